"""Compiler output for the norms on each GPU: registers, spills, 16-byte accesses. As for Hopper in
tests/sm90/test_cuda_sources.py, without a GPU.
"""

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import test_cuda_sources as sources
from native_build import build_script

from fastattn.testing import record

LIBRARY = build_script().LIBRARIES["cuda"]
INSTANCES = {
    name: (file, macros)
    for file, instances in build_script().INSTANCES.items()
    if file.startswith("norm_")
    for name, macros in instances.items()
} | {"sum_partials_cuda.cu": ("sum_partials_cuda.cu", ())}
GPUS = ("sm_80", "sm_90", "sm_100", "sm_120")
REGISTERS = 65536  # of a multiprocessor
LOAD = r"LDG(STS)?\.E\S*\.128"  # of 16 bytes, to registers or to shared memory
THREADS = 512  # of a multiprocessor, that the plans count on (norm_cuda.h)


@dataclass
class Kernel:
    """arguments: of the template. width, values: of a thread's columns."""

    name: str
    arguments: list[str]
    registers: int
    spilled: int
    sass: list[str] = field(default_factory=list)

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in self.sass)


def _demangled(name: str) -> tuple[str, list[str]]:
    """The kernel's name and its template's arguments, as far as tests need them: two types, the
    vector's width, the values of a thread, and a flag.
    """
    kernel = re.search(r"\d+([a-z_]+_kernel)", name)
    assert kernel, name
    return kernel[1], re.findall(r"L[ib](\d+)E", name)


def _compiled(name: str, folder: Path) -> dict[str, list[Kernel]]:
    """Compiled kernels for each GPU."""
    nvcc, cuobjdump = sources._nvcc(), record.cuobjdump()
    if nvcc is None or cuobjdump is None:
        pytest.skip("needs nvcc and cuobjdump")
    binary = sources._objects("cuda").get(name)
    if binary is not None:
        log = build_script().log_of(binary).read_text()
    else:
        file, macros = INSTANCES[name]
        binary = folder / "kernels.o"
        (path,) = sources.CSRC.rglob(file)
        command = [nvcc, "-std=c++17", "-O3", "-Xptxas", "-v", "-c", f"-I{sources.CSRC}", *macros]
        command += [f"-gencode={a}" for a in LIBRARY.architectures]
        done = subprocess.run([*command, "-o", binary, path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:2000]
        log = done.stderr
    kernels: dict[str, dict[str, Kernel]] = {gpu: {} for gpu in GPUS}
    said = re.findall(
        r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?(\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    for mangled, gpu, stores, loads, registers in said:
        kernel = Kernel(*_demangled(mangled), int(registers), int(stores) + int(loads))
        kernels[gpu][mangled] = kernel
    text = subprocess.run(
        [cuobjdump, "-sass", binary], capture_output=True, text=True, check=True
    ).stdout
    for code in re.split(r"code for (?=sm_)", text)[1:]:
        gpu = re.match(r"sm_\d+", code)
        assert gpu
        _, *functions = re.split(r"Function : (\S+)", code)
        for mangled, body in zip(functions[::2], functions[1::2], strict=True):
            kernels[gpu[0]][mangled].sass = re.findall(
                r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", body, re.M
            )
    return {gpu: list(found.values()) for gpu, found in kernels.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTANCES)
def test_instance(name: str, tmp_path: Path) -> None:
    compiled = _compiled(name, tmp_path)
    for gpu, kernels in compiled.items():
        # Rows of bf16 and fp16 with parameters of their type have two tilings.
        of_bwd = 8 if re.search(r"_(\w\wf?16)_\1$", name) else 6
        assert len(kernels) == (10 if "_fwd_" in name else of_bwd if "_bwd_" in name else 1), gpu
        for kernel in kernels:
            where = f"{kernel.name} {kernel.arguments} on {gpu}"
            assert kernel.sass, where
            assert kernel.spilled == 0 and kernel.count(r"\b(STL|LDL)\b") == 0, where
            if kernel.name == "sum_partials_kernel":
                assert kernel.registers * 512 <= REGISTERS, where
                assert kernel.count(r"LDG\.E") >= 8, where  # lines in flight
                continue
            width, values, *_ = map(int, kernel.arguments)
            assert kernel.registers * THREADS <= REGISTERS, where
            loads, stores = kernel.count(LOAD), kernel.count(r"STG\.E\S*\.128")
            if width == 1:
                assert loads == 0 and stores == 0, where
                continue
            vectors = values // width
            rows = 1 if kernel.name == "norm_fwd_kernel" else 2  # that are read
            assert loads >= vectors * rows, where
            assert kernel.name == "norm_row_sums_kernel" or stores >= vectors, where
            # All vectors of the rows are loaded before one is used.
            assert _first_run_of_loads(kernel) >= vectors, where


def _first_run_of_loads(kernel: Kernel) -> int:
    """The loads of 16 bytes before the first sum over lanes."""
    count = 0
    for line in kernel.sass:
        if "SHFL" in line:
            break
        count += bool(re.search(LOAD, line))
    return count
