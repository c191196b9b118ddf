"""Fused blocks see what is in a module now: plain tensors in place of its parameters, for one."""

import copy

import pytest
import torch
from torch import Tensor, nn

import fastattn.nn


def _with_plain_tensors(layer: nn.Module) -> nn.Module:
    """As somebody does who computes the weights: the parameters go, tensors take their names."""
    layer = copy.deepcopy(layer)
    for name in ("linear1", "linear2", "norm1", "norm2", "self_attn.out_proj"):
        module = layer.get_submodule(name)
        for attribute in ("weight", "bias"):
            value: Tensor = getattr(module, attribute).detach()
            delattr(module, attribute)
            setattr(module, attribute, value * 1.25)
    return layer


@pytest.mark.parametrize("norm_first", [False, True])
def test_tensors_in_place_of_parameters(norm_first: bool) -> None:
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    ours = fastattn.nn.TransformerEncoderLayer(16, 2, 32, **options)
    torchs = nn.TransformerEncoderLayer(16, 2, 32, **options)
    torchs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 16)
    before = ours(x)
    after, expected = _with_plain_tensors(ours)(x), _with_plain_tensors(torchs)(x)
    torch.testing.assert_close(after, expected)
    assert not torch.allclose(after, before)
