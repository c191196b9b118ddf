"""Carries records of verified kernels over to changed sources that compile to the same machine
code, without a GPU.

    python -m fastattn.testing.same_code [sm90 cuda]

Builds the libraries in a source tree (minutes) and compares the machine code of every kernel, as
cuobjdump prints it, with that of the records in `fastattn/ops/verified`. Where all of it is equal,
the record gets the digest of the new sources. This says nothing about constants in memory, nor
about host code: after a change of bindings, launchers in C++, workspaces or plans, run
`python -m fastattn.testing.instances` on a GPU as well. A record is left as it is if launchers in
Python or the compiler differ. Exit code 1 if a record was not carried over.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fastattn.ops import _env, _verified
from fastattn.testing import lines, record

_LIBRARIES = ("sm90", "cuda")


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
    old, digest = _verified.read(file), _verified.digest(backend)
    if old["digest"] == digest:
        return None
    if old["digest"] is None or not old.get("code"):
        return "has no machine code to compare: a GPU run must record it"
    if old["digest"].partition("-")[2] != digest.partition("-")[2]:
        return "is of other launchers in Python: a GPU run must record them"
    _, compiler = _verified.built(backend) or ("", "none")
    if old.get("compiler") != compiler:
        return f"is of kernels that nvcc {old.get('compiler')} compiled, here nvcc {compiler} did"
    code = record.machine_code(_verified.library(backend))
    if names := differences(old["code"], code):
        return f"has other machine code in {len(names)} kernels: {', '.join(names)}"
    lines.write_json(file, old | {"digest": digest, "code": code})
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
    if os.environ.get(_env.LIBRARY_VARIABLE):
        parser.error(f"{_env.LIBRARY_VARIABLE} must not be set: what is built here is compared")
    if not (root / "setup.py").is_file() or record.cuobjdump() is None:
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
