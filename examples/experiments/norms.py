"""Norms before or after the blocks, with a warm-up of the learning rate or without."""

import torch.nn.functional as F
from matplotlib.figure import Figure

from examples import common
from examples.experiments.experiment import Check, Experiment, Settings, Values, plain
from examples.experiments.translators import (
    draw_losses,
    last_loss,
    short_sentences,
    small_translator,
    training_curve,
)
from fastattn.seq2seq.data import PAD, collate

NORM_LAYERS = 4
NORM_PLACES = {"post-norm": False, "pre-norm": True}
NORM_RATES = (1e-3, 3e-3)


def gradients_by_layer(norm_first: bool, seed: int) -> list[float]:
    """The norm of the gradient of each decoder layer's last matrix, before training."""
    model = small_translator(
        seed, norm_first=norm_first, encoder_layers=NORM_LAYERS, decoder_layers=NORM_LAYERS
    )
    batch = collate(short_sentences().train[:64])
    logits = model(batch.source, batch.target_in, batch.source_padding)
    targets = batch.target_out.flatten()
    F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=PAD).backward()  # type: ignore[no-untyped-call]
    return [layer.linear2.weight.grad.norm().item() for layer in model.transformer.decoder.layers]


def measure(settings: Settings) -> Values:
    values: Values = {"gradients": {}, "curves": {}}
    steps = settings.choose(160, 2)
    for place, norm_first in NORM_PLACES.items():
        values["gradients"][place] = gradients_by_layer(norm_first, settings.seed)
        for rate in NORM_RATES:
            for name, warmup in (("warm-up", steps // 4), ("no warm-up", 0)):
                model = small_translator(
                    settings.seed, norm_first=norm_first,
                    encoder_layers=NORM_LAYERS, decoder_layers=NORM_LAYERS,
                )  # fmt: skip
                kind = f"{place}, {name}, {rate:g}"
                values["curves"][kind] = training_curve(
                    model, f"norms: {kind}", settings, steps, batch_tokens=1200,
                    learning_rate=rate, warmup_steps=warmup, packed=True,
                )  # fmt: skip
    return values


def check(values: Values) -> list[Check]:
    losses = {name: last_loss(curve) for name, curve in values["curves"].items()}
    grows = {place: norms[-1] / norms[0] for place, norms in values["gradients"].items()}
    low, high = NORM_RATES
    loss_without = {
        (place, rate): losses[f"{place}, no warm-up, {rate:g}"]
        - losses[f"{place}, warm-up, {rate:g}"]
        for place in NORM_PLACES
        for rate in NORM_RATES
    }
    post, pre = NORM_PLACES
    best = {
        place: min(loss for name, loss in losses.items() if name.startswith(place))
        for place in NORM_PLACES
    }
    xiong = "Xiong et al. 2020"
    return [
        Check(
            "before training, gradients grow towards the last layer with post-norm, more than with "
            "pre-norm",
            xiong,
            f"last over first layer: {grows[post]:.2f} against {grows[pre]:.2f}",
            grows[post] > max(1.0, grows[pre]),
        ),
        Check(
            "post-norm needs the warm-up: without it at least 0.2 nats per token worse, at "
            f"{low:g} and at {high:g}",
            xiong,
            f"{loss_without[post, low]:+.2f}, {loss_without[post, high]:+.2f}",
            all(loss_without[post, rate] >= 0.2 for rate in NORM_RATES),
        ),
        Check(
            f"pre-norm does not: without it at most 0.1 worse, at {low:g} and at {high:g}",
            xiong,
            f"{loss_without[pre, low]:+.2f}, {loss_without[pre, high]:+.2f}",
            all(loss_without[pre, rate] <= 0.1 for rate in NORM_RATES),
        ),
        Check(
            "in a short training pre-norm is ahead, each at its best",
            xiong,
            f"{best[pre]:.2f} against {best[post]:.2f}",
            best[pre] < best[post],
        ),
    ]


def draw(values: Values) -> Figure:
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(NORM_RATES))
    for (place, norms), colour in zip(values["gradients"].items(), common.COLOURS, strict=False):
        left.plot(range(1, len(norms) + 1), norms, "o-", color=colour, label=place)
    left.set(xlabel="decoder layer", title="norm of the gradient of its last matrix, untrained")
    left.set(xticks=range(1, NORM_LAYERS + 1), ylim=(0.0, None))
    left.legend(frameon=False)
    for axes, rate in zip(others, NORM_RATES, strict=True):
        ending = f", {rate:g}"
        curves = {
            name.removesuffix(ending): curve
            for name, curve in values["curves"].items()
            if name.endswith(ending)
        }
        draw_losses(axes, curves, f"loss on held-out sentences, learning rate {rate:g}")
    return plain(figure)


EXPERIMENT = Experiment("Norms before and after the blocks", measure, check, draw)
