"""What `parallelize` gives to modules: the `Sharding` of a stack on a mesh.

Along "tensor", a process holds a share of the heads, of the hidden columns and of the vocabulary,
and, with `rows`, a share of the rows of the residual stream. Along "context" it holds a share of
every sequence, along "data" of the sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastattn import functional
from fastattn.distributed import collectives
from fastattn.distributed.collectives import Group
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
    method: str = "ring"
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

    def seed(self, seed: Tensor, of: str) -> Tensor:
        if of == "heads":
            return seed
        index = self.place.index(tensor=of == "hidden" or (of == "rows" and self.rows))
        step = (index * _SEED_STEP + (1 << 63)) % (1 << 64) - (1 << 63)  # as int64
        return seed + step if index else seed

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return functional.attention(q, k, v, **options)  # type: ignore[return-value]

    def dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        if not training or p == 0.0:
            return x
        seed = self.seed(new_dropout_seed(x.device), "tokens")
        return dropout_and_sum(x, None, torch.zeros_like(x), p, {"dropout_seed": seed})

    def _row_dim(self, x: Tensor) -> int:
        return 1 if self.batch_first and x.dim() == 3 else 0


@dataclass(frozen=True, eq=False)
class TokenSharding(StackSharding):
    """The `Sharding` of a model of tokens around a Transformer.

    vocabulary: whether the output head's rows are divided along "tensor".
    """

    vocabulary: bool = False

    def shared(self, x: Tensor) -> Tensor:
        return collectives.shared(x, self.place.tensor) if self.vocabulary else x

    def batch(
        self, source: Tensor, target: Tensor, source_padding: Tensor, pad: int
    ) -> tuple[Tensor, Tensor, Tensor, int | Tensor, int | Tensor]:
        source, target = self.padded(source, pad), self.padded(target, pad)
        source_padding = self.padded(source_padding, True)
        return source, target, source_padding, 0, 0

    def padded(self, tokens: Tensor, value: int | bool) -> Tensor:
        """`[B, S]` with an S that all processes' shards divide."""
        return F.pad(tokens, (0, -tokens.shape[1] % self.row_multiple), value=value)

    def targets(self, targets: Tensor, ignore_index: int) -> Tensor:
        """The targets of this process's logits."""
        return self.padded(targets, ignore_index)
