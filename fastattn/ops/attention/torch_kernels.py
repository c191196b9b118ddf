"""aten's fused attention kernels as functions of a `Problem`, and which calls they support."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.ops.attention.calls import (
    AnyCall,
    BackwardCall,
    CausalKind,
    ForwardCall,
    changes_products,
    has_window,
)
from fastattn.ops.attention.torch_problem import Problem, wide

_aten = torch.ops.aten


# Pairs of functions: (problem) -> out, lse and (problem, dout, out, lse) -> dq, dk, dv.
def _cpu_fwd(t: Problem) -> tuple[Tensor, Tensor]:
    """Computes half precision in fp32, also `out`: aten's half-precision exponential gives lse an
    error of 5e-5, and is not faster on processors without half-precision matrix instructions.
    """
    q, k, v = (x.to(wide(x.dtype)) for x in t[:3])
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, t.causal, attn_mask=t.bias, scale=t.scale
    )
    return out, lse


def _cpu_bwd(t: Problem, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    tensors = [dout, *t[:3], out]
    if t.q.dtype == torch.float16:  # fp16 products take ten times as long as fp32 products
        tensors = [x.float() for x in tensors]
    gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *tensors, lse, 0.0, t.causal, attn_mask=t.bias, scale=t.scale
    )
    return tuple(x.to(t.q.dtype) for x in gradients)


def _flash_fwd(t: Problem) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in t[:3])
    out, lse, *_ = _aten._flash_attention_forward.default(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, t.causal, False, scale=t.scale
    )
    return out.transpose(1, 2), lse


def _flash_bwd(t: Problem, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, *t[:3], out))
    unused = lse.new_zeros(2, dtype=torch.uint64)  # the state of aten's own dropout
    gradients = _aten._flash_attention_backward.default(
        dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, t.causal, unused, unused,
        scale=t.scale,
    )  # fmt: skip
    return tuple(x.transpose(1, 2) for x in gradients)


_LSE_ROWS = 32  # memory-efficient attention pads lse to a multiple of it


def _for_each_head(t: Problem) -> Problem:
    """The problem with k and v repeated for each query head, and bias expanded, rows aligned."""
    (B, H, M, _), (K, N), bias = t.q.shape, t.k.shape[1:3], t.bias
    k, v = (x if K == H else x.repeat_interleave(H // K, 1) for x in (t.k, t.v))
    if bias is not None:
        bias = F.pad(bias.to(t.q.dtype), (0, -N % 16))[..., :N].expand(B, H, M, N)
    return t._replace(k=k, v=v, bias=bias)


def _efficient_fwd(t: Problem) -> tuple[Tensor, Tensor]:
    t = _for_each_head(t)
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention.default(
        t.q, t.k, t.v, t.bias, True, 0.0, t.causal, scale=t.scale
    )
    return out, lse[..., : t.q.shape[2]]


def _efficient_bwd(t: Problem, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    K, t = t.k.shape[1], _for_each_head(t)
    # In half precision aten's kernel reads `out` as if it were stored as [B, M, H, E].
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = F.pad(lse, (0, -lse.shape[2] % _LSE_ROWS), value=math.inf)
    unused = torch.zeros((), dtype=torch.int64)  # the state of aten's own dropout
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward.default(
        dout, t.q, t.k, t.v, t.bias, out, lse, unused, unused, 0.0, [True, True, True, False],
        t.causal, scale=t.scale,
    )  # fmt: skip
    if K != t.q.shape[1]:
        dk, dv = (x.unflatten(1, (K, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def kernels(t: Problem, width: int) -> tuple[Callable[..., tuple[Tensor, ...]], ...]:
    """The forward and backward kernel for head dim `width`."""
    if t.q.is_cpu:
        return _cpu_fwd, _cpu_bwd
    # Flash attention's causal diagonal is bottom-right.
    square = not t.causal or t.q.shape[2] == t.k.shape[2]
    if t.bias is None and square and width <= 256 and t.q.dtype != torch.float32:
        return _flash_fwd, _flash_bwd
    return _efficient_fwd, _efficient_bwd


def is_fused(call: AnyCall) -> bool:
    """Whether aten has a sufficiently accurate fused kernel for the call."""
    q, mask = call.q, call.mask
    if q.is_cuda:  # where half-precision kernels take a bias in half precision
        has_kernels = q.dtype == torch.float32 or (
            q.dtype != torch.float64
            and call.distance_bias is None
            and (mask is None or mask.dtype in (torch.bool, q.dtype))
        )
    else:
        has_kernels = q.is_cpu
    changed = call.dropout_p > 0 or changes_products(call)
    return has_kernels and not changed and q.shape[3] > 0 and call.v.shape[3] > 0


def padded_head_dim(x: Tensor, size: int) -> int:
    """The padded head dim: CUDA kernels load 16 bytes at a time."""
    return size if x.is_cpu else -(-size // 8) * 8


def pad(x: Tensor, size: int) -> Tensor:
    """x with its last dimension contiguous and zero-padded to `size`."""
    x = x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


# -- packed sequences ------------------------------------------------------------------------------
def why_not_packed(call: AnyCall) -> str | None:
    """Why flash attention, whose causal diagonal is bottom-right, cannot run the call, or None."""
    assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
    q, same = call.q, call.cu_seqlens_q.data_ptr() == call.cu_seqlens_k.data_ptr()
    if q.dtype not in (torch.float16, torch.bfloat16) or max(q.shape[2], call.v.shape[2]) > 248:
        return f"has packed kernels for fp16 and bf16, up to head dim 248, got {q.dtype}"
    if call.dropout_p > 0 or has_window(call):
        return "has packed kernels without dropout and without a window"
    if call.distance_bias is not None or changes_products(call):
        return "has packed kernels without score modifications"
    if call.causal == CausalKind.TOP_LEFT and not same:
        return (
            "has packed kernels for causal='top_left' only if queries and keys have one cu_seqlens"
        )
    return None


def packed_live(call: AnyCall) -> tuple[Tensor, Tensor]:
    """Live rows [T, 1, 1] and live keys [S, 1, 1]."""
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    assert cu_q is not None and cu_k is not None
    M, N = cu_q.diff(), cu_k.diff()  # [B]: the queries and keys of each sequence
    rows, keys = (torch.arange(x.shape[0], device=x.device) for x in (call.q, call.k))
    b, in_sequence = sequence_of(rows, cu_q)
    allowed = N[b]  # how many keys the row may attend
    if call.causal:
        allowed = allowed - M[b] + rows - cu_q[b] + 1
    live_rows = in_sequence & (allowed > 0)
    b, in_sequence = sequence_of(keys, cu_k)
    live_keys = in_sequence & (M[b] > 0)
    return live_rows[:, None, None], live_keys[:, None, None]


def sequence_of(positions: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of each position, and whether the position is before the last offset."""
    count = cu_seqlens.shape[0] - 1
    b = torch.bucketize(positions, cu_seqlens[1:], right=True)
    return b.clamp(max=count - 1), b < count


def packed_fwd(t: Problem, call: ForwardCall) -> tuple[Tensor, Tensor]:
    # With a maximum of one query, aten takes every sequence to have one; it may have none.
    longest = max(2, call.max_seqlen_q)
    out, lse, *_ = _aten._flash_attention_forward.default(
        t.q, t.k, t.v, call.cu_seqlens_q, call.cu_seqlens_k, longest, call.max_seqlen_k,
        0.0, t.causal, False, scale=t.scale,
    )  # fmt: skip
    return out, lse


def packed_bwd(
    t: Problem, dout: Tensor, out: Tensor, lse: Tensor, call: BackwardCall
) -> tuple[Tensor, ...]:
    unused = lse.new_zeros(2, dtype=torch.uint64)  # the state of aten's own dropout
    return _aten._flash_attention_backward.default(
        dout, t.q, t.k, t.v, out, lse, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q,
        call.max_seqlen_k, 0.0, t.causal, unused, unused, scale=t.scale,
    )  # fmt: skip
