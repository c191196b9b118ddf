"""`set_heads`: attention whose heads have another number, size or scale than torch's."""

import math

import pytest
import torch
from torch import nn

import fastattn
import fastattn.nn as fnn
from fastattn.nn.conversion import convert
from fastattn.nn.positional_attention import set_positions

E, H, D = 18, 4, 6  # 4 does not divide 18


def attention(**options) -> fnn.MultiheadAttention:
    torch.manual_seed(0)
    module = fnn.MultiheadAttention(E, 1, batch_first=True, **options)
    fnn.set_heads(module, num_heads=H, head_dim=D, scale=0.7)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def expected(module, query, memory, mask) -> tuple[torch.Tensor, torch.Tensor]:
    weights = module.in_proj_weight.chunk(3)
    biases = (0.0,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (
        (x @ weight.T + bias).unflatten(-1, (H, D)).transpose(1, 2)
        for x, weight, bias in zip((query, memory, memory), weights, biases, strict=True)
    )
    scores = (q @ k.mT * 0.7).masked_fill(mask, -math.inf)
    p = scores.softmax(-1)
    return module.out_proj((p @ v).transpose(1, 2).flatten(-2)), p


@pytest.mark.parametrize("bias", [True, False])
def test_heads_of_any_number_and_size(bias):
    module = attention(bias=bias)
    assert module.in_proj_weight.shape == (3 * H * D, E)
    assert module.out_proj.weight.shape == (E, H * D)
    query, memory = torch.randn(2, 3, E), torch.randn(2, 5, E)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    for q, kv, mask in ((query, memory, padding), (query, query, None)):
        blocked = torch.tensor(False) if mask is None else mask[:, None, None]
        wanted, weights = expected(module, q, kv, blocked)
        got, _ = module(q, kv, kv, key_padding_mask=mask, need_weights=False)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        got, p = module(q, kv, kv, key_padding_mask=mask, average_attn_weights=False)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(p, weights, rtol=1e-4, atol=1e-5)


def test_positions_keep_heads_and_scale():
    module = attention()
    layer = nn.Module()
    layer.self_attn = module
    positions = fnn.T5Positions(E, H, buckets=8, max_distance=6)
    set_positions(layer, positions)
    x = torch.randn(2, 7, E)
    distances = torch.arange(7) - torch.arange(7)[:, None]
    bias = positions.bias(distances.flatten()).unflatten(1, (7, 7))  # [H, M, N]
    q, k, v = (x @ module.in_proj_weight.T + module.in_proj_bias).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in (q, k, v))
    p = (q @ k.mT * 0.7 + bias).softmax(-1)
    wanted = module.out_proj((p @ v).transpose(1, 2).flatten(-2))
    for need_weights in (True, False):
        got, weights = module(x, x, x, need_weights=need_weights, average_attn_weights=False)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        if need_weights:
            torch.testing.assert_close(weights, p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", [None, "t5"])
@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_packs_and_decodes_with_its_heads(positions, training):
    torch.manual_seed(0)
    model = fnn.Transformer(
        16, 2, 1, 2, 24, dropout=0.0, batch_first=True, norm_first=True, positions=positions
    )
    with torch.no_grad():
        unchanged = model.train(training)(torch.ones(1, 2, 16), torch.ones(1, 2, 16))
    fnn.set_heads(model, head_dim=6, scale=1.0)
    model.train(training)
    src, tgt = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    with torch.no_grad():
        padded = model(
            src, tgt, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        packed = model(src, tgt, tgt_mask=mask, src_lengths=[5, 2], tgt_lengths=[4, 4])
        assert not torch.allclose(model(torch.ones(1, 2, 16), torch.ones(1, 2, 16)), unchanged)
        memory = model.encoder(src, src_key_padding_mask=padding)
        cache = model.decoder.init_cache(memory, memory_key_padding_mask=padding, max_length=4)
        steps = torch.cat([model.decoder.step(tgt[:, t : t + 1], cache) for t in range(4)], 1)
    torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(steps, padded, rtol=1e-4, atol=1e-5)


def test_unpatched_modules_have_heads_of_torch():
    model = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    for options, got, back in (
        ({"scale": 1.0}, r"2 \* 8 and 1", {"scale": 8**-0.5}),
        ({"head_dim": 6}, r"2 \* 6 and 0\.354", {"head_dim": 8}),
        ({"num_heads": 4, "head_dim": 4, "scale": 0.7}, r"4 \* 4 and 0\.7", {"scale": 0.5}),
    ):
        convert(model)
        fnn.set_heads(model, **options)
        with pytest.raises(RuntimeError, match=rf"self_attn must have num_heads .* got {got}:"):
            fastattn.unpatch(model)
        assert type(model.self_attn) is fnn.MultiheadAttention
        fnn.set_heads(model, **back)
        expected = model(x)
        fastattn.unpatch(model)
        assert type(model.self_attn) is nn.MultiheadAttention
        torch.testing.assert_close(model(x), expected)


def test_what_cannot_have_other_heads_is_refused():
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        fnn.set_heads(fnn.MultiheadAttention(8, 2), head_dim=0)
    with pytest.raises(ValueError, match="without kdim, vdim"):
        fnn.set_heads(fnn.MultiheadAttention(8, 2, kdim=4), scale=1.0)
    for module in (nn.MultiheadAttention(8, 2), fnn.ScoredMultiheadAttention(8, 2)):
        with pytest.raises(TypeError, match=r"heads can be set for fastattn's .* got "):
            fnn.set_heads(nn.Sequential(module), scale=1.0)
    with pytest.raises(NotImplementedError, match=r"its own scale .* got torch\.int64"):
        x = torch.ones(1, 2, E, dtype=torch.int64)
        attention()(x, x, x)
