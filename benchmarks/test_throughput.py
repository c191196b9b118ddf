"""Every op and model on the workloads of its specification; `-k layer_norm` selects one."""

from collections.abc import Callable

from benchmarks.conftest import Case


def test_throughput(case: Case, measure: Callable[[Case], None]) -> None:
    measure(case)
