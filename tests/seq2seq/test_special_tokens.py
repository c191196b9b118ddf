"""Models whose special tokens are not the first of the vocabulary: the same results, renumbered."""

import dataclasses
import math

import pytest
import torch
from seq2seq_samples import CPU, SMALL, random_examples, small_model, toy_training

from fastattn.seq2seq.beam_search import BeamSearch
from fastattn.seq2seq.data import Example, SpecialTokens, collate
from fastattn.seq2seq.generation import GREEDY, generate
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer
from fastattn.seq2seq.sampling import Sampling
from fastattn.seq2seq.training import train

# Token t of the usual vocabulary is token NEW[t] of the other.
NEW = torch.randperm(SMALL.vocabulary, generator=torch.Generator().manual_seed(1)).tolist()
SPECIAL = SpecialTokens(*NEW[:3])


def pair_of_models(**changes) -> tuple[Seq2SeqTransformer, Seq2SeqTransformer]:
    usual = small_model(**changes)
    with torch.no_grad():
        usual.embedding.weight[2] *= 2.0  # so that some results end
        for layer in usual.transformer.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight *= 2.0
    other = Seq2SeqTransformer(dataclasses.replace(usual.config, **SPECIAL._asdict()))
    state = usual.state_dict()
    weight = torch.empty_like(state["embedding.weight"])
    weight[NEW] = state["embedding.weight"]
    other.load_state_dict({**state, "embedding.weight": weight})
    return usual, other


def renumbered(examples: list[Example]) -> list[Example]:
    return [Example(*([NEW[t] for t in side] for side in example)) for example in examples]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    "strategy", [GREEDY, BeamSearch(3), BeamSearch(20), Sampling(top_k=8), Sampling(top_p=0.7)]
)
def test_searches_choose_the_same_tokens(strategy, use_cache):
    usual, other = (model.eval() for model in pair_of_models())
    examples = random_examples(8)
    first, second = collate(examples), collate(renumbered(examples), SPECIAL)
    prefixes = [[5, 9]] + [[]] * 7
    options = {"max_lengths": [12] * 8, "strategy": strategy, "use_cache": use_cache}
    wanted = generate(usual, first.source, first.source_padding, prefixes=prefixes, **options)
    found = generate(
        other, second.source, second.source_padding,
        prefixes=[[NEW[t] for t in prefix] for prefix in prefixes], **options,
    )  # fmt: skip
    assert any(best.ended for best, *_ in wanted)
    for a, b in zip(wanted, found, strict=True):
        assert [[NEW[t] for t in each.tokens] for each in a] == [each.tokens for each in b]
        scores = [each.score for each in a], [each.score for each in b]
        torch.testing.assert_close(*map(torch.tensor, scores), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, {"packed": True}, {"scheduled_sampling": "parallel"}, {"sequence_steps": 2}]
)
def test_training_has_the_same_losses(changes):
    usual, other = pair_of_models()
    examples = random_examples(30)
    config = toy_training(steps=3, **changes)
    losses = [
        train(model, part[:20], part[20:], config, device=CPU, show=False)
        for model, part in ((usual, examples), (other, renumbered(examples)))
    ]
    if not ("scheduled_sampling" in changes or "sequence_steps" in changes):
        torch.testing.assert_close(*(torch.tensor(r.losses) for r in losses), rtol=1e-3, atol=1e-3)
    # Draws depend on the order of the vocabulary, the first loss and the validation do not.
    a, b = (result.validations[-1][1] for result in losses)
    assert math.isclose(a, b, rel_tol=0.05)


def test_begin_may_be_the_end_or_the_padding():
    for special in (SpecialTokens(29, 29, 5), SpecialTokens(4, 6, 6), SpecialTokens(0, 0, 1)):
        config = dataclasses.replace(SMALL, **special._asdict())
        torch.manual_seed(0)
        model = Seq2SeqTransformer(config).eval()
        batch = collate([Example([8, 9, special.end], [7, special.end])], special)
        assert batch.target_in.tolist() == [[special.begin, 7]]
        for strategy in (GREEDY, BeamSearch(4), Sampling()):
            ((best, *_),) = generate(
                model, batch.source, batch.source_padding, max_lengths=[9], strategy=strategy
            )
            assert special.pad not in best.tokens and special.end not in best.tokens
            # Its probability is that of teacher forcing.
            tokens = best.tokens + [special.end] * best.ended
            logits = model(
                batch.source, torch.tensor([[special.begin, *tokens[:-1]]]), batch.source_padding
            )
            log_p = logits.log_softmax(-1)[0, range(len(tokens)), tokens].sum().item()
            assert best.log_probability == pytest.approx(log_p, abs=1e-4)


@pytest.mark.parametrize("strategy", [GREEDY, Sampling(), BeamSearch(3)])
def test_tokens_that_are_not_scored_count_as_certain(strategy):
    model = small_model().eval()
    batch = collate(random_examples(3))
    inputs = model, batch.source, batch.source_padding
    options = {"max_lengths": [8] * 3, "strategy": strategy, "prefixes": [[7, 9]] * 3}
    scored, unscored = (generate(*inputs, unscored=count, **options) for count in (0, 1))
    begin = torch.full((3, 1), model.config.begin)
    log_p = model(batch.source, begin, batch.source_padding).log_softmax(-1)[:, 0, 7]
    for a, b, first in zip(scored, unscored, log_p.tolist(), strict=True):
        assert a[0].tokens == b[0].tokens and b[0].tokens[:2] == [7, 9]
        assert b[0].log_probability == pytest.approx(a[0].log_probability - first, abs=1e-4)


OTHER_LIBRARIES = {
    "heads": {"head_dim": 6, "heads": 3, "attention_scale": 1.0},
    "relative positions": {"positions": "t5", "relative_buckets": 8, "relative_distance": 9},
    "sinusoids": {"sinusoid_halves": True, "sinusoid_inclusive": True, "first_position": 2},
    "two tables": {"positions": "learned", "shared_positions": False, "embedding_norm": True},
    "norms": {"norm": "rms", "norm_eps": 1e-6, "bias": False, "final_dropout": True},
    "post-norm": {"norm_first": False, "final_norm": False, "embedding_scale": 1.0},
    "gated": {"activation": "geglu_tanh", "padding_gradient": False},
    "gated in one op": {"activation": "swiglu", "activation_dropout": 0.0},
    "embeddings": {"tied": "embeddings", "head_scale": 0.3, "head_bias": True},
    "two vocabularies": {"tied": "target", "target_vocabulary": 37},
    "target": {"tied": "target", "activation": "gelu_tanh", "attention_dropout": 0.0},
}


@pytest.mark.parametrize("name", OTHER_LIBRARIES)
def test_options_hold_in_packed_and_cached_execution(name):
    """Values are compared with transformers in test_from_huggingface."""
    model = small_model(**OTHER_LIBRARIES[name]).eval()
    assert ModelConfig.from_json(model.config.to_json()) == model.config
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    batch = collate(random_examples(6))
    with torch.no_grad():
        padded = model(batch.source, batch.target_in, batch.source_padding)
        packed, targets = model.forward_packed(batch)
    real = batch.target_out != model.config.pad
    torch.testing.assert_close(packed, padded[real], rtol=1e-4, atol=1e-4)
    assert torch.equal(targets, batch.target_out[real])
    for strategy in (GREEDY, BeamSearch(3)):
        options = {"max_lengths": [10] * 6, "strategy": strategy}
        cached, prefix = (
            generate(model, batch.source, batch.source_padding, use_cache=use, **options)
            for use in (True, False)
        )
        assert [a[0].tokens for a in cached] == [a[0].tokens for a in prefix]
        for a, b in zip(cached, prefix, strict=True):
            assert a[0].score == pytest.approx(b[0].score, abs=1e-3)
    assert (small_model(**OTHER_LIBRARIES[name]).state_dict().keys()) == model.state_dict().keys()
