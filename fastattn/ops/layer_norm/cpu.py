"""The norms on the CPU in C++ (csrc/layer_norm): fp32, bf16 and fp16, on PyTorch's threads.

The kernels are registered under the dispatcher's CPU key.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.ops import _native
from fastattn.ops.layer_norm.calls import (
    AddLayerNormBackwardCall,
    AddLayerNormCall,
    LayerNormBackwardCall,
    LayerNormCall,
    RmsNormBackwardCall,
    RmsNormCall,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def _why_unsupported(tensors: Sequence[Tensor | None], *dtypes: torch.dtype) -> str | None:
    for dtype in (*dtypes, *(tensor.dtype for tensor in tensors if tensor is not None)):
        if dtype not in _DTYPES:
            return f"has kernels for fp32, bf16 and fp16, got {dtype}"
    return unavailable()


def layer_norm_fwd_unsupported(call: LayerNormCall) -> str | None:
    return _why_unsupported((call.x, call.weight, call.bias))


def layer_norm_bwd_unsupported(call: LayerNormBackwardCall) -> str | None:
    return _why_unsupported((call.x, call.weight, call.bias))


def add_layer_norm_fwd_unsupported(call: AddLayerNormCall) -> str | None:
    return _why_unsupported((call.x, call.residual, call.x_bias, call.weight, call.bias))


def add_layer_norm_bwd_unsupported(call: AddLayerNormBackwardCall) -> str | None:
    return _why_unsupported((call.z, call.x_bias, call.weight, call.bias), call.x_dtype)


def rms_norm_fwd_unsupported(call: RmsNormCall) -> str | None:
    return _why_unsupported((call.x, call.weight))


def rms_norm_bwd_unsupported(call: RmsNormBackwardCall) -> str | None:
    return _why_unsupported((call.x, call.weight))
