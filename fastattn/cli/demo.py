"""`fastattn demo`."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastattn.cli.arguments import (
    DONE,
    FAILED,
    UsageError,
    add_command,
    add_device,
    cannot_write,
    chosen_device,
    existing_file,
    input_errors,
    log,
    positive_int,
    run_folder,
)
from fastattn.cli.signals import StopRequest, tell_how_to_resume

if TYPE_CHECKING:
    import torch

    from fastattn.seq2seq.demo import DemoReport

# Time limit of the check on a GPU, which compiles kernels.
_CHECK_SECONDS = 60


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "demo",
        "train an English-French translator and compare it with torch.nn.Transformer",
        _run_demo,
        description=(
            "Train a small translator twice from one seed, with fastattn.nn.Transformer and with "
            "torch.nn.Transformer, check that their losses agree, and translate held-out "
            "sentences. Takes two to four minutes on two idle CPU cores, depending on their speed; "
            "on a GPU the model is larger."
        ),
    )
    parser.add_argument(
        "--steps", type=positive_int, default=argparse.SUPPRESS,
        help="updates of each model (default: 550 on a CPU, 1500 on a GPU)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=run_folder, default=argparse.SUPPRESS,
        help="run folder to create (default: runs/demo-DATE-TIME)",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=existing_file, default=argparse.SUPPRESS,
        help="tab-separated sentence pairs (default: downloaded message catalogues)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_device(parser)


def _run_demo(options: argparse.Namespace) -> int:
    device = chosen_device(options)
    if device.type == "cuda" and not _check_kernels(device):
        return FAILED
    from fastattn.seq2seq.demo import run_demo
    from fastattn.seq2seq.training import TrainingInterrupted

    out = getattr(options, "out", None) or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if why := cannot_write(out):
        raise UsageError(f"--out must be a folder that can be written, got {out} ({why})")
    stop = StopRequest()
    try:
        with input_errors():
            report = run_demo(
                out,
                data=getattr(options, "data", None),
                steps=getattr(options, "steps", None),
                device=device,
                notify=log,
                stop_request=stop,
            )
    except TrainingInterrupted as interrupted:
        log(f"interrupted: {interrupted}")
        tell_how_to_resume(out, options)
        return stop.exit_code
    if options.json:
        print(json.dumps(report.summary(), indent=2))
    else:
        _print_demo(report)
    return DONE if report.passed else FAILED


def _check_kernels(device: torch.device) -> bool:
    """Runs the quick form of `fastattn check` for the ops of the model and says which kernels will
    train it. Returns False if these failed.
    """
    import fastattn
    from fastattn.testing import check

    calls = _calls(device)
    others = {row.backend for row in fastattn.ops.backend_table(device) if row.available}
    arguments = [f"--op={name}" for name in calls] + ["--dtype=fp32", "--dtype=bf16", "--quick"]
    arguments += [f"--backend={name}" for name in sorted(others - {"reference"})]
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    log(f"checking the kernels, at most {_CHECK_SECONDS} s")
    options = parser.parse_args([*arguments, f"--seconds={_CHECK_SECONDS}", f"--device={device}"])
    rows = check.check_samples(options, device)
    works = True
    for name, arguments_of_call in calls.items():
        chosen = fastattn.explain(name, *arguments_of_call).chosen
        status: dict[str, set[str]] = {}
        for row in rows:
            if row.op == name:
                status.setdefault(row.backend, set()).add(row.status)
        failed = sorted(backend for backend, found in status.items() if "FAIL" in found)
        passed = {backend for backend, found in status.items() if "ok" in found} - set(failed)
        unused = sorted(passed - {chosen, "torch", "cpu"})
        unknown = "" if chosen in passed else ", which was not checked"
        log(
            f"{name}: trained by backend {chosen}"
            f"{', which FAILED' if chosen in failed else unknown}"
        )
        if failed:
            log(f"  wrong here: {', '.join(failed)} (`fastattn check --op {name}` names samples)")
        if unused:
            log(
                f"  right in these samples: {', '.join(unused)}; `fastattn check --device cuda "
                "--record` checks all of them; training then uses what passes"
            )
        works = works and chosen not in failed
    if not works:
        log("FASTATTN_BACKEND=torch trains with PyTorch's operators")
    return works


def _calls(device: torch.device) -> dict[str, tuple[Any, ...]]:
    """A call of every op of the model in training."""
    import torch

    def data(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device, requires_grad=True)

    q, x, weight = data(1, 8, 64, 64), data(64, 512), data(512)
    w1, b1, w2 = data(2048, 512), data(2048), data(512, 2048)
    return {
        "attention": (q, q, q),
        "add_layer_norm": (x, x, weight, weight),
        "ffn": (x, w1, b1, w2, weight, "relu"),
    }


def _print_demo(report: DemoReport) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)

    def write(line: str) -> None:
        # Soft wrap, so that a line that is copied or searched for stays one line.
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
        f"validation loss); BLEU of the untranslated source: {report.bleu_of_source:.1f}"
        f"{'' if report.bleu_is_judged else ' (not judged in a shortened run)'}\n"
    )

    for which, samples in (
        ("closest to their references", report.best_samples),
        ("drawn at random", report.samples),
    ):
        if not samples:
            continue
        write(f"Held-out sentences, {which} (chrF: similarity to the reference, 0 to 100):")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=False)
        for heading in ("source", "reference", "translation"):
            table.add_column(heading, ratio=1, overflow="fold")
        table.add_column("chrF", justify="right")
        for sample in samples:
            translation = Text(sample.translation, "cyan")
            score = f"{sample.chrf:.0f}"
            table.add_row(Text(sample.source), Text(sample.reference), translation, score)
        console.print(table)
    write(
        f"{report.seconds['all']:.0f} s in total. In {report.out}: curves.png, samples.tsv, "
        "attention-*.png"
    )
    example = shlex.join(["--run", str(report.out), report.best_samples[0].source])
    write(f"Try it: fastattn translate {example}")
    write("The text keeps its licence; the trained model is for demonstration.")
