"""Every op call goes through PyTorch's dispatcher: modes, the profiler, subclasses, tracers and
compilers see the same ops, forward and backward, and the backend is the one that `explain` names.
"""

from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from cpu_library import needs_library
from op_examples import results_of
from small_calls import OPS, first_result, op_name, small_call
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn import functional
from fastattn.ops import _env, _select
from fastattn.ops._op import Op
from fastattn.ops._select import why_unsupported
from fastattn.testing import all_specs, poisoned_results
from fastattn.testing.spec import OpSpec, Sample

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
pytestmark = pytest.mark.usefixtures("no_request")


def _differentiated(op: str, calls: dict[str, Any]) -> list[Tensor]:
    """The first result and its gradients."""
    leaves = {
        name: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in calls.items()
    }
    y = first_result(op, **leaves)
    wanted = [x for x in leaves.values() if isinstance(x, Tensor) and x.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), wanted)]


@pytest.mark.parametrize("op", OPS)
def test_modes_see_the_ops(op: str) -> None:
    expected = _differentiated(op, small_call(op))
    with CallRecorder() as recorder:
        actual = _differentiated(op, small_call(op))
    assert [called.name() for called, _, _ in recorder.calls] == [
        f"fastattn::{op_name(op, way)}" for way in ("fwd", "bwd")
    ]
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


def test_the_profiler_names_the_ops() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    with torch.profiler.profile() as profile:
        fastattn.layer_norm(x).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"fastattn::layer_norm_fwd", "fastattn::layer_norm_bwd"} <= names


@pytest.mark.parametrize("op", OPS)
def test_function_modes_and_subclasses_see_the_ops(op: str) -> None:
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(f))
            return f(*args, **kwargs or {})

    class Subclass(Tensor):
        @classmethod
        def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(f))
            return super().__torch_function__(f, types, args, kwargs or {})

    expected = _differentiated(op, small_call(op))
    with Mode():
        actual = _differentiated(op, small_call(op))
    assert seen.count(f"fastattn.{op_name(op)}.default") == 1
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)
    seen.clear()
    calls = small_call(op)
    last = [name for name, x in calls.items() if isinstance(x, Tensor)][-1]
    getattr(fastattn, op)(**calls | {last: calls[last].as_subclass(Subclass)})
    assert seen.count(f"fastattn.{op_name(op)}.default") == 1


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traces_hold_the_ops(op: str, requires_grad: bool) -> None:
    calls = small_call(op)
    names = [n for n, x in calls.items() if isinstance(x, Tensor) and x.is_floating_point()]

    def function(*tensors: Tensor) -> Tensor:
        return first_result(op, **calls | dict(zip(names, tensors, strict=True)))

    examples = [calls[n].detach().requires_grad_(requires_grad) for n in names]
    trace = torch.jit.trace(function, tuple(examples), check_trace=False)
    others = [torch.randn_like(x) for x in examples]
    assert torch.equal(trace(*others), function(*others))


def test_eager_calls_parse_as_pytorch_does() -> None:
    """What `csrc/autograd/eager_call.h` does not parse itself is PyTorch's, errors included."""
    fastattn.layer_norm(torch.ones(1, 3))  # loads the extension
    layer_norm, attention = (_select.OPS[n] for n in ("layer_norm_fwd", "attention_fwd"))
    x = torch.randn(2, 3)
    expected = layer_norm.default(x, None, None, 1.0)
    for args in ((x, None, None, 1.0), (x, None, None, 1), (x.as_subclass(_Own), None, None, 1.0)):
        for y, z in zip(layer_norm.eager(*args), expected, strict=True):
            assert torch.equal(y, z)
    assert type(layer_norm.eager(x.as_subclass(_Own), None, None, 1.0)[0]) is _Own
    fields = functional.ForwardCall(*[torch.randn(1, 1, 4, 8) for _ in range(3)])._asdict()
    wrong: list[tuple[Op, tuple[Any, ...]]] = [
        (layer_norm, (x,)),
        (layer_norm, (x, None, None, "1")),
        (layer_norm, ([1.0], None, None, 1.0)),
        (layer_norm, (x, torch.ones(4), None, 1.0)),
        (attention, tuple((fields | {"window_left": 2**70}).values())),
        (attention, tuple((fields | {"window_left": True}).values())),
        (attention, tuple((fields | {"window_left": 0.5}).values())),
        (attention, tuple((fields | {"q": torch.ones(2)}).values())),
    ]
    for op, args in wrong:
        raised = []
        for call in (op.eager, op.default):
            try:
                call(*args)
                raised.append(None)
            except Exception as error:
                raised.append((type(error), str(error)))
        assert raised[0] == raised[1]


class _Own(Tensor):
    pass


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_lazily_negated_tensors(backend: str) -> None:
    """Their memory holds the negated values; so may that of gradients."""
    if why := why_unsupported(
        _select.OPS["layer_norm_fwd"], backend, (torch.ones(2, 3), None, None, 0.0)
    ):
        pytest.skip(f"backend {backend} {why}")
    x = torch.randn(2, 3, dtype=torch.complex64).conj().imag
    dy = torch.randn(2, 3, dtype=torch.complex64).conj().imag
    assert x.is_neg() and dy.is_neg()

    def results(x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = fastattn.layer_norm(x, backend=backend)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    for actual, expected in zip(results(x, dy), results(x.clone(), dy.clone()), strict=True):
        assert torch.equal(actual, expected)


def test_tensors_of_a_finished_transform() -> None:
    kept = []

    def loss(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    x = torch.randn(2, 3)
    torch.func.grad(loss)(x)
    assert torch.equal(fastattn.layer_norm(kept[0]), fastattn.layer_norm(x))
    weight = torch.ones(3, requires_grad=True)
    fastattn.layer_norm(kept[0], weight).sum().backward()
    assert weight.grad is not None


# -- overloads ------------------------------------------------------------------------------------
def _sample_calls(
    spec: OpSpec, sample: Sample, dtype: torch.dtype, wide: bool = False
) -> list[tuple[OpOverload, tuple[Any, ...]]]:
    """A sample's calls of the forward and the backward op. wide: in fp64."""
    inputs = sample.inputs("cpu", dtype)
    inputs = spec.widen(inputs) if wide else inputs
    with CallRecorder() as recorder:
        results_of(spec, sample, inputs, spec.function(**inputs))
    assert not any(kwargs for _, _, kwargs in recorder.calls)
    return [(function, args) for function, args, _ in recorder.calls]


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _assert_same_bits(found: Any, expected: Any) -> None:
    for a, b in zip(_tuple(found), _tuple(expected), strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@needs_library
@pytest.mark.parametrize("spec, sample, dtype", [
    pytest.param(spec, sample, sample.dtypes[i % len(sample.dtypes)],
                 id=f"{spec.name}-{sample.name}")
    for spec in all_specs().values()
    for i, sample in enumerate(spec.samples)
])  # fmt: skip
@torch.no_grad()
def test_overloads_give_the_same_bits(spec, sample, dtype, torch_is_faster):
    """The default overload, with and without poisoned results and workspace, `.backend`, `.out`;
    each sample in one of its dtypes.
    """
    with torch.enable_grad():
        calls = _sample_calls(spec, sample, dtype)
    directions = ("fwd", "bwd") if sample.gradients else ("fwd",)
    wanted = [f"fastattn::{op_name(spec.name, way)}" for way in directions]
    assert [op.name() for op, _ in calls] == wanted
    for default, args in calls:
        op = _select.OPS[default.name().removeprefix("fastattn::")]
        assert why_unsupported(op, "cpu", args) is None
        expected = op.default(*args)
        with poisoned_results():
            _assert_same_bits(op.default(*args), expected)
            _assert_same_bits(op.named(*args, "cpu"), expected)
            given = [torch.full_like(x, torch.nan) for x in _tuple(expected)]
            returned = op.out(*args, **dict(zip(op.results, given, strict=True)))
        for result, value, x in zip(given, _tuple(returned), _tuple(expected), strict=True):
            assert value.data_ptr() == result.data_ptr() and torch.equal(value, result)
            torch.testing.assert_close(result, x, rtol=0, atol=0, equal_nan=True)


@needs_library
@pytest.mark.parametrize("spec", all_specs().values(), ids=lambda spec: spec.name)
@torch.no_grad()
def test_overloads_forward_calls_unchanged(spec: OpSpec) -> None:
    """fp64 calls go to the next backend."""
    most = {"attention": 8000}.get(spec.name, 40_000)  # elements: more take seconds
    for sample in spec.samples:
        tensors = [x for x in sample.inputs("cpu", torch.float32).values() if isinstance(x, Tensor)]
        if sum(x.numel() for x in tensors) > most:
            continue
        with torch.enable_grad():
            calls = _sample_calls(spec, sample, torch.float32, wide=True)
        for default, args in calls:
            op = _select.OPS[default.name().removeprefix("fastattn::")]
            expected = op.named(*args, "torch")
            _assert_same_bits(op.default(*args), expected)
            if not op.is_derivative:
                given = [torch.full_like(x, torch.nan) for x in _tuple(expected)]
                _assert_same_bits(
                    op.out(*args, **dict(zip(op.results, given, strict=True))), tuple(given)
                )
                _assert_same_bits(tuple(given), expected)


# -- the backend of a call ------------------------------------------------------------------------
class _Runs(TorchDispatchMode):
    """Records (op, call, whether Python selected its backend) for each call of an op."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.calls: list[tuple[Op, tuple[Any, ...], str | None]] = []
        self.selected: list[str] = []
        select = _select.select

        def recording(op: Op, args: Any, backend: str | None) -> str:
            self.selected.append(select(op, args, backend))
            return self.selected[-1]

        monkeypatch.setattr(_select, "select", recording)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.selected.clear()
        results = op(*args, **kwargs or {})
        if op.namespace == "fastattn":
            op = _select.OPS[op._schema.name.removeprefix("fastattn::")]
            # The kernel under the CPU key runs without a selection.
            ran_by = self.selected[0] if self.selected else "cpu"
            self.calls.append((op, args[: len(op.arguments)], ran_by))
        return results


def _mixed_dtypes() -> list[Any]:
    """Public calls in one dtype, and op calls in dtypes that the public functions refuse."""
    fp32, fp64, bf16 = torch.float32, torch.float64, torch.bfloat16
    found: list[Any] = [
        pytest.param(op, {n: dtype for n in small_call(op)}, id=f"{op}-{dtype}")
        for op in OPS
        for dtype in (fp32, fp64, bf16)
    ]
    for op, dtypes in (
        ("layer_norm", {"x": fp32, "weight": fp64}),
        ("layer_norm", {"x": fp64, "weight": fp32}),
        ("layer_norm", {"x": bf16, "bias": fp64}),
        ("rms_norm", {"x": bf16, "weight": fp64}),
        ("rms_norm", {"x": bf16, "weight": fp32}),
        ("add_layer_norm", {"x": bf16, "residual": fp32}),
        ("add_layer_norm", {"x": fp32, "residual": fp64}),
        ("add_layer_norm", {"x": fp64, "residual": fp32}),
        ("add_layer_norm", {"x": fp32, "residual": fp32, "x_bias": fp64}),
        ("add_layer_norm", {"x": fp32, "residual": fp32, "weight": fp64}),
        ("attention", {"q": fp32, "k": fp32, "v": fp32, "mask": fp64}),
        ("attention", {"q": fp64, "k": fp64, "v": fp64, "mask": fp32}),
        ("ffn", {"x": fp32, "residual": fp64}),
        ("ffn", {"x": bf16, "residual": fp32}),
    ):
        kinds = "-".join(f"{n}={d}".replace("torch.", "") for n, d in dtypes.items())
        found.append(pytest.param(op, dtypes, id=f"{op}-{kinds}"))
    return found


@needs_library
@pytest.mark.parametrize("op, dtypes", _mixed_dtypes())
def test_the_library_runs_what_cpu_does_not_refuse(op, dtypes, monkeypatch, torch_is_faster):
    """Forward and backward; other backends run the other calls, with the reference's bits."""
    shapes = {"weight": (3,), "bias": (3,), "x_bias": (3,), "residual": (2, 3), "mask": (3, 3)}
    shapes |= {"weight": (5, 3)} if op == "linear" else {}
    calls = small_call(op)
    leaves = {
        name: torch.randn(calls[name].shape if name in calls else shapes[name], dtype=torch.float64)
        .to(dtypes.get(name, dtypes.get("x")))
        .requires_grad_()
        for name in {**calls, **dtypes}
        if name not in calls or getattr(calls[name], "dtype", None) == torch.float32
    }
    for check in ("check_parameter", "check_ffn_weights", "check_rows"):
        monkeypatch.setattr(functional, check, lambda *_: None)

    def results(backend: str | None) -> list[Tensor]:
        y = first_result(op, **calls | leaves, backend=backend)
        return [y, *torch.autograd.grad(y.double().sin().sum(), list(leaves.values()))]

    with _Runs(monkeypatch) as runs:
        found = results(None)
    assert [o.name for o, _, _ in runs.calls] == [op_name(op, way) for way in ("fwd", "bwd")]
    for called, args, ran_by in runs.calls:
        taken = _select.why_skipped(called, "cpu", args) is None
        assert ran_by == ("cpu" if taken else "torch"), called.name
        assert ran_by == _select.explain(called, args, None).chosen
    if {ran_by for _, _, ran_by in runs.calls} == {"torch"}:
        for a, b in zip(found, results("torch"), strict=True):
            assert torch.equal(a, b)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_library_runs_logits_in_fp32(dtype, monkeypatch):
    with _Runs(monkeypatch) as runs:
        functional.topk_logsumexp(torch.randn(2, 9, dtype=dtype), 0, 2)
    [(op, _, ran_by)] = runs.calls
    assert (op.name, ran_by) == ("topk_logsumexp", "cpu" if dtype == torch.float32 else "reference")


# -- the environment ------------------------------------------------------------------------------
@needs_library
@pytest.mark.parametrize("traced_with", ["", "reference"])
def test_the_environment_is_read_by_calls_and_not_by_graphs(traced_with, monkeypatch):
    selected: list[str | None] = []  # without which the library's kernel is called
    run, x = Op.run, torch.randn(2, 3)

    def recording(op: Op, args: Any, backend: str | None) -> tuple[Tensor, ...]:
        selected.append(backend)
        return run(op, args, backend)

    monkeypatch.setenv(_env.BACKEND_VARIABLE, traced_with)
    graph = make_fx(lambda x: fastattn.layer_norm(x))(x)
    monkeypatch.setattr(Op, "run", recording)
    for requested in ("reference", "", "reference"):
        monkeypatch.setenv(_env.BACKEND_VARIABLE, requested)
        for function, backend in ((fastattn.layer_norm, requested), (graph, traced_with)):
            selected.clear()
            function(x)
            assert selected == ([backend] if backend else [])
