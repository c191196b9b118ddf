"""LengthMaskedMultiheadAttention compared with one query and one head at a time."""

import copy
import math

import pytest
import torch
from module_equivalence import assert_equivalent, assert_same
from torch import nn

import fastattn.nn as fnn

E, H, D = 16, 4, 4
B, M, N = 3, 5, 7


class NaiveLengthMasked(nn.Module):
    """One query and one head at a time, over the keys within the length."""

    def __init__(self, fast: nn.Module) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, copy.deepcopy(getattr(fast, name)))

    def forward(self, queries, keys, values, valid_lens=None):
        q, k, v = self.q_proj(queries), self.k_proj(keys), self.v_proj(values)
        rows = []
        for b in range(B):
            for i in range(M):
                length = N if valid_lens is None else int(valid_lens.view(B, -1)[b].expand(M)[i])
                heads = []
                for h in range(H):
                    part = slice(h * D, (h + 1) * D)
                    scores = k[b, :length, part] @ q[b, i, part] / math.sqrt(D)
                    weights = torch.exp(scores) / torch.exp(scores).sum()
                    heads.append(weights @ v[b, :length, part])
                rows.append(torch.cat(heads))
        return self.out_proj(torch.stack(rows).view(B, M, -1))


@pytest.mark.parametrize("lens", ["none", "per sequence", "per query"])
@pytest.mark.parametrize("bias", [True, False])
def test_length_masked_attention(lens, bias):
    torch.manual_seed(0)
    fast = fnn.LengthMaskedMultiheadAttention(6, 10, 12, E, H, dropout=0.5, bias=bias).eval()
    inputs = torch.randn(B, M, 6), torch.randn(B, N, 10), torch.randn(B, N, 12)
    valid_lens = {
        "none": None,
        "per sequence": torch.tensor([3, N, 0]),
        "per query": torch.randint(0, N + 1, (B, M), dtype=torch.int32),
    }[lens]
    assert_equivalent(NaiveLengthMasked(fast), fast, *inputs, valid_lens)
    out, weights = fast(*inputs, valid_lens, need_weights=True)
    assert_same("need_weights", out, out, fast(*inputs, valid_lens).double())
    lengths = torch.full((B, 1), N) if valid_lens is None else valid_lens.view(B, -1)
    allowed = (torch.arange(N) < lengths[..., None]).expand(B, M, N)[:, None].expand_as(weights)
    assert (weights[~allowed] == 0).all() and (weights[allowed] > 0).all()
    total = weights.sum(-1)
    torch.testing.assert_close(total, allowed.any(-1).to(total.dtype))


def test_length_masked_attention_rejects():
    module = fnn.LengthMaskedMultiheadAttention(6, 10, 12, E, H)
    q, k, v = torch.randn(B, M, 6), torch.randn(B, N, 10), torch.randn(B, N, 12)
    for args, message in (
        ((k, k, v), r"queries must be \[B, S, 6\], got \[3, 7, 10\]"),
        ((q, k[:2], v), r"keys must be \[3, S, 10\], got \[2, 7, 10\]"),
        ((q, k, v[:, :4]), "values must have one row for each of the 7 keys, got 4"),
        ((q, k, v, torch.ones(B)), r"valid_lens must be int32 or int64.*got torch.float32 \[3\]"),
        ((q, k, v, torch.ones(B, N, dtype=torch.long)), r"\[3\] or \[3, 5\].*\[3, 7\]"),
    ):
        with pytest.raises(ValueError, match=message):
            module(*args)
    with pytest.raises(ValueError, match="multiple of num_heads, got 16 and 5"):
        fnn.LengthMaskedMultiheadAttention(6, 10, 12, E, 5)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        fnn.LengthMaskedMultiheadAttention(6, 10, 12, E, H, dropout=1.5)
