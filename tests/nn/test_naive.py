"""The Transformer of naive.py compared with PyTorch's and with fastattn's."""

import dataclasses
import inspect

import pytest
import torch
from module_equivalence import assert_equivalent, random_mask
from torch import nn

import fastattn.nn as fnn
from fastattn.nn import naive

E, H = 16, 4
B, M, N = 3, 5, 7


def test_naive_defaults_are_torchs():
    parameters = inspect.signature(nn.Transformer).parameters
    for name, value in dataclasses.asdict(naive.Config()).items():
        default = parameters[name].default
        assert value == (default.__name__ if callable(default) else default), name


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_naive_transformer_equals_torch(norm_first, activation):
    torch.manual_seed(0)
    sizes = {
        "d_model": E, "nhead": H, "num_encoder_layers": 2, "num_decoder_layers": 2,
        "dim_feedforward": 24, "dropout": 0.0, "activation": activation, "norm_first": norm_first,
        "bias": not norm_first,
    }  # fmt: skip
    reference = nn.Transformer(**sizes, batch_first=True)
    plain = naive.Transformer(naive.Config(**sizes))
    plain.load_state_dict(reference.state_dict())
    fast = fnn.Transformer(**sizes, batch_first=True)
    fast.load_state_dict(plain.state_dict())
    padding = random_mask(B, N)
    masks = {
        "tgt_mask": torch.ones(M, M, dtype=torch.bool).triu(1), "src_mask": random_mask(N, N),
        "memory_mask": random_mask(M, N), "src_key_padding_mask": padding,
        "tgt_key_padding_mask": random_mask(B, M), "memory_key_padding_mask": padding,
    }  # fmt: skip
    src, tgt = torch.randn(B, N, E), torch.randn(B, M, E)
    assert_equivalent(reference, plain, src, tgt, **masks)
    assert_equivalent(plain, fast, src, tgt, **masks)
    masks["memory_key_padding_mask"] = padding.index_fill(0, torch.tensor([1]), True)
    masks["src_key_padding_mask"] = masks["memory_key_padding_mask"]
    assert_equivalent(plain, fast, src, tgt, **masks)
