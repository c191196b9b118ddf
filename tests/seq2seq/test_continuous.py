"""Continuous batching: the results of `generate`, whatever the places and pages.

Bit for bit with the CPU library, whose products of a row do not depend on the batch.
"""

import pytest
import torch
from cpu_library import needs_library
from naive_search import KINDS, assert_same_hypotheses, padded, sharp_model, sources
from seq2seq_samples import small_model, toy_pairs

from fastattn.nn import step_graph
from fastattn.seq2seq import continuous, generation
from fastattn.seq2seq.beam_search import BeamSearch
from fastattn.seq2seq.continuous import Sentence
from fastattn.seq2seq.data import END, SubwordTokenizer
from fastattn.seq2seq.generation import Translator, generate
from fastattn.seq2seq.model import Seq2SeqTransformer
from fastattn.seq2seq.non_autoregressive import make_model
from fastattn.seq2seq.sampling import Sampling

COUNT = 21
# Up to 24 tokens, two pages: some sentences end within the first.
LIMITS = [1 + 5 * i % 24 for i in range(COUNT)]
SAMPLING = Sampling(0.8, top_k=20, top_p=0.9, seed=2)


def sentences(prefixes=None) -> list[Sentence]:
    prefixes = prefixes or [()] * COUNT
    rows = zip(sources(COUNT), LIMITS, prefixes, strict=True)
    return [Sentence(*row, number) for number, row in enumerate(rows)]


def run(model, rows, strategy=generation.GREEDY, **changes):
    options = {"unscored": 0, "places": 5, "page_size": 16, "pages": None} | changes
    return generation._generate_continuously(
        model, rows, strategy, notify=lambda count: None, **options
    )


def batched(model, rows, strategy=generation.GREEDY, **options):
    found = generate(
        model, *padded([row.source for row in rows]), strategy=strategy,
        max_lengths=[row.max_length for row in rows],
        prefixes=[row.prefix for row in rows], **options,
    )  # fmt: skip
    return [best for (best,) in found]


@needs_library
@pytest.mark.parametrize("strategy", [generation.GREEDY, SAMPLING], ids=["greedy", "sampling"])
def test_results_are_those_of_a_batch(strategy):
    model = sharp_model()
    prefixes = [[5 + i] * min(i % 4, LIMITS[i]) for i in range(COUNT)]
    for rows, unscored in ((sentences(), 0), (sentences(prefixes), 1)):
        expected = batched(model, rows, strategy, unscored=unscored)
        assert len({len(h.tokens) for h in expected}) > 5 and len({h.ended for h in expected}) == 2
        for places in (1, 5, COUNT):
            assert run(model, rows, strategy, places=places, unscored=unscored) == expected


@needs_library
@pytest.mark.parametrize("pages", [3, 4, 11])
def test_sentences_wait_for_pages(pages, monkeypatch):
    """A sentence needs up to three pages: one fits, two do until one of them needs its third."""
    model, begun = sharp_model(), []
    start = continuous.ContinuousBatch._start

    def count(self, rows, waiting, free):
        started = start(self, rows, waiting, free)
        begun.extend(started)
        return started

    monkeypatch.setattr(continuous.ContinuousBatch, "_start", count)
    rows = sentences([[5 + i] * (LIMITS[i] - 1) for i in range(COUNT)])  # as long as allowed
    assert run(model, rows, pages=pages) == batched(model, rows)
    assert set(begun) == set(range(COUNT))
    # Some begin twice, where the pages suffice to begin but not to continue.
    assert (len(begun) > COUNT) == (pages == 4)


@needs_library
@pytest.mark.parametrize("pages", [None, 4])
def test_steps_are_recorded_before_the_first_sentence(pages, monkeypatch):
    """As for a CUDA graph, which needs two steps, and whose replays are checked every 8 steps."""

    def record(step, rewind, device, **options):
        for _ in range(2):
            rewind()
            tape = step_graph.Tape(step)
            tape()
        rewind()
        return tape

    model = sharp_model()
    expected = batched(model, sentences())
    monkeypatch.setattr(generation, "recorded", record)
    monkeypatch.setattr(generation, "STEPS_BETWEEN_END_CHECKS", {"cpu": 8})
    assert run(model, sentences(), pages=pages) == expected


@pytest.mark.parametrize("changes", [k for k in KINDS if "scoring" not in k], ids=str)
def test_every_kind_of_model_decodes_continuously(changes):
    model = small_model(tied=False, seed=7, **changes).eval()
    with torch.no_grad():
        model.head.weight.mul_(3.0)
        model.head.weight[END].mul_(4.0)
    for found, expected in zip(run(model, sentences()), batched(model, sentences()), strict=True):
        assert_same_hypotheses([found], [expected])


def test_steps_are_replayed_unless_there_are_hooks(monkeypatch):
    model, tapes, calls = sharp_model(), [], []
    decoder = model.transformer.decoder
    step = type(decoder).step
    monkeypatch.setattr(
        type(decoder), "step", lambda self, *args: calls.append(1) or step(self, *args)
    )
    init = step_graph.Tape.__init__
    monkeypatch.setattr(
        step_graph.Tape, "__init__",
        lambda self, *args: tapes.append(self) or init(self, *args),
    )  # fmt: skip
    expected = run(model, sentences())
    assert len(calls) == len(tapes) == 1 and tapes[0].is_replayed
    hook = decoder.layers[0].linear1.register_forward_hook(lambda *_: None)
    assert [h.tokens for h in run(model, sentences())] == [h.tokens for h in expected]
    assert len(tapes) == 1 and len(calls) > 20
    hook.remove()


@needs_library
def test_translator_decodes_continuously():
    pairs = toy_pairs(60)
    tokenizer = SubwordTokenizer.train((t for pair in pairs for t in pair), vocabulary=300)
    translator = Translator(small_model(vocabulary=tokenizer.vocabulary), tokenizer)
    texts = [pair.source for pair in pairs[:9]] + [""]
    for strategy in (generation.GREEDY, Sampling(seed=1)):
        counts: list[int] = []
        found = translator.search(
            texts, strategy=strategy, batch_size=3, page_size=16, notify=counts.append
        )
        assert found == translator.search(texts, strategy=strategy)
        assert counts == sorted(set(counts)) and counts[-1] == 9 and len(counts) > 2
    assert translator.translate([""], page_size=16) == [""]
    assert translator.translate(texts, page_size=16, pages=40) == translator.translate(texts)
    for options, wanted in (
        ({"pages": 9}, "pages must be None without page_size, got 9"),
        ({"page_size": 16, "pages": 1}, "pages must be at least 3 for the longest .* got 1"),
        ({"page_size": 10}, "page_size must be one of"),
        ({"page_size": 16, "use_cache": False}, "page_size must be None with return_attention"),
        ({"page_size": 16, "strategy": BeamSearch(2)}, "page_size must be None with BeamSearch"),
    ):
        with pytest.raises(ValueError, match=wanted):
            translator.translate(texts, **options)
    assert translator.model.training  # as it was
    with pytest.raises(ValueError, match="prefixes must not be longer than their max_lengths"):
        translator.search(texts[:1], prefixes=["Ka Lo Mi Ka"], max_length=1, page_size=16)


def test_models_without_a_cache_are_refused():
    torch.manual_seed(0)
    parallel = make_model(
        small_model().config.__class__(30, 16, 2, 1, 1, 32, decoder="non-autoregressive")
    )
    additive = small_model(scoring="additive")
    for model in (small_model("torch").eval(), parallel.eval(), additive.eval()):
        assert isinstance(model, Seq2SeqTransformer)
        with pytest.raises(ValueError, match="page_size must be None for a model without a key"):
            run(model, sentences())


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", [generation.GREEDY, SAMPLING], ids=["greedy", "sampling"])
def test_recorded_steps_decode_continuously_on_a_gpu(strategy):
    model = sharp_model()
    expected = batched(model, sentences(), strategy)
    for pages in (None, 4):
        found = run(model.cuda(), sentences(), strategy, pages=pages)
        for actual, wanted in zip(found, expected, strict=True):
            assert_same_hypotheses([actual], [wanted])
