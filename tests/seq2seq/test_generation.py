"""Greedy decoding compared with a naive one, and what holds for every search strategy.

Ragged sources, limits and prefixes, attention, every kind of model, error messages.
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
from seq2seq_samples import CLASSES, small_model

import fastattn.nn
from fastattn.seq2seq.beam_search import BeamSearch
from fastattn.seq2seq.data import BEGIN, END, PAD
from fastattn.seq2seq.generation import Greedy, Hypothesis, Programs, generate, greedy_decode
from fastattn.seq2seq.model import record_attention
from fastattn.seq2seq.sampling import Sampling

# Greedy


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


# Every kind of model


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


# Tests of every search


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
        model,
        *padded([rows[i] for i in order] + [long]),
        max_lengths=[LIMITS[i] for i in order] + [24],
        strategy=strategy,
        numbers=[*order, 8],
    )
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


# Errors


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
