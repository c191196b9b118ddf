"""Launching a Triton kernel again without binding its arguments again.

Triton looks at every argument of every launch to choose a specialisation, which costs tens of
microseconds. All that matters here but the pointers follows from widths, strides and options, so a
launch bound once per such combination only has to check that the pointers are aligned.
"""

from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Combinations remembered: more than a program's shapes, few enough to forget all at once.
_MOST_REMEMBERED = 2048


class BoundLaunch:
    """A kernel with every argument that follows the leading ones.

    The kernel's parameters are: what changes from call to call (tensors, None, descriptors, and
    integers that are not specialised), then `scalars`, then the names in `constants`, in order.
    Which of the leading ones are None must not change from call to call.
    """

    def __init__(
        self, kernel: Any, scalars: tuple[Any, ...], constants: dict[str, Any], **options: Any
    ):
        self.kernel, self.scalars = kernel, scalars
        self.constants, self.options = constants, options
        self._tail = (*scalars, *constants.values())
        self._compiled: Any = None

    def __call__(self, programs: int, *leading: Any) -> None:
        """Pointers not aligned to 16 bytes are another specialisation, which Triton looks up."""
        if programs == 0:
            return
        grid = (programs, 1, 1)
        if self._compiled is not None and aligned(*leading):
            self._compiled[grid](*leading, *self._tail)
            return
        compiled = self.kernel[grid](*leading, *self.scalars, **self.constants, **self.options)
        # The interpreter and compile-only runs have nothing to run again.
        if getattr(compiled, "function", None) is not None and aligned(*leading):
            self._compiled = compiled


def aligned(*arguments: Any) -> bool:
    """Whether every tensor among them starts at a multiple of 16 bytes."""
    addresses = 0
    for x in arguments:
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


def signature(x: Tensor) -> Any:
    """What of a tensor a launch depends on besides its address."""
    return x.dtype, x.shape, x.stride()


def rows_signature(x: Tensor | None) -> Any:
    """The same of [rows, N] without the rows, of which every packed batch has another number."""
    return None if x is None else (x.dtype, x.shape[1], x.stride())


def rebased(template: TensorDescriptor, base: Tensor, rows: int | None) -> TensorDescriptor:
    """The same descriptor of other memory, whose layout was checked when the template was made, and
    of another number of rows.
    """
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(template.__dict__)
    descriptor.base = base
    if rows is not None:
        descriptor.shape = [rows, *template.shape[1:]]
    return descriptor
