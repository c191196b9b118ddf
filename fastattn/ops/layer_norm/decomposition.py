"""The layer norms by PyTorch's layer norm, for exported programs: ONNX and others have an operator
for it. Its input and parameters are converted to one dtype, as ONNX requires.
"""

import torch
from torch import Tensor


def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
    y, mean, rstd = torch.native_layer_norm(x.to(dtype), [x.shape[-1]], weight, bias, eps)
    return y.to(x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


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
    """Without dropout."""
    dtype = torch.float64 if residual.dtype == torch.float64 else torch.float32
    branch = x.to(dtype) if x_bias is None else x.to(dtype) + x_bias
    z = (residual.to(dtype) + branch).to(residual.dtype)
    y, mean, rstd = layer_norm_fwd(z, weight, bias, eps)
    return y, z, mean, rstd
