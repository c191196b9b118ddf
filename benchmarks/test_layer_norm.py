"""The norms, forward and backward, on the workloads of their specifications."""

from collections.abc import Callable

from benchmarks.conftest import Case

OPS = ("layer_norm", "add_layer_norm", "rms_norm")


def test_layer_norm(case: Case, measure: Callable[[Case], None]) -> None:
    measure(case)
