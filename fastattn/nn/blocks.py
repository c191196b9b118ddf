"""The blocks and layers of the Transformer, as functions over torch's modules.

A layer is a sequence of blocks: attention or feed-forward network, dropout, residual, norm. A block
runs as fused ops if its modules are unmodified (see `fusion`), else as torch composes it:
`_sa_block`, `_mha_block`, `_ff_block` and the norms, called as modules. The same layer functions
serve padded batches, packed batches and single decoding steps, which differ in what the attention
reads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fastattn import functional
from fastattn.nn.attention import (
    as_heads,
    attend,
    attention_context,
    is_plain,
    is_supported,
    merge_heads,
    project_in,
)
from fastattn.nn.decoding import DecoderCache, LayerCache, Step
from fastattn.nn.feed_forward import activation_name, fused_activation
from fastattn.nn.fusion import (
    AFFINE,
    DropoutStreams,
    active_p,
    are_plain,
    attribute,
    has_any_global_hook,
    has_its_own_forward,
    has_plain_parameters,
    in_class,
    inherits,
    is_unmodified,
    linear,
    runs_eagerly,
    weight_and_bias,
)
from fastattn.nn.norm import (
    LayerNorm,
    can_fuse,
    fused_add_norm,
    fused_add_norm_and_sum,
    is_valid_eps,
)
from fastattn.nn.packing import Packing, packed_context
from fastattn.nn.positional_attention import attention_classes, positions_of
from fastattn.nn.sharding import SINGLE, dropout_and_sum, sharding_of

# Input of a block -> the attention's context before its output projection, None if not supported.
Context = Callable[[Tensor], Tensor | None]
# The same block as torch composes it, dropout included.
Block = Callable[[Tensor], Tensor]
Layer: TypeAlias = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


# The children of a layer and their classes.
_NORMS, _DROPOUTS, _LINEARS = (nn.LayerNorm, LayerNorm), (nn.Dropout,), (nn.Linear,)
_ATTENTIONS = attention_classes("multihead_attn")
_OF_ENCODERS: dict[str, tuple[type[nn.Module], ...]] = {
    "self_attn": _ATTENTIONS, "linear1": _LINEARS, "dropout": _DROPOUTS, "linear2": _LINEARS,
    "norm1": _NORMS, "norm2": _NORMS, "dropout1": _DROPOUTS, "dropout2": _DROPOUTS,
}  # fmt: skip
_OF_DECODERS = _OF_ENCODERS | {
    "multihead_attn": _ATTENTIONS, "norm3": _NORMS, "dropout3": _DROPOUTS,
}  # fmt: skip
_NAMES = {len(kinds): frozenset(kinds) for kinds in (_OF_ENCODERS, _OF_DECODERS)}


def streams_of(layer: Layer, x: Tensor, *others: Tensor) -> DropoutStreams:
    """The dropouts of a forward of the layer, and whether it is checked: it runs eagerly, all
    inputs are dense CPU tensors of one dtype, and the children are unmodified, with dense
    parameters of this dtype and of the sizes that the children name. One test for all, because a
    test for each op takes as long as the op if sequences are short.
    """
    streams = DropoutStreams(x.device, sharding_of(layer))
    streams.low_residual = has_low_residual(layer)
    if streams.sharding is SINGLE and are_plain(x, *others) and runs_eagerly():
        kinds = _OF_ENCODERS if isinstance(layer, nn.TransformerEncoderLayer) else _OF_DECODERS
        names, children = _NAMES[len(kinds)], layer._modules
        streams.checked = (
            children.keys() - {"activation"} == names  # which is tested where it is used
            and layer.__dict__.keys().isdisjoint(names)
            and not in_class(type(layer), names)  # type: ignore[arg-type]
            and not has_any_global_hook()
            and all(_is_plain(children[name], kind, x) for name, kind in kinds.items())
        )
    return streams


def has_low_residual(module: nn.Module) -> bool:
    """Whether the residual stream of a layer or stack has autocast's dtype under autocast."""
    return module.__dict__.get("autocast_residual", False) and torch._C._is_any_autocast_enabled()


def _is_plain(child: nn.Module | None, kind: tuple[type[nn.Module], ...], x: Tensor) -> bool:
    """Whether a layer's child of a kind may be part of its ops on inputs like x."""
    if child is None or not has_its_own_forward(child, *kind):
        return False
    if kind is _DROPOUTS:
        return 0.0 <= active_p(child) <= 1.0
    if kind is _NORMS:
        shape = child.normalized_shape
        return shape == x.shape[-1:] and is_valid_eps(child.eps) and _has_sizes(child, shape, x)
    if kind is _LINEARS:
        return _has_sizes(child, (child.out_features, child.in_features), x)
    return is_plain(child, x)


def _has_sizes(child: Any, sizes: Any, x: Tensor) -> bool:
    """Whether weight and bias are plain and of these sizes; a norm may have no weight."""
    if not has_plain_parameters(child, AFFINE, x):
        return False
    weight, bias = child._parameters["weight"], child._parameters["bias"]
    if weight is None:
        return len(sizes) == 1 and bias is None
    return weight.shape == sizes and (bias is None or bias.shape == sizes[:1])


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
    if not (streams.checked or is_unmodified(attention, *attention_classes(name))):
        return None
    shards, checked = streams.sharding.key_shards, streams.checked
    if not is_supported(attention, query, memory, memory, padding, mask, shards, checked):  # type: ignore[arg-type]
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
    sharding = streams.sharding
    unmodified = streams.checked or is_unmodified(dropout, nn.Dropout)
    heads = context(sharding.enter(y)) if unmodified else None
    if heads is None:
        _require_whole(layer, "attention", streams)
        streams.checked = False
        x = x + block(y)
        y = norm(x)
        return (x, y) if layer.norm_first else (y, y)
    weight, bias = weight_and_bias(attribute(attention, "out_proj"))
    # Its bias is added with the residual.
    product = sharding.leave(linear(heads, weight, checked=streams.checked))
    if not (streams.checked or can_fuse(norm, x)):
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
    if inherits(layer, base, "_ff_block"):
        if streams.checked:
            activation = activation_name(layer.activation)
        elif is_unmodified(dropout, nn.Dropout):
            activation = fused_activation(linear1, layer.activation, inner, linear2)
    if activation is None:
        _require_whole(layer, "feed-forward network", streams)
        streams.checked = False
        x = x + layer._ff_block(y)
        return x if norm is None else norm(x)
    # The op adds bias and residual too, unless a norm or a sum over processes comes before them.
    whole = norm is None and sharding.whole
    p, output_p = active_p(inner), active_p(dropout)
    (weight1, bias1), (weight2, bias2) = weight_and_bias(linear1), weight_and_bias(linear2)
    last_bias, residual, last_p = (bias2, x, output_p) if whole else (None, None, 0.0)
    stream = streams.take(p, last_p, of="hidden")
    if streams.checked:
        result: Tensor = functional.ffn_op(
            y, weight1, bias1, weight2, last_bias, residual, activation, p, last_p,
            stream.get("dropout_seed"), stream.get("dropout_stream", 0),
        )[0]  # fmt: skip
    else:
        result = functional.ffn(
            sharding.enter(y),
            weight1,
            bias1,
            weight2,
            last_bias,
            activation,
            dropout_p=p,
            output_dropout_p=last_p,
            residual=residual,
            **stream,
        )
    if whole:
        return result
    result = sharding.leave(result)
    if norm is not None and (streams.checked or can_fuse(norm, x)):
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
    x = functional.autocast(x)[0] if streams.low_residual else x
    y = part("norm1")(x) if pre else x
    x, y = _attention_block(
        layer, part("self_attn"), x, y, *to_self, part("dropout1"), norms[0], streams
    )
    return _feed_forward_block(layer, x, y, part("dropout2"), norms[1], streams)


def packed_encoder_layer(
    layer: nn.TransformerEncoderLayer, x: Tensor, packing: Packing, causal: bool
) -> Tensor:
    """`layer` on packed rows `[T, E]`."""
    streams, attention = streams_of(layer, x), layer.self_attn

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
    streams = streams_of(layer, x, memory)
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
    x = functional.autocast(x)[0] if streams.low_residual else x
    y = part("norm1")(x) if pre else x
    x, y = _attention_block(
        layer, part("self_attn"), x, y, *to_self, part("dropout1"), norms[0], streams
    )
    x, y = _attention_block(
        layer, part("multihead_attn"), x, y, *to_memory, part("dropout2"), norms[1], streams
    )
    return _feed_forward_block(layer, x, y, part("dropout3"), norms[2], streams)


def decoder_layer_step(
    layer: nn.TransformerDecoderLayer, x: Tensor, past: LayerCache, cache: DecoderCache, step: Step
) -> Tensor:
    """`layer` on the next positions, whose keys and values are written to the cache."""
    self_attn, cross_attn = layer.self_attn, layer.multihead_attn
    streams = streams_of(layer, x, past.target, past.memory)
    streams.low_residual = False  # a step has few rows
    positions = positions_of(self_attn)

    def attend_self(y: Tensor) -> Tensor:
        qkv = project_in(self_attn, y, 0, 3)
        qkv = qkv if self_attn.batch_first else qkv.transpose(0, 1)  # [B, S, 3, H, D]
        q, kv = qkv[:, :, 0], qkv[:, :, 1:]
        if positions is not None:
            q, k = positions.rotated(q, kv[:, :, 0], step.positions)
            kv = torch.stack((k, kv[:, :, 1]), dim=2)
        past.target.index_copy_(1, step.rows, kv.to(past.target.dtype))  # autocast's dtype
        k, v = past.target_heads()
        heads = attend(self_attn, q.transpose(1, 2), k, v, streams, **step.options(positions))
        return merge_heads(self_attn, heads, 3)

    def attend_memory(y: Tensor) -> Tensor:
        q = as_heads(cross_attn, project_in(cross_attn, y, 0, 1).squeeze(-3))
        k, v = past.memory_heads()
        dead: dict[str, Any] = {"mask": cache.memory_mask, "key_lengths": cache.memory_lengths}
        return merge_heads(cross_attn, attend(cross_attn, q, k, v, streams, **dead), 3)

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
