"""The torch op of a linear layer: schemas, shapes of the results, backends in order of preference.

Nothing is saved but the inputs. `suits` tells which plain calls are worth taking from torch.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.ops._derivative import differentiable, gradient_like
from fastattn.ops._op import PLAIN_TENSORS, Backend, Op
from fastattn.ops.linear import reference

_PACKAGE = "fastattn.ops.linear"
_BACKENDS = (Backend("cpu"), Backend("reference"))
_HALVES = (torch.bfloat16, torch.float16)


def _fwd_outputs(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    return (x.new_empty((*x.shape[:-1], w.shape[0])),)


def _bwd_outputs(dy: Tensor, x: Tensor, w: Tensor, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    db = x.new_empty(w.shape[0] if needs[2] else 0)
    return gradient_like(x, needs[0], x), gradient_like(w, needs[1], x), db


_forward = Op(
    "linear_fwd", "Tensor x, Tensor w, Tensor? b", "Tensor y", _fwd_outputs, _PACKAGE, _BACKENDS
)

linear = differentiable(
    _forward,
    Op(
        "linear_bwd",
        "Tensor dy, Tensor x, Tensor w, bool[3] needs",
        "Tensor dx, Tensor dw, Tensor db",
        _bwd_outputs,
        _PACKAGE,
        _BACKENDS,
    ),
    reference.linear_bwd,
)


def suits(x: Tensor, w: Tensor, b: Tensor | None) -> bool:
    """Whether an eager call is faster through this op than through torch's own, nobody watches
    torch's ops, and the difference shows nowhere: the arguments are strided matrices that fit, and
    the gradients that are wanted read both of them, for both are kept.
    """
    if (
        not x.is_cpu
        or w.dim() != 2
        or x.dim() == 0
        or x.shape[-1] != w.shape[1]
        or x.layout is not torch.strided
        or w.layout is not torch.strided
        or not (b is None or (b.dim() == 1 and b.shape[0] == w.shape[0] and b.dtype == x.dtype))
    ):
        return False
    if torch.is_grad_enabled() and not (x.requires_grad and w.requires_grad):
        if x.requires_grad or w.requires_grad or (b is not None and b.requires_grad):
            return False
    args = (x, w, b)
    return _forward.pays("cpu", args) and _forward.is_plain(args)


def is_left_to_torch(x: Tensor, w: Tensor, b: Tensor | None) -> bool:
    """Whether a plain eager call that names no backend goes straight to torch's own op: on the CPU
    it is as fast in bf16 and fp16.
    """
    if torch.compiler.is_compiling() or x.dtype not in _HALVES or not x.is_cpu:
        return False
    return _forward.direct_on_cpu() is not None and _forward.is_plain((x, w, b))


def is_torchs_at_once(x: Any, w: Any, b: Any) -> bool:
    """`is_left_to_torch` of arguments as a caller gives them: False where they would be refused or
    cast, or the choice explained. (Where it is True a call takes 1.2 us less than by the checks.)
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) in PLAIN_TENSORS
        and type(w) in PLAIN_TENSORS
        and (b is None or type(b) in PLAIN_TENSORS)
        and (dtype := x.dtype) in _HALVES
        and w.dtype is dtype
        and x.is_cpu
        and w.is_cpu
        and not (x.is_nested or w.is_nested)
        and len(w_shape := w.shape) == 2
        and x.dim() > 0
        and x.shape[-1] == w_shape[1]
        and (
            b is None
            or (b.dtype is dtype and b.is_cpu and b.dim() == 1 and b.shape[0] == w_shape[0])
        )
        and _forward.at_once() is not None
    )


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Inside, a row's fp32 products on the CPU have the same bits among any number of rows, where
    they are ours: not where torch's are as quick, see `suits`.
    """
    set_to = _forward._module("cpu").batch_invariant
    before = set_to(True)
    try:
        yield
    finally:
        set_to(before)
