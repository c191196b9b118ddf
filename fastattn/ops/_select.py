"""Which backend runs a call: the op's order of preference, explicit choices, explanations.

A backend is a module `<package>.<name>` beside the op. Its function `<op>_unsupported` returns the
reason why it cannot run a call. `<op>_slower` returns the reason why it would run it slower than
the next backend; only the automatic choice calls it.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn.ops import _env, _launch, _verified

if TYPE_CHECKING:
    from fastattn.ops._op import Op

OPS: dict[str, "Op"] = {}
# The backend whose kernels are registered under the dispatcher's CPU key.
CPU_BACKEND = "cpu"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# The backend's name in calls that the CPU kernels forward: the automatic choice without them.
NOT_CPU = ""
_log = logging.getLogger("fastattn")
_UNVERIFIED = (
    "runs only on request: it has not been verified on this hardware, which "
    "`fastattn check --device cuda --record` does"
)


@dataclass(frozen=True)
class Backend:
    """A backend in an op's order of preference.

    automatic: whether it can be chosen automatically everywhere. False for GPU kernels: these are
    chosen where a record says that they passed the equivalence suite (`_verified`).
    """

    name: str
    automatic: bool = True


@dataclass(frozen=True)
class BackendStatus:
    """The status of one backend of one op on one device that `fastattn info` prints.

    automatic: whether it can be chosen automatically in every dtype. automatic_for: if not, the
    dtypes in which it can.
    """

    op: str
    backend: str
    available: bool
    reason: str
    automatic: bool
    automatic_for: tuple[str, ...] = ()


@dataclass
class Explanation:
    """Which backend runs a call of an op. refusals: why others cannot, or are not chosen."""

    op: str
    chosen: str | None = None
    refusals: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen or 'no backend can run this'}"]
        return "\n".join(lines + [f"  backend {name} {why}" for name, why in self.refusals.items()])


def op_of(public_name: str) -> "Op":
    """The forward op of a public function."""
    return next(o for o in OPS.values() if public_name in o.names and not o.is_derivative)


# -- one call -------------------------------------------------------------------------------------
def why_unsupported(op: "Op", backend: str, args: Sequence[Any]) -> str | None:
    """Why `backend` cannot run this call, or None."""
    if why := _env.why_not_on(backend, args[op.first_tensor].device):
        return why
    if why := op.import_failure(backend):
        return why
    module = op.module(backend)
    unsupported = getattr(module, f"{op.name}_unsupported", None)
    if unsupported is not None:
        return unsupported(*op.backend_args(args))
    if backend == CPU_BACKEND or hasattr(module, op.name):
        return None
    return f"does not implement {op.name}"


def why_skipped(op: "Op", backend: str, args: Sequence[Any]) -> str | None:
    """Why the automatic choice skips `backend`, or None."""
    if why := why_unsupported(op, backend, args):
        return why
    slower = getattr(op.module(backend), f"{op.name}_slower", None)
    return slower(*op.backend_args(args)) if slower else None


def select(op: "Op", args: Sequence[Any], backend: str | None) -> str:
    """The backend that runs this call. An explicit choice runs or raises."""
    if backend:
        check_known(op, backend)
        if why := why_unsupported(op, backend, args):
            raise NotImplementedError(f"{op.name}: backend {backend} {why}")
        return backend
    device, dtype = args[op.first_tensor].device, op.data_dtype(args)
    refusals: dict[str, str] = {}
    for candidate in order(op, device, dtype):
        if backend == NOT_CPU and candidate.name == CPU_BACKEND:
            continue
        why = why_skipped(op, candidate.name, args)
        if why is None:
            _warn_if_slow_or_unverified(op, candidate, device, dtype, refusals)
            return candidate.name
        refusals[candidate.name] = why
    raise NotImplementedError(str(Explanation(op.name, None, refusals)))


def check_known(op: "Op", backend: Any, argument: str = "backend") -> None:
    if not isinstance(backend, str):
        raise TypeError(f"{argument} must be a name or None, got {backend!r}")
    if backend not in op.backends:
        known = ", ".join(op.backends)
        raise ValueError(f"{argument} must be one of {known} for {op.public_name}, got {backend!r}")


def order(op: "Op", device: torch.device, dtype: torch.dtype) -> tuple[Backend, ...]:
    """The candidates of the automatic choice: backends with `automatic`, and those that passed the
    equivalence suite in this dtype on this GPU model.
    """
    found = op.orders.get((device, dtype))
    if found is None:
        found = tuple(
            backend
            for backend in op.backends.values()
            if backend.automatic or _is_verified(op, backend, device, dtype)
        )
        op.orders[device, dtype] = found
    return found


def forget_orders() -> None:
    """After a change of what is verified."""
    for op in OPS.values():
        op.orders.clear()
    _launch.clear()


def _is_verified(op: "Op", backend: Backend, device: torch.device, dtype: torch.dtype) -> bool:
    """Entries of a record are of a public function, or of one direction of it."""
    passed, failed = _verified.recorded(device)
    keys = {(name, backend.name, _verified.name(dtype)) for name in (op.public_name, op.name)}
    return not keys.isdisjoint(passed) and keys.isdisjoint(failed)


def _verified_dtypes(op: "Op", device: torch.device) -> dict[str, tuple[str, ...]]:
    """By the names of backends that are not automatic everywhere."""
    return {
        name: tuple(_verified.name(t) for t in _DTYPES if _is_verified(op, backend, device, t))
        for name, backend in op.backends.items()
        if not backend.automatic
    }


def _warn_if_slow_or_unverified(
    op: "Op", chosen: Backend, device: torch.device, dtype: torch.dtype, refusals: Mapping[str, str]
) -> None:
    if device.type != "cuda":
        return
    if chosen.name == "reference":
        if all(_env.why_not_on(name, device) for name in op.backends if name != chosen.name):
            return  # no other backend exists for this device
        candidates = order(op, device, dtype)
        unverified = {
            name: _UNVERIFIED
            for name, other in op.backends.items()
            if other not in candidates and _env.why_not_on(name, device) is None
        }
        reasons = {**refusals, **unverified}
        why = "; ".join(f"backend {name} {reason}" for name, reason in reasons.items())
        _warn_once(f"{op.name} runs the slow reference on {device.type}: {why}")
    elif chosen.automatic and not _is_verified(op, chosen, device, dtype):
        architecture = _env.architecture(device.type, device.index or 0)
        _warn_once(f"{op.name}: backend {chosen.name} is not verified on {architecture}")


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)


# -- FASTATTN_BACKEND -----------------------------------------------------------------------------
def requested_backend(op: "Op") -> str | None:
    """The backend that FASTATTN_BACKEND requests; raises for unknown ops and backends."""
    request = _env.requested_backends()
    if not request or not op.requestable:
        return None
    requestable = [other for other in OPS.values() if other.requestable]
    known = sorted({name for other in requestable for name in other.names})
    backends = {backend for other in requestable for backend in other.backends}
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
    named = {name: request[name] for name in op.names if name in request}
    if len({*named.values()}) > 1:
        raise ValueError(
            f"{_env.BACKEND_VARIABLE} must name one backend for {' and '.join(named)}, which are "
            f"one op, got {' and '.join(named.values())}"
        )
    requested = next(iter(named.values()), None if op.requested_in_pairs else request.get(""))
    if requested is not None:
        check_known(op, requested, _env.BACKEND_VARIABLE)
    return requested


# -- explanations ---------------------------------------------------------------------------------
def explain(op: "Op", args: Sequence[Any], backend: str | None) -> Explanation:
    refusals, candidates = {}, order(op, args[op.first_tensor].device, op.data_dtype(args))
    for name, other in op.backends.items():
        why = why_unsupported(op, name, args) if backend else why_skipped(op, name, args)
        if why is None and other not in candidates:
            why = _UNVERIFIED
        if why is not None:
            refusals[name] = why
    try:
        chosen = select(op, args, backend)
    except NotImplementedError:
        chosen = None
    if chosen is not None:
        refusals.pop(chosen, None)
    return Explanation(op.name, chosen, refusals)


class _Explaining(TorchDispatchMode):
    """Records the choice of a backend for each fastattn op instead of running it, and returns
    uninitialised results. Leaves the state of random number generators unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.explanations: list[Explanation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "fastattn":
            op = OPS[func._schema.name.removeprefix("fastattn::")]
            count = len(op.arguments)
            backend = args[count] if len(args) > count else kwargs.get("backend")
            self.explanations.append(explain(op, args[:count], backend))
            return op.as_declared(op.allocate(args[:count]))
        if torch.Tag.nondeterministic_seeded in func.tags and "device" in kwargs:
            meta = func(*args, **{**kwargs, "device": torch.device("meta")})
            return torch.empty_like(meta, device=kwargs["device"])
        return func(*args, **kwargs)


@contextlib.contextmanager
def explaining() -> Iterator[list[Explanation]]:
    """Inside, fastattn's ops record their choice of a backend and return uninitialised results."""
    with _Explaining() as mode:
        yield mode.explanations


def backend_table(device: torch.device | None = None) -> list[BackendStatus]:
    """Every backend of every public op and whether it is available on `device` (default: the GPU if
    there is one); of a backward op, too, where other kernels are chosen than for its forward.
    """
    device = device or _env.default_device()
    table = []
    for op in OPS.values():
        if not op.requestable:
            continue
        dtypes = _verified_dtypes(op, device)
        forward = OPS.get(f"{op.public_name}_fwd", op)
        if op.is_derivative and dtypes == _verified_dtypes(forward, device):
            continue
        for name, backend in op.backends.items():
            why = _env.why_not_on(name, device) or op.import_failure(name)
            if why is None:
                module = op.module(name)
                unavailable = getattr(module, "unavailable", None)
                why = unavailable() if unavailable else None
                if why is None and name != CPU_BACKEND and not hasattr(module, op.name):
                    why = f"does not implement {op.name}"
            status = (why is None, why or "", backend.automatic, dtypes.get(name, ()))
            table.append(BackendStatus(op.name.removesuffix("_fwd"), name, *status))
    return table
