"""Inputs and parameters made in inference mode: drop-ins accept them where torch's modules do."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastattn

E, H = 16, 4


def _layer(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(E, H, 32, 0.0, **options)


def _attention(batch_first: bool = True) -> nn.Module:
    return nn.MultiheadAttention(E, H, batch_first=batch_first)


def _stack(kind: Any, layer: Any, norm_first: bool) -> Callable[[], nn.Module]:
    return lambda: kind(_layer(layer, batch_first=True, norm_first=norm_first)(), 2)


ENCODER, DECODER = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
# The module, and the number of inputs.
MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "attention": (_attention, 3),
    "attention, sequence first": (lambda: _attention(False), 3),
    "layer norm": (lambda: nn.LayerNorm(E), 1),
    "rms norm": (lambda: nn.RMSNorm(E), 1),
    "transformer": (lambda: nn.Transformer(E, H, 1, 1, 32, 0.0, batch_first=True), 2),
    **{
        f"{name}, pre-norm" if norm_first else name: (make, count)
        for norm_first in (False, True)
        for name, make, count in (
            ("encoder layer", _layer(ENCODER, batch_first=True, norm_first=norm_first), 1),
            ("decoder layer", _layer(DECODER, batch_first=True, norm_first=norm_first), 2),
            ("encoder", _stack(nn.TransformerEncoder, ENCODER, norm_first), 1),
            ("decoder", _stack(nn.TransformerDecoder, DECODER, norm_first), 2),
        )
    },
}


def _results(module: nn.Module, inputs: list[Tensor], grad: bool) -> list[Tensor] | None:
    """The output and the parameters' gradients; None if the call raises."""
    try:
        with torch.set_grad_enabled(grad):
            y = module(*inputs)
            y = y[0] if isinstance(y, tuple) else y
            parameters = [
                p for p in module.parameters() if y.requires_grad and not p.is_inference()
            ]
            grads = torch.autograd.grad(y.square().sum(), parameters) if parameters else ()
    except RuntimeError:
        return None
    return [y, *grads]


@pytest.mark.parametrize("made", ["inputs", "memory", "parameters", "both"])
@pytest.mark.parametrize("name", MODULES)
def test_accepted_where_torch_accepts(name: str, made: str) -> None:
    torch.manual_seed(0)
    make, count = MODULES[name]
    with torch.inference_mode(made in ("parameters", "both")):
        module = make()
        fast = copy.deepcopy(module)
        fastattn.patch(fast, quiet=True)
    normal = torch.randn(2, 5, E)
    with torch.inference_mode():
        x = torch.randn(2, 5, E)
    inputs = {
        "inputs": [x] * count, "memory": [normal, *[x] * (count - 1)],
        "parameters": [normal] * count, "both": [x] * count,
    }[made]  # fmt: skip
    for training, grad in itertools.product((True, False), repeat=2):
        module.train(training), fast.train(training)
        expected, actual = (_results(m, inputs, grad) for m in (module, fast))
        if expected is None:
            continue
        assert actual is not None
        torch.testing.assert_close(actual[0], expected[0])
        assert actual[0].is_inference() is expected[0].is_inference() is False
        if made in ("inputs", "memory"):
            assert actual[0].requires_grad is expected[0].requires_grad is grad
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["attention", "encoder layer", "encoder"])
def test_padding_masks(name: str, dtype: torch.dtype) -> None:
    make, count = MODULES[name]
    module = make()
    with torch.inference_mode():
        mask = (torch.arange(5) >= torch.tensor([[5], [3]])).to(dtype)
    x = torch.randn(2, 5, E)
    argument = "key_padding_mask" if count == 3 else "src_key_padding_mask"

    def results() -> Any:
        y = module(*[x] * count, **{argument: mask})
        y = y[0] if isinstance(y, tuple) else y
        return [y, *torch.autograd.grad(y.square().sum(), list(module.parameters()))]

    expected = results()
    fastattn.patch(module, quiet=True)
    torch.testing.assert_close(results(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("positions", ["alibi", "t5", "rotary"])
def test_layers_with_positions(positions: Any) -> None:
    layer = fastattn.nn.TransformerEncoderLayer(E, H, 32, 0.0, positions=positions)
    with torch.inference_mode():
        x = torch.randn(5, 2, E)
    actual, expected = _results(layer, [x], True), _results(layer, [x.clone()], True)
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual, expected)
