"""The whole encoder-decoder in one file, in textbook order, in plain torch functions.

Nothing here is fused or fast: the other modules are tested against it. Batch comes first, masks are
boolean with True = blocked as in `torch.nn`, and a query with no allowed key gets a zero context.
Parameter names are those of `torch.nn.Transformer`, so one `state_dict` loads into both.

Shapes: B batch, S source length, T target length, H heads, D head dim, E = H * D model size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The sizes and options that all layers of one model share; names and defaults are torch's."""

    d_model: int = 512
    nhead: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    dim_feedforward: int = 2048
    dropout: float = 0.1
    activation: str = "relu"
    layer_norm_eps: float = 1e-5
    norm_first: bool = False
    bias: bool = True


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, dropout: nn.Module
) -> Tensor:
    """q [B, H, M, D], k and v [B, H, N, D], allowed broadcast to [B, H, M, N] -> [B, H, M, D]."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # [B, H, M, N]
    # exp(finfo.min - max) is 0 beside an allowed score; `* allowed` is for rows without one.
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1) * allowed
    return dropout(weights) @ v


class MultiheadAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        E = config.d_model
        self.nhead = config.nhead
        self.in_proj_weight = nn.Parameter(torch.empty(3 * E, E))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * E)) if config.bias else None
        self.out_proj = nn.Linear(E, E, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def split_heads(self, x: Tensor) -> Tensor:
        B, S, E = x.shape
        return x.view(B, S, self.nhead, E // self.nhead).transpose(1, 2)  # [B, H, S, D]

    def forward(
        self, query: Tensor, memory: Tensor, mask: Tensor | None, padding: Tensor | None
    ) -> Tensor:
        """query [B, M, E], memory [B, N, E]; mask [M, N], padding [B, N], both True = blocked."""
        w_q, w_k, w_v = self.in_proj_weight.chunk(3)
        b_q, b_k, b_v = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q = self.split_heads(nn.functional.linear(query, w_q, b_q))
        k = self.split_heads(nn.functional.linear(memory, w_k, b_k))
        v = self.split_heads(nn.functional.linear(memory, w_v, b_v))

        allowed = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool, device=query.device)
        if mask is not None:
            allowed = allowed & ~mask
        if padding is not None:
            allowed = allowed & ~padding[:, None, None, :]
        context = scaled_dot_product_attention(q, k, v, allowed, self.dropout)
        return self.out_proj(context.transpose(1, 2).flatten(2))  # [B, M, E]


class Layer(nn.Module):
    """The part common to both layers: the feed-forward network, and residual, dropout and norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = MultiheadAttention(config)
        self.linear1 = nn.Linear(config.d_model, config.dim_feedforward, bias=config.bias)
        self.linear2 = nn.Linear(config.dim_feedforward, config.d_model, bias=config.bias)
        self.norm1 = nn.LayerNorm(config.d_model, config.layer_norm_eps, bias=config.bias)
        self.norm2 = nn.LayerNorm(config.d_model, config.layer_norm_eps, bias=config.bias)
        self.activation = {"relu": torch.relu, "gelu": nn.functional.gelu}[config.activation]
        self.dropout = nn.Dropout(config.dropout)
        self.norm_first = config.norm_first

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def sublayer(self, x: Tensor, norm: nn.Module, function: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x + self.dropout(function(norm(x)))
        return norm(x + self.dropout(function(x)))


class EncoderLayer(Layer):
    def forward(self, x: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor:
        x = self.sublayer(x, self.norm1, lambda x: self.self_attn(x, x, mask, padding))
        return self.sublayer(x, self.norm2, self.feed_forward)


class DecoderLayer(Layer):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multihead_attn = MultiheadAttention(config)
        self.norm3 = nn.LayerNorm(config.d_model, config.layer_norm_eps, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None,
        memory_mask: Tensor | None,
        padding: Tensor | None,
        memory_padding: Tensor | None,
    ) -> Tensor:
        def attend_memory(x: Tensor) -> Tensor:
            return self.multihead_attn(x, memory, memory_mask, memory_padding)

        x = self.sublayer(x, self.norm1, lambda x: self.self_attn(x, x, mask, padding))
        x = self.sublayer(x, self.norm2, attend_memory)
        return self.sublayer(x, self.norm3, self.feed_forward)


class Stack(nn.Module):
    """Layers in sequence, followed by a norm."""

    def __init__(self, config: Config, kind: type[Layer], num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(config) for _ in range(num_layers))
        self.norm = nn.LayerNorm(config.d_model, config.layer_norm_eps, bias=config.bias)

    def forward(self, x: Tensor, *rest: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return self.norm(x)


class Transformer(nn.Module):
    """`Transformer(Config(...))`; the `state_dict` is that of `torch.nn.Transformer`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.encoder = Stack(config, EncoderLayer, config.num_encoder_layers)
        self.decoder = Stack(config, DecoderLayer, config.num_decoder_layers)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """src [B, S, E], tgt [B, T, E] -> [B, T, E]."""
        memory = self.encoder(src, src_mask, src_key_padding_mask)
        return self.decoder(
            tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        )
