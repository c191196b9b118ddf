"""The public functions: what they compute, the checks of every argument, the call of the op.

Everything below this file trusts its inputs. Shapes: B batch, H query heads, K key/value heads (H a
multiple of K), M queries, N keys, D head dim of q and k, E head dim of v. `backend` names one of
sm90, triton, cpu, reference and never falls back; None takes the first of the op's backends that
has no objection (see `explain`).
"""

import math
from typing import Any, Literal, TypedDict, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from fastattn.ops._dropout import SECOND_STREAM
from fastattn.ops._op import Explanation, explaining, recording_choices
from fastattn.ops.attention.op import CAUSAL, MASK_TILE, PreparedMask, classify_mask, jagged
from fastattn.ops.attention.op import attention as _attention
from fastattn.ops.attention.op import attention_at_once as _attention_at_once
from fastattn.ops.attention.op import attention_varlen as _attention_varlen
from fastattn.ops.attention.op import attention_weights as _attention_weights
from fastattn.ops.best_tokens.op import best_tokens as _best_tokens
from fastattn.ops.ffn.op import ACTIVATIONS, GATED_ACTIVATIONS
from fastattn.ops.ffn.op import ffn as _ffn
from fastattn.ops.layer_norm.op import add_layer_norm as _add_layer_norm
from fastattn.ops.layer_norm.op import layer_norm as _layer_norm
from fastattn.ops.layer_norm.op import rms_norm as _rms_norm
from fastattn.ops.linear.op import batch_invariant as batch_invariant
from fastattn.ops.linear.op import linear as _linear
from fastattn.ops.linear.op import suits as _linear_suits

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

Causal = Literal["top_left", "bottom_right"] | bool
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_INTEGERS = (torch.int32, torch.int64)


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
        q: [B, H, M, D]; fp32, fp16, bf16 (fp64 by the reference). Any strides; a last dimension
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
        return_lse: also return the natural log of the sum of exp of each row's scores, fp32 [B, H,
            M], differentiable.

    Returns:
        out [B, H, M, E] in q's dtype and storage order, or (out, lse).
    """
    if (
        mask is None
        and key_lengths is None
        and query_lengths is None
        and window is None
        and dropout_seed is None
        and backend is None
        and type(dropout_p) is float
        and dropout_p == 0.0
        and type(dropout_stream) is int
        and dropout_stream == 0
        and (causal is False or causal is True)
        and (made := _attention_at_once(q, k, v, causal, scale)) is not None
    ):
        return (made[0], made[1]) if return_lse else made[0]
    _check_backend(backend)
    if isinstance(q, Tensor) and q.is_nested:
        for name, given in (
            ("mask", mask),
            ("key_lengths", key_lengths),
            ("query_lengths", query_lengths),
        ):
            if given is not None:
                raise ValueError(f"{name} must be None with nested tensors, which have lengths")
        return _attention_nested(
            q,
            k,
            v,
            causal=causal,
            window=window,
            scale=scale,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            dropout_stream=dropout_stream,
            return_lse=return_lse,
            backend=backend,
        )
    q, k, v = _autocast(q, k, v)
    B, H, M, D, N = _check_attention_inputs(q, k, v)
    mask_tiles = None
    if mask is not None:
        mask, mask_tiles = _check_mask(mask, B, H, M, N, q.device)
    if key_lengths is not None:
        _check_lengths("key_lengths", key_lengths, ((B,), (B, M)), q.device)
    if query_lengths is not None:
        _check_lengths("query_lengths", query_lengths, ((B,),), q.device)
    window_left, window_right = _check_window(window)
    seed = _check_dropout(dropout_p, dropout_seed, dropout_stream, q.device)
    out, lse = _attention(
        q if q.stride(-1) == 1 else _contiguous_rows(q),
        k if k.stride(-1) == 1 else _contiguous_rows(k),
        v if v.stride(-1) == 1 else _contiguous_rows(v),
        mask,
        mask_tiles,
        key_lengths,
        query_lengths,
        _causal_code(causal, M, N),
        window_left,
        window_right,
        _check_scale(scale, D),
        float(dropout_p),
        seed,
        dropout_stream,
        backend=backend,
    )
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
    out, lse = attention_varlen(
        rows_q,
        rows_k,
        jagged.pack(v)[0],
        offsets_q,
        offsets_k,
        longest_q,
        longest_k,
        return_lse=True,
        **options,
    )
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
    _check_backend(backend)
    q, k, v = _autocast(q, k, v)
    _check_varlen_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k)
    window_left, window_right = _check_window(window)
    seed = _check_dropout(dropout_p, dropout_seed, dropout_stream, q.device)
    out, lse = _attention_varlen(
        _contiguous_rows(q),
        _contiguous_rows(k),
        _contiguous_rows(v),
        cu_seqlens_q,
        cu_seqlens_k,
        _check_length("max_seqlen_q", max_seqlen_q),
        _check_length("max_seqlen_k", max_seqlen_k),
        _causal_code(causal, 0, 0),
        window_left,
        window_right,
        _check_scale(scale, q.shape[2]),
        float(dropout_p),
        seed,
        dropout_stream,
        backend=backend,
    )
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
    q, k = _autocast(q, k)
    _check_attention_inputs(q, k, k)
    (B, H, M, D), N = q.shape, k.shape[2]
    mask, _ = _check_mask(mask, B, H, M, N, q.device)
    if key_lengths is not None:
        _check_lengths("key_lengths", key_lengths, ((B,), (B, M)), q.device)
    if query_lengths is not None:
        _check_lengths("query_lengths", query_lengths, ((B,),), q.device)
    return _attention_weights(
        q,
        k,
        mask,
        key_lengths,
        query_lengths,
        _causal_code(causal, M, N),
        *_check_window(window),
        _check_scale(scale, D),
        _check_index("rows", rows, M, q.device),
        _check_index("heads", heads, H, q.device),
    )


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
    if backend is not None:
        _check_backend(backend)
    _check_rows("x", x)
    if weight is not None:
        _check_parameter("weight", weight, x)
    if bias is not None:
        _check_parameter("bias", bias, x)
    return _layer_norm(x, weight, bias, _check_eps(eps), backend=backend)[0]


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
    _check_backend(backend)
    _check_rows("x", x)
    _check_rows("residual", residual)
    if residual.shape != x.shape:
        raise ValueError(f"residual must have x's shape {_shape(x)}, got {_shape(residual)}")
    _check_device("residual", residual, x.device)
    _check_parameter("x_bias", x_bias, x)
    _check_parameter("weight", weight, residual)
    _check_parameter("bias", bias, residual)
    seed = _check_dropout(dropout_p, dropout_seed, dropout_stream, x.device)
    y, z, *_ = _add_layer_norm(
        x,
        residual,
        x_bias,
        weight,
        bias,
        _check_eps(eps),
        float(dropout_p),
        seed,
        dropout_stream,
        backend=backend,
    )
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
    _check_backend(backend)
    _check_rows("x", x)
    _check_parameter("weight", weight, x)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return _rms_norm(x, weight, _check_eps(eps), backend=backend)[0]


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
    _check_backend(backend)
    x, w1, b1, w2, b2 = _autocast(x, w1, b1, w2, b2)
    _check_rows("x", x)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    _check_ffn_weights(x, w1, b1, w2, b2, activation)
    if residual is not None:
        _check_float("residual", residual)
        wanted = (*x.shape[:-1], w2.shape[0])
        if residual.shape != wanted:
            raise ValueError(f"residual must be {list(wanted)}, got {_shape(residual)}")
        _check_device("residual", residual, x.device)
    output_dropout_p = _check_probability("output_dropout_p", output_dropout_p)
    seed = _check_dropout(dropout_p, dropout_seed, dropout_stream, x.device, output_dropout_p)
    return _ffn(
        x,
        w1,
        b1,
        w2,
        b2,
        residual,
        activation,
        float(dropout_p),
        output_dropout_p,
        seed,
        dropout_stream,
        backend=backend,
    )[0]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """x weightᵀ + bias, `torch.nn.functional.linear`.

    x: [..., D]; weight: [E, D]; bias: [E] or None; all of one dtype.
    """
    _check_backend(backend)
    x, weight, bias = _autocast(x, weight, bias)
    _check_rows("x", x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        _check_float(name, tensor)
        _check_device(name, tensor, x.device)
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} must have x's dtype {x.dtype}, got {tensor.dtype}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must be [E, {x.shape[-1]}] to fit x, got {_shape(weight)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {_shape(bias)}")
    return _linear(x, weight, bias, backend=backend)[0]


def quickest_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` where a plain eager call is faster through it, else torch's own, which compilers,
    transforms, autocast, counters and tensor subclasses know.
    """
    if (
        not torch.compiler.is_compiling()
        and x.dtype is weight.dtype is torch.float32
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._is_tracing()  # where sizes are tensors
        and _linear_suits(x, weight, bias)
    ):
        return _linear(x, weight, bias)[0]
    return F.linear(x, weight, bias)


def best_tokens(logits: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a search wants to know of logits [..., V], without gradients.

    Returns:
        The logarithm of the sum of their exponentials [...], NaN where a logit is, and the `count`
        largest logits of tokens from `first` on, largest first, with their tokens, each [...,
        count]. Which of equal logits comes first, and the tokens of -inf, are not defined.
    """
    if not (first >= 0 and 1 <= count <= logits.shape[-1] - first):
        raise ValueError(
            f"count must be from 1 to the {logits.shape[-1]} tokens less first, got {count} "
            f"with first {first}"
        )
    rows, leading = logits.reshape(-1, logits.shape[-1]), logits.shape[:-1]
    log_z, best, tokens = _best_tokens(rows, first, count)
    return log_z.view(leading), best.view(*leading, count), tokens.view(*leading, count)


def prepare_mask(mask: Tensor) -> PreparedMask:
    """Looks at a dense mask once, for the `mask` of many `attention` calls.

    mask: as in `attention`. Which of its tiles are empty, full or partial, and which of their lines
    are dead, is computed here, by plain torch on the mask's device, and not again in each call.
    Results are those of the mask itself, to the last bit, and a floating mask that requires grad
    gets its gradient. Changing the mask in place afterwards is an error that nobody sees: prepare
    it again.
    """
    _check_mask_dtype(mask)
    if mask.dim() > 4:
        raise ValueError(f"mask must have at most 4 dimensions, got {_shape(mask)}")
    return PreparedMask(mask, classify_mask(_in_four_dimensions(mask)))


def new_dropout_seed(device: torch.device | str) -> Tensor:
    """A dropout seed, int64 [1], from torch's generator of `device`: `manual_seed` and CUDA graphs
    behave as expected.
    """
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Which backend `fastattn.<op>(*args, **kwargs)` would take and why each other one would not.
    Runs nothing.
    """
    functions = {f.__name__: f for f in _FUNCTIONS}
    if op not in functions:
        raise ValueError(f"op must be one of {', '.join(functions)}, got {op!r}")
    with torch.no_grad(), recording_choices() as explanations:
        functions[op](*args, **kwargs)
    return explanations[0]


_FUNCTIONS = (attention, attention_varlen, layer_norm, add_layer_norm, rms_norm, ffn, linear)


# -- validation ------------------------------------------------------------------------------------
def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Floating tensors in the autocast dtype, where autocast is on; fp64 stays, as in torch."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors
    if not isinstance(tensors[0], Tensor):
        return tensors  # refused by the checks
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if _casts(t) else t for t in tensors)


def _casts(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def _check_float(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        _check_tensor(name, x)
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")


def _check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like the first input, got {x.device}")


def _check_attention_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int]:
    """The sizes B, H, M, D, N."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dtype not in _FLOATS:
            _check_float(name, x)
        if x.dim() != 4:
            layout = {"q": "[B, H, M, D]", "k": "[B, K, N, D]", "v": "[B, K, N, E]"}[name]
            raise ValueError(f"{name} must have 4 dimensions {layout}, got {_shape(x)}")
        if x.is_nested:
            raise TypeError(f"{name} must be a dense tensor here, got a nested one")
    if not (k.device == q.device == v.device and k.dtype is q.dtype is v.dtype):
        for name, x in (("k", k), ("v", v)):
            _check_device(name, x, q.device)
            if x.dtype != q.dtype:
                raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
    (B, H, M, D), (key_B, K, N, key_D) = q.shape, k.shape
    if key_B != B:
        raise ValueError(f"k must have q's batch size {B}, got {key_B}")
    _check_heads(H, K, D, key_D)
    value_B, value_K, value_N, _ = v.shape
    if value_B != B or value_K != K or value_N != N:
        raise ValueError(f"v must be [{B}, {K}, {N}, E] like k, got {_shape(v)}")
    return B, H, M, D, N


def _check_varlen_inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> None:
    layouts = {"q": "[T, H, D]", "k": "[S, K, D]", "v": "[S, K, E]"}
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_float(name, x)
        if x.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions {layouts[name]}, got {_shape(x)}")
        _check_device(name, x, q.device)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
    _check_heads(q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v must be [{k.shape[0]}, {k.shape[1]}, E] like k, got {_shape(v)}")
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_tensor(name, offsets)
        if offsets.dtype != torch.int32 or offsets.dim() != 1 or offsets.shape[0] < 1:
            raise ValueError(f"{name} must be int32 [B + 1], got {offsets.dtype} {_shape(offsets)}")
        _check_device(name, offsets, q.device)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k must have cu_seqlens_q's shape {_shape(cu_seqlens_q)}, "
            f"got {_shape(cu_seqlens_k)}"
        )


def _check_heads(H: int, K: int, D: int, key_D: int) -> None:
    if key_D != D:
        raise ValueError(f"k must have q's head dim {D}, got {key_D}")
    if (K == 0 and H != 0) or (K != 0 and H % K != 0):
        raise ValueError(f"q must have a multiple of k's {K} heads, got {H}")


def _check_length(name: str, length: Any) -> int:
    length = _integer(name, length)
    if length < 0:
        raise ValueError(f"{name} must be >= 0, got {length}")
    return length


def _check_index(
    name: str, index: Tensor | slice | None, size: int, device: torch.device
) -> Tensor:
    """Chosen positions as an int64 index; negative ones count from the end, as in Python."""
    if index is None or isinstance(index, slice):
        return torch.arange(size, device=device)[index or slice(None)]
    if not isinstance(index, Tensor) or index.dtype not in _INTEGERS or index.dim() != 1:
        raise TypeError(f"{name} must be a slice or an int32 or int64 index [n], got {index!r}")
    return index.to(device=device, dtype=torch.int64) % max(size, 1)


def _check_mask(
    mask: Tensor | PreparedMask | None, B: int, H: int, M: int, N: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """The mask as a 4-dimensional view with its size-1 dimensions kept; the tiles of a prepared
    one.
    """
    if mask is None:
        return None, None
    tiles = None
    if isinstance(mask, PreparedMask):
        mask, tiles = mask
    _check_mask_dtype(mask)
    _check_device("mask", mask, device)
    fits = mask.dim() <= 4
    for size, wanted in zip(reversed(mask.shape), (N, M, H, B), strict=False):
        fits = fits and (size == 1 or size == wanted)
    if not fits:
        raise ValueError(f"mask must be broadcastable to {[B, H, M, N]}, got {_shape(mask)}")
    mask = _in_four_dimensions(mask)
    if tiles is not None:
        _check_mask_tiles(tiles, mask)
    return mask, tiles


def _check_mask_dtype(mask: Any) -> None:
    _check_tensor("mask", mask)
    if mask.dtype != torch.bool and mask.dtype not in _FLOATS:
        raise TypeError(f"mask must be bool or floating, got {mask.dtype}")


def _in_four_dimensions(mask: Tensor) -> Tensor:
    return mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask


def _check_mask_tiles(tiles: Tensor, mask: Tensor) -> None:
    """Kernels trust them to lie in memory, and to be those of this mask."""
    _check_tensor("mask.tiles", tiles)
    B, H, M, N = mask.shape
    wanted = (B, H, -(-M // MASK_TILE), -(-N // MASK_TILE))
    fits = tiles.dtype == torch.int64 and tiles.dim() == 4
    for size, most in zip(tiles.shape, wanted, strict=fits):
        fits = fits and (size == 1 or size == most)
    if not fits:
        raise ValueError(
            f"mask.tiles must be int64, broadcastable to {list(wanted)}, "
            f"got {tiles.dtype} {_shape(tiles)}"
        )
    _check_device("mask.tiles", tiles, mask.device)


def _check_lengths(
    name: str, lengths: Tensor, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> None:
    _check_tensor(name, lengths)
    if lengths.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, got {lengths.dtype}")
    if all(lengths.shape != shape for shape in shapes):
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must be {wanted}, got {_shape(lengths)}")
    _check_device(name, lengths, device)


def _number(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def _check_eps(eps: Any) -> float:
    eps = _number("eps", eps)
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps must be a finite number >= 0, got {eps}")
    return eps


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return value  # type: ignore[return-value]


def _check_backend(backend: Any) -> None:
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be a name or None, got {backend!r}")


def _check_window(window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window must be (left, right), got {window!r}")
    left, right = (_integer("window", side) for side in window)
    if left < -1 or right < -1:
        raise ValueError(f"window must hold numbers >= 0, or -1 for unlimited, got {window!r}")
    return left, right


def _check_scale(scale: float | None, D: int) -> float:
    if scale is None:
        return D**-0.5 if D else 1.0
    scale = _number("scale", scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return scale


def _causal_code(causal: Causal, M: int, N: int) -> int:
    if causal is True:
        if M != N:
            raise ValueError(
                f"causal=True is ambiguous for {M} queries and {N} keys: "
                'say "top_left" or "bottom_right"'
            )
        return CAUSAL["top_left"]
    if causal is False:
        return CAUSAL[False]
    if not isinstance(causal, str) or causal not in CAUSAL:
        raise ValueError(
            f'causal must be False, True, "top_left" or "bottom_right", got {causal!r}'
        )
    return CAUSAL[causal]


def _check_probability(name: str, p: float) -> float:
    p = _number(name, p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {p}")
    return p


def _check_dropout(
    p: float, seed: Tensor | None, stream: int, device: torch.device, second_p: float = 0.0
) -> Tensor | None:
    """The seed to use, None where nothing is dropped."""
    if type(p) is float and p == 0.0 == second_p and seed is None and type(stream) is int:
        if 0 <= stream < SECOND_STREAM:  # without dropout: 0.4 us less than all checks
            return None
    p = _check_probability("dropout_p", p)
    stream = _integer("dropout_stream", stream)
    if not 0 <= stream < SECOND_STREAM:
        raise ValueError(f"dropout_stream must be >= 0 and < 2 ** 31, got {stream}")
    if seed is not None:
        _check_tensor("dropout_seed", seed)
        if seed.dtype != torch.int64 or seed.shape != (1,):
            raise ValueError(f"dropout_seed must be int64 [1], got {seed.dtype} {_shape(seed)}")
        _check_device("dropout_seed", seed, device)
    if p == 0.0 and second_p == 0.0:
        return None
    if seed is not None:
        return seed
    if explaining():  # runs nothing, the generator included
        return torch.empty(1, dtype=torch.int64, device=device)
    return new_dropout_seed(device)


def _check_rows(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype not in _FLOATS:
        _check_float(name, x)
    if x.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar")


def _check_parameter(name: str, parameter: Tensor | None, x: Tensor) -> None:
    if parameter is None:
        return
    N = x.shape[-1]
    if not isinstance(parameter, Tensor) or parameter.dtype not in _FLOATS:
        _check_float(name, parameter)
    if parameter.shape != (N,):
        raise ValueError(f"{name} must be [{N}] like the last dimension, got {_shape(parameter)}")
    if parameter.device != x.device:
        _check_device(name, parameter, x.device)


def _check_ffn_weights(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str
) -> None:
    for name, weight in (("w1", w1), ("b1", b1), ("w2", w2), ("b2", b2)):
        if weight is None and name in ("b1", "b2"):
            continue
        if not isinstance(weight, Tensor) or weight.dtype not in _FLOATS:
            _check_float(name, weight)
        assert weight is not None
        if weight.device != x.device:
            _check_device(name, weight, x.device)
        if weight.dtype != x.dtype:
            raise TypeError(f"{name} must have x's dtype {x.dtype}, got {weight.dtype}")
    if w1.dim() != 2 or w1.shape[1] != x.shape[-1]:
        raise ValueError(f"w1 must be [F, {x.shape[-1]}] to fit x, got {_shape(w1)}")
    F = w1.shape[0]
    if activation in GATED_ACTIVATIONS:
        if F % 2:
            raise ValueError(f"w1 must have an even number of rows for {activation}, got {F}")
        F //= 2
    if w2.dim() != 2 or w2.shape[1] != F:
        raise ValueError(f"w2 must be [D, {F}] to fit w1 and {activation}, got {_shape(w2)}")
    for name, bias, weight in (("b1", b1, w1), ("b2", b2, w2)):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{name} must be [{weight.shape[0]}], got {_shape(bias)}")
