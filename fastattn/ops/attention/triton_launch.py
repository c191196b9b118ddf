"""Launching a Triton kernel again without binding its arguments again.

Triton looks at every argument of every launch to choose a specialisation: some 50 µs for the
attention kernels. All that matters here but the pointers follows from shapes, strides and options,
so a launch bound once per such combination only has to check that the pointers are aligned. On
NVIDIA GPUs it then calls what Triton's launcher ends in: the Python on the way there, 8 µs with
tensor descriptors, looks at nothing that changes.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from fastattn.ops import _env

# Combinations remembered: more than a program's shapes, few enough to forget all at once.
_MOST_REMEMBERED = 2048
_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
# Offsets inside a tile are 32-bit: 256 rows of this stride stay below 2^31.
_LARGEST_ROW_STRIDE = 1 << 22
# How Triton's compiled launchers take their arguments, for which `_straight` is written.
_CONVENTION = "iiiKKppOOOOOO"


class BoundLaunch:
    """A kernel with its grid and every argument that follows the leading ones.

    The kernel's parameters are: what changes from call to call (tensors, None, and integers that
    are not specialised), then `scalars`, then the names in `constants`, in order. The leading
    arguments at the positions in `described` are tensors, of which the kernel gets descriptors like
    these templates; without a template it gets None.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        scalars: tuple[Any, ...],
        constants: dict[str, Any],
        described: Mapping[int, TensorDescriptor | None] | None = None,
        **options: Any,
    ):
        self.kernel, self.grid, self.described = kernel, (*grid, 1, 1)[:3], described or {}
        self.scalars, self.constants, self.options = scalars, constants, options
        self._tail = (*scalars, *constants.values())
        self._straight: Callable[..., bool] | None = None
        self._runner: Callable[..., None] | None = None

    def __call__(self, *leading: Any) -> None:
        """Pointers not aligned to 16 bytes are another specialisation, which Triton looks up."""
        if self._straight is not None and self._straight(leading):
            return
        aligned = _aligned(leading)
        arguments = list(leading)
        for n, template in self.described.items():
            arguments[n] = None if template is None else _with_base(template, leading[n])
        if aligned and self._runner is not None:
            self._runner(*arguments, *self._tail)
            return
        compiled = self.kernel[self.grid](
            *arguments, *self.scalars, **self.constants, **self.options
        )
        # The interpreter and compile-only runs have nothing to run again.
        if aligned and getattr(compiled, "function", None) is not None:
            self._straight = _straight(compiled, self.grid, arguments, self.described, self._tail)
            self._runner = compiled[self.grid]


def _aligned(leading: tuple[Any, ...]) -> bool:
    addresses = 0
    for x in leading:
        if isinstance(x, Tensor):
            addresses |= x.data_ptr()
    return addresses & 15 == 0


def _straight(
    compiled: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    described: Mapping[int, TensorDescriptor | None],
    tail: tuple[Any, ...],
) -> Callable[[tuple[Any, ...]], bool] | None:
    """A function that launches what was compiled for `arguments` with others of their kinds, or
    returns False if that takes Triton's own road; None where launchers are not what is known here.
    """
    nvidia = sys.modules.get("triton.backends.nvidia.driver")
    launcher = compiled.run
    if (
        getattr(nvidia, "_BASE_ARGS_FORMAT", None) != _CONVENTION
        or type(launcher) is not getattr(nvidia, "CudaLauncher", None)
        or launcher.global_scratch_size > 0
        or launcher.profile_scratch_size > 0
    ):
        return None
    launch = launcher.launch
    # How a leading argument is passed: as it is or its address, by an encoder, or not at all.
    ways: list[Callable[[Tensor], list[Any]] | bool] = [True] * len(arguments)
    for n in described:
        ways[n] = False
    templates = {n: x for n, x in enumerate(arguments) if isinstance(x, TensorDescriptor)}
    if templates:
        found = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
        metadata = getattr(compiled.metadata, "tensordesc_meta", None)
        if "launcher" not in found or not metadata or len(metadata) != len(templates):
            return None
        launch = found["launcher"].cell_contents
        for (n, template), layout in zip(templates.items(), metadata, strict=True):
            ways[n] = _encoder(nvidia, template, layout)
    runtime = knobs.runtime
    streams, device = driver.active.get_current_stream, driver.active.get_current_device()
    first = (
        compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,
        compiled.packed_metadata, None, None, None,
    )  # fmt: skip
    pattern = tuple(ways)

    def run(leading: tuple[Any, ...]) -> bool:
        for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
            if hook is not None and getattr(hook, "calls", True):
                return False  # a profiler wants to know what is launched
        addresses = 0
        args: list[Any] = []
        for x, way in zip(leading, pattern, strict=True):
            if way is True:
                if x is None or x.__class__ is int:
                    args.append(x)
                else:
                    address = x.data_ptr()
                    addresses |= address
                    args.append(address)
            elif way is False:
                args.append(None)
            else:
                args += way(x)
        if addresses & 15:
            return False
        launch(*grid, streams(device), *first, *args, *tail)
        return True

    return run


def _encoder(nvidia: Any, template: TensorDescriptor, layout: Any) -> Callable[[Tensor], list[Any]]:
    """base -> a descriptor's arguments. Nothing in them but the address changes."""
    encode = driver.active.utils.fill_tma_descriptor
    shape, strides = list(template.shape), list(template.strides)
    options = (
        layout["swizzle"], layout["elem_size"],
        nvidia.TMA_DTYPE_DEVICE_TO_HOST[layout["elem_type"]], layout["block_size"], shape, strides,
        0,
    )  # fmt: skip
    last: tuple[int, list[Any]] = (-1, [])

    def arguments(base: Tensor) -> list[Any]:
        nonlocal last
        address = base.data_ptr()
        known, result = last
        if known != address:
            result = [encode(address, *options), *shape, *strides]
            last = (address, result)
        return result

    return arguments


def unsupported(
    mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **others: Tensor | None
) -> str | None:
    """What none of the kernels can do. others: further tensors whose rows they read, by name."""
    if q.dtype not in _DTYPES:
        return f"has kernels for float16, bfloat16 and float32, got {q.dtype}"
    D, E = q.shape[3], v.shape[3]
    if not (1 <= D <= 256 and 1 <= E <= 256):
        return f"handles head dims up to 256, got {D} and {E}"
    for name, x in (("q", q), ("k", k), ("v", v), *others.items()):
        if x is None:
            continue
        _, _, step, last = x.stride()
        if last != 1 and x.shape[3] > 1:
            return f"needs a contiguous last dimension, got {name} with strides {x.stride()}"
        if step > _LARGEST_ROW_STRIDE and x.shape[2] > 1:
            return f"handles row strides up to {_LARGEST_ROW_STRIDE}, got {step} in {name}"
    if mask is not None and max(mask.stride()[2:]) > _LARGEST_ROW_STRIDE:
        return f"handles mask strides up to {_LARGEST_ROW_STRIDE}, got {mask.stride()}"
    return _too_old(_env.architecture(q.device.type, q.device.index or 0))


@functools.cache
def _too_old(arch: str) -> str | None:
    if arch.startswith("sm_") and int(arch[3:]) < 80:
        return f"needs compute capability 8.0 or newer, got {arch}"
    return None


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


def _with_base(template: TensorDescriptor, base: Tensor) -> TensorDescriptor:
    """The same descriptor of other memory, whose layout was checked when the template was made."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(template.__dict__)
    descriptor.base = base
    return descriptor
