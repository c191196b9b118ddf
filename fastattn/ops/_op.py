"""One path per op: a torch schema, behind it the choice of a backend and its launch.

`Op` defines `torch.ops.fastattn.<name>`. Its `outputs` function is the only description of the
results: it allocates them, it is the fake kernel, and tests fill what it returns with NaN. Backends
are modules beside the op that write into those results. The derivative, which joins a forward and a
backward op, is in `_derivative.py`. Only `integrations/sdpa.py` calls torch.library beside this.

Plain eager calls, where neither a mode nor a subclass nor the profiler could see the difference,
run the op's implementation without torch's dispatcher: 2 us less for each op.
"""

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn.ops import _env, _road, _verified

LIBRARY = torch.library.Library("fastattn", "DEF")
OPS: dict[str, "Op"] = {}
_log = logging.getLogger("fastattn")
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_UNVERIFIED = (
    "runs only when asked for: it has not been verified on this hardware, which "
    "`fastattn check --device cuda --record` does"
)


@dataclass(frozen=True)
class Backend:
    """A row of an op's order of preference.

    automatic: taken without being asked for. A kernel that never passed the equivalence suite on
    its hardware is not, until it passes on the user's (`_verified`).
    verified: the architectures on which it has passed; elsewhere the first automatic use says so
    once.
    """

    name: str
    automatic: bool = True
    verified: tuple[str, ...] = ()


@dataclass(frozen=True)
class BackendStatus:
    """What `fastattn info` shows of one backend of one op on one device.

    automatic: whether it is taken without being asked for, whatever the dtype; where not,
    automatic_for has the dtypes in which it is.
    """

    op: str
    backend: str
    available: bool
    reason: str
    automatic: bool
    automatic_for: tuple[str, ...] = ()


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

    schema: arguments and named results, without the name and without the `backend` argument that
    every op gets. torch.ops returns a single result bare; everything here returns tuples.
    outputs: (*arguments), or (call) of an op with a call_type, -> tuple of empty results.
    package: the module path of the op's folder; backend `b` is the module `<package>.b`.
    call_type: the NamedTuple of the arguments. `outputs` and the backends get it instead of them;
    only the reference and a `<name>_direct` still get them one by one.
    takes_requests: whether FASTATTN_BACKEND chooses for this op.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        results: str,
        outputs: Callable[..., tuple[Tensor, ...]],
        package: str,
        backends: Sequence[Backend],
        call_type: type[tuple[Any, ...]] | None = None,
        *,
        takes_requests: bool = True,
    ):
        self.name, self.outputs, self.package = name, outputs, package
        self.call_type, self.takes_requests = call_type, takes_requests
        self.family = family(name)
        self.backends = {row.name: row for row in backends}
        self._automatic = tuple(row for row in backends if row.automatic)
        self._orders: dict[tuple[torch.device, torch.dtype], tuple[Backend, ...]] = {}
        self._unsupported = f"{name}_unsupported"
        LIBRARY.define(f"{name}({arguments}, *, str? backend=None) -> ({results})")
        overload = getattr(torch.ops.fastattn, name).default
        schema = overload._schema
        self._has_one_result = len(schema.returns) == 1
        self.call = _returning_tuples(overload) if self._has_one_result else overload
        self.implement(self._dispatched, "CompositeExplicitAutograd")
        fake = self._as_declared(self._fake)
        torch.library.register_fake(f"fastattn::{name}", fake, lib=LIBRARY)
        self.arguments = [a.name for a in schema.arguments if a.name != "backend"]
        assert call_type is None or [*getattr(call_type, "_fields", ())] == self.arguments
        self.results = [r.name for r in schema.returns]
        types = [str(a.type) for a in schema.arguments]
        self.types = types[: len(self.arguments)]
        self.tensors = [i for i, t in enumerate(types) if t in ("Tensor", "Optional[Tensor]")]
        self.anchor = types.index("Tensor")  # its device is the op's device
        # What has the dtype of the data, in a backward too, where gradients may have another.
        named = (self.arguments.index(n) for n in ("x_dtype", "x", "q") if n in self.arguments)
        self._data = next(named, self.anchor)
        self._launchers: dict[str, Callable[..., None]] = {}
        # (backend's name, *arguments), which may be anything -> the results that have a gradient
        # of a plain CPU call, or None where it must take the whole road, which says what is wrong.
        self.short_road: Callable[..., tuple[Tensor, ...] | None] = self._no_road
        # What that is before the first call.
        self.find_short_road: Callable[..., tuple[Tensor, ...] | None] = self._no_road
        self._directs: dict[str, Callable[..., tuple[Tensor, ...] | None] | None] = {}
        self._modules: dict[str, ModuleType] = {}
        OPS[name] = self

    def implement(self, function: Callable[..., tuple[Tensor, ...]], key: str) -> None:
        """Registers what the op does under a dispatch key."""
        LIBRARY.impl(self.name, self._as_declared(function), key)

    def _as_declared(self, function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
        """The function with the results that the schema declares."""
        if not self._has_one_result:
            return function

        def bare(*args: Any, backend: str | None = None) -> Tensor:
            return function(*args, backend=backend)[0]

        return bare

    # -- selection ---------------------------------------------------------------------------------
    def refusal(self, backend: str, args: Sequence[Any]) -> str | None:
        """Why `backend` cannot run this call, or None."""
        return self._refusal(backend, args[self.anchor].device, args)

    def _refusal(self, backend: str, device: torch.device, args: Sequence[Any]) -> str | None:
        if why := _env.refuses_device(backend, device):
            return why
        module = self._modules.get(backend)
        if module is None:
            if why := self.import_failure(backend):
                return why
            module = self._module(backend)
        unsupported = getattr(module, self._unsupported, None)
        if unsupported is not None:
            return unsupported(*self.given(args))
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
        if backend is None and self.takes_requests and (request := _env.requested_backends()):
            requested, argument = _requested_backend(request, self.family), _env.BACKEND_VARIABLE
        if requested is not None:
            if requested not in self.backends:
                known = ", ".join(self.backends)
                raise ValueError(
                    f"{argument} must be one of {known} for {self.family}, got {requested!r}"
                )
            if why := self.refusal(requested, args):
                raise NotImplementedError(f"{self.name}: backend {requested} {why}")
            return requested
        device, refusals = args[self.anchor].device, None
        on_gpu = device != _env.CPU and device.type == "cuda"
        for row in self.order(device, self.data_dtype(args)) if on_gpu else self._automatic:
            why = self._refusal(row.name, device, args)
            if why is None:
                if on_gpu:
                    self._remark(row, device, self.data_dtype(args), refusals or {})
                return row.name
            refusals = refusals or {}
            refusals[row.name] = why
        raise NotImplementedError(str(Explanation(self.name, None, refusals or {})))

    def order(self, device: torch.device, dtype: torch.dtype) -> tuple[Backend, ...]:
        """What the automatic choice goes through on a device: its rows, and those of kernels that
        have passed the equivalence suite in this dtype on a GPU such as this one.
        """
        order = self._orders.get((device, dtype))
        if order is None:
            order = tuple(
                row
                for row in self.backends.values()
                if row.automatic or self._has_passed(row.name, device, dtype)
            )
            self._orders[device, dtype] = order
        return order

    def data_dtype(self, args: Sequence[Any]) -> torch.dtype:
        """That of the verdicts on backends which a call goes by, forward and backward alike."""
        data = args[self._data]
        return data if isinstance(data, torch.dtype) else data.dtype

    def _has_passed(self, backend: str, device: torch.device, dtype: torch.dtype) -> bool:
        return (self.family, backend, _verified.name(dtype)) in _verified.passed(device)

    def would_take(self, backend: str, args: Sequence[Any]) -> bool:
        """Whether a call that names no backend takes this one; False where the environment asks for
        another that cannot run it.
        """
        if request := _env.requested_backends():
            requested = _requested_backend(request, self.family)
            if requested is not None:
                return requested == backend
        return self.select(args, None) == backend

    def explain(self, args: Sequence[Any], backend: str | None) -> Explanation:
        refusals, order = {}, self.order(args[self.anchor].device, self.data_dtype(args))
        for name, row in self.backends.items():
            why = self.refusal(name, args)
            if why is None and row not in order:
                why = _UNVERIFIED
            if why is not None:
                refusals[name] = why
        try:
            chosen = self.select(args, backend)
        except NotImplementedError:
            chosen = None
        if chosen is not None:
            refusals.pop(chosen, None)
        return Explanation(self.name, chosen, refusals)

    def _remark(
        self, row: Backend, device: torch.device, dtype: torch.dtype, refusals: dict[str, str]
    ) -> None:
        if row.name == "reference":
            others = (name for name in self.backends if name != "reference")
            if all(_env.refuses_device(name, device) for name in others):
                return  # the op is torch's own there, not a slow stand-in
            order = self.order(device, dtype)
            for name, other in self.backends.items():
                if other not in order and _env.refuses_device(name, device) is None:
                    refusals = {**refusals, name: _UNVERIFIED}
            why = "; ".join(f"backend {name} {reason}" for name, reason in refusals.items())
            _warn_once(f"{self.name} runs the slow reference on {device.type}: {why}")
        else:
            architecture = _env.architecture(device.type, device.index or 0)
            passed = architecture in row.verified
            if not passed and not self._has_passed(row.name, device, dtype):
                _warn_once(f"{self.name}: backend {row.name} is not verified on {architecture}")

    # -- execution ---------------------------------------------------------------------------------
    def given(self, args: Sequence[Any]) -> Sequence[Any]:
        """What `outputs` and the functions of backends are called with."""
        if self.call_type is None:
            return args
        return (args if type(args) is self.call_type else self.named(args),)

    def named(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments in their NamedTuple, if the op has one."""
        if self.call_type is None or type(args) is self.call_type:
            return args
        # _make, which counts them first, takes 0.2 us longer.
        return tuple.__new__(self.call_type, args)

    def allocate(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """The results before anything is written (`testing.poisoned_results` puts NaN there)."""
        return self.outputs(*self.given(args))

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
        anchor = args[self.anchor]
        if anchor.is_cpu and (direct := self._direct_of(backend)) is not None:
            if (made := direct(*args)) is not None:
                return made
        call = self.named(args)
        launch = self._launcher(self.select(call, backend))
        results = self.allocate(call)
        if anchor.is_cuda and _env.several_gpus():
            with torch.cuda.device(anchor.device):
                launch(call, results)
        else:
            launch(call, results)
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
        if are_ops_watched():
            return False
        for i in self.tensors:
            if args[i] is not None and type(args[i]) not in PLAIN_TENSORS:
                return False
        return args[self.anchor].is_cpu or self.is_readable(args)

    def is_readable(self, args: Sequence[Any]) -> bool:
        """Whether kernels may read the memory of these plain tensors. On a CPU torch's dispatcher
        stands before them and sees to lazily negated ones.
        """
        anchor = args[self.anchor]
        if anchor.is_cpu:
            return True
        return anchor.is_cuda and not any(
            args[i] is not None and args[i].is_neg() for i in self.tensors
        )

    def _fake(self, *args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        return self.outputs(*self.given(args))

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

    def _direct_of(self, backend: str | None) -> Callable[..., tuple[Tensor, ...] | None] | None:
        """What serves a call with CPU tensors and this choice without being selected: it refuses
        what its backend does.
        """
        if torch._C._len_torch_dispatch_stack() > 0:
            return None  # a mode that sees launches: they write into what `allocate` made
        if backend is None:
            return self.direct_on_cpu()
        return self.direct(backend) if backend == "cpu" in self.backends else None

    def direct(self, backend: str) -> Callable[..., tuple[Tensor, ...] | None] | None:
        """`<name>_direct` of a backend: makes the results itself, like `outputs` but quicker than
        Python can, or returns None where the backend or this road of it does not serve
        (`testing.poisoned_results` hides it).
        """
        return self._directs[backend] if backend in self._directs else self._find_direct(backend)

    def direct_on_cpu(self) -> Callable[..., tuple[Tensor, ...] | None] | None:
        """That of the backend which the automatic choice takes for CPU tensors, if it serves."""
        direct = self.direct("cpu") if "cpu" in self.backends else None
        if direct is None or _env.requested_backends() or _env.interpreting():
            return None
        return direct

    def at_once(self) -> Callable[..., tuple[Tensor, ...] | None] | None:
        """`direct_on_cpu` for plain CPU tensors where nobody could tell it from the whole road: in
        eager code (the caller has seen to that) that nobody watches, explains or casts.
        """
        if (
            _recording.explanations is not None
            or torch._C._is_any_autocast_enabled()
            or torch._C._len_torch_dispatch_stack() > 0
            or are_ops_watched()
        ):
            return None
        return self.direct_on_cpu()

    def _find_direct(self, backend: str) -> Callable[..., tuple[Tensor, ...] | None] | None:
        module = self._module(backend)
        direct = getattr(module, f"{self.name}_direct", None)
        if direct is not None and module.unavailable():
            direct = None
        self._directs[backend] = direct
        return direct

    @staticmethod
    def _no_road(*_: Any) -> None:
        return None

    def _make_launcher(self, backend: str) -> Callable[..., None]:
        module = self._module(backend)
        function: Callable[..., Any] = getattr(module, self.name)
        workspace: Callable[..., Any] | None = getattr(module, f"{self.name}_workspace", None)

        def compute_and_copy(args: Sequence[Any], results: Sequence[Tensor]) -> None:
            for result, value in zip(results, function(*args), strict=True):
                if value is not None:
                    result.copy_(value)

        def launch(args: Sequence[Any], results: Sequence[Tensor]) -> None:
            function(*self.given(args), *results)

        def launch_with_workspace(args: Sequence[Any], results: Sequence[Tensor]) -> None:
            assert workspace is not None
            call = self.given(args)
            pieces = workspace(*call)
            if pieces:
                scratch = self.allocate_workspace(pieces, args[self.anchor].device)
                function(*call, *results, *scratch)
            else:
                function(*call, *results)

        # The reference is written to be believed: it returns its results.
        if backend == "reference":
            return compute_and_copy
        return launch_with_workspace if workspace else launch


def _returning_tuples(call: Any) -> Callable[..., tuple[Tensor, ...]]:
    def wrapped(*args: Any, backend: str | None = None) -> tuple[Tensor, ...]:
        return (call(*args, backend=backend),)

    return wrapped


def _requested_backend(request: Mapping[str, str], op: str) -> str | None:
    """What the environment asks for; a pair for an op that does not exist is an error."""
    asked = [op_ for op_ in OPS.values() if op_.takes_requests]
    known = sorted({op_.family for op_ in asked})
    backends = {backend for op_ in asked for backend in op_.backends}
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
            passed = tuple(
                dtype
                for name, backend, dtype in sorted(_verified.passed(device))
                if (name, backend) == (op.family, row.name) and not row.automatic
            )
            table.append(
                BackendStatus(op.family, row.name, why is None, why or "", row.automatic, passed)
            )
    return table


def explaining() -> bool:
    return _recording.explanations is not None


def record_choice(explanation: Explanation) -> None:
    """Of a call that is not an op's where choices are recorded."""
    assert _recording.explanations is not None
    _recording.explanations.append(explanation)


@contextlib.contextmanager
def recording_choices() -> Iterator[list[Explanation]]:
    """Inside, ops record why they choose a backend and return uninitialised results."""
    explanations: list[Explanation] = []
    _recording.explanations = explanations
    try:
        with _road.closed():
            yield explanations
    finally:
        _recording.explanations = None


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)


def are_ops_watched() -> bool:
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
