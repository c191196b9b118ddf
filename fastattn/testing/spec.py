"""An op's specification: samples with their reasons, errors it must raise, workloads to time, and
the op written in PyTorch operators.

Tests, benchmarks and `fastattn check` use one `OpSpec` for each op, in `fastattn/ops/<op>/spec.py`.
Inputs are a dictionary of the public function's arguments. They have the same values on every
device: they are made on the CPU with a seed from the sample's name.
"""

import importlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
Index = tuple[slice, ...]
DRAWN = "drawn_"  # first part of the names of samples that are drawn, before their number
HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
_SPEC_MODULES = (
    "attention.spec",
    "attention.spec_varlen",
    "attention.spec_weights",
    "layer_norm.spec",
    "ffn.spec",
    "linear.spec",
)


@dataclass(frozen=True)
class Sample:
    """One case of an op.

    make: (generator, dtype) -> inputs on the CPU. gradients: the inputs that require one.
    tags: "interpreter": small enough for Triton's interpreter; "slow": left out of quick runs.
    wrong_gradients, wrong_results: the backends whose gradients, or all results,
    docs/pages/backends.md states to be wrong here; they are not checked.
    """

    name: str
    reason: str
    make: Callable[[torch.Generator, torch.dtype], Inputs]
    gradients: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = HALF_AND_SINGLE
    tags: frozenset[str] = frozenset()
    wrong_gradients: frozenset[str] = frozenset()
    wrong_results: frozenset[str] = frozenset()

    def inputs(self, device: torch.device | str, dtype: torch.dtype) -> Inputs:
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        inputs = {}
        for name, value in self.make(generator, dtype).items():
            if isinstance(value, Tensor):
                value = _move(value, device)
                value.requires_grad_(value.is_floating_point() and name in self.gradients)
            inputs[name] = value
        return inputs


def _move(x: Tensor, device: torch.device | str) -> Tensor:
    """x on a device with the same strides; expanded dimensions stay expanded."""
    if torch.device(device).type == "cpu":
        return x
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


@dataclass(frozen=True)
class Entry:
    """A part of a sample's batch that can be computed alone.

    where: the results and gradients with this batch -> the part's slice of each.
    """

    name: str
    inputs: Inputs
    where: Mapping[str, Index]


@dataclass(frozen=True)
class ErrorSample:
    """A call that must fail: the error's type and a pattern that names the argument."""

    name: str
    make: Callable[[], Inputs]
    error: type[Exception]
    message: str


@dataclass(frozen=True)
class Workload:
    """A call to time. flops and bytes are the forward's, backward_* those of the backward alone.

    make: (device, dtype, generator) -> inputs. features: properties such as causal or padded.
    """

    name: str
    make: Callable[[torch.device, torch.dtype, torch.Generator], Inputs]
    gradients: tuple[str, ...]
    flops: float
    bytes: float
    backward_flops: float
    backward_bytes: float
    features: tuple[str, ...] = ()
    device_types: tuple[str, ...] = ("cuda", "cpu")


@dataclass(frozen=True)
class OpSpec:
    """The specification of an op.

    function: the public function; called with a sample's inputs and `backend`. Returns a tensor or
    a tuple.
    results: the names of its results.
    torch_form: (inputs) -> the results by PyTorch's operators, independent of the reference; None
    if PyTorch cannot compute them.
    magnitudes: (inputs in fp64, output gradients in fp64) -> for each result, and "d" + input, its
    formula applied to absolute values.
    slice_dims: the number of a result's leading dimensions that index slices of the error budget.
    widen: (inputs) -> the same inputs in fp64.
    entries: (inputs) -> parts of the batch; None for an op without a batch.
    entries_in_bits: whether a part computed alone has the same bits as in the whole batch.
    prepare: (inputs) -> the arguments that `function` passes to the public function, the same
    dictionary if nothing differs; benchmarks do not time it.
    dead: (inputs) -> for each input or output, the positions whose value (or whose output gradient)
    must not affect anything, broadcastable to it; {} for an op without padding.
    drawn: (number) -> a random sample, always the same for a number; None for an op without them.
    arguments: (inputs) -> arguments of the public function, each restriction in one spelling, for
    implementations from elsewhere. outputs: what such a function returns -> the results.
    """

    name: str
    function: Callable[..., Any]
    results: tuple[str, ...]
    samples: tuple[Sample, ...]
    errors: tuple[ErrorSample, ...]
    workloads: tuple[Workload, ...]
    torch_form: Callable[[Inputs], tuple[Tensor, ...] | None]
    magnitudes: Callable[[Inputs, tuple[Tensor, ...]], dict[str, Tensor]]
    slice_dims: Callable[[str, Tensor], int]
    widen: Callable[[Inputs], Inputs]
    entries: Callable[[Inputs], tuple[Entry, ...]] | None = None
    entries_in_bits: bool = True
    dead: Callable[[Inputs], dict[str, Tensor]] = lambda inputs: {}
    prepare: Callable[[Inputs], Inputs] = lambda inputs: inputs
    drawn: Callable[[int], Sample] | None = None
    arguments: Callable[[Inputs], Inputs] = lambda inputs: inputs
    outputs: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda outputs: outputs

    def sample(self, name: str) -> Sample:
        if self.drawn is not None and name.startswith(DRAWN):
            return self.drawn(int(name.removeprefix(DRAWN)))
        return next(s for s in self.samples if s.name == name)

    @property
    def backends(self) -> tuple[str, ...]:
        from fastattn.ops._select import op_of

        return tuple(op_of(self.name).backends)


def widen(inputs: Inputs) -> Inputs:
    """The inputs with floating tensors in fp64, and the same requires_grad."""
    wide = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().double().requires_grad_(value.requires_grad)
        wide[name] = value
    return wide


def all_specs() -> dict[str, OpSpec]:
    """Every op's specification by the op's name."""
    specs = {}
    for module in _SPEC_MODULES:
        for spec in importlib.import_module(f"fastattn.ops.{module}").SPECS:
            specs[spec.name] = spec
    return specs


def entries_by_rows(
    inputs: Inputs, names: tuple[str, ...], results: tuple[str, ...]
) -> tuple[Entry, ...]:
    """Slices of the first dimension for an op on rows. With dropout they start at the first row,
    because the bits depend on the index of the row.
    """
    x = inputs["x"]
    if x.dim() < 2 or x.shape[0] < 2:
        return ()
    n, half = x.shape[0], x.shape[0] // 2
    dropout = inputs.get("dropout_p") or inputs.get("output_dropout_p")
    found = []
    for start, stop in ((0, 1), (0, half) if dropout else (half, n)):
        where = (slice(start, stop),)
        alone = {name: inputs[name][where] for name in names if inputs.get(name) is not None}
        found.append(
            Entry(f"rows {start} to {stop}", inputs | alone, dict.fromkeys(results, where))
        )
    return tuple(found)
