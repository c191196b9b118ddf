"""The torch op of a linear layer: schemas, shapes of the results, backends in order of preference.

Nothing is saved but the inputs. `suits` tells which plain calls are worth taking from torch.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.ops._derivative import differentiable, gradient_like
from fastattn.ops._op import Backend, Op
from fastattn.ops._road import Road
from fastattn.ops.linear import reference

_PACKAGE = "fastattn.ops.linear"
_BACKENDS = (Backend("cpu"), Backend("reference"))


def _fwd_outputs(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    return (x.new_empty((*x.shape[:-1], w.shape[0])),)


def _bwd_outputs(dy: Tensor, x: Tensor, w: Tensor, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    db = x.new_empty(w.shape[0] if needs[2] else 0)
    return gradient_like(x, needs[0], x), gradient_like(w, needs[1], x), db


LINEAR = Op(
    "linear_fwd", "Tensor x, Tensor w, Tensor? b", "Tensor y", _fwd_outputs, _PACKAGE, _BACKENDS
)

linear = differentiable(
    LINEAR,
    Op(
        "linear_bwd",
        "Tensor dy, Tensor x, Tensor w, bool[3] needs",
        "Tensor dx, Tensor dw, Tensor db",
        _bwd_outputs,
        _PACKAGE,
        _BACKENDS,
    ),
    reference.linear_bwd,
    road=Road("linear_plain_fwd", "linear_plain_bwd", casts=True),
)


def _keeps_too_much(x: Tensor, w: Tensor, b: Tensor | None) -> bool:
    """Whether the gradients that are wanted do not read both x and w, which the op keeps: what
    torch does not keep may be changed in place.
    """
    if not torch.is_grad_enabled() or (x.requires_grad and w.requires_grad):
        return False
    return x.requires_grad or w.requires_grad or (b is not None and b.requires_grad)


def is_worth_taking(x: Tensor, w: Tensor, b: Tensor | None) -> bool:
    """Whether an eager call is faster through this op than through torch's own if it is plain, and
    the gradients that are wanted read both x and w, for both are kept.
    """
    if w.dim() != 2 or _keeps_too_much(x, w, b):
        return False
    graph = w.requires_grad and torch.is_grad_enabled()
    return LINEAR._module("cpu").is_worth_taking(x, w, graph)


def suits(x: Tensor, w: Tensor, b: Tensor | None) -> bool:
    """Whether a call that the short road does not serve is the CPU kernels' all the same, and the
    difference shows nowhere: strided matrices that fit, and nobody who watches torch's ops but
    those who record what is launched.
    """
    if (
        torch._C._is_any_autocast_enabled()
        or not x.is_cpu
        or w.dim() != 2
        or x.dim() == 0
        or x.shape[-1] != w.shape[1]
        or any(t is not None and t.layout is not torch.strided for t in (x, w, b))
        or w.dtype is not x.dtype
        or not (b is None or (b.dim() == 1 and b.shape[0] == w.shape[0] and b.dtype is x.dtype))
    ):
        return False
    args = (x, w, b)
    return LINEAR.would_take("cpu", args) and LINEAR.is_plain(args)


def left_to_torch(x: Any, w: Any, b: Any) -> str | None:
    """Why an eager call that names no backend goes straight to torch's own op, None where not."""
    if (
        torch.compiler.is_compiling()
        or not (isinstance(x, Tensor) and isinstance(w, Tensor) and x.is_cpu)
        or not (b is None or isinstance(b, Tensor))
    ):
        return None
    if _keeps_too_much(x, w, b):
        why = "keeps x and weight, of which the gradients that are wanted do not read both"
    else:
        why = LINEAR._module("cpu").left_to_torch(x.dtype)
    return why if why and LINEAR.direct_on_cpu() is not None else None


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Inside, a row's fp32 products on the CPU have the same bits among any number of rows, where
    they are ours: not where torch's are as quick, see `is_worth_taking`.
    """
    set_to = LINEAR._module("cpu").batch_invariant
    before = set_to(True)
    try:
        yield
    finally:
        set_to(before)
