"""What a training step of a `Seq2SeqTransformer` computes, sends and keeps: the formulas.

`blocks` describes a model as a sequence of blocks, its embeddings, layers and head, each with the
FLOPs, the transfers and the saved bytes of one rank under a layout. `sent` adds the transfers up,
`memory` the bytes. tests/distributed/test_volumes.py compares both with what processes count;
`benchmarks.scaling` turns them into times. All divisions are exact: FSDP2 pads the rows of a
parameter that its ranks do not divide.

Sizes: B sentence pairs, S source and T target tokens of each, E width, F width of the feed-forward
network, V vocabulary; Z shards of the parameters, P ranks of a tensor group, C of a context group.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from fastattn.distributed import Plan
from fastattn.seq2seq.model import ModelConfig

FP32 = 4
BYTES = {"fp32": 4, "bf16": 2}
SHARDS, TENSOR, CONTEXT = "shards", "tensor", "context"  # process groups
_DEFAULT = Plan()


@dataclass(frozen=True)
class Step:
    """One update with B sentence pairs of S and T tokens, without padding.

    dtype: of matrix products and attention; bf16 is autocast, with the residual stream, parameters,
    gradients and the moments of AdamW in fp32. smoothing: whether the loss smooths its targets.
    """

    config: ModelConfig
    batch: int
    source: int
    target: int
    dtype: str = "fp32"
    smoothing: bool = True

    @property
    def element(self) -> int:
        """Bytes of an element of a product."""
        return BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """The sizes of a mesh's dimensions, and the plan. accumulate: batches of an update."""

    data: int = 1
    tensor: int = 1
    context: int = 1
    plan: Plan = _DEFAULT
    accumulate: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.context

    @property
    def shards(self) -> int:
        """The ranks that share the parameters by FSDP2: data and context jointly."""
        return self.data * self.context


@dataclass(frozen=True)
class Transfer:
    """What each rank of `group` sends in `count` operations together; average over ranks."""

    group: str
    operation: str
    sent: float
    count: int = 1


def all_gather(group: str, ranks: int, whole: float, count: int = 1) -> Transfer:
    """`count` all-gathers of tensors of `whole` bytes."""
    return Transfer(group, "all_gather", count * (ranks - 1) / ranks * whole, count)


def reduce_scatter(group: str, ranks: int, whole: float, count: int = 1) -> Transfer:
    return Transfer(group, "reduce_scatter", count * (ranks - 1) / ranks * whole, count)


def all_reduce(group: str, ranks: int, whole: float, count: int = 1) -> Transfer:
    return Transfer(group, "all_reduce", count * 2 * (ranks - 1) / ranks * whole, count)


def all_to_all(group: str, ranks: int, own: float, count: int = 1) -> Transfer:
    """`count` exchanges of `own` bytes of each rank."""
    return Transfer(group, "all_to_all", count * (ranks - 1) / ranks * own, count)


def send(group: str, own: float, count: int) -> Transfer:
    """`own` bytes to the next rank, `count` times."""
    return Transfer(group, "send", count * own, count)


# -- blocks ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Attention:
    """An attention on one rank. queries, keys: of whole sequences; width: the rank's heads times
    the head dim; sentences: of the rank's data group; ranks: of the context group.
    """

    queries: int
    keys: int
    causal: bool
    width: float
    sentences: float
    ranks: int
    method: str
    element: int

    def flops(self, backward: bool) -> float:
        """Two products of each pair forward, five backward, of 2 FLOPs for each column."""
        M = self.queries
        pairs = M * (M + 1) / 2 if self.causal else M * self.keys
        return 2 * self.sentences * pairs / self.ranks * self.width * (5 if backward else 2)

    def shard(self, tokens: int) -> float:
        """Bytes of this rank's shard of one of q, k, v, out."""
        return self.sentences * tokens / self.ranks * self.width * self.element

    def transfers(self, backward: bool) -> tuple[Transfer, ...]:
        """In the context group."""
        P, both = self.ranks, 2 * self.shard(self.keys)
        if P == 1:
            return ()
        if self.method == "all_to_all":
            own = 2 * self.shard(self.queries) + both
            return (all_to_all(CONTEXT, P, own / 4, 4),)
        # Causal, in the balanced layout of 2 P chunks: no other rank needs the last chunk, and of
        # the other late chunks, half of the passes have no gradient yet.
        passed = (1 - 1 / (2 * P) if self.causal else 1.0) * both
        if not backward:
            return (send(CONTEXT, passed, P - 1),)
        gradients = (3 / 4 if self.causal else 1.0) * both / self.element * FP32
        return send(CONTEXT, passed, P - 1), send(CONTEXT, gradients, P - 1)

    def buffers(self) -> float:
        """Bytes of a ring's backward: gradients of q, k and v in fp32, and chunks of keys, values
        and their gradients, those that are held and those that arrive.
        """
        if self.ranks == 1 or self.method != "ring":
            return 0.0
        return 12 * self.shard(self.keys) / self.element * FP32

    def overlap(self) -> float:
        """The share of the computation during which a ring transfers: keys and values in all steps
        but the last, gradients in all but the first.
        """
        return (self.ranks - 1) / self.ranks if self.method == "ring" else 0.0


@dataclass(frozen=True)
class Block:
    """Embeddings and head, or a layer, on one rank.

    divided, replicated: numbers of parameters that tensor parallelism divides and does not (the
    divided ones of this rank); kept_gathered: whether FSDP2 keeps them between forward and
    backward. products: FLOPs of the matrix products forward, twice as many backward. forward,
    backward: its transfers in the tensor group. saved: bytes that it saves for the backward.
    temporary: those in use only during its backward, or in the loss. streamed: bytes that its
    memory-bound kernels read and write, forward and backward.
    """

    name: str
    divided: float
    replicated: float
    kept_gathered: bool
    products: float
    attentions: tuple[Attention, ...]
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    saved: float
    temporary: float
    streamed: tuple[float, float]

    @property
    def parameters(self) -> float:
        return self.divided + self.replicated

    def gathers(self, layout: Layout) -> Transfer:
        """Before the forward."""
        return all_gather(SHARDS, layout.shards, FP32 * self.parameters)

    def gathers_again(self, layout: Layout) -> Transfer:
        """Before the backward."""
        whole = 0.0 if self.kept_gathered else FP32 * self.parameters
        return all_gather(SHARDS, layout.shards, whole, int(not self.kept_gathered))

    def scatters(self, layout: Layout) -> Transfer:
        """Of the gradients."""
        return reduce_scatter(SHARDS, layout.shards, FP32 * self.parameters)

    def transfers(self, layout: Layout) -> list[Transfer]:
        """All of one forward and backward."""
        found = [*self.forward, *self.backward]
        found += [self.gathers(layout), self.gathers_again(layout), self.scatters(layout)]
        for attention in self.attentions:
            for backward in (False, True):
                found += attention.transfers(backward)
        return [transfer for transfer in found if transfer.sent]


# Options of models for which the formulas hold.
_USUAL = {
    "norm": "layer",
    "positions": "sinusoidal",
    "scoring": "dot",
    "memory_layers": "last",
    "decoder": "autoregressive",
    "copy": False,
    "target_vocabulary": None,
    "head_dim": None,
    "embedding_norm": False,
    "norm_first": True,
}


def blocks(step: Step, layout: Layout) -> list[Block]:
    """The blocks of one rank in the order of the forward; the head comes with the embeddings.
    Equal layers are one object.
    """
    c, b = step.config, step.element
    for name, usual in _USUAL.items():
        if getattr(c, name) != usual:
            raise ValueError(f"{name} must be {usual!r}, got {getattr(c, name)!r}")
    sentences = step.batch / layout.data
    source = sentences * step.source / layout.context  # rows of the rank
    target = sentences * step.target / layout.context
    tensor = _Tensor(layout, c.width, b)

    def attention(queries: int, keys: int, causal: bool) -> Attention:
        width = c.width / layout.tensor
        method = layout.plan.context
        return Attention(queries, keys, causal, width, sentences, layout.context, method, b)

    of_source = (attention(step.source, step.source, False),)
    of_target = (
        attention(step.target, step.target, True),
        attention(step.target, step.source, False),
    )
    encoder = _layer("encoder layer", c, tensor, source, 0.0, of_source)
    decoder = _layer("decoder layer", c, tensor, target, source, of_target)
    ends = _ends(c, tensor, source, target, 4 if step.smoothing else 3)
    return [ends, *[encoder] * c.encoder_layers, *[decoder] * c.decoder_layers]


@dataclass(frozen=True)
class _Tensor:
    """What a tensor group does with rows of the model width; `element`: bytes in a product."""

    layout: Layout
    width: int
    element: int

    @property
    def ranks(self) -> int:
        return self.layout.tensor

    @property
    def rows(self) -> bool:
        """Whether rows of the residual stream are divided."""
        return self.layout.plan.sequence and self.ranks > 1

    @property
    def vocabulary(self) -> bool:
        return self.layout.plan.vocabulary and self.ranks > 1

    def enter(self, rows: float, times: int, backward: bool) -> tuple[Transfer, ...]:
        """Before the first products of `times` sublayers; of the residual stream's fp32."""
        return self._share(all_gather, rows * self.width * FP32, times, backward, backward)

    def leave(self, rows: float, times: int, backward: bool) -> tuple[Transfer, ...]:
        """After the last products."""
        whole = rows * self.width * self.element
        return self._share(reduce_scatter, whole, times, backward, not backward)

    def _share(
        self, forward: Any, whole: float, times: int, backward: bool, sums: bool
    ) -> tuple[Transfer, ...]:
        """With rows divided, the all-gather or reduce-scatter `forward`, or its inverse; else a sum
        in one of the two directions.
        """
        if self.ranks == 1:
            return ()
        if not self.rows:
            return (all_reduce(TENSOR, self.ranks, whole, times),) if sums else ()
        inverse = reduce_scatter if forward is all_gather else all_gather
        return ((inverse if backward else forward)(TENSOR, self.ranks, whole, times),)

    def gather_rows(self, rows: float) -> tuple[Transfer, ...]:
        return (all_gather(TENSOR, self.ranks, rows * self.width * FP32),) if self.rows else ()

    def add(self, rows: float, columns: int | None = None) -> tuple[Transfer, ...]:
        """The sum of all ranks' terms of `rows` rows in fp32, of the model width or `columns`."""
        if self.ranks == 1:
            return ()
        whole = rows * FP32 * (self.width if columns is None else columns)
        return (all_reduce(TENSOR, self.ranks, whole),)

    def gradients(self, parameters: float) -> tuple[Transfer, ...]:
        """The sum of the gradients of a block's parameters that all ranks apply to their rows."""
        whole = FP32 * parameters
        return (all_reduce(TENSOR, self.ranks, whole),) if self.rows and parameters else ()


def _ffn_columns(c: ModelConfig) -> int:
    """Rows of linear1."""
    return c.ffn_width * (2 if c.activation.removesuffix("_tanh") in _GATED else 1)


_GATED = ("reglu", "geglu", "swiglu")


def _layer(
    name: str,
    c: ModelConfig,
    tensor: _Tensor,
    rows: float,
    memory: float,
    attentions: tuple[Attention, ...],
) -> Block:
    """A layer with `rows` rows and `memory` rows of memory."""
    E, F, F1, P = c.width, c.ffn_width, _ffn_columns(c), tensor.ranks
    n = len(attentions)
    weights = n * 4 * E * E + (F + F1) * E
    products = 2 * rows * (weights - (n - 1) * 2 * E * E) + 2 * memory * (n - 1) * 2 * E * E
    # Of each row: inputs of the norms, results of the norms in the dtype of products, q, k, v and
    # results of the attentions, the hidden layer; lse and statistics of the norms.
    element, divisor = tensor.element, P if tensor.rows else 1
    row = E * element
    saved = rows * (
        (n + 1) * (FP32 * E + 2 * FP32) / divisor
        + (n + 1) * row
        + ((2 * n + 2) * E + F1) * element / P
        + n * FP32 * c.heads / P
    )
    # k and v of the memory, and autocast's copy of it.
    saved += memory * (n - 1) * (2 * row / P + (row if element < FP32 else 0))
    # Copies of weights that autocast made and the backward of a product reads, which FSDP2 does not
    # free. Those of q, k and v are made again.
    saved += (element * (weights - n * 3 * E * E) if element < FP32 else 0) / P
    # Gradients of the hidden layer and of a few tensors of the model width.
    temporary = max([rows * (F1 / P + 3 * E) * element, *(a.buffers() for a in attentions)])
    replicated = (n + 1) * (1 + 2 * c.bias) * E  # norms, and biases after sums over ranks
    moved = 4 * (n + 1) * rows * E * FP32 / divisor
    return Block(
        name,
        (weights + c.bias * (n * 3 * E + F1)) / P,
        replicated,
        False,
        products / P,
        attentions,
        tensor.enter(rows, n + 1, False) + tensor.leave(rows, n + 1, False),
        tensor.enter(rows, n + 1, True)
        + tensor.leave(rows, n + 1, True)
        + tensor.gradients(replicated),
        saved,
        temporary,
        (moved, moved),
    )


def _ends(c: ModelConfig, tensor: _Tensor, source: float, target: float, terms: int) -> Block:
    """Embeddings, the last norms and the head, with the loss, which has `terms` sums of each row
    over the vocabulary: the maximum, of exponentials, the target's, and of all logits if smoothed.
    """
    E, V, P = c.width, c.vocabulary, tensor.ranks
    tables = {True: 1, "embeddings": 2, "target": 2, False: 3}[c.tied]
    columns = V / P if tensor.vocabulary else V
    norms = 2 * E * (1 + c.bias) if c.final_norm else 0
    forward: tuple[Transfer, ...] = tensor.gather_rows(source) + tensor.gather_rows(target)
    backward = forward + tensor.add(source) + tensor.gradients(norms)
    if tensor.vocabulary:
        forward += tensor.add(source) + tensor.add(target) + tensor.add(target, terms)
        backward += tensor.add(target)
    element = tensor.element
    rows = (source + target) * E * FP32
    logits = target * columns
    return Block(
        "embeddings and head",
        tables * columns * E if tensor.vocabulary else 0,
        norms + (0 if tensor.vocabulary else tables * V * E),
        True,
        2 * target * columns * E,
        (),
        forward,
        backward,
        rows + (source + target) * E * element,
        logits * 4 * FP32,  # exponentials, two terms of the gradient and their sum
        (2 * rows + logits * (2 * element + 2 * FP32), 2 * rows + logits * (3 * FP32 + element)),
    )


def sent(step: Step, layout: Layout) -> dict[tuple[str, str], float]:
    """Bytes that each rank sends in one forward and backward, by group and operation."""
    total: Counter[tuple[str, str]] = Counter()
    for block in blocks(step, layout):
        for transfer in block.transfers(layout):
            total[transfer.group, transfer.operation] += transfer.sent  # type: ignore[assignment]
    return dict(total)


# AdamW reads parameter, gradient and both moments, and writes all but the gradient.
OPTIMIZER_BYTES = 7 * FP32


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at the peak of a step.

    states: its shards of the parameters, of AdamW's moments and of gradients; gathered: parameters
    and gradients of whole blocks; saved: for the backward; temporary: of the loss or a backward.
    """

    states: float
    gathered: float
    saved: float
    temporary: float

    @property
    def total(self) -> float:
        return self.states + self.gathered + self.saved + self.temporary


def memory(step: Step, layout: Layout) -> Memory:
    """The highest of: in the loss, when all is saved; in the backward of the last layer; at the end
    of the backward, when all gradients exist.
    """
    ends, *layers = blocks(replace(step, batch=step.batch // layout.accumulate), layout)
    shards = layout.shards
    own = FP32 * (ends.parameters + sum(layer.parameters for layer in layers)) / shards
    saved = ends.saved + sum(layer.saved for layer in layers)
    # Without FSDP2 a block's parameters are its own shard, and only gradients are copied.
    held, copies = (1, 3) if shards > 1 else (0, 1)
    whole = FP32 * held * ends.parameters
    last = layers[-1] if layers else ends
    # Until the first batch's backward there are no gradients.
    states = (3 if layout.accumulate == 1 else 4) * own
    found = [
        Memory(states, whole, saved, ends.temporary),
        Memory(states, whole + FP32 * copies * last.parameters, saved, last.temporary),
        Memory(4 * own, FP32 * copies * ends.parameters, 0.0, 0.0),
    ]
    return max(found, key=lambda memory: memory.total)


def refusal(step: Step, layout: Layout) -> str | None:
    """Why a layout is impossible, as `parallelize` says it; None if it is possible."""
    c, P, C = step.config, layout.tensor, layout.context
    divisors = {
        "heads": (c.heads, P),
        "the feed-forward network": (c.ffn_width, P),
        "the vocabulary": (c.vocabulary, P if layout.plan.vocabulary else 1),
        "source tokens": (step.source, C * (P if layout.plan.sequence else 1)),
        "target tokens": (step.target, 2 * C * (P if layout.plan.sequence else 1)),
        "sentences": (step.batch, layout.data * layout.accumulate),
    }
    if layout.plan.context == "all_to_all":
        divisors["heads of a rank"] = (c.heads // P, C)
    for name, (size, divisor) in divisors.items():
        if size % divisor:
            return f"{name}: {size} is not divided by {divisor}"
    return None
