"""The short road of plain calls: with the node in C++, with an autograd.Function, and closed.

Which calls take it, what it says of wrong ones, and that its bits are those of the whole road.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from roads import NORMS, call, each_norm, each_op, is_short, make_inputs, needs_library, use_road
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn.ops import _road
from fastattn.ops._op import OPS, recording_choices
from fastattn.testing import poisoned_results

pytestmark = needs_library


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
    inputs = make_inputs(op)
    y = call(op, inputs)
    name = "".join(word.capitalize() for word in op.split("_")) + "Backward"
    assert y.grad_fn is not None
    assert y.grad_fn.name() == (name if short_road == "extension" else "DirectBackward")
    assert _takes(op, inputs) and _takes(op, [x.detach() for x in inputs])
    with torch.no_grad():
        assert _takes(op, inputs) and not call(op, inputs).requires_grad
    assert is_short(call(op, inputs, backend="cpu"))
    assert not is_short(call(op, inputs, backend="reference"))
    with torch.autocast("cpu", torch.bfloat16):
        norm = op in NORMS  # they compute what they are given
        assert _takes(op, inputs) == (norm and short_road == "extension")
        assert call(op, inputs).dtype == (torch.float32 if norm else torch.bfloat16)


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

    inputs = make_inputs(op)
    expected = call(op, inputs)
    forward_mode = torch.autograd.forward_ad.dual_level()
    for watcher in (Mode(), Seen(), torch.profiler.profile(), forward_mode):
        with watcher, torch.no_grad():
            assert not _takes(op, inputs)
            assert torch.equal(call(op, inputs), expected)
    x, *others = [x.detach() for x in inputs]
    assert not _takes(op, [x.as_subclass(Subclass), *others])
    assert not _takes(op, [x.to_sparse(), *others])
    assert not _takes(op, [x.double(), *others])
    negated = torch._neg_view(x)
    assert torch.equal(call(op, [negated, *others]), call(op, [-x, *others]))
    taken: list[bool] = []

    def transformed(x: Tensor) -> Tensor:
        taken.append(_takes(op, [x, *others]))
        return call(op, [x, *others]).sum()

    torch.func.grad(transformed)(x)
    torch.func.vmap(transformed)(torch.stack([x, x]))
    assert taken == [False, False]


@each_op
def test_the_environment_closes_it(
    op: str, short_road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(op)
    assert is_short(call(op, inputs))
    for variable, value in (("FASTATTN_BACKEND", "reference"), ("TRITON_INTERPRET", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert not is_short(call(op, inputs))
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {"FASTATTN_BACKEND": "reference"})
        assert not is_short(call(op, inputs))
    assert is_short(call(op, inputs))


@each_op
def test_explanations_and_poison_close_it(op: str, short_road: str) -> None:
    inputs = make_inputs(op)
    shorts = [_takes(op, inputs)]
    with recording_choices() as explanations:
        assert not _takes(op, inputs)
        call(op, inputs)
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
    use_road("extension", monkeypatch)
    inputs = make_inputs(op)
    torch.autograd.grad(call(op, inputs).sum(), inputs)
    assert not entered
    torch.autograd.grad(call(op, inputs).sum(), inputs, create_graph=True)
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
        call(op, args, **options)


# -- values ---------------------------------------------------------------------------------------
def _results(op: str, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """The results and the gradients of all inputs that want one."""
    outputs = call(op, inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    wanted = [x for x in inputs if x.requires_grad]
    if not wanted:
        return list(outputs)
    return [*outputs, *torch.autograd.grad(outputs, wanted, weights)]


VARIANTS: dict[str, Callable[[str], tuple[list[Tensor], dict[str, Any]]]] = {
    "fp32": lambda op: (make_inputs(op, (2, 33, 40)), {}),
    "bf16": lambda op: (make_inputs(op, dtype=torch.bfloat16, parameters=torch.bfloat16), {}),
    "fp16, fp32 parameters": lambda op: (make_inputs(op, dtype=torch.float16), {}),
    "fp32, bf16 parameters": lambda op: (make_inputs(op, parameters=torch.bfloat16), {}),
    "fp64": lambda op: (make_inputs(op, dtype=torch.float64), {}),
    "no elements": lambda op: (make_inputs(op, (0, 8)), {}),
    "no columns": lambda op: (make_inputs(op, (3, 0)), {}),
    "one row": lambda op: (make_inputs(op, (8,)), {}),
    "many rows": lambda op: (make_inputs(op, (3000, 24)), {}),
    "eps": lambda op: (make_inputs(op), {"eps": 0.1}),
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
    count = len(make_inputs(op))
    for chosen in range(1, 2**count):
        inputs = make_inputs(op)
        for i, x in enumerate(inputs):
            x.requires_grad_(bool(chosen >> i & 1))
        for a, b in zip(_results(op, inputs), _whole_road(_results, op, inputs), strict=True):
            assert torch.equal(a, b)
        inputs = make_inputs(op)
        asked = [x for i, x in enumerate(inputs) if chosen >> i & 1]
        y, whole = call(op, inputs), _whole_road(call, op, inputs)
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
    for run in (call, functools.partial(_whole_road, call)):
        rows = [x.to(types[0]), residual.to(types[1]), weight, bias]
        y, z = run("add_layer_norm", rows, x_bias=x_bias, return_sum=True, **options)
        loss = {"y": y.sin(), "z": z.sin(), "both": y.sin() + z.cos()}[used].sum()
        found.append([y, z, *torch.autograd.grad(loss, inputs, allow_unused=True)])
    assert is_short(found[0][0]) and not is_short(found[1][0])
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
        others = [o.detach() for o in make_inputs(op, x.shape)[1:]]
        y, expected = call(op, [x, *others]), call(op, [whole, *others])
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


# -- modes and threads ----------------------------------------------------------------------------
@each_op
def test_inference(op: str, short_road: str) -> None:
    inputs = make_inputs(op)
    expected = call(op, inputs)
    with torch.inference_mode():
        assert _takes(op, inputs)
        y = call(op, inputs)
        assert _takes(op, [y, *inputs[1:]])
        again = call(op, [y, *inputs[1:]])
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
    inputs = make_inputs(op, (400, 64))
    two = _results(op, inputs)
    torch.set_num_threads(1)
    for a, b in zip(two, _results(op, inputs), strict=True):
        assert torch.equal(a, b)
