"""PyTorch's utilities for modules, on the drop-ins: conversions, copies, loading.

Every test does the same to PyTorch's module and to fastattn's, then compares their results.
"""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from module_equivalence import assert_equivalent, random_mask
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune
from transformer_twins import CLASSES, B, E, H, S, build, inputs, twins

import fastattn.nn as fnn

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
]
each_class = pytest.mark.parametrize("name", ["MultiheadAttention", *CLASSES])


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _target(module: nn.Module, name: str) -> nn.Module:
    """The first submodule of that name."""
    return next(m for path, m in module.named_modules() if path.split(".")[-1] == name)


def _weight_norm(module: nn.Module) -> None:
    parametrizations.weight_norm(_target(module, "linear1"))


def _prune_linear(module: nn.Module, permanent: bool = False) -> None:
    prune.l1_unstructured(_target(module, "linear1"), "weight", 0.4)
    prune.ln_structured(_target(module, "linear2"), "weight", 0.3, n=2, dim=0)
    for name in ("linear1", "linear2") if permanent else ():
        prune.remove(_target(module, name), "weight")


def _parametrize_and_remove(module: nn.Module) -> None:
    _weight_norm(module)
    parametrize.remove_parametrizations(_target(module, "linear1"), "weight")


Change = Callable[[nn.Module], Any]
KEEP_VALUES: dict[str, Change] = {
    "weight norm": _weight_norm,
    "weight norm by a hook": lambda m: utils.weight_norm(_target(m, "linear2")),
    "weight norm of attention": lambda m: parametrizations.weight_norm(
        _target(m, "self_attn"), "in_proj_weight"
    ),
    "parametrized and removed": _parametrize_and_remove,
}
CHANGES: dict[str, Change] = KEEP_VALUES | {
    "spectral norm": lambda m: parametrizations.spectral_norm(
        _target(m, "linear1"), n_power_iterations=2
    ),
    "spectral norm by a hook": lambda m: utils.spectral_norm(_target(m, "linear2")),
    "orthogonal": lambda m: parametrizations.orthogonal(_target(m, "out_proj")),
    "softplus of a norm": lambda m: parametrize.register_parametrization(
        _target(m, "norm2"), "weight", nn.Softplus()
    ),
    "pruned": _prune_linear,
    "pruned and made permanent": lambda m: _prune_linear(m, permanent=True),
    "pruned attention": lambda m: prune.random_unstructured(
        _target(m, "self_attn"), "in_proj_weight", 0.5
    ),
    "pruned norm": lambda m: prune.custom_from_mask(
        _target(m, "norm1"), "weight", torch.arange(E) % 3 > 0
    ),
}


def assert_same_steps(reference: nn.Module, fast: nn.Module, args: list[Tensor]) -> None:
    """Results and gradients in fp64, without copies, which pruned modules do not support."""
    values = []
    for module in (reference, fast):
        module.zero_grad()
        leaves = [x.double().requires_grad_() for x in args]
        out = first(module(*leaves))
        out.sin().sum().backward()
        gradients = {n: p.grad for n, p in module.named_parameters()}
        assert all(g is not None for g in gradients.values())
        values.append([out, *(x.grad for x in leaves), gradients])
    torch.testing.assert_close(values[1], values[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameters(change: str, training: bool) -> None:
    """Norms of weights, pruning and other parametrizations keep their effect and gradients."""
    name = "TransformerEncoderLayer"
    reference, fast = (module.double() for module in twins(name, batch_first=True))
    args = list(inputs(name))
    before = fast(args[0].double())
    for module in (reference, fast):
        torch.manual_seed(1)
        CHANGES[change](module)
        module.train(training)
    assert list(fast.state_dict()) == list(reference.state_dict())
    fast.load_state_dict(reference.state_dict())
    assert_same_steps(reference, fast, args)
    after, _ = (module(args[0].double()) for module in (fast, reference))  # spectral norms iterate
    assert torch.allclose(after, before) is (change in KEEP_VALUES)
    assert_same_steps(reference, fast, args)


def test_cached_parametrizations() -> None:
    reference, fast = (
        module.double() for module in twins("TransformerDecoderLayer", batch_first=True)
    )
    for module in (reference, fast):
        _weight_norm(module)
    with parametrize.cached():
        assert_same_steps(reference, fast, list(inputs("TransformerDecoderLayer")))


@each_class
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functional_call(name: str) -> None:
    """Given parameters, tied or not, leave the module's own unchanged."""
    reference, fast = twins(name, batch_first=True)
    args = inputs(name)
    others = {n: torch.randn_like(p) for n, p in fast.named_parameters()}
    inside = copy.deepcopy(fast.state_dict())
    expected, got = (first(torch.func.functional_call(m, others, args)) for m in (reference, fast))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for n, value in fast.state_dict().items():
        assert torch.equal(value, inside[n])
    # Ensembles: one module, stacked parameters.
    stacked, buffers = torch.func.stack_module_state([fast, copy.deepcopy(fast)])  # type: ignore[arg-type]
    each = torch.func.vmap(
        lambda p, b: first(torch.func.functional_call(fast, (p, b), args)), randomness="different"
    )(stacked, buffers)
    torch.testing.assert_close(each[0], first(fast(*args)))


@each_class
def test_skip_init_meta_and_to_empty(name: str) -> None:
    reference, fast = twins(name, batch_first=True)
    if name == "MultiheadAttention":
        empty = utils.skip_init(fnn.MultiheadAttention, E, H, batch_first=True)
    else:
        with torch.device("meta"):
            empty = build(fnn, name, batch_first=True)
        assert all(p.is_meta for p in empty.parameters())
        shapes = first(empty(*(x.to("meta") for x in inputs(name)))).shape
        assert shapes == first(fast(*inputs(name))).shape
        empty.to_empty(device="cpu")
    assert type(empty) is type(fast)
    empty.load_state_dict(reference.state_dict())
    assert_equivalent(reference, empty, *inputs(name))


# -- conversions and copies -----------------------------------------------------------------------
@contextlib.contextmanager
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("how", [contextlib.nullcontext, _swapping], ids=["in place", "swapped"])
@each_class
def test_dtypes(name: str, how: Callable[[], Any]) -> None:
    reference, fast = twins(name, batch_first=True)
    args = inputs(name)
    with how():
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            reference.to(dtype), fast.to(dtype)
            assert {p.dtype for p in fast.parameters()} == {dtype}
            assert_equivalent(reference, fast, *(x.to(dtype) for x in args))


@each_class
def test_copies_and_files(name: str) -> None:
    """deepcopy, pickle, torch.save (module and state_dict) and sharing keep fastattn's classes."""
    reference, fast = twins(name, batch_first=True)
    args = inputs(name)
    expected = first(fast(*args))
    file, state = io.BytesIO(), io.BytesIO()
    torch.save(fast, file)
    torch.save(fast.state_dict(), state)
    file.seek(0), state.seek(0)
    loaded = build(fnn, name, batch_first=True)
    loaded.load_state_dict(torch.load(state, weights_only=True), assign=True)
    copies = [
        copy.deepcopy(fast), copy.copy(fast), pickle.loads(pickle.dumps(fast)),
        torch.load(file, weights_only=False), loaded, copy.deepcopy(fast).share_memory(),
    ]  # fmt: skip
    for other in copies:
        assert [type(m) for m in other.modules()] == [type(m) for m in fast.modules()]
        assert torch.equal(first(other(*args)), expected)
    # `convert` converts a whole module of PyTorch's loaded from a file.
    converted = fnn.convert(pickle.loads(pickle.dumps(reference)))
    assert torch.equal(first(converted(*args)), expected)


@each_class
def test_training_both_gives_the_same_model(name: str) -> None:
    """A few steps of an optimizer, with some parameters frozen and some tied."""
    reference, fast = (module.double() for module in twins(name, batch_first=True))
    args = [x.double() for x in inputs(name)]
    losses = []
    for module in (reference, fast):
        parameters = list(module.parameters())
        parameters[-1].requires_grad_(False)
        if name != "MultiheadAttention":
            layers = [m for n, m in module.named_modules() if n.endswith("linear1")]
            layers[-1].weight = layers[0].weight
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 0.01)
        values = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = first(module(*args)).square().mean()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        losses.append(values)
        assert parameters[-1].grad is None
    assert losses[1] == pytest.approx(losses[0], rel=1e-9) and losses[0][-1] < losses[0][0]


# -- empty inputs ---------------------------------------------------------------------------------
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@each_class
def test_empty_batches(name: str, batch_first: bool, training: bool) -> None:
    """Results without elements; gradients of parameters are zeros, not None."""
    reference, fast = twins(name, batch_first=batch_first)
    args = [x[:0] if batch_first else x[:0].transpose(0, 1) for x in inputs(name)]
    for module in (reference, fast):
        leaves = [x.clone().requires_grad_() for x in args]
        module.zero_grad()
        out = first(module.train(training)(*leaves))
        assert out.numel() == 0 and out.shape[-1] == E
        out.backward(torch.rand_like(out))
        for x in (*leaves, *module.parameters()):
            assert x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))
    assert first(fast(*args)).shape == first(reference(*args)).shape


@pytest.mark.parametrize("need_weights", [True, False])
def test_no_queries(need_weights: bool) -> None:
    reference, fast = twins("MultiheadAttention", batch_first=True)
    keys = torch.randn(B, S, E)
    query = torch.randn(B, 0, E)
    padding = random_mask(B, S)
    for module in (reference, fast):
        out, weights = module(
            query, keys, keys, key_padding_mask=padding, need_weights=need_weights
        )
        assert out.shape == (B, 0, E)
        assert not need_weights or weights.shape == (B, 0, S)


def test_a_parametrized_output_projection_is_computed_once_a_call() -> None:
    class Counted(nn.Module):
        calls = 0

        def forward(self, weight: Tensor) -> Tensor:
            type(self).calls += 1
            return weight

    attention = fnn.MultiheadAttention(16, 2, batch_first=True)
    parametrize.register_parametrization(attention.out_proj, "weight", Counted())
    Counted.calls = 0
    x = torch.randn(2, 3, 16)
    attention(x, x, x, need_weights=False)
    assert Counted.calls == 1
