"""Example inputs of every op, the results of samples, and the comparison of bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn.ops import _env
from fastattn.testing import all_specs
from fastattn.testing.oracle import output_gradients
from fastattn.testing.spec import Inputs, OpSpec, Sample

SPECS = all_specs()
SAMPLES = {(spec.name, sample.name): sample for spec in SPECS.values() for sample in spec.samples}
DEVICE = _env.default_device()

each_op = pytest.mark.parametrize("op", list(SPECS))


def backends_of(op: str) -> list[str]:
    """The op's backends for the device under test."""
    return [b for b in SPECS[op].backends if _env.why_not_on(b, DEVICE) is None]


BACKENDS = [
    pytest.param(spec, backend, id=f"{op}-{backend}")
    for op, spec in SPECS.items()
    for backend in backends_of(op)
]
each_backend = pytest.mark.parametrize("spec, backend", BACKENDS)


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def varied_inputs(inputs: Inputs) -> list[str]:
    return [name for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad]


def example_inputs(
    op: str, length: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Inputs:
    """Inputs that use most features of an op; `length` is the number of rows."""
    generator = torch.Generator().manual_seed(1000 * seed + length)

    def data(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    dropout: Inputs = {"dropout_p": 0.2, "dropout_seed": torch.tensor([11]), "dropout_stream": 1}
    if op in ("attention", "attention_with_weights"):
        inputs: Inputs = {
            "q": data(2, 4, length, 8),
            "k": data(2, 2, length + 3, 8),
            "v": data(2, 2, length + 3, 16),
            "mask": data(4, 1, length + 3),
            "key_lengths": torch.tensor([length, 3]),
        }
        dropout["dropout_seed"] = torch.tensor([11, 1, 3, 32, 16])
        returned = {"return_lse": True} if op == "attention" else {"average": True}
        return inputs | {"causal": "bottom_right"} | returned | dropout
    if op == "attention_varlen":  # heads first
        inputs = {
            name: data(heads, length + 3, 8) for name, heads in zip("qkv", (4, 2, 2), strict=True)
        }
        inputs |= {
            "cu_seqlens_q": torch.tensor([0, length, length + 1], dtype=torch.int32),
            "cu_seqlens_k": torch.tensor([0, 3, length + 3], dtype=torch.int32),
            "max_seqlen_q": length,
            "max_seqlen_k": length + 1,
        }
        return inputs | {"causal": "bottom_right"} | dropout
    if op == "ffn":
        inputs = {"x": data(length, 8), "w1": data(24, 8), "b1": data(24)}
        inputs |= {"w2": data(6, 12), "b2": data(6), "residual": data(length, 6)}
        return inputs | {"activation": "swiglu", "output_dropout_p": 0.1} | dropout
    if op == "linear":
        return {"x": data(2, length, 8), "weight": data(12, 8), "bias": data(12)}
    inputs = {"x": data(2, length, 8), "weight": data(8)}
    if op != "rms_norm":
        inputs["bias"] = data(8)
    if op == "add_layer_norm":
        inputs |= {"residual": data(2, length, 8), "x_bias": data(8), "return_sum": True} | dropout
    return inputs


def weighted_loss(results: Any) -> Tensor:
    """A loss in which every element has its own weight; -inf of `lse` has weight 0."""
    return sum(torch.where(x.isinf(), 0, x).double().sin().sum() for x in as_tuple(results))


def results_of(spec: OpSpec, sample: Sample, inputs: Inputs, outputs: Any) -> dict[str, Tensor]:
    """A sample's outputs, and the gradients of its inputs for fixed output gradients, by name."""
    outputs, names = as_tuple(outputs), varied_inputs(inputs)
    if not names:
        return dict(zip(spec.results, outputs, strict=True))
    gradients = torch.autograd.grad(
        outputs, [inputs[n] for n in names], output_gradients(spec, sample, outputs)
    )
    named = dict(zip(spec.results, outputs, strict=True))
    return named | {"d" + n: g for n, g in zip(names, gradients, strict=True)}


def gradients_of(function: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor]:
    names = varied_inputs(inputs)
    gradients = torch.autograd.grad(weighted_loss(function(**inputs)), [inputs[n] for n in names])
    return dict(zip(names, gradients, strict=True))


def assert_same_bits(actual: Any, expected: Any) -> None:
    """The same bits and dtypes."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
