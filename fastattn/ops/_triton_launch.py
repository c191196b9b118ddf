"""Repeated launches of a Triton kernel that bind its arguments once.

Triton examines every argument of every launch to choose a specialisation, which takes some 50 µs
for the attention kernels. Here only the pointers differ between launches with the same shapes,
strides and options. So a launch is bound once for each such combination, and later calls check only
that the pointers are aligned, then launch the compiled kernel that Triton returned.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from fastattn.ops._cuda_driver import ensure_context, loading_allowed

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# More than the combinations that a program uses; a full cache is cleared.
_MAX_CACHED = 2048

Grid = tuple[int, int, int]


class DescriptorTemplate(NamedTuple):
    """A tensor descriptor without its memory. resized: whether it has the sizes of a call's tensor,
    which differ between calls.
    """

    descriptor: TensorDescriptor
    resized: bool = False

    def of(self, base: Tensor) -> TensorDescriptor:
        """The descriptor of `base`, without the checks of TensorDescriptor's constructor."""
        descriptor = object.__new__(TensorDescriptor)
        descriptor.__dict__.update(self.descriptor.__dict__)
        descriptor.base = base
        if self.resized:
            descriptor.shape = [*base.shape]
        return descriptor


def descriptor_template(
    x: Tensor, shape: list[int], strides: list[int], block: list[int], resized: bool = False
) -> DescriptorTemplate:
    """The template for tensors like x."""
    descriptor = TensorDescriptor(x, shape, strides, block)
    descriptor.base = None  # a cached template must not keep memory alive
    return DescriptorTemplate(descriptor, resized)


class BoundLaunch:
    """A kernel and all its arguments but the leading ones, on one device.

    The kernel's parameters are, in order: the leading ones, which each call passes (tensors, None,
    tuples of these, and numbers that are not specialised); `scalars`; the names in `constants`.
    Which leading arguments are None must not change. The tensors at the positions in `descriptors`
    are passed as descriptors made from these templates, or as None if the template is None.
    """

    def __init__(
        self,
        kernel: Any,
        scalars: tuple[Any, ...],
        constants: dict[str, Any],
        descriptors: Mapping[int, DescriptorTemplate | None] | None = None,
        **options: Any,
    ):
        self.kernel, self.descriptors = kernel, descriptors or {}
        self.scalars, self.constants, self.options = scalars, constants, options
        self._tail = (*scalars, *constants.values())
        self._compiled: Any = None

    def __call__(self, grid: Grid, *leading: Any) -> None:
        """Pointers not aligned to 16 bytes need another specialisation, which Triton looks up."""
        arguments = list(leading)
        for n, template in self.descriptors.items():
            arguments[n] = None if template is None else template.of(leading[n])
        if self.descriptors:
            ensure_context()
        bindable = aligned(*leading) and not _hooks_active()
        if bindable and self._compiled is not None:
            self._compiled[grid](*arguments, *self._tail)
            return
        with loading_allowed():
            compiled = self.kernel[grid](
                *arguments, *self.scalars, **self.constants, **self.options
            )
        # The interpreter and compile-only runs return no loaded kernel.
        if bindable and getattr(compiled, "function", None) is not None:
            self._compiled = compiled

    def over(self, programs: int) -> Callable[..., None]:
        """The launch with a fixed number of programs."""
        return functools.partial(self, (programs, 1, 1))


def aligned(*arguments: Any) -> bool:
    """Whether the address of every tensor, also in tuples, is a multiple of 16 bytes."""
    addresses = 0
    for x in arguments:
        if isinstance(x, Tensor):
            addresses |= x.data_ptr()
        elif isinstance(x, tuple):
            addresses |= 0 if aligned(*x) else 1
    return addresses & 15 == 0


def _hooks_active() -> bool:
    """Whether Triton's launch hooks are in use, as by a profiler. Hooks may also change how kernels
    are compiled, so Triton then looks up the kernel of every launch.
    """
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


# -- the cache of bound launches ------------------------------------------------------------------


class LaunchCache(dict[Any, Any]):
    """Bound launches by the combination of shapes, strides and options."""

    def remember(self, key: Any, value: Any) -> Any:
        if len(self) >= _MAX_CACHED:
            self.clear()
        self[key] = value
        return value


def signature(x: Tensor | None) -> Any:
    """The properties of a tensor that a launch depends on, without the address."""
    return None if x is None else (x.dtype, x.shape, x.stride())


def rows_signature(x: Tensor | None) -> Any:
    """The signature of [rows, N] without the number of rows, which every packed batch changes."""
    return None if x is None else (x.dtype, x.shape[1], x.stride())


@functools.cache
def too_old(arch: str) -> str | None:
    """Why kernels cannot be compiled for an architecture, or None."""
    if arch.startswith("sm_") and int(arch[3:]) < 80:
        return f"needs compute capability 8.0 or newer, got {arch}"
    return None
