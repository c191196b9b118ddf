"""Common code of the commands: exit codes, usage errors, argument types, common options."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

    from fastattn.seq2seq.data import Pair
    from fastattn.seq2seq.generation import Strategy

DONE, FAILED, WRONG_INPUT, NO_TEXT, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 130, 141
PROBLEMS_SHOWN = 5


class UsageError(Exception):
    """Wrong input; the message names it, what was expected and what was given."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are two lines, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"{self.prog}: error: {message}\nSee {self.prog} --help\n")


@contextmanager
def input_errors() -> Iterator[None]:
    """Report a ValueError of the library, whose message names the value, as wrong input."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def add_command(
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


# Types of arguments


def positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value < 2**31:
        wanted = "must be a positive integer" + (" below 2 ** 31" if value > 0 else "")
        raise argparse.ArgumentTypeError(f"{wanted}, got {text!r}")
    return value


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    if int(text) >= 2**63:
        wanted = "an integer of at least 0, below 2 ** 63"
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"must be a number in [0, 1), got {text!r}")
    return value


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def share(text: str) -> float:
    value = number(text)
    if value > 1.0:
        raise argparse.ArgumentTypeError(f"must be a number in [0, 1], got {text!r}")
    return value


def image_file(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf", ".jpg", ".jpeg") or path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file .png, .svg, .pdf or .jpg, got {text!r}")
    if why := cannot_write(path.parent, create=False):
        raise argparse.ArgumentTypeError(
            f"must be a file that can be written, got {text!r} ({why})"
        )
    return path


def run_folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must be a folder, got ''")
    if why := cannot_write(Path(text)):
        wanted = "must be a folder that can be written"
        raise argparse.ArgumentTypeError(f"{wanted}, got {text!r} ({why})")
    return Path(text)


def json_file(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must be a file, got ''")
    if why := cannot_write(Path(text).parent):
        raise argparse.ArgumentTypeError(
            f"must be a file that can be written, got {text!r} ({why})"
        )
    return text


def cannot_write(folder: Path, *, create: bool = True) -> str | None:
    """Why files cannot be created in a folder, which itself can be created with its parents."""
    while create and not os.path.lexists(folder):
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror}"


def existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"must be an existing file, got {text!r}")
    return path


def device(text: str) -> torch.device:
    import torch

    try:
        device = torch.device(text)
    except RuntimeError as error:  # it lists every device type that torch knows
        raise argparse.ArgumentTypeError(
            f"must be cpu, cuda or cuda:NUMBER, got {text!r}"
        ) from error
    try:
        torch.empty(0, device=device).sum().item()  # fails on the meta device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(
            f"must be a device that torch can use here, such as cpu, got {text!r} ({reason})"
        ) from error
    return device


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", type=device, default=argparse.SUPPRESS,
        help="cpu, cuda, cuda:1, ... (default: the GPU if there is one)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=positive_int, default=argparse.SUPPRESS,
        help="CPU threads for torch (default: torch's choice)",
    )  # fmt: skip


def chosen_device(options: argparse.Namespace) -> torch.device:
    import torch

    from fastattn.ops import default_device

    if hasattr(options, "threads"):
        torch.set_num_threads(options.threads)
    return getattr(options, "device", None) or default_device()


def chosen_text(options: argparse.Namespace, default: Path | None) -> Path | None:
    """--data, or the text that the run was started with."""
    path: Path | None = getattr(options, "data", default)
    if path is not None and not path.is_file():
        raise UsageError(f"--data must be given: the run's own text does not exist, got {path}")
    return path


def load_pairs(path: Path | None) -> list[Pair]:
    from fastattn.seq2seq import catalogues, data
    from fastattn.seq2seq.progress import counted

    if path is None:
        for source in catalogues.SOURCES:
            log(f"text: French messages of {source.requirement}, {source.licence}")
        return catalogues.load_catalogue_pairs().pairs
    file = data.read_pairs(path)
    for problem in file.problems[:PROBLEMS_SHOWN]:
        log(f"skipped: {problem}")
    if len(file.problems) > PROBLEMS_SHOWN:
        left = counted(len(file.problems) - PROBLEMS_SHOWN, "more malformed line")
        log(f"skipped: {left}")
    if not file.pairs:
        lines = counted(len(file.problems), "line")
        raise UsageError(
            f"--data must hold lines of source<TAB>target, got {lines} without them in {path}"
        )
    return file.pairs


def add_strategy(parser: argparse.ArgumentParser) -> None:
    """The options of the search strategies; those of a strategy that is not chosen are errors."""
    group = parser.add_argument_group("search (greedy without --beams and --sample)")

    def add(*names: str, **about: Any) -> None:
        group.add_argument(*names, default=argparse.SUPPRESS, **about)

    add("--beams", type=positive_int, help="beam search with this many beams")
    add("--length-penalty", type=number, help="--beams: larger favours length (default: 0.6)")
    add(
        "--early-stopping", action="store_true",
        help="--beams: stop at as many ends as beams, even if an unfinished beam could still win",
    )  # fmt: skip
    add("--sample", action="store_true", help="draw each token at random")
    add("--temperature", type=positive_float, help="--sample: divides the logits (default: 1)")
    add("--top-k", type=positive_int, help="--sample: only the k likeliest tokens (default: all)")
    add(
        "--top-p", type=share,
        help="--sample: only the likeliest tokens that reach this probability (default: 1)",
    )  # fmt: skip
    add("--seed", type=natural, help="--sample: seed of the random numbers (default: 0)")


def chosen_strategy(options: argparse.Namespace) -> Strategy:
    from fastattn.seq2seq.beam_search import BeamSearch
    from fastattn.seq2seq.generation import GREEDY
    from fastattn.seq2seq.sampling import Sampling

    given = vars(options)
    strategies = {
        "beams": ("beams", "length_penalty", "early_stopping"),
        "sample": ("temperature", "top_k", "top_p", "seed"),
    }
    for name, own in strategies.items():
        for option in own:
            if option in given and name not in given:
                flag = option.replace("_", "-")
                raise UsageError(f"--{flag} needs --{name}, got {given[option]} without it")
    if "beams" in given and "sample" in given:
        raise UsageError("--sample must be given without --beams, got both")
    name = next((name for name in strategies if name in given), "")
    chosen = {option: given[option] for option in strategies.get(name, ()) if option in given}
    with input_errors():
        return {"beams": BeamSearch, "sample": Sampling}[name](**chosen) if name else GREEDY
