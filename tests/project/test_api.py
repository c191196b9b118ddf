"""What a user sees of the package in Python."""

import subprocess
import sys

import fastattn

_LIST = "import fastattn; print(*dir(fastattn)); {}; print(*dir(fastattn))"
_USE = "fastattn.patch, fastattn.nn.LayerNorm, fastattn.testing"


def test_dir_lists_the_public_names() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIST.format(_USE)], capture_output=True, text=True, check=True
    )
    before, after = (line.split() for line in done.stdout.splitlines())
    modules = ["distributed", "functional", "integrations", "nn", "seq2seq", "testing"]
    assert before == after == sorted([*fastattn.__all__, *modules, "__version__"])
    assert {"patch", "unpatch", "attention"} < set(before)
    for name in before:
        assert getattr(fastattn, name) is not None
