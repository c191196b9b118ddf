"""Wheel and source distribution: built, installed apart and used, with and without a compiler."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from native_build import build_script

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

USE = """
import sys, torch, fastattn
assert fastattn.__file__.startswith(sys.argv[1]), fastattn.__file__
x = torch.randn(2, 3, 8)
y = fastattn.layer_norm(x)
torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (8,)))
print("chosen:", fastattn.explain("layer_norm", x).chosen)
"""

NODE = """
import torch, fastattn
print(fastattn.layer_norm(torch.randn(2, 8, requires_grad=True)).grad_fn.name())
"""


@pytest.fixture(scope="module")
def mypy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """The command; torch is analysed once, by `make lint` or the first test."""
    cache = tmp_path_factory.mktemp("mypy") / "cache"
    if (kept := ROOT / ".mypy_cache").is_dir():
        shutil.copytree(kept, cache)
    options = f"--config-file={ROOT}/pyproject.toml", f"--cache-dir={cache}"
    return sys.executable, "-m", "mypy", *options


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files, without build results."""
    folder = tmp_path_factory.mktemp("source") / "fastattn"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "fastattn", folder / "fastattn", ignore=ignored)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=os.environ | environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(source: Path, folder: Path, **environment: str) -> tuple[Path, str]:
    """The wheel that pip builds from `source`, and pip's output."""
    pip = sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"
    output = run(*pip, "-w", folder, source, cwd=folder, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel, output


def use(wheel: Path, folder: Path) -> str:
    """The backend of a layer norm in the package as `wheel` installs it."""
    target = folder / "installed"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel, cwd=folder)
    output = run(sys.executable, "-c", USE, target, cwd=folder, PYTHONPATH=str(target))
    chosen = output.partition("chosen: ")[2].split()[0]
    # pip may hide its output, so the log says how to get the library.
    assert ("`pip install --no-build-isolation .` builds it" in output) == (chosen != "cpu"), output
    return chosen


def libraries(wheel: Path) -> list[str]:
    return [Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def quick_compiler(folder: Path) -> str:
    """The C++ compiler without optimisation, which takes a quarter of the time. Objects that `make
    native` has compiled of the same sources are copied.
    """
    script, made, build = folder / "quick-g++", folder / "made", build_script()
    tools = build.Tools.found()
    for name in ("cpu", "autograd"):
        *steps, _ = build.library_steps(build.LIBRARIES[name], tools)
        stale = build.outdated(steps)
        for output in (step.output for step in steps if step.output not in stale):
            copy = made / output.relative_to(build.OBJECTS)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(output)
    script.write_text(
        "#!/bin/sh\n"
        "for output; do :; done\n"  # the last argument
        f'found="{made}/${{output##*/build/native/}}"\n'
        'if [ -e "$found" ]; then exec cp "$found" "$output"; fi\n'
        f'exec "{tools.cxx}" "$@" -O0\n'
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.long
def test_wheel_with_a_compiler(source: Path, tmp_path: Path) -> None:
    variables = {"FASTATTN_NATIVE": "cpu,autograd", "CXX": quick_compiler(tmp_path)}
    wheel, _ = build(source, tmp_path, **variables)
    extension, library = sorted(libraries(wheel))
    assert extension.startswith("_C_autograd_") and library == "_C_cpu.abi3.so"
    assert "-cp310-abi3-" in wheel.name, "the extension is left alone where it does not fit"
    assert "fastattn/py.typed" in zipfile.ZipFile(wheel).namelist()
    binary = zipfile.ZipFile(wheel).read(f"fastattn/{library}")
    versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_([0-9.]+)", binary)}
    assert (2, 2, 5) in versions and max(versions) <= (2, 28), "torch's wheels need glibc 2.28"
    assert use(wheel, tmp_path) == "cpu"
    installed = str(tmp_path / "installed")
    node = run(sys.executable, "-c", NODE, cwd=tmp_path, PYTHONPATH=installed)
    assert node.split() == ["LayerNormBackward"]


def test_wheel_without_a_compiler(source: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python3").symlink_to(sys.executable)
    record = "fastattn/ops/verified/sm_90-sm90.json"
    wheel, output = build(source, tmp_path, PATH=str(tools), CXX="", CUDA_HOME="")
    assert libraries(wheel) == []
    assert record in zipfile.ZipFile(wheel).namelist()
    assert "fastattn: installing without the native library cpu" in output
    assert use(wheel, tmp_path) == "torch"


def test_wheel_without_torch(source: Path, tmp_path: Path) -> None:
    """As in an isolated build: setuptools and nothing else."""
    tools = tmp_path / "build-tools"
    for pattern in ("setuptools*", "_distutils_hack"):
        for found in Path(sysconfig.get_path("purelib")).glob(pattern):
            shutil.copytree(found, tools / found.name)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from setuptools import build_meta\n"
        "print(build_meta.build_wheel(sys.argv[2]))\n"
    )
    output = run(sys.executable, "-I", "-S", "-c", code, tools, tmp_path, cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    assert libraries(wheel) == []
    assert "needs torch, which the build does not see" in output
    assert use(wheel, tmp_path) == "torch"


def test_source_distribution(source: Path, tmp_path: Path) -> None:
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
        packed.extractall(tmp_path / "unpacked", filter="data")
    wanted = {str(p.relative_to(source)) for p in (source / "csrc").rglob("*") if p.is_file()}
    assert wanted <= names
    assert {"setup.py", "LICENSE", "fastattn/functional.py"} <= names
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel, _ = build(unpacked, tmp_path, FASTATTN_NATIVE="0")
    assert use(wheel, tmp_path) == "torch"


def test_mypy_finds_the_types_of_the_package(mypy: tuple[str | Path, ...], tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    user.write_text(
        "# mypy: disallow-untyped-calls, disallow-any-generics, warn-return-any\n"
        "import torch\n"
        "import fastattn\n"
        "from fastattn import nn as fnn\n"
        "\n"
        "def attend(x: torch.Tensor) -> torch.Tensor:\n"
        "    out = fastattn.attention(x, x, x, causal=True)\n"
        "    out, lse = fastattn.attention(x, x, x, return_lse=True)\n"
        "    y: torch.Tensor = fastattn.layer_norm(out)\n"
        "    y, z = fastattn.add_layer_norm(y, x, return_sum=True)\n"
        "    return y + z + fastattn.add_layer_norm(y, x)\n"
        "\n"
        "def model() -> fnn.Transformer:\n"
        "    built = fnn.Transformer(16, 2, batch_first=True)\n"
        "    fastattn.patch(built, quiet=True)\n"
        "    return built\n"
        "\n"
        "with fastattn.patch(model()) as report:\n"
        "    print(report.replaced, fastattn.explain('ffn', torch.zeros(1)).chosen)\n"
    )
    output = run(*mypy, user, cwd=tmp_path, MYPYPATH=str(ROOT))
    assert "Success" in output


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Python of a virtual environment with an editable install of a clone, and the clone."""
    folder = tmp_path_factory.mktemp("editable")
    clone = folder / "fastattn"
    shutil.copytree(source, clone)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    # torch, setuptools and mypy are those of this environment.
    installed = Path(sysconfig.get_path("purelib"))
    (site,) = (folder / "venv").glob("lib/*/site-packages")
    (site / "environment.pth").write_text(f"{installed}\n")
    pip = sys.executable, "-m", "pip", "--python", python, "install"
    options = "--no-deps", "--no-build-isolation", "--ignore-installed", "--editable"
    run(*pip, *options, clone, cwd=folder, FASTATTN_NATIVE="0")
    return python, clone


def test_editable_install_beside_the_clone(editable: tuple[Path, Path]) -> None:
    """A script beside the clone must not import the clone's folder as a namespace package."""
    python, clone = editable
    script = clone.parent / "script.py"
    script.write_text("import fastattn; print(fastattn.__file__, fastattn.attention.__name__)")
    output = run(python, script, cwd=clone.parent)
    assert output.split() == [str(clone / "fastattn" / "__init__.py"), "attention"]


def test_editable_install_has_types(mypy, editable, tmp_path):
    python, clone = editable
    user = tmp_path / "user.py"
    user.write_text(
        "import fastattn\nimport torch\nreveal_type(fastattn.layer_norm(torch.ones(2, 3)))\n"
    )
    for cwd in (tmp_path, clone.parent):
        output = run(*mypy, "--python-executable", python, user, cwd=cwd)
        assert 'Revealed type is "torch._tensor.Tensor"' in output
