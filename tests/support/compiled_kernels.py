"""Compiles Triton kernels for GPUs that are not present, and inspects the code."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.backends.nvidia
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from fastattn.ops import _env

compiles = pytest.mark.skipif(_env.interpreting(), reason="the interpreter compiles nothing")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64), "sm_89": GPUTarget("cuda", 89, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
}  # fmt: skip
# One GPU of each family: sm_86 and sm_89 have sm_80's instructions and less shared memory.
GENERATIONS = ("sm_80", "sm_90", "sm_100", "gfx942")
GPUS = {
    "sm_80": "A100", "sm_86": "RTX 3090", "sm_89": "RTX 4090, L4", "sm_90": "H100",
    "sm_100": "B200", "sm_120": "RTX 5090", "gfx942": "MI300",
}  # fmt: skip
# The maximum bytes of shared memory of a program.
SHARED_MEMORY = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
    "sm_100": 227 << 10, "sm_120": 99 << 10, "gfx942": 64 << 10,
}  # fmt: skip
# 32-bit registers of a multiprocessor, and of a thread at most.
REGISTERS, REGISTERS_OF_A_THREAD = 64 << 10, 255
# AMD's: those of each of the four SIMDs of a compute unit, for a lane of its waves.
REGISTERS_OF_A_LANE = 512
TENSOR_MEMORY_COLUMNS = 512
# For configs of sm_80 that sm_86, sm_89 and sm_120 use too, which have less shared memory.
LEAST_SHARED_MEMORY = SHARED_MEMORY | {"sm_80": SHARED_MEMORY["sm_86"]}
# Tensor-core instructions.
TENSOR = {
    "sm_80": r"\bHMMA", "sm_86": r"\bHMMA", "sm_89": r"\bHMMA", "sm_90": r"\bHGMMA",
    "sm_100": r"\bUTC\w*MMA", "sm_120": r"\bHMMA", "gfx942": r"\bv_mfma",
}  # fmt: skip


def in_turns(
    arch: str, sizes: Sequence[Any], features: Iterable[Any], whole: Sequence[Any] = ()
) -> set[tuple[Any, Any]]:
    """(size, feature) pairs to compile: every size and every feature at least once, in other pairs
    on each GPU, and all features with the sizes in `whole`.
    """
    features, shift = list(features), list(TARGETS).index(arch)
    turns = range(max(len(sizes), len(features)))
    pairs = {(sizes[(i + shift) % len(sizes)], features[i % len(features)]) for i in turns}
    return pairs | {(size, feature) for size in whole for feature in features}


def cross_section(
    arch: str, always: Mapping[Any, Sequence[str]], sizes: Sequence[Any], features: Iterable[str],
) -> list[Any]:  # fmt: skip
    """Parameters (arch, size, feature): `always` has the features of a size that the quick run
    compiles, the slow run adds those `in_turns`.
    """
    quick = [(size, feature) for size in sizes for feature in always.get(size, ())]
    slow = sorted(in_turns(arch, sizes, features) - set(quick))
    return [
        pytest.param(arch, size, feature, marks=marks, id=f"{arch}-{size}-{feature}")
        for pairs, marks in ((quick, ()), (slow, pytest.mark.slow))
        for size, feature in pairs
    ]


def on_each_gpu(
    sizes: Sequence[Any],
    features: Mapping[str, Iterable[str]],
    quick: Sequence[tuple[str, Any, str]],
) -> list[Any]:
    """Parameters (arch, size, feature) by the features of an architecture; `quick` are those of the
    quick run.
    """
    return [
        pytest.param(
            *(case := (arch, size, feature)),
            marks=() if case in quick else pytest.mark.slow,
            id=f"{arch}-{size}-{feature}",
        )
        for arch in features
        for size in sizes
        for feature in features[arch]
    ]


class _AbsentGpu:
    """The functions of a driver that compilation needs."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiled_for(arch: str) -> Iterator[list[Any]]:
    """Inside, launched kernels are compiled for `arch` and collected, but not run."""
    found: list[Any] = []
    run = JITFunction.run
    used = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        used.add(self)
        self.device_caches.clear()
        found.append(run(self, *args, grid=grid, warmup=True, **options))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(_env, "architecture", lambda *device: arch)
        patch.setattr(triton.runtime.driver, "_active", _AbsentGpu(TARGETS[arch]))
        try:
            yield found
        finally:
            for function in used:
                function.device_caches.clear()


class _Allocated(Exception):
    """Raised where the rest of a compilation is left out."""


@contextlib.contextmanager
def without_code() -> Iterator[None]:
    """Inside, kernels are compiled up to the allocation of shared and tensor memory: what their
    metadata say of it is final.
    """

    def stop(*args: Any) -> None:
        raise _Allocated

    def allocating(make_llir: Callable[..., str]) -> Callable[..., str]:
        def allocate(*args: Any) -> str:
            # Behind self, which AMD's has not: a module, metadata, options.
            module, metadata = args[:2] if isinstance(args[1], dict) else args[1:3]
            metadata["name"] = module.get_entry_func_name()
            with contextlib.suppress(_Allocated):
                make_llir(*args)
            metadata["shared"] = module.get_int_attr("ttg.shared")
            metadata["tmem_size"] = module.get_int_attr("ttg.tensor_memory_size")
            for kind in ("global", "profile"):
                metadata |= {f"{kind}_scratch_size": 0, f"{kind}_scratch_align": 1}
            return ""

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvidia.nvidia.passes.ttgpuir, "add_to_llvmir", lambda *_: None)
        patch.setattr(triton.knobs.compilation, "disable_line_info", True)  # in LLVM's operations
        patch.setattr(nvidia.llvm, "to_module", stop)
        patch.setattr(CUDABackend, "make_llir", allocating(CUDABackend.make_llir))
        patch.setattr(CUDABackend, "make_ptx", lambda *_: "")
        patch.setattr(CUDABackend, "make_cubin", lambda *_: b"")
        patch.setattr(HIPBackend, "make_llir", staticmethod(allocating(HIPBackend.make_llir)))
        patch.setattr(HIPBackend, "make_amdgcn", staticmethod(lambda *_: ""))
        patch.setattr(HIPBackend, "make_hsaco", staticmethod(lambda *_: b""))
        patch.setattr(triton.knobs.cache, "dir", f"{triton.knobs.cache.dir}/allocated")
        yield


@contextlib.contextmanager
def allocated_for(arch: str) -> Iterator[list[Any]]:
    """As `compiled_for`, without machine code."""
    with without_code(), compiled_for(arch) as found:
        yield found


def check_memory(kernels: Iterable[Any], arch: str) -> None:
    """Each kernel fits in the shared and tensor memory of the GPU."""
    for kernel in kernels:
        name, gpu = kernel.metadata.name, f"{GPUS[arch]} ({arch})"
        took, limit = kernel.metadata.shared, SHARED_MEMORY[arch]
        assert took <= limit, f"{name} takes {took} bytes of shared memory, {gpu} has {limit}"
        columns = getattr(kernel.metadata, "tmem_size", None) or 0
        assert columns <= TENSOR_MEMORY_COLUMNS, f"{name} takes {columns} columns on {gpu}"


def check_registers(kernel: Any, arch: str, most_spilled: int) -> None:
    """The kernel spills as little as stated, and one program fits in the registers of the GPU.
    most_spilled: bytes (AMD: registers) of a thread.
    """
    name, gpu = kernel.metadata.name, f"{GPUS[arch]} ({arch})"
    spills, registers = spills_and_registers(kernel)
    assert spills <= most_spilled, f"{name} spills {spills} on {gpu}, at most {most_spilled} stated"
    if arch == "gfx942":
        waves = max(1, kernel.metadata.num_warps // 4)
        assert registers * waves <= REGISTERS_OF_A_LANE, f"{name}: {registers} registers on {gpu}"
        return
    threads = kernel.metadata.num_warps * 32
    fits = registers <= REGISTERS_OF_A_THREAD and registers * threads <= REGISTERS
    assert fits, f"{name} takes {registers} registers of {threads} threads on {gpu}"


def by_name(kernels: Sequence[Any]) -> dict[str, Any]:
    """The last kernel of each name."""
    return {kernel.metadata.name: kernel for kernel in kernels}


def cuda_tool(name: str) -> Path:
    """A program of the CUDA toolkit that comes with Triton."""
    return Path(triton.backends.nvidia.__file__).parent / "bin" / name


def _run_tool(kernel: Any, name: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [cuda_tool(name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(kernel: Any) -> str:
    """The kernel's machine code, one instruction per line."""
    if "cubin" not in kernel.asm:
        return kernel.asm["amdgcn"]
    return _run_tool(kernel, "nvdisasm", "-c")


def loops(kernel: Any) -> list[list[str]]:
    """Instructions of the innermost loops, in the order of the code. NVIDIA only."""
    code = _run_tool(kernel, "cuobjdump", "-sass")
    lines = [(int(a, 16), t) for a, t in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", code)]
    found = []
    for address, text in lines:
        target = re.search(r"\bBRA.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            found.append((int(target[1], 16), address))
    inner = [a for a in found if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return [[t for x, t in lines if a <= x <= b] for a, b in sorted(inner)]


def spills_and_registers(kernel: Any) -> tuple[int, int]:
    """The spilled bytes (AMD: registers) and the registers of a thread."""
    if "cubin" not in kernel.asm:
        text, patterns = kernel.asm["amdgcn"], (r"\.vgpr_spill_count:\s*", r"\.vgpr_count:\s*")
    else:
        text, patterns = _run_tool(kernel, "cuobjdump", "--dump-resource-usage"), ("STACK:", "REG:")
    spilled, registers = (max(map(int, re.findall(rf"{p}(\d+)", text))) for p in patterns)
    return spilled, registers


def spilled(kernel: Any) -> int:
    """The spilled bytes (AMD: registers) of a thread."""
    return spills_and_registers(kernel)[0]
