"""Plots of a run: curves of loss and BLEU, and cross-attention as heat maps and as lines between
the sentences.

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


@dataclass(frozen=True)
class Curve:
    losses: Sequence[float]  # of update 1, 2, ...
    validations: Sequence[tuple[int, float]]  # (update, loss)
    bleus: Sequence[tuple[int, float]] = ()  # (update, BLEU of validation sentences)


def save_curves(
    path: Path, curves: Mapping[str, Curve], *, difference_limit: float | None = None
) -> None:
    """Draw the loss curves in one panel, the relative difference of two curves in a second one, and
    BLEU, where it was measured, in a last one.
    """
    from matplotlib.figure import Figure

    compared, scored = len(curves) == 2, any(curve.bleus for curve in curves.values())
    panels = 1 + compared + scored
    figure = Figure(figsize=(5.5 * panels, 4.0), layout="constrained")
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
    axes[0].set(xlabel="update", ylabel="loss (nats per token)")
    axes[0].legend(frameon=False)
    if scored:
        for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
            if curve.bleus:
                axes[-1].plot(*zip(*curve.bleus, strict=True), color=colour, marker="o", label=name)
        axes[-1].set(xlabel="update", ylabel="BLEU (validation)", ylim=(0.0, None))
        axes[-1].legend(frameon=False)
    if compared:
        (_, first), (_, second) = curves.items()
        differences = relative_differences(first.losses, second.losses)
        # A logarithmic axis cannot show a difference of 0.
        shown = [(step, d) for step, d in enumerate(differences, start=1) if d > 0]
        if shown:
            axes[1].semilogy(*zip(*shown, strict=True), ".", color=COLOURS[0], markersize=3)
        if difference_limit is not None:
            axes[1].axhline(difference_limit, color=COLOURS[1], linewidth=1)
        axes[1].set(xlabel="update", ylabel="relative difference of the training losses")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def save_heat_map(
    path: Path,
    weights: Sequence[Tensor],
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
) -> None:
    """Draw cross-attention, one panel per layer; each layer's weights are [H, M, N], averaged here.

    Row i is the attention with which the decoder produced target token i.
    """
    from matplotlib.figure import Figure

    width = min(1.6 + 0.34 * len(source_tokens), _MAX_INCHES / len(weights))
    height = min(1.8 + 0.28 * len(target_tokens), _MAX_INCHES)
    figure = Figure(figsize=(width * len(weights), height), layout="constrained")
    text = {"fontsize": 8, "parse_math": False}  # a token may hold a dollar sign
    for index, (axis, layer) in enumerate(
        zip(figure.subplots(1, len(weights), squeeze=False)[0], weights, strict=True), start=1
    ):
        axis.imshow(layer.mean(dim=0).cpu().numpy(), cmap="Blues", vmin=0.0, vmax=1.0)
        axis.set_title(f"decoder layer {index}", fontsize=9)
        axis.set_xticks(range(len(source_tokens)), source_tokens, rotation=90, **text)
        axis.set_yticks(range(len(target_tokens)), target_tokens, **text)
        axis.tick_params(length=0)
    figure.savefig(path, dpi=120)


def save_alignment(
    path: Path, weights: Tensor, source_tokens: Sequence[str], target_tokens: Sequence[str]
) -> None:
    """Draw both sentences with lines between them, darker for larger weights.

    weights: [M, N], for example averaged over heads and layers.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    longest = max(len(source_tokens), len(target_tokens))
    figure = Figure(figsize=(min(1.0 + 0.75 * longest, _MAX_INCHES), 2.6), layout="constrained")
    axis = figure.subplots()
    rows = ((1.0, source_tokens, "bottom"), (0.0, target_tokens, "top"))
    positions = []
    for height, tokens, side in rows:
        # Both sentences span the whole width.
        xs = [(i + 0.5) / len(tokens) for i in range(len(tokens))]
        positions.append(xs)
        for x, token in zip(xs, tokens, strict=True):
            axis.text(x, height, token, ha="center", va=side, fontsize=9, parse_math=False)
    # Lines of less than a hundredth would be invisible.
    seen = [(*pair, weights[tuple(pair)].item()) for pair in (weights > 0.01).nonzero().tolist()]
    if seen:  # LineCollection accepts no empty list of alphas
        lines = LineCollection(
            [((positions[1][t], 0.02), (positions[0][s], 0.98)) for t, s, _ in seen],
            colors=COLOURS[0], linewidths=[2.0 * weight for *_, weight in seen],
            alpha=[min(1.0, weight) for *_, weight in seen], capstyle="round",
        )  # fmt: skip
        axis.add_collection(lines)
    axis.set(xlim=(0.0, 1.0), ylim=(-0.2, 1.2))
    axis.set_axis_off()
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
