"""Positions added to embeddings: fixed sinusoids, and learned vectors.

Both take `[B, S, E]` (or any `[..., S, E]`) and add row `offset + s` of a table to position s, then
apply dropout.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.nn.tables import ComputedTable


class _PositionalEncoding(nn.Module):
    """Adds rows of a table, `[max_length, d_model]`, that the subclass provides."""

    def __init__(self, d_model: int, max_length: int, dropout: float) -> None:
        super().__init__()
        if d_model < 1 or max_length < 1:
            raise ValueError(
                f"d_model and max_length must be at least 1, got {d_model} and {max_length}"
            )
        self.d_model = d_model
        self.max_length = max_length
        self.dropout = nn.Dropout(dropout)

    def _add(self, x: Tensor, table: Tensor, offset: int | Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[-1] != self.d_model:
            raise ValueError(f"x must be [..., S, {self.d_model}], got {list(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"x must be floating, got {x.dtype}")
        if isinstance(offset, Tensor):
            S = x.shape[-2]
            integral = offset.dtype in (torch.int32, torch.int64)
            if not (integral and offset.shape in ((), (1,), (S,))):
                raise ValueError(
                    f"offset must be an integer or integers [1] or [{S}], "
                    f"got {offset.dtype} {list(offset.shape)}"
                )
            if S > 1 and offset.shape != (S,):
                offset = offset + torch.arange(x.shape[-2], device=offset.device)
            return self.dropout(x + table.index_select(0, offset).to(x.dtype))
        given: Any = offset
        if not (isinstance(given, int) or hasattr(given, "__index__")):
            raise TypeError(f"offset must be an integer or int64 [1], got {offset!r}")
        end = offset + x.shape[-2]
        if offset < 0 or end > self.max_length:
            raise ValueError(
                f"positions must lie in [0, max_length={self.max_length}), "
                f"got {offset} to {end - 1}: build the module with a larger max_length"
            )
        return self.dropout(x + table[offset:end].to(x.dtype))

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, max_length={self.max_length}"


class SinusoidalPositionalEncoding(ComputedTable, _PositionalEncoding):
    """Column 2i holds sin(position / 10000^(2i / d_model)), column 2i + 1 the cosine of the same.

    The table is a buffer outside the `state_dict`: it follows the module's device but not its
    dtype, and checkpoints do not depend on `max_length`.
    """

    def __init__(self, d_model: int, max_length: int = 4096, dropout: float = 0.0) -> None:
        super().__init__(d_model, max_length, dropout)
        self._register_table()

    def _computed(self, device: torch.device | str) -> Tensor:
        return sinusoids(self.max_length, self.d_model, device)

    def forward(self, x: Tensor, *, offset: int | Tensor = 0) -> Tensor:
        """x `[..., S, d_model]` with the rows of its positions added.

        offset: number of earlier positions, for incremental decoding, or the S positions. A tensor,
        int64 `[1]` or `[S]`, is read only on the device and not checked, so that a step can be
        captured as a CUDA graph.
        """
        return self._add(x, self.table_on(x.device), offset)


class LearnedPositionalEncoding(_PositionalEncoding):
    """One trained vector for each position below `max_length`."""

    def __init__(self, d_model: int, max_length: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, max_length, dropout)
        self.weight = nn.Parameter(torch.empty(max_length, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # 0.02: small compared with embeddings of unit variance, as usual for learned positions.
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, *, offset: int | Tensor = 0) -> Tensor:
        """As `SinusoidalPositionalEncoding.forward`."""
        return self._add(x, self.weight, offset)


def sinusoids(length: int, d_model: int, device: torch.device | str | None = None) -> Tensor:
    """The table of `SinusoidalPositionalEncoding`, fp32 `[length, d_model]`, rounded from fp64."""
    position = torch.arange(length, dtype=torch.float64, device=device)[:, None]
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angle = position * torch.exp(even * (-math.log(10000.0) / d_model))  # [length, ceil(d / 2)]
    table = position.new_empty(length, d_model)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle.cos()[:, : d_model // 2]
    return table.float()
