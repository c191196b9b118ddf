"""Decoding of a fixed number of tokens, greedy and beam search, next to other libraries."""

from collections.abc import Callable

from benchmarks.conftest import Case

OPS = ("generation",)


def test_generation(case: Case, measure: Callable[[Case], None]) -> None:
    measure(case)
