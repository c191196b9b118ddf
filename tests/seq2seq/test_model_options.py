"""Options of the model: the encoder layer that each decoder layer attends, norms, scores."""

import dataclasses

import pytest
import torch
from seq2seq_samples import CPU, SMALL, random_examples, small_model, toy_pairs, toy_training

from fastattn.nn import PositionalMultiheadAttention
from fastattn.seq2seq import runs, training
from fastattn.seq2seq.data import Example, collate
from fastattn.seq2seq.generation import Translator
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer
from fastattn.seq2seq.non_autoregressive import make_model
from fastattn.seq2seq.training import TrainingConfig, train


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "group"}, "norm must be one of .* got 'group'"),
        ({"scoring": "bilinear"}, "scoring must be one of .* got 'bilinear'"),
        ({"decoder": "diffusion"}, "decoder must be one of .* got 'diffusion'"),
        ({"length": "short"}, "length must be one of .* got 'short'"),
        (
            {"memory_layers": "first"},
            r"memory_layers must be one of \('last', 'same'\), got 'first'",
        ),
        ({"positions": "xpos"}, "positions must be one of .*'alibi', 't5', 'rotary'.* got 'xpos'"),
        (
            {"positions": "alibi", "scoring": "cosine"},
            "scoring must be 'dot' with positions='alibi'",
        ),
        ({"activation": "tanh"}, "activation must be one of .* got 'tanh'"),
        (
            {"target_vocabulary": 40},
            "tied must be False or 'target' with target_vocabulary, got True",
        ),
        ({"target_vocabulary": 2, "tied": False}, "end must be a token below vocabulary 2, got 2"),
        ({"tied": "head"}, "tied must be one of .* got 'head'"),
        ({"attention_dropout": 1.0}, r"attention_dropout must lie in \[0, 1\), got 1.0"),
        (
            {"positions": "alibi", "head_dim": 4},
            "positions must be one of .* with head_dim or attention_scale, got 'alibi'",
        ),
        (
            {"positions": "rotary", "width": 14},
            "heads must divide width 14 into even parts .* got 2",
        ),
    ],
)
def test_errors_of_model_options(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "power"},
        {"scoring": "additive"},
        {"positions": "alibi"},
        {"activation": "silu"},
        {"head_dim": 4},
        {"attention_scale": 1.0},
    ],
)
def test_pytorchs_transformer_refuses_options_that_it_lacks(changes):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=rf"{name} must be .* with torch\.nn"):
        small_model("torch", **changes)


def test_memory_layers_are_numbers_from_one():
    def numbers(wanted: str, encoder: int, decoder: int) -> list[int]:
        config = ModelConfig(9, encoder_layers=encoder, decoder_layers=decoder,
                             memory_layers=wanted)  # fmt: skip
        return config.memory_numbers()

    assert numbers("last", 3, 2) == [3, 3]
    assert numbers("same", 3, 4) == [1, 2, 3, 3]
    assert numbers("same", 0, 2) == [0, 0]


@pytest.mark.parametrize("name", ["fastattn", "torch"])
@torch.no_grad()
def test_each_decoder_layer_attends_its_encoder_layer(name):
    model = small_model(name, memory_layers="same").eval()
    batch = collate(random_examples(4))
    logits = model(batch.source, batch.target_in, batch.source_padding)
    encoder, decoder = model.transformer.encoder, model.transformer.decoder
    x = model.embed_source(batch.source)
    outputs = []
    for layer in encoder.layers:
        x = layer(x, src_key_padding_mask=batch.source_padding)
        outputs.append(encoder.norm(x))
    y = model.embed_target(batch.target_in)
    T = y.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    for layer, memory in zip(decoder.layers, outputs, strict=True):
        y = layer(y, memory, tgt_mask=causal, memory_key_padding_mask=batch.source_padding)
    torch.testing.assert_close(logits, model.logits(decoder.norm(y)), rtol=1e-4, atol=1e-5)
    usual = small_model(name).eval()(batch.source, batch.target_in, batch.source_padding)
    assert (logits - usual).abs().max() > 1e-3


@pytest.mark.parametrize("norm", ["power", "batch"])
def test_norms_over_tokens_leave_padding_out_of_the_model(norm):
    """More padding gives the same loss and buffers."""
    examples = random_examples(8)
    batch = collate(examples)
    wider = collate([*examples, Example([5] * 20, [6] * 20)])
    wider = dataclasses.replace(
        wider, **{name: getattr(wider, name)[:8] for name in ("source", "source_padding",
                                                              "target_in", "target_out")}
    )  # fmt: skip
    results = []
    for padded in (batch, wider):
        model = small_model(norm=norm)
        loss = training.cross_entropy(model, padded, toy_training())
        results.append((loss.item(), dict(model.named_buffers())))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    for name, buffer in results[0][1].items():
        torch.testing.assert_close(buffer, results[1][1][name], rtol=1e-3, atol=1e-5)
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in model.modules())


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "power", "positions": "rotary"},
        {"norm": "batch", "positions": "alibi"},
        {"scoring": "additive", "copy": True},
        {"scoring": "cosine", "memory_layers": "same"},
        {"norm_first": False, "norm": "power", "positions": "t5"},
    ],
    ids=str,
)
def test_every_model_trains(changes):
    """60 updates of repeating the source: the loss falls below that of the best constant guess."""
    examples = [Example(e.source, e.source) for e in random_examples(100, vocabulary=12)]
    torch.manual_seed(0)
    model = Seq2SeqTransformer(dataclasses.replace(SMALL, vocabulary=12, width=32, **changes))
    config = TrainingConfig(
        steps=60, batch_tokens=600, learning_rate=5e-3, warmup_steps=10, smoothing=0.0
    )
    result = train(model, examples, examples[:20], config, device=CPU, show=False)
    tokens = torch.tensor([t for e in examples for t in e.target])
    shares = tokens.bincount().float() / len(tokens)
    entropy = -(shares[shares > 0] * shares[shares > 0].log()).sum().item()
    assert result.validations[-1][1] < 0.8 * entropy, (result.validations, entropy)


RELATIVE = ["alibi", "t5", "rotary"]


@pytest.mark.parametrize("positions", RELATIVE)
def test_relative_positions_replace_those_of_the_embeddings(positions):
    model = small_model(positions=positions)
    tokens = torch.tensor([[5, 9, 5]])
    torch.testing.assert_close(model.embed_target(tokens, start=7), model.embedding(tokens) * 4.0)
    dropped = small_model(positions=positions, dropout=0.5).train().embed_source(tokens)
    assert (dropped == 0).any()
    for stack in (model.transformer.encoder, model.transformer.decoder):
        for layer in stack.layers:
            assert isinstance(layer.self_attn, PositionalMultiheadAttention)
    tables = [name for name in model.state_dict() if "positions" in name]
    expected = [
        f"transformer.{stack}.layers.{i}.self_attn.positions.relative_bias"
        for stack, layers in (("encoder", SMALL.encoder_layers), ("decoder", SMALL.decoder_layers))
        for i in range(layers)
    ]
    assert tables == (expected if positions == "t5" else [])


@pytest.mark.parametrize("positions", RELATIVE)
def test_words_in_another_order_have_another_translation(positions):
    """Without positions an encoder only permutes its outputs."""
    model = small_model(positions=positions).eval()
    real, begin = torch.zeros(1, 4, dtype=torch.bool), torch.tensor([[1]])
    first, second = (
        model(torch.tensor([source]), begin, real) for source in ([5, 6, 7, 8], [8, 6, 5, 7])
    )
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("decoder", ["autoregressive", "non-autoregressive"])
def test_buckets_of_a_decoder_are_those_of_what_it_attends(decoder):
    config = dataclasses.replace(SMALL, positions="t5", decoder=decoder)
    transformer = make_model(config).transformer
    assert not transformer.encoder.layers[0].self_attn.positions.causal
    own = transformer.decoder.layers[0].self_attn.positions
    assert own.causal == (decoder == "autoregressive")


@pytest.mark.parametrize("positions", RELATIVE)
def test_runs_keep_their_positions(positions, tmp_path):
    """From the run's files comes the model that was trained, with the same translations."""
    prepared = runs.prepare_text(
        toy_pairs(100), held_out=10, max_length=20, vocabulary=300, show=False
    )
    config = dataclasses.replace(
        SMALL, vocabulary=prepared.tokenizer.vocabulary, positions=positions
    )
    schedule = toy_training(steps=6, valid_every=6, checkpoint_every=3)
    files = runs.RunFiles(config, schedule, prepared.tokenizer, prepared.digest, 10)
    runs.start_run(tmp_path, files)
    texts = [pair.source for pair in prepared.test]
    for stop in (3, None):  # the second continues from the first one's checkpoint
        model = small_model(vocabulary=config.vocabulary, positions=positions)
        train(
            model, prepared.train, prepared.valid, schedule,
            device=CPU, run=tmp_path, resume=True, stop_after=stop, show=False,
        )  # fmt: skip
    loaded = runs.load_translator(tmp_path)
    assert loaded.model.config == config
    state = loaded.model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    if positions == "t5":
        start = small_model(vocabulary=config.vocabulary, positions="t5").state_dict()
        name = "transformer.decoder.layers.0.self_attn.positions.relative_bias"
        assert not torch.equal(state[name], start[name])
    expected = Translator(model.eval(), prepared.tokenizer).translate(texts)
    assert loaded.translate(texts) == expected
