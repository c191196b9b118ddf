"""Run folders: preparing the text of a run, starting and opening a run, loading its translator."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .checkpoint import (
    checkpoint_folder,
    checkpoint_steps,
    load_parameters,
    read_best,
    read_state,
    reading,
    write_atomically,
)
from .data import (
    Example,
    Pair,
    Splits,
    SubwordTokenizer,
    encode_pairs,
    sentence_key,
    split_pairs,
)
from .generation import Translator, bleu
from .model import ModelConfig, Seq2SeqTransformer
from .non_autoregressive import make_model
from .progress import counted, waiting
from .training import TrainingConfig, out_of_patience

FILES = ("model.json", "training.json", "tokenizer.json", "data.json")


@dataclass(frozen=True)
class PreparedText:
    """Sentence pairs split and encoded, without those too long for the model.

    A test pair is kept if its source fits; `left_out` counts the training pairs that do not fit.
    """

    splits: Splits
    tokenizer: SubwordTokenizer
    train: list[Example]
    valid: list[Example]
    test: list[Pair]
    left_out: int

    @property
    def digest(self) -> str:
        """A digest of the text, to detect that a run is continued or evaluated with another."""
        digest = hashlib.sha256()
        for part in (self.train, self.valid, self.test):
            for example in part:
                digest.update(json.dumps(example).encode())
            digest.update(b"\n")
        return digest.hexdigest()


def prepare_text(
    pairs: Sequence[Pair],
    *,
    held_out: int,
    seed: int = 0,
    max_length: int,
    vocabulary: int | SubwordTokenizer,
    show: bool = True,
) -> PreparedText:
    """Split pairs, learn subwords from the training part and encode.

    `vocabulary` is the number of subwords to learn, or the tokenizer of a run to continue.
    """
    with waiting(f"preparing {counted(len(pairs), 'sentence pair')}", show=show):
        splits = split_pairs(pairs, held_out=held_out, seed=seed)
        tokenizer = vocabulary
        if isinstance(tokenizer, int):
            tokenizer = SubwordTokenizer.train(
                (text for pair in splits.train for text in pair), vocabulary=tokenizer
            )
        train = encode_pairs(splits.train, tokenizer, max_length=max_length)
        valid = encode_pairs(splits.valid, tokenizer, max_length=max_length)
        sources = tokenizer.encode_sentences([pair.source for pair in splits.test])
        fits = [len(source) <= max_length for source in sources]
        test = list(itertools.compress(splits.test, fits))
    for part, kept in (("training", train), ("validation", valid), ("test", test)):
        if not kept:
            raise ValueError(
                f"max_length must keep some {part} pairs, got {max_length}, and all are longer"
            )
    return PreparedText(splits, tokenizer, train, valid, test, len(splits.train) - len(train))


def validation_bleu(prepared: PreparedText, count: int) -> Callable[[Seq2SeqTransformer], float]:
    """Return a function that scores a model by BLEU of greedy translations of `count` sentences."""
    tokenizer = prepared.tokenizer
    examples = prepared.valid[:count]
    sources, references = (
        [tokenizer.decode(example[side]) for example in examples] for side in (0, 1)
    )

    def score(model: Seq2SeqTransformer) -> float:
        return bleu(Translator(model, tokenizer).translate(sources), references).score

    return score


def default_held_out(pairs: Sequence[Pair]) -> int:
    """Return the number of sentences for validation and for test: 5 %, at most 500, and at most a
    third of the different sources.
    """
    sources = len({sentence_key(pair.source) for pair in pairs})
    return max(1, min(500, len(pairs) // 20, sources // 3))


@dataclass(frozen=True)
class RunFiles:
    """Files that are fixed before the first update: sizes, options, subwords, text.

    text: the file of pairs; None means the default text.
    """

    model: ModelConfig
    training: TrainingConfig
    tokenizer: SubwordTokenizer
    data_digest: str
    held_out: int
    text: Path | None = None


def require_no_run(run: Path) -> None:
    """Raise if a folder already holds a run."""
    if (run / "model.json").exists():
        raise FileExistsError(f"the run folder must be new or empty, got {run}, which holds a run")


def start_run(run: Path, files: RunFiles) -> None:
    """Create a run folder; raises if it already holds a run."""
    require_no_run(run)
    run.mkdir(parents=True, exist_ok=True)
    text = None if files.text is None else str(files.text.resolve())
    data = {"digest": files.data_digest, "held_out": files.held_out, "text": text}
    write_atomically(run / "tokenizer.json", files.tokenizer.to_json())
    write_atomically(run / "training.json", files.training.to_json())
    write_atomically(run / "data.json", json.dumps(data))
    # Last: the folder holds a run once this file exists.
    write_atomically(run / "model.json", files.model.to_json())


def open_run(run: Path) -> RunFiles:
    """Read what `start_run` wrote; DamagedFile names a file with other content."""
    for name in FILES:
        if not (run / name).is_file():
            raise FileNotFoundError(
                f"the run folder must be one that `fastattn train` made, got {run}, which has no "
                f"{name}"
            )
    with reading(run / "model.json") as path:
        model = ModelConfig.from_json(path.read_text())
    with reading(run / "training.json") as path:
        training = TrainingConfig.from_json(path.read_text())
    with reading(run / "tokenizer.json") as path:
        tokenizer = SubwordTokenizer.load(path)
        if (found := tokenizer.vocabulary) > model.vocabulary:
            raise ValueError(f"the model has {model.vocabulary} tokens, the tokenizer {found}")
    with reading(run / "data.json") as path:
        data = json.loads(path.read_text())
        text = data.get("text")
        return RunFiles(
            model, training, tokenizer, data["digest"], data["held_out"], text and Path(text)
        )


def extend_run(run: Path, files: RunFiles, steps: int) -> RunFiles:
    """Raise the number of updates of a run, finished or not, and return its new files.

    Updates already done keep the schedule that they were planned with.
    """
    training = files.training
    if steps < training.steps:
        raise ValueError(f"steps must be at least the run's {training.steps:,}, got {steps:,}")
    if steps == training.steps:
        return files
    done = 0
    if saved := checkpoint_steps(run):
        state = read_state(checkpoint_folder(run, saved[-1]))
        done = state.step
        if out_of_patience(state, training):
            raise ValueError(
                f"steps cannot be raised for a run that stopped at update {done:,} after "
                f"{training.patience} validations without a lower loss, got {steps:,}"
            )
    training = training.extended(done, steps)
    write_atomically(run / "training.json", training.to_json())
    return replace(files, training=training)


def load_translator(run: Path, *, device: torch.device | str = "cpu") -> Translator:
    """Load the best checkpoint of a run, or its newest one if none was validated."""
    files = open_run(run)
    best, steps = read_best(run), checkpoint_steps(run)
    if not steps:
        raise FileNotFoundError(
            f"the run folder must hold a checkpoint, got {run}, where training has not saved one"
        )
    model = make_model(files.model)
    load_parameters(checkpoint_folder(run, best.step if best else steps[-1]), model)
    return Translator(model.to(device).eval(), files.tokenizer)
