"""Which backend runs a call: the op's order of preference, explicit choices, explanations.

A backend is a module `<package>.<name>` beside the op. What it cannot run it refuses with a reason
(`<op>_unsupported`); what it can run but slower than the next one, `<op>_slower` says, which is
asked in the automatic choice alone.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn.ops import _env, _verified

if TYPE_CHECKING:
    from fastattn.ops._op import Op

OPS: dict[str, "Op"] = {}
# The backend whose kernels are registered under the dispatcher's CPU key.
CPU_BACKEND = "cpu"
# The backend's name in calls that the CPU backend hands on: the automatic choice among the others.
ELSEWHERE = ""
_log = logging.getLogger("fastattn")
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


# -- one call -------------------------------------------------------------------------------------
def refusal(op: "Op", backend: str, args: Sequence[Any]) -> str | None:
    """Why `backend` cannot run this call, or None."""
    if why := _env.refuses_device(backend, args[op.anchor].device):
        return why
    if why := op.import_failure(backend):
        return why
    module = op.module(backend)
    unsupported = getattr(module, f"{op.name}_unsupported", None)
    if unsupported is not None:
        return unsupported(*op.given(args))
    if backend == CPU_BACKEND or hasattr(module, op.name):
        return None
    return f"does not implement {op.name}"


def objection(op: "Op", backend: str, args: Sequence[Any]) -> str | None:
    """Why the automatic choice passes over `backend`, or None."""
    if why := refusal(op, backend, args):
        return why
    slower = getattr(op.module(backend), f"{op.name}_slower", None)
    return slower(*op.given(args)) if slower else None


def select(op: "Op", args: Sequence[Any], backend: str | None) -> str:
    """The backend that runs this call. An explicit choice never falls back."""
    if backend:
        check_known(op, backend)
        if why := refusal(op, backend, args):
            raise NotImplementedError(f"{op.name}: backend {backend} {why}")
        return backend
    device, dtype = args[op.anchor].device, op.data_dtype(args)
    refusals: dict[str, str] = {}
    for row in order(op, device, dtype):
        if backend == ELSEWHERE and row.name == CPU_BACKEND:
            continue
        why = objection(op, row.name, args)
        if why is None:
            _remark(op, row, device, dtype, refusals)
            return row.name
        refusals[row.name] = why
    raise NotImplementedError(str(Explanation(op.name, None, refusals)))


def check_known(op: "Op", backend: Any, argument: str = "backend") -> None:
    if not isinstance(backend, str):
        raise TypeError(f"{argument} must be a name or None, got {backend!r}")
    if backend not in op.backends:
        known = ", ".join(op.backends)
        raise ValueError(f"{argument} must be one of {known} for {op.family}, got {backend!r}")


def order(op: "Op", device: torch.device, dtype: torch.dtype) -> tuple[Backend, ...]:
    """What the automatic choice goes through on a device: its rows, and those of kernels that have
    passed the equivalence suite in this dtype on a GPU such as this one.
    """
    found = op.orders.get((device, dtype))
    if found is None:
        found = tuple(
            row
            for row in op.backends.values()
            if row.automatic or _has_passed(op, row.name, device, dtype)
        )
        op.orders[device, dtype] = found
    return found


def _has_passed(op: "Op", backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    return (op.family, backend, _verified.name(dtype)) in _verified.passed(device)


def _remark(
    op: "Op", row: Backend, device: torch.device, dtype: torch.dtype, refusals: Mapping[str, str]
) -> None:
    if device.type != "cuda":
        return
    if row.name == "reference":
        if all(_env.refuses_device(name, device) for name in op.backends if name != row.name):
            return  # the op is torch's own there, not a slow stand-in
        taken = order(op, device, dtype)
        waiting = {
            name: _UNVERIFIED
            for name, other in op.backends.items()
            if other not in taken and _env.refuses_device(name, device) is None
        }
        reasons = {**refusals, **waiting}
        why = "; ".join(f"backend {name} {reason}" for name, reason in reasons.items())
        _warn_once(f"{op.name} runs the slow reference on {device.type}: {why}")
    elif not _has_passed(op, row.name, device, dtype):
        architecture = _env.architecture(device.type, device.index or 0)
        if architecture not in row.verified:
            _warn_once(f"{op.name}: backend {row.name} is not verified on {architecture}")


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)


# -- what the environment asks for ----------------------------------------------------------------
def requested_backend(op: "Op") -> str | None:
    """What FASTATTN_BACKEND asks for; a pair for an op that does not exist is an error."""
    request = _env.requested_backends()
    if not request or not op.requestable:
        return None
    asked = [other for other in OPS.values() if other.requestable]
    known = sorted({other.family for other in asked})
    backends = {backend for other in asked for backend in other.backends}
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
    wanted = request.get(op.family) or (None if op.requested_in_pairs else request.get(""))
    if wanted is not None:
        check_known(op, wanted, _env.BACKEND_VARIABLE)
    return wanted


# -- explanations ---------------------------------------------------------------------------------
def explain(op: "Op", args: Sequence[Any], backend: str | None) -> Explanation:
    refusals, taken = {}, order(op, args[op.anchor].device, op.data_dtype(args))
    for name, row in op.backends.items():
        why = refusal(op, name, args) if backend else objection(op, name, args)
        if why is None and row not in taken:
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
    """Answers the package's ops before their kernels, with why they choose a backend and
    uninitialised results; draws nothing from random generators.
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
    """Inside, ops record why they choose a backend and return uninitialised results."""
    with _Explaining() as mode:
        yield mode.explanations


def backend_table(device: torch.device | None = None) -> list[BackendStatus]:
    """Every backend of every public op and whether it can serve `device` (default: the GPU if there
    is one).
    """
    device = device or _env.default_device()
    table = []
    for op in OPS.values():
        if not op.requestable or op.is_backward:
            continue
        for row in op.backends.values():
            why = _env.refuses_device(row.name, device) or op.import_failure(row.name)
            if why is None:
                module = op.module(row.name)
                unavailable = getattr(module, "unavailable", None)
                why = unavailable() if unavailable else None
                if why is None and row.name != CPU_BACKEND and not hasattr(module, op.name):
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
