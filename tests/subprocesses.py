"""What tests that start another Python give it."""

import os


def environment(**variables: str) -> dict[str, str]:
    """For a subprocess, which is no worker of pytest-xdist even where this process is one."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return mine | {"OMP_NUM_THREADS": "1"} | variables
