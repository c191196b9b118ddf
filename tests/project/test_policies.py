"""The project's policies: its public names, its versions, and the files for those who report and
release.
"""

import doctest
import importlib
import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import python_output

import fastattn
from fastattn import functional

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest needs tomli
    import tomli as tomllib

yaml = pytest.importorskip("yaml")  # of mkdocs

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "pages"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def reference(page: Path) -> dict[str, set[str] | None]:
    """The modules of a page of the reference and the names that it lists, None for all."""
    found: dict[str, set[str] | None] = {}
    for module, options in re.findall(r"^::: (\S+)\n((?:    .*\n?)*)", page.read_text(), re.M):
        listed = re.search(r"members: \[(.*?)\]", options)
        found[module] = set(listed[1].split(", ")) if listed else None
    return found


def test_public_names_are_those_of_the_reference() -> None:
    stated = re.findall(r"`(fastattn\.\w+)`", (PAGES / "stability.md").read_text())
    public = [name for name in dict.fromkeys(stated) if name != "fastattn.ops"]
    pages = [reference(page) for page in sorted((PAGES / "api").glob("*.md"))]
    documented = {name: members for page in pages for name, members in page.items()}
    for name in public:
        module = importlib.import_module(name)
        if name not in documented:  # a package whose modules the reference lists
            assert any(other.startswith(f"{name}.") for other in documented), name
            continue
        assert documented[name] in (None, set(module.__all__)), name
        assert all(getattr(module, member, None) is not None for member in module.__all__)
    assert {name for name in documented if name.count(".") == 1} <= set(public)


def test_supported_versions_are_stated_alike() -> None:
    (torch_from,) = re.findall(r"^torch>=([\d.]+)$", "\n".join(PROJECT["dependencies"]), re.M)
    python_from = PROJECT["requires-python"].removeprefix(">=")
    for page in (ROOT / "README.md", PAGES / "quickstart.md", PAGES / "install.md"):
        for what, version in re.findall(
            r"(?i)(python|torch)[^\n`]*?([\d.]+) or newer", page.read_text()
        ):
            assert version == (torch_from if what == "torch" else python_from), page
    oldest = workflow("versions")["jobs"]["test"]["strategy"]["matrix"]["include"][1]
    assert oldest["python"] == python_from and oldest["torch"] == f"torch=={torch_from}.0"
    (dev,) = [x for x in PROJECT["optional-dependencies"]["dev"] if x.startswith("transformers")]
    assert oldest["beside"].removesuffix(".0") == dev.partition(",")[0].replace(">=", "==")


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def test_the_scheduled_run_installs_what_it_names(tmp_path: Path) -> None:
    job = workflow("versions")["jobs"]["test"]
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    for versions in job["strategy"]["matrix"]["include"]:
        filled = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda m, v=versions: v[m[1]], command)
        assert "{{" not in filled
        dry = filled.replace("make test", f"make -n -C {ROOT} {tmp_path / 'venv' / 'torch'}")
        dry += f" VENV={tmp_path / 'venv'} TORCH_INDEX_URL=index"
        done = subprocess.run(dry, shell=True, capture_output=True, text=True, check=True)
        assert f'--index-url index "{versions["torch"]}"' in done.stdout
        beside = [versions[key] for key in ("numpy", "triton", "beside")]
        assert " ".join(f'"{package}"' for package in beside) in done.stdout


def test_pre_commit_has_the_pinned_checkers() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    pins = {x for x in PROJECT["optional-dependencies"]["dev"] if "==" in x}
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    used = {pin for hook in hooks for pin in hook.get("additional_dependencies", ())}
    assert used == {pin for pin in pins if not pin.startswith("mypy")}
    assert {hook["id"] for hook in hooks} == {"ruff", "ruff-format", "clang-format", "mypy"}


def test_templates_ask_for_what_is_needed() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    for name, words in (
        ("failure", ("fastattn info",)),
        ("wrong-result", ("fastattn info", "fastattn check --op", "--json")),
    ):
        form = yaml.safe_load((folder / f"{name}.yml").read_text())
        required = [
            field["attributes"]["label"]
            for field in form["body"]
            if field.get("validations", {}).get("required")
        ]
        assert all(any(word in label for label in required) for word in words)
    for path in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(path.read_text())


def test_the_changelog_is_short_and_in_sections() -> None:
    """At most 60 lines for a version, in sections that readers know."""
    text = (PAGES / "changelog.md").read_text()
    versions = re.split(r"^## ", text, flags=re.M)[1:]
    assert versions
    for version in versions:
        assert len(version.splitlines()) <= 60
        sections = re.findall(r"^### (.*)$", version, re.M)
        assert sections and set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed"}


# -- the public API --------------------------------------------------------------------------------
FUNCTIONS = {
    name: function
    for name in functional.__all__
    if inspect.isfunction(function := getattr(functional, name))
}
_LIST = "import fastattn; print(*dir(fastattn)); {}; print(*dir(fastattn))"
_USE = "fastattn.patch, fastattn.nn.LayerNorm, fastattn.testing"


def test_dir_lists_the_public_names() -> None:
    before, after = (x.split() for x in python_output("-c", _LIST.format(_USE)).splitlines())
    modules = ["distributed", "functional", "integrations", "nn", "seq2seq", "testing"]
    assert before == after == sorted([*fastattn.__all__, *modules, "__version__"])
    assert {"patch", "unpatch", "attention"} < set(before)
    for name in before:
        assert getattr(fastattn, name) is not None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_names_every_argument(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    words = set(text.replace(",", " ").replace(":", " ").replace("`", " ").split())
    assert not set(named) - words


def test_examples_of_docstrings_run() -> None:
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    with_examples = []
    for name, function in FUNCTIONS.items():
        for test in finder.find(function, name, globs={}):
            if test.examples:
                with_examples.append(test.name)
                runner.run(test)
    assert "attention" in with_examples
    assert not runner.failures


_Q = torch.randn(1, 2, 5, 8)
_OFFSETS = torch.tensor([0, 5], dtype=torch.int32)
_PACKED = (*[torch.randn(5, 2, 8)] * 3, _OFFSETS, _OFFSETS, 5, 5)
_X, _W = torch.randn(3, 8), torch.randn(8, 8)


@pytest.mark.parametrize("function, arguments, given, hint", [
    (fastattn.attention, (_Q,) * 3, "attn_mask", "mask="),
    (fastattn.attention, (_Q,) * 3, "is_causal", "causal="),
    (fastattn.attention, (_Q,) * 3, "dropout", "dropout_p="),
    (fastattn.attention, (_Q,) * 3, "p", "dropout_p="),
    (fastattn.attention, (_Q,) * 3, "enable_gqa", "without an argument"),
    (fastattn.attention, (_Q,) * 3, "softmax_scale", "scale="),
    (fastattn.attention, (_Q,) * 3, "window_size", "window="),
    (fastattn.attention, (_Q,) * 3, "key_padding_mask", "True = may attend"),
    (fastattn.attention, (_Q,) * 3, "need_weights", "attention_with_weights"),
    (fastattn.attention_varlen, _PACKED, "is_causal", "causal="),
    (fastattn.attention_weights, (_Q, _Q), "attn_mask", "mask="),
    (fastattn.add_layer_norm, (_X, _X), "dropout", "dropout_p="),
    (fastattn.ffn, (_X, _W, None, _W, None), "p", "dropout_p="),
])  # fmt: skip
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_names_of_other_packages_get_a_hint(function, arguments, given, hint, compiled):
    if compiled:
        function = torch.compile(function, backend="eager")
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{given}'.*{hint}"):
        function(*arguments, **{given: None})


@pytest.mark.parametrize("function, arguments", [
    (fastattn.attention, (_Q,) * 3),
    (fastattn.attention_varlen, _PACKED),
    (fastattn.attention_weights, (_Q, _Q)),
    (fastattn.attention_with_weights, (_Q,) * 3),
    (fastattn.add_layer_norm, (_X, _X)),
    (fastattn.ffn, (_X, _W, None, _W, None)),
])  # fmt: skip
def test_unknown_names_are_refused(function: Callable[..., Any], arguments: Any) -> None:
    wanted = rf"^{function.__name__}\(\) got an unexpected keyword argument 'colour'$"
    with pytest.raises(TypeError, match=wanted):
        function(*arguments, colour=1)


def test_hints_name_arguments_that_the_function_has() -> None:
    """A norm has no mask: Python's own error is enough."""
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'attn_mask'$"):
        fastattn.add_layer_norm(_X, _X, attn_mask=None)  # type: ignore[call-overload]
