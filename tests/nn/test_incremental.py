"""Decoding token by token compared with a full forward, and its errors."""

import pytest
import torch
from module_equivalence import assert_same
from transformer_twins import FFN, B, E, H, S, T, build, causal_mask, inputs, twins

import fastattn.nn as fnn

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("memory", ["whole", "padding", "lengths"])
def test_decoding_step_by_step_equals_forward(batch_first, norm_first, memory):
    torch.manual_seed(0)
    reference, fast = twins("TransformerDecoder", batch_first=batch_first, norm_first=norm_first)
    reference.eval(), fast.eval()
    tgt, source = inputs("TransformerDecoder", batch_first=batch_first)
    lengths = torch.tensor([S, 3, 1])
    padding = torch.arange(S) >= lengths[:, None]
    given = {
        "whole": {},
        "padding": {"memory_key_padding_mask": padding},
        "lengths": {"memory_lengths": lengths},
    }[memory]
    kwargs = {} if memory == "whole" else {"memory_key_padding_mask": padding}
    kwargs["tgt_mask"] = causal_mask(T)
    expected = reference(tgt, source, **kwargs).detach()
    truth = reference.double()(
        tgt.double(), source.double(), **kwargs | {"tgt_mask": causal_mask(T).double()}
    ).detach()

    time = 1 if batch_first else 0
    cache = fast.init_cache(source, max_length=T, **given)
    rows = []
    for i in range(T):
        assert cache.length == i
        rows.append(fast.step(tgt.narrow(time, i, 1), cache))
    assert not rows[0].requires_grad
    assert_same("steps", torch.cat(rows, time), expected, truth)

    cache = fast.init_cache(source, max_length=T + 3, **given)
    prompt = fast.step(tgt.narrow(time, 0, 3), cache)
    rest = fast.step(tgt.narrow(time, 3, T - 3), cache)
    assert_same("prompt", torch.cat((prompt, rest), time), expected, truth)


def test_decoding_calls_children_with_hooks():
    torch.manual_seed(0)
    reference, fast = twins("TransformerDecoder", batch_first=True)
    tgt, memory = inputs("TransformerDecoder")
    for module in (reference.eval(), fast.eval()):
        layer = module.layers[1]
        layer.norm1.register_forward_hook(lambda module, args, output: output + 1)
        layer.linear1.register_forward_hook(lambda module, args, output: output * 2)
        layer.dropout2.register_forward_hook(lambda module, args, output: output * 3)
    expected = reference(tgt, memory, causal_mask(T))
    cache = fast.init_cache(memory, max_length=T)
    got = torch.cat([fast.step(tgt[:, i : i + 1], cache) for i in range(T)], 1)
    assert_same("steps", got, expected, expected.double())


def test_steps_under_autocast_fill_a_cache_made_outside():
    decoder = build(fnn, "TransformerDecoder", batch_first=True).eval()
    tgt, memory = inputs("TransformerDecoder")
    cache = decoder.init_cache(memory, max_length=T)
    expected = torch.cat([decoder.step(tgt[:, i : i + 1], cache) for i in range(T)], 1)
    cache.rewind()
    with torch.autocast("cpu", torch.bfloat16):
        rows = torch.cat([decoder.step(tgt[:, i : i + 1], cache) for i in range(T)], 1)
    torch.testing.assert_close(rows.float(), expected, rtol=0.05, atol=0.05)


def test_decoding_rejects():
    decoder = build(fnn, "TransformerDecoder", batch_first=True).eval()
    tgt, memory = inputs("TransformerDecoder")
    for kwargs, message in (
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"memory_key_padding_mask": torch.zeros(B, T).bool()}, r"must be bool \[3, 7\].*\[3, 5\]"),
        ({"memory_key_padding_mask": torch.zeros(B, S)}, r"bool \[3, 7\], got torch.float32"),
        ({"memory_lengths": torch.ones(2)}, r"memory_lengths must be int32 or int64 \[3\]"),
        ({"memory_lengths": [S, S]}, r"memory_lengths must be int32 or int64 \[3\].*got .*\[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.init_cache(memory, **{"max_length": T, **kwargs})
    for kwargs, message in (
        ({"max_length": 1.5}, r"max_length must be an integer, got 1\.5"),
        ({"memory_lengths": 7}, "memory_lengths must be a tensor or a list of integers, got int"),
        (
            {"memory_key_padding_mask": [[False]]},
            "memory_key_padding_mask must be a tensor or None",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            decoder.init_cache(memory, **{"max_length": T, **kwargs})
    for wrong in (memory[0], memory[..., :8]):
        with pytest.raises(ValueError, match="memory must have 3 dimensions, the last 16, got"):
            decoder.init_cache(wrong, max_length=T)
    cache = decoder.init_cache(memory, max_length=2)
    with pytest.raises(ValueError, match=r"x must be \[B, 1, E\] with B=3, E=16, got \[2, 1, 16\]"):
        decoder.step(tgt[:2, :1], cache)
    with pytest.raises(ValueError, match=r"E=16, got \[3, 1, 8\]"):
        decoder.step(tgt[:, :1, :8], cache)
    with pytest.raises(ValueError, match="max_length=2 positions, got position 4"):
        decoder.step(tgt, cache)
    with pytest.raises(ValueError, match=r"rows must be int32 or int64.*torch.float32"):
        cache.reorder(torch.zeros(3))
    for block in ("_sa_block", "_mha_block"):
        setattr(decoder.layers[0], block, lambda x, *_: x)
        with pytest.raises(NotImplementedError, match=rf"layers\[0\] has its own {block}"):
            decoder.init_cache(memory, max_length=2)
        delattr(decoder.layers[0], block)
    for option in ("add_bias_kv", "add_zero_attn"):
        other = build(fnn, "TransformerDecoder", batch_first=True)
        other.layers[1].multihead_attn = fnn.MultiheadAttention(
            E, H, batch_first=True, **{option: True}
        )
        with pytest.raises(NotImplementedError, match=rf"has a multihead_attn with .*{option}"):
            other.init_cache(memory, max_length=2)
    decoder.layers[1].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match=r"layers\[1\] has a self_attn .* without hooks"):
        decoder.init_cache(memory, max_length=2)

    class Custom(fnn.TransformerDecoderLayer):
        pass

    with pytest.raises(NotImplementedError, match=r"layers\[0\] is not exactly"):
        fnn.TransformerDecoder(Custom(E, H, FFN, batch_first=True), 1).init_cache(
            memory, max_length=2
        )
