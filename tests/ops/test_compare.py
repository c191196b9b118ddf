"""The error budget accepts correct results and rejects wrong ones."""

import pytest
import torch
from torch import Tensor

from fastattn.testing import Comparison, compare

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16, torch.float16)}
DTYPES = pytest.mark.parametrize("dtype", list(EPS), ids=lambda d: str(d).removeprefix("torch."))


def _smallest(dtype: torch.dtype) -> float:
    """The smallest positive number, which is also the spacing of subnormal numbers."""
    return torch.finfo(dtype).smallest_normal * EPS[dtype]


def _exact(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _judge(
    actual: Tensor, exact: Tensor, slice_dims: int = 2, *, same: Tensor | None = None,
    mag: Tensor | None = None,
) -> Comparison:  # fmt: skip
    """Compares with a same-dtype reference that is the rounded exact result."""
    same = exact.to(actual.dtype) if same is None else same
    return compare(actual, exact, same, torch.zeros_like(exact) if mag is None else mag, slice_dims)


# -- what passes ----------------------------------------------------------------------------------
@DTYPES
def test_correct_rounding_passes(dtype: torch.dtype) -> None:
    exact = _exact(2, 3, 16, 8) * 10.0 ** torch.arange(3).view(3, 1, 1)
    comparison = _judge(exact.to(dtype), exact)
    assert comparison.ok and 0 < comparison.ratio <= 0.5
    assert comparison.message == ""


@DTYPES
def test_zeros_are_exact(dtype: torch.dtype) -> None:
    zeros = torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    comparison = _judge(zeros.to(dtype), zeros)
    assert comparison.ok and comparison.error == 0 and comparison.ratio == 0
    assert not _judge((zeros + _smallest(dtype)).to(dtype), zeros).ok


@DTYPES
@pytest.mark.parametrize("steps", [0.5, 1.5, 3.25, 3.5, -2.5])
def test_rounding_below_the_normal_numbers(dtype: torch.dtype, steps: float) -> None:
    """The error is up to half the spacing of subnormal numbers, even if the reference is exact."""
    exact = torch.full((1, 1, 1, 1), steps * _smallest(dtype), dtype=torch.float64)
    rounded = exact.to(dtype)
    assert _judge(rounded, exact, same=exact).ok
    for sign in (1, -1):
        off = (rounded.double() + sign * 2 * _smallest(dtype)).to(dtype)
        assert (off.double() - rounded).abs() == 2 * _smallest(dtype)
        assert not _judge(off, exact, same=exact).ok


@pytest.mark.parametrize("shape, slice_dims", [((0, 2, 3, 4), 2), ((2, 2, 0, 4), 2), ((0,), 0)])
def test_empty(shape: tuple[int, ...], slice_dims: int) -> None:
    exact = torch.zeros(shape, dtype=torch.float64)
    assert _judge(exact.float(), exact, slice_dims).ok


def test_zero_dimensions() -> None:
    exact = torch.tensor(2.0, dtype=torch.float64)
    assert _judge(torch.tensor(2.0), exact, 0).ok
    assert not _judge(torch.tensor(2.1), exact, 0).ok


def test_matching_non_finite_values_pass() -> None:
    exact = _exact(1, 2, 4, 4)
    exact[0, 0, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    comparison = _judge(exact.float(), exact)
    assert comparison.ok and comparison.error < 1e-6


def test_overflow_of_the_dtype_is_expected() -> None:
    exact = torch.tensor([[1.0, 1e6]], dtype=torch.float64)
    assert _judge(torch.tensor([[1.0, torch.inf]], dtype=torch.float16), exact, 1).ok
    assert not _judge(torch.tensor([[1.0, 65504.0]], dtype=torch.float16), exact, 1).ok


# -- how much is allowed --------------------------------------------------------------------------
@DTYPES
@pytest.mark.parametrize("term", ["eps", "reference", "magnitude"])
def test_bound_of_every_term(dtype: torch.dtype, term: str) -> None:
    """Errors just below and above each term: 2 eps max|ref|, 2 max|same - ref|, 8 eps32 mag."""
    exact = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    same, mag = exact, torch.zeros_like(exact)
    allowed = 2 * EPS[dtype]
    if term == "reference":
        same = exact.clone()
        same[0, 0, 1, 1] += 64 * EPS[dtype]
        allowed += 128 * EPS[dtype]
    elif term == "magnitude":
        mag = mag.clone()
        mag[0, 0, 0, 1] = 4 * EPS[dtype] / EPS[torch.float32]
        allowed += 32 * EPS[dtype]
    step = EPS[dtype] / 2  # of dtype, below 1
    inside, outside = exact.clone(), exact.clone()
    inside[0, 0, 0, 0] -= allowed
    outside[0, 0, 0, 0] -= allowed + step * 16
    results = [_judge(x.to(dtype), exact, same=same, mag=mag) for x in (inside, outside)]
    assert [x.ok for x in results] == [True, False]
    assert results[0].allowed == pytest.approx(allowed, abs=_smallest(dtype))
    assert results[0].error == pytest.approx(allowed)
    assert results[0].ratio == pytest.approx(1.0, rel=1e-4) and results[1].ratio > 1


def test_non_finite_reference_error_counts_as_zero() -> None:
    exact = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    same = torch.tensor([[[[torch.inf, torch.nan]]]])
    assert _judge(torch.ones(1, 1, 1, 2), exact, same=same).ok
    comparison = _judge(torch.full((1, 1, 1, 2), 1.001), exact, same=same)
    assert not comparison.ok and comparison.reference_error == 0


def test_non_finite_magnitude_allows_nothing() -> None:
    exact = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    mag = torch.full_like(exact, torch.nan)
    assert not _judge(torch.full((1, 1, 1, 2), 1.001), exact, mag=mag).ok


# -- what fails -----------------------------------------------------------------------------------
@DTYPES
def test_wrong_slice_beside_a_large_one(dtype: torch.dtype) -> None:
    exact = _exact(2, 2, 16, 8)
    exact[0, 0] *= 1e4
    actual = exact.to(dtype)
    actual[1, 1] += 0.1
    comparison = _judge(actual, exact)
    assert not comparison.ok and "[1, 1]" in comparison.message
    assert comparison.error == pytest.approx(0.1, rel=0.2)
    if dtype != torch.float32:
        assert _judge(actual, exact, slice_dims=0).ok, "a slice per head is what finds it"


def test_wrong_row_of_a_norm() -> None:
    exact = _exact(5, 64)
    exact[0] *= 1e6
    actual = exact.float()
    actual[3, 17] += 1e-3
    comparison = _judge(actual, exact, slice_dims=1)
    assert not comparison.ok and "[3]" in comparison.message


def test_a_slice_of_zeros_must_be_zeros() -> None:
    exact = _exact(1, 2, 4, 4)
    exact[0, 1] = 0
    actual = exact.float()
    actual[0, 1, 2, 2] = 1e-30
    assert not _judge(actual, exact).ok


@pytest.mark.parametrize("expected, got", [
    (1.0, torch.nan), (1.0, torch.inf), (torch.nan, 1.0), (torch.nan, torch.inf),
    (torch.inf, -torch.inf), (-torch.inf, torch.inf), (-torch.inf, -3.4e38),
    (torch.inf, torch.nan),
])  # fmt: skip
def test_non_finite_mismatch(expected: float, got: float) -> None:
    exact = _exact(1, 2, 4, 4)
    exact[0, 1, 2, 3] = expected
    actual = exact.float()
    actual[0, 1, 2, 3] = got
    comparison = _judge(actual, exact, mag=torch.full_like(exact, 1e30))
    assert not comparison.ok
    assert "1 non-finite positions differ, first [0, 1, 2, 3]" in comparison.message


def test_other_shape() -> None:
    exact = _exact(2, 3)
    assert not _judge(exact.float().t(), exact, 1, same=exact).ok
    assert not _judge(exact.float()[:0], exact, 1, same=exact).ok
