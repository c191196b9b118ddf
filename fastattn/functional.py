"""The public functions: what they compute, the checks of every argument (`_arguments.py`), the call
of the op.

Everything below this file trusts its inputs. Shapes: B batch, H query heads, K key/value heads (H a
multiple of K), M queries, N keys, D head dim of q and k, E head dim of v. `backend` names one of
sm90, triton, cpu, torch, reference and never falls back; None takes what FASTATTN_BACKEND asks for,
else the first of the op's backends that has no objection (see `explain`). Under `torch.autocast`
inputs of attention, `ffn` and `linear` are cast to its dtype, which is then the result's; inputs of
norms and fp64 inputs are not cast.

What an argument may not be is refused before anything runs, by name: TypeError for kinds and
dtypes, ValueError for shapes, values, devices and unknown backends, IndexError for `rows` and
`heads`. NotImplementedError is a backend that was asked for and cannot run the call.
"""

from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastattn import _jagged as jagged
from fastattn._arguments import (
    Causal,
    autocast,
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
from fastattn.ops._dropout import draw_seed
from fastattn.ops._select import Explanation, explaining
from fastattn.ops.attention.op import PreparedMask, classify_mask
from fastattn.ops.attention.op import attention as _attention
from fastattn.ops.attention.op import attention_varlen as _attention_varlen
from fastattn.ops.attention.op import attention_weights as _attention_weights
from fastattn.ops.ffn.op import ACTIVATIONS
from fastattn.ops.ffn.op import ffn as _ffn
from fastattn.ops.layer_norm.op import add_layer_norm as _add_layer_norm
from fastattn.ops.layer_norm.op import layer_norm as _layer_norm
from fastattn.ops.layer_norm.op import rms_norm as _rms_norm
from fastattn.ops.linear.op import batch_invariant as batch_invariant
from fastattn.ops.linear.op import linear as _linear
from fastattn.ops.topk_logsumexp.op import topk_logsumexp as _topk_logsumexp

__all__ = [
    "PreparedMask",
    "add_layer_norm",
    "attention",
    "attention_varlen",
    "attention_weights",
    "explain",
    "ffn",
    "layer_norm",
    "linear",
    "new_dropout_seed",
    "prepare_mask",
    "rms_norm",
]


class _Options(TypedDict, total=False):
    """The keywords that attention shares with its packed form, for type checkers."""

    causal: Causal
    window: tuple[int, int] | None
    scale: float | None
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int
    backend: str | None


class _Restrictions(_Options, total=False):
    mask: Tensor | PreparedMask | None
    key_lengths: Tensor | None
    query_lengths: Tensor | None


class _AddNormOptions(TypedDict, total=False):
    x_bias: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int
    backend: str | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Restrictions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Restrictions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[_Restrictions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | PreparedMask | None = None,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    causal: Causal = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    dropout_stream: int = 0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ + mask) v over the allowed pairs (Vaswani et al. 2017, equation 1).

    All restrictions combine by intersection. A row with no allowed key gives output 0, gradient 0
    and lse -inf. Keys that no query may attend and rows without a key may hold anything, NaN
    included: their gradients are exactly 0.

    Args:
        q: [B, H, M, D]; fp32, fp16, bf16 or fp64. Any strides; a last dimension
            that is not contiguous is copied. Or q, k and v all jagged nested tensors, M and N then
            each sequence's own; causal=True means "top_left".
        k: [B, K, N, D], v: [B, K, N, E], in q's dtype. Query head h reads head h // (H // K).
        mask: broadcastable to [B, H, M, N]. bool: True = may attend. Floating: added to the scores;
            values at or below finfo(mask.dtype).min block. A floating mask that requires grad gets
            its gradient. Or what `prepare_mask` made of such a mask.
        key_lengths: int32 or int64 [B] or [B, M]: keys at or beyond it are blocked. Clamped to [0,
            N].
        query_lengths: int32 or int64 [B]: rows at or beyond it are empty and not computed. Clamped
            to [0, M].
        causal: False, "top_left" (key j allowed if j <= i), "bottom_right" (j <= i + N - M). True
            needs M == N.
        window: (left, right) keys on each side of the causal diagonal (top left if causal is off);
            -1 = unlimited.
        scale: default D ** -0.5; any finite number.
        dropout_p: probability of dropping a normalised weight, in steps of 1/256.
        dropout_seed: int64 [1] on q's device; None draws one from torch's generator. The same seed
            and stream repeat a call exactly.
        dropout_stream: separates calls that share a seed; 0 <= stream < 2 ** 31.
        return_lse: also return the natural log of the sum of exp of each row's scores, fp32 (fp64
            for fp64) [B, H, M], differentiable.

    Returns:
        out [B, H, M, E] in q's dtype (autocast's where it is on) and storage order, or (out, lse).
    """
    backend = _attention.choice(backend)
    if isinstance(q, Tensor) and q.is_nested:
        for name, given in (
            ("mask", mask),
            ("key_lengths", key_lengths),
            ("query_lengths", query_lengths),
        ):
            if given is not None:
                raise ValueError(f"{name} must be None with nested tensors, which have lengths")
        return _attention_nested(
            q, k, v, causal=causal, window=window, scale=scale, dropout_p=dropout_p,
            dropout_seed=dropout_seed, dropout_stream=dropout_stream, return_lse=return_lse,
            backend=backend,
        )  # fmt: skip
    q, k, v = autocast(q, k, v)
    B, H, M, D, N = check_attention_inputs(q, k, v)
    mask_tiles = None
    if mask is not None or key_lengths is not None or query_lengths is not None:
        mask, mask_tiles = check_restrictions(
            mask, key_lengths, query_lengths, B, H, M, N, q.device
        )
    left, right = check_window(window)
    code, scale = causal_code(causal, M, N), check_scale(scale, D)
    seed = check_dropout(dropout_p, dropout_seed, dropout_stream, q.device)
    out, lse = _attention(
        q, k, v, mask, mask_tiles, key_lengths, query_lengths, code, left, right, scale,
        float(dropout_p), seed, dropout_stream, backend=backend,
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
    **options: Unpack[_Options],
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
    **options: Unpack[_Options],
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
    **options: Unpack[_Options],
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
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    dropout_stream: int = 0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over sequences packed one behind the other, without padding.

    Args:
        q: [T, H, D]; k: [S, K, D]; v: [S, K, E].
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1] on q's device, ascending from 0: sequence b is
            rows cu_seqlens[b] to cu_seqlens[b + 1]. Trusted: their values are never read by the
            host.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        causal, window: as in `attention`, by each sequence's own lengths; True means "top_left".
        scale, dropout_p, dropout_seed, dropout_stream, return_lse, backend: as in `attention`;
            dropout counts sequences as batches and positions inside them.

    Returns:
        out [T, H, E], or (out, lse [H, T]). Rows beyond the last offset: out 0, lse -inf, gradient
        0.
    """
    backend = _attention_varlen.choice(backend)
    q, k, v = autocast(q, k, v)
    check_varlen_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k)
    max_seqlen_q = check_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = check_length("max_seqlen_k", max_seqlen_k)
    left, right = check_window(window)
    code, scale = causal_code(causal, 0, 0), check_scale(scale, q.shape[2])
    seed = check_dropout(dropout_p, dropout_seed, dropout_stream, q.device)
    out, lse = _attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, code, left, right, scale,
        float(dropout_p), seed, dropout_stream, backend=backend,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | PreparedMask | None = None,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    causal: Causal = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    rows: Tensor | slice | None = None,
    heads: Tensor | slice | None = None,
) -> Tensor:
    """The weights that `attention` gives the values, for the rows and heads one wants to look at.

    Arguments as in `attention`; dropout is not applied. rows, heads: integer index tensors or
    slices of the queries and query heads, all by default. The work is that of the chosen rows and
    heads.

    Returns:
        [B, heads, rows, N], fp32 (fp64 for fp64), differentiable. Rows without a key are 0.
    """
    q, k = autocast(q, k)
    B, H, M, D, N = check_attention_inputs(q, k, k)
    mask, _ = check_restrictions(mask, key_lengths, query_lengths, B, H, M, N, q.device)
    return _attention_weights(
        q, k, mask, key_lengths, query_lengths, causal_code(causal, M, N), *check_window(window),
        check_scale(scale, D),
        check_index("rows", rows, M, q.device), check_index("heads", heads, H, q.device),
    )  # fmt: skip


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al. 2016).

    x: [..., N]; weight, bias: [N] or None, fp32 or x's dtype. eps: finite, >= 0. Statistics in fp32
    by two passes. Result in x's dtype.
    """
    backend = _layer_norm.choice(backend)
    check_rows("x", x)
    check_parameter("weight", weight, x)
    check_parameter("bias", bias, x)
    return _layer_norm(x, weight, bias, check_eps(eps), backend=backend)[0]


@overload
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    return_sum: Literal[False] = ...,
    **options: Unpack[_AddNormOptions],
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
    **options: Unpack[_AddNormOptions],
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
    **options: Unpack[_AddNormOptions],
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
) -> Tensor | tuple[Tensor, Tensor]:
    """z = residual + dropout(x + x_bias), y = layer_norm(z): what stands between two blocks of a
    Transformer.

    Args:
        x: [..., N], the branch. residual: the same shape, of any floating dtype; y and z take it.
        weight, bias: [N] or None. x_bias: [N] or None, the bias of the projection that made x.
        eps: finite, >= 0.
        dropout_p, dropout_seed, dropout_stream: as in `attention`.
        return_sum: return (y, z); pre-norm blocks carry z on.
    """
    backend = _add_layer_norm.choice(backend)
    check_rows("x", x)
    check_rows("residual", residual)
    if residual.shape != x.shape:
        raise ValueError(f"residual must have x's shape {sizes(x)}, got {sizes(residual)}")
    check_device("residual", residual, x.device)
    check_parameter("x_bias", x_bias, x)
    check_parameter("weight", weight, residual)
    check_parameter("bias", bias, residual)
    seed = check_dropout(dropout_p, dropout_seed, dropout_stream, x.device)
    y, z, *_ = _add_layer_norm(
        x, residual, x_bias, weight, bias, check_eps(eps), float(dropout_p), seed, dropout_stream,
        backend=backend,
    )  # fmt: skip
    return (y, z) if return_sum else y


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang and Sennrich 2019).

    x: [..., N]; weight: [N] or None. Result in x's dtype. eps: finite, >= 0; default finfo.eps of
    fp32 (of fp64 for fp64), as torch.
    """
    backend = _rms_norm.choice(backend)
    check_rows("x", x)
    check_parameter("weight", weight, x)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return _rms_norm(x, weight, check_eps(eps), backend=backend)[0]


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
) -> Tensor:
    """dropout(dropout(act(x w1ᵀ + b1)) w2ᵀ + b2) [+ residual], the position-wise feed-forward
    network.

    Args:
        x: [..., D]. w1: [F, D] (gated: [2F, D], rows [0, F) the gate), b1: [F] or [2F] or None; w2:
            [D', F], b2: [D'] or None; all in x's dtype, in `nn.Linear` layout.
        activation: relu, gelu, gelu_tanh, silu, or gated: reglu, geglu, swiglu (act(gate) * up;
            Shazeer 2020).
        dropout_p, output_dropout_p: of the hidden activations and of the output before the residual
            is added.
        residual: [..., D'] or None, any floating dtype; the result takes it (else x's).
    """
    backend = _ffn.choice(backend)
    x, w1, b1, w2, b2 = autocast(x, w1, b1, w2, b2)
    check_rows("x", x)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    check_ffn_weights(x, w1, b1, w2, b2, activation)
    if residual is not None:
        check_float("residual", residual)
        wanted = (*x.shape[:-1], w2.shape[0])
        if residual.shape != wanted:
            raise ValueError(f"residual must be {list(wanted)}, got {sizes(residual)}")
        check_device("residual", residual, x.device)
    output_dropout_p = check_probability("output_dropout_p", output_dropout_p)
    seed = check_dropout(dropout_p, dropout_seed, dropout_stream, x.device, output_dropout_p)
    return _ffn(
        x, w1, b1, w2, b2, residual, activation, float(dropout_p), output_dropout_p, seed,
        dropout_stream, backend=backend,
    )[0]  # fmt: skip


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """x weightᵀ + bias, as `torch.nn.functional.linear`, which is faster on some processors: there
    it is what runs unless `backend` says otherwise (see `explain`).

    x: [..., D] or a jagged nested tensor [B, j, ..., D]; weight: [E, D]; bias: [E] or None; all of
    one dtype.
    """
    backend = _linear.choice(backend)
    if isinstance(x, Tensor) and x.is_nested:
        jagged.check_rows("x", x)
        return jagged.with_rows(linear(x.values(), weight, bias, backend=backend), x)
    x, weight, bias = autocast(x, weight, bias)
    check_rows("x", x)
    check_linear_weights(x, weight, bias)
    return _linear(x, weight, bias, backend=backend)  # type: ignore[no-any-return]


def topk_logsumexp(logits: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits of each row of [..., V] and the row's logsumexp, without gradients.

    Returns:
        The logsumexp of each whole row [...], NaN if the row contains NaN; the `count` largest
        logits of each row from column `first` on, in descending order, and their indices in the
        row, each [..., count]. The order of equal logits and the indices of -inf are undefined.
    """
    if not (first >= 0 and 1 <= count <= logits.shape[-1] - first):
        raise ValueError(
            f"count must be from 1 to the {logits.shape[-1]} columns less first, got {count} "
            f"with first {first}"
        )
    rows, leading = logits.detach().reshape(-1, logits.shape[-1]), logits.shape[:-1]
    logsumexp, values, indices = _topk_logsumexp(rows, first, count)
    return logsumexp.view(leading), values.view(*leading, count), indices.view(*leading, count)


def prepare_mask(mask: Tensor) -> PreparedMask:
    """Looks at a dense mask once, for the `mask` of many `attention` calls.

    mask: as in `attention`. Which of its tiles are empty, full or partial, and which of their lines
    are dead, is computed here, by plain torch on the mask's device, and not again in each call of a
    GPU backend; the CPU kernels look at the mask itself.
    Results are those of the mask itself, to the last bit, and a floating mask that requires grad
    gets its gradient. Changing the mask in place afterwards is an error that nobody sees: prepare
    it again.
    """
    check_mask_dtype(mask)
    if mask.dim() > 4:
        raise ValueError(f"mask must have at most 4 dimensions, got {sizes(mask)}")
    return PreparedMask(mask, classify_mask(in_four_dimensions(mask)))


def new_dropout_seed(device: torch.device | str) -> Tensor:
    """A dropout seed, int64 [1], from torch's generator of `device`: `manual_seed` and CUDA graphs
    behave as expected.
    """
    return draw_seed(device)


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Which backend `fastattn.<op>(*args, **kwargs)` would take here, gradients and autocast
    included, and why each other one would not. Runs nothing.
    """
    functions = {f.__name__: f for f in _FUNCTIONS}
    if not isinstance(op, str) or op not in functions:
        raise ValueError(f"op must be one of {', '.join(functions)}, got {op!r}")
    with explaining() as explanations:
        functions[op](*args, **kwargs)
    return explanations[0]


_FUNCTIONS = (attention, attention_varlen, layer_norm, add_layer_norm, rms_norm, ffn, linear)
