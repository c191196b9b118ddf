"""How idle CPU threads wait in the command `fastattn`. Imported before torch, which reads it once.

OpenMP's idle threads spin for milliseconds, waiting for the next parallel region. Where other
processes need the same cores, the threads that have work to do then wait for a core. Sleeping
threads leave it to them. Programs that import fastattn decide for themselves.
"""

import os
import sys

VARIABLE = "OMP_WAIT_POLICY"


def runs_the_command() -> bool:
    """Whether this process is `fastattn ...` or `python -m fastattn ...`."""
    arguments: list[str] = getattr(sys, "argv", None) or [""]
    if arguments[0] != "-m":
        return os.path.basename(arguments[0]) == "fastattn"
    # While `python -m` imports the package, its name is in orig_argv alone.
    return sys.orig_argv[-len(arguments)].removeprefix("-m") == "fastattn"


if runs_the_command():
    os.environ.setdefault(VARIABLE, "passive")
