"""Fills results and workspaces with NaN before a backend runs, to detect elements that it does not
write or reads before writing.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastattn.ops import _launch, _native
from fastattn.ops._op import Op


@contextlib.contextmanager
def poisoned_results() -> Iterator[None]:
    """Inside, the results and workspaces of every op are filled with NaN before the op runs."""

    def allocate(self: Op, args: Sequence[Any]) -> tuple[Tensor, ...]:
        results = self.outputs(*self.backend_args(args))
        for result in results:
            if result.is_floating_point():
                result.fill_(float("nan"))
        return results

    def allocate_workspace(self: Op, buffers: Any, device: torch.device) -> list[Tensor]:
        workspace = own_workspace(self, buffers, device)
        for tensor, (_, _, zeroed) in zip(workspace, buffers, strict=True):
            if not zeroed and tensor.numel():
                tensor.view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype
        return workspace

    def native_workspace(size: int, device: torch.device) -> Tensor:
        return own_native_workspace(size, device).fill_(0xFF)

    def run_and_record(*call: Any) -> Any:
        return call[-1]()  # records nothing

    own_workspace, own_native_workspace = Op.allocate_workspace, _native.workspace
    library = None if _native.unavailable("cpu") else torch.ops.fastattn_cpu
    before = library is not None and library.poison_memory(True)
    try:
        with (
            mock.patch.object(Op, "allocate", allocate),
            mock.patch.object(Op, "allocate_workspace", allocate_workspace),
            mock.patch.object(_native, "workspace", native_workspace),
            mock.patch.object(_launch, "run_and_record", run_and_record),
        ):
            _launch.clear()
            yield
    finally:
        if library is not None:
            library.poison_memory(before)
