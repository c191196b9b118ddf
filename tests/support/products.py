"""Sets whether PyTorch's matrix products are faster, which determines linear's backend."""

from collections.abc import Callable, Iterator

import pytest
import torch

from fastattn.ops import _env, _native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SetFaster = Callable[..., None]


@pytest.fixture
def torch_is_faster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetFaster]:
    """torch_is_faster(*dtypes): in these dtypes only; initially in none."""
    usual = _env.slower_products

    def tell_the_library() -> None:
        if _native.unavailable("cpu") is None:
            flags = [_env.slower_products(dtype) is not None for dtype in DTYPES]
            torch.ops.fastattn_cpu.set_torch_is_faster(flags)

    def set_faster(*dtypes: torch.dtype) -> None:
        why = "is slower in this test"
        monkeypatch.setattr(_env, "slower_products", lambda dtype: why if dtype in dtypes else None)
        tell_the_library()

    set_faster()
    yield set_faster
    monkeypatch.setattr(_env, "slower_products", usual)
    tell_the_library()
