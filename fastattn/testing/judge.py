"""Checks an implementation from elsewhere on the samples of an op.

Most samples are universal: dead positions hold 0.25, and output gradients are 0 in rows without a
key. What only fastattn defines has kinds of its own, which fail only where they are required.
Samples of dropout bits and prepared masks are left out.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastattn.testing.implementation import Implementation
from fastattn.testing.oracle import Oracle, output_gradients, with_gradients
from fastattn.testing.properties import (
    Case,
    Faults,
    Results,
    batch,
    deterministic_algorithms,
    fill_positions,
    padding,
    rerun,
    same_bits,
)
from fastattn.testing.rows import NAMES, Row
from fastattn.testing.spec import DRAWN, Inputs, OpSpec, Sample

_UNIVERSAL = 0.25  # value at dead positions
_OWN = {
    "dropout_p": "dropout bits of fastattn",
    "output_dropout_p": "dropout bits of fastattn",
    "prepared": "a mask of prepare_mask",
}
_NOT_FINITE = ("NaN", "inf")


def _fresh_memory(case: Case) -> Faults:
    """Compares results where torch.empty and the like return memory filled with NaN."""
    with deterministic_algorithms():
        again = case.run(case.make(), case.douts)
    found = {name: case.judge(name, value, ()) for name, value in again.items()}
    return {n: f"with NaN in new memory: {c.message}" for n, c in found.items() if not c.ok}


def _inference(case: Case) -> Faults:
    """Compares outputs of calls that need no gradient."""
    fixed = {n: x.detach() if isinstance(x, Tensor) else x for n, x in case.make().items()}
    with torch.no_grad():
        found = {"with torch.no_grad": case.run(case.make(), case.douts)}
    with torch.inference_mode():
        found["in inference mode"] = case.run(fixed, case.douts)
    faults = {}
    for where, results in found.items():
        for name, value in results.items():
            if not (comparison := case.judge(name, value, ())).ok:
                faults[name] = f"{where}: {comparison.message}"
    return faults


_CONVENTIONS: dict[str, Callable[[Case], Faults | None]] = {
    "fresh memory": _fresh_memory,
    "batch": functools.partial(batch, bitwise=False),
    "rerun": rerun,
    "batch bits": functools.partial(batch, bitwise=True),
    "finite padding": functools.partial(padding, fills=("finite",), in_douts=False),
    "NaN padding": functools.partial(padding, fills=_NOT_FINITE, in_douts=False),
    "NaN gradients in padding": functools.partial(padding, fills=_NOT_FINITE),
}
# What may be required. "precision": no result passes only because scores or weights may be rounded
# to the dtype. "call": no exception but NotImplementedError.
_ALWAYS_REQUIRED = ("value", "gradient", "inputs", "expanded gradient", "inference")
KINDS = (*_ALWAYS_REQUIRED, "precision", "call", "empty rows", *_CONVENTIONS)


def required_kinds(names: str | Iterable[str] = ()) -> tuple[str, ...]:
    """The kinds that are always required, and those with these names, or with a name such as
    "rerun,batch"; "padding" stands for its three kinds.
    """
    found = dict.fromkeys(_ALWAYS_REQUIRED)
    for name in names.split(",") if isinstance(names, str) and names else names:
        kinds = [k for k in KINDS if k == name or (name == "padding" and name in k)]
        if not kinds:
            raise ValueError(f"require must be of {', '.join((*KINDS, 'padding'))}, got {name!r}")
        found |= dict.fromkeys(kinds)
    return tuple(found)


def judge_sample(
    spec: OpSpec,
    sample: Sample,
    dtype: torch.dtype,
    implementation: Implementation,
    device: torch.device,
    require: tuple[str, ...],
) -> list[Row]:
    """Checks the results of an implementation on one sample, and their properties if they are
    right. What does not hold fails if its kind is among `require`.
    """

    def row(result: str, kind: str, status: str, message: str = "", **errors: Any) -> Row:
        at = (spec.name, implementation.name, device.type, NAMES[dtype], sample.name)
        return Row(*at, result, status, message=message[:500], kind=kind, **errors)

    def fault(result: str, kind: str, message: str, otherwise: str = "differs") -> Row:
        return row(result, kind, "FAIL" if kind in require else otherwise, message)

    def not_run(result: str, kind: str, error: Exception) -> Row:
        if isinstance(error, NotImplementedError):
            return row(result, kind, "refused", str(error))
        status = "FAIL" if "call" in require else "raised"
        kind = "call" if "call" in require else kind
        return row(result, kind, status, f"{type(error).__name__}: {error}")

    given = sample.inputs("cpu", dtype)
    if own := [why for name, why in _OWN.items() if given.get(name)]:
        return [row("all", "value", "left out", own[0])]
    rows = []
    trial = _Trial(spec, sample, dtype, implementation, device)
    try:
        results = trial.run(trial.make())
    except Exception as error:
        if not sample.gradients:
            return [not_run("all", "value", error)]
        trial = _Trial(
            spec, dataclasses.replace(sample, gradients=()), dtype, implementation, device
        )
        try:
            results = trial.run(trial.make())
        except Exception as forward_error:
            return [not_run("all", "value", forward_error)]
        rows.append(not_run("gradients", "gradient", error))

    has_nan = False
    for name, (positions, value) in trial.defined.items():
        found = results[name].cpu()[positions]
        has_nan |= bool(found.isnan().any())
        wrong = found[found != value]
        message = f"{float(wrong[0]):.3g}, expected {value:.3g}" if len(wrong) else ""
        rows.append(
            fault(name, "empty rows", message) if message else row(name, "empty rows", "ok")
        )
    results = trial.with_defined_rows(trial.make(), results)
    torch_errors, right = trial.oracle.torch_errors(), True
    for name, x in results.items():
        kind, status = "value" if name in spec.results else "gradient", "ok"
        if x.dtype != (dtype_of_op := trial.oracle.same[name].dtype):
            rows.append(fault(name, kind, f"{x.dtype}, expected {dtype_of_op}"))
            right = False
            continue
        comparison = trial.oracle.judge(name, x)
        if not comparison.ok and trial.oracle.judge(name, x, rounded=True).ok:
            status = "FAIL" if "precision" in require else "imprecise"
        elif not comparison.ok:
            if has_nan and kind == "gradient" and not bool(x.isfinite().all()):
                kind = "empty rows"  # NaN there has no other gradient
            status, right = "FAIL" if kind in require else "differs", False
        errors = {"error": comparison.error, "allowed": comparison.allowed}
        errors |= {"torch_error": torch_errors[name]} if name in torch_errors else {}
        rows.append(row(name, kind, status, comparison.message, **errors))
    for name in trial.modified:
        rows.append(fault(name, "inputs", "modified in place"))
    rows += [] if trial.modified else [row("all", "inputs", "ok")]
    if right and not sample.name.startswith(DRAWN):
        case = trial.case(results)
        universal = {"expanded gradient": trial.expanded_gradient, "inference": _inference}
        for kind, faults_of in (universal | _CONVENTIONS).items():
            try:
                faults = faults_of(case)
            except Exception as error:
                faults = {"all": f"{type(error).__name__}: {error}"}
            if faults is not None:
                rows += [fault(name, kind, message) for name, message in faults.items()]
                rows += [] if faults else [row("all", kind, "ok")]
            if kind == "rerun" and faults:  # the others compare bits
                break
    return rows


def fail_what_always_raises(rows: Iterable[Row], require: tuple[str, ...]) -> list[Row]:
    """The rows, with FAIL for what raised if it is required and holds for no sample."""
    rows = list(rows)
    held = {row.kind for row in rows if row.status in ("ok", "imprecise")}
    wrong = {*require} - held
    return [
        dataclasses.replace(row, status="FAIL", message=f"{row.message} (holds for no sample)")
        if row.status == "raised" and row.kind in wrong
        else row
        for row in rows
    ]


class _Trial:
    """Runs of one implementation on one sample. The first one finds `oracle`: what the results must
    be, with gradient 0 for outputs that are not returned or have no graph.
    """

    def __init__(
        self,
        spec: OpSpec,
        sample: Sample,
        dtype: torch.dtype,
        implementation: Implementation,
        device: torch.device,
    ):
        self.sample = dataclasses.replace(sample, make=functools.partial(_universal, spec, sample))
        self.op, self.spec, self.dtype, self.device = spec, spec, dtype, device
        self.implementation = implementation
        self.modified: dict[str, None] = {}
        self.dead = spec.dead(self.sample.inputs("cpu", dtype))
        # For each output with dead positions: these, and the value that fastattn defines there.
        self.defined: dict[str, tuple[Tensor, float]] = {}

    def make(self) -> Inputs:
        return self.sample.inputs(self.device, self.dtype)

    def run(self, inputs: Inputs, douts: tuple[Tensor, ...] | None = None) -> Results:
        """douts: the output gradients, or numbers to expand; None in the first run."""
        arguments = self.implementation.arguments(self.spec, inputs)
        before = {n: x.detach().clone() for n, x in arguments.items() if isinstance(x, Tensor)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = self.implementation.call(self.spec, arguments)
            if douts is None:
                self._find_oracle(outputs, any(arguments[name].requires_grad for name in before))
                douts = self.oracle.douts
            given = []
            for dout, output in zip(douts, outputs, strict=False):
                dout = dout.to(output.device, output.dtype, copy=True)
                given.append(dout if dout.dim() else dout.expand_as(output))
            copies = [d.clone() for d in given]
            douts = tuple(given)
            results = with_gradients(self.spec, self.sample, inputs, outputs, lambda *_: douts)
        for name, x in before.items():
            if not same_bits(x, arguments[name].detach()):
                self.modified[name] = None
        for name, x, copy in zip(self.spec.results, given, copies, strict=False):
            if not same_bits(x, copy):
                self.modified[f"gradient of {name}"] = None
        # Copies: an implementation may write its next results into the same memory.
        return {name: x.clone() for name, x in results.items()}

    def _find_oracle(self, outputs: tuple[Tensor, ...], differentiable: bool) -> None:
        graph = {n: o.requires_grad for n, o in zip(self.spec.results, outputs, strict=False)}
        if differentiable and not any(graph.values()):
            raise NotImplementedError("returns results without a graph")

        def douts(spec: OpSpec, sample: Sample, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            found = dict(zip(spec.results, output_gradients(spec, sample, outputs), strict=True))
            for name in spec.results:
                ignored = self.dead.get(name, torch.tensor(False)) | (not graph.get(name))
                found[name] = found[name].masked_fill(ignored, 0)
            return tuple(found.values())

        self.oracle = Oracle(self.spec, self.sample, self.dtype, douts)
        self.spec = dataclasses.replace(self.spec, results=tuple(graph))
        for name, output in zip(graph, outputs, strict=True):
            exact = self.oracle.exact[name]
            if output.shape == exact.shape and name in self.dead and bool(self.dead[name].any()):
                positions = self.dead[name].expand_as(exact)
                self.defined[name] = positions, float(exact[positions][0])

    def expanded_gradient(self, case: Case) -> Faults | None:
        """Compares gradients for an output gradient of 1 with stride 0, as `out.sum().backward()`
        gives, in samples without empty rows, where no gradient overflows.
        """
        dead = [bool(self.dead[name].any()) for name in self.spec.results if name in self.dead]
        if any(dead) or not self.sample.gradients:
            return None
        numbers = [torch.tensor(float(i == 0)) for i in range(len(self.op.results))]

        def douts(spec: OpSpec, sample: Sample, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(x.to(o).expand_as(o) for x, o in zip(numbers, outputs, strict=True))

        oracle = Oracle(self.op, self.sample, self.dtype, douts)
        names = [name for name in oracle.exact if name not in self.op.results]
        if not all(bool(oracle.exact[n].to(self.dtype).isfinite().all()) for n in names):
            return None
        results = self.run(self.make(), tuple(numbers))
        found = {name: oracle.judge(name, results[name], rounded=True) for name in names}
        return {name: c.message for name, c in found.items() if not c.ok}

    def with_defined_rows(self, inputs: Inputs, results: Results) -> Results:
        """The results with defined values at dead positions of the outputs."""
        dead = self.spec.dead(inputs)
        defined = {name: value for name, (_, value) in self.defined.items()}
        return results | {n: torch.where(dead[n], x, results[n]) for n, x in defined.items()}

    def case(self, results: Results) -> Case:
        """results: those of the first run, with defined rows."""
        douts = tuple(
            dout.to(self.device, results[name].dtype)
            for name, dout in zip(self.spec.results, self.oracle.douts, strict=False)
        )

        def run(inputs: Inputs, douts: tuple[Tensor, ...]) -> Results:
            return self.with_defined_rows(inputs, self.run(inputs, douts))

        judge = functools.partial(self.oracle.judge, rounded=True)
        at = (self.spec, self.sample, self.implementation.name)
        return Case(*at, results, douts, self.make, run, judge)


def _universal(
    spec: OpSpec, sample: Sample, generator: torch.Generator, dtype: torch.dtype
) -> Inputs:
    """The inputs of a sample, without NaN and inf at dead positions."""
    inputs = sample.make(generator, dtype)
    for name, positions in spec.dead(inputs).items():
        if name in inputs:
            fill_positions(inputs[name], positions, _UNIVERSAL)
    return inputs
