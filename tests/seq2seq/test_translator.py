"""Translator: order, strategies and prefixes of texts; BLEU."""

import pytest
from seq2seq_samples import small_model, toy_pairs

from fastattn.seq2seq import generation
from fastattn.seq2seq.beam_search import BeamSearch
from fastattn.seq2seq.data import END, SubwordTokenizer
from fastattn.seq2seq.generation import Translator, bleu
from fastattn.seq2seq.sampling import Sampling


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
