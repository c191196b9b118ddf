"""The measuring process. Requests and events are JSON lines on standard input and output.

It announces each stage before it starts, so that the supervising process knows which candidate
failed if this one dies or hangs. It is restarted only then: importing torch and opening a GPU take
seconds.
"""

import contextlib
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases
from benchmarks.generation import GENERATION, GenerationBenchmark
from benchmarks.implementations import Implementation
from benchmarks.model import MODEL, ModelBenchmark
from benchmarks.op_benchmark import Benchmark, OpBenchmark, Verdict
from fastattn.ops import _env
from fastattn.testing.timing import (
    DeviceLost,
    GpuState,
    Plan,
    Timing,
    ceilings,
    check_device,
    gpu_state,
    side_stream,
    time_side_by_side,
)

Send = Callable[..., None]
# How torch's messages say that one of its backends does not support these inputs.
_TORCH_REFUSALS = ("No available kernel", "No viable backend", "not supported", "only supports")


def main() -> None:
    os.setpgrp()  # so that the supervising process can kill it with its child processes
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the events

    def send(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")

    device = torch.device("cpu")
    with contextlib.ExitStack() as stack:
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "start":
                device = _start(request)
                stack.enter_context(side_stream(device))
                send("started", environment=_environment(device))
            elif request["do"] == "ceilings":
                found = ceilings(device, cases.DTYPES[request["dtype"]], Plan(**request["plan"]))
                send("ceilings", flops_per_s=found.flops_per_s, bytes_per_s=found.bytes_per_s)
                _clean(device)
            elif request["do"] == "group":
                try:
                    _Run(request, device, send).run()
                except DeviceLost:
                    os._exit(3)
                send("done")
                _clean(device)


def _start(request: dict[str, Any]) -> torch.device:
    device = torch.device(request["device"])
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    # A compiled backward is run many times for one forward.
    import torch._functorch.config as functorch_config

    functorch_config.donated_buffer = False
    gc.collect()
    gc.freeze()  # imported objects are never garbage: this shortens later collections
    return device


def _environment(device: torch.device) -> dict[str, Any]:
    versions = _env.versions()
    return {
        "gpu": _env.device_name(device) if device.type == "cuda" else None,
        "cpu": _env.device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        **{name: versions[name] for name in ("torch", "triton", "cuda")},
    }


def _clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _Run:
    """One group: inputs, then every candidate's check, then the timing of those that passed."""

    def __init__(self, request: dict[str, Any], device: torch.device, send: Send):
        self.op, self.workload, self.dtype = request["op"], request["workload"], request["dtype"]
        self.wanted: dict[str, list[str]] = {}
        for implementation, direction in request["wanted"]:
            self.wanted.setdefault(implementation, []).append(direction)
        self.plan = Plan(**request["plan"])
        self.cold, self.turns = request["cold"], request["turns"]
        files = [Path(path) for path in request["peer_files"]]
        found = cases.implementations_of(self.op, device.type, files)
        self.candidates = {c.name: c for c in found if c.name in self.wanted}
        self.device, self.send = device, send

    def run(self) -> None:
        self._stage(None, "inputs")
        benchmark = self.benchmark = self._make_benchmark()
        if any(c.compiles for c in self.candidates.values()):
            torch._dynamo.reset()
        passed: dict[str, list[tuple[Implementation, Verdict]]] = {}
        for name, directions in self.wanted.items():
            candidate = self.candidates[name]
            self._stage(name, "inquiry")
            reason = benchmark.why_unsupported(candidate)
            if reason is not None:
                self._end(candidate, directions, "refused", f"{name} {reason}")
                continue
            for direction, verdict in self._gate(candidate, directions):
                passed.setdefault(direction, []).append((candidate, verdict))
        workload = cases.find_workload(self.op, self.workload)
        for direction in cases.directions(self.op, workload):
            if direction in passed:
                self._time(direction, passed[direction])

    def _make_benchmark(self) -> Benchmark:
        workload, dtype = cases.find_workload(self.op, self.workload), cases.DTYPES[self.dtype]
        kinds: dict[str, Any] = {MODEL: ModelBenchmark, GENERATION: GenerationBenchmark}
        if self.op in kinds:
            return kinds[self.op](workload, self.device, dtype)  # type: ignore[no-any-return]
        return OpBenchmark(cases.specs()[self.op], workload, self.device, dtype, cold=self.cold)

    def _gate(self, candidate: Implementation, directions: list[str]) -> list[tuple[str, Verdict]]:
        self._stage(None, "oracle")
        try:
            self.benchmark.prepare_oracle(candidate)
        except torch.OutOfMemoryError:
            _clean(self.device)
            self._end(candidate, directions, "skipped", "the fp64 oracle does not fit into memory")
            return []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # candidates read how much memory is free
        passed = []
        built = False
        for direction in directions:
            self._stage(candidate.name, "gate")
            try:
                if not built:
                    self.benchmark.build(candidate)
                    built = True
                verdict = self.benchmark.check(candidate, direction)
            except Exception as error:
                self._failed(candidate, [direction], error)
                continue
            if verdict.ok:
                passed.append((direction, verdict))
            else:
                self._end(candidate, [direction], "FAIL", verdict.message, verdict)
        return passed

    def _time(self, direction: str, passed: list[tuple[Implementation, Verdict]]) -> None:
        calls = {}
        with torch.set_grad_enabled(direction != "fwd"):
            for candidate, _ in passed:
                self._stage(candidate.name, "preparation")
                try:
                    calls[candidate.name] = self.benchmark.calls(candidate, direction)
                except Exception as error:
                    self._failed(candidate, [direction], error)
            before = self._gpu_state()
            plan = self.plan
            if not self.benchmark.uses_graphs:
                plan = dataclasses.replace(plan, graph=False)
            first = next(iter(calls), None)

            def announce(name: str) -> None:
                if self.turns and name == first:
                    self.send("turn")
                    sys.stdin.readline()
                self._stage(name, "timing")

            try:
                timings = time_side_by_side(calls, self.device, plan, announce=announce)
            except DeviceLost as lost:
                candidate = self.candidates[lost.candidate]
                self._end(candidate, [direction], "FAIL", str(lost))
                raise
            after = self._gpu_state()
        states = [s for s in (before, after) if s is not None]
        rows = []
        for candidate, verdict in passed:
            timing = timings.get(candidate.name)
            if isinstance(timing, Exception):
                self._failed(candidate, [direction], timing)
            elif timing is not None:
                row = self._row(candidate, direction, "ok", verdict.message, verdict)
                row |= self._measured(timing) | self.benchmark.details(candidate, direction)
                row["clocks_mhz"] = [s.sm_mhz for s in states] or None
                row["power_w"] = [s.power_w for s in states] or None
                rows.append(row)
        self.send("rows", rows=rows)

    def _gpu_state(self) -> GpuState | None:
        if self.device.type != "cuda":
            return None
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return gpu_state(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    def _measured(self, timing: Timing) -> dict[str, Any]:
        measured: dict[str, Any] = {
            "clock": timing.clock,
            "launches": timing.launches,
            "ms_median": 1e3 * timing.quantile(0.5),
            "ms_p10": 1e3 * timing.quantile(0.1),
            "ms_p90": 1e3 * timing.quantile(0.9),
            "ms_rounds": [1e3 * s for s in timing.seconds],
        }
        return measured | ({"message": timing.note} if timing.note else {})

    def _failed(self, candidate: Implementation, directions: list[str], error: Exception) -> None:
        """A row for an exception: a refusal if the candidate raised one, else a failure."""
        message = f"{type(error).__name__}: {error}"
        refused = isinstance(error, NotImplementedError) or (
            not candidate.is_fastattn and any(words in message for words in _TORCH_REFUSALS)
        )
        self._end(candidate, directions, "refused" if refused else "FAIL", message)
        check_device(self.device, candidate.name, error)

    def _end(
        self,
        candidate: Implementation,
        directions: list[str],
        status: str,
        message: str,
        verdict: Verdict | None = None,
    ) -> None:
        rows = [self._row(candidate, d, status, message, verdict) for d in directions]
        self.send("rows", rows=rows)

    def _row(
        self,
        candidate: Implementation,
        direction: str,
        status: str,
        message: str,
        verdict: Verdict | None,
    ) -> dict[str, Any]:
        flops, moved = self.benchmark.work(direction)
        return {
            "op": self.op,
            "direction": direction,
            "workload": self.workload,
            "shape": self.benchmark.shape,
            "dtype": self.dtype,
            "features": list(self.benchmark.workload.features),
            "impl": candidate.name,
            "impl_version": candidate.version(),
            "backend_used": candidate.backend,
            "flops": flops,
            "bytes": moved,
            "error": verdict.error if verdict else None,
            "allowed_error": verdict.allowed if verdict else None,
            "status": status,
            "message": " ".join(message.split())[:400],
        }

    def _stage(self, implementation: str | None, stage: str) -> None:
        compiles = implementation is not None and self.candidates[implementation].compiles
        self.send("stage", impl=implementation, stage=stage, compiles=compiles)


if __name__ == "__main__":
    main()
