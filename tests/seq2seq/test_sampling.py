"""Sampling: the distribution of the tokens, top-k and top-p, seeds."""

import pytest
import torch
from naive_search import LIMITS, next_log_p, padded, sharp_model, sources

from fastattn.seq2seq.data import END
from fastattn.seq2seq.generation import Greedy, Programs, generate
from fastattn.seq2seq.sampling import Sampling, draw, uniform_numbers


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
