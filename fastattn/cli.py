"""The command `fastattn`: train, translate, evaluate, demo, info, check.

Results go to standard output, progress and remarks to standard error; `--json` prints one JSON
document instead of text. Heavy modules are imported by the command that needs them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from fastattn.seq2seq.data import Pair
    from fastattn.seq2seq.demo import DemoReport
    from fastattn.seq2seq.generation import Strategy, Translator
    from fastattn.seq2seq.runs import PreparedText, RunFiles

DONE, FAILED, WRONG_INPUT, NO_TEXT, INTERRUPTED = 0, 1, 2, 3, 130
DEMO_PACKAGES = ("matplotlib", "rich", "sacrebleu", "safetensors", "tokenizers")
PROBLEMS_SHOWN = 5

EPILOG = """\
exit codes: 0 done, 1 a check failed or training diverged, 2 wrong input or a missing
package, 3 the default text could not be downloaded, 130 interrupted
"""


class UsageError(Exception):
    """Input that the command cannot work with; the message names it, what was wanted, what came."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(arguments)
    options = parser.parse_args(arguments)
    if options.version:
        import fastattn

        print(f"fastattn {fastattn.__version__}")
        return DONE
    if options.command is None:
        parser.print_help()
        return WRONG_INPUT
    try:
        command: Callable[[argparse.Namespace], int] = options.run
        return command(options)
    except KeyboardInterrupt:
        print("\nfastattn: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name not in DEMO_PACKAGES:
            raise
        return _fail(
            f"{options.command} needs the package {error.name}, which is not installed: "
            "pip install 'fastattn[demo]'"
        )
    except (UsageError, OSError) as error:
        return _fail(str(error))
    except Exception as error:
        # Raised by modules that are imported lazily, so known by name here.
        code = {"TextUnavailable": NO_TEXT, "TrainingDiverged": FAILED}.get(type(error).__name__)
        if code is None:
            raise
        return _fail(str(error), code)


def make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; the options of `check` are read in only when it is the command."""
    parser = argparse.ArgumentParser(
        prog="fastattn",
        description="Attention kernels behind a drop-in Transformer: try it, train it, check it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_demo(commands)
    _add_train(commands)
    _add_translate(commands)
    _add_evaluate(commands)
    _add_info(commands)
    check = _add_command(
        commands, "check", "compare every op and backend with an fp64 reference", _run_check
    )
    if arguments and arguments[0] == "check":
        from fastattn.testing import check as equivalence

        equivalence.add_arguments(check, device=_device, count=_positive_int)
    return parser


def _add_command(
    commands: Any, name: str, summary: str, run: Callable[[argparse.Namespace], int], **extra: Any
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=extra.pop("description", summary[0].upper() + summary[1:] + "."),
        **extra,
    )
    parser.set_defaults(run=run)
    return parser


def _fail(message: str, code: int = WRONG_INPUT) -> int:
    print(f"fastattn: error: {message}", file=sys.stderr)
    return code


@contextmanager
def _input_errors() -> Iterator[None]:
    """Report a ValueError of the library, which names the value at fault, as wrong input."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# Types of arguments


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"must be a number in [0, 1), got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if value > 1.0:
        raise argparse.ArgumentTypeError(f"must be a number in [0, 1], got {text!r}")
    return value


def _existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"must be an existing file, got {text!r}")
    return path


def _device(text: str) -> torch.device:
    import torch

    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(
            f"must be a device that torch can use here, cpu or cuda say, got {text!r} ({reason})"
        ) from error
    return device


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", type=_device, default=argparse.SUPPRESS,
        help="cpu, cuda, cuda:1, ... (default: the GPU if there is one)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=_positive_int, default=argparse.SUPPRESS,
        help="CPU threads for torch (default: torch's choice)",
    )  # fmt: skip


def _chosen_device(options: argparse.Namespace) -> torch.device:
    import torch

    from fastattn.ops import _env

    if hasattr(options, "threads"):
        torch.set_num_threads(options.threads)
    return getattr(options, "device", None) or _env.default_device()


# demo


def _add_demo(commands: Any) -> None:
    parser = _add_command(
        commands,
        "demo",
        "train an English-French translator and compare it with torch.nn.Transformer",
        _run_demo,
        description=(
            "Train a small translator twice from one seed, with fastattn.nn.Transformer and with "
            "torch.nn.Transformer, check that their losses agree, and translate held-out "
            "sentences. Three to six minutes on two CPU cores; a GPU trains a larger model."
        ),
    )
    parser.add_argument(
        "--steps", type=_positive_int, default=argparse.SUPPRESS,
        help="updates of each model (default: 550 on a CPU, 1500 on a GPU)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=argparse.SUPPRESS,
        help="run folder to create (default: runs/demo-DATE-TIME)",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=_existing_file, default=argparse.SUPPRESS,
        help="tab-separated sentence pairs (default: downloaded message catalogues)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    _add_device(parser)


def _run_demo(options: argparse.Namespace) -> int:
    device = _chosen_device(options)
    from fastattn.seq2seq.demo import run_demo

    out = getattr(options, "out", None) or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    with _input_errors():
        report = run_demo(
            out,
            data=getattr(options, "data", None),
            steps=getattr(options, "steps", None),
            device=device,
            notify=_say,
        )
    if options.json:
        print(json.dumps(report.summary(), indent=2))
    else:
        _print_demo(report)
    return DONE if report.passed else FAILED


def _print_demo(report: DemoReport) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)

    def write(line: str) -> None:
        # Soft: a line that is copied into a shell or searched for stays one line.
        console.print(line, soft_wrap=True)

    write("")
    console.rule("fastattn demo")
    text, model = report.text, report.preset.model
    write(
        f"{report.device}; {report.parameters / 1e6:.1f} M parameters, {model.encoder_layers}"
        f"+{model.decoder_layers} layers of width {model.width}\n"
        f"Text: {', '.join(text['origin'])}\n"
        f"{text['train']:,} pairs for training, {text['test']} for the test\n"
    )

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("Transformer", "final loss", "validation", "tokens/s", "updates", "seconds"):
        table.add_column(heading, justify="left" if heading == "Transformer" else "right")
    for name, result in report.runs.items():
        last = result.losses[-20:]
        valid = f"{result.validations[-1][1]:.4f}" if result.validations else ""
        table.add_row(
            name, f"{sum(last) / len(last):.4f}", valid, f"{result.tokens_per_second:,.0f}",
            str(len(result.losses)), f"{result.seconds:.1f}",
        )  # fmt: skip
    console.print(table)

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("check", "wanted", "got", ""):
        table.add_column(heading)
    for check in report.checks:
        verdict = Text("ok", "green") if check.passed else Text("FAILED", "bold red")
        table.add_row(check.name, check.wanted, check.got, verdict)
    console.print(table)
    write(
        f"Held-out BLEU: {report.bleu:.1f} (update {report.best_step}, the lowest "
        f"validation loss); handing the source back: {report.bleu_of_source:.1f}"
        f"{'' if report.bleu_is_judged else ' (not judged in a shortened run)'}\n"
    )

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=False)
    for heading in ("source", "reference", "ours"):
        table.add_column(heading, ratio=1, overflow="fold")
    for sample in report.samples:
        table.add_row(Text(sample.source), Text(sample.reference), Text(sample.ours, "cyan"))
    console.print(table)
    write(f"{report.seconds['all']:.0f} s in all. Curves, samples, heat maps: {report.out}")
    write(f"Try it: fastattn translate --run {report.out} {shlex.quote(report.samples[0].source)}")
    write("The text keeps its licence; the trained model is for demonstration.")


# train


def _add_train(commands: Any) -> None:
    parser = _add_command(
        commands,
        "train",
        "train a translator from a file of sentence pairs",
        _run_train,
        description=(
            "Train a translator into a run folder, from tab-separated sentence pairs (source, "
            "target, further columns ignored, as in Tatoeba's fra.txt). With --resume, continue "
            "an interrupted run with the choices it was started with."
        ),
    )
    parser.add_argument(
        "--data", type=_existing_file, default=argparse.SUPPRESS,
        help="tab-separated sentence pairs (default: downloaded English-French messages)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="run folder")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument(
        "--bleu-sentences", type=_natural, default=0, metavar="N",
        help="translate N sentences at every validation, for a BLEU curve (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_device(parser)

    fixed: list[argparse.Action] = []

    def choices_of(title: str) -> Callable[..., None]:
        group = parser.add_argument_group(title)

        def add(*names: str, **about: Any) -> None:
            if about.get("default", argparse.SUPPRESS) != argparse.SUPPRESS:
                about["help"] += " (default: %(default)s)"
            fixed.append(group.add_argument(*names, **about))

        return add

    model = choices_of("model")
    model("--vocabulary", type=_positive_int, default=8000, help="subwords to learn")
    model("--width", type=_positive_int, default=256, help="size of a token's vector")
    model("--heads", type=_positive_int, default=4, help="attention heads")
    model("--layers", type=_positive_int, default=3, help="layers of each stack")
    model("--ffn-width", type=_positive_int, default=1024, help="hidden size of an FFN")
    model("--dropout", type=_fraction, default=0.1, help="probability")
    model("--max-length", type=_positive_int, default=128, help="tokens of a sentence")
    model("--post-norm", action="store_true", help="norms after the residual sums")
    model("--untied", action="store_true", help="separate embeddings and output head")
    model("--positions", choices=("sinusoidal", "learned"), default="sinusoidal", help="encoding")
    model(
        "--norm", choices=("layer", "power", "batch"), default="layer",
        help="what the norms normalise by; power and batch for comparison",
    )  # fmt: skip
    model(
        "--scoring", choices=("dot", "additive", "cosine"), default="dot",
        help="how attention compares queries with keys",
    )  # fmt: skip
    model(
        "--memory-layers", default="last", metavar="LAYERS",
        help="encoder layer that each decoder layer reads: last, same, reversed, or numbers from "
        "1 such as 1,2,2",
    )  # fmt: skip
    model("--copy", action="store_true", help="a head that may copy source tokens")
    model(
        "--decoder", choices=("autoregressive", "non-autoregressive"), default="autoregressive",
        help="one token after the other, or all at once",
    )  # fmt: skip
    model(
        "--length", choices=("predictor", "end"), default="predictor",
        help="what ends a non-autoregressive translation: its predicted length, or its first END",
    )  # fmt: skip

    training = choices_of("training")
    training("--steps", type=_positive_int, default=10_000, help="updates in all")
    training(
        "--batch-tokens", type=_positive_int, default=8192, help="source and target tokens a batch"
    )
    training("--accumulate", type=_positive_int, default=1, help="batches of an update")
    training("--packed", action="store_true", help="run on real tokens alone, without padding")
    training(
        "--patience", type=_natural, default=0,
        help="stop after so many validations without a lower loss; 0: never",
    )  # fmt: skip
    training("--learning-rate", type=_positive_float, default=1e-3, help="peak, after the warm-up")
    training("--warmup-steps", type=_natural, default=400, help="updates of warm-up")
    training("--smoothing", type=_fraction, default=0.1, help="label smoothing")
    training("--weight-decay", type=_fraction, default=0.01, help="AdamW's")
    training("--clip", type=_positive_float, default=1.0, help="largest gradient norm")
    training(
        "--precision", choices=("auto", "fp32", "bf16"), default="auto",
        help="auto: bf16 autocast on a GPU, fp32 on a CPU",
    )  # fmt: skip
    training("--seed", type=_natural, default=0, help="of split, model and order")
    training(
        "--held-out", type=_positive_int, default=argparse.SUPPRESS,
        help="sentences of the validation and of the test part (default: 5 %%, at most 500)",
    )  # fmt: skip
    training("--valid-every", type=_positive_int, default=500, help="updates between validations")
    training(
        "--checkpoint-every", type=_positive_int, default=500, help="updates between checkpoints"
    )

    objective = choices_of("what training minimises")
    objective(
        "--scheduled-sampling", choices=("none", "sequential", "parallel"), default="none",
        help="feed the decoder some of its own tokens, drawn one by one or all at once",
    )  # fmt: skip
    objective(
        "--sampling-decay", choices=("linear", "exponential", "inverse-sigmoid"), default="linear",
        help="how the share of true tokens falls from 1",
    )  # fmt: skip
    objective("--truth-floor", type=_share, default=0.5, help="and to which share")
    objective(
        "--guided-attention", type=_number, default=0.0, metavar="WEIGHT",
        help="of a loss that keeps attention near the diagonal",
    )  # fmt: skip
    objective("--guided-width", type=_positive_float, default=0.2, help="how near")
    objective(
        "--sequence-steps", type=_natural, default=0,
        help="last updates that reward sampled translations by their BLEU",
    )  # fmt: skip
    objective(
        "--sequence-weight", type=_share, default=0.9, help="share of that loss in these updates"
    )
    parser.set_defaults(fixed_choices={action.dest: action for action in fixed})


def _run_train(options: argparse.Namespace) -> int:
    import torch

    device = _chosen_device(options)
    from fastattn.seq2seq.model import make_model
    from fastattn.seq2seq.plots import Curve, save_curves
    from fastattn.seq2seq.runs import load_translator, start_run, validation_bleu
    from fastattn.seq2seq.training import read_metrics, require_trainable, train

    run: Path = options.out
    with _input_errors():
        prepared, files = _continue_run(options) if options.resume else _new_run(options, device)
        torch.manual_seed(files.training.seed)
        model = make_model(files.model)
        require_trainable(model, files.training)
    if not options.resume:
        start_run(run, files)
    parameters = sum(p.numel() for p in model.parameters())
    _say(
        f"{len(prepared.train):,} training pairs ({prepared.left_out} too long left out), "
        f"{len(prepared.valid)} for validation, {len(prepared.test)} for the test; "
        f"{parameters / 1e6:.1f} M parameters on {device}, {files.training.precision}"
    )
    result = train(
        model, prepared.train, prepared.valid, files.training,
        device=device, run=run, resume=options.resume,
        score=validation_bleu(prepared, options.bleu_sentences) if options.bleu_sentences else None,
    )  # fmt: skip
    rows = read_metrics(run / "metrics.jsonl")
    points = {
        name: [(row["step"], row[name]) for row in rows if name in row]
        for name in ("loss", "valid_loss", "valid_bleu")
    }
    losses = [loss for _, loss in points["loss"]]
    curve = Curve(losses, points["valid_loss"], points["valid_bleu"])
    save_curves(run / "curves.png", {run.name: curve})
    outcome = {
        "run": str(run),
        "updates": result.first_step + len(result.losses) - 1,
        "stopped_early": result.stopped_early,
        "tokens_per_second": round(result.tokens_per_second),
        **_score(load_translator(run, device=device), prepared.test),
    }
    if options.json:
        print(json.dumps(outcome, indent=2))
    else:
        print(
            f"test BLEU {outcome['bleu']:.1f}; handing the source back: "
            f"{outcome['bleu_of_source']:.1f}\n"
            f'translate with: fastattn translate --run {run} "TEXT"'
        )
    return DONE


def _new_run(options: argparse.Namespace, device: torch.device) -> tuple[PreparedText, RunFiles]:
    from fastattn.seq2seq.model import ModelConfig
    from fastattn.seq2seq.runs import RunFiles, default_held_out, prepare_text, require_no_run
    from fastattn.seq2seq.training import TrainingConfig

    try:
        require_no_run(options.out)
    except FileExistsError as error:
        raise UsageError(f"--out: {error}; continue it with --resume") from error
    precision = options.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    model = ModelConfig(
        vocabulary=options.vocabulary,
        width=options.width,
        heads=options.heads,
        encoder_layers=options.layers,
        decoder_layers=options.layers,
        ffn_width=options.ffn_width,
        dropout=options.dropout,
        norm_first=not options.post_norm,
        tied=not options.untied,
        positions=options.positions,
        max_length=options.max_length,
        memory_layers=options.memory_layers,
        norm=options.norm,
        scoring=options.scoring,
        copy=options.copy,
        decoder=options.decoder,
        length=options.length,
    )
    training = TrainingConfig(
        steps=options.steps,
        batch_tokens=options.batch_tokens,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        smoothing=options.smoothing,
        weight_decay=options.weight_decay,
        clip=options.clip,
        precision=precision,
        seed=options.seed,
        valid_every=options.valid_every,
        checkpoint_every=options.checkpoint_every,
        accumulate=options.accumulate,
        packed=options.packed,
        patience=options.patience,
        scheduled_sampling=options.scheduled_sampling,
        sampling_decay=options.sampling_decay,
        truth_floor=options.truth_floor,
        guided_attention=options.guided_attention,
        guided_width=options.guided_width,
        sequence_steps=options.sequence_steps,
        sequence_weight=options.sequence_weight,
    )
    pairs = _load_pairs(getattr(options, "data", None))
    held_out = getattr(options, "held_out", default_held_out(len(pairs)))
    prepared = prepare_text(
        pairs,
        held_out=held_out,
        seed=options.seed,
        max_length=model.max_length,
        vocabulary=options.vocabulary,
    )
    model = replace(model, vocabulary=prepared.tokenizer.vocabulary)
    return prepared, RunFiles(model, training, prepared.tokenizer, prepared.digest, held_out)


def _continue_run(options: argparse.Namespace) -> tuple[PreparedText, RunFiles]:
    from fastattn.seq2seq.runs import open_run, prepare_text

    files = open_run(options.out)
    for name, action in options.fixed_choices.items():
        if getattr(options, name, action.default) != action.default:
            raise UsageError(
                f"{action.option_strings[0]} must be left out with --resume, which continues with "
                f"the run's own choices, got {getattr(options, name)}"
            )
    prepared = prepare_text(
        _load_pairs(getattr(options, "data", None)),
        held_out=files.held_out,
        seed=files.training.seed,
        max_length=files.model.max_length,
        vocabulary=files.tokenizer,
    )
    if prepared.digest != files.data_digest:
        raise UsageError(
            f"--data must be the text that {options.out} was started with, got another one"
        )
    return prepared, files


def _score(translator: Translator, test: Sequence[Pair]) -> dict[str, Any]:
    from fastattn.seq2seq.generation import bleu
    from fastattn.seq2seq.progress import Progress

    sources, references = zip(*test, strict=True)
    with Progress("translating the test part", len(test), unit="sentences") as progress:
        translations = translator.translate(sources, notify=progress.update)
    score = bleu(translations, references)
    return {
        "bleu": score.score,
        "bleu_of_source": bleu(sources, references).score,
        "bleu_details": score.details,
        "bleu_signature": score.signature,
    }


def _load_pairs(path: Path | None) -> list[Pair]:
    from fastattn.seq2seq import catalogues, data

    if path is None:
        for source in catalogues.SOURCES:
            _say(f"text: French messages of {source.requirement}, {source.licence}")
        return catalogues.load_catalogue_pairs().pairs
    file = data.read_pairs(path)
    for problem in file.problems[:PROBLEMS_SHOWN]:
        _say(f"left out: {problem}")
    if len(file.problems) > PROBLEMS_SHOWN:
        _say(f"left out: {len(file.problems) - PROBLEMS_SHOWN} more malformed lines")
    if not file.pairs:
        raise UsageError(
            f"--data must hold lines of source<TAB>target, got {len(file.problems)} lines without "
            f"them in {path}"
        )
    return file.pairs


# translate


def _add_translate(commands: Any) -> None:
    parser = _add_command(
        commands,
        "translate",
        "translate text with a trained run",
        _run_translate,
        description=(
            "Translate each TEXT, or each line of standard input, with a run's best checkpoint."
        ),
    )
    parser.add_argument("--run", dest="run_folder", type=Path, required=True, help="run folder")
    parser.add_argument("text", nargs="*", metavar="TEXT", help="a sentence")
    parser.add_argument(
        "--max-length", type=_positive_int, default=argparse.SUPPRESS,
        help="tokens of a translation (default: twice the source's and ten)",
    )  # fmt: skip
    parser.add_argument(
        "--attention", type=Path, metavar="PNG", default=argparse.SUPPRESS,
        help="draw the cross-attention of the first sentence",
    )  # fmt: skip
    parser.add_argument(
        "--alignment", type=Path, metavar="PNG", default=argparse.SUPPRESS,
        help="draw the first sentence and its translation with lines between their tokens",
    )  # fmt: skip
    parser.add_argument(
        "--prefix", default=argparse.SUPPRESS, metavar="WORDS",
        help="words that every translation begins with",
    )  # fmt: skip
    parser.add_argument(
        "--scores", action="store_true", help="print each translation's score and a tab before it"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON array of both texts and the scores"
    )
    _add_strategy(parser)
    _add_device(parser)


def _add_strategy(parser: argparse.ArgumentParser) -> None:
    """The ways of choosing tokens; options that belong to another way are errors."""
    group = parser.add_argument_group("search (greedy without --beams and --sample)")

    def add(*names: str, **about: Any) -> None:
        group.add_argument(*names, default=argparse.SUPPRESS, **about)

    add("--beams", type=_positive_int, help="keep so many translations side by side")
    add("--length-penalty", type=_number, help="of beams: larger favours length (default: 0.6)")
    add(
        "--early-stopping", action="store_true",
        help="of beams: stop at as many ends as beams, though another could still win",
    )  # fmt: skip
    add("--sample", action="store_true", help="draw each token")
    add("--temperature", type=_positive_float, help="of samples: divides the logits (default: 1)")
    add("--top-k", type=_positive_int, help="of samples: the k likeliest tokens (default: all)")
    add(
        "--top-p", type=_share,
        help="of samples: the likeliest tokens that reach this probability (default: 1)",
    )  # fmt: skip
    add("--seed", type=_natural, help="of samples (default: 0)")


def _strategy(options: argparse.Namespace) -> Strategy:
    from fastattn.seq2seq.beam_search import BeamSearch
    from fastattn.seq2seq.generation import GREEDY
    from fastattn.seq2seq.sampling import Sampling

    given = vars(options)
    ways = {
        "beams": ("beams", "length_penalty", "early_stopping"),
        "sample": ("temperature", "top_k", "top_p", "seed"),
    }
    for way, names in ways.items():
        for name in names:
            if name in given and way not in given:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} must come with --{way}, got {given[name]} without it")
    if "beams" in given and "sample" in given:
        raise UsageError("--sample must come without --beams, got both")
    way = next((way for way in ways if way in given), "")
    chosen = {name: given[name] for name in ways.get(way, ()) if name in given}
    with _input_errors():
        return {"beams": BeamSearch, "sample": Sampling}[way](**chosen) if way else GREEDY


def _run_translate(options: argparse.Namespace) -> int:
    device = _chosen_device(options)
    from fastattn.seq2seq.progress import Progress
    from fastattn.seq2seq.runs import load_translator

    strategy = _strategy(options)
    translator = load_translator(options.run_folder, device=device)
    if not options.text and sys.stdin.isatty():
        _say("reading lines from the keyboard; end with Ctrl-D")
    texts = options.text or [line.rstrip("\n") for line in sys.stdin]
    with Progress("translating", len(texts), show=len(texts) > 64, unit="lines") as progress:
        with _input_errors():
            results = translator.search(
                texts,
                prefixes=[options.prefix] * len(texts) if hasattr(options, "prefix") else None,
                max_length=getattr(options, "max_length", None),
                strategy=strategy,
                notify=progress.update,
            )
    translations = [result.text for result in results]
    scores = [result.hypothesis.score if result.hypothesis else 0.0 for result in results]
    if hasattr(options, "attention") and texts:
        from fastattn.seq2seq.demo import draw_attention

        draw_attention(options.attention, translator, texts[0], translations[0])
    if hasattr(options, "alignment") and texts:
        from fastattn.seq2seq.demo import draw_alignment

        draw_alignment(options.alignment, translator, texts[0], translations[0])
    if options.json:
        rows = [
            {"source": source, "translation": translation, "score": score}
            for source, translation, score in zip(texts, translations, scores, strict=True)
        ]
        print(json.dumps(rows, ensure_ascii=False, indent=2))
    elif options.scores:
        for score, translation in zip(scores, translations, strict=True):
            print(f"{score:.4f}\t{translation}")
    else:
        print("\n".join(translations))
    return DONE


# evaluate


def _add_evaluate(commands: Any) -> None:
    parser = _add_command(
        commands,
        "evaluate",
        "compare runs on their test part: BLEU and speed",
        _run_evaluate,
        description=(
            "Translate the test part with each RUN and print BLEU and sentences per second side by "
            "side: greedy and by beams, autoregressive and not. All runs must come from one text."
        ),
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--data", type=_existing_file, default=argparse.SUPPRESS,
        help="the text that the runs were trained on (default: downloaded messages)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    _add_strategy(parser)
    _add_device(parser)


def _run_evaluate(options: argparse.Namespace) -> int:
    device = _chosen_device(options)
    from fastattn.seq2seq.evaluation import evaluate_run

    strategy = _strategy(options)
    pairs = _load_pairs(getattr(options, "data", None))
    rows = []
    for run in options.runs:
        with _input_errors():
            rows.append(evaluate_run(run, pairs, strategy=strategy, device=device))
    if options.json:
        figures = [asdict(r) | {"sentences_per_second": r.sentences_per_second} for r in rows]
        print(json.dumps(figures, indent=2))
        return DONE
    table: list[tuple[str, ...]] = [("run", "decoder", "search", "BLEU", "source", "sentences/s")]
    for row in rows:
        numbers = row.bleu, row.bleu_of_source, row.sentences_per_second
        table.append((row.run, row.decoder, row.search, *(f"{n:.1f}" for n in numbers)))
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
    return DONE


# info


def _add_info(commands: Any) -> None:
    parser = _add_command(
        commands, "info", "print versions, the device and which backend serves which op", _run_info
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    _add_device(parser)


def _run_info(options: argparse.Namespace) -> int:
    device = _chosen_device(options)
    import torch

    import fastattn
    from fastattn.ops import _env, backend_table

    rows = backend_table(device)
    report = {
        "fastattn": fastattn.__version__,
        "versions": _env.versions(),
        "device": str(device),
        "device_name": _env.device_name(device),
        "threads": torch.get_num_threads(),
        "backends": [asdict(row) for row in rows],
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return DONE
    versions = ", ".join(f"{name} {version}" for name, version in _env.versions().items())
    print(f"fastattn {fastattn.__version__}; {versions}")
    print(f"device {device}: {_env.device_name(device)}, {torch.get_num_threads()} CPU threads\n")
    print("Backends in the order in which they are tried:\n")
    table = [("op", "backend", "available", "automatic", "")]
    for row in rows:
        available, automatic = ("yes" if flag else "no" for flag in (row.available, row.automatic))
        table.append((row.op, row.backend, available, automatic, row.reason))
    widths = [max(len(line[i]) for line in table) for i in range(4)]
    for line in table:
        cells = [cell.ljust(width) for cell, width in zip(line[:4], widths, strict=True)]
        print("  ".join([*cells, line[4]]).rstrip())
    return DONE


# check


def _run_check(options: argparse.Namespace) -> int:
    from fastattn.testing import check as equivalence

    with _input_errors():
        return equivalence.run(options)
