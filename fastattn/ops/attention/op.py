"""The torch op of attention: schemas, shapes and strides of the results, backends in order of
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
    BackwardCall,
    ForwardCall,
    PackedBackwardCall,
    PackedForwardCall,
    PagedForwardCall,
    WeightsBackwardCall,
    WeightsForwardCall,
)
from fastattn.ops.attention.prepared import TILE as MASK_TILE  # noqa: F401
from fastattn.ops.attention.prepared import PreparedMask as PreparedMask
from fastattn.ops.attention.prepared import classify as classify_mask  # noqa: F401

# Codes of the schema's `causal`.
CAUSAL = {
    False: 0,
    "top_left": reference.TOP_LEFT,
    "bottom_right": reference.BOTTOM_RIGHT,
    "bottom_right_lengths": reference.BOTTOM_RIGHT_LENGTHS,
}
_PACKAGE = "fastattn.ops.attention"
# Not an op: PyTorch operators on every device.
attention_weights = reference.attention_weights
# triton passes in its interpreter, but not all of the suite has run on a GPU: it is not chosen
# automatically.
_BACKENDS = (
    Backend("sm90", automatic=False, verified=("sm_90",)),
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


def _lse_dtype(q: Tensor) -> torch.dtype:
    """The dtype of lse."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _fwd_outputs(call: ForwardCall | PagedForwardCall) -> tuple[Tensor, ...]:
    q = call.q
    return _like_query(q, call.v.shape[3]), q.new_empty(q.shape[:3], dtype=_lse_dtype(q))


def _bwd_outputs(call: BackwardCall) -> tuple[Tensor, ...]:
    given = (call.q, call.k, call.v, call.mask, call.distance_bias, call.sinks)
    inputs = zip(call.needs, given, strict=True)
    return tuple(gradient_like(like, needed, call.q) for needed, like in inputs)


def _weights_fwd_outputs(call: Any) -> tuple[Tensor, ...]:
    (B, H, M, _), N = call.q.shape, call.k.shape[2]
    weights = call.q.new_empty((B, M, N) if call.average else (B, H, M, N))
    return *_fwd_outputs(call), weights


_LENGTHS = ("key_lengths", "query_lengths")
# The arguments and results of all these ops that have a batch.
_BATCHED = (
    "q", "k", "v", *_LENGTHS, "out", "lse", "dout", "dlse", "dq", "dk", "dv", "weights",
    "dweights",
)  # fmt: skip
# Arguments with this batch or a batch of 1.
_BROADCAST = ("mask", "mask_tiles", "distance_bias")
_GRADIENTS = {"dq": "q", "dk": "k", "dv": "v"}
_SCORE_GRADIENTS = {"ddistance_bias": "distance_bias", "dsinks": "sinks"}

attention = differentiable(
    Op(
        "attention_fwd",
        ForwardCall,
        "Tensor out, Tensor lse",
        _fwd_outputs,
        _PACKAGE,
        _BACKENDS,
        public_name="attention",
        contiguous=("q", "k", "v", *_LENGTHS, "distance_bias"),
        batched=_BATCHED,
        batch_is_one_dimension=True,
        broadcast=_BROADCAST,
        dropout=("dropout_p",),
        decomposition="decomposition",
    ),
    Op(
        "attention_bwd",
        BackwardCall,
        "Tensor dq, Tensor dk, Tensor dv, Tensor dmask, Tensor ddistance_bias, Tensor dsinks",
        _bwd_outputs,
        _PACKAGE,
        _BACKENDS,
        public_name="attention",
        data="q",
        contiguous=("dout", "q", "k", "v", "out", *_LENGTHS, "distance_bias"),
        batched=_BATCHED,
        batch_is_one_dimension=True,
        broadcast=_BROADCAST,
        dropout=("dropout_p",),
        is_derivative=True,
    ),
    reference.attention_bwd,
    jvp=tangents.attention_tangents,
    gradients=_GRADIENTS | {"dmask": "mask"} | _SCORE_GRADIENTS,
    result_gradients={"out": "dout", "lse": "dlse"},
)

# Context, lse and weights after dropout, from one softmax.
_WEIGHTS_BACKENDS = (Backend("cpu"), Backend("torch"), Backend("reference"))
attention_with_weights = differentiable(
    Op(
        "attention_with_weights_fwd",
        WeightsForwardCall,
        "Tensor out, Tensor lse, Tensor weights",
        _weights_fwd_outputs,
        _PACKAGE,
        _WEIGHTS_BACKENDS,
        public_name="attention_with_weights",
        contiguous=("q", "k", "v", *_LENGTHS, "distance_bias"),
        batched=_BATCHED,
        batch_is_one_dimension=True,
        broadcast=_BROADCAST,
        dropout=("dropout_p",),
        requested_in_pairs=True,
    ),
    Op(
        "attention_with_weights_bwd",
        WeightsBackwardCall,
        "Tensor dq, Tensor dk, Tensor dv, Tensor dmask, Tensor ddistance_bias, Tensor dsinks",
        _bwd_outputs,
        _PACKAGE,
        _WEIGHTS_BACKENDS,
        public_name="attention_with_weights",
        data="q",
        contiguous=("dout", "q", "k", "v", "out", *_LENGTHS, "distance_bias"),
        batched=_BATCHED,
        batch_is_one_dimension=True,
        broadcast=_BROADCAST,
        dropout=("dropout_p",),
        requested_in_pairs=True,
        is_derivative=True,
    ),
    reference.attention_with_weights_bwd,
    forward_maths=reference.attention_with_weights_fwd,
    gradients=_GRADIENTS | {"dmask": "mask"} | _SCORE_GRADIENTS,
    result_gradients={"out": "dout", "lse": "dlse", "weights": "dweights"},
)

# Without a derivative: pages of keys and values are caches.
attention_paged = Op(
    "attention_paged_fwd",
    PagedForwardCall,
    "Tensor out, Tensor lse",
    _fwd_outputs,
    _PACKAGE,
    _BACKENDS,
    public_name="attention",
    contiguous=("q", "k", "v", "block_table", *_LENGTHS, "distance_bias"),
    batched=("q", "block_table", *_LENGTHS, "out", "lse"),
    batch_is_one_dimension=True,
    broadcast=("mask", "distance_bias"),
    decomposition="decomposition",
)


def _varlen_fwd_outputs(call: PackedForwardCall) -> tuple[Tensor, ...]:
    q, (T, H, _) = call.q, call.q.shape
    return q.new_empty(T, H, call.v.shape[2]), q.new_empty(H, T, dtype=_lse_dtype(q))


def _varlen_bwd_outputs(call: PackedBackwardCall) -> tuple[Tensor, ...]:
    given = (call.q, call.k, call.v, call.distance_bias, call.sinks)
    inputs = zip(call.needs, given, strict=True)
    return tuple(gradient_like(like, needed, call.q) for needed, like in inputs)


_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")

attention_varlen = differentiable(
    Op(
        "attention_varlen_fwd",
        PackedForwardCall,
        "Tensor out, Tensor lse",
        _varlen_fwd_outputs,
        _PACKAGE,
        _BACKENDS,
        public_name="attention_varlen",
        contiguous=("q", "k", "v", *_OFFSETS, "distance_bias"),
    ),
    Op(
        "attention_varlen_bwd",
        PackedBackwardCall,
        "Tensor dq, Tensor dk, Tensor dv, Tensor ddistance_bias, Tensor dsinks",
        _varlen_bwd_outputs,
        _PACKAGE,
        _BACKENDS,
        public_name="attention_varlen",
        data="q",
        contiguous=("dout", "q", "k", "v", "out", *_OFFSETS, "distance_bias"),
        is_derivative=True,
    ),
    reference.attention_varlen_bwd,
    jvp=tangents.attention_varlen_tangents,
    gradients=_GRADIENTS | _SCORE_GRADIENTS,
    result_gradients={"out": "dout", "lse": "dlse"},
)
