"""Keyword arguments of the public functions that have overloads, for type checkers."""

from typing import TypedDict

from torch import Tensor

from fastattn._arguments import Causal, Lengths
from fastattn._scores import RelativeBuckets
from fastattn.ops.attention.op import PreparedMask


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments that `attention` and `attention_varlen` share, for type checkers."""

    causal: Causal
    window: tuple[int, int] | None
    scale: float | None
    alibi_slopes: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    relative_bias: Tensor | None
    relative_buckets: RelativeBuckets | None
    relative_max_distance: int
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int
    backend: str | None


class PaddedOptions(AttentionOptions, total=False):
    mask: Tensor | PreparedMask | None
    key_lengths: Lengths | None
    query_lengths: Lengths | None
    block_table: Tensor | None


class AddNormOptions(TypedDict, total=False):
    x_bias: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int
    backend: str | None
