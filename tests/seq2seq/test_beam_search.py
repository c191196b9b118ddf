"""Beam search compared with a naive implementation."""

import pytest
from naive_search import (
    LIMITS,
    assert_same_hypotheses,
    padded,
    search_beams_naively,
    sharp_model,
    sources,
)
from seq2seq_samples import small_model

from fastattn.seq2seq.beam_search import BeamSearch
from fastattn.seq2seq.data import END
from fastattn.seq2seq.generation import generate


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


def test_beams_find_what_greedy_misses():
    model = sharp_model()
    greedy = generate(model, *padded(sources()), max_lengths=LIMITS)
    beams = generate(
        model, *padded(sources()), max_lengths=LIMITS, strategy=BeamSearch(5, length_penalty=0.0)
    )
    gains = [found[0].score - h.score for found, (h,) in zip(beams, greedy, strict=True)]
    assert max(gains) > 0.5
    one = generate(
        model, *padded(sources()), max_lengths=LIMITS, strategy=BeamSearch(1, length_penalty=0.0)
    )
    assert [h.tokens for (h,) in one] == [h.tokens for (h,) in greedy]


def test_a_larger_length_penalty_gives_longer_results():
    model = sharp_model()
    lengths = []
    for penalty in (0.0, 3.0):
        found = generate(
            model, *padded(sources()), max_lengths=[20] * 8, strategy=BeamSearch(4, penalty)
        )
        lengths.append(sum(len(best.tokens) for best, *_ in found))
    assert lengths[0] < lengths[1]


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
