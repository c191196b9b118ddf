"""Values at positions that no query attends, and at those that one does, on the CPU: the former
change no bit (samples have this property, see fastattn/testing/properties.py), the latter affect
these queries only.
"""

from functools import partial
from typing import Any

import pytest
import torch
from cpu_library import every_isa, needs_library
from torch import Tensor

import fastattn

pytestmark = needs_library
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [138, 141, 143])
@pytest.mark.parametrize("M", [1, 3])
def test_keys_just_before_the_window_may_hold_anything(isa, M, dtype, first):
    """They may be in the group of keys that the kernel reads together with the first one."""
    N, page = 208, 16
    q = torch.randn(2, 4, M, 64).to(dtype)
    k, v = (torch.randn(2, 2, N, 64).to(dtype) for _ in range(2))
    attend = partial(
        fastattn.attention, q, causal="bottom_right", window=(N - M - first, 0), softcap=5.0
    )
    expected = attend(k, v)
    k[:, :, :first], v[:, :, :first] = torch.nan, torch.inf
    assert torch.equal(attend(k, v), expected)
    table = torch.arange(2 * N // page, dtype=torch.int32).view(2, -1)
    pages = [x.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1) for x in (k, v)]
    assert torch.equal(attend(*pages, block_table=table), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_live_values_propagates(dtype: torch.dtype) -> None:
    """NaN affects the queries that may attend it, and no query whose tiles do not contain it."""
    q, k, v = (_randn(1, 1, 400, 16, dtype=dtype, seed=s) for s in range(3))
    v[..., 10, :] = float("nan")
    out = fastattn.attention(q, k, v, window=(3, 3), backend="cpu")
    assert out[..., 7:14, :].isnan().all()
    assert out[..., 300:, :].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M, window", [(5, None), (1, None), (1, (20, -1))])
def test_nan_in_a_query_propagates(dtype, M, window):
    """Its out, lse and gradients are NaN, also with several tiles and splits."""
    q, k, v = (_randn(1, 1, n, 16, dtype=dtype, seed=n) for n in (M, 1100, 1100))
    q[..., -1, :] = float("nan")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    options: dict[str, Any] = {"causal": "bottom_right" if window else False, "window": window}
    out, lse = fastattn.attention(*inputs, **options, return_lse=True, backend="cpu")
    assert out[..., -1, :].isnan().all() and lse[..., -1].isnan().all()
    assert out[..., :-1, :].isfinite().all() and lse[..., :-1].isfinite().all()
    dq, dk, dv = torch.autograd.grad(out.sum(), inputs)
    assert dq[..., -1, :].isnan().all() and dq[..., :-1, :].isfinite().all()
    first = 1100 - 21 if window else 0
    assert dk[..., first:, :].isnan().all() and dv[..., first:, :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("through", ["mask", "lengths"])
def test_a_value_that_one_query_attends_is_live(dtype: torch.dtype, through: str) -> None:
    """Here by the last query of the last head of a group only."""
    q = _randn(1, 4, 20, 16, dtype=dtype, seed=1)
    k, v = (_randn(1, 2, 30, 16, dtype=dtype, seed=s) for s in (2, 3))
    v[0, 0, 25] = float("nan")
    restrictions: dict[str, Tensor] = {}
    if through == "mask":
        restrictions["mask"] = torch.ones(1, 4, 20, 30, dtype=torch.bool)
        restrictions["mask"][..., 25] = False
        restrictions["mask"][0, 1, 19, 25] = True
    else:
        restrictions["key_lengths"] = torch.tensor([[25] * 19 + [26]])
    out = fastattn.attention(q, k, v, **restrictions, backend="cpu")
    assert out[0, 1, 19].isnan().all()
    assert out[0, 2:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_attended_by_one_head_affects_only_this_head(dtype: torch.dtype) -> None:
    """A mask may allow a value for one head of a group and block it for another."""
    q = _randn(1, 2, 1, 16, dtype=dtype, seed=1)
    k, v = (_randn(1, 1, 128, 16, dtype=dtype, seed=s) for s in (2, 3))
    v[..., 25, :] = float("nan")
    mask = torch.ones(1, 2, 1, 128, dtype=torch.bool)
    mask[0, 1, 0, 25] = False
    out = fastattn.attention(q, k, v, mask=mask, backend="cpu")
    assert out[0, 0].isnan().all() and out[0, 1].isfinite().all()
