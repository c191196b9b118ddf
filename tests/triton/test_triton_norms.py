"""The norms in Triton: values, tiles, launches, and what the compilers make of the kernels.

On a GPU every sample runs natively. Without one, test_in_the_interpreter.py runs this file in
Triton's interpreter, on samples that are small enough, and what ships is compiled for GPUs that are
not there: no spills, all programs of a multiprocessor resident, shared memory within the limit.
"""

import re
from functools import partial
from typing import Any

import pytest
import torch
from compiled_kernels import (
    GENERATIONS,
    GPUS,
    SHARED_MEMORY,
    allocated_for,
    check_memory,
    check_registers,
    compiled_for,
    compiles,
    in_turns,
    instructions,
    spills_and_registers,
)
from torch import Tensor
from triton_values import DEVICE, NATIVE, interpreted, runs

import fastattn
from fastattn.ops import _env
from fastattn.ops._triton_launch import LaunchCache
from fastattn.ops.layer_norm import config, spec
from fastattn.ops.layer_norm import triton as kernels
from fastattn.ops.layer_norm.calls import (
    AddLayerNormBackwardCall,
    AddLayerNormCall,
    LayerNormBackwardCall,
    LayerNormCall,
    RmsNormCall,
)
from fastattn.ops.layer_norm.config import BackwardConfig, ForwardConfig
from fastattn.ops.layer_norm.rows import with_one_stride
from fastattn.testing.check import check_sample
from fastattn.testing.compare import compare
from fastattn.testing.oracle import Oracle
from fastattn.testing.spec import OpSpec, Sample

SPECS = {s.name: s for s in spec.SPECS}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# -- values ---------------------------------------------------------------------------------------
def _check(op: OpSpec, sample: Sample, dtype: torch.dtype) -> None:
    rows = check_sample(Oracle(op, sample, dtype), "triton", DEVICE)
    assert not [row for row in rows if row.status != "ok"]


SMALL = [
    pytest.param(op, sample, id=f"{op.name}-{sample.name}")
    for op in spec.SPECS
    for sample in op.samples
    if "interpreter" in sample.tags or sample.name == "no_rows"
]


@interpreted
@pytest.mark.parametrize("op, sample", SMALL)
def test_sample(op: OpSpec, sample: Sample) -> None:
    _check(op, sample, BF16)


@interpreted
@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "rms_norm"])
def test_fp32_parameters(op: str) -> None:
    sample = next(s for s in SPECS[op].samples if s.name == "fp32_parameters")
    _check(SPECS[op], sample, FP16)


def _sample(op: str, shape: tuple[int, ...], **options: Any) -> Sample:
    make = partial(spec.make_inputs, op=op, shape=shape, **options)
    return Sample("made", "made here", make, ("x", "residual", "weight", "bias", "x_bias"))


def _use(
    monkeypatch: pytest.MonkeyPatch,
    forward: ForwardConfig | None = None,
    backward: BackwardConfig | None = None,
) -> None:
    """Makes every call use these configs, with empty caches."""
    if forward is not None:
        monkeypatch.setattr(kernels, "forward_config", lambda *_: forward)
    if backward is not None:
        monkeypatch.setattr(kernels, "backward_config", lambda *_: backward)
    monkeypatch.setattr(kernels, "_forward_plans", LaunchCache())
    monkeypatch.setattr(kernels, "_backward_plans", LaunchCache())


# For rows of 70 columns: one block of 128, two of 64, three of 32.
FORWARD_TILINGS = {
    "tiles": ForwardConfig(4, 128, 4),
    "parameters_late": ForwardConfig(1, 128, 4, parameters=config.AFTER_STATISTICS),
    "persistent": ForwardConfig(2, 128, 4, 1, config.BEFORE, 2),
    "blocks": ForwardConfig(1, 32, 4, stages=2),
}
BACKWARD_TILINGS = {
    "whole": BackwardConfig(4, 128, 4, 1, 2),
    "weight_again": BackwardConfig(1, 128, 4, 3, 1, keep_weight=False),
    "halves": BackwardConfig(2, 64, 4, 2, 1, 2, keep_weight=False),
    "blocks": BackwardConfig(4, 32, 4, 3, 1, 0),
}


@runs
@pytest.mark.parametrize(
    "forward, backward", list(zip(FORWARD_TILINGS, BACKWARD_TILINGS, strict=True))
)
@pytest.mark.parametrize("op", ["add_layer_norm", "rms_norm"])
def test_results_do_not_depend_on_tiles(op, forward, backward, monkeypatch):
    """add_layer_norm with all options, and a norm without a mean."""
    _use(monkeypatch, FORWARD_TILINGS[forward], BACKWARD_TILINGS[backward])
    everything = {"x_bias": True, "dropout_p": 0.3} if op == "add_layer_norm" else {}
    _check(SPECS[op], _sample(op, (1, 9, 70), offset=30.0, **everything), FP32)


@runs
def test_long_rows_keep_small_deviations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values around 1000 in several blocks: a sum of squares would lose the variance."""
    _use(monkeypatch, ForwardConfig(1, 256, 4))
    _check(SPECS["layer_norm"], _sample("layer_norm", (1, 2, 1100), offset=1000.0), FP32)


@runs
@pytest.mark.slow
def test_a_row_of_a_million(monkeypatch: pytest.MonkeyPatch) -> None:
    if not NATIVE:  # the interpreter is fast only with few, large blocks
        block = 1 << 16
        backward, total = BackwardConfig(1, block, 4, 2, 1, 0), config.SumConfig(2, block, 4)
        _use(monkeypatch, ForwardConfig(1, block, 4), backward)
        monkeypatch.setattr(kernels, "sum_config", lambda *_: total)
        monkeypatch.setattr(kernels, "row_sums_config", lambda *_: total)
    _check(SPECS["layer_norm"], _sample("layer_norm", (1, 1 << 20), offset=5.0), FP16)


@runs
def test_offsets_have_64_bits() -> None:
    """Two rows that are 2^31 elements apart; the memory between them is never accessed."""
    storage = torch.empty((1 << 31) + 64, dtype=FP16, device=DEVICE)
    x = storage.as_strided((2, 64), (1 << 31, 1)).copy_(torch.randn(2, 64)).requires_grad_()
    near = x.detach().contiguous().requires_grad_()
    dy = torch.randn(2, 64, device=DEVICE).half()
    results = []
    for rows in (x, near):
        y = fastattn.layer_norm(rows, backend="triton")
        results.append((y, *torch.autograd.grad(y, rows, dy)))
    for far_result, near_result in zip(*results, strict=True):
        assert torch.equal(far_result, near_result)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_31_elements() -> None:
    x = torch.empty((1 << 21) + 3, 1024, dtype=BF16, device=DEVICE).normal_().requires_grad_()
    y = fastattn.layer_norm(x, backend="triton")
    (dx,) = torch.autograd.grad(y, x, x.detach())
    last = x.detach()[-3:].clone().requires_grad_()
    y_last = fastattn.layer_norm(last, backend="triton")
    (dx_last,) = torch.autograd.grad(y_last, last, last.detach())
    assert torch.equal(y[-3:], y_last) and torch.equal(dx[-3:], dx_last)


@runs
def test_rows_without_columns() -> None:
    ops = torch.ops.fastattn
    x = torch.empty(3, 0, device=DEVICE)
    y, mean, rstd = ops.layer_norm_fwd(x, None, None, 1e-5, backend="triton")
    assert y.shape == x.shape and bool(mean.isnan().all()) and bool(rstd.isnan().all())
    w = torch.empty(0, device=DEVICE)
    needs = [True, True, True]
    gradients = ops.layer_norm_bwd(x, x, w, w, mean, rstd, 1e-5, needs, backend="triton")
    assert [list(g.shape) for g in gradients] == [[3, 0], [0], [0]]


def _add_inputs(M: int, N: int) -> dict[str, Any]:
    inputs = spec.make_inputs(
        torch.Generator().manual_seed(M), FP32, op="add_layer_norm", shape=(M, N), x_bias=True,
        dropout_p=0.3,
    )  # fmt: skip
    return {k: x.to(DEVICE) if isinstance(x, Tensor) else x for k, x in inputs.items()}


@runs
@pytest.mark.parametrize("N", [33, 600], ids=["short", "long"])
def test_backward_of_the_sum_alone(N: int) -> None:
    """Without a gradient of the norm's result, gradients of weight and bias are 0."""
    inputs = _add_inputs(5, N)
    names = ("x", "residual", "x_bias", "weight", "bias")
    tensors = [inputs[n].requires_grad_() for n in names]
    dz = torch.randn(5, N, device=DEVICE)
    grads = {}
    for backend in ("triton", "reference"):
        _, z = fastattn.add_layer_norm(**inputs, backend=backend)
        grads[backend] = torch.autograd.grad(z, tensors, dz, materialize_grads=True)
    for name, actual, expected in zip(names, grads["triton"], grads["reference"], strict=True):
        if name != "x_bias":
            assert torch.equal(actual, expected), name
    exact = grads["reference"][0].double().sum(0)
    magnitude = grads["reference"][0].double().abs().sum(0)
    result = compare(grads["triton"][2], exact, grads["reference"][2], magnitude, 0)
    assert result.ok, result.message


@interpreted  # compilers may contract multiply-adds differently
@pytest.mark.parametrize("N", [33, 257, 600], ids=["whole", "halves", "blocks"])
@pytest.mark.parametrize("op", ["add_layer_norm", "layer_norm", "rms_norm"])
def test_only_needed_gradients_are_written(op: str, N: int) -> None:
    """A gradient has the same bits whether it is computed alone or with the others."""
    inputs = _add_inputs(6, N)
    x, residual, x_bias, w, b = (inputs[n] for n in ("x", "residual", "x_bias", "weight", "bias"))
    options = (0.3, inputs["dropout_seed"], 3)
    fwd, bwd = (getattr(torch.ops.fastattn, f"{op}_{way}") for way in ("fwd", "bwd"))
    dy, dz = torch.randn(2, 6, N, device=DEVICE)
    if op == "add_layer_norm":
        _, z, mean, rstd = fwd(x, residual, x_bias, w, b, 1e-5, *options, backend="triton")
        args = (dy, dz, z, x_bias, w, b, mean, rstd, 1e-5, FP32, *options)
    elif op == "layer_norm":
        _, mean, rstd = fwd(x, w, b, 1e-5, backend="triton")
        args = (dy, x, w, b, mean, rstd, 1e-5)
    else:
        _, rstd = fwd(x, w, 1e-5, backend="triton")
        args = (dy, x, w, rstd, 1e-5)

    def run(needs: list[bool]) -> list[Tensor]:
        return bwd(*args, needs, backend="triton")

    count = {"add_layer_norm": 5, "layer_norm": 3, "rms_norm": 2}[op]
    whole = run([True] * count)
    for i, expected in enumerate(whole):
        alone = run([j == i for j in range(count)])
        assert torch.equal(alone[i], expected)
        assert all(x.shape == (0,) for j, x in enumerate(alone) if j != i)


def _with_gaps(generator: torch.Generator, dtype: torch.dtype, name: str) -> dict[str, Any]:
    """Inputs of which one, `name`, is not contiguous."""
    inputs = spec.make_inputs(generator, dtype, op="add_layer_norm", shape=(5, 48), x_bias=True)
    x = inputs.get(name)
    if x is not None:
        inputs[name] = torch.stack([x, x], 1)[:, 0] if x.dim() == 1 else _odd_rows(x)
        assert not inputs[name].is_contiguous()
    return inputs


def _odd_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x[:, :1]], 1)[:, :-1]


@runs
@pytest.mark.parametrize("name", ["x", "residual", "weight", "bias", "x_bias"])
def test_calls_that_differ_in_strides(name: str) -> None:
    """A plan cached for one call is not used for the other."""
    for gaps in ("", name):
        make = partial(_with_gaps, name=gaps)
        gradients = ("x", "residual", "weight", "bias", "x_bias")
        _check(SPECS["add_layer_norm"], Sample("strides", "", make, gradients), FP16)


@interpreted  # compilers may contract multiply-adds differently
def test_gradients_that_differ_in_strides() -> None:
    x = torch.randn(5, 48, device=DEVICE).requires_grad_()
    w = torch.randn(48, device=DEVICE).requires_grad_()
    y = fastattn.layer_norm(_odd_rows(x), w, backend="triton")
    dy = torch.randn(5, 48, device=DEVICE)
    expected = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    actual = torch.autograd.grad(y, (x, w), _odd_rows(dy))
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@runs
def test_another_number_of_rows_uses_the_cached_plan() -> None:
    """The number of rows of packed batches changes with every call."""
    sizes = []
    for M in (3, 4, 5, 64):
        inputs = _add_inputs(M, 48)
        inputs["weight"].requires_grad_()
        y, _ = fastattn.add_layer_norm(**inputs, backend="triton")
        y.sum().backward()
        sizes.append((len(kernels._forward_plans), len(kernels._backward_plans)))
    assert len(set(sizes)) == 1


# -- on the host ----------------------------------------------------------------------------------
def test_rows_are_copied_only_without_a_single_stride() -> None:
    x = torch.randn(4, 6, 8)
    cases = {
        "contiguous": (x, 8), "wider rows": (torch.randn(4, 6, 16)[..., :8], 16),
        "one of several": (x[:, 2], 48), "one of several, kept": (x[:, 2:3], 48),
        "repeated": (x[0, 0].expand(5, 8), 0), "vector": (x[0, 0], 8),
        "one row": (torch.randn(1, 3, 16)[:, 1:2, :8], 8), "column": (torch.randn(6, 4)[:, 1:2], 4),
    }  # fmt: skip
    for name, (rows, stride) in cases.items():
        found, found_stride = with_one_stride(rows)
        assert found.data_ptr() == rows.data_ptr() and found_stride == stride, name
    for rows in (x.mT, x[:, 1:4], x.transpose(0, 1)):
        found, stride = with_one_stride(rows)
        assert found.is_contiguous() and torch.equal(found, rows) and stride == rows.shape[-1]


def test_refuses_what_it_cannot_run() -> None:
    x, wide = torch.randn(3, 8), torch.randn(3, 8).double()
    refusal = kernels.layer_norm_fwd_unsupported
    assert refusal(LayerNormCall(x, None, None, 1e-5)) is None
    assert "got torch.float64" in str(refusal(LayerNormCall(wide, None, None, 1e-5)))
    assert "got torch.float64" in str(refusal(LayerNormCall(x, wide[0], None, 1e-5)))
    args = (x, None, x, None, None, None, x[:, 0], x[:, 0], 1e-5)
    for dtype in (FP16, torch.float64):
        call = AddLayerNormBackwardCall(*args, dtype, 0.0, None, 0, [True] * 5)
        refused = kernels.add_layer_norm_bwd_unsupported(call) is not None
        assert refused == (dtype == torch.float64)
    long = torch.empty(1, (1 << 30) + 1, dtype=FP16, device="meta")
    assert "rows of up to" in str(refusal(LayerNormCall(long, None, None, 1e-5)))


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_env, "architecture", lambda *_: "sm_75")
    refusal = kernels.rms_norm_fwd_unsupported(RmsNormCall(torch.randn(3, 8), None, 1e-5))
    assert refusal == "needs compute capability 8.0 or newer, got sm_75"


LENGTHS = (1, 3, 64, 100, 512, 1000, 1024, 2048, 4096, 5000, 8192, 16384, 20000, 1 << 20)


@pytest.mark.parametrize("arch", GPUS)
def test_every_row_length_has_a_config(arch: str) -> None:
    for N in LENGTHS:
        aligned = N % 16 == 0
        for add in (False, True):
            c = config.forward_config(arch, N, add, aligned)
            assert c.BLOCK >= N or (c.ROWS == 1 and N > 4096)
            assert c.ROWS * c.BLOCK <= 32 * 32 * c.warps * (2 if arch == "gfx942" else 1)
        for itemsize, tensors, sums in ((2, 2, 2), (2, 3, 2), (2, 3, 3), (4, 2, 2), (4, 3, 1)):
            b = config.backward_config(arch, N, itemsize, tensors, sums, aligned)
            whole = N <= b.ROW_BLOCKS * b.BLOCK
            assert whole if b.ROW_BLOCKS else N > (8192 if aligned else 2048)
            if arch != "gfx942":
                registers = b.maxnreg or 255
                assert b.programs * b.warps * 32 * registers <= 1 << 16
            read = tensors + 2 * (b.ROW_BLOCKS == 2)
            staged = (b.stages - 1) * b.ROWS * b.BLOCK * itemsize * read
            assert _all_resident(b, staged + 512, arch)  # 512: the most that sums take


def _all_resident(c: config.BackwardConfig, shared: int, arch: str) -> bool:
    """Whether all programs of a multiprocessor fit in its shared memory, which on NVIDIA is 1 KB
    more than a program may have, and of which CUDA reserves 1 KB for each.
    """
    if arch == "gfx942":
        return shared <= SHARED_MEMORY[arch]
    return c.programs * (shared + 1024) <= SHARED_MEMORY[arch] + 1024


def test_searches_start_from_the_default_config() -> None:
    for N in (64, 512, 4096, 16384):
        for add in (False, True):
            forward = config.forward_candidates("sm_90", N, add)
            assert forward[0] == config.forward_config("sm_90", N, add)
            assert len(set(forward)) == len(forward) > 10
        backward = config.backward_candidates("sm_90", N, 2, 2, 2)
        assert backward[0] == config.backward_config("sm_90", N, 2, 2, 2)
        assert len(set(backward)) == len(backward) > 10


# -- compilers ------------------------------------------------------------------------------------
def _empty(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _launch(
    direction: str, N: int, dtype: torch.dtype = BF16, parameters: torch.dtype | None = None, *,
    add: bool = False, dz: bool = False, dropout_p: float = 0.0,
) -> None:  # fmt: skip
    """Launches a norm as its op does, on meta tensors. add: add_layer_norm with x_bias."""
    x, w = _empty(4096, N, dtype=dtype), _empty(N, dtype=parameters or dtype)
    row = _empty(4096)
    dropout = (dropout_p, _empty(1, dtype=torch.int64), 3)
    if direction == "fwd":
        if add:
            call = AddLayerNormCall(x, x, w, w, w, 1e-5, *dropout)
            kernels.add_layer_norm_fwd(call, x, x, row, row)
        else:
            kernels.layer_norm_fwd(LayerNormCall(x, w, w, 1e-5), x, row, row)
        return
    if add:
        backward = AddLayerNormBackwardCall(
            x, x if dz else None, x, w, w, w, row, row, 1e-5, dtype, *dropout, [True] * 5
        )
        buffers = kernels.add_layer_norm_bwd_workspace(backward)
        workspace = [_empty(*shape, dtype=kind) for shape, kind, _ in buffers]
        kernels.add_layer_norm_bwd(backward, x, x, w, w, w, *workspace)
    else:
        call = LayerNormBackwardCall(x, x, w, w, row, row, 1e-5, [True] * 3)
        buffers = kernels.layer_norm_bwd_workspace(call)
        workspace = [_empty(*shape, dtype=kind) for shape, kind, _ in buffers]
        kernels.layer_norm_bwd(call, x, w, w, *workspace)


CALLS: dict[str, Any] = {
    "fwd": partial(_launch, "fwd"),
    "fwd_fp32_parameters": partial(_launch, "fwd", parameters=FP32),
    "add_fwd": partial(_launch, "fwd", add=True, dropout_p=0.1),
    "bwd": partial(_launch, "bwd"),
    "bwd_fp32": partial(_launch, "bwd", dtype=FP32),
    "add_bwd": partial(_launch, "bwd", add=True, dz=True, dropout_p=0.1),
}


def _compile_cases() -> list[Any]:
    """(arch, row length, call): a few cases in every run, more in the slow run."""
    always = {
        ("sm_90", 512): ("fwd", "bwd", "add_bwd"), ("sm_90", 4096): ("add_fwd", "bwd"),
        ("sm_90", 16384): ("fwd", "bwd"), ("sm_90", 65536): ("bwd",), ("sm_80", 512): ("bwd",),
        ("sm_100", 4096): ("fwd",), ("gfx942", 512): ("fwd", "bwd"),
    }  # fmt: skip
    lengths = {"sm_90": (33, 64, 512, 1024, 4096, 4095, 8192, 16384, 65536)}
    cases = []
    for arch in (*GENERATIONS, "sm_120"):
        sizes = lengths.get(arch, (33, 512, 4096, 16384, 65536))
        pairs = in_turns(arch, sizes, CALLS, whole=(512,) if arch == "sm_90" else ())
        for N in sizes:
            for call in CALLS:
                short = call in always.get((arch, N), ())
                if short or (N, call) in pairs:
                    marks = () if short else (pytest.mark.slow,)
                    cases.append(pytest.param(arch, N, call, id=f"{arch}-{N}-{call}", marks=marks))
    return cases


@compiles
@pytest.mark.parametrize("arch, N, call", _compile_cases())
def test_compiles(arch: str, N: int, call: str) -> None:
    with compiled_for(arch) as found:
        CALLS[call](N)
    names = [kernel.metadata.name for kernel in found]
    if "bwd" in call:
        itemsize = 4 if call == "bwd_fp32" else 2
        sums, tensors = (3, 3) if call == "add_bwd" else (2, 2)
        c = config.backward_config(arch, N, itemsize, tensors, sums, N % 16 == 0)
        first = [] if c.ROW_BLOCKS else ["norm_row_sums_kernel"]
        assert names == [*first, "norm_bwd_kernel", "sum_partials_kernel"]
    else:
        whole = config.forward_config(arch, N, "add" in call, N % 16 == 0).BLOCK >= N
        assert names == ["norm_fwd_kernel" if whole else "norm_fwd_long_kernel"]
    check_memory(found, arch)
    for kernel in found:
        check_registers(kernel, arch, 16 if N == 16384 and "add" in call else 0)
        if kernel.metadata.name == "norm_bwd_kernel" and arch != "gfx942":
            assert c.programs * c.warps * 32 * spills_and_registers(kernel)[1] <= 1 << 16
            assert _all_resident(c, kernel.metadata.shared, arch)


@compiles
def test_strides_change_no_code() -> None:
    """A row has the same bits wherever the next one begins."""
    row = _empty(9)
    code = set()
    for stride in (0, 65, 65 * 16):
        x = _empty(9 * 65 * 16).as_strided((9, 65), (stride, 1))
        with compiled_for("sm_90") as found:
            kernels.layer_norm_fwd(LayerNormCall(x, None, None, 1e-5), _empty(9, 65), row, row)
        code |= {kernel.asm["ptx"] for kernel in found}
    assert len(code) == 1


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("arch", GPUS)
def test_fits_in_shared_memory(arch: str) -> None:
    """Where rows are longest, and where programs share a multiprocessor."""
    for N in (512, 8192, 16384):
        for call in ("bwd", "bwd_fp32", "add_bwd"):
            with allocated_for(arch) as found:
                CALLS[call](N)
            check_memory(found, arch)
            itemsize, *counts = (2, 3, 3) if call == "add_bwd" else (4 if "32" in call else 2, 2, 2)
            c = config.backward_config(arch, N, itemsize, *counts)
            [kernel] = [k for k in found if k.metadata.name == "norm_bwd_kernel"]
            assert _all_resident(c, kernel.metadata.shared, arch)


@compiles
def test_rows_are_loaded_in_vectors() -> None:
    """16 bytes per thread, asynchronously in the backward; single elements if the length is odd."""
    with compiled_for("sm_90") as found:
        _launch("fwd", 1024)
        _launch("bwd", 1024)
        _launch("fwd", 1023)
    forward, backward, _, odd = (kernel.asm["ptx"] for kernel in found)
    assert "ld.global.L1::evict_first" in forward and ".v4.b32" in forward
    assert not re.search(r"(ld|st)\.global\S*\.b16", forward)
    assert "cp.async.cg.shared.global" in backward
    assert re.search(r"ld\.global\S*\.b16", odd)


@compiles
def test_the_weight_is_not_staged_with_the_rows() -> None:
    """At 16384, two buffers of four blocks of 16 KB, and the statistics, are in shared memory."""
    with compiled_for("sm_90") as found:
        _launch("bwd", 16384)
    assert 128 << 10 <= found[0].metadata.shared < 132 << 10


# Row length, dtype, and the widest load of such a row, in bits.
_IN_STEPS = {"eight": (1000, BF16, 128), "four": (1004, BF16, 64), "four_fp32": (1004, FP32, 128)}


@compiles
@pytest.mark.parametrize(
    "steps", ["eight", *(pytest.param(s, marks=pytest.mark.slow) for s in ("four", "four_fp32"))]
)
def test_rows_in_steps_of_four_and_eight_are_loaded_in_vectors(steps: str) -> None:
    """Triton detects multiples of 16 only, and would load other rows element by element."""
    N, dtype, bits = _IN_STEPS[steps]
    with compiled_for("sm_90") as found:
        _launch("fwd", N, dtype, add=True, dropout_p=0.1)
        _launch("bwd", N, dtype, add=True, dz=True, dropout_p=0.1)
        x = _empty(64, N, dtype=dtype)
        kernels.rms_norm_fwd(RmsNormCall(x, x[0], 1e-5), x, _empty(64))
    for kernel in found:
        name, code = kernel.metadata.name, instructions(kernel)
        assert not re.search(r"\b(LDG|STG)\.E\.U16\b", code) or name == "sum_partials_kernel"
        if name == "norm_bwd_kernel":
            assert re.search(rf"\bLDGSTS\.E\.[\w.]*{bits}\b", code)
        elif name == "norm_fwd_kernel":
            assert re.search(rf"\bLDG\.E\.[\w.]*{bits}\b", code)
        assert re.search(rf"\bSTG\.E\.[\w.]*{bits}\b", code) or name == "sum_partials_kernel"


@runs
@pytest.mark.parametrize("N", [24, 72, 40])
def test_rows_apart_in_steps_of_eight(N: int) -> None:
    """Rows of a wider tensor, whose stride and length are divisible by different powers of two."""
    wide = torch.randn(5, N + 8, device=DEVICE)
    w, b = torch.randn(2, N, device=DEVICE)
    results = []
    for rows in (wide[:, :N], wide[:, :N].contiguous()):
        x = rows.detach().requires_grad_()
        y = fastattn.layer_norm(x, w, b, backend="triton")
        results.append((y, *torch.autograd.grad(y, x, wide[:, :N])))
    for apart, together in zip(*results, strict=True):
        assert torch.equal(apart, together)
