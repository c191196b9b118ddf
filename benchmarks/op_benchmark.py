"""One op on one workload: inputs, the oracle that checks results, the calls that are timed.

A candidate is checked against the error budget on the inputs it will be timed on. If the result is
too large for an fp64 oracle, some (batch, head) slices are compared, and of wide results some rows;
finiteness is checked everywhere.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.implementations import SCORE_ARGUMENTS, Forward, Implementation, Task
from fastattn.testing.compare import Comparison, compare
from fastattn.testing.properties import deterministic_algorithms
from fastattn.testing.spec import Inputs, OpSpec, Workload
from fastattn.testing.timing import Call, copies_beyond_cache, peak_memory

# Number of attention weights up to which the oracle computes all batches and heads in one call.
_WHOLE = 2**20
# Number of elements of a result that are compared, first and last rows among them.
_CHECKED = 2**18
_EDGE_ROWS = 32
# Number of backward calls in a fixed order whose bits are compared, and the size of the products
# that occupy another stream of a GPU meanwhile.
_ORDERED_CALLS = {"cuda": 200, "cpu": 20}
_BUSY_SIZE = 8192


@dataclass
class Verdict:
    """The worst of a candidate's results. `ok` without results: no error so far."""

    ok: bool = True
    error: float = 0.0
    allowed: float = 0.0
    message: str = ""
    ratio: float = field(default=-1.0, repr=False)

    def add(self, name: str, comparison: Comparison) -> None:
        if not comparison.ok and self.ok:
            self.message = f"{name}: {comparison.message}"
        if comparison.ratio > self.ratio or (self.ok and not comparison.ok):
            self.error, self.allowed, self.ratio = (
                comparison.error,
                comparison.allowed,
                comparison.ratio,
            )
        self.ok = self.ok and comparison.ok

    def fail(self, message: str) -> None:
        self.ok, self.message, self.error, self.allowed = False, message, float("inf"), 0.0


class Benchmark:
    """A group as the worker uses it: an op, a model or its generation. Subclasses also have
    `prepare_oracle(candidate)`, `check(candidate, direction)` -> Verdict, `calls(candidate,
    direction)` to time, and `work(direction)` -> FLOPs and bytes.
    """

    uses_graphs = False

    def __init__(self, op: str, workload: Any, device: torch.device, dtype: torch.dtype):
        self.workload, self.device, self.dtype = workload, device, dtype
        self.inputs = draw_inputs(workload, device, dtype)
        self.task = Task(op, workload, device, dtype, self.inputs)
        self.shape: dict[str, Any] = {}
        self.forwards: dict[str, Any] = {}
        self.peaks: dict[tuple[str, str], int | None] = {}

    def why_unsupported(self, candidate: Implementation) -> str | None:
        return candidate.unavailable() or candidate.why_unsupported(self.task)

    def build(self, candidate: Implementation) -> None:
        self.forwards[candidate.name] = candidate.build(self.task)

    def details(self, candidate: Implementation, direction: str) -> dict[str, Any]:
        """More fields of a row."""
        peak = self.peaks.get((candidate.name, direction))
        return {"cache": "warm", "copies": 1, "peak_bytes": peak}


class OpBenchmark(Benchmark):
    """An op of a specification. cold: inputs rotate over copies beyond the L2 cache."""

    uses_graphs = True

    def __init__(
        self,
        spec: OpSpec,
        workload: Workload,
        device: torch.device,
        dtype: torch.dtype,
        *,
        cold: bool = True,
    ):
        super().__init__(spec.name, workload, device, dtype)
        self.spec, self.cold = spec, cold and device.type == "cuda"
        self.shape = {k: list(v.shape) for k, v in self.inputs.items() if isinstance(v, Tensor)}
        self.gradients = [n for n in workload.gradients if isinstance(self.inputs.get(n), Tensor)]
        # The rotating inputs; of workloads without gradients those of attention.
        self.moving = self.gradients or ["q", "k", "v"]
        self.oracles: dict[bool, Oracle] = {}
        self.copies: list[Inputs] = []

    def why_unsupported(self, candidate: Implementation) -> str | None:
        if "ordered" in self.workload.features and not candidate.is_fastattn:
            return "is not asked for a fixed order"
        return super().why_unsupported(candidate)

    def _without_dropout(self, candidate: Implementation) -> bool:
        return candidate.draws_dropout and bool(self.inputs.get("dropout_p"))

    def prepare_oracle(self, candidate: Implementation) -> None:
        without = self._without_dropout(candidate)
        if without not in self.oracles:
            inputs = self.inputs | {"dropout_p": 0.0} if without else self.inputs
            self.oracles[without] = Oracle(self.spec, self.workload, inputs)

    def check(self, candidate: Implementation, direction: str) -> Verdict:
        """Checks the direction's results: the output of the timed call itself, or the gradients."""
        without = self._without_dropout(candidate)
        oracle = self.oracles[without]
        forward = self.forwards[candidate.name]
        if direction == "fwd":
            with torch.no_grad():
                results = {oracle.result: _first(forward(oracle.inputs))}
        else:
            leaves = self._leaves(oracle.inputs)
            value = _first(forward(leaves))
            found = torch.autograd.grad(value, [leaves[n] for n in self.gradients], oracle.dout)
            results = {"d" + n: g for n, g in zip(self.gradients, found, strict=True)}
        ignores = candidate.ignores_query_lengths
        verdict = oracle.check(results, ignores_query_lengths=ignores)
        judged = candidate.is_fastattn and candidate.backend != "torch"  # which adds in any order
        if verdict.ok and direction == "bwd" and judged and "ordered" in self.workload.features:
            self._check_bits(self._backward_call(forward, oracle.inputs, oracle.dout), verdict)
        if verdict.ok and without:
            verdict.message = "checked with dropout off"
        return verdict

    def calls(self, candidate: Implementation, direction: str) -> list[Call]:
        forward = self.forwards[candidate.name]
        self._measure_peak(candidate.name, forward, direction)
        if direction == "fwd":
            return [partial(forward, inputs) for inputs in self._rotation()]
        dout = next(iter(self.oracles.values())).dout
        return [
            self._backward_call(forward, inputs, dout.clone() if i else dout)
            for i, inputs in enumerate(self._rotation())
        ]

    def _backward_call(self, forward: Forward, inputs: Inputs, dout: Tensor) -> Call:
        leaves = self._leaves(inputs)
        value = _first(forward(leaves))
        wanted = [leaves[n] for n in self.gradients]

        def call() -> Any:
            return torch.autograd.grad(value, wanted, dout, retain_graph=True)

        return deterministic_algorithms()(call) if "ordered" in self.workload.features else call

    def _check_bits(self, call: Call, verdict: Verdict) -> None:
        """Compares the results of many calls, on a GPU while another stream computes products."""
        first = call()
        if self.device.type == "cuda":
            busy = torch.randn(_BUSY_SIZE, _BUSY_SIZE, device=self.device, dtype=self.dtype)
            product, other = torch.empty_like(busy), torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
        count = _ORDERED_CALLS[self.device.type]
        for i in range(count):
            if self.device.type == "cuda":
                with torch.cuda.stream(other):
                    torch.mm(busy, busy, out=product)
            for name, a, b in zip(self.gradients, first, call(), strict=True):
                if not torch.equal(a, b):
                    verdict.fail(f"d{name}: call {i + 2} in a fixed order has other bits")
                    return
        verdict.message = f"{count} calls in a fixed order have the same bits"

    def _measure_peak(self, name: str, forward: Forward, direction: str) -> None:
        """Peak memory of a call or of forward and backward, beyond the inputs, with the results."""

        def both() -> None:
            leaves = self._leaves(self.inputs)
            dout = next(iter(self.oracles.values())).dout
            torch.autograd.grad(_first(forward(leaves)), [leaves[n] for n in self.gradients], dout)

        call = both if direction == "bwd" else partial(forward, self.inputs)
        self.peaks[name, direction] = peak_memory(call, self.device)

    def _leaves(self, inputs: Inputs) -> Inputs:
        return inputs | {n: inputs[n].detach().requires_grad_() for n in self.gradients}

    def _rotation(self) -> list[Inputs]:
        if not self.copies:
            moving = [self.inputs[n] for n in self.moving]
            footprint = sum(x.numel() * x.element_size() for x in moving)
            footprint += moving[0].numel() * moving[0].element_size()  # the result
            count = 1
            if self.cold:
                cache = torch.cuda.get_device_properties(self.device).L2_cache_size
                free = torch.cuda.mem_get_info(self.device)[0]
                count = copies_beyond_cache(footprint, cache, free)
            self.copies = [self.inputs]
            for _ in range(count - 1):
                self.copies.append(self.inputs | {n: self.inputs[n].clone() for n in self.moving})
        return self.copies

    def work(self, direction: str) -> tuple[float, float]:
        """FLOPs and bytes; workloads state bytes for two-byte data."""
        w, scale = self.workload, self.dtype.itemsize / 2
        if direction == "fwd":
            return w.flops, w.bytes * scale
        return w.backward_flops, w.backward_bytes * scale

    def details(self, candidate: Implementation, direction: str) -> dict[str, Any]:
        rotation = {"cache": "cold" if self.cold else "warm", "copies": len(self.copies)}
        return super().details(candidate, direction) | rotation


def draw_inputs(workload: Workload, device: torch.device, dtype: torch.dtype) -> Inputs:
    """The workload's inputs, drawn on the device if its `make` can, else on the CPU."""
    seed = zlib.crc32(workload.name.encode())
    if device.type != "cpu":
        # A workload that names no device draws on the default one; if that fails too, everything is
        # drawn on the CPU and moved.
        for default in (device, torch.device("cpu")):
            try:
                with default:
                    return workload.make(device, dtype, torch.Generator(device).manual_seed(seed))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                continue
    return workload.make(device, dtype, torch.Generator().manual_seed(seed))


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


# -- the oracle ------------------------------------------------------------------------------------
Select = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class _Part:
    """A slice of the problem that can be computed alone, and its expected results."""

    select: Select
    exact: dict[str, Tensor]
    same: dict[str, Tensor]
    magnitudes: dict[str, Tensor]


class Oracle:
    """The fp64 reference and the one in the data's dtype, on slices small enough for them."""

    def __init__(self, spec: OpSpec, workload: Workload, inputs: Inputs):
        self.spec, self.inputs = spec, inputs
        self.result = spec.results[0]
        self.gradients = [n for n in workload.gradients if isinstance(inputs.get(n), Tensor)]
        with torch.no_grad():
            like = _result_like(spec, inputs)
        device = next(x.device for x in inputs.values() if isinstance(x, Tensor))
        generator = torch.Generator(device).manual_seed(1)
        dout = torch.randn(like.shape, generator=generator, device=device).to(like.dtype)
        self.live_rows = _live_rows(inputs, dout)
        self.dout = dout if self.live_rows is None else torch.where(self.live_rows, dout, 0)
        self.parts = [self._part(select, part) for select, part in _parts(spec, inputs)]

    def _part(self, select: Select, inputs: Inputs) -> _Part:
        inputs = {
            n: v.detach().requires_grad_(n in self.gradients) if _is_floating(v) else v
            for n, v in inputs.items()
        }
        dout = select(self.result, self.dout)
        wide = self.spec.widen(inputs)
        exact = self._run(wide, dout.double())
        same = self._run(inputs, dout)
        fixed = {k: v.detach() if isinstance(v, Tensor) else v for k, v in wide.items()}
        with torch.no_grad():
            outputs = self.spec.function(**fixed, backend="reference")
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            douts = (dout.double(), *[torch.zeros_like(x) for x in outputs[1:]])
            magnitudes = self.spec.magnitudes(_spelled_out(fixed), douts)

        def checked(results: dict[str, Tensor]) -> dict[str, Tensor]:
            return {n: _checked_rows(results[n].detach().expand_as(exact[n])).cpu() for n in exact}

        return _Part(select, checked(exact), checked(same), checked(magnitudes))

    def _run(self, inputs: Inputs, dout: Tensor) -> dict[str, Tensor]:
        value = _first(self.spec.function(**inputs, backend="reference"))
        if not self.gradients:
            return {self.result: value}
        found = torch.autograd.grad(value, [inputs[n] for n in self.gradients], dout)
        gradients = {"d" + n: g for n, g in zip(self.gradients, found, strict=True)}
        return {self.result: value, **gradients}

    def check(self, results: dict[str, Tensor], *, ignores_query_lengths: bool) -> Verdict:
        verdict = Verdict()
        for name, value in results.items():
            if ignores_query_lengths and self.live_rows is not None and name in (self.result, "dq"):
                value = torch.where(self.live_rows, value, 0)
            if not bool(value.isfinite().all()):
                verdict.fail(f"{name}: {int((~value.isfinite()).sum())} elements are not finite")
                return verdict
            for part in self.parts:
                exact = part.exact[name]
                got = _checked_rows(part.select(name, value.detach()))
                dims = self.spec.slice_dims(name, exact)
                verdict.add(name, compare(got, exact, part.same[name], part.magnitudes[name], dims))
        return verdict


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _result_like(spec: OpSpec, inputs: Inputs) -> Tensor:
    """A tensor of the result's shape and dtype, on the device "meta"."""
    prepared = spec.prepare(inputs).items()
    meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in prepared}
    return _first(spec.function(**meta))


def _live_rows(inputs: Inputs, result: Tensor) -> Tensor | None:
    """Rows of attention within query_lengths, [B, 1, M, 1]; None without lengths."""
    if "query_lengths" not in inputs:
        return None
    rows = torch.arange(result.shape[2], device=result.device)
    return (rows < inputs["query_lengths"].view(-1, 1))[:, None, :, None]


def _spelled_out(inputs: Inputs) -> Inputs:
    """With the defaults that the magnitude formulas read."""
    return {"scale": None, "window": None} | inputs if "q" in inputs else inputs


def _parts(spec: OpSpec, inputs: Inputs) -> list[tuple[Select, Inputs]]:
    """The whole workload, or of a large attention the heads of some (batch, kv head)."""
    inputs = inputs | {
        "attention": {"return_lse": True},
        "add_layer_norm": {"return_sum": True},
    }.get(spec.name, {})
    if spec.name != "attention":
        return [(lambda name, x: x, inputs)]
    (B, H, M, _), (K, N) = inputs["q"].shape, inputs["k"].shape[1:3]
    if B * H * M * N <= _WHOLE:
        return [(lambda name, x: x, inputs)]
    chosen = sorted({(0, 0), (B // 2, K // 2), (B - 1, K - 1)})
    if inputs.get("dropout_p"):
        chosen = chosen[:1]  # the bits depend on batch and head: only the first slice keeps them
    G = H // K
    return [(_slice_of(b, g, G), _sliced(inputs, b, g, G)) for b, g in chosen]


def _slice_of(b: int, g: int, G: int) -> Select:
    def select(name: str, x: Tensor) -> Tensor:
        heads = slice(g, g + 1) if name in ("k", "v", "dk", "dv") else slice(g * G, (g + 1) * G)
        if name.removeprefix("d") in SCORE_ARGUMENTS:  # gradients are those of a batch of 1
            return x[heads]
        return x[b : b + 1, heads]

    return select


def _sliced(inputs: Inputs, b: int, g: int, G: int) -> Inputs:
    select = _slice_of(b, g, G)
    by_head = [n for n in SCORE_ARGUMENTS if isinstance(inputs.get(n), Tensor)]
    part = inputs | {n: select(n, inputs[n]) for n in ("q", "k", "v", *by_head)}
    for name in ("key_lengths", "query_lengths"):
        if name in inputs:
            part[name] = inputs[name][b : b + 1]
    mask = inputs.get("mask")
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask[b : b + 1] if mask.shape[0] > 1 else mask
        part["mask"] = mask[:, g * G : (g + 1) * G] if mask.shape[1] > 1 else mask
    return part


def _checked_rows(x: Tensor) -> Tensor:
    """x, or some rows (last dimension but one) of a large one: edges and a fixed sample."""
    if x.dim() < 2 or x.numel() <= _CHECKED:
        return x
    rows = x.shape[-2]
    wanted = max(2 * _EDGE_ROWS, _CHECKED * rows // x.numel())
    if wanted >= rows:
        return x
    inner = torch.randperm(rows - 2 * _EDGE_ROWS, generator=torch.Generator().manual_seed(0))
    picked = inner[: wanted - 2 * _EDGE_ROWS] + _EDGE_ROWS
    edges = torch.arange(_EDGE_ROWS)
    index = torch.cat([edges, picked.sort().values, edges + rows - _EDGE_ROWS])
    return x.index_select(-2, index.to(x.device))
