"""Patched encoder-decoders remain models that change between calls and steps of `generate`, are
copied, trained and used by several threads.
"""

import copy
import itertools
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

transformers = pytest.importorskip("transformers")

from generating_models import MODELS, generated, seq2seq  # noqa: E402
from transformers_models import VOCABULARY, build, tokens  # noqa: E402

import fastattn  # noqa: E402
from fastattn.integrations import foreign_generation  # noqa: E402


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
            expected, got = (generated(m, num_beams=2) for m in (plain, model))
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
            expected, got = (generated(m, no_repeat_ngram_size=1) for m in (plain, model))
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
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return cls(op(args[0].inner))
        args, kwargs = tree_map_only(cls, lambda tensor: 2 * tensor.inner, (args, kwargs or {}))
        return op(*args, **kwargs)


def test_parameters_of_tensor_subclasses() -> None:
    plain: Any = build(MODELS["marian"], "eager")
    model: Any = copy.deepcopy(plain)
    for m in (plain, model):
        fc1 = m.model.decoder.layers[0].fc1
        fc1.weight = torch.nn.Parameter(_Scaled(fc1.weight.detach()), requires_grad=False)
    with fastattn.patch(model, quiet=True) as report:
        assert torch.equal(generated(model), generated(plain))
        assert report.generate[""] == {"is of a model with a _Scaled, as of a Linear": 1}


class _Kept(torch.nn.Module):
    """A module that keeps its last output, as probes do, from a number of `calls` on."""

    calls = 0  # since a sentence's prompt

    def __init__(self, base: Any, first: int) -> None:
        super().__init__()
        self.base, self.first, self.output = base, first, None

    def forward(self, x: Any) -> Any:
        y = self.base(x)
        if _Kept.calls >= self.first:
            self.output = y
        _Kept.calls += 1
        return y


@pytest.mark.parametrize("first", [0, 1])
def test_values_that_modules_keep(first: int) -> None:
    plain: Any = build(MODELS["marian"], "eager")
    layer = plain.model.decoder.layers[-1]
    layer.fc1 = _Kept(layer.fc1, first)
    model: Any = copy.deepcopy(plain)
    with fastattn.patch(model, quiet=True) as report:
        for calls in (1, 2):
            kept = []
            for m in (plain, model):
                _Kept.calls = 0
                result = generated(m, new=40, min_new_tokens=40)  # in two caches
                kept.append((result, m.model.decoder.layers[-1].fc1.output))
            torch.testing.assert_close(kept[1], kept[0])
            why = "is of a model whose forward changes modules' attributes"
            assert report.generate[""] == {why: calls}


def test_memory_of_a_value_is_not_used_again_unnoticed() -> None:
    """As by a module that frees its value before it computes the next one."""
    module, x = torch.nn.Module(), torch.randn(3, 1, 32, requires_grad=True)
    module.kept = x * 2
    value, source = (StorageWeakRef(t.untyped_storage()) for t in (module.kept, x))
    setting = foreign_generation._setting(module.__dict__)
    module.kept = x = None
    assert not value.expired() and source.expired()  # without its graph
    del setting
    assert value.expired()


def test_parameters_that_move() -> None:
    model: Any = build(MODELS["marian"], "eager")
    other: Any = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    expected = generated(other), generated(other.double()), generated(copy.deepcopy(model).double())
    with fastattn.patch(model, quiet=True) as report:
        before = generated(model)
        other.float()
        for parameter, source in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data = source.data.clone()
        assert torch.equal(generated(model), expected[0])
        assert torch.equal(generated(model.double()), expected[1])
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
            expected, got = (generated(m, **options) for m in (plain, model))
            assert torch.equal(got.sequences, expected.sequences)
            torch.testing.assert_close(got.logits, expected.logits)
            found.append(expected.logits[-1])
        for m in (plain, model):
            m.config.scale_decoder_outputs = not m.config.scale_decoder_outputs
        expected, got = (generated(m, **options) for m in (plain, model))
        torch.testing.assert_close(got.logits, expected.logits)
        found.append(expected.logits[-1])
        assert not report.generate[""]
    assert not any(torch.allclose(a, b) for a, b in itertools.pairwise(found))


def test_an_object_is_not_replaced_unnoticed_by_one_with_its_address() -> None:
    model: Any = build(MODELS["t5"], "eager")
    chain: Any = _Chain(torch.nn.Linear(32, 32)).eval()
    model.decoder.block[0].layer[0].SelfAttention.q = chain
    with fastattn.patch(model, quiet=True):
        generated(model)
        address = id(chain.scale)
        chain.scale = None
        assert all(id(_Scale(-1.0)) != address for _ in range(3))  # CPython uses free memory first


def test_layers_in_training_mode() -> None:
    plain: Any = build(MODELS["marian"], "eager")
    for layer in plain.model.decoder.layers:
        layer.train()
    model: Any = copy.deepcopy(plain)
    with fastattn.patch(model, quiet=True) as report:
        assert torch.equal(generated(model, num_beams=3), generated(plain, num_beams=3))
        why = "is of a model with dropout in training mode, as of a MarianDecoderLayer"
        assert report.generate[""] == {why: 1}


def test_memory_is_released() -> None:
    model: Any = build(MODELS["bart"], "eager")
    fastattn.patch(model, quiet=True)
    generated(model, new=1)
    assert not model.__dict__[foreign_generation.STATE].programs  # there is no step to keep
    generated(model, new=40, min_new_tokens=40)
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
    expected, kind = generated(model), type(model)
    fastattn.patch(model, quiet=True)
    generated(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(generated(other), expected)
        fastattn.unpatch(other)
        assert type(other) is kind
        assert foreign_generation.STATE not in other.__dict__
        assert torch.equal(generated(other), expected)
    fastattn.unpatch(model)
    assert type(model) is kind
    assert torch.equal(generated(model), expected)


def test_calls_at_the_same_time() -> None:
    model = build(MODELS["marian"], "eager")
    with fastattn.patch(model, quiet=True):
        expected = {side: generated(model, side=side, num_beams=2) for side in ("left", "right")}
        sides = ["left", "right"] * 4
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda side: generated(model, side=side, num_beams=2), sides))
    for side, got in zip(sides, found, strict=True):
        assert torch.equal(got, expected[side])


def test_inference_mode() -> None:
    model = build(MODELS["t5"], "eager")
    expected = generated(model, num_beams=2)
    with fastattn.patch(model, quiet=True):
        for _ in range(2):
            with torch.inference_mode():
                assert torch.equal(generated(model, num_beams=2), expected)
            assert torch.equal(generated(model, num_beams=2), expected)


def test_what_keeps_its_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(transformers.MarianMTModel):  # type: ignore[misc]
        pass

    own = Own(MODELS["marian"]()[1])
    assert "Own is a class of another package" in fastattn.patch(own, quiet=True).kept[""]
    kind, config = seq2seq("BlenderbotForConditionalGeneration", "BlenderbotConfig")()
    report = fastattn.patch(kind(config), quiet=True)
    assert report.kept[""] == "keeps its generate: fastattn has none for model_type blenderbot"
    monkeypatch.setattr(foreign_generation, "_OLDEST", (99, 1))
    report = fastattn.patch(build(MODELS["marian"], "eager"), quiet=True)
    assert "fastattn needs transformers >= 99.1, got 5." in report.kept[""]
