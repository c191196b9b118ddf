"""Attention, padded and packed, forward and backward, on the workloads of its specifications."""

from collections.abc import Callable

from benchmarks.conftest import Case

OPS = ("attention", "attention_varlen", "attention_with_weights")


def test_attention(case: Case, measure: Callable[[Case], None]) -> None:
    measure(case)
