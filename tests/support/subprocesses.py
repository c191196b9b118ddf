"""What tests that start another Python give it."""

import os
import re
import subprocess
import sys


def environment(**variables: str) -> dict[str, str]:
    """For a subprocess, which is no worker of pytest-xdist even where this process is one."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return mine | {"OMP_NUM_THREADS": "1"} | variables


def passed_in_the_interpreter(file: str, *options: str) -> int:
    """Runs a file's tests once more, in Triton's interpreter, and returns how many there were."""
    return passed_with(*options, file, TRITON_INTERPRET="1")


def passed_with(*options: str, **variables: str) -> int:
    """Runs pytest with these options and returns how many tests there were, all of which passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
    result = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:]
    return int(re.findall(r"(\d+) passed", result.stdout)[-1])
