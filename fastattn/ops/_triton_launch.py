"""Repeated launches of a Triton kernel that bind its arguments once.

Triton examines every argument of every launch to choose a specialisation, which takes some 50 µs
for the attention kernels. Here only the pointers differ between launches with the same shapes,
strides and options. So a launch is bound once for each such combination, and later calls check only
that the pointers are aligned. On NVIDIA GPUs a direct launch then calls the C function of Triton's
launcher, without the Python around it (8 µs with tensor descriptors). If Triton's launcher is not
the implementation expected here, kernels are launched through it and a warning is logged.
"""

import copy
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from fastattn.ops._cuda_driver import ensure_context, loading_allowed

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_log = logging.getLogger("fastattn")
# More than the combinations that a program uses; a full cache is cleared.
_MAX_CACHED = 2048

Grid = tuple[int, int, int]
# (grid, leading arguments) -> whether the kernel was launched.
_DirectLaunch = Callable[[Grid, tuple[Any, ...]], bool]


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
    x: Tensor,
    shape: list[int],
    strides: list[int],
    block: list[int],
    resized: bool = False,
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
        self._direct: _DirectLaunch | None = None

    def __call__(self, grid: Grid, *leading: Any) -> None:
        """Pointers not aligned to 16 bytes need another specialisation, which Triton looks up."""
        if self._direct is None or not self._direct(grid, leading):
            self._launch(grid, leading)

    def over(self, programs: int) -> Callable[..., None]:
        """The launch with a fixed number of programs."""
        return functools.partial(self, (programs, 1, 1))

    def _launch(self, grid: Grid, leading: tuple[Any, ...]) -> None:
        arguments = _arguments(leading, self.descriptors)
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
            self._direct = _direct_launch(compiled, grid, leading, self.descriptors, self._tail)
            self._compiled = compiled


def _arguments(
    leading: tuple[Any, ...], descriptors: Mapping[int, DescriptorTemplate | None]
) -> list[Any]:
    arguments = list(leading)
    for n, template in descriptors.items():
        arguments[n] = None if template is None else template.of(leading[n])
    return arguments


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
    are compiled, so every launch then goes through Triton.
    """
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


# -- direct launches ------------------------------------------------------------------------------


def _direct_launch(
    compiled: Any,
    grid: Grid,
    leading: tuple[Any, ...],
    descriptors: Mapping[int, DescriptorTemplate | None],
    tail: tuple[Any, ...],
) -> _DirectLaunch | None:
    """A function that launches the compiled kernel with arguments of the same kinds as `leading`,
    and returns False for those that need Triton's launcher. None if every launch needs it: on AMD,
    for kernels with a workspace of Triton's, and for unexpected implementations of the launcher.
    """
    try:
        if driver.active.get_current_target().backend != "cuda":
            return None
        launcher = compiled.run
        if launcher.global_scratch_size > 0 or launcher.profile_scratch_size > 0:
            return None
        run = _direct_caller(launcher, compiled, leading, descriptors, tail)
        direct, triton = _Recorder(), _Recorder()
        run(direct, grid, leading)
        _call_through_triton(launcher, compiled, triton, grid, leading, descriptors, tail)
        if direct.arguments is None or direct.arguments != triton.arguments:
            raise ValueError("Triton's launcher passes other arguments to its C function")
        return functools.partial(run, _c_function(launcher, any(descriptors.values())))
    except Exception:  # an unexpected launcher may raise anything; Triton's launcher still works
        _log.debug("cannot launch kernels directly", exc_info=True)
        _warn_indirect()
        return None


@functools.cache
def _warn_indirect() -> None:
    _log.warning(
        "this version of Triton has an unexpected launcher: each launch of a kernel takes some 6 "
        "microseconds longer"
    )


class _Recorder:
    """A stand-in for the launcher's C function that records its arguments."""

    arguments: tuple[Any, ...] | None = None

    def __call__(self, *args: Any) -> None:
        self.arguments = tuple(self._comparable(x) for x in args)

    @staticmethod
    def _comparable(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.data_ptr()
        if isinstance(x, tuple):
            return tuple(map(_Recorder._comparable, x))
        return type(x) if type(x).__name__ == "PyCUtensorMap" else x


def _call_through_triton(
    launcher: Any,
    compiled: Any,
    c_function: Callable[..., None],
    grid: Grid,
    leading: tuple[Any, ...],
    descriptors: Mapping[int, DescriptorTemplate | None],
    tail: tuple[Any, ...],
) -> None:
    """Calls `c_function` as Triton's launcher does."""
    metadata = getattr(compiled.metadata, "tensordesc_meta", None)
    probe = copy.copy(launcher)
    probe.launch = _nvidia().wrap_handle_tensordesc(c_function, compiled.src.signature, metadata)
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    probe(
        *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *_arguments(leading, descriptors), *tail,
    )  # fmt: skip


def _c_function(launcher: Any, wrapped: bool) -> Callable[..., None]:
    """wrapped: whether Triton wrapped it in a function that makes descriptors."""
    launch: Any = launcher.launch
    if not wrapped:
        return launch
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    return cells["launcher"].cell_contents


def _nvidia() -> Any:
    return sys.modules["triton.backends.nvidia.driver"]


def _direct_caller(
    launcher: Any,
    compiled: Any,
    leading: tuple[Any, ...],
    descriptors: Mapping[int, DescriptorTemplate | None],
    tail: tuple[Any, ...],
) -> Callable[[Callable[..., None], Grid, tuple[Any, ...]], bool]:
    """A function (C function, grid, leading) that calls the C function without Triton's Python."""
    pointers = [n for n, x in enumerate(leading) if isinstance(x, Tensor) and n not in descriptors]
    # (position, places of tensors); the other elements are None or numbers.
    tuples = [
        (n, [i for i, element in enumerate(x) if isinstance(element, Tensor)])
        for n, x in enumerate(leading)
        if isinstance(x, tuple)
    ]
    absent = [n for n, template in descriptors.items() if template is None]
    # A descriptor becomes several arguments; the last is replaced first, so that positions hold.
    templates = [(n, template) for n, template in descriptors.items() if template is not None]
    layouts = compiled.metadata.tensordesc_meta if templates else []
    encoders = [
        (n, _encoder(template, layout))
        for (n, template), layout in zip(templates, layouts, strict=True)
    ][::-1]
    runtime = knobs.runtime
    streams, device = driver.active.get_current_stream, driver.active.get_current_device()
    first = (
        compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,
        compiled.packed_metadata, None, None, None,
    )  # fmt: skip

    def run(launch: Callable[..., None], grid: Grid, leading: tuple[Any, ...]) -> bool:
        for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
            if hook is not None and getattr(hook, "calls", True):
                return False  # as _hooks_active
        args = list(leading)
        addresses = 0
        for n in pointers:
            args[n] = address = leading[n].data_ptr()
            addresses |= address
        for n, places in tuples:
            elements = list(leading[n])
            for i in places:
                elements[i] = address = elements[i].data_ptr()
                addresses |= address
            args[n] = tuple(elements)
        if addresses & 15:
            return False
        for n in absent:
            args[n] = None
        for n, encode in encoders:
            args[n : n + 1] = encode(leading[n])
        launch(*grid, streams(device), *first, *args, *tail)
        return True

    return run


def _encoder(template: DescriptorTemplate, layout: Any) -> Callable[[Tensor], list[Any]]:
    """A function: base -> the C function's arguments for its descriptor."""
    encode = driver.active.utils.fill_tma_descriptor
    shape, strides = list(template.descriptor.shape), list(template.descriptor.strides)
    swizzle, elem_size, block = layout["swizzle"], layout["elem_size"], layout["block_size"]
    elem_type = _nvidia().TMA_DTYPE_DEVICE_TO_HOST[layout["elem_type"]]
    last: tuple[int, list[int], list[Any]] = (-1, [], [])

    def arguments(base: Tensor) -> list[Any]:
        nonlocal last
        address, sizes = base.data_ptr(), [*base.shape] if template.resized else shape
        last_address, last_sizes, result = last
        if last_address != address or last_sizes != sizes:
            ensure_context()
            encoded = encode(address, swizzle, elem_size, elem_type, block, sizes, strides, 0)
            result = [encoded, *sizes, *strides]
            last = (address, sizes, result)
        return result

    return arguments


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
