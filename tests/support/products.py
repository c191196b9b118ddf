"""Tests of matrix products on the CPU: whether PyTorch's are faster, which determines linear's
backend, and whether rows have the same bits in every batch.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fastattn.ops import _env, _native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SetFaster = Callable[..., None]


@pytest.fixture
def torch_is_faster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetFaster]:
    """torch_is_faster(*dtypes, rows=0): in these dtypes with more rows; initially in none."""
    usual = _env.product_limit

    def tell_the_library() -> None:
        if _native.unavailable("cpu") is None:
            limits = [_env.product_limit(dtype)[0] for dtype in DTYPES]
            torch.ops.fastattn_cpu.set_product_limits(limits)

    def set_faster(*dtypes: torch.dtype, rows: int = 0) -> None:
        why = "is slower in this test"
        limits = {dtype: (rows, why) for dtype in dtypes}
        monkeypatch.setattr(_env, "product_limit", lambda dtype: limits.get(dtype, (2**62, "")))
        tell_the_library()

    set_faster()
    yield set_faster
    monkeypatch.setattr(_env, "product_limit", usual)
    tell_the_library()


def different_rows(compute: Callable[[Tensor], Tensor], x: Tensor) -> list[int]:
    """For which numbers of rows a call with these rows of x differs from one with all, 240."""
    together = compute(x)
    counts = (1, 2, 3, 5, 8, 30, 60, 97, 200)
    alone = (compute(x[3 : 3 + n]) for n in counts)
    return [n for n, y in zip(counts, alone, strict=True) if not y.equal(together[3 : 3 + n])]
