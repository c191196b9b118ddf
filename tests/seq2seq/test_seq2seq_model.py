"""The token model: parameters, embeddings, masks, recorded attention, configurations, options."""

import dataclasses
import math

import pytest
import torch
from seq2seq_samples import CLASSES, CPU, SMALL, random_examples, small_model, toy_training

from fastattn.nn import PositionalMultiheadAttention
from fastattn.seq2seq import training
from fastattn.seq2seq.beam_search import BeamSearch
from fastattn.seq2seq.data import END, PAD, Example, collate
from fastattn.seq2seq.generation import GREEDY, generate, greedy_decode
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer, record_attention
from fastattn.seq2seq.non_autoregressive import make_model
from fastattn.seq2seq.pointer_generator import PointerGenerator
from fastattn.seq2seq.training import TrainingConfig, train


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
    with pytest.raises(ValueError, match=r"keys must be in .*, got \['depth'\]"):
        ModelConfig.from_json('{"vocabulary": 9, "depth": 3}')
    for removed in ("reversed", "2,1", "same+last"):  # of runs before these were removed
        text = SMALL.to_json().replace('"memory_layers": "last"', f'"memory_layers": "{removed}"')
        with pytest.raises(ValueError, match="memory_layers must be one of") as error:
            ModelConfig.from_json(text)
        assert str(error.value).endswith(f"got {removed!r}")


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


@pytest.mark.parametrize("config, changes", [
    (ModelConfig, {"vocabulary": 0}),
    (ModelConfig, {"vocabulary": 9, "heads": 0}),
    (ModelConfig, {"vocabulary": 9, "width": -4}),
    (ModelConfig, {"vocabulary": 9, "decoder_layers": -1}),
    (ModelConfig, {"vocabulary": 9, "dropout": 1.0}),
    (TrainingConfig, {"warmup_steps": -1}),
    (TrainingConfig, {"learning_rate": 0.0}),
])  # fmt: skip
def test_errors_of_configurations(config: type, changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{list(changes)[-1]} must"):
        config(**changes)


# -- Options ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "group"}, "norm must be one of .* got 'group'"),
        ({"tied": "target"}, r"tied must be one of \(False, True\), got 'target'"),
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
        ({"heads": 3}, "heads must divide width 16, got 3"),
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
    ],
)  # fmt: skip
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


@pytest.mark.parametrize("changes", [
    {"norm": "power", "positions": "rotary"},
    {"norm": "batch", "positions": "alibi"},
    {"scoring": "additive", "copy": True},
    {"scoring": "cosine", "memory_layers": "same"},
    {"norm_first": False, "norm": "power", "positions": "t5"},
], ids=str)  # fmt: skip
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


@pytest.mark.parametrize("decoder", ["autoregressive", "non-autoregressive"])
def test_buckets_of_a_decoder_are_those_of_what_it_attends(decoder):
    config = dataclasses.replace(SMALL, positions="t5", decoder=decoder)
    transformer = make_model(config).transformer
    assert not transformer.encoder.layers[0].self_attn.positions.causal
    own = transformer.decoder.layers[0].self_attn.positions
    assert own.causal == (decoder == "autoregressive")


# -- Copying ---------------------------------------------------------------------------------------
def test_the_pointer_generator_equals_its_formula():
    torch.manual_seed(0)
    head = PointerGenerator(8)
    hidden, memory, logits = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 3, 11)
    source = torch.tensor([[4, 7, 4, 9, 2], [3, 3, 2, 0, 0]])
    padding = source == PAD
    log_p = head(hidden, logits, memory, head.keys(memory), source, padding)
    for b in range(2):
        S = int((~padding[b]).sum())
        for t in range(3):
            scores = head.key(memory[b, :S]) @ head.query(hidden[b, t]) / math.sqrt(8)
            a = scores.softmax(0)
            context = a @ memory[b, :S]
            p_gen = head.generate(torch.cat([context, hidden[b, t]])).sigmoid()
            p = p_gen * logits[b, t].softmax(0)
            for i in range(S):
                p[source[b, i]] += (1 - p_gen[0]) * a[i]
            torch.testing.assert_close(log_p[b, t].exp(), p)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(2, 3))
    # A word that the source lacks and whose probability is 0 in fp32.
    logits = torch.where(torch.arange(11) == 10, -1e4, logits).requires_grad_()
    log_p = head(hidden, logits, memory, head.keys(memory), source, padding)
    log_p[..., 10].sum().backward()
    assert log_p.isfinite().all() and logits.grad.isfinite().all()


@pytest.mark.slow
def test_copying_learns_unseen_words():
    rare = random_examples(30, vocabulary=60, seed=9)
    rare = [Example([30 + t // 2 if t != END else t for t in e.source], []) for e in rare]
    seen = [Example(e.source, e.source) for e in random_examples(150, vocabulary=30)]
    right = {}
    for copy in (False, True):
        torch.manual_seed(0)
        config = dataclasses.replace(SMALL, vocabulary=60, width=32, copy=copy)
        model = Seq2SeqTransformer(config)
        schedule = TrainingConfig(
            steps=120, batch_tokens=500, learning_rate=5e-3, warmup_steps=10, valid_every=1000
        )
        train(model, seen, [], schedule, device=CPU, show=False)
        batch = collate([Example(e.source, [END]) for e in rare])
        limits = [len(e.source) for e in rare]
        decoded = greedy_decode(
            model.eval(), batch.source, batch.source_padding, max_lengths=limits
        )
        tokens = [
            a == b
            for found, e in zip(decoded, rare, strict=True)
            for a, b in zip(found, e.source[:-1], strict=False)
        ]
        right[copy] = sum(tokens) / sum(len(e.source) - 1 for e in rare)
    assert right[False] < 0.1 and right[True] > 0.3, right


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "t5"},
        {"positions": "learned", "tied": False},
        {"norm": "rms"},
        {"norm_first": False, "activation": "gelu_tanh"},
        {"activation": "geglu_tanh"},
        {"activation": "swiglu"},
    ],
    ids=str,
)
def test_options_hold_in_packed_and_cached_execution(options):
    model = small_model(**options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    batch = collate(random_examples(6))
    with torch.no_grad():
        padded = model(batch.source, batch.target_in, batch.source_padding)
        packed, targets = model.forward_packed(batch)
    real = batch.target_out != PAD
    torch.testing.assert_close(packed, padded[real], rtol=1e-4, atol=1e-4)
    assert torch.equal(targets, batch.target_out[real])
    for strategy in (GREEDY, BeamSearch(3)):
        given = {"max_lengths": [10] * 6, "strategy": strategy}
        cached, prefix = (
            generate(model, batch.source, batch.source_padding, use_cache=use, **given)
            for use in (True, False)
        )
        assert [a[0].tokens for a in cached] == [a[0].tokens for a in prefix]
        for a, b in zip(cached, prefix, strict=True):
            assert a[0].score == pytest.approx(b[0].score, abs=1e-3)
