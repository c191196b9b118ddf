"""The ops in autograd: nodes, saved tensors, gradients.

With `--python-derivatives`, as in the last test, the derivatives in Python are used.
"""

import contextlib
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from cpu_library import needs_library
from products import SetFaster
from subprocesses import environment, passed_with
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.ops import _native
from fastattn.ops._select import op_of

NORMS = ("layer_norm", "add_layer_norm", "rms_norm")
PADDED = ("attention", "attention_with_weights")
OPS = (*NORMS, *PADDED, "attention_varlen", "ffn", "linear")
each_op = pytest.mark.parametrize("op", OPS)
# Inputs whose values no gradient reads; add_layer_norm saves the sum instead.
UNREAD = {"add_layer_norm": (0, 1), "linear": (2,)}


@pytest.fixture(autouse=True)
def _same_linear_backend(torch_is_faster: SetFaster) -> None:
    """The same backend for linear on every processor."""


def make_inputs(op: str, shape: tuple[int, ...] = (3, 8), **types: torch.dtype) -> list[Tensor]:
    """The tensors that have gradients, in the order of the public function; x or q [..., *shape].

    dtype: of the data. parameters: of the norms' and linear's weights.
    """
    generator = torch.Generator().manual_seed(0)
    width = shape[-1]
    shape = (*(1,) * (4 - len(shape)), *shape) if op in PADDED else shape
    if op == "attention_varlen":
        shape = {1: (1, 1, width), 2: (shape[0], 1, width)}.get(len(shape), shape)
    rows = [shape] * (3 if op.startswith("attention") else 2 if op == "add_layer_norm" else 1)
    parameters: list[tuple[int, ...]] = {
        "linear": [(width, width), (width,)],
        "ffn": [(12, width), (12,), (width, 12), (width,)],
        "rms_norm": [(width,)],
    }.get(op, [(width,)] * 2 if op in NORMS else [])
    data, parameter = types.get("dtype"), types.get("parameters")
    made = [torch.randn(s, generator=generator).to(data) for s in rows]
    made += [
        torch.randn(s, generator=generator).to(data if op == "ffn" else parameter)
        for s in parameters
    ]
    return [x.requires_grad_() for x in made]


def call(op: str, inputs: list[Tensor], **options: Any) -> Any:
    """The first result of attention_with_weights, all results of other ops."""
    results = call_with_all_results(op, inputs, **options)
    return results[0] if op == "attention_with_weights" else results


def call_with_all_results(op: str, inputs: list[Tensor], **options: Any) -> Any:
    if op == "attention_varlen":
        length = inputs[0].shape[0]
        offsets = torch.tensor([0, length // 2, length], dtype=torch.int32)
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets)
        options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), length)
    if op == "ffn":
        options["activation"] = "gelu"
    return getattr(fastattn, op)(*inputs, **options)


def results_of(op: str, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """The results, and the gradients of all inputs that require one."""
    outputs = call_with_all_results(op, inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    wanted = [x for x in inputs if x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, wanted, weights)]


# -- the graph ------------------------------------------------------------------------------------
@each_op
def test_nodes(op: str) -> None:
    """The attributes of nodes that tools for the autograd graph use."""
    inputs = make_inputs(op)
    y = call(op, inputs)
    node = y.grad_fn
    assert isinstance(node, torch.autograd.graph.Node)
    words = op_of(op).public_name.split("_")
    assert node.name() == "".join(map(str.capitalize, words)) + "Backward"
    assert f"grad_fn=<{node.name()}>" in repr(y)
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


def test_saved_results_have_no_gradient() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    for mode in (contextlib.nullcontext(), CallRecorder()):
        with mode:
            results = torch.ops.fastattn.layer_norm_fwd(x, None, None, 1e-5)
        assert [y.requires_grad for y in results] == [True, False, False]


@each_op
def test_graph_is_used_once(op: str) -> None:
    inputs = make_inputs(op)
    y = call(op, inputs)
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(y.sum(), inputs), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y.sum(), inputs)


@each_op
def test_changed_inputs_raise(op: str) -> None:
    for i in range(len(make_inputs(op))):
        leaves = make_inputs(op)
        inputs = [x * 1 for x in leaves]
        y = call(op, inputs)
        expected = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
        with torch.no_grad():
            inputs[i].add_(1)
        if i in UNREAD.get(op, ()):
            for a, b in zip(torch.autograd.grad(y.sum(), leaves), expected, strict=True):
                assert torch.equal(a, b)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_changed_sums_raise() -> None:
    y, z = fastattn.add_layer_norm(*make_inputs("add_layer_norm"), return_sum=True)
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, z = fastattn.add_layer_norm(*make_inputs("add_layer_norm"), return_sum=True)
    y.mul_(2)  # y is not kept
    (y.sum() + z.sum()).backward()


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1)])
def test_linear_saves_what_its_gradients_need(frozen: tuple[int, ...]) -> None:
    """x for the weight's gradient, the weight for x's; others may be changed or freed."""
    leaves = make_inputs("linear")
    for i in frozen:
        leaves[i].requires_grad_(False)
    inputs = [x * 1 for x in leaves]
    read = [i for i in (0, 1) if 1 - i not in frozen]
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = call("linear", inputs)
    assert [x.shape for x in saved] == [inputs[i].shape for i in read]
    y = call("linear", inputs)
    with torch.no_grad():
        for i in {0, 1, 2} - {*read}:
            inputs[i].add_(1)
    y.sum().backward()


@each_op
def test_saved_tensors_are_freed(op: str) -> None:
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
    assert finalised and y.grad_fn is not None


@each_op
def test_results_are_freed_without_a_backward(op: str) -> None:
    outputs = call(op, make_inputs(op), **({"return_sum": True} if op == "add_layer_norm" else {}))
    freed: list[bool] = []
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        weakref.finalize(y, freed.append, True)
    expected = len(outputs) if isinstance(outputs, tuple) else 1
    del outputs, y
    assert freed == [True] * expected


def test_long_graphs_are_freed() -> None:
    """Without recursion, which would overflow the small stack of this thread."""
    freed: list[bool] = []

    def make_and_free() -> None:
        weight, y = torch.ones(1), torch.ones(1, requires_grad=True)
        for _ in range(20_000):
            y = fastattn.rms_norm(y, weight)
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


# -- hooks and checkpoints ------------------------------------------------------------------------
@each_op
def test_saved_tensors_hooks(op: str) -> None:
    inputs = make_inputs(op)
    expected = torch.autograd.grad(call(op, inputs).sum(), inputs)
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x.detach().clone())
        return len(packed) - 1

    def differ(y: Tensor) -> list[int]:
        found = torch.autograd.grad(y.sum(), inputs)
        return [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not a.equal(b)]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        y = call(op, inputs)
    counts = {"linear": 2, "rms_norm": 3, "attention_varlen": 7, "ffn": 6}
    assert len(packed) == counts.get(op, 5) and not differ(y)
    with torch.autograd.graph.save_on_cpu():
        y = call(op, inputs)
    assert not differ(y)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.double(), lambda x: x.float() if op != "attention_varlen" else _from_fp64(x)
    ):
        y = call(op, inputs)
    assert not differ(y)


@each_op
def test_saved_tensors_may_come_back_in_another_layout(op: str) -> None:
    inputs = make_inputs(op, (2, 3, 8))

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(op, inputs).sin().sum(), inputs)

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.mT.contiguous() if x.dim() > 1 else x, lambda x: x.mT if x.dim() > 1 else x
    ):
        found = gradients()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def _from_fp64(x: Tensor) -> Tensor:
    """Offsets are integers, all other tensors are data."""
    return x.int() if x.dim() == 1 else x.float()


@each_op
def test_errors_of_hooks_propagate(op: str) -> None:
    inputs = make_inputs(op)
    calls: list[Any] = []

    def refuse(x: Any) -> Any:
        calls.append(x)
        raise LookupError("nothing is kept here")

    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        with pytest.raises(LookupError, match="nothing is kept here"):
            call(op, inputs)
    assert len(calls) == 1
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, refuse):
        y = call(op, inputs)
    with pytest.raises(LookupError, match="nothing is kept here"):
        y.sum().backward()
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        call(op, inputs).sum().backward()


@each_op
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(op: str, reentrant: bool) -> None:
    inputs = make_inputs(op)

    def block(*tensors: Tensor) -> Tensor:
        return call(op, [tensors[0].sin(), *tensors[1:]]).cos()

    expected = torch.autograd.grad(block(*inputs).sum(), inputs)
    checkpoint(block, *inputs, use_reentrant=reentrant).sum().backward()
    for x, b in zip(inputs, expected, strict=True):
        assert x.grad is not None and torch.equal(x.grad, b)


@each_op
def test_anomalies(op: str) -> None:
    inputs = make_inputs(op)
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="Backward"):
        y = call(op, inputs)
        with pytest.raises(RuntimeError, match=r"Backward'? returned nan values"):
            y.backward(torch.full_like(y, torch.nan))


# -- gradients ------------------------------------------------------------------------------------
@each_op
@needs_library
def test_double_backward(op: str) -> None:
    inputs = make_inputs(op)
    found = []
    for backend in (None, "cpu", "reference"):
        y = call(op, inputs, backend=backend)
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        total = sum(g.square().sum() for g in first)
        found.append([*first, *torch.autograd.grad(total, inputs)])
    for a, named, b in zip(*found, strict=True):
        assert torch.equal(a, named)
        size = b.abs().max().clamp_min(1.0)  # elements are sums of terms of this size
        torch.testing.assert_close(a / size, b / size, atol=1e-5, rtol=1e-5)


# -- modes and threads ----------------------------------------------------------------------------
def test_inference_tensors() -> None:
    with torch.inference_mode():
        x = fastattn.rms_norm(torch.randn(3, 8))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        fastattn.rms_norm(x, torch.ones(8, requires_grad=True))


@each_op
def test_threads_share_a_graph(op: str) -> None:
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


# -- both forms of the derivative -----------------------------------------------------------------
@each_op
@needs_library
def test_backward_in_cpp_does_not_enter_python(op: str) -> None:
    inputs = make_inputs(op)
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("fastattn"):
            entered.add(module)

    def entered_by_backward(**options: Any) -> set[str]:
        y = call(op, inputs)
        dy, before = torch.ones_like(y), sys.getprofile()
        entered.clear()
        sys.setprofile(note)
        try:
            torch.autograd.grad(y, inputs, dy, **options)
        finally:
            sys.setprofile(before)
        return set(entered)

    derivatives = "fastattn.ops._autograd"
    expected = {derivatives} if _native.extension() is None else set()
    assert entered_by_backward() == expected
    assert derivatives in entered_by_backward(create_graph=True)


FIRST_CALLS = """
import threading, time
import torch, fastattn
from fastattn.ops import _native

def slow():
    time.sleep(0.3)
    return extension()

extension, _native.extension = _native.extension, slow
x = torch.randn(3, 8, requires_grad=True)
results = []
threads = [threading.Thread(target=lambda: results.append(fastattn.rms_norm(x))) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
y = fastattn.rms_norm(x)
y.sum().backward()
print(type(y.grad_fn).__name__, "CppFunction" in {type(y.grad_fn).__name__ for y in results})
"""


def test_first_calls_of_several_threads_register_one_node() -> None:
    if _native.extension() is None:
        pytest.skip("there are no nodes in C++")
    command = [sys.executable, "-c", FIRST_CALLS]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "CppFunction True"
    assert "previously registered kernel" not in result.stderr


# Tests of other files about derivatives under transforms, compilers and modes.
CHOSEN = (
    "(test_autograd or finite_differences or test_transforms or modes_see or traces "
    "or opcheck_of_named or func_grad or vmap or batched or test_compile or one_output "
    "or selective or derivatives_of_modules) "
    "and not test_compiled and not (finite_differences and reference)"
)


@pytest.mark.slow
def test_derivatives_in_python() -> None:
    """This file, and tests of transforms and compilers, without the nodes in C++."""
    if _native.extension() is None:
        pytest.skip("every test here uses them")
    names = "autograd dispatch forward_mode op_modes torch_behaviours vmap".split()
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    assert passed_with("--python-derivatives", "-m", "not slow", "-k", CHOSEN, *files) > 220
