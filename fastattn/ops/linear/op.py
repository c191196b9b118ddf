"""The torch op of a linear layer: schemas, shapes of the results, backends in order of preference.

Only the inputs that the needed gradients read are saved.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from fastattn.ops._autograd import differentiable
from fastattn.ops._op import Backend, Op
from fastattn.ops.linear import reference

_PACKAGE = "fastattn.ops.linear"
_BACKENDS = (Backend("cpu"), Backend("torch"), Backend("reference"))


def _fwd_outputs(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    return (x.new_empty((*x.shape[:-1], w.shape[0])),)


def _bwd_outputs(
    dy: Tensor, x: Tensor | None, w: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    need_x, need_w, need_b = needs
    dx = dw = dy.new_empty(0)
    if need_x:
        assert w is not None
        dx = dy.new_empty((*dy.shape[:-1], w.shape[1]))
    if need_w:
        assert x is not None
        dw = dy.new_empty(dy.shape[-1], x.shape[-1])
    return dx, dw, dy.new_empty(dy.shape[-1] if need_b else 0)


linear = differentiable(
    Op(
        "linear_fwd",
        "Tensor x, Tensor w, Tensor? b",
        "Tensor y",
        _fwd_outputs,
        _PACKAGE,
        _BACKENDS,
        public_name="linear",
        requested_in_pairs=True,
        batched=("x", "y"),
    ),
    Op(
        "linear_bwd",
        "Tensor dy, Tensor? x, Tensor? w, bool[3] needs",
        "Tensor dx, Tensor dw, Tensor db",
        _bwd_outputs,
        _PACKAGE,
        _BACKENDS,
        public_name="linear",
        requested_in_pairs=True,
        batched=("dy", "x", "dx"),
        is_derivative=True,
    ),
    reference.linear_bwd,
    forward_maths=reference.linear_fwd,
    gradients={"dx": "x", "dw": "w", "db": "b"},
    result_gradients={"y": "dy"},
    read_by={"x": ("w",), "w": ("x",)},
)


def linear_runs_torch(x: Tensor) -> bool:
    """Whether `fastattn.linear` runs PyTorch's operator for x [..., D], a CPU tensor."""
    if requested := linear.choice(None):
        return requested == "torch"
    cpu = linear.module("cpu")
    return cpu.why_unsupported(x) is not None or cpu.slower(x) is not None


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Inside, the CPU kernels' matrix products of this thread (`linear` and `ffn`) sum in an order
    that does not depend on the number of rows, so each row of a forward is the same bit for bit in
    any batch. For eager code: graphs that are traced inside do not have this property.
    """
    with linear.module("cpu").batch_invariant():
        yield
