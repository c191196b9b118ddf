"""`generate` of patched encoder-decoders against the same model before, on tiny random models."""

import copy
import itertools
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

transformers = pytest.importorskip("transformers")

from transformers_models import SMALL, VOCABULARY, build, tokens  # noqa: E402

import fastattn  # noqa: E402
from fastattn.integrations import foreign_generation  # noqa: E402

# The name of the cache in arguments and results.
OUTPUT_FIELDS = transformers.modeling_outputs.Seq2SeqLMOutput.__dataclass_fields__
CACHE = "cache" if "cache" in OUTPUT_FIELDS else "past_key_values"
SIZES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1, "max_position_embeddings": 64,
}  # fmt: skip
T5_SIZES = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 1,
}  # fmt: skip


def _kind(model: str, config: str, **options: Any) -> Callable[[], Any]:
    sizes = T5_SIZES if "T5" in config else SIZES | {"forced_eos_token_id": None}
    return lambda: (
        getattr(transformers, model),
        getattr(transformers, config)(**sizes | SMALL | options),
    )


MODELS = {
    "marian": _kind("MarianMTModel", "MarianConfig"),
    "marian-scaled": _kind(
        "MarianMTModel", "MarianConfig", scale_embedding=True, activation_function="swish",
        decoder_layers=1,
    ),
    "bart": _kind("BartForConditionalGeneration", "BartConfig"),
    "bart-forced": _kind(
        "BartForConditionalGeneration", "BartConfig", forced_bos_token_id=5, forced_eos_token_id=2
    ),
    "mbart": _kind("MBartForConditionalGeneration", "MBartConfig"),
    "pegasus": _kind("PegasusForConditionalGeneration", "PegasusConfig"),
    "m2m100": _kind("M2M100ForConditionalGeneration", "M2M100Config"),
    "t5": _kind("T5ForConditionalGeneration", "T5Config"),
    "t5-gated": _kind(
        "T5ForConditionalGeneration", "T5Config", feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8, relative_attention_max_distance=12,
    ),
    "mt5": _kind("MT5ForConditionalGeneration", "MT5Config"),
}  # fmt: skip
WHISPER = _kind(
    "WhisperForConditionalGeneration", "WhisperConfig", max_source_positions=20, num_mel_bins=8,
    max_target_positions=64, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip
STRATEGIES: dict[str, dict[str, Any]] = {
    # Random weights repeat one token, which hides wrong steps.
    "greedy": {"num_beams": 1, "no_repeat_ngram_size": 1},
    "beams": {"num_beams": 4},
    "sampling": {"do_sample": True},
}


def _generate(model: Any, side: str = "left", new: int = 8, **options: Any) -> Any:
    ids, mask = tokens(side)
    torch.manual_seed(7)
    return model.generate(
        ids, attention_mask=mask, **{"max_new_tokens": new, "do_sample": False} | options
    )


def _both(model: Any, **options: Any) -> tuple[Any, Any, dict[str, int]]:
    """What the model generates before it is patched and after, the second time, and its calls by
    the model's own path.
    """
    expected = _generate(model, **options)
    with fastattn.patch(model, quiet=True) as report:
        _generate(model, **options)
        return expected, _generate(model, **options), report.generate[""]


@pytest.mark.parametrize("name", MODELS)
def test_tokens(name: str) -> None:
    model = build(MODELS[name], "eager")
    for side in ("left", "right"):
        for strategy, options in STRATEGIES.items():
            expected, got, fallbacks = _both(model, side=side, **options)
            assert torch.equal(got, expected), (side, strategy)
            assert not fallbacks


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_replayed(name: str) -> None:
    model = build(MODELS[name], "eager")
    with fastattn.patch(model, quiet=True):
        _generate(model)
        (program,) = model.__dict__[foreign_generation.STATE].programs.values()
        assert program._replay.is_replayed
        calls = 0
        forward = program._forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return forward(*args, **kwargs)

        program._forward = counted
        _generate(model)
        assert calls == 1  # the prompt


def test_more_positions_than_a_cache_has() -> None:
    m2m100 = "M2M100ForConditionalGeneration", "M2M100Config"
    for make, strategy, new in (
        (MODELS["marian"], "beams", 40),
        (MODELS["t5"], "beams", 40),
        (MODELS["bart"], "greedy", 40),
        (MODELS["m2m100"], "greedy", 70),  # whose table of 64 positions grows
        (_kind(*m2m100, max_position_embeddings=20), "greedy", 70),  # twice
    ):
        model = build(make, "eager")
        expected, got, fallbacks = _both(model, new=new, min_new_tokens=new, **STRATEGIES[strategy])
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
    expected = {option: _generate(model, **given) for option, given in OPTIONS.items()}
    with fastattn.patch(model, quiet=True) as report:
        for option, given in OPTIONS.items():
            for _ in range(2):  # the second time by kept steps
                assert torch.equal(_generate(model, **given), expected[option]), option
        assert not report.generate[""]
    assert len({str(result.tolist()) for result in expected.values()}) > len(OPTIONS) * 2 // 3


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["marian", "t5"])
def test_all_results(name: str, beams: int) -> None:
    model = build(MODELS[name], "eager").double()  # small differences of fp32 grow in T5
    expected, got, fallbacks = _both(
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
        cache = _generate(model, **options).past_key_values
        keys = cache.self_attention_cache.layers[0].keys.clone()
        _generate(model, **options, side="right")
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
    expected, got, fallbacks = _both(model, **given)
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
    expected = _generate(model)
    ids = tokens("left")[0]
    cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    with fastattn.patch(model, quiet=True) as report:
        reasons = report.generate[""]
        assert torch.equal(_generate(model, past_key_values=cache), expected)
        assert reasons == {f"has {CACHE}": 1}
        handle = model.model.decoder.layers[0].fc1.register_forward_hook(lambda *a: None)
        assert torch.equal(_generate(model), expected)
        assert reasons.popitem() == ("is of a model with hooks, as of a Linear", 1)
        handle.remove()
        model.model.decoder.layers[0].fc1.compile(backend="eager")
        assert torch.equal(_generate(model), expected)
        assert reasons.popitem() == ("is of a compiled model, as of a Linear", 1)
        model.model.decoder.layers[0].fc1._compiled_call_impl = None
        model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)
        assert torch.equal(_generate(model), expected)
        why, count = reasons.popitem()
        assert (why, count) == ("is of a model with its own forward, as of a MarianMTModel", 1)
        del model.forward
        _generate(model.train())
        assert reasons.popitem() == ("is in training mode", 1)
        with torch.autocast("cpu", torch.bfloat16):
            _generate(model.eval())
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
        assert torch.equal(_generate(model), _generate(plain))
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            for options in STRATEGIES.values():
                assert torch.equal(_generate(model, **options), _generate(plain, **options))
            why = f"is of a model with attn_implementation={implementation!r}"
            assert reasons.pop(why) == len(STRATEGIES)
        model.set_attn_implementation("fastattn")
        fc1 = model.model.decoder.layers[0].fc1
        fc1.forward = scaled
        before = _generate(model)
        factor = -2.0
        assert not torch.equal(_generate(model), before)
        assert reasons.popitem() == ("is of a model with its own forward, as of a Linear", 2)
        del fc1.forward
        calls = []
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, *_: calls.append(module)
        )
        _generate(model)
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
        _generate(model, output_attentions=True, return_dict_in_generate=True)
        _generate(model)
        assert report.generate[""] == {"has output_attentions": 1}


# -- the model ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_generation_in_the_middle_of_training(name: str) -> None:
    plain: Any = build(MODELS[name], "eager")
    plain.to(torch.float64 if name == "t5" else torch.float32)  # where small differences grow
    model: Any = copy.deepcopy(plain)
    ids, mask = tokens("right")
    labels = torch.randint(3, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(5))
    results: list[list[list[int]]] = []
    with fastattn.patch(model, quiet=True) as report:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, model)]
        for _ in range(3):
            expected, got = (_generate(m, num_beams=2) for m in (plain, model))
            assert torch.equal(got, expected)
            results.append(got.tolist())
            for m, optimizer in zip((plain, model), optimizers, strict=True):
                m(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
        assert not report.generate[""]
    assert results[0] != results[2]


class _Adapter(torch.nn.Module):
    """As in the package peft: attributes of Python decide what is added to a linear layer."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.is_on, self.scaling = base, True, {"default": 1.0}
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)
        torch.nn.init.normal_(self.up.weight)

    def forward(self, x: Any) -> Any:
        added = self.scaling["default"] * self.up(self.down(x))
        return self.base(x) + added if self.is_on else self.base(x)


def test_adapters_between_calls() -> None:
    plain: Any = build(MODELS["bart"], "eager")
    model: Any = copy.deepcopy(plain)
    results = []
    with fastattn.patch(model, quiet=True) as report:

        def check() -> None:
            expected, got = (_generate(m, no_repeat_ngram_size=1) for m in (plain, model))
            assert torch.equal(got, expected)
            results.append(expected.tolist())

        check()
        layers = [layer for m in (plain, model) for layer in m.model.decoder.layers]
        for i, layer in enumerate(layers):
            torch.manual_seed(i % 2)
            layer.self_attn.q_proj = _Adapter(layer.self_attn.q_proj)
            layer.fc1 = _Adapter(layer.fc1)
        check()
        for layer in layers:
            layer.fc1.is_on = False
        check()
        for layer in layers:
            layer.self_attn.q_proj.scaling["default"] = -3.0
        check()
        assert not report.generate[""]
        # Steps of former states, which hold memory and parameters, are not kept.
        assert len(model.__dict__[foreign_generation.STATE].programs) == 1
    assert all(one != other for one, other in itertools.pairwise(results))


class _Scaled(torch.Tensor):
    """A tensor without memory of its own, as quantised weights of other packages are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return cls(func(args[0].inner))
        args, kwargs = tree_map_only(cls, lambda tensor: 2 * tensor.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_parameters_of_tensor_subclasses() -> None:
    plain: Any = build(MODELS["marian"], "eager")
    model: Any = copy.deepcopy(plain)
    for m in (plain, model):
        fc1 = m.model.decoder.layers[0].fc1
        fc1.weight = torch.nn.Parameter(_Scaled(fc1.weight.detach()), requires_grad=False)
    with fastattn.patch(model, quiet=True) as report:
        assert torch.equal(_generate(model), _generate(plain))
        assert report.generate[""] == {"is of a model with a _Scaled, as of a Linear": 1}


class _Kept(torch.nn.Module):
    """A module that keeps its last output, as probes do."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Any) -> Any:
        self.output = self.base(x)
        return self.output


def test_values_that_modules_keep() -> None:
    plain: Any = build(MODELS["marian"], "eager")
    for layer in plain.model.decoder.layers:
        layer.fc1 = _Kept(layer.fc1)
    model: Any = copy.deepcopy(plain)
    with fastattn.patch(model, quiet=True) as report:
        for calls in (1, 2):
            options: dict[str, Any] = {"new": 40, "min_new_tokens": 40}  # in two caches
            assert torch.equal(_generate(model, **options), _generate(plain, **options))
            for layer, other in zip(
                model.model.decoder.layers, plain.model.decoder.layers, strict=True
            ):
                torch.testing.assert_close(layer.fc1.output, other.fc1.output)
            why = "is of a model whose forward changes modules' attributes"
            assert report.generate[""] == {why: calls}


class _KeptLater(torch.nn.Module):
    """As _Kept, but not in the first of `calls`, the prompt of a sentence."""

    calls = 0

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.output = base, None

    def forward(self, x: Any) -> Any:
        y = self.base(x)
        if _KeptLater.calls > 0:
            self.output = y
        _KeptLater.calls += 1
        return y


def test_values_that_modules_keep_in_a_step() -> None:
    plain: Any = build(MODELS["marian"], "eager")
    layer = plain.model.decoder.layers[-1]
    layer.fc1 = _KeptLater(layer.fc1)
    model: Any = copy.deepcopy(plain)
    with fastattn.patch(model, quiet=True) as report:
        for calls in (1, 2):
            kept = []
            for m in (plain, model):
                _KeptLater.calls = 0
                kept.append((_generate(m), m.model.decoder.layers[-1].fc1.output))
            torch.testing.assert_close(kept[1], kept[0])
            why = "is of a model whose forward changes modules' attributes"
            assert report.generate[""] == {why: calls}


def test_memory_of_a_value_is_not_used_again_unnoticed() -> None:
    """As by a module that frees its value before it computes the next one."""
    module = torch.nn.Module()
    module.kept = torch.randn(3, 1, 32, requires_grad=True) * 2
    before = foreign_generation._setting(module.__dict__)
    address = module.kept.data_ptr()
    module.kept = None
    assert all(torch.empty(3, 1, 32).data_ptr() != address for _ in range(3))
    assert foreign_generation._setting(module.__dict__) != before


def test_parameters_that_move() -> None:
    model: Any = build(MODELS["marian"], "eager")
    other: Any = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    expected = _generate(other), _generate(other.double()), _generate(copy.deepcopy(model).double())
    with fastattn.patch(model, quiet=True) as report:
        before = _generate(model)
        other.float()
        for parameter, source in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data = source.data.clone()
        assert torch.equal(_generate(model), expected[0])
        assert torch.equal(_generate(model.double()), expected[1])
        assert not report.generate[""]
    assert not torch.equal(before, expected[0])


class _Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor


class _Chain(torch.nn.Module):
    """A linear layer, others and a scale that is an object."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        others = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.layers = torch.nn.ModuleList([base, *others, others[0]])
        self.scale = _Scale(1.0)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale.factor


def _transpose(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.detach().t())


def test_changes_that_keep_the_addresses_of_parameters() -> None:
    plain: Any = build(MODELS["t5"], "eager")
    torch.manual_seed(0)
    attention = plain.decoder.block[0].layer[0].SelfAttention
    attention.q = _Chain(attention.q).eval()
    plain.double()  # small differences of fp32 grow in T5
    model: Any = copy.deepcopy(plain)
    options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "new": 4}
    with fastattn.patch(model, quiet=True) as report:
        changes: tuple[Callable[[Any], None], ...] = (
            lambda chain: None,
            lambda chain: _transpose(chain.layers[2]),
            lambda chain: chain.layers.__setitem__(3, chain.layers[2]),
        )
        found = []
        for change in changes:
            for m in (plain, model):
                change(m.decoder.block[0].layer[0].SelfAttention.q)
            expected, got = (_generate(m, **options) for m in (plain, model))
            assert torch.equal(got.sequences, expected.sequences)
            torch.testing.assert_close(got.logits, expected.logits)
            found.append(expected.logits[-1])
        for m in (plain, model):
            m.config.scale_decoder_outputs = not m.config.scale_decoder_outputs
        expected, got = (_generate(m, **options) for m in (plain, model))
        torch.testing.assert_close(got.logits, expected.logits)
        found.append(expected.logits[-1])
        assert not report.generate[""]
    assert not any(torch.allclose(a, b) for a, b in itertools.pairwise(found))


def test_an_object_is_not_replaced_unnoticed_by_one_with_its_address() -> None:
    model: Any = build(MODELS["t5"], "eager")
    chain: Any = _Chain(torch.nn.Linear(32, 32)).eval()
    model.decoder.block[0].layer[0].SelfAttention.q = chain
    with fastattn.patch(model, quiet=True):
        _generate(model)
        address = id(chain.scale)
        chain.scale = None
        assert all(id(_Scale(-1.0)) != address for _ in range(3))  # CPython uses free memory first


def test_layers_in_training_mode() -> None:
    plain: Any = build(MODELS["marian"], "eager")
    for layer in plain.model.decoder.layers:
        layer.train()
    model: Any = copy.deepcopy(plain)
    with fastattn.patch(model, quiet=True) as report:
        assert torch.equal(_generate(model, num_beams=3), _generate(plain, num_beams=3))
        why = "is of a model with dropout in training mode, as of a MarianDecoderLayer"
        assert report.generate[""] == {why: 1}


def test_memory_is_released() -> None:
    model: Any = build(MODELS["bart"], "eager")
    fastattn.patch(model, quiet=True)
    _generate(model, new=1)
    assert not model.__dict__[foreign_generation.STATE].programs  # there is no step to keep
    _generate(model, new=40, min_new_tokens=40)
    programs = model.__dict__[foreign_generation.STATE].programs
    assert [program.cache.max_length for program in programs.values()] == [32, 64]
    for program in programs.values():
        for layer in program.cache.state.layers:
            assert layer.target.untyped_storage().nbytes() == 0
            assert layer.memory.untyped_storage().nbytes() == 0
    reference = weakref.ref(model)
    del model, programs, program, layer
    assert reference() is None  # without the garbage collector


def test_copies_and_pickles() -> None:
    model = build(MODELS["marian"], "eager")
    expected, kind = _generate(model), type(model)
    fastattn.patch(model, quiet=True)
    _generate(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(_generate(other), expected)
        fastattn.unpatch(other)
        assert type(other) is kind
        assert foreign_generation.STATE not in other.__dict__
        assert torch.equal(_generate(other), expected)
    fastattn.unpatch(model)
    assert type(model) is kind
    assert torch.equal(_generate(model), expected)


def test_calls_at_the_same_time() -> None:
    model = build(MODELS["marian"], "eager")
    with fastattn.patch(model, quiet=True):
        expected = {side: _generate(model, side=side, num_beams=2) for side in ("left", "right")}
        sides = ["left", "right"] * 4
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda side: _generate(model, side=side, num_beams=2), sides))
    for side, got in zip(sides, found, strict=True):
        assert torch.equal(got, expected[side])


def test_inference_mode() -> None:
    model = build(MODELS["t5"], "eager")
    expected = _generate(model, num_beams=2)
    with fastattn.patch(model, quiet=True):
        for _ in range(2):
            with torch.inference_mode():
                assert torch.equal(_generate(model, num_beams=2), expected)
            assert torch.equal(_generate(model, num_beams=2), expected)


def test_what_keeps_its_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(transformers.MarianMTModel):  # type: ignore[misc]
        pass

    own = Own(MODELS["marian"]()[1])
    assert "Own is a class of another package" in fastattn.patch(own, quiet=True).kept[""]
    kind, config = _kind("BlenderbotForConditionalGeneration", "BlenderbotConfig")()
    report = fastattn.patch(kind(config), quiet=True)
    assert report.kept[""] == "keeps its generate: fastattn has none for model_type blenderbot"
    monkeypatch.setattr(foreign_generation, "_OLDEST", (99, 1))
    report = fastattn.patch(build(MODELS["marian"], "eager"), quiet=True)
    assert "fastattn needs transformers >= 99.1, got 5." in report.kept[""]
