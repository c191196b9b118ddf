"""Properties of correct results, judged in bits and not in errors.

rerun: a second run gives the same bits. batch: an entry of the batch computed alone gives what it
gives among its neighbours. padding: what dead positions hold (finite, NaN, inf; in inputs, masks
and gradients of results) changes nothing, and their gradients are exactly 0.

A property takes a `Case` and returns what is wrong, result -> message, or None where the sample
says nothing about it: no batch, nothing dead.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn.testing.compare import Comparison
from fastattn.testing.spec import Index, Inputs, OpSpec, Sample

Results = dict[str, Tensor]
Faults = dict[str, str]
_FILLS = {"finite": -3.5, "NaN": float("nan"), "inf": float("inf")}


@dataclass(frozen=True)
class Case:
    """A sample that one backend has run.

    results: what it gave, outputs and gradients by name. douts: the gradients of its outputs.
    make: fresh inputs. run: (inputs, gradients of the outputs) -> results.
    judge: (result's name, value, where it lies in the whole result) -> its error and allowance.
    """

    spec: OpSpec
    sample: Sample
    backend: str
    results: Results
    douts: tuple[Tensor, ...]
    make: Callable[[], Inputs]
    run: Callable[[Inputs, tuple[Tensor, ...]], Results]
    judge: Callable[[str, Tensor, Index], Comparison]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal values, NaN equal to NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return a.shape == b.shape and bool(same.all())


def rerun(case: Case) -> Faults | None:
    again = case.run(case.make(), case.douts)
    return {
        name: "a second run gave other bits"
        for name, value in case.results.items()
        if not same_bits(value, again[name])
    }


def batch(case: Case) -> Faults | None:
    """In bits where the op promises it. `torch` and the reference do not: torch's matrix products
    and reductions choose their blocking by the whole shape, so there the error budget decides.
    """
    if case.spec.entries is None:
        return None
    entries = case.spec.entries(case.make())
    promised = case.spec.entries_in_bits and case.backend not in ("torch", "reference")
    faults: Faults = {}
    for entry in entries:
        douts = tuple(
            dout[entry.where[name]]
            for name, dout in zip(case.spec.results, case.douts, strict=True)
        )
        alone = case.run(_leaves(entry.inputs, case.sample), douts)
        for name, where in entry.where.items():
            if name not in alone:
                continue
            if promised and not same_bits(alone[name], case.results[name][where]):
                faults[name] = f"{entry.name} computed alone gave other bits"
            elif not promised and not (found := case.judge(name, alone[name], where)).ok:
                faults[name] = f"{entry.name} computed alone: {found.message}"
    return faults if entries else None


def _leaves(inputs: Inputs, sample: Sample) -> Inputs:
    """Parts of inputs as inputs of their own: gradients end at them."""
    leaves = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            value = value.detach()
            value.requires_grad_(value.is_floating_point() and name in sample.gradients)
        leaves[name] = value
    return leaves


def padding(case: Case) -> Faults | None:
    if case.spec.dead is None:
        return None
    dead = case.spec.dead(case.make())
    if not any(bool(positions.any()) for positions in dead.values()):
        return None
    faults: Faults = {}
    for fill, value in _FILLS.items():
        inputs = case.make()
        for name, positions in dead.items():
            if name in inputs:
                fill_positions(inputs[name], positions, value)
        douts = tuple(
            torch.where(dead[name], value, dout) if name in dead else dout
            for name, dout in zip(case.spec.results, case.douts, strict=True)
        )
        results = case.run(inputs, douts)
        for name, result in results.items():
            nothing = dead.get(name.removeprefix("d")) if name.startswith("d") else None
            if nothing is not None and bool((result.masked_select(nothing) != 0).any()):
                faults.setdefault(name, f"not 0 at dead positions, with {fill} there")
            elif not same_bits(result, case.results[name]):
                faults.setdefault(name, f"{fill} at dead positions changes it")
    return faults


def fill_positions(x: Tensor, positions: Tensor, value: float) -> None:
    """Writes `value` where `positions` (broadcastable to x) are True. Of a dimension that x
    repeats (stride 0), positions count where all agree.
    """
    positions = positions.expand_as(x)
    x = x.detach()
    for dim in range(x.dim()):
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            x, positions = x.narrow(dim, 0, 1), positions.all(dim, keepdim=True)
    x.masked_fill_(positions, value)


PROPERTIES = {"rerun": rerun, "batch": batch, "padding": padding}
