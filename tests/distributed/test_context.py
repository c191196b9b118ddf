"""Attention over sequences sharded across processes: results equal those of one process."""

import pytest
import torch
import torch.distributed as dist
from support import gradients, in_processes, needs_distributed

import fastattn

pytestmark = needs_distributed


def ring_equals_attention() -> None:
    from fastattn.distributed import ring_attention, shard_sequence, unshard_sequence

    for causal in (False, True):
        for K, E, dtype in ((4, 8, torch.float32), (2, 12, torch.float32), (4, 8, torch.bfloat16)):
            q, k, v = (
                torch.randn(2, heads, 24, size).to(dtype).requires_grad_()
                for heads, size in ((4, 8), (K, 8), (K, E))
            )
            weights = torch.randn(2, 4, 24, E).to(dtype), torch.randn(2, 4, 24)
            whole = fastattn.attention(q, k, v, causal=causal, return_lse=True)
            expected = (*whole, *gradients(whole, weights, [q, k, v]))
            parts = [
                shard_sequence(x.detach(), 2, causal=causal).requires_grad_() for x in (q, k, v)
            ]
            part_results = ring_attention(*parts, causal=causal, return_lse=True)
            part_weights = [shard_sequence(w, 2, causal=causal) for w in weights]
            got = (*part_results, *gradients(part_results, part_weights, parts))
            tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-5
            for x, y in zip(got, expected, strict=True):
                full = unshard_sequence(x, 2, causal=causal)
                torch.testing.assert_close(full, y.detach(), atol=tolerance, rtol=tolerance)


def gradients_of_lse_only() -> None:
    from fastattn.distributed import ring_attention, shard_sequence, unshard_sequence

    q, k = (torch.randn(2, 4, 24, 8).requires_grad_() for _ in range(2))
    weight = torch.randn(2, 4, 24)
    _, lse = fastattn.attention(q, k, k.detach(), causal=True, return_lse=True)
    expected = gradients([lse], [weight], [q, k])
    parts = [shard_sequence(x.detach(), 2, causal=True).requires_grad_() for x in (q, k)]
    _, lse = ring_attention(*parts, parts[1].detach(), causal=True, return_lse=True)
    got = gradients([lse], [shard_sequence(weight, 2, causal=True)], parts)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(unshard_sequence(x, 2, causal=True), y, atol=2e-5, rtol=2e-5)


def layouts_are_inverse() -> None:
    from fastattn.distributed import shard_sequence, unshard_sequence

    x = torch.randn(3, 12)
    for causal in (False, True):
        part = shard_sequence(x, 1, causal=causal)
        assert part.shape == (3, 12 // dist.get_world_size())
        assert torch.equal(unshard_sequence(part, 1, causal=causal), x)
    with pytest.raises(ValueError, match=r"x must have a size along dim 1 that \d divides, got 13"):
        shard_sequence(torch.randn(3, 13), 1, causal=True)


def ring_errors() -> None:
    from fastattn.distributed import ring_attention

    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="q must hold two chunks of equal length, got 5"):
        ring_attention(q, q, q, causal=True)
    with pytest.raises(ValueError, match="k must have q's 5 positions, got 4"):
        ring_attention(q, q[:, :, 1:], q[:, :, 1:])
    with pytest.raises(ValueError, match=r"k must have 4 dimensions \[B, K, N, D\], got"):
        ring_attention(q, q[0], q)
    with pytest.raises(ValueError, match="v must be"):
        ring_attention(q, q, q[:, :1])
    with pytest.raises(TypeError, match=r"q must be fp16, bf16, fp32 or fp64, got torch\.int64"):
        ring_attention(*3 * [q.long()])
    with pytest.raises(ValueError, match="scale must be finite, got nan"):
        ring_attention(q, q, q, scale=float("nan"))
    others = dist.new_group([0])
    if dist.get_rank() > 0:
        with pytest.raises(ValueError, match="group must contain the calling process"):
            ring_attention(q, q, q, group=others)


def ring_follows_autocast() -> None:
    from fastattn.distributed import ring_attention

    q = torch.randn(1, 2, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert ring_attention(q, q, q).dtype is torch.bfloat16  # type: ignore[union-attr]


def ring_of_some_processes() -> None:
    """Ranks in a group are not the ranks of the processes."""
    from fastattn.distributed import ring_attention, shard_sequence, unshard_sequence

    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    q = torch.randn(1, 2, 8, 8)
    part = shard_sequence(q, 2, causal=True, group=group)
    out = ring_attention(part, part, part, causal=True, group=group)
    whole = unshard_sequence(out, 2, causal=True, group=group)  # type: ignore[arg-type]
    torch.testing.assert_close(whole, fastattn.attention(q, q, q, causal=True))


def test_ring_attention() -> None:
    in_processes(
        layouts_are_inverse,
        ring_equals_attention,
        gradients_of_lse_only,
        ring_errors,
        ring_follows_autocast,
        size=2,
    )


@pytest.mark.slow
def test_ring_attention_of_three() -> None:
    in_processes(layouts_are_inverse, ring_equals_attention, ring_of_some_processes, size=3)
