"""Launching a Triton kernel again without binding its arguments again.

Triton looks at every argument of every launch to choose a specialisation, which takes longer than a
small norm. All that matters here but the pointers follows from dtypes, row lengths and strides, so
a launch bound once per such combination only has to check that the pointers are aligned. The number
of rows is not part of it: packed batches bring another one with every call.
"""

from typing import Any

from torch import Tensor

# Combinations remembered: more than a program's shapes, few enough to forget all at once.
_MOST_REMEMBERED = 2048


class BoundLaunch:
    """A kernel with every argument that follows the leading ones.

    The kernel's parameters are: what changes from call to call (tensors or None, numbers that are
    not specialised), then `scalars`, then the names in `constants`, in order.
    """

    def __init__(
        self, kernel: Any, scalars: tuple[int, ...], constants: dict[str, Any], **options: int
    ):
        self.kernel, self.scalars = kernel, scalars
        self.constants, self.options = constants, options
        self._tail = (*scalars, *constants.values())
        self._tensors: list[int] = []
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *leading: Any) -> None:
        """Which of the leading ones are None must not change from call to call. Pointers not
        aligned to 16 bytes are another specialisation, which Triton looks up.
        """
        if self._compiled is not None and self._are_aligned(leading):
            self._compiled[grid](*leading, *self._tail)
            return
        compiled = self.kernel[grid](*leading, *self.scalars, **self.constants, **self.options)
        # The interpreter and compile-only runs have nothing to run again.
        if self._compiled is None and getattr(compiled, "function", None) is not None:
            self._tensors = [i for i, x in enumerate(leading) if isinstance(x, Tensor)]
            if self._are_aligned(leading):
                self._compiled = compiled

    def _are_aligned(self, leading: tuple[Any, ...]) -> bool:
        addresses = 0
        for i in self._tensors:
            addresses |= leading[i].data_ptr()
        return addresses & 15 == 0


class LaunchCache(dict[Any, Any]):
    """What was bound, by combination."""

    def remember(self, key: Any, value: Any) -> Any:
        if len(self) >= _MOST_REMEMBERED:
            self.clear()
        self[key] = value
        return value
