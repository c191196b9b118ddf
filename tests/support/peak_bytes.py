"""The bytes of tensors that a process holds, at their peak."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Follows, while active, the storages that operators allocate, until they are freed, by
    whichever thread. Memory that an operator allocates and frees itself does not count.

    Attributes:
        peak: the most bytes in use since the start or `reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def in_use(self) -> int:
        """FSDP2 frees parameters by resizing their storages, so sizes are asked for each time."""
        storages = [reference() for reference in list(self._storages.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def reset(self) -> None:
        self.peak = self.in_use()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the ops of its local tensors
        result = func(*args, **(kwargs or {}))
        given = {id(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if id(storage) not in given:
                self._follow(storage)
        self.peak = max(self.peak, self.in_use())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not _wraps(leaf)
    ]


def _wraps(x: Tensor) -> bool:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(x)
