"""Launching a Triton kernel again without binding its arguments again.

Triton looks at every argument of every launch to choose a specialisation: some 50 µs for the
attention kernels. All that matters here but the pointers follows from shapes, strides and options,
so a launch bound once per such combination only has to check that the pointers are aligned.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Combinations remembered: more than a program's shapes, few enough to forget all at once.
_MOST_REMEMBERED = 2048


class BoundLaunch:
    """A kernel with its grid and every argument that follows the leading ones.

    The kernel's parameters are: what changes from call to call (tensors, None, descriptors, and
    integers that are not specialised), then `scalars`, then the names in `constants`, in order.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        scalars: tuple[Any, ...],
        constants: dict[str, Any],
        **options: Any,
    ):
        self.kernel, self.grid = kernel, (*grid, 1, 1)[:3]
        self.scalars, self.constants, self.options = scalars, constants, options
        self._tail = (*scalars, *constants.values())
        self._runner: Callable[..., None] | None = None

    def __call__(self, *leading: Any) -> None:
        """Pointers not aligned to 16 bytes are another specialisation, which Triton looks up."""
        if not _aligned(leading):
            self._launch(leading)
        elif self._runner is not None:
            self._runner(*leading, *self._tail)
        else:
            compiled = self._launch(leading)
            # The interpreter and compile-only runs have nothing to run again.
            if hasattr(compiled, "function") and compiled.function is not None:
                self._runner = compiled[self.grid]

    def _launch(self, leading: tuple[Any, ...]) -> Any:
        return self.kernel[self.grid](*leading, *self.scalars, **self.constants, **self.options)


def _aligned(leading: tuple[Any, ...]) -> bool:
    addresses = 0
    for x in leading:
        if isinstance(x, Tensor):
            addresses |= x.data_ptr()
    return addresses & 15 == 0


class LaunchCache(dict[Any, Any]):
    """What was bound, by combination."""

    def remember(self, key: Any, value: Any) -> Any:
        if len(self) >= _MOST_REMEMBERED:
            self.clear()
        self[key] = value
        return value


def signature(x: Tensor | None) -> Any:
    """What of a tensor a launch depends on besides its address."""
    return None if x is None else (x.dtype, x.shape, x.stride())


def with_base(template: TensorDescriptor, base: Tensor) -> TensorDescriptor:
    """The same descriptor of other memory, whose layout was checked when the template was made."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(template.__dict__)
    descriptor.base = base
    return descriptor
