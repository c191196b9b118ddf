"""The peers of the benchmarks, with stubs that have the signatures and requirements of the real
packages, on a CPU: names and order of arguments, layouts, results.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import failing_decoders
import pytest
import torch
from torch import Tensor, nn

from benchmarks import cases, conformance, generation, score_changes
from benchmarks.generation import DecodeSize, GenerationBenchmark
from benchmarks.implementations import Implementation, Task
from benchmarks.op_benchmark import OpBenchmark
from benchmarks.own_process import OwnProcess
from benchmarks.peers import flash_attention as fa_peers
from fastattn import functional
from fastattn.integrations import flash_attn as flash
from fastattn.ops.attention.spec_workloads import SCORE_CHANGES, packed_workload, padded_workload
from fastattn.testing import check_implementation, implementation
from fastattn.testing.spec import Workload

CPU = torch.device("cpu")
LENGTHS = torch.tensor([5, 17, 2])
# Options of `padded_workload`, and the two kinds of packing.
DENSE: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 8},
    "grouped": {"K": 2}, "bias": {"mask": "float HMN"},
}  # fmt: skip


JUDGED = (
    "top_left", "bottom_right", "window", "gqa", "scale", "bias", "causal", "rows", "wide",
    "weight",
)  # fmt: skip


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs modules by name: `modules({"package.module": {"name": value}})`."""

    def install(contents: dict[str, dict[str, Any]]) -> None:
        for name in contents:
            parts = name.split(".")
            for n in range(1, len(parts) + 1):
                path = ".".join(parts[:n])
                if not isinstance(sys.modules.get(path), _Stub):
                    monkeypatch.setitem(sys.modules, path, _Stub(path))
                if n > 1:
                    setattr(sys.modules[".".join(parts[: n - 1])], parts[n - 1], sys.modules[path])
            vars(sys.modules[name]).update(contents[name])

    return install


class _Stub(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []


def _peer(name: str, op: str, device_type: str = "cuda") -> Implementation:
    return next(p for p in cases.implementations_of(op, device_type) if p.name == name)


def _judge(name: str, op: str) -> None:
    """Its function has right results for the samples that it does not refuse."""
    peer = next(
        c for c in conformance.candidates("cuda") if (c.name, c.op) == (f"{name}, {op}", op)
    )
    function = implementation.load(peer.function).function
    report = check_implementation(function, op, device="cpu", dtypes=torch.bfloat16, samples=JUDGED)
    report.raise_if_failed()
    values = [row for row in report.rows if row.kind == "value"]
    assert {row.status for row in values} <= {"ok", "refused", "left out"}
    assert sum(row.status == "ok" for row in values) > 2


def _check(name: str, op: str, workload: Workload, dtype: torch.dtype = torch.bfloat16) -> None:
    """As in the worker: built, then forward and gradients within the error budget."""
    benchmark = OpBenchmark(cases.specs()[op], workload, CPU, dtype, cold=False)
    peer = _peer(name, op)
    assert peer.unsupported(benchmark.task) is None
    benchmark.build(peer)
    benchmark.prepare_oracle(peer)
    for direction in ("fwd", "bwd"):
        verdict = benchmark.check(peer, direction)
        assert verdict.ok, f"{direction}: {verdict.message}"


def _dense(**options: Any) -> Workload:
    return padded_workload("tiny", 2, 4, 33, 16, ("cpu",), **options)


@pytest.mark.parametrize(("name", "scores"), [
    *[("fastattn-cpu", scores) for scores in SCORE_CHANGES],
    ("sdpa", "alibi"),
    ("sdpa", "relative"),
])  # fmt: skip
def test_changes_of_scores(name: str, scores: str) -> None:
    workload = padded_workload("tiny", 1, 4, 40, 16, ("cpu",), causal=True, scores=scores)
    spec, peer = cases.specs()["attention"], _peer(name, "attention", "cpu")
    benchmark = OpBenchmark(spec, workload, CPU, torch.float32, cold=False)
    assert benchmark.why_unsupported(peer) is None
    benchmark.build(peer)
    benchmark.prepare_oracle(peer)
    for direction in ("fwd", "bwd"):
        verdict = benchmark.check(peer, direction)
        assert verdict.ok, f"{direction}: {verdict.message}"


def test_times_of_changed_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_changes, "SHAPES", ((1, 2, 40, 16), (1, 2, 70, 16)))
    monkeypatch.setattr(score_changes, "_PEERS_UP_TO", 40)
    monkeypatch.setattr(score_changes, "PEERS", ("sdpa",))
    monkeypatch.setattr(score_changes, "ROUNDS", 1)
    rows = score_changes.measure(with_peers=True)
    kinds = [(row.direction, row.scores) for row in rows if (row.dtype, row.keys) == ("bf16", 40)]
    own = ["plain", "alibi", "softcap", "sinks", "table"]
    forward = [s for s in own for _ in range(1 + (s in ("plain", "alibi", "table")))]
    learned = [*forward[:-2], "learned table", "table", "learned table", "table"]
    assert kinds == [
        *[("forward", scores) for scores in forward],
        *[("forward + backward", scores) for scores in learned],
    ]
    assert all(row.ms > 0.0 and row.ratio > 0.0 for row in rows)
    assert {row.implementation for row in rows if row.keys == 70} == {"fastattn-cpu"}


PACKED = packed_workload("tiny", LENGTHS, 4, 16, ("cpu",))
FLASH_CASES = pytest.mark.parametrize("case", ["full", "causal", "window", "grouped", "packed"])


def _check_flash(name: str, case: str) -> None:
    if case == "packed":
        _check(name, "attention_varlen", PACKED)
    else:
        _check(name, "attention", _dense(**DENSE[case]))
    if case in ("full", "packed"):
        _judge(name, "attention_varlen" if case == "packed" else "attention")


# -- FlashAttention --------------------------------------------------------------------------------
@FLASH_CASES
def test_flash_attention_2(modules: Any, case: str) -> None:
    modules({"flash_attn.flash_attn_interface": vars(flash)})
    _check_flash("fa2", case)


FWD_3 = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, "
    "Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BWD_3 = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq = None, Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, "
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, float softcap = 0.0, bool deterministic = False, "
    "int sm_margin = 0) -> "
)
# One release returns the results, another one only its workspace.
RESULTS_3 = {
    "gradients": "(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
    "workspace": "(Tensor, Tensor, Tensor, Tensor, Tensor)",
}


def _attend_3(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    window = {"window_size": (options["window_size_left"], options["window_size_right"])}
    shared = {
        "softmax_scale": options["softmax_scale"], "causal": options["is_causal"],
        "return_attn_probs": True, **window,
    }  # fmt: skip
    if options["cu_seqlens_q"] is None:
        return flash.flash_attn_func(q, k, v, **shared)[:2]  # type: ignore[return-value]
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return flash.flash_attn_varlen_func(q, k, v, *(options[n] for n in names), **shared)[:2]  # type: ignore[return-value]


@contextmanager
def _library_3(results: str) -> Iterator[None]:
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FWD_3)
    library.define(BWD_3 + RESULTS_3[results])
    fwd_schema = torch.ops.flash_attn_3.fwd.default._schema
    bwd_schema = torch.ops.flash_attn_3.bwd.default._schema

    def named(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}

    def fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        options = named(fwd_schema, args, kwargs)
        q, k, v = (options[n] for n in "qkv")
        assert q.shape[-1] % 8 == 0 and q.dtype in (torch.float16, torch.bfloat16)
        out, lse = _attend_3(q, k, v, options)
        return out, lse, q.new_empty(0), q.new_empty(0)

    def bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        options = named(bwd_schema, args, kwargs)
        assert options["dout"].stride(-1) == 1
        with torch.enable_grad():
            leaves = [options[n].detach().requires_grad_() for n in "qkv"]
            out, _ = _attend_3(*leaves, options)  # type: ignore[arg-type]
        grads = torch.autograd.grad(out, leaves, options["dout"])
        written = [
            grad if options[n] is None else options[n].copy_(grad)
            for n, grad in zip(("dq", "dk", "dv"), grads, strict=True)
        ]
        workspace = tuple(grads[0].new_zeros(grads[0].shape) for _ in range(5))
        return (*written, *workspace) if results == "gradients" else workspace

    library.impl("fwd", fwd, "CPU")
    library.impl("bwd", bwd, "CPU")
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.parametrize("results", RESULTS_3)
@FLASH_CASES
def test_flash_attention_3(monkeypatch, tmp_path, case, results):
    package = tmp_path / "flash_attn_3"
    package.mkdir()
    for name in ("__init__.py", "_C.py"):
        (package / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("FASTATTN_FA3_LIBRARY", raising=False)
    for name in ("flash_attn_3", "flash_attn_3._C"):
        monkeypatch.setitem(sys.modules, name, None)  # so that they are removed after this test
        monkeypatch.delitem(sys.modules, name)
    assert _peer("fa3", "attention").unavailable() is None
    fa_peers._third_operators.cache_clear()
    with _library_3(results):
        _check_flash("fa3", case)
    fa_peers._third_operators.cache_clear()


def _flash_attn_4(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
    block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False,
):  # fmt: skip
    assert all(side is None or side >= 0 for side in window_size)
    assert q.shape[-1] % 8 == 0
    window = tuple(-1 if side is None else side for side in window_size)
    return flash.flash_attn_func(q, k, v, 0.0, softmax_scale, causal, window), None


def _flash_attn_varlen_4(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    seqused_q=None, seqused_k=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, score_mod=None, aux_tensors=None, return_lse=False,
):  # fmt: skip
    window = tuple(-1 if side is None else side for side in window_size)
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash.flash_attn_varlen_func(q, k, v, *packing, 0.0, softmax_scale, causal, window), None


@FLASH_CASES
def test_flash_attention_4(modules: Any, case: str) -> None:
    functions = {"flash_attn_func": _flash_attn_4, "flash_attn_varlen_func": _flash_attn_varlen_4}
    modules({"flash_attn.cute.interface": functions})
    _check_flash("fa4", case)


@pytest.mark.parametrize(("name", "refused"), [("fa2", False), ("fa3", True), ("fa4", True)])
def test_head_dims_that_are_not_multiples_of_8(name: str, refused: bool) -> None:
    """FlashAttention 2 pads them in Python, the others do not."""
    workload = padded_workload("tiny", 2, 4, 33, 20, ("cpu",))
    inputs = workload.make(CPU, torch.bfloat16, torch.Generator())
    task = Task("attention", workload, CPU, torch.bfloat16, inputs)
    assert bool(_peer(name, "attention").unsupported(task)) == refused


# -- xFormers --------------------------------------------------------------------------------------
class LowerTriangularMask:
    """Aligned top left."""


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    pass


def _memory_efficient_attention(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    B, M, H, _ = query.shape
    bottom_right = isinstance(attn_bias, LowerTriangularFromBottomRightMask)
    causal = "top_left" if isinstance(attn_bias, LowerTriangularMask) else False
    if isinstance(attn_bias, Tensor):  # it does not broadcast
        assert attn_bias.shape == (B, H, M, key.shape[1]) and attn_bias.dtype == query.dtype
    out = functional.attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        mask=attn_bias if isinstance(attn_bias, Tensor) else None,
        causal="bottom_right" if bottom_right else causal,
        scale=scale,
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("case", ["full", "causal", "bias"])
def test_xformers(modules: Any, case: str) -> None:
    functions = {
        "LowerTriangularMask": LowerTriangularMask,
        "memory_efficient_attention": _memory_efficient_attention,
    }
    kinds = {"LowerTriangularFromBottomRightMask": LowerTriangularFromBottomRightMask}
    modules({"xformers.ops": functions, "xformers.ops.fmha.attn_bias": functions | kinds})
    if case == "full":
        _judge("xformers", "attention")
    _check("xformers", "attention", padded_workload("tiny", 2, 4, 32, 16, ("cpu",), **DENSE[case]))


# -- norms -----------------------------------------------------------------------------------------
def _norm_workload(op: str) -> Workload:
    return next(w for w in cases.specs()[op].workloads if w.name == "64x512")


def _liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    assert not in_place  # in place, its backward overwrites the gradient of the result
    return functional.rms_norm(X, W, eps)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_liger(modules: Any, op: str) -> None:
    functions = {
        "liger_layer_norm": lambda X, W, B, eps: functional.layer_norm(X, W, B, eps),
        "liger_rms_norm": _liger_rms_norm,
    }
    modules({"liger_kernel.transformers.functional": functions})
    _check("liger", op, _norm_workload(op))
    _judge("liger", op)


def _layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    assert x.dim() == 2 and weight.dtype is torch.float32 and bias.dtype is torch.float32
    assert not x.requires_grad or not torch.is_grad_enabled()  # there is no derivative
    wide = x.float()
    found = [wide.var(-1, unbiased=False).add(eps).rsqrt(), wide.mean(-1)]
    wanted = [s for s, on in zip(found, (return_rstd, return_mean), strict=True) if on]
    out = functional.layer_norm(x, weight, bias, eps)
    return (out, *wanted) if wanted else out


def _layernorm_bwd(x, weight, dout, rstd, mean):
    hat = (x.double() - mean.double()[:, None]) * rstd.double()[:, None]
    wide = dout.double() * weight.double()
    inner = wide - wide.mean(-1, True) - hat * (hat * wide).mean(-1, True)
    dx = (inner * rstd.double()[:, None]).to(x.dtype)
    return dx, (dout.double() * hat).sum(0).float(), dout.double().sum(0).float()


def _rmsnorm(
    x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6,
    prenorm=False,
):  # fmt: skip
    return functional.rms_norm(x, weight, eps)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_quack(modules: Any, op: str) -> None:
    functions = {"layernorm_fwd": _layernorm_fwd, "layernorm_bwd": _layernorm_bwd}
    modules({"quack.rmsnorm": functions | {"rmsnorm": _rmsnorm}})
    _check("quack", op, _norm_workload(op))
    _judge("quack", op)


# -- TransformerEngine -----------------------------------------------------------------------------
class _EngineLayerNorm(nn.Module):
    def __init__(self, normalized_shape, eps=1e-5, sequence_parallel=None, params_dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))
        self.eps = eps

    def forward(self, x):
        return functional.layer_norm(x, self.weight, self.bias, self.eps)


class _EngineRMSNorm(nn.Module):
    def __init__(self, normalized_shape, eps=1e-5, sequence_parallel=None, params_dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.eps = eps

    def forward(self, x):
        return functional.rms_norm(x, self.weight, self.eps)


class _DotProductAttention(nn.Module):
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.1,
        qkv_format="sbhd", attn_mask_type="causal", window_size=None, sequence_parallel=False,
        tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None,
        attention_type="self", softmax_scale=None,
    ):  # fmt: skip
        super().__init__()
        assert qkv_format == "bshd"
        assert attention_dropout == 0.0
        self.heads, self.channels, self.groups = num_attention_heads, kv_channels, num_gqa_groups
        kinds = {"no_mask": False, "causal": "top_left", "causal_bottom_right": "bottom_right"}
        self.options = {"causal": kinds[attn_mask_type], "scale": softmax_scale}

    def forward(self, query_layer, key_layer, value_layer, attention_mask=None):
        layers = (query_layer, key_layer, value_layer)
        # It assumes memory in the order of the shape if offsets and strides agree.
        assert all(x.is_contiguous() for x in layers)
        assert query_layer.shape[2:] == (self.heads, self.channels)
        assert key_layer.shape[2] == self.groups
        out = functional.attention(*(x.transpose(1, 2) for x in layers), **self.options)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("case", ["full", "causal", "grouped", "layer_norm", "rms_norm"])
def test_transformer_engine(modules: Any, case: str) -> None:
    kinds = {
        "LayerNorm": _EngineLayerNorm, "RMSNorm": _EngineRMSNorm,
        "DotProductAttention": _DotProductAttention,
    }  # fmt: skip
    modules({"transformer_engine.pytorch": kinds})
    if case in DENSE:
        _check("transformer-engine", "attention", _dense(**DENSE[case]))
    else:
        _check("transformer-engine", case, _norm_workload(case))
    if case in ("full", "layer_norm", "rms_norm"):
        _judge("transformer-engine", "attention" if case == "full" else case)


# -- decoders in a process of their own ------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(("name", "beams", "dtype"), [
    ("ctranslate2", 1, torch.float32),
    ("ctranslate2", 3, torch.bfloat16),
    ("onnxruntime", 1, torch.float32),
])  # fmt: skip
def test_converted_decoders(name: str, beams: int, dtype: torch.dtype) -> None:
    fast, peer = (_peer(each, generation.GENERATION, "cpu") for each in ("fastattn", name))
    if why := peer.unavailable():
        pytest.skip(f"{name} {why}")
    workload = generation._workload(DecodeSize(32, 2, 64, 2, 50, 3, 5, 4, beams), ("cpu",))
    benchmark = GenerationBenchmark(workload, CPU, dtype)
    assert peer.unsupported(benchmark.task) is None
    for candidate in (fast, peer):
        benchmark.build(candidate)
        benchmark.prepare_oracle(candidate)
        verdict = benchmark.check(candidate, "decode")
        assert verdict.ok, verdict.message
    if dtype is torch.float32:
        assert verdict.message == "3 of 3 sentences have fastattn's tokens"
    [call] = benchmark.calls(peer, "decode")
    pid = call.pid  # type: ignore[attr-defined]
    assert pid != os.getpid()
    with pytest.raises(RuntimeError, match="Error"):  # the process answers, and reports errors
        benchmark.forwards[name]({"source": torch.full((3, 5), 10**6)})
    call()
    del call
    benchmark.forwards.clear()
    assert _ends(pid)


def _ends(pid: int) -> bool:
    """Whether a child process ends within 20 seconds."""
    deadline = time.monotonic() + 20
    while any(child.pid == pid for child in multiprocessing.active_children()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _decoder_task() -> Task:
    workload = generation._workload(DecodeSize(32, 2, 64, 2, 50, 3, 5, 4), ("cpu",))
    return GenerationBenchmark(workload, CPU, torch.float32).task


@pytest.mark.slow
def test_process_of_a_decoder_that_cannot_be_built_ends(tmp_path: Path) -> None:
    """It would slow down the candidates that are measured next."""
    builds, before = tmp_path / "builds", multiprocessing.active_children()
    with pytest.raises(RuntimeError, match=r"^ValueError: no such model$"):
        OwnProcess(partial(failing_decoders.fail_to_build, builds), _decoder_task())
    for child in multiprocessing.active_children():
        assert child in before or _ends(child.pid)
    assert builds.read_text() == "built\n"


@pytest.mark.slow
def test_decoder_whose_process_ends() -> None:
    task = _decoder_task()
    decoder = OwnProcess(failing_decoders.exit_when_called, task)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="process of the decoder ended with exit code 7"):
            decoder(task.inputs)


def test_implementations_from_elsewhere(tmp_path: Path) -> None:
    """A function named by its module is a candidate with the arguments that its signature has."""
    (tmp_path / "their_kernels.py").write_text(
        "import torch.nn.functional as F\n"
        "def attention(q, k, v, *, causal=False):\n"
        "    assert causal in (False, True)\n"
        "    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)\n"
        "    return out, None\n"
    )
    files = [tmp_path / "their_kernels:attention"]
    found = cases.implementations_of("attention", "cpu", files)
    [candidate] = [c for c in found if c.name == "their_kernels:attention"]
    verdicts = {}
    for name, options in DENSE.items():
        workload = _dense(**options)
        benchmark = OpBenchmark(cases.specs()["attention"], workload, CPU, torch.float32)
        verdicts[name] = benchmark.why_unsupported(candidate)
        if verdicts[name] is None:
            benchmark.prepare_oracle(candidate)
            benchmark.build(candidate)
            assert all(benchmark.check(candidate, d).ok for d in ("fwd", "bwd"))
    assert verdicts == {
        "full": None, "causal": None, "window": "takes no window", "bias": "takes no mask",
        "grouped": None,
    }  # fmt: skip


def test_packed_sequences_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function gets tokens first. Which arguments it gets is found once for some inputs."""
    (tmp_path / "packed_kernels.py").write_text(
        "import fastattn\n"
        "def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):\n"
        "    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k\n"
        "    return fastattn.attention_varlen(q, k, v, *lengths)\n"
    )
    found = cases.implementations_of(
        "attention_varlen", "cpu", [tmp_path / "packed_kernels:attend"]
    )
    [candidate] = [c for c in found if c.name == "packed_kernels:attend"]
    benchmark = OpBenchmark(cases.specs()["attention_varlen"], PACKED, CPU, torch.float32)
    benchmark.prepare_oracle(candidate)
    benchmark.build(candidate)
    assert all(benchmark.check(candidate, d).ok for d in ("fwd", "bwd"))
    asked, arguments = [], implementation.Implementation.arguments
    monkeypatch.setattr(
        implementation.Implementation,
        "arguments",
        lambda *call: asked.append(call) or arguments(*call),
    )
    forward = candidate.build(benchmark.task)
    for _ in range(3):
        forward(benchmark.inputs)
    assert len(asked) == 2  # when it was built, and for these inputs
