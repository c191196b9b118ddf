"""`fastattn translate` and `fastattn evaluate`: translate with trained runs and compare them."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastattn.cli.arguments import (
    DONE,
    UsageError,
    add_command,
    add_device,
    add_strategy,
    chosen_device,
    chosen_strategy,
    chosen_text,
    existing_file,
    image_file,
    input_errors,
    load_pairs,
    log,
    positive_int,
)


def add_translate(commands: Any) -> None:
    parser = add_command(
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
        "--max-length", type=positive_int, default=argparse.SUPPRESS,
        help="largest number of tokens of a translation (default: twice the source's plus ten)",
    )  # fmt: skip
    parser.add_argument(
        "--attention", type=image_file, metavar="PNG", default=argparse.SUPPRESS,
        help="draw the attention of the first sentence: every layer and head",
    )  # fmt: skip
    parser.add_argument(
        "--attention-of", choices=("cross", "encoder", "decoder"), default=argparse.SUPPRESS,
        help="--attention: from the translation to the source, or the self-attention of a stack "
        "(default: cross)",
    )  # fmt: skip
    parser.add_argument(
        "--prefix", default=argparse.SUPPRESS, metavar="WORDS",
        help="words that begin every translation",
    )  # fmt: skip
    parser.add_argument(
        "--scores", action="store_true", help="print each translation's score and a tab before it"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON array of both texts and the scores"
    )
    add_strategy(parser)
    add_device(parser)


def _run_translate(options: argparse.Namespace) -> int:
    device = chosen_device(options)
    from fastattn.seq2seq.non_autoregressive import NonAutoregressiveTransformer
    from fastattn.seq2seq.progress import Progress
    from fastattn.seq2seq.runs import load_translator

    if hasattr(options, "attention_of") and not hasattr(options, "attention"):
        raise UsageError(f"--attention-of needs --attention, got {options.attention_of} without it")
    strategy = chosen_strategy(options)
    translator = load_translator(options.run_folder, device=device)
    if isinstance(translator.model, NonAutoregressiveTransformer):
        for flag in ("beams", "sample", "prefix"):
            if flag in vars(options):
                raise UsageError(
                    f"--{flag} cannot be given for a run whose decoder writes all tokens at once, "
                    f"got {getattr(options, flag)} for {options.run_folder}"
                )
    texts = options.text or _lines_of_input()
    with Progress("translating", len(texts), show=len(texts) > 64, unit="lines") as progress:
        with input_errors():
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

        kind = getattr(options, "attention_of", "cross")
        draw_attention(options.attention, translator, texts[0], translations[0], kind)
    if options.json:
        rows = [
            {"source": source, "translation": translation, "score": score}
            for source, translation, score in zip(texts, translations, scores, strict=True)
        ]
        unicode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
        print(json.dumps(rows, ensure_ascii=not unicode, indent=2))
    for score, translation in zip(scores, translations, strict=True):
        if not options.json:
            print(f"{score:.4f}\t{translation}" if options.scores else translation)
    return DONE


def _lines_of_input() -> list[str]:
    if sys.stdin is None:
        raise UsageError("TEXT must be given if there is no standard input, got neither")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A lone CR ends no line, and `search` names the text whose bytes cannot be decoded. After
        # the caller has read from the stream, lines go on as they began.
        with contextlib.suppress(io.UnsupportedOperation):
            sys.stdin.reconfigure(errors="surrogateescape", newline="\n")
    if sys.stdin.isatty():
        log("reading lines from the terminal; end with Ctrl-D")
    # Joined files have byte order marks at the start of other lines than the first.
    with input_errors():
        return [line.removeprefix("\ufeff").rstrip("\r\n") for line in sys.stdin]


def add_evaluate(commands: Any) -> None:
    parser = add_command(
        commands,
        "evaluate",
        "compare runs on their test part: BLEU and speed",
        _run_evaluate,
        description=(
            "Translate the test part with each RUN and print BLEU and sentences per second as a "
            "table, all with the same search; a decoder that writes all tokens at once has none. "
            "All runs must be trained on the same text."
        ),
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--data", type=existing_file, default=argparse.SUPPRESS,
        help="the text that the runs were trained on (default: the text of the first run)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    add_strategy(parser)
    add_device(parser)


def _run_evaluate(options: argparse.Namespace) -> int:
    device = chosen_device(options)
    from fastattn.seq2seq.evaluation import evaluate_run
    from fastattn.seq2seq.runs import open_run

    strategy = chosen_strategy(options)
    with input_errors():
        pairs = load_pairs(chosen_text(options, open_run(options.runs[0]).text))
        rows = []
        for run in options.runs:
            rows.append(evaluate_run(run, pairs, strategy=strategy, device=device))
            if rows[-1].test_part != rows[0].test_part:
                raise UsageError(
                    f"RUN must have the test part of {options.runs[0]}, which depends on --seed, "
                    f"--held-out, --max-length and the tokens, got {run} with another one"
                )
    if options.json:
        figures = [asdict(r) | {"sentences_per_second": r.sentences_per_second} for r in rows]
        print(json.dumps(figures, indent=2))
        return DONE
    table: list[tuple[str, ...]] = [
        ("run", "decoder", "search", "sentences", "BLEU", "source", "sentences/s")
    ]
    for row in rows:
        numbers = row.bleu, row.bleu_of_source, row.sentences_per_second
        count = str(row.sentences)
        table.append((row.run, row.decoder, row.search, count, *(f"{n:.1f}" for n in numbers)))
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
    return DONE
