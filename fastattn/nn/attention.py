"""`MultiheadAttention` on the `attention` op, and multi-head attention masked by lengths.

A `torch.nn` mask marks what is *blocked*, a mask of an op what is *allowed*: `allowed_mask`
converts. Calls that the op does not support, invalid ones included, use torch's forward, with the
same result. One difference is intended: a query whose keys are all blocked gets a zero context,
where torch, depending on its path, may return NaN.

Shapes: B batch, M queries, N keys, H heads, D head dim, E = H * D. Heads are `[B, H, S, D]` views.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from fastattn import functional
from fastattn.functional import Lengths
from fastattn.nn.conversion import DropIn
from fastattn.nn.fusion import (
    AFFINE,
    DropoutStreams,
    are_plain,
    attribute,
    has_plain_parameters,
    is_plain_tensor,
    is_recorded_inference,
    linear,
    runs_eagerly,
    savable,
    weight_and_bias,
)
from fastattn.nn.relative import AttentionPositions
from fastattn.nn.sharding import SINGLE, Sharding, sharding_of


class MultiheadAttention(DropIn, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` on the `attention` op.

    As in torch, `is_causal=True` requires `attn_mask` and is trusted: the op then reads no mask,
    also beside a `key_padding_mask`. With `need_weights=True` context and weights are computed by
    `attention_with_weights`; in training the weights are those after dropout.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        given = query, key, value
        query, key, value = savable(*given)
        streams = DropoutStreams(query.device)
        streams.checked = (
            type(self) is MultiheadAttention
            and runs_eagerly()
            and are_plain(query, key, value)
            and is_plain(self, query)
        )
        if not is_supported(
            self, query, key, value, key_padding_mask, attn_mask, checked=streams.checked
        ):
            return super().forward(
                *given,
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        if not need_weights:
            context = attention_context(
                self, query, key, value, key_padding_mask, attn_mask, is_causal, streams
            )
            weights = None
        else:
            check_causal_hint(is_causal, attn_mask)
            masks = matching_masks(attn_mask, key_padding_mask, query.dtype)
            q, k, v = project(self, query, key, value, streams.checked)
            k, v, extra = extended_keys(self, k, v)
            mask = allowed_mask(*masks, q.shape[0], self.num_heads, extra)
            heads, weights = heads_with_weights(self, q, k, v, mask, bool(average_attn_weights))
            context = merge_heads(self, heads, query.dim())
            if query.dim() == 2:
                weights = weights.squeeze(0)
        affine = weight_and_bias(attribute(self, "out_proj"))
        return linear(context, *affine, checked=streams.checked), weights


_PARAMETERS = frozenset(
    ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
)
_OF_PROJECTIONS = _PARAMETERS | {"out_proj"}


def projects_alike(attention: Any) -> bool:
    """Whether attention has none of kdim, vdim, add_bias_kv and add_zero_attn."""
    return not (
        attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn
    )


def is_plain(module: nn.Module, x: Tensor) -> bool:
    """Whether the parameters of torch's or fastattn's attention are its own, dense and like x."""
    projection = module._modules.get("out_proj")
    return (
        type(projection) is NonDynamicallyQuantizableLinear
        and module.__dict__.keys().isdisjoint(_OF_PROJECTIONS)
        and projection.__dict__.keys().isdisjoint(AFFINE)
        and has_plain_parameters(module, _PARAMETERS, x)
        and has_plain_parameters(projection, AFFINE, x)
    )


def is_supported(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    key_shards: int = 1,
    checked: bool = False,
) -> bool:
    """Whether `attention_context` supports this call. Reads sizes and types only.

    key_shards: number of shards of the keys, of which one is given; the masks are for all keys.
    checked: the parameters and the query are known to be plain.
    """
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is not None:
            functional.check_holds_values(name, mask)
            if functional.overrides_functions(mask):
                return False
    rank = query.dim()
    if rank not in (2, 3) or key.dim() != rank or value.dim() != rank:
        return False
    if not (checked or _has_supported_tensors(module, query, key, value)):
        return False
    B, M = batch_and_length(module, query)
    batch, N = (B, M) if key is query else batch_and_length(module, key)
    return (
        functional.is_size(batch, B)
        and (value is key or functional.is_shape(batch_and_length(module, value), (B, N)))
        and query.shape[-1] == module.embed_dim
        and key.shape[-1] == module.kdim
        and value.shape[-1] == module.vdim
        and (attribute(module, "bias_k") is None) == (attribute(module, "bias_v") is None)
        and (
            key_padding_mask is None
            or is_mask(key_padding_mask, (N * key_shards,) if rank == 2 else (B, N * key_shards))
        )
        and (
            attn_mask is None
            or is_mask(attn_mask, (M, N * key_shards))
            or is_mask(attn_mask, (B * module.num_heads, M, N * key_shards))
        )
    )


def _has_supported_tensors(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> bool:
    out_proj = attribute(module, "out_proj")
    if "weight" not in out_proj._parameters and is_parametrized(out_proj, "weight"):
        return False  # each read of a parametrized weight computes it
    in_proj, out_weight = attribute(module, "in_proj_weight"), attribute(out_proj, "weight")
    inputs = (query,) if query is key and key is value else (query, key, value)
    for tensor in (*inputs, module.q_proj_weight if in_proj is None else in_proj, out_weight):
        if tensor is not None and (
            not is_plain_tensor(tensor)
            or tensor.dtype not in functional.FLOATS
            or tensor.layout is not torch.strided
            or is_recorded_inference(tensor)
        ):
            return False
    bias = attribute(module, "in_proj_bias")
    return bias is None or bias.dtype == out_weight.dtype


def matching_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    dtype: torch.dtype,
    attn_name: str = "attn_mask",
    padding_name: str = "key_padding_mask",
) -> tuple[Tensor | None, Tensor | None]:
    """Both masks boolean or both floating; like torch, warns before it converts."""
    if attn_mask is None or key_padding_mask is None or attn_mask.dtype == key_padding_mask.dtype:
        return attn_mask, key_padding_mask
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"{padding_name} is {key_padding_mask.dtype} and {attn_name} is {attn_mask.dtype}: "
            "support for masks of different types is deprecated, pass both in one type",
            stacklevel=3,
        )
    return floating_mask(attn_mask, dtype), floating_mask(key_padding_mask, dtype)


def floating_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask with True = blocked as the additive mask that torch passes to layers and modules."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def attention_context(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    streams: DropoutStreams,
    positions: AttentionPositions | None = None,
) -> Tensor:
    """The output of `module` before its output projection, in query's layout `[..., E]`.

    positions: those of query and key, which have the same.
    """
    check_causal_hint(is_causal, attn_mask)
    attn_mask, key_padding_mask = matching_masks(attn_mask, key_padding_mask, query.dtype)
    q, k, v = project(module, query, key, value, streams.checked)
    k, v, extra = extended_keys(module, k, v)
    # As in torch, the hint also covers the added keys, unless a padding mask requires the mask.
    causal = is_causal and (extra == 0 or key_padding_mask is None)
    mask = allowed_mask(
        None if causal else attn_mask, key_padding_mask, q.shape[0], module.num_heads, extra
    )
    scores: dict[str, Any] = {}
    if positions is not None:
        q, k = rotated_heads(positions, q, k, streams.sharding)
        scores = positions.score_options(q.device)
    kind = "top_left" if causal else False
    heads = attend(module, q, k, v, streams, mask=mask, causal=kind, **scores)
    return merge_heads(module, heads, query.dim())


def attend(
    module: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    streams: DropoutStreams,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: str | bool = False,
    **options: Any,
) -> Tensor:
    """The `attention` op on projected heads, with the module's dropout.

    options: `AttentionPositions.score_options`.
    """
    p = float(module.dropout) if module.training else 0.0
    sharding, stream = sharding_of(module), streams.take(p, of="heads")
    if (
        sharding is SINGLE
        and mask is key_lengths is None
        and causal in (False, "top_left")
        and 0.0 <= p <= 1.0
        and not options
        and (streams.checked or functional.plain_sizes(q, k, v))
    ):
        return functional.plain_attention(
            q,
            k,
            v,
            functional.CAUSAL[causal],
            functional.check_scale(None, q.shape[3]),
            p,
            **stream,
        )
    return sharding.attention(
        q,
        k,
        v,
        mask=mask,
        key_lengths=key_lengths,
        causal=causal,
        dropout_p=p,
        **stream,
        **options,
    )


def heads_with_weights(
    module: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    average: bool,
    **scores: Any,
) -> tuple[Tensor, Tensor]:
    """`attend` with the weights. scores: `AttentionPositions.score_options()`."""
    p = float(module.dropout) if module.training else 0.0
    return functional.attention_with_weights(
        q,
        k,
        v,
        average=average,
        mask=mask,
        dropout_p=p,
        **DropoutStreams(q.device, sharding_of(module)).take(p, of="heads"),
        **scores,
    )


def rotated_heads(
    positions: AttentionPositions, q: Tensor, k: Tensor, sharding: Sharding = SINGLE
) -> tuple[Tensor, Tensor]:
    """Heads q and k `[B, H, S, D]` at the positions 0, 1, 2, ..., or those of this process."""
    at = sharding.positions(q.shape[2], q.device)
    # Storage [B, S, H, D], which needs no copy when heads are merged.
    q, k = positions.rotated(q.transpose(1, 2), k.transpose(1, 2), at)
    return q.transpose(1, 2), k.transpose(1, 2)


def project(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, checked: bool = False
) -> tuple[Tensor, ...]:
    """`project_each` as heads `[B, H, S, D]`."""
    return tuple(as_heads(module, x) for x in project_each(module, query, key, value, checked))


def project_each(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, checked: bool = False
) -> tuple[Tensor, ...]:
    """q, k and v `[..., H, D]`; inputs that are the same tensor share one matrix product.

    checked: as in `fusion.linear`.
    """
    packed = module._qkv_same_embed_dim or attribute(module, "q_proj_weight") is None
    if not packed or query is not key is not value:
        parts = [(query, 0, 1), (key, 1, 1), (value, 2, 1)]
    elif query is key and key is value:
        parts = [(query, 0, 3)]
    else:
        parts = [(query, 0, 1), (key, 1, 2)] if key is value else [(query, 0, 2), (value, 2, 1)]
    found: tuple[Tensor, ...] = ()
    if len(parts) == 1 or (packed and sharding_of(module) is not SINGLE):
        for part in parts:
            y = project_in(module, *part, checked)
            found += (y.squeeze(-3),) if part[2] == 1 else y.unbind(-3)
        return found
    heads = module.num_heads, module.head_dim
    sizes = [count * heads[0] * heads[1] for _, _, count in parts]
    if packed:  # one autograd node for the gradients, where slices would add padded ones
        weights: Any = attribute(module, "in_proj_weight").split_with_sizes(sizes)
    else:
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    bias: Tensor | None = attribute(module, "in_proj_bias")
    biases = (None,) * 3 if bias is None else bias.split_with_sizes(sizes)
    for (x, _, count), weight, part_bias in zip(parts, weights, biases, strict=False):
        y = linear(x, weight, part_bias, checked=checked)
        if count == 1:
            found += (y.view(*y.shape[:-1], *heads),)
        else:  # not of permuted heads: the backward copies the gradients once, into y's order
            found += y.view(*y.shape[:-1], count, *heads).unbind(-3)
    return found


def project_in(
    module: nn.MultiheadAttention, x: Tensor, first: int, count: int, checked: bool = False
) -> Tensor:
    """x `[..., E]` times `count` blocks of `in_proj_weight` (0 query, 1 key, 2 value), beginning
    with block `first`: `[..., count, H, D]`.
    """
    y = sharding_of(module).product_of_parts(module, x, first, count)
    if y is None:
        weight: Tensor = attribute(module, "in_proj_weight")
        bias: Tensor | None = attribute(module, "in_proj_bias")
        if count < 3:
            width = module.num_heads * module.head_dim
            rows = slice(first * width, (first + count) * width)
            weight, bias = weight[rows], None if bias is None else bias[rows]
        y = linear(x, weight, bias, checked=checked)
    return y.view(*y.shape[:-1], count, module.num_heads, module.head_dim)


def extended_keys(
    module: nn.MultiheadAttention, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, int]:
    """k and v followed by the keys of `add_bias_kv` and `add_zero_attn`, and how many there are."""
    bias_k, bias_v = attribute(module, "bias_k"), attribute(module, "bias_v")
    if bias_k is bias_v is None and not module.add_zero_attn:
        return k, v, 0
    B, H, _, D = k.shape
    ks, vs = [k], [v]
    if bias_k is not None and bias_v is not None:
        ks.append(bias_k.view(1, H, 1, D).to(k.dtype).expand(B, H, 1, D))
        vs.append(bias_v.view(1, H, 1, D).to(v.dtype).expand(B, H, 1, D))
    if module.add_zero_attn:
        ks.append(k.new_zeros(B, H, 1, D))
        vs.append(v.new_zeros(B, H, 1, D))
    return torch.cat(ks, dim=2), torch.cat(vs, dim=2), len(ks) - 1


def allowed_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, B: int, H: int, extra: int = 0
) -> Tensor | None:
    """nn's masks, both boolean (True = blocked) or both floating, as one mask for the op.

    attn_mask `[M, N]` or `[B * H, M, N]`, key_padding_mask `[N]` or `[B, N]`; `extra` keys after
    them are allowed. Dimensions over which the mask is constant keep size 1.
    """
    if attn_mask is not None:
        attn_mask = (
            attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (B, H))
        )
        attn_mask = F.pad(attn_mask, (0, extra)) if extra else attn_mask
    if key_padding_mask is not None:
        if key_padding_mask.dim() == 1:
            key_padding_mask = key_padding_mask[None]
        key_padding_mask = key_padding_mask[:, None, None, :]  # [B, 1, 1, N]
        key_padding_mask = F.pad(key_padding_mask, (0, extra)) if extra else key_padding_mask
    if attn_mask is None or key_padding_mask is None:
        mask = key_padding_mask if attn_mask is None else attn_mask
    elif attn_mask.dtype is torch.bool:
        mask = attn_mask | key_padding_mask
    else:
        mask = attn_mask + key_padding_mask
    if mask is None or mask.dtype is torch.bool:
        return mask if mask is None else ~mask
    return savable(mask)[0]


def merge_heads(module: nn.MultiheadAttention, heads: Tensor, rank: int) -> Tensor:
    """Heads `[B, H, M, D]` in the layout of a query of rank `rank`, `[..., E]`."""
    if rank == 2:
        return heads[0].transpose(0, 1).flatten(-2)  # [M, E]
    if module.batch_first:
        return heads.transpose(1, 2).flatten(-2)  # [B, M, E]
    return heads.permute(2, 0, 1, 3).flatten(-2)  # [M, B, E]


class UnpackedMultiheadAttention(nn.MultiheadAttention):
    """Base of attentions whose `forward` torch's encoder layers have to call. If the flag says that
    the projections are packed, these layers read the weights instead.
    """

    def _reset_parameters(self) -> None:
        # The last step of torch's constructor; it initialises the packed weight if the flag is set.
        self._qkv_same_embed_dim = True
        super()._reset_parameters()
        self._qkv_same_embed_dim = False


class LengthMaskedMultiheadAttention(nn.Module):
    """Multi-head attention over the first `valid_lens` keys; each input has its own width.

    query_size, key_size, value_size: widths of the inputs; num_hiddens: total width of the heads
    and width of the output. Batch comes first.
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        value_size: int,
        num_hiddens: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or num_hiddens % num_heads:
            raise ValueError(
                f"num_hiddens must be a multiple of num_heads, got {num_hiddens} and {num_heads}"
            )
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        self.num_heads = num_heads
        self.dropout = dropout

        def linear(size: int) -> nn.Linear:
            return nn.Linear(size, num_hiddens, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(query_size)
        self.k_proj = linear(key_size)
        self.v_proj = linear(value_size)
        self.out_proj = linear(num_hiddens)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Lengths | None = None,
        *,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """queries `[B, M, query_size]`, keys and values `[B, N, ...]` -> `[B, M, num_hiddens]`.

        valid_lens: int32 or int64, `[B]`, or `[B, M]` with one length for each query, or a list of
        B integers; keys at or beyond it are not attended, a length of 0 gives a zero context. With
        `need_weights` the weights `[B, H, M, N]` are returned second (after dropout in training).
        """
        sizes = (self.q_proj.in_features, self.k_proj.in_features, self.v_proj.in_features)
        valid_lens = check_sequences(queries, keys, values, sizes, valid_lens)
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, S, D]
            for projection, x in (
                (self.q_proj, queries),
                (self.k_proj, keys),
                (self.v_proj, values),
            )
        )
        p = self.dropout if self.training else 0.0
        options: Any = {"key_lengths": valid_lens, "dropout_p": p}
        options |= DropoutStreams(queries.device).take(p)
        if not need_weights:
            heads = functional.attention(q, k, v, **options)
            return self.out_proj(heads.transpose(1, 2).flatten(-2))  # type: ignore[union-attr]
        heads, weights = functional.attention_with_weights(q, k, v, **options)
        return self.out_proj(heads.transpose(1, 2).flatten(-2)), weights

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, dropout={self.dropout}"


def check_sequences(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sizes: tuple[int, int, int | None],
    valid_lens: Lengths | None,
) -> Tensor | None:
    """Checks batched inputs of widths `sizes` (None: any). Returns the lengths as a tensor."""
    named = {"queries": queries, "keys": keys, "values": values}
    for (name, x), size in zip(named.items(), sizes, strict=True):
        if (
            x.dim() != 3
            or (size is not None and x.shape[-1] != size)
            or x.shape[0] != queries.shape[0]
        ):
            batch = "B" if name == "queries" else queries.shape[0]
            width = "V" if size is None else size
            raise ValueError(f"{name} must be [{batch}, S, {width}], got {list(x.shape)}")
    if keys.shape[1] != values.shape[1]:
        raise ValueError(
            f"values must have one row for each of the {keys.shape[1]} keys, got {values.shape[1]}"
        )
    if valid_lens is None:
        return None
    valid_lens = functional.lengths_tensor("valid_lens", valid_lens, queries.device)
    B, M = queries.shape[:2]
    if valid_lens.dtype not in (torch.int32, torch.int64) or valid_lens.shape not in ((B,), (B, M)):
        raise ValueError(
            f"valid_lens must be int32 or int64, [{B}] or [{B}, {M}], "
            f"got {valid_lens.dtype} {list(valid_lens.shape)}"
        )
    return valid_lens


def check_padded_inputs(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    """Raises unless the inputs of `module` are padded batches of its width, with their masks."""
    named = {"query": query, "key": key, "value": value}
    layout = "B, S" if module.batch_first else "S, B"
    for name, x in named.items():
        if x.dim() != 3 or x.shape[-1] != module.embed_dim:
            raise ValueError(f"{name} must be [{layout}, {module.embed_dim}], got {list(x.shape)}")
    (B, M), (_, N) = batch_and_length(module, query), batch_and_length(module, key)
    for name, x in (("key", key), ("value", value)):
        if batch_and_length(module, x) != (B, N):
            raise ValueError(
                f"{name} must hold {B} sequences of {N}, got {layout} of {list(x.shape[:2])}"
            )
    for name, mask, shapes in (
        ("key_padding_mask", key_padding_mask, ((B, N),)),
        ("attn_mask", attn_mask, ((M, N), (B * module.num_heads, M, N))),
    ):
        if mask is None:
            continue
        functional.check_holds_values(name, mask)
        if not any(is_mask(mask, shape) for shape in shapes):
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(
                f"{name} must be bool or floating, {wanted}, got {mask.dtype} {list(mask.shape)}"
            )


def check_causal_hint(is_causal: bool, attn_mask: Tensor | None) -> None:
    """Raises, like torch, if `is_causal` is set without a mask."""
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "is_causal=True is a hint about attn_mask and needs it: pass "
            "Transformer.generate_square_subsequent_mask(length), got attn_mask=None"
        )


def is_mask(mask: Tensor, shape: tuple[int, ...]) -> bool:
    fits = functional.is_shape(mask.shape, shape)
    return fits and (mask.dtype is torch.bool or mask.is_floating_point())


def batch_and_length(module: nn.MultiheadAttention, x: Tensor) -> tuple[int, int]:
    if x.dim() == 2:
        return 1, x.shape[0]
    return (x.shape[0], x.shape[1]) if module.batch_first else (x.shape[1], x.shape[0])


def as_heads(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """A projection `[..., H, D]` in the module's layout as `[B, H, S, D]`, without a copy."""
    if x.dim() == 3:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if module.batch_first else x.permute(1, 2, 0, 3)
