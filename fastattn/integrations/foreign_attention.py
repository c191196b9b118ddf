"""Forms for `foreign_modules`: attention of transformers models whose scores depend on positions.

T5 and its relatives call the attention function that their config names, with a bias [1, H, M, N]
made from a table: if fastattn's function is chosen, the drop-in passes the table. LongT5's local
attention becomes a call of `attention` with a window.

Bloom and MPT compute attention themselves, with a bias of each key: slope * position, which differs
from ALiBi's slope * (key's position - query's position) by a number for each query, that a softmax
ignores. The drop-in calls `attention` with this bias as a mask [B, H, 1, N], which also blocks the
padding, and causal. It compares the model's mask [B, 1, M, N] with that form once for each mask;
another mask is applied as it is.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastattn import functional
from fastattn.integrations import huggingface
from fastattn.integrations.relative_bias import RelativeBias
from fastattn.nn.fusion import active_p, is_unmodified

Methods = dict[str, Any]  # of a drop-in
FORMS: list[tuple[str, Callable[[Any], Methods]]] = []


def _form(published: str) -> Callable[[Callable[[Any], Methods]], Callable[[Any], Methods]]:
    """Decorates a function that makes the drop-in's methods, given the class with the published
    code.
    """

    def add(make: Callable[[Any], Methods]) -> Callable[[Any], Methods]:
        FORMS.append((published, make))
        return make

    return add


# -- T5 -------------------------------------------------------------------------------------------
_T5_BUCKETS = """
def _relative_position_bucket(
    relative_position, bidirectional=True, num_buckets=32, max_distance=128
):
    relative_buckets = 0
    if bidirectional:
        num_buckets //= 2
        relative_buckets += (relative_position > 0).to(torch.long) * num_buckets
        relative_position = torch.abs(relative_position)
    else:
        relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
    max_exact = num_buckets // 2
    is_small = relative_position < max_exact
    relative_position_if_large = max_exact + (
        torch.log(relative_position.float() / max_exact)
        / math.log(max_distance / max_exact)
        * (num_buckets - max_exact)
    ).to(torch.long)
    relative_position_if_large = torch.min(
        relative_position_if_large, torch.full_like(relative_position_if_large, num_buckets - 1)
    )
    relative_buckets += torch.where(is_small, relative_position, relative_position_if_large)
    return relative_buckets
"""
_UMT5_BUCKETS = """
def _relative_position_bucket(self, relative_position):
    relative_buckets = 0
    num_buckets = self.relative_attention_num_buckets
    max_distance = self.relative_attention_max_distance
    if not self.is_decoder:
        num_buckets //= 2
        relative_buckets += (relative_position > 0).to(torch.long) * num_buckets
        relative_position = torch.abs(relative_position)
    else:
        relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
    max_exact = num_buckets // 2
    is_small = relative_position < max_exact
    log_ratio = torch.log(relative_position.float() / max_exact) / math.log(
        max_distance / max_exact
    )
    log_ratio = log_ratio * (num_buckets - max_exact)
    relative_position_if_large = max_exact + log_ratio.to(torch.long)
    relative_position_if_large = torch.min(
        relative_position_if_large, torch.full_like(relative_position_if_large, num_buckets - 1)
    )
    relative_buckets += torch.where(is_small, relative_position, relative_position_if_large)
    return relative_buckets
"""


def _compute_bias(buckets: str) -> str:
    return f"""
def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
    if device is None:
        device = self.relative_attention_bias.weight.device
    context_position = (
        torch.arange(query_length, dtype=torch.long, device=device)[:, None] + past_seen_tokens
    )
    memory_position = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
    relative_position = memory_position - context_position
    relative_position_bucket = self._relative_position_bucket({buckets})
    values = self.relative_attention_bias(relative_position_bucket)
    values = values.permute([2, 0, 1]).unsqueeze(0)
    return values
"""


def _t5_call(bidirectional: str) -> str:
    return f"""
        relative_position, bidirectional={bidirectional},
        num_buckets=self.relative_attention_num_buckets,
        max_distance=self.relative_attention_max_distance,
    """


@_form(_T5_BUCKETS + _compute_bias(_t5_call("(not self.is_decoder)")))
@_form(_UMT5_BUCKETS + _compute_bias("relative_position"))
def _t5(kind: Any) -> Methods:
    return _with_table(kind, lambda self: bool(self.is_decoder))


@_form(_T5_BUCKETS + _compute_bias(_t5_call("False")))
def _pix2struct(kind: Any) -> Methods:
    return _with_table(kind, lambda self: True)


def _with_table(kind: Any, is_causal: Callable[[Any], bool]) -> Methods:
    is_shared = "position_bias" in inspect.signature(kind.forward).parameters

    def compute_bias(self: Any, *args: Any, **kwargs: Any) -> Any:
        dense = functools.partial(kind.compute_bias, self, *args, **kwargs)
        given = inspect.signature(kind.compute_bias).bind(self, *args, **kwargs).arguments
        table, causal = self.relative_attention_bias, is_causal(self)
        distance = self.relative_attention_max_distance
        if not (_is_chosen(self) and _is_plain_table(table, distance, causal)):
            return dense()
        buckets: Any = "t5_causal" if causal else "t5"
        past = given.get("past_seen_tokens", 0)
        return RelativeBias(table.weight, buckets, distance, past, dense)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Without zeros [1, H, M, N] for a bias in cross-attention."""
        if _is_chosen(self) and not self.has_relative_attention_bias:
            if not is_shared:
                kwargs["has_zero_bias"] = True
            elif kwargs.get("position_bias", 0) is None:
                kwargs["position_bias"] = torch.empty(0)
        return kind.forward(self, *args, **kwargs)

    return {"compute_bias": compute_bias, "forward": forward}


def _is_chosen(module: Any) -> bool:
    return module.config._attn_implementation in huggingface.NAMES


def _is_plain_table(table: Any, distance: int, causal: bool) -> bool:
    """Whether `attention` has these buckets."""
    if not is_unmodified(table, nn.Embedding) or table.max_norm is not None:
        return False
    count = table.num_embeddings
    if causal:
        return bool(count >= 2 and distance > count // 2)
    return bool(count >= 4 and count % 2 == 0 and distance > count // 4)


@dataclass(frozen=True, eq=False)
class _LocalBias:
    """What the first layer of LongT5's encoder passes to the others."""

    weight: Tensor  # of its table, [buckets, H]
    keys: Tensor  # [B, 1, 1, S]: False for padding
    dense: Callable[[], Tensor]  # the bias of blocks, with the mask


@_form(
    _T5_BUCKETS
    + '''
def compute_bias(self, block_length: int):
    target_device = (
        self.relative_attention_bias.weight.device
        if self.relative_attention_bias.weight.device.type != "meta"
        else None
    )
    memory_position = torch.arange(3 * block_length, dtype=torch.long, device=target_device)
    context_position = memory_position[block_length:-block_length]
    relative_position = memory_position[None, :] - context_position[:, None]
    relative_position_bucket = self._relative_position_bucket(
        relative_position,
        bidirectional=(not self.is_decoder),
        num_buckets=self.relative_attention_num_buckets,
        max_distance=self.relative_attention_max_distance,
    )
    values = self.relative_attention_bias(relative_position_bucket)
    values = values.permute([2, 0, 1]).unsqueeze(0).unsqueeze(0)
    return values

def forward(self, hidden_states, mask=None, position_bias=None, output_attentions=False):
    batch_size, seq_length = hidden_states.shape[:2]
    def shape(states):
        """projection"""
        return states.view(batch_size, -1, self.n_heads, self.key_value_proj_dim)
    def unshape(states):
        """reshape"""
        return states.contiguous().view(batch_size, -1, self.inner_dim)
    query_states = shape(self.q(hidden_states))
    key_states = shape(self.k(hidden_states))
    value_states = shape(self.v(hidden_states))
    query_states = _split_into_blocks(query_states, self.block_len, dim=1)
    key_states = _split_into_blocks(key_states, self.block_len, dim=1)
    value_states = _split_into_blocks(value_states, self.block_len, dim=1)
    key_states = _concatenate_3_blocks(key_states, block_dim=1, sequence_dim=2)
    value_states = _concatenate_3_blocks(value_states, block_dim=1, sequence_dim=2)
    scores = torch.einsum("...qhd,...khd->...hqk", query_states, key_states)
    if position_bias is None:
        if not self.has_relative_attention_bias:
            position_bias = torch.zeros(
                (1, 1, self.n_heads, self.block_len, 3 * self.block_len),
                device=scores.device,
                dtype=scores.dtype,
            )
            if self.gradient_checkpointing and self.training:
                position_bias.requires_grad = True
        else:
            position_bias = self.compute_bias(self.block_len)
        if mask is not None:
            mask = torch.where(mask > 0, 0.0, -1e10)
            position_bias = position_bias + mask.transpose(1, 2)
    scores += position_bias
    attn_weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
    attn_weights = nn.functional.dropout(attn_weights, p=self.dropout, training=self.training)
    attn_weights = attn_weights.type(value_states.dtype)
    attn_output = unshape(torch.einsum("...hqk,...khd->...qhd", attn_weights, value_states))
    attn_output = attn_output[:, :seq_length, :]
    attn_output = self.o(attn_output)
    outputs = (
        attn_output,
        position_bias,
    )
    if output_attentions:
        outputs = outputs + (attn_weights,)
    return outputs
'''
)
def _longt5_local(kind: Any) -> Methods:
    """Blocks of queries, each with its own and the two adjacent blocks of keys: a window."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        position_bias: Any = None,
        output_attentions: bool = False,
    ) -> Any:
        B, S = hidden_states.shape[:2]
        if position_bias is None and _is_local(self, mask):
            assert mask is not None
            # The padding is on the diagonal of the mask of blocks.
            keys = mask[:, 0].diagonal(self.block_len, 2, 3).flatten(1)[:, None, None, :S]

            def dense() -> Any:
                bias = kind.compute_bias(self, self.block_len)
                return bias + torch.where(mask > 0, 0.0, -1e10).transpose(1, 2)

            position_bias = _LocalBias(self.relative_attention_bias.weight, keys > 0, dense)
        if output_attentions or not isinstance(position_bias, _LocalBias):
            bias = position_bias.dense() if isinstance(position_bias, _LocalBias) else position_bias
            return kind.forward(self, hidden_states, mask, bias, output_attentions)
        q, k, v = (
            x.view(B, S, self.n_heads, self.key_value_proj_dim).transpose(1, 2)
            for x in (self.q(hidden_states), self.k(hidden_states), self.v(hidden_states))
        )
        reach = self.block_len - 1
        out = functional.attention(
            q, k, v, mask=position_bias.keys, window=(reach, reach), scale=1.0,
            relative_bias=position_bias.weight.t().to(q.device), relative_buckets="t5",
            relative_max_distance=self.relative_attention_max_distance,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.o(out.transpose(1, 2).flatten(2)), position_bias

    return {"forward": forward}


def _is_local(module: Any, mask: Tensor | None) -> bool:
    return (
        mask is not None
        and mask.dim() == 5
        and module.has_relative_attention_bias
        and not module.is_decoder
        and _is_plain_table(
            module.relative_attention_bias, module.relative_attention_max_distance, False
        )
    )


# -- ALiBi ----------------------------------------------------------------------------------------
def _attention_with_key_bias(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, past: Any, **options: Any
) -> Tensor:
    """bias: [B or 1, H, 1, N]; mask: the model's, [B, 1, M, N]; query i has position past + i."""
    M, N = q.shape[2], k.shape[2]
    if M == 1 or (columns := _columns(mask, past)) is None:
        added = bias if mask.dtype is torch.bool else bias + mask
        options["mask"] = torch.where(_allowed(mask), added, -math.inf)
        return functional.attention(q, k, v, **options)
    options["mask"] = torch.where(columns, bias, -math.inf)
    if isinstance(past, int) and past == N - M:
        return functional.attention(q, k, v, causal="bottom_right", **options)
    ends = (torch.as_tensor(past, device=q.device).long().view(1) + M).expand(q.shape[0])
    return functional.attention(q, k, v, causal="bottom_right_lengths", key_lengths=ends, **options)


def _allowed(mask: Tensor) -> Tensor:
    """mask: additive, or True where blocked."""
    return ~mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2


_KNOWN = "_fastattn_columns"  # of a mask, which all layers get: its version, past and columns


def _columns(mask: Tensor, past: Any) -> Tensor | None:
    """The keys [B, 1, 1, N] that the last query may attend, if every query may attend those of them
    up to its own position and adds nothing to their scores; else None. Reads the mask, if past is a
    number only once.
    """
    if (
        type(mask) is not Tensor
        or mask.is_meta
        or torch.compiler.is_compiling()
        or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return None
    version = (mask._version, past) if isinstance(past, int) and not mask.is_inference() else None
    known = mask.__dict__.get(_KNOWN)
    if version is not None and known is not None and known[0] == version:
        return known[1]  # type: ignore[no-any-return]
    M, N = mask.shape[2:]
    i, j = torch.arange(M, device=mask.device), torch.arange(N, device=mask.device)
    allowed = _allowed(mask)
    last = allowed[:, :, -1:].clone()
    is_causal = allowed == last & (j <= i[:, None] + past)
    if mask.dtype is not torch.bool:
        is_causal &= ~allowed | (mask == 0.0)
    columns = last if bool(is_causal.all()) else None
    setattr(mask, _KNOWN, (version, columns))
    return columns


def _past(cache: Any, layer: int | None) -> Any:
    """The number of positions in a cache before it gets those of this call."""
    if cache is None:
        return 0
    past = cache.get_seq_length(layer)
    return past.clone() if isinstance(past, Tensor) else past


@_form("""
def forward(
    self, hidden_states, residual, alibi, attention_mask, layer_past=None, use_cache=False,
    output_attentions=False, **kwargs,
):
    batch_size, q_length, _ = hidden_states.shape
    fused_qkv = self.query_key_value(hidden_states)
    query_layer, key_layer, value_layer = self._reshape(fused_qkv)
    if layer_past is not None:
        key_layer, value_layer = layer_past.update(key_layer, value_layer, self.layer_idx)
    query_layer = query_layer.reshape(batch_size * self.num_heads, -1, self.head_dim)
    key_layer = key_layer.reshape(batch_size * self.num_heads, -1, self.head_dim).transpose(-1, -2)
    value_layer = value_layer.reshape(batch_size * self.num_heads, -1, self.head_dim)
    attention_scores = alibi.baddbmm(
        batch1=query_layer, batch2=key_layer, beta=self.beta, alpha=self.inv_norm_factor,
    )
    attn_weights = attention_scores.view(batch_size, self.num_heads, q_length, -1)
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask
    attention_probs = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_layer.dtype)
    attention_probs = self.attention_dropout(attention_probs)
    attention_probs_reshaped = attention_probs.view(batch_size * self.num_heads, q_length, -1)
    context_layer = torch.bmm(attention_probs_reshaped, value_layer)
    context_layer = self._merge_heads(context_layer)
    if self.pretraining_tp > 1 and self.slow_but_exact:
        slices = self.hidden_size / self.pretraining_tp
        output_tensor = torch.zeros_like(context_layer)
        for i in range(self.pretraining_tp):
            output_tensor = output_tensor + F.linear(
                context_layer[:, :, int(i * slices) : int((i + 1) * slices)],
                self.dense.weight[:, int(i * slices) : int((i + 1) * slices)],
            )
    else:
        output_tensor = self.dense(context_layer)
    output_tensor = dropout_add(output_tensor, residual, self.hidden_dropout, self.training)
    return output_tensor, attention_probs
""")
def _bloom(kind: Any) -> Methods:
    def forward(
        self: Any,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if (
            output_attentions
            or attention_mask is None
            or (self.pretraining_tp > 1 and self.slow_but_exact)
            or self.beta != 1.0
            or not is_unmodified(self.attention_dropout, nn.Dropout)
        ):
            return kind.forward(  # type: ignore[no-any-return]
                self, hidden_states, residual, alibi, attention_mask, layer_past=layer_past,
                use_cache=use_cache, output_attentions=output_attentions, **kwargs,
            )  # fmt: skip
        q, k, v = self._reshape(self.query_key_value(hidden_states))  # [B, H, M, D]
        past = _past(layer_past, self.layer_idx)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        bias = alibi.view(q.shape[0], self.num_heads, 1, -1)
        out = _attention_with_key_bias(
            q, k, v, bias, attention_mask, past, scale=self.inv_norm_factor,
            dropout_p=active_p(self.attention_dropout),
        )  # fmt: skip
        y = self.dense(out.transpose(1, 2).flatten(2))
        add = kind.forward.__globals__["dropout_add"]
        return add(y, residual, self.hidden_dropout, self.training), None

    return {"forward": forward}


class _KeyBias:
    """MPT's bias [H, 1, positions], for a call whose weights are not used."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


_MPT = """
def forward(
    self, hidden_states, position_bias, cache=None, attention_mask=None, **kwargs,
):
    batch_size, seq_length = hidden_states.shape[:2]
    mixed_qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed_qkv = mixed_qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query_states, key_states, value_states = mixed_qkv.chunk(3, dim=2)
    query_states = query_states.reshape(
        batch_size, seq_length, self.n_heads, self.head_dim
    ).transpose(1, 2)
    key_states = key_states.reshape(
        batch_size, seq_length, self.n_heads, self.head_dim
    ).transpose(1, 2)
    value_states = value_states.reshape(
        batch_size, seq_length, self.n_heads, self.head_dim
    ).transpose(1, 2)
    if cache is not None:
        key_states, value_states = cache.update(
            key_states, value_states, self.layer_idx, kwargs=kwargs
        )
    attention_scores = torch.matmul(query_states, key_states.transpose(-1, -2)) * self.softmax_scale
    query_length = seq_length if cache is None else seq_length + cache.get_seq_length()
    if position_bias is not None:
        if len(position_bias.shape) != 3:
            raise ValueError(
                f"Expecting position_bias shape to be 3 dimensions, got {len(position_bias.shape)}"
            )
        key_length = key_states.shape[-2]
        position_bias_query_index = max(0, position_bias.size(1) - query_length)
        position_bias_key_index = max(0, position_bias.size(2) - key_length)
        position_bias = position_bias[:, position_bias_query_index:, position_bias_key_index:]
        attention_scores = attention_scores + position_bias
    if attention_mask is not None:
        attention_scores = attention_scores.masked_fill(
            attention_mask, torch.finfo(query_states.dtype).min
        )
    attn_weights = nn.functional.softmax(attention_scores.float(), dim=-1).to(value_states.dtype)
    attn_weights = nn.functional.dropout(
        attn_weights, p=self.attn_dropout_p, training=self.training
    )
    context_states = torch.matmul(attn_weights, value_states)
    context_states = context_states.permute(0, 2, 1, 3).contiguous().view(
        batch_size, seq_length, -1
    )
    attn_output = self.out_proj(context_states)
    return attn_output, attn_weights
"""


@_form(_MPT)
@_form(_MPT.replace(", kwargs=kwargs", ""))  # before transformers 5.24
def _mpt(kind: Any) -> Methods:
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_bias: Any,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = kwargs.pop("past_key_values", cache)
        if not isinstance(position_bias, _KeyBias):
            return kind.forward(  # type: ignore[no-any-return]
                self, hidden_states, position_bias, cache, attention_mask, **kwargs
            )
        assert attention_mask is not None
        B, M = hidden_states.shape[:2]
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (
            x.reshape(B, M, self.n_heads, self.head_dim).transpose(1, 2) for x in qkv.chunk(3, 2)
        )
        past = _past(cache, self.layer_idx)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        bias = position_bias.values
        bias = bias[None, :, :, max(0, bias.shape[2] - k.shape[2]) :]
        out = _attention_with_key_bias(
            q, k, v, bias, attention_mask, past, scale=self.softmax_scale,
            dropout_p=self.attn_dropout_p if self.training else 0.0,
        )  # fmt: skip
        return self.out_proj(out.transpose(1, 2).flatten(2)), None

    return {"forward": forward, "takes_key_bias": True}


@_form("""
def forward(
    self, hidden_states, position_bias, attention_mask, layer_past=None, use_cache=False,
    output_attentions=False, **kwargs,
):
    layernorm_output = self.norm_1(hidden_states)
    residual = hidden_states
    attn_outputs, attn_weights = self.attn(
        layernorm_output, position_bias=position_bias, attention_mask=attention_mask,
        cache=layer_past,
    )
    hidden_states = self.resid_attn_dropout(attn_outputs) + residual
    layernorm_output = self.norm_2(hidden_states)
    residual = hidden_states
    output = self.ffn(layernorm_output, residual)
    return output, attn_weights
""")
def _mpt_block(kind: Any) -> Methods:
    """MPT's attention is not told whether its weights are used; the block is."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_bias: Any,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        if (
            not output_attentions
            and attention_mask is not None
            and attention_mask.dtype is torch.bool
            and isinstance(position_bias, Tensor)
            and position_bias.dim() == 3
            and position_bias.shape[1] == 1
            and getattr(type(self.attn), "takes_key_bias", False)
            and is_unmodified(self.attn, type(self.attn))
        ):
            position_bias = _KeyBias(position_bias)
        return kind.forward(
            self, hidden_states, position_bias, attention_mask, layer_past=layer_past,
            use_cache=use_cache, output_attentions=output_attentions, **kwargs,
        )  # fmt: skip

    return {"forward": forward}
