"""Interface of layers to the processes that share a model: `Sharding`, by default of one process.

`fastattn.distributed.parallelize` gives modules a `Sharding` whose methods communicate; every other
module has `SINGLE`, whose methods return what they are given. Layers call the same methods at the
same places in both cases:

    stack:  x = split(x);  memory = shared(memory);  layers, norm;  return gather(x)
    block:  product = projections(enter(y));  x = norm(x + dropout(leave(product) + bias))

Between `enter` and `leave` a process holds whole rows of y and a share of the heads or of the
hidden columns; outside, on the residual stream, it may hold a share of the rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import functional


class Sharding:
    """One process, which holds all weights and all rows of its batch."""

    # Whether modules may be called as PyTorch composes them: with whole weights and sequences.
    whole = True
    # Whether a layer may run on packed rows, for layers whose weights are divided.
    can_pack = False
    # The number of processes among which the keys of an attention are divided.
    key_shards = 1
    # The number of rows of a packed batch must be a multiple of this.
    row_multiple = 1

    def split(self, x: Tensor) -> Tensor:
        """The input of a stack: this process's rows of it."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The output of a stack: all rows."""
        return x

    def shared(self, x: Tensor) -> Tensor:
        """An x that all processes hold, before each multiplies it by a share of the weights."""
        return x

    def enter(self, y: Tensor) -> Tensor:
        """The input of a block, before its first projection."""
        return y

    def leave(self, product: Tensor) -> Tensor:
        """The result of a block's last projection, before its bias: the sum over processes."""
        return product

    def product_of_parts(
        self, attention: nn.MultiheadAttention, x: Tensor, first: int, count: int
    ) -> Tensor | None:
        """x times `count` blocks of `in_proj_weight`, beginning with block `first`, if each block
        is a parameter of its own.
        """
        return None

    def seed(self, seed: Tensor, of: str) -> Tensor:
        """The dropout seed, so that each value in the model has bits of its own.

        of: what the processes hold of the values: "tokens" of the batch, "rows" of the residual
        stream, "hidden" columns of a feed-forward network, or "heads", whose bits follow the
        position in the whole attention.
        """
        return seed

    def positions(self, length: int, device: torch.device) -> Tensor:
        """The positions of this process's tokens in their sequences, `[length]`."""
        return torch.arange(length, device=device)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return functional.attention(q, k, v, **options)  # type: ignore[return-value]

    def attention_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *longest: int,
        **options: Any,
    ) -> Tensor:
        return functional.attention_varlen(  # type: ignore[return-value]
            q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, **options
        )

    def batch(
        self, source: Tensor, target: Tensor, source_padding: Tensor, pad: int
    ) -> tuple[Tensor, Tensor, Tensor, int | Tensor, int | Tensor]:
        """This process's tokens of a batch of a token model, `[B, S]` and `[B, T]`, the whole
        padding mask of the source, and the positions of the tokens: the first or all of them.
        """
        return source, target, source_padding, 0, 0

    def dropout(self, x: Tensor, p: float, training: bool, of: str = "tokens") -> Tensor:
        """Dropout outside the layers; of: see `seed`."""
        return F.dropout(x, p, training)


SINGLE = Sharding()


@dataclass(frozen=True)
class TokenModelParts:
    """The names that `fastattn.distributed.parallelize` reads of a token model around a
    Transformer.

    transformer: its name. vocabulary: names of the parameters with a row for each token of a
    vocabulary. dropouts: names of dropouts outside the Transformer. methods: those that run
    the model, besides forward. max_length: the largest number of positions, if it is limited.
    refused: mesh dimension, or option of a `Plan`, -> why the model's
    options do not support it, phrased to follow "a model that".
    """

    transformer: str
    vocabulary: tuple[str, ...]
    dropouts: tuple[str, ...]
    methods: tuple[str, ...]
    max_length: int | None
    refused: dict[str, str]


def sharding_of(module: nn.Module) -> Sharding:
    return module.__dict__.get("sharding", SINGLE)


class ShardedDropout(nn.Dropout):
    """`nn.Dropout` of values that processes share, in place of one that draws from the generator,
    which all processes have in the same state.
    """

    def __init__(self, p: float, sharding: Sharding, of: str) -> None:
        super().__init__(p)
        self.sharding, self.of = sharding, of

    def forward(self, x: Tensor) -> Tensor:
        return self.sharding.dropout(x, self.p, self.training, self.of)


def dropout_and_sum(
    x: Tensor, x_bias: Tensor | None, residual: Tensor, p: float, stream: dict[str, Any]
) -> Tensor:
    """residual + dropout(x + x_bias), the second result of `add_layer_norm`."""
    _, z = functional.add_layer_norm(
        x, residual, None, None, x_bias=x_bias, dropout_p=p, return_sum=True, **stream
    )
    return z
