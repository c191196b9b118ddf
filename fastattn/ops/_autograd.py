"""The derivative of an op: a forward and a backward op, joined by name.

`differentiable` registers it under the dispatcher's Autograd key, below which the forward runs; the
backward is a call of the backward op, which has a derivative of its own. Of both forms of the
forward's, one runs: where the extension `_C_autograd` fits the torch that runs, a node in C++ for
CPU and CUDA tensors; otherwise, and for other devices, the same in Python.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from fastattn.ops._op import LIBRARY, Op

_DERIVATIVES: list["Derivative"] = []
# Where a backward argument comes from: the words of csrc/autograd/derivative.h, in their order.
_SAVED, _CONSTANT, _DTYPE, _NEEDS, _GRADIENT = range(5)


@dataclass(frozen=True)
class Derivative:
    """How the backward op is fed. Its arguments that are called like an argument or a result of the
    forward are those; `needs` says which gradients are wanted.

    gradients: the backward's results, in order -> the forward arguments whose gradients they are.
    result_gradients: the forward's results -> the backward argument with the result's gradient. The
    results named come first; the others have no gradient.
    dtypes: backward arguments -> the forward tensors whose dtype they are.
    passes_through: forward arguments whose gradient is that of a result.
    equal_gradients: (x, y) -> the argument that is 0 where both have the same gradient, if they are
    of one dtype; then only y's is computed and both inputs get it, as those of a sum do in torch.
    read_by: forward tensors -> the arguments whose gradients alone read them; without those they
    are not kept.
    """

    forward: Op
    backward: Op
    gradients: Mapping[str, str]
    result_gradients: Mapping[str, str]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    passes_through: Mapping[str, str] = field(default_factory=dict)
    equal_gradients: Mapping[tuple[str, str], str] = field(default_factory=dict)
    read_by: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert [*self.gradients] == self.backward.results
        assert [*self.result_gradients] == self.forward.results[: len(self.result_gradients)]

    @property
    def name(self) -> str:
        """Of the node in autograd's graph."""
        return "".join(word.capitalize() for word in self.forward.family.split("_")) + "Backward"

    def positions(self, overload: str) -> "Positions":
        """Of the default overload ("") or of "backend", which has the backend's name last."""
        named = ["backend"] if overload else []
        inputs, results = [*self.forward.arguments, *named], self.forward.results
        read = [*self.backward.arguments, *named]
        tensors = {inputs[i] for i in self.forward.tensors}
        saved = [name for name in read if name in tensors or name in results]
        constants = [name for name in read if name in inputs and name not in tensors]
        gradients = [*self.gradients.values()]
        sources = {
            **{name: (_SAVED, i) for i, name in enumerate(saved)},
            **{name: (_CONSTANT, i) for i, name in enumerate(constants)},
            **{name: (_DTYPE, i) for i, name in enumerate(self.dtypes)},
            "needs": (_NEEDS, 0),
            **{name: (_GRADIENT, i) for i, name in enumerate(self.result_gradients.values())},
        }
        values = [*inputs, *results]
        return Positions(
            tensors=self.forward.tensors,
            differentiable=len(self.result_gradients),
            saved=[
                (values.index(name), [inputs.index(x) for x in self.read_by.get(name, ())])
                for name in saved
            ],
            constants=[inputs.index(name) for name in constants],
            dtypes=[inputs.index(name) for name in self.dtypes.values()],
            sources=[sources[name] for name in read],
            gradients=[inputs.index(name) for name in gradients],
            passed=[(inputs.index(x), results.index(y)) for x, y in self.passes_through.items()],
            equal=[
                (gradients.index(x), gradients.index(y), *map(inputs.index, (x, y, zero)))
                for (x, y), zero in self.equal_gradients.items()
            ],
        )


class Positions(NamedTuple):
    """A derivative by position: what csrc/autograd/derivative.h holds, in its order."""

    tensors: list[int]
    differentiable: int
    saved: list[tuple[int, list[int]]]
    constants: list[int]
    dtypes: list[int]
    sources: list[tuple[int, int]]
    gradients: list[int]
    passed: list[tuple[int, int]]
    equal: list[tuple[int, ...]]


def differentiable(
    forward: Op,
    backward: Op,
    backward_maths: Callable[..., tuple[Tensor | None, ...]],
    *,
    gradients: Mapping[str, str],
    result_gradients: Mapping[str, str],
    **facts: Mapping[Any, Any],
) -> Op:
    """Joins two ops and returns the forward; see `Derivative`.

    backward_maths: the backward op's arguments -> its results (None where not needed) in
    differentiable torch, for double backward.
    """
    derivative = Derivative(forward, backward, gradients, result_gradients, **facts)
    _DERIVATIVES.append(derivative)
    second = _second_derivative(backward, backward_maths)
    for overload in ("", ".backend"):
        LIBRARY.impl(forward.name + overload, _first_derivative(derivative, overload), "Autograd")
        LIBRARY.impl(
            backward.name + overload, _under_autograd(second, backward, overload), "Autograd"
        )
    return forward


def gradient_like(like: Tensor | None, needed: bool, anchor: Tensor) -> Tensor:
    """An empty gradient of `like`, or one of shape [0] where it is not needed. It has the order of
    strides of `like`, unless that has its last dimension elsewhere: kernels write rows.
    """
    if not needed or like is None:
        return anchor.new_empty(0)
    if like.dim() == 0:
        return torch.empty_like(like)
    if like.stride(-1) == 1 and not like.is_contiguous():
        gradient = torch.empty_like(like)
        if gradient.stride(-1) == 1:  # unless the input overlaps itself
            return gradient
    return torch.empty_like(like, memory_format=torch.contiguous_format)


_registering = threading.Lock()
_registered = False


def _register_nodes() -> bool:
    """Registers the derivatives in C++, if there is an extension; they come before those here.
    Returns whether this call has done so.
    """
    global _registered
    with _registering:
        if _registered:
            return False
        from fastattn.ops import _native  # not with the package: it looks for native libraries

        extension = _native.extension()
        if extension is not None:
            for d in _DERIVATIVES:
                for overload in ("", "backend"):
                    names = (d.name, d.forward.name, overload, d.backward.name)
                    extension.differentiate(*names, *d.positions(overload))
        _registered = True
        return extension is not None


# -- the derivative in Python ---------------------------------------------------------------------
def _function(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> type[_SingleLevelFunction]:
    """An autograd function for one level of functorch's: kernels at the Autograd key see one."""
    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        # Compiled autograd asks for it, of ordinary functions alone.
        "_compiled_autograd_key": staticmethod(torch.autograd.Function._compiled_autograd_key),
    }
    return type(name, (_SingleLevelFunction,), methods)


def _under_autograd(
    function: type[_SingleLevelFunction], op: Op, overload: str
) -> Callable[..., Any]:
    """The kernel at the Autograd key: `function` where a gradient is wanted."""
    call = op.named if overload else op.default

    def kernel(*args: Any) -> Any:
        _check_no_tangents(op, args)
        if torch.is_grad_enabled() and any(
            args[i] is not None and args[i].requires_grad for i in op.tensors
        ):
            with enable_single_level_autograd_function():
                results = function.apply(call, *args)  # type: ignore[attr-defined]
            return op.as_declared(results)
        with torch._C._AutoDispatchBelowAutograd():
            return call(*args)

    return kernel


def _below(op: Op, call: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The op below this level of autograd; further levels of functorch's may follow, whose
    tangents an autograd function hides.
    """
    with (
        torch.enable_grad(),
        forward_ad._set_fwd_grad_enabled(True),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        results = call(*args)
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _check_no_tangents(op: Op, args: Sequence[Any]) -> None:
    """A derivative in forward mode would be lost."""
    if forward_ad._current_level < 0:
        return
    for i in op.tensors:
        if args[i] is not None and forward_ad.unpack_dual(args[i]).tangent is not None:
            raise NotImplementedError(f"fastattn::{op.name} has no derivative in forward mode")


def _first_derivative(derivative: Derivative, overload: str) -> Callable[..., Any]:
    d, forward, at = derivative, derivative.forward, derivative.positions(overload)
    backward_call = d.backward.named if overload else d.backward.default

    def run_forward(ctx: Any, call: Any, *args: Any) -> tuple[Tensor, ...]:
        results = _below(forward, call, args)
        values = (*args, *results)
        ctx.save_for_backward(
            *(
                values[i] if not read_by or any(args[j].requires_grad for j in read_by) else None
                for i, read_by in at.saved
            )
        )
        ctx.constants = [args[i] for i in at.constants]
        ctx.dtypes = [args[i].dtype for i in at.dtypes]
        ctx.equal = [
            (spared, computed)
            for spared, computed, x, y, zero in at.equal
            if args[zero] == 0.0 and args[x].dtype == args[y].dtype
        ]
        ctx.mark_non_differentiable(*results[at.differentiable :])
        ctx.set_materialize_grads(False)
        return results

    def run_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]  # behind the call
        wants = [needed[i] for i in at.gradients]
        found: list[Tensor | None] = [None] * len(needed)
        if any(wants) and any(x is not None for x in gradients[: at.differentiable]):
            needs = list(wants)
            for spared, computed in ctx.equal:
                if wants[spared] and wants[computed]:
                    needs[spared] = False
            kinds = (ctx.saved_tensors, ctx.constants, ctx.dtypes, [needs], gradients)
            args = [kinds[kind][i] for kind, i in at.sources]
            # A gradient with a derivative in forward mode is refused above the kernels.
            recorded = torch.is_grad_enabled() or forward_ad._current_level >= 0
            if recorded or torch.compiler.is_compiling():
                results = backward_call(*args)
            else:
                with torch._C._AutoDispatchBelowAutograd():  # nothing to record
                    results = backward_call(*args)
            for i, need, result in zip(at.gradients, needs, results, strict=True):
                if need:
                    found[i] = result
            for spared, computed in ctx.equal:
                if wants[spared] and not needs[spared]:
                    found[at.gradients[spared]] = results[computed]
        for i, j in at.passed:
            if needed[i]:
                found[i] = gradients[j]
        return (None, *found)

    function = _function(d.name.removesuffix("Backward"), run_forward, run_backward)
    python = _under_autograd(function, forward, overload)
    forward_call = forward.named if overload else forward.default

    def kernel(*args: Any) -> Any:
        return forward_call(*args) if _register_nodes() else python(*args)

    return kernel


def _second_derivative(
    op: Op, maths: Callable[..., tuple[Tensor | None, ...]]
) -> type[_SingleLevelFunction]:
    """The backward op's own derivative, through torch's operators."""
    needs_at = op.arguments.index("needs")

    def run_forward(ctx: Any, call: Any, *args: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*(args[i] for i in op.tensors))
        ctx.constants = [None if i in op.tensors else a for i, a in enumerate(args)]
        ctx.set_materialize_grads(False)
        return _below(op, call, args)

    def run_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        args = list(ctx.constants)
        for i, tensor in zip(op.tensors, ctx.saved_tensors, strict=True):
            args[i] = tensor
        moving = [i for i in op.tensors if ctx.needs_input_grad[1 + i]]
        given = [
            i
            for i, (gradient, needed) in enumerate(zip(gradients, args[needs_at], strict=True))
            if gradient is not None and needed
        ]

        if not given:
            return (None,) * (1 + len(args))

        def results(*values: Tensor) -> tuple[Tensor, ...]:
            moved = list(args)
            for i, value in zip(moving, values, strict=True):
                moved[i] = value
            made = maths(*moved[: len(op.arguments)])
            return tuple(x for i in given if (x := made[i]) is not None)

        with torch._C._DisableAutocast():
            vjp = torch.func.vjp(results, *(args[i] for i in moving))[1]
            found = dict(zip(moving, vjp(tuple(gradients[i] for i in given)), strict=True))
        return (None, *(found.get(i) for i in range(len(args))))

    return _function(op.name, run_forward, run_backward)
