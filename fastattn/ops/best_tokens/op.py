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


_search = Op(
    "best_tokens",
    "Tensor logits, int first, int count",
    "Tensor log_z, Tensor best, Tensor tokens",
    _outputs,
    "fastattn.ops.best_tokens",
    (Backend("cpu"), Backend("reference")),
    takes_requests=False,
)


def best_tokens(logits: Tensor, first: int, count: int) -> tuple[Tensor, ...]:
    """[rows, V] -> log_z [rows], best and tokens [rows, count]. A part of searches, not an op that
    users choose backends for.
    """
    if torch.compiler.is_compiling():
        return _search.call(logits, first, count)  # type: ignore[no-any-return]
    return _search.below_autograd((logits, first, count), None)
