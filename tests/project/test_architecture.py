"""Which module may import which: the rules of the design, checked on import and #include lines.

Every checker is a function of a folder, so that tests can run it on a tree that breaks a rule.
"""

import ast
import functools
import graphlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from subprocesses import python_output

import fastattn

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(fastattn.__file__).resolve().parent
BACKENDS = ("sm90", "cuda", "triton", "cpu", "torch", "reference")


# -- reading --------------------------------------------------------------------------------------
def _modules(package: Path) -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


_parsed = functools.cache(ast.parse)  # of the text of a file


def _nodes(path: Path) -> Iterator[ast.AST]:
    """The nodes of a file, without those that only type checkers read."""
    nodes: list[ast.AST] = [_parsed(path.read_text())]
    while nodes:
        node = nodes.pop()
        yield node
        typing_alone = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        nodes += node.orelse if typing_alone else ast.iter_child_nodes(node)  # type: ignore[attr-defined]


def _imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules that a module imports anywhere, as full names as far as these exist."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                parents = package[: len(package) - node.level + 1]
                base = ".".join(parents + ([base] if base else []))
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in modules else base


def _attributes(path: Path) -> Iterator[str]:
    """Dotted attribute chains and imported names: torch.cuda.is_available, os.environ."""
    for node in ast.walk(_parsed(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _op_of(name: str) -> str | None:
    """fastattn.ops.attention.triton -> attention; None outside an op's folder."""
    parts = name.split(".")
    return parts[2] if len(parts) >= 4 and parts[:2] == ["fastattn", "ops"] else None


def _backend_of(name: str) -> str | None:
    """The backend a file of an op's folder belongs to: triton.py, triton_steps.py and
    triton/tiles.py to triton.
    """
    if _op_of(name) is None:
        return None
    stem = name.split(".")[3]
    return next((b for b in BACKENDS if stem == b or stem.startswith(f"{b}_")), None)


@functools.cache
def _edges(package: Path) -> tuple[tuple[str, str], ...]:
    """(module, what it imports) of a whole package."""
    modules = _modules(package)
    return tuple(
        (name, imported)
        for name, path in modules.items()
        for imported in dict.fromkeys(_imports(name, path, modules))
    )


# -- the rules ------------------------------------------------------------------------------------
def backends_import_each_other(package: Path) -> list[str]:
    """1. Backends never import each other, the reference, or their op."""
    found = []
    for name, imported in _edges(package):
        own, other = _backend_of(name), _backend_of(imported)
        above = _op_of(imported) and re.search(r"\.(op|spec\w*)$", imported)
        if own and (above or other not in (None, own)):
            found.append(f"{name} imports {imported}")
    return found


def ops_import_each_other(package: Path) -> list[str]:
    """2. One op never imports another op."""
    return [
        f"{name} imports {imported}"
        for name, imported in _edges(package)
        if _op_of(name) and _op_of(imported) and _op_of(name) != _op_of(imported)
    ]


def references_import_more_than_torch(package: Path) -> list[str]:
    """3. reference.py and naive.py import only torch, reference.py also the dropout bits and the
    arguments of its op.
    """
    found = []
    for name, imported in _edges(package):
        stem = name.split(".")[-1]
        if stem not in ("reference", "naive"):
            continue
        top = imported.split(".")[0]
        given = ("fastattn.ops._dropout", name.replace("reference", "calls"))
        known = stem == "reference" and imported in given
        if top != "torch" and top not in sys.stdlib_module_names and not known:
            found.append(f"{name} imports {imported}")
    return found


# Modules of fastattn that a module of each layer may import, without "fastattn." in front; names
# are prefixes, <op> is its own op, "." is the whole package.
_LAYERS = {
    "ops._env": "",
    "ops._dropout": "",
    "ops._native": "ops._env",
    # Common code of the Triton backends of all ops.
    "ops._cuda_driver": "",
    "ops._triton_launch": "ops._cuda_driver",
    "ops._triton_dropout": "ops._dropout",
    "ops._verified": "ops._env",
    "ops._vmap": "",
    "ops._launch": "ops._native",
    "ops._select": "ops._env ops._launch ops._verified",
    "ops._op": "ops._env ops._launch ops._select ops._vmap",
    "ops._autograd": "ops._op ops._native",
    # The reference is also the derivative of the backward op and, unless a tangents.py has formulas
    # of its own, the one in forward mode; other backends are found by name.
    "ops.<op>.op": (
        "ops._op ops._autograd ops.<op>.reference ops.<op>.tangents ops.<op>.calls "
        "ops.<op>.prepared"
    ),
    "ops.<op>.spec": ".",
    "ops.<op>": "ops._env ops._dropout ops._native ops._triton_launch ops._triton_dropout ops.<op>",
    "ops": "ops._env ops._native ops._op ops._select",
    "_arguments": "ops._dropout ops.*.op",
    "_scores": "_arguments ops.attention.op",
    "_options": "_arguments _scores ops.attention.op",
    "_paged": "_arguments",
    "_jagged": "",
    "functional": "_arguments _jagged _options _paged _scores ops._select ops._dropout ops.*.op",
    "_openmp": "",
    "nn": "functional nn ops",
    "integrations": "functional nn integrations",
    "distributed": (
        "_arguments _scores functional nn distributed ops._select ops.attention.calls "
        "ops.attention.op"
    ),
    "seq2seq": "functional nn distributed seq2seq ops",
    "testing": "functional ops testing",
    "cli": ".",
    "__main__": "cli",
}


def _full_names(names: str) -> tuple[str, ...]:
    return tuple(f"fastattn.{name}".removesuffix("..") for name in names.split())


def _matches(name: str, prefix: str) -> bool:
    pattern = re.escape(prefix).replace(r"\*", r"\w+")
    return re.match(pattern + r"(\.|$)", name) is not None


def layers_import_upwards(package: Path) -> list[str]:
    """The layers: cli > seq2seq > nn > functional > _arguments > op.py > _autograd.py > _op.py >
    _select.py > _env.py.
    """
    found = []
    for name, imported in _edges(package):
        if not imported.startswith("fastattn"):
            continue
        op = _op_of(name) or "<op>"
        if name == "fastattn":
            allowed = ("fastattn._openmp", "fastattn.functional", "fastattn.integrations")
        else:
            layers = [
                (f"fastattn.{p.replace('<op>', op)}", _full_names(allowed))
                for p, allowed in _LAYERS.items()
            ]
            plain = re.sub(r"\.spec_\w+$", ".spec", name)  # an op's folder may hold several specs
            matching = [(p, allowed) for p, allowed in layers if _matches(plain, p)]
            if not matching:
                found.append(f"{name} is in no layer")
                continue
            allowed = max(matching, key=lambda layer: len(layer[0]))[1]
        # `import fastattn` from inside reaches every layer: only its own submodules may be named.
        if not any(_matches(imported, p.replace("<op>", op)) for p in allowed):
            found.append(f"{name} imports {imported}")
    return found


def private_parts_are_imported(package: Path) -> list[str]:
    """8. seq2seq, nn, integrations and cli use the public API."""
    return [
        f"{name} imports {imported}"
        for name, imported in _edges(package)
        if re.match(r"fastattn\.(seq2seq|nn|integrations|cli)\b", name)
        and re.match(r"fastattn\.(.*\._|_|ops\.)", imported)
    ]


def imports_go_in_circles(package: Path) -> list[str]:
    """9. No import circles, anywhere in a file, except for imports that only type checkers read."""
    modules = _modules(package)
    graph = {name: set(_imports(name, path, modules)) for name, path in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


def specs_in_the_library(package: Path) -> list[str]:
    """Only tests, benchmarks and `fastattn check` import specs and fastattn.testing."""
    return [
        f"{name} imports {imported}"
        for name, imported in _edges(package)
        if (re.search(r"\.spec\w*$", imported) or _matches(imported, "fastattn.testing"))
        and not re.search(r"^fastattn\.(testing|cli)|\.spec\w*$", name)
    ]


# Queries of the machine and its software.
_QUESTIONS = re.compile(
    r"torch\.version\b|torch\.__version__|triton\.__version__|importlib\.(metadata|util)|platform\."
    r"|sys\.(version|platform)|torch\.cuda\.(is_available|device_count|get_device|get_arch_list)"
    r"|torch\.(xpu|mps|accelerator|backends\.\w+)\.is_|torch\.accelerator\.(current|device_count)"
)


# sdpa overrides torch's ops with the package's.
_REGISTRARS = ("fastattn.ops._op", "fastattn.ops._autograd", "fastattn.integrations.sdpa")


def environment_queries_outside_env(package: Path) -> list[str]:
    """6. Only _op.py and _autograd.py call torch.library, only _env.py asks for versions and
    devices; _openmp.py sets a variable before torch is loaded.
    """
    found = []
    for name, path in _modules(package).items():
        kernels = name.startswith(
            ("fastattn.ops", "fastattn._", "fastattn.functional", "fastattn.nn")
        )
        for chain in _attributes(path):
            if re.match(r"torch\.library\b", chain) and name not in _REGISTRARS:
                found.append(f"{name} uses torch.library")
            if name in ("fastattn.ops._env", "fastattn._openmp"):
                continue
            if question := _QUESTIONS.match(chain):
                found.append(f"{name} asks {question.group()}")
            if kernels and chain in ("os.environ", "os.getenv"):
                found.append(f"{name} asks {chain}")
    return list(dict.fromkeys(found))


_FAMILIES = (
    *("attention", "attention_varlen", "ffn", "layer_norm", "add_layer_norm", "rms_norm"),
    *("linear", "topk_logsumexp"),
)


def shared_files_name_ops(package: Path) -> list[str]:
    """7. Files that all ops share name no op; those that choose and launch name no backend except
    the reference and the one of the CPU key.
    """
    found = []
    for name, path in _modules(package).items():
        if not name.startswith("fastattn.ops._"):
            continue
        unknown = _FAMILIES
        if name.endswith(("._op", "._select", "._autograd")):
            unknown = (*_FAMILIES, "sm90", "triton")
        for node in _nodes(path):
            word = node.value if isinstance(node, ast.Constant) else None
            if isinstance(word, str) and re.sub("_(fwd|bwd)$", "", word) in unknown:
                found.append(f"{name} names {word}")
    return found


_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
_SOURCES = (".h", ".cuh", ".cpp", ".cu")


def includes_break_rules(csrc: Path) -> list[str]:
    """5 and 6. ptx < tile < op, no op includes another, only torch_binding.h includes torch (and
    the extension that is built for one torch, which includes nothing else).
    """
    shared = {"common", "cpu", "sm90", "host", "autograd"}
    ops = {path.name for path in csrc.iterdir() if path.is_dir()} - shared
    found = []
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in _SOURCES):
        file = path.relative_to(csrc)
        area = "/".join(file.parts[:2]) if file.parts[0] == "sm90" else file.parts[0]
        for include in _INCLUDE.findall(path.read_text()):
            first = include.split("/")[0]
            binding = file.name.startswith(("binding", "module"))
            why = None
            if area == "autograd":
                if first in {path.name for path in csrc.iterdir()} - {"autograd"}:
                    why = "autograd knows torch alone"
            elif first in ("torch", "ATen", "c10") and file.name != "torch_binding.h":
                why = "torch_binding.h alone includes torch"
            elif include.endswith(("torch_binding.h", "cpu/binding.h")) and not binding:
                why = "only bindings know torch"
            elif binding and (first.startswith("cuda") or include.endswith(".cuh")):
                why = "bindings include no CUDA header"
            elif area == "sm90/ptx" and (first in ops or include.startswith("sm90/tile/")):
                why = "ptx knows no tile and no op"
            elif area == "sm90/tile" and first in ops:
                why = "tile knows no op"
            elif area == "common" and first in ops | {"cpu", "sm90"}:
                why = "common knows neither op nor backend"
            elif area == "cpu" and first in ops | {"sm90"}:
                why = "cpu knows no op"
            elif area in ops and first in ops - {area}:
                why = "one op never includes another"
            if why:
                found.append(f"{file} includes {include}: {why}")
    return found


Rule = Callable[[Path], list[str]]
PYTHON_RULES: tuple[Rule, ...] = (
    backends_import_each_other, ops_import_each_other, references_import_more_than_torch,
    layers_import_upwards, private_parts_are_imported, imports_go_in_circles, specs_in_the_library,
    environment_queries_outside_env, shared_files_name_ops,
)  # fmt: skip


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_python(rule: Rule) -> None:
    assert rule(PACKAGE) == []


def test_includes() -> None:
    csrc = ROOT / "csrc"
    assert len([p for p in csrc.rglob("*") if p.suffix in _SOURCES]) > 5
    assert includes_break_rules(csrc) == []


# -- violations -----------------------------------------------------------------------------------
_SKELETON = (
    *("__init__.py", "functional.py", "nn/__init__.py", "nn/norm.py", "nn/naive.py"),
    *("ops/__init__.py", "ops/_op.py", "ops/_env.py", "ops/_dropout.py", "testing/compare.py"),
    *(
        f"ops/{op}/{file}.py"
        for op in ("attention", "ffn")
        for file in ("__init__", "op", "spec", "reference", "triton", "triton_steps", "cpu", "sm90")
    ),
)
_BREAKS = (
    (backends_import_each_other, "ops/ffn/triton.py", "from fastattn.ops.ffn import cpu"),
    (backends_import_each_other, "ops/ffn/sm90.py", "from .reference import x"),
    (backends_import_each_other, "ops/ffn/triton_steps.py", "from . import sm90"),
    (backends_import_each_other, "ops/attention/triton/tiles.py", "from .. import sm90"),
    (backends_import_each_other, "ops/ffn/cpu.py", "from fastattn.ops.ffn.op import x"),
    (ops_import_each_other, "ops/ffn/op.py", "import fastattn.ops.attention.op"),
    (ops_import_each_other, "ops/ffn/cpu.py", "from fastattn.ops.attention.cpu import x"),
    (references_import_more_than_torch, "ops/ffn/reference.py", "import numpy"),
    (references_import_more_than_torch, "ops/ffn/reference.py", "from fastattn.ops import _env"),
    (references_import_more_than_torch, "nn/naive.py", "from fastattn import functional"),
    (layers_import_upwards, "functional.py", "from fastattn.ops.ffn.reference import x"),
    (layers_import_upwards, "functional.py", "from fastattn import nn"),
    (layers_import_upwards, "nn/norm.py", "from fastattn.seq2seq import generate"),
    (layers_import_upwards, "nn/norm.py", "import fastattn"),
    (layers_import_upwards, "ops/ffn/op.py", "def f():\n    from fastattn.ops.ffn import triton"),
    (layers_import_upwards, "ops/_env.py", "from . import _op"),
    (layers_import_upwards, "ops/_select.py", "from fastattn.ops import _op"),
    (layers_import_upwards, "ops/ffn/op.py", "from fastattn.ops.ffn.cpu import x"),
    (layers_import_upwards, "ops/_triton_launch.py", "from fastattn.ops import _op"),
    (layers_import_upwards, "__init__.py", "from fastattn import nn"),
    (layers_import_upwards, "elsewhere.py", "from fastattn import nn"),
    (private_parts_are_imported, "nn/norm.py", "from fastattn.ops import _env"),
    (private_parts_are_imported, "nn/norm.py", "from fastattn.ops.ffn.op import ffn"),
    (imports_go_in_circles, "nn/norm.py", "def f():\n    from fastattn import nn"),
    (specs_in_the_library, "nn/norm.py", "from fastattn.ops.ffn.spec import SPECS"),
    (specs_in_the_library, "functional.py", "from fastattn.testing import compare"),
    (environment_queries_outside_env, "ops/ffn/op.py", "import torch\ntorch.library.define('x')"),
    (environment_queries_outside_env, "ops/ffn/op.py", "from torch.library import impl"),
    (environment_queries_outside_env, "nn/norm.py", "import torch\nx = torch.cuda.is_available()"),
    (environment_queries_outside_env, "nn/norm.py", "import importlib.metadata"),
    (environment_queries_outside_env, "testing/compare.py", "import torch\nx = torch.__version__"),
    (environment_queries_outside_env, "functional.py", "import os\nx = os.environ.get('X')"),
    (shared_files_name_ops, "ops/_env.py", "x = 'attention_bwd'"),
    (shared_files_name_ops, "ops/_op.py", "x = {'triton': 1}"),
)


@pytest.mark.parametrize("rule, file, source", _BREAKS)
def test_python_rules_can_fail(tmp_path: Path, rule: Rule, file: str, source: str) -> None:
    package = tmp_path / "fastattn"
    for name in (*_SKELETON, file):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (package / "nn/__init__.py").write_text("from fastattn.nn import norm")
    (package / "nn/norm.py").write_text("if TYPE_CHECKING:\n    from fastattn import nn")
    assert not [other for other in PYTHON_RULES if other(package)]
    _edges.cache_clear()
    (package / file).write_text(source + "\n")
    assert len(rule(package)) == 1
    _edges.cache_clear()


_BROKEN_INCLUDES = (
    (
        "attention/sm90/forward/attention_fwd_sm90.cuh",
        "common/torch_binding.h",
        "only bindings know torch",
    ),
    ("common/math.h", "torch/csrc/stable/tensor.h", "alone includes torch"),
    ("autograd/node.h", "common/torch_binding.h", "autograd knows torch alone"),
    ("attention/binding_fwd_sm90.cpp", "cuda_runtime.h", "no CUDA header"),
    ("attention/binding_fwd_sm90.cpp", "attention/sm90/masks/mask.cuh", "no CUDA header"),
    ("sm90/ptx/tma.cuh", "sm90/tile/pipeline.cuh", "ptx knows no tile"),
    ("sm90/ptx/tma.cuh", "attention/attention.h", "ptx knows no tile and no op"),
    ("sm90/tile/pipeline.cuh", "attention/attention.h", "tile knows no op"),
    ("common/math.h", "layer_norm/layer_norm.h", "common knows neither"),
    ("cpu/simd.h", "layer_norm/layer_norm.h", "cpu knows no op"),
    ("layer_norm/layer_norm.h", "attention/attention.h", "never includes another"),
)


@pytest.mark.parametrize("file, include, why", _BROKEN_INCLUDES)
def test_include_rules_can_fail(tmp_path: Path, file: str, include: str, why: str) -> None:
    for folder in ("common", "cpu", "sm90/ptx", "sm90/tile", "attention", "autograd", "layer_norm"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(f'#pragma once\n  # include "{include}"\n')
    [found] = includes_break_rules(tmp_path)
    assert why in found


# -- importing ------------------------------------------------------------------------------------
def _python(source: str, folder: Path) -> str:
    """Runs Python on the package in `folder`; no variable selects a backend."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FASTATTN", "TRITON"))}
    environment["PYTHONPATH"] = str(folder)
    return python_output("-c", source, env=environment, cwd=folder)


_LIGHT = """
import sys, torch
before = set(sys.modules)
import fastattn
new = set(sys.modules) - before
assert not [m for m in new if m.split(".")[0] in ("triton", "numpy", "rich", "onnx")], new
assert "torch.onnx" not in new
last = {m.split(".")[-1] for m in new if m.startswith("fastattn.")}
assert not last & {"triton", "cpu", "sm90", "spec", "testing", "_native"}, new
assert not torch.ops.loaded_libraries, torch.ops.loaded_libraries
assert "/fastattn/_C_" not in open("/proc/self/maps").read()
q = torch.ones(1, 2, 3, 4, requires_grad=True)
fastattn.attention(q, q, q, backend="reference").sum().backward()
assert "triton" not in set(sys.modules) - before
"""


def test_import_is_light() -> None:
    """4. `import fastattn` imports neither triton nor a native library."""
    _python(_LIGHT, PACKAGE.parent)


_WITHOUT = """
import logging.handlers
import sys

class Without:  # finds everything but triton
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.split(".")[0] == "triton" else self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import torch
import fastattn
from fastattn.ops import _env, backend_table
records = logging.handlers.BufferingHandler(100)
logging.getLogger("fastattn").addHandler(records)
x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4)
q = torch.randn(1, 2, 3, 4, requires_grad=True)
results = [
    fastattn.attention(q, q, q, causal=True),
    fastattn.layer_norm(x),
    fastattn.rms_norm(x),
    fastattn.add_layer_norm(x, x, dropout_p=0.5),
    fastattn.ffn(x, w, None, w, None, "gelu"),
]
sum(y.sin().sum() for y in results).backward()
assert torch.isfinite(x.grad).all() and torch.isfinite(q.grad).all()
try:
    import triton
except ImportError:
    print(fastattn.__file__)
print(_env.why_not_on("triton", torch.device("cuda")))
print([record.getMessage() for record in records.buffer])
for row in backend_table(torch.device("cpu")):
    print(row.backend, row.available, row.reason)
"""


def test_works_without_triton_and_without_native_libraries(tmp_path: Path) -> None:
    """4. On a machine with neither, every op runs and the table states what is missing. The first
    use of an op logs how to get the library.
    """
    package = tmp_path / "fastattn"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    where, no_triton, logged, *rows = _python(_WITHOUT, tmp_path).splitlines()
    assert where == str(package / "__init__.py")
    assert no_triton == "needs the triton package, which is not installed"
    for row in rows:
        backend, available, reason = row.split(" ", 2)
        assert available == str(backend in ("torch", "reference")), row
        if backend == "cpu":
            assert "native library cpu, which was not built" in reason
            assert logged == repr([f"ops on the CPU run PyTorch's operators: backend cpu {reason}"])
            assert "`pip install --no-build-isolation .` builds it" in reason
