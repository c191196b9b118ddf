"""The feed-forward network on the CPU in C++ (csrc/ffn): fp32, bf16 and fp16 on PyTorch's threads.

Biases, activations, dropout, the residual and the sums for bias gradients are fused into the matrix
products: they are applied to each block of a product while it is in the cache. The kernels are
registered under the dispatcher's CPU key.
"""

import torch
from torch import Tensor

from fastattn.ops import _native
from fastattn.ops.ffn.calls import BackwardCall, ForwardCall

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def _why_unsupported(*tensors: Tensor | None) -> str | None:
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in _DTYPES:
            return f"has kernels for fp32, bf16 and fp16, got {tensor.dtype}"
    return unavailable()


def ffn_fwd_unsupported(call: ForwardCall) -> str | None:
    return _why_unsupported(call.x, call.residual)


def ffn_bwd_unsupported(call: BackwardCall) -> str | None:
    return _why_unsupported(call.dy, call.x)
