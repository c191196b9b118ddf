"""Launching a Triton kernel again without binding its arguments again.

Triton looks at every argument of every launch to choose a specialisation: some 50 µs for the
attention kernels. All that matters here but the pointers follows from shapes, strides and options,
so a launch bound once per such combination only has to check that the pointers are aligned. On
NVIDIA GPUs it then calls what Triton's launcher ends in: the Python on the way there, 8 µs with
tensor descriptors, looks at nothing that changes. Where that end is not as it is known here, as in
another Triton, launches go through Triton's launcher, and one line is logged.
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
# Combinations remembered: more than a program's shapes, few enough to forget all at once.
_MOST_REMEMBERED = 2048

Grid = tuple[int, int, int]
_Straight = Callable[[Grid, tuple[Any, ...]], bool]


class DescriptorTemplate(NamedTuple):
    """A tensor descriptor without its memory. dims: where calls bring other sizes, the tensor's
    dimensions in the order of the descriptor's.
    """

    descriptor: TensorDescriptor
    dims: tuple[int, ...] | None = None

    def of(self, base: Tensor) -> TensorDescriptor:
        """The descriptor of this memory, whose layout was checked when the template was made."""
        descriptor = object.__new__(TensorDescriptor)
        descriptor.__dict__.update(self.descriptor.__dict__)
        descriptor.base = base
        if self.dims is not None:
            descriptor.shape = [base.shape[d] for d in self.dims]
        return descriptor


def descriptor_template(
    x: Tensor,
    shape: list[int],
    strides: list[int],
    block: list[int],
    dims: tuple[int, ...] | None = None,
) -> DescriptorTemplate:
    """Of tensors like x."""
    descriptor = TensorDescriptor(x, shape, strides, block)
    descriptor.base = None  # what is remembered must not keep memory alive
    return DescriptorTemplate(descriptor, dims)


class BoundLaunch:
    """A kernel with every argument that follows the leading ones, on one device.

    The kernel's parameters are: what changes from call to call (tensors, None, and numbers that are
    not specialised), then `scalars`, then the names in `constants`, in order. Which of the leading
    ones are None must not change. At the positions in `descriptors` are tensors, which the
    kernel gets as descriptors made from these templates; without a template it gets None.
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
        self._straight: _Straight | None = None

    def __call__(self, grid: Grid, *leading: Any) -> None:
        """Pointers not aligned to 16 bytes are another specialisation, which Triton looks up."""
        if self._straight is None or not self._straight(grid, leading):
            self._launch(grid, leading)

    def over(self, programs: int) -> Callable[..., None]:
        """The launch with that many programs whatever it is called with."""
        return functools.partial(self, (programs, 1, 1))

    def _launch(self, grid: Grid, leading: tuple[Any, ...]) -> None:
        arguments = _arguments(leading, self.descriptors)
        if self.descriptors:
            ensure_context()
        bindable = aligned(*leading) and not _watched()
        if bindable and self._compiled is not None:
            self._compiled[grid](*arguments, *self._tail)
            return
        with loading_allowed():
            compiled = self.kernel[grid](
                *arguments, *self.scalars, **self.constants, **self.options
            )
        # The interpreter and compile-only runs have nothing to run again.
        if bindable and getattr(compiled, "function", None) is not None:
            self._straight = _straight(compiled, grid, leading, self.descriptors, self._tail)
            self._compiled = compiled


def _arguments(
    leading: tuple[Any, ...], descriptors: Mapping[int, DescriptorTemplate | None]
) -> list[Any]:
    arguments = list(leading)
    for n, template in descriptors.items():
        arguments[n] = None if template is None else template.of(leading[n])
    return arguments


def aligned(*arguments: Any) -> bool:
    """Whether every tensor among them starts at a multiple of 16 bytes."""
    addresses = 0
    for x in arguments:
        if isinstance(x, Tensor):
            addresses |= x.data_ptr()
    return addresses & 15 == 0


def _watched() -> bool:
    """Whether somebody wants to know what is launched, such as a profiler, which may also have
    kernels compiled in another way: then every launch is Triton's business.
    """
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


# -- past Triton's launcher -----------------------------------------------------------------------


def _straight(
    compiled: Any,
    grid: Grid,
    leading: tuple[Any, ...],
    descriptors: Mapping[int, DescriptorTemplate | None],
    tail: tuple[Any, ...],
) -> _Straight | None:
    """A function that launches what was compiled for `leading` with others of their kinds, or
    returns False if Triton has to. None where only Triton can: on AMD, for kernels with scratch
    memory, and where launchers are not what is known here.
    """
    try:
        if driver.active.get_current_target().backend != "cuda":
            return None
        launcher = compiled.run
        if launcher.global_scratch_size > 0 or launcher.profile_scratch_size > 0:
            return None
        run = _past(launcher, compiled, leading, descriptors, tail)
        ours, theirs = _Recorder(), _Recorder()
        run(ours, grid, leading)
        _through(launcher, compiled, theirs, grid, leading, descriptors, tail)
        if ours.seen is None or ours.seen != theirs.seen:
            raise ValueError("Triton's launcher passes other arguments on")
        return functools.partial(run, _innermost(launcher, any(descriptors.values())))
    except Exception:  # whatever is different: Triton's own launcher goes with it
        _log.debug("cannot launch past Triton's launcher", exc_info=True)
        _remark()
        return None


@functools.cache
def _remark() -> None:
    _log.warning(
        "Triton's launcher is not the one known here: kernels are launched through it, which takes "
        "some 6 microseconds longer"
    )


class _Recorder:
    """In the place of the innermost launcher: what it would be called with."""

    seen: tuple[Any, ...] | None = None

    def __call__(self, *args: Any) -> None:
        self.seen = tuple(self._known(x) for x in args)

    @staticmethod
    def _known(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.data_ptr()
        return type(x) if type(x).__name__ == "PyCUtensorMap" else x


def _through(
    launcher: Any,
    compiled: Any,
    innermost: Callable[..., None],
    grid: Grid,
    leading: tuple[Any, ...],
    descriptors: Mapping[int, DescriptorTemplate | None],
    tail: tuple[Any, ...],
) -> None:
    """Triton's own way to the innermost launcher."""
    metadata = getattr(compiled.metadata, "tensordesc_meta", None)
    probe = copy.copy(launcher)
    probe.launch = _nvidia().wrap_handle_tensordesc(innermost, compiled.src.signature, metadata)
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    probe(
        *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *_arguments(leading, descriptors), *tail,
    )  # fmt: skip


def _innermost(launcher: Any, wrapped: bool) -> Callable[..., None]:
    """wrapped: in a function that makes descriptors."""
    launch: Any = launcher.launch
    if not wrapped:
        return launch
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    return cells["launcher"].cell_contents


def _nvidia() -> Any:
    return sys.modules["triton.backends.nvidia.driver"]


def _past(
    launcher: Any,
    compiled: Any,
    leading: tuple[Any, ...],
    descriptors: Mapping[int, DescriptorTemplate | None],
    tail: tuple[Any, ...],
) -> Callable[[Callable[..., None], Grid, tuple[Any, ...]], bool]:
    """The short way to the innermost launcher."""
    pointers = [n for n, x in enumerate(leading) if isinstance(x, Tensor) and n not in descriptors]
    absent = [n for n, template in descriptors.items() if template is None]
    # One becomes several arguments: from behind, so that the others keep their positions.
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
                return False  # as _watched
        args = list(leading)
        addresses = 0
        for n in pointers:
            args[n] = address = leading[n].data_ptr()
            addresses |= address
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
    """base -> a descriptor's arguments."""
    encode = driver.active.utils.fill_tma_descriptor
    shape, strides = list(template.descriptor.shape), list(template.descriptor.strides)
    swizzle, elem_size, block = layout["swizzle"], layout["elem_size"], layout["block_size"]
    elem_type = _nvidia().TMA_DTYPE_DEVICE_TO_HOST[layout["elem_type"]]
    dims = template.dims
    last: tuple[int, list[int], list[Any]] = (-1, [], [])

    def arguments(base: Tensor) -> list[Any]:
        nonlocal last
        address, sizes = base.data_ptr(), shape if dims is None else [base.shape[d] for d in dims]
        known_address, known_sizes, result = last
        if known_address != address or known_sizes != sizes:
            ensure_context()
            found = encode(address, swizzle, elem_size, elem_type, block, sizes, strides, 0)
            result = [found, *sizes, *strides]
            last = (address, sizes, result)
        return result

    return arguments


# -- what is remembered ---------------------------------------------------------------------------


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


def rows_signature(x: Tensor | None) -> Any:
    """The same of [rows, N] without the rows, of which every packed batch has another number."""
    return None if x is None else (x.dtype, x.shape[1], x.stride())


@functools.cache
def too_old(arch: str) -> str | None:
    """Why kernels cannot be compiled for it."""
    if arch.startswith("sm_") and int(arch[3:]) < 80:
        return f"needs compute capability 8.0 or newer, got {arch}"
    return None
