"""A sequence too long for one process: ring attention over several, equal to attention over one.

Data: an image of the terrain around Jacksboro (matplotlib's elevation model) as a sequence of its
pixels. Each process holds a shard of it; at the end the shards are joined and compared.

    torchrun --nproc-per-node 2 -m examples.ring_attention
"""

import time

import matplotlib.cbook
import torch
import torch.distributed as dist

import fastattn
from fastattn.distributed import context_parallel_attention, shard_sequence, unshard_sequence

HEADS, HEAD_DIM, LENGTH = 4, 32, 4096


def main() -> float:
    """The largest relative difference between the ring and one process, output and gradients."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with matplotlib.cbook.get_sample_data("jacksboro_fault_dem.npz") as terrain:
        heights = torch.from_numpy(terrain["elevation"]).float().flatten()[:LENGTH]
    heights = (heights - heights.mean()) / heights.std()
    x = heights[:, None] * torch.randn(1, 3 * HEADS * HEAD_DIM)  # every process draws the same
    q, k, v = x.view(1, LENGTH, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)

    shards = [shard_sequence(t, 2, balanced=True).requires_grad_() for t in (q, k, v)]
    begin = time.perf_counter()
    out = context_parallel_attention(*shards, balanced=True, causal=True)
    gradients = torch.autograd.grad(out.square().sum(), shards)  # type: ignore[union-attr]
    seconds = time.perf_counter() - begin
    actual = [unshard_sequence(t, 2, balanced=True) for t in (out, *gradients)]  # type: ignore[arg-type]

    whole = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    whole_out = fastattn.attention(*whole, causal=True)
    expected = (whole_out, *torch.autograd.grad(whole_out.square().sum(), whole))
    difference = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(actual, expected, strict=True)
    )
    if dist.get_rank() == 0:
        print(
            f"{LENGTH} positions over {dist.get_world_size()} processes, forward and backward: "
            f"{seconds:.2f} s; largest relative difference from one process: {difference:.1e}"
        )
    dist.destroy_process_group()
    return difference


if __name__ == "__main__":
    main()
