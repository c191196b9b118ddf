"""The short road of plain calls: with the node in C++, with an autograd.Function, and closed.

Every case runs on each; what is asserted is torch's own behaviour, or the bits of the whole road.
"""

import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.ops import _native, _road
from fastattn.ops._op import OPS, recording_choices
from fastattn.testing import poisoned_results

NORMS = ("layer_norm", "add_layer_norm", "rms_norm")
PARAMETERS = {"layer_norm": 2, "add_layer_norm": 2, "rms_norm": 1, "linear": 1}
ROADS = (*NORMS, "attention", "linear")
each_norm = pytest.mark.parametrize("op", NORMS)
each_op = pytest.mark.parametrize("op", ROADS)

pytestmark = pytest.mark.skipif(
    _native.unavailable("cpu") is not None, reason="needs the native library cpu"
)


def _use(road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if road == "extension" and (why := _native.extension_unavailable()):
        pytest.skip(why)
    if road == "python":
        monkeypatch.setattr(_road, "in_cpp", lambda *_: None)
    for name in ROADS:
        op = OPS[f"{name}_fwd"]
        used = op._no_road if road == "whole" else op.find_short_road
        monkeypatch.setattr(op, "short_road", used)


@pytest.fixture(params=["extension", "python", "whole"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    _use(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture(params=["extension", "python"])
def short_road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    _use(request.param, monkeypatch)
    return str(request.param)


def _inputs(op: str, shape: tuple[int, ...] = (3, 8), **types: torch.dtype) -> list[Tensor]:
    """x, residual for add_layer_norm, then the parameters (of linear a square weight); or q, k, v;
    all require gradients.
    """
    generator = torch.Generator().manual_seed(0)
    if op == "attention":
        shape = (*(1,) * (4 - len(shape)), *shape)
    rows = [shape] * {"attention": 3, "add_layer_norm": 2}.get(op, 1)
    made = [torch.randn(s, generator=generator) for s in rows]
    made = [x.to(types.get("dtype")) for x in made]
    if op == "linear":
        weight = torch.randn(shape[-1], shape[-1], generator=generator)
        made.append(weight.to(types.get("parameters")))
    for _ in range(PARAMETERS.get(op, 0)):
        made.append(torch.randn(shape[-1:], generator=generator).to(types.get("parameters")))
    return [x.requires_grad_() for x in made]


def _call(op: str, inputs: list[Tensor], **options: Any) -> Any:
    return getattr(fastattn, op)(*inputs, **options)


def _is_short(y: Tensor) -> bool:
    assert y.grad_fn is not None
    return not y.grad_fn.name().startswith("Plain")


def _takes(op: str, inputs: list[Tensor]) -> bool:
    """Whether the road serves this call."""
    if op == "attention":
        args = [*inputs, *(None,) * 4, 0, -1, -1, 0.5, 0.0, None, 0]
    elif op == "add_layer_norm":
        args = [*inputs[:2], None, *inputs[2:], 1e-5, 0.0, None, 0]
    elif op == "linear":
        args = inputs
    else:
        args = [*inputs, 1e-5]
    return OPS[f"{op}_fwd"].short_road(None, *args) is not None


def _whole_road(function: Callable[..., Any], op: str, *args: Any, **options: Any) -> Any:
    """What the function returns where there is no short road."""
    found = OPS[f"{op}_fwd"]
    with mock.patch.object(found, "short_road", found._no_road):
        return function(op, *args, **options)


# -- which calls take it --------------------------------------------------------------------------
@each_op
def test_plain_calls_take_it(op: str, short_road: str) -> None:
    inputs = _inputs(op)
    y = _call(op, inputs)
    name = "".join(word.capitalize() for word in op.split("_")) + "Backward"
    assert y.grad_fn is not None
    assert y.grad_fn.name() == (name if short_road == "extension" else "DirectBackward")
    assert _takes(op, inputs) and _takes(op, [x.detach() for x in inputs])
    with torch.no_grad():
        assert _takes(op, inputs) and not _call(op, inputs).requires_grad
    assert _is_short(_call(op, inputs, backend="cpu"))
    assert not _is_short(_call(op, inputs, backend="reference"))
    with torch.autocast("cpu", torch.bfloat16):
        norm = op in NORMS  # they compute what they are given
        assert _takes(op, inputs) == (norm and short_road == "extension")
        assert _call(op, inputs).dtype == (torch.float32 if norm else torch.bfloat16)


@each_op
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_watched_calls_do_not(op: str, short_road: str) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), options: Any = None) -> Any:
            return func(*args, **(options or {}))

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, _: Any, args: Any = (), options: Any = None) -> Any:
            return func(*args, **(options or {}))

    class Subclass(Tensor):
        pass

    inputs = _inputs(op)
    expected = _call(op, inputs)
    forward_mode = torch.autograd.forward_ad.dual_level()
    for watcher in (Mode(), Seen(), torch.profiler.profile(), forward_mode):
        with watcher, torch.no_grad():
            assert not _takes(op, inputs)
            assert torch.equal(_call(op, inputs), expected)
    x, *others = [x.detach() for x in inputs]
    assert not _takes(op, [x.as_subclass(Subclass), *others])
    assert not _takes(op, [x.to_sparse(), *others])
    assert not _takes(op, [x.double(), *others])
    negated = torch._neg_view(x)
    assert torch.equal(_call(op, [negated, *others]), _call(op, [-x, *others]))
    taken: list[bool] = []

    def transformed(x: Tensor) -> Tensor:
        taken.append(_takes(op, [x, *others]))
        return _call(op, [x, *others]).sum()

    torch.func.grad(transformed)(x)
    torch.func.vmap(transformed)(torch.stack([x, x]))
    assert taken == [False, False]


@each_op
def test_the_environment_closes_it(
    op: str, short_road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _inputs(op)
    assert _is_short(_call(op, inputs))
    for variable, value in (("FASTATTN_BACKEND", "reference"), ("TRITON_INTERPRET", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert not _is_short(_call(op, inputs))
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {"FASTATTN_BACKEND": "reference"})
        assert not _is_short(_call(op, inputs))
    assert _is_short(_call(op, inputs))


@each_op
def test_explanations_and_poison_close_it(op: str, short_road: str) -> None:
    inputs = _inputs(op)
    shorts = [_takes(op, inputs)]
    with recording_choices() as explanations:
        assert not _takes(op, inputs)
        _call(op, inputs)
        thread = threading.Thread(target=lambda: shorts.append(_takes(op, inputs)))
        thread.start()
        thread.join()
    assert [e.chosen for e in explanations] == ["cpu"] and shorts == [True, True]
    with poisoned_results():
        assert not _takes(op, inputs)
    assert _takes(op, inputs)


@each_op
def test_plain_gradients_do_not_enter_python(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[bool] = []

    def watched(road: Any, wires: Any, in_python: Callable[..., Any]) -> Any:
        def seen(*args: Any) -> Any:
            entered.append(True)
            return in_python(*args)

        return in_cpp(road, wires, seen)

    in_cpp = _road.in_cpp
    monkeypatch.setattr(_road, "in_cpp", watched)
    _use("extension", monkeypatch)
    inputs = _inputs(op)
    torch.autograd.grad(_call(op, inputs).sum(), inputs)
    assert not entered
    torch.autograd.grad(_call(op, inputs).sum(), inputs, create_graph=True)
    assert entered


# -- what is wrong is said by the checks ----------------------------------------------------------
X = torch.randn(3, 8)
WRONG: tuple[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str], ...] = (
    ("layer_norm", (3,), {}, TypeError, "x must be a tensor, got int"),
    ("layer_norm", (None,), {}, TypeError, "x must be a tensor, got NoneType"),
    ("add_layer_norm", (None, X), {}, TypeError, "x must be a tensor, got NoneType"),
    ("add_layer_norm", (X, None), {}, TypeError, "residual must be a tensor, got NoneType"),
    ("attention", (None, X, X), {}, TypeError, "q must be a tensor, got NoneType"),
    ("layer_norm", (torch.tensor(1.0),), {}, ValueError, "x must have at least one dimension"),
    ("layer_norm", (X.long(),), {}, TypeError, "x must be fp16, bf16, fp32 or fp64"),
    ("layer_norm", (X, torch.ones(7)), {}, ValueError, r"weight must be \[8\].* got \[7\]"),
    ("layer_norm", (X, torch.ones(1, 8)), {}, ValueError, r"weight must be \[8\].*\[1, 8\]"),
    ("layer_norm", (X, None, torch.ones(9)), {}, ValueError, r"bias must be \[8\].* got \[9\]"),
    ("layer_norm", (X, torch.ones(8, device="meta")), {}, ValueError, "weight must be on"),
    ("layer_norm", (X,), {"eps": -1.0}, ValueError, "eps must be a finite number >= 0"),
    ("layer_norm", (X,), {"eps": float("nan")}, ValueError, "eps must be a finite number >= 0"),
    ("layer_norm", (X,), {"eps": float("inf")}, ValueError, "eps must be a finite number >= 0"),
    ("layer_norm", (X,), {"eps": "small"}, TypeError, "eps must be a number"),
    ("layer_norm", (X,), {"eps": True}, TypeError, "eps must be a number"),
    *(
        (op, args, {"backend": backend}, TypeError, "backend must be a name or None")
        for op, args in (
            ("attention", (X[None, None],) * 3),
            ("layer_norm", (X,)),
            ("add_layer_norm", (X, X)),
            ("rms_norm", (X,)),
        )
        # Arrays are equal to "cpu" element by element.
        for backend in (3, np.array(["cpu", "reference"]))
    ),
    ("rms_norm", (X, torch.ones(1, 8)), {}, ValueError, r"weight must be \[8\]"),
    ("rms_norm", (X,), {"eps": -1.0}, ValueError, "eps must be a finite number >= 0"),
    ("linear", (3, X), {}, TypeError, "x must be a tensor, got int"),
    ("linear", (X, X[0]), {}, ValueError, r"weight must be \[E, 8\]"),
    ("linear", (X, X[:, :4]), {}, ValueError, r"weight must be \[E, 8\]"),
    ("linear", (X, X, X[:, 0].double()), {}, TypeError, "bias must have x's dtype"),
    ("linear", (X, X, X[:1, 0]), {}, ValueError, r"bias must be \[3\]"),
    ("linear", (X, X, X[:0, 0]), {}, ValueError, r"bias must be \[3\]"),
    ("linear", (X, X, X[:, :1]), {}, ValueError, r"bias must be \[3\]"),
    ("add_layer_norm", (X, X.view(3, 2, 4)), {}, ValueError, "residual must have x's shape"),
    ("add_layer_norm", (X.view(3, 1, 8), X), {}, ValueError, "residual must have x's shape"),
    ("add_layer_norm", (X, X), {"x_bias": torch.ones(8, 1)}, ValueError, "x_bias must be"),
    ("add_layer_norm", (X, X), {"dropout_p": 1.5}, ValueError, "dropout_p must be"),
    ("add_layer_norm", (X, X), {"dropout_p": X}, TypeError, "dropout_p must be a number"),
    ("add_layer_norm", (X, X), {"dropout_stream": -1}, ValueError, "dropout_stream must be >= 0"),
    ("add_layer_norm", (X, X), {"dropout_stream": 2**31}, ValueError, "dropout_stream must be"),
    ("add_layer_norm", (X, X), {"dropout_stream": 2**70}, ValueError, "dropout_stream must be"),
    (
        "add_layer_norm",
        (X, X),
        {"dropout_seed": torch.ones(())},
        ValueError,
        r"dropout_seed must be int64 \[1\]",
    ),
    *(
        (
            "add_layer_norm",
            (X, X),
            {"dropout_seed": seed},  # though nothing is dropped
            ValueError,
            r"dropout_seed must be int64 \[1\]",
        )
        for seed in (torch.ones(1), torch.ones(5, dtype=torch.int64))
    ),
    (
        "add_layer_norm",
        (X, X),
        {"dropout_seed": torch.tensor(1), "dropout_p": 0.5},
        ValueError,
        r"dropout_seed must be int64 \[1\]",
    ),
)


@pytest.mark.parametrize("op, args, options, error, message", WRONG)
@pytest.mark.parametrize("graph", [False, True])
def test_errors(
    op: str,
    args: Any,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    graph: bool,
    road: str,
) -> None:
    if graph and isinstance(args[0], Tensor) and args[0].is_floating_point():
        args = (args[0].detach().requires_grad_(), *args[1:])
    with pytest.raises(error, match=message):
        _call(op, args, **options)


# -- values ---------------------------------------------------------------------------------------
def _results(op: str, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """The results and the gradients of all inputs that want one."""
    outputs = _call(op, inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    wanted = [x for x in inputs if x.requires_grad]
    if not wanted:
        return list(outputs)
    return [*outputs, *torch.autograd.grad(outputs, wanted, weights)]


VARIANTS: dict[str, Callable[[str], tuple[list[Tensor], dict[str, Any]]]] = {
    "fp32": lambda op: (_inputs(op, (2, 33, 40)), {}),
    "bf16": lambda op: (_inputs(op, dtype=torch.bfloat16, parameters=torch.bfloat16), {}),
    "fp16, fp32 parameters": lambda op: (_inputs(op, dtype=torch.float16), {}),
    "fp32, bf16 parameters": lambda op: (_inputs(op, parameters=torch.bfloat16), {}),
    "fp64": lambda op: (_inputs(op, dtype=torch.float64), {}),
    "no elements": lambda op: (_inputs(op, (0, 8)), {}),
    "no columns": lambda op: (_inputs(op, (3, 0)), {}),
    "one row": lambda op: (_inputs(op, (8,)), {}),
    "many rows": lambda op: (_inputs(op, (3000, 24)), {}),
    "eps": lambda op: (_inputs(op), {"eps": 0.1}),
}


@each_op
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits(op: str, variant: str, short_road: str) -> None:
    inputs, options = VARIANTS[variant](op)
    norms_alone = ("no columns", "many rows", "eps")
    mixed = ("fp16, fp32 parameters", "fp32, bf16 parameters", "fp64")
    if variant in {"attention": norms_alone, "linear": (*mixed, "eps")}.get(op, ()):
        pytest.skip("is a variant of the norms")
    found = _results(op, inputs, **options)
    whole = _whole_road(_results, op, inputs, **options)
    for a, b in zip(found, whole, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


@each_op
def test_every_choice_of_gradients(op: str, short_road: str) -> None:
    """Constant inputs, and inputs that nobody asks the gradient of."""
    count = len(_inputs(op))
    for chosen in range(1, 2**count):
        inputs = _inputs(op)
        for i, x in enumerate(inputs):
            x.requires_grad_(bool(chosen >> i & 1))
        for a, b in zip(_results(op, inputs), _whole_road(_results, op, inputs), strict=True):
            assert torch.equal(a, b)
        inputs = _inputs(op)
        asked = [x for i, x in enumerate(inputs) if chosen >> i & 1]
        y, whole = _call(op, inputs), _whole_road(_call, op, inputs)
        dy = torch.randn_like(y)
        for a, b in zip(
            torch.autograd.grad(y, asked, dy), torch.autograd.grad(whole, asked, dy), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("types", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("used", ["y", "z", "both"])
def test_sums(
    types: tuple[torch.dtype, torch.dtype], dropout_p: float, used: str, short_road: str
) -> None:
    """Everything that add_layer_norm takes and returns, one of whose results may go unused."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator) for s in ((5, 8), (5, 8), (8,), (8,), (8,))]
    x, residual, x_bias, weight, bias = [t.requires_grad_() for t in inputs]
    options: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": torch.tensor([7])}
    found = []
    for call in (_call, functools.partial(_whole_road, _call)):
        rows = [x.to(types[0]), residual.to(types[1]), weight, bias]
        y, z = call("add_layer_norm", rows, x_bias=x_bias, return_sum=True, **options)
        loss = {"y": y.sin(), "z": z.sin(), "both": y.sin() + z.cos()}[used].sum()
        found.append([y, z, *torch.autograd.grad(loss, inputs, allow_unused=True)])
    assert _is_short(found[0][0]) and not _is_short(found[1][0])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@each_norm
def test_layouts(op: str, road: str) -> None:
    """Rows and gradients with gaps, transposed, expanded."""
    base = torch.randn(4, 6, 5, 16)
    for view in (
        lambda t: t[:, ::2],
        lambda t: t[::2, ::2, ::2],
        lambda t: t.transpose(0, 2),
        lambda t: t.transpose(1, 3),
        lambda t: t[..., ::2],
        lambda t: t[:, :1].expand(-1, 6, -1, -1),
        lambda t: t[..., :1],
    ):
        leaf = base.clone().requires_grad_()
        x = view(leaf)
        whole = x.contiguous()
        others = [o.detach() for o in _inputs(op, x.shape)[1:]]
        y, expected = _call(op, [x, *others]), _call(op, [whole, *others])
        assert torch.equal(y, expected) and y.is_contiguous()
        weights = torch.randn(y.shape)
        for dy in (
            weights,
            weights[..., :1].expand_as(y),
            torch.randn(*y.shape[:-1], 2 * y.shape[-1])[..., : y.shape[-1]],
            weights.mT.contiguous().mT,
        ):
            a, b = (torch.autograd.grad(o, leaf, dy, retain_graph=True)[0] for o in (y, expected))
            torch.testing.assert_close(a, b)
        a, b = (torch.autograd.grad(o.sum(), leaf)[0] for o in (y, expected))
        torch.testing.assert_close(a, b)


# -- autograd -------------------------------------------------------------------------------------
@each_op
def test_graph_is_used_once(op: str, road: str) -> None:
    inputs = _inputs(op)
    y = _call(op, inputs)
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(y.sum(), inputs), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y.sum(), inputs)


@each_op
def test_changed_inputs_are_seen(op: str, road: str) -> None:
    for i in range(len(_inputs(op))):
        if op == "add_layer_norm" and i < 2:
            continue  # the sum is kept instead of them
        inputs = [x * 1 for x in _inputs(op)]
        y = _call(op, inputs)
        if op == "linear" and i == 2:
            continue  # nobody reads a bias again
        if op != "rms_norm" and i == len(inputs) - 1:
            torch.autograd.grad(y.sum(), inputs[0], retain_graph=True)
        inputs[i].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_changed_sums_are_seen(road: str) -> None:
    y, z = fastattn.add_layer_norm(*_inputs("add_layer_norm"), return_sum=True)
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, z = fastattn.add_layer_norm(*_inputs("add_layer_norm"), return_sum=True)
    y.mul_(2)  # nobody keeps y
    (y.sum() + z.sum()).backward()


@each_op
def test_saved_tensors_are_freed(op: str, road: str) -> None:
    leaf, *others = _inputs(op)
    held = [leaf * 1, *others]
    outputs = _call(op, held, **({"return_sum": True} if op == "add_layer_norm" else {}))
    kept = outputs[1] if op == "add_layer_norm" else held[0]
    y = outputs[0] if op == "add_layer_norm" else outputs
    finalised: list[bool] = []
    weakref.finalize(kept, finalised.append, True)
    del held, outputs, kept
    loss = y.sum()
    if op != "add_layer_norm":
        assert not finalised, "the graph keeps what it reads"
    loss.backward()
    gc.collect()
    assert finalised and y.grad_fn is not None


def test_long_graphs_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without recursion, which would end the process: this stack holds some thousand calls."""
    _use("extension", monkeypatch)
    freed: list[bool] = []

    def make_and_free() -> None:
        weight, y = torch.ones(1), torch.ones(1, requires_grad=True)
        for _ in range(20_000):
            y = fastattn.rms_norm(y, weight)
        assert _is_short(y)
        del y
        freed.append(True)

    before = threading.stack_size(1 << 19)
    try:
        thread = threading.Thread(target=make_and_free)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert freed


@each_op
def test_saved_tensors_hooks(op: str, road: str) -> None:
    inputs = _inputs(op)
    expected = torch.autograd.grad(_call(op, inputs).sum(), inputs)
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        y = _call(op, inputs)
    assert len(packed) == {"linear": 2, "rms_norm": 3}.get(op, 5)
    for a, b in zip(torch.autograd.grad(y.sum(), inputs), expected, strict=True):
        assert torch.equal(a, b)
    with torch.autograd.graph.save_on_cpu():
        y = _call(op, inputs)
    for a, b in zip(torch.autograd.grad(y.sum(), inputs), expected, strict=True):
        assert torch.equal(a, b)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.double(), lambda x: x.float()):
        y = _call(op, inputs)
    for a, b in zip(torch.autograd.grad(y.sum(), inputs), expected, strict=True):
        assert torch.equal(a, b)


@each_op
def test_errors_of_hooks_are_theirs(op: str, road: str) -> None:
    inputs = _inputs(op)

    def refuse(x: Any) -> Any:
        raise LookupError("nothing is kept here")

    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        with pytest.raises(LookupError, match="nothing is kept here"):
            _call(op, inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, refuse):
        y = _call(op, inputs)
    with pytest.raises(LookupError, match="nothing is kept here"):
        y.sum().backward()
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        _call(op, inputs).sum().backward()


@each_op
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(op: str, reentrant: bool, road: str) -> None:
    inputs = _inputs(op)

    def block(*tensors: Tensor) -> Tensor:
        return _call(op, [tensors[0].sin(), *tensors[1:]]).cos()

    expected = torch.autograd.grad(block(*inputs).sum(), inputs)
    checkpoint(block, *inputs, use_reentrant=reentrant).sum().backward()
    for x, b in zip(inputs, expected, strict=True):
        assert x.grad is not None and torch.equal(x.grad, b)


@each_op
def test_anomalies(op: str, road: str) -> None:
    inputs = _inputs(op)
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="Backward"):
        y = _call(op, inputs)
        with pytest.raises(RuntimeError, match=r"Backward'? returned nan values"):
            y.backward(torch.full_like(y, torch.nan))


@each_op
def test_double_backward(op: str, road: str) -> None:
    inputs = _inputs(op)
    found = []
    for backend in (None, "cpu", "reference"):
        y = _call(op, inputs, backend=backend)
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        total = sum(g.square().sum() for g in first)
        found.append([*first, *torch.autograd.grad(total, inputs)])
    for a, named, b in zip(*found, strict=True):
        assert torch.equal(a, named)
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@each_op
def test_nodes(op: str, road: str) -> None:
    """What tools that walk the graph look at."""
    inputs = _inputs(op)
    y = _call(op, inputs)
    node = y.grad_fn
    assert isinstance(node, torch.autograd.graph.Node)
    assert node.name().endswith("Backward") and f"grad_fn=<{node.name()}>" in repr(y)
    leaves = [n.variable for n, _ in node.next_functions if n is not None]
    assert [any(leaf is x for x in inputs) for leaf in leaves] == [True] * len(inputs)
    expected = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    seen: list[Any] = []
    node.register_hook(lambda gradients, incoming: seen.append(len(incoming)))
    node.register_prehook(lambda incoming: tuple(g if g is None else 2 * g for g in incoming))
    for a, b in zip(torch.autograd.grad(y.sum(), inputs, retain_graph=True), expected, strict=True):
        torch.testing.assert_close(a, 2 * b)
    assert len(seen) == 1
    assert node.metadata == {} and y.is_leaf is False
    assert torch.autograd.graph.get_gradient_edge(y).node.name() == node.name()


@each_op
def test_threads_share_a_graph(op: str, road: str) -> None:
    inputs = _inputs(op, (64, 32))
    y = _call(op, inputs)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    wrong: list[int] = []

    def differentiate(seed: int) -> None:
        for _ in range(20):
            found = torch.autograd.grad(y, inputs, dy, retain_graph=True)
            found += torch.autograd.grad(_call(op, inputs), inputs, dy, create_graph=seed == 0)
            if not all(torch.equal(a, b) for a, b in zip(found, expected + expected, strict=True)):
                wrong.append(seed)

    threads = [threading.Thread(target=differentiate, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@each_op
def test_inference(op: str, short_road: str) -> None:
    inputs = _inputs(op)
    expected = _call(op, inputs)
    with torch.inference_mode():
        assert _takes(op, inputs)
        y = _call(op, inputs)
        assert _takes(op, [y, *inputs[1:]])
        again = _call(op, [y, *inputs[1:]])
    assert torch.equal(y, expected) and y.is_inference() and again.is_inference()
    parameter = torch.ones(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        fastattn.rms_norm(y, parameter)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@each_op
def test_gradients_do_not_depend_on_threads(op: str, short_road: str, two_threads: None) -> None:
    inputs = _inputs(op, (400, 64))
    two = _results(op, inputs)
    torch.set_num_threads(1)
    for a, b in zip(two, _results(op, inputs), strict=True):
        assert torch.equal(a, b)
