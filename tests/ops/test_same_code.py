"""Machine code of kernels, and the records that are carried over where it is equal."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from native_build import build_script

from fastattn.ops import _env, _verified
from fastattn.testing import lines, record, same_code
from fastattn.testing.rows import Row

# As cuobjdump prints a library with two architectures.
PRINTED = """
Fatbin elf code:
================
arch = sm_90a
host = linux

\tcode for sm_90a
\t\tFunction : _Z3addPf
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/  LDC R1, c[0x0][0x28] ;  /* 0x00000a00ff017b82 */
\t\t..........

\t\tFunction : _Z3subPf
        /*0000*/  FADD R1, R2, -R3 ;  /* 0x00000a00ff017b83 */
\t\t..........

Fatbin elf code:
================
arch = sm_80
\tcode for sm_80
\t\tFunction : _Z3addPf
        /*0000*/  IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;  /* 0x00000a00ff017b84 */
"""
ADD, SUB, OLD_ADD = "sm_90a _Z3addPf", "sm_90a _Z3subPf", "sm_80 _Z3addPf"


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the program in place of cuobjdump prints."""
    text, program = tmp_path / "printed.txt", tmp_path / "cuobjdump"
    program.write_text(f'#!/bin/sh\n[ "$1" = -sass ] && cat "{text}"\n')
    program.chmod(0o755)
    text.write_text(PRINTED)
    (tmp_path / "_C_sm90.abi3.so").write_bytes(b"\x7fELF fastattn sources 0a1b, nvcc 13.0.88\0")
    monkeypatch.setattr(record, "cuobjdump", lambda: str(program))
    monkeypatch.setattr(_verified, "_PACKAGE", tmp_path)
    return text


def _code(printed: Path) -> dict[str, str]:
    return record.machine_code(printed.with_name("_C_sm90.abi3.so"))


def test_machine_code_is_that_of_each_kernel(printed: Path) -> None:
    code = _code(printed)
    assert set(code) == {ADD, SUB, OLD_ADD} and len({*code.values()}) == 3
    for before, after, changed in (
        ("_Z3subPf", "_Z6othersPf", []),
        ("Function : _Z3addPf\n\t", "Function : _Z3addPf\n\n\t\t", []),
        ("0x00000a00ff017b83", "0x00000a00ff017b93", [SUB]),
        ("R2, -R3", "R2, -R4", [SUB]),
        ('.headerflags\t@"EF_CUDA_SM90"', "", [ADD]),
        ("0x00000a00ff017b84", "0x00000a00ff017b94", [OLD_ADD]),
    ):
        assert before in PRINTED
        printed.write_text(PRINTED.replace(before, after))
        assert same_code.differences(code, _code(printed)) == changed, before
    assert record.machine_code(printed.with_name("absent.so")) == {}


@pytest.mark.parametrize("old, new, names", [
    ({"a": "1", "b": "2"}, {"a": "1", "b": "2"}, []),
    ({"a": "1", "b": "2"}, {"a": "2", "b": "1"}, ["a", "b"]),  # exchanged
    ({"a": "1", "b": "2"}, {"a": "1", "c": "2"}, []),  # renamed
    ({"a": "1", "b": "2"}, {"c": "2", "d": "1"}, []),
    ({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, ["b", "c"]),
    ({"a": "1", "b": "1"}, {"a": "1"}, ["b"]),
    ({"a": "1"}, {"a": "1", "b": "1"}, ["b"]),
    ({"a": "1", "b": "2", "c": "2"}, {"a": "1", "d": "2"}, ["b", "c", "d"]),
])  # fmt: skip
def test_kernels_of_two_libraries(old, new, names):
    assert same_code.differences(old, new) == names


@pytest.mark.parametrize("change, why", [
    ({}, None),
    ({"digest": None}, "has no machine code to compare"),
    ({"code": {}}, "has no machine code to compare"),
    ({"digest": "ffff-of others"}, "is of other launchers in Python"),
    ({"compiler": "12.8.1"}, r"nvcc 12\.8\.1 compiled, here nvcc 13\.0\.88 did"),
    ({"code": {ADD: "1"}}, "has other machine code in 3 kernels: sm_90a _Z3addPf"),
], ids=lambda value: next(iter(value), "equal") if isinstance(value, dict) else "")  # fmt: skip
def test_a_record_is_carried_over_where_all_machine_code_is_equal(printed, change, why):
    digest = _verified.digest.__wrapped__("sm90")
    _, launchers = digest.split("-")
    entry = {"op": "ffn", "dtype": "bfloat16", "status": "passed"}
    record = {"digest": f"ffff-{launchers}", "compiler": "13.0.88", "kernels": [entry]}
    record |= {"code": _code(printed)} | change
    file = printed.with_name("sm_90-sm90.json")
    lines.write_json(file, record)
    _verified.digest.cache_clear()
    found = same_code.carry_over(file, "sm90")
    _verified.digest.cache_clear()
    assert found is None if why is None else re.search(why, found or "")
    assert json.loads(file.read_text()) == (record | {"digest": digest} if why is None else record)


def test_a_library_is_disassembled_once(printed, tmp_path, monkeypatch):
    """A record of the same kernels keeps the machine code, one of others does not."""
    monkeypatch.setenv(_env.RECORD_VARIABLE, str(tmp_path / "verified"))
    monkeypatch.setattr(_env, "architecture", lambda *_: "sm_90")
    monkeypatch.setattr(_env, "device_name", lambda device: "a GPU")
    row = Row("ffn", "sm90", "cuda", "bf16", "a sample", "y", "ok")

    def recorded() -> dict[str, Any]:
        _verified.digest.cache_clear()
        record.record([row], torch.device("cuda", 0))
        _verified.digest.cache_clear()
        return _verified.read(tmp_path / "verified" / "sm_90-sm90.json")

    first, code = recorded(), _code(printed)
    assert first["code"] == code and first["compiler"] == "13.0.88"
    printed.write_text("")
    assert recorded()["code"] == code
    library = tmp_path / "_C_sm90.abi3.so"
    library.write_bytes(library.read_bytes().replace(b"0a1b", b"0a1c"))
    assert recorded()["code"] == {}


def test_the_command(printed, monkeypatch, capsys):
    """It builds the libraries, then says of each record whether it is of these kernels."""
    built: list[str] = []

    def build(command: list[str], *, cwd: Path, env: dict[str, str], check: bool) -> None:
        assert command[1] == "setup.py" and (cwd / "setup.py").is_file() and check
        built.append(env["FASTATTN_NATIVE"])

    monkeypatch.setattr(same_code.subprocess, "run", build)
    assert same_code.main(["sm90"]) == 1 and built == ["sm90"]
    assert "sm_90-sm90.json: has no machine code to compare" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        same_code.main(["cpu"])
    assert "LIBRARY must be sm90 or cuda, got cpu" in capsys.readouterr().err


KERNEL = """
struct Sizes { int rows, columns; };  // of x
template <class T>
__global__ void scale(T* x, Sizes sizes) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < sizes.rows * sizes.columns) { x[i] *= T(2); }
}
template __global__ void scale<float>(float*, Sizes);
"""


@pytest.mark.slow
def test_renaming_keeps_the_machine_code(tmp_path: Path) -> None:
    """By nvcc and cuobjdump themselves."""
    tools = build_script().Tools.found()
    if tools.cuda is None or record.cuobjdump() is None:
        pytest.skip("needs nvcc and cuobjdump")

    def compiled(text: str) -> dict[str, str]:
        (tmp_path / "kernel.cu").write_text(text)
        output = tmp_path / "kernel.o"
        command = [str(tools.cuda / "bin" / "nvcc"), "-gencode=arch=compute_90a,code=sm_90a"]
        subprocess.run([*command, "-c", "-o", output, tmp_path / "kernel.cu"], check=True)
        return record.machine_code(output)

    first = compiled(KERNEL)
    renamed = compiled(KERNEL.replace("Sizes", "Shape").replace("scale", "twice"))
    assert len(first) == 1 and set(first) != set(renamed)
    assert same_code.differences(first, renamed) == []
    changed = compiled(KERNEL.replace("T(2)", "T(3)"))
    assert same_code.differences(first, changed) == list(first)
