"""The non-autoregressive decoder: its inputs, the length of its results, training."""

import dataclasses

import pytest
import torch
from seq2seq_samples import CPU, SMALL, random_examples, toy_pairs, toy_training
from torch.nn import functional as F

from fastattn.seq2seq import runs
from fastattn.seq2seq.beam_search import BeamSearch
from fastattn.seq2seq.data import END, PAD, Example, Pair, collate
from fastattn.seq2seq.evaluation import evaluate_run
from fastattn.seq2seq.generation import Translator, bleu, generate
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer
from fastattn.seq2seq.non_autoregressive import (
    NonAutoregressiveTransformer,
    make_model,
    non_autoregressive_loss,
)
from fastattn.seq2seq.training import TrainingConfig, train

LENGTHS = ["predictor", "end"]


def model_for(length: str, **changes) -> NonAutoregressiveTransformer:
    torch.manual_seed(0)
    config = dataclasses.replace(SMALL, decoder="non-autoregressive", length=length, **changes)
    model = make_model(config)
    assert isinstance(model, NonAutoregressiveTransformer)
    return model


def test_the_configuration_selects_the_class():
    assert type(make_model(SMALL)) is Seq2SeqTransformer
    assert model_for("predictor").length_head.out_features == 24
    assert model_for("end").length_head is None


@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_targets_are_not_read_and_padding_does_not_count(length):
    model = model_for(length).eval()
    examples = random_examples(5, seed=1)
    batch = collate(examples)
    logits = model(batch.source, batch.target_in, batch.source_padding)
    others = batch.target_in.masked_fill(batch.target_in > END, 9)
    assert torch.equal(model(batch.source, others, batch.source_padding), logits)
    for i, example in enumerate(examples):
        one = collate([example])
        alone = model(one.source, one.target_in, one.source_padding)[0]
        T = len(example.target) - (length == "predictor")  # END has no position of its own
        torch.testing.assert_close(logits[i, :T], alone[:T], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_lengths_affect_tokens_only_with_a_predictor():
    source = collate(random_examples(1, seed=4))
    memory = {name: model_for(name).eval() for name in LENGTHS}
    for name, model in memory.items():
        encoded = model.encode(source.source, source.source_padding)
        short, long = (model.parallel_logits(encoded, torch.tensor([n]), 3)[0] for n in (3, 8))
        assert torch.equal(short, long) == (name == "end")


@torch.no_grad()
def test_source_tokens_are_copied_uniformly(monkeypatch):
    model = model_for("predictor").eval()
    source = torch.tensor([[5, 6, 7, 8], [3, 4, PAD, PAD]])
    memory = model.encode(source, source == PAD)
    seen = []
    embed = model.embed_target
    monkeypatch.setattr(model, "embed_target", lambda tokens: seen.append(tokens) or embed(tokens))
    model.parallel_logits(memory, torch.tensor([8, 2]), 8)
    model.parallel_logits(memory, torch.tensor([2, 6]), 6)
    assert seen[0][0].tolist() == [5, 5, 6, 6, 7, 7, 8, 8]
    assert seen[0][1, :2].tolist() == [3, 4]
    assert seen[1][0, :2].tolist() == [5, 7]
    assert seen[1][1].tolist() == [3, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("length", LENGTHS)
def test_the_loss_is_that_of_tokens_and_lengths(length):
    model = model_for(length)
    examples = random_examples(6, seed=2)
    batch = collate(examples)
    loss = non_autoregressive_loss(model, batch, smoothing=0.1)
    logits = model(batch.source, batch.target_in, batch.source_padding)
    scored = [len(e.target) - (length == "predictor") for e in examples]
    rows = torch.cat([logits[i, :T] for i, T in enumerate(scored)])
    targets = torch.tensor([t for e, T in zip(examples, scored, strict=True) for t in e.target[:T]])
    expected = F.cross_entropy(rows, targets, label_smoothing=0.1)
    if length == "predictor":
        memory = model.encode(batch.source, batch.source_padding)
        # Class n means n + 1 tokens, without END.
        classes = torch.tensor([len(e.target) - 2 for e in examples])
        expected = expected + F.cross_entropy(model.length_logits(memory), classes)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@torch.no_grad()
def test_tokens_without_a_position_do_not_count_in_the_loss():
    """Where END decides, a source of two tokens has 14 positions."""
    model = model_for("end").eval()
    target = [*range(3, 21), END]
    examples = Example([5, END], target), Example([5, END], target[:14])
    long, cut = (non_autoregressive_loss(model, collate([example])).item() for example in examples)
    assert long == pytest.approx(cut, rel=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_decoding_chooses_the_likeliest_token_at_every_position(length):
    model = model_for(length, tied=False).eval()
    model.head.weight[END] = 2.0 * model.head.weight[5]
    examples = random_examples(8, seed=3)
    batch = collate(examples)
    limits = [20, 20, 20, 2, 20, 20, 1, 20]
    found = generate(model, batch.source, batch.source_padding, max_lengths=limits)
    for example, limit, (h,) in zip(examples, limits, found, strict=True):
        one = collate([example])
        memory = model.encode(one.source, one.source_padding)
        if length == "predictor":
            log_p = model.length_logits(memory)[0].log_softmax(-1)
            wanted, total = int(log_p.argmax()) + 1, log_p.max().item()
        else:
            wanted, total = min(2 * len(example.source) + 10, 24), 0.0
        logits = model.parallel_logits(memory, torch.tensor([wanted]), wanted)[0].log_softmax(-1)
        first = END if length == "end" else END + 1
        tokens = []
        for row in logits[: min(wanted, limit)]:
            token = first + int(row[first:].argmax())
            total += row[token].item()
            if token == END:
                break
            tokens.append(token)
        assert h.tokens == tokens
        assert h.log_probability == pytest.approx(total, rel=1e-4)
        assert h.ended == (wanted <= limit if length == "predictor" else token == END)
    if length == "end":
        assert {h.ended for (h,) in found} == {True, False}


COPYING = {"copy": True, "memory_layers": "same", "norm": "power"}


@pytest.mark.parametrize("length, changes", [
    ("end", {}),
    pytest.param("predictor", {"positions": "t5"}, marks=pytest.mark.slow),
    pytest.param("end", COPYING, marks=pytest.mark.slow),
])  # fmt: skip
def test_learning_to_capitalise(length, changes):
    """150 updates on sentences whose words are translated one by one, in order."""
    pairs = [Pair(p.source, p.source.title()) for p in toy_pairs(400, longest=4)]
    prepared = runs.prepare_text(pairs, held_out=30, max_length=20, vocabulary=400, show=False)
    torch.manual_seed(0)
    model = make_model(
        ModelConfig(
            vocabulary=prepared.tokenizer.vocabulary, width=32, heads=2, encoder_layers=2,
            decoder_layers=2, ffn_width=64, dropout=0.0, max_length=32,
            decoder="non-autoregressive", length=length, **changes,
        )
    )  # fmt: skip
    schedule = TrainingConfig(
        steps=150, batch_tokens=800, learning_rate=5e-3, warmup_steps=20, valid_every=50
    )
    train(model, prepared.train, prepared.valid, schedule, device=CPU, show=False)
    sources, references = zip(*prepared.splits.test, strict=True)
    translations = Translator(model, prepared.tokenizer).translate(sources)
    score, copied = bleu(translations, references).score, bleu(sources, references).score
    assert score > copied + 30, (score, copied)


def test_options_that_need_autoregressive_decoding_are_refused():
    model = model_for("predictor").eval()
    source = torch.tensor([[5, END]])
    for arguments in (
        {"strategy": BeamSearch(2)}, {"prefixes": [[5]]}, {"return_attention": True},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"strategy must be Greedy\(\), without prefixes"):
            generate(model, source, source == PAD, max_lengths=[3], **arguments)
    for changes in (
        {"scheduled_sampling": "parallel"}, {"guided_attention": 1.0}, {"sequence_steps": 2},
    ):  # fmt: skip
        name = next(iter(changes))
        with pytest.raises(ValueError, match=f"{name} must be .* for a non-autoregressive decoder"):
            train(model, [Example([5, END], [5, END])], [], toy_training(**changes), device=CPU)
    with pytest.raises(ValueError, match="length must be 'predictor' for a length head"):
        other = model_for("end")
        other.length_logits(other.encode(source, source == PAD))


@pytest.mark.slow
def test_runs_are_evaluated_side_by_side(tmp_path):
    pairs = toy_pairs(120)
    rows = []
    for decoder in ("autoregressive", "non-autoregressive"):
        prepared = runs.prepare_text(pairs, held_out=10, max_length=20, vocabulary=300, show=False)
        config = dataclasses.replace(
            SMALL, vocabulary=prepared.tokenizer.vocabulary, decoder=decoder
        )
        files = runs.RunFiles(
            config, toy_training(steps=4), prepared.tokenizer, prepared.digest, 10
        )
        runs.start_run(tmp_path / decoder, files)
        torch.manual_seed(0)
        train(
            make_model(config), prepared.train, [], files.training,
            device=CPU, run=tmp_path / decoder, show=False,
        )  # fmt: skip
        rows.append(evaluate_run(tmp_path / decoder, pairs, strategy=BeamSearch(3), show=False))
    sources, references = zip(*prepared.test, strict=True)
    translator = runs.load_translator(tmp_path / "autoregressive")
    beams = translator.translate(sources, strategy=BeamSearch(3))
    assert rows[0].bleu == bleu(beams, references).score
    assert [row.search for row in rows] == ["3 beams", "parallel"]
    assert [row.decoder for row in rows] == ["autoregressive", "non-autoregressive (predictor)"]
    for row in rows:
        assert row.sentences == len(sources) and row.sentences_per_second > 0
        assert row.bleu_of_source == bleu(sources, references).score
    with pytest.raises(ValueError, match=r"pairs must be the text that .* got another text"):
        evaluate_run(tmp_path / "autoregressive", toy_pairs(120, seed=1), show=False)
