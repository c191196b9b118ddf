"""The state of incremental decoding: the projected keys and values of every decoder layer.

`TransformerDecoder.init_cache` makes a `DecoderCache`, `TransformerDecoder.step` fills it. Its
tensors change neither shape nor address: a step writes the rows given by a counter on the device
and increments the counter, so one step can be captured as a CUDA graph and replayed.

Beams of one sequence share its cache. Position t of beam j is row `t * beams + j`, all beams are
queries of one attention over all rows, and the mask `ancestry` allows each beam its own history.
Reordering beams changes that mask; no key or value moves. The attention's products grow with the
number of beams; the memory it reads, which determines its time, does not.

Shapes: B batch, K beams, N rows of the memory, T positions, H heads, D head dim.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastattn import functional
from fastattn.functional import Lengths
from fastattn.nn.relative import AttentionPositions


@dataclass
class LayerCache:
    """Keys and values of one decoder layer, interleaved: `[B, rows, 2, H, D]`."""

    target: Tensor  # T * K rows
    memory: Tensor  # N rows

    def target_heads(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, T * K, D]`, as views."""
        return _heads(self.target)

    def memory_heads(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, N, D]`, as views."""
        return _heads(self.memory)


@dataclass
class DecoderCache:
    """The state of incremental decoding. `length` counts the positions decoded so far.

    memory_mask: allowed keys of the memory, bool `[B, 1, 1, N]`, or None. memory_lengths: `[B]` or
    None. On the device: `position` `[1]`, the next position; `rows` `[K]`, the rows it is written
    to; `key_lengths` `[B]`, how many rows its queries read. ancestry: bool `[B, 1, K, T * K]`, None
    for one beam.
    """

    layers: list[LayerCache]
    max_length: int
    beams: int = 1
    memory_mask: Tensor | None = None
    memory_lengths: Tensor | None = None
    length: int = 0
    ancestry: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._allocate()

    def _allocate(self) -> None:
        like = self.layers[0].target
        B, K, device = like.shape[0], self.beams, like.device
        # One tensor, so that one addition advances all three counters.
        columns = torch.arange(K, device=device)
        self._start = torch.cat([columns[:1], columns, columns.new_full((B,), K)])
        self._increment = torch.full_like(self._start, K)
        self._increment[0] = 1
        self._counters = self._start.clone()
        self.position, self.rows, self.key_lengths = self._counters.split([1, K, B])
        if K > 1:
            self._columns = torch.arange(self.max_length * K, device=device)
            # Future rows: each beam reads those that it will write itself.
            own = self._columns % K == self._start[1 : 1 + K, None]  # [K, T * K]
            self._own = own.expand(B, 1, K, self.max_length * K)
            self._positions = self._columns // K
            self.ancestry = self._own.clone()

    @property
    def batch_size(self) -> int:
        return self.layers[0].target.shape[0]

    @property
    def memory_size(self) -> int:
        return self.layers[0].memory.shape[1]

    def step(self, positions: int) -> "Step":
        """The arguments and buffers of the layers at the next positions."""
        if (end := self.length + positions) > self.max_length:
            raise ValueError(
                f"the cache holds max_length={self.max_length} positions, got position {end - 1}"
            )
        if positions == 1:
            return Step(self, self.position, self.rows, self.key_lengths)
        rows = self.rows + torch.arange(positions, device=self.rows.device)
        return Step(self, rows, rows, (rows + 1).expand(self.batch_size, positions))

    def positional_mask(self, positions: AttentionPositions) -> Tensor | None:
        """`ancestry` as a floating mask `[B, H, K, T * K]` with the biases of the next position.

        A distance in rows does not tell the distance in positions: the row of a beam's ancestor may
        belong to any beam.
        """
        bias = positions.bias(self._positions - self.position)  # [H, T * K]
        if bias is None or self.ancestry is None:
            return self.ancestry
        return torch.where(self.ancestry, bias[:, None], float("-inf"))

    def biased(self, bias: Tensor) -> Tensor:
        """`ancestry` as a floating mask `[B, H, K, T * K]` with `bias`, `[1, H, 1, at least T]`, of
        each position.
        """
        assert self.ancestry is not None
        rows = bias.index_select(3, self._positions)
        return torch.where(self.ancestry, rows, float("-inf"))

    def advance(self, positions: int) -> None:
        """Advances the counters past the positions just written."""
        self._counters.add_(self._increment, alpha=positions)
        self.length += positions

    def seek(self, position: Tensor) -> None:
        """Continues at `position`, an int64 tensor of one element on the device; `length` and
        `ancestry` stay.

        For exported steps, whose cache and position are inputs.
        """
        self._counters.copy_(self._start + self._increment * position)

    def follow(self, parents: Tensor) -> None:
        """Beam j of sequence b continues from beam `parents[b, j]`; int64 `[B, K]`."""
        B, K = self.batch_size, self.beams
        if parents.shape != (B, K) or parents.dtype is not torch.int64:
            raise ValueError(
                f"parents must be int64 [{B}, {K}], got {parents.dtype} {list(parents.shape)}"
            )
        if self.ancestry is None:
            return
        inherited = self.ancestry.gather(2, parents[:, None, :, None].expand_as(self.ancestry))
        past = self._columns < self.rows[:1]
        torch.where(past, inherited, self._own, out=self.ancestry)

    def restart(self, projected: Iterable[Tensor], lengths: Tensor) -> None:
        """Resets to position 0 over another memory: keys and values `[B, N, 2, H, D]` for each
        layer, of which `lengths` `[B]` rows are read.
        """
        if self.memory_lengths is None or self.memory_mask is not None:
            raise ValueError("cache must have memory_lengths and no memory_key_padding_mask")
        self.memory_lengths.copy_(lengths)
        for layer, kv in zip(self.layers, projected, strict=True):
            layer.memory[:, : kv.shape[1]] = kv
        self.rewind()

    def rewind(self) -> None:
        """Resets to position 0; rows written before are no longer read."""
        self._counters.copy_(self._start)
        self.length = 0
        if self.ancestry is not None:
            self.ancestry.copy_(self._own)

    def reorder(self, rows: Tensor) -> None:
        """Sequence i continues from `rows[i]`, for example without the sequences that have ended.

        Copies the cache; `follow`, which reorders the beams of one sequence, does not.
        """
        if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"rows must be int32 or int64 [new batch], got {rows.dtype} {list(rows.shape)}"
            )
        for layer in self.layers:
            layer.target = layer.target.index_select(0, rows)
            layer.memory = layer.memory.index_select(0, rows)
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask.index_select(0, rows)
        if self.memory_lengths is not None:
            self.memory_lengths = self.memory_lengths.index_select(0, rows)
        ancestry, length, self.length = self.ancestry, self.length, 0
        self._allocate()
        self.advance(length)
        if ancestry is not None:
            self.ancestry = ancestry.index_select(0, rows)


@dataclass
class Step:
    """The next positions of a cache: what all its layers share while they decode them.

    positions: `[S]`, `[1]` for beams; rows: those to write; key_lengths: how many rows each query
    reads, `[B]` or `[B, S]`.
    """

    cache: DecoderCache
    positions: Tensor
    rows: Tensor
    key_lengths: Tensor
    _masks: dict[AttentionPositions, Tensor | None] = field(default_factory=dict)

    def options(self, positions: AttentionPositions | None) -> dict[str, Any]:
        """The keyword arguments of a layer's self-attention with these positions."""
        scores = {} if positions is None else positions.score_options(self.key_lengths.device)
        if not scores or positions is None:
            return {"mask": self.cache.ancestry, "key_lengths": self.key_lengths}
        if self.cache.beams == 1:
            # Distances count from the last key of each sequence.
            lengths = self.key_lengths if self.key_lengths.dim() == 1 else self.key_lengths[:, -1]
            return {"key_lengths": lengths, "causal": "bottom_right_lengths", **scores}
        if positions not in self._masks:
            self._masks[positions] = self.cache.positional_mask(positions)
        return {"mask": self._masks[positions], "key_lengths": self.key_lengths}


def _heads(rows: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = rows.unbind(2)
    return keys.transpose(1, 2), values.transpose(1, 2)


def check_memory_lengths(memory_lengths: Lengths, B: int, device: torch.device) -> Tensor:
    """`memory_lengths` as a tensor; raises unless they are integers `[B]`."""
    memory_lengths = functional.lengths_tensor("memory_lengths", memory_lengths, device)
    if memory_lengths.dtype not in (torch.int32, torch.int64) or memory_lengths.shape != (B,):
        raise ValueError(
            f"memory_lengths must be int32 or int64 [{B}], "
            f"got {memory_lengths.dtype} {list(memory_lengths.shape)}"
        )
    return memory_lengths
