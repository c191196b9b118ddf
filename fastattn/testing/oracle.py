"""Runs ops on samples and compares results with the fp64 reference, within the error budget of
compare.py.
"""

import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.testing.compare import Comparison, compare
from fastattn.testing.properties import Results
from fastattn.testing.spec import Index, Inputs, OpSpec, Sample

OutputGradients = Callable[[OpSpec, Sample, tuple[Tensor, ...]], tuple[Tensor, ...]]


def output_gradients(
    spec: OpSpec, sample: Sample, outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Random output gradients, the same for every dtype and device; 0 where an output is not
    finite.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.name} {sample.name}".encode()))
    gradients = []
    for output in outputs:
        gradient = torch.randn(output.shape, generator=generator).to(torch.bfloat16)
        gradient = gradient.to(output.device).to(output.dtype)
        gradients.append(torch.where(output.isfinite(), gradient, 0))
    return tuple(gradients)


def run_op(
    spec: OpSpec,
    sample: Sample,
    inputs: Inputs,
    backend: str | None,
    douts: OutputGradients | None = None,
) -> Results:
    """The results of a backend. douts: as in `Oracle`."""
    return with_gradients(spec, sample, inputs, spec.function(**inputs, backend=backend), douts)


def with_gradients(
    spec: OpSpec, sample: Sample, inputs: Inputs, results: Any, douts: OutputGradients | None = None
) -> Results:
    outputs = results if isinstance(results, tuple) else (results,)
    named = dict(zip(spec.results, outputs, strict=True))
    leaves = [
        n for n in sample.gradients if isinstance(inputs.get(n), Tensor) and inputs[n].requires_grad
    ]
    if not leaves or not torch.is_grad_enabled():
        return named
    given = (douts or output_gradients)(spec, sample, outputs)
    differentiable = [i for i, output in enumerate(outputs) if output.requires_grad]
    gradients = torch.autograd.grad(
        [outputs[i] for i in differentiable],
        [inputs[n] for n in leaves],
        [given[i] for i in differentiable],
        allow_unused=True,
    )
    for name, gradient in zip(leaves, gradients, strict=True):
        named["d" + name] = torch.zeros_like(inputs[name]) if gradient is None else gradient
    return {name: value.detach() for name, value in named.items()}


class Oracle:
    """The references of one sample in fp64 and in its dtype, computed once, on the CPU.

    douts: (spec, sample, outputs) -> their gradients; default `output_gradients`.
    """

    def __init__(
        self, spec: OpSpec, sample: Sample, dtype: torch.dtype, douts: OutputGradients | None = None
    ):
        self.spec, self.sample, self.dtype = spec, sample, dtype
        self._output_gradients = douts or output_gradients
        inputs = sample.inputs("cpu", dtype)
        wide = spec.widen(inputs)
        self.exact = run_op(spec, sample, wide, "reference", douts)
        self.same = run_op(spec, sample, inputs, "reference", douts)
        outputs = tuple(self.exact[name] for name in spec.results)
        self.douts = self._output_gradients(spec, sample, outputs)
        detached = {k: v.detach() if isinstance(v, Tensor) else v for k, v in wide.items()}
        self.magnitudes = spec.magnitudes(detached, self.douts)

    def judge(
        self, name: str, value: Tensor, where: Index = (), *, rounded: bool = False
    ) -> Comparison:
        """Compares a result with the references, or a slice of it with their slice `where`.
        rounded: allows eps(dtype) mag / 2 more, for kernels that round scores, weights or their
        gradients to the dtype.
        """
        exact = self.exact[name]
        mag = self.magnitudes[name].expand_as(exact)[where]
        dims = self.spec.slice_dims(name, exact)
        rounding = torch.finfo(self.dtype).eps / 2 if rounded else 0.0
        return compare(value, exact[where], self.same[name][where], mag, dims, rounding)

    def torch_errors(self) -> dict[str, float]:
        """The errors of PyTorch's operators on this sample; {} if they cannot compute it."""
        inputs = self.sample.inputs("cpu", self.dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outputs = self.spec.torch_form(inputs)
                if outputs is None:
                    return {}
                douts = self._output_gradients
                results = with_gradients(self.spec, self.sample, inputs, outputs, douts)
        except (RuntimeError, NotImplementedError, IndexError):
            return {}
        return {name: self.judge(name, value).error for name, value in results.items()}
