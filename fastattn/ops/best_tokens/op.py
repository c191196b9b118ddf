"""The torch op that searches logits: schema, shapes of the results, backends. No gradients."""

import torch
from torch import Tensor

from fastattn.ops._op import Backend, Op


def _outputs(logits: Tensor, first: int, count: int) -> tuple[Tensor, ...]:
    rows = logits.shape[0]
    return (
        logits.new_empty(rows),
        logits.new_empty(rows, count),
        logits.new_empty(rows, count, dtype=torch.long),
    )


# A part of searches: users choose no backend for it.
best_tokens = Op(
    "best_tokens",
    "Tensor logits, int first, int count",
    "Tensor log_z, Tensor best, Tensor tokens",
    _outputs,
    "fastattn.ops.best_tokens",
    (Backend("cpu"), Backend("reference")),
    requestable=False,
)
