"""Time of forward-mode differentiation of attention on the CPU, as a multiple of the forward's.

    python -m benchmarks.forward_mode

One thread, process CPU time, fp32, tangents of q, k and v. Beside it: the same derivative of
PyTorch's attention, for which PyTorch has its math backend alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.ops import _env

SHAPES = ((1, 8, 1024, 64), (1, 8, 2048, 64))
ROUNDS = 5


def main() -> None:
    torch.set_num_threads(1)
    print(f"{_env.device_name(torch.device('cpu'))}, one thread, torch {_env.torch_version()}")
    print(f"{'':28} forward ms  with tangents ms  ratio  PyTorch with tangents ms")
    for shape in SHAPES:
        for causal in (False, True):
            tensors = [torch.randn(shape) for _ in range(3)]
            tangents = [torch.randn(shape) for _ in range(3)]

            def peer(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
                with sdpa_kernel(SDPBackend.MATH):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            forward, with_tangents, of_peer = _medians(
                lambda x=tensors, c=causal: fastattn.attention(*x, causal=c),
                lambda x=tensors, t=tangents, c=causal: _dual(fastattn.attention, x, t, causal=c),
                lambda x=tensors, t=tangents, c=causal: _dual(peer, x, t, causal=c),
            )
            name = "x".join(map(str, shape)) + (", causal" if causal else "")
            ratio = with_tangents / forward
            print(f"{name:28} {forward:10.1f} {with_tangents:17.1f} {ratio:6.1f} {of_peer:25.1f}")


def _dual(
    function: Callable[..., Tensor], tensors: list[Tensor], tangents: list[Tensor], **options: Any
) -> None:
    with forward_ad.dual_level():
        function(*map(forward_ad.make_dual, tensors, tangents), **options)


def _medians(*calls: Callable[[], Any]) -> list[float]:
    """Milliseconds; the calls are timed alternately."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):  # the first one is a warm-up
        for call, measured in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            measured.append((time.process_time() - start) * 1e3)
    return [statistics.median(measured[1:]) for measured in times]


if __name__ == "__main__":
    main()
