"""Attention without positions treats its input as a bag of words."""

import math

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples import common
from examples.experiments.experiment import Check, Experiment, Settings, Values, plain
from fastattn import nn as fnn

DOUBLE = torch.float64
LENGTH, LETTERS, WIDTH = 12, 10, 32
ORDER_KINDS = ("no positions", "sinusoidal positions", "no positions, causal mask")


class OrderClassifier(nn.Module):
    """Two encoder layers; the class is read from the mean of their outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH)
        self.positions = (
            fnn.SinusoidalPositionalEncoding(WIDTH, max_length=LENGTH)
            if kind == "sinusoidal positions"
            else nn.Identity()
        )
        layer = fnn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = fnn.TransformerEncoder(layer, 2)
        self.classes = nn.Linear(WIDTH, 2)
        self.mask = None
        if "causal" in kind:
            self.mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def states(self, tokens: Tensor) -> Tensor:
        return self.encoder(self.positions(self.embedding(tokens)), mask=self.mask)  # [B, S, WIDTH]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classes(self.states(tokens).mean(dim=1))


def order_sequences(count: int) -> tuple[Tensor, Tensor]:
    """Random letters with one 0 and one 1 among them; the class is whether 0 comes first. Each
    sequence comes a second time, with 0 and 1 exchanged: the same bag, the other class.
    """
    tokens = torch.randint(2, LETTERS, (count, LENGTH))
    first, second = torch.rand(count, LENGTH).topk(2, dim=1).indices.sort(dim=1).values.unbind(1)
    rows = torch.arange(count)
    tokens[rows, first], tokens[rows, second] = 0, 1
    swapped = torch.where(tokens < 2, 1 - tokens, tokens)
    return torch.cat([tokens, swapped]), torch.tensor([1, 0]).repeat_interleave(count)


@torch.no_grad()
def permutation_error(kind: str) -> dict[str, float]:
    """How far the states of a permuted input are from the permuted states, in fp64; and the mean
    of the states from what it was.
    """
    model = OrderClassifier(kind).to(DOUBLE).eval()
    tokens, order = torch.randint(LETTERS, (8, LENGTH)), torch.randperm(LENGTH)
    before, after = model.states(tokens), model.states(tokens[:, order])
    return {
        "states": (after - before[:, order]).abs().max().item(),
        "mean": (after.mean(1) - before.mean(1)).abs().max().item(),
    }


def measure(settings: Settings) -> Values:
    values: Values = {"errors": {}, "losses": {}, "accuracy": {}}
    for kind in ORDER_KINDS:
        torch.manual_seed(settings.seed)
        values["errors"][kind] = permutation_error(kind)
        model = OrderClassifier(kind)

        def loss(model: nn.Module = model) -> Tensor:
            tokens, labels = order_sequences(32)
            return F.cross_entropy(model(tokens), labels)

        steps = settings.choose(300, 5)
        values["losses"][kind] = common.train(model, loss, steps, title=f"order: {kind}")
        tokens, labels = order_sequences(1000)
        with torch.no_grad():
            right = model(tokens).argmax(-1) == labels
        values["accuracy"][kind] = right.float().mean().item()
    return values


def check(values: Values) -> list[Check]:
    none, sinusoidal, causal = ORDER_KINDS
    errors, accuracy = values["errors"], values["accuracy"]
    source = "Vaswani et al. 2017, section 3.5"
    return [
        Check(
            "without positions: permuting the input permutes the outputs and leaves their mean "
            "unchanged, up to rounding (< 1e-12)",
            source,
            f"{errors[none]['states']:.0e}, {errors[none]['mean']:.0e}",
            max(errors[none].values()) < 1e-12,
        ),
        Check(
            "with positions it does not (> 0.01)",
            source,
            f"{errors[sinusoidal]['states']:.2f}, {errors[sinusoidal]['mean']:.2f}",
            min(errors[sinusoidal].values()) > 0.01,
        ),
        Check(
            "which of two letters comes first: without positions guessing (50 %), with them at "
            "least 95 % right",
            source,
            f"{accuracy[none]:.1%}, {accuracy[sinusoidal]:.1%}",
            abs(accuracy[none] - 0.5) < 0.01 and accuracy[sinusoidal] >= 0.95,
        ),
        Check(
            "a causal mask tells positions apart without encoding them: at least 95 % right",
            "Haviv et al. 2022",
            f"{accuracy[causal]:.1%}",
            accuracy[causal] >= 0.95,
        ),
    ]


def draw(values: Values) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for (kind, losses), colour in zip(values["losses"].items(), common.COLOURS, strict=False):
        smooth = torch.tensor(losses).unfold(0, min(10, len(losses)), 1).mean(-1)
        left.plot(smooth.tolist(), color=colour, label=kind)
    left.axhline(math.log(2), color="0.6", linestyle=":", label="guessing")
    left.set(xlabel="update", ylabel="nats", title="loss: does 0 come before 1?")
    left.legend(frameon=False)
    kinds = list(values["accuracy"])
    shares = [100 * share for share in values["accuracy"].values()]
    bars = right.barh(kinds, shares, color=common.COLOURS[: len(kinds)])
    right.bar_label(bars, fmt="%.1f %%", padding=3)
    right.axvline(50, color="0.6", linestyle=":")
    right.set(xlim=(0, 118), xlabel="% right", title="afterwards")
    right.invert_yaxis()
    return plain(figure)


EXPERIMENT = Experiment("Attention without positions is a bag of words", measure, check, draw)
