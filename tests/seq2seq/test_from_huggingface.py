"""`from_huggingface` against transformers on tiny random models: logits, searches, training."""

import copy
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

import tokenizers  # noqa: E402
import tokenizers.models  # noqa: E402
import tokenizers.pre_tokenizers  # noqa: E402
import tokenizers.processors  # noqa: E402
from cli_runs import call  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from fastattn.seq2seq import (  # noqa: E402
    BeamSearch,
    from_huggingface,
    generate,
    load_translator,
    record_attention,
    translator_from_huggingface,
)
from fastattn.seq2seq.data import Example, collate  # noqa: E402
from fastattn.seq2seq.generation import GREEDY  # noqa: E402
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer  # noqa: E402
from fastattn.seq2seq.pretrained_tokenizer import load_tokenizer  # noqa: E402
from fastattn.testing.compare import compare  # noqa: E402

VOCABULARY = 40
BART_SIZES = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 40, "forced_eos_token_id": None,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
T5_SIZES = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_heads": 4, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
}  # fmt: skip


def _make(kind: str, config: str, sizes: dict[str, Any]) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        configuration = getattr(transformers, config)(**{**sizes, **changes})
        return getattr(transformers, kind)._from_config(configuration, attn_implementation="eager")

    return make


marian = _make(
    "MarianMTModel", "MarianConfig",
    {**BART_SIZES, "pad_token_id": 39, "decoder_start_token_id": 39, "eos_token_id": 0},
)  # fmt: skip
bart = _make("BartForConditionalGeneration", "BartConfig", BART_SIZES)
mbart = _make(
    "MBartForConditionalGeneration", "MBartConfig", {**BART_SIZES, "decoder_start_token_id": 38}
)
m2m100 = _make("M2M100ForConditionalGeneration", "M2M100Config", BART_SIZES)
pegasus = _make("PegasusForConditionalGeneration", "PegasusConfig", BART_SIZES)
t5 = _make("T5ForConditionalGeneration", "T5Config", T5_SIZES)
mt5 = _make("MT5ForConditionalGeneration", "MT5Config", T5_SIZES)

CASES: dict[str, Callable[[], Any]] = {
    "marian": lambda: marian(activation_function="swish", scale_embedding=True),
    "marian, two embeddings": lambda: marian(share_encoder_decoder_embeddings=False),
    "marian, two vocabularies": lambda: marian(
        share_encoder_decoder_embeddings=False, decoder_vocab_size=46
    ),
    "marian, logits bias": lambda: marian(encoder_layers=1),
    "bart": bart,
    "bart, scaled": lambda: bart(scale_embedding=True, activation_function="relu"),
    "mbart": lambda: mbart(scale_embedding=True),
    "m2m100": m2m100,
    "m2m100, deeper encoder": lambda: m2m100(encoder_layers=3, decoder_layers=1),
    "m2m100, three embeddings": lambda: m2m100(tie_word_embeddings=False),
    "pegasus": lambda: pegasus(scale_embedding=True, activation_function="relu"),
    "t5": t5,
    "t5, gated": lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "t5, own head": lambda: t5(feed_forward_proj="gated-silu", num_decoder_layers=1),
    "mt5": lambda: mt5(num_heads=3, d_kv=16, scale_decoder_outputs=True),
}


def build(name: str, *, gain: float = 4.0) -> tuple[Any, Seq2SeqTransformer]:
    """A model and the converted one. gain: of the matrices, so large that attention is not uniform
    and results are not one repeated token.
    """
    torch.manual_seed(0)
    original = CASES[name]().eval()
    if name == "t5, own head":
        original.lm_head.weight = torch.nn.Parameter(
            original.lm_head.weight.detach().clone().normal_()
        )
    scaled = getattr(original.config, "scale_embedding", False)
    with torch.no_grad():
        for key, tensor in original.named_parameters():
            if "embed_positions" in key and "bart" not in name:
                continue  # sinusoids
            if tensor.dim() == 1:
                tensor.add_(0.3 * torch.randn_like(tensor))
            elif "embed" in key or "shared" in key:
                tensor.normal_(std=32**-0.5 if scaled else 0.8)
            else:
                tensor.normal_(std=gain * tensor.shape[1] ** -0.5)
        # So that some results end.
        original.get_output_embeddings().weight[original.config.eos_token_id].mul_(2.0)
        if name == "marian, logits bias":
            original.final_logits_bias.normal_()
    return original, from_huggingface(original)


def inputs(config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Source, its padding, and a target that begins as a decoder's input does."""
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(3, 38, (4, 9), generator=generator)
    lengths = torch.tensor([9, 6, 1, 4])
    padding = torch.arange(9) >= lengths[:, None]
    target = torch.randint(3, 38, (4, 15), generator=generator)
    target[:, 0] = config.begin
    return source.masked_fill(padding, config.pad), padding, target


def logits_of_rounded_weights(model, given, seed):
    """With weights that are moved by up to half a unit in the last place of fp32: one run alone may
    have an unusually small error in a model that amplifies rounding.
    """
    changed, generator = copy.deepcopy(model).float(), torch.Generator().manual_seed(seed)
    for weight in changed.parameters():
        weight.mul_(1 + 2**-23 * (torch.rand(weight.shape, generator=generator) - 0.5))
    return changed.to(model.dtype)(**given).logits


@pytest.mark.parametrize("name", CASES)
def test_logits_are_equal(name):
    for dtype in (torch.float32, torch.bfloat16):
        original, converted = (model.to(dtype) for model in build(name))
        source, padding, target = inputs(converted.config)
        given = {
            "input_ids": source, "attention_mask": (~padding).long(), "decoder_input_ids": target
        }  # fmt: skip
        with torch.no_grad():
            runs = [original(**given).logits]
            runs += [logits_of_rounded_weights(original, given, seed) for seed in range(4)]
            exact = original.double()(**given).logits
            expected = max(runs, key=lambda run: float((run - exact).abs().max()))
            together = converted(source, target, padding)
            separately = converted.logits(
                converted.decode(target, converted.encode(source, padding))
            )
        for got in (together, separately):
            outcome = compare(got, exact, expected, exact.abs(), slice_dims=0)
            assert outcome.ok, (dtype, outcome.message)


@pytest.mark.parametrize("name", ["marian", "bart", "t5", "mt5"])
def test_attention_weights_are_equal(name):
    original, converted = build(name, gain=1.5)
    source, padding, target = inputs(converted.config)
    with torch.no_grad(), record_attention(converted) as weights:
        converted(source, target, padding)
        expected = original(
            input_ids=source, attention_mask=(~padding).long(), decoder_input_ids=target,
            output_attentions=True,
        )  # fmt: skip
    for kind, module in (
        ("encoder_attentions", "encoder.layers.{}.self_attn"),
        ("decoder_attentions", "decoder.layers.{}.self_attn"),
        ("cross_attentions", "decoder.layers.{}.multihead_attn"),
    ):
        for i, wanted in enumerate(expected[kind]):
            got = weights[module.format(i)]
            if kind == "encoder_attentions":  # rows of padding are of no use
                got, wanted = (w.transpose(1, 2)[~padding] for w in (got, wanted))
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def results(rows: Tensor, config: ModelConfig) -> list[list[int]]:
    """The tokens of transformers' `generate`, without the first one, END and what follows."""
    found = []
    for row in rows[:, 1:].tolist():
        stop = next((i for i, token in enumerate(row) if token == config.end), len(row))
        found.append(row[:stop])
    return found


SEARCHES = (
    ({"num_beams": 1}, GREEDY),
    (
        {"num_beams": 4, "length_penalty": 1.3, "early_stopping": "never"},
        BeamSearch(4, length_penalty=1.3, normalization="tokens"),
    ),
    (
        {"num_beams": 4, "length_penalty": 0.0, "early_stopping": True},
        BeamSearch(4, length_penalty=0.0, early_stopping=True),
    ),
)


# One of the models whose logits differ in weights alone.
SEARCHED = (
    "marian", "marian, two vocabularies", "marian, logits bias", "bart", "mbart", "m2m100",
    "pegasus", "t5", "mt5",
)  # fmt: skip


@pytest.mark.parametrize("name", SEARCHED)
def test_searches_find_the_tokens_of_generate(name):
    original, converted = build(name)
    source, padding, _ = inputs(converted.config)
    forced = [5] if "m2m" in name or name == "bart" else []
    seen = set()
    for options, strategy in SEARCHES:
        expected = original.generate(
            input_ids=source, attention_mask=(~padding).long(), max_new_tokens=14,
            do_sample=False, suppress_tokens=converted.config.special.never_chosen,
            forced_bos_token_id=forced[0] if forced else None, **options,
        )  # fmt: skip
        wanted = results(expected, converted.config)
        for use_cache in (True, False):
            found = generate(
                converted, source, padding, max_lengths=[14] * 4, strategy=strategy,
                prefixes=[forced] * 4 if forced else None, unscored=len(forced),
                use_cache=use_cache,
            )  # fmt: skip
            assert [best.tokens for best, *_ in found] == wanted, (options, use_cache)
        seen.update(map(tuple, wanted))
    assert len(seen) > 1  # results depend on the source


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_is_equal(name):
    original, converted = build(name, gain=1.0)
    source, padding, target = inputs(converted.config)
    rows = [[*row[1 : 3 + 4 * i], converted.config.end] for i, row in enumerate(target.tolist())]
    sources = [row[: int(n)] for row, n in zip(source.tolist(), (~padding).sum(1), strict=True)]
    batch = collate(list(map(Example, sources, rows)), converted.config.special)
    before = converted.state_dict()
    before = {key: value.clone() for key, value in before.items()}

    def step(model: Any) -> dict[str, Tensor]:
        """The parameters after one step of gradient descent, with the names of `converted`."""
        if model is converted:
            logits, targets = model.forward_packed(batch)
        else:
            logits = model(
                input_ids=batch.source, attention_mask=(~batch.source_padding).long(),
                decoder_input_ids=batch.target_in,
            ).logits.flatten(0, 1)  # fmt: skip
            targets = batch.target_out.flatten()
        F.cross_entropy(logits, targets, ignore_index=converted.config.pad).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return (model if model is converted else from_huggingface(model)).state_dict()

    exact_model = copy.deepcopy(original).double()
    got, expected, exact = step(converted), step(original), step(exact_model)
    largest = max(float((exact[key] - before[key]).abs().max()) for key in exact)
    assert largest > 1e-2
    for key, value in exact.items():
        # Some gradients, as of a key's bias, are only rounding errors: the largest sets the scale.
        size = value.abs() + largest
        outcome = compare(got[key], value, expected[key], size, slice_dims=0)
        assert outcome.ok, (key, outcome.message)


def test_options_of_dropout_are_converted():
    model = bart(dropout=0.3, attention_dropout=0.2, activation_dropout=0.1).train()
    converted = from_huggingface(model)
    assert converted.training
    layer = converted.transformer.decoder.layers[1]
    assert (layer.dropout1.p, layer.dropout.p, layer.dropout3.p) == (0.3, 0.1, 0.3)
    assert layer.self_attn.dropout == layer.multihead_attn.dropout == 0.2
    assert from_huggingface(t5(dropout_rate=0.25)).transformer.encoder.norm[1].p == 0.25
    with pytest.warns(UserWarning, match=r"encoder_layerdrop=0\.05 is not applied"):
        from_huggingface(bart(encoder_layerdrop=0.05))


REFUSED = {
    "model_type must be one of .* got 'led'": lambda: transformers.LEDForConditionalGeneration(
        transformers.LEDConfig(
            vocab_size=9, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8,
            decoder_ffn_dim=8, encoder_attention_heads=1, decoder_attention_heads=1,
            attention_window=2, max_encoder_position_embeddings=8,
            max_decoder_position_embeddings=8,
        )
    ),
    "activation_function must be one of .* got 'tanh'": lambda: bart(activation_function="tanh"),
    "decoder_attention_heads must be encoder_attention_heads, 4, got 2": lambda: bart(
        decoder_attention_heads=2
    ),
    "decoder_ffn_dim must be encoder_ffn_dim, 48, got 32": lambda: pegasus(decoder_ffn_dim=32),
    "decoder_start_token_id must be one token, got None": lambda: mbart(
        decoder_start_token_id=None
    ),
    "eos_token_id must be one token, got": lambda: t5(eos_token_id=[1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(message):
    model = REFUSED[message]()
    with pytest.raises(ValueError, match=message):
        from_huggingface(model)


def test_parameters_without_a_counterpart_are_refused():
    model = bart()
    model.model.encoder.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match=r"without a counterpart: model\.encoder\.extra"):
        from_huggingface(model)
    model = marian()
    with torch.no_grad():
        model.model.encoder.embed_positions.weight.add_(1.0)
    with pytest.raises(ValueError, match="must hold sinusoids"):
        from_huggingface(model)
    model = bart()
    layer = model.model.encoder.layers[0]
    layer.fc1.weight = torch.nn.Parameter(torch.zeros(7))  # such as packed integers
    with pytest.raises(ValueError, match=r"layers\.0\.fc1\.weight must be plain .* got \[7\]"):
        from_huggingface(model)
    with pytest.raises(ValueError, match="max_length must be at most max_position_embeddings, 40"):
        from_huggingface(bart(), max_length=41)
    assert from_huggingface(pegasus(), max_length=100).config.max_length == 100


# Folders

WORDS = [f"w{i}" for i in range(30)]


def save_folder(folder: Path, model: Any, special: str = "<pad> </s> <unk>") -> Any:
    """A model with a tokenizer of words that puts END after a sentence, and "<s>", if it has it,
    before it; returns the tokenizer.
    """
    tokens = {word: i for i, word in enumerate([*special.split(), *WORDS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    ends = [token for token in ("<s>", "</s>") if token in tokens]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=" ".join([*ends[:-1], "$A", ends[-1]]),
        special_tokens=[(token, tokens[token]) for token in ends],
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>" if "<s>" in tokens else None,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def translations(model: Any, tokenizer: Any, texts: list[str], **options: Any) -> list[str]:
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    rows = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False,
        suppress_tokens=[model.config.pad_token_id], **options,
    )  # fmt: skip
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


TEXTS = ["w1 w2 w3", "w9", "w4 w4 w20 w21 w22"]


def test_translate_runs_a_folder(tmp_path, capsys):
    original, _ = build("t5, gated")
    tokenizer = save_folder(tmp_path, original)
    code, out, _ = call(capsys, "translate", "--model", str(tmp_path), "--max-length", "8", *TEXTS)
    assert code == 0
    assert out.splitlines() == translations(original, tokenizer, TEXTS, max_new_tokens=8)
    code, _, err = call(capsys, "translate", "--model", str(tmp_path / "none"), "w1")
    assert code != 0 and "config.json" in err
    code, _, err = call(
        capsys, "translate", "--model", str(tmp_path), "--target-language", "fr", "w1"
    )
    assert code == 2 and "target_language must be None" in err and "'fr'" in err


def test_a_folder_is_fine_tuned_and_its_run_needs_no_transformers(tmp_path, capsys, monkeypatch):
    original, _ = build("t5")
    save_folder(tmp_path / "model", original)
    draw = random.Random(0)
    lines = {" ".join(draw.choices(WORDS, k=4)) for _ in range(40)}
    (tmp_path / "pairs.tsv").write_text(
        "".join(f"{line}\t{line[::-1]}\n" for line in sorted(lines))
    )
    run = tmp_path / "run"
    options = [
        "train", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "pairs.tsv"),
        "--out", str(run), "--steps", "3", "--packed", "--batch-tokens", "100",
    ]  # fmt: skip
    code, _, err = call(capsys, *options, "--width", "8")
    assert code == 2 and "--width cannot be given with --model" in err
    code, out, _ = call(capsys, *options)
    assert code == 0 and "test BLEU" in out
    expected = load_translator(run).translate(["w1 w2"], max_length=5)
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "transformers", None)  # importing it raises ImportError
        assert load_translator(run).translate(["w1 w2"], max_length=5) == expected
    # The checkpoint of update 0 is the model that training began with.
    start = run / "checkpoints" / "step-00000000"
    started_with = load_file(start / "model.safetensors")["embedding.weight"]
    assert torch.equal(started_with, original.shared.weight)
    # Training that was interrupted before its first checkpoint.
    shutil.copytree(run, tmp_path / "other", ignore=shutil.ignore_patterns("step-00000003"))
    code, _, _ = call(capsys, "train", "--resume", "--out", str(tmp_path / "other"))
    assert code == 0
    assert load_translator(tmp_path / "other").translate(["w1 w2"], max_length=5) == expected


def test_a_first_token_forced_by_the_model_is_not_part_of_the_text(tmp_path):
    original, _ = build("bart")
    original.generation_config.forced_bos_token_id = 0
    tokenizer = save_folder(tmp_path, original, "<s> <pad> </s> <unk>")
    translator = translator_from_huggingface(tmp_path)
    assert translator.tokenizer.encode_sources(TEXTS) == tokenizer(TEXTS)["input_ids"]
    beams = BeamSearch(4, length_penalty=1.0, normalization="tokens")
    found = translator.search(TEXTS, max_length=6, strategy=beams)
    assert [best.hypothesis.tokens[0] for best in found] == [0, 0, 0]
    wanted = translations(
        original, tokenizer, TEXTS, max_new_tokens=7, num_beams=4, early_stopping="never"
    )
    assert [best.text for best in found] == wanted
    assert any(wanted)


@pytest.mark.parametrize("kind", ["NllbTokenizer", "MBart50Tokenizer", "MBartTokenizer"])
def test_languages_are_passed_to_the_model(tmp_path, kind):
    codes = ("eng_Latn", "fra_Latn") if kind == "NllbTokenizer" else ("en_XX", "fr_XX")
    tokenizer, saved = (
        getattr(transformers, kind)(**dict(zip(("src_lang", "tgt_lang"), given, strict=False)))
        for given in (codes, ())
    )
    for each in (tokenizer, saved):
        each.add_tokens(WORDS)
    make = m2m100 if kind == "NllbTokenizer" else mbart
    torch.manual_seed(0)
    language = tokenizer.convert_tokens_to_ids(codes[1])
    first = language if kind == "MBartTokenizer" else 2
    original = make(
        vocab_size=len(tokenizer), pad_token_id=1, eos_token_id=2, decoder_start_token_id=first
    ).eval()
    with torch.no_grad():
        original.get_input_embeddings().weight.normal_(std=0.5)
    saved.save_pretrained(tmp_path)
    original.save_pretrained(tmp_path)
    translator = translator_from_huggingface(
        tmp_path, source_language=codes[0], target_language=codes[1]
    )
    assert translator.tokenizer.encode_sources(TEXTS) == tokenizer(TEXTS)["input_ids"]
    labels = tokenizer(text_target=TEXTS)["input_ids"]
    if kind == "MBartTokenizer":
        labels = [row[:-1] for row in labels]  # the language, which the decoder reads first
        assert translator.model.config.begin == language
    assert translator.tokenizer.encode_targets(TEXTS) == labels
    found = translator.search(TEXTS, max_length=6)
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    rows = original.generate(
        **batch, do_sample=False, max_new_tokens=6 + (kind != "MBartTokenizer"),
        suppress_tokens=translator.model.config.special.never_chosen,
        forced_bos_token_id=None if kind == "MBartTokenizer" else language,
    )  # fmt: skip
    assert [best.hypothesis.tokens for best in found] == results(rows, translator.model.config)
    assert [best.text for best in found] == tokenizer.batch_decode(rows, skip_special_tokens=True)
    with pytest.raises(ValueError, match=r"target_language must be .* got 'xx'"):
        translator_from_huggingface(tmp_path, source_language=codes[0], target_language="xx")
    with pytest.raises(ValueError, match=r"target_language must be .* got None"):
        translator_from_huggingface(tmp_path, source_language=codes[0])


def test_tokenizers_without_a_fast_form_stay_in_their_folder(tmp_path):
    tokenizer = transformers.ByT5Tokenizer()
    torch.manual_seed(0)
    original = t5(vocab_size=400, pad_token_id=0, eos_token_id=1).eval()
    tokenizer.save_pretrained(tmp_path)
    original.half().save_pretrained(tmp_path)
    translator = translator_from_huggingface(tmp_path)
    assert translator.model.embedding.weight.dtype is torch.float32
    saved = tmp_path / "tokenizer.json"
    saved.write_text(translator.tokenizer.to_json())
    for loaded in (translator.tokenizer, load_tokenizer(saved)):
        assert loaded.encode_sources(TEXTS) == tokenizer(TEXTS)["input_ids"]
        assert loaded.encode_targets(TEXTS) == tokenizer(text_target=TEXTS)["input_ids"]
        assert [loaded.decode(ids) for ids in loaded.encode_targets(TEXTS)] == TEXTS
        assert loaded.tokens(loaded.encode_sources(["ab"])[0]) == ["a", "b", "</s>"]
        assert loaded.encode_all([]) == []


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = call(capsys, "translate", "--model", str(tmp_path), "w1")
    assert code == 2 and "pip install transformers" in err
    with pytest.raises(ImportError, match="from_huggingface needs the package transformers"):
        from_huggingface(torch.nn.Identity())
