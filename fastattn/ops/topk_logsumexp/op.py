"""The torch op `topk_logsumexp`: schema, shapes of the results, backends. No gradients."""

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


# Internal to greedy and beam search, so users cannot choose its backend.
topk_logsumexp = Op(
    "topk_logsumexp",
    "Tensor logits, int first, int count",
    "Tensor logsumexp, Tensor values, Tensor indices",
    _outputs,
    "fastattn.ops.topk_logsumexp",
    (Backend("cpu"), Backend("reference")),
    requestable=False,
)
