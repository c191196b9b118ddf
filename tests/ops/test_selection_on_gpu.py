"""Which backend runs a call on a GPU: records of verified kernels, and warnings.

The tests need no GPU: the selection reads only the device and the dtype of a tensor.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probe_op import REFERENCE, MakeOp, refuses, run_op, value_of, writes

from fastattn.ops import _env, _select, _verified, backend_table
from fastattn.ops._op import Backend, Op
from fastattn.testing import lines

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.usefixtures("no_request")


def _on_cuda(dtype: torch.dtype = torch.bfloat16, index: int = 0) -> tuple[Any, float]:
    return SimpleNamespace(device=torch.device("cuda", index), dtype=dtype), 4.0


@pytest.fixture(autouse=True)
def _pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the queries of the GPU."""
    monkeypatch.setattr(_env, "architecture", lambda *_: "sm_90")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """record(op, backend, **other) adds an entry for sm_90, with the fields in `other`, to this
    user's record. None ship.
    """
    folder = tmp_path / "verified"
    (tmp_path / "shipped").mkdir()
    monkeypatch.setattr(_verified, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv(_env.RECORD_VARIABLE, str(folder))

    def write(op: str, backend: str, architecture: str = "sm_90", **other: str) -> None:
        digest = other.pop("digest", _verified.digest(backend))
        file = folder / _verified.file_name(architecture, backend)
        entries = json.loads(file.read_text())["kernels"] if file.exists() else []
        entries.append({"op": op, "dtype": "bfloat16", "status": "passed"} | other)
        lines.write_json(file, {"digest": digest, "kernels": entries})
        _verified.recorded.cache_clear()

    _verified.recorded.cache_clear()
    yield write
    _verified.recorded.cache_clear()


def _verifiable(make_op: MakeOp) -> Op:
    order = [Backend("triton", automatic=False), Backend("reference")]
    return make_op(order, triton=writes(1), reference=REFERENCE)


def test_a_kernel_that_passed_is_automatic(make_op, record, caplog):
    op = _verifiable(make_op)
    record(op.name, "triton")
    assert _select.select(op, _on_cuda(), None) == "triton"
    assert _select.explain(op, _on_cuda(), None).chosen == "triton"
    assert not caplog.records
    assert value_of(op) == 4  # the CPU is not affected


def test_forward_and_backward_use_the_same_entry() -> None:
    x, wide = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    for name, given in (
        ("ffn_fwd", {"x": x, "residual": wide}),
        ("ffn_bwd", {"dy": wide, "x": x}),
        ("add_layer_norm_fwd", {"x": x, "residual": wide}),
        ("add_layer_norm_bwd", {"dy": wide, "z": wide, "x_dtype": x.dtype}),
        ("attention_bwd", {"q": x, "mask": wide}),
    ):
        op = _select.OPS[name]
        assert op.data_dtype([given.get(n) for n in op.arguments]) is torch.bfloat16, name


def test_the_table_names_the_dtypes_that_passed(record, monkeypatch):
    monkeypatch.setattr(_env, "why_not_on", lambda backend, device: "is unsupported")
    record("ffn", "triton")
    record("ffn", "triton", dtype="float16")
    record("ffn", "another", dtype="float32")
    rows = {(row.op, row.backend): row for row in backend_table(CUDA)}
    triton = rows["ffn", "triton"]
    assert (triton.automatic, triton.automatic_for) == (False, ("bfloat16", "float16"))
    assert rows["attention", "triton"].automatic_for == ()


@pytest.mark.parametrize("other", [
    {"op": "another"}, {"backend": "sm90"}, {"dtype": "float16"}, {"architecture": "sm_100"},
    {"digest": "0" * 16}, {"status": "failed"},
], ids=lambda other: next(iter(other)))  # fmt: skip
def test_an_entry_applies_to_its_kernels(make_op, record, other):
    op = _verifiable(make_op)
    record(**{"op": op.name, "backend": "triton"} | other)
    assert _select.select(op, _on_cuda(), None) == "reference"


def test_an_entry_applies_to_its_dtype(make_op: MakeOp, record: Callable[..., None]) -> None:
    """Independent of earlier selections of the op."""
    record((op := _verifiable(make_op)).name, "triton")
    for dtype, backend in (
        (torch.bfloat16, "triton"),
        (torch.float16, "reference"),
        (torch.bfloat16, "triton"),
    ):
        assert _select.select(op, _on_cuda(dtype), None) == backend
        explanation = _select.explain(op, _on_cuda(dtype), None)
        assert explanation.chosen == backend
        assert ("triton" in explanation.refusals) == (backend == "reference")


@pytest.mark.parametrize("suffix", ["_fwd", "_bwd"])
def test_an_entry_applies_to_forward_and_backward(make_op, record, suffix):
    """Unless it names one of them."""
    order = [Backend("triton", automatic=False), Backend("reference")]
    op, other = (
        make_op(order, suffix=suffix, triton=writes(1), reference=REFERENCE) for _ in range(2)
    )
    record(op.name.removesuffix(suffix), "triton")
    record(other.name.removesuffix(suffix) + "_fwd", "triton")
    assert _select.select(op, _on_cuda(), None) == "triton"
    expected = "triton" if suffix == "_fwd" else "reference"
    assert _select.select(other, _on_cuda(), None) == expected


def test_an_entry_applies_to_gpus_of_its_architecture(make_op, record, monkeypatch):
    monkeypatch.setattr(_env, "architecture", lambda _, index: ("sm_90", "sm_80")[index])
    record((op := _verifiable(make_op)).name, "triton")
    for index, backend in ((0, "triton"), (1, "reference"), (0, "triton")):
        assert _select.select(op, _on_cuda(index=index), None) == backend


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose backend sm90 is a library and two modules, one of them imported."""
    monkeypatch.setattr(_verified, "_PACKAGE", tmp_path / "package")
    (folder := tmp_path / "package" / "ops" / "ffn").mkdir(parents=True)
    launcher = "from fastattn.ops import _env\nfrom fastattn.ops.ffn import calls\n\n\n"
    launcher += 'def launch(x):  # x: a row\n    """Launches."""\n'
    launcher += '    return calls.order(x, "a b")\n'
    (folder / "sm90.py").write_text(launcher)
    (folder / "calls.py").write_text("def order(x, y):\n    return x - y\n")
    for name in ("../_env.py", "triton.py", "reference.py"):
        (folder / name).write_text("first = 1\n")
    library = b"\x7fELF fastattn sources 0a1b, nvcc 13.0.88\0 kernels"
    (tmp_path / "package" / "_C_sm90.abi3.so").write_bytes(library)
    return tmp_path / "package"


@pytest.mark.parametrize(
    "file, before, after, changes",
    [
        ("ops/ffn/sm90.py", "  # x: a row", "", False),
        ("ops/ffn/sm90.py", '    """Launches."""\n', "", False),
        ("ops/ffn/sm90.py", '(x, "a b")', '(\n        x,\n        "a b",\n    )', False),
        ("ops/ffn/sm90.py", "a b", "ab", True),
        ("ops/ffn/calls.py", "x - y", "y - x", True),
        ("ops/_env.py", "1", "2", False),
        ("ops/ffn/triton.py", "1", "2", False),
        ("ops/ffn/reference.py", "1", "2", False),
        ("_C_sm90.abi3.so", "sources 0a1b", "sources 0a1c", True),
        ("_C_sm90.abi3.so", "nvcc 13.0.88", "nvcc 12.8.1", True),
        ("_C_sm90.abi3.so", " kernels", " the same kernels", False),
    ],
)
def test_the_digest_is_of_sources_and_launchers(package, file, before, after, changes):
    """Comments, docstrings and white space do not count, nor other backends and queries."""
    digest = _verified.digest.__wrapped__
    first, content = digest("sm90"), (package / file).read_text()
    assert first.startswith("0a1b nvcc 13.0.88-") and _verified.built("sm90") == ("0a1b", "13.0.88")
    assert before in content
    (package / file).write_text(content.replace(before, after))
    assert (digest("sm90") != first) == changes


@pytest.mark.parametrize("trial", [False, True])
def test_records_without_a_digest_apply_to_no_trial(package, record, trial):
    library = package / "_C_sm90.abi3.so"
    content = library.read_bytes()
    library.write_bytes(content.replace(b"0a1b", b"trial_0a1b") if trial else content)
    record("ffn", "sm90", digest=None)
    passed, _ = _verified.recorded(_on_cuda()[0].device)
    assert bool(passed) is not trial


def test_the_digest_names_the_version_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    digest, versions = _verified.digest.__wrapped__, _env.versions()
    first = digest("triton")
    assert first.startswith(f"{versions['triton']}-")
    monkeypatch.setattr(_env, "versions", lambda: versions | {"triton": "0.0", "torch": "0.0"})
    assert digest("triton") == f"0.0-{first.rpartition('-')[2]}"


def test_records_ship_with_the_package(make_op, record, tmp_path, monkeypatch, caplog):
    """The user's own failures and an unreadable record outweigh them."""
    op = _verifiable(make_op)
    shipped, own = (tmp_path / name / "sm_90-triton.json" for name in ("shipped", "verified"))

    def chosen() -> str:
        _verified.recorded.cache_clear()
        op.orders.clear()
        return _select.select(op, _on_cuda(), None)

    assert chosen() == "reference"
    record(op.name, "triton")
    own.rename(shipped)
    assert chosen() == "triton"
    record(op.name, "triton", digest="of other kernels", status="failed")
    assert chosen() == "triton"
    own.unlink()
    record(op.name, "triton", status="failed")
    assert chosen() == "reference"
    for unreadable in (
        "[]",
        '{"digest": null, "kernels": [{"op": [], "dtype": "", "status": ""}]}',
    ):
        own.write_text(json.dumps(unreadable))
        caplog.clear()
        assert chosen() == "reference"
        assert "no kernel is taken as verified" in caplog.text

    def denied(folder: Path) -> bool:
        raise PermissionError(f"Permission denied: '{folder}'")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_file", denied)
        assert chosen() == "reference"
    assert "FASTATTN_RECORD must name a readable folder: Permission denied" in caplog.text
    monkeypatch.setenv(_env.RECORD_VARIABLE, "")
    assert chosen() == "triton"
    found = json.loads(shipped.read_text())
    shipped.write_text(json.dumps(found | {"digest": "of other kernels"}))
    assert chosen() == "reference"
    shipped.write_text(json.dumps(found | {"digest": None}))
    assert chosen() == "triton"
    failed = [entry | {"status": "failed"} for entry in found["kernels"]]
    shipped.write_text(json.dumps(found | {"kernels": failed}))
    assert chosen() == "reference"


def test_the_reference_says_how_to_verify(make_op, record, caplog):
    assert _select.select(_verifiable(make_op), _on_cuda(), None) == "reference"
    assert "fastattn check --device cuda --record" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"digest": null, "kernels": 3}', '{"digest": null, "kernels": [3]}',
     '{"kernels": []}', '{"digest": null, "kernels": [{"op": "a", "dtype": "b", "status": "c"}]}'],
)  # fmt: skip
def test_an_invalid_record_is_ignored(make_op, record, content, tmp_path, caplog):
    (tmp_path / "verified").mkdir()
    (tmp_path / "verified" / "sm_90-triton.json").write_text(content)
    assert _select.select(_verifiable(make_op), _on_cuda(), None) == "reference"
    assert "sm_90-triton.json" in caplog.text


def test_a_file_in_place_of_the_folder_is_named(make_op, record, tmp_path, caplog):
    (tmp_path / "verified").write_text("{}")
    assert _select.select(_verifiable(make_op), _on_cuda(), None) == "reference"
    assert "FASTATTN_RECORD must name a folder, got the file" in caplog.text


def test_the_record_is_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_env.RECORD_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert _env.record_folder() == Path("/caches/fastattn/verified")
    monkeypatch.setenv("HOME", "/home/someone")
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert _env.record_folder() == Path("/home/someone/.cache/fastattn/verified")


def test_ops_without_gpu_kernels_do_not_warn(make_op, monkeypatch, caplog):
    op = make_op([Backend("cpu"), Backend("reference")], cpu=writes(1), reference=REFERENCE)
    elsewhere = {"cpu": "runs on cpu tensors, got cuda"}
    monkeypatch.setattr(_env, "why_not_on", lambda backend, device: elsewhere.get(backend))
    assert _select.select(op, _on_cuda(), None) == "reference"
    assert not caplog.records


def test_reference_on_a_gpu_warns_once(make_op: MakeOp, caplog: pytest.LogCaptureFixture) -> None:
    order = [Backend("sm90"), Backend("triton"), Backend("reference")]
    op = make_op(order, sm90=refuses("has no A"), triton=refuses("has no B"), reference=REFERENCE)
    for _ in range(3):
        assert _select.select(op, _on_cuda(), None) == "reference"
    [record] = caplog.records
    for part in (op.name, "slow reference", "backend sm90 has no A", "backend triton has no B"):
        assert part in record.getMessage()


def test_no_warning_where_the_reference_is_expected(make_op, caplog):
    op = make_op([Backend("cpu"), Backend("reference")], cpu=refuses("no"), reference=REFERENCE)
    run_op(op)
    _select.select(op, _on_cuda(), "reference")
    assert not caplog.records


def test_kernels_chosen_on_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the records that ship: those that have passed there as they are now."""
    monkeypatch.setenv(_env.RECORD_VARIABLE, str(tmp_path))
    _verified.recorded.cache_clear()
    norms = ("layer_norm", "add_layer_norm", "rms_norm")
    half, all_three = ("bfloat16", "float16"), ("bfloat16", "float16", "float32")
    expected = {
        f"{name}_{direction}": {"sm90": half}
        for name in ("attention", "ffn")
        for direction in ("fwd", "bwd")
    }
    for name in norms:
        expected[f"{name}_fwd"] = {"cuda": all_three, "triton": all_three}
        expected[f"{name}_bwd"] = {"triton": all_three}
    for name, op in _select.OPS.items():
        if op.requestable:
            found = _select._verified_dtypes(op, CUDA)
            assert {by: dtypes for by, dtypes in found.items() if dtypes} == expected.get(name, {})
            monkeypatch.setattr(op, "orders", {})
            chosen = [b.name for b in _select.order(op, CUDA, torch.bfloat16) if not b.automatic]
            assert chosen == list(expected.get(name, {})), name
    monkeypatch.setattr(_env, "why_not_on", lambda backend, device: "is unsupported")
    automatic = {(row.op, row.backend): row.automatic_for for row in backend_table(CUDA)}
    assert {op for op, _ in automatic if op.endswith("_bwd")} == {f"{name}_bwd" for name in norms}
    for name in norms:
        assert automatic[name, "cuda"] == automatic[f"{name}_bwd", "triton"] == all_three
        assert automatic[f"{name}_bwd", "cuda"] == ()


def test_unverified_architecture_warns_once(make_op, record, caplog, monkeypatch):
    op = make_op([Backend("triton")], triton=writes(1))
    record(op.name, "triton")
    elsewhere = {"cpu": "runs on cuda tensors, got cpu"}
    monkeypatch.setattr(_env, "why_not_on", lambda _, device: elsewhere.get(device.type))
    for architecture, warnings in (("sm_90", 0), ("sm_120", 1), ("sm_120", 1)):
        monkeypatch.setattr(_env, "architecture", lambda *_, a=architecture: a)
        _verified.recorded.cache_clear()
        assert _select.select(op, _on_cuda(), None) == "triton"
        assert len(caplog.records) == warnings
    assert "backend triton is not verified on sm_120" in caplog.records[0].getMessage()
