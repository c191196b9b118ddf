"""What a decoder remembers between two tokens: the projected keys and values of every layer.

`TransformerDecoder.init_cache` makes a `DecoderCache`, `TransformerDecoder.step` fills it. Buffers
for the target are allocated once, `[B, H, max_length, D]`; the memory is projected once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """Keys and values of one decoder layer, all `[B, H, ..., D]`."""

    keys: Tensor
    values: Tensor
    memory_keys: Tensor
    memory_values: Tensor

    def append(self, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Writes positions from `start` on; returns all keys and values so far, as views."""
        end = start + k.shape[2]
        self.keys[:, :, start:end] = k
        self.values[:, :, start:end] = v
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass
class DecoderCache:
    """The state of incremental decoding. `length` counts the positions decoded so far.

    memory_mask: allowed keys of the memory, bool `[B, 1, 1, N]`, or None. memory_lengths: `[B]` or
    None.
    """

    layers: list[LayerCache]
    max_length: int
    memory_mask: Tensor | None = None
    memory_lengths: Tensor | None = None
    length: int = 0

    @property
    def batch_size(self) -> int:
        return self.layers[0].keys.shape[0]

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from row `rows[i]`; rows may repeat or be left out, as in beam search."""
        if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"rows must be int32 or int64 [new batch], got {rows.dtype} {list(rows.shape)}"
            )
        for layer in self.layers:
            layer.keys = layer.keys.index_select(0, rows)
            layer.values = layer.values.index_select(0, rows)
            layer.memory_keys = layer.memory_keys.index_select(0, rows)
            layer.memory_values = layer.memory_values.index_select(0, rows)
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask.index_select(0, rows)
        if self.memory_lengths is not None:
            self.memory_lengths = self.memory_lengths.index_select(0, rows)
