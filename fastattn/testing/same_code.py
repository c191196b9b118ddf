"""Carries records of verified kernels over to changed sources that compile to the same machine
code, without a GPU.

    python -m fastattn.testing.same_code [sm90 cuda]

Builds the libraries in a source tree (minutes) and compares the machine code of every kernel, as
cuobjdump prints it, with that of the records in `fastattn/ops/verified`. Where all of it is equal,
the record gets the digest of the new sources. This says nothing about host code: after a change of
bindings, launchers in C++, workspaces or plans, run `python -m fastattn.testing.instances` on a GPU
as well. A record is left as it is if launchers in Python or the compiler differ. Exit code 1 if a
record was not carried over.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fastattn.ops import _verified
from fastattn.testing import lines

_LIBRARIES = ("sm90", "cuda")


def cuobjdump() -> str | None:
    """The program of the CUDA toolkit, or the one in Triton's package."""
    try:
        import triton
    except ImportError:
        return shutil.which("cuobjdump")
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return str(bundled) if bundled.is_file() else shutil.which("cuobjdump")


def machine_code(library: Path) -> dict[str, str]:
    """Digests of the kernels in a library by architecture and mangled name; the names do not count.
    Empty without the library or cuobjdump.
    """
    program = cuobjdump()
    if program is None or not library.is_file():
        return {}
    command = [program, "-sass", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bodies: dict[str, list[str]] = {}  # a kernel may be in several objects
    for binary in re.split(r"^arch = ", text, flags=re.MULTILINE)[1:]:
        head, *functions = re.split(r"^\s*Function : (\S+)\n", binary, flags=re.MULTILINE)
        for name, body in zip(functions[::2], functions[1::2], strict=True):
            body = body.partition("Fatbin ")[0].replace(name, "")
            bodies.setdefault(f"{head.split()[0]} {name}", []).append(" ".join(body.split()))
    return {
        name: hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        for name, parts in bodies.items()
    }


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names of kernels whose machine code is in one library alone. Kernels that were renamed are
    compared with those that have no longer a name.
    """
    changed = [name for name in old if name in new and old[name] != new[name]]
    gone, come = (
        {name: code[name] for name in code if name not in other}
        for code, other in ((old, new), (new, old))
    )
    alone = (Counter(gone.values()) - Counter(come.values())) | (
        Counter(come.values()) - Counter(gone.values())
    )
    return changed + [name for name, digest in (gone | come).items() if digest in alone]


def carry_over(file: Path, backend: str) -> str | None:
    """Why a record stays as it is, or None if it is of the installed kernels from now on."""
    record, digest = _verified.read(file), _verified.digest(backend)
    if record["digest"] == digest:
        return None
    if record["digest"] is None or not record.get("code"):
        return "has no machine code to compare: a GPU run must record it"
    if record["digest"].partition("-")[2] != digest.partition("-")[2]:
        return "is of other launchers in Python: a GPU run must record them"
    _, compiler = _verified.built(backend) or ("", "none")
    if record.get("compiler") != compiler:
        return f"is of kernels that nvcc {record.get('compiler')} compiled, here nvcc {compiler} did"
    code = machine_code(_verified.library(backend))
    if names := differences(record["code"], code):
        return f"has other machine code in {len(names)} kernels: {', '.join(names)}"
    lines.write_json(file, record | {"digest": digest, "code": code})
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn.testing.same_code",
        description="Carries records over to sources that compile to the same machine code.",
    )
    parser.add_argument("library", nargs="*", metavar="LIBRARY", help=" or ".join(_LIBRARIES))
    libraries = parser.parse_args(arguments).library or _LIBRARIES
    root = _verified.SHIPPED.parents[2]
    if unknown := set(libraries) - set(_LIBRARIES):
        parser.error(f"LIBRARY must be {' or '.join(_LIBRARIES)}, got {', '.join(unknown)}")
    if not (root / "setup.py").is_file() or cuobjdump() is None:
        parser.error("a source tree with setup.py, nvcc and cuobjdump (Triton has one) are needed")
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    native = {"FASTATTN_NATIVE": ",".join(libraries), "FASTATTN_TRIALS": ""}
    subprocess.run(build, cwd=root, env=os.environ | native, check=True)
    kept = False
    for backend in libraries:
        for file in _verified.files(_verified.SHIPPED):
            if file.stem.endswith(f"-{backend}"):
                why = carry_over(file, backend)
                kept |= why is not None
                print(f"{file.name}: {why or 'is of these kernels'}")
    return int(kept)


if __name__ == "__main__":
    sys.exit(main())
