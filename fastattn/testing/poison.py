"""NaN in results and scratch memory before a backend runs: what it leaves unwritten, or reads too
early, is seen.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastattn.ops import _native
from fastattn.ops._op import Op


@contextlib.contextmanager
def poisoned_results() -> Iterator[None]:
    """Inside, every op finds its results and its scratch memory filled with NaN."""

    def allocate(self: Op, args: Sequence[Any]) -> tuple[Tensor, ...]:
        results = self.outputs(*self.given(args))
        for result in results:
            if result.is_floating_point():
                result.fill_(float("nan"))
        return results

    def allocate_workspace(self: Op, pieces: Any, device: torch.device) -> list[Tensor]:
        scratch = own_workspace(self, pieces, device)
        for piece, (_, _, zeroed) in zip(scratch, pieces, strict=True):
            if not zeroed and piece.numel():
                piece.view(torch.uint8).fill_(0xFF)  # NaN in every floating type
        return scratch

    own_workspace = Op.allocate_workspace
    library = None if _native.unavailable("cpu") else torch.ops.fastattn_cpu
    before = library is not None and library.poison_memory(True)
    try:
        with (
            mock.patch.object(Op, "allocate", allocate),
            mock.patch.object(Op, "allocate_workspace", allocate_workspace),
        ):
            yield
    finally:
        if library is not None:
            library.poison_memory(before)
