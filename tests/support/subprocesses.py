"""Helpers for tests that start another Python process."""

import os
import re
import subprocess
import sys
from typing import Any


def environment(**variables: str) -> dict[str, str]:
    """The environment for a subprocess, without the variables of pytest-xdist's workers."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return mine | {"OMP_NUM_THREADS": "1"} | variables


def python_output(*arguments: Any, **options: Any) -> str:
    """What Python prints, which must succeed. options: of subprocess.run."""
    options = {"env": environment(), "timeout": 600} | options
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def passed_with(*options: str, **variables: str) -> int:
    """Runs pytest with these options, checks that all tests pass, and returns their number."""
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
    shown = python_output(*command, env=environment(**variables), timeout=None)
    return int(re.findall(r"(\d+) passed", shown)[-1])
