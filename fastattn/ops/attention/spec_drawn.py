"""Samples of attention drawn at random, for `fastattn check --fuzz`.

Calls combine everything the op has. Half of them have scores of up to 1e10 for which fp32 has one
right result, whatever the order of sums: whole numbers times a power of two, which fp32 holds
exactly, and which differ by far more than its rounding errors or not at all; sums of terms that
cancel, and differ by far more than the rounding errors of the terms; or a finite "minus infinity"
added to all keys of a row.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from fastattn.ops.attention.spec_inputs import make_inputs
from fastattn.testing.spec import DRAWN, HALF_AND_SINGLE, Inputs, Sample

_GRADIENTS = ("q", "k", "v", "mask", "alibi_slopes", "sinks", "relative_bias")
# Sizes of scores from which gradients and results of `triton` and `sm90` are wrong.
_LARGE, _HUGE = 1e5, 3e7
_NUMBERS = (1e4, 1e5, 1e9, 1e10, 1e39)


class Call(NamedTuple):
    """A drawn call. options: of `make_inputs`."""

    number: int
    options: dict[str, Any]
    dtype: torch.dtype
    largest: float  # bound of the absolute values of scores and masks
    exact: bool

    def sample(self, make: Callable[..., Inputs], **options: Any) -> Sample:
        """The inputs that `make` returns for the options, which are its reason."""
        wrong = frozenset(("sm90", "triton") if self.largest >= _LARGE else ())
        return Sample(
            f"{DRAWN}{self.number}", str(options), partial(make, **options), _GRADIENTS,
            (self.dtype,), wrong_gradients=wrong,
            wrong_results=wrong if self.exact and self.largest >= _HUGE else frozenset(),
        )  # fmt: skip


def drawn(number: int) -> Sample:
    """The sample of this number, always the same."""
    call = draw(number)
    return call.sample(make_inputs, **call.options)


def draw(number: int) -> Call:
    r = random.Random(number)
    dtype = r.choice(HALF_AND_SINGLE)
    options = _shape(r) | _restrictions(r)
    M, N = options["M"], options["N"]
    if options["causal"] is True and M != N:
        options["causal"] = r.choice(("top_left", "bottom_right", "bottom_right_lengths"))
    if options["causal"] == "bottom_right_lengths" and options.get("key_lengths") == "per query":
        del options["key_lengths"]
    for name, size in (("key_lengths", N), ("query_lengths", M)):
        if options.get(name) == "drawn":
            options[name] = [r.randint(0, size) for _ in range(options["B"])]
    kind = r.random()
    exact = kind < 0.5
    if kind < 0.4:
        largest = _exact_scores(r, options, dtype)
    elif exact:
        largest = _cancelling_scores(r, options, dtype)
    else:
        largest = _any_scores(r, options)
    letters = r.choice(("BHMN", "BMN", "HMN", "MN", "BN", "N"))
    if r.random() < 0.5:
        kinds = ("bool", "rows", "none", "min_causal")
        others = ("float", "min", "inf", "min_rows") + (() if "sinks" in options else ("low",))
        options["mask"] = f"{r.choice(kinds if exact else kinds + others)} {letters}"
    elif r.random() < 0.6:
        size = r.choice([x for x in _NUMBERS if _has_one_result(x, options)])
        largest = max(largest, size)
        shift = "padding" if exact or r.random() < 0.5 else r.choice(("add-", "add"))
        letters = letters if shift != "padding" or "M" in letters else "MN"
        options["mask"] = f"{shift}{size:g} {letters}"
    return Call(number, options, dtype, largest, exact)


def _has_one_result(number: float, options: dict[str, Any]) -> bool:
    """Whether fp32 holds scores beside this number to 1e-2, or loses them completely."""
    unit = number * 2.0**-24
    if "whole" in options and "softcap" not in options:
        step = options["amplitude"] * options["key_amplitude"] * abs(options["scale"])
        return unit < step / 16 or 40 * options["D"] * step < unit
    small = options["amplitude"] <= 1.0 and not options.keys() & {"alibi", "scale", "whole"}
    return unit < 1e-2 or small


def _shape(r: random.Random) -> dict[str, Any]:
    H, K = r.choice(((1, 1), (2, 2), (2, 1), (4, 2)))
    M = r.choice((1, 1, 2, 3, 8, 17, 33, 65, 100))
    options = {
        "B": r.choice((1, 1, 2)), "H": H, "K": K, "M": M, "D": r.choice((8, 8, 16, 24, 33)),
        "N": M if r.random() < 0.3 else r.choice((1, 2, 3, 8, 17, 33, 64, 130, 200)),
        "layout": r.choice(("bhsd", "bhsd", "bshd", "packed", "shared")),
    }  # fmt: skip
    return options | ({"E": r.choice((8, 20, 40))} if r.random() < 0.3 else {})


def _restrictions(r: random.Random) -> dict[str, Any]:
    causal = (False, False, False, True, "top_left", "bottom_right", "bottom_right_lengths")
    options: dict[str, Any] = {"causal": r.choice(causal)}
    if r.random() < 0.25:
        options["key_lengths"] = r.choice(("drawn", "drawn", "per query"))
    if r.random() < 0.15:
        options["query_lengths"] = "drawn"
    if r.random() < 0.2:
        options["window"] = (r.choice((-1, 0, 5, 40)), r.choice((-1, 0, 5, 40)))
    if r.random() < 0.2:
        options["dropout_p"] = r.choice((0.1, 0.5))
    if r.random() < 0.2:
        options["softcap"] = r.choice((1.0, 5.0, 50.0))
    return options


def _exact_scores(r: random.Random, options: dict[str, Any], dtype: torch.dtype) -> float:
    """Adds q and k whose scores are whole numbers times a power of two; returns their bound."""
    bits = r.randint(0, 20 if dtype == torch.float16 else 28)
    half = bits // 2
    options |= {"whole": True, "amplitude": 2.0**half, "key_amplitude": 2.0**half}
    options["scale"] = r.choice((1.0, 1.0, -1.0)) * 2.0 ** (bits % 2)
    largest = 2.0**bits * 10 * options["D"]
    if r.random() < 0.2:  # a sink that is lower or higher by so much that one weight is 0
        high = min(largest / 7.3, torch.finfo(dtype).max / 2)
        options["sinks"] = r.choice((0.0, high)) if high > 1e4 else 0.0
    return largest


def _cancelling_scores(r: random.Random, options: dict[str, Any], dtype: torch.dtype) -> float:
    """Adds q and k whose products cancel; returns a bound of the scores."""
    amplitude = 2.0 ** r.randint(4, 6 if dtype == torch.float16 else 14)
    options |= {"cancelling": True, "amplitude": amplitude, "key_amplitude": amplitude}
    options.pop("softcap", None)
    return amplitude**2 * options["N"]


def _any_scores(r: random.Random, options: dict[str, Any]) -> float:
    options["amplitude"] = amplitude = r.choice((0.0, 1.0, 1.0, 4.0, 100.0))
    if r.random() < 0.2:
        options["scale"] = r.choice((0.0, 1.0, -0.5))
    if r.random() < 0.2:
        options["alibi"] = r.choice(("H", "BH"))
    if r.random() < 0.2 and amplitude < 100.0:  # above some scores by less than 80
        options["sinks"] = r.choice((-30.0, 0.0, 5.0))
    if r.random() < 0.2:
        kinds = (("t5", 16, 40), ("t5_causal", 16, 40), ("clipped", 9, 1))
        options["relative"] = r.choice(kinds)
    return amplitude
