"""The arguments and results of attention's torch ops, in the order of their schemas.

The weights ops take the fields of `ForwardCall` and `BackwardCall` and a few more. Padded, packed
and paged calls differ in the shapes of their tensors and in which fields are given:

- padded: q [B, H, M, D], k [B, K, N, D], v [B, K, N, E]; out [B, H, M, E], lse [B, H, M].
- packed, with cu_seqlens: q [T, H, D], k [S, K, D], v [S, K, E]; out [T, H, E], lse [H, T]. No
  mask and no lengths.
- paged, with a block table: k [P, K, page, D] and v [P, K, page, E] in place of the N = pages of a
  sequence * page keys: key j of sequence b is row j % page of page block_table[b, j // page].
  Entries for keys beyond the key length may be any numbers. No dropout.
"""

from collections.abc import Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

SymInt = Annotated[int, torch.SymInt]


class CausalKind(IntEnum):
    """What `causal` means: where the diagonal is. csrc/attention/key_range.h has the same."""

    NONE = 0
    TOP_LEFT = 1
    BOTTOM_RIGHT = 2  # by the sizes of the tensors; in packed sequences by those of each
    BOTTOM_RIGHT_LENGTHS = 3  # by the lengths of each sequence


class ForwardCall(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    mask_tiles: Tensor | None = None
    key_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # int32 [B + 1]
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: SymInt = 0
    max_seqlen_k: SymInt = 0
    # [B or 1, H, M + N - 1]: the pair (i, j) adds entry j - i - (the diagonal's offset) + M - 1, or
    # N - 1 in place of M - 1 if the diagonal is a bottom-right one. M and N of packed sequences are
    # max_seqlen_q and max_seqlen_k.
    distance_bias: Tensor | None = None
    sinks: Tensor | None = None  # [H], in lse's dtype
    softcap: float = 0.0  # 0.0: none
    causal: int = CausalKind.NONE
    window_left: SymInt = -1
    window_right: SymInt = -1
    scale: float = 1.0
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    dropout_stream: int = 0
    block_table: Tensor | None = None  # int32 [B, pages of a sequence]


class BackwardCall(NamedTuple):
    """The gradients of the forward's results, these, its arguments, and which are needed."""

    dout: Tensor | None
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    mask_tiles: Tensor | None = None
    key_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: SymInt = 0
    max_seqlen_k: SymInt = 0
    distance_bias: Tensor | None = None
    sinks: Tensor | None = None
    softcap: float = 0.0
    causal: int = CausalKind.NONE
    window_left: SymInt = -1
    window_right: SymInt = -1
    scale: float = 1.0
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    dropout_stream: int = 0
    block_table: Tensor | None = None
    needs: Sequence[bool] = (True,) * 6  # in the order of Gradients

    @property
    def forward(self) -> ForwardCall:
        return ForwardCall._make(self[4:-1])


AnyCall = ForwardCall | BackwardCall


class Gradients(NamedTuple):
    """The results of the backward; those not needed have no elements."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dmask: Tensor
    ddistance_bias: Tensor
    dsinks: Tensor


def _call(name: str, fields: list[tuple[str, Any]]) -> Any:
    make: Any = NamedTuple
    return make(name, fields)


_FORWARD, _BACKWARD = (
    [*get_type_hints(call, include_extras=True).items()] for call in (ForwardCall, BackwardCall)
)
assert _BACKWARD[4:-1] == _FORWARD
# The numbers that decide with the tensors what is launched: softcap, causal, ..., dropout_p.
_NOT_OPTIONS = ("max_seqlen_q", "max_seqlen_k", "dropout_stream")
options_of = attrgetter(
    *(n for n, hint in _FORWARD if hint in (int, float, SymInt) and n not in _NOT_OPTIONS)
)
# average: whether the weights are the mean over the heads, [B, M, N], else [B, H, M, N].
WeightsForwardCall = _call("WeightsForwardCall", [*_FORWARD, ("average", bool)])
WeightsBackwardCall = _call(
    "WeightsBackwardCall",
    [
        *_BACKWARD[:2],
        ("dweights", Tensor | None),
        *_BACKWARD[2:-1],
        ("average", bool),
        *_BACKWARD[-1:],
    ],
)


# The predicates that decide what a call needs. A new field of a call goes into one of them.
def has_pattern(call: AnyCall) -> bool:
    """Whether a mask or lengths restrict the pairs of a padded call."""
    return not (call.mask is call.key_lengths is call.query_lengths is None)


def has_window(call: AnyCall) -> bool:
    return call.window_left >= 0 or call.window_right >= 0


def is_restricted(call: AnyCall) -> bool:
    """Whether a padded call restricts pairs at all."""
    return has_pattern(call) or bool(call.causal) or has_window(call)


def unrestricted(call: ForwardCall) -> ForwardCall:
    """The call, padded, with all pairs allowed."""
    return call._replace(
        mask=None, mask_tiles=None, key_lengths=None, query_lengths=None, causal=CausalKind.NONE,
        window_left=-1, window_right=-1,
    )  # fmt: skip


def changes_products(call: AnyCall) -> bool:
    """Whether scores are other than products plus a mask or bias."""
    return call.softcap > 0.0


def changes_scores(call: AnyCall) -> bool:
    """Whether scores are other than products plus a mask, or a softmax has sinks."""
    return not (call.distance_bias is call.sinks is None) or changes_products(call)


def why_call_unsupported(call: AnyCall) -> str | None:
    """Why no backend runs the call, or None: packed and paged calls have fewer options."""
    packed = call.cu_seqlens_q is not None
    if packed != (call.cu_seqlens_k is not None):
        return "takes cu_seqlens_q and cu_seqlens_k together, got one"
    others = (call.mask, call.key_lengths, call.query_lengths, call.block_table)
    if packed and any(x is not None for x in others):
        return "takes no mask, lengths or block_table with cu_seqlens"
    if call.block_table is not None and call.dropout_p > 0.0:
        return "takes no dropout with block_table"
    return None


def why_no_weights(call: Any) -> str | None:
    """Why no backend of `attention_with_weights` runs the call, or None."""
    padded = call.cu_seqlens_q is call.cu_seqlens_k is call.block_table is None
    return None if padded else "computes weights of padded calls only, without cu_seqlens or pages"


def why_no_pages(call: BackwardCall) -> str | None:
    """Why no backend but the reference computes gradients of a paged call, or None."""
    return None if call.block_table is None else "has no gradients with block_table"


# Largest number of keys for which the CPU backends compute delta from the weights in half precision
# (kFewKeys of csrc/attention/cpu/problem.h).
FEW_KEYS = 4


def has_few_keys(call: BackwardCall) -> bool:
    """Whether a padded call in half precision has sequences of so few keys, on a CPU by lengths."""
    lengths = call.key_lengths
    return call.q.dtype.itemsize < 4 and (
        call.k.shape[2] <= FEW_KEYS
        or (lengths is not None and lengths.is_cpu and bool((lengths <= FEW_KEYS).any()))
    )
