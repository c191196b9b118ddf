"""A training step (forward, backward, no optimizer) of a Transformer: workloads, check and calls.

The oracle is torch.nn.Transformer in fp64 with the same weights, dropout off, on the first
sequences of the batch; the error budget also uses torch.nn.Transformer in the dtype of the run.
Steps run as in user code, including eager launches, not from a CUDA graph.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fastattn
from benchmarks.implementations import ON_REQUEST, Implementation, Task
from benchmarks.op_benchmark import Benchmark, Verdict
from fastattn.ops._env import BACKEND_VARIABLE
from fastattn.ops._select import OPS, order
from fastattn.ops.attention.spec_workloads import sentence_lengths, spread_lengths
from fastattn.testing.compare import compare
from fastattn.testing.spec import Inputs, Workload
from fastattn.testing.timing import Call, peak_memory

MODEL = "transformer"
# Compiling a stack takes a minute, so other workloads are compiled only on request.
COMPILED_WORKLOADS = r"^d512_h8_b64_s512$"
_DROPOUT = 0.1
# Kinds of kernels, or of operators on a CPU, by the first pattern that occurs in a name.
_KERNELS = {
    "attention": "attention|sdpa|flash|fmha",
    "norms": "norm|GammaBeta",
    "feed-forward": "ffn",
    "products": "gemm|nvjet|cutlass|cublas|addmm|::b?mm|linear",
    "copies": "memcpy|memset|copy|cat_|::_?cat|fill",
    "others": "",
}
_CHECKED_SEQUENCES = 2
_CHECKED_ELEMENTS = 2**14


@dataclass(frozen=True)
class Size:
    """d_model, heads, feed-forward width, layers of each stack, batch, source and target length."""

    d: int
    heads: int
    ff: int
    layers: int
    B: int
    S: int

    def module(
        self, kind: type[nn.Transformer], device: torch.device, dropout: float
    ) -> nn.Transformer:
        torch.manual_seed(0)
        return kind(
            self.d,
            self.heads,
            self.layers,
            self.layers,
            self.ff,
            dropout,
            batch_first=True,
            device=device,
        )


@dataclass(frozen=True)
class ModelWorkload(Workload):
    size: Size = Size(0, 0, 0, 0, 0, 0)


class Model:
    """A module and how to call it; `step` is timed, `module` has the parameters.

    packed: lengths instead of masks mark the padding. backends: the value of FASTATTN_BACKEND.
    """

    def __init__(
        self, module: nn.Transformer, step: Any = None, *, packed: bool = False, backends: str = ""
    ):
        self.module = module
        self.step = module if step is None else step  # bool() of a compiled module raises
        self.packed, self.backends = packed, backends

    def __call__(self, inputs: Inputs) -> Tensor:
        return self.run(self.step, inputs)

    def run(self, module: Any, inputs: Inputs) -> Tensor:
        if not self.packed:
            return call(module, inputs)
        return module(
            inputs["src"],
            inputs["tgt"],
            tgt_mask=inputs["tgt_mask"],
            tgt_is_causal=True,
            src_lengths=inputs["lengths"],
            tgt_lengths=inputs["lengths"],
        )


def call(module: Any, inputs: Inputs) -> Tensor:
    padding = inputs.get("padding")
    return module(
        inputs["src"],
        inputs["tgt"],
        tgt_mask=inputs["tgt_mask"],
        src_key_padding_mask=padding,
        tgt_key_padding_mask=padding,
        memory_key_padding_mask=padding,
        tgt_is_causal=True,
    )


def _workload(size: Size, devices: tuple[str, ...], *, padded: str = "") -> ModelWorkload:
    """padded: "" or "padded" (lengths uniform in [S / 4, S]) or "sentences" (typical sentence
    lengths); source and target have the same lengths.
    """
    B, S, d = size.B, size.S, size.d
    lengths = torch.full((B,), S)
    if padded:
        lengths = sentence_lengths(B) if padded == "sentences" else spread_lengths(B, S)
    tokens, pairs = float(lengths.sum()), float((lengths.double() ** 2).sum())

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        def data() -> Tensor:
            return torch.randn(B, S, d, generator=generator, device=generator.device).to(device)

        inputs: Inputs = {"src": data(), "tgt": data()}
        inputs["tgt_mask"] = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)
        if padded:
            padding = torch.arange(S, device="cpu") >= lengths[:, None]
            inputs |= {"padding": padding.to(device), "lengths": lengths.tolist()}
        return inputs

    # Projections and feed-forward: 2 FLOPs per weight and token; attention: 4 d per pair, causal
    # pairs counted as half.
    weights = (4 * d * d + 2 * d * size.ff) + (8 * d * d + 2 * d * size.ff)
    products = 2.0 * weights * tokens * size.layers
    attention = 4.0 * d * pairs * 2.5 * size.layers
    flops = 3.0 * products + 3.5 * attention
    name = f"d{d}_h{size.heads}_b{B}_s{S}" + (f"_{padded}" if padded else "")
    features = (padded,) if padded else ()
    return ModelWorkload(name, make, (), flops, 0.0, 0.0, 0.0, features, devices, size)


MODEL_WORKLOADS = (
    _workload(Size(512, 8, 2048, 6, 64, 512), ("cuda",)),
    _workload(Size(512, 8, 2048, 6, 64, 512), ("cuda",), padded="padded"),
    _workload(Size(1024, 16, 4096, 6, 16, 2048), ("cuda",)),
    _workload(Size(1024, 16, 4096, 6, 16, 2048), ("cuda",), padded="padded"),
    _workload(Size(512, 8, 2048, 6, 256, 72), ("cuda",), padded="sentences"),
    _workload(Size(128, 4, 512, 2, 4, 64), ("cpu",)),
    _workload(Size(512, 8, 2048, 2, 4, 128), ("cpu",), padded="padded"),
    _workload(Size(512, 8, 2048, 2, 16, 72), ("cpu",), padded="sentences"),
)


# -- implementations -------------------------------------------------------------------------------
def build_module(
    task: Task,
    kind: type[nn.Transformer],
    *,
    compiled: bool = False,
    packed: bool = False,
    backends: str = "",
) -> Model:
    assert isinstance(task.workload, ModelWorkload)
    module = task.workload.size.module(kind, task.device, _DROPOUT).train()
    step = torch.compile(module, dynamic=False) if compiled else None
    return Model(module, step, packed=packed, backends=backends)


def requested_backends(device_type: str) -> str:
    """The value of FASTATTN_BACKEND for a model: empty, or Triton for every op that has it, on a
    GPU for which neither sm90 nor Triton is automatic.
    """
    if device_type != "cuda":
        return ""
    ops = {op.public_name: op for op in OPS.values() if op.name == f"{op.public_name}_fwd"}
    gpu = torch.device(device_type, 0)
    rows = order(ops["attention"], gpu, torch.bfloat16)
    if any(row.name in ("sm90", "triton") for row in rows):
        return ""
    return ",".join(f"{name}=triton" for name, op in ops.items() if "triton" in op.backends)


@contextlib.contextmanager
def requesting(backends: str) -> Iterator[None]:
    """A context with FASTATTN_BACKEND set to `backends`, if there are any."""
    if not backends:
        yield
        return
    before = os.environ.get(BACKEND_VARIABLE)
    os.environ[BACKEND_VARIABLE] = backends
    try:
        yield
    finally:
        os.environ.pop(BACKEND_VARIABLE)
        if before is not None:
            os.environ[BACKEND_VARIABLE] = before


def _fastattn(name: str, backends: str, *, compiled: bool = False, packed: bool = False) -> Any:
    def build(task: Task) -> Model:
        from fastattn import nn as fast_nn

        return build_module(
            task, fast_nn.Transformer, compiled=compiled, packed=packed, backends=backends
        )

    return Implementation(
        name,
        (MODEL,),
        build,
        device_types=("cuda",) if compiled else ("cuda", "cpu"),
        unsupported=_nothing_to_pack if packed else lambda task: None,
        version=lambda: fastattn.__version__,
        backend=backends or "automatic",
        is_fastattn=True,
        compiles=compiled,
        workloads=ON_REQUEST if compiled else "padded|sentences" if packed else "",
    )


def _nothing_to_pack(task: Task) -> str | None:
    return None if "lengths" in task.inputs else "packs padded batches, got a full one"


def fastattn_models(device_type: str) -> list[Implementation]:
    backends = requested_backends(device_type)
    return [
        _fastattn("fastattn", backends),
        _fastattn("fastattn-packed", backends, packed=True),
        _fastattn("fastattn-compile", backends, compiled=True),
    ]


# -- the benchmark ---------------------------------------------------------------------------------
class ModelBenchmark(Benchmark):
    def __init__(self, workload: ModelWorkload, device: torch.device, dtype: torch.dtype):
        super().__init__(MODEL, workload, device, dtype)
        size = workload.size
        self.shape = {name: [size.B, size.S, size.d] for name in ("src", "tgt")}
        self.shape |= {"heads": size.heads, "ff": size.ff, "layers": 2 * size.layers}
        self.steps: dict[str, Call] = {}
        self.dout = self._dout(self.inputs, size.B)
        self.exact: list[Tensor] = []
        self.same: list[Tensor] = []

    def _dout(self, inputs: Inputs, sequences: int) -> Tensor:
        like = inputs["tgt"]
        generator = torch.Generator(like.device).manual_seed(1)
        dout = torch.randn(like.shape, generator=generator, device=like.device)
        if "padding" in inputs:
            dout = torch.where(inputs["padding"][..., None], 0, dout)
        return dout[:sequences]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def prepare_oracle(self, candidate: Implementation) -> None:
        if self.exact:
            return
        model = Model(self.workload.size.module(nn.Transformer, self.device, 0.0).train())
        with self._autocast():
            self.same = self._checked(model, self._few(torch.float32))
        model.module.double()
        self.exact = self._checked(model, self._few(torch.float64))

    def _few(self, dtype: torch.dtype) -> Inputs:
        """The first sequences."""
        few = {n: x if n == "tgt_mask" else x[:_CHECKED_SEQUENCES] for n, x in self.inputs.items()}
        return few | {n: few[n].to(dtype) for n in ("src", "tgt")}

    def _checked(self, model: Model, inputs: Inputs) -> list[Tensor]:
        """The output on real tokens and a sample of every parameter's gradient, on the CPU."""
        with requesting(model.backends):
            out = model.run(model.module, inputs)
            dout = self._dout(self.inputs, _CHECKED_SEQUENCES).to(out.dtype)
            gradients = torch.autograd.grad(out, list(model.module.parameters()), dout)
        if "padding" in inputs:
            out = torch.where(inputs["padding"][..., None], 0, out)
        generator = torch.Generator().manual_seed(0)
        return [_some(x.detach(), generator).cpu() for x in (out, *gradients)]

    def check(self, candidate: Implementation, direction: str) -> Verdict:
        model = self.forwards[candidate.name]
        module = model.module
        p = _set_dropout(module, 0.0)
        try:
            with self._autocast():
                found = self._checked(model, self._few(torch.float32))
        finally:
            _set_dropout(module, p)
        verdict = Verdict()
        names = ["out", *["d" + n for n, _ in module.named_parameters()]]
        for name, got, exact, same in zip(names, found, self.exact, self.same, strict=True):
            verdict.add(name, compare(got, exact, same, exact.abs(), 0))
        if verdict.ok and candidate.compiles:
            verdict.message = "checked before compilation"
        return verdict

    def calls(self, candidate: Implementation, direction: str) -> list[Call]:
        model = self.forwards[candidate.name]
        parameters = list(model.module.parameters())

        def step() -> None:
            with requesting(model.backends):
                with self._autocast():
                    out = model(self.inputs)
                torch.autograd.grad(out, parameters, self.dout.to(out.dtype))

        step()
        self.steps[candidate.name] = step
        self.peaks[candidate.name, direction] = peak_memory(step, self.device) + self._own(model)
        return [step]

    def _own(self, model: Model) -> int:
        return sum(p.numel() * p.element_size() for p in model.module.parameters())

    def work(self, direction: str) -> tuple[float, float]:
        return self.workload.flops, self.workload.bytes

    def details(self, candidate: Implementation, direction: str) -> dict[str, Any]:
        size = self.workload.size
        positions = 2 * size.B * size.S
        real = positions
        if "padding" in self.inputs:
            real = 2 * int((~self.inputs["padding"]).sum())
        kernel_ms = kernel_times(self.steps[candidate.name], self.device)
        work = {"positions": positions, "real_tokens": real, "kernel_ms": kernel_ms}
        return super().details(candidate, direction) | work


def kernel_times(call: Call, device: torch.device) -> dict[str, float] | None:
    """Milliseconds of a call's kernels (on a CPU: of its operators) by kind, None without any."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
    total: dict[str, float] = {}
    for each in found.key_averages():
        if each.is_user_annotation or on_gpu == (each.device_type == DeviceType.CPU):
            continue
        spent = each.self_device_time_total if on_gpu else each.self_cpu_time_total
        kind = next(k for k, names in _KERNELS.items() if re.search(names, each.key, re.I))
        total[kind] = total.get(kind, 0.0) + spent / 1e3
    return total or None


def _some(x: Tensor, generator: torch.Generator) -> Tensor:
    """x, or a fixed random sample of its elements."""
    flat = x.flatten()
    if flat.numel() <= _CHECKED_ELEMENTS:
        return flat
    index = torch.randint(flat.numel(), (_CHECKED_ELEMENTS,), generator=generator)
    return flat[index.to(flat.device)]


def _set_dropout(module: nn.Module, p: float) -> float:
    """Sets every dropout of a Transformer and returns the previous p."""
    before = p
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            before, child.p = child.p, p
        elif isinstance(child, nn.MultiheadAttention):
            before, child.dropout = child.dropout, p
    return before
