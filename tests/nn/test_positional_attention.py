"""ALiBi, T5's and rotary positions: attention and stacks compared with the written-out formulas."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from fastattn import nn as fnn
from fastattn.nn.positional_attention import set_positions
from fastattn.nn.relative import AttentionPositions, alibi_slopes

B, S, E, H = 3, 6, 16, 2
D = E // H
KINDS = ("alibi", "t5", "rotary")
SRC_LENGTHS, TGT_LENGTHS = [7, 3, 0], [5, 2, 4]


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


def padding(lengths: list[int], size: int) -> Tensor:
    return torch.arange(size) >= torch.tensor(lengths)[:, None]


# -- one attention --------------------------------------------------------------------------------
def dense(
    module: fnn.PositionalMultiheadAttention, x: Tensor, blocked: Tensor, earlier_only: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and weights by the formulas of the papers; x [B, S, E], blocked [B, 1, S, S]."""
    q, k, v = (
        y.unflatten(-1, (H, D)).transpose(1, 2)
        for y in nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    )
    size = x.shape[1]
    d = torch.arange(size) - torch.arange(size)[:, None]  # [S, S], key minus query
    bias = torch.zeros((), dtype=x.dtype)
    positions = module.positions
    if isinstance(positions, fnn.AlibiPositions):
        # Two heads: 2^-4 and 2^-8.
        bias = -torch.tensor([2**-4, 2**-8], dtype=x.dtype)[:, None, None] * d.abs()
    elif isinstance(positions, fnn.T5Positions):
        # All distances here have a bucket of their own.
        bucket = (-d).clamp(min=0) if earlier_only else d.abs() + 16 * (d > 0)
        bias = positions.relative_bias[:, bucket]
    else:
        theta = 10_000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        turn = torch.polar(torch.ones(()), torch.arange(size)[:, None] * theta.float())  # [S, D/2]
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn).flatten(-2)
            for y in (q, k)
        )
    scores = (q @ k.mT / D**0.5 + bias).masked_fill(blocked, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    return module.out_proj((weights @ v).transpose(1, 2).flatten(-2)), weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", ["none", "causal", "both", "additive"])
def test_attention_equals_its_formula(kind: str, mask: str) -> None:
    torch.manual_seed(0)
    module = fnn.PositionalMultiheadAttention(E, H, positions=kind, batch_first=True)
    x = torch.randn(B, S, E, requires_grad=True)
    blocked = torch.zeros(B, 1, S, S, dtype=torch.bool)
    given: dict = {}
    if mask != "none":
        blocked = blocked | causal(S)
        given["attn_mask"] = causal(S)
    if mask == "causal":
        given["is_causal"] = True
    if mask in ("both", "additive"):
        given["key_padding_mask"] = padding([6, 2, 0], S)
        blocked = blocked | given["key_padding_mask"][:, None, None]
    if mask == "additive":
        given = {
            name: torch.zeros(m.shape).masked_fill(m, float("-inf")) for name, m in given.items()
        }
    expected, expected_weights = dense(module, x, blocked)
    out, none = module(x, x, x, need_weights=False, **given)
    seen, weights = module(x, x, x, average_attn_weights=False, **given)
    assert none is None
    torch.testing.assert_close(weights, expected_weights, atol=2e-6, rtol=1e-4)
    live = ~blocked.all(-1).squeeze(1)[..., None].expand_as(x)  # the formula's gradient is NaN else
    cotangent = torch.randn(B, S, E) * live
    inputs = [x, *module.parameters()]
    wanted = None
    if mask in ("none", "causal"):
        wanted = torch.autograd.grad((expected * cotangent).sum(), inputs)
    for result in (out, seen):
        torch.testing.assert_close(result, expected, atol=2e-6, rtol=1e-4)
        got = torch.autograd.grad((result * cotangent).sum(), inputs)
        assert all(g.isfinite().all() for g in got)
        for a, b in zip(got, wanted or got, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    averaged = module(x, x, x, **given)[1]
    torch.testing.assert_close(averaged, expected_weights.mean(1), atol=2e-6, rtol=1e-4)
    module.batch_first = False
    y = x.transpose(0, 1)
    sequence_first = module(y, y, y, need_weights=False, **given)[0]
    torch.testing.assert_close(sequence_first.transpose(0, 1), expected, atol=2e-6, rtol=1e-4)


def test_t5_in_a_decoder_has_buckets_for_earlier_keys_alone() -> None:
    torch.manual_seed(0)
    layer = fnn.TransformerDecoderLayer(E, H, 32, positions="t5", batch_first=True).eval()
    x = torch.randn(B, S, E)
    out, _ = layer.self_attn(x, x, x, attn_mask=causal(S), is_causal=True, need_weights=False)
    expected, _ = dense(layer.self_attn, x, causal(S).expand(B, 1, S, S), earlier_only=True)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-4)
    assert not isinstance(layer.multihead_attn, fnn.PositionalMultiheadAttention)


def test_the_slopes_are_those_of_the_paper() -> None:
    eight = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8).tolist() == eight
    assert alibi_slopes(1).tolist() == [2.0**-8]
    twelve = torch.tensor(eight + [2.0**-i for i in (0.5, 1.5, 2.5, 3.5)])
    torch.testing.assert_close(alibi_slopes(12), twelve)
    sixteen = torch.tensor([2.0 ** (-i / 2) for i in range(1, 17)])
    torch.testing.assert_close(alibi_slopes(16), sixteen)
    assert len(alibi_slopes(3)) == 3 and len(alibi_slopes(31)) == 31


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    positions = fnn.RotaryPositions(8, 1)
    q, k = torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    at = torch.arange(5)
    scores = []
    for shift in (0, 40):
        a, b = positions.rotated(q, k, at + shift)
        scores.append(a[:, 0] @ b[:, 0].T)
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=1e-4)
    assert (scores[0] - q[:, 0] @ k[:, 0].T).abs().max() > 1e-2
    torch.testing.assert_close(scores[0].diag(), (q * k).sum((1, 2)))


@pytest.mark.parametrize(("kind", "heads"), [("alibi", 12), ("rotary", 3)])
def test_tables_keep_fp32_values_when_a_model_is_converted(kind: str, heads: int) -> None:
    def made() -> fnn.PositionalMultiheadAttention:
        return fnn.PositionalMultiheadAttention(24, heads, positions=kind)

    expected = made().positions.table
    assert not torch.equal(expected.bfloat16().float(), expected)
    converted = made().bfloat16()
    assert converted.in_proj_weight.dtype is torch.bfloat16
    with torch.device("meta"):
        meta = made()
    for module in (converted, meta.to_empty(device="cpu"), copy.deepcopy(converted)):
        assert torch.equal(module.positions.table, expected)
        assert "positions.table" not in module.state_dict()
    x = torch.randn(2, 4, 24, dtype=torch.bfloat16)
    assert converted(x, x, x, need_weights=False)[0].dtype is torch.bfloat16


def test_weights_are_initialised_again_as_by_torch() -> None:
    module = fnn.PositionalMultiheadAttention(E, H, positions="t5")
    for each in (module, expected := nn.MultiheadAttention(E, H)):
        torch.manual_seed(1)
        each._reset_parameters()
    assert torch.equal(module.in_proj_weight, expected.in_proj_weight)
    # torch's layers still call its `forward`.
    layer = nn.TransformerEncoderLayer(E, H, dropout=0.0).eval()
    layer.self_attn = module.eval()
    x = torch.randn(S, B, E)
    with torch.no_grad():
        y = layer.norm1(x + module(x, x, x, need_weights=False)[0])
        torch.testing.assert_close(layer(x), layer.norm2(y + layer._ff_block(y)))


def test_modules_with_other_options() -> None:
    table = fnn.T5Positions(E, H, causal=True, buckets=4, max_distance=8)
    module = fnn.PositionalMultiheadAttention(E, H, positions=table, batch_first=True)
    assert module.state_dict()["positions.relative_bias"].shape == (H, 4)
    slow = fnn.PositionalMultiheadAttention(
        E, H, positions=fnn.RotaryPositions(E, H, base=100.0), batch_first=True
    )
    torch.testing.assert_close(slow.positions.table[-1].item(), 100.0 ** (-6 / 8))
    x = torch.randn(2, 3, E)
    for each in (module, slow):
        each(x, x, x)[0].sum().backward()
    assert (table.relative_bias.grad != 0).any()


def test_errors() -> None:
    module = fnn.PositionalMultiheadAttention(E, H, positions="alibi", batch_first=True)
    x = torch.randn(2, 3, E)
    with pytest.raises(ValueError, match=r"key must have query's shape \[2, 2, 16\], .* counted"):
        module(x[:, :2], x, x)
    with pytest.raises(ValueError, match=r"query must be \[B, S, 16\], got \[3, 16\]"):
        module(x[0], x[0], x[0])
    with pytest.raises(ValueError, match=r"positions must be one of .* got 'xpos'"):
        fnn.TransformerEncoderLayer(E, H, positions="xpos")
    with pytest.raises(ValueError, match="even head dim, got 5: embed_dim=15 with num_heads=3"):
        fnn.RotaryPositions(15, 3)
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads, got 16 and 3"):
        fnn.AlibiPositions(16, 3)
    with pytest.raises(ValueError, match="base must be greater than 0, got 0"):
        fnn.RotaryPositions(16, 2, base=0)
    for causal_, buckets, distance, message in (
        (False, 5, 128, "buckets must be even and at least 4, got 5"),
        (True, 1, 128, "buckets must be at least 2 with causal=True, got 1"),
        (False, 32, 8, "max_distance must be greater than 8, got 8"),
        (True, 32, 16, "max_distance must be greater than 16, got 16"),
    ):
        with pytest.raises(ValueError, match=message):
            fnn.T5Positions(E, H, causal=causal_, buckets=buckets, max_distance=distance)
    encoder = fnn.TransformerEncoder(fnn.TransformerEncoderLayer(E, H), 1)
    with pytest.raises(ValueError, match="positions must be None with custom_encoder"):
        fnn.Transformer(E, H, custom_encoder=encoder, positions="alibi")
    layer = nn.TransformerEncoderLayer(E, H)
    layer.self_attn = fnn.ScoredMultiheadAttention(E, H)
    with pytest.raises(TypeError, match="of torch or fastattn, got ScoredMultiheadAttention"):
        set_positions(layer, fnn.AlibiPositions(E, H))
    layer.self_attn = nn.MultiheadAttention(E, H, add_zero_attn=True)
    with pytest.raises(ValueError, match="without kdim, vdim, add_bias_kv and add_zero_attn"):
        set_positions(layer, fnn.AlibiPositions(E, H))


# -- layers and stacks ----------------------------------------------------------------------------
def transformer(kind: str, **options) -> fnn.Transformer:
    torch.manual_seed(0)
    settings = {"dropout": 0.0, "batch_first": True} | options
    return fnn.Transformer(E, H, 2, 2, 32, positions=kind, **settings)


def stacks(kind: str) -> list[nn.Module]:
    """An encoder made of a layer, and a decoder."""
    torch.manual_seed(0)
    settings = {"dropout": 0.0, "batch_first": True, "positions": kind}
    encoder = fnn.TransformerEncoderLayer(E, H, 32, **settings)
    decoder = fnn.TransformerDecoderLayer(E, H, 32, **settings)
    return [
        fnn.TransformerEncoder(encoder, 3, enable_nested_tensor=False),
        fnn.TransformerDecoder(decoder, 3),
    ]


def held(stack: nn.Module) -> list[AttentionPositions]:
    return [layer.self_attn.positions for layer in stack.layers]


@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_of_a_stack_share_their_positions(kind: str) -> None:
    plain = nn.Transformer(E, H, 2, 2, 32, batch_first=True).state_dict()
    model = transformer(kind)
    names = {
        f"{stack}.layers.{i}.self_attn.positions.relative_bias"
        for stack in ("encoder", "decoder")
        for i in range(2)
    }
    assert model.state_dict().keys() - plain.keys() == (names if kind == "t5" else set())
    assert not plain.keys() - model.state_dict().keys()
    for whole in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for stack in (whole.encoder, whole.decoder):
            assert len(set(held(stack))) == 1
        assert held(whole.encoder)[0] is not held(whole.decoder)[0]
    made = stacks(kind)
    for stack in made:
        assert len(set(held(stack))) == 1
        tables = [name for name in stack.state_dict() if "positions" in name]
        assert len(tables) == (len(stack.layers) if kind == "t5" else 0)
        parameters = [name for name, _ in stack.named_parameters() if "positions" in name]
        assert len(parameters) == (kind == "t5")
    if kind == "t5":
        assert [held(stack)[0].causal for stack in made] == [False, True]
        with torch.device("meta"):
            meta = transformer(kind)
        meta = meta.to_empty(device="cpu")
        meta.load_state_dict(model.state_dict())
        src, tgt = torch.randn(2, 4, E), torch.randn(2, 3, E)
        assert torch.equal(meta.eval()(src, tgt), model.eval()(src, tgt))


def test_a_layer_of_a_stack_keeps_its_table_alone() -> None:
    """Copied, pickled or saved by its state_dict, also one that is not the first."""
    for stack in stacks("t5"):
        layer = stack.layers[1]
        table = layer.self_attn.positions.relative_bias
        copied = copy.deepcopy(layer)
        saved = copy.deepcopy(stack.layers[0])
        with torch.no_grad():
            saved.self_attn.positions.relative_bias.zero_()
        saved.load_state_dict(layer.state_dict())
        for alone in (copied, pickle.loads(pickle.dumps(layer)), saved):
            own = dict(alone.named_parameters())["self_attn.positions.relative_bias"]
            assert own is not table and torch.equal(own, table)
            assert alone.state_dict().keys() == layer.state_dict().keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_fused_layers_equal_modules_called_one_by_one(kind: str, norm_first: bool) -> None:
    """A hook makes the layers call the attention as a module; torch's layers always do."""
    model = transformer(kind, norm_first=norm_first)
    src, tgt = torch.randn(3, 7, E, requires_grad=True), torch.randn(3, 5, E, requires_grad=True)
    masks = {
        "tgt_mask": causal(5),
        "src_key_padding_mask": padding([7, 3, 1], 7),
        "tgt_key_padding_mask": padding(TGT_LENGTHS, 5),
    }
    fused = model(src, tgt, **masks)
    calls = []
    for stack in (model.encoder, model.decoder):
        for layer in stack.layers:
            layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    hooked = model(src, tgt, **masks)
    assert len(calls) == 4
    torch.testing.assert_close(hooked, fused, atol=1e-5, rtol=1e-4)
    inputs = [src, tgt, *model.parameters()]
    cotangent = torch.randn(fused.shape)
    wanted = torch.autograd.grad((fused * cotangent).sum(), inputs)
    got = torch.autograd.grad((hooked * cotangent).sum(), inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)

    layer = transformer(kind, norm_first=norm_first).encoder.layers[0].eval()
    torch_layer = nn.TransformerEncoderLayer(
        E, H, 32, dropout=0.0, batch_first=True, norm_first=norm_first
    ).eval()
    set_positions(torch_layer, copy.deepcopy(layer.self_attn.positions))
    torch_layer.load_state_dict(layer.state_dict(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(torch_layer(src), layer(src), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_execution_equals_padded(kind, batch_first, monkeypatch):
    model = transformer(kind, batch_first=batch_first)
    sizes = [(3, 7, E), (3, 5, E)] if batch_first else [(7, 3, E), (5, 3, E)]
    src, tgt = (torch.randn(size, requires_grad=True) for size in sizes)
    src_padding, tgt_padding = padding(SRC_LENGTHS, 7), padding(TGT_LENGTHS, 5)
    padded = model(
        src, tgt, tgt_mask=causal(5), src_key_padding_mask=src_padding,
        tgt_key_padding_mask=tgt_padding, memory_key_padding_mask=src_padding,
    )  # fmt: skip
    for layer in (*model.encoder.layers, *model.decoder.layers):
        monkeypatch.setattr(type(layer), "forward", None)  # packed rows do not call it
    packed = model(src, tgt, tgt_mask=causal(5), src_lengths=SRC_LENGTHS, tgt_lengths=TGT_LENGTHS)
    real = ~tgt_padding if batch_first else ~tgt_padding.t()
    torch.testing.assert_close(packed[real], padded[real], atol=1e-5, rtol=1e-4)
    cotangent = torch.randn(padded.shape) * real[..., None]
    inputs = [src, tgt, *model.parameters()]
    wanted = torch.autograd.grad((padded * cotangent).sum(), inputs)
    got = torch.autograd.grad((packed * cotangent).sum(), inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_decoding_steps_equal_forward(kind: str, batch_first: bool) -> None:
    _, decoder = stacks(kind)
    decoder.eval()
    for layer in decoder.layers:
        layer.self_attn.batch_first = layer.multihead_attn.batch_first = batch_first
    time = 1 if batch_first else 0
    tgt, memory = torch.randn(3, 5, E), torch.randn(3, 7, E)
    if not batch_first:
        tgt, memory = tgt.transpose(0, 1), memory.transpose(0, 1)
    expected = decoder(tgt, memory, tgt_mask=causal(5), tgt_is_causal=True)
    for parts in ([1] * 5, [3, 2], [2, 1, 1, 1]):
        cache = decoder.init_cache(memory, max_length=8)
        out = [decoder.step(x, cache) for x in tgt.split(parts, time)]
        torch.testing.assert_close(torch.cat(out, time), expected, atol=1e-5, rtol=1e-4)
    set_positions(decoder, AttentionPositions())  # none
    without = decoder(tgt, memory, tgt_mask=causal(5), tgt_is_causal=True)
    assert (without - expected).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_beams_have_the_positions_of_their_own_history(kind: str, dtype: torch.dtype) -> None:
    _, decoder = stacks(kind)
    decoder.eval().to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    memory, beams = torch.randn(2, 4, E, dtype=dtype), 3
    cache = decoder.init_cache(memory, max_length=6, beams=beams)
    histories = torch.zeros(2, beams, 0, E, dtype=dtype)
    for parents in ([0, 1, 2], [2, 0, 0], [1, 1, 2], [2, 1, 0]):
        cache.follow(torch.tensor([parents, parents[::-1]]))
        order = torch.tensor([parents, parents[::-1]])
        histories = torch.stack([h[o] for h, o in zip(histories, order, strict=True)])
        x = torch.randn(2, beams, E, dtype=dtype)
        histories = torch.cat((histories, x[:, :, None]), dim=2)
        got = decoder.step(x, cache)
        size = histories.shape[2]
        for j in range(beams):
            whole = decoder(histories[:, j], memory, tgt_mask=causal(size), tgt_is_causal=True)
            torch.testing.assert_close(got[:, j], whole[:, -1], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["t5", "rotary"])
def test_stacks_compile_and_export(kind: str) -> None:
    encoder, _ = stacks(kind)
    encoder.eval()
    x = torch.randn(2, 5, E)
    expected = encoder(x)
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    exported = torch.export.export(encoder, (x,))
    torch.testing.assert_close(exported.module()(x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_refuses_positions_that_it_would_leave_out() -> None:
    model = transformer("alibi")
    for module in (model.encoder.layers[0].self_attn, model.encoder.layers[0], model.decoder):
        with pytest.raises(ValueError, match=r"Unknown type annotation.*AttentionPositions"):
            torch.jit.script(module)
