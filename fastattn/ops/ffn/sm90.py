"""The feed-forward network on Hopper in CUDA C++ (csrc/ffn/sm90): bf16 and fp16.

Six matrix products, each a persistent kernel whose epilogue has what follows it: biases,
activations, dropout, the residual, derivatives and sums for bias gradients. Operands are read by
the copy engine (TMA) where they are, which requires addresses and rows of multiples of 16 bytes.
The library plans the workspace (csrc/ffn/sm90/workspace.h): the activation, unless it is saved, and
in the backward the gradients between two products.
"""

import torch
from torch import Tensor

from fastattn.ops import _native
from fastattn.ops.ffn.calls import BackwardCall, ForwardCall

_library = torch.ops.fastattn_sm90
_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes
_STEP = 8  # elements of them
_MAX_SIZE = 2**28  # the kernels count positions in 32 bits


def unavailable() -> str | None:
    return _native.unavailable("sm90")


# -- unsupported calls ----------------------------------------------------------------------------
def _unreadable(name: str, x: Tensor) -> str | None:
    """Why TMA cannot read the rows of x in place."""
    if x.stride(-1) != 1:
        return f"needs {name} with a contiguous last dimension, got strides {x.stride()}"
    if x.data_ptr() % _ALIGNMENT:
        return f"needs {name} at an address that is a multiple of {_ALIGNMENT} bytes"
    step = _ALIGNMENT // x.element_size()
    # Any of them may become the stride of rows (`_rows`).
    leading = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    if any(size > 1 and (stride % step or stride <= 0) for size, stride in leading):
        return f"needs strides of {name} that are positive multiples of {step}, got {x.stride()}"
    return None


def _unsupported(call: ForwardCall | BackwardCall, of_y: Tensor | None, name: str) -> str | None:
    """of_y: a tensor of y's shape and dtype."""
    if why := unavailable():
        return why
    x, w1, w2 = call.x, call.w1, call.w2
    if x.dtype not in _DTYPES:
        return f"has kernels for bf16 and fp16, got {x.dtype}"
    if of_y is not None and of_y.dtype not in (x.dtype, torch.float32):
        return f"takes a {name} in {x.dtype} or torch.float32, got {of_y.dtype}"
    for columns in (x.shape[-1], w2.shape[1], w2.shape[0]):
        if columns == 0 or columns % _STEP:
            return f"is built for features that are multiples of {_STEP}, got {columns}"
    for size in (x.shape[:-1].numel(), x.shape[-1], *w1.shape, *w2.shape):
        if size > _MAX_SIZE:
            return f"takes at most {_MAX_SIZE} rows and features, got {size}"
    for operand, tensor in (("x", x), ("w1", w1), ("w2", w2)):
        if tensor.numel() and (why := _unreadable(operand, tensor)):
            return why
    return None


def ffn_fwd_unsupported(call: ForwardCall) -> str | None:
    return _unsupported(call, call.residual, "residual")


def ffn_bwd_unsupported(call: BackwardCall) -> str | None:
    return _unsupported(call, call.dy, "gradient")


# -- launches -------------------------------------------------------------------------------------
def _rows(x: Tensor) -> Tensor:
    """[..., N] -> [rows, N], or x itself where the library takes its leading dimensions as rows."""
    if x.dim() == 2 or (x.dim() > 2 and x.is_contiguous()):
        return x
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _dense(x: Tensor | None) -> Tensor | None:
    """x, or a copy that is contiguous and aligned."""
    if x is None or (x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def ffn_fwd(call: ForwardCall, y: Tensor, hidden: Tensor) -> None:
    x, residual = _rows(call.x), call.residual
    if x.numel() == 0:
        return
    if residual is not None:
        residual = _rows(residual)
        if _unreadable("residual", residual):
            residual = residual.clone(memory_format=torch.contiguous_format)
    _native.call_with_workspace(
        _library.ffn_fwd.default, x.device, x, call.w1, _dense(call.b1), call.w2, _dense(call.b2),
        residual, *call[call._fields.index("activation") :], y, hidden,
    )  # fmt: skip


def ffn_bwd(
    call: BackwardCall, dx: Tensor, dw1: Tensor, db1: Tensor, dw2: Tensor, db2: Tensor
) -> None:
    x = _rows(call.x)
    if x.numel() == 0:
        for gradient in (dx, dw1, db1, dw2, db2):
            gradient.zero_()
        return
    _native.call_with_workspace(
        _library.ffn_bwd.default, x.device, _dense(call.dy), x, call.w1, call.w2,
        _dense(call.hidden), call.activation, call.dropout_p, call.output_dropout_p,
        call.dropout_seed, call.dropout_stream, dx, dw1, db1, dw2, db2,
    )  # fmt: skip
