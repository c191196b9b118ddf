"""T5's bias of relative positions as its table, between the drop-ins of `foreign_attention` that
make it and the attention function of `huggingface` that uses it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """In the place of a bias [1, H, M, N], whose values functions of torch get by `dense`."""

    table: Tensor  # [buckets, H]
    buckets: Literal["t5", "t5_causal"]
    max_distance: int
    past: int | Tensor  # query i has position past + i
    dense: Callable[[], Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda bias: bias.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def table_options(self, device: torch.device) -> dict[str, Any]:
        """The arguments of `attention` for the table alone."""
        return {
            "relative_bias": self.table.t().to(device),
            "relative_buckets": self.buckets,
            "relative_max_distance": self.max_distance,
        }

    def options(self, query: Tensor, N: int) -> dict[str, Any] | None:
        """The arguments of `attention` for queries [B, H, M, D] of a model whose mask allows no
        later keys if there are past ones; None if their distances cannot be expressed.
        """
        options = self.table_options(query.device)
        B, M = query.shape[0], query.shape[2]
        is_known = not isinstance(self.past, Tensor)
        if is_known and self.past == 0:
            return options
        if M != 1:  # a chunk of a prompt: only a causal diagonal would have the offset
            return None
        if is_known and self.past == N - 1:
            return options | {"causal": "bottom_right"}
        ends = torch.as_tensor(self.past, device=query.device).long().view(1) + 1
        return options | {"causal": "bottom_right_lengths", "key_lengths": ends.expand(B)}
