"""The launch cache of the GPU libraries, in the extension `_C_autograd`: it repeats what a call
launched for later calls of the same layouts (csrc/autograd/launch_cache.h).
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Backends with a GPU library, whose ops are in the namespace fastattn_<backend>.
_LIBRARIES = ["sm90", "cuda"]

_enabling = threading.Lock()
_extension: Any = None
_enabled = False


def enable(ops: Iterable[Any]) -> None:
    """Registers the caches of the ops that GPU libraries have, if there is the extension. They are
    the kernels of the default and the named overload on CUDA from then on.
    """
    global _extension, _enabled
    with _enabling:
        if _enabled:
            return
        from fastattn.ops import _native  # here, so that `import fastattn` loads no native library

        _extension = _native.extension()
        libraries = [name for name in _LIBRARIES if _native.unavailable(name) is None]
        for op in ops if _extension is not None else ():
            if not op.backends.keys().isdisjoint(libraries):
                for overload in ("", ".backend"):
                    _extension.cache_launches(op.name + overload, "CUDA")
        _enabled = True


def run_and_record(
    name: str,
    backend: str | None,
    args: Sequence[Any],
    contiguous: Sequence[Any],
    run: Callable[[], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """run(), for a call of the op `name` or, with `backend`, of its named overload, whose launch is
    recorded if its cache asks for it. contiguous: the arguments with those made contiguous that
    backends need so.
    """
    if _extension is None or not _extension.should_record_launch():
        return run()
    with _Launches() as seen:
        results = run()
    op, library_args = seen.launches[0] if seen.can_be_repeated else ("", ())
    overload, named = (name, ()) if backend is None else (f"{name}.backend", (backend,))
    calls = (*args, *named), (*contiguous, *named)
    _extension.record_launch(overload, *calls, results, op, library_args)
    return results


def clear() -> None:
    if _extension is not None:
        _extension.clear_launches()


# Ops beside which a launch can be repeated; views, too.
_ALLOCATIONS = ("aten::empty", "aten::new_empty")


class _Launches(TorchDispatchMode):
    """The calls of GPU libraries' ops, and whether they are all that is done inside."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[str, tuple[Any, ...]]] = []
        self._only_launches = True

    @property
    def can_be_repeated(self) -> bool:
        return self._only_launches and len(self.launches) == 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace.removeprefix("fastattn_") in _LIBRARIES:
            if not result:  # otherwise the size of the workspace that it needs
                self.launches.append((func._schema.name, tuple(args)))
        elif not (func.is_view or func._schema.name.startswith(_ALLOCATIONS)):
            self._only_launches = False
        return result
