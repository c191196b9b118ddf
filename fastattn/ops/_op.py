"""One path per op: a torch schema, behind it the choice of a backend, around it the derivative.

`Op` defines `torch.ops.fastattn.<name>`. Its `outputs` function is the only description of the
results: it allocates them, it is the fake kernel, and tests fill what it returns with NaN. Backends
are modules beside the op that write into those results. `differentiable` joins a forward and a
backward op through the names in their schemas. Nothing else in the package calls torch.library.

Plain eager calls, where neither a mode nor a subclass nor the profiler could see the difference,
run the op's implementation without torch's dispatcher: 2 us less for each op.
"""

import contextlib
import importlib
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn.ops import _env

LIBRARY = torch.library.Library("fastattn", "DEF")
OPS: dict[str, "Op"] = {}
_log = logging.getLogger("fastattn")
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
# Gradients batched by torch.autograd.grad have none, and nothing else tells them apart.
_has_storage = torch._C._has_storage


@dataclass(frozen=True)
class Backend:
    """A row of an op's order of preference.

    automatic: taken without being asked for. A kernel that never passed the equivalence suite on
    its hardware is not.
    verified: the architectures on which it has passed; elsewhere the first automatic use says so
    once.
    """

    name: str
    automatic: bool = True
    verified: tuple[str, ...] = ()


@dataclass(frozen=True)
class BackendStatus:
    """What `fastattn info` shows of one backend of one op on one device."""

    op: str
    backend: str
    available: bool
    reason: str
    automatic: bool


@dataclass
class Explanation:
    """Which backend an op call takes and why each other one does not."""

    op: str
    chosen: str | None = None
    refusals: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen or 'no backend can run this'}"]
        return "\n".join(lines + [f"  backend {name} {why}" for name, why in self.refusals.items()])


class _Recording(threading.local):
    """Where the calls of this thread record their choices, None where they run."""

    explanations: list[Explanation] | None = None


_recording = _Recording()


class Op:
    """A torch op `fastattn::<name>` whose backend is chosen behind its schema.

    schema: arguments and named results (two or more), without the name and without the `backend`
    argument that every op gets.
    outputs: (*arguments) -> tuple of empty results.
    package: the module path of the op's folder; backend `b` is the module `<package>.b`.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        results: str,
        outputs: Callable[..., tuple[Tensor, ...]],
        package: str,
        backends: Sequence[Backend],
    ):
        self.name, self.outputs, self.package = name, outputs, package
        self.family = family(name)
        self.backends = {row.name: row for row in backends}
        self._automatic = tuple(row for row in backends if row.automatic)
        self._unsupported = f"{name}_unsupported"
        LIBRARY.define(f"{name}({arguments}, *, str? backend=None) -> ({results})")
        LIBRARY.impl(name, self._dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fastattn::{name}", self._fake, lib=LIBRARY)
        self.call = getattr(torch.ops.fastattn, name).default
        schema = self.call._schema
        self.arguments = [a.name for a in schema.arguments if a.name != "backend"]
        self.results = [r.name for r in schema.returns]
        types = [str(a.type) for a in schema.arguments]
        self.tensors = [i for i, t in enumerate(types) if t in ("Tensor", "Optional[Tensor]")]
        self._anchor = types.index("Tensor")  # its device is the op's device
        self._launchers: dict[str, Callable[..., None]] = {}
        self._modules: dict[str, ModuleType] = {}
        OPS[name] = self

    # -- selection ---------------------------------------------------------------------------------
    def refusal(self, backend: str, args: Sequence[Any]) -> str | None:
        """Why `backend` cannot run this call, or None."""
        if why := _env.refuses_device(backend, args[self._anchor].device):
            return why
        module = self._modules.get(backend)
        if module is None:
            if why := self.import_failure(backend):
                return why
            module = self._module(backend)
        unsupported = getattr(module, self._unsupported, None)
        if unsupported is not None:
            return unsupported(*args)
        return None if hasattr(module, self.name) else f"does not implement {self.name}"

    def import_failure(self, backend: str) -> str | None:
        try:
            self._module(backend)
        except ImportError as error:
            return f"cannot be imported: {error}"
        return None

    def select(self, args: Sequence[Any], backend: str | None) -> str:
        """The backend that runs this call. An explicit choice never falls back."""
        requested, argument = backend, "backend"
        if backend is None and (request := _env.requested_backends()):
            requested, argument = _requested_backend(request, self.family), _env.BACKEND_VARIABLE
        if requested is not None:
            if requested not in self.backends:
                known = ", ".join(self.backends)
                raise ValueError(
                    f"{argument} must be one of {known} for {self.name}, got {requested!r}"
                )
            if why := self.refusal(requested, args):
                raise NotImplementedError(f"{self.name}: backend {requested} {why}")
            return requested
        refusals = None
        for row in self._automatic:
            why = self.refusal(row.name, args)
            if why is None:
                device = args[self._anchor].device
                if device.type == "cuda":
                    self._remark(row, device, refusals or {})
                return row.name
            refusals = refusals or {}
            refusals[row.name] = why
        raise NotImplementedError(str(Explanation(self.name, None, refusals or {})))

    def explain(self, args: Sequence[Any], backend: str | None) -> Explanation:
        refusals = {}
        for name, row in self.backends.items():
            why = self.refusal(name, args)
            if why is None and not row.automatic:
                why = "runs only when asked for: it has not been verified on this hardware"
            if why is not None:
                refusals[name] = why
        try:
            chosen = self.select(args, backend)
        except NotImplementedError:
            chosen = None
        if chosen is not None:
            refusals.pop(chosen, None)
        return Explanation(self.name, chosen, refusals)

    def _remark(self, row: Backend, device: torch.device, refusals: dict[str, str]) -> None:
        if row.name == "reference":
            why = "; ".join(f"backend {name} {reason}" for name, reason in refusals.items())
            _warn_once(f"{self.name} runs the slow reference on {device.type}: {why}")
        else:
            architecture = _env.architecture(device.type, device.index or 0)
            if architecture not in row.verified:
                _warn_once(f"{self.name}: backend {row.name} is not verified on {architecture}")

    # -- execution ---------------------------------------------------------------------------------
    def allocate(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """The results before anything is written (`testing.poisoned_results` puts NaN there)."""
        return self.outputs(*args)

    def allocate_workspace(
        self, pieces: Sequence[tuple[Sequence[int], torch.dtype, bool]], device: torch.device
    ) -> list[Tensor]:
        """A backend's scratch memory (`testing.poisoned_results` puts NaN where zeros are not asked
        for).
        """
        return [
            # Sizes one by one: torch.empty reads a tuple 0.3 us slower.
            (torch.zeros if zeroed else torch.empty)(*shape, dtype=dtype, device=device)
            for shape, dtype, zeroed in pieces
        ]

    def run(self, args: Sequence[Any], backend: str | None) -> tuple[Tensor, ...]:
        """Select, allocate, launch."""
        if (record := _recording.explanations) is not None:
            record.append(self.explain(args, backend))
            return self.allocate(args)
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():  # torch ops inside a launcher change no dtypes
                return self.run(args, backend)
        name = self.select(args, backend)
        results = self.allocate(args)
        launch, anchor = self._launcher(name), args[self._anchor]
        if anchor.is_cuda and _env.several_gpus():
            with torch.cuda.device(anchor.device):
                launch(args, results)
        else:
            launch(args, results)
        return results

    def _dispatched(self, *args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():  # torch ops inside a launcher record no graph
            return self.run(args, backend)

    def below_autograd(self, args: Sequence[Any], backend: str | None) -> tuple[Tensor, ...]:
        """The op without its derivative. The caller has seen to it that torch ops inside record
        none: in a Function's forward, or because no argument requires a gradient.
        """
        if self.is_plain(args):
            return self.run(args, backend)
        with torch._C._AutoDispatchBelowAutograd():
            return self.call(*args, backend=backend)

    def is_plain(self, args: Sequence[Any]) -> bool:
        """Whether torch's dispatcher has nothing to do for this call: nobody watches or transforms
        torch's ops, and every tensor is one that they and the kernels can read.
        """
        if _are_ops_watched():
            return False
        for i in self.tensors:
            if args[i] is not None and type(args[i]) not in _PLAIN_TENSORS:
                return False
        return self.is_readable(args)

    def is_readable(self, args: Sequence[Any]) -> bool:
        """Whether kernels may read the memory of these plain tensors. On a CPU torch's dispatcher
        stands before them and sees to lazily negated ones.
        """
        anchor = args[self._anchor]
        if anchor.is_cpu:
            return True
        return anchor.is_cuda and not any(
            args[i] is not None and args[i].is_neg() for i in self.tensors
        )

    def _fake(self, *args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        return self.outputs(*args)

    def _module(self, backend: str) -> ModuleType:
        module = self._modules.get(backend)
        if module is None:
            module = importlib.import_module(f"{self.package}.{backend}")
            self._modules[backend] = module
        return module

    def _launcher(self, backend: str) -> Callable[..., None]:
        launcher = self._launchers.get(backend)
        if launcher is None:
            launcher = self._make_launcher(backend)
            self._launchers[backend] = launcher
        return launcher

    def _make_launcher(self, backend: str) -> Callable[..., None]:
        module = self._module(backend)
        function: Callable[..., Any] = getattr(module, self.name)
        workspace: Callable[..., Any] | None = getattr(module, f"{self.name}_workspace", None)

        def compute_and_copy(args: Sequence[Any], results: Sequence[Tensor]) -> None:
            for result, value in zip(results, function(*args), strict=True):
                if value is not None:
                    result.copy_(value)

        def launch(args: Sequence[Any], results: Sequence[Tensor]) -> None:
            function(*args, *results)

        def launch_with_workspace(args: Sequence[Any], results: Sequence[Tensor]) -> None:
            assert workspace is not None
            pieces = workspace(*args)
            if pieces:
                scratch = self.allocate_workspace(pieces, args[self._anchor].device)
                function(*args, *results, *scratch)
            else:
                function(*args, *results)

        # The reference is written to be believed: it returns its results.
        if backend == "reference":
            return compute_and_copy
        return launch_with_workspace if workspace else launch


def _requested_backend(request: Mapping[str, str], op: str) -> str | None:
    """What the environment asks for; a pair for an op that does not exist is an error."""
    known = sorted({family(name) for name in OPS})
    backends = {backend for op_ in OPS.values() for backend in op_.backends}
    for name, backend in request.items():
        if name and name not in known:
            raise ValueError(
                f"{_env.BACKEND_VARIABLE} must name one of {', '.join(known)}, got {name!r}"
            )
        if backend not in backends:
            got = f"{name}={backend}" if name else backend
            raise ValueError(
                f"{_env.BACKEND_VARIABLE} must name one of {', '.join(sorted(backends))}, "
                f"or pairs such as attention=triton, got {got!r}"
            )
    return request.get(op) or request.get("")


def family(name: str) -> str:
    """The public function that a torch op belongs to: attention_fwd -> attention."""
    return name.removesuffix("_fwd").removesuffix("_bwd")


def backend_table(device: torch.device | None = None) -> list[BackendStatus]:
    """Every backend of every public op and whether it can serve `device` (default: the GPU if there
    is one).
    """
    device = device or _env.default_device()
    table = []
    for op in OPS.values():
        if not op.name.endswith("_fwd"):
            continue
        for row in op.backends.values():
            why = _env.refuses_device(row.name, device) or op.import_failure(row.name)
            if why is None:
                unavailable = getattr(op._module(row.name), "unavailable", None)
                why = unavailable() if unavailable else None
            if why is None and not hasattr(op._module(row.name), op.name):
                why = f"does not implement {op.name}"
            table.append(
                BackendStatus(family(op.name), row.name, why is None, why or "", row.automatic)
            )
    return table


def explaining() -> bool:
    return _recording.explanations is not None


@contextlib.contextmanager
def recording_choices() -> Iterator[list[Explanation]]:
    """Inside, ops record why they choose a backend and return uninitialised results."""
    explanations: list[Explanation] = []
    _recording.explanations = explanations
    try:
        yield explanations
    finally:
        _recording.explanations = None


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)


def _are_ops_watched() -> bool:
    """Whether a mode, a transform, a tracer or the profiler looks at each of torch's ops. A mode
    with `sees_launches` wants to see what an op launches in place of the op.
    """
    return (
        (torch._C._len_torch_dispatch_stack() > 0 and not _do_modes_see_launches())
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or torch.autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )


def _do_modes_see_launches() -> bool:
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    return all(getattr(mode, "sees_launches", False) for mode in modes)


# -- derivative ------------------------------------------------------------------------------------
def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """items -> the items at these indices."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda items: tuple(items[i] for i in indices)


def _traceable_picker(indices: Sequence[int]) -> Callable[[Sequence[Any], bool], tuple[Any, ...]]:
    """The same in a backward pass, which compiled autograd traces: it knows no itemgetter."""
    pick = _picker(indices)

    def pick_or_trace(items: Sequence[Any], traced: bool) -> tuple[Any, ...]:
        return tuple(items[i] for i in indices) if traced else pick(items)

    return pick_or_trace


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
        equal_gradients: Mapping[tuple[str, str], Callable[..., bool]],
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
        self._saved = _picker([produced.index(name) for name in saved_inputs + saved_results])
        self._constants = _picker([inputs.index(name) for name in constants])
        self._typed = [inputs.index(name.removesuffix("_dtype")) for name in typed]
        # Results that have a gradient come first.
        self.with_gradient = sum(name in backward.arguments for name in gradients)
        assert all(name in backward.arguments for name in gradients[: self.with_gradient])
        # In backward every argument is taken from these, in this order.
        sources = [*saved_inputs, *saved_results, *constants, *typed, "needs", *gradients]
        self._arguments = _traceable_picker([sources.index(name) for name in backward.arguments])
        # Positions among the arguments of a Function, of which the first is the backend's name.
        self.wanted = [1 + inputs.index(name.removeprefix("d")) for name in backward.results]
        self.needs = _traceable_picker(self.wanted)
        self.passed = [(1 + inputs.index(x), results.index(y)) for x, y in passes_through.items()]
        self.positions = 1 + len(inputs)
        # The same among the backward's results: (spared, computed, when).
        ordered = [name.removeprefix("d") for name in backward.results]
        self.equal = [
            (ordered.index(x), ordered.index(y), when) for (x, y), when in equal_gradients.items()
        ]

    def save(self, ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*self._saved(args + results))
        ctx.constants = self._constants(args)
        if self._typed:
            ctx.constants += tuple(args[i].dtype for i in self._typed)
        ctx.set_materialize_grads(False)

    def backward_arguments(
        self, ctx: Any, gradients: Sequence[Tensor | None], needs: Sequence[bool], traced: bool
    ) -> tuple[Any, ...]:
        return self._arguments((*ctx.saved_tensors, *ctx.constants, needs, *gradients), traced)


def gradient_like(
    like: Tensor | None, needed: bool, anchor: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """An empty gradient of `like` (its shape and order of strides), or one of shape [0] where
    nobody wants it.
    """
    if needed and like is not None:
        return torch.empty_like(like, dtype=dtype or like.dtype)
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
    equal_gradients: Mapping[tuple[str, str], Callable[..., bool]] = MappingProxyType({}),
) -> Callable[..., tuple[Tensor, ...]]:
    """Joins two ops; returns `apply(*arguments, backend=None)`, the road that every public function
    takes; of the results, those without a gradient may be missing.

    backward_maths: the backward op's arguments -> its results (None where not needed) in
    differentiable torch, for double backward. passes_through: forward arguments whose gradient is
    that of a result. equal_gradients: (x, y) -> whether x has the gradient of y, asked with the
    backward op's arguments; then only y's is computed and both inputs get it, as those of a sum do
    in torch. Eager calls use a Function in ctx style, the cheapest; tracing and functorch need the
    other style.
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
        found: list[Tensor | None] = [None] * wiring.positions
        needed = ctx.needs_input_grad
        traced = torch.compiler.is_compiling()
        wants = wiring.needs(needed, traced)
        rows = [None if gradient is None else _dense_rows(gradient) for gradient in gradients]
        if True in wants and any(gradient is not None for gradient in rows):
            needs = list(wants)  # what the op is asked for
            args = wiring.backward_arguments(ctx, rows, needs, traced)
            for x, y, when in wiring.equal:
                if wants[x] and wants[y] and when(*args):
                    needs[x] = False
            if torch.is_grad_enabled():
                results = Backward.apply(ctx.backend, *args)
            elif (
                not traced
                and all(row is None or _has_storage(row) for row in rows)
                and backward.is_plain(args)
            ):
                results = backward.run(args, ctx.backend)
            else:
                results = backward.call(*args, backend=ctx.backend)
            for i, computed, result in zip(wiring.wanted, needs, results, strict=True):
                if computed:
                    found[i] = result
            for x, y, _ in wiring.equal:
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

    # Function.apply looks for functorch's wrappers first: 1.5 us, and plain calls have none.
    apply_plain = super(torch.autograd.Function, Plain).apply

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

    call, tensors = forward.call, forward.tensors

    def apply(*args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return call(*args, backend=backend)  # traced as one op; its Autograd kernel is below
        if not _are_ops_watched():
            graph = False
            for i in tensors:
                x = args[i]
                if x is not None:
                    if type(x) not in _PLAIN_TENSORS:
                        break
                    if x.requires_grad:
                        if _is_functorch_wrapped(x):
                            break
                        graph = True
            else:
                if forward.is_readable(args):
                    if graph and torch.is_grad_enabled():
                        return apply_plain(backend, *args)
                    return forward.run(args, backend)
        if torch._C._is_tracing():
            return call(*args, backend=backend)
        if torch._C._are_functorch_transforms_active():
            return Transformable.apply(backend, *args)
        return eager(*args, backend=backend)

    # The raw torch.ops.fastattn.* are differentiable too.
    LIBRARY.impl(forward.name, eager, "Autograd")
    LIBRARY.impl(backward.name, eager_backward, "Autograd")
    return apply
