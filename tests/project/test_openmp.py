"""The command's idle threads sleep: OMP_WAIT_POLICY is set before torch is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Stands for torch: prints what torch would read, and ends.
TORCH = "import os, sys; print(os.environ.get('OMP_WAIT_POLICY')); sys.exit()"
# As pip writes it.
SCRIPT = """
import re
import sys
from fastattn.cli import main
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(main())
"""
LIBRARY = "import sys; import fastattn"


@pytest.mark.parametrize(("start", "policy", "seen"), [
    (["-m", "fastattn", "info"], None, "passive"),
    (["-X", "utf8", "-m", "fastattn"], None, "passive"),
    (["SCRIPT", "info"], None, "passive"),
    (["-m", "fastattn", "info"], "active", "active"),
    (["SCRIPT", "info"], "active", "active"),
    (["-c", LIBRARY, "fastattn"], None, "None"),
    (["-m", "fastattn.testing.primitives"], None, "None"),
])  # fmt: skip
def test_the_command_sets_the_wait_policy_before_torch(tmp_path, start, policy, seen):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "fastattn").write_text(SCRIPT)
    variables = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    variables.pop("OMP_WAIT_POLICY", None)
    if policy is not None:
        variables["OMP_WAIT_POLICY"] = policy
    command = [str(tmp_path / "fastattn") if word == "SCRIPT" else word for word in start]
    done = subprocess.run(
        [sys.executable, *command], env=variables, cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == f"{seen}\n"
