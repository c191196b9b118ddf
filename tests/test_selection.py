"""Which backend a call takes: order of preference, explicit choices, the environment, explanations.

Most tests define an op of their own (probe_op). What a GPU changes is in test_selection_on_gpu.
"""

import threading
from typing import Any, NamedTuple

import pytest
import torch
from probe_op import REFERENCE, MakeOp, refuses, run_op, value_of, writes
from small_calls import OPS, small_call
from torch import Tensor

import fastattn
from fastattn.ops import _env, _op, _road, backend_table
from fastattn.ops._op import Backend, Op
from fastattn.testing import poisoned_results

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.usefixtures("no_request")


# -- order of preference --------------------------------------------------------------------------
def test_first_without_objection(make_op: MakeOp) -> None:
    rows = [Backend("sm90"), Backend("triton"), Backend("cpu"), Backend("reference")]
    op = make_op(
        rows, sm90=refuses("is full"), triton=writes(1), cpu=writes(2), reference=REFERENCE
    )
    assert value_of(op) == 1
    assert op.select((torch.ones(3), 4.0), None) == "triton"


def test_order_is_the_rows_order(make_op: MakeOp) -> None:
    op = make_op([Backend("cpu"), Backend("triton")], triton=writes(1), cpu=writes(2))
    assert value_of(op) == 2


def test_refusal_depends_on_the_call(make_op: MakeOp) -> None:
    source = writes(1) + (
        "def PROBE_unsupported(x, factor):\n"
        "    return None if x.shape[0] == 3 else f'is built for 3, got {x.shape[0]}'\n"
    )
    op = make_op([Backend("cpu"), Backend("reference")], cpu=source, reference=REFERENCE)
    assert value_of(op) == 1
    assert run_op(op, x=torch.ones(5)).tolist() == [4.0] * 5


@pytest.mark.parametrize("backend", [None, "cpu"])
def test_what_makes_its_own_results_is_not_selected(
    make_op: MakeOp, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once; a call that it leaves is selected once."""
    own = (
        "asked = []\n"
        "def unavailable():\n    return None\n"
        "def PROBE_direct(x, factor):\n"
        "    asked.append(x.shape[0])\n"
        "    return (x * 7, x * -7) if x.shape[0] == 3 else None\n"
    )
    op = make_op([Backend("cpu")], cpu=writes(2) + own)
    selected, select = [], Op.select

    def count(self: Op, args: Any, backend: str | None) -> str:
        selected.append(args[0].shape[0])
        return select(self, args, backend)

    monkeypatch.setattr(Op, "select", count)
    assert run_op(op, backend).tolist() == [7.0] * 3
    assert run_op(op, backend, torch.ones(5)).tolist() == [2.0] * 5
    assert (op._module("cpu").asked, selected) == ([3, 5], [5])


def test_later_backends_are_not_imported(make_op: MakeOp) -> None:
    op = make_op([Backend("cpu"), Backend("triton")], cpu=writes(2), triton="raise ImportError\n")
    assert value_of(op) == 2


def test_unverified_kernels_wait_to_be_asked(make_op: MakeOp) -> None:
    rows = [Backend("sm90", automatic=False), Backend("reference")]
    op = make_op(rows, sm90=writes(1), reference=REFERENCE)
    assert value_of(op) == 4
    assert value_of(op, "sm90") == 1
    explanation = op.explain((torch.ones(3), 4.0), None)
    assert explanation.chosen == "reference"
    assert "only when asked for" in explanation.refusals["sm90"]
    assert op.explain((torch.ones(3), 4.0), "sm90").chosen == "sm90"


def test_nobody_can(make_op: MakeOp) -> None:
    rows = [Backend("triton"), Backend("cpu")]
    op = make_op(rows, triton=refuses("is tired"), cpu=refuses("is busy"))
    with pytest.raises(NotImplementedError) as failure:
        run_op(op)
    for reason in ("backend triton is tired", "backend cpu is busy", op.name):
        assert reason in str(failure.value)
    explanation = op.explain((torch.ones(3), 4.0), None)
    assert explanation.chosen is None
    assert explanation.refusals == {"triton": "is tired", "cpu": "is busy"}


def test_op_missing_from_a_module(make_op: MakeOp) -> None:
    rows = [Backend("cpu"), Backend("reference")]
    op = make_op(rows, cpu="def something_else():\n    pass\n", reference=REFERENCE)
    assert value_of(op) == 4
    assert op.explain((torch.ones(3), 4.0), None).refusals == {
        "cpu": f"does not implement {op.name}"
    }
    with pytest.raises(NotImplementedError, match=f"backend cpu does not implement {op.name}"):
        run_op(op, "cpu")


# -- launching ------------------------------------------------------------------------------------
def test_launcher_gets_arguments_results_workspace(make_op: MakeOp) -> None:
    source = """
import torch
seen = []

def PROBE(x, factor, y, z, counters, scratch):
    seen.append((x, factor, y, counters.clone(), scratch))
    y.copy_(x * factor)
    z.copy_(-y)

def PROBE_workspace(x, factor):
    return [((x.shape[0], 500), torch.int32, True), ((7,), torch.float64, False)]
"""
    op = make_op([Backend("cpu")], cpu=source)
    # Memory that the allocator hands out again: zeroed must mean zeroed.
    used = [torch.full((3, 500), 9, dtype=torch.int32) for _ in range(8)]
    del used
    x = torch.ones(3)
    y = run_op(op, x=x)
    [(seen_x, factor, seen_y, counters, scratch)] = op._module("cpu").seen
    assert y.tolist() == [4.0] * 3 and factor == 4.0
    assert seen_x.data_ptr() == x.data_ptr() and seen_y.data_ptr() == y.data_ptr()
    assert counters.shape == (3, 500) and counters.dtype == torch.int32
    assert not counters.any()
    assert scratch.shape == (7,) and scratch.dtype == torch.float64


class _Call(NamedTuple):
    x: Tensor
    factor: float


def test_a_call_type_stands_for_the_arguments(make_op: MakeOp) -> None:
    source = """
import torch

def PROBE_unsupported(call):
    return "multiplies by more than 0" if call.factor == 0.0 else None

def PROBE_workspace(call):
    return [(call.x.shape, torch.float32, True)]

def PROBE(call, y, z, scratch):
    y.copy_(call.x * call.factor + scratch)
    z.copy_(-y)
"""
    rows = [Backend("cpu"), Backend("reference")]
    op = make_op(rows, _Call, cpu=source, reference=REFERENCE)
    assert value_of(op) == value_of(op, "cpu") == value_of(op, "reference") == 4
    assert op.explain((torch.ones(3), 0.0), None).refusals == {"cpu": "multiplies by more than 0"}
    with poisoned_results():
        assert value_of(op) == 4
    y, _ = op.call(torch.ones(5, device="meta"), 4.0)
    assert y.shape == (5,)


def test_reference_returns_its_results(make_op: MakeOp) -> None:
    op = make_op([Backend("reference")], reference=REFERENCE)
    assert value_of(op) == 4


def test_poisoned_results_show_what_was_not_written(make_op: MakeOp) -> None:
    rows = [Backend("cpu"), Backend("reference")]
    op = make_op(
        rows, cpu="def PROBE(x, factor, y, z):\n    y[:2], z[:2] = 4, -4\n", reference=REFERENCE
    )
    with poisoned_results():
        assert run_op(op).isnan().tolist() == [False, False, True]
        assert not run_op(op, "reference").isnan().any()
    with pytest.raises(AssertionError), poisoned_results():
        torch.testing.assert_close(run_op(op), torch.full((3,), 4.0))


def test_poisoned_results_end(make_op: MakeOp) -> None:
    op = make_op([Backend("cpu")], cpu="def PROBE(x, factor, y, z):\n    pass\n")
    op.outputs = lambda x, factor: (torch.zeros(3), torch.zeros(3))
    with poisoned_results():
        assert run_op(op).isnan().all()
    with pytest.raises(RuntimeError), poisoned_results():
        raise RuntimeError
    assert run_op(op).tolist() == [0.0] * 3


# -- explicit choices -----------------------------------------------------------------------------
def test_explicit_choice_never_falls_back(make_op: MakeOp) -> None:
    rows = [Backend("triton"), Backend("cpu"), Backend("reference")]
    op = make_op(rows, triton=refuses("is out"), cpu=writes(2), reference=REFERENCE)
    assert value_of(op, "reference") == 4
    with pytest.raises(NotImplementedError, match=f"{op.name}: backend triton is out"):
        run_op(op, "triton")
    with pytest.raises(ValueError, match=r"backend must be one of triton, cpu, reference.*'sm90'"):
        run_op(op, "sm90")
    with pytest.raises(ValueError, match="backend must be one of"):
        run_op(op, "")


def test_explicit_choice_holds_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op call, backward included, asks for the backend that the public call named."""
    asked = []
    select = Op.select

    def recording(self: Op, args: Any, backend: str | None) -> str:
        asked.append((self.name, backend))
        return select(self, args, backend)

    monkeypatch.setattr(Op, "select", recording)
    x = torch.randn(3, 4, requires_grad=True)
    y = fastattn.layer_norm(x, backend="reference")
    [gradient] = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    names = {name for name, _ in asked}
    assert names == {"layer_norm_fwd", "layer_norm_bwd"}
    assert {backend for _, backend in asked} == {"reference"}


# -- the environment ------------------------------------------------------------------------------
def _request(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(_env.BACKEND_VARIABLE, value)


@pytest.fixture
def probe(make_op: MakeOp) -> Op:
    rows = [Backend("triton"), Backend("cpu"), Backend("reference")]
    return make_op(rows, triton=writes(1), cpu=writes(2), reference=REFERENCE)


@pytest.mark.parametrize(
    "value, expected",
    [
        ("", 1),
        ("cpu", 2),
        ("reference", 4),
        ("PROBE=cpu", 2),
        ("attention=reference", 1),
        ("attention=reference,PROBE=cpu", 2),
        ("reference,PROBE=cpu", 2),
        ("PROBE=cpu,reference", 2),
        (" PROBE = cpu , attention = reference ", 2),
    ],
)
def test_environment(
    probe: Op, monkeypatch: pytest.MonkeyPatch, value: str, expected: float
) -> None:
    _request(monkeypatch, value.replace("PROBE", probe.name))
    assert value_of(probe) == expected
    assert value_of(probe, "triton") == 1, "an argument is nearer than the environment"


def test_environment_is_read_at_every_call(probe: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    assert value_of(probe) == 1
    _request(monkeypatch, "cpu")
    assert value_of(probe) == 2
    monkeypatch.delenv(_env.BACKEND_VARIABLE)
    assert value_of(probe) == 1


def test_environment_serves_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair names the public function: attention=... means attention_fwd and attention_bwd."""
    _request(monkeypatch, "attention=sm90,layer_norm=reference")
    monkeypatch.setattr(_env, "refuses_device", lambda backend, device: f"{backend} is away")
    x = torch.ones(2, 3)
    for name in ("attention_fwd", "attention_bwd"):
        op = _op.OPS[name]
        arguments = [x] * len(op.arguments)
        with pytest.raises((NotImplementedError, ValueError), match="sm90"):
            op.select(arguments, None)


@pytest.mark.parametrize(
    "value", ["nonsense", "attention=nonsense", "cpu,", "attention=", "=", "cpu;triton", "CPU"]
)
def test_nonsense_in_the_environment(
    probe: Op, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    _request(monkeypatch, value)
    with pytest.raises(ValueError, match=_env.BACKEND_VARIABLE) as failure:
        run_op(probe)
    assert value in str(failure.value)


@pytest.mark.parametrize("name", ["atention", "best_tokens"])
def test_op_in_the_environment_that_cannot_be_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice that would never apply is an error, not a silent fall-back."""
    _request(monkeypatch, f"{name}=reference")
    with pytest.raises(ValueError, match=f"{_env.BACKEND_VARIABLE}.*, got '{name}'") as failure:
        fastattn.layer_norm(torch.ones(2, 3))
    offered = str(failure.value).partition(", got")[0]
    assert "attention" in offered and "best_tokens" not in offered


def test_environment_asks_for_a_backend_the_op_lacks(
    make_op: MakeOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not fall back, and the message says where the request came from."""
    op = make_op([Backend("reference")], reference=REFERENCE)
    _request(monkeypatch, "triton")
    with pytest.raises((ValueError, NotImplementedError), match="triton") as failure:
        run_op(op)
    assert _env.BACKEND_VARIABLE in str(failure.value)


def test_environment_that_refuses_does_not_fall_back(
    make_op: MakeOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Backend("cpu"), Backend("reference")]
    op = make_op(rows, cpu=refuses("is closed"), reference=REFERENCE)
    _request(monkeypatch, "cpu")
    with pytest.raises(NotImplementedError, match="backend cpu is closed"):
        run_op(op)


# -- explanations ---------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPS)
def test_explain(op: str) -> None:
    """What comes before the choice was refused; what comes after may not have been asked."""
    explanation = fastattn.explain(op, **small_call(op))
    backends = list(_op.OPS[f"{op}_fwd"].backends)
    assert explanation.op == f"{op}_fwd"
    assert explanation.chosen in backends and explanation.chosen not in explanation.refusals
    before = backends[: backends.index(explanation.chosen)]
    assert set(before) <= set(explanation.refusals) <= set(backends)
    lines = str(explanation).splitlines()
    assert lines[0] == f"{op}_fwd: {explanation.chosen}"
    assert len(lines) == 1 + len(explanation.refusals)
    asked = fastattn.explain(op, **small_call(op), backend="reference")
    assert asked.chosen == "reference"


@pytest.mark.parametrize("op", OPS)
def test_explain_runs_nothing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(self: Op, backend: str) -> Any:
        raise AssertionError(f"{self.name} launched {backend}")

    monkeypatch.setattr(Op, "_launcher", launched)
    monkeypatch.setattr(Op, "direct", launched)
    with _road.closed(everywhere=True), pytest.raises(AssertionError, match="launched"):
        getattr(fastattn, op)(**small_call(op))
    state = torch.get_rng_state()
    dropout = {} if op in ("layer_norm", "rms_norm", "linear") else {"dropout_p": 0.5}
    assert fastattn.explain(op, **small_call(op), **dropout).chosen is not None
    assert torch.equal(torch.get_rng_state(), state), "no dropout seed is drawn either"


def test_explain_leaves_gradients_alone() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    fastattn.explain("layer_norm", x)
    y = fastattn.layer_norm(x)
    assert y.requires_grad and not y.isnan().any()


def test_explanations_belong_to_their_thread() -> None:
    x = torch.randn(2, 3)
    results = []
    thread = threading.Thread(target=lambda: results.append(fastattn.layer_norm(x)))
    with _op.recording_choices() as explanations:
        thread.start()
        thread.join()
        assert not explanations
        fastattn.layer_norm(x)
        assert [explanation.op for explanation in explanations] == ["layer_norm_fwd"]
    assert torch.equal(results[0], fastattn.layer_norm(x))


def test_explain_refuses_what_a_call_refuses() -> None:
    with pytest.raises(ValueError, match=r"op must be one of attention, .*'conv'"):
        fastattn.explain("conv")
    with pytest.raises(ValueError, match=r"op must be one of attention, .*\['ffn'\]"):
        fastattn.explain(["ffn"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight must be"):
        fastattn.explain("layer_norm", torch.ones(2, 3), torch.ones(4))
    fastattn.layer_norm(torch.ones(2, 3))


def test_explain_reports_a_refused_choice(make_op: MakeOp, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Backend("cpu"), Backend("reference")]
    op = make_op(rows, cpu=refuses("is closed"), reference=REFERENCE)
    for backend, variable in (("cpu", ""), (None, "cpu")):
        _request(monkeypatch, variable)
        explanation = op.explain((torch.ones(3), 4.0), backend)
        assert explanation.chosen is None
        assert explanation.refusals == {"cpu": "is closed"}
        assert str(explanation) == f"{op.name}: no backend can run this\n  backend cpu is closed"


# -- the table ------------------------------------------------------------------------------------
def test_backend_table() -> None:
    table = backend_table(torch.device("cpu"))
    assert {row.op for row in table} == set(OPS)
    rows = {(row.op, row.backend): row for row in table}
    assert len(rows) == len(table)
    for op in OPS:
        assert rows[op, "reference"].available and rows[op, "reference"].automatic
        assert [row.backend for row in table if row.op == op] == list(_op.OPS[f"{op}_fwd"].backends)
    for row in table:
        assert row.available == (row.reason == "")


def test_backend_table_tells_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _env, "refuses_device", lambda name, device: None if name == "reference" else "is away"
    )
    for row in backend_table(torch.device("cpu")):
        assert row.reason == ("" if row.backend == "reference" else "is away")


def test_backend_table_asks_the_module(make_op: MakeOp, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def unavailable():\n    return 'needs a library'\n"
    op = make_op([Backend("cpu", automatic=False)], cpu=source)
    monkeypatch.setitem(_op.OPS, "whole_fwd", op)
    op.name += "_fwd"
    row = backend_table(torch.device("cpu"))[-1]
    op.name = op.name.removesuffix("_fwd")
    assert (row.op, row.backend, row.available) == (op.name, "cpu", False)
    assert (row.reason, row.automatic) == ("needs a library", False)


@pytest.mark.parametrize(
    "backend, device, reason",
    [
        ("reference", "cpu", None),
        ("reference", "cuda", None),
        ("cpu", "cpu", None),
        ("cpu", "cuda", "runs on cpu tensors, got cuda"),
        ("triton", "cpu", "runs on cuda tensors, got cpu"),
        ("sm90", "cpu", "runs on cuda tensors, got cpu"),
        ("triton", "cuda", None),
        ("sm90", "cuda", "is built for Hopper (compute capability 9.0), got 8.0"),
    ],
)
def test_devices(
    backend: str, device: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(_env, "has_triton", lambda: True)
    monkeypatch.setattr(_env, "capability", lambda index: (8, 0))
    assert _env.refuses_device(backend, torch.device(device)) == reason


def test_triton_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(_env, "has_triton", lambda: True)
    assert _env.refuses_device("triton", torch.device("cpu")) is None
    monkeypatch.setattr(_env, "has_triton", lambda: False)
    for device in ("cpu", "cuda"):
        reason = _env.refuses_device("triton", torch.device(device))
        assert reason == "needs the triton package, which is not installed"
