"""Attention on the CPU in C++ (csrc/attention): fp32, bf16 and fp16, tiled, on PyTorch's threads.

It supports all restrictions, score modifications, dropout and gradients, for padded and packed
inputs. Only tiles with an allowed pair are computed. Results do not depend on the number of
threads. The kernels are registered under the dispatcher's CPU key.
"""

import torch

from fastattn.ops import _native
from fastattn.ops.attention.calls import (
    BackwardCall,
    ForwardCall,
    PackedBackwardCall,
    PackedForwardCall,
    PagedForwardCall,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_PAGE = 16
_MAX_POSITIONS = 2**28  # the kernels compute sums of positions in 32 bits
_FEW_ROWS, _LARGE_LSE = 8, 2800.0  # no less rows and no larger lse than in the kernels


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def _refusal(dtype: torch.dtype, queries: int, keys: int) -> str | None:
    if dtype not in _DTYPES:
        return f"has kernels for fp32, bf16 and fp16, got {dtype}"
    if max(queries, keys) > _MAX_POSITIONS:
        return f"takes at most {_MAX_POSITIONS} queries and keys, got {queries}, {keys}"
    return unavailable()


def attention_fwd_unsupported(call: ForwardCall) -> str | None:
    return _refusal(call.q.dtype, call.q.shape[2], call.k.shape[2])


def attention_paged_fwd_unsupported(call: PagedForwardCall) -> str | None:
    page = call.k.shape[2]
    if page < _LEAST_PAGE or page & (page - 1):
        return f"takes pages of a power of two of at least {_LEAST_PAGE} keys, got {page}"
    return _refusal(call.q.dtype, call.q.shape[2], call.block_table.shape[1] * page)


def attention_bwd_unsupported(call: BackwardCall) -> str | None:
    return _refusal(call.q.dtype, call.q.shape[2], call.k.shape[2])


attention_with_weights_fwd_unsupported = attention_fwd_unsupported
attention_with_weights_bwd_unsupported = attention_bwd_unsupported


def attention_bwd_uses_lse(call: BackwardCall) -> bool:
    """The gradient of a mask may be computed for weights whose sum is 1. The weights of few rows
    (kFewRows) and of rows with a large lse (kLargeLse) always are.
    """
    rows = call.q.shape[2] * call.q.shape[1] // max(1, call.k.shape[1])
    has_large = (call.lse.nan_to_num(neginf=0.0).abs() > _LARGE_LSE).any()
    return not (call.needs[3] or call.q.shape[2] == 1 or rows <= _FEW_ROWS or has_large)


def attention_varlen_fwd_unsupported(call: PackedForwardCall) -> str | None:
    return _refusal(call.q.dtype, call.q.shape[0], call.k.shape[0])


def attention_varlen_bwd_unsupported(call: PackedBackwardCall) -> str | None:
    return _refusal(call.q.dtype, call.q.shape[0], call.k.shape[0])
