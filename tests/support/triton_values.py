"""Values of Triton's kernels: on a GPU natively, else in Triton's interpreter, which is another
process (tests/triton/test_in_the_interpreter.py).
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from op_examples import as_tuple, varied_inputs
from torch import Tensor

from fastattn.ops import _env
from fastattn.ops._op import OPS
from fastattn.testing.oracle import Oracle, output_gradients
from fastattn.testing.poison import poisoned_results
from fastattn.testing.properties import fill_positions
from fastattn.testing.spec import Inputs, OpSpec, Sample

DEVICE = _env.default_device()
NATIVE = DEVICE.type == "cuda"
runs = pytest.mark.skipif(
    not NATIVE and not _env.interpreting(),
    reason="runs on a GPU, or in the interpreter's own process",
)
# On a GPU every sample runs in tests/ops/test_ops.py.
interpreted = pytest.mark.skipif(not _env.interpreting(), reason="runs in the interpreter")
NAN = float("nan")


def check(
    spec: OpSpec, sample: Sample, dtype: torch.dtype,
    change: Callable[[Inputs], None] = lambda inputs: None, through: tuple[str, ...] = (),
    outputs: bool = True,
) -> None:  # fmt: skip
    """Compares results and gradients with the error budget. What no element may depend on holds
    NaN, also in the output gradients. change: of the strides of the inputs. through: the results
    that have a gradient, by default all. outputs: whether to compare these, too.
    """
    through = through or spec.results

    def douts(*args: Any) -> tuple[Tensor, ...]:
        named = zip(spec.results, output_gradients(*args), strict=True)
        return tuple(x if name in through else torch.zeros_like(x) for name, x in named)

    oracle = Oracle(spec, sample, dtype, douts)
    inputs = sample.inputs(DEVICE, dtype)
    change(inputs)
    with poisoned_results():
        values = as_tuple(spec.function(**inputs, backend="triton"))
        results = dict(zip(spec.results, values, strict=True))
        leaves = [n for n in varied_inputs(inputs) if n in sample.gradients]
        if leaves and "triton" not in sample.wrong_gradients:
            given = dict(zip(spec.results, douts(spec, sample, values), strict=True))
            for name, dead in spec.dead(inputs).items():
                if name in given:
                    fill_positions(given[name], dead, NAN)
            gradients = torch.autograd.grad(
                [results[name] for name in through], [inputs[n] for n in leaves],
                [given[name] for name in through], materialize_grads=True,
            )  # fmt: skip
            results |= {f"d{n}": x for n, x in zip(leaves, gradients, strict=True)}
    for name, value in results.items():
        if name not in spec.results or outputs:
            verdict = oracle.judge(name, value.detach().cpu())
            assert verdict.ok, f"{name}: {verdict.message}, allowed {verdict.allowed:.3g}"


def apart(x: Tensor) -> Tensor:
    """The same values, with the first dimension further apart."""
    wider = torch.stack([x, x], 1).flatten(0, 1)[::2]
    assert wider.stride() != x.stride()
    return wider


@contextlib.contextmanager
def launched_by(op: str, launch: Callable[..., None]) -> Iterator[None]:
    """Inside, `launch(call, *results)` takes the place of the backend's launcher."""

    def run(args: Any) -> tuple[Tensor, ...]:
        results = OPS[op].allocate(args)
        launch(*OPS[op].backend_args(args), *results)
        return results

    with mock.patch.dict(OPS[op]._launchers, {"triton": run}):
        yield


def samples_of(spec: OpSpec, quick: tuple[str, ...], leave_out: tuple[str, ...] = ()) -> list[Any]:
    """Parameters (sample, dtype), each in one dtype; all but the quick ones are slow."""
    cases = []
    for sample in spec.samples:
        if sample.name not in leave_out and "triton" not in sample.wrong_results:
            dtype = torch.bfloat16 if torch.bfloat16 in sample.dtypes else sample.dtypes[0]
            marks = () if sample.name in quick else pytest.mark.slow
            cases.append(pytest.param(sample, dtype, marks=marks, id=sample.name))
    return cases


def made(make: Callable[..., Inputs], gradients: str, name: str, **options: Any) -> Sample:
    return Sample(name, "made here", partial(make, **options), tuple(gradients.split()))
