"""The token model: embeddings, positions, a Transformer and an output head.

`Seq2SeqTransformer(config)` takes the Transformer's class as a second argument:
`fastattn.nn.Transformer` or `torch.nn.Transformer`. Parameter names, shapes and initial values
are the same for both, so a checkpoint of one loads into the other.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn.functional import linear_runs_torch
from fastattn.nn import (
    GatedActivation,
    LayerNorm,
    LearnedPositionalEncoding,
    RMSNorm,
    SinusoidalPositionalEncoding,
    Transformer,
)
from fastattn.nn.fusion import is_unmodified, linear
from fastattn.nn.packing import Packing
from fastattn.nn.positional_attention import set_positions
from fastattn.nn.power_norm import PowerNorm, TokenBatchNorm, real_tokens
from fastattn.nn.relative import make_positions
from fastattn.nn.scoring import SCORES, ScoredMultiheadAttention
from fastattn.nn.sharding import TokenModelParts, sharding_of

from . import losses
from .data import END, PAD, Batch
from .pointer_generator import PointerGenerator

ENCODINGS = {"sinusoidal": SinusoidalPositionalEncoding, "learned": LearnedPositionalEncoding}
POSITIONS = (*ENCODINGS, "alibi", "t5", "rotary")
NORMS = ("layer", "rms", "power", "batch")
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
    **{name: partial(GatedActivation, name) for name in GatedActivation.functions},
}
MEMORY_LAYERS = ("last", "same")
DECODERS = ("autoregressive", "non-autoregressive")
LENGTHS = ("predictor", "end")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a model.

    One vocabulary serves both languages. `max_length` bounds the tokens of a sentence, END
    included.

    Attributes:
        activation: of the feed-forward networks: "relu", "gelu", "gelu_tanh", "silu", or gated
            "reglu", "geglu", "geglu_tanh", "swiglu", with `ffn_width` columns for gate and up each.
        positions: "sinusoidal" and "learned" are added to the embeddings; "alibi", "t5" and
            "rotary" enter the scores of the self-attentions.
        tied: source embedding, target embedding and output head share one matrix.
        memory_layers: which encoder layer each decoder layer reads. "last": the last one, as
            usual; "same": the one with its own index (He et al. 2018).
        norm: "layer" or "rms"; "power" and "batch" normalise over tokens, for comparison.
        scoring: the score of queries and keys: "dot", "additive" or "cosine".
        copy: add a pointer-generator head, which can copy source tokens.
        decoder: "non-autoregressive" predicts all target tokens in parallel.
        length: the target length of such a decoder: from a "predictor", or by cutting a result of
            the maximum length at its first "end".
    """

    vocabulary: int
    width: int = 256
    heads: int = 4
    encoder_layers: int = 3
    decoder_layers: int = 3
    ffn_width: int = 1024
    dropout: float = 0.1
    activation: str = "relu"
    norm_first: bool = True
    tied: bool = True
    positions: str = "sinusoidal"
    max_length: int = 128
    memory_layers: str = "last"
    norm: str = "layer"
    scoring: str = "dot"
    copy: bool = False
    decoder: str = "autoregressive"
    length: str = "predictor"

    def __post_init__(self) -> None:
        if self.vocabulary <= END:
            raise ValueError(f"vocabulary must be at least {END + 1}, got {self.vocabulary}")
        for name in ("width", "heads", "ffn_width", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("encoder_layers", "decoder_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width {self.width}, got {self.heads}")
        for name, known in (
            ("tied", (False, True)),
            ("activation", tuple(ACTIVATIONS)),
            ("positions", POSITIONS),
            ("memory_layers", MEMORY_LAYERS),
            ("norm", NORMS),
            ("scoring", SCORES),
            ("decoder", DECODERS),
            ("length", LENGTHS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        if self.positions not in ENCODINGS and self.scoring != "dot":
            raise ValueError(
                f"scoring must be 'dot' with positions={self.positions!r}, got {self.scoring!r}"
            )
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise ValueError(
                f"heads must divide width {self.width} into even parts with positions='rotary', "
                f"got {self.heads}"
            )

    def memory_numbers(self) -> list[int]:
        """The encoder layer that each decoder layer reads, counted from 1."""
        last = self.encoder_layers
        if self.memory_layers == "last":
            return [last] * self.decoder_layers
        return [min(number, last) for number in range(1, self.decoder_layers + 1)]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        values = json.loads(text)
        known = {field.name for field in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"model configuration keys must be in {sorted(known)}, got {unknown}")
        return cls(**values)


@dataclass(frozen=True)
class Memory:
    """An encoded batch: the input of each decoder layer, and the source ids."""

    layers: list[Tensor]  # [B, S, width] for each decoder layer
    source: Tensor  # [B, S] int64
    padding: Tensor  # [B, S] bool, True = padding
    output: Tensor  # [B, S, width], of the last encoder layer
    copy_keys: Tensor | None = None  # [B, S, width], keys of the copying head

    def lengths(self) -> Tensor:
        """The number of real tokens of each source, int64 [B]; padding is on the right."""
        return (~self.padding).sum(dim=1)

    def repeat(self, times: int) -> Memory:
        """Each sentence repeated `times` times in succession."""
        if times == 1:
            return self
        return self._map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    def padded(self, size: int) -> Memory:
        """A copy padded to `size` source tokens."""
        S = self.source.shape[1]

        def longer(tensor: Tensor) -> Tensor:
            filling = {torch.int64: PAD, torch.bool: True}.get(tensor.dtype, 0.0)
            sides = (0, size - S) if tensor.dim() == 2 else (0, 0, 0, size - S)
            return F.pad(tensor, sides, value=filling) if size > S else tensor.clone()

        return self._map(longer)

    def copy_from(self, other: Memory) -> None:
        """Copy the values of another memory of the same sizes."""
        for target, source in zip(self._tensors(), other._tensors(), strict=True):
            target.copy_(source)

    def _tensors(self) -> list[Tensor]:
        keys = [] if self.copy_keys is None else [self.copy_keys]
        return [*self.layers, self.source, self.padding, self.output, *keys]

    def _map(self, function: Callable[[Tensor], Tensor]) -> Memory:
        done: dict[int, Tensor] = {}  # most layers share one tensor

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = function(tensor)
            return done[id(tensor)]

        return Memory(
            [once(layer) for layer in self.layers],
            once(self.source),
            once(self.padding),
            once(self.output),
            None if self.copy_keys is None else once(self.copy_keys),
        )


class Seq2SeqTransformer(nn.Module):
    """Encoder-decoder over token ids; forward returns the logits of the next target token."""

    def __init__(
        self, config: ModelConfig, transformer_class: type[nn.Transformer] = Transformer
    ) -> None:
        super().__init__()
        _check_transformer_class(config, transformer_class)
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        if not config.tied:
            self.target_embedding = nn.Embedding(config.vocabulary, config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.positions = _make_encoding(config)
        with warnings.catch_warnings():
            # torch warns that norm_first disables its nested tensors, which are not used here.
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            self.transformer = transformer_class(
                d_model=config.width,
                nhead=config.heads,
                num_encoder_layers=config.encoder_layers,
                num_decoder_layers=config.decoder_layers,
                dim_feedforward=config.ffn_width,
                dropout=config.dropout,
                activation=config.activation if config.activation in ("relu", "gelu") else "relu",
                batch_first=True,
                norm_first=config.norm_first,
            )
        _use_activation(self.transformer, config)
        _use_positions(self.transformer, config)
        _use_norm(self.transformer, config)
        _use_scoring(self.transformer, config.scoring)
        self.copying = PointerGenerator(config.width) if config.copy else None
        self._memory_numbers = config.memory_numbers()
        # Embeddings scaled by sqrt(width) have variance 1 at first; so have the head's logits.
        for module in self.children():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=config.width**-0.5)

    def forward(self, source: Tensor, target_in: Tensor, source_padding: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary] for ids [B, S] and [B, T]; padding True = padded.

        Targets need no padding mask: padding is on the right, where the causal mask hides it from
        every real token, and the loss ignores its rows.
        """
        return self.logits(*self.hidden(source, target_in, source_padding))

    def hidden(
        self, source: Tensor, target_in: Tensor, source_padding: Tensor
    ) -> tuple[Tensor, Memory | None]:
        """Return the arguments of `logits`: the decoder's output [B, T, width], and the memory."""
        if self._reads_last_layer() and self.copying is None:
            sharding = sharding_of(self)
            source, target_in, source_padding, *starts = sharding.batch(
                source, target_in, source_padding, PAD
            )
            with self._norms_skip_padding(source_padding, target_in != PAD):
                hidden = self.transformer(
                    self.embed_source(source, start=starts[0]),
                    self.embed_target(target_in, start=starts[1]),
                    tgt_mask=_causal_mask(target_in, sharding.key_shards),
                    tgt_is_causal=True,
                    src_key_padding_mask=source_padding,
                    memory_key_padding_mask=source_padding,
                )
            return hidden, None
        memory = self.encode(source, source_padding)
        return self.decode(target_in, memory), memory

    def forward_packed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits [T, vocabulary] and targets [T] of the T real target tokens of a batch.

        Layers and head run only on real tokens. Raises ValueError if `cannot_pack`.
        """
        hidden, targets = self.hidden_packed(batch)
        return self.logits(hidden), targets

    def hidden_packed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`forward_packed` with the decoder's output [T, width] in place of logits."""
        if why := self.cannot_pack():
            raise ValueError(f"packed execution is not supported for a model that {why}")
        hidden = self.transformer(
            self.embed_source(batch.source),
            self.embed_target(batch.target_in),
            tgt_mask=_causal_mask(batch.target_in),
            tgt_is_causal=True,
            src_lengths=batch.source_lengths,
            tgt_lengths=batch.target_lengths,
        )
        real = Packing.of(hidden, batch.target_lengths, True, "target_in", "target_lengths")
        return real.pack(hidden), real.pack(batch.target_out[..., None])[:, 0]

    def has_head_loss(self, rows: int) -> bool:
        """Whether `head_loss` should compute the loss of this many rows: with torch >= 2.13 in fp32
        on a CPU, if logits would take much memory and `linear` runs PyTorch's product.
        """
        weight = self._head_weight()
        return (
            hasattr(nn, "LinearCrossEntropyOptions")
            and self.copying is None
            and is_unmodified(self, Seq2SeqTransformer)
            and self._compiled_call_impl is None
            and weight.is_cpu
            and weight.dtype is torch.float32
            and rows * len(weight) > losses.CHUNK
            and not torch.is_autocast_enabled("cpu")
            and linear_runs_torch(weight)
        )

    def head_loss(self, hidden: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """Return the cross-entropy of the logits of `hidden`, without all logits in memory."""
        return losses.linear_cross_entropy(
            hidden, self._head_weight(), targets, smoothing=smoothing, ignore_index=PAD
        )

    def cannot_pack(self) -> str | None:
        """Why `forward_packed` does not support this model, phrased to follow "a model that"."""
        if not isinstance(self.transformer, Transformer):
            return f"has a {type(self.transformer).__module__}.Transformer"
        if self.copying is not None:
            return "copies source tokens"
        if not self._reads_last_layer():
            return f"reads the encoder's layers {self.config.memory_layers}"
        if self.config.norm not in ("layer", "rms"):
            return f"has {self.config.norm} norms"
        if sharding_of(self).key_shards > 1:
            return "divides sequences among processes"
        return None

    def parallel_parts(self) -> TokenModelParts:
        """The parts that `fastattn.distributed.parallelize` divides among processes."""
        refused = {}
        if self.config.decoder != "autoregressive":
            refused = dict.fromkeys(("data", "tensor", "context"), "predicts tokens in parallel")
        elif not self._reads_last_layer():
            why = f"reads the encoder's layers {self.config.memory_layers}"
            refused = dict.fromkeys(("tensor", "context"), why)
        elif self.copying is not None:
            kinds = ("vocabulary", "sequence", "context")
            refused = dict.fromkeys(kinds, "copies source tokens")
        rows = ("embedding.weight", "target_embedding.weight", "head.weight")
        known = dict(self.named_parameters())
        return TokenModelParts(
            transformer="transformer",
            vocabulary=tuple(name for name in rows if name in known),
            dropouts=() if self.positions is None else ("positions.dropout",),
            methods=("forward_packed",),
            max_length=self.config.max_length if self.config.positions in ENCODINGS else None,
            refused=refused,
        )

    def _reads_last_layer(self) -> bool:
        """Whether every decoder layer reads the last encoder layer."""
        return set(self._memory_numbers) <= {self.config.encoder_layers}

    def encode(self, source: Tensor, source_padding: Tensor) -> Memory:
        """Return the inputs of the decoder's layers."""
        encoder, x = self.transformer.encoder, self.embed_source(source)
        wanted, last = self._memory_numbers, self.config.encoder_layers
        with self._norms_skip_padding(source_padding):
            if self._reads_last_layer():
                output = encoder(x, src_key_padding_mask=source_padding)
                layers = [output] * len(wanted)
            else:
                outputs = {}
                for number, layer in enumerate(encoder.layers, start=1):
                    x = layer(x, src_key_padding_mask=source_padding)
                    if number in wanted or number == last:
                        outputs[number] = x if encoder.norm is None else encoder.norm(x)
                output, layers = outputs[last], [outputs[number] for number in wanted]
        keys = None if self.copying is None else self.copying.keys(output)
        return Memory(layers, source, source_padding, output, keys)

    def decode(self, target_in: Tensor, memory: Memory) -> Tensor:
        """Return the decoder's output [B, T, width] for every prefix of `target_in`."""
        masks = {"tgt_mask": _causal_mask(target_in), "tgt_is_causal": True}
        real = target_in != PAD
        return self._run_decoder(self.embed_target(target_in), memory, real, masks)

    def _run_decoder(
        self, x: Tensor, memory: Memory, real: Tensor, masks: dict[str, Any]
    ) -> Tensor:
        """The decoder's layers, each with its own memory."""
        decoder = self.transformer.decoder
        masks = {**masks, "memory_key_padding_mask": memory.padding}
        with self._norms_skip_padding(memory.padding, real):
            if all(layer is memory.output for layer in memory.layers):
                return decoder(x, memory.output, **masks)
            for layer, read in zip(decoder.layers, memory.layers, strict=True):
                x = layer(x, read, **masks)
            return x if decoder.norm is None else decoder.norm(x)

    def embed_source(self, source: Tensor, *, start: int | Tensor = 0) -> Tensor:
        """Embed source ids [B, S] at positions `start`, `start + 1`, ..."""
        return self._embed(self.embedding, source, start=start)

    def embed_target(self, target: Tensor, *, start: int | Tensor = 0) -> Tensor:
        """Embed target ids [B, T] at positions `start`, `start + 1`, ...

        start: as the `offset` of a positional encoding, an int or a tensor on the device.
        """
        embedding = self.embedding if self.config.tied else self.target_embedding
        return self._embed(embedding, target, start=start)

    def logits(self, hidden: Tensor, memory: Memory | None = None) -> Tensor:
        """Return logits [B, T, vocabulary]. A copying head needs the memory, and its logits are
        log-probabilities.
        """
        weight, hidden = self._head_weight(), sharding_of(self).shared(hidden)
        logits = linear(hidden, weight, None)
        if self.copying is None:
            return logits
        if memory is None or memory.copy_keys is None:
            raise ValueError("memory must be the result of encode, for a model that copies")
        return self.copying(
            hidden, logits, memory.output, memory.copy_keys, memory.source, memory.padding
        )

    @contextmanager
    def _norms_skip_padding(
        self, source_padding: Tensor, real_target: Tensor | None = None
    ) -> Iterator[None]:
        """Within this context, norms over tokens ignore padding."""
        if self.config.norm in ("layer", "rms"):
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(real_tokens(self.transformer.encoder, ~source_padding))
            if real_target is not None:
                stack.enter_context(real_tokens(self.transformer.decoder, real_target))
            yield

    def _head_weight(self) -> Tensor:
        return (self.embedding if self.config.tied else self.head).weight

    def _embed(self, embedding: nn.Embedding, tokens: Tensor, *, start: int | Tensor = 0) -> Tensor:
        x = embedding(tokens) * math.sqrt(self.config.width)
        if self.positions is not None:
            return self.positions(x, offset=start)  # after dropout
        return sharding_of(self).dropout(x, self.config.dropout, self.training)


def _check_transformer_class(config: ModelConfig, transformer_class: type[nn.Transformer]) -> None:
    if issubclass(transformer_class, Transformer):
        return
    for name, usual in (
        ("activation", ("relu", "gelu")),
        ("norm", ("layer",)),
        ("scoring", ("dot",)),
        ("positions", tuple(ENCODINGS)),
    ):
        if getattr(config, name) not in usual:
            # torch's layers read their children's weights directly and would ignore these options.
            wanted = " or ".join(map(repr, usual))
            raise ValueError(
                f"{name} must be {wanted} with {transformer_class.__module__}."
                f"{transformer_class.__name__}, got {getattr(config, name)!r}"
            )


def _use_positions(transformer: nn.Transformer, config: ModelConfig) -> None:
    if config.positions in ENCODINGS:
        return
    causal = config.decoder == "autoregressive"
    for stack, own in ((transformer.encoder, False), (transformer.decoder, causal)):
        kind: Any = config.positions
        positions = make_positions(kind, config.width, config.heads, causal=own)
        set_positions(stack, positions)


def _make_encoding(config: ModelConfig) -> nn.Module | None:
    """The positions added to the embeddings, with their dropout."""
    made = ENCODINGS.get(config.positions)
    return None if made is None else made(config.width, config.max_length, config.dropout)


def _make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layer":
        return LayerNorm(config.width)
    if config.norm == "rms":
        return RMSNorm(config.width, 1e-5)
    return {"power": PowerNorm, "batch": TokenBatchNorm}[config.norm](config.width)


def _use_activation(transformer: nn.Transformer, config: ModelConfig) -> None:
    """Replace the activation of the layers by one that torch's constructor has no name for."""
    if config.activation in ("relu", "gelu"):
        return
    for layer in (*transformer.encoder.layers, *transformer.decoder.layers):
        layer.activation = ACTIVATIONS[config.activation]()
        if isinstance(layer.activation, GatedActivation):
            layer.linear1 = nn.Linear(config.width, 2 * config.ffn_width)
            nn.init.xavier_uniform_(layer.linear1.weight)


def _use_norm(transformer: nn.Transformer, config: ModelConfig) -> None:
    if config.norm == "layer":
        return
    for parent in list(transformer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.LayerNorm):
                setattr(parent, name, _make_norm(config))


def _use_scoring(transformer: nn.Transformer, scoring: str) -> None:
    if scoring == "dot":
        return
    for parent in list(transformer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                scored = ScoredMultiheadAttention(
                    child.embed_dim, child.num_heads, child.dropout, scoring=scoring
                )
                setattr(parent, name, scored)


def _causal_mask(target_in: Tensor, key_shards: int = 1) -> Tensor:
    """The mask that torch's `is_causal` refers to; with several shards of keys, its shape alone."""
    length = target_in.shape[1]
    blocked = torch.ones(length, length * key_shards, dtype=torch.bool, device=target_in.device)
    return blocked.triu(1)


@contextmanager
def record_attention(
    model: Seq2SeqTransformer, *, only: str = "", differentiable: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Collect the attention weights of every layer while the block runs the model.

    Yields a dict from module name, such as `decoder.layers.0.multihead_attn`, to the weights of
    its last call, [B, H, M, N], not averaged over heads. Hooks request the weights from each
    attention module, so the fused paths are off within the block. `only` selects modules whose name
    ends with it; `differentiable` keeps the weights' graph.
    """
    weights: dict[str, Tensor] = {}

    def request_weights(
        module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
            weights[name] = output[1] if differentiable else output[1].detach()

        return hook

    handles = []
    for name, module in model.transformer.named_modules():
        if isinstance(module, nn.MultiheadAttention) and name.endswith(only):
            handles.append(module.register_forward_pre_hook(request_weights, with_kwargs=True))
            handles.append(module.register_forward_hook(keep(name)))
    try:
        yield weights
    finally:
        for handle in handles:
            handle.remove()
