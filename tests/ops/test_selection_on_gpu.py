"""Which backend runs a call on a GPU: records of verified kernels, and warnings.

The tests need no GPU: the selection reads only the device and the dtype of a tensor.
"""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probe_op import REFERENCE, MakeOp, refuses, run_op, value_of, writes
from small_calls import OPS

from fastattn.ops import _env, _select, _verified, backend_table
from fastattn.ops._op import Backend, Op

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
    """record(op, backend, **other) writes an entry for sm_90, with the fields in `other`."""
    file = tmp_path / "verified.json"
    monkeypatch.setenv(_env.RECORD_VARIABLE, str(file))
    entries = []

    def write(op: str, backend: str, **other: str) -> None:
        about = {"dtype": "bfloat16", "architecture": "sm_90", **_verified.kernels(backend)}
        entries.append({"op": op, "backend": backend} | about | other)
        file.write_text(json.dumps({"passed": entries}))
        _verified.recorded.cache_clear()

    _verified.recorded.cache_clear()
    yield write
    _verified.recorded.cache_clear()


def _verifiable(make_op: MakeOp) -> Op:
    order = [Backend("triton", automatic=False), Backend("reference")]
    return make_op(order, triton=writes(1), reference=REFERENCE)


def test_a_kernel_that_passed_is_automatic(
    make_op: MakeOp, record: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    op = _verifiable(make_op)
    record(op.name, "triton")
    with caplog.at_level(logging.WARNING, logger="fastattn"):
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


def test_the_table_names_the_dtypes_that_passed(
    record: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_env, "refuses_device", lambda backend, device: "is unsupported")
    record("ffn", "triton")
    record("ffn", "triton", dtype="float16")
    record("ffn", "another", dtype="float32")
    rows = {(row.op, row.backend): row for row in backend_table(CUDA)}
    triton = rows["ffn", "triton"]
    assert (triton.automatic, triton.automatic_for) == (False, ("bfloat16", "float16"))
    assert rows["attention", "triton"].automatic_for == ()


@pytest.mark.parametrize(
    "other",
    [
        {"op": "another"},
        {"backend": "sm90"},
        {"dtype": "float16"},
        {"architecture": "sm_100"},
        {"digest": "0" * 16},
        {"torch": "2.0.0"},
        {"cuda": "10.2"},
        {"triton": "2.0.0"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_an_entry_applies_to_its_kernels_and_versions(
    make_op: MakeOp, record: Callable[..., None], other: dict[str, str]
) -> None:
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
def test_an_entry_applies_to_forward_and_backward(
    make_op: MakeOp, record: Callable[..., None], suffix: str
) -> None:
    order = [Backend("triton", automatic=False), Backend("reference")]
    op = make_op(order, suffix=suffix, triton=writes(1), reference=REFERENCE)
    record(op.name.removesuffix(suffix), "triton")
    assert _select.select(op, _on_cuda(), None) == "triton"


@pytest.mark.parametrize(
    "name",
    [op for op in OPS if "triton" in _select.op_of(op).backends and f"{op}_fwd" in _select.OPS],
)
def test_an_entry_applies_to_both_ops_of_a_function(
    name: str, record: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(name, "triton")
    for op in (_select.OPS[f"{name}_fwd"], _select.OPS[f"{name}_bwd"]):
        monkeypatch.setattr(op, "orders", {})
        assert op.backends["triton"] in _select.order(op, CUDA, torch.bfloat16)


def test_an_entry_applies_to_gpus_of_its_architecture(
    make_op: MakeOp, record: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_env, "architecture", lambda _, index: ("sm_90", "sm_80")[index])
    record((op := _verifiable(make_op)).name, "triton")
    for index, backend in ((0, "triton"), (1, "reference"), (0, "triton")):
        assert _select.select(op, _on_cuda(index=index), None) == backend


def test_the_digest_depends_on_sources_and_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is of the backend's kernels: building another one's library changes nothing."""
    monkeypatch.setattr(_verified, "_PACKAGE", tmp_path)
    compute = _verified.kernels.__wrapped__
    digests = [compute("sm90")["digest"]]
    for name in ("ops/_op.py", "ops/ffn/triton.py", "_C_sm90.abi3.so"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for content in ("first", "other"):
            file.write_text(content)
            digests.append(compute("sm90")["digest"])
    assert len(set(digests)) == len(digests)
    (tmp_path / "_C_cpu.abi3.so").write_text("first")
    assert compute("sm90")["digest"] == digests[-1]


def test_records_ship_with_the_package(
    make_op: MakeOp,
    record: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is read; the user's own failures and an unreadable record outweigh them."""
    (op, other) = _verifiable(make_op), _verifiable(make_op)
    (shipped := tmp_path / "shipped").mkdir()
    monkeypatch.setattr(_verified, "_SHIPPED", shipped)
    own = tmp_path / "verified.json"

    def chosen() -> list[str]:
        _verified.recorded.cache_clear()
        for each in (op, other):
            each.orders.clear()
        return [_select.select(each, _on_cuda(), None) for each in (op, other)]

    assert chosen() == ["reference", "reference"]
    for each, file in ((op, "h100.json"), (other, "h200.json")):
        record(each.name, "triton")
        entries = json.loads(own.read_text())["passed"]
        (shipped / file).write_text(json.dumps({"passed": entries[-1:]}))
    own.unlink()
    assert chosen() == ["triton", "triton"]
    own.write_text(json.dumps({"passed": [], "failed": entries[-1:]}))
    assert chosen() == ["triton", "reference"]
    changed = entries[-1] | {"digest": "of other kernels"}
    own.write_text(json.dumps({"passed": [], "failed": [changed]}))
    assert chosen() == ["triton", "triton"]
    own.write_text("[]")
    assert chosen() == ["reference", "reference"]
    assert "no kernel is taken as verified" in caplog.text
    monkeypatch.setenv(_env.RECORD_VARIABLE, "")
    assert chosen() == ["reference", "reference"]


def test_the_reference_says_how_to_verify(
    make_op: MakeOp, record: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fastattn"):
        assert _select.select(_verifiable(make_op), _on_cuda(), None) == "reference"
    assert "fastattn check --device cuda --record" in caplog.records[0].getMessage()


@pytest.mark.parametrize("content", ["{", "[]", '{"passed": 3}', '{"passed": [3]}'])
def test_an_invalid_record_is_ignored(
    make_op: MakeOp,
    record: Callable[..., None],
    content: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "verified.json").write_text(content)
    with caplog.at_level(logging.WARNING, logger="fastattn"):
        assert _select.select(_verifiable(make_op), _on_cuda(), None) == "reference"
    assert "verified.json" in caplog.text


def test_the_record_is_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_env.RECORD_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert _env.record_path() == Path("/caches/fastattn/verified.json")
    monkeypatch.setenv("HOME", "/home/someone")
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert _env.record_path() == Path("/home/someone/.cache/fastattn/verified.json")


def test_ops_without_gpu_kernels_do_not_warn(
    make_op: MakeOp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    op = make_op([Backend("cpu"), Backend("reference")], cpu=writes(1), reference=REFERENCE)
    elsewhere = {"cpu": "runs on cpu tensors, got cuda"}
    monkeypatch.setattr(_env, "refuses_device", lambda backend, device: elsewhere.get(backend))
    with caplog.at_level(logging.WARNING, logger="fastattn"):
        assert _select.select(op, _on_cuda(), None) == "reference"
    assert not caplog.records


def test_reference_on_a_gpu_warns_once(make_op: MakeOp, caplog: pytest.LogCaptureFixture) -> None:
    order = [Backend("sm90"), Backend("triton"), Backend("reference")]
    op = make_op(order, sm90=refuses("has no A"), triton=refuses("has no B"), reference=REFERENCE)
    with caplog.at_level(logging.WARNING, logger="fastattn"):
        for _ in range(3):
            assert _select.select(op, _on_cuda(), None) == "reference"
    [record] = caplog.records
    for part in (op.name, "slow reference", "backend sm90 has no A", "backend triton has no B"):
        assert part in record.getMessage()


def test_no_warning_where_the_reference_is_expected(
    make_op: MakeOp, caplog: pytest.LogCaptureFixture
) -> None:
    op = make_op([Backend("cpu"), Backend("reference")], cpu=refuses("no"), reference=REFERENCE)
    with caplog.at_level(logging.WARNING, logger="fastattn"):
        run_op(op)
        _select.select(op, _on_cuda(), "reference")
    assert not caplog.records


def test_verified_architectures_need_no_record(
    make_op: MakeOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the kernels are chosen, unless the user's record says that they failed."""
    order = [Backend("triton", automatic=False, verified=("sm_90",)), Backend("reference")]
    op = make_op(order, triton=writes(1), reference=writes(2))
    dtype = torch.float32

    def candidates(architecture: str) -> list[str]:
        monkeypatch.setattr(_env, "architecture", lambda *_: architecture)
        op.orders.clear()
        return [backend.name for backend in _select.order(op, _on_cuda()[0].device, dtype)]

    assert candidates("sm_90") == ["triton", "reference"]
    assert candidates("sm_80") == ["reference"]
    failed = frozenset({(op.public_name, "triton", "float32")})
    monkeypatch.setattr(_verified, "failed", lambda device: failed)
    assert candidates("sm_90") == ["reference"]


def test_kernels_chosen_on_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a record, those that have passed there as they are now."""
    monkeypatch.setenv(_env.RECORD_VARIABLE, str(tmp_path / "none.json"))
    norms = ("layer_norm", "add_layer_norm", "rms_norm")
    sm90 = ("attention", "ffn")
    expected = {f"{name}_{direction}": ["sm90"] for name in sm90 for direction in ("fwd", "bwd")}
    expected |= {f"{name}_fwd": ["cuda", "triton"] for name in norms}
    expected |= {f"{name}_bwd": ["triton"] for name in norms}
    for name, op in _select.OPS.items():
        if not op.requestable:
            continue
        monkeypatch.setattr(op, "orders", {})
        chosen = [b.name for b in _select.order(op, CUDA, torch.bfloat16) if not b.automatic]
        assert chosen == expected.get(name, []), name
    monkeypatch.setattr(_env, "refuses_device", lambda backend, device: "is unsupported")
    automatic = {(row.op, row.backend): row.automatic for row in backend_table(CUDA)}
    assert {op for op, _ in automatic if op.endswith("_bwd")} == {f"{name}_bwd" for name in norms}
    for name in norms:
        assert automatic[name, "cuda"] and automatic[f"{name}_bwd", "triton"]
        assert not automatic[f"{name}_bwd", "cuda"]


def test_unverified_architecture_warns_once(
    make_op: MakeOp, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = make_op([Backend("triton", verified=("sm_90",))], triton=writes(1))
    elsewhere = {"cpu": "runs on cuda tensors, got cpu"}
    monkeypatch.setattr(_env, "refuses_device", lambda _, device: elsewhere.get(device.type))
    with caplog.at_level(logging.WARNING, logger="fastattn"):
        for architecture, warnings in (("sm_90", 0), ("sm_120", 1), ("sm_120", 1)):
            monkeypatch.setattr(_env, "architecture", lambda *_, a=architecture: a)
            assert _select.select(op, _on_cuda(), None) == "triton"
            assert len(caplog.records) == warnings
    assert "backend triton is not verified on sm_120" in caplog.records[0].getMessage()
