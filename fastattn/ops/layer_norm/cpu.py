"""The norms on the CPU in C++ (csrc/layer_norm): fp32, bf16 and fp16, on PyTorch's threads.

The kernels are registered under the dispatcher's CPU key.
"""

import torch

from fastattn.ops import _native
from fastattn.ops.layer_norm.calls import AnyCall, other_dtype

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def _why_unsupported(call: AnyCall) -> str | None:
    if dtype := other_dtype(call, _DTYPES):
        return f"has kernels for fp32, bf16 and fp16, got {dtype}"
    return unavailable()


layer_norm_fwd_unsupported = layer_norm_bwd_unsupported = _why_unsupported
add_layer_norm_fwd_unsupported = add_layer_norm_bwd_unsupported = _why_unsupported
rms_norm_fwd_unsupported = rms_norm_bwd_unsupported = _why_unsupported
