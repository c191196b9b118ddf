"""The torch ops of attention: schemas, shapes and strides of the results, backends in order of
preference.

Saved for the backward: q, k, v, the restrictions and score modifications, `out` and `lse` (fp32,
natural log; fp64 for fp64 data).

The lse of a row without an allowed key is its head's sink, -inf without sinks; the lse of every
other row is larger (by rounding up if necessary). So a backward identifies these rows by lse alone.
"""

from typing import Any

import torch
from torch import Tensor

from fastattn.ops._autograd import differentiable, gradient_like
from fastattn.ops._op import Backend, Op
from fastattn.ops.attention import reference, tangents
from fastattn.ops.attention.calls import (
    AnyCall,
    BackwardCall,
    CausalKind,
    ForwardCall,
    Gradients,
    WeightsBackwardCall,
    WeightsForwardCall,
)
from fastattn.ops.attention.prepared import TILE as MASK_TILE  # noqa: F401
from fastattn.ops.attention.prepared import PreparedMask as PreparedMask
from fastattn.ops.attention.prepared import classify as classify_mask  # noqa: F401

# Plain integers, which compiled programs keep as constants.
CAUSAL = {
    False: int(CausalKind.NONE),
    "top_left": int(CausalKind.TOP_LEFT),
    "bottom_right": int(CausalKind.BOTTOM_RIGHT),
    "bottom_right_lengths": int(CausalKind.BOTTOM_RIGHT_LENGTHS),
}
_PACKAGE = "fastattn.ops.attention"
# Not an op: PyTorch operators on every device.
attention_weights = reference.attention_weights
_BACKENDS = (
    Backend("sm90", automatic=False),
    Backend("triton", automatic=False),
    Backend("cpu"),
    Backend("torch"),
    Backend("reference"),
)


def _like_query(q: Tensor, E: int) -> Tensor:
    """An empty [B, H, M, E] in q's dimension order: stored as [B, M, H, E] if q is."""
    B, H, M, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty(B, M, H, E).transpose(1, 2)
    return q.new_empty(B, H, M, E)


def _fwd_outputs(call: AnyCall) -> tuple[Tensor, ...]:
    q, E = call.q, call.v.shape[-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if call.cu_seqlens_q is None:
        return _like_query(q, E), q.new_empty(q.shape[:3], dtype=dtype)
    T, H, _ = q.shape
    return q.new_empty(T, H, E), q.new_empty(H, T, dtype=dtype)


def _bwd_outputs(call: BackwardCall) -> tuple[Tensor, ...]:
    given = (call.q, call.k, call.v, call.mask, call.distance_bias, call.sinks)
    inputs = zip(call.needs, given, strict=True)
    return tuple(gradient_like(like, needed, call.q) for needed, like in inputs)


def _weights_fwd_outputs(call: Any) -> tuple[Tensor, ...]:
    (B, H, M, _), N = call.q.shape, call.k.shape[2]
    weights = call.q.new_empty((B, M, N) if call.average else (B, H, M, N))
    return *_fwd_outputs(call), weights


_LENGTHS = ("key_lengths", "query_lengths")
_CONTIGUOUS = (
    "q", "k", "v", *_LENGTHS, "cu_seqlens_q", "cu_seqlens_k", "distance_bias", "block_table",
)  # fmt: skip
_OPTIONS: dict[str, Any] = {
    # The arguments and results that have a batch, in padded calls.
    "batched": (
        "q", "k", "v", *_LENGTHS, "out", "lse", "dout", "dlse", "dq", "dk", "dv", "weights",
        "dweights",
    ),
    "batch_is_one_dimension": True,
    "broadcast": ("mask", "mask_tiles", "distance_bias"),
    "unfoldable": ("cu_seqlens_q", "block_table"),
    "dropout": ("dropout_p",),
}  # fmt: skip
_FORWARD_OPTIONS = _OPTIONS | {"contiguous": _CONTIGUOUS}
_BACKWARD_OPTIONS = _OPTIONS | {
    "contiguous": ("dout", "out", *_CONTIGUOUS),
    "data": "q",
    "is_derivative": True,
}
_GRADIENT_NAMES = ", ".join(f"Tensor {name}" for name in Gradients._fields)
_GRADIENTS = {
    "dq": "q",
    "dk": "k",
    "dv": "v",
    "dmask": "mask",
    "ddistance_bias": "distance_bias",
    "dsinks": "sinks",
}

_NAMES: dict[str, Any] = {"public_name": "attention", "other_names": ("attention_varlen",)}
attention = differentiable(
    Op(
        "attention_fwd",
        ForwardCall,
        "Tensor out, Tensor lse",
        _fwd_outputs,
        _PACKAGE,
        _BACKENDS,
        decomposition="decomposition",
        **_NAMES,
        **_FORWARD_OPTIONS,
    ),
    Op(
        "attention_bwd",
        BackwardCall,
        _GRADIENT_NAMES,
        _bwd_outputs,
        _PACKAGE,
        _BACKENDS,
        **_NAMES,
        **_BACKWARD_OPTIONS,
    ),
    reference.attention_bwd,
    jvp=tangents.attention_tangents,
    gradients=_GRADIENTS,
    result_gradients={"out": "dout", "lse": "dlse"},
)

# Context, lse and weights after dropout, from one softmax. Padded calls alone.
_WEIGHTS_BACKENDS = (Backend("cpu"), Backend("torch"), Backend("reference"))
_WEIGHTS_NAMES: dict[str, Any] = {
    "public_name": "attention_with_weights",
    "requested_in_pairs": True,
}
attention_with_weights = differentiable(
    Op(
        "attention_with_weights_fwd",
        WeightsForwardCall,
        "Tensor out, Tensor lse, Tensor weights",
        _weights_fwd_outputs,
        _PACKAGE,
        _WEIGHTS_BACKENDS,
        **_WEIGHTS_NAMES,
        **_FORWARD_OPTIONS,
    ),
    Op(
        "attention_with_weights_bwd",
        WeightsBackwardCall,
        _GRADIENT_NAMES,
        _bwd_outputs,
        _PACKAGE,
        _WEIGHTS_BACKENDS,
        **_WEIGHTS_NAMES,
        **_BACKWARD_OPTIONS,
    ),
    reference.attention_with_weights_bwd,
    forward_maths=reference.attention_with_weights_fwd,
    gradients=_GRADIENTS,
    result_gradients={"out": "dout", "lse": "dlse", "weights": "dweights"},
)
