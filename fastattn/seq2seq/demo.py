"""`fastattn demo`: train a translator, compare it with torch.nn.Transformer, translate new text.

The same token model is trained twice from the same seed on the same batches, once with
`fastattn.nn.Transformer` and once with `torch.nn.Transformer`. Without dropout and in fp32 the two
loss curves must agree; held-out BLEU must be higher than that of the untranslated source. The run
folder receives checkpoints, curves, samples, heat maps and `summary.json`.

On a CPU the compared runs are the demonstration. On a GPU a larger model is compared over fewer
updates, then trained with dropout in bf16, where the tokens per second of both are measured.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastattn.nn
from fastattn.ops import default_device, device_name, versions

from .catalogues import SOURCES, load_catalogue_pairs
from .checkpoint import read_best, write_atomically
from .data import BEGIN, Pair, read_pairs
from .generation import Translator, bleu, chrf
from .model import ModelConfig, Seq2SeqTransformer, record_attention
from .plots import Curve, Limit, relative_differences, save_curves, save_heat_maps
from .progress import Progress, counted
from .runs import (
    PreparedText,
    RunFiles,
    default_held_out,
    load_translator,
    prepare_text,
    require_no_run,
    start_run,
)
from .training import TrainingConfig, TrainingInterrupted, TrainingResult, train

FIRST_UPDATES = 20
FIRST_UPDATES_LIMIT = 1e-4  # relative difference of the loss of each
FINAL_LIMIT = 0.02  # relative difference of the last validation loss
FINAL_UPDATES = 20  # the final training loss is the mean over these
SAMPLES_SHOWN = 5  # the best ones, and as many at random
PROBLEMS_SHOWN = 5
# The kinds of attention: the title of a picture, and the stack and name of the modules.
ATTENTION = {
    "cross": (
        "Cross-attention of the decoder: row = token written, column = source token",
        ("decoder", "multihead_attn"),
    ),
    "encoder": (
        "Self-attention of the encoder: row = token computed, column = token read",
        ("encoder", "self_attn"),
    ),
    "decoder": (
        "Self-attention of the decoder: row = token written, column = token read",
        ("decoder", "self_attn"),
    ),
}
TRANSFORMERS: dict[str, type[nn.Transformer]] = {
    "fastattn.nn": fastattn.nn.Transformer,
    "torch.nn": nn.Transformer,
}


@dataclass(frozen=True)
class Preset:
    """Model and options of a demo. `model.vocabulary` is an upper bound until subwords are learnt.

    `compared_updates`: updates of the fp32 comparison without dropout, if that is a separate run;
    None if the demonstration itself is compared.
    """

    model: ModelConfig
    training: TrainingConfig
    compared_updates: int | None = None


# Two otherwise idle cores reach 19,000 tokens/s or more: the demo takes at most three minutes.
CPU_PRESET = Preset(
    ModelConfig(
        vocabulary=4000, width=128, heads=4, encoder_layers=2, decoder_layers=2, ffn_width=512,
        dropout=0.0, max_length=64,
    ),
    TrainingConfig(
        steps=550, batch_tokens=3000, learning_rate=3e-3, warmup_steps=60, weight_decay=0.05,
        valid_every=50, checkpoint_every=50, keep=1, log_every=5,
    ),
)  # fmt: skip

GPU_PRESET = Preset(
    ModelConfig(
        vocabulary=4000, width=512, heads=8, encoder_layers=6, decoder_layers=6, ffn_width=2048,
        dropout=0.3, max_length=64,
    ),
    TrainingConfig(
        steps=1500, batch_tokens=16384, learning_rate=7e-4, warmup_steps=200, weight_decay=0.05,
        precision="bf16", valid_every=250, checkpoint_every=500, keep=1, log_every=50,
    ),
    compared_updates=100,
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One claim of the demo: the expected value and the result."""

    name: str
    wanted: str
    got: str
    passed: bool


@dataclass(frozen=True)
class Sample:
    """chrf: the similarity of the translation to the reference by character n-grams, 0 to 100."""

    source: str
    reference: str
    translation: str
    chrf: float


@dataclass(frozen=True)
class DemoReport:
    """The results of the demo; `summary.json` holds the same."""

    out: Path
    device: str
    preset: Preset
    parameters: int
    text: dict[str, Any]
    runs: dict[str, TrainingResult]
    compared: dict[str, TrainingResult]
    best_step: int
    bleu: float
    bleu_is_judged: bool  # a shortened run is not expected to translate
    bleu_of_source: float
    bleu_details: str
    bleu_signature: str
    checks: list[Check]
    best_samples: list[Sample]
    samples: list[Sample]  # drawn at random
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def summary(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return {
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "device": self.device,
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "text": self.text,
            "model": asdict(self.preset.model),
            "training": asdict(self.preset.training),
            "parameters": self.parameters,
            "bleu": self.bleu,
            "bleu_is_judged": self.bleu_is_judged,
            "bleu_of_source": self.bleu_of_source,
            "bleu_details": self.bleu_details,
            "bleu_signature": self.bleu_signature,
            "best_step": self.best_step,
            "runs": {name: _figures(result) for name, result in self.runs.items()},
            "compared": None
            if self.compared is self.runs
            else {name: _figures(result) for name, result in self.compared.items()},
            "best_samples": [asdict(sample) for sample in self.best_samples],
            "samples": [asdict(sample) for sample in self.samples],
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
        }


def run_demo(
    out: Path,
    *,
    data: Path | None = None,
    steps: int | None = None,
    device: torch.device | None = None,
    preset: Preset | None = None,
    notify: Callable[[str], None] = lambda _: None,
    stop_request: AbstractContextManager[Callable[[], bool]] | None = None,
    show: bool = True,
) -> DemoReport:
    """Run the demo into the folder `out`, which must not hold a run yet, and return its report.

    `data` replaces the default text by a pair file. `steps` shortens or lengthens training; with
    fewer than the preset's, BLEU is reported but not checked. `notify` receives one line per stage.
    `stop_request` is entered while models train: once what it returns is True, TrainingInterrupted
    is raised after a checkpoint.
    """
    started = time.perf_counter()
    device = device or default_device()
    preset = preset or (GPU_PRESET if device.type == "cuda" else CPU_PRESET)
    judged = steps is None or steps >= preset.training.steps
    if steps is not None:
        preset = _with_steps(preset, steps)

    require_no_run(out)
    pairs, text = _load_pairs(data, notify, show)
    held_out = default_held_out(pairs)
    prepared = prepare_text(
        pairs,
        held_out=held_out,
        max_length=preset.model.max_length,
        vocabulary=preset.model.vocabulary,
        show=show,
    )
    model_config = replace(preset.model, vocabulary=prepared.tokenizer.vocabulary)
    preset = replace(preset, model=model_config)
    text |= {
        "train": len(prepared.train),
        "valid": len(prepared.valid),
        "test": len(prepared.test),
        "train_tokens": sum(len(e.source) + len(e.target) for e in prepared.train),
    }
    notify(
        f"{counted(text['train'], 'training pair')}, {text['test']} held out for the test, "
        f"{model_config.vocabulary:,} subwords"
    )
    digest = prepared.digest
    files = RunFiles(model_config, preset.training, prepared.tokenizer, digest, held_out, data)
    start_run(out, files)
    seconds = {"text": time.perf_counter() - started}

    compared: dict[str, TrainingResult] = {}
    with stop_request or nullcontext(lambda: False) as should_stop:
        if preset.compared_updates is not None:
            stage = time.perf_counter()
            notify(f"comparing both Transformers in fp32, {preset.compared_updates} updates each")
            compared = _train_both(
                replace(model_config, dropout=0.0),
                replace(preset.training, precision="fp32"),
                prepared, device,
                stop_after=preset.compared_updates, description="fp32", should_stop=should_stop,
                show=show,
            )  # fmt: skip
            seconds["comparison"] = time.perf_counter() - stage
        stage = time.perf_counter()
        runs = _train_both(
            model_config, preset.training, prepared, device,
            run=out, description=preset.training.precision, should_stop=should_stop, show=show,
        )  # fmt: skip
    compared = compared or runs
    seconds["training"] = time.perf_counter() - stage

    stage = time.perf_counter()
    translator = load_translator(out, device=device)
    sources, references = zip(*prepared.test, strict=True)
    with Progress("translating", len(sources), show=show, unit="sentences") as progress:
        translations = translator.translate(sources, notify=progress.update)
    score = bleu(translations, references)
    copied = bleu(sources, references)
    seconds["translating"] = time.perf_counter() - stage

    checks = _compare(compared)
    if judged:
        checks.append(
            Check(
                "held-out BLEU is higher than that of the source",
                f"> {copied.score:.1f}",
                f"{score.score:.1f}",
                score.score > copied.score,
            )
        )
    best = read_best(out)
    samples = [
        Sample(*texts, chrf(texts[2], texts[1]))
        for texts in zip(sources, references, translations, strict=True)
    ]
    best_samples, random_samples = _choose_samples(samples)
    stage = time.perf_counter()
    _draw(out, compared, translator, best_samples[0])
    seconds["plots"] = time.perf_counter() - stage
    seconds["all"] = time.perf_counter() - started
    report = DemoReport(
        out=out,
        device=device_name(device),
        preset=preset,
        parameters=sum(p.numel() for p in translator.model.parameters()),
        text=text,
        runs=runs,
        compared=compared,
        best_step=best.step if best else preset.training.steps,
        bleu=score.score,
        bleu_is_judged=judged,
        bleu_of_source=copied.score,
        bleu_details=score.details,
        bleu_signature=score.signature,
        checks=checks,
        best_samples=best_samples,
        samples=random_samples,
        seconds=seconds,
    )
    lines = ["source\treference\ttranslation\tchrF"]
    lines += [f"{s.source}\t{s.reference}\t{s.translation}\t{s.chrf:.1f}" for s in samples]
    write_atomically(out / "samples.tsv", "\n".join(lines) + "\n")
    write_atomically(out / "summary.json", json.dumps(report.summary(), indent=2) + "\n")
    return report


def _with_steps(preset: Preset, steps: int) -> Preset:
    """Adapt a preset to another number of updates; the warm-up scales with it."""
    training = preset.training
    scaled = {
        name: max(1, round(getattr(training, name) * steps / training.steps))
        for name in ("warmup_steps", "valid_every", "checkpoint_every")
    }
    compared = preset.compared_updates
    return replace(
        preset,
        training=replace(training, steps=steps, **scaled),
        compared_updates=None if compared is None else min(compared, steps),
    )


def _load_pairs(
    data: Path | None, notify: Callable[[str], None], show: bool
) -> tuple[list[Pair], dict[str, Any]]:
    if data is None:
        catalogue = load_catalogue_pairs(show=show)
        pairs, left_out = catalogue.pairs, catalogue.skipped
        origin = [f"{source.requirement} ({source.licence})" for source in SOURCES]
        count = counted(len(pairs), "pair")
        notify(f"text: English-French messages of {' and '.join(origin)}; {count}")
    else:
        file = read_pairs(data)
        pairs, left_out = file.pairs, {"malformed lines": len(file.problems)}
        origin = [str(data)]
        for problem in file.problems[:PROBLEMS_SHOWN]:
            notify(f"skipped: {problem}")
        malformed = counted(len(file.problems), "malformed line")
        notify(f"text: {data}; {counted(len(pairs), 'pair')}, {malformed}")
    return pairs, {"origin": origin, "pairs": len(pairs), "left_out": left_out}


def _train_both(
    model_config: ModelConfig,
    training: TrainingConfig,
    prepared: PreparedText,
    device: torch.device,
    *,
    run: Path | None = None,
    stop_after: int | None = None,
    description: str,
    should_stop: Callable[[], bool],
    show: bool,
) -> dict[str, TrainingResult]:
    results = {}
    initial: dict[str, torch.Tensor] = {}
    for name, transformer_class in TRANSFORMERS.items():
        torch.manual_seed(training.seed)
        model = Seq2SeqTransformer(model_config, transformer_class)
        if initial:
            _require_equal(initial, model.state_dict())
        else:
            initial = {key: value.clone() for key, value in model.state_dict().items()}
        results[name] = train(
            model,
            prepared.train,
            prepared.valid,
            training,
            device=device,
            run=run if name == "fastattn.nn" else None,
            stop_after=stop_after,
            description=f"{name} {description}",
            should_stop=should_stop,
            show=show,
        )
        del model
        if results[name].interrupted:
            raise TrainingInterrupted(f"{name} after update {len(results[name].losses):,}")
    return results


def _require_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    if first.keys() != second.keys() or not all(torch.equal(first[k], second[k]) for k in first):
        raise RuntimeError(
            "both Transformers must start from equal parameters, but their state_dicts differ"
        )


def _compare(compared: dict[str, TrainingResult]) -> list[Check]:
    result, expected = (compared[name] for name in TRANSFORMERS)
    differences = relative_differences(result.losses, expected.losses)
    first = max(differences[:FIRST_UPDATES])
    checks = [
        Check(
            f"losses of the first {min(FIRST_UPDATES, len(result.losses))} updates equal torch's",
            f"<= {FIRST_UPDATES_LIMIT:.0e} apart",
            f"{first:.1e}",
            first <= FIRST_UPDATES_LIMIT,
        )
    ]
    finals = [("training", _final_loss(result), _final_loss(expected))]
    if result.validations and expected.validations:
        finals.append(("validation", result.validations[-1][1], expected.validations[-1][1]))
    for kind, loss, expected_loss in finals:
        apart = abs(loss - expected_loss) / expected_loss
        checks.append(
            Check(
                f"final {kind} loss equals torch's",
                f"<= {FINAL_LIMIT:.0%} apart",
                f"{loss:.4f} against {expected_loss:.4f}: {apart:.2%}",
                apart <= FINAL_LIMIT,
            )
        )
    return checks


def _final_loss(result: TrainingResult) -> float:
    last = result.losses[-FINAL_UPDATES:]
    return sum(last) / len(last)


def _choose_samples(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return sentences of four to ten words: those closest to their references, the longer first of
    equally close ones, and a fixed draw of the others, whatever their translations.
    """
    fitting = [s for s in samples if 4 <= len(s.source.split()) <= 10] or list(samples)
    ranked = sorted(fitting, key=lambda s: (-s.chrf, -len(s.source)))
    count = min(SAMPLES_SHOWN, (len(ranked) + 1) // 2)
    best, others = ranked[:count], ranked[count:]
    return best, random.Random(0).sample(others, min(SAMPLES_SHOWN, len(others)))


def _draw(
    out: Path, compared: dict[str, TrainingResult], translator: Translator, sample: Sample
) -> None:
    updates = min(len(result.losses) for result in compared.values())
    first, final = min(FIRST_UPDATES, updates), max(1, updates - FINAL_UPDATES + 1)
    save_curves(
        out / "curves.png",
        {
            name: Curve(r.losses, r.validations, learning_rates=r.learning_rates)
            for name, r in compared.items()
        },
        limits=[
            Limit(1, first, FIRST_UPDATES_LIMIT, f"limit, updates 1 to {first}"),
            Limit(final, updates, FINAL_LIMIT, f"limit, mean of updates {final} to {updates}"),
        ],
    )
    for kind in ATTENTION:
        path = out / f"attention-{kind}.png"
        draw_attention(path, translator, sample.source, sample.translation, kind)


def draw_attention(
    path: Path, translator: Translator, source: str, target: str, kind: str = "cross"
) -> None:
    """Save the attention of each layer and head for `target` as the output: the cross-attention,
    or the self-attention of the encoder or decoder.
    """
    sources, targets, weights = _attention(translator, source, target)
    title, (stack, module) = ATTENTION[kind]
    queries = sources if stack == "encoder" else targets
    # The decoder reads what it has written before.
    begin = translator.tokenizer.tokens([BEGIN])
    keys = [*begin, *targets[:-1]] if kind == "decoder" else sources
    layers = [w for name, w in weights.items() if name.startswith(stack) and name.endswith(module)]
    save_heat_maps(path, layers, queries, keys, title)


def _attention(
    translator: Translator, source: str, target: str
) -> tuple[list[str], list[str], dict[str, torch.Tensor]]:
    """The tokens of both sentences, and the weights [H, M, N] of each attention module by name."""
    model, tokenizer = translator.model, translator.tokenizer
    device = model.embedding.weight.device
    source_ids, target_ids = tokenizer.encode_sentences([source, target])
    target_ids = target_ids[: model.config.max_length]
    tokens = torch.tensor([source_ids], device=device)
    shifted = torch.tensor([[BEGIN, *target_ids[:-1]]], device=device)
    with torch.no_grad(), record_attention(model) as weights:
        model(tokens, shifted, torch.zeros_like(tokens, dtype=torch.bool))
    by_name = {name: w[0].float() for name, w in weights.items()}
    return tokenizer.tokens(source_ids), tokenizer.tokens(target_ids), by_name


def _figures(result: TrainingResult) -> dict[str, Any]:
    return {
        "updates": len(result.losses),
        "tokens": result.tokens,
        "seconds": round(result.seconds, 2),
        "tokens_per_second": round(result.tokens_per_second),
        "final_training_loss": _final_loss(result),
        "validations": result.validations,
        "losses": result.losses,
    }
