"""The C++ CPU code under AddressSanitizer and UndefinedBehaviorSanitizer, over its ops' samples.

A copy of the package with an instrumented library runs them in a process that preloads the
sanitizers' runtime; torch's allocations get red zones there too, so a kernel that reads one
element too far ends the process. Every instruction set that this processor has is checked.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_library import ISAS, needs_library

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build" / "sanitized"
CXX = os.environ.get("CXX") or shutil.which("g++")

# test_ops checks the values; computing the references here would take minutes.
RUN = """
import sys
from contextlib import nullcontext
import torch
from fastattn.functional import batch_invariant
from fastattn.ops import _native
from fastattn.testing import all_specs, poisoned_results
isa = sys.argv[1]
_native.use_cpu_isa(isa)
# The code of the two sets with AVX-512 differs in bf16 alone.
bf16_alone = isa.startswith("avx512") and isa != _native.usable_cpu_isas()[-1]
turn, ran = _native.usable_cpu_isas().index(isa), 0
for spec in all_specs().values():
    for i, sample in enumerate(spec.samples if "cpu" in spec.backends else ()):
        products = spec.name in ("linear", "ffn")
        dtypes = (torch.float32, torch.bfloat16, *[torch.float16] * products)
        dtypes = [torch.bfloat16] if bf16_alone else dtypes
        dtypes = [d for d in dtypes if d in sample.dtypes]
        if isa == "portable" and len(dtypes) > 1:
            dtypes = dtypes[i % len(dtypes) :][:1]  # alternating: it is slow
        for dtype in dtypes:
            inputs = sample.inputs("cpu", dtype)
            wanted = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
            # Results made here, or those that the library makes itself: in turns.
            backend = ("cpu", None)[(i + turn + (dtype == torch.bfloat16)) % 2]
            same = batch_invariant() if products and backend else nullcontext()
            try:
                with poisoned_results(), same:
                    outputs = spec.function(**inputs, backend=backend)
                    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                    douts = [torch.where(x.isfinite(), x.detach(), 0) for x in outputs]
                    if wanted:
                        torch.autograd.grad(outputs, wanted, douts, allow_unused=True)
            except NotImplementedError:
                continue
            ran += 1
print(ran, "ran")
"""


def _runtime(name: str) -> Path | None:
    """A runtime library of the compiler, which prints the bare name if it has none."""
    if CXX is None:
        return None
    command = [CXX, f"-print-file-name={name}"]
    found = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    return found if found.is_absolute() and found.is_file() else None


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and its instrumented CPU library. Objects are kept in
    build/sanitized, where a later run compiles what has changed.
    """
    folder = tmp_path_factory.mktemp("sanitized")
    leave_out = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "fastattn", folder / "fastattn", ignore=leave_out)
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    OBJECTS.mkdir(parents=True, exist_ok=True)
    command += ["--build-lib", str(folder), "--build-temp", str(OBJECTS)]
    variables = {"FASTATTN_NATIVE": "cpu", "FASTATTN_SANITIZE": "address,undefined"}
    with (OBJECTS / "lock").open("w") as lock:  # another worker may need them, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True,
            timeout=1200,
        )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    assert (folder / "fastattn" / "_C_cpu.abi3.so").is_file()
    return folder


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2500)
@pytest.mark.skipif(_runtime("libasan.so") is None, reason="the compiler has no libasan")
@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_samples_under_sanitizers(package: Path, isa: str) -> None:
    # libasan looks for the functions that it wraps when it is loaded, so libstdc++ comes with it.
    runtimes = [str(_runtime(name)) for name in ("libasan.so", "libstdc++.so.6")]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaks
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": "",
    }
    command = [sys.executable, "-c", RUN, isa]
    result = subprocess.run(
        command, cwd=package, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
    [ran] = re.findall(r"^(\d+) ran$", result.stdout, re.M)
    every_dtype = isa == "avx2" or isa == ISAS[-1] != "portable"
    assert int(ran) > (300 if every_dtype else 150)  # most calls are not refused
