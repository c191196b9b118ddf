"""Functions over the kernels' own headers, compiled for the host."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[3] / "csrc"
Range = tuple[int, int]


def compiled(folder: Path, source: str) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    shim, library = folder / "shim.cpp", folder / "shim.so"
    shim.write_text(source)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CSRC}", "-o", library, shim]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))
