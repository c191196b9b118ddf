"""Drop-in modules as PyTorch modules: parameters, copies, files; convert; torch.jit.script."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from module_equivalence import assert_same
from torch import Tensor, nn

import fastattn
import fastattn.nn as fnn

E, H = 16, 4
B, M, N = 3, 5, 7


def test_convert_changes_torchs_classes_and_no_others():
    class Custom(nn.LayerNorm):
        pass

    model = nn.Sequential(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 24, batch_first=True), 2),
        Custom(E),
        nn.RMSNorm(E),
    ).eval()
    x = torch.randn(B, M, E)
    expected = model(x)
    parameters = list(model.parameters())
    assert fnn.convert(model) is model
    assert type(model[0]) is fnn.TransformerEncoder and not model[0].use_nested_tensor
    assert type(model[0].layers[1].self_attn) is fnn.MultiheadAttention
    assert type(model[0].layers[1].norm2) is fnn.LayerNorm
    assert type(model[1]) is Custom and type(model[2]) is fnn.RMSNorm
    assert all(x is y for x, y in zip(parameters, model.parameters(), strict=True))
    assert_same("converted", model(x), expected, expected.double())


def test_torch_fx_does_not_trace_into_converted_modules():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(E, H, 24, dropout=0.0, batch_first=True)
            self.attention = nn.MultiheadAttention(E, H, batch_first=True)
            self.norm = nn.LayerNorm(E)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            x = self.norm(self.layer(x, src_key_padding_mask=padding))
            return self.attention(x, x, x)[0]

    inputs = torch.randn(B, M, E), torch.arange(M).expand(B, M) > 2
    model = Model()
    before = torch.fx.symbolic_trace(model).graph.nodes
    traced = torch.fx.symbolic_trace(fnn.convert(model))
    assert [str(node) for node in traced.graph.nodes] == [str(node) for node in before]
    assert torch.equal(traced(*inputs), model(*inputs))
    assert type(traced.layer) is fnn.TransformerEncoderLayer
    fastattn.unpatch(model)
    assert not any("__module__" in module.__dict__ for module in model.modules())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_jit_script_compiles_torchs_forward_and_does_not_change_the_modules():
    class Subclass(fnn.TransformerEncoderLayer):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([fnn.LayerNorm(E), nn.Sequential(fnn.RMSNorm(E))])
            self.transformer = fnn.Transformer(E, H, 1, 1, 24, dropout=0.0)
            self.transformer.encoder.layers[0] = Subclass(E, H, 24, dropout=0.0)

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            for norm in self.norms:
                src = norm(src)
            return self.transformer(src, tgt)

    torch.manual_seed(0)
    model = Model()
    modules = [(module, type(module)) for module in model.modules()]
    scripted = torch.jit.script(model)
    assert [(module, type(module)) for module in model.modules()] == modules
    src, tgt = torch.randn(N, B, E), torch.randn(M, B, E)
    for _ in range(2):
        expected = model(src, tgt)
        assert_same("scripted", scripted(src, tgt), expected, expected.double())
        with torch.no_grad():
            model.norms[1][0].weight.copy_(torch.randn(E))  # the tensors are shared
    signature = inspect.signature(fnn.TransformerEncoder.forward)
    assert "src_lengths" in signature.parameters

    class Doubled(fnn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    module = Doubled(E)
    expected = module(src)
    assert torch.equal(torch.jit.script(module)(src), expected)
