"""The norms by PyTorch's fused operators; further operators apply fastattn's dropout bits.

aten's layer norm saves its statistics in the parameters' dtype and, on CUDA, requires parameters in
the data's dtype. So parameters are converted to fp32 (ones replace a missing weight of half
precision data), and on CUDA the data too. aten's RMS norm has no fused backward on CPUs; there it
is computed by several operators.

Functions return their results, None for gradients that are not needed.
"""

import math

import torch
from torch import Tensor

from fastattn.ops._dropout import keep_scale, rows_dropped
from fastattn.ops.layer_norm.calls import (
    AddLayerNormBackwardCall,
    AddLayerNormCall,
    LayerNormBackwardCall,
    LayerNormCall,
    RmsNormBackwardCall,
    RmsNormCall,
)

RETURNS_RESULTS = True
_aten = torch.ops.aten
_Gradients = tuple[Tensor | None, ...]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _operands(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """x and its parameters in the dtypes that aten needs."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.dtype == dtype and all(p is None or p.dtype == dtype for p in parameters):
        return x, *parameters
    wide = [None if p is None else p.to(dtype) for p in parameters]
    if x.dtype != dtype and wide[0] is None:
        wide[0] = x.new_ones(x.shape[-1], dtype=dtype)
    return x if x.is_cpu else x.to(dtype), *wide


def _columns(x: Tensor) -> Tensor:
    """Sums over all rows, in fp32 (fp64)."""
    return _wide(x).sum_to_size(x.shape[-1:])


# -- layer_norm ------------------------------------------------------------------------------------
def layer_norm_fwd(call: LayerNormCall) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = _operands(call.x, call.weight, call.bias)
    y, mean, rstd = _aten.native_layer_norm.default(x, [call.x.shape[-1]], weight, bias, call.eps)
    return y.to(call.x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_bwd(call: LayerNormBackwardCall) -> _Gradients:
    x, weight, bias = _operands(call.x, call.weight, call.bias)
    assert x is not None
    needs = [n and p is not None for n, p in zip(call.needs, call[1:4], strict=True)]
    sums = needs[1] or needs[2]
    # aten reads the statistics as contiguous memory, whatever their strides.
    statistics = (call.mean.contiguous()[..., None], call.rstd.contiguous()[..., None])
    dy = call.dy.to(x.dtype)
    if x.dtype in (torch.bfloat16, torch.float16) and sums:
        found = _bwd_in_fp32(dy, x, *statistics, weight, bias, needs)
    else:
        found = _aten.native_layer_norm_backward.default(
            dy, x, [x.shape[-1]], *statistics, weight, bias, needs
        )
    return tuple(gradient if n else None for gradient, n in zip(found, needs, strict=True))


_CHUNK = 2**17  # elements that stay in a core's cache


def _bwd_in_fp32(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """Converts rows to fp32 in chunks, as aten sums parameters' gradients in the data's dtype."""
    N, dx = x.shape[-1], torch.empty_like(x, memory_format=torch.contiguous_format)
    sums = [x.new_zeros(N, dtype=torch.float32) for _ in range(2)]
    rows = max(1, _CHUNK * torch.get_num_threads() // max(1, N))
    tensors = [t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (dx, dy, x, mean, rstd)]
    for chunk in zip(*(t.split(rows) for t in tensors), strict=True):
        target, *inputs = chunk
        found = _aten.native_layer_norm_backward.default(
            *(t.float() for t in inputs[:2]), [N], *inputs[2:], weight, bias, needs
        )
        if needs[0]:
            target.copy_(found[0])
        for total, needed, one in zip(sums, needs[1:], found[1:], strict=True):
            if needed:
                total += one
    return dx, *sums


# -- add_layer_norm --------------------------------------------------------------------------------
def _dropped(x: Tensor, call: AddLayerNormCall | AddLayerNormBackwardCall) -> Tensor:
    N = x.shape[-1]
    assert call.dropout_seed is not None
    rows = x.numel() // N if N else 0
    dropped = rows_dropped(call.dropout_seed, call.dropout_stream, call.dropout_p, rows, N)
    return dropped.view(x.shape)


def add_layer_norm_fwd(call: AddLayerNormCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, residual, x_bias, weight, bias, eps, p, _, _ = call
    if x_bias is not None:
        x = _wide(x) + x_bias
    if p > 0:
        x = x.masked_fill(_dropped(x, call), 0.0)
    z = torch.add(residual, x, alpha=keep_scale(p)).to(residual.dtype).contiguous()
    y, mean, rstd = layer_norm_fwd(LayerNormCall(z, weight, bias, eps))
    return y, z, mean, rstd


def add_layer_norm_bwd(call: AddLayerNormBackwardCall) -> _Gradients:
    dy, dz, z, x_bias, weight, bias, mean, rstd, eps, x_dtype, p, _, _, needs = call
    dweight = dbias = None
    if dy is None:
        assert dz is not None
        dsum = dz
        dweight = torch.zeros_like(weight) if needs[3] and weight is not None else None
        dbias = torch.zeros_like(bias) if needs[4] and bias is not None else None
    else:
        if dz is not None:  # so that the sum is rounded once
            dy, z = _wide(dy), _wide(z)
        norm = LayerNormBackwardCall(
            dy, z, weight, bias, mean, rstd, eps, [True, needs[3], needs[4]]
        )
        found, dweight, dbias = layer_norm_bwd(norm)
        assert found is not None
        dsum = found if dz is None else found + dz
    dx = dsum
    if p > 0:
        dx = (dsum * keep_scale(p)).masked_fill_(_dropped(dsum, call), 0.0)
    return (
        dx.to(x_dtype, copy=dx is dsum) if needs[0] else None,
        (dsum.clone() if dsum is dz else dsum) if needs[1] else None,
        _columns(dx) if needs[2] and x_bias is not None else None,
        dweight,
        dbias,
    )


# -- rms_norm --------------------------------------------------------------------------------------
def _rows(x: Tensor) -> Tensor:
    """[rows, N], because PyTorch's reductions take at most 64 dimensions."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def rms_norm_fwd(call: RmsNormCall) -> tuple[Tensor, Tensor]:
    shape = call.x.shape
    x, weight = _operands(_rows(call.x), call.weight)
    y, rstd = _aten._fused_rms_norm.default(x, [shape[-1]], weight, call.eps)
    return y.to(call.x.dtype).view(shape), rstd.view(shape[:-1])


def rms_norm_bwd(call: RmsNormBackwardCall) -> _Gradients:
    shape, weight = call.x.shape, call.weight
    dy, x, rstd = _wide(_rows(call.dy)), _rows(call.x), call.rstd.reshape(-1, 1)
    needs = [call.needs[0], call.needs[1] and weight is not None]
    if x.is_cuda:
        dx, dweight = _aten._fused_rms_norm_backward.default(
            dy, _wide(x), [shape[-1]], rstd, _operands(x, weight)[1], needs
        )
        return dx.view(shape) if needs[0] else None, dweight if needs[1] else None
    xhat = x * rstd
    product = dy * xhat
    dx = None
    if needs[0]:
        g = dy if weight is None else dy * weight
        along = product if weight is None else product * weight
        dx = torch.addcmul(g, xhat, along.mean(-1, keepdim=True), value=-1).mul_(rstd).view(shape)
    return dx, _columns(product) if needs[1] else None
