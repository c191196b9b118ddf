"""Samples, errors and workloads of attention_with_weights: those of attention, with weights."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastattn import functional
from fastattn.ops.attention import spec
from fastattn.ops.attention.spec_drawn import drawn
from fastattn.ops.attention.spec_inputs import dead_positions, entries
from fastattn.ops.attention.spec_workloads import WEIGHTS_WORKLOADS
from fastattn.testing.spec import Entry, ErrorSample, Inputs, OpSpec, Sample

_ATTENTION = {sample.name: sample for sample in spec.SAMPLES}
# The samples of attention, by whether the weights are averaged over the heads.
_AVERAGED = (
    *("plain", "gqa", "gqa_bias", "bool_mask_rows", "bias_dead_window", "one_query_everything"),
    *("few_queries_scores", "d128_mask_dropout", "all_restrictions", "all_scores", "sinks_no_keys"),
    *("no_queries", "no_batch", "one_query", "scale_negative", "window_but_one", "exact_1e9"),
)
_BY_HEAD = (
    *("one_by_one", "odd_sizes", "bshd", "gqa_lengths", "bottom_right_tall", "bias", "dropout"),
    *("own_diagonals_gqa_window", "key_lengths_rows", "key_lengths_zero", "one_query_long"),
    *("few_queries_everything", "d192_e128", "e_larger", "no_keys", "no_heads", "extreme_logits"),
    *("all_scores_own_diagonals", "s257", "columns", "shared", "add_1e9"),
)


def _make(
    attention: Sample, average: bool, generator: torch.Generator, dtype: torch.dtype
) -> Inputs:
    inputs = attention.make(generator, dtype) | {"average": average}
    del inputs["return_lse"]
    return inputs


def _sample(name: str, average: bool) -> Sample:
    attention = _ATTENTION[name]
    return replace(attention, make=partial(_make, attention, average))


SAMPLES = tuple(
    _sample(name, average)
    for average, names in ((True, _AVERAGED), (False, _BY_HEAD))
    for name in names
)


def _drawn(number: int) -> Sample:
    attention = drawn(number)
    return replace(attention, make=partial(_make, attention, number % 2 == 0))


def _mean(weights: Tensor, inputs: Inputs) -> Tensor:
    return weights.mean(1) if inputs["average"] else weights


def _torch_form(inputs: Inputs) -> tuple[Tensor, ...]:
    out, _, weights = spec.torch_results(inputs)
    return out, _mean(weights, inputs)


def _magnitudes(inputs: Inputs, douts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    dout, dweights = douts
    if inputs["average"]:
        dweights = dweights[:, None] / dout.shape[1]
    mags = spec.magnitudes(inputs, (dout, torch.zeros_like(dout[..., 0])), dweights)
    return mags | {"weights": _mean(mags["weights"], inputs)}


def _entries(inputs: Inputs) -> tuple[Entry, ...]:
    return tuple(
        replace(entry, where={**entry.where, "weights": entry.where["out"]})
        for entry in entries(inputs)
    )


def _dead_positions(inputs: Inputs) -> dict[str, Tensor]:
    positions = dead_positions(inputs)
    rows = positions["out"]
    return positions | {"weights": rows.all(1) if inputs["average"] else rows}


def _error(name: str, error: type[Exception], message: str, **changes: Any) -> ErrorSample:
    def make() -> Inputs:
        return {name: torch.zeros(2, 4, 6, 8) for name in "qkv"} | changes

    return ErrorSample(name, make, error, message)


ERRORS = (
    _error("integers", TypeError, "q must be fp16", q=torch.zeros(2, 4, 6, 8).int()),
    _error("heads", ValueError, "q must have a multiple", k=torch.zeros(2, 3, 6, 8),
           v=torch.zeros(2, 3, 6, 8)),
    _error("mask_shape", ValueError, "mask must be broadcastable", mask=torch.ones(5, 6).bool()),
    _error("causal_word", ValueError, "causal must be", causal="lower"),
    _error("average", TypeError, "average must be a bool, got str", average="mean"),
    _error("dropout_p", ValueError, "dropout_p must be between", dropout_p=-0.1),
    _error("backend", ValueError, "backend must be one of", backend="triton"),
)  # fmt: skip

SPECS = (
    OpSpec(
        "attention_with_weights",
        functional.attention_with_weights,
        ("out", "weights"),
        SAMPLES,
        ERRORS,
        WEIGHTS_WORKLOADS,
        _torch_form,
        _magnitudes,
        spec.slice_dims,
        spec.widen_inputs,
        _entries,
        dead=_dead_positions,
        drawn=_drawn,
    ),
)
