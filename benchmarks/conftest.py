"""The same cases through pytest-benchmark, with the rounds of `fastattn.testing.timing`.

Candidates of a group are timed together: the first test of a group measures all its selected tests,
and each test replays its own rounds to pytest-benchmark. `extra_info` is the result row.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cases, rows
from benchmarks.cases import Group
from benchmarks.rows import Row
from benchmarks.runner import Runner, Settings
from fastattn.ops import _env
from fastattn.testing.timing import Plan


@dataclasses.dataclass(frozen=True)
class Case:
    group: Group
    implementation: str
    direction: str

    @property
    def name(self) -> str:
        g = self.group
        return cases.case_name(g.op, self.direction, g.workload, g.dtype, self.implementation)


class Replay:
    """A clock that replays measured durations: `step` advances it by the next one."""

    def __init__(self) -> None:
        self.now = 0.0
        self.durations: Iterator[float] = iter(())

    def time(self) -> float:
        return self.now

    def load(self, seconds: list[float]) -> None:
        self.durations = iter(seconds)

    def step(self) -> None:
        self.now += next(self.durations, 0.0)


REPLAY = Replay()


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("fastattn benchmarks").addoption
    add("--quick", action="store_true", help="a few workloads, fewer rounds")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    add("--all-implementations", action="store_true", help="every implementation on every workload")
    add("--peer", action="append", type=Path, default=[], help="another file of peers")
    add("--results", type=Path, help="also append the rows to this file (JSON lines)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    config = metafunc.config
    found = [
        Case(group, implementation, direction)
        for device_type in ("cuda", "cpu")
        for group in cases.groups(
            device_type,
            quick=config.getoption("quick"),
            every_implementation=config.getoption("all_implementations"),
            peer_files=config.getoption("peer"),
        )
        for implementation, direction in group.wanted
    ]
    metafunc.parametrize("case", found, ids=[case.name for case in found])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = _device_type(config)
    clock = pytest.mark.benchmark(timer=REPLAY.time, warmup=False)
    no_timeout = pytest.mark.timeout(0)  # the runner has its own limits
    for item in items:
        case = _case_of(item)
        if case is None:
            continue
        item.add_marker(clock)
        if config.pluginmanager.hasplugin("timeout"):
            item.add_marker(no_timeout)
        if case.group.device_type != device:
            item.add_marker(pytest.mark.skip(reason=f"a workload for {case.group.device_type}"))


def _device_type(config: pytest.Config) -> str:
    return str(config.getoption("device") or _env.default_device().type)


def _case_of(item: pytest.Item) -> Case | None:
    call: Any = getattr(item, "callspec", None)
    return None if call is None else call.params.get("case")


class Measurements:
    """Rows by case. A group is measured when its first case is requested."""

    def __init__(self, session: pytest.Session, runner: Runner):
        self.selected = [c for c in map(_case_of, session.items) if c is not None]
        self.results: Path | None = session.config.getoption("results")
        self.runner = runner
        self.rows: dict[Case, Row] = {}

    def row(self, case: Case) -> Row:
        if case not in self.rows:
            siblings = {
                (c.implementation, c.direction): c for c in self.selected if c.group == case.group
            }
            group = dataclasses.replace(case.group, wanted=tuple(siblings))
            for batch in self.runner.run(group):
                if self.results is not None:
                    self.results.parent.mkdir(parents=True, exist_ok=True)
                    rows.append(self.results, batch)
                for row in batch:
                    self.rows[siblings[row["impl"], row["direction"]]] = row
        return self.rows[case]


@pytest.fixture(scope="session")
def measurements(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Measurements]:
    config = request.config
    plan = Plan(rounds=11, budget_ms=600.0) if config.getoption("quick") else Plan()
    settings = Settings(_device_type(config), plan=plan, peer_files=tuple(config.getoption("peer")))
    with Runner(settings, tmp_path_factory.mktemp("benchmarks") / "worker.log") as runner:
        yield Measurements(request.session, runner)


@pytest.fixture
def measure(benchmark: Any, measurements: Measurements) -> Callable[[Case], None]:
    """Measures a case and replays its rounds; skips refused cases, fails wrong results."""

    def run(case: Case) -> None:
        row = measurements.row(case)
        benchmark.group = f"{case.group.name}-{case.direction}"
        benchmark.extra_info.update(row)
        if row["status"] == "FAIL":
            benchmark.skipped = True
            (pytest.fail if rows.is_fastattn(row) else pytest.skip)(row["message"])
        if row["status"] != "ok":
            benchmark.skipped = True
            pytest.skip(row["message"])
        seconds = [ms / 1e3 for ms in row["ms_rounds"]]
        REPLAY.load(seconds)
        benchmark.pedantic(REPLAY.step, rounds=len(seconds), iterations=1)

    return run
