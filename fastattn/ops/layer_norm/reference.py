"""The norms in their textbook form, in fp32 (fp64 for fp64 data), rounded once at the end.

Functions take the arguments of the torch op of the same name and return its results, None for
gradients that are not needed. They are differentiable, and used for double backward too.
"""

import torch
from torch import Tensor

from fastattn.ops._dropout import drop_rows


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation of each row, both [..., 1]."""
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return mean, (variance + eps).rsqrt()


def _affine(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = xhat if weight is None else xhat * weight
    return y if bias is None else y + bias


def _sum_rows(x: Tensor, like: Tensor | None, needed: bool) -> Tensor | None:
    """The gradient of a parameter that all rows share: [..., N] -> [N]."""
    return x.sum_to_size(x.shape[-1:]).to(like.dtype) if needed and like is not None else None


def _norm_bwd(
    dy: Tensor, xhat: Tensor, rstd: Tensor, weight: Tensor | None, centred: bool
) -> Tensor:
    """d(loss)/dx for y = xhat * weight + bias, xhat = (x - mean) * rstd (centred) or x * rstd."""
    g = dy if weight is None else dy * weight
    along = xhat * (g * xhat).mean(-1, keepdim=True)
    if centred:
        g = g - g.mean(-1, keepdim=True)
    return rstd * (g - along)


def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(x)
    mean, rstd = _statistics(wide, eps)
    y = _affine((wide - mean) * rstd, weight, bias)
    return y.to(x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    wide, dy = _wide(x), _wide(dy)
    mean, rstd = _statistics(wide, eps)
    xhat = (wide - mean) * rstd
    dx = _norm_bwd(dy, xhat, rstd, weight, centred=True).to(x.dtype) if needs[0] else None
    return dx, _sum_rows(dy * xhat, weight, needs[1]), _sum_rows(dy, bias, needs[2])


def add_layer_norm_fwd(
    x: Tensor,
    residual: Tensor,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    branch = _wide(x) if x_bias is None else _wide(x) + x_bias
    z = (_wide(residual) + drop_rows(branch, dropout_p, dropout_seed, dropout_stream)).to(
        residual.dtype
    )
    y, mean, rstd = layer_norm_fwd(z, weight, bias, eps)
    return y, z, mean, rstd


def add_layer_norm_bwd(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    x_dtype: torch.dtype,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    wide = _wide(z)
    dsum = torch.zeros_like(wide) if dz is None else _wide(dz)
    dweight = dbias = None
    if dy is not None:
        dy = _wide(dy)
        mean, rstd = _statistics(wide, eps)
        xhat = (wide - mean) * rstd
        dsum = dsum + _norm_bwd(dy, xhat, rstd, weight, centred=True)
        dweight = _sum_rows(dy * xhat, weight, needs[3])
        dbias = _sum_rows(dy, bias, needs[4])
    else:
        dweight = torch.zeros_like(weight) if needs[3] and weight is not None else None
        dbias = torch.zeros_like(bias) if needs[4] and bias is not None else None
    dbranch = drop_rows(dsum, dropout_p, dropout_seed, dropout_stream)
    return (
        dbranch.to(x_dtype) if needs[0] else None,
        dsum.to(z.dtype) if needs[1] else None,
        _sum_rows(dbranch, x_bias, needs[2]),
        dweight,
        dbias,
    )


def rms_norm_fwd(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return _affine(wide * rstd, weight, None).to(x.dtype), rstd.squeeze(-1)


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    wide, dy = _wide(x), _wide(dy)
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    xhat = wide * rstd
    dx = _norm_bwd(dy, xhat, rstd, weight, centred=False).to(x.dtype) if needs[0] else None
    return dx, _sum_rows(dy * xhat, weight, needs[1])
