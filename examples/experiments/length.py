"""BLEU by sentence length: an RNN, an RNN with attention, a Transformer."""

import math
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples import common, rnn_translation
from examples.experiments.experiment import Check, Experiment, Settings, Values, plain
from fastattn.seq2seq.catalogues import load_catalogue_pairs
from fastattn.seq2seq.data import END, Example, collate, training_batches
from fastattn.seq2seq.generation import bleu
from fastattn.seq2seq.runs import prepare_text

LENGTH_KINDS = {"plain": "RNN", "attention": "RNN with attention", "transformer": "Transformer"}
BINS = ((1, 4), (5, 8), (9, 13), (14, rnn_translation.LONGEST - 1))  # tokens of the source


def translations(model: nn.Module, sources: list[list[int]]) -> list[list[int]]:
    """Greedy translations, in batches of similar length."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    found: list[list[int]] = [[] for _ in sources]
    for start in range(0, len(order), 64):
        chosen = order[start : start + 64]
        batch = collate([Example([*sources[i], END], [END]) for i in chosen])
        for i, ids in zip(chosen, rnn_translation.translate(model, batch.source), strict=True):
            found[i] = ids
    return found


def measure(settings: Settings) -> Values:
    pairs = load_catalogue_pairs().pairs
    text = prepare_text(pairs, held_out=800, max_length=rnn_translation.LONGEST, vocabulary=2000)
    test = text.test[: settings.choose(len(text.test), 60)]
    sources = text.tokenizer.encode_all([pair.source for pair in test])
    bins = [[i for i, ids in enumerate(sources) if low <= len(ids) <= high] for low, high in BINS]
    values: Values = {"sentences": [len(chosen) for chosen in bins], "bleu": {}, "loss": {}}
    for kind in LENGTH_KINDS:
        torch.manual_seed(settings.seed)
        model = rnn_translation.MODELS[kind](text.tokenizer.vocabulary)
        batches = training_batches(text.train, token_budget=1500, seed=settings.seed)

        def loss(model: nn.Module = model, batches: Any = batches) -> Tensor:
            return rnn_translation.loss_of(model, next(batches)[0])

        steps = settings.choose(700, 2)
        common.train(model, loss, steps, title=f"length: {kind}", learning_rate=3e-3)
        values["loss"][kind] = rnn_translation.held_out_loss(model, text.valid)
        found = [text.tokenizer.decode(ids) for ids in translations(model, sources)]
        values["bleu"][kind] = [
            bleu([found[i] for i in chosen], [test[i].target for i in chosen]).score
            for chosen in bins
        ]
    return values


def check(values: Values) -> list[Check]:
    scores = values["bleu"]
    kept = {kind: bleus[-1] / (bleus[0] or math.nan) for kind, bleus in scores.items()}
    longest = {kind: bleus[-1] for kind, bleus in scores.items()}

    def in_words(figures: dict[str, float], form: str) -> str:
        return ", ".join(f"{LENGTH_KINDS[kind]} {form % figures[kind]}" for kind in LENGTH_KINDS)

    return [
        Check(
            f"from sentences of {BINS[0][0]} to {BINS[0][1]} tokens to those of {BINS[-1][0]} to "
            f"{BINS[-1][1]}, the RNN without attention keeps the smallest share of its BLEU",
            "Bahdanau et al. 2015, figure 2",
            in_words({kind: 100 * share for kind, share in kept.items()}, "%.0f %%"),
            all(kept["plain"] < kept[kind] for kind in ("attention", "transformer")),
        ),
        Check(
            "on the longest, either attention has more than twice its BLEU",
            "Bahdanau et al. 2015, figure 2",
            in_words(longest, "%.1f"),
            min(longest["attention"], longest["transformer"]) > 2.0 * longest["plain"],
        ),
    ]


def draw(values: Values) -> Figure:
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    names = [
        f"{low} to {high}\n({count} sentences)"
        for (low, high), count in zip(BINS, values["sentences"], strict=True)
    ]
    for i, (kind, scores) in enumerate(values["bleu"].items()):
        places = [place + 0.27 * (i - 1) for place in range(len(BINS))]
        bars = axes.bar(places, scores, 0.25, color=common.COLOURS[i],
                        label=LENGTH_KINDS[kind])  # fmt: skip
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(BINS)), names)
    axes.set(xlabel="tokens of the source", ylabel="BLEU")
    axes.legend(frameon=False)
    return plain(figure)


EXPERIMENT = Experiment("BLEU by sentence length", measure, check, draw)
