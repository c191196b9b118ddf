"""The token model: parameters, embeddings, masks, recorded attention, configurations."""

import dataclasses

import pytest
import torch
from seq2seq_samples import CLASSES, SMALL, random_examples, small_model

from fastattn.seq2seq.data import (
    END,
    Example,
    collate,
)
from fastattn.seq2seq.model import ModelConfig, record_attention
from fastattn.seq2seq.training import TrainingConfig


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_both_transformers_have_the_same_parameters_and_logits(tied, positions):
    fast = small_model("fastattn", tied=tied, positions=positions).eval()
    reference = small_model("torch", tied=tied, positions=positions).eval()
    fast_state, reference_state = fast.state_dict(), reference.state_dict()
    assert list(fast_state) == list(reference_state)
    assert all(torch.equal(fast_state[name], reference_state[name]) for name in fast_state)
    batch = collate(random_examples(6))
    with torch.no_grad():
        a, b = (m(batch.source, batch.target_in, batch.source_padding) for m in (fast, reference))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_embeddings_are_scaled_and_have_positions_added():
    model = small_model()
    tokens = torch.tensor([[5, 9, 5]])
    table = model.positions.table
    expected = model.embedding.weight[tokens] * 4.0 + table[:3]  # sqrt(16)
    torch.testing.assert_close(model.embed_source(tokens), expected)
    later = model.embedding.weight[tokens] * 4.0 + table[7:10]
    torch.testing.assert_close(model.embed_target(tokens, start=7), later)
    # Scaled embeddings have variance about 1.
    wide = small_model(vocabulary=500, width=64)
    assert (wide.embedding.weight * 8.0).std().item() == pytest.approx(1.0, abs=0.02)


def test_tied_weights_are_one_matrix():
    tied, untied = small_model(tied=True), small_model(tied=False)
    hidden = torch.randn(2, 3, 16)
    torch.testing.assert_close(tied.logits(hidden), hidden @ tied.embedding.weight.T)
    extra = untied.state_dict().keys() - tied.state_dict().keys()
    assert extra == {"target_embedding.weight", "head.weight"}
    torch.testing.assert_close(untied.logits(hidden), hidden @ untied.head.weight.T)
    tokens = torch.tensor([[4]])
    expected = untied.target_embedding.weight[4] * 4.0 + untied.positions.table[0]
    torch.testing.assert_close(untied.embed_target(tokens)[0, 0], expected)


def test_neither_padding_nor_later_tokens_reach_a_logit():
    model = small_model().eval()
    short, long = Example([5, 6, END], [7, 8, 9, END]), Example([5] * 9 + [END], [4] * 6 + [END])
    with torch.no_grad():
        both = collate([short, long])
        batched = model(both.source, both.target_in, both.source_padding)[0, :4]
        one = collate([short])
        alone = model(one.source, one.target_in, one.source_padding)[0]
        torch.testing.assert_close(batched, alone, rtol=1e-5, atol=1e-5)
        changed = one.target_in.clone()
        changed[0, 2:] = 11
        later = model(one.source, changed, one.source_padding)[0]
    torch.testing.assert_close(later[:2], alone[:2], rtol=1e-5, atol=1e-5)
    assert (later[2:] - alone[2:]).abs().max() > 1e-2


def test_configurations_round_trip_through_json():
    assert ModelConfig.from_json(SMALL.to_json()) == SMALL
    config = TrainingConfig(steps=7, betas=(0.8, 0.9))
    assert TrainingConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="heads must divide width 16, got 3"):
        dataclasses.replace(SMALL, heads=3)
    with pytest.raises(ValueError, match=r"positions must be one of .* got 'none'"):
        dataclasses.replace(SMALL, positions="none")
    with pytest.raises(ValueError, match=r"keys must be in .*, got \['depth'\]"):
        ModelConfig.from_json('{"vocabulary": 9, "depth": 3}')
    for removed in ("reversed", "2,1", "same+last"):  # of runs before these were removed
        text = SMALL.to_json().replace('"memory_layers": "last"', f'"memory_layers": "{removed}"')
        with pytest.raises(ValueError, match="memory_layers must be one of") as error:
            ModelConfig.from_json(text)
        assert str(error.value).endswith(f"got {removed!r}")
    with pytest.raises(ValueError, match="steps must be an integer of at least 1, got 0"):
        TrainingConfig(steps=0)
    with pytest.raises(ValueError, match=r"precision must be one of .* got 'fp8'"):
        TrainingConfig(precision="fp8")


def test_recorded_attention_equals_torchs_weights():
    recorded = {}
    batch = collate([Example([5, 6, 7, END], [8, 9, END]), Example([4, END], [8, END])])
    for name in CLASSES:
        model = small_model(name).eval()
        with torch.no_grad():
            before = model(batch.source, batch.target_in, batch.source_padding)
            with record_attention(model) as recorded[name]:
                during = model(batch.source, batch.target_in, batch.source_padding)
        torch.testing.assert_close(before, during, rtol=1e-4, atol=1e-5)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert recorded["fastattn"].keys() == recorded["torch"].keys()
    assert len(recorded["torch"]) == 6  # two encoder layers, two decoder layers with two each
    for name, weights in recorded["fastattn"].items():
        torch.testing.assert_close(weights, recorded["torch"][name], rtol=1e-4, atol=1e-6)
    cross = recorded["fastattn"]["decoder.layers.1.multihead_attn"]  # [B, H, M, N]
    assert cross.shape == (2, 2, 3, 4)
    torch.testing.assert_close(cross.sum(-1), torch.ones(2, 2, 3))
    assert cross[1, :, :, 2:].abs().max() == 0


@pytest.mark.parametrize(
    "config, changes",
    [
        (ModelConfig, {"vocabulary": 0}),
        (ModelConfig, {"vocabulary": 9, "heads": 0}),
        (ModelConfig, {"vocabulary": 9, "width": -4}),
        (ModelConfig, {"vocabulary": 9, "decoder_layers": -1}),
        (ModelConfig, {"vocabulary": 9, "dropout": 1.0}),
        (TrainingConfig, {"warmup_steps": -1}),
        (TrainingConfig, {"learning_rate": 0.0}),
    ],
)
def test_errors_of_configurations(config: type, changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{list(changes)[-1]} must"):
        config(**changes)
