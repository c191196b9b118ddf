"""Triton's interpreter is patched before its first kernel runs."""

import importlib.util

from fastattn.ops import _env

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
if _env.interpreting():
    import patched_interpreter

    patched_interpreter.install()
