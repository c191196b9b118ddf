"""`LayerNorm` and `RMSNorm` in place of torch's, and `AddNorm`: norm(x + dropout(sublayer output)).

The drop-ins differ from `torch.nn`'s only in `forward`. `fused_add_norm` is the end of a block of
a Transformer layer as one op, for unmodified dropouts and norms that `can_fuse` accepts.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastattn import functional
from fastattn.functional import FLOATS
from fastattn.nn.conversion import DropIn
from fastattn.nn.fusion import (
    AFFINE,
    DropoutStreams,
    active_p,
    are_plain,
    has_plain_parameters,
    is_plain_tensor,
    is_recorded_inference,
    is_unmodified,
    runs_eagerly,
    weight_and_bias,
)

_DENSE, _PARAMETER = torch.strided, nn.Parameter
_layer_norm_op = functional.layer_norm_op.overload


def is_valid_eps(eps: Any) -> bool:
    """Whether the ops accept this eps: torch's norms compute a result for any number."""
    return isinstance(eps, (int, float)) and not isinstance(eps, bool) and 0 <= eps < math.inf


def _is_supported(
    x: Tensor, normalized_shape: tuple[int, ...], eps: Any, *parameters: Tensor | None
) -> bool:
    """Whether the ops accept x; everything else, errors included, is handled by torch's forward."""
    rank = len(normalized_shape)
    return (
        is_plain_tensor(x)
        and all(p is None or is_plain_tensor(p) for p in parameters)
        and x.dtype in FLOATS
        and x.layout is torch.strided
        and x.dim() >= rank > 0
        and x.shape[x.dim() - rank :] == normalized_shape
        and is_valid_eps(eps)
    )


def _autocast_input(x: Tensor) -> Tensor:
    """x as autocast passes it to torch's norms: in fp32, on a CPU unchanged."""
    if x.is_cpu or x.is_meta or x.dtype not in (torch.bfloat16, torch.float16):
        return x
    return x.float() if torch.is_autocast_enabled(x.device.type) else x


def _in_memory_format_of(x: Tensor, y: Tensor) -> Tensor:
    """y, contiguous, in the memory format of x if that is channels_last or channels_last_3d."""
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    # With one channel both formats match: the strides decide.
    if memory_format is None or x.stride(1) > x.stride(-1):
        return y
    if not x.is_contiguous(memory_format=memory_format):
        return y
    return y.clone(memory_format=memory_format)


def layer_norm(module: Any, input: Tensor) -> Tensor | None:
    """The result of an `nn.LayerNorm`, by the `layer_norm` op; None where torch's code must run."""
    shape, eps, (weight, bias) = module.normalized_shape, module.eps, weight_and_bias(module)
    # All but the sizes, which the op checks: these tests take as long as a small norm.
    if (
        type(input) is Tensor
        and input.is_cpu
        and not input.is_nested
        and input.layout is _DENSE
        and (dtype := input.dtype) in FLOATS
        and (
            input.shape[-1:] == shape
            if weight is None
            else type(weight) is _PARAMETER
            and weight.dtype is dtype
            and weight.is_cpu
            and weight.shape == shape
        )
        and (bias is None or (type(bias) is _PARAMETER and bias.dtype is dtype and bias.is_cpu))
        and type(eps) is float
        and 0.0 <= eps < math.inf
        and len(shape) == 1
    ):
        try:
            return _layer_norm_op(None)(input, weight, bias, eps)[0]  # type: ignore[no-any-return]
        except RuntimeError:
            if input.shape[-1:] == shape and (bias is None or bias.shape == shape):
                raise  # not because of a size; sizes that do not fit raise below, as in torch
    if not _is_supported(input, shape, eps, weight, bias):
        return None
    x = _autocast_input(input)
    if len(shape) == 1:
        return functional.layer_norm(x, weight, bias, eps)
    weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
    return functional.layer_norm(x.flatten(-len(shape)), weight, bias, eps).view(x.shape)


def rms_norm(module: Any, x: Tensor) -> Tensor | None:
    """The result of an `nn.RMSNorm`, by the `rms_norm` op; None where torch's code must run."""
    eps, weight, shape = module.eps, module.weight, module.normalized_shape
    if not _is_supported(x, shape, 0.0 if eps is None else eps, weight):
        return None
    if is_recorded_inference(x) or is_recorded_inference(weight):
        return None
    x = _autocast_input(x)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    if len(shape) == 1:
        y = functional.rms_norm(x, weight, eps)
    else:
        weight = None if weight is None else weight.flatten()
        y = functional.rms_norm(x.flatten(-len(shape)), weight, eps).view(x.shape)
    return _in_memory_format_of(x, y)


class LayerNorm(DropIn, nn.LayerNorm):
    """`torch.nn.LayerNorm` on the `layer_norm` op."""

    def forward(self, input: Tensor) -> Tensor:
        y = layer_norm(self, input)
        return super().forward(input) if y is None else y


class RMSNorm(DropIn, nn.RMSNorm):
    """`torch.nn.RMSNorm` on the `rms_norm` op. As in torch, the default eps is fp32's or fp64's."""

    def forward(self, x: Tensor) -> Tensor:
        y = rms_norm(self, x)
        return super().forward(x) if y is None else y


class AddNorm(nn.Module):
    """`norm(x + dropout(y))`: y is the output of a sublayer, x its input.

    normalized_shape: the size of the last dimension, or the sizes of the last dimensions.
    """

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        dropout: float = 0.0,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        self.norm = LayerNorm(shape, eps, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x and y have one shape `[..., *normalized_shape]`, else ValueError; so has the result."""
        if x.shape != y.shape:
            raise ValueError(f"y must have the shape of x, {list(x.shape)}, got {list(y.shape)}")
        norm = self.norm
        if (
            is_unmodified(self.dropout, nn.Dropout)
            and can_fuse(norm, x)
            and _is_supported(x, norm.normalized_shape, norm.eps)
        ):
            streams = DropoutStreams(x.device)
            streams.checked = (
                runs_eagerly()
                and are_plain(x, y)
                and has_plain_parameters(norm, AFFINE, x)
                and 0.0 <= active_p(self.dropout) <= 1.0
            )
            return fused_add_norm(y, None, x, self.dropout, norm, streams)
        return self.norm(x + self.dropout(y))


def can_fuse(norm: nn.Module, x: Tensor) -> bool:
    """Whether `fused_add_norm` can compute the norm: unmodified, over the last dimension of x."""
    return (
        is_unmodified(norm, nn.LayerNorm, LayerNorm)
        and norm.normalized_shape == x.shape[-1:]
        and is_valid_eps(norm.eps)
    )


def fused_add_norm(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor,
    dropout: nn.Module,
    norm: nn.Module,
    streams: DropoutStreams,
) -> Tensor:
    """norm(residual + dropout(x + x_bias)) in torch's dtype: the end of a post-norm block."""
    if not (streams.checked or streams.low_residual):
        residual = _autocast_input(_promoted(residual, x))
    return fused_add_norm_and_sum(x, x_bias, residual, dropout, norm, streams)[0]


def fused_add_norm_and_sum(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor,
    dropout: nn.Module,
    norm: nn.Module,
    streams: DropoutStreams,
) -> tuple[Tensor, Tensor]:
    """z = residual + dropout(x + x_bias) -> (norm(z), z): between two pre-norm blocks."""
    p = active_p(dropout)
    weight, bias = weight_and_bias(norm)
    eps: Any = norm.eps
    stream = streams.take(p)
    if streams.checked:
        y, z, *_ = functional.add_layer_norm_op(
            x, residual, x_bias, weight, bias, float(eps), p, stream.get("dropout_seed"),
            stream.get("dropout_stream", 0),
        )  # fmt: skip
        return y, z
    y, z = functional.add_layer_norm(
        x,
        _promoted(residual, x),
        weight,
        bias,
        eps,
        x_bias=x_bias,
        dropout_p=p,
        return_sum=True,
        **stream,
    )
    return y, z


def _promoted(residual: Tensor, x: Tensor) -> Tensor:
    """The residual in the wider of both dtypes, as in torch: the op's sum has the residual's."""
    if residual.dtype == x.dtype:
        return residual
    return residual.to(torch.promote_types(residual.dtype, x.dtype))
