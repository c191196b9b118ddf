"""The functions of the namespace `fastattn`.

Shapes: B batch, H query heads, K key/value heads (H a multiple of K), M queries, N keys, D head dim
of q and k, E head dim of v. `backend` is one of sm90, cuda, triton, cpu, torch and reference, and
never falls back. With None, FASTATTN_BACKEND decides if it is set; otherwise the op's first backend
that can run the call is used (see `explain`). Under `torch.autocast`, inputs of attention, `ffn`
and `linear` are cast to autocast's dtype, and the result has that dtype; inputs of the norms and
fp64 inputs are not cast.

Invalid arguments raise before anything runs: TypeError for types and dtypes, ValueError for shapes,
values, devices and unknown backends, IndexError for `rows` and `heads`. A requested backend that
cannot run the call raises NotImplementedError. `**unknown` accepts nothing: for the name of another
package's argument, the TypeError gives the name to use here.
"""

# A function checks its arguments (`_arguments.py`), fills in defaults and calls the op. The code
# behind the op does not check arguments again.

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch._ops import OpOverload
from typing_extensions import Never, Unpack

from fastattn import _jagged as jagged
from fastattn._arguments import FLOATS as FLOATS
from fastattn._arguments import (
    Causal,
    aligned_mask,
    causal_code,
    check_attention_inputs,
    check_device,
    check_dropout,
    check_eps,
    check_ffn_weights,
    check_float,
    check_index,
    check_length,
    check_linear_weights,
    check_mask_dtype,
    check_parameter,
    check_probability,
    check_restrictions,
    check_rows,
    check_scale,
    check_varlen_inputs,
    check_window,
    in_four_dimensions,
    sizes,
)
from fastattn._arguments import Lengths as Lengths
from fastattn._arguments import are_plain as are_plain
from fastattn._arguments import autocast as autocast
from fastattn._arguments import check_holds_values as check_holds_values
from fastattn._arguments import check_tensor as check_tensor
from fastattn._arguments import fits_linear as fits_linear
from fastattn._arguments import is_on_host as is_on_host
from fastattn._arguments import is_shape as is_shape
from fastattn._arguments import is_size as is_size
from fastattn._arguments import lengths_tensor as lengths_tensor
from fastattn._arguments import overrides_functions as overrides_functions
from fastattn._arguments import plain_sizes as plain_sizes
from fastattn._arguments import runs_eagerly as runs_eagerly
from fastattn._options import AddNormOptions, AttentionOptions, PaddedOptions, refuse_unknown
from fastattn._paged import check_block_table, check_paged_inputs, refuse_gradients
from fastattn._paged import first_differentiated as first_differentiated
from fastattn._scores import RelativeBuckets, score_arguments
from fastattn._scores import t5_buckets as t5_buckets
from fastattn.ops._dropout import draw_seed
from fastattn.ops._select import OPS, Explanation, explaining
from fastattn.ops.attention.op import CAUSAL as CAUSAL
from fastattn.ops.attention.op import ForwardCall as ForwardCall
from fastattn.ops.attention.op import PreparedMask, classify_mask
from fastattn.ops.attention.op import attention as attention_op
from fastattn.ops.attention.op import attention_weights as _attention_weights
from fastattn.ops.attention.op import attention_with_weights as attention_with_weights_op
from fastattn.ops.ffn.op import ACTIVATIONS
from fastattn.ops.ffn.op import ffn as ffn_op
from fastattn.ops.layer_norm.op import add_layer_norm as add_layer_norm_op
from fastattn.ops.layer_norm.op import layer_norm as layer_norm_op
from fastattn.ops.layer_norm.op import rms_norm as rms_norm_op
from fastattn.ops.linear.op import batch_invariant as batch_invariant
from fastattn.ops.linear.op import linear as linear_op
from fastattn.ops.linear.op import linear_runs_torch as linear_runs_torch
from fastattn.ops.topk_logsumexp.op import topk_logsumexp as _topk_logsumexp

__all__ = [
    "PreparedMask",
    "add_layer_norm",
    "attention",
    "attention_varlen",
    "attention_weights",
    "attention_with_weights",
    "decompositions",
    "explain",
    "ffn",
    "layer_norm",
    "linear",
    "new_dropout_seed",
    "prepare_mask",
    "rms_norm",
]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[PaddedOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[PaddedOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[PaddedOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | PreparedMask | None = None,
    key_lengths: Lengths | None = None,
    query_lengths: Lengths | None = None,
    block_table: Tensor | None = None,
    causal: Causal = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_buckets: RelativeBuckets | None = None,
    relative_max_distance: int = 128,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    dropout_stream: int = 0,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ + mask) v over the allowed pairs (Vaswani et al. 2017, equation 1).

    A query attends to a key if every restriction (mask, lengths, causal, window) allows the pair. A
    query without an allowed key has output 0, gradient 0 and lse -inf (with sinks: the head's sink,
    except for queries beyond query_lengths). Such queries, and keys that no query attends to, may
    hold any values, NaN included: their gradients are exactly 0.

    The score of an allowed pair is softcap(scale q kᵀ) + mask + ALiBi's bias + relative bias. All
    of these, and sinks, combine with each other, with every restriction and with dropout, and all
    but softcap get gradients.

    Args:
        q: [B, H, M, D]; fp32, fp16, bf16 or fp64. Any strides; copied if the last dimension is not
            contiguous. q, k and v may also be jagged nested tensors, whose sequences have their own
            M and N; causal=True then means "top_left".
        k: [B, K, N, D] and v: [B, K, N, E], in q's dtype. Query head h uses head h // (H // K).
        mask: broadcastable to [B, H, M, N], or the result of `prepare_mask`. A bool mask is True
            where attention is allowed. A floating mask is added to the scores; values at or below
            finfo(mask.dtype).min block the pair. It gets a gradient if it requires one.
            torch.nn.attention.bias.causal_lower_right(M, N) is the same as causal="bottom_right",
            also for `window` and distances, causal_upper_left(M, N) as causal="top_left".
        key_lengths: int32 or int64 [B] or [B, M], or a list of B integers, which is copied to q's
            device; clamped to [0, N]. Keys from this position on are blocked.
        query_lengths: int32 or int64 [B], or a list of B integers, clamped to [0, M]. Queries from
            this position on are treated as queries without an allowed key, and are not computed.
        block_table: int32 [B, T]: k [P, K, page, D] and v [P, K, page, E] are pages of any order,
            and key j of sequence b is row j % page of page block_table[b, j // page], so that
            N = T * page. All other arguments have the meaning they have for N contiguous keys.
            Entries for keys beyond the key length may be any numbers; these pages and keys are not
            read. Other entries must be pages: eager calls on the CPU check them, on a GPU other
            numbers are undefined behaviour. No gradients and no dropout.
        causal: False, "top_left" (query i attends to keys j <= i), "bottom_right" (j <= i + N - M),
            "bottom_right_lengths" (j <= i + n - m, with the key length n and the query length m of
            each sequence, N and M without lengths; key_lengths must be [B]), or True, which
            requires M == N. Warning: "bottom_right" goes by the sizes of the tensors, also if
            there are key_lengths. For new queries over a padded cache, where the last query is at
            the last key of its sequence, use "bottom_right_lengths".
        window: (left, right), the number of allowed keys on each side of the causal diagonal (of
            the top-left one if causal is False); -1 is unlimited.
        scale: any finite number; default D ** -0.5.
        alibi_slopes: [H] or [B, H], floating. Adds -slope * |d| to the score of a pair, where d is
            the distance of the key from the key on the query's causal diagonal (from key i if
            causal is False), so that no bias is added on the diagonal (ALiBi, Press et al. 2022).
        softcap: a number from 1e-30 to 1e30; scores become softcap * tanh(score / softcap), after
            `scale` and before masks and biases are added, as in Gemma 2.
        sinks: [H], floating. A logit for each head that takes part in the softmax of every query
            and has no value, as in gpt-oss: the weights of the keys sum to less than 1.
        relative_bias: [H, buckets], floating: adds relative_bias[h, bucket(d)] to the score, where
            d is the distance as for alibi_slopes. Memory is linear in M + N.
        relative_buckets: which distances share a bucket: "t5" and "t5_causal" as in T5 (Raffel et
            al. 2020) with bidirectional=True and False, and "clipped": bucket c + d for
            -c <= d <= c, where buckets = 2 c + 1 (Shaw et al. 2018).
        relative_max_distance: the distance from which on T5's last bucket is used.
        dropout_p: the probability of dropping a weight, in steps of 1/256.
        dropout_seed: int64 [1] on q's device; None draws one from PyTorch's random generator. Calls
            with the same seed and stream drop the same weights. int64 [5] holds the seed and the
            index of this call's first sequence, query head, query and key in a larger attention:
            the call drops what that attention drops there. The indices of the query and the key
            must be multiples of 16.
        dropout_stream: gives calls that share a seed different dropout; 0 <= stream < 2 ** 31.
        return_lse: whether to also return the logsumexp of each query's scores, [B, H, M], fp32
            (fp64 for fp64 inputs), differentiable.
        backend: "sm90", "triton", "cpu", "torch" or "reference" runs the call on this backend or
            raises NotImplementedError. None: the FASTATTN_BACKEND environment variable decides if
            it is set, else the first backend that can run the call (see `explain`).

    Returns:
        out [B, H, M, E] in q's dtype (autocast's if it is on) and dimension order, or (out, lse).

    Example:
        >>> import torch, fastattn
        >>> q = torch.randn(2, 8, 128, 64)  # [B, H, M, D]
        >>> k = v = torch.randn(2, 2, 128, 64)  # four query heads share a key/value head
        >>> fastattn.attention(q, k, v, causal=True, key_lengths=[128, 90]).shape
        torch.Size([2, 8, 128, 64])
    """
    if unknown:
        refuse_unknown(attention, unknown)
    plain = plain_sizes(q, k, v) if block_table is None else None
    if plain is None and isinstance(q, Tensor) and q.is_nested:
        for name, given in (
            ("mask", mask),
            ("key_lengths", key_lengths),
            ("query_lengths", query_lengths),
            ("block_table", block_table),
        ):
            if given is not None:
                got = type(given).__name__
                raise ValueError(f"{name} must be None for nested q, k and v, got {got}")
        return _attention_nested(
            q, k, v, causal=causal, window=window, scale=scale, alibi_slopes=alibi_slopes,
            softcap=softcap, sinks=sinks, relative_bias=relative_bias,
            relative_buckets=relative_buckets, relative_max_distance=relative_max_distance,
            dropout_p=dropout_p, dropout_seed=dropout_seed, dropout_stream=dropout_stream,
            return_lse=return_lse, backend=backend,
        )  # fmt: skip
    if plain is not None:
        (B, H, M, D), N = plain, k.shape[2]
    else:
        q, k, v = autocast(q, k, v)
        if block_table is None:
            B, H, M, D, N = check_attention_inputs(q, k, v)
        else:
            B, H, M, D, N = check_paged_inputs(q, k, v, block_table)
    mask_tiles = None
    if mask is not None or key_lengths is not None or query_lengths is not None:
        mask, causal = aligned_mask(mask, causal, M, N)
        mask, mask_tiles, key_lengths, query_lengths = check_restrictions(
            mask, key_lengths, query_lengths, B, H, M, N, q.device
        )
    left, right = (-1, -1) if window is None else check_window(window)
    code = 0 if causal is False else causal_code(causal, M, N, key_lengths, query_lengths)
    scale = check_scale(scale, D)
    distance_bias, cap = None, 0.0
    if not (alibi_slopes is softcap is sinks is relative_bias is relative_buckets is None):
        distance_bias, sinks, cap = score_arguments(
            alibi_slopes, softcap, sinks, relative_bias, relative_buckets, relative_max_distance,
            causal=code, B=B, M=M, N=N, q=q,
        )  # fmt: skip
    seed = check_dropout(dropout_p, dropout_seed, dropout_stream, q, takes_origin=True)
    if block_table is not None:
        check_block_table(block_table, q, k, key_lengths, float(dropout_p))
        refuse_gradients(
            q=q, k=k, v=v, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks,
            relative_bias=relative_bias,
        )  # fmt: skip
        mask_tiles = None
    out, lse = attention_op.overload(backend)(
        q, k, v, mask, mask_tiles, key_lengths, query_lengths, None, None, 0, 0, distance_bias,
        sinks, cap, code, left, right, scale, float(dropout_p), seed, dropout_stream, block_table,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _attention_nested(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        jagged.check(name, x)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's {q.shape[0]} sequences, got {k.shape[0]}")
    jagged.check_sequences(k, v)
    rows_q, offsets_q, longest_q = jagged.pack(q)
    rows_k, offsets_k, longest_k = jagged.pack(k)
    rows_v, *_ = jagged.pack(v)
    out, lse = attention_varlen(
        rows_q, rows_k, rows_v, offsets_q, offsets_k, longest_q, longest_k, return_lse=True,
        **options,
    )  # fmt: skip
    nested = jagged.unpack(out, q)
    return (nested, jagged.unpack(lse.t(), q)) if return_lse else nested


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: Causal = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_buckets: RelativeBuckets | None = None,
    relative_max_distance: int = 128,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    dropout_stream: int = 0,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over packed sequences, without padding.

    Args:
        q: [T, H, D]; k: [S, K, D]; v: [S, K, E].
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1] on q's device, ascending from 0. Sequence b is
            rows cu_seqlens[b] to cu_seqlens[b + 1]. The values are not checked: that would make the
            host wait for the device.
        max_seqlen_q, max_seqlen_k: upper bounds of the sequences' lengths.
        causal, window: as in `attention`, with each sequence's own lengths; True means "top_left",
            "bottom_right_lengths" the same as "bottom_right".
        alibi_slopes, softcap, sinks, relative_bias, relative_buckets, relative_max_distance: as in
            `attention`; distances are those inside a sequence.
        scale, dropout_p, dropout_seed, dropout_stream, return_lse, backend: as in `attention`. The
            dropout bits are those of a batch of padded sequences; in a seed of 5 numbers the
            indices of the query and the key are those inside every sequence.

    Returns:
        out [T, H, E], or (out, lse [H, T]). Rows beyond the last offset have out 0, lse -inf and
        gradient 0.
    """
    if unknown:
        refuse_unknown(attention_varlen, unknown)
    q, k, v = autocast(q, k, v)
    check_varlen_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k)
    max_seqlen_q = check_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = check_length("max_seqlen_k", max_seqlen_k)
    left, right = check_window(window)
    code, scale = causal_code(causal, 0, 0), check_scale(scale, q.shape[2])
    distance_bias, cap = None, 0.0
    if not (alibi_slopes is softcap is sinks is relative_bias is relative_buckets is None):
        distance_bias, sinks, cap = score_arguments(
            alibi_slopes, softcap, sinks, relative_bias, relative_buckets, relative_max_distance,
            causal=code, B=cu_seqlens_q.shape[0] - 1, M=max_seqlen_q, N=max_seqlen_k, q=q,
        )  # fmt: skip
    seed = check_dropout(dropout_p, dropout_seed, dropout_stream, q, takes_origin=True)
    out, lse = attention_op.overload(backend)(
        q, k, v, None, None, None, None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        distance_bias, sinks, cap, code, left, right, scale, float(dropout_p), seed, dropout_stream,
        None,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: int,
    scale: float,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    dropout_stream: int = 0,
) -> Tensor:
    """`attention` of checked inputs without other options. causal: the op's code."""
    return attention_op.overload(None)(  # type: ignore[no-any-return]
        q, k, v, None, None, None, None, None, None, 0, 0, None, None, 0.0, causal, -1, -1, scale,
        dropout_p, dropout_seed, dropout_stream, None,
    )[0]  # fmt: skip


def attention_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | None = None,
    key_lengths: Lengths | None = None,
    query_lengths: Lengths | None = None,
    causal: Causal = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_buckets: RelativeBuckets | None = None,
    relative_max_distance: int = 128,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    dropout_stream: int = 0,
    processes: int = 1,
) -> ForwardCall:
    """The op's arguments for arguments of `attention` over padded sequences, which are checked.

    processes: between how many the sequences are divided. q, k, v are this process's queries and
    keys, and mask has these queries and the keys of all processes.
    """
    if (plain := plain_sizes(q, k, v)) is not None:
        (B, H, rows, D), keys = plain, k.shape[2]
    else:
        q, k, v = autocast(q, k, v)
        B, H, rows, D, keys = check_attention_inputs(q, k, v)
    M, N = rows * processes, keys * processes
    mask, causal = aligned_mask(mask, causal, M, N)
    mask, mask_tiles, key_lengths, query_lengths = check_restrictions(
        mask, key_lengths, query_lengths, B, H, rows, N, q.device
    )
    code = causal_code(causal, M, N, key_lengths, query_lengths)
    distance_bias, sinks, cap = score_arguments(
        alibi_slopes, softcap, sinks, relative_bias, relative_buckets, relative_max_distance,
        causal=code, B=B, M=M, N=N, q=q,
    )  # fmt: skip
    left, right = check_window(window)
    scale = check_scale(scale, D)
    seed = check_dropout(dropout_p, dropout_seed, dropout_stream, q, takes_origin=True)
    return ForwardCall(
        q, k, v, mask, mask_tiles, key_lengths, query_lengths, None, None, 0, 0, distance_bias,
        sinks, cap, code, left, right, scale, float(dropout_p), seed, dropout_stream, None,
    )  # fmt: skip


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | PreparedMask | None = None,
    key_lengths: Lengths | None = None,
    query_lengths: Lengths | None = None,
    causal: Causal = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_buckets: RelativeBuckets | None = None,
    relative_max_distance: int = 128,
    rows: Tensor | slice | None = None,
    heads: Tensor | slice | None = None,
    **unknown: Never,
) -> Tensor:
    """The attention weights of `attention`, without dropout, for selected queries and heads.

    Args:
        q, k, mask, key_lengths, query_lengths, causal, window, scale, alibi_slopes, softcap, sinks,
            relative_bias, relative_buckets, relative_max_distance: as in `attention`.
        rows, heads: integer index tensors or slices that select queries and query heads; default
            all. Only these are computed.

    Returns:
        [B, heads, rows, N], fp32 (fp64 for fp64 inputs), differentiable. The weights of a query
        without an allowed key are 0.
    """
    if unknown:
        refuse_unknown(attention_weights, unknown)
    call = attention_call(
        q, k, k, mask, key_lengths, query_lengths, causal, window, scale, alibi_slopes, softcap,
        sinks, relative_bias, relative_buckets, relative_max_distance,
    )  # fmt: skip
    if rows is None and heads is None and call.q.is_cpu:
        # Values without columns: the kernel computes weights alone, in the dtype of the result.
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (call.q, call.k))
        values = k.detach()[..., :0]
        return attention_with_weights_op(q, k, values, *call[3:], False)[2]  # type: ignore[no-any-return]
    (_, H, M, _), device = call.q.shape, call.q.device
    rows, heads = check_index("rows", rows, M, device), check_index("heads", heads, H, device)
    return _attention_weights(call, rows, heads)


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    average: bool = False,
    mask: Tensor | PreparedMask | None = None,
    key_lengths: Lengths | None = None,
    query_lengths: Lengths | None = None,
    causal: Causal = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_buckets: RelativeBuckets | None = None,
    relative_max_distance: int = 128,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    dropout_stream: int = 0,
    backend: str | None = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """`attention` and its weights, from one softmax.

    Args:
        average: whether to average the weights over the heads.
        q, k, v, mask, key_lengths, query_lengths, causal, window, scale, alibi_slopes, softcap,
            sinks, relative_bias, relative_buckets, relative_max_distance, dropout_p, dropout_seed,
            dropout_stream: as in `attention`; q, k and v must not be nested.
        backend: cpu, torch or reference.

    Returns:
        (out, weights). out has the bits of `attention` on the CPU. weights: [B, H, M, N], or
        [B, M, N] with average, in q's dtype, differentiable, after dropout. The weights of a query
        without an allowed key are 0. The weights are computed in fp32 and rounded once.
    """
    if unknown:
        refuse_unknown(attention_with_weights, unknown)
    if not isinstance(average, bool):
        raise TypeError(f"average must be a bool, got {type(average).__name__}")
    call = attention_call(
        q, k, v, mask, key_lengths, query_lengths, causal, window, scale, alibi_slopes, softcap,
        sinks, relative_bias, relative_buckets, relative_max_distance, dropout_p, dropout_seed,
        dropout_stream,
    )  # fmt: skip
    out, _, weights = attention_with_weights_op(*call, average, backend=backend)
    return out, weights


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al. 2016).

    x: [..., N]; weight, bias: [N] or None, in fp32 or x's dtype. eps: finite, >= 0. Mean and
    variance are computed in two passes, in fp32 (fp64 for fp64). The result has x's dtype.
    backend: as in `attention`.
    """
    check_rows("x", x)
    check_parameter("weight", weight, x)
    check_parameter("bias", bias, x)
    return layer_norm_op(x, weight, bias, check_eps(eps), backend=backend)[0]


@overload
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    return_sum: Literal[False] = ...,
    **options: Unpack[AddNormOptions],
) -> Tensor: ...
@overload
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    return_sum: Literal[True],
    **options: Unpack[AddNormOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    return_sum: bool,
    **options: Unpack[AddNormOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    dropout_stream: int = 0,
    return_sum: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """z = residual + dropout(x + x_bias), y = layer_norm(z): the step between two blocks of a
    Transformer.

    Args:
        x: [..., N], the output of the block.
        residual: x's shape, in any floating dtype, which is also the dtype of y and z.
        weight, bias: [N] or None. x_bias: [N] or None, the bias of the projection that computed x.
        eps: finite, >= 0.
        dropout_p, dropout_seed, dropout_stream: as in `attention`, the seed int64 [1].
        return_sum: whether to return (y, z); pre-norm Transformers pass z on as the next residual.
        backend: as in `attention`.
    """
    if unknown:
        refuse_unknown(add_layer_norm, unknown)
    check_rows("x", x)
    check_rows("residual", residual)
    if not is_shape(residual.shape, x.shape):
        raise ValueError(f"residual must have x's shape {sizes(x)}, got {sizes(residual)}")
    check_device("residual", residual, x.device)
    check_parameter("x_bias", x_bias, x)
    check_parameter("weight", weight, residual)
    check_parameter("bias", bias, residual)
    seed = check_dropout(dropout_p, dropout_seed, dropout_stream, x)
    y, z, *_ = add_layer_norm_op(
        x, residual, x_bias, weight, bias, check_eps(eps), float(dropout_p), seed, dropout_stream,
        backend=backend,
    )  # fmt: skip
    return (y, z) if return_sum else y


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float | None = None, *, backend: str | None = None
) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang and Sennrich 2019).

    x: [..., N]; weight: [N] or None. eps: finite, >= 0; default finfo(torch.float32).eps, or
    finfo(torch.float64).eps for fp64, as in PyTorch. The result has x's dtype. backend: as in
    `attention`.
    """
    check_rows("x", x)
    check_parameter("weight", weight, x)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return rms_norm_op(x, weight, check_eps(eps), backend=backend)[0]


def ffn(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str = "relu",
    *,
    dropout_p: float = 0.0,
    output_dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    dropout_stream: int = 0,
    residual: Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor:
    """dropout(dropout(act(x w1ᵀ + b1)) w2ᵀ + b2) [+ residual], the position-wise feed-forward
    network.

    Args:
        x: [..., D].
        w1, b1: [F, D], and [F] or None; for a gated activation [2F, D] and [2F], the gate first.
        w2, b2: [D', F], and [D'] or None. All four are in x's dtype, laid out as in `nn.Linear`.
        activation: relu, gelu, gelu_tanh, silu, or gated (act(gate) * up; Shazeer 2020): reglu,
            geglu, swiglu.
        dropout_p, output_dropout_p: for the activations, and for the output before the residual is
            added. dropout_seed, dropout_stream: as in `attention`, the seed int64 [1].
        residual: [..., D'] in any floating dtype, which is then the result's, or None.
        backend: as in `attention`.
    """
    if unknown:
        refuse_unknown(ffn, unknown)
    x, w1, b1, w2, b2 = autocast(x, w1, b1, w2, b2)
    check_rows("x", x)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    check_ffn_weights(x, w1, b1, w2, b2, activation)
    if residual is not None:
        check_float("residual", residual)
        wanted = (*x.shape[:-1], w2.shape[0])
        if not is_shape(residual.shape, wanted):
            raise ValueError(f"residual must be {list(wanted)}, got {sizes(residual)}")
        check_device("residual", residual, x.device)
    output_dropout_p = check_probability("output_dropout_p", output_dropout_p)
    seed = check_dropout(dropout_p, dropout_seed, dropout_stream, x, output_dropout_p)
    return ffn_op(
        x, w1, b1, w2, b2, residual, activation, float(dropout_p), output_dropout_p, seed,
        dropout_stream, backend=backend,
    )[0]  # fmt: skip


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """x weightᵀ + bias, as `torch.nn.functional.linear`, which runs by default where it is faster
    (see `explain`).

    x: [..., D] or a jagged nested tensor [B, j, ..., D]; weight: [E, D]; bias: [E] or None; all in
    the same dtype. backend: as in `attention`.
    """
    if isinstance(x, Tensor) and x.is_nested:
        jagged.check_rows("x", x)
        return jagged.with_rows(linear(x.values(), weight, bias, backend=backend), x)
    if not fits_linear(x, weight, bias):
        x, weight, bias = autocast(x, weight, bias)
        check_rows("x", x)
        check_linear_weights(x, weight, bias)
    return linear_op(x, weight, bias, backend=backend)  # type: ignore[no-any-return]


def topk_logsumexp(logits: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits of each row of [..., V] and the row's logsumexp, without gradients.

    Returns:
        The logsumexp of each whole row, [...], NaN if the row contains NaN; the `count` largest
        logits of each row among columns >= `first`, in descending order; their indices in the row.
        The last two are [..., count]; the order of equal logits and indices of -inf are undefined.
    """
    if not (first >= 0 and 1 <= count <= logits.shape[-1] - first):
        raise ValueError(
            f"first must be >= 0 and count from 1 to {logits.shape[-1]} - first, "
            f"got first {first} and count {count}"
        )
    rows, leading = logits.detach().reshape(-1, logits.shape[-1]), logits.shape[:-1]
    logsumexp, values, indices = _topk_logsumexp(rows, first, count)
    return logsumexp.view(leading), values.view(*leading, count), indices.view(*leading, count)


def prepare_mask(mask: Tensor) -> PreparedMask:
    """Classifies the tiles of a dense mask once, for many calls of `attention` with this mask.

    mask: as in `attention`. PyTorch operators find here, on the mask's device, which tiles are
    empty, full or partial, and which of their rows and columns are empty. GPU backends then do not
    repeat this in each call; the CPU kernels read the mask itself. Results and gradients have the
    same bits as with the mask itself. A mask that is changed in place must be prepared again; this
    is not checked.
    """
    check_mask_dtype(mask)
    if mask.dim() > 4:
        raise ValueError(f"mask must have at most 4 dimensions, got {sizes(mask)}")
    return PreparedMask(mask, classify_mask(in_four_dimensions(mask)))


def new_dropout_seed(device: torch.device | str) -> Tensor:
    """A dropout seed, int64 [1], drawn from PyTorch's random generator of `device`, so that
    `torch.manual_seed` and CUDA graphs apply to it.
    """
    return draw_seed(device)


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """A table for `torch.export.ExportedProgram.run_decompositions`: each forward op of fastattn in
    PyTorch's operators, for processes that do not have fastattn. `torch.onnx.export` needs
    no table.

    They have the semantics of the ops, such as output 0 for a query that may attend no key, but not
    their speed. Dropout raises NotImplementedError: call `model.eval()` before exporting.

    Example:
        >>> import torch, fastattn
        >>> program = torch.export.export(fastattn.nn.LayerNorm(8), (torch.randn(2, 8),))
        >>> program = program.run_decompositions(fastattn.decompositions())
        >>> any("fastattn" in str(node.target) for node in program.graph.nodes)
        False
    """
    forwards = (op for op in OPS.values() if not op.is_derivative)
    return {overload: f for op in forwards for overload, f in op.decompositions().items()}


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Which backend would run `fastattn.<op>(*args, **kwargs)`, and why not another: it cannot run
    the call, is not verified on this GPU or is known to be slower. Nothing is computed. Gradients
    and autocast are taken into account.

    op: the name of the function, such as "attention".
    """
    functions = {f.__name__: f for f in _FUNCTIONS}
    if not isinstance(op, str) or op not in functions:
        raise ValueError(f"op must be one of {', '.join(functions)}, got {op!r}")
    with explaining() as explanations:
        functions[op](*args, **kwargs)
    return explanations[0]


_FUNCTIONS = (
    *(attention, attention_varlen, attention_with_weights),
    *(layer_norm, add_layer_norm, rms_norm, ffn, linear),
)
