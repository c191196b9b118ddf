"""The norms in CUDA C++, computed without a GPU and judged like any backend.

The kernels run thread by thread on the simulator in tests/sm90/sm90_on_host, behind the real
bindings: Python, schemas, workspace, choice of the instance and tiling are those of a GPU. Tensors
and workspace lie before inaccessible pages.
"""

import ctypes
import functools
import itertools
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import norms_on_host as on_host
import pytest
import torch
from norms_on_host import Tiling
from sm90_on_host.build import Machine, missing
from sm90_plans.shim import compiled
from torch import Tensor

import fastattn
from fastattn.ops.layer_norm import cuda, spec
from fastattn.ops.layer_norm.calls import (
    AddLayerNormBackwardCall,
    LayerNormBackwardCall,
    LayerNormCall,
)
from fastattn.testing.check import check_sample
from fastattn.testing.oracle import Oracle, run_op
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import Sample

pytestmark = pytest.mark.slow
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPECS = {each.name: each for each in spec.SPECS}


def _own(op: str, name: str, reason: str, shape: tuple[int, ...], **options: Any) -> Sample:
    dtypes = options.pop("dtypes", (BF16, FP16, FP32))
    make = partial(spec.make_inputs, op=op, shape=shape, **options)
    return Sample(name, reason, make, ("x", "residual", "weight", "bias", "x_bias"), dtypes)


def _each_width(op: str) -> list[Sample]:
    """Every tiling: short rows, rows of a part of a warp, of some warps, of a block, of parts."""
    add = {"x_bias": True, "dropout_p": 0.3} if op == "add_layer_norm" else {}
    found = [
        _own(op, f"columns_{N}", "a tiling of its own", (rows, N), **add)
        for rows, N in ((70, 8), (9, 96), (19, 256), (9, 264), (5, 1000), (3, 4104), (2, 8200),
                        (1, 16384), (1, 16392))
    ]  # fmt: skip
    return [*found, _own(op, "parts", "three parts", (1, 16_392), dtypes=(FP32,), **add)]


OWN = {op: _each_width(op) for op in SPECS}
OWN["add_layer_norm"] += [
    _own("add_layer_norm", "half_x", "x in bf16, the residual in fp32", (9, 72), dtypes=(BF16,),
         wide_residual=True, wide_parameters=True, x_bias=True, dropout_p=0.1),
    _own("add_layer_norm", "plain_sum", "no dropout, no x_bias: the norm's own backward", (9, 520)),
    _own("add_layer_norm", "wide_sum", "two strips", (3, 8200), x_bias=True),
]  # fmt: skip
# In bf16, with all properties. The others in one dtype each: the widths of the three ops in
# different ones.
PROPERTIES = {
    "layer_norm": ("odd_width", "columns_256", "columns_1000"),
    "add_layer_norm": ("dropout", "columns_96", "no_parameters"),
    "rms_norm": ("model", "columns_264"),
}


def _cases(properties: bool) -> list[Any]:
    found = []
    for first, op in enumerate(SPECS.values()):
        for number, sample in enumerate((*op.samples, *OWN[op.name]), first):
            names = PROPERTIES[op.name]
            if sample.name in names if properties else sample.name != "wide_row":  # but "parts"
                dtype = BF16 if properties else sample.dtypes[number % len(sample.dtypes)]
                name = f"{op.name}-{sample.name}-{str(dtype)[6:]}"
                found.append(pytest.param(op, sample, dtype, id=name))
    return found


@pytest.fixture(scope="session")
def machine() -> Callable[[str], Machine]:
    """The machine for rows of a type."""
    if reason := missing():
        pytest.skip(reason)
    return functools.cache(on_host.machine)


@pytest.fixture
def simulate(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """From then on the reference is the simulated backend."""

    def launch(op: str, problem: int, dtype: str, parameter_dtype: str) -> str | None:
        types = map(on_host.index_of, (dtype, parameter_dtype))
        return machine(dtype).call(op, ctypes.c_void_p(problem), *types)

    on_host.use(monkeypatch, launch)
    return lambda: on_host.replace(monkeypatch)


@pytest.mark.parametrize("op, sample, dtype", _cases(properties=True))
def test_properties(simulate, op, sample, dtype):
    """Forward and backward against fp64 with the one tolerance; the same bits in every run and in
    every batch.
    """
    oracle = Oracle(op, sample, dtype)  # computed by the reference
    simulate()
    rows = check_sample(oracle, "reference", torch.device("cpu"))
    assert not [row for row in rows if row.status != "ok"], rows


@pytest.mark.parametrize("kilobytes, name", [(100, "add_layer_norm"), (164, "layer_norm")])
def test_less_shared_memory(simulate, machine, kilobytes, name):
    """Rows are copied one at a time, without their statistics and by fewer thread blocks, or two at
    a time with them; each block computes several rows.
    """
    library = machine("kFloat32").library
    library.norm_shared_memory(kilobytes << 10)
    try:
        test_properties(simulate, SPECS[name], _own(name, "several", "", (40, 520)), FP32)
    finally:
        library.norm_shared_memory(228 << 10)


@pytest.mark.parametrize("op, sample, dtype", _cases(properties=False))
def test_values(simulate, op, sample, dtype):
    oracle = Oracle(op, sample, dtype)
    simulate()
    with poisoned_results():
        results = run_op(op, sample, sample.inputs("cpu", dtype), "reference")
    for name, value in results.items():
        comparison = oracle.judge(name, value)
        assert comparison.ok, f"{name}: {comparison.message}"


@pytest.mark.usefixtures("simulate")
@pytest.mark.parametrize("name", SPECS)
def test_another_backward_follows_the_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper, where the backward is another backend's: the statistics mean the same."""
    op, sample = SPECS[name], OWN[name][1]
    oracle = Oracle(op, sample, BF16)
    on_host.replace(monkeypatch, [f"{name}_fwd"])
    for result, value in run_op(op, sample, sample.inputs("cpu", BF16), "reference").items():
        comparison = oracle.judge(result, value)
        assert comparison.ok, f"{result}: {comparison.message}"


# -- what samples do not have ----------------------------------------------------------------------
def _add(x: Tensor, residual: Tensor, **options: Any) -> list[Tensor]:
    """The results and gradients of add_layer_norm with these tensors as leaves."""
    leaves = {"x": x, "residual": residual, **options}
    leaves = {
        name: value.detach().requires_grad_(True) if value.is_floating_point() else value
        for name, value in leaves.items()
    }
    outputs = fastattn.add_layer_norm(**leaves, dropout_p=0.2, return_sum=True, backend="reference")
    wanted = [x for x in leaves.values() if x.requires_grad]
    gradient = sum(out.double().sin().sum() for out in outputs)
    return [*outputs, *torch.autograd.grad(gradient, wanted)]


def test_dtypes_may_all_differ(simulate: Callable[[], None]) -> None:
    """Parameters are then converted to fp32; x is read, and its gradient written, in any dtype."""
    N = 72
    given = {
        "x": torch.randn(5, N).half(), "residual": torch.randn(5, N).bfloat16(),
        "x_bias": torch.randn(N).half(), "weight": torch.randn(N),
        "bias": torch.randn(N).bfloat16(), "dropout_seed": torch.tensor([7]),
    }  # fmt: skip
    expected = _add(**given)
    simulate()
    for actual, wanted in zip(_add(**given), expected, strict=True):
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(actual, wanted)


def test_the_rounded_sum_is_normalised(simulate: Callable[[], None]) -> None:
    simulate()
    x, residual = (100 * torch.randn(5, 72).bfloat16() for _ in range(2))
    arguments = (x, residual, None, None, None, 1e-5, 0.0, None, 0)
    y, z, *statistics = torch.ops.fastattn.add_layer_norm_fwd(*arguments, backend="reference")
    normalised = torch.ops.fastattn.layer_norm_fwd(z, None, None, 1e-5, backend="reference")
    for one, other in zip((y, *statistics), normalised, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_nan_makes_its_row_nan(simulate: Callable[[], None], op: str) -> None:
    x = torch.randn(3, 72).bfloat16()
    x[1, 5] = torch.nan
    arguments = (x, None, None, 1e-5) if op == "layer_norm" else (x, None, 1e-5)
    launch = getattr(torch.ops.fastattn, f"{op}_fwd")
    expected = launch(*arguments, backend="reference")
    simulate()
    for actual, wanted in zip(launch(*arguments, backend="reference"), expected, strict=True):
        assert wanted[1].isnan().all()
        torch.testing.assert_close(actual, wanted, equal_nan=True)


@pytest.mark.parametrize("N", [72, 8200])
def test_gradient_of_the_sum_alone(simulate: Callable[[], None], N: int) -> None:
    """dy is None: z and weight may be anything, and weight and bias have gradients of 0."""
    simulate()
    dz, z = torch.randn(3, N).bfloat16(), torch.full((3, N), torch.nan).bfloat16()
    w, row = torch.randn(N).bfloat16(), torch.full((3,), torch.nan)
    w[1], w[-1] = torch.nan, torch.inf
    dx, dresidual, dx_bias, dweight, dbias = torch.ops.fastattn.add_layer_norm_bwd(
        None, dz, z, w, w, w, row, row, 1e-5, torch.float32, 0.0, None, 0, [True] * 5,
        backend="reference",
    )  # fmt: skip
    assert torch.equal(dx, dz.float()) and torch.equal(dresidual, dz)
    assert torch.equal(dx_bias, dz.float().sum(0).bfloat16())
    assert not dweight.any() and not dbias.any()


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_rows_without_columns(simulate: Callable[[], None], op: str) -> None:
    simulate()
    x = torch.empty(3, 0, requires_grad=True)
    assert getattr(fastattn, op)(x, backend="reference").shape == (3, 0)
    statistics = getattr(torch.ops.fastattn, f"{op}_fwd")
    arguments = (x, None, None, 1e-5) if op == "layer_norm" else (x, None, 1e-5)
    for statistic in statistics(*arguments, backend="reference")[1:]:
        assert statistic.isnan().all()


def test_offsets_of_more_than_32_bits(simulate: Callable[[], None]) -> None:
    """Rows 2^31 elements apart, in memory of which few pages exist."""
    N, stride, rows = 40, 1 << 31, 3
    reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, ((rows - 1) * stride + N) * 2, flags=reserved)
    x = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((rows, N), (stride, 1))
    x.copy_(torch.randn(rows, N))
    dy, row = torch.randn(rows, N).bfloat16(), torch.empty(rows)
    y, dx, none = torch.empty_like(dy), torch.empty_like(dy), torch.empty(0)
    cuda.layer_norm_fwd(LayerNormCall(x, None, None, 1e-5), y, mean := row.clone(), row)
    near = x.clone().float().requires_grad_()
    expected = torch.nn.functional.layer_norm(near, (N,))
    torch.testing.assert_close(y, expected.detach().bfloat16())
    call = LayerNormBackwardCall(dy, x, None, None, mean, row, 1e-5, [True, False, False])
    cuda.layer_norm_bwd(call, dx, none, none)
    expected.backward(dy.float())
    torch.testing.assert_close(dx, near.grad.bfloat16())


# -- what the library plans ------------------------------------------------------------------------
@pytest.fixture
def tilings(monkeypatch: pytest.MonkeyPatch) -> list[Tiling]:
    """Tilings of launches, which compute nothing."""
    if reason := missing():
        pytest.skip(reason)
    made: list[Tiling] = []
    on_host.use(
        monkeypatch,
        lambda op, problem, *_: made.append(on_host.tiling_of(op, problem)),
        multiprocessors=132,
    )
    return made


def _forward(rows: int, N: int, dtype: torch.dtype) -> None:
    x = torch.empty(rows, N, dtype=dtype)
    statistics = torch.empty(rows), torch.empty(rows)
    cuda.layer_norm_fwd(LayerNormCall(x, None, None, 1e-5), torch.empty_like(x), *statistics)


def _backward(rows: int, N: int, dtype: torch.dtype, add: bool = False) -> None:
    w, row = torch.empty(N, dtype=dtype), torch.empty(rows)
    x = w.expand(rows, N)
    if add:
        call = AddLayerNormBackwardCall(
            x, x, x, w, w, w, row, row, 1e-5, dtype, 0.0, None, 0, [True] * 5
        )
        cuda.add_layer_norm_bwd(call, x, x, w, w, w)
    else:
        call = LayerNormBackwardCall(x, x, w, w, row, row, 1e-5, [True] * 3)
        cuda.layer_norm_bwd(call, x, w, w)


def test_copied_rows_fit(tmp_path: Path) -> None:
    """The thread blocks that run at the same time share a multiprocessor's memory, of which each
    needs 1.5 KB otherwise. Where one stage does not fit in all of them, there are fewer.
    """
    source = """#include "layer_norm/norm_cuda.h"
using namespace fastattn;
extern "C" void plan(int columns, bool is_float, bool has_dz, int shared_memory, int* result) {
  norm::BackwardProblem p = {};
  p.type = p.parameter_type = is_float ? DType::kFloat32 : DType::kBFloat16;
  p.columns = columns;
  p.rows = 1 << 18;
  p.dy.data = p.z.data = &p;
  p.dz.data = has_dz ? &p : nullptr;
  norm::plan_backward(p, true, 132);
  result[0] = norm::plan_ring(p, shared_memory);
  result[1] = norm::threads_of(p.tiling);
  result[2] = p.stages;
  result[3] = p.lines * p.strips;
  result[4] = p.copies_statistics;
  result[5] = p.passes * p.lines * p.tiling.rows >= p.rows;
}"""
    plan, result = compiled(tmp_path, source).plan, (ctypes.c_int * 6)()
    fewer, without_statistics = set(), set()
    for columns, is_float, has_dz in itertools.product((8, 512, 1024, 4096, 16384), (0, 1), (0, 1)):
        few = is_float or columns <= 8192  # 16 columns of a thread
        of_rows = (3 if has_dz else 2) * (64 if is_float or not few else 32)
        for kilobytes in (100, 164, 228):
            plan(columns, is_float, has_dz, kilobytes << 10, result)
            used, threads, stages, lines, copied, covered = result
            assert used == stages * threads * (of_rows + 8 * copied) and 1 <= stages <= 3
            assert covered
            resident = max(lines // 132, 1)
            assert resident * (used + 1536) <= kilobytes << 10
            # Statistics do not take the place of a stage.
            one_more = resident * ((stages + 1) * threads * of_rows + 1536)
            assert stages == 3 or one_more > kilobytes << 10
            if resident * threads < 512:
                fewer.add((kilobytes, of_rows))
            if few and not copied:
                without_statistics.add((kilobytes, of_rows, threads))
    assert fewer == {(100, 192)}
    assert {(kilobytes, of_rows) for kilobytes, of_rows, _ in without_statistics} >= fewer
    assert not [kilobytes for kilobytes, *_ in without_statistics if kilobytes == 228]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("N", [1, 8, 24, 100, 256, 257, 260, 512, 768, 1024, 4096, 16384, 100_000])
def test_tilings(tilings: list[Tiling], N: int, dtype: torch.dtype) -> None:
    """The registers of a row's threads hold the whole row, if a block can have enough threads, and
    the tiling of a row does not depend on the number of rows. Registers hold 32 KB of a row.
    """
    for launch in (_forward, _backward, partial(_backward, add=True)):
        tilings.clear()
        for rows in (1, 300):
            launch(rows, N, dtype)
        first, t = tilings
        assert t.width == (16 // dtype.itemsize if N % (16 // dtype.itemsize) == 0 else 1)
        assert (first.width, first.values, first.threads, first.rows, first.strips) == (
            t.width, t.values, t.threads, t.rows, t.strips,
        )  # fmt: skip
        assert t.threads & (t.threads - 1) == 0 and t.threads * t.rows <= 512
        assert t.threads * t.values >= N or t.threads == 512
        assert t.threads < 2 or t.threads == 512 or t.threads * t.values < 2 * max(N, 32 * t.values)
        if launch is _forward and t.width > 1 and N * dtype.itemsize <= 1 << 15:
            assert t.threads * t.values >= N
        assert t.strips == (1 if launch is _forward else -(-N // (t.threads * t.values)))


@pytest.mark.parametrize("N", [8, 512, 4096, 16384, 100_000])
@pytest.mark.parametrize("add", [False, True])
def test_all_thread_blocks_of_a_backward_are_resident(tilings, N, add):
    """512 threads of a multiprocessor, which may take 128 registers each; none is without rows."""
    for rows in (1, 40, 1 << 18):
        _backward(rows, N, BF16, add)
        t = tilings[-1]
        blocks = t.lines * t.strips
        assert blocks * t.threads * t.rows <= max(132 * 512, t.strips * 512)
        assert (t.lines - 1) * t.rows < rows
    assert blocks * t.threads * t.rows > 132 * 512 / 2


@pytest.mark.parametrize("section", [0, 1, 2, 3])
def test_a_short_section_of_the_workspace_is_detected(simulate, section):
    """Each section is accessed up to its end, and accesses behind it fault."""
    simulate()
    sample = _own("add_layer_norm", "strips", "every section", (2, 16_388), x_bias=True)
    on_host.HOST.native.on_host_short_section(section)
    try:
        with pytest.raises(RuntimeError, match="there is no memory"):
            run_op(SPECS["add_layer_norm"], sample, sample.inputs("cpu", FP32), "reference")
    finally:
        on_host.HOST.native.on_host_short_section(-1)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    x, wide = torch.empty(3, 8), torch.empty(3, 8, dtype=torch.float64)
    refusal = cuda.layer_norm_fwd_unsupported
    assert refusal(LayerNormCall(x, None, None, 1e-5)) is None
    assert "got torch.float64" in str(refusal(LayerNormCall(wide, None, None, 1e-5)))
    assert "got torch.float64" in str(refusal(LayerNormCall(x, wide[0], None, 1e-5)))
    long = torch.empty(1, dtype=BF16).expand((1 << 30) + 1)
    assert "up to 1073741824 elements" in str(refusal(LayerNormCall(long, None, None, 1e-5)))
