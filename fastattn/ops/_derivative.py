"""The derivative of an op: a forward and a backward op, joined through the names in their schemas.

`differentiable` returns the road that every public function takes. A plain eager call runs the
forward op inside an autograd.Function in ctx style, the cheapest; tracing and functorch need the
other style; torch.compile sees one op, whose Autograd kernel is registered here too.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn.ops import _road
from fastattn.ops._op import PLAIN_TENSORS, Op, are_ops_watched, explaining

_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# Gradients batched by torch.autograd.grad have none, and nothing else tells them apart.
_has_storage = torch._C._has_storage


class _Picker:
    """`pick(items)` -> the items at these indices."""

    def __init__(self, indices: Sequence[int]):
        self.indices = tuple(indices)
        self.pick: Callable[[Sequence[Any]], tuple[Any, ...]] = self.traced
        if len(self.indices) > 1:
            self.pick = operator.itemgetter(*self.indices)

    def traced(self, items: Sequence[Any]) -> tuple[Any, ...]:
        """For a backward pass that compiled autograd traces: it knows no itemgetter."""
        return tuple(items[i] for i in self.indices)


class _Wiring:
    """How a backward op is fed, read off the names in the two schemas.

    A backward argument is a forward argument, a forward result, "d" + a forward result (its
    gradient), `needs` (which gradients are wanted, in the order of the backward's results) or a
    forward tensor's name + "_dtype". Backward result "d" + x is the gradient of forward argument x.
    """

    def __init__(
        self,
        forward: Op,
        backward: Op,
        passes_through: Mapping[str, str],
        equal_gradients: Mapping[tuple[str, str], str],
    ):
        inputs, results = forward.arguments, forward.results
        tensors = {inputs[i] for i in forward.tensors}
        used = [name for name in backward.arguments if name in inputs]
        saved_inputs = [name for name in used if name in tensors]
        saved_results = [name for name in backward.arguments if name in results]
        constants = [name for name in used if name not in tensors]
        typed = [name for name in backward.arguments if name.endswith("_dtype")]
        gradients = ["d" + name for name in results]
        produced = [*inputs, *results]
        self._saved = _Picker([produced.index(name) for name in saved_inputs + saved_results]).pick
        self._constants = [inputs.index(name) for name in constants]
        self._typed = [inputs.index(name.removesuffix("_dtype")) for name in typed]
        # Results that have a gradient come first.
        self.with_gradient = sum(name in backward.arguments for name in gradients)
        assert all(name in backward.arguments for name in gradients[: self.with_gradient])
        # In backward every argument is taken from these, in this order.
        sources = [*saved_inputs, *saved_results, *constants, *typed, "needs", *gradients]
        self.arguments = _Picker([sources.index(name) for name in backward.arguments])
        # Positions among the arguments of a Function, of which the first is the backend's name.
        self.wanted = [1 + inputs.index(name.removeprefix("d")) for name in backward.results]
        self.needs = _Picker(self.wanted)
        self.passed = [(1 + inputs.index(x), results.index(y)) for x, y in passes_through.items()]
        self.positions = 1 + len(inputs)
        # For each position its place behind a None among the backward's results, or that None.
        self.gradients = _Picker(
            [self.wanted.index(i) + 1 if i in self.wanted else 0 for i in range(self.positions)]
        )
        ordered = [name.removeprefix("d") for name in backward.results]
        # Among the backward's results (spared, computed), then among the arguments (x, y, zero).
        self._equal = [
            (*map(ordered.index, pair), *map(inputs.index, (*pair, zero)))
            for pair, zero in equal_gradients.items()
        ]
        self.wires = _road.Wires(
            name="".join(word.capitalize() for word in forward.family.split("_")) + "Backward",
            types=dict(zip(inputs, forward.types, strict=True)),
            saved=saved_inputs + saved_results,
            constants=constants,
            typed=[inputs[i] for i in self._typed],
            results=results,
            differentiable=self.with_gradient,
            gradients=ordered,
            passed=list(passes_through.items()),
            equal=[(x, y, zero) for (x, y), zero in equal_gradients.items()],
        )

    def save(self, ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*self._saved(args + results))
        constants = [args[i] for i in self._constants]
        for i in self._typed:
            constants.append(args[i].dtype)
        ctx.constants = constants
        ctx.equal = [
            (spared, computed)
            for spared, computed, x, y, zero in self._equal
            if args[zero] == 0.0 and args[x].dtype == args[y].dtype
        ]
        ctx.set_materialize_grads(False)


def gradient_like(like: Tensor | None, needed: bool, anchor: Tensor) -> Tensor:
    """An empty gradient of `like` (its shape and order of strides), or one of shape [0] where
    nobody wants it.
    """
    if needed and like is not None:
        return torch.empty_like(like)
    return anchor.new_empty(0)


def _dense_rows(gradient: Tensor) -> Tensor:
    """Kernels read rows: an expanded gradient (of a sum, say) is written out."""
    if gradient.dim() == 0 or gradient.stride(-1) == 1:
        return gradient
    return gradient.contiguous()


def differentiable(
    forward: Op,
    backward: Op,
    backward_maths: Callable[..., tuple[Tensor | None, ...]],
    passes_through: Mapping[str, str] = MappingProxyType({}),
    equal_gradients: Mapping[tuple[str, str], str] = MappingProxyType({}),
    road: _road.Road | None = None,
) -> Callable[..., tuple[Tensor, ...]]:
    """Joins two ops; returns `apply(*arguments, backend=None)`, the road that every public function
    takes; of the results, those without a gradient may be missing.

    backward_maths: the backward op's arguments -> its results (None where not needed) in
    differentiable torch, for double backward. passes_through: forward arguments whose gradient is
    that of a result. equal_gradients: (x, y) -> the argument that is 0 where both have the same
    gradient, if they are of one dtype; then only y's is computed and both inputs get it, as those
    of a sum do in torch. road: that of `forward.short_road`, which public functions try first where
    torch.compile does not trace. Eager calls use a Function in ctx style, the cheapest; tracing and
    functorch need the other style.
    """
    wiring = _Wiring(forward, backward, passes_through, equal_gradients)

    class Backward(torch.autograd.Function):
        """The backward op, itself differentiable."""

        generate_vmap_rule = True

        @staticmethod
        def forward(backend: str | None, *args: Any) -> tuple[Tensor, ...]:
            return backward.call(*args, backend=backend)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            args = inputs[1:]
            ctx.save_for_backward(*[args[i] for i in backward.tensors])
            ctx.constants = [a for i, a in enumerate(args) if i not in backward.tensors]

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            tensors, constants = iter(ctx.saved_tensors), iter(ctx.constants)
            args = [
                next(tensors if i in backward.tensors else constants)
                for i in range(len(backward.arguments))
            ]
            moving = [i for i in backward.tensors if ctx.needs_input_grad[1 + i]]
            needs = args[backward.arguments.index("needs")]

            def maths(*values: Tensor) -> tuple[Tensor, ...]:
                moved = list(args)
                for i, value in zip(moving, values, strict=True):
                    moved[i] = value
                results = backward_maths(*moved)
                return tuple(r for r in results if r is not None)

            wanted = tuple(g for g, needed in zip(gradients, needs, strict=True) if needed)
            with torch._C._DisableAutocast():
                vjp = torch.func.vjp(maths, *[args[i] for i in moving])[1]
                moved_gradients = vjp(wanted)
            second: list[Tensor | None] = [None] * (1 + len(args))
            for i, gradient in zip(moving, moved_gradients, strict=True):
                second[1 + i] = gradient
            return tuple(second)

    def run_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        traced = torch.compiler.is_compiling()
        wants = wiring.needs.traced(needed) if traced else wiring.needs.pick(needed)
        rows, given, in_memory = [], False, not traced
        for gradient in gradients:
            if gradient is not None:
                given = True
                in_memory = in_memory and _has_storage(gradient)
                if not in_memory or not gradient.is_contiguous():
                    gradient = _dense_rows(gradient)
            rows.append(gradient)
        found: list[Tensor | None] = [None] * wiring.positions
        if given and True in wants:
            needs = list(wants)  # what the op is asked for
            sources = (*ctx.saved_tensors, *ctx.constants, needs, *rows)
            pick = wiring.arguments
            args = pick.traced(sources) if traced else pick.pick(sources)
            for x, y in ctx.equal:
                if wants[x] and wants[y]:
                    needs[x] = False
            if torch.is_grad_enabled():
                results = Backward.apply(ctx.backend, *args)
            elif in_memory and backward.is_plain(args):
                results = backward.run(args, ctx.backend)
            else:
                results = backward.call(*args, backend=ctx.backend)
            if False not in needs and not wiring.passed:
                pick, none_first = wiring.gradients, (None, *results)
                return pick.traced(none_first) if traced else pick.pick(none_first)
            for i, computed, result in zip(wiring.wanted, needs, results, strict=True):
                if computed:
                    found[i] = result
            for x, y in ctx.equal:
                if wants[x] and not needs[x]:
                    found[wiring.wanted[x]] = results[y]
        for i, j in wiring.passed:
            if needed[i]:
                found[i] = gradients[j]
        return tuple(found)

    class Transformable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(backend: str | None, *args: Any) -> tuple[Tensor, ...]:
            return forward.call(*args, backend=backend)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.backend = inputs[0]
            wiring.save(ctx, inputs[1:], output)
            ctx.mark_non_differentiable(*output[wiring.with_gradient :])

        backward = staticmethod(run_backward)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, backend: str | None, *args: Any) -> tuple[Tensor, ...]:
            results = forward.below_autograd(args, backend)
            ctx.backend = backend
            wiring.save(ctx, args, results)
            ctx.mark_non_differentiable(*results[wiring.with_gradient :])
            return results

        backward = staticmethod(run_backward)

    class Plain(torch.autograd.Function):
        """For calls that `is_plain`: returns only the results that have a gradient."""

        @staticmethod
        def forward(ctx: Any, backend: str | None, *args: Any) -> tuple[Tensor, ...]:
            results = forward.run(args, backend)
            ctx.backend = backend
            wiring.save(ctx, args, results)
            return results[: wiring.with_gradient]

        backward = staticmethod(run_backward)

    class Direct(torch.autograd.Function):
        """For the short road: nobody but the native op has checked these arguments."""

        @staticmethod
        def forward(ctx: Any, backend: str | None, *args: Any) -> tuple[Tensor, ...]:
            results = native()(*args)
            if results is None:
                raise RuntimeError(f"{forward.name} takes the whole road")
            ctx.backend = backend
            wiring.save(ctx, args, results)
            return results[: wiring.with_gradient]

        backward = staticmethod(run_backward)

    # Function.apply looks for functorch's wrappers first: 1.5 us, and plain calls have none.
    apply_plain = super(torch.autograd.Function, Plain).apply
    apply_direct = super(torch.autograd.Function, Direct).apply

    def needs_graph(args: Sequence[Any], tensors: Sequence[int]) -> bool:
        return torch.is_grad_enabled() and any(
            args[i] is not None and args[i].requires_grad for i in tensors
        )

    def eager(*args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        # A Function refuses forward-mode derivatives, where a call without it would drop them.
        if needs_graph(args, forward.tensors) or forward_ad._current_level >= 0:
            return Eager.apply(backend, *args)
        return forward.below_autograd(args, backend)

    def eager_backward(*args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        if needs_graph(args, backward.tensors) or forward_ad._current_level >= 0:
            return Backward.apply(backend, *args)
        return backward.below_autograd(args, backend)

    call, tensors, anchor = forward.call, forward.tensors, forward.anchor

    def apply(*args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return call(*args, backend=backend)  # traced as one op; its Autograd kernel is below
        if not are_ops_watched():
            graph = False
            for i in tensors:
                x = args[i]
                if x is not None:
                    if type(x) not in PLAIN_TENSORS:
                        break
                    if x.requires_grad:
                        if _is_functorch_wrapped(x):
                            break
                        graph = True
            else:
                if args[anchor].is_cpu or forward.is_readable(args):
                    if graph and torch.is_grad_enabled():
                        return apply_plain(backend, *args)
                    return forward.run(args, backend)
        if torch._C._is_tracing():
            return call(*args, backend=backend)
        if torch._C._are_functorch_transforms_active():
            return Transformable.apply(backend, *args)
        return eager(*args, backend=backend)

    @functools.cache
    def native() -> Callable[..., tuple[Tensor, ...] | None]:
        """The native op itself if it takes all arguments: it asks what its backend asks before."""
        assert road is not None
        direct = forward.direct("cpu")
        assert direct is not None  # says `at_once`
        if road.without or wiring.with_gradient == 1 == len(forward.results):
            return direct
        return getattr(torch.ops.fastattn_cpu, road.forward).default._op

    numbers = [
        (i, {"float": float, "int": int}[kind])
        for i, kind in enumerate(forward.types)
        if kind in ("float", "int")
    ]

    def road_in_python(backend: str | None, *args: Any) -> tuple[Tensor, ...] | None:
        if not (backend is None or (isinstance(backend, str) and backend == "cpu")):
            return None
        if args[anchor] is None:
            return None
        graph = False
        for i in tensors:
            x = args[i]
            if x is not None:
                if type(x) not in PLAIN_TENSORS or not x.is_cpu or _is_functorch_wrapped(x):
                    return None
                graph = graph or x.requires_grad
        for i, kind in numbers:
            if type(args[i]) is not kind:
                return None
        if args[anchor].dtype is torch.float64 or forward.at_once() is None:
            return None
        try:
            if not graph or not torch.is_grad_enabled():
                return native()(*args)
            if _saved_tensors_hooks(False) is not None:
                return None  # what they raise is theirs
            return apply_direct(backend, *args)
        except RuntimeError:
            return None

    class Context:
        """What `run_backward` reads of a Function's, from a node in C++."""

        equal = ()  # found by the node

        def __init__(
            self, backend: str | None, needed: tuple[bool, ...], saved: Any, constants: Any
        ):
            found = iter(needed)
            inputs = range(wiring.positions - 1)
            self.needs_input_grad = (False, *(i in tensors and next(found) for i in inputs))
            self.backend, self.saved_tensors, self.constants = backend, saved, constants

    def backward_in_python(
        backend: str | None,
        needed: tuple[bool, ...],
        saved: tuple[Tensor | None, ...],
        constants: tuple[Any, ...],
        gradients: tuple[Tensor | None, ...],
    ) -> list[Tensor | None]:
        found = run_backward(Context(backend, needed, saved, constants), *gradients)
        return [found[1 + i] for i in tensors]

    def find_short_road(backend: str | None, *args: Any) -> tuple[Tensor, ...] | None:
        if explaining():
            return None
        assert road is not None
        native = _road.in_cpp(road, wiring.wires, backward_in_python)
        forward.short_road = native or road_in_python
        return forward.short_road(backend, *args)

    if road is not None:
        forward.short_road = forward.find_short_road = find_short_road
    # The raw torch.ops.fastattn.* are differentiable too.
    forward.implement(eager, "Autograd")
    backward.implement(eager_backward, "Autograd")
    return apply
