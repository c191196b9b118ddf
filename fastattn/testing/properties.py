"""Properties of correct results, compared bit for bit.

rerun: a second run gives the same bits. batch: a part of the batch computed alone has the same
results as in the whole batch. padding: the values at dead positions (finite, NaN or inf; in inputs,
masks and output gradients) do not affect the results, and their gradients are exactly 0.

A property takes a `Case` and returns its faults (result -> message), or None if it does not apply
to the sample, which has no batch or no dead positions.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn.testing.compare import Comparison
from fastattn.testing.spec import Index, Inputs, OpSpec, Sample

Results = dict[str, Tensor]
Faults = dict[str, str]
# Backends with the same bits in every run only under torch.use_deterministic_algorithms: sm90 adds
# to attention's dq in any order otherwise.
DETERMINISTIC_ON_REQUEST = ("sm90",)
_FILLS = {"finite": -3.5, "NaN": float("nan"), "inf": float("inf")}


@dataclass(frozen=True)
class Case:
    """A sample that one backend has run.

    results: its outputs and gradients by name. douts: the output gradients.
    make: returns new inputs. run: (inputs, output gradients) -> results.
    judge: (a result's name, value, its slice of the whole result) -> comparison with the reference.
    """

    spec: OpSpec
    sample: Sample
    backend: str
    results: Results
    douts: tuple[Tensor, ...]
    make: Callable[[], Inputs]
    run: Callable[[Inputs, tuple[Tensor, ...]], Results]
    judge: Callable[[str, Tensor, Index], Comparison]


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool = True) -> Iterator[None]:
    """As torch.use_deterministic_algorithms; ops that have no such algorithm warn."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(enabled, warn_only=True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shapes and values are equal; NaN equals NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return a.shape == b.shape and bool(same.all())


def _differs(case: Case, name: str, value: Tensor) -> bool:
    """Whether another run's result has other bits; of backend torch on a GPU, whether it exceeds
    the error budget, because aten's kernels add to attention's dq in any order.
    """
    if case.backend == "torch" and value.is_cuda:
        return not case.judge(name, value, ()).ok
    return not same_bits(value, case.results[name])


def rerun(case: Case) -> Faults | None:
    again = case.run(case.make(), case.douts)
    return {
        name: "a second run gave other bits"
        for name in case.results
        if _differs(case, name, again[name])
    }


def batch(case: Case, bitwise: bool | None = None) -> Faults | None:
    """bitwise: whether to compare bits; by default if the op guarantees them. The backends `torch`
    and reference do not, because PyTorch's matrix products and reductions choose their blocking by
    the whole shape: there the error budget applies.
    """
    if case.spec.entries is None:
        return None
    entries = case.spec.entries(case.make())
    if bitwise is None:
        bitwise = case.spec.entries_in_bits and case.backend not in ("torch", "reference")
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
            if bitwise and not same_bits(alone[name], case.results[name][where]):
                faults[name] = f"{entry.name} computed alone gave other bits"
            elif not bitwise and not (found := case.judge(name, alone[name], where)).ok:
                faults[name] = f"{entry.name} computed alone: {found.message}"
    return faults if entries else None


def _leaves(inputs: Inputs, sample: Sample) -> Inputs:
    """Slices of inputs as leaf tensors."""
    leaves = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            value = value.detach()
            value.requires_grad_(value.is_floating_point() and name in sample.gradients)
        leaves[name] = value
    return leaves


def padding(
    case: Case, fills: Sequence[str] = tuple(_FILLS), in_douts: bool = True
) -> Faults | None:
    """fills: what dead positions hold in turn. in_douts: also in the output gradients."""
    dead = case.spec.dead(case.make())
    if not any(bool(positions.any()) for positions in dead.values()):
        return None
    faults: Faults = {}
    for fill in fills:
        inputs, value = case.make(), _FILLS[fill]
        for name, positions in dead.items():
            if name in inputs:
                fill_positions(inputs[name], positions, value)
        douts = tuple(
            torch.where(dead[name], value, dout) if in_douts and name in dead else dout
            for name, dout in zip(case.spec.results, case.douts, strict=True)
        )
        results = case.run(inputs, douts)
        for name, result in results.items():
            zeros = dead.get(name.removeprefix("d")) if name.startswith("d") else None
            if zeros is not None and bool((result.masked_select(zeros) != 0).any()):
                faults.setdefault(name, f"not 0 at dead positions, with {fill} there")
            elif _differs(case, name, result):
                faults.setdefault(name, f"{fill} at dead positions changes it")
    return faults


def fill_positions(x: Tensor, positions: Tensor, value: float) -> None:
    """Writes `value` where `positions` (broadcastable to x) are True. In an expanded dimension of x
    (stride 0), all positions must be True.
    """
    positions = positions.expand_as(x)
    x = x.detach()
    for dim in range(x.dim()):
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            x, positions = x.narrow(dim, 0, 1), positions.all(dim, keepdim=True)
    x.masked_fill_(positions, value)


PROPERTIES = {"rerun": rerun, "batch": batch, "padding": padding}
