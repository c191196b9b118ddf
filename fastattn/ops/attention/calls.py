"""The arguments of attention's torch ops: one tuple for each op, whose fields are the arguments of
its schema. All backends but the reference take them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

SymInt = Annotated[int, torch.SymInt]


class ForwardCall(NamedTuple):
    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, K, N, D]
    v: Tensor  # [B, K, N, E]
    mask: Tensor | None
    mask_tiles: Tensor | None
    key_lengths: Tensor | None
    query_lengths: Tensor | None
    # [B or 1, H, M + N - 1]: the pair (i, j) adds entry j - i - (the diagonal's offset) + M - 1, or
    # N - 1 in place of M - 1 if the diagonal is a bottom-right one. M and N of packed sequences are
    # max_seqlen_q and max_seqlen_k.
    distance_bias: Tensor | None
    sinks: Tensor | None  # [H], in lse's dtype
    softcap: float  # 0.0: none
    causal: int
    window_left: SymInt
    window_right: SymInt
    scale: float
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int


class BackwardCall(NamedTuple):
    dout: Tensor | None
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    mask_tiles: Tensor | None
    key_lengths: Tensor | None
    query_lengths: Tensor | None
    out: Tensor
    lse: Tensor
    distance_bias: Tensor | None
    sinks: Tensor | None
    softcap: float
    causal: int
    window_left: SymInt
    window_right: SymInt
    scale: float
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int
    needs: Sequence[bool]


def _call(name: str, fields: list[tuple[str, Any]]) -> Any:
    make: Any = NamedTuple
    return make(name, fields)


_FORWARD, _BACKWARD = (
    [*get_type_hints(call, include_extras=True).items()] for call in (ForwardCall, BackwardCall)
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


class PagedForwardCall(NamedTuple):
    """Keys and values in pages: key j of sequence b is row j % page of page
    block_table[b, j // page]. The other fields mean what they mean in ForwardCall, for N = T * page
    keys. Entries for keys beyond the key length may be any numbers.
    """

    q: Tensor  # [B, H, M, D]
    k: Tensor  # [P, K, page, D]
    v: Tensor  # [P, K, page, E]
    block_table: Tensor  # int32 [B, T]
    mask: Tensor | None
    key_lengths: Tensor | None
    query_lengths: Tensor | None
    distance_bias: Tensor | None
    sinks: Tensor | None
    softcap: float
    causal: int
    window_left: SymInt
    window_right: SymInt
    scale: float


class PackedForwardCall(NamedTuple):
    q: Tensor  # [T, H, D]
    k: Tensor  # [S, K, D]
    v: Tensor  # [S, K, E]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: SymInt
    max_seqlen_k: SymInt
    distance_bias: Tensor | None
    sinks: Tensor | None
    softcap: float
    causal: int
    window_left: SymInt
    window_right: SymInt
    scale: float
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int


class PackedBackwardCall(NamedTuple):
    dout: Tensor | None
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    out: Tensor
    lse: Tensor
    max_seqlen_q: SymInt
    max_seqlen_k: SymInt
    distance_bias: Tensor | None
    sinks: Tensor | None
    softcap: float
    causal: int
    window_left: SymInt
    window_right: SymInt
    scale: float
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int
    needs: Sequence[bool]


class Gradients(NamedTuple):
    """The results of the backward; those not needed have no elements."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dmask: Tensor
    ddistance_bias: Tensor
    dsinks: Tensor
