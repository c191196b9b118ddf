"""What autograd sees of a plain call, the same on each road."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from roads import call, each_op, is_short, make_inputs, needs_library, use_road
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastattn

pytestmark = needs_library


@each_op
def test_graph_is_used_once(op: str, road: str) -> None:
    inputs = make_inputs(op)
    y = call(op, inputs)
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(y.sum(), inputs), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y.sum(), inputs)


@each_op
def test_changed_inputs_are_seen(op: str, road: str) -> None:
    for i in range(len(make_inputs(op))):
        if op == "add_layer_norm" and i < 2:
            continue  # the sum is kept instead of them
        inputs = [x * 1 for x in make_inputs(op)]
        y = call(op, inputs)
        if op == "linear" and i == 2:
            continue  # nobody reads a bias again
        if op != "rms_norm" and i == len(inputs) - 1:
            torch.autograd.grad(y.sum(), inputs[0], retain_graph=True)
        inputs[i].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_changed_sums_are_seen(road: str) -> None:
    y, z = fastattn.add_layer_norm(*make_inputs("add_layer_norm"), return_sum=True)
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, z = fastattn.add_layer_norm(*make_inputs("add_layer_norm"), return_sum=True)
    y.mul_(2)  # nobody keeps y
    (y.sum() + z.sum()).backward()


@each_op
def test_saved_tensors_are_freed(op: str, road: str) -> None:
    leaf, *others = make_inputs(op)
    held = [leaf * 1, *others]
    outputs = call(op, held, **({"return_sum": True} if op == "add_layer_norm" else {}))
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
    use_road("extension", monkeypatch)
    freed: list[bool] = []

    def make_and_free() -> None:
        weight, y = torch.ones(1), torch.ones(1, requires_grad=True)
        for _ in range(20_000):
            y = fastattn.rms_norm(y, weight)
        assert is_short(y)
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
    inputs = make_inputs(op)
    expected = torch.autograd.grad(call(op, inputs).sum(), inputs)
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        y = call(op, inputs)
    assert len(packed) == {"linear": 2, "rms_norm": 3}.get(op, 5)
    for a, b in zip(torch.autograd.grad(y.sum(), inputs), expected, strict=True):
        assert torch.equal(a, b)
    with torch.autograd.graph.save_on_cpu():
        y = call(op, inputs)
    for a, b in zip(torch.autograd.grad(y.sum(), inputs), expected, strict=True):
        assert torch.equal(a, b)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.double(), lambda x: x.float()):
        y = call(op, inputs)
    for a, b in zip(torch.autograd.grad(y.sum(), inputs), expected, strict=True):
        assert torch.equal(a, b)


@each_op
def test_errors_of_hooks_are_theirs(op: str, road: str) -> None:
    inputs = make_inputs(op)

    def refuse(x: Any) -> Any:
        raise LookupError("nothing is kept here")

    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        with pytest.raises(LookupError, match="nothing is kept here"):
            call(op, inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, refuse):
        y = call(op, inputs)
    with pytest.raises(LookupError, match="nothing is kept here"):
        y.sum().backward()
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        call(op, inputs).sum().backward()


@each_op
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(op: str, reentrant: bool, road: str) -> None:
    inputs = make_inputs(op)

    def block(*tensors: Tensor) -> Tensor:
        return call(op, [tensors[0].sin(), *tensors[1:]]).cos()

    expected = torch.autograd.grad(block(*inputs).sum(), inputs)
    checkpoint(block, *inputs, use_reentrant=reentrant).sum().backward()
    for x, b in zip(inputs, expected, strict=True):
        assert x.grad is not None and torch.equal(x.grad, b)


@each_op
def test_anomalies(op: str, road: str) -> None:
    inputs = make_inputs(op)
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="Backward"):
        y = call(op, inputs)
        with pytest.raises(RuntimeError, match=r"Backward'? returned nan values"):
            y.backward(torch.full_like(y, torch.nan))


@each_op
def test_double_backward(op: str, road: str) -> None:
    inputs = make_inputs(op)
    found = []
    for backend in (None, "cpu", "reference"):
        y = call(op, inputs, backend=backend)
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        total = sum(g.square().sum() for g in first)
        found.append([*first, *torch.autograd.grad(total, inputs)])
    for a, named, b in zip(*found, strict=True):
        assert torch.equal(a, named)
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@each_op
def test_nodes(op: str, road: str) -> None:
    """What tools that walk the graph look at."""
    inputs = make_inputs(op)
    y = call(op, inputs)
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
    inputs = make_inputs(op, (64, 32))
    y = call(op, inputs)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    wrong: list[int] = []

    def differentiate(seed: int) -> None:
        for _ in range(20):
            found = torch.autograd.grad(y, inputs, dy, retain_graph=True)
            found += torch.autograd.grad(call(op, inputs), inputs, dy, create_graph=seed == 0)
            if not all(torch.equal(a, b) for a, b in zip(found, expected + expected, strict=True)):
                wrong.append(seed)

    threads = [threading.Thread(target=differentiate, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
