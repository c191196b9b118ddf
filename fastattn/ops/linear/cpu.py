"""The linear layer on the CPU in C++, by the products of the feed-forward network (csrc/ffn).

The kernels are registered under the dispatcher's CPU key. PyTorch multiplies fp32 matrices with
Intel's MKL, which reaches about half the speed of an AMD Zen 5 core, so fastattn's products are
faster on processors not by Intel. In half precision they are faster on processors without matrix
instructions. When the library is loaded, Python sets for which dtypes PyTorch is faster.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastattn.ops import _env, _native

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def _refusal(x: Tensor) -> str | None:
    if x.dtype not in _DTYPES:
        return f"has kernels for fp32, bf16 and fp16, got {x.dtype}"
    return unavailable()


def linear_fwd_unsupported(x: Tensor, w: Tensor, b: Tensor | None) -> str | None:
    return _refusal(x)


def linear_fwd_slower(x: Tensor, w: Tensor, b: Tensor | None) -> str | None:
    return _env.slower_products(x.dtype)


def linear_bwd_unsupported(
    dy: Tensor, x: Tensor | None, w: Tensor | None, needs: Sequence[bool]
) -> str | None:
    return _refusal(dy)


def linear_bwd_slower(
    dy: Tensor, x: Tensor | None, w: Tensor | None, needs: Sequence[bool]
) -> str | None:
    return _env.slower_products(dy.dtype)


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """`batch_invariant` of op.py; without the library it does nothing."""
    if unavailable() is not None:
        yield
        return
    library = torch.ops.fastattn_cpu
    before = library.batch_invariant(True)
    try:
        yield
    finally:
        library.batch_invariant(before)
