"""Decoder layers that read two encoder layers, the last one and their own."""

import math

import torch
from matplotlib.figure import Figure

from examples import common
from examples.experiments.experiment import Check, Experiment, Settings, Values, plain
from examples.experiments.translators import (
    last_loss,
    short_sentences,
    small_translator,
    training_curve,
)
from fastattn.seq2seq.data import collate

VIEW_KINDS = {
    "last": "the last layer",
    "same": "its own layer",
    "same+last": "both",
}
VIEW_SEEDS = 2
VIEW_LAYERS = 3


@torch.no_grad()
def equal_views_difference(seed: int) -> float:
    """Reading the last layer twice in one attention is reading it once."""
    batch = collate(short_sentences().valid[:16])
    one, two = (
        small_translator(seed, memory_layers=layers).double().eval()
        for layers in ("last", "last+last")
    )
    inputs = batch.source, batch.target_in, batch.source_padding
    return (one(*inputs) - two(*inputs)).abs().max().item()


def measure(settings: Settings) -> Values:
    values: Values = {"difference": equal_views_difference(settings.seed), "curves": {}}
    for kind in VIEW_KINDS:
        values["curves"][kind] = []
        for seed in range(settings.seed, settings.seed + settings.choose(VIEW_SEEDS, 1)):
            model = small_translator(
                seed, memory_layers=kind, encoder_layers=VIEW_LAYERS, decoder_layers=VIEW_LAYERS
            )
            title = f"views: {VIEW_KINDS[kind]}, seed {seed}"
            curve = training_curve(model, title, settings, 240, seed=seed)
            values["curves"][kind].append(curve)
    return values


def check(values: Values) -> list[Check]:
    losses = {kind: [last_loss(c) for c in curves] for kind, curves in values["curves"].items()}
    mean = {kind: sum(each) / len(each) for kind, each in losses.items()}
    noise = max(max(each) - min(each) for each in losses.values())
    found = ", ".join(f"{VIEW_KINDS[kind]} {value:.3f}" for kind, value in mean.items())
    liu = "Liu et al. 2020"
    return [
        Check(
            "two equal views are one view, up to rounding (fp64, < 1e-12)",
            "the weights of equal keys add up",
            f"{values['difference']:.0e}",
            values["difference"] < 1e-12,
        ),
        Check(
            "both views are better than its own layer alone",
            liu,
            f"{found} (mean of {len(losses['last'])} seeds, which differ by up to {noise:.3f})",
            mean["same+last"] < mean["same"],
        ),
        Check(
            "both views are better than the last layer alone",
            liu,
            f"{mean['same+last']:.3f} against {mean['last']:.3f}",
            mean["same+last"] < mean["last"],
        ),
    ]


def draw(values: Values) -> Figure:
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    for (kind, curves), colour in zip(values["curves"].items(), common.COLOURS, strict=False):
        for number, curve in enumerate(curves):
            label = VIEW_KINDS[kind] if number == 0 else None
            axes.plot(*zip(*(curve or [(0, math.nan)]), strict=True), "o-", color=colour,
                      markersize=3, linewidth=1.2 - 0.5 * number, label=label)  # fmt: skip
    axes.set(xlabel="update", ylabel="nats per token")
    axes.set_title("loss on held-out sentences; each decoder layer reads", fontsize=10)
    axes.legend(frameon=False)
    return plain(figure)


EXPERIMENT = Experiment("Two views of the encoder", measure, check, draw)
