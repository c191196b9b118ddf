"""SIGINT (Ctrl-C) and SIGTERM: training saves a checkpoint, and the command that resumes it is
printed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import threading
from pathlib import Path
from types import FrameType

from fastattn.cli.arguments import log

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nfastattn: stopping after this update; a second signal ends without saving\n"


class StopRequest:
    """Within its `with` block the first signal is only recorded; the next has its usual effect.

    Training calls it after each update, to know whether a signal has arrived.
    """

    def __init__(self) -> None:
        self._number: int | None = None

    def __call__(self) -> bool:
        return self._number is not None

    @property
    def exit_code(self) -> int:
        return 128 + (self._number or signal.SIGINT)

    def __enter__(self) -> StopRequest:
        self._usual = {}
        if threading.current_thread() is threading.main_thread():  # no other can set handlers
            for number in SIGNALS:
                # Ignored as in a background job of a script, or not set by Python.
                if (usual := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    self._usual[number] = usual
                    signal.signal(number, self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, usual in self._usual.items():
            signal.signal(number, usual)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self.__exit__()
        os.write(2, NOTICE)  # print cannot be called while it runs


def tell_how_to_resume(run: Path, options: argparse.Namespace) -> None:
    """Print the command that continues a run of `fastattn train` or `fastattn demo`."""
    given = vars(options)
    words = ["fastattn", "train", "--resume", "--out", str(run)]
    for name in ("device", "threads", "bleu_sentences"):
        if given.get(name):
            words += [f"--{name.replace('_', '-')}", str(given[name])]
    log(f"continue with: {shlex.join(words)}")
