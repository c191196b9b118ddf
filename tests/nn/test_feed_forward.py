"""PositionWiseFFN compared with two linear layers and an activation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from module_equivalence import assert_equivalent
from torch import nn

import fastattn.nn as fnn

E = 16
B, M = 3, 5


class NaiveFFN(nn.Module):
    def __init__(self, linear1, linear2, activation):
        super().__init__()
        self.linear1, self.linear2 = linear1, linear2
        self.activation = activation

    def forward(self, x):
        return self.linear2(self.activation(self.linear1(x)))


def gated(function):
    def activation(hidden):
        gate, up = hidden[..., : hidden.shape[-1] // 2], hidden[..., hidden.shape[-1] // 2 :]
        return function(gate) * up

    return activation


ACTIVATIONS = {
    "relu": torch.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu, "reglu": gated(torch.relu), "geglu": gated(F.gelu), "swiglu": gated(F.silu),
}  # fmt: skip


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "with a hook"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_position_wise_ffn(activation, fused):
    torch.manual_seed(0)
    bias = activation not in ("silu", "geglu")
    fast = fnn.PositionWiseFFN(E, 24, 10, activation=activation, dropout=0.5, bias=bias).eval()
    if not fused:
        fast.linear1.register_forward_hook(lambda *_: None)
    linears = copy.deepcopy(fast.linear1), copy.deepcopy(fast.linear2)
    reference = NaiveFFN(*linears, ACTIVATIONS[activation])
    assert_equivalent(reference, fast, torch.randn(B, M, E))
    x = torch.ones(64, E)
    fast.train()
    torch.manual_seed(1)
    first = fast(x)
    torch.manual_seed(1)
    assert torch.equal(first, fast(x)) and not torch.equal(first, fast(x))
    # Equal rows differ only in their dropout; their mean is the result of evaluation.
    assert not torch.equal(first[0], first[1])


def test_position_wise_ffn_rejects():
    with pytest.raises(ValueError, match=r"activation must be one of relu, .* got 'tanh'"):
        fnn.PositionWiseFFN(E, 24, activation="tanh")
    with pytest.raises(ValueError, match=r"x must be \[..., 16\], got \[3, 8\]"):
        fnn.PositionWiseFFN(E, 24)(torch.randn(3, 8))


@pytest.mark.parametrize("name", ["reglu", "geglu", "swiglu", "geglu_tanh"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_layers_with_gated_activations(name, norm_first):
    torch.manual_seed(0)
    layer = fnn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    layer.linear1 = nn.Linear(8, 24)
    layer.activation = fnn.GatedActivation(name)
    stack = fnn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        fused = stack(x)
        packed = stack(x, src_lengths=[5, 5])
        for module in stack.layers:  # a hook makes the layer call its modules
            module.activation.register_forward_hook(lambda *_: None)
        unfused = stack(x)
    torch.testing.assert_close(fused, unfused, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(packed, unfused, rtol=1e-5, atol=1e-6)
    functions = {
        "reglu": F.relu, "geglu": F.gelu, "swiglu": F.silu,
        "geglu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    }  # fmt: skip
    gate, up = torch.randn(2, 3), torch.randn(2, 3)
    got = fnn.GatedActivation(name)(torch.cat([gate, up], dim=1))
    torch.testing.assert_close(got, functions[name](gate) * up)
    with pytest.raises(ValueError, match=r"name must be one of .* got 'glu'"):
        fnn.GatedActivation("glu")
