"""Runs and checks samples, for `fastattn check` and tests/ops/test_ops.py.

A sample's results (outputs, and gradients for fixed random output gradients) are compared with the
fp64 reference. The error budget (compare.py) depends on the error of the reference in the data's
dtype. The error of PyTorch's operators is shown for comparison. Correct results are then checked
for the properties of properties.py: rerun, batch, padding. A backend that gives the same bits in
every run only under deterministic algorithms runs again under them; these results are compared and
have the properties.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn.ops import _env, _native
from fastattn.testing import lines
from fastattn.testing.implementation import Implementation, load
from fastattn.testing.isolation import Lost, run_isolated
from fastattn.testing.judge import fail_what_always_raises, judge_sample, required_kinds
from fastattn.testing.oracle import Oracle, output_gradients, run_op
from fastattn.testing.poison import poisoned_results
from fastattn.testing.properties import (
    DETERMINISTIC_ON_REQUEST,
    PROPERTIES,
    Case,
    Results,
    deterministic_algorithms,
)
from fastattn.testing.record import check_recordable, record
from fastattn.testing.report import Report, nothing_checked, print_report
from fastattn.testing.rows import DTYPES, NAMES, Row
from fastattn.testing.spec import DRAWN, Inputs, Sample, all_specs


def check_sample(
    oracle: Oracle,
    backend: str,
    device: torch.device,
    torch_errors: dict[str, float] | None = None,
    *,
    gradients: bool = True,
) -> list[Row]:
    """Checks the results of one backend on one sample, then its properties until one fails. Bits of
    PyTorch's products depend on the address with odd sizes, so backends that use them have no
    properties on drawn samples. If the backend refuses only the gradients, or is known to compute
    wrong ones, the outputs are checked without them.
    """
    spec, sample = oracle.spec, oracle.sample
    if not gradients:
        sample = dataclasses.replace(sample, gradients=())

    def row(result: str, status: str, **details: Any) -> Row:
        return Row(
            spec.name,
            backend,
            device.type,
            NAMES[oracle.dtype],
            sample.name,
            result,
            status,
            **details,
        )

    made = functools.cache(sample.inputs)

    def make() -> Inputs:
        return copy.deepcopy(made(device, oracle.dtype))

    def run(
        inputs: Inputs, douts: tuple[Tensor, ...] | None = None, *, deterministic: bool = False
    ) -> Results:
        with poisoned_results(), deterministic_algorithms(deterministic):
            given = None if douts is None else lambda *_: douts
            return run_op(spec, sample, inputs, backend, given)

    def crash(error: Exception, kind: str) -> Row:
        return row("all", "FAIL", message=f"{type(error).__name__}: {error}"[:500], kind=kind)

    def outputs_alone(message: str) -> list[Row]:
        rows = check_sample(oracle, backend, device, torch_errors, gradients=False)
        if rows[0].status == "refused":  # the outputs are refused, too
            return rows
        return [*rows, row("gradients", "refused", message=message)]

    if backend in sample.wrong_results:
        message = "computes wrong results of such scores (docs/pages/backends.md)"
        return [row("all", "refused", message=message)]
    if sample.gradients and backend in sample.wrong_gradients:
        return outputs_alone("computes wrong gradients of such scores (docs/pages/backends.md)")
    try:
        results = run(make())
    except NotImplementedError as refusal:
        message = str(refusal).partition(": ")[2]
        return (
            outputs_alone(message) if sample.gradients else [row("all", "refused", message=message)]
        )
    except Exception as error:  # reported as a row; other samples still run
        return [crash(error, "value")]

    def judged(results: Results) -> list[Row]:
        rows = []
        for name, value in results.items():
            comparison = oracle.judge(name, value)
            rows.append(
                row(
                    name,
                    "ok" if comparison.ok else "FAIL",
                    error=comparison.error,
                    allowed=comparison.allowed,
                    torch_error=(torch_errors or {}).get(name),
                    message=comparison.message,
                )
            )
        return rows

    rows = judged(results)
    douts = output_gradients(spec, sample, tuple(results[name] for name in spec.results))
    again: Callable[..., Results] = run
    if backend in DETERMINISTIC_ON_REQUEST and sample.gradients:
        again = functools.partial(run, deterministic=True)
        try:
            results = again(make(), douts)
        except Exception as error:
            return [*rows, crash(error, "value")]
        rows += [
            dataclasses.replace(r, message=f"with deterministic algorithms: {r.message}")
            for r in judged(results)
            if r.status == "FAIL"
        ]
    case = Case(spec, sample, backend, results, douts, make, again, oracle.judge)
    by_products = sample.name.startswith(DRAWN) and backend in ("torch", "reference")
    for kind, faults_of in PROPERTIES.items():
        if by_products or any(r.status == "FAIL" for r in rows):
            break
        try:
            faults = faults_of(case)
        except Exception as error:
            rows.append(crash(error, kind))
            break
        if faults is not None:
            rows += [row(name, "FAIL", message=m, kind=kind) for name, m in faults.items()]
            rows += [] if faults else [row("all", "ok", kind=kind)]
    return rows


# -- the command -----------------------------------------------------------------------------------


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    device: Callable[[str], torch.device] = torch.device,
    count: Callable[[str], int] = int,
    file: Callable[[str], str] = str,
) -> None:
    """device, count, file: parse a device, a positive number and a file to write."""
    parser.add_argument("--op", action="append", help="only this op (may be repeated)")
    parser.add_argument("--backend", action="append", help="only this backend (may be repeated)")
    parser.add_argument(
        "--implementation", metavar="MODULE:ATTR",
        help="instead of the backends: a function or module with the arguments of the op",
    )  # fmt: skip
    parser.add_argument(
        "--require", default="", metavar="KIND,KIND",
        help="with --implementation: further checks that must not fail",
    )  # fmt: skip
    parser.add_argument("--dtype", action="append", choices=sorted(DTYPES), help="only this dtype")
    parser.add_argument("--sample", action="append", help="only samples whose name contains this")
    parser.add_argument(
        "--device", type=device, default=None, help="cpu or cuda (default: cuda if there is one)"
    )
    parser.add_argument(
        "--json",
        type=file,
        metavar="FILE",
        help="write all rows as a JSON array, or to FILE.jsonl as lines while the checks run",
    )
    parser.add_argument(
        "--quick", action="store_true", help="only the samples tagged for quick runs"
    )
    parser.add_argument(
        "--fuzz",
        type=count,
        metavar="N",
        help="instead of the samples: N random calls of each form of attention",
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="with --fuzz: number of the first call (default: 0)"
    )
    parser.add_argument("--isa", help="instruction set of the CPU kernels (default: the fastest)")
    parser.add_argument(
        "--jobs", type=count, default=None, help="number of processes (default: one per core)"
    )
    parser.add_argument(
        "--seconds", type=count, default=None, help="start no sample after this time"
    )
    parser.add_argument(
        "--limit", type=count, default=90, metavar="SECONDS",
        help="a sample that takes longer counts as hanging (default: 90)",
    )  # fmt: skip
    parser.add_argument(
        "--resume",
        action="store_true",
        help="with --json FILE.jsonl: leave out samples that the file has results of, for the same "
        "kernels, versions and device",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="on a GPU: record the kernels that pass every sample, to be chosen automatically",
    )
    parser.add_argument("--verbose", action="store_true", help="print every row, not only failures")


def run(options: argparse.Namespace) -> int:
    """`fastattn check`: prints a table and returns the exit code, 1 if anything failed. Raises
    ValueError for invalid options.
    """
    device = options.device or _env.default_device()
    rows: Sequence[Row] = check_samples(options, device)
    if options.implementation:
        report = _report(rows, options, device)
        rows = report.rows
        print(report.table(options.verbose))
    else:
        print_report(rows, device, options.verbose)
    if options.json and not _in_lines(options.json):
        lines.write_json(Path(options.json), [dataclasses.asdict(row) for row in rows])
    if options.record:
        print(record(rows, device))
    return 1 if any(row.status == "FAIL" for row in rows) or nothing_checked(rows) else 0


def check_implementation(
    implementation: Callable[..., Any] | str,
    op: str,
    *,
    device: torch.device | str | None = None,
    dtypes: torch.dtype | Iterable[torch.dtype] | None = None,
    samples: str | Sequence[str] = (),
    require: str | Sequence[str] = (),
    limit_s: int = 90,
) -> Report:
    """Checks a function or module that computes `op` against fp64, within the error budget of
    fastattn's own backends.

    implementation: has the arguments of `fastattn.<op>`, or some of them, by name; samples with
        others are refused, and so are those for which it raises NotImplementedError. Returns the
        first result or several. A name such as "my_kernels:my_attention" runs in processes of its
        own, so that a sample that crashes or hangs costs one row.
    op: the name of a function, such as "attention" or "rms_norm".
    device: default cuda if there is one. dtypes: default fp32, bf16 and fp16.
    samples: parts of the names of the samples to run; default all.
    require: kinds of checks that count as failures besides value, gradient, inputs, expanded
        gradient and inference, of `fastattn.testing.KINDS`, such as "rerun,batch"; "padding" stands
        for three. The others are reported.
    limit_s: with a name: a sample that takes longer counts as hanging.
    """
    name = implementation
    if not isinstance(name, str):
        name = getattr(implementation, "__name__", type(implementation).__name__)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args([f"--op={op}", f"--implementation={name}"])
    options.sample = [samples] if isinstance(samples, str) else samples
    dtypes = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes or NAMES)
    if unknown := [dtype for dtype in dtypes if dtype not in NAMES]:
        raise ValueError(f"dtypes must be of {', '.join(map(str, NAMES))}, got {unknown[0]}")
    options.dtype = [NAMES[dtype] for dtype in dtypes]
    options.limit, options.require = limit_s, require
    device = _env.default_device() if device is None else torch.device(device)
    if isinstance(implementation, str):
        return _report(check_samples(options, device), options, device)
    cases, judged = _cases(options, device), Implementation(name, implementation)
    judged.check_signature(op)
    rows = [row for case in cases for row in _judge_case(case, judged)]
    return _report(rows, options, device)


def _report(rows: Iterable[Row], options: argparse.Namespace, device: torch.device) -> Report:
    require = required_kinds(options.require)
    return Report(tuple(fail_what_always_raises(rows, require)), device, require)


def check_samples(options: argparse.Namespace, device: torch.device) -> list[Row]:
    """The rows of the samples that the options select, also those of a file that is continued."""
    if options.json and Path(options.json).is_dir():
        raise ValueError(f"--json must be a file to write, got the folder {options.json}")
    if options.resume and not _in_lines(options.json):
        raise ValueError(f"--resume must go with --json FILE.jsonl, got --json {options.json}")
    if options.record:
        check_recordable(options, device)
    cases = _cases(options, device)
    if options.implementation:
        load(options.implementation).check_signature(*options.op)
    backends = {backend for case in cases for backend in case.backends if case.require is None}
    isas = {"cpu": options.isa or _native.cpu_isa()}
    digests = {
        backend: lines.applies_to(device, backend, isas.get(backend)) for backend in backends
    }
    found = _finished(Path(options.json), cases, digests) if options.resume else {}
    waiting = [index for index in range(len(cases)) if index not in found]
    if found:
        print(f"{len(found)} of {len(cases)} samples were checked before: {options.json}")
    jobs = min(options.jobs or os.cpu_count() or 1, max(1, len(waiting)))
    chosen = [cases[index] for index in waiting]
    results = _check_cases(chosen, jobs, options.seconds, options.limit)
    for number, case_rows in _progress(results, f"checking on {device}", len(waiting)):
        index = waiting[number]
        found[index] = [
            dataclasses.replace(row, applies_to=digests.get(row.backend, "")) for row in case_rows
        ]
        if _in_lines(options.json):
            lines.append(Path(options.json), map(dataclasses.asdict, found[index]))
    return [row for index in sorted(found) for row in found[index]]


def _finished(
    file: Path, cases: Sequence["_Case"], digests: Mapping[str, str]
) -> dict[int, list[Row]]:
    """The rows of a file that its cases need not repeat, by the index of the case."""
    known: dict[tuple[str, ...], dict[tuple[str, str], Row]] = {}
    for row in lines.read_as(Row, file):
        if row.status != "skipped" and row.applies_to == digests.get(row.backend):
            of_sample = known.setdefault((row.op, row.sample, row.dtype, row.backend), {})
            of_sample[row.result, row.kind] = row
    found = {}
    for index, case in enumerate(cases):
        keys = [(case.op, case.sample, NAMES[case.dtype], backend) for backend in case.backends]
        if all(key in known for key in keys):
            found[index] = [row for key in keys for row in known[key].values()]
    return found


def _progress(
    results: Iterator[tuple[int, list[Row]]], label: str, total: int
) -> Iterable[tuple[int, list[Row]]]:
    """The results, with a progress bar on standard error; a line for each tenth of them if that is
    not a terminal or rich is not installed.
    """
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return _progress_lines(results, label, total)
    console = Console(stderr=True)
    if not console.is_terminal:
        return _progress_lines(results, label, total)
    return track(results, label, total, console=console)


def _progress_lines(
    results: Iterator[tuple[int, list[Row]]], label: str, total: int
) -> Iterator[tuple[int, list[Row]]]:
    started = time.monotonic()
    for done, result in enumerate(results, 1):
        yield result
        if done * 10 // total > (done - 1) * 10 // total:
            seconds = time.monotonic() - started
            print(f"{label}: {done} of {total}, {seconds:.0f} s", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Case:
    """One sample in one dtype, by name: it can be pickled for another process. require: None, or
    what must hold of an implementation, whose name `backends` holds.
    """

    op: str
    sample: str
    dtype: torch.dtype
    backends: tuple[str, ...]
    device: torch.device
    isa: str | None = None
    require: tuple[str, ...] | None = None


def _judge_case(case: _Case, implementation: Implementation) -> list[Row]:
    spec = all_specs()[case.op]
    sample, require = spec.sample(case.sample), case.require or ()
    return judge_sample(spec, sample, case.dtype, implementation, case.device, require)


@contextlib.contextmanager
def _cpu_isa(isa: str | None) -> Iterator[None]:
    before = _native.cpu_isa()
    if isa is None or before is None:
        yield
        return
    _native.use_cpu_isa(isa)
    try:
        yield
    finally:
        _native.use_cpu_isa(before)


def _check_case(case: _Case) -> list[Row]:
    if case.require is not None:
        return _judge_case(case, load(*case.backends))
    spec = all_specs()[case.op]
    sample = spec.sample(case.sample)
    oracle = Oracle(spec, sample, case.dtype)
    torch_errors = oracle.torch_errors()
    rows = []
    with _cpu_isa(case.isa):
        for backend in case.backends:
            rows += check_sample(oracle, backend, case.device, torch_errors)
    if case.sample.startswith(DRAWN):
        again = f"--op {case.op} --fuzz 1 --seed {case.sample.removeprefix(DRAWN)}"
        again += f" --isa {case.isa}" if case.isa else ""
        rows = [
            dataclasses.replace(row, message=f"{row.message} ({again}: {sample.reason})")
            if row.status == "FAIL"
            else row
            for row in rows
        ]
    return rows


# After so many cases of an op by a backend in a dtype hung or crashed, the others are left out.
_MAX_LOST = 3


def _check_cases(
    cases: Sequence[_Case], jobs: int, seconds: float | None, limit_s: float = 90.0
) -> Iterator[tuple[int, list[Row]]]:
    """Yields (index of the case, its rows) as cases finish, from processes with one thread each. A
    case whose process dies or hangs gives a row, and so does a case not started within `seconds`,
    or left out because its kernels hung or crashed too often.
    """
    trusted = all(case.device.type == "cpu" and case.require is None for case in cases)
    if jobs <= 1 and seconds is None and trusted:
        yield from enumerate(map(_check_case, cases))
        return
    lost: Counter[Any] = Counter()

    def left_out(case: _Case) -> str | None:
        count = lost[case.op, case.backends, case.dtype]
        return f"{count} samples of it crashed or hung" if count >= _MAX_LOST else None

    results = run_isolated(
        _check_case, cases, jobs=jobs, seconds=seconds, limit_s=limit_s, left_out=left_out
    )
    for index, rows in results:
        if isinstance(rows, Lost):
            case = cases[index]
            lost[case.op, case.backends, case.dtype] += rows.reached
            status = "FAIL" if rows.reached else "refused" if rows.left_out else "skipped"
            rows = [_row_of_case(case, backend, status, rows.why) for backend in case.backends]
        yield index, rows


def _row_of_case(case: _Case, backend: str, status: str, message: str) -> Row:
    at = (case.op, backend, case.device.type, NAMES[case.dtype], case.sample)
    kind = "process" if status == "FAIL" else "value"
    return Row(*at, "all", status, message=message, kind=kind)


def _cases(options: argparse.Namespace, device: torch.device) -> list[_Case]:
    specs = all_specs()
    known = sorted({b for spec in specs.values() for b in spec.backends})
    for option, values, allowed in (
        ("--op", options.op, list(specs)),
        ("--backend", options.backend, known),
    ):
        for value in values or ():
            if value not in allowed:
                raise ValueError(f"{option} must be one of {', '.join(allowed)}, got {value!r}")
    require = required_kinds(options.require) if options.implementation else None
    if require is not None and (
        len(options.op or ()) != 1 or options.backend or options.record or options.resume
    ):
        wanted = "one --op, and without --backend, --record and --resume"
        raise ValueError(f"--implementation must go with {wanted}")
    dtypes = [DTYPES[name] for name in options.dtype or DTYPES]
    if options.isa and options.isa not in (isas := _native.usable_cpu_isas()):
        raise ValueError(f"--isa must be one of {', '.join(isas)}, got {options.isa!r}")
    _check_fuzz(options, [spec.name for spec in specs.values() if spec.drawn])
    cases = []
    for spec in specs.values():
        if options.op and spec.name not in options.op:
            continue
        backends = tuple(b for b in spec.backends if not options.backend or b in options.backend)
        if not options.backend:  # leave out backends for other devices, and what is not recorded
            backends = tuple(b for b in backends if _env.why_not_on(b, device) is None)
            backends = tuple(b for b in backends if not options.record or b != "reference")
        if require is not None:
            backends = (options.implementation,)
        samples: Iterable[Sample] = spec.samples
        if options.fuzz:
            first = options.seed or 0
            numbers = range(first, first + options.fuzz)
            samples = map(spec.drawn, numbers) if spec.drawn else ()
        for sample in samples:
            if options.quick and "interpreter" not in sample.tags:
                continue
            if options.sample and not any(part in sample.name for part in options.sample):
                continue
            for dtype in dtypes:
                # On a GPU, one process per backend: a backend can make the GPU unusable in it.
                groups = [backends] if device.type == "cpu" else [(b,) for b in backends]
                if dtype in sample.dtypes and backends:
                    at = (spec.name, sample.name, dtype)
                    case = _Case(*at, backends, device, options.isa, require)
                    cases += [dataclasses.replace(case, backends=group) for group in groups]
    if device.type != "cpu":
        # In the order requested. Otherwise the backend that compiles its kernels is first: its
        # samples take longest, and short ones fill the processes that are idle at the end.
        order = options.backend or ["triton"]
        last = len(order)
        cases.sort(key=lambda c: order.index(c.backends[0]) if c.backends[0] in order else last)
    if not cases:
        raise ValueError("the options must leave at least one sample to check, got none")
    return cases


def _check_fuzz(options: argparse.Namespace, drawable: Sequence[str]) -> None:
    if not options.fuzz:
        if options.seed is not None:
            raise ValueError(f"--seed must go with --fuzz N, got --seed {options.seed}")
        return
    if options.quick:
        raise ValueError("--quick must go without --fuzz, whose calls have no tags, got both")
    if options.op and not set(options.op) & set(drawable):
        raise ValueError(
            f"--op must be one of {', '.join(drawable)} with --fuzz, got {', '.join(options.op)}"
        )


def _in_lines(file: str | None) -> bool:
    return file is not None and file.endswith(".jsonl")
