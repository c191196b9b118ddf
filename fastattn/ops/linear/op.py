"""The torch op of a linear layer: schemas, shapes of the results, backends in order of preference.

Nothing is saved but the inputs. `suits` tells which plain calls are worth taking from torch.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from fastattn.ops._derivative import differentiable, gradient_like
from fastattn.ops._op import Backend, Op
from fastattn.ops.linear import reference

_PACKAGE = "fastattn.ops.linear"
_BACKENDS = (Backend("cpu"), Backend("reference"))


def _fwd_outputs(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    return (x.new_empty((*x.shape[:-1], w.shape[0])),)


def _bwd_outputs(
    dy: Tensor, x: Tensor, w: Tensor, b: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    return tuple(gradient_like(like, n, x) for n, like in zip(needs, (x, w, b), strict=True))


_forward = Op(
    "linear_fwd", "Tensor x, Tensor w, Tensor? b", "Tensor y", _fwd_outputs, _PACKAGE, _BACKENDS
)

linear = differentiable(
    _forward,
    Op(
        "linear_bwd",
        "Tensor dy, Tensor x, Tensor w, Tensor? b, bool[3] needs",
        "Tensor dx, Tensor dw, Tensor db",
        _bwd_outputs,
        _PACKAGE,
        _BACKENDS,
    ),
    reference.linear_bwd,
)


def suits(x: Tensor, w: Tensor, b: Tensor | None) -> bool:
    """Whether an eager call of valid arguments is faster through this op than through torch's own,
    and nobody watches torch's ops.
    """
    args = (x, w, b)
    return x.is_cpu and _forward.pays("cpu", args) and _forward.is_plain(args)


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Inside, a row's fp32 products on the CPU have the same bits among any number of rows."""
    set_to = _forward._module("cpu").batch_invariant
    before = set_to(True)
    try:
        yield
    finally:
        set_to(before)
