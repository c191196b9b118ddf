"""Helpers for tests that start another Python process."""

import os
import re
import subprocess
import sys


def environment(**variables: str) -> dict[str, str]:
    """The environment for a subprocess, without the variables of pytest-xdist's workers."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return mine | {"OMP_NUM_THREADS": "1"} | variables


def passed_with(*options: str, **variables: str) -> int:
    """Runs pytest with these options, checks that all tests pass, and returns their number."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
    result = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:]
    return int(re.findall(r"(\d+) passed", result.stdout)[-1])
