"""Small translation models, trained for a few hundred updates on short sentences."""

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from examples import common
from examples.experiments.experiment import Settings
from fastattn.seq2seq.catalogues import load_catalogue_pairs
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer
from fastattn.seq2seq.runs import PreparedText, prepare_text
from fastattn.seq2seq.training import TrainingConfig, TrainingDiverged, train

CPU = torch.device("cpu")
LONGEST = 16  # tokens of a sentence, END included


@functools.cache
def short_sentences() -> PreparedText:
    pairs = load_catalogue_pairs().pairs
    return prepare_text(pairs, held_out=500, max_length=LONGEST, vocabulary=2000)


def small_translator(
    seed: int, kind: type[Seq2SeqTransformer] = Seq2SeqTransformer, **options: Any
) -> Seq2SeqTransformer:
    usual: dict[str, Any] = {
        "width": 128, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "ffn_width": 256,
        "dropout": 0.0, "max_length": LONGEST,
    }  # fmt: skip
    torch.manual_seed(seed)
    vocabulary = short_sentences().tokenizer.vocabulary
    return kind(ModelConfig(vocabulary, **{**usual, **options}))


def training_curve(
    model: Seq2SeqTransformer, title: str, settings: Settings, steps: int, **options: Any
) -> list[tuple[int, float]] | None:
    """(update, loss in nats per token on held-out sentences); None if the loss became infinite."""
    text = short_sentences()
    steps = settings.choose(steps, 2)
    usual: dict[str, Any] = {
        "batch_tokens": 1500, "learning_rate": 2e-3, "warmup_steps": steps // 10, "smoothing": 0.0,
        "valid_every": max(1, steps // 8), "seed": settings.seed,
    }  # fmt: skip
    config = TrainingConfig(steps=steps, **{**usual, **options})
    valid = text.valid[: settings.choose(len(text.valid), 20)]
    try:
        return train(model, text.train, valid, config, device=CPU, description=title).validations
    except TrainingDiverged as error:
        print(f"{title}: {error}", file=sys.stderr)
        return None


def last_loss(curve: Sequence[Sequence[float]] | None) -> float:
    return math.inf if curve is None else curve[-1][1]


def draw_losses(axes: Any, curves: dict[str, Any], title: str) -> None:
    for (name, curve), colour in zip(curves.items(), common.COLOURS, strict=False):
        label = f"{name}: {'diverged' if curve is None else format(last_loss(curve), '.2f')}"
        axes.plot(*zip(*(curve or [(0, math.nan)]), strict=True), "o-", color=colour, label=label,
                  markersize=3)  # fmt: skip
    axes.set(xlabel="update", ylabel="nats per token", title=title)
    axes.legend(frameon=False)
