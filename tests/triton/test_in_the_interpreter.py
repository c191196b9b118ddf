"""The tests of Triton kernels' values, in Triton's interpreter: a process of its own."""

from pathlib import Path

import pytest
from subprocesses import passed_with
from triton_values import NATIVE

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(NATIVE, reason="the GPU runs them"),
]
# With the numbers of tests that pass at least, in the quick and in the slow run.
FILES = {
    "attention": (75, 220), "attention_paged": (1, 0), "attention_tiles": (20, 0), "ffn": (80, 25),
    "norms": (40, 1),
}  # fmt: skip


def _passed(which: str, *names: str) -> int:
    files = (str(Path(__file__).with_name(f"test_triton_{name}.py")) for name in names)
    return passed_with("-m", which, *files, TRITON_INTERPRET="1")


def test_quick_tests() -> None:
    assert _passed("not slow", *FILES) >= sum(quick for quick, _ in FILES.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, slow) in FILES.items() if slow])
def test_slow_tests(name: str) -> None:
    assert _passed("slow", name) >= FILES[name][1]
