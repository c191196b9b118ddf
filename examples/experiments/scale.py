"""Scores without 1/sqrt(d): their variance, and the gradients that pass the softmax."""

import math

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fastattn
from examples import common
from examples.experiments.experiment import Check, Experiment, Settings, Values, plain
from fastattn.seq2seq.progress import Progress

DOUBLE = torch.float64
KEYS = 64
SCALE_FIGURES = ("variance", "gradient", "median")
HEAD_DIMS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)


def gap_density(count: int) -> float:
    """The density at 0 of the gap between the two largest of `count` standard normal numbers."""
    x = torch.linspace(-8.0, 8.0, 4001, dtype=DOUBLE)
    # Two of the numbers are at x, the others below.
    density = torch.exp(-x * x) / (2.0 * math.pi) * torch.special.ndtr(x) ** (count - 2)
    return count * (count - 1) * torch.trapezoid(density, x).item()


def score_gradients(q: Tensor, k: Tensor, scale: float) -> tuple[float, float]:
    """The squared norm of a query's gradient of the scores, for random gradients of the weights:
    its mean and its median. A mask of zeros is added to the scores, so that its gradient is the
    scores' gradient.
    """
    B, _, M, _ = q.shape
    mask = torch.zeros(B, 1, M, KEYS, requires_grad=True)
    weights = fastattn.attention(q, k, torch.eye(KEYS).expand(B, 1, -1, -1), mask=mask, scale=scale)
    (gradient,) = torch.autograd.grad(weights, mask, torch.randn_like(weights))
    norms = gradient.square().sum(dim=-1)
    return norms.mean().item(), norms.median().item()


def measure(settings: Settings) -> Values:
    torch.manual_seed(settings.seed)
    dims = HEAD_DIMS[: settings.choose(len(HEAD_DIMS), 3)]
    values: Values = {"d": list(dims), "tie": gap_density(KEYS)}
    values |= {f"{name}{kind}": [] for name in SCALE_FIGURES for kind in ("", " scaled")}
    with Progress("scale", len(dims)) as bar:
        for count, d in enumerate(dims, start=1):
            q, k = torch.randn(48, 1, 256, d), torch.randn(48, 1, KEYS, d)
            for kind, scale in (("", 1.0), (" scaled", d**-0.5)):
                variance = (q @ k.mT * scale).var().item()
                figures = (variance, *score_gradients(q, k, scale))
                for name, figure in zip(SCALE_FIGURES, figures, strict=True):
                    values[f"{name}{kind}"].append(figure)
            bar.update(count, f"d = {d}")
    return values


def tie_theory(values: Values) -> list[float]:
    """Only a query whose two largest scores nearly tie has a gradient. The gap g between them has
    the density tie / sqrt(d) at 0, and the squared gradient of a pair integrates to 1 / 3.
    """
    return [values["tie"] / (3.0 * math.sqrt(d)) for d in values["d"]]


def check(values: Values) -> list[Check]:
    dims = values["d"]
    of_variance = [v / d for v, d in zip(values["variance"], dims, strict=True)]
    scaled = values["variance scaled"]
    measured, theory = values["gradient"][-1], tie_theory(values)[-1]
    steady = [g for g, d in zip(values["gradient scaled"], dims, strict=True) if d >= 16]
    paper = "Vaswani et al. 2017, section 3.2.1"
    return [
        Check(
            "variance of q·k is d, of q·k / sqrt(d) is 1 (within 5 %)",
            paper,
            f"{min(of_variance):.3f} d to {max(of_variance):.3f} d, "
            f"{min(scaled):.3f} to {max(scaled):.3f}",
            all(0.95 < ratio < 1.05 for ratio in (*of_variance, *scaled)),
        ),
        Check(
            f"without the scale, the mean gradient falls as {values['tie']:.2f} / (3 sqrt(d)) for "
            f"large d (at d = {dims[-1]}: {theory:.4f}, within 15 %)",
            "derived here from nearly tied scores",
            f"{measured:.4f}",
            abs(measured / theory - 1.0) < 0.15,
        ),
        Check(
            "that is the gradient of few queries: for half of them the softmax is saturated, their "
            "gradient less than a thousandth of that with the scale",
            paper,
            f"median {values['median'][-1]:.0e} against {values['median scaled'][-1]:.4f}",
            values["median"][-1] < 1e-3 * values["median scaled"][-1],
        ),
        Check(
            "with the scale they do not depend on d (from 16 on, within 15 %)",
            paper,
            f"{min(steady):.4f} to {max(steady):.4f}",
            max(steady) / min(steady) < 1.15,
        ),
    ]


def draw(values: Values) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    dims, blue, orange = values["d"], *common.COLOURS[:2]
    left.loglog(dims, values["variance"], "o", color=orange, label="q·k")
    left.loglog(dims, dims, color=orange, linewidth=0.8, label="theory: d")
    left.loglog(dims, values["variance scaled"], "o", color=blue, label="q·k / √d")
    left.loglog(dims, [1.0] * len(dims), color=blue, linewidth=0.8, label="theory: 1")
    left.set(xlabel="d", title="variance of the scores")
    right.loglog(dims, values["gradient"], "o", color=orange, label="q·k, mean")
    theory = tie_theory(values)
    right.loglog(dims, theory, color=orange, linewidth=0.8, label="theory for large d")
    right.loglog(dims, values["median"], "x--", color=orange, label="q·k, median")
    right.loglog(dims, values["gradient scaled"], "o-", color=blue, label="q·k / √d, mean")
    right.loglog(dims, values["median scaled"], "x--", color=blue, label="q·k / √d, median")
    right.set_ylim(1e-8, 1.0)
    right.set(xlabel="d", title="squared norm of the gradient of a query's scores")
    for axes in (left, right):
        axes.legend(frameon=False)
    return plain(figure)


EXPERIMENT = Experiment("Scores without 1/√d", measure, check, draw)
