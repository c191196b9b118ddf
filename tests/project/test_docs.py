"""The documentation builds without a warning, and its code parses."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "pages").rglob("*.md"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda p: p.stem)
def test_code_parses(page: Path) -> None:
    for block in blocks(page):
        ast.parse(block)


def test_the_first_example_runs() -> None:
    (example,) = blocks(ROOT / "docs" / "pages" / "index.md")
    names: dict[str, object] = {}
    exec(example, names)
    assert names["out"].shape == (2, 8, 512, 64)  # type: ignore[attr-defined]


def test_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its Python blocks, one after the other, as a reader pastes them."""
    names: dict[str, object] = {}
    for block in blocks(ROOT / "README.md"):
        exec(block, names)
    printed = capsys.readouterr().out
    assert "attention" in printed and "TransformerEncoderLayer" in printed


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text()
    for page in PAGES:
        assert str(page.relative_to(ROOT / "docs" / "pages")) in navigation


@pytest.mark.slow
def test_site_builds_strictly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT / "docs",
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    backends = (tmp_path / "backends.html").read_text()
    assert "attention_fwd" in backends
    assert "{{" not in backends
    assert (tmp_path / "images" / "hopper.svg").read_text().startswith("<?xml")
    assert "add_layer_norm" in (tmp_path / "api.html").read_text()
    support = (tmp_path / "equivalence.html").read_text()
    assert "sm90</code> takes key_lengths per sequence" in support
