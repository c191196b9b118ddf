"""The linear layer on the CPU in C++, by the products of the feed-forward network (csrc/ffn).

The kernels are registered under the dispatcher's CPU key. PyTorch's products are faster in half
precision on processors with matrix instructions, in fp32 for many rows except where fastattn uses
AVX-512 and Intel's MKL does not, and on processors that are not x86: `_env.product_limit`, which is
set in the library when it is loaded.
"""

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastattn.ops import _env, _native

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# `on`: the library's own switch in this thread, which takes 5 us to ask for.
_batch_invariance = threading.local()


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def why_unsupported(x: Tensor) -> str | None:
    if x.dtype not in _DTYPES:
        return f"has kernels for fp32, bf16 and fp16, got {x.dtype}"
    return unavailable()


def slower(x: Tensor) -> str | None:
    """As the library decides; x [..., D]."""
    most, why = _env.product_limit(x.dtype)
    if 0 < x.numel() <= most or math.prod(x.shape[:-1]) <= most:  # the first is faster
        return None
    if most > 0 and getattr(_batch_invariance, "on", False):
        return None
    return why


def linear_fwd_unsupported(x: Tensor, w: Tensor, b: Tensor | None) -> str | None:
    return why_unsupported(x)


def linear_fwd_slower(x: Tensor, w: Tensor, b: Tensor | None) -> str | None:
    return slower(x)


def linear_bwd_unsupported(
    dy: Tensor, x: Tensor | None, w: Tensor | None, needs: Sequence[bool]
) -> str | None:
    return why_unsupported(dy)


def linear_bwd_slower(
    dy: Tensor, x: Tensor | None, w: Tensor | None, needs: Sequence[bool]
) -> str | None:
    return slower(dy)


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """`batch_invariant` of op.py; without the library it does nothing."""
    if unavailable() is not None:
        yield
        return
    switch = torch.ops.fastattn_cpu.batch_invariant
    before = _native.call_unobserved(switch, True)
    _batch_invariance.on = True
    try:
        yield
    finally:
        _batch_invariance.on = before
        _native.call_unobserved(switch, before)
