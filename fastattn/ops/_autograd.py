"""The derivative of an op: a forward and a backward op, joined by the names of their arguments.

`differentiable` registers the derivative under the dispatcher's Autograd key. The backward calls
the backward op, which has a derivative of its own. The forward's derivative exists twice: as a C++
node for CPU and CUDA tensors, used if the extension `_C_autograd` was built for the running torch,
and in Python for everything else, forward mode included.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._prims_common import is_contiguous_or_false
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from fastattn.ops._op import LIBRARY, OPS, Op

Jvp = Callable[[Sequence[Any], Sequence[Tensor | None], Sequence[Tensor]], Sequence[Tensor]]

_DERIVATIVES: list["Derivative"] = []
# Where an argument of the backward comes from: an enum of csrc/autograd/derivative.h.
_SAVED, _CONSTANT, _DTYPE, _NEEDS, _GRADIENT = range(5)


@dataclass(frozen=True)
class Derivative:
    """Where the backward op's arguments come from. An argument that has the name of an argument or
    result of the forward gets its value; `needs` gets which gradients are needed.

    gradients: the backward's results, in order -> the forward's arguments.
    result_gradients: the forward's results -> the backward's arguments for their gradients. The
    results listed must come first; the others are not differentiable.
    dtypes: the backward's arguments -> forward tensors; the argument is the tensor's dtype.
    passes_through: a forward argument -> the result whose gradient is also the argument's.
    equal_gradients: (x, y) -> a forward argument. If that argument is 0 and x and y have the same
    dtype, their gradients are equal: only y's is computed, and both get the same tensor.
    read_by: a forward tensor -> the only arguments whose gradients read it. It is saved only if one
    of them requires a gradient.
    Forward mode has one of:
    forward_maths: the forward op in differentiable PyTorch operators: its arguments -> its results.
    jvp: (arguments, their tangents, results) -> the tangents of the differentiable results, in
    differentiable PyTorch operators. An argument without a tangent has None.
    """

    forward: Op
    backward: Op
    gradients: Mapping[str, str]
    result_gradients: Mapping[str, str]
    forward_maths: Callable[..., Sequence[Tensor]] | None = None
    jvp: Jvp | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    passes_through: Mapping[str, str] = field(default_factory=dict)
    equal_gradients: Mapping[tuple[str, str], str] = field(default_factory=dict)
    read_by: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.forward_maths is None) != (self.jvp is None)
        assert [*self.gradients] == self.backward.results
        assert [*self.result_gradients] == self.forward.results[: len(self.result_gradients)]

    @property
    def name(self) -> str:
        """The name of the node in autograd's graph."""
        words = self.forward.public_name.split("_")
        return "".join(word.capitalize() for word in words) + "Backward"

    def positions(self, overload: str) -> "Positions":
        """overload: "" for the default one, or "backend", whose last argument is the backend."""
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
    """A derivative by position, in the order of the struct in csrc/autograd/derivative.h."""

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
    **options: Any,
) -> Op:
    """Makes `backward` the derivative of `forward` and returns `forward`. options: the other fields
    of `Derivative`.

    backward_maths: the backward op in differentiable PyTorch operators, for double backward and
    forward mode: its arguments -> its results, None for those not needed.
    """
    derivative = Derivative(forward, backward, **options)
    _DERIVATIVES.append(derivative)

    def first_call(*args: Any) -> Any:  # in inference mode no kernel at an Autograd key runs
        _register_nodes()
        if forward.eager is first_call:  # there is no extension
            forward.eager = forward.default
        return forward.eager(*args)

    forward.eager = first_call
    second = _second_derivative(backward, backward_maths)
    for overload in ("", ".backend"):
        LIBRARY.impl(forward.name + overload, _first_kernel(derivative, overload), "Autograd")
        LIBRARY.impl(
            backward.name + overload, _under_autograd(second, backward, overload), "Autograd"
        )
    return forward


def gradient_like(like: Tensor | None, needed: bool, other: Tensor) -> Tensor:
    """An empty gradient of `like`, or a tensor [0] like `other` if it is not needed. Its dimensions
    are stored in like's order if the last one of `like` is contiguous, as kernels need.
    """
    if not needed or like is None:
        return other.new_empty(0)
    if like.dim() == 0:
        return torch.empty_like(like)
    if like.stride(-1) == 1 and not _is_contiguous(like):
        gradient = torch.empty_like(like)
        if gradient.stride(-1) == 1:  # unless the input overlaps itself
            return gradient
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _is_contiguous(x: Tensor) -> bool:
    """False for a tensor in a graph whose sizes, which depend on data, may be 0."""
    return x.is_contiguous() if type(x.numel()) is int else is_contiguous_or_false(x)


_registering = threading.Lock()
_registered = False


def _register_nodes() -> bool:
    """Registers the C++ nodes and the calls of eager code, if the extension is available. The nodes
    take precedence over the derivatives in Python. Returns whether this call registered them.
    """
    global _registered
    with _registering:
        if _registered:
            return False
        from fastattn.ops import _native  # here, so that `import fastattn` loads no native library

        extension = _native.extension()
        if extension is not None:
            for op in OPS.values():
                op.eager = extension.eager_call(f"fastattn::{op.name}", op.default)
            for d in _DERIVATIVES:
                for overload in ("", "backend"):
                    names = (d.name, d.forward.name, overload, d.backward.name)
                    in_python = _first_derivative(d, overload)
                    extension.differentiate(*names, *d.positions(overload), in_python)
        _registered = True
        return extension is not None


# -- the derivative in Python ---------------------------------------------------------------------
def _function(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], jvp: Callable[..., Any]
) -> type[_SingleLevelFunction]:
    """An autograd function for a single functorch level, as a kernel at the Autograd key needs."""
    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        "jvp": staticmethod(jvp),
        # Compiled autograd needs it; only torch.autograd.Function defines it.
        "_compiled_autograd_key": staticmethod(torch.autograd.Function._compiled_autograd_key),
    }
    return type(name, (_SingleLevelFunction,), methods)


def _under_autograd(
    function: type[_SingleLevelFunction], op: Op, overload: str
) -> Callable[..., Any]:
    """The kernel at the Autograd key: applies `function` if an input requires a gradient or has a
    tangent.
    """
    call = op.named if overload else op.default

    def kernel(*args: Any) -> Any:
        recorded = torch.is_grad_enabled() and any(
            args[i] is not None and args[i].requires_grad for i in op.tensors
        )
        if recorded or _has_tangents(op, args):
            with enable_single_level_autograd_function():
                results = function.apply(call, *args)  # type: ignore[attr-defined]
            return op.as_declared(results)
        with torch._C._AutoDispatchBelowAutograd():
            return call(*args)

    return kernel


def _below(op: Op, call: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Calls the op below this autograd level. Outer functorch levels may follow, so gradient
    recording is on again, and forward mode, which an autograd function turns off.
    """
    with (
        torch.enable_grad(),
        forward_ad._set_fwd_grad_enabled(True),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        results = call(*args)
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _in_forward_mode() -> bool:
    """Whether tensors may have tangents. Compiled graphs enter torch.func.jvp's level without
    `forward_ad`, but not without functorch.
    """
    return (
        forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _dual(x: Any) -> tuple[Any, Tensor | None]:
    """(the argument without its tangent, the tangent or None)."""
    return forward_ad.unpack_dual(x, level=0) if isinstance(x, Tensor) else (x, None)


def _has_tangents(op: Op, args: Sequence[Any]) -> bool:
    return _in_forward_mode() and any(_dual(args[i])[1] is not None for i in op.tensors)


def _keep_for_jvp(ctx: Any, op: Op, args: Sequence[Any], results: Sequence[Tensor]) -> None:
    """Keeps what `jvp` needs until autograd calls it, right after the forward."""
    if _in_forward_mode():
        with forward_ad._set_fwd_grad_enabled(True):
            if _has_tangents(op, args):
                ctx.dual = (args, results)


@contextlib.contextmanager
def _forward_mode(ctx: Any) -> Iterator[tuple[Sequence[Any], Sequence[Tensor]]]:
    """(the arguments, with tangents; the results). Inside, tangents are propagated, which autograd
    turns off around a `jvp`.
    """
    dual = ctx.dual
    del ctx.dual
    with forward_ad._set_fwd_grad_enabled(True), torch._C._DisableAutocast():
        yield dual


def _tangents_of(found: Sequence[Tensor | None], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tangents of `found`, which was computed from arguments with tangents; zeros like a result
    that has none, as autograd takes no None.
    """
    tangents = (_dual(x)[1] for x in found)
    return tuple(
        torch.zeros_like(x) if t is None else t for t, x in zip(tangents, results, strict=True)
    )


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
            (skipped, computed)
            for skipped, computed, x, y, zero in at.equal
            if args[zero] == 0.0 and args[x].dtype == args[y].dtype
        ]
        ctx.mark_non_differentiable(*results[at.differentiable :])
        ctx.set_materialize_grads(False)
        _keep_for_jvp(ctx, forward, args, results)
        return results

    def run_jvp(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        with _forward_mode(ctx) as (args, results):
            if d.forward_maths is not None:
                found = _tangents_of(d.forward_maths(*args[: len(forward.arguments)]), results)
            else:
                assert d.jvp is not None
                primals, tangents = zip(*map(_dual, args), strict=True)
                found = tuple(d.jvp(primals, tangents, results))
        constant = len(forward.results) - at.differentiable
        return (*found[: at.differentiable], *(None,) * constant)

    def run_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]  # without `call`
        requested = [needed[i] for i in at.gradients]
        found: list[Tensor | None] = [None] * len(needed)
        if any(requested) and any(x is not None for x in gradients[: at.differentiable]):
            needs = list(requested)
            for skipped, computed in ctx.equal:
                if requested[skipped] and requested[computed]:
                    needs[skipped] = False
            kinds = (ctx.saved_tensors, ctx.constants, ctx.dtypes, [needs], gradients)
            args = [kinds[kind][i] for kind, i in at.sources]
            # In forward mode the Autograd key must see the call: arguments may have tangents.
            recorded = torch.is_grad_enabled() or _in_forward_mode()
            if recorded or torch.compiler.is_compiling():
                results = backward_call(*args)
            else:
                with torch._C._AutoDispatchBelowAutograd():  # nothing to record
                    results = backward_call(*args)
            for i, need, result in zip(at.gradients, needs, results, strict=True):
                if need:
                    found[i] = result
            for skipped, computed in ctx.equal:
                if requested[skipped] and not needs[skipped]:
                    found[at.gradients[skipped]] = results[computed]
        for i, j in at.passed:
            if needed[i]:
                found[i] = gradients[j]
        return (None, *found)

    function = _function(d.name.removesuffix("Backward"), run_forward, run_backward, run_jvp)
    return _under_autograd(function, forward, overload)


def _first_kernel(derivative: Derivative, overload: str) -> Callable[..., Any]:
    """The kernel at the forward's Autograd key; its first call registers the nodes in C++."""
    python = _first_derivative(derivative, overload)
    forward = derivative.forward
    forward_call = forward.named if overload else forward.default

    def kernel(*args: Any) -> Any:
        return forward_call(*args) if _register_nodes() else python(*args)

    return kernel


def _second_derivative(
    op: Op, maths: Callable[..., tuple[Tensor | None, ...]]
) -> type[_SingleLevelFunction]:
    """The derivative of an op that computes gradients, by PyTorch's operators."""
    needs_at = op.arguments.index("needs")

    def run_forward(ctx: Any, call: Any, *args: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*(args[i] for i in op.tensors))
        ctx.constants = [None if i in op.tensors else a for i, a in enumerate(args)]
        ctx.set_materialize_grads(False)
        results = _below(op, call, args)
        _keep_for_jvp(ctx, op, args, results)
        return results

    def run_jvp(ctx: Any, *_: Any) -> tuple[Tensor, ...]:
        with _forward_mode(ctx) as (args, results):
            return _tangents_of(maths(*args[: len(op.arguments)]), results)

    def run_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        args = list(ctx.constants)
        for i, tensor in zip(op.tensors, ctx.saved_tensors, strict=True):
            args[i] = tensor
        inputs = [i for i in op.tensors if ctx.needs_input_grad[1 + i]]
        given = [
            i
            for i, (gradient, needed) in enumerate(zip(gradients, args[needs_at], strict=True))
            if gradient is not None and needed
        ]

        if not given:
            return (None,) * (1 + len(args))

        def results(*values: Tensor) -> tuple[Tensor, ...]:
            replaced = list(args)
            for i, value in zip(inputs, values, strict=True):
                replaced[i] = value
            computed = maths(*replaced[: len(op.arguments)])
            return tuple(x for i in given if (x := computed[i]) is not None)

        with torch._C._DisableAutocast():
            vjp = torch.func.vjp(results, *(args[i] for i in inputs))[1]
            found = dict(zip(inputs, vjp(tuple(gradients[i] for i in given)), strict=True))
        return (None, *(found.get(i) for i in range(len(args))))

    return _function(op.name, run_forward, run_backward, run_jvp)
