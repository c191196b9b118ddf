"""Greedy and beam search compared with naive ones, sampling, what holds for every strategy.

Ragged sources, limits and prefixes, attention, every kind of model, texts, error messages.
"""

import math
import random

import pytest
import torch
from cpu_library import needs_library
from naive_search import (
    KINDS,
    LIMITS,
    STRATEGIES,
    assert_same_hypotheses,
    next_log_p,
    padded,
    search_beams_naively,
    search_naively,
    sharp_model,
    sources,
)
from seq2seq_samples import CLASSES, small_model, toy_pairs

import fastattn.nn
from fastattn.seq2seq import generation
from fastattn.seq2seq.beam_search import BeamSearch
from fastattn.seq2seq.data import BEGIN, END, PAD, SubwordTokenizer
from fastattn.seq2seq.generation import (
    Greedy,
    Hypothesis,
    Programs,
    Translator,
    bleu,
    generate,
    greedy_decode,
)
from fastattn.seq2seq.model import record_attention
from fastattn.seq2seq.sampling import Sampling, draw, uniform_numbers


# -- greedy ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm_first", [True, False])
def test_greedy_equals_argmax_over_the_whole_model(norm_first):
    model = sharp_model(norm_first=norm_first)
    expected = [search_naively(model, *row) for row in zip(sources(), LIMITS, strict=True)]
    assert len({tuple(h.tokens) for h in expected}) > 4
    assert {h.ended for h in expected} == {True, False}
    for use_cache in (True, False, None):
        found = generate(model, *padded(sources()), max_lengths=LIMITS, use_cache=use_cache)
        assert_same_hypotheses([h for (h,) in found], expected)
    tokens = greedy_decode(model, *padded(sources()), max_lengths=LIMITS)
    assert tokens == [h.tokens for h in expected]


def test_pytorchs_transformer_decodes_without_a_cache():
    found = [
        generate(small_model(name).eval(), *padded(sources()), max_lengths=LIMITS)
        for name in CLASSES
    ]
    assert [h.tokens for (h,) in found[0]] == [h.tokens for (h,) in found[1]]


def test_a_decoder_that_cannot_step_runs_whole_prefixes():
    class Custom(fastattn.nn.TransformerDecoderLayer):
        pass

    model = sharp_model()
    expected = generate(model, *padded(sources()), max_lengths=LIMITS)
    model.transformer.decoder.layers[1].__class__ = Custom
    found = generate(model, *padded(sources()), max_lengths=LIMITS)
    for actual, wanted in zip(found, expected, strict=True):
        assert_same_hypotheses(actual, wanted)
    with pytest.raises(NotImplementedError, match=r"layers\[1\] is not exactly"):
        generate(model, *padded(sources()), max_lengths=LIMITS, use_cache=True)


# -- beam search -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("beams", "length_penalty", "early_stopping"),
    [(1, 0.0, True), (2, 1.0, False), (4, 0.6, True), (4, 0.6, False), (5, 0.0, False)],
)
def test_beam_search_equals_the_naive_one(beams, length_penalty, early_stopping):
    options = BeamSearch(beams, length_penalty, early_stopping)
    model = sharp_model(norm_first=early_stopping)
    expected = [
        search_beams_naively(model, source, limit, options)
        for source, limit in zip(sources(), LIMITS, strict=True)
    ]
    assert {h.ended for found in expected for h in found} == {True, False}
    for use_cache in (True, False):
        found = generate(
            model, *padded(sources()), max_lengths=LIMITS, strategy=options, use_cache=use_cache
        )
        for actual, naive in zip(found, expected, strict=True):
            assert_same_hypotheses(actual, naive)


def test_more_beams_than_tokens():
    # At the first step one beam has 28 continuations at most; 20 beams want 40.
    model = sharp_model()
    options = BeamSearch(20)
    found = generate(model, *padded(sources(3)), max_lengths=[1, 2, 4], strategy=options)
    for source, limit, hypotheses in zip(sources(3), [1, 2, 4], found, strict=True):
        assert_same_hypotheses(hypotheses, search_beams_naively(model, source, limit, options))


@pytest.mark.parametrize("vocabulary", [3, 4])
@pytest.mark.parametrize("beams", [1, 2, 3])
def test_vocabularies_of_special_tokens_and_at_most_one_word(vocabulary, beams):
    model = small_model(vocabulary=vocabulary).eval()
    (found,) = generate(model, *padded([[END]]), max_lengths=[4], strategy=BeamSearch(beams))
    best = found[0] if isinstance(found, list) else found
    assert set(best.tokens) <= set(range(END, vocabulary))


# -- sampling --------------------------------------------------------------------------------------
def test_a_number_becomes_a_token_by_the_distribution():
    p = torch.tensor([[0.0, 0.1, 0.4, 0.3, 0.2]])
    rows = torch.linspace(0, 1, 1001)[:-1]
    logits = p.log().expand(1000, -1)

    def shares(sampling: Sampling) -> list[float]:
        return [(draw(logits, rows, sampling) == token).float().mean().item() for token in range(5)]

    assert shares(Sampling()) == pytest.approx([0, 0.1, 0.4, 0.3, 0.2], abs=2e-3)
    assert shares(Sampling(top_k=2)) == pytest.approx([0, 0, 4 / 7, 3 / 7, 0], abs=2e-3)
    # 0.4 + 0.3 < 0.75: the nucleus takes a third token to reach it.
    assert shares(Sampling(top_p=0.75)) == pytest.approx([0, 0, 4 / 9, 3 / 9, 2 / 9], abs=2e-3)
    assert shares(Sampling(top_p=0.7 - 1e-3)) == pytest.approx([0, 0, 4 / 7, 3 / 7, 0], abs=2e-3)
    assert shares(Sampling(top_k=3, top_p=0.5)) == pytest.approx([0, 0, 4 / 7, 3 / 7, 0], abs=2e-3)
    squares = p.square() / p.square().sum()
    assert shares(Sampling(0.5)) == pytest.approx(squares[0].tolist(), abs=2e-3)
    # The largest number that fp32 has below 1, or 1 itself by rounding: still a token with p > 0.
    last = torch.tensor([1.0 - 2**-24, 1.0])
    assert draw(p.log().expand(2, -1), last, Sampling(top_p=0.6)).tolist() == [3, 3]
    assert draw(p.log().flip(1).expand(2, -1), last, Sampling()).tolist()[0] == 3


def test_samples_follow_the_models_probabilities():
    model = sharp_model()
    source = sources()[1]
    p = next_log_p(model, source, []).exp()
    count = 4000
    found = generate(
        model, *padded([source] * count), max_lengths=[1] * count, strategy=Sampling(seed=3)
    )
    first = torch.tensor([h.tokens[0] if h.tokens else END for (h,) in found])
    shares = first.bincount(minlength=len(p)) / count
    allowed = p.clone()
    allowed[:END] = 0.0
    allowed /= allowed.sum()
    deviation = (allowed * (1 - allowed) / count).sqrt()
    assert ((shares - allowed).abs() <= 4.5 * deviation + 1e-9).all()
    # The score is the model's own probability, whatever the draw was made from.
    for (h,) in found[:20]:
        token = h.tokens[0] if h.tokens else END
        assert h.score == pytest.approx(p[token].log().item(), abs=1e-5)


def test_restricted_sampling_is_greedy_and_seeds_determine_draws():
    model = sharp_model()

    def tokens(strategy) -> list[list[int]]:
        found = generate(model, *padded(sources()), max_lengths=LIMITS, strategy=strategy)
        return [h.tokens for (h,) in found]

    greedy = tokens(Greedy())
    assert tokens(Sampling(top_k=1)) == greedy
    assert tokens(Sampling(top_p=1e-6)) == tokens(Sampling(top_p=1e-60)) == greedy
    assert tokens(Sampling(temperature=1e-4)) == greedy
    programs = Programs()
    for seed in (1, 2):
        kept = generate(
            model, *padded(sources()), max_lengths=LIMITS, strategy=Sampling(seed=seed),
            programs=programs,
        )  # fmt: skip
        assert [h.tokens for (h,) in kept] == tokens(Sampling(seed=seed))
    assert len(programs._kept) == 1
    first = tokens(Sampling(seed=1))
    assert first != greedy and first == tokens(Sampling(seed=1)) != tokens(Sampling(seed=2))


def test_uniform_numbers_depend_on_seed_and_sentence_alone():
    all_of_them = uniform_numbers(5, [0, 1, 2], 9)
    assert torch.equal(all_of_them[:4, 1:2], uniform_numbers(5, [1], 4))
    assert len(all_of_them.unique()) == 27
    assert not torch.equal(uniform_numbers(6, [0], 4), uniform_numbers(5, [0], 4))


# -- every kind of model ---------------------------------------------------------------------------
@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_every_kind_of_model_decodes(changes):
    """The cache, if there is one, and kept programs give the results of whole prefixes."""
    model = small_model(tied=False, seed=7, **changes).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("psi2", "running_variance")):
                buffer.uniform_(0.5, 2.0)
        model.head.weight.mul_(3.0)
        model.head.weight[END].mul_(4.0)
    programs = Programs()
    generate(model, *padded(sources(seed=5)), max_lengths=LIMITS, programs=programs)
    found = generate(model, *padded(sources()), max_lengths=LIMITS, programs=programs)
    assert len(programs._kept) == ("scoring" not in changes)
    beams = generate(model, *padded(sources()), max_lengths=LIMITS, strategy=BeamSearch(2))
    for i in range(0, 8, 3):
        naive = search_naively(model, sources()[i], LIMITS[i])
        assert_same_hypotheses(found[i], [naive])
        naive_beams = search_beams_naively(model, sources()[i], LIMITS[i], BeamSearch(2))
        assert_same_hypotheses(beams[i], naive_beams)


# -- tests of every search -------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_neither_batch_nor_padding_changes_a_result(strategy):
    model = sharp_model()
    rows = sources()
    together = generate(model, *padded(rows), max_lengths=LIMITS, strategy=strategy)
    alone = [
        generate(model, *padded([row]), max_lengths=[limit], strategy=strategy, numbers=[i])[0]
        for i, (row, limit) in enumerate(zip(rows, LIMITS, strict=True))
    ]
    order = random.Random(0).sample(range(8), 8)
    long = [5] * 23 + [END]
    shuffled = generate(
        model, *padded([rows[i] for i in order] + [long]),
        max_lengths=[LIMITS[i] for i in order] + [24], strategy=strategy, numbers=[*order, 8],
    )  # fmt: skip
    for i in range(8):
        assert_same_hypotheses(together[i], alone[i])
        assert_same_hypotheses(shuffled[order.index(i)], alone[i])


@needs_library
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scores_have_the_same_bits_in_every_batch(strategy, torch_is_faster):
    """Small batches read the weights unpacked, large batches would pack them."""
    torch_is_faster(torch.float32, rows=8)
    model = sharp_model()
    rows = sources(45)
    results = [
        generate(
            model,
            *padded(rows[first : first + size]),
            max_lengths=[12] * len(rows[first : first + size]),
            strategy=strategy,
            numbers=range(first, min(first + size, 45)),
        )
        for size in (45, 7)
        for first in range(0, 45, size)
    ]
    together, parts = results[0], [found for part in results[1:] for found in part]
    for actual, others in zip(together, parts, strict=True):
        assert [(h.tokens, h.score) for h in actual] == [(h.tokens, h.score) for h in others]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_begin_with_their_prefixes(strategy):
    model = sharp_model()
    prefixes = [[7, 8], [], [9] * 5, [4], [11, 12, 13], [], [6] * 20, [5]]
    limits = [6, 20, 12, 1, 20, 7, 20, 15]
    batch = padded(sources())
    found = generate(model, *batch, max_lengths=limits, strategy=strategy, prefixes=prefixes)
    cases = zip(sources(), limits, prefixes, found, strict=True)
    for i, (source, limit, prefix, hypotheses) in enumerate(cases):
        assert all(h.tokens[: len(prefix)] == prefix for h in hypotheses)
        if isinstance(strategy, Greedy):
            assert_same_hypotheses(hypotheses, [search_naively(model, source, limit, prefix)])
        elif isinstance(strategy, BeamSearch):
            naive = search_beams_naively(model, source, limit, strategy, prefix)
            assert_same_hypotheses(hypotheses, naive)
        elif not prefix:
            free = generate(
                model, *padded([source]), max_lengths=[limit], strategy=strategy, numbers=[i]
            )
            assert_same_hypotheses(hypotheses, free[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scores_are_those_of_the_whole_model(strategy):
    model = sharp_model()
    found = generate(model, *padded(sources()), max_lengths=LIMITS, strategy=strategy)
    for source, hypotheses in zip(sources(), found, strict=True):
        for h in hypotheses:
            target = h.tokens + [END] * h.ended
            total = sum(
                float(next_log_p(model, source, target[:t])[token])
                for t, token in enumerate(target)
            )
            assert h.log_probability == pytest.approx(total, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_attention_weights_are_those_of_the_whole_model(strategy):
    model = sharp_model()
    found = generate(
        model, *padded(sources()), max_lengths=LIMITS, strategy=strategy, return_attention=True
    )
    for source, (best, *others) in zip(sources(), found, strict=True):
        target = best.tokens + [END] * best.ended
        assert best.attention.shape == (2, 2, len(target), len(source))
        assert all(h.attention is None for h in others)
        whole = torch.zeros(1, len(source), dtype=torch.bool)
        with torch.no_grad(), record_attention(model) as weights:
            model(torch.tensor([source]), torch.tensor([[BEGIN, *target[:-1]]]), whole)
        for layer in range(2):
            expected = weights[f"decoder.layers.{layer}.multihead_attn"][0]
            torch.testing.assert_close(best.attention[layer], expected, rtol=1e-4, atol=1e-5)


def test_a_limit_of_zero_gives_nothing():
    model = sharp_model()
    for strategy in (Greedy(), BeamSearch(2)):
        found = generate(model, *padded(sources(2)), max_lengths=[0, 4], strategy=strategy)
        assert found[0] == [Hypothesis([], 0.0, 0.0, False)] and found[1][0].tokens
    empty = torch.zeros(0, 5, dtype=torch.long)
    assert generate(model, empty, empty == PAD, max_lengths=[]) == []


# -- errors ----------------------------------------------------------------------------------------
def test_errors_of_generate():
    model = small_model()
    source = torch.tensor([[5, END]])
    padding = source == PAD
    with pytest.raises(ValueError, match="model must be in eval mode, got one in training mode"):
        generate(model, source, padding, max_lengths=[3])
    model.eval()
    for message, arguments in (
        ("one length for each of 1 sources, got 2", {"max_lengths": [3, 3]}),
        ("must not exceed the model's max_length 24, got 25", {"max_lengths": [25]}),
        ("one prefix for each of 1 sources, got 0", {"prefixes": []}),
        ("must not be longer than their max_lengths, got 4 tokens for 3", {"prefixes": [[5] * 4]}),
        (r"prefixes must hold ordinary tokens, got \[5, 2\]", {"prefixes": [[5, END]]}),
        (r"prefixes must hold ordinary tokens, got \[30\]", {"prefixes": [[30]]}),
        (r"prefixes must hold ordinary tokens, got \[0\]", {"prefixes": [[PAD]]}),
        ("one number for each of 1", {"strategy": Sampling(), "numbers": [0, 1]}),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, source, padding, **{"max_lengths": [3], **arguments})
    with pytest.raises(ValueError, match="source_padding must be on the right, got a token"):
        generate(model, source, torch.tensor([[True, False]]), max_lengths=[3])
    with pytest.raises(ValueError, match=r"needs a fastattn\.nn decoder, got torch\.nn"):
        pytorch_model = small_model("torch").eval()
        generate(pytorch_model, source, padding, max_lengths=[3], use_cache=True)


@pytest.mark.parametrize(
    ("options", "changes", "wanted"),
    [
        (BeamSearch, {"beams": 0}, "at least 1, got 0"),
        (BeamSearch, {"length_penalty": -0.1}, r"at least 0, got -0\.1"),
        (Sampling, {"temperature": 0.0}, r"in \[1e-06, 1000000\.0\], got 0\.0"),
        (Sampling, {"temperature": math.nan}, r"in \[1e-06, 1000000\.0\], got nan"),
        (Sampling, {"top_k": 0}, "at least 1, got 0"),
        (Sampling, {"top_p": 0.0}, r"in \(0, 1\], got 0\.0"),
        (Sampling, {"top_p": 1.5}, r"in \(0, 1\], got 1\.5"),
    ],
)
def test_errors_of_strategies(options, changes, wanted):
    with pytest.raises(ValueError, match=f"^{next(iter(changes))} must (be|lie) {wanted}"):
        options(**changes)


# -- Translator ------------------------------------------------------------------------------------
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


def test_translator_passes_strategies_and_prefixes():
    pairs = toy_pairs(60)
    tokenizer = SubwordTokenizer.train((t for pair in pairs for t in pair), vocabulary=300)
    translator = Translator(small_model(vocabulary=tokenizer.vocabulary).eval(), tokenizer)
    texts = [pair.source for pair in pairs[:5]] + [""]
    prefixes = ["Ka", "", "Lo Mi", "", "Ka", "Ka"]
    found = translator.search(
        texts, prefixes=prefixes, strategy=BeamSearch(3), return_attention=True, max_length=9
    )
    for text, prefix, result in zip(texts[:5], prefixes, found, strict=False):
        assert result.text.startswith(prefix)
        source = tokenizer.encode(text)
        target = result.hypothesis.tokens + [END] * result.hypothesis.ended
        assert result.hypothesis.attention.shape[2:] == (len(target), len(source) + 1)
    assert found[-1] == generation.Translation("", None)
    # A text's random numbers do not depend on its batch.
    sampling = Sampling(seed=1)
    drawn = translator.translate(texts, strategy=sampling, batch_size=2)
    assert drawn == translator.translate(texts, strategy=sampling)
    assert drawn != translator.translate(texts)
    with pytest.raises(ValueError, match="prefixes must hold one for each of 6 texts, got 1"):
        translator.search(texts, prefixes=["Ka"])


def test_bleu():
    references = ["the cat sat on the mat", "a dog barked at the moon"]
    perfect = bleu(references, references)
    assert perfect.score == pytest.approx(100.0)
    assert perfect.details.startswith("BLEU = 100.00") and "tok:13a" in perfect.signature
    assert bleu(["x y z u", "v w"], references).score < 5.0
    # 6 of 6 words, 3 of 5 pairs, 1 of 4 triples; no match of 3 counts as half of one.
    smoothed = bleu(["the cat sat the mat on"], references[:1])
    assert smoothed.score == pytest.approx(100 * (6 / 6 * 3 / 5 * 1 / 4 * 0.5 / 3) ** 0.25)
    settings = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:"
    assert smoothed.signature.startswith(settings)
    with pytest.raises(ValueError, match="as many as the 1 hypotheses, got 2"):
        bleu(["a"], references)
