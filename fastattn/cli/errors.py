"""Errors that commands print as one line, with their exit codes."""

from __future__ import annotations

import io
import os
import sys

from fastattn.cli.arguments import (
    FAILED,
    INTERRUPTED,
    NO_TEXT,
    PIPE_CLOSED,
    WRONG_INPUT,
    UsageError,
)

DEMO_PACKAGES = ("matplotlib", "rich", "sacrebleu", "safetensors", "tokenizers")


def report(error: BaseException, command: str) -> int | None:
    """Print an error of a command and return the exit code; None: it needs a traceback."""
    if isinstance(error, KeyboardInterrupt):
        print("\nfastattn: interrupted", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, ModuleNotFoundError):
        if error.name not in DEMO_PACKAGES:
            return None
        return _fail(
            f"{command} needs the package {error.name}, which is not installed: "
            "from a clone, pip install --no-build-isolation '.[demo]'"
        )
    if isinstance(error, BrokenPipeError):  # the reader closed the pipe
        if isinstance(sys.stdout, io.TextIOWrapper):  # or Python's last flush would fail too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    if isinstance(error, UsageError | OSError):
        return _fail(str(error))
    if isinstance(error, OverflowError | MemoryError):
        return _fail(f"a number among the options is too large: {str(error) or 'out of memory'}")
    # Raised by modules that are imported lazily, so matched by name.
    code = {
        "TextUnavailable": NO_TEXT, "TrainingDiverged": FAILED, "DamagedFile": WRONG_INPUT,
    }.get(type(error).__name__)  # fmt: skip
    return None if code is None else _fail(str(error), code)


def _fail(message: str, code: int = WRONG_INPUT) -> int:
    print(f"fastattn: error: {message}", file=sys.stderr)
    return code
