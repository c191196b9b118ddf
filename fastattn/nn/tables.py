"""Base of modules with a table that follows from their arguments, such as sinusoids."""

from typing import Any

import torch
from torch import Tensor, nn


class ComputedTable(nn.Module):
    """A module with a constant table in fp32, in every dtype of the model.

    The buffer `table` is outside the `state_dict`. It is computed again when the module is moved or
    converted, which fills it after `to_empty`, and at its first use if it is still on the meta
    device, as after `load_state_dict(assign=True)`.
    """

    table: Tensor

    def _register_table(self, device: torch.device | str | None = None) -> None:
        device = torch.get_default_device() if device is None else torch.device(device)
        self.register_buffer("table", self._table(device), persistent=False)

    def _computed(self, device: torch.device | str) -> Tensor:
        """The table, on this device."""
        raise NotImplementedError

    def _table(self, device: torch.device) -> Tensor:
        return self._computed("meta" if device.type == "meta" else "cpu").to(device)

    def reset_parameters(self) -> None:
        self.table = self._table(self.table.device)

    def table_on(self, device: torch.device) -> Tensor:
        """The table for data on this device."""
        if not self.table.is_meta or device.type == "meta":
            return self.table
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            return self._table(device)
        with torch.inference_mode(False):  # for later calls, too
            self.table = self._table(device)
        return self.table

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self.table
        super()._apply(fn, recurse)
        if self.table is not before:
            self.reset_parameters()
        return self
