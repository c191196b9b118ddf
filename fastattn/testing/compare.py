"""The error budget: how far a result may be from the fp64 reference.

Non-finite values must be where the fp64 reference has them after a cast to the result's dtype. Then
in each slice (a batch and head of attention, a row of a norm):

    |kernel - ref64| <= 2 max|ref(same dtype) - ref64| + 2 eps(dtype) max|ref64|
                        + 8 eps(fp32) max(mag) + half the smallest number of the dtype

The last term is the rounding error of subnormal numbers. `mag` is the result's formula applied to
absolute values: without it, correct kernels would fail on queries with a single key and on constant
rows. Maxima are per slice, because a large slice could otherwise hide a wrong one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_FP32_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Comparison:
    """The worst slice of one result. `error` and `allowed` are absolute; a `ratio` <= 1 passes."""

    ok: bool
    error: float
    allowed: float
    reference_error: float
    message: str

    @property
    def ratio(self) -> float:
        return self.error / self.allowed if self.allowed else float(self.error > 0)


def compare(
    actual: Tensor, ref64: Tensor, same: Tensor, mag: Tensor, slice_dims: int, rounding: float = 0.0
) -> Comparison:
    """Compares a result with the fp64 reference.

    actual: the result. ref64: the reference in fp64. same: the reference in the data's dtype. mag:
    in fp64, with ref64's shape.
    slice_dims: the number of leading dimensions that index slices; 0 if the tensor is one slice.
    rounding: this times mag is allowed, too, but at most a quarter of the slice's largest element
    if zeros would not pass without it: neither they nor 1.5 times the result pass by it.
    """
    if actual.shape != ref64.shape:
        return _failure(f"shape {list(actual.shape)}, expected {list(ref64.shape)}")
    if actual.numel() == 0:
        return Comparison(True, 0.0, 0.0, 0.0, "empty")
    got, expected = actual.detach().double().cpu(), ref64.detach().cpu()
    near, mag = same.detach().double().cpu(), mag.detach().cpu()
    rounded = expected.to(actual.dtype).double()
    if (message := _non_finite_mismatch(got, rounded)) is not None:
        return _failure(message)

    slices = (*expected.shape[:slice_dims], -1)
    finite = rounded.isfinite()

    def error_of(x: Tensor) -> Tensor:
        difference = torch.where(finite & x.isfinite(), (x - expected).abs(), 0)
        return difference.reshape(slices).amax(-1)

    error, reference_error = error_of(got), error_of(near)
    largest = torch.where(finite, expected.abs(), 0).reshape(slices).amax(-1)
    magnitude = torch.where(mag.isfinite(), mag, 0).expand_as(expected).reshape(slices).amax(-1)
    dtype = torch.finfo(actual.dtype)
    allowed = (
        2 * reference_error
        + 2 * dtype.eps * largest
        + 8 * _FP32_EPS * magnitude
        + dtype.smallest_normal * dtype.eps / 2
    )
    extra = rounding * magnitude
    allowed += torch.where(largest > allowed, extra.clamp(max=largest / 4), extra)
    excess = (error / allowed.clamp_min(torch.finfo(torch.float64).tiny)).flatten()
    worst = int(excess.argmax())
    ok = bool((error <= allowed).all())
    at = (
        [int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape)]
        if slice_dims
        else []
    )
    message = "" if ok else f"slice {at}: error {error.flatten()[worst]:.3g}"
    return Comparison(
        ok,
        float(error.flatten()[worst]),
        float(allowed.flatten()[worst]),
        float(reference_error.flatten()[worst]),
        message,
    )


def _non_finite_mismatch(got: Tensor, rounded: Tensor) -> str | None:
    same_kind = (got.isnan() == rounded.isnan()) & (
        torch.where(got.isinf(), got, 0) == torch.where(rounded.isinf(), rounded, 0)
    )
    if bool(same_kind.all()):
        return None
    where = (~same_kind).nonzero()
    first = where[0].tolist()
    return (
        f"{len(where)} non-finite positions differ, first {first}: "
        f"{got[tuple(first)]}, expected {rounded[tuple(first)]}"
    )


def _failure(message: str) -> Comparison:
    return Comparison(False, float("inf"), 0.0, 0.0, message)
