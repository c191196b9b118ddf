"""The calls of fastattn's ops as a dispatch mode sees them."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CallRecorder(TorchDispatchMode):
    """Records the calls of fastattn's ops: (overload, arguments, keyword arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "fastattn":
            self.calls.append((op, args, kwargs or {}))
        return op(*args, **kwargs or {})

    @property
    def names(self) -> list[str]:
        """The name of the op of each call, such as attention_fwd."""
        return [op._schema.name.removeprefix("fastattn::") for op, _, _ in self.calls]
