"""A text of an invented language, a run trained on it, and calls of the command line."""

import dataclasses
from pathlib import Path

import pytest

from fastattn import cli
from fastattn.seq2seq import demo

TINY = [
    "--vocabulary=300", "--width=16", "--heads=2", "--layers=1", "--ffn-width=32",
    "--max-length=24", "--batch-tokens=300", "--held-out=5", "--device=cpu",
]  # fmt: skip
TINY_PRESET = dataclasses.replace(
    demo.CPU_PRESET,
    model=dataclasses.replace(
        demo.CPU_PRESET.model, vocabulary=300, width=16, heads=2, ffn_width=32, encoder_layers=1,
        decoder_layers=1,
    ),
    training=dataclasses.replace(demo.CPU_PRESET.training, steps=50, batch_tokens=300),
)  # fmt: skip


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory) -> Path:
    """An invented language: a name and a number word, whose translation swaps and doubles them."""
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    names = [
        f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe") for b in ("rin", "sot", "tal", "vek")
    ]
    counts = ("one", "two", "six")
    lines = [f"{n} {c}\t{c}{c} {n.upper()}\tignored" for n in names for c in counts]
    path.write_text("\n".join([*lines, "a line without a tab"]) + "\n")
    return path


@pytest.fixture(scope="session")
def run_folder(pairs_file, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    arguments = ["train", "--data", str(pairs_file), "--out", str(run), "--steps=6", *TINY]
    assert cli.main([*arguments, "--valid-every=3", "--checkpoint-every=3"]) == 0
    return run


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error of a command."""
    capsys.readouterr()
    try:
        code = cli.main(list(arguments))
    except SystemExit as left:  # argparse exits
        code = left.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err
