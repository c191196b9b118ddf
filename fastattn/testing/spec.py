"""An op's specification: samples each with a reason, errors it must raise, workloads worth timing,
an independent form.

One `OpSpec` per op, in `fastattn/ops/<op>/spec.py`, feeds the tests, the benchmarks and `fastattn
check`. Inputs are a dictionary of the public function's arguments, the same values on every device
(made on the CPU from the sample's name).
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
HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
_SPEC_MODULES = (
    "attention.spec",
    "attention.spec_varlen",
    "layer_norm.spec",
    "ffn.spec",
    "linear.spec",
)


@dataclass(frozen=True)
class Sample:
    """One case of an op.

    make: (generator, dtype) -> inputs on the CPU. gradients: names of the inputs that get one.
    tags: "interpreter" = small enough for Triton's interpreter; "slow" = left out of quick runs.
    """

    name: str
    reason: str
    make: Callable[[torch.Generator, torch.dtype], Inputs]
    gradients: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = HALF_AND_SINGLE
    tags: frozenset[str] = frozenset()

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
    """To a device with the strides kept, expanded dimensions included."""
    if torch.device(device).type == "cpu":
        return x
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


@dataclass(frozen=True)
class Entry:
    """A part of a sample's batch that can be computed alone.

    where: results and gradients that belong to it alone, and where they lie in the whole's.
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
    """A shape people care about. flops and bytes count the forward; backward_* the backward alone.

    make: (device, dtype, generator) -> inputs. features: what the row is about, such as causal or
    padded.
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
    """Everything that is known about an op.

    function: the public function; called with a sample's inputs and `backend`. Returns a tensor or
    a tuple.
    results: names of what it returns.
    torch_form: the same from torch's own operators, independent of the reference; None where torch
    cannot say it.
    magnitudes: (inputs in fp64, gradients of the results in fp64) -> result or "d" + input -> its
    formula on absolute values.
    slice_dims: how many leading dimensions of a result count slices of the error budget.
    widen: inputs in fp64 with the same meaning.
    entries: parts of the batch; None for an op without a batch.
    entries_in_bits: whether they have the same bits alone and together.
    dead: (inputs) -> input or output -> positions that nothing may read (of an output: of its
    gradient), broadcastable to it; None for an op without padding.
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
    dead: Callable[[Inputs], dict[str, Tensor]] | None = None

    @property
    def backends(self) -> tuple[str, ...]:
        from fastattn.ops._op import OPS

        return tuple(OPS[f"{self.name}_fwd"].backends)


def widen(inputs: Inputs) -> Inputs:
    """Floating tensors in fp64, gradients wanted as before."""
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
    """Pieces of the first dimension of an op that sees rows. The bits of dropout count rows, so
    there the pieces start at the first.
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
