"""The native library cpu: whether this install has it, and tests under each instruction set."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from fastattn.ops import _native

NO_LIBRARY = _native.unavailable("cpu")
needs_library = pytest.mark.skipif(NO_LIBRARY is not None, reason=f"fastattn {NO_LIBRARY}")
# Supported by this processor; the last is the fastest, and used by default.
ISAS = () if NO_LIBRARY else _native.usable_cpu_isas()
every_isa = pytest.mark.parametrize("isa", ISAS, indirect=True)
slower_isas = pytest.mark.parametrize("isa", ISAS[:-1], indirect=True)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set that the CPU kernels use during the test."""
    _native.use_cpu_isa(request.param)
    yield request.param
    _native.use_cpu_isa(ISAS[-1])


def assert_threads_change_no_bit(compute: Callable[[], Sequence[Tensor]]) -> None:
    """`compute` returns the same bits with 1, 2, 3 and 7 threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = compute()
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            for actual, one_thread in zip(compute(), expected, strict=True):
                assert torch.equal(actual, one_thread), threads
    finally:
        torch.set_num_threads(before)
