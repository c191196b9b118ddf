"""Whoever watches torch's ops sees ours too: calls that nobody watches run the implementation
themselves, the others go through torch's dispatcher.
"""

from typing import Any

import pytest
import torch
from small_calls import OPS, small_call
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn.ops import _op

pytestmark = pytest.mark.usefixtures("no_request")


class _Names(TorchDispatchMode):
    """The ops that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(op.name())
        return op(*args, **kwargs or {})


def _differentiated(op: str, calls: dict[str, Any]) -> list[Tensor]:
    """The first result and its gradients."""
    leaves = {
        name: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in calls.items()
    }
    y = getattr(fastattn, op)(**leaves)
    wanted = [x for x in leaves.values() if isinstance(x, Tensor) and x.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), wanted)]


@pytest.mark.parametrize("op", OPS)
def test_modes_see_the_ops(op: str) -> None:
    """In the forward and in the backward, with the bits of a plain call."""
    plain = _differentiated(op, small_call(op))
    with _Names() as names:
        watched = _differentiated(op, small_call(op))
    seen = [name for name in names.seen if name.startswith("fastattn::")]
    assert seen == [f"fastattn::{op}_fwd", f"fastattn::{op}_bwd"]
    for x, y in zip(plain, watched, strict=True):
        assert torch.equal(x, y)


def test_modes_see_a_backward_alone() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    y = fastattn.layer_norm(x)
    with _Names() as names:
        y.sum().backward()
    assert "fastattn::layer_norm_bwd" in names.seen


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

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(f))
            return super().__torch_function__(f, types, args, kwargs or {})

    plain = _differentiated(op, small_call(op))
    with Mode():
        watched = _differentiated(op, small_call(op))
    assert seen.count(f"fastattn.{op}_fwd.default") == 1
    for x, y in zip(plain, watched, strict=True):
        assert torch.equal(x, y)
    seen.clear()
    calls = small_call(op)
    last = [name for name, x in calls.items() if isinstance(x, Tensor)][-1]
    getattr(fastattn, op)(**calls | {last: calls[last].as_subclass(Watched)})
    assert seen.count(f"fastattn.{op}_fwd.default") == 1


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traces_hold_the_ops(op: str, requires_grad: bool) -> None:
    calls = small_call(op)
    names = [n for n, x in calls.items() if isinstance(x, Tensor) and x.is_floating_point()]

    def function(*tensors: Tensor) -> Tensor:
        return getattr(fastattn, op)(**calls | dict(zip(names, tensors, strict=True)))

    examples = [calls[n].detach().requires_grad_(requires_grad) for n in names]
    trace = torch.jit.trace(function, tuple(examples), check_trace=False)
    others = [torch.randn_like(x) for x in examples]
    assert torch.equal(trace(*others), function(*others))


@pytest.mark.parametrize("op", OPS)
def test_changed_inputs_are_noticed(op: str) -> None:
    """What is changed in place before the backward pass is refused where it matters."""
    calls = small_call(op)
    names = [n for n, x in calls.items() if isinstance(x, Tensor) and x.is_floating_point()]
    leaves = [torch.randn_like(calls[n]).requires_grad_() for n in names]
    refused = []
    for name in names:
        given = {n: leaf * 1 for n, leaf in zip(names, leaves, strict=True)}
        y = getattr(fastattn, op)(**calls | given)
        expected = torch.autograd.grad(y.sin().sum(), leaves, retain_graph=True)
        with torch.no_grad():
            given[name].add_(1)
        try:
            found = torch.autograd.grad(y.sin().sum(), leaves)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            refused.append(name)
        else:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
    assert refused or op == "add_layer_norm"  # which keeps the sum alone


class _Own(Tensor):
    pass


def test_results_keep_a_subclass() -> None:
    x = torch.randn(2, 3)
    y = fastattn.layer_norm(x.as_subclass(_Own))
    assert type(y) is _Own and torch.equal(y, fastattn.layer_norm(x))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_lazily_negated_tensors(backend: str) -> None:
    """Their memory holds the opposite of their values; so may that of gradients."""
    if why := _op.OPS["layer_norm_fwd"].refusal(backend, (torch.ones(2, 3), None, None, 0.0)):
        pytest.skip(f"backend {backend} {why}")
    x = torch.randn(2, 3, dtype=torch.complex64).conj().imag
    dy = torch.randn(2, 3, dtype=torch.complex64).conj().imag
    assert x.is_neg() and dy.is_neg()

    def results(x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = fastattn.layer_norm(x, backend=backend)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    for lazy, plain in zip(results(x, dy), results(x.clone(), dy.clone()), strict=True):
        assert torch.equal(lazy, plain)


def test_tensors_that_outlived_a_transform() -> None:
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


def test_forward_mode_derivatives_are_refused() -> None:
    """Not dropped in silence. What carries none passes."""
    x = torch.randn(2, 3)
    with forward_ad.dual_level():
        y = fastattn.layer_norm(x)
        dual = forward_ad.make_dual(x, torch.ones(2, 3))
        with pytest.raises(NotImplementedError, match="jvp"):
            fastattn.layer_norm(dual)
        with pytest.raises(NotImplementedError, match="jvp"), torch.no_grad():
            torch.ops.fastattn.layer_norm_fwd(dual, None, None, 1e-5)
    assert torch.equal(y, fastattn.layer_norm(x))
