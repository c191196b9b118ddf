"""Attention on the CPU in C++ (csrc/attention): fp32, bf16 and fp16, tiled, on PyTorch's threads.

It supports all restrictions, score modifications, dropout and gradients, for padded and packed
inputs, and the forward of paged ones. Only tiles with an allowed pair are computed. Results do not
depend on the number of threads. The kernels are registered under the dispatcher's CPU key.
"""

from typing import Any

import torch

from fastattn.ops import _native
from fastattn.ops.attention.calls import (
    FEW_KEYS,
    AnyCall,
    BackwardCall,
    ForwardCall,
    has_few_keys,
    why_call_unsupported,
    why_no_pages,
    why_no_weights,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_PAGE = 16
_MAX_POSITIONS = 2**28  # the kernels compute sums of positions in 32 bits
_FEW_ROWS, _LARGE_LSE = 8, 2800.0  # no less rows and no larger lse than in the kernels


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def _why_unsupported(call: AnyCall) -> str | None:
    if why := why_call_unsupported(call):
        return why
    q, k, table, rows = call.q, call.k, call.block_table, 2 if call.cu_seqlens_q is None else 0
    if q.dtype not in _DTYPES:
        return f"has kernels for fp32, bf16 and fp16, got {q.dtype}"
    queries, keys = q.shape[rows], k.shape[rows]
    if table is not None:
        if keys < _LEAST_PAGE or keys & (keys - 1):
            return f"takes pages of a power of two of at least {_LEAST_PAGE} keys, got {keys}"
        keys *= table.shape[1]
    if max(queries, keys) > _MAX_POSITIONS:
        return f"takes at most {_MAX_POSITIONS} queries and keys, got {queries}, {keys}"
    return unavailable()


def attention_fwd_unsupported(call: ForwardCall) -> str | None:
    return _why_unsupported(call)


def attention_bwd_unsupported(call: BackwardCall) -> str | None:
    return why_no_pages(call) or _why_unsupported(call)


def attention_with_weights_fwd_unsupported(call: Any) -> str | None:
    return why_no_weights(call) or _why_unsupported(call)


attention_with_weights_bwd_unsupported = attention_with_weights_fwd_unsupported


def attention_bwd_uses_lse(call: BackwardCall) -> bool:
    """The gradient of a mask may be computed for weights whose sum is 1. The weights of few rows
    (kFewRows), of few keys in half precision (kFewKeys) and of rows with a large lse (kLargeLse)
    always are.
    """
    left, right = call.window_left, 0 if call.causal else call.window_right
    narrow = call.q.dtype.itemsize < 4 and min(left, right) >= 0 and left + right < FEW_KEYS
    if narrow or has_few_keys(call):
        return False
    rows = call.q.shape[2] * call.q.shape[1] // max(1, call.k.shape[1])
    has_large = (call.lse.nan_to_num(neginf=0.0).abs() > _LARGE_LSE).any()
    return not (call.needs[3] or call.q.shape[2] == 1 or rows <= _FEW_ROWS or has_large)
