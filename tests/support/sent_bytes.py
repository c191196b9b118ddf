"""Counts the bytes that a process sends through torch.distributed.

The dispatcher sees every transfer: collectives and point-to-point operations of c10d, functional
collectives, those of DTensor and FSDP2. So `SentBytes` is a dispatch mode.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """Counts, while active, what this process sends.

    A collective counts as what each of its P processes sends if it is done in a ring, whatever
    algorithm the backend uses: of a whole tensor of n bytes

    | operation | bytes |
    |---|---|
    | `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `reduce` | (P - 1) / P n |
    | `all_reduce` | 2 (P - 1) / P n |
    | `send` | n |

    The whole tensor is the gathered one, the one before it is scattered, or the input. In an
    all-to-all of unequal shares each process counts what it sends to others. Scatter and gather,
    in which processes send different amounts, raise NotImplementedError.

    Attributes:
        sent: bytes by operation, named as in the table, and ranks of the process group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: defaultdict[tuple[str, tuple[int, ...]], float] = defaultdict(float)

    def total(self, operation: str | None = None, ranks: Iterable[int] | None = None) -> float:
        """The bytes of one operation and one group; None: of all."""
        group = None if ranks is None else tuple(ranks)
        return sum(
            sent
            for (name, members), sent in self.sent.items()
            if operation in (None, name) and group in (None, members)
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, _dtensor()) for kind in types):
            return NotImplemented  # DTensor calls ops and collectives of local tensors
        count = _OPERATIONS.get(str(getattr(func, "_overloadpacket", func)))
        if count is not None:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | dict(kwargs or {})
            group = _group(given)
            operation, sent = count(given, dist.get_world_size(group))
            if sent:
                self.sent[operation, tuple(dist.get_process_group_ranks(group))] += sent
        elif getattr(func, "namespace", "").strip("_") in _NAMESPACES and func._overloadpacket:
            name = str(func._overloadpacket)
            if name not in _SILENT:
                raise NotImplementedError(f"the bytes that {name} sends are not known")
        return func(*args, **(kwargs or {}))


_Arguments = Mapping[str, Any]
_Count = Callable[[_Arguments, int], tuple[str, float]]
_NAMESPACES = ("c10d", "c10d_functional", "c10d_functional_autograd", "dtensor")
# Operations that send nothing of a size, or whose transfers are other operations.
_SILENT = {
    *("c10d.barrier", "c10d.monitored_barrier_", "c10d.check_for_nan"),
    *("c10d.recv_", "c10d.recv_any_source_", "_dtensor.mesh_get_process_group"),
    *("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"),
}


def _dtensor() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor


def _group(given: _Arguments) -> dist.ProcessGroup:
    group = given["process_group" if "process_group" in given else "group_name"]
    if isinstance(group, str):
        resolve: Any = dist.distributed_c10d._resolve_process_group
        return resolve(group)
    if isinstance(group, dist.ProcessGroup):
        return group
    return dist.ProcessGroup.unbox(group)


def _bytes(x: Any) -> int:
    """Bytes of a tensor or of nested lists of tensors."""
    if isinstance(x, Tensor):
        return math.prod(x.shape) * x.element_size()
    return sum(map(_bytes, x))


def _gathers(argument: str) -> _Count:
    """`argument` is the shard of this process."""
    return lambda given, P: ("all_gather", (P - 1) * _bytes(given[argument]))


def _scatters(argument: str) -> _Count:
    """`argument` is the tensor before it is scattered."""
    return lambda given, P: ("reduce_scatter", (P - 1) * _bytes(given[argument]) / P)


def _reduces(argument: str) -> _Count:
    return lambda given, P: ("all_reduce", 2 * (P - 1) * _bytes(given[argument]) / P)


def _passes_on(operation: str, argument: str) -> _Count:
    return lambda given, P: (operation, (P - 1) * _bytes(given[argument]) / P)


def _exchanges(argument: str, splits: str | None = None) -> _Count:
    """An all-to-all of `argument`, in equal shares or in rows as in `splits`."""

    def count(given: _Arguments, P: int) -> tuple[str, float]:
        x = given[argument]
        if splits is None or not given[splits]:
            return "all_to_all", (P - 1) * _bytes(x) / P
        rows = given[splits]
        others = sum(rows) - rows[dist.get_rank(_group(given))]
        return "all_to_all", _bytes(x) / max(1, x.shape[0]) * others

    return count


def _exchanges_list(given: _Arguments, P: int) -> tuple[str, float]:
    rank = dist.get_rank(_group(given))
    others = [x for i, x in enumerate(given["input_tensors"]) if i != rank]
    return "all_to_all", _bytes(others)


def _sends(given: _Arguments, P: int) -> tuple[str, float]:
    return "send", _bytes(given["tensors"])


_OPERATIONS: dict[str, _Count] = {
    "c10d.allgather_": _gathers("input_tensors"),
    "c10d._allgather_base_": _gathers("input_tensor"),
    "c10d.allgather_coalesced_": _gathers("input_list"),
    "c10d.allgather_into_tensor_coalesced_": _gathers("inputs"),
    "c10d.allreduce_": _reduces("tensors"),
    "c10d.allreduce_coalesced_": _reduces("tensors"),
    "c10d.reduce_scatter_": _scatters("input_tensors"),
    "c10d._reduce_scatter_base_": _scatters("input_tensor"),
    "c10d.reduce_scatter_tensor_coalesced_": _scatters("inputs"),
    "c10d.alltoall_base_": _exchanges("input", "input_split_sizes"),
    "c10d.alltoall_": _exchanges_list,
    "c10d.broadcast_": _passes_on("broadcast", "tensors"),
    "c10d.reduce_": _passes_on("reduce", "tensors"),
    "c10d.send": _sends,
    "_dtensor.shard_dim_alltoall": _exchanges("input"),
}
for _namespace in ("_c10d_functional", "_c10d_functional_autograd"):
    _OPERATIONS |= {
        f"{_namespace}.all_gather_into_tensor": _gathers("input"),
        f"{_namespace}.all_gather_into_tensor_out": _gathers("input"),
        f"{_namespace}.all_gather_into_tensor_coalesced": _gathers("inputs"),
        f"{_namespace}.all_reduce": _reduces("input"),
        f"{_namespace}.all_reduce_": _reduces("input"),
        f"{_namespace}.all_reduce_coalesced": _reduces("inputs"),
        f"{_namespace}.all_reduce_coalesced_": _reduces("inputs"),
        f"{_namespace}.reduce_scatter_tensor": _scatters("input"),
        f"{_namespace}.reduce_scatter_tensor_out": _scatters("input"),
        f"{_namespace}.reduce_scatter_tensor_coalesced": _scatters("inputs"),
        f"{_namespace}.all_to_all_single": _exchanges("input", "input_split_sizes"),
        f"{_namespace}.broadcast": _passes_on("broadcast", "input"),
        f"{_namespace}.broadcast_": _passes_on("broadcast", "input"),
    }
