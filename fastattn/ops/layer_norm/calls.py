"""The arguments of the norms' torch ops: one tuple for each op, whose fields are the arguments of
its schema. All backends but the reference take them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LayerNormCall(NamedTuple):
    x: Tensor  # [..., N]
    weight: Tensor | None  # [N]
    bias: Tensor | None
    eps: float


class LayerNormBackwardCall(NamedTuple):
    dy: Tensor
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor  # [...]
    rstd: Tensor
    eps: float
    needs: Sequence[bool]


class AddLayerNormCall(NamedTuple):
    x: Tensor  # [..., N]
    residual: Tensor
    x_bias: Tensor | None  # [N]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int


class AddLayerNormBackwardCall(NamedTuple):
    dy: Tensor | None
    dz: Tensor | None
    z: Tensor
    x_bias: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    rstd: Tensor
    eps: float
    x_dtype: torch.dtype
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int
    needs: Sequence[bool]


class RmsNormCall(NamedTuple):
    x: Tensor
    weight: Tensor | None
    eps: float


class RmsNormBackwardCall(NamedTuple):
    dy: Tensor
    x: Tensor
    weight: Tensor | None
    rstd: Tensor
    eps: float
    needs: Sequence[bool]
