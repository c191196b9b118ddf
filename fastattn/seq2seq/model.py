"""The token model: embeddings, positions, a Transformer and an output head.

`Seq2SeqTransformer(config)` takes the Transformer's class as a second argument:
`fastattn.nn.Transformer` or `torch.nn.Transformer`. Parameter names, shapes and initial values
are the same for both, so a checkpoint of one loads into the other.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn.nn import LearnedPositionalEncoding, SinusoidalPositionalEncoding, Transformer

POSITIONS = ("sinusoidal", "learned")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of a `Seq2SeqTransformer`.

    One vocabulary serves both languages. `tied` uses one matrix as source embedding, target
    embedding and output head. `max_length` bounds the tokens of a sentence, END included.
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

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "heads", "ffn_width", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("encoder_layers", "decoder_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width {self.width}, got {self.heads}")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {POSITIONS}, got {self.positions!r}")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        values = json.loads(text)
        known = {field.name for field in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"a model configuration has the keys {sorted(known)}, got {unknown}")
        return cls(**values)


class Seq2SeqTransformer(nn.Module):
    """Encoder-decoder over token ids; forward returns the logits of the next target token."""

    def __init__(
        self, config: ModelConfig, transformer_class: type[nn.Transformer] = Transformer
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        if not config.tied:
            self.target_embedding = nn.Embedding(config.vocabulary, config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        encoding = (
            SinusoidalPositionalEncoding
            if config.positions == "sinusoidal"
            else LearnedPositionalEncoding
        )
        self.positions = encoding(
            config.width, max_length=config.max_length, dropout=config.dropout
        )
        with warnings.catch_warnings():
            # torch remarks that its nested-tensor path is off with norm_first; nothing is lost.
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            self.transformer = transformer_class(
                d_model=config.width,
                nhead=config.heads,
                num_encoder_layers=config.encoder_layers,
                num_decoder_layers=config.decoder_layers,
                dim_feedforward=config.ffn_width,
                dropout=config.dropout,
                activation=config.activation,
                batch_first=True,
                norm_first=config.norm_first,
            )
        # Scaled by sqrt(width), embeddings start with variance 1; as a head, logits do.
        for module in self.children():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=config.width**-0.5)

    def forward(self, source: Tensor, target_in: Tensor, source_padding: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary] for ids [B, S] and [B, T]; padding True = padded.

        Targets need no padding mask: padding stands on the right, where the causal mask hides it
        from every real token, and the loss ignores its rows.
        """
        hidden = self.transformer(
            self.embed_source(source),
            self.embed_target(target_in),
            tgt_mask=_causal_mask(target_in),
            tgt_is_causal=True,
            src_key_padding_mask=source_padding,
            memory_key_padding_mask=source_padding,
        )
        return self.logits(hidden)

    def encode(self, source: Tensor, source_padding: Tensor) -> Tensor:
        """Return the encoder's output [B, S, width]."""
        return self.transformer.encoder(
            self.embed_source(source), src_key_padding_mask=source_padding
        )

    def decode(self, target_in: Tensor, memory: Tensor, source_padding: Tensor) -> Tensor:
        """Return the decoder's output [B, T, width] for every prefix of `target_in`."""
        return self.transformer.decoder(
            self.embed_target(target_in),
            memory,
            tgt_mask=_causal_mask(target_in),
            tgt_is_causal=True,
            memory_key_padding_mask=source_padding,
        )

    def embed_source(self, source: Tensor) -> Tensor:
        return self._embed(self.embedding, source)

    def embed_target(self, target: Tensor, *, start: int = 0) -> Tensor:
        """Embed target ids [B, T] that stand at positions `start`, `start + 1`, ..."""
        return self._embed(
            self.embedding if self.config.tied else self.target_embedding, target, start=start
        )

    def logits(self, hidden: Tensor) -> Tensor:
        weight = self.embedding.weight if self.config.tied else self.head.weight
        return F.linear(hidden, weight)

    def _embed(self, embedding: nn.Embedding, tokens: Tensor, *, start: int = 0) -> Tensor:
        x = embedding(tokens) * math.sqrt(self.config.width)
        return self.positions(x, offset=start)


def _causal_mask(target_in: Tensor) -> Tensor:
    length = target_in.shape[1]
    blocked = torch.ones(length, length, dtype=torch.bool, device=target_in.device)
    return blocked.triu(1)


@contextmanager
def record_attention(model: Seq2SeqTransformer) -> Iterator[dict[str, Tensor]]:
    """Collect the attention weights of every layer while the block runs the model.

    Yields a dict from module name, such as `decoder.layers.0.multihead_attn`, to the weights of
    its last call, [B, H, M, N] with the heads apart. Works by hooks that ask each attention module
    for its weights, so the fused paths are off inside the block.
    """
    weights: dict[str, Tensor] = {}

    def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
            weights[name] = output[1].detach()

        return hook

    handles = []
    for name, module in model.transformer.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            handles.append(module.register_forward_pre_hook(ask, with_kwargs=True))
            handles.append(module.register_forward_hook(keep(name)))
    try:
        yield weights
    finally:
        for handle in handles:
            handle.remove()
