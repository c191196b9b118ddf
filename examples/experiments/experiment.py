"""The interface of an experiment: three functions, and the checks that one of them returns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

# Measurements of an experiment, as they are written to JSON.
Values = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """quick: tiny sizes, to see that everything runs; a training of a few updates shows nothing."""

    seed: int = 0
    quick: bool = False

    def choose(self, usual: int, quick: int) -> int:
        return quick if self.quick else usual


@dataclass(frozen=True)
class Check:
    """An expectation, where it is from, what was measured, and whether that agrees."""

    expected: str
    source: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Experiment:
    title: str
    measure: Callable[[Settings], Values]
    check: Callable[[Values], list[Check]]
    draw: Callable[[Values], Figure]


def plain(figure: Figure) -> Figure:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    return figure
