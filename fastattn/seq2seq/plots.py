"""Plots of a run: curves of loss, learning rate and BLEU, attention as heat maps.

Figures are made without pyplot, so they need no display and change no global backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

SMOOTHING_UPDATES = 20
_MAX_INCHES = 120.0
COLOURS = ("#0b6e99", "#d9730d")
LIMIT_COLOURS = ("#c8322b", "#7a3e9d")


@dataclass(frozen=True)
class Curve:
    losses: Sequence[float]  # of update 1, 2, ...
    validations: Sequence[tuple[int, float]]  # (update, loss)
    bleus: Sequence[tuple[int, float]] = ()  # (update, BLEU of validation sentences)
    learning_rates: Sequence[float] = ()  # of update 1, 2, ...


@dataclass(frozen=True)
class Limit:
    """The largest difference that is allowed for updates `first` to `last`."""

    first: int
    last: int
    value: float
    label: str


def save_curves(path: Path, curves: Mapping[str, Curve], *, limits: Sequence[Limit] = ()) -> None:
    """Draw the loss curves in one panel, the relative difference of two curves with its limits in a
    second one, then the learning rate, and BLEU where it was measured.
    """
    from matplotlib.figure import Figure

    compared, scored = len(curves) == 2, any(curve.bleus for curve in curves.values())
    rates = next((c.learning_rates for c in curves.values() if c.learning_rates), ())
    panels = 1 + compared + bool(rates) + scored
    figure = Figure(figsize=(5.2 * panels, 4.0), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for (name, curve), colour, width in zip(curves.items(), COLOURS, (4.0, 1.5), strict=False):
        steps = range(1, len(curve.losses) + 1)
        # The first line is wide and transparent, the second thin, so that equal curves both show.
        axes[0].plot(
            steps, moving_average(curve.losses, SMOOTHING_UPDATES), color=colour, linewidth=width,
            alpha=0.5 if width > 2 else 1.0, label=f"{name}, training",
        )  # fmt: skip
        if curve.validations:
            axes[0].plot(
                *zip(*curve.validations, strict=True), color=colour, marker="o", linestyle=":",
                markersize=2 * width, alpha=0.5 if width > 2 else 1.0, label=f"{name}, validation",
            )  # fmt: skip
    axes[0].set(title="loss", xlabel="update", ylabel="nats per token")
    axes[0].legend(frameon=False)
    if scored:
        for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
            if curve.bleus:
                axes[-1].plot(*zip(*curve.bleus, strict=True), color=colour, marker="o", label=name)
        axes[-1].set(
            title="BLEU of validation sentences", xlabel="update", ylabel="BLEU", ylim=(0.0, None)
        )
        axes[-1].legend(frameon=False)
    if compared:
        (_, first), (_, second) = curves.items()
        differences = relative_differences(first.losses, second.losses)
        # A logarithmic axis cannot show a difference of 0.
        shown = [(step, d) for step, d in enumerate(differences, start=1) if d > 0]
        if shown:
            axes[1].semilogy(
                *zip(*shown, strict=True), ".", color=COLOURS[0], markersize=3, label="one update"
            )
        for limit, colour in zip(limits, LIMIT_COLOURS, strict=False):
            # Half an update further on both sides, so that one update is a line too.
            axes[1].hlines(
                limit.value, limit.first - 0.5, limit.last + 0.5, color=colour, linewidth=3,
                label=f"{limit.label}: {limit.value:g}",
            )  # fmt: skip
        axes[1].margins(y=0.12)
        axes[1].set(
            title="difference of the training losses", xlabel="update", ylabel="relative difference"
        )
        if shown or limits:
            axes[1].legend(frameon=False, loc="lower right", fontsize=8)
    if rates:
        axes[1 + compared].plot(range(1, len(rates) + 1), rates, color=COLOURS[0])
        axes[1 + compared].set(title="learning rate", xlabel="update", ylim=(0.0, None))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def save_heat_maps(
    path: Path,
    weights: Sequence[Tensor],
    query_tokens: Sequence[str],
    key_tokens: Sequence[str],
    title: str,
) -> None:
    """Draw attention weights: a row of panels for each layer, with a panel for each head.

    weights: [H, M, N] of each layer. A row of a panel belongs to a query, a column to a key.
    """
    from matplotlib.figure import Figure

    layers, heads = len(weights), len(weights[0])
    # The outer panels have the tokens beside them. Sizes are limited by the largest picture.
    width = min(0.25 + 0.17 * len(key_tokens), _MAX_INCHES / (heads + 1))
    height = min(0.35 + 0.17 * len(query_tokens), _MAX_INCHES / (layers + 1))
    size = (max(4.0, 2.0 + width * heads), 2.2 + height * layers)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    text = {"fontsize": 7, "parse_math": False}  # a token may hold a dollar sign
    for layer, row in enumerate(axes):
        row[0].set_ylabel(f"layer {layer + 1}", fontsize=9)
        row[0].set_yticks(range(len(query_tokens)), query_tokens, **text)
        for head, axis in enumerate(row):
            image = axis.imshow(
                weights[layer][head].cpu().numpy(), cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto"
            )
            axis.tick_params(length=0)
            if layer == 0:
                axis.set_title(f"head {head + 1}", fontsize=9)
            if layer == layers - 1:
                axis.set_xticks(range(len(key_tokens)), key_tokens, rotation=90, **text)
    figure.colorbar(image, ax=axes, label="weight", shrink=0.6, fraction=0.04)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def moving_average(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of each value and up to `width - 1` values before it."""
    return [
        sum(values[max(0, end - width) : end]) / (end - max(0, end - width))
        for end in range(1, len(values) + 1)
    ]


def relative_differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return |a - b| / |b| for each pair of values, as far as both sequences go."""
    return [abs(a - b) / abs(b) for a, b in zip(first, second, strict=False)]
