"""One path per op: a torch schema, behind it the choice of a backend, around it the derivative.

`Op` defines `torch.ops.fastattn.<name>`. Its `outputs` function is the only description of the
results: it allocates them, it is the fake kernel, and tests fill what it returns with NaN. Backends
are modules beside the op that write into those results. `differentiable` joins a forward and a
backward op through the names in their schemas. Nothing else in the package calls torch.library.
"""

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fastattn.ops import _env

LIBRARY = torch.library.Library("fastattn", "DEF")
OPS: dict[str, "Op"] = {}
_log = logging.getLogger("fastattn")
_state = threading.local()


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
        self.backends = {row.name: row for row in backends}
        LIBRARY.define(f"{name}({arguments}, *, str? backend=None) -> ({results})")
        LIBRARY.impl(name, self._run, "CompositeExplicitAutograd")
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
        if why := self.import_failure(backend):
            return why
        module = self._module(backend)
        if not hasattr(module, self.name):
            return f"does not implement {self.name}"
        unsupported = getattr(module, f"{self.name}_unsupported", None)
        return unsupported(*args) if unsupported else None

    def import_failure(self, backend: str) -> str | None:
        try:
            self._module(backend)
        except ImportError as error:
            return f"cannot be imported: {error}"
        return None

    def select(self, args: Sequence[Any], backend: str | None) -> str:
        """The backend that runs this call. An explicit choice never falls back."""
        requested, argument = backend, "backend"
        if backend is None:
            requested, argument = _requested_backend(family(self.name)), _env.BACKEND_VARIABLE
        if requested is not None:
            if requested not in self.backends:
                known = ", ".join(self.backends)
                raise ValueError(
                    f"{argument} must be one of {known} for {self.name}, got {requested!r}"
                )
            if why := self.refusal(requested, args):
                raise NotImplementedError(f"{self.name}: backend {requested} {why}")
            return requested
        refusals: dict[str, str] = {}
        for name, row in self.backends.items():
            if not row.automatic:
                continue
            why = self.refusal(name, args)
            if why is None:
                self._remark(row, args, refusals)
                return name
            refusals[name] = why
        raise NotImplementedError(str(Explanation(self.name, None, refusals)))

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

    def _remark(self, row: Backend, args: Sequence[Any], refusals: dict[str, str]) -> None:
        device = args[self._anchor].device
        if device.type != "cuda":
            return
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
            (torch.zeros if zeroed else torch.empty)(shape, dtype=dtype, device=device)
            for shape, dtype, zeroed in pieces
        ]

    def _run(self, *args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        # Torch ops inside a launcher must neither record a graph nor change dtypes.
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            if (record := getattr(_state, "explanations", None)) is not None:
                record.append(self.explain(args, backend))
                return self.allocate(args)
            name = self.select(args, backend)
            results = self.allocate(args)
            launch, device = self._launcher(name), args[self._anchor].device
            if device.type == "cuda" and _env.several_gpus():
                with torch.cuda.device(device):
                    launch(args, results)
            else:
                launch(args, results)
        return results

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
            scratch = self.allocate_workspace(workspace(*args), args[self._anchor].device)
            function(*args, *results, *scratch)

        # The reference is written to be believed: it returns its results.
        if backend == "reference":
            return compute_and_copy
        return launch_with_workspace if workspace else launch


def _requested_backend(op: str) -> str | None:
    """What the environment asks for; a pair for an op that does not exist is an error."""
    request = _env.requested_backends()
    if not request:
        return None
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
    return getattr(_state, "explanations", None) is not None


@contextlib.contextmanager
def recording_choices() -> Iterator[list[Explanation]]:
    """Inside, ops record why they choose a backend and return uninitialised results."""
    _state.explanations = []
    try:
        yield _state.explanations
    finally:
        _state.explanations = None


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)


# -- derivative ------------------------------------------------------------------------------------
class _Wiring:
    """How a backward op is fed, read off the names in the two schemas.

    A backward argument is a forward argument, a forward result, "d" + a forward result (its
    gradient), `needs` (which gradients are wanted, in the order of the backward's results) or a
    forward tensor's name + "_dtype". Backward result "d" + x is the gradient of forward argument x.
    """

    def __init__(self, forward: Op, backward: Op, passes_through: Mapping[str, str]):
        inputs, results = forward.arguments, forward.results
        tensors = {inputs[i] for i in forward.tensors}
        used = [name for name in backward.arguments if name in inputs]
        self.saved_inputs = [inputs.index(name) for name in used if name in tensors]
        self.saved_results = [results.index(n) for n in backward.arguments if n in results]
        self.constants = [inputs.index(name) for name in used if name not in tensors]
        typed = [name for name in backward.arguments if name.endswith("_dtype")]
        self.typed = [inputs.index(name.removesuffix("_dtype")) for name in typed]
        self.wanted = [inputs.index(name.removeprefix("d")) for name in backward.results]
        self.passed = [(inputs.index(x), results.index(y)) for x, y in passes_through.items()]
        gradients = ["d" + name for name in results]
        self.no_gradient = [i for i, name in enumerate(gradients) if name not in backward.arguments]
        # Where each backward argument comes from: (which list, index into it).
        sources = {inputs[i]: ("saved", n) for n, i in enumerate(self.saved_inputs)}
        offset = len(self.saved_inputs)
        sources |= {results[i]: ("saved", offset + n) for n, i in enumerate(self.saved_results)}
        sources |= {inputs[i]: ("constants", n) for n, i in enumerate(self.constants)}
        offset = len(self.constants)
        sources |= {name: ("constants", offset + n) for n, name in enumerate(typed)}
        sources |= {name: ("gradients", i) for i, name in enumerate(gradients)}
        sources["needs"] = ("needs", 0)
        self.sources = [sources[name] for name in backward.arguments]
        self.inputs = len(inputs)

    def save(self, ctx: Any, args: Sequence[Any], results: Sequence[Tensor]) -> None:
        ctx.save_for_backward(
            *[args[i] for i in self.saved_inputs], *[results[i] for i in self.saved_results]
        )
        ctx.constants = [args[i] for i in self.constants] + [args[i].dtype for i in self.typed]
        ctx.mark_non_differentiable(*[results[i] for i in self.no_gradient])
        ctx.set_materialize_grads(False)

    def backward_arguments(self, ctx: Any, gradients: Sequence[Tensor | None]) -> list[Any]:
        saved, constants = ctx.saved_tensors, ctx.constants
        needs = [ctx.needs_input_grad[1 + i] for i in self.wanted]
        args: list[Any] = []
        for kind, i in self.sources:
            if kind == "saved":
                args.append(saved[i])
            elif kind == "constants":
                args.append(constants[i])
            elif kind == "gradients":
                args.append(_dense_rows(gradients[i]))
            else:
                args.append(needs)
        return args

    def gradients(
        self, ctx: Any, incoming: Sequence[Tensor | None], results: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """One gradient for each argument of the Function: the backend's name, then the op's
        arguments.
        """
        gradients: list[Tensor | None] = [None] * (1 + self.inputs)
        for i, result in zip(self.wanted, results, strict=True):
            if ctx.needs_input_grad[1 + i]:
                gradients[1 + i] = result
        for i, j in self.passed:
            if ctx.needs_input_grad[1 + i]:
                gradients[1 + i] = incoming[j]
        return gradients


def gradient_like(
    like: Tensor | None, needed: bool, anchor: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """An empty gradient of `like` (its shape and order of strides), or one of shape [0] where
    nobody wants it.
    """
    if needed and like is not None:
        return torch.empty_like(like, dtype=dtype or like.dtype)
    return anchor.new_empty(0)


def _dense_rows(gradient: Tensor | None) -> Tensor | None:
    """Kernels read rows: an expanded gradient (of a sum, say) is written out."""
    if gradient is None or gradient.dim() == 0 or gradient.stride(-1) == 1:
        return gradient
    return gradient.contiguous()


def differentiable(
    forward: Op,
    backward: Op,
    backward_maths: Callable[..., tuple[Tensor | None, ...]],
    passes_through: Mapping[str, str] = MappingProxyType({}),
) -> Callable[..., tuple[Tensor, ...]]:
    """Joins two ops; returns `apply(*arguments, backend=None)`, the road that every public function
    takes.

    backward_maths: the backward op's arguments -> its results (None where not needed) in
    differentiable torch, for double backward. passes_through: forward arguments whose gradient is
    that of a result. Eager calls use a Function in ctx style, the cheapest; tracing and functorch
    need the other style.
    """
    wiring = _Wiring(forward, backward, passes_through)

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
        if all(gradient is None for gradient in gradients):
            return (None,) * (1 + wiring.inputs)
        args = wiring.backward_arguments(ctx, gradients)
        if not any(ctx.needs_input_grad[1 + i] for i in wiring.wanted):
            results = [None] * len(wiring.wanted)  # only passed-through gradients
        elif torch.is_grad_enabled():
            results = Backward.apply(ctx.backend, *args)
        else:
            results = backward.call(*args, backend=ctx.backend)
        return tuple(wiring.gradients(ctx, gradients, results))

    class Transformable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(backend: str | None, *args: Any) -> tuple[Tensor, ...]:
            return forward.call(*args, backend=backend)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.backend = inputs[0]
            wiring.save(ctx, inputs[1:], output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            return run_backward(ctx, *gradients)

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, backend: str | None, *args: Any) -> tuple[Tensor, ...]:
            with torch._C._AutoDispatchBelowAutograd():
                results = forward.call(*args, backend=backend)
            ctx.backend = backend
            wiring.save(ctx, args, results)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            return run_backward(ctx, *gradients)

    def needs_graph(args: Sequence[Any], tensors: Sequence[int]) -> bool:
        return torch.is_grad_enabled() and any(
            args[i] is not None and args[i].requires_grad for i in tensors
        )

    def eager(*args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        if needs_graph(args, forward.tensors):
            return Plain.apply(backend, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return forward.call(*args, backend=backend)

    def eager_backward(*args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        if needs_graph(args, backward.tensors):
            return Backward.apply(backend, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return backward.call(*args, backend=backend)

    call = forward.call

    def apply(*args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return call(*args, backend=backend)  # traced as one op; its Autograd kernel is below
        if torch._C._are_functorch_transforms_active():
            return Transformable.apply(backend, *args)
        return eager(*args, backend=backend)

    # The raw torch.ops.fastattn.* are differentiable too.
    LIBRARY.impl(forward.name, eager, "Autograd")
    LIBRARY.impl(backward.name, eager_backward, "Autograd")
    return apply
