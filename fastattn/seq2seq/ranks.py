"""The ranks of a training run: the processes of a mesh of torch.distributed, or one process alone.

Training is written once, for `Ranks`; with one process the methods return their argument. Along
"data" each rank has a shard of every batch (`part`), rank 0 alone writes files and prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fastattn.distributed import Plan

    from .model import Seq2SeqTransformer


T = TypeVar("T")


class Ranks:
    """The processes that `train` runs in: those of a mesh, or this process alone.

    All processes make it together, after `torch.distributed.init_process_group`.

    Args:
        mesh: a DeviceMesh of all processes, whose dimensions are named as for
            `fastattn.distributed.parallelize`; None: this process alone.

    Attributes:
        rank, size: this process's number among all, and their number.
        part: the rank and the number of ranks that split a batch by sentences.
        names: the dimensions of the mesh with more than one rank.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.rank, self.size, self.part = 0, 1, (0, 1)
        self.names: tuple[str, ...] = ()
        if mesh is None:
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Flags, texts and checkpoints travel apart from the tensors of training, on the CPU.
        self.files, self._flags = (dist.new_group(backend="gloo") for _ in range(2))
        self.alone = dist.new_group([0], backend="gloo")
        names = mesh.mesh_dim_names or ()
        self.names = tuple(name for name in names if mesh[name].size() > 1)
        if "data" in self.names:
            self.part = mesh.get_local_rank("data"), mesh["data"].size()

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def total(self, count: Tensor) -> Tensor:
        """Return the sum of a count of sentences or tokens over the shards of a batch."""
        return self._summed(count, "data")

    def sum(self, loss: Tensor) -> Tensor:
        """Return the sum of the ranks' parts of a loss, each of its sentences and tokens."""
        return self._summed(loss, "data", "context")

    def _summed(self, value: Tensor, *names: str) -> Tensor:
        if self.mesh is None:
            return value
        value = value.detach().clone()
        for name in names:
            if name in self.names:
                dist.all_reduce(value, group=self.mesh.get_group(name))
        return value

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set in any rank."""
        return bool(self.highest(flag))

    def highest(self, number: int) -> int:
        """Return the highest number of all ranks."""
        if self.mesh is None:
            return number
        value = torch.tensor(int(number))
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._flags)
        return int(value)

    def wait(self) -> None:
        """Return when every rank has called this."""
        self.any(False)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items that this rank works on; `join` gives the results of all."""
        return items[self.rank :: self.size]

    def join(self, results: Sequence[T]) -> list[T]:
        """Return the results for all items, in their order."""
        if self.mesh is None:
            return list(results)
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, list(results), group=self._flags)
        return [parts[i % self.size][i // self.size] for i in range(sum(map(len, parts)))]

    def parallelize(self, model: Seq2SeqTransformer) -> None:
        """Divide the model over the mesh."""
        if self.mesh is None:
            return
        from fastattn.distributed import parallelize

        parallelize(model, self.mesh, self._plan(model))

    def require_divisible(self, model: Seq2SeqTransformer) -> None:
        """Raise what `parallelize` would."""
        if self.mesh is None:
            return
        from fastattn.distributed.parallelize import require_divisible

        device = next(model.parameters()).device
        require_divisible(model, self.mesh, self._plan(model), device.type)

    def _plan(self, model: Seq2SeqTransformer) -> Plan:
        """All that can be divided along "tensor": a vocabulary if its size allows, and a copying
        head neither divides its vocabulary nor pads sentences to lengths that can be divided.
        """
        from fastattn.distributed import Plan

        assert self.mesh is not None
        size = self.mesh["tensor"].size() if "tensor" in self.names else 1
        config = model.config
        odd = config.vocabulary % size
        return Plan(vocabulary=not (odd or config.copy), sequence=not config.copy)

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """Clip the gradient to a norm of `limit` and return its norm."""
        if self.mesh is None:
            return nn.utils.clip_grad_norm_(model.parameters(), limit)
        from fastattn.distributed import clip_grad_norm_

        return clip_grad_norm_(model.parameters(), limit)


ONE_PROCESS = Ranks()
