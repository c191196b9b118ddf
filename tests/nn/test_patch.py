"""`patch`, `unpatch` and the context manager on torch's models: results stay, changes revert."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fastattn
from fastattn import nn as fnn


class Block(nn.Module):
    """A user's model: torch's modules under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.scale = nn.RMSNorm(16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.scale(self.encoder(self.norm(x)))


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    return Block()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def result(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and the gradient of every parameter."""
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


def kinds(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("training", [True, False])
def test_same_results_and_the_same_tensors(model: Block, x: Tensor, training: bool) -> None:
    model.train(training)
    before, state, names = result(model, x), model.state_dict(keep_vars=True), kinds(model)
    report = fastattn.patch(model, quiet=True)
    assert isinstance(model.attention, fnn.MultiheadAttention)
    assert isinstance(model.encoder.layers[1].norm2, fnn.LayerNorm)
    assert isinstance(model.scale, fnn.RMSNorm)
    assert set(report.replaced) == {
        name for name, kind in names.items() if hasattr(fnn, kind.__name__)
    }
    assert not report.kept
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state)
    assert all(after[name] is state[name] for name in state)
    for actual, expected in zip(result(model, x), before, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    fastattn.unpatch(model)
    assert kinds(model) == names
    assert model.encoder.use_nested_tensor
    for actual, expected in zip(result(model, x), before, strict=True):
        assert torch.equal(actual, expected)


def test_context_manager_also_after_an_error(model: Block) -> None:
    names = kinds(model)
    with pytest.raises(KeyError), fastattn.patch(model, quiet=True):
        assert isinstance(model.norm, fnn.LayerNorm)
        raise KeyError
    assert kinds(model) == names


def test_a_context_reverts_only_its_own_changes(model: Block) -> None:
    fastattn.patch(model.encoder, quiet=True)
    with fastattn.patch(model, quiet=True) as report:
        assert isinstance(model.norm, fnn.LayerNorm)
        assert "encoder" not in report.replaced
    assert type(model.norm) is nn.LayerNorm
    assert type(model.encoder.layers[0].norm1) is fnn.LayerNorm
    fastattn.unpatch(model)
    assert type(model.encoder) is nn.TransformerEncoder


def test_later_changes_survive_unpatch(model: Block, x: Tensor) -> None:
    fastattn.patch(model, quiet=True)
    parametrizations.weight_norm(model.norm)
    expected = model(x)
    with pytest.raises(RuntimeError, match=r"norm must be fastattn's LayerNorm, .* Param"):
        fastattn.unpatch(model)
    assert isinstance(model.attention, fnn.MultiheadAttention)
    assert torch.equal(model(x), expected)
    nn.utils.parametrize.remove_parametrizations(model.norm, "weight")
    fastattn.unpatch(model)
    assert type(model.norm) is nn.LayerNorm


def test_patching_twice_and_unpatching(model: Block) -> None:
    names = kinds(model)
    fastattn.patch(model, quiet=True)
    assert not fastattn.patch(model, quiet=True).replaced
    fastattn.unpatch(model)
    fastattn.unpatch(model)
    assert kinds(model) == names


def test_unpatch_reverts_convert(model: Block, x: Tensor) -> None:
    names, before = kinds(model), result(model, x)
    fnn.convert(model)
    assert kinds(model) != names
    made = fnn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1)  # of fastattn's classes
    fastattn.unpatch(nn.ModuleList([model, made]))
    assert kinds(model) == names and model.encoder.use_nested_tensor
    for actual, expected in zip(result(model, x), before, strict=True):
        assert torch.equal(actual, expected)
    assert isinstance(made.layers[0].norm1, fnn.LayerNorm)


def test_unpatch_keeps_modules_of_fastattn() -> None:
    model = nn.Sequential(fnn.LayerNorm(4), nn.LayerNorm(4))
    fastattn.patch(model, quiet=True)
    fastattn.unpatch(model)
    assert type(model[0]) is fnn.LayerNorm
    assert type(model[1]) is nn.LayerNorm


class MyNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class MyRMSNorm(nn.Module):
    pass


class MyAttention(nn.Module):
    pass


def test_the_report_lists_what_is_not_patched_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    parametrized = parametrizations.weight_norm(nn.LayerNorm(4))
    replaced = nn.LayerNorm(4)
    replaced.forward = lambda x: x  # type: ignore[method-assign, assignment]
    model = nn.ModuleDict(
        {
            "custom": MyNorm(4), "foreign": MyRMSNorm(), "attention": MyAttention(),
            "parametrized": parametrized, "replaced": replaced,
            "scripted": torch.jit.script(nn.Linear(2, 2)), "plain": nn.LayerNorm(4),
        }
    )  # fmt: skip
    report = fastattn.patch(model)
    assert report.replaced == {"plain": "LayerNorm"}
    assert report.kept == {
        "custom": "is MyNorm, a subclass of nn.LayerNorm",
        "foreign": "is MyRMSNorm, not a norm of torch.nn",
        "attention": "is MyAttention, which fastattn has no drop-in for",
        "parametrized": "is parametrized",
        "replaced": "has its own forward",
        "scripted": "is compiled by torch.jit",
    }
    printed = capsys.readouterr().out
    assert printed.startswith("fastattn.patch: 1 modules of ModuleDict")
    for name, why in report.kept.items():
        assert name in printed
        assert why in printed


def test_modules_of_fastattn_are_not_reported() -> None:
    model = fnn.TransformerEncoderLayer(16, 2, 32, positions="t5")
    report = fastattn.patch(model, quiet=True)
    assert not report.kept and not report.replaced


@pytest.mark.parametrize("function", [fastattn.patch, fastattn.unpatch])
def test_not_a_model(function: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        function({})
    with pytest.raises(TypeError, match=r"model must not be compiled by torch\.jit"):
        function(torch.jit.script(nn.Linear(2, 2)))
