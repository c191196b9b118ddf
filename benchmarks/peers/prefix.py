"""Decoding with torch.nn.Transformer, which has no cache: each step recomputes the whole prefix."""

from typing import Any

from torch import nn

from benchmarks.generation import GENERATION, decode, model_of
from benchmarks.implementations import Implementation, Task


def _build(task: Task) -> Any:
    return decode(model_of(task, nn.Transformer), task, keep_programs=False)


PEERS = (
    # A call takes seconds with large batches or many tokens.
    Implementation("torch-prefix", (GENERATION,), _build, workloads=r"_b\d_.*_new24"),
)
