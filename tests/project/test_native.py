"""Native code: dropout bits in C++, CPU norms with every instruction set, decisions of the build.

The norms' samples run here with each instruction set but the best, which test_ops.py covers.
"""

import functools
import importlib.machinery
import importlib.util
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from native_build import build_script
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn import cli
from fastattn.ops import _dropout, _env, _native
from fastattn.ops.layer_norm import cpu
from fastattn.ops.layer_norm.calls import LayerNormCall
from fastattn.testing import poisoned_results
from fastattn.testing.check import Oracle, check_sample
from fastattn.testing.spec import OpSpec, Sample, all_specs

ROOT = Path(__file__).resolve().parents[2]
NORMS = ("layer_norm", "add_layer_norm", "rms_norm")
NO_LIBRARY = _native.unavailable("cpu")
needs_library = pytest.mark.skipif(NO_LIBRARY is not None, reason=f"fastattn {NO_LIBRARY}")
ISAS = () if NO_LIBRARY else _native.usable_cpu_isas()


# -- dropout bits ---------------------------------------------------------------------------------
MASK = 0xFFFFFFFF
ROW_TAG, COLUMN_TAG = 0x243F6A88, 0x85A308D3


def finalise(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D & MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & MASK
    return x ^ (x >> 16)


def keys(tag: int, seed: int, stream: int, *values: int) -> int:
    state = tag
    for value in (seed & MASK, (seed >> 32) & MASK, stream, *values):
        state = finalise(((state ^ value) + 0x9E3779B9) & MASK)
    return state


def attention_byte(seed: int, stream: int, b: int, h: int, i: int, j: int) -> int:
    row = keys(ROW_TAG, seed, stream, b, h, i // 16 * 8 + i % 8)
    column = keys(COLUMN_TAG, seed, stream, j // 16 * 8 + j % 8)
    index = 2 * (i // 8 % 2) + j // 8 % 2
    return finalise(row ^ column) >> (8 * index) & 0xFF


def row_byte(seed: int, stream: int, row: int, column: int) -> int:
    key = keys(ROW_TAG, seed, stream, row >> 32, 0, row & MASK)
    word = finalise(key ^ keys(COLUMN_TAG, seed, stream, column // 4))
    return word >> (8 * (column % 4)) & 0xFF


@pytest.fixture(scope="module")
def host() -> ModuleType:
    return pytest.importorskip("fastattn._host", reason="part of development installs only")


SEEDS = (0, 1, -1, 0x1234_5678_9ABC, -(2**63), 2**63 - 1)
STREAMS = (0, 3, 2**31 - 1, 2**31 + 5)


def test_the_definition_does_not_change(host: ModuleType) -> None:
    """Published bits: a change changes what a saved seed reproduces."""
    assert host.finalise(1) == 0x688990C0 == finalise(1)
    assert [host.row_byte(42, 7, 5, c) for c in range(8)] == [204, 34, 21, 20, 147, 163, 158, 249]
    found = [host.attention_byte(42, 7, 1, 2, i, j) for i in (0, 8) for j in (3, 11)]
    assert found == [127, 58, 68, 254]


def test_bits_follow_the_definition(host: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(300):
        seed, stream = draw.choice(SEEDS), draw.choice(STREAMS)
        b, h, i, j = (draw.randrange(1 << 20) for _ in range(4))
        row, column = draw.randrange(1 << 40), draw.randrange(1 << 33)
        x, y = draw.randrange(1 << 32), draw.randrange(1 << 32)
        assert host.absorb(x, y) == finalise(((x ^ y) + 0x9E3779B9) & MASK)
        assert host.row_key(seed, stream, b, h, i) == keys(ROW_TAG, seed, stream, b, h, i)
        assert host.column_key(seed, stream, j) == keys(COLUMN_TAG, seed, stream, j)
        assert host.attention_byte(seed, stream, b, h, i, j) == attention_byte(
            seed, stream, b, h, i, j
        )
        assert host.row_byte(seed, stream, row, column) == row_byte(seed, stream, row, column)


@pytest.mark.parametrize("seed", SEEDS)
def test_torch_draws_the_same_bits(host: ModuleType, seed: int) -> None:
    p, stream = 0.37, 9
    t, tensor = host.threshold(p), torch.tensor([seed])
    rows = torch.from_numpy(host.row_bytes(seed, stream, 19, 37))
    assert torch.equal(_dropout.row_keep(tensor, stream, p, 19, 37), rows >= t)
    lattice = torch.from_numpy(host.attention_bytes(seed, stream, 2, 3, 35, 50))
    assert torch.equal(_dropout.attention_keep(tensor, stream, p, 2, 3, 35, 50), lattice >= t)


@pytest.mark.parametrize("p", [0.0, 1e-9, 1 / 512, 0.1, 0.5, 0.9, 0.997, 1 - 1e-12, 1.0])
def test_threshold(host: ModuleType, p: float) -> None:
    t = host.threshold(p)
    assert t == _dropout.threshold(p)
    assert (t == 0) == (p == 0) and (t == 256) == (p == 1)
    assert abs(t / 256 - p) <= 1 / 256
    assert host.keep_scale(t) == pytest.approx(_dropout.keep_scale(p), rel=1e-6)
    assert host.keep_scale(t) * (256 - t) == pytest.approx(256 if t < 256 else 0)


# -- the norms in every instruction set -----------------------------------------------------------
@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _native.use_cpu_isa(request.param)
    yield request.param
    _native.use_cpu_isa(ISAS[-1])


every_isa = pytest.mark.parametrize("isa", ISAS, indirect=True)
HALVES = (torch.bfloat16, torch.float16)


def _samples() -> list[Any]:
    """Every sample in fp32; in 16-bit types those that differ in how memory is read."""
    narrow = ("model", "odd_width", "three_columns", "row_stride", "dropout", "fp32_residual")
    return [
        pytest.param(spec, sample, dtype, id=f"{name}-{sample.name}-{dtype}".replace("torch.", ""))
        for name in NORMS
        for spec in [all_specs()[name]]
        for sample in spec.samples
        for dtype in sample.dtypes
        if dtype == torch.float32 or sample.name in narrow
    ]


@pytest.mark.parametrize("isa", ISAS[:-1], indirect=True)
@pytest.mark.parametrize("spec, sample, dtype", _samples())
def test_sample(isa: str, spec: OpSpec, sample: Sample, dtype: torch.dtype) -> None:
    rows = check_sample(Oracle(spec, sample, dtype), "cpu", torch.device("cpu"))
    assert not [row for row in rows if row.status != "ok"]


@every_isa
@pytest.mark.parametrize("dtype", HALVES)
def test_every_value_survives(isa: str, dtype: torch.dtype) -> None:
    """x = 0: z is the residual, bit for bit, for each of the 65536 values."""
    residual = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(256, 256)
    _, z = fastattn.add_layer_norm(
        torch.zeros_like(residual), residual, return_sum=True, backend="cpu"
    )
    same = (z.view(torch.int16) == residual.view(torch.int16)) | (residual == 0)
    assert (same | (z.isnan() & residual.isnan())).all()
    assert torch.equal(z == 0, residual == 0)


@every_isa
@pytest.mark.parametrize("dtype", HALVES)
def test_rounds_to_nearest_even(isa: str, dtype: torch.dtype) -> None:
    """fp32 to half, as torch rounds: ties, overflow, denormals, NaN with any payload."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (64, 1024), generator=generator)
    ties = bits & ~0xFFFF | 0x8000  # halfway between two bf16
    ties[32:] = bits[32:] & ~0x1FFF | 0x1000  # halfway between two fp16
    small = torch.randn(64, 1024, generator=generator) * torch.logspace(-8, 6, 64)[:, None]
    floats = [t.to(torch.int32).view(torch.float32) for t in (bits, ties)]
    x = torch.cat([*floats, small, small * 1e-37])
    zero = torch.zeros_like(x, dtype=dtype)
    _, z = fastattn.add_layer_norm(x, zero, return_sum=True, backend="cpu")
    wanted = x.to(dtype)
    assert torch.equal(z.isnan(), wanted.isnan())
    assert torch.equal(z.nan_to_num(), wanted.nan_to_num())


@every_isa
def test_one_column_has_no_gradient(isa: str) -> None:
    """A row of one element is normalised to 0 for any value."""
    x = torch.randn(9, 1, requires_grad=True)
    y = fastattn.layer_norm(x, torch.randn(1), torch.tensor([2.0]), backend="cpu")
    y.backward(torch.randn(9, 1))
    assert (y == 2).all() and x.grad is not None and (x.grad == 0).all()


def _everything(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of the three norms."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    x, residual = randn(rows, columns), randn(rows, columns)
    weight, bias, x_bias = (randn(columns, dtype=torch.float32) for _ in range(3))
    outputs = [
        fastattn.layer_norm(x, weight, bias, backend="cpu"),
        fastattn.rms_norm(x, weight, backend="cpu"),
        *fastattn.add_layer_norm(
            x,
            residual,
            weight,
            bias,
            x_bias=x_bias,
            dropout_p=0.2,
            dropout_seed=torch.tensor([3]),
            return_sum=True,
            backend="cpu",
        ),
    ]
    gradients = [randn(rows, columns).detach() for _ in outputs]
    return [*outputs, *torch.autograd.grad(outputs, (x, residual, weight, bias, x_bias), gradients)]


@needs_library
@pytest.mark.parametrize("rows, columns", [(700, 515), (37, 4100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(rows: int, columns: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = _everything(rows, columns, dtype)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            for one, many in zip(alone, _everything(rows, columns, dtype), strict=True):
                assert torch.equal(one, many), threads
    finally:
        torch.set_num_threads(before)


# -- layouts and memory ---------------------------------------------------------------------------
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed rows": lambda t: t.view(6, 10, 40).transpose(0, 1),
    "rows of a larger tensor": lambda t: t.view(15, 160)[:, 33:73],
    "a plane of each": lambda t: t.view(5, 4, 3, 40)[:, 1],
    "one of each, within rows": lambda t: t.view(5, 2, 3, 80)[:, 1:2, :, :40].transpose(1, 2),
    "reversed dimensions": lambda t: t.view(3, 4, 5, 40).permute(2, 1, 0, 3),
    "columns first": lambda t: t.view(60, 40).t(),
    "one row, repeated": lambda t: t[:40].expand(7, 40),
    "one value, repeated": lambda t: t[:1].expand(7, 40),
    "one column": lambda t: t.view(60, 40)[:, 3:4],
}


@needs_library
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_layouts(view: Callable[[Tensor], Tensor]) -> None:
    """Every layout gives the bits of its contiguous copy."""
    x, residual, dy = (view(torch.randn(2400)) for _ in range(3))

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        x, residual, dy = tensors
        y, z, mean, rstd = torch.ops.fastattn.add_layer_norm_fwd(
            x, residual, None, None, None, 1e-5, 0.0, None, 0, backend="cpu"
        )
        gradients = torch.ops.fastattn.layer_norm_bwd(
            dy, x, None, None, mean, rstd, 1e-5, [True, False, False], backend="cpu"
        )
        return y, z, mean, rstd, *gradients

    for strided, dense in zip(
        results(x, residual, dy), results(*(t.contiguous() for t in (x, residual, dy))), strict=True
    ):
        assert torch.equal(strided, dense)


def _forward(**changes: Any) -> None:
    x = torch.randn(4, 8)
    arguments = {"x": x, "weight": None, "bias": None, "eps": 1e-5}
    arguments |= {"y": torch.empty_like(x), "mean": torch.empty(4), "rstd": torch.empty(4)}
    torch.ops.fastattn.layer_norm_fwd.out(**arguments | changes)


@needs_library
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"y": torch.zeros(4, 7)}, "y must be a CPU tensor of 4 rows of 8"),
        ({"y": torch.zeros(8, 4).t()}, "y must have a contiguous last dimension"),
        ({"y": torch.zeros(4, 8).half()}, "y must be a CPU tensor"),
        ({"mean": torch.zeros(3)}, "mean must be a contiguous CPU tensor of 4"),
        ({"rstd": torch.zeros(8)[::2]}, "rstd must be a contiguous"),
        ({"weight": torch.ones(7)}, "weight must be a contiguous CPU tensor of 8"),
        ({"weight": torch.ones(1, 8)}, "weight must have one dimension, got 2"),
    ],
)
def test_library_protects_memory(changes: dict[str, Any], message: str) -> None:
    _forward()
    with pytest.raises(RuntimeError, match=message):
        _forward(**changes)


@needs_library
@pytest.mark.parametrize("op, name", [
    (op, name)
    for op, names in {
        "attention": ("q", "v", "mask"),
        "layer_norm": ("x", "weight"),
        "ffn": ("x", "w1", "b1"),
    }.items()
    for name in names
])  # fmt: skip
def test_a_tensor_without_memory_is_refused(op: str, name: str) -> None:
    """Its storage was freed, as in offloading and sharding; views begin at an offset."""
    samples = {"attention": "gqa_bias", "ffn": "gelu_plain"}
    spec = all_specs()[op]
    sample = next(s for s in spec.samples if s.name == samples.get(op, "model"))
    inputs = {
        n: x.detach() if isinstance(x, Tensor) else x
        for n, x in sample.inputs("cpu", torch.float32).items()
    }
    spec.function(**inputs, backend="cpu")
    for view in (False, True):
        gone = torch.stack([inputs[name]] * 2)[1] if view else inputs[name].clone()
        gone.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=f"{name} must have memory"):
            spec.function(**inputs | {name: gone}, backend="cpu")


@needs_library
@pytest.mark.parametrize("rows", [0, 1, 32, 33, 2048, 9000])
def test_sums_over_partitions_of_the_rows(rows: int) -> None:
    x, rstd = torch.randn(rows, 8), torch.ones(rows)
    with poisoned_results():
        _, dweight = torch.ops.fastattn.rms_norm_bwd(x, x, torch.ones(8), rstd, 0.0, [False, True])
    torch.testing.assert_close(dweight, x.square().sum(0))


# -- reasons --------------------------------------------------------------------------------------
@needs_library
def test_unsupported() -> None:
    x, reason = torch.zeros(2, 8).double(), "has kernels for fp32, bf16 and fp16"
    assert reason in fastattn.explain("layer_norm", x).refusals["cpu"]
    with pytest.raises(NotImplementedError, match=f"backend cpu {reason}"):
        fastattn.layer_norm(x, backend="cpu")


def test_absent_and_broken_libraries_are_reasons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_native, "_PACKAGE", tmp_path)
    load = _native.unavailable.__wrapped__
    assert "was not built" in load("cpu")
    (tmp_path / "_C_cpu.abi3.so").write_bytes(b"not a library")
    assert "cannot load its native library _C_cpu.abi3.so" in load("cpu")
    monkeypatch.setattr(_native, "unavailable", load)
    call = LayerNormCall(torch.zeros(2, 3), None, None, 0.0)
    assert "cannot load" in (cpu.layer_norm_fwd_unsupported(call) or "")
    with pytest.raises(RuntimeError, match="cannot load"):
        _native.usable_cpu_isas()


@needs_library
def test_libraries_load_under_dispatch_modes_and_transforms() -> None:
    """Nothing but the call that loads the library is seen there."""
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
            seen.append(op.namespace)
            return op(*args, **kwargs)

    def autograd_kernel(x: Tensor) -> Tensor:
        assert _native.unavailable.__wrapped__("cpu") is None
        return x.sum()

    with torch.library._scoped_library("fastattn_probe", "DEF") as library:
        library.define("loads(Tensor x) -> Tensor")
        library.impl("loads", autograd_kernel, "Autograd")
        with Seen():
            torch.vmap(torch.func.grad(torch.ops.fastattn_probe.loads))(torch.ones(3, 2))
    assert "aten" in seen and "fastattn_cpu" not in seen


@needs_library
def test_the_extension_is_for_one_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_native, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_native, "unavailable", lambda library: None)
    monkeypatch.setattr(_env, "torch_version", lambda: "2.14.0a0+cpu")
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    load = _native.extension_unavailable.__wrapped__
    assert "for torch 2.14.0a0+cpu under this Python was not built: `pip install" in load()
    (tmp_path / f"_C_autograd_2_13_0_cpu{suffix}").touch()
    assert "was built for another" in load()
    (tmp_path / f"_C_autograd_2_14_0a0_cpu{suffix}").write_bytes(b"not a library")
    assert f"cannot load its extension _C_autograd_2_14_0a0_cpu{suffix}" in load()


@needs_library
@pytest.mark.parametrize(
    "broken, reason",
    [
        ("no library", "cannot load its extension {}: ImportError: .*file too short"),
        ("another library", "cannot load its extension {}: ImportError: .*PyInit__C_autograd"),
        ("raises", "cannot load its extension {}: AttributeError: no Node"),
        ("other sources", "the extension {} was built from other sources: `pip install"),
    ],
)
def test_a_broken_extension_leaves_nodes_to_python(
    broken: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def raising(loader: Any, spec: Any) -> None:
        raise AttributeError("no Node")

    version = re.sub(r"[^0-9A-Za-z]", "_", str(torch.__version__))
    file = tmp_path / f"_C_autograd_{version}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    shutil.copy(torch._C.__file__, file)
    loader = importlib.machinery.ExtensionFileLoader
    if broken == "no library":
        file.write_bytes(b"no library")
    elif broken == "raises":
        monkeypatch.setattr(loader, "create_module", raising)
    elif broken == "other sources":
        monkeypatch.setattr(loader, "create_module", lambda _, spec: ModuleType(spec.name))
        monkeypatch.setattr(loader, "exec_module", lambda *_: None)
    find = functools.cache(_native.extension_unavailable.__wrapped__)
    monkeypatch.setattr(_native, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_native, "extension_unavailable", find)
    assert _native.extension() is None
    assert cli.main(["info", "--device=cpu"]) == 0
    expected = f"by Python, which takes longer: {reason.format(re.escape(file.name))}"
    assert re.search(expected, capsys.readouterr().out)


@needs_library
def test_instruction_set_by_name() -> None:
    with pytest.raises(ValueError, match=r"name must be one of portable.*, got 'mmx'"):
        _native.use_cpu_isa("mmx")


# -- the build ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def build() -> ModuleType:
    return build_script()


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    (folder / "norm").mkdir(parents=True)
    for name in ("norm_kernels_cpu.cpp", "binding_cpu.cpp", "norm.h", "module_autograd.cpp"):
        (folder / "norm" / name).touch()
    for name in ("norm_sm90.cu", "binding_sm90.cpp"):
        (folder / "norm" / name).touch()
    return folder


def _tools(build: ModuleType, **changes: Any) -> Any:
    found = {"torch": Path("/torch"), "torch_version": "2.13.0+cpu", "cxx": "g++"}
    return build.Tools(**{**found, "cuda": Path("/cuda"), "has_hopper": True, **changes})


def test_requests(build: ModuleType) -> None:
    assert build.requested(None) is None and build.requested("") is None
    assert build.requested("0") == ()
    assert build.requested("cpu, sm90") == ("cpu", "sm90")
    with pytest.raises(SystemExit, match=r"must be 0 or a comma-separated list of cpu.*gpu'"):
        build.requested("cpu,gpu")


def test_what_is_built(build: ModuleType, csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(value: str | None, **changes: Any) -> list[str]:
        return [row.name for row in build.choose(value, _tools(build, **changes), csrc)]

    assert names(None) == ["cpu", "autograd", "sm90"]
    assert names("cpu") == ["cpu"]
    assert names("0") == []
    assert names(None, cuda=None) == ["cpu", "autograd"]
    assert names(None, has_hopper=False) == ["cpu", "autograd"]
    assert names("sm90", has_hopper=False) == ["sm90"]
    assert names(None, torch_version="2.11.0") == ["cpu", "autograd", "sm90"]
    with pytest.raises(SystemExit, match=r"autograd needs torch >= 2\.11, got 2\.10\.1"):
        names("autograd", torch_version="2.10.1")
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: "/nowhere")
    assert names(None) == ["cpu", "sm90"]
    with pytest.raises(SystemExit, match="autograd needs Python's headers"):
        names("autograd")


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"torch": None, "torch_version": None}, "needs torch, which the build does not see"),
        ({"torch_version": "2.10.1"}, "needs torch >= 2.11, got 2.10.1"),
        ({"cxx": None}, r"needs a C\+\+ compiler"),
    ],
)
def test_impossible_is_an_error_only_when_asked_for(
    build: ModuleType,
    csrc: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    reason: str,
) -> None:
    tools = _tools(build, **changes)
    assert build.choose(None, tools, csrc) == []
    capsys.readouterr()
    build.choose(None, tools, csrc)
    said = capsys.readouterr().err
    assert "without the native library cpu" in said and "pip install" in said
    with pytest.raises(SystemExit, match=f"FASTATTN_NATIVE=cpu: the native library cpu {reason}"):
        build.choose("cpu", tools, csrc)
    with pytest.raises(SystemExit, match="cuda has no sources in this tree"):
        build.choose("cuda", _tools(build), csrc)


def test_kernels_for_different_processors_share_no_symbol(build: ModuleType) -> None:
    """Of a function that several objects define the linker keeps one, for every processor."""
    tools = build.Tools.found()
    try:
        build.check_possible(build.LIBRARIES["cpu"], tools)
    except build.Impossible as why:
        pytest.skip(str(why))
    objects = {
        step.output: sets[1]
        for step in build.library_steps(build.LIBRARIES["cpu"], tools)
        if (sets := re.search(r"_kernels_cpu_(\w+)", step.output.name)) and step.output.is_file()
    }
    if not objects or shutil.which("nm") is None:
        pytest.skip("needs the objects of a build in this folder, and nm")
    for path, instruction_set in objects.items():
        symbols = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True)
        weak = re.findall(r"^\w+ [WVu] (.*fastattn::.*)$", symbols.stdout, re.MULTILINE)
        assert not [name for name in weak if f"::{instruction_set}::" not in name], path


def test_commands(build: ModuleType, csrc: Path, tmp_path: Path) -> None:
    def commands(name: str) -> dict[str, str]:
        steps = build.library_steps(build.LIBRARIES[name], _tools(build), csrc, tmp_path)
        return {step.output.name: " ".join(step.command) for step in steps}

    cpu_commands = commands("cpu")
    assert "_C_cpu.abi3.so" in cpu_commands and len(cpu_commands) == 5
    assert "-ltorch_cpu" in cpu_commands["_C_cpu.abi3.so"]
    assert "-mavx512bf16" in cpu_commands["norm_kernels_cpu_avx512.o"]
    assert "-march=x86-64-v3" in cpu_commands["norm_kernels_cpu_avx2.o"]
    assert "-march" not in cpu_commands["norm_kernels_cpu_portable.o"]
    assert all("TORCH_TARGET_VERSION" in c for n, c in cpu_commands.items() if n.endswith(".o"))
    sm90 = commands("sm90")
    assert " /cuda/bin/nvcc -ccbin g++" in sm90["norm_sm90.cu.o"]
    assert "-gencode=arch=compute_90a,code=sm_90a" in sm90["norm_sm90.cu.o"]
    assert sm90["binding_sm90.cpp.o"].startswith("g++")
    assert "-lcudart_static" in sm90["_C_sm90.abi3.so"]
    compiled, linked = commands("autograd")
    assert linked == f"_C_autograd_2_13_0_cpu{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    assert "TORCH_TARGET_VERSION" not in commands("autograd")[compiled]
    assert "-ltorch_python" in commands("autograd")[linked]


def test_commands_of_instances(build: ModuleType, csrc: Path, tmp_path: Path) -> None:
    """A source with instances is compiled for each of them and not for itself."""
    (csrc / "norm" / "attention_fwd_instance_sm90.cu").touch()
    steps = build.library_steps(build.LIBRARIES["sm90"], _tools(build), csrc, tmp_path)
    commands = {step.output.name: step.command for step in steps}
    assert "attention_fwd_instance_sm90.cu.o" not in commands
    assert "-DFASTATTN_HEAD_DIM=192" in commands["attention_fwd_sm90_fp16_d192_bias.o"]
    assert len([name for name in commands if name.startswith("attention_fwd_sm90_")]) == 56


def test_what_is_out_of_date(build: ModuleType, tmp_path: Path) -> None:
    """Objects are rebuilt for changed sources, headers or commands."""
    if build._ninja() is None or shutil.which("g++") is None:
        pytest.skip("needs ninja and g++")
    header, names = tmp_path / "shared.h", ("one", "two")
    header.write_text("inline int shared() { return 1; }")
    (tmp_path / "one.cpp").write_text('#include "shared.h"\nint one() { return shared(); }')
    (tmp_path / "two.cpp").write_text("int two() { return 2; }")

    def steps(*flags: str) -> list[Any]:
        paths = [(tmp_path / f"{name}.cpp", tmp_path / f"{name}.o") for name in names]
        return [build._compile_step(["g++", "-MMD", *flags], *path) for path in paths]

    one, two = (step.output for step in steps())
    assert build.outdated(steps(), tmp_path / "absent") == {one, two}
    assert build.outdated(steps(), tmp_path) == {one, two}
    build.execute(steps(), tmp_path)
    assert build.outdated(steps(), tmp_path) == set()
    header.write_text("inline int shared() { return 3; }")
    assert build.outdated(steps(), tmp_path) == {one}
    assert build.outdated(steps("-O1"), tmp_path) == {one, two}
    build.execute(steps(), tmp_path)
    two.unlink()
    assert build.outdated(steps(), tmp_path) == {two}


def test_what_nvcc_says_is_kept(
    build: ModuleType, csrc: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The output is kept in a file beside the object; register counts are not printed."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    said = (
        "ptxas info    : Used 40 registers\n    0 bytes stack frame, 0 bytes spill stores\n",
        "ptxas info    : (C7510) Potential Performance Loss\n",
    )
    nvcc.write_text(f"#!/bin/sh\nprintf '{said[0]}{said[1]}' >&2\nexit 3\n")
    nvcc.chmod(0o755)
    tools = _tools(build, cuda=tmp_path / "cuda")
    steps = build.library_steps(build.LIBRARIES["sm90"], tools, csrc, tmp_path)
    [step] = [step for step in steps if step.output.name == "norm_sm90.cu.o"]
    step.output.parent.mkdir(parents=True)
    assert subprocess.run(step.command).returncode == 3
    assert build.log_of(step.output).read_text() == "".join(said)
    assert capfd.readouterr().err == said[1]


def test_the_variant_of_torch_is_part_of_the_name(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text("debug = False\n__version__ = '2.13.0+cu130'\n")
    tools = _tools(build, torch=tmp_path, torch_version="2.13.0")
    assert build.LIBRARIES["autograd"].file_name(tools) == "_C_autograd_2_13_0_cu130"
    assert build.LIBRARIES["cpu"].file_name(tools) == "_C_cpu"


def test_objects_of_an_extension_serve_one_torch(
    build: ModuleType, csrc: Path, tmp_path: Path
) -> None:
    """If torch is replaced, neither the compiler's command nor a file that ninja tracks differs, so
    the output folder must.
    """

    def outputs(name: str, version: str) -> set[Path]:
        tools = _tools(build, torch_version=version)
        steps = build.library_steps(build.LIBRARIES[name], tools, csrc, tmp_path)
        return {step.output for step in steps}

    assert not outputs("autograd", "2.12.1") & outputs("autograd", "2.13.0")
    assert outputs("cpu", "2.12.1") == outputs("cpu", "2.13.0")


def test_other_cpus_get_the_portable_kernels(
    build: ModuleType, csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    steps = build.library_steps(build.LIBRARIES["cpu"], _tools(build), csrc, tmp_path)
    names = [step.output.name for step in steps]
    assert names == ["binding_cpu.cpp.o", "norm_kernels_cpu_portable.o", "_C_cpu.abi3.so"]


@pytest.mark.parametrize("ninja", [True, False], ids=["ninja", "threads"])
def test_execute(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ninja: bool
) -> None:
    tools = build.Tools.found()
    if tools.cxx is None or (ninja and build._ninja() is None):
        pytest.skip("needs a compiler and ninja")
    if not ninja:
        monkeypatch.setattr(build, "_ninja", lambda: None)
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "a.cpp").write_text("int a() { return 1; }\n")
    (folder / "b.cpp").write_text("int b() { return 2; }\n")
    compiled = [
        build._compile_step([tools.cxx, "-fPIC", "-MMD"], folder / f"{n}.cpp", folder / f"{n}.o")
        for n in "ab"
    ]
    link = build._link_step(tools.cxx, compiled, folder / "both.so", [])
    build.execute([*compiled, link], folder)
    assert (folder / "both.so").is_file()
    (folder / "a.cpp").write_text("int a() { return\n")
    with pytest.raises(subprocess.CalledProcessError):
        build.execute([*compiled, link], folder)
