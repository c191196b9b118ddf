"""A training step of the whole Transformer, padded and unpadded, with peak memory on a GPU."""

from collections.abc import Callable

from benchmarks.conftest import Case

OPS = ("transformer",)


def test_transformer(case: Case, measure: Callable[[Case], None]) -> None:
    measure(case)
