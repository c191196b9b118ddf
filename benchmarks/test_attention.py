"""Attention, forward and backward, on the workloads of its specification."""

from collections.abc import Callable

from benchmarks.conftest import Case

OPS = ("attention",)


def test_attention(case: Case, measure: Callable[[Case], None]) -> None:
    measure(case)
