"""Decoder layers that read two encoder layers, the last one and their own."""

import math
from dataclasses import replace

import torch
from matplotlib.figure import Figure
from torch import Tensor

from examples import common
from examples.experiments.experiment import Check, Experiment, Settings, Values, plain
from examples.experiments.translators import (
    last_loss,
    short_sentences,
    small_translator,
    training_curve,
)
from fastattn.seq2seq.data import collate
from fastattn.seq2seq.model import Memory, Seq2SeqTransformer

VIEW_KINDS = {
    "last": "the last layer",
    "same": "its own layer",
    "same+last": "both",
}
VIEW_SEEDS = 2
VIEW_LAYERS = 3


class TwoViews(Seq2SeqTransformer):
    """Each decoder layer reads the last encoder layer as well, in one attention."""

    def encode(self, source: Tensor, source_padding: Tensor) -> Memory:
        memory = super().encode(source, source_padding)
        # [B, 2 S, width], the two rows of a token in succession.
        layers = [torch.stack((x, memory.output), dim=2).flatten(1, 2) for x in memory.layers]
        return replace(memory, layers=layers, padding=memory.padding.repeat_interleave(2, dim=1))

    def forward(self, source: Tensor, target_in: Tensor, source_padding: Tensor) -> Tensor:
        memory = self.encode(source, source_padding)
        return self.logits(self.decode(target_in, memory))


@torch.no_grad()
def equal_views_difference(seed: int) -> float:
    """Reading the last layer twice in one attention is reading it once."""
    batch = collate(short_sentences().valid[:16])
    one, two = (
        small_translator(seed, kind).double().eval() for kind in (Seq2SeqTransformer, TwoViews)
    )
    inputs = batch.source, batch.target_in, batch.source_padding
    return (one(*inputs) - two(*inputs)).abs().max().item()


def measure(settings: Settings) -> Values:
    values: Values = {"difference": equal_views_difference(settings.seed), "curves": {}}
    for kind in VIEW_KINDS:
        layers, _, second = kind.partition("+")
        values["curves"][kind] = []
        for seed in range(settings.seed, settings.seed + settings.choose(VIEW_SEEDS, 1)):
            model = small_translator(
                seed, TwoViews if second else Seq2SeqTransformer, memory_layers=layers,
                encoder_layers=VIEW_LAYERS, decoder_layers=VIEW_LAYERS,
            )  # fmt: skip
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
