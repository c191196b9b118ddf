"""`python -m benchmarks.run`: measures the cases of this machine within a given time.

Needs only torch and the package. Rows are written as they are measured, so an interrupted run keeps
them.
"""

import argparse
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import cases, rows
from benchmarks.cases import Group
from benchmarks.grids import UNITS, metric_of
from benchmarks.rows import Row, is_fastattn
from benchmarks.runner import STAGE_SECONDS, Runner, Settings
from fastattn.ops import _env
from fastattn.testing.instances import regular_expression
from fastattn.testing.timing import Plan

# A group that is running when the time is over may take this much longer.
_GRACE_SECONDS = 45.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    device = _env.default_device().type
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default=device, help="default: cuda if there is one")
    add("--out", type=Path, default=Path("build/benchmarks"), help="folder of results.jsonl")
    add("--quick", action="store_true", help="a few workloads, fewer rounds")
    add("--op", action="append", choices=cases.ops(), help="only this op (may be repeated)")
    add(
        "--match", type=regular_expression, default="", metavar="REGEX",
        help="only cases whose name matches",
    )  # fmt: skip
    add("--dtype", action="append", choices=sorted(cases.DTYPES), help="default: what models use")
    add("--seconds", type=float, metavar="BUDGET", help="start no group after this time")
    add("--resume", action="store_true", help="leave out what the folder has rows of, same sources")
    add("--all", action="store_true", help="every implementation on every workload, also slow ones")
    add("--warm", action="store_true", help="one copy of the inputs, so that caches stay warm")
    add("--peer", action="append", type=Path, metavar="FILE", help="another file of peers")
    add(
        "--implementation", action="append", metavar="MODULE:ATTR", default=[],
        help="a function or module with the arguments of --op, beside its peers",
    )  # fmt: skip
    add("--threads", type=int, default=0, help="torch's CPU threads")
    add("--stage-seconds", type=float, default=STAGE_SECONDS, help="limit of a stage of one case")
    add("--list", action="store_true", help="print the cases and exit")


def settings_of(options: argparse.Namespace) -> Settings:
    plan = Plan(rounds=11, budget_ms=600.0) if options.quick else Plan()
    if options.seconds is not None and not options.quick:  # more workloads, fewer rounds
        plan = Plan(rounds=15, budget_ms=900.0)
    return Settings(
        options.device,
        threads=options.threads,
        cold=not options.warm,
        plan=plan,
        stage_seconds=options.stage_seconds,
        peer_files=files_of(options),
    )


def files_of(options: argparse.Namespace) -> tuple[Path, ...]:
    for name in options.implementation:
        if ":" not in name:
            raise ValueError(f"an implementation must be named module:attribute, got {name!r}")
    named = [Path.cwd() / name for name in options.implementation]
    return (*(options.peer or ()), *named)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.implementation and len(options.op or ()) != 1:
        parser.error("--implementation needs one --op")
    try:
        groups = cases.groups(
            options.device,
            only_ops=options.op or (),
            match=options.match,
            dtypes=options.dtype or (),
            quick=options.quick,
            every_implementation=options.all,
            peer_files=files_of(options),
        )
    except ValueError as error:  # in the names of implementations or files of peers
        parser.error(str(error))
    if not groups and not options.list:
        parser.error("no case matches --op, --match, --dtype and --quick")
    if options.seconds is not None:
        groups = cases.spread(groups)
    return measure(options, groups, settings_of(options))


def measure(
    options: argparse.Namespace,
    groups: Sequence[Group],
    settings: Settings,
    *,
    order: Callable[[Sequence[Group]], Iterable[Group]] = iter,
    batches: Callable[[Runner, Group, float | None], Iterator[list[Row]]] = Runner.run,
) -> int:
    """Measures or lists groups; returns the exit code. order: the remaining groups one by one, in
    the order in which they start. batches: as `Runner.run`.
    """
    started = time.monotonic()
    if options.list:
        print("\n".join(name for group in groups for name in group.cases))
        return 0
    if options.device == "cuda" and _env.default_device().type != "cuda":
        print("error: --device cuda needs a GPU that torch can use", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _end)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    collected: list[Row] = []
    known: set[str] = set()  # absent peers that the file names
    reached: list[Group] = []
    busy = busy_share()
    if busy is not None and busy > rows.BUSY:
        print(f"warning: {rows.busy_warning(busy)}", file=sys.stderr, flush=True)
    with Runner(settings, options.out / "worker.log", busy=busy) as runner:
        runner.start()
        print("  ".join(f"{k} {v}" for k, v in runner.environment.items() if v is not None))
        if options.resume and results.exists():
            collected, groups = _continued(results, groups, runner.environment)
            known = {row["impl"] for row in rows.read_all(results) if row["status"] == "absent"}
        missing = cases.absent_peers(options.device, options.op or (), files_of(options))
        for name, (served, why) in missing.items():
            print(f"absent: {name} ({', '.join(served)}) {why}")
            if name not in known:
                lost = [rows.untimed(op, name, "absent", f"{name} {why}") for op in served]
                rows.append(results, rows.complete(lost, runner.environment, None))
        for dtype in dict.fromkeys(group.dtype for group in groups):
            if (ceiling := runner.ceiling(dtype)) is not None:
                flops, moved = ceiling["flops_per_s"] / 1e12, ceiling["bytes_per_s"] / 1e9
                print(f"ceilings {dtype}: {flops:.4g} TFLOP/s, {moved:.4g} GB/s", flush=True)
        for group in order(groups):
            elapsed = time.monotonic() - started
            if options.seconds is not None and elapsed >= options.seconds:
                break
            reached.append(group)
            print(f"[{len(reached)}/{len(groups)} {elapsed:.0f} s] {group.name}", flush=True)
            until = None if options.seconds is None else started + options.seconds + _GRACE_SECONDS
            for batch in batches(runner, group, until):
                rows.append(results, batch)
                collected += batch
                for row in batch:
                    print(f"  {line(row)}", flush=True)
    print("\n" + summary(collected))
    failures = [r for r in collected if r["status"] == "FAIL"]
    for row in failures:
        print(f"FAIL {case_of(row)}: {row['message']}")
    if missed := [group.name for group in groups if group not in reached]:
        print(
            f"{len(missed)} of {len(groups)} groups were not reached in {options.seconds:.0f} s "
            f"(--seconds): {', '.join(missed)}"
        )
    print(f"{len(collected)} rows in {results}, {time.monotonic() - started:.0f} s")
    measured = any(r["status"] == "ok" for r in collected)
    return 1 if not measured or any(is_fastattn(r) for r in failures) else 0


def _continued(
    results: Path, groups: Sequence[Group], environment: Mapping[str, Any]
) -> tuple[list[Row], list[Group]]:
    """The current rows of a file, and what remains of the groups."""
    before = [row for row in rows.read_all(results) if rows.is_current(row, environment)]
    left = cases.unfinished(groups, {case_of(row) for row in before})
    repeated = {name for group in left for name in group.cases}
    before = [row for row in before if case_of(row) not in repeated]
    print(f"{len(before)} rows were measured before, {len(left)} of {len(groups)} groups remain")
    return before, left


def busy_share(seconds: float = 1.0) -> float | None:
    """The share of the CPUs' time that other processes take; None where the kernel does not say."""
    try:
        before = _cpu_times()
        time.sleep(seconds)
        spent, idle = (now - then for now, then in zip(_cpu_times(), before, strict=True))
    except (OSError, ValueError, IndexError):
        return None
    return round(1.0 - idle / spent, 2) if spent else None


def _cpu_times() -> tuple[int, int]:
    """The time of all CPUs since they were started, and how much of it they were idle."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    times = [int(field) for field in fields]  # user nice system idle iowait irq softirq steal
    return sum(times), times[3] + times[4]


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # runs the context managers, which end the worker


def case_of(row: Row) -> str:
    return cases.case_name(*(row[k] for k in ("op", "direction", "workload", "dtype", "impl")))


def line(row: Row) -> str:
    head = f"{row['direction']:4} {row['impl']:20}"
    if row["status"] != "ok":
        return f"{head} {row['status']}: {row['message']}"
    parts = [f"{row['ms_median']:9.4g} ms"]
    metric = metric_of(row)
    if row[metric]:
        parts.append(f"{row[metric]:9.4g} {UNITS[metric]}")
    if row["roof"]:
        note = " (in cache)" if rows.exceeds_bytes(row) else ""
        if rows.exceeds_flops(row):
            note = " (above the measured matrix product)"
        parts.append(f"{100 * row['roof']:5.1f} % of roof{note}")
    if row["peak_bytes"]:
        parts.append(f"{row['peak_bytes'] / 2**20:.4g} MiB")
    if row["ratio_best"] and row["impl"] != row["best_peer"]:
        parts.append(f"{row['ratio_best']:.2f} x {row['best_peer']}")
    spread = (row["ms_p90"] - row["ms_p10"]) / row["ms_median"]
    parts.append(f"±{50 * spread:.1f} %")
    if row["clock"] == "stream" and row["op"] != cases.MODEL:
        parts.append("no graph")
    if row["message"]:
        parts.append(f"({row['message']})")
    return f"{head} {'  '.join(parts)}"


def summary(collected: Sequence[Row]) -> str:
    """A line per op, direction, dtype and implementation, compared with the best peers."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in collected:
        key = (row["op"], row["direction"], row["dtype"], row["impl"])
        groups.setdefault(key, []).append(row)
    header = ("op", "direction", "dtype", "implementation")
    header += ("ok", "FAIL", "no", "of best peer", "worst", "best")
    table: list[tuple[str, ...]] = [header]
    for key in sorted(groups):
        found = groups[key]
        count = {s: sum(r["status"] == s for r in found) for s in ("ok", "FAIL")}
        ratios = [r["ratio_best"] for r in found if r["ratio_best"]]
        cells = ["-", "-", "-"]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            cells = [f"{x:.2f}" for x in (mean, min(ratios), max(ratios))]
        rest = len(found) - count["ok"] - count["FAIL"]
        table.append((*key, str(count["ok"]), str(count["FAIL"]), str(rest), *cells))
    widths = [max(len(r[i]) for r in table) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 4 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(r, widths, strict=True))
        )
        for r in table
    )


if __name__ == "__main__":
    sys.exit(main())
