"""`fastattn train`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastattn.cli.arguments import (
    DONE,
    UsageError,
    add_command,
    add_device,
    chosen_device,
    chosen_text,
    existing_file,
    fraction,
    input_errors,
    load_pairs,
    log,
    natural,
    number,
    positive_float,
    positive_int,
    run_folder,
    share,
)
from fastattn.cli.signals import StopRequest, tell_how_to_resume

if TYPE_CHECKING:
    import torch

    from fastattn.seq2seq.data import Pair
    from fastattn.seq2seq.generation import Translator
    from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer
    from fastattn.seq2seq.runs import PreparedText, RunFiles
    from fastattn.seq2seq.training import TrainingConfig

    T = TypeVar("T", ModelConfig, TrainingConfig)


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "train",
        "train a translator from a file of sentence pairs",
        _run_train,
        description=(
            "Train a translator into a run folder, from tab-separated sentence pairs (source, "
            "target; further columns are ignored, as in Tatoeba's fra.txt). With --resume, "
            "continue an interrupted run with its own options, or with a larger --steps. Ctrl-C "
            "and SIGTERM save a checkpoint first and print the command that continues."
        ),
    )
    parser.add_argument(
        "--data", type=existing_file, default=argparse.SUPPRESS,
        help="tab-separated sentence pairs (default: downloaded English-French messages; with "
        "--resume the text of the run)",
    )  # fmt: skip
    parser.add_argument("--out", type=run_folder, required=True, metavar="RUN", help="run folder")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument(
        "--bleu-sentences", type=natural, default=0, metavar="N",
        help="translate N sentences at every validation, for a BLEU curve (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_device(parser)

    fixed: dict[str, tuple[str, Any]] = {}

    def fixed_options(title: str) -> Callable[..., None]:
        group = parser.add_argument_group(title)

        def add(*names: str, **about: Any) -> None:
            default = about.pop("default", False if "action" in about else argparse.SUPPRESS)
            if default is not argparse.SUPPRESS and "action" not in about:
                about["help"] += f" (default: {default})"
            # Suppressed defaults tell which options were given: with --resume none may be.
            action = group.add_argument(*names, default=argparse.SUPPRESS, **about)
            fixed[action.dest] = (action.option_strings[0], default)

        return add

    model = fixed_options("model")
    model(
        "--vocabulary", type=positive_int, default=8000,
        help="number of tokens, of which 259 are bytes and special tokens",
    )  # fmt: skip
    model("--width", type=positive_int, default=256, help="size of a token's vector")
    model("--heads", type=positive_int, default=4, help="attention heads")
    model("--layers", type=positive_int, default=3, help="layers of each stack")
    model("--ffn-width", type=positive_int, default=1024, help="hidden size of an FFN")
    model("--dropout", type=fraction, default=0.1, help="dropout probability")
    model("--max-length", type=positive_int, default=128, help="tokens of a sentence")
    model("--post-norm", action="store_true", help="norms after the residual sums")
    model("--untied", action="store_true", help="separate embeddings and output head")
    model(
        "--positions", choices=("sinusoidal", "learned", "alibi", "t5", "rotary"),
        default="sinusoidal",
        help="added to the embeddings (sinusoidal, learned) or in the self-attention's scores",
    )  # fmt: skip
    model(
        "--norm", choices=("layer", "power", "batch"), default="layer",
        help="layer norm, or power norm or batch norm for comparison",
    )  # fmt: skip
    model(
        "--scoring", choices=("dot", "additive", "cosine"), default="dot",
        help="score function of the attention",
    )  # fmt: skip
    model(
        "--memory-layers", choices=("last", "same"), default="last",
        help="encoder layer that each decoder layer reads: the last, or that of the same number",
    )  # fmt: skip
    model("--copy", action="store_true", help="add a head that can copy source tokens")
    model(
        "--decoder", choices=("autoregressive", "non-autoregressive"), default="autoregressive",
        help="one token after the other, or all tokens at once",
    )  # fmt: skip
    model(
        "--length", choices=("predictor", "end"), default="predictor",
        help="end of a non-autoregressive translation: a predicted length or the first END token",
    )  # fmt: skip

    training = fixed_options("training")
    training(
        "--steps", type=positive_int, default=10_000, metavar="N",
        help="total updates; with --resume it may be raised",
    )  # fmt: skip
    training(
        "--batch-tokens", type=positive_int, default=8192, help="source and target tokens per batch"
    )
    training("--accumulate", type=positive_int, default=1, help="batches per update")
    training("--packed", action="store_true", help="run only on real tokens, without padding")
    training(
        "--patience", type=natural, default=0,
        help="stop after this many validations without a lower loss; 0: never",
    )  # fmt: skip
    training("--learning-rate", type=positive_float, default=1e-3, help="peak, after the warm-up")
    training("--warmup-steps", type=natural, default=400, help="updates of warm-up")
    training("--smoothing", type=fraction, default=0.1, help="label smoothing")
    training("--weight-decay", type=fraction, default=0.01, help="weight decay of AdamW")
    training("--clip", type=positive_float, default=1.0, help="largest gradient norm")
    training(
        "--precision", choices=("auto", "fp32", "bf16"), default="auto",
        help="auto: bf16 autocast on a GPU, fp32 on a CPU",
    )  # fmt: skip
    training("--seed", type=natural, default=0, help="seed of the split, the model and the order")
    training(
        "--held-out", type=positive_int, default=argparse.SUPPRESS,
        help="sentences of the validation part and of the test part (default: 5 %%, at most 500)",
    )  # fmt: skip
    training("--valid-every", type=positive_int, default=500, help="updates between validations")
    training(
        "--checkpoint-every", type=positive_int, default=500, help="updates between checkpoints"
    )

    objective = fixed_options("objective")
    objective(
        "--scheduled-sampling", choices=("none", "sequential", "parallel"), default="none",
        help="replace decoder inputs by the model's own tokens, drawn one by one or all at once",
    )  # fmt: skip
    objective(
        "--sampling-decay", choices=("linear", "exponential", "inverse-sigmoid"), default="linear",
        help="decay of the share of true tokens from 1 (inverse-sigmoid: from slightly less)",
    )  # fmt: skip
    objective("--truth-floor", type=share, default=0.5, help="lowest share of true tokens")
    objective(
        "--guided-attention", type=number, default=0.0, metavar="WEIGHT",
        help="weight of a loss that keeps attention near the diagonal",
    )  # fmt: skip
    objective("--guided-width", type=positive_float, default=0.2, help="relative width of it")
    objective(
        "--sequence-steps", type=natural, default=0,
        help="last updates, which reward sampled translations by their BLEU",
    )  # fmt: skip
    objective(
        "--sequence-weight", type=share, default=0.9, help="weight of that reward in these updates"
    )
    parser.set_defaults(fixed_options=fixed)


def _run_train(options: argparse.Namespace) -> int:
    import torch

    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UsageError(f"train must run in one process, got WORLD_SIZE={size}, as by torchrun")
    device = chosen_device(options)
    from fastattn.seq2seq import make_model
    from fastattn.seq2seq.runs import start_run
    from fastattn.seq2seq.training import require_trainable

    run: Path = options.out
    with input_errors():
        if options.resume:
            _refuse_fixed_options(options)
            prepared, files = _continue_run(options)
        else:
            prepared, files = _new_run(options, device)
        torch.manual_seed(files.training.seed)
        model = make_model(files.model)
        require_trainable(model, files.training)
    if not options.resume:
        start_run(run, files)
    try:
        return _train(options, model, prepared, files, device)
    except KeyboardInterrupt:
        tell_how_to_resume(run, options)
        raise


def _train(
    options: argparse.Namespace,
    model: Seq2SeqTransformer,
    prepared: PreparedText,
    files: RunFiles,
    device: torch.device,
) -> int:
    from fastattn.seq2seq.plots import Curve, save_curves
    from fastattn.seq2seq.progress import counted
    from fastattn.seq2seq.runs import load_translator, validation_bleu
    from fastattn.seq2seq.training import read_metrics, train

    run: Path = options.out
    parameters = sum(p.numel() for p in model.parameters())
    log(
        f"{counted(len(prepared.train), 'training pair')} ({prepared.left_out:,} too long and "
        f"skipped), {len(prepared.valid)} for validation, {len(prepared.test)} for the test; "
        f"{parameters / 1e6:.1f} M parameters on {device}, {files.training.precision}"
    )
    score = None
    if options.bleu_sentences:
        score = validation_bleu(prepared, options.bleu_sentences)
    with StopRequest() as stop:
        result = train(
            model, prepared.train, prepared.valid, files.training,
            device=device, run=run, resume=options.resume, score=score, should_stop=stop,
        )  # fmt: skip
    updates = result.first_step + len(result.losses) - 1
    if result.interrupted:
        log(f"interrupted after update {updates:,} of {files.training.steps:,}, saved in {run}")
        tell_how_to_resume(run, options)
        return stop.exit_code
    scores = _score(load_translator(run, device=device), prepared.test)
    rows = read_metrics(run / "metrics.jsonl")
    points = {
        name: [(row["step"], row[name]) for row in rows if name in row]
        for name in ("loss", "lr", "valid_loss", "valid_bleu")
    }
    losses, rates = ([value for _, value in points[name]] for name in ("loss", "lr"))
    curve = Curve(losses, points["valid_loss"], points["valid_bleu"], rates)
    save_curves(run / "curves.png", {run.name: curve})
    outcome = {
        "run": str(run),
        "updates": updates,
        "stopped_early": result.stopped_early,
        "tokens_per_second": round(result.tokens_per_second),
        **scores,
    }
    if options.json:
        print(json.dumps(outcome, indent=2))
    else:
        print(
            f"test BLEU {outcome['bleu']:.1f}; BLEU of the untranslated source: "
            f"{outcome['bleu_of_source']:.1f}\n"
            f'translate with: fastattn translate --run {shlex.quote(str(run))} "TEXT"'
        )
    return DONE


def _new_run(options: argparse.Namespace, device: torch.device) -> tuple[PreparedText, RunFiles]:
    from fastattn.seq2seq.model import ModelConfig
    from fastattn.seq2seq.runs import RunFiles, default_held_out, prepare_text, require_no_run
    from fastattn.seq2seq.training import TrainingConfig

    for name, (_, default) in options.fixed_options.items():
        if default is not argparse.SUPPRESS and not hasattr(options, name):
            setattr(options, name, default)
    try:
        require_no_run(options.out)
    except FileExistsError as error:
        raise UsageError(f"--out: {error}; continue it with --resume") from error
    precision = options.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    model = _config(
        ModelConfig,
        options,
        encoder_layers=options.layers,
        decoder_layers=options.layers,
        norm_first=not options.post_norm,
        tied=not options.untied,
    )
    training = _config(TrainingConfig, options, precision=precision)
    pairs = load_pairs(getattr(options, "data", None))
    held_out = getattr(options, "held_out", default_held_out(pairs))
    prepared = prepare_text(
        pairs,
        held_out=held_out,
        seed=options.seed,
        max_length=model.max_length,
        vocabulary=options.vocabulary,
    )
    model = replace(model, vocabulary=prepared.tokenizer.vocabulary)
    text = getattr(options, "data", None)
    files = RunFiles(model, training, prepared.tokenizer, prepared.digest, held_out, text)
    return prepared, files


def _config(kind: type[T], options: argparse.Namespace, **translated: Any) -> T:
    """`kind` from the options named like its fields, and from `translated` for the others."""
    named = {f.name: getattr(options, f.name) for f in fields(kind) if hasattr(options, f.name)}
    return kind(**named | translated)


def _refuse_fixed_options(options: argparse.Namespace) -> None:
    for name, (flag, _) in options.fixed_options.items():
        if hasattr(options, name) and name != "steps":
            raise UsageError(
                f"{flag} cannot be given with --resume, which continues with the run's own "
                f"options, got {getattr(options, name)}"
            )


def _continue_run(options: argparse.Namespace) -> tuple[PreparedText, RunFiles]:
    from fastattn.seq2seq.runs import extend_run, open_run, prepare_text

    files = open_run(options.out)
    prepared = prepare_text(
        load_pairs(chosen_text(options, files.text)),
        held_out=files.held_out,
        seed=files.training.seed,
        max_length=files.model.max_length,
        vocabulary=files.tokenizer,
    )
    if prepared.digest != files.data_digest:
        raise UsageError(
            f"--data must be the text that {options.out} was started with, got another text"
        )
    if hasattr(options, "steps"):
        files = extend_run(options.out, files, options.steps)
    return prepared, files


def _score(translator: Translator, test: Sequence[Pair]) -> dict[str, Any]:
    from fastattn.seq2seq.generation import bleu
    from fastattn.seq2seq.progress import Progress

    sources, references = zip(*test, strict=True)
    with Progress("translating the test part", len(sources), unit="sentences") as progress:
        translations = translator.translate(sources, notify=progress.update)
    score = bleu(translations, references)
    return {
        "bleu": score.score,
        "bleu_of_source": bleu(sources, references).score,
        "bleu_details": score.details,
        "bleu_signature": score.signature,
    }
