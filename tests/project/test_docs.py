"""The documentation builds without a warning, its code runs, and its commands exist."""

import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest
from subprocesses import python_output

from fastattn import cli
from fastattn.ops import _env

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "pages").rglob("*.md"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


WITH_PYTHON = [page for page in [ROOT / "README.md", *PAGES] if blocks(page)]


@pytest.mark.parametrize("page", [
    # Inductor compiles most of these blocks: half a minute.
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem == "compile"))
    for page in WITH_PYTHON
])  # fmt: skip
def test_python_blocks_run(page, capsys, monkeypatch):
    if page.stem == "modules":
        pytest.importorskip("transformers")
    if page.stem == "compile":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    if page.stem in ("distributed", "parallelize"):  # what torchrun sets for a single process
        for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), ("localhost", "0"), strict=True):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
    names: dict[str, object] = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), names)
    expected = {"README": "attention", "speedup": "TransformerEncoderLayer"}.get(page.stem, "")
    assert expected in capsys.readouterr().out


def commands() -> list[str]:
    """Every line of a shell block of the README and the pages, without its comment."""
    return [
        line.split("#")[0].strip()
        for page in [ROOT / "README.md", *PAGES]
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]


def test_commands_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.tsv").touch()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    modules = {"benchmarks.run", "benchmarks.report", "benchmarks.overhead", "benchmarks.tune"}
    seen = set()
    for command in commands():
        words = shlex.split(command)
        words = [word for word in words if not re.match(r"[A-Z_0-9]+=", word)]  # variables
        match words[:3]:
            case ["fastattn", *_]:  # parsing asks for the device
                options = ["cpu" if word == "cuda" else word for word in words[1:]]
                cli.make_parser(options).parse_args(options)
            case ["make", target, *_]:
                assert target in targets, command
            case ["python", "-m", module]:
                assert module in modules or importlib.util.find_spec(module), command
            case _:
                assert words[:2] in ([], ["pip", "install"], ["torchrun", "--nproc-per-node"]), (
                    command
                )
        seen.update(words[:1])
    assert {"fastattn", "make", "pip", "python"} <= seen


def test_environment_variables_are_documented() -> None:
    table = (ROOT / "docs" / "pages" / "environment.md").read_text()
    sources = [ROOT / "setup.py", *(ROOT / "fastattn").rglob("*.py")]
    sources += (ROOT / "benchmarks").rglob("*.py")
    used = {
        name
        for source in sources
        for name in re.findall(r'"(FASTATTN_[A-Z0-9_]+)"', source.read_text())
    }
    assert {"FASTATTN_BACKEND", "FASTATTN_NATIVE"} <= used
    assert used == set(re.findall(r"`(FASTATTN_[A-Z0-9_]+)`", table))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text()
    for page in PAGES:
        assert str(page.relative_to(ROOT / "docs" / "pages")) in navigation


@pytest.mark.slow
def test_site_builds_strictly(tmp_path: Path) -> None:
    build = ["-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    python_output(*build, cwd=ROOT / "docs", env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    backends = (tmp_path / "backends.html").read_text()
    assert "attention_fwd" in backends
    assert "{{" not in backends
    assert (tmp_path / "images" / "hopper.svg").read_text().startswith("<?xml")
    assert "add_layer_norm" in (tmp_path / "api" / "functions.html").read_text()
    assert "--max-length" in (tmp_path / "cli.html").read_text()
    support = (tmp_path / "equivalence.html").read_text()
    assert "sm90</code> takes key_lengths per sequence" in support
    assert "(where it has passed)" in backends and "not been verified" not in support
    assert "passed: NVIDIA H200" in backends


def test_shared_memory_of_each_gpu_is_what_configs_are_chosen_for() -> None:
    text = (ROOT / "docs" / "pages" / "backends.md").read_text()
    rows = re.findall(r"^\|[^|]+\| (sm_\d+|gfx\d+) \| (\d+) KB \|", text, re.MULTILINE)
    assert len(rows) == 7
    assert {arch: int(kb) << 10 for arch, kb in rows} == {
        arch: _env.shared_memory(arch) for arch, _ in rows
    }
