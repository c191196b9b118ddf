"""The `Sharding` of a stack on a mesh, which `parallelize` gives to modules.

Along "tensor", a process holds a share of the heads, of the hidden columns and of the vocabulary,
and, with `rows`, a share of the rows of the residual stream. Along "context" it holds a share of
every sequence, along "data" of the sequences.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn import functional
from fastattn.distributed import collectives
from fastattn.distributed.blocks import DROPOUT_TILE
from fastattn.distributed.collectives import Group
from fastattn.distributed.context import context_parallel_attention
from fastattn.distributed.parameters import product_of_parts
from fastattn.distributed.sequence import chunk_count, chunks_of, shard_sequence
from fastattn.functional import new_dropout_seed
from fastattn.nn.sharding import Sharding, dropout_and_sum

# Odd, so that the multiples of one seed differ: 2^64 divided by the golden ratio.
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Place:
    """The groups of this process along the dimensions of a mesh."""

    data: Group
    tensor: Group
    context: Group

    def index(self, *, tensor: bool) -> int:
        """The number of this process among those of data and context, and tensor if it counts."""
        index = self.data.rank * self.context.size + self.context.rank
        return index * self.tensor.size + (self.tensor.rank if tensor else 0)


@dataclass(frozen=True, eq=False)
class StackSharding(Sharding):
    """The `Sharding` of a stack, its layers and their attentions.

    rows: whether the residual stream is divided along "tensor". batch_first: whether dimension 1 of
    a padded batch is the sequence. packable: `can_pack` of a layer. method, balanced,
    keys_balanced: of attention along "context", see `context_parallel_attention`.
    """

    place: Place
    rows: bool
    batch_first: bool
    packable: bool = False
    method: Literal["ring", "all_to_all"] = "ring"
    balanced: bool = False
    keys_balanced: bool = False

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return self.place.tensor.size == self.place.context.size == 1

    @property
    def can_pack(self) -> bool:  # type: ignore[override]
        return self.packable

    @property
    def key_shards(self) -> int:  # type: ignore[override]
        return self.place.context.size

    @property
    def row_multiple(self) -> int:  # type: ignore[override]
        return self.place.tensor.size if self.rows else 1

    def split(self, x: Tensor) -> Tensor:
        if self.row_multiple == 1:
            return x
        dim = self._row_dim(x)
        if x.shape[dim] % self.row_multiple:
            raise ValueError(
                f"the input of a stack must have a length that the {self.row_multiple} processes "
                f'of "tensor" divide, got {x.shape[dim]}: pad it, or use Plan(sequence=False)'
            )
        return collectives.split(x, dim, self.place.tensor)

    def gather(self, x: Tensor) -> Tensor:
        return collectives.gather(x, self._row_dim(x), self.place.tensor) if self.rows else x

    def shared(self, x: Tensor) -> Tensor:
        return collectives.shared(x, self.place.tensor)

    def enter(self, y: Tensor) -> Tensor:
        if self.rows:
            return collectives.gather_shared(y, self._row_dim(y), self.place.tensor)
        return collectives.shared(y, self.place.tensor)

    def leave(self, product: Tensor) -> Tensor:
        if self.rows:
            return collectives.sum_part(product, self._row_dim(product), self.place.tensor)
        return collectives.sum_whole(product, self.place.tensor)

    def product_of_parts(
        self, attention: nn.MultiheadAttention, x: Tensor, first: int, count: int
    ) -> Tensor | None:
        return product_of_parts(attention, x, first, count)

    def seed(self, seed: Tensor, of: str) -> Tensor:
        if of == "heads":
            return seed
        index = self.place.index(tensor=of == "hidden" or (of == "rows" and self.rows))
        step = (index * _SEED_STEP + (1 << 63)) % (1 << 64) - (1 << 63)  # as int64
        return seed + step if index else seed

    def positions(self, length: int, device: torch.device) -> Tensor:
        context = self.place.context
        chunks = chunks_of(context.size, context.rank, self.balanced)
        size = length // len(chunks)
        return torch.cat([torch.arange(c * size, (c + 1) * size, device=device) for c in chunks])

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, dropout_seed: Tensor | None = None, **options: Any
    ) -> Tensor:
        seed = self._with_origin(dropout_seed, q.shape[0], q.shape[1])
        context = self.place.context
        if context.size == 1:
            return functional.attention(q, k, v, dropout_seed=seed, **options)  # type: ignore[return-value]
        return context_parallel_attention(  # type: ignore[return-value]
            q,
            k,
            v,
            method=self.method,
            balanced=self.balanced,
            key_balanced=self.keys_balanced,
            group=context.group,
            dropout_seed=seed,
            **options,
        )

    def attention_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *longest: int,
        dropout_seed: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        # With rows divided, the last sequence is that of `Packing.extended`.
        sequences = len(cu_seqlens_q) - (2 if self.row_multiple > 1 else 1)
        seed = self._with_origin(dropout_seed, sequences, q.shape[1])
        return functional.attention_varlen(  # type: ignore[return-value]
            q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, dropout_seed=seed, **options
        )

    def _with_origin(self, seed: Tensor | None, sequences: int, heads: int) -> Tensor | None:
        """The seed, followed by the index of this process's first sequence and head (and query and
        key, 0) in the attention of all processes, whose bits it draws. Processes of "data" are
        taken to have equally many sequences.
        """
        if seed is None:
            return None
        first = self.place.data.rank * sequences, self.place.tensor.rank * heads
        return seed if first == (0, 0) else F.pad(seed, (0, 4)) + _origin(seed.device, *first)

    def dropout(self, x: Tensor, p: float, training: bool, of: str = "tokens") -> Tensor:
        if not training or p == 0.0:
            return x
        seed = self.seed(new_dropout_seed(x.device), of)
        return dropout_and_sum(x, None, torch.zeros_like(x), p, {"dropout_seed": seed})

    def _row_dim(self, x: Tensor) -> int:
        return 1 if self.batch_first and x.dim() == 3 else 0


@lru_cache(maxsize=64)
def _origin(device: torch.device, sequence: int, head: int) -> Tensor:
    return torch.tensor([0, sequence, head, 0, 0], device=device)


@dataclass(frozen=True, eq=False)
class TokenSharding(StackSharding):
    """The `Sharding` of a model of tokens around a Transformer.

    vocabulary: whether the output head's rows are divided along "tensor". max_length: the largest
    number of positions, if it is limited. attention_dropout: whether attentions have dropout.
    """

    vocabulary: bool = False
    max_length: int | None = None
    attention_dropout: bool = False

    def shared(self, x: Tensor) -> Tensor:
        return collectives.shared(x, self.place.tensor) if self.vocabulary else x

    def batch(
        self, source: Tensor, target: Tensor, source_padding: Tensor, pad: int
    ) -> tuple[Tensor, Tensor, Tensor, int | Tensor, int | Tensor]:
        """Sources are divided contiguously, targets, which attend causally, in balance."""
        if source_padding.shape != source.shape:
            raise ValueError(
                f"source_padding must be {list(source.shape)} like source, "
                f"got {list(source_padding.shape)}"
            )
        source_at, target_at = self._positions(source, False), self._positions(target, True)
        return (
            self._shard(source, pad, False),
            self._shard(target, pad, True),
            self._padded(source_padding, True, False),
            source_at,
            target_at,
        )

    def targets(self, targets: Tensor, ignore_index: int) -> Tensor:
        """The targets of this process's logits."""
        return self._shard(targets, ignore_index, True)

    def _multiple(self, balanced: bool) -> int:
        """The number that has to divide the length of a sequence."""
        P, method = self.place.context.size, self.method
        if P == 1:
            return self.row_multiple
        # Dropout bits of attention belong to tiles.
        tile = DROPOUT_TILE if method == "ring" and self.attention_dropout else 1
        return math.lcm(chunk_count(P, balanced) * tile, P * self.row_multiple)

    def _padded(self, tokens: Tensor, value: int | bool, balanced: bool) -> Tensor:
        extra = -tokens.shape[1] % self._multiple(balanced)
        return F.pad(tokens, (0, extra), value=value)

    def _shard(self, tokens: Tensor, value: int | bool, balanced: bool) -> Tensor:
        tokens, context = self._padded(tokens, value, balanced), self.place.context
        if context.size == 1:
            return tokens
        return shard_sequence(tokens, 1, balanced=balanced, group=context.group)

    def _positions(self, tokens: Tensor, balanced: bool) -> int | Tensor:
        """The positions of this process's tokens; padding has that of the last token."""
        length = tokens.shape[1]
        if self.max_length is not None and length > self.max_length:
            raise ValueError(f"sequences must have at most {self.max_length} tokens, got {length}")
        if length % self._multiple(balanced) == 0 and self.place.context.size == 1:
            return 0
        at = torch.arange(length, device=tokens.device)[None]
        return self._shard(at, length - 1, balanced)[0]
