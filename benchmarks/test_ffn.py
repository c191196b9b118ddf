"""The feed-forward network, forward and backward, on the workloads of its specification."""

from collections.abc import Callable

from benchmarks.conftest import Case

OPS = ("ffn", "linear")


def test_ffn(case: Case, measure: Callable[[Case], None]) -> None:
    measure(case)
