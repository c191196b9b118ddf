"""The C++ CPU kernels apart from torch: on std::thread under ThreadSanitizer, and for another
processor family.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CXX = os.environ.get("CXX") or shutil.which("g++")
KERNELS = sorted(CSRC.rglob("*_kernels_cpu.cpp"))
KERNELS_ON_THREADS = (
    str(Path(__file__).with_name("attention_threads.cpp")),
    str(CSRC / "attention" / "cpu" / "attention_kernels_cpu.cpp"),
)
FLAGS = f"-std=c++17 -fno-math-errno -ffp-contract=off -Wall -Wextra -I{CSRC} -pthread".split()
ARM = shutil.which("aarch64-linux-gnu-g++")
ARM_EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def _run(*command: str, **environment: str) -> str:
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-5000:]
    return output


def _has_thread_sanitizer() -> bool:
    if CXX is None:
        return False
    command = [CXX, "-print-file-name=libtsan.so"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return Path(found).is_absolute() and Path(found).is_file()


@pytest.mark.slow
@pytest.mark.skipif(not _has_thread_sanitizer(), reason="the compiler has no libtsan")
def test_threads_do_not_race(tmp_path: Path) -> None:
    assert CXX
    program = str(tmp_path / "attention_threads")
    _run(CXX, *FLAGS, "-O1", "-g1", "-fsanitize=thread", *KERNELS_ON_THREADS, "-o", program)
    output = _run(program, TSAN_OPTIONS="halt_on_error=1")
    assert output.count("the same bits") == 7


@pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("source", KERNELS, ids=lambda source: source.stem)
def test_portable_kernels_include_no_intrinsics(source: Path) -> None:
    assert CXX
    headers = _run(CXX, "-M", "-std=c++17", f"-I{CSRC}", str(source))
    assert "simd.h" in headers
    assert "intrin.h" not in headers


@pytest.mark.slow
@pytest.mark.skipif(ARM is None, reason="there is no compiler for aarch64")
@pytest.mark.parametrize("source", KERNELS, ids=lambda source: source.stem)
def test_portable_kernels_compile_for_arm(source: Path, tmp_path: Path) -> None:
    assert ARM
    _run(ARM, *FLAGS, "-Werror", "-O1", "-c", str(source), "-o", str(tmp_path / "object.o"))


@pytest.mark.slow
@pytest.mark.skipif(not (ARM and ARM_EMULATOR), reason="aarch64 is not emulated here")
def test_attention_runs_on_arm(tmp_path: Path) -> None:
    assert ARM and ARM_EMULATOR
    program = str(tmp_path / "attention_threads")
    _run(ARM, *FLAGS, "-O1", "-static", *KERNELS_ON_THREADS, "-o", program)
    assert _run(ARM_EMULATOR, program).count("the same bits") == 7
