"""Which backend runs a call: order of preference, explicit choices, the environment, explanations.

Most tests define their own op (probe_op). test_selection_on_gpu.py has the tests for GPUs.
"""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from call_recorder import CallRecorder
from probe_op import REFERENCE, MakeOp, refuses, run_op, value_of, writes
from small_calls import OPS, op_name, small_call
from torch import Tensor

import fastattn
from fastattn.ops import _env, _select, backend_table
from fastattn.ops._op import LIBRARY, Backend, Op, schema_of
from fastattn.testing import poisoned_results

pytestmark = pytest.mark.usefixtures("no_request")


# -- order of preference --------------------------------------------------------------------------
def test_the_first_backend_without_an_objection_is_chosen(make_op: MakeOp) -> None:
    order = [Backend("sm90"), Backend("triton"), Backend("torch"), Backend("reference")]
    op = make_op(
        order, sm90=refuses("needs a mask"), triton=writes(1), torch=writes(2), reference=REFERENCE
    )
    assert value_of(op) == 1
    assert _select.select(op, (torch.ones(3), 4.0), None) == "triton"


def test_refusal_depends_on_the_call(make_op: MakeOp) -> None:
    source = writes(1) + (
        "def PROBE_unsupported(x, factor):\n"
        "    return None if x.shape[0] == 3 else f'is built for 3, got {x.shape[0]}'\n"
    )
    op = make_op([Backend("torch"), Backend("reference")], torch=source, reference=REFERENCE)
    assert value_of(op) == 1
    assert run_op(op, x=torch.ones(5)).tolist() == [4.0] * 5


def test_later_backends_are_not_imported(make_op: MakeOp) -> None:
    op = make_op(
        [Backend("torch"), Backend("triton")], torch=writes(2), triton="raise ImportError\n"
    )
    assert value_of(op) == 2


def test_unverified_kernels_run_only_on_request(make_op: MakeOp) -> None:
    order = [Backend("sm90", automatic=False), Backend("reference")]
    op = make_op(order, sm90=writes(1), reference=REFERENCE)
    assert value_of(op) == 4
    assert value_of(op, "sm90") == 1
    explanation = _select.explain(op, (torch.ones(3), 4.0), None)
    assert explanation.chosen == "reference"
    assert "only on request" in explanation.refusals["sm90"]
    explanation = _select.explain(op, (torch.ones(3), 4.0), "sm90")
    assert (explanation.chosen, explanation.refusals) == ("sm90", {})


def test_no_backend_supports_the_call(make_op: MakeOp) -> None:
    order = [Backend("triton"), Backend("torch")]
    op = make_op(order, triton=refuses("has no kernel"), torch=refuses("needs a mask"))
    with pytest.raises(NotImplementedError) as failure:
        run_op(op)
    for reason in ("backend triton has no kernel", "backend torch needs a mask", op.name):
        assert reason in str(failure.value)
    explanation = _select.explain(op, (torch.ones(3), 4.0), None)
    assert explanation.chosen is None
    assert explanation.refusals == {"triton": "has no kernel", "torch": "needs a mask"}


def test_a_module_without_the_op(make_op: MakeOp) -> None:
    order = [Backend("torch"), Backend("reference")]
    op = make_op(order, torch="def something_else():\n    pass\n", reference=REFERENCE)
    assert value_of(op) == 4
    assert _select.explain(op, (torch.ones(3), 4.0), None).refusals == {
        "torch": f"does not implement {op.name}"
    }
    with pytest.raises(NotImplementedError, match=f"backend torch does not implement {op.name}"):
        run_op(op, "torch")


# -- launching ------------------------------------------------------------------------------------
def test_launcher_gets_arguments_results_workspace(make_op: MakeOp) -> None:
    source = """
import torch
seen = []

def PROBE(x, factor, y, z, counters, buffer):
    seen.append((x, factor, y, counters.clone(), buffer))
    y.copy_(x * factor)
    z.copy_(-y)

def PROBE_workspace(x, factor):
    return [((x.shape[0], 500), torch.int32, True), ((7,), torch.float64, False)]
"""
    op = make_op([Backend("torch")], torch=source)
    # The allocator reuses this memory, which is not 0.
    used = [torch.full((3, 500), 9, dtype=torch.int32) for _ in range(8)]
    del used
    x = torch.ones(3)
    y = run_op(op, x=x)
    [(seen_x, factor, seen_y, counters, buffer)] = op.module("torch").seen
    assert y.tolist() == [4.0] * 3 and factor == 4.0
    assert seen_x.data_ptr() == x.data_ptr() and seen_y.data_ptr() == y.data_ptr()
    assert counters.shape == (3, 500) and counters.dtype == torch.int32
    assert not counters.any()
    assert buffer.shape == (7,) and buffer.dtype == torch.float64


class _Call(NamedTuple):
    x: Tensor
    factor: float


class _Everything(NamedTuple):
    x: Tensor
    bias: Tensor | None
    word: str
    flag: bool
    count: int
    size: Annotated[int, torch.SymInt]
    p: float
    dtype: torch.dtype
    needs: Sequence[bool]


def test_a_schema_has_the_types_of_the_fields() -> None:
    assert schema_of(_Everything, 3) == (
        "Tensor x, Tensor? bias, str word, bool flag, int count, SymInt size, float p, "
        "ScalarType dtype, bool[3] needs"
    )


def test_a_call_type_holds_the_arguments(make_op: MakeOp) -> None:
    source = """
import torch

def PROBE_unsupported(call):
    return "multiplies by more than 0" if call.factor == 0.0 else None

def PROBE_workspace(call):
    return [(call.x.shape, torch.float32, True)]

def PROBE(call, y, z, workspace):
    y.copy_(call.x * call.factor + workspace)
    z.copy_(-y)
"""
    order = [Backend("torch"), Backend("reference")]
    op = make_op(order, _Call, torch=source, reference=REFERENCE)
    assert value_of(op) == value_of(op, "torch") == value_of(op, "reference") == 4
    assert _select.explain(op, (torch.ones(3), 0.0), None).refusals == {
        "torch": "multiplies by more than 0"
    }
    with poisoned_results():
        assert value_of(op) == 4
    y, _ = op(torch.ones(5, device="meta"), 4.0)
    assert y.shape == (5,)


def test_cpu_is_the_kernel_under_the_dispatchers_key(make_op: MakeOp) -> None:
    """It writes into results allocated by Python, or is called without Python."""
    op = make_op([Backend("cpu"), Backend("reference")], cpu="", reference=REFERENCE)

    def write(x: Tensor, factor: float, *, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return y.fill_(7.0), z.fill_(-7.0)

    LIBRARY.impl(f"{op.name}.out", write, "CPU")
    assert value_of(op) == value_of(op, "cpu") == 7
    assert value_of(op, "reference") == 4
    LIBRARY.impl(op.name, lambda x, factor: (x * 8, x * -8), "CPU")
    assert value_of(op) == 8 and value_of(op, "cpu") == 7
    assert op.named(torch.ones(3), 4.0, _select.NOT_CPU)[0].tolist() == [4.0] * 3


def test_given_results_are_written_and_returned(make_op: MakeOp) -> None:
    op = make_op([Backend("reference")], reference=REFERENCE)
    given = {"y": torch.zeros(3), "z": torch.zeros(3)}
    returned = op.out(torch.ones(3), 4.0, **given)
    assert [x.tolist() for x in given.values()] == [[4.0] * 3, [-4.0] * 3]
    for x, result in zip(returned, given.values(), strict=True):
        assert x.data_ptr() == result.data_ptr()


def test_poisoned_results_show_unwritten_elements(make_op: MakeOp) -> None:
    order = [Backend("torch"), Backend("reference")]
    op = make_op(
        order, torch="def PROBE(x, factor, y, z):\n    y[:2], z[:2] = 4, -4\n", reference=REFERENCE
    )
    with poisoned_results():
        assert run_op(op).isnan().tolist() == [False, False, True]
        assert not run_op(op, "reference").isnan().any()
    with pytest.raises(AssertionError), poisoned_results():
        torch.testing.assert_close(run_op(op), torch.full((3,), 4.0))


def test_poisoned_workspaces(make_op: MakeOp) -> None:
    """Buffers that must be 0 stay 0."""
    source = (
        "import torch\n"
        "def PROBE(x, factor, y, z, zeros, rest):\n    y.copy_(zeros)\n    z.copy_(rest)\n"
        "def PROBE_workspace(x, factor):\n"
        "    return [((3,), torch.bfloat16, True), ((3,), torch.bfloat16, False)]\n"
    )
    op = make_op([Backend("torch")], torch=source)
    with poisoned_results():
        y, z = op(torch.ones(3), 4.0)
    assert y.tolist() == [0.0] * 3 and z.isnan().all()


def test_poisoned_results_end_with_the_context(make_op: MakeOp) -> None:
    op = make_op([Backend("torch")], torch="def PROBE(x, factor, y, z):\n    pass\n")
    op.outputs = lambda x, factor: (torch.zeros(3), torch.zeros(3))
    with poisoned_results():
        assert run_op(op).isnan().all()
    with pytest.raises(RuntimeError), poisoned_results():
        raise RuntimeError
    assert run_op(op).tolist() == [0.0] * 3


# -- explicit choices -----------------------------------------------------------------------------
def test_explicit_choice_never_falls_back(make_op: MakeOp) -> None:
    order = [Backend("triton"), Backend("torch"), Backend("reference")]
    op = make_op(order, triton=refuses("needs a GPU"), torch=writes(2), reference=REFERENCE)
    assert value_of(op, "reference") == 4
    with pytest.raises(NotImplementedError, match=f"{op.name}: backend triton needs a GPU"):
        run_op(op, "triton")
    with pytest.raises(
        ValueError, match=r"backend must be one of triton, torch, reference.*'sm90'"
    ):
        run_op(op, "sm90")
    with pytest.raises(ValueError, match="backend must be one of"):
        run_op(op, "")


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_choice_applies_to_the_backward(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op call, backward included, has the backend that the public call named."""
    selected = []
    run = Op.run

    def recording(self: Op, args: Any, backend: str | None) -> tuple[Tensor, ...]:
        selected.append((self.name, backend))
        return run(self, args, backend)

    monkeypatch.setattr(Op, "run", recording)
    x = torch.randn(3, 4, requires_grad=True)
    if by == "environment":  # a pair names the public function; only its forward reads it
        monkeypatch.setenv(_env.BACKEND_VARIABLE, "layer_norm=reference")
        y = fastattn.layer_norm(x)
        monkeypatch.delenv(_env.BACKEND_VARIABLE)
    else:
        y = fastattn.layer_norm(x, backend="reference")
    [gradient] = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert {*selected} == {("layer_norm_fwd", "reference"), ("layer_norm_bwd", "reference")}


# -- the environment ------------------------------------------------------------------------------
def _request(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(_env.BACKEND_VARIABLE, value)


@pytest.fixture
def probe(make_op: MakeOp) -> Op:
    order = [Backend("triton"), Backend("torch"), Backend("reference")]
    return make_op(order, triton=writes(1), torch=writes(2), reference=REFERENCE)


@pytest.mark.parametrize("value, expected", [
    ("", 1), ("torch", 2), ("reference", 4), ("PROBE=torch", 2), ("attention=reference", 1),
    ("attention=reference,PROBE=torch", 2), ("reference,PROBE=torch", 2),
    ("PROBE=torch,reference", 2), (" PROBE = torch , attention = reference ", 2),
])  # fmt: skip
def test_environment(probe, monkeypatch, value, expected):
    _request(monkeypatch, value.replace("PROBE", probe.name))
    assert value_of(probe) == expected
    assert value_of(probe, "triton") == 1, "an argument is nearer than the environment"


@pytest.mark.parametrize(
    "value", ["nonsense", "attention=nonsense", "cpu,", "attention=", "=", "cpu;triton", "CPU"]
)
def test_invalid_values_in_the_environment(probe, monkeypatch, value):
    _request(monkeypatch, value)
    with pytest.raises(ValueError, match=_env.BACKEND_VARIABLE) as failure:
        run_op(probe)
    assert value in str(failure.value)


@pytest.mark.parametrize("name", ["atention", "topk_logsumexp"])
def test_ops_in_the_environment_without_a_choice(name, monkeypatch):
    """A request that would never apply raises."""
    _request(monkeypatch, f"{name}=reference")
    with pytest.raises(ValueError, match=f"{_env.BACKEND_VARIABLE}.*, got '{name}'") as failure:
        fastattn.layer_norm(torch.ones(2, 3))
    offered = str(failure.value).partition(", got")[0]
    assert "attention" in offered and "topk_logsumexp" not in offered


def test_environment_requests_a_backend_that_the_op_lacks(make_op, monkeypatch):
    """It does not fall back, and the message names the variable."""
    op = make_op([Backend("reference")], reference=REFERENCE)
    _request(monkeypatch, "triton")
    with pytest.raises((ValueError, NotImplementedError), match="triton") as failure:
        run_op(op)
    assert _env.BACKEND_VARIABLE in str(failure.value)


@pytest.mark.parametrize("name", ["attention", "attention_varlen"])
def test_functions_of_one_op_share_a_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _request(monkeypatch, f"{name}=reference")
    for op in ("attention", "attention_varlen"):
        assert fastattn.explain(op, **small_call(op)).chosen == "reference"
    _request(monkeypatch, "attention=torch,attention_varlen=reference")
    with pytest.raises(ValueError, match="one backend for attention and attention_varlen"):
        fastattn.attention(**small_call("attention"))


# -- explanations ---------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPS)
def test_explain(op: str) -> None:
    """Backends before the chosen one have refused; later ones need no reason."""
    explanation = fastattn.explain(op, **small_call(op))
    backends = list(_select.op_of(op).backends)
    assert explanation.op == op_name(op)
    assert explanation.chosen in backends and explanation.chosen not in explanation.refusals
    before = backends[: backends.index(explanation.chosen)]
    assert set(before) <= set(explanation.refusals) <= set(backends)
    lines = str(explanation).splitlines()
    assert lines[0] == f"{op_name(op)}: {explanation.chosen}"
    assert len(lines) == 1 + len(explanation.refusals)
    explained = fastattn.explain(op, **small_call(op), backend="reference")
    assert explained.chosen == "reference"


@pytest.mark.parametrize("op", OPS)
def test_explain_runs_nothing(op: str) -> None:
    state = torch.get_rng_state()
    dropout = {} if op in ("layer_norm", "rms_norm", "linear") else {"dropout_p": 0.5}
    with CallRecorder() as recorder:
        assert fastattn.explain(op, **small_call(op), **dropout).chosen is not None
        assert recorder.names == []
        getattr(fastattn, op)(**small_call(op))
        assert recorder.names == [op_name(op)]
    assert torch.equal(torch.get_rng_state(), state), "no dropout seed is drawn either"


def test_explain_does_not_change_gradients() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    fastattn.explain("layer_norm", x)
    y = fastattn.layer_norm(x)
    assert y.requires_grad and not y.isnan().any()


def test_explanations_are_thread_local() -> None:
    x = torch.randn(2, 3)
    results = []
    thread = threading.Thread(target=lambda: results.append(fastattn.layer_norm(x)))
    with _select.explaining() as explanations:
        thread.start()
        thread.join()
        assert not explanations
        fastattn.layer_norm(x)
        assert [explanation.op for explanation in explanations] == ["layer_norm_fwd"]
    assert torch.equal(results[0], fastattn.layer_norm(x))


def test_explain_raises_what_a_call_raises() -> None:
    with pytest.raises(ValueError, match=r"op must be one of attention, .*'conv'"):
        fastattn.explain("conv")
    with pytest.raises(ValueError, match=r"op must be one of attention, .*\['ffn'\]"):
        fastattn.explain(["ffn"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight must be"):
        fastattn.explain("layer_norm", torch.ones(2, 3), torch.ones(4))
    fastattn.layer_norm(torch.ones(2, 3))


def test_explain_reports_a_refused_choice(make_op: MakeOp, monkeypatch: pytest.MonkeyPatch) -> None:
    order = [Backend("cpu"), Backend("reference")]
    op = make_op(order, cpu=refuses("has no kernel"), reference=REFERENCE)
    for backend, variable in (("cpu", ""), (None, "cpu")):
        _request(monkeypatch, variable)
        explanation = _select.explain(op, (torch.ones(3), 4.0), op.choice(backend))
        assert explanation.chosen is None
        assert explanation.refusals == {"cpu": "has no kernel"}
        assert (
            str(explanation) == f"{op.name}: no backend can run this\n  backend cpu has no kernel"
        )


def test_explain_of_a_choice_ignores_slower(make_op: MakeOp) -> None:
    slow = writes(1) + "def PROBE_slower(x, factor):\n    return 'is slow here'\n"
    order = [Backend("torch"), Backend("reference")]
    op = make_op(order, torch=slow, reference=REFERENCE)
    call = (torch.ones(3), 4.0)
    assert _select.explain(op, call, None).refusals == {"torch": "is slow here"}
    assert _select.explain(op, call, "reference").refusals == {}


# -- the table ------------------------------------------------------------------------------------
def test_backend_table() -> None:
    table = backend_table(torch.device("cpu"))
    names = {_select.op_of(op).public_name for op in OPS}
    assert {row.op for row in table} == names
    rows = {(row.op, row.backend): row for row in table}
    assert len(rows) == len(table)
    for op in names:
        assert rows[op, "reference"].available and rows[op, "reference"].automatic
        assert [row.backend for row in table if row.op == op] == list(
            _select.OPS[f"{op}_fwd"].backends
        )
    for row in table:
        assert row.available == (row.reason == "")


def test_backend_table_has_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _env, "why_not_on", lambda name, device: None if name == "reference" else "is away"
    )
    for row in backend_table(torch.device("cpu")):
        assert row.reason == ("" if row.backend == "reference" else "is away")


def test_backend_table_calls_unavailable(make_op: MakeOp) -> None:
    source = "def unavailable():\n    return 'needs a library'\n"
    op = make_op([Backend("cpu", automatic=False)], cpu=source)
    row = backend_table(torch.device("cpu"))[-1]
    assert (row.op, row.backend, row.available) == (op.name, "cpu", False)
    assert (row.reason, row.automatic) == ("needs a library", False)


@pytest.mark.parametrize("backend, device, reason", [
    ("reference", "cpu", None), ("reference", "cuda", None), ("cpu", "cpu", None),
    ("cpu", "cuda", "runs on cpu tensors, got cuda"),
    ("triton", "cpu", "runs on cuda tensors, got cpu"),
    ("sm90", "cpu", "runs on cuda tensors, got cpu"), ("triton", "cuda", None),
    ("sm90", "cuda", "is built for Hopper (compute capability 9.0), got 8.0"),
    ("cuda", "cpu", "runs on cuda tensors, got cpu"), ("cuda", "cuda", None),
])  # fmt: skip
def test_devices(backend, device, reason, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(_env, "has_triton", lambda: True)
    monkeypatch.setattr(_env, "capability", lambda index: (8, 0))
    monkeypatch.setattr(_env, "architecture", lambda *device: "sm_80")
    monkeypatch.setattr(_env, "device_shared_memory", lambda index: 163 << 10)
    assert _env.why_not_on(backend, torch.device(device)) == reason


# (architecture, bytes of shared memory that its GPUs have for a thread block)
_GPUS = [
    *(("sm_80", 166912), ("sm_86", 101376), ("sm_89", 101376), ("sm_90", 232448)),
    *(("sm_100", 232448), ("sm_120", 101376), ("gfx942", 65536)),
]


@pytest.mark.parametrize("arch, has", _GPUS)
def test_triton_refuses_gpus_with_less_shared_memory_than_its_configs_take(arch, has, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(_env, "has_triton", lambda: True)
    monkeypatch.setattr(_env, "architecture", lambda *device: arch)
    monkeypatch.setattr(_env, "device_shared_memory", lambda index: (has, has - 1)[index])
    assert _env.why_not_on("triton", torch.device("cuda", 0)) is None
    assert _env.why_not_on("triton", torch.device("cuda", 1)) == (
        f"needs {has >> 10} KB of shared memory per program on {arch}, got {(has - 1) >> 10} KB"
    )


def test_shared_memory_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVIDIA GPU has more for a kernel that asks for it; the properties of an AMD GPU have one
    entry.
    """
    nvidia = SimpleNamespace(shared_memory_per_block=49152, shared_memory_per_block_optin=101376)
    amd = SimpleNamespace(shared_memory_per_block=65536)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: (nvidia, amd)[index])
    found = [_env.device_shared_memory.__wrapped__(index) for index in (0, 1)]
    assert found == [101376, 65536]


def test_cuda_refuses_older_gpus_and_those_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_env, "capability", lambda index: (7, 5))
    reason = _env.why_not_on("cuda", torch.device("cuda"))
    assert reason == "is built for compute capability 8.0 and newer, got 7.5"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    reason = _env.why_not_on("cuda", torch.device("cuda"))
    assert reason == "is built for NVIDIA GPUs, got one of AMD"


def test_gpus_of_one_machine_may_have_different_capabilities(monkeypatch):
    monkeypatch.setattr(_env, "capability", lambda index: ((8, 0), (9, 0))[index])
    for index, refused in ((0, True), (1, False)):
        assert (_env.why_not_on("sm90", torch.device("cuda", index)) is not None) is refused


def test_triton_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(_env, "has_triton", lambda: True)
    assert _env.why_not_on("triton", torch.device("cpu")) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    reason = _env.why_not_on("triton", torch.device("cpu"))
    assert reason == "runs on cuda tensors, got cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(_env, "has_triton", lambda: False)
    for device in ("cpu", "cuda"):
        reason = _env.why_not_on("triton", torch.device(device))
        assert reason == "needs the triton package, which is not installed"
