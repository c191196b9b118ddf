"""The arguments of the feed-forward network's torch ops: one tuple for each op, whose fields are
the arguments of its schema. All backends but the reference take them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class ForwardCall(NamedTuple):
    x: Tensor  # [..., D]
    w1: Tensor  # [F, D], gated [2F, D]
    b1: Tensor | None
    w2: Tensor  # [E, F]
    b2: Tensor | None
    residual: Tensor | None  # [..., E]
    activation: str
    dropout_p: float
    output_dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int


class BackwardCall(NamedTuple):
    dy: Tensor
    x: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    hidden: Tensor
    activation: str
    dropout_p: float
    output_dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int
    needs: Sequence[bool]
