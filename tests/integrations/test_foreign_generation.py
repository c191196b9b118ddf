"""`generate` of patched encoder-decoders against the same model before, on tiny random models."""

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from generating_models import (  # noqa: E402
    CACHE,
    MODELS,
    STRATEGIES,
    WHISPER,
    before_and_after,
    generated,
    seq2seq,
)
from transformers_models import build, tokens  # noqa: E402

import fastattn  # noqa: E402
from fastattn.integrations import foreign_generation  # noqa: E402


@pytest.mark.parametrize("name", MODELS)
def test_tokens(name: str) -> None:
    model = build(MODELS[name], "eager")
    for side in ("left", "right"):
        for strategy, options in STRATEGIES.items():
            expected, got, fallbacks = before_and_after(model, side=side, **options)
            assert torch.equal(got, expected), (side, strategy)
            assert not fallbacks


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_replayed(name: str) -> None:
    model = build(MODELS[name], "eager")
    with fastattn.patch(model, quiet=True):
        generated(model)
        (program,) = model.__dict__[foreign_generation.STATE].programs.values()
        assert program._replay.is_replayed
        calls = 0
        forward = program._forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return forward(*args, **kwargs)

        program._forward = counted
        generated(model)
        assert calls == 1  # the prompt


def test_more_positions_than_a_cache_has() -> None:
    m2m100 = "M2M100ForConditionalGeneration", "M2M100Config"
    for make, strategy, new in (
        (MODELS["marian"], "beams", 40),
        (MODELS["t5"], "beams", 40),
        (MODELS["bart"], "greedy", 40),
        (MODELS["m2m100"], "greedy", 70),  # whose table of 64 positions grows
        (seq2seq(*m2m100, max_position_embeddings=20), "greedy", 70),  # twice
    ):
        model = build(make, "eager")
        expected, got, fallbacks = before_and_after(
            model, new=new, min_new_tokens=new, **STRATEGIES[strategy]
        )
        assert expected.shape[1] == new + 1
        assert torch.equal(got, expected)
        assert not fallbacks


class _Favour(transformers.LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        scores[:, 7] += input_ids.shape[1] % 3
        return scores


class _Stop(transformers.StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return (input_ids == 9).sum(1) > 1


OPTIONS: dict[str, dict[str, Any]] = {
    "length_penalty": {"num_beams": 4, "length_penalty": 2.0, "max_new_tokens": 12},
    "early_stopping": {"num_beams": 4, "early_stopping": True},
    "never_stopping": {"num_beams": 3, "early_stopping": "never", "length_penalty": 0.0},
    "num_return_sequences": {"num_beams": 4, "num_return_sequences": 3},
    "sampled_sequences": {"do_sample": True, "num_return_sequences": 3},
    "sampled_beams": {"do_sample": True, "num_beams": 3},
    "warpers": {"do_sample": True, "temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "no_repeat_ngram_size": {"num_beams": 2, "no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"num_beams": 2, "encoder_no_repeat_ngram_size": 1},
    "repetition_penalty": {"repetition_penalty": 2.5},
    "forced": {"num_beams": 3, "forced_bos_token_id": 11, "forced_eos_token_id": 2},
    "suppress_tokens": {"suppress_tokens": [4, 5, 6], "begin_suppress_tokens": [7, 8]},
    "bad_words_ids": {"num_beams": 2, "bad_words_ids": [[5], [6, 7]]},
    "min_new_tokens": {"num_beams": 4, "min_new_tokens": 6},
    "several_ends": {"num_beams": 3, "eos_token_id": [2, 9, 12]},
    "prefix_allowed_tokens_fn": {
        "num_beams": 3,
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(3 + (len(ids) + row) % 4, 40, 3)),
    },
    "logits_processor": {"logits_processor": transformers.LogitsProcessorList([_Favour()])},
    "stopping_criteria": {
        "stopping_criteria": transformers.StoppingCriteriaList([_Stop()]), "num_beams": 2,
    },
    "prompt": {
        "decoder_input_ids": torch.tensor([[1, 5, 6], [1, 7, 8], [1, 9, 9]]), "num_beams": 3,
    },
    "max_length": {"max_new_tokens": None, "max_length": 7},
    "renormalize_logits": {"num_beams": 2, "renormalize_logits": True, "top_k": 5,
                           "do_sample": True},
}  # fmt: skip


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_options(name: str) -> None:
    model = build(MODELS[name], "eager")
    expected = {option: generated(model, **given) for option, given in OPTIONS.items()}
    with fastattn.patch(model, quiet=True) as report:
        for option, given in OPTIONS.items():
            for _ in range(2):  # the second time by kept steps
                assert torch.equal(generated(model, **given), expected[option]), option
        assert not report.generate[""]
    assert len({str(result.tolist()) for result in expected.values()}) > len(OPTIONS) * 2 // 3


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["marian", "t5"])
def test_all_results(name: str, beams: int) -> None:
    model = build(MODELS[name], "eager").double()  # small differences of fp32 grow in T5
    expected, got, fallbacks = before_and_after(
        model, num_beams=beams, output_scores=True, output_logits=True,
        return_dict_in_generate=True, new=10,
    )  # fmt: skip
    assert not fallbacks
    assert type(got) is type(expected)
    assert got.keys() == expected.keys()
    assert torch.equal(got.sequences, expected.sequences)
    lists = [("scores", "logits"), ("scores", "logits", "sequences_scores")][beams > 1]
    for key in lists:
        for a, b in zip(got[key], expected[key], strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    if beams > 1:
        assert torch.equal(got.beam_indices, expected.beam_indices)
    for part in ("self_attention_cache", "cross_attention_cache"):
        ours, theirs = (getattr(r.past_key_values, part).layers for r in (got, expected))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.keys, b.keys, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(a.values, b.values, atol=2e-5, rtol=1e-4)


def test_a_returned_cache_is_not_written_by_later_calls() -> None:
    model = build(MODELS["marian"], "eager")
    with fastattn.patch(model, quiet=True) as report:
        options = {"num_beams": 2, "return_dict_in_generate": True}
        cache = generated(model, **options).past_key_values
        keys = cache.self_attention_cache.layers[0].keys.clone()
        generated(model, **options, side="right")
        assert torch.equal(cache.self_attention_cache.layers[0].keys, keys)
        assert not report.generate[""]


def test_a_streamer_gets_every_token() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, tokens: Any) -> None:
            self.tokens += tokens.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    model = build(MODELS["marian"], "eager")
    ids = tokens("left")[0][1:2]
    streamers = Streamer(), Streamer()
    model.generate(ids, max_new_tokens=8, streamer=streamers[0])  # type: ignore[operator]
    with fastattn.patch(model, quiet=True) as report:
        model.generate(ids, max_new_tokens=8, streamer=streamers[1])  # type: ignore[operator]
        assert not report.generate[""]
    assert streamers[0].tokens == streamers[1].tokens
    assert len(streamers[0].tokens) > 3


def test_whisper() -> None:
    model: Any = build(WHISPER, "eager")
    frames = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(4))
    prompt = torch.tensor([[1, 5, 6], [1, 5, 6]])

    def run(**options: Any) -> Any:
        return model.generate(frames, decoder_input_ids=prompt, max_new_tokens=8, **options)

    for options in ({}, {"num_beams": 3}):
        expected = run(**options)
        with fastattn.patch(model, quiet=True) as report:
            assert [run(**options).tolist() for _ in range(2)] == [expected.tolist()] * 2
            assert not report.generate[""]


# -- the model's own path -------------------------------------------------------------------------
OWN_PATH: dict[str, tuple[dict[str, Any], str]] = {
    "attentions": (
        {"output_attentions": True, "return_dict_in_generate": True}, "has output_attentions"
    ),
    "hidden": (
        {"output_hidden_states": True, "return_dict_in_generate": True}, "has output_hidden_states"
    ),
    "no_cache": ({"use_cache": False}, "has use_cache=False"),
    "static": ({"cache_implementation": "static"}, "has cache_implementation='static'"),
    "decoder_mask": (
        {
            "decoder_input_ids": torch.tensor([[0, 1], [1, 4], [1, 4]]),
            "decoder_attention_mask": torch.tensor([[0, 1], [1, 1], [1, 1]]),
        },
        "has decoder_attention_mask",
    ),
}  # fmt: skip


@pytest.mark.parametrize("option", OWN_PATH)
def test_what_runs_the_models_own_path(option: str) -> None:
    given, reason = OWN_PATH[option]
    model = build(MODELS["marian"], "eager")
    expected, got, fallbacks = before_and_after(model, **given)
    assert fallbacks == {reason: 2}
    if isinstance(got, torch.Tensor):
        assert torch.equal(got, expected)
        return
    assert torch.equal(got.sequences, expected.sequences)
    for key in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        for a, b in zip(expected.get(key, ()), got.get(key, ()), strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)


def test_own_path_by_the_state_of_the_model() -> None:
    model: Any = build(MODELS["marian"], "eager")
    expected = generated(model)
    ids = tokens("left")[0]
    cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    with fastattn.patch(model, quiet=True) as report:
        reasons = report.generate[""]
        assert torch.equal(generated(model, past_key_values=cache), expected)
        assert reasons == {f"has {CACHE}": 1}
        handle = model.model.decoder.layers[0].fc1.register_forward_hook(lambda *a: None)
        assert torch.equal(generated(model), expected)
        assert reasons.popitem() == ("is of a model with hooks, as of a Linear", 1)
        handle.remove()
        model.model.decoder.layers[0].fc1.compile(backend="eager")
        assert torch.equal(generated(model), expected)
        assert reasons.popitem() == ("is of a compiled model, as of a Linear", 1)
        model.model.decoder.layers[0].fc1._compiled_call_impl = None
        model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)
        assert torch.equal(generated(model), expected)
        why, count = reasons.popitem()
        assert (why, count) == ("is of a model with its own forward, as of a MarianMTModel", 1)
        del model.forward
        generated(model.train())
        assert reasons.popitem() == ("is in training mode", 1)
        with torch.autocast("cpu", torch.bfloat16):
            generated(model.eval())
        assert reasons.popitem() == ("is under autocast", 1)
        assistant = build(MODELS["marian"], "eager")
        assisted = model.generate(ids[1:2], max_new_tokens=8, assistant_model=assistant)
        assert torch.equal(assisted, model.generate(ids[1:2], max_new_tokens=8))
        assert reasons == {f"has {CACHE}": 1, "runs assisted decoding": 1}
        assert f"1 calls by its own path: the call has {CACHE}" in str(report)


def test_own_path_after_changes_that_no_recorded_step_has() -> None:
    plain: Any = build(MODELS["marian"], "eager")
    model: Any = copy.deepcopy(plain)
    factor = 1.0

    def scaled(x: Any) -> Any:
        return factor * torch.nn.functional.linear(x, fc1.weight, fc1.bias)

    with fastattn.patch(model, quiet=True) as report:
        reasons = report.generate[""]
        assert torch.equal(generated(model), generated(plain))
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            for options in STRATEGIES.values():
                assert torch.equal(generated(model, **options), generated(plain, **options))
            why = f"is of a model with attn_implementation={implementation!r}"
            assert reasons.pop(why) == len(STRATEGIES)
        model.set_attn_implementation("fastattn")
        fc1 = model.model.decoder.layers[0].fc1
        fc1.forward = scaled
        before = generated(model)
        factor = -2.0
        assert not torch.equal(generated(model), before)
        assert reasons.popitem() == ("is of a model with its own forward, as of a Linear", 2)
        del fc1.forward
        calls = []
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, *_: calls.append(module)
        )
        generated(model)
        handle.remove()
        assert calls.count(fc1) == 8
        assert reasons.popitem() == ("is made while hooks of all modules are registered", 1)


def test_one_memory_for_several_prompts() -> None:
    model: Any = build(MODELS["bart"], "eager")
    prompts = torch.tensor([[1, 4], [1, 5], [1, 9]])
    memory = model.model.encoder(tokens("left")[0][1:2])

    def run() -> Any:
        return model.generate(
            encoder_outputs=memory, decoder_input_ids=prompts, max_new_tokens=8, do_sample=False
        )

    expected = run()
    with fastattn.patch(model, quiet=True) as report:
        assert torch.equal(run(), expected)
        assert list(report.generate[""]) == [
            "has a batch of encoder_outputs that is not that of its tokens"
        ]


def test_attentions_once_requested_do_not_prevent_later_replays() -> None:
    """transformers leaves its hooks in the model."""
    model = build(MODELS["marian"], "eager")
    with fastattn.patch(model, quiet=True) as report:
        generated(model, output_attentions=True, return_dict_in_generate=True)
        generated(model)
        assert report.generate[""] == {"has output_attentions": 1}
