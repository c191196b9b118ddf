"""Supervises the measuring process: sends groups to a worker, collects rows, survives its crashes
and hangs.

If a worker dies or exceeds the time limit, its current candidate fails; a new worker continues with
the others.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Group
from benchmarks.rows import ROOT, Row, complete, exceeds_flops, untimed
from fastattn.testing.timing import Plan

# Time limits of a stage, beyond which it counts as hung. Compiling a whole model takes longest;
# without one, the oracle or a kernel's compilation. Starting has its own limit.
STAGE_SECONDS = 240.0
SHORT_STAGE_SECONDS = 75.0
# A candidate that lost this many workers to crashes and hangs is skipped for the rest of its op.
_MAX_LOST_WORKERS = 2
_START_SECONDS = 240.0
# How often the ceilings of a dtype are measured again because a figure exceeds them.
_MOST_REPEATS = 3
_END_SECONDS = 30.0


@dataclass(frozen=True)
class Settings:
    """threads: torch's CPU threads, 0 = default. cold: inputs rotate beyond the L2 cache.

    variables: environment variables of the worker. turns: `Runner.run` yields no rows before each
    round of timings, so that rounds of several runners alternate.
    """

    device_type: str
    threads: int = 0
    cold: bool = True
    plan: Plan = field(default_factory=Plan)
    stage_seconds: float = STAGE_SECONDS
    short_stage_seconds: float = SHORT_STAGE_SECONDS
    variables: tuple[tuple[str, str], ...] = ()
    turns: bool = False
    peer_files: tuple[Path, ...] = ()


class _Ended(Exception):
    """The worker has ended: the reason, and what it was doing."""

    def __init__(self, why: str, candidate: str | None, stage: str):
        super().__init__(why)
        self.candidate, self.stage = candidate, stage


class Runner:
    """A worker and the state of its measurements. Use as a context manager."""

    def __init__(self, settings: Settings, log: Path | None = None, busy: float | None = None):
        self.settings, self.log, self.busy = settings, log, busy
        self.environment: dict[str, Any] = {}
        self.ceilings: dict[str, dict[str, float]] = {}
        self.repeats: dict[str, int] = {}
        self.process: subprocess.Popen[str] | None = None
        self.starts = 0
        self.lost_workers: dict[tuple[str, str], int] = {}

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def start(self) -> None:
        if self.process is not None:
            return
        environment = os.environ | {"PYTHONPATH": _with_root(os.environ.get("PYTHONPATH"))}
        environment |= dict(self.settings.variables)
        with open(self.log or os.devnull, "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(
            target=_read_lines, args=(self.process.stdout, self.lines), daemon=True
        ).start()
        self.starts += 1
        self._request("start", device=self.settings.device_type, threads=self.settings.threads)
        self.environment = self._next_event(None, "start", None)["environment"]
        self.environment["busy"] = self.busy

    def ceiling(self, dtype: str) -> dict[str, float] | None:
        """Measured once per dtype, before anything else in it; None if that failed."""
        if dtype not in self.ceilings:
            try:
                self.start()
                self._request("ceilings", dtype=dtype, plan=asdict(self.settings.plan))
                found = self._next_event(None, "start", None)
                self.ceilings[dtype] = {k: found[k] for k in ("flops_per_s", "bytes_per_s")}
            except _Ended as ended:
                self._stop()
                self.ceilings[dtype] = {}
                print(f"benchmarks: no ceilings for {dtype}: {ended}", file=sys.stderr)
        return self.ceilings[dtype] or None

    def raised_ceiling(self, dtype: str) -> dict[str, float] | None:
        """The larger rates of the ceilings so far and of another measurement: another process may
        have taken the time of the first one.
        """
        before = self.ceiling(dtype)
        if before is None or self.repeats.get(dtype, 0) >= _MOST_REPEATS:
            return before
        self.repeats[dtype] = self.repeats.get(dtype, 0) + 1
        del self.ceilings[dtype]
        again = self.ceiling(dtype) or before
        self.ceilings[dtype] = {name: max(rate, again[name]) for name, rate in before.items()}
        return self.ceilings[dtype]

    def run(self, group: Group, until: float | None = None) -> Iterator[list[Row]]:
        """Batches of finished rows. until: skip the rest at this time.monotonic().

        Rows above a ceiling come last, after it has been measured again.
        """
        above: list[list[Row]] = []
        ceiling = self.ceiling(group.dtype)
        out = [c for c in group.wanted if self._lost_workers(group, c[0]) >= _MAX_LOST_WORKERS]
        if out:
            why = f"ended {_MAX_LOST_WORKERS} workers before"
            lost = [_lost(group, *case, "skipped", why) for case in out]
            yield complete(lost, self.environment, ceiling)
        open_cases = [case for case in group.wanted if case not in out]
        while open_cases:
            try:
                self.start()
                for batch in self._measure(group, open_cases, until):
                    for row in batch:
                        open_cases.remove((row["impl"], row["direction"]))
                    finished = complete(batch, self.environment, ceiling)
                    if any(map(exceeds_flops, finished)):
                        above.append(batch)
                    else:
                        yield finished
                if open_cases:
                    raise RuntimeError(f"the worker returned no rows for {open_cases}")
            except _Ended as ended:
                self._stop()
                out_of_time = until is not None and time.monotonic() >= until
                failed = [
                    case for case in open_cases if out_of_time or ended.candidate in (None, case[0])
                ]
                if ended.candidate is not None and not out_of_time:
                    key = (ended.candidate, group.op)
                    self.lost_workers[key] = self._lost_workers(group, ended.candidate) + 1
                status = "skipped" if out_of_time else "FAIL"
                why = "the time budget ended" if out_of_time else f"{ended} in {ended.stage}"
                open_cases = [case for case in open_cases if case not in failed]
                rows = [_lost(group, *case, status, why) for case in failed]
                if rows:
                    yield complete(rows, self.environment, ceiling)
        if above and (until is None or time.monotonic() < until):
            ceiling = self.raised_ceiling(group.dtype)
        for batch in above:
            yield complete(batch, self.environment, ceiling)

    def _lost_workers(self, group: Group, implementation: str) -> int:
        return self.lost_workers.get((implementation, group.op), 0)

    def _measure(
        self, group: Group, wanted: Sequence[tuple[str, str]], until: float | None
    ) -> Iterator[list[Row]]:
        self._request(
            "group",
            op=group.op,
            workload=group.workload,
            dtype=group.dtype,
            wanted=list(wanted),
            plan=asdict(self.settings.plan),
            cold=self.settings.cold,
            turns=self.settings.turns,
            peer_files=[str(path.resolve()) for path in self.settings.peer_files],
        )
        candidate, stage, compiles = None, "start", False
        while (event := self._next_event(candidate, stage, until, compiles))["event"] != "done":
            if event["event"] == "stage":
                candidate, stage, compiles = event["impl"], event["stage"], event["compiles"]
            elif event["event"] == "turn":
                yield []
                self._request("continue")
            elif event["rows"]:
                yield event["rows"]

    def _request(self, do: str, **fields: Any) -> None:
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # the worker has ended: the next read raises the reason

    def _next_event(
        self, candidate: str | None, stage: str, until: float | None, compiles: bool = False
    ) -> dict[str, Any]:
        limit = _START_SECONDS if stage == "start" else self.settings.stage_seconds
        if stage != "start" and not compiles:
            limit = min(limit, self.settings.short_stage_seconds)
        if until is not None:
            limit = min(limit, max(0.0, until - time.monotonic()))
        try:
            line = self.lines.get(timeout=limit)
        except queue.Empty:
            raise _Ended(f"no event for {limit:.0f} s", candidate, stage) from None
        if line is None:
            assert self.process is not None
            code = self.process.wait()
            why = f"the process ended with {_exit_name(code)}{self._last_error()}"
            raise _Ended(why, candidate, stage)
        return json.loads(line)

    def _last_error(self) -> str:
        """The last line of the worker's log, if it is a Python error."""
        if self.log is None or not self.log.exists():
            return ""
        written = self.log.read_text(errors="replace").split("\n")
        last = next((x.strip() for x in reversed(written) if x.strip()), "")
        return f" ({last[:300]})" if last and "Error" in last else ""

    def _stop(self) -> None:
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # includes the compilers it started
        except ProcessLookupError:
            self.process.kill()  # it has not yet created its process group
        try:
            self.process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # blocked in the driver: abandoned
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
        self.process = None


def _read_lines(stream: Any, lines: "queue.Queue[str | None]") -> None:
    try:
        for line in stream:
            lines.put(line)
    except ValueError:
        pass  # the pipe was closed while reading
    lines.put(None)


def _with_root(path: str | None) -> str:
    return str(ROOT) if not path else f"{ROOT}{os.pathsep}{path}"


def _exit_name(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _lost(group: Group, implementation: str, direction: str, status: str, why: str) -> Row:
    case = (direction, group.workload, group.dtype)
    return untimed(group.op, implementation, status, why, case)
