"""Progress on standard error: a live bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

SECONDS_BETWEEN_LINES = 10.0


def counted(count: int, noun: str) -> str:
    """Return "1 sentence pair", "2,000 sentence pairs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class Progress:
    """Counts to `total` within a `with` block; `show=False` prints nothing."""

    def __init__(self, description: str, total: int, *, show: bool = True, unit: str = "") -> None:
        self._description = description
        self._total = total
        self._unit = unit
        self._show = show
        self._live = show and sys.stderr.isatty()
        self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        if self._live:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(file=sys.stderr),
                expand=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._description, total=self._total, note="")
        return self

    def update(self, completed: int, note: str = "") -> None:
        """Set the count reached and the text shown beside it."""
        if self._live:
            self._bar.update(self._task, completed=completed, note=note)
        elif self._show:
            now = time.monotonic()
            if now - self._last_line >= SECONDS_BETWEEN_LINES or completed == self._total:
                self._last_line = now
                unit = f" {self._unit}" if self._unit else ""
                counted = f"{self._description}: {completed}/{self._total}{unit}  {note}"
                print(counted.rstrip(), file=sys.stderr, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._bar.stop()


@contextmanager
def waiting(description: str, *, show: bool = True) -> Iterator[None]:
    """Print what the block does, for work without a step count; a terminal shows activity."""
    if show and sys.stderr.isatty():
        from rich.console import Console

        with Console(file=sys.stderr).status(description):
            yield
        return
    if show:
        print(description, file=sys.stderr, flush=True)
    yield
