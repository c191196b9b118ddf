"""The blocks and layers of the Transformer, as functions over torch's modules.

A layer is a sequence of blocks: attention or feed-forward network, dropout, residual, norm. A block
runs as fused ops if its modules are unmodified (see `fusion`), else as torch composes it:
`_sa_block`, `_mha_block`, `_ff_block` and the norms, called as modules. The same layer functions
serve padded batches, packed batches and single decoding steps, which differ in what the attention
reads.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fastattn import functional
from fastattn.nn.attention import (
    attend,
    attention_context,
    is_supported,
    merge_heads,
    project_heads,
    project_in,
)
from fastattn.nn.decoding import DecoderCache, LayerCache, Step
from fastattn.nn.feed_forward import fused_activation
from fastattn.nn.fusion import (
    DropoutStreams,
    active_p,
    attribute,
    inherits,
    is_unmodified,
    linear,
    weight_and_bias,
)
from fastattn.nn.norm import can_fuse, fused_add_norm, fused_add_norm_and_sum
from fastattn.nn.packing import Packing, packed_context
from fastattn.nn.positional_attention import attention_classes, positions_of
from fastattn.nn.sharding import dropout_and_sum, sharding_of

# Input of a block -> the attention's context before its output projection, None if not supported.
Context = Callable[[Tensor], Tensor | None]
# The same block as torch composes it, dropout included.
Block = Callable[[Tensor], Tensor]
Layer: TypeAlias = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


def fused_context(
    attention: nn.Module,
    query: Tensor,
    memory: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
    streams: DropoutStreams,
) -> Tensor | None:
    """The attention's context before its output projection; None if the module must be called."""
    name = "self_attn" if query is memory else "multihead_attn"
    if not is_unmodified(attention, *attention_classes(name)):
        return None
    shards = streams.sharding.key_shards
    if not is_supported(attention, query, memory, memory, padding, mask, shards):  # type: ignore[arg-type]
        return None
    return attention_context(
        attention,  # type: ignore[arg-type]
        query,
        memory,
        memory,
        padding,
        mask,
        is_causal,
        streams,
        positions_of(attention),
    )


def _attention_block(
    layer: Layer,
    attention: nn.MultiheadAttention,
    x: Tensor,
    y: Tensor,
    context: Context,
    block: Block,
    dropout: nn.Module,
    norm: nn.Module,
    streams: DropoutStreams,
) -> tuple[Tensor, Tensor]:
    """x is the residual stream, y the attention's input -> x and y for the next block.

    Post-norm: both are one tensor, and `norm` is this block's. Pre-norm: y is normalised, and
    `norm` is that of the next block.
    """
    sharding, fusable = streams.sharding, can_fuse(dropout, norm)
    heads = context(sharding.enter(y)) if is_unmodified(dropout, nn.Dropout) else None
    if heads is None:
        _require_whole(layer, "attention", streams)
        x = x + block(y)
        y = norm(x)
        return (x, y) if layer.norm_first else (y, y)
    weight, bias = weight_and_bias(attribute(attention, "out_proj"))
    product = sharding.leave(linear(heads, weight))  # its bias is added with the residual
    if not fusable:
        p = active_p(dropout)
        x = dropout_and_sum(product, bias, x, p, streams.take(p))
        y = norm(x)
        return (x, y) if layer.norm_first else (y, y)
    if layer.norm_first:
        y, x = fused_add_norm_and_sum(product, bias, x, dropout, norm, streams)
        return x, y
    x = fused_add_norm(product, bias, x, dropout, norm, streams)
    return x, x


def _feed_forward_block(
    layer: Layer,
    x: Tensor,
    y: Tensor,
    dropout: nn.Module,
    norm: nn.Module | None,
    streams: DropoutStreams,
) -> Tensor:
    """x + dropout(ffn(y)), then `norm` if it is given (post-norm)."""
    sharding = streams.sharding
    linear1, inner, linear2 = layer.linear1, layer.dropout, layer.linear2
    base = (
        nn.TransformerEncoderLayer
        if isinstance(layer, nn.TransformerEncoderLayer)
        else nn.TransformerDecoderLayer
    )
    activation = None
    if inherits(layer, base, "_ff_block") and is_unmodified(dropout, nn.Dropout):
        activation = fused_activation(linear1, layer.activation, inner, linear2)
    if activation is None:
        _require_whole(layer, "feed-forward network", streams)
        x = x + layer._ff_block(y)
        return x if norm is None else norm(x)
    # The op adds bias and residual too, unless a norm or a sum over processes comes before them.
    whole = norm is None and sharding.whole
    p, output_p = active_p(inner), active_p(dropout)
    (weight1, bias1), (weight2, bias2) = weight_and_bias(linear1), weight_and_bias(linear2)
    result = functional.ffn(
        sharding.enter(y),
        weight1,
        bias1,
        weight2,
        bias2 if whole else None,
        activation,
        dropout_p=p,
        output_dropout_p=output_p if whole else 0.0,
        residual=x if whole else None,
        **streams.take(p, output_p if whole else 0.0, of="hidden"),
    )
    if whole:
        return result
    result = sharding.leave(result)
    if norm is not None and can_fuse(dropout, norm):
        return fused_add_norm(result, bias2, x, dropout, norm, streams)
    x = dropout_and_sum(result, bias2, x, output_p, streams.take(output_p))
    return x if norm is None else norm(x)


def _require_whole(layer: Layer, block: str, streams: DropoutStreams) -> None:
    """Raises for a block that must run unfused if its modules hold shares of the weights."""
    if not streams.sharding.whole:
        raise NotImplementedError(
            f"the {block} of a layer that several processes share must be fused, got modules, "
            f"inputs or masks that its ops do not support: {layer}"
        )


def encoder_layer(
    layer: nn.TransformerEncoderLayer,
    x: Tensor,
    to_self: tuple[Context, Block],
    streams: DropoutStreams,
) -> Tensor:
    """The two blocks of an encoder layer, for padded and packed batches."""
    pre, part = layer.norm_first, partial(attribute, layer)
    norms = (part("norm2"), None) if pre else (part("norm1"), part("norm2"))
    y = part("norm1")(x) if pre else x
    x, y = _attention_block(
        layer, part("self_attn"), x, y, *to_self, part("dropout1"), norms[0], streams
    )
    return _feed_forward_block(layer, x, y, part("dropout2"), norms[1], streams)


def packed_encoder_layer(
    layer: nn.TransformerEncoderLayer, x: Tensor, packing: Packing, causal: bool
) -> Tensor:
    """`layer` on packed rows `[T, E]`."""
    streams, attention = DropoutStreams(x.device, sharding_of(layer)), layer.self_attn

    def attend_self(y: Tensor) -> Tensor:
        return packed_context(attention, y, y, packing, packing, causal, streams)

    def self_block(y: Tensor) -> Tensor:
        return layer.dropout1(_output(attention, attend_self(y)))

    return encoder_layer(layer, x, (attend_self, self_block), streams)


def packed_decoder_layer(
    layer: nn.TransformerDecoderLayer,
    x: Tensor,
    memory: Tensor,
    target: Packing,
    source: Packing,
    causal: bool,
) -> Tensor:
    """`layer` on packed rows x `[T, E]` over packed memory `[S, E]`."""
    streams = DropoutStreams(x.device, sharding_of(layer))
    self_attn, cross_attn = layer.self_attn, layer.multihead_attn

    def attend_self(y: Tensor) -> Tensor:
        return packed_context(self_attn, y, y, target, target, causal, streams)

    def attend_memory(y: Tensor) -> Tensor:
        return packed_context(cross_attn, y, memory, target, source, False, streams)

    return decoder_layer(
        layer,
        x,
        (attend_self, lambda y: layer.dropout1(_output(self_attn, attend_self(y)))),
        (attend_memory, lambda y: layer.dropout2(_output(cross_attn, attend_memory(y)))),
        streams,
    )


def decoder_layer(
    layer: nn.TransformerDecoderLayer,
    x: Tensor,
    to_self: tuple[Context, Block],
    to_memory: tuple[Context, Block],
    streams: DropoutStreams,
) -> Tensor:
    """The three blocks of a decoder layer, for padded and packed batches and single steps."""
    pre, part = layer.norm_first, partial(attribute, layer)
    norms = (
        (part("norm2"), part("norm3"), None)
        if pre
        else (part("norm1"), part("norm2"), part("norm3"))
    )
    y = part("norm1")(x) if pre else x
    x, y = _attention_block(
        layer, part("self_attn"), x, y, *to_self, part("dropout1"), norms[0], streams
    )
    x, y = _attention_block(
        layer, part("multihead_attn"), x, y, *to_memory, part("dropout2"), norms[1], streams
    )
    return _feed_forward_block(layer, x, y, part("dropout3"), norms[2], streams)


def decoder_layer_step(
    layer: nn.TransformerDecoderLayer,
    x: Tensor,
    past: LayerCache,
    cache: DecoderCache,
    step: Step,
) -> Tensor:
    """`layer` on the next positions, whose keys and values are written to the cache."""
    self_attn, cross_attn = layer.self_attn, layer.multihead_attn
    streams = DropoutStreams(x.device)
    positions = positions_of(self_attn)

    def attend_self(y: Tensor) -> Tensor:
        qkv = project_in(self_attn, y, 0, 3)
        qkv = qkv if self_attn.batch_first else qkv.transpose(0, 1)  # [B, S, 3, H, D]
        q, kv = qkv[:, :, 0], qkv[:, :, 1:]
        if positions is not None:
            q, k = positions.rotated(q, kv[:, :, 0], step.positions)
            kv = torch.stack((k, kv[:, :, 1]), dim=2)
        cache.write(past.target, step, kv.to(past.target.dtype))  # autocast's dtype
        k, v = past.target_heads()
        options = {**step.options(positions), **cache.target_options()}
        heads = attend(self_attn, q.transpose(1, 2), k, v, streams, **options)
        return merge_heads(self_attn, heads, 3)

    def attend_memory(y: Tensor) -> Tensor:
        (q,) = project_heads(cross_attn, y, 0, 1)
        k, v = past.memory_heads()
        heads = attend(cross_attn, q, k, v, streams, **cache.memory_options())
        return merge_heads(cross_attn, heads, 3)

    return decoder_layer(
        layer,
        x,
        (attend_self, lambda y: layer.dropout1(_output(self_attn, attend_self(y)))),
        (attend_memory, lambda y: layer.dropout2(_output(cross_attn, attend_memory(y)))),
        streams,
    )


def project_memory(layer: nn.TransformerDecoderLayer, memory: Tensor) -> Tensor:
    """The keys and values of the cross-attention, `[B, N, 2, H, D]`."""
    kv = project_in(layer.multihead_attn, memory, 1, 2)
    return kv if layer.multihead_attn.batch_first else kv.transpose(0, 1)


def _output(attention: nn.MultiheadAttention, context: Tensor) -> Tensor:
    return linear(context, attention.out_proj.weight, attention.out_proj.bias)
