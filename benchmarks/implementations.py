"""The candidates of a case: fastattn's backends, and the peers in `benchmarks/peers`.

A peer is one small file with a tuple `PEERS`: how to find it, what it does not support and why, and
a function that builds its forward. Its backward is torch's autograd of that forward.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fastattn
from fastattn.ops._select import explaining
from fastattn.testing.implementation import Implementation as Judged
from fastattn.testing.implementation import dense_mask, load
from fastattn.testing.spec import Inputs, OpSpec, Workload, all_specs

Forward = Callable[[Inputs], Any]
# A value of `Implementation.workloads`: runs only when requested by name.
ON_REQUEST = "(?!)"
_DEVICE_OF_BACKEND = {"triton": "cuda", "cuda": "cuda", "sm90": "cuda", "cpu": "cpu"}
# Ops whose automatic choice passes some calls to torch: it is measured as a candidate, too.
_USES_TORCH_FOR_SOME_CALLS = ("linear",)
_AUTOMATIC = "automatic"
# Arguments of attention that change scores. A peer has none unless it says so.
SCORE_ARGUMENTS = ("alibi_slopes", "softcap", "sinks", "relative_bias")


@dataclass(frozen=True)
class Task:
    """Call that a peer computes. inputs: one copy; masks and lengths are the same in all copies."""

    op: str
    workload: Workload
    device: torch.device
    dtype: torch.dtype
    inputs: Inputs


@dataclass(frozen=True)
class Implementation:
    """One way to compute a case.

    build: task -> forward(inputs) -> result. Work that is done once per model, not per call,
    belongs into `build`.
    unavailable: why it cannot run on this machine. unsupported: why it cannot compute a task. Both
    return None if it can, else a reason phrased to follow the name.
    compiles: takes seconds to minutes before its first result (torch.compile).
    scores: which of SCORE_ARGUMENTS it computes.
    workloads: a regular expression of workload names to which it is limited unless all are
    requested.
    directions: the directions that it supports.
    draws_dropout: has its own dropout bits, so it is checked with dropout off.
    ignores_query_lengths: rows beyond query_lengths are arbitrary, so they are not checked.
    function: where it is a function with arguments of the public one: MODULE:NAME.
    """

    name: str
    ops: tuple[str, ...]
    build: Callable[[Task], Forward]
    device_types: tuple[str, ...] = ("cuda", "cpu")
    unavailable: Callable[[], str | None] = lambda: None
    unsupported: Callable[[Task], str | None] = lambda task: None
    version: Callable[[], str] = lambda: str(torch.__version__)
    backend: str = ""
    is_fastattn: bool = False
    compiles: bool = False
    scores: tuple[str, ...] = ()
    workloads: str = ""
    directions: tuple[str, ...] = ("fwd", "bwd", "step", "decode")
    draws_dropout: bool = False
    ignores_query_lengths: bool = False
    function: str = ""

    def why_unsupported(self, task: Task) -> str | None:
        missing = [n for n in SCORE_ARGUMENTS if n in task.inputs and n not in self.scores]
        return f"has no {' and '.join(missing)}" if missing else self.unsupported(task)


def _with_prepared_inputs(prepare: Callable[[Inputs], Inputs], call: Forward) -> Forward:
    """Inputs are prepared when they are first used, which the calls before a timing do."""
    prepared: list[tuple[Inputs, Inputs]] = []

    def forward(inputs: Inputs) -> Any:
        for given, ready in prepared:
            if given is inputs:
                return call(ready)
        prepared.append((inputs, prepare(inputs)))
        return forward(inputs)

    return forward


def fastattn_backends(spec: OpSpec, device_type: str) -> list[Implementation]:
    """fastattn's backends for a kind of device, and its automatic choice where that may be none of
    them.
    """

    def of(backend: str | None) -> Implementation:
        def build(task: Task) -> Forward:
            # As users call it where it is the automatic choice: a request is resolved in Python.
            with torch.no_grad(), explaining() as choices:
                spec.function(**task.inputs)
            requested = None if backend == choices[0].chosen else backend

            def call(inputs: Inputs) -> Any:
                return spec.function(**inputs, backend=requested)

            unchanged = spec.prepare(task.inputs) is task.inputs
            return call if unchanged else _with_prepared_inputs(spec.prepare, call)

        return Implementation(
            f"fastattn-{backend or _AUTOMATIC}",
            (spec.name,),
            build,
            version=lambda: fastattn.__version__,
            unsupported=_reference_is_too_large if backend == "reference" else lambda task: None,
            backend=backend or _AUTOMATIC,
            is_fastattn=True,
            scores=SCORE_ARGUMENTS,
            workloads=ON_REQUEST if (backend, device_type) == ("reference", "cuda") else "",
        )

    chosen: list[str | None] = [None] if spec.name in _USES_TORCH_FOR_SOME_CALLS else []
    chosen += [b for b in spec.backends if _DEVICE_OF_BACKEND.get(b, device_type) == device_type]
    return [of(b) for b in chosen]


def _reference_is_too_large(task: Task) -> str | None:
    if task.op != "attention":
        return None
    return weights_are_too_large(task, copies=8)


def weights_are_too_large(task: Task, copies: int) -> str | None:
    """Why an implementation that stores all B x H x M x N weights `copies` times in fp32 cannot."""
    (B, H, M, _), N = task.inputs["q"].shape, task.inputs["k"].shape[2]
    size = copies * 4 * B * H * M * N / 2**30
    limit = 16.0
    if task.device.type == "cuda":
        limit = torch.cuda.mem_get_info(task.device)[0] / 2**30 / 2
    return f"stores {size:.0f} GiB of weights here" if size > limit else None


def refusing(why: Callable[..., str | None]) -> Callable[..., Callable[..., Any]]:
    """Decorates a function for `adapter`: a call raises NotImplementedError if `why` returns a
    reason for its arguments, which are passed by name.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**arguments: Any) -> Any:
            if reason := why(**arguments):
                raise NotImplementedError(reason)
            return function(**arguments)

        vars(call)["why"] = why
        return call

    return decorate


def without_parameters(**arguments: Any) -> str | None:
    """For `refusing`: required parameters that are None."""
    missing = [name for name in ("weight", "bias") if arguments.get(name, ...) is None]
    return f"needs {' and '.join(missing)} here" if missing else None


def adapter(
    name: str,
    op: str,
    function: Callable[..., Any],
    *,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    prepare: Callable[[Inputs], Inputs] | None = None,
    **about: Any,
) -> Implementation:
    """A function or module with arguments of the public function, as the judge calls it. Which of
    them it gets, and whether it refuses them, is found once. wrap: such as torch.compile. prepare:
    what is done once with its arguments. about: of `Implementation`.
    """
    spec, judged = all_specs()[op], Judged(name, function)
    judged.check_signature(op)
    path = f"{function.__module__}:{getattr(function, '__name__', '')}"
    why = getattr(function, "why", None)
    function = function.__wrapped__ if why else function  # type: ignore[attr-defined]
    not_passed = ("dropout_seed",) if about.get("draws_dropout") else ()

    def layout(inputs: Inputs) -> Inputs:
        return judged.arguments(spec, {n: x for n, x in inputs.items() if n not in not_passed})

    def build(task: Task) -> Forward:
        given = layout(task.inputs)
        moving = [name for name, value in given.items() if value is task.inputs.get(name)]
        fixed = {name: value for name, value in given.items() if name not in moving}
        call = wrap(function)
        if prepare is not None:
            return _with_prepared_inputs(
                lambda inputs: prepare(layout(inputs)), lambda ready: call(**ready)
            )
        if any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in fixed.values()):
            # Another layout of the data
            return _with_prepared_inputs(layout, functools.partial(Judged(name, call).call, spec))
        return lambda inputs: call(**{n: inputs[n] for n in moving}, **fixed)

    def unsupported(task: Task) -> str | None:
        try:
            given = layout(task.inputs)
        except NotImplementedError as refusal:
            return str(refusal)
        return why(**given) if why else None

    return Implementation(
        name,
        (op,),
        build,
        unsupported=unsupported,
        scores=SCORE_ARGUMENTS,
        function=path,
        **about,
    )


def implementation_from_elsewhere(op: str, path: Path) -> Implementation:
    """A function or module of a reader, FOLDER/MODULE:ATTRIBUTE."""
    if op not in all_specs():
        raise ValueError(f"an implementation must be of an op, got {op}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return adapter(path.name, op, load(path.name).function)


_RESTRICTIONS = ("key_lengths", "query_lengths", "causal", "window")


def with_dense_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of q, k, v and mask with every restriction of attention, which are all in the mask
    that it gets.
    """

    @functools.wraps(function)
    def call(q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> Any:
        restrictions = {name: options.pop(name, None) for name in _RESTRICTIONS}
        restrictions["causal"] = restrictions["causal"] or False
        mask = dense_mask(q, k, mask=options.pop("mask", None), **restrictions)
        return function(q, k, *rest, mask=mask, **options)

    signature = inspect.signature(function)
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(n, kind, default=False if n == "causal" else None) for n in _RESTRICTIONS
    ]
    vars(call)["__signature__"] = signature.replace(
        parameters=[*signature.parameters.values(), *more]
    )
    return call


def can_import(module: str) -> bool:
    """Whether a module's file exists. Nothing is imported: some packages take seconds, or fail
    without their GPU.
    """
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for name in inner[:-1]:
        folders = [folder / name for folder in folders if (folder / name).is_dir()]
    return not inner or any(
        (folder / inner[-1]).is_dir() or any(folder.glob(f"{inner[-1]}.*")) for folder in folders
    )


def needs_package(package: str, module: str) -> Callable[[], str | None]:
    """For `Implementation.unavailable`: `module` is imported, `package` installs it."""

    def unavailable() -> str | None:
        return None if can_import(module) else f"is not installed: no package {package}"

    return unavailable


def package_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def of_package(package: str, module: str) -> dict[str, Any]:
    """Fields of an `Implementation` that `package` installs; `module` is imported."""
    version = functools.partial(package_version, package)
    return {"unavailable": needs_package(package, module), "version": version}


@functools.cache
def peers(files: tuple[Path, ...] = ()) -> list[Implementation]:
    """Every peer of `benchmarks/peers` and of the given Python files."""
    import benchmarks.peers as package

    found: list[Implementation] = []
    for module in pkgutil.iter_modules(package.__path__):
        found += importlib.import_module(f"{package.__name__}.{module.name}").PEERS
    for path in files:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"a peer must be a Python file, got {path}")
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        found += loaded.PEERS
    return found
