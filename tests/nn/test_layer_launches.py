"""The kernels that a layer's forward launches: fastattn's ops and no elementwise kernel."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import nn as fnn


class Launches(TorchDispatchMode):
    """Names of the ops that compute something: not of views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name != "aten::_unsafe_view":
            self.names.append(func._schema.name.removeprefix("aten::"))
        return out


def launches(module: nn.Module, *args: Tensor, **options: object) -> list[str]:
    with Launches() as recorded:
        module(*args, **options)
    return recorded.names


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_layers(kind: str, norm_first: bool, activation: str, dropout: float) -> None:
    settings = {"batch_first": True, "norm_first": norm_first, "activation": activation}
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    norm = ["fastattn::layer_norm_fwd"] * norm_first
    linear = "fastattn::linear_fwd"
    attention = ["fastattn::attention_fwd", linear, "fastattn::add_layer_norm_fwd"]
    last = ["fastattn::ffn_fwd"] + ["fastattn::add_layer_norm_fwd"] * (not norm_first)
    if kind == "encoder":
        encoder = fnn.TransformerEncoderLayer(16, 2, 32, dropout, **settings)  # type: ignore[arg-type]
        names = launches(encoder, x)
        expected = [*norm, linear, *attention, *last]
    else:
        decoder = fnn.TransformerDecoderLayer(16, 2, 32, dropout, **settings)  # type: ignore[arg-type]
        names = launches(decoder, x, memory)
        expected = [*norm, linear, *attention, linear, linear, *attention, *last]
    seed = [name for name in names if name not in {*expected}]
    assert [name for name in names if name in {*expected}] == expected
    # One seed is drawn for all the dropouts of a layer.
    assert seed == (["randint"] if dropout else [])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_layers_with_norms_that_are_not_fused(norm_first: bool, dropout: float) -> None:
    """The sum before the norm is one op, with the bits of the layer's seed."""
    layer = fnn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=norm_first)
    layer.norm1, layer.norm2 = fnn.RMSNorm(16), fnn.RMSNorm(16)
    names = launches(layer, torch.randn(2, 5, 16))
    norm, add = "fastattn::rms_norm_fwd", "fastattn::add_layer_norm_fwd"
    linear = "fastattn::linear_fwd"
    expected = [linear, "fastattn::attention_fwd", linear, add, norm, "fastattn::ffn_fwd"]
    expected = [norm, *expected] if norm_first else [*expected, add, norm]
    assert [name for name in names if name in {*expected}] == expected
    others = [name for name in names if name not in {*expected, "promote_types"}]
    assert others == ["randint"] * (dropout > 0.0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_packed_layers(norm_first: bool) -> None:
    """Packed execution adds only the row indices, the gather and the scatter."""
    layer = fnn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first)
    short, long = (
        fnn.TransformerEncoder(layer, depth, enable_nested_tensor=False) for depth in (1, 3)
    )
    x = torch.randn(2, 5, 16)
    once, thrice = (launches(stack, x, src_lengths=[3, 5]) for stack in (short, long))
    layers = launches(layer, x)
    assert sorted(thrice) == sorted(once + layers * 2)
