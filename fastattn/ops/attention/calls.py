"""The arguments of attention's torch ops: one tuple for each op, whose fields are the arguments of
its schema. All backends but the reference take them.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

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
    causal: int
    window_left: SymInt
    window_right: SymInt
    scale: float
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int
    needs: Sequence[bool]


class PackedForwardCall(NamedTuple):
    q: Tensor  # [T, H, D]
    k: Tensor  # [S, K, D]
    v: Tensor  # [S, K, E]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: SymInt
    max_seqlen_k: SymInt
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
