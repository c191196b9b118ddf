"""The native libraries: how they are loaded, what follows if one is absent or broken, and that they
refuse tensors without memory.
"""

import functools
import importlib.machinery
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cpu_library import needs_library
from probe_op import REFERENCE, MakeOp, run_op
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import cli
from fastattn.ops import _env, _native
from fastattn.ops._select import Backend
from fastattn.ops.layer_norm import cpu
from fastattn.ops.layer_norm.calls import LayerNormCall
from fastattn.testing.spec import all_specs

ROOT = Path(__file__).resolve().parents[2]


def test_absent_and_broken_libraries_are_reasons(monkeypatch, tmp_path):
    monkeypatch.setattr(_native, "_PACKAGE", tmp_path)
    load = _native.unavailable.__wrapped__
    assert "was not built" in load("cpu")
    (tmp_path / "_C_cpu.abi3.so").write_bytes(b"an older library")
    assert "a native library from other sources, _C_cpu.abi3.so" in load("cpu")
    (tmp_path / "_C_cpu.abi3.so").write_bytes(b"not a library" + _native._CPU_INTERFACE)
    assert "cannot load its native library _C_cpu.abi3.so" in load("cpu")
    monkeypatch.setattr(_native, "unavailable", load)
    call = LayerNormCall(torch.zeros(2, 3), None, None, 0.0)
    assert "cannot load" in (cpu.layer_norm_fwd_unsupported(call) or "")
    with pytest.raises(RuntimeError, match="cannot load"):
        _native.usable_cpu_isas()


def test_sources_have_the_interface_that_the_package_expects() -> None:
    """Otherwise a new library would be refused, and tests that need it skipped."""
    source = (ROOT / "csrc" / "cpu" / "module_cpu.cpp").read_text()
    assert f'"{_native._CPU_INTERFACE[:-1].decode()}"' in source


def test_a_library_without_an_op_is_to_be_built_again(make_op: MakeOp) -> None:
    op = make_op([Backend("cpu")], cpu="", reference=REFERENCE)
    for backend in (None, "cpu"):
        with pytest.raises(RuntimeError, match=rf"a kernel of fastattn::{op.name}\.out.*build it"):
            run_op(op, backend)


@needs_library
def test_libraries_load_under_dispatch_modes_and_transforms() -> None:
    """They see the op that loads the library, not the calls that loading it makes."""
    namespaces = []

    class RecordNamespaces(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
            namespaces.append(op.namespace)
            return op(*args, **kwargs)

    def autograd_kernel(x: Tensor) -> Tensor:
        assert _native.unavailable.__wrapped__("cpu") is None
        return x.sum()

    with torch.library._scoped_library("fastattn_probe", "DEF") as library:
        library.define("loads(Tensor x) -> Tensor")
        library.impl("loads", autograd_kernel, "Autograd")
        with RecordNamespaces():
            torch.vmap(torch.func.grad(torch.ops.fastattn_probe.loads))(torch.ones(3, 2))
    assert "aten" in namespaces and "fastattn_cpu" not in namespaces


@needs_library
def test_the_extension_is_for_one_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_native, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_native, "unavailable", lambda library: None)
    monkeypatch.setattr(_env, "torch_version", lambda: "2.14.0a0+cpu")
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    load = _native.extension_unavailable.__wrapped__
    assert "for torch 2.14.0a0+cpu under this Python was not built: `pip install" in load()
    (tmp_path / f"_C_autograd_2_13_0_cpu{suffix}").touch()
    assert "was built for another" in load()
    (tmp_path / f"_C_autograd_2_14_0a0_cpu{suffix}").write_bytes(b"not a library")
    assert f"cannot load its extension _C_autograd_2_14_0a0_cpu{suffix}" in load()


@needs_library
@pytest.mark.parametrize("broken, reason", [
    ("no library", "cannot load its extension {}: ImportError: .*file too short"),
    ("another library", "cannot load its extension {}: ImportError: .*PyInit__C_autograd"),
    ("raises", "cannot load its extension {}: AttributeError: no Node"),
    ("other sources", "the extension {} was built from other sources: `pip install"),
])  # fmt: skip
def test_without_a_working_extension_nodes_are_recorded_in_python(
    broken: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def raising(loader: Any, spec: Any) -> None:
        raise AttributeError("no Node")

    version = re.sub(r"[^0-9A-Za-z]", "_", str(torch.__version__))
    file = tmp_path / f"_C_autograd_{version}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    shutil.copy(torch._C.__file__, file)
    loader = importlib.machinery.ExtensionFileLoader
    if broken == "no library":
        file.write_bytes(b"no library")
    elif broken == "raises":
        monkeypatch.setattr(loader, "create_module", raising)
    elif broken == "other sources":
        monkeypatch.setattr(loader, "create_module", lambda _, spec: ModuleType(spec.name))
        monkeypatch.setattr(loader, "exec_module", lambda *_: None)
    find = functools.cache(_native.extension_unavailable.__wrapped__)
    monkeypatch.setattr(_native, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_native, "extension_unavailable", find)
    assert _native.extension() is None
    assert cli.main(["info", "--device=cpu"]) == 0
    expected = f"by Python, which takes longer: {reason.format(re.escape(file.name))}"
    assert re.search(expected, capsys.readouterr().out)


@needs_library
@pytest.mark.parametrize("op, name", [
    (op, name)
    for op, names in {
        "attention": ("q", "v", "mask"),
        "layer_norm": ("x", "weight"),
        "ffn": ("x", "w1", "b1"),
    }.items()
    for name in names
])  # fmt: skip
def test_a_tensor_without_memory_is_refused(op: str, name: str) -> None:
    """Its storage was freed, as in offloading and sharding; views begin at an offset."""
    samples = {"attention": "gqa_bias", "ffn": "gelu_plain"}
    spec = all_specs()[op]
    sample = next(s for s in spec.samples if s.name == samples.get(op, "model"))
    inputs = {
        n: x.detach() if isinstance(x, Tensor) else x
        for n, x in sample.inputs("cpu", torch.float32).items()
    }
    spec.function(**inputs, backend="cpu")
    for view in (False, True):
        freed = torch.stack([inputs[name]] * 2)[1] if view else inputs[name].clone()
        freed.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=f"{name} must have memory"):
            spec.function(**inputs | {name: freed}, backend="cpu")


@needs_library
def test_instruction_set_by_name() -> None:
    with pytest.raises(ValueError, match=r"name must be one of portable.*, got 'mmx'"):
        _native.use_cpu_isa("mmx")
