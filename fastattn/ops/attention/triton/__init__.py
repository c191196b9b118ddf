"""Attention in Triton, the portable GPU path: the launchers of the backend `triton`.

`forward.py` and `backward.py` launch, `fwd_*` and `bwd_*` are their kernels and configs; shared are
`call_shape.py` (what a call is, strides, tensor descriptors), `tiles.py` and `row_tiles.py` (device
code), `mask_lists.py` (lists of mask tiles) and `base_tiles.py` (what these lists are made from in
the backward).
"""

from .backward import (
    attention_bwd,
    attention_bwd_unsupported,
    attention_bwd_uses_lse,
    attention_bwd_workspace,
)
from .forward import attention_fwd, attention_fwd_unsupported, attention_fwd_workspace

__all__ = [
    "attention_bwd",
    "attention_bwd_unsupported",
    "attention_bwd_uses_lse",
    "attention_bwd_workspace",
    "attention_fwd",
    "attention_fwd_unsupported",
    "attention_fwd_workspace",
]
