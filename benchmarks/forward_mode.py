"""Time of forward-mode differentiation of attention on the CPU, as a multiple of the forward's.

    python -m benchmarks.forward_mode

One thread, process CPU time; results and tangents, with tangents of q, k and v, of q alone and of v
alone. Beside it: with tangents of q, k and v by PyTorch's attention, for which PyTorch has its math
backend alone.
"""

from __future__ import annotations

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

SHAPES = ((2, 8, 512, 64), (2, 8, 1024, 64), (1, 8, 2048, 64), (8, 8, 1, 64))
DTYPES = (torch.float32, torch.bfloat16)
KEYS_OF_ONE_QUERY = 2048
ROUNDS = 9


def main() -> None:
    torch.set_num_threads(1)
    print(f"{_env.device_name(torch.device('cpu'))}, one thread, torch {_env.torch_version()}")
    print(f"{'':38} forward ms  q, k, v     q     v  PyTorch's q, k, v")
    for dtype in DTYPES:
        for shape in SHAPES:
            for causal in (False, True) if shape[2] > 1 else (False,):
                _measure(shape, dtype, causal)


def _measure(shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    B, H, M, D = shape
    keys = M if M > 1 else KEYS_OF_ONE_QUERY
    sizes = (shape, (B, H, keys, D), (B, H, keys, D))
    tensors, tangents = ([torch.randn(x).to(dtype) for x in sizes] for _ in range(2))

    def peer(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def with_tangents(function: Callable[..., Tensor], names: str = "qkv") -> Callable[[], None]:
        given = [t if name in names else None for name, t in zip("qkv", tangents, strict=True)]
        return lambda: _dual(function, tensors, given, causal=causal)

    forward, *others = _fastest(
        lambda: fastattn.attention(*tensors, causal=causal),
        *(with_tangents(fastattn.attention, names) for names in ("qkv", "q", "v")),
        with_tangents(peer),
    )
    *ratios, of_peer = (x / forward for x in others)
    name = f"{dtype}".removeprefix("torch.") + " " + "x".join(map(str, shape))
    name += (", causal" if causal else "") + (f", {keys} keys" if keys != M else "")
    columns = " ".join(f"{x:{width}.2f}" for x, width in zip(ratios, (8, 5, 5), strict=True))
    print(f"{name:38} {forward:10.2f} {columns} {of_peer:18.1f}", flush=True)


def _dual(
    function: Callable[..., Tensor],
    tensors: list[Tensor],
    tangents: list[Tensor | None],
    **options: Any,
) -> None:
    with forward_ad.dual_level():
        pairs = zip(tensors, tangents, strict=True)
        duals = [x if t is None else forward_ad.make_dual(x, t) for x, t in pairs]
        function(*duals, **options)


def _fastest(*calls: Callable[[], Any]) -> list[float]:
    """Milliseconds, the least of several rounds; the calls are timed alternately."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):  # the first one is a warm-up
        for call, measured in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            measured.append((time.process_time() - start) * 1e3)
    return [min(measured[1:]) for measured in times]


if __name__ == "__main__":
    main()
