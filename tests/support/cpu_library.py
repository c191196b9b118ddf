"""The native library cpu: whether this install has it, and tests under each instruction set."""

from collections.abc import Iterator

import pytest

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
