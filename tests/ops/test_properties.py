"""Random inputs of norms and ffn, and properties that their samples cannot show.

The reference is compared with PyTorch's operators in fp64, backends with fp64 by the error budget
and by the properties of `fastattn check`. (Attention draws its own samples: see test_ops.)
"""

from functools import partial
from typing import Any

import pytest
import torch
from cpu_library import NO_LIBRARY, needs_library
from op_examples import results_of
from torch import Tensor

import fastattn
from fastattn.ops.attention import spec as attention_spec
from fastattn.ops.attention.spec_inputs import dead_positions
from fastattn.ops.ffn import spec as ffn_spec
from fastattn.ops.ffn.op import ACTIVATIONS
from fastattn.ops.layer_norm import spec as norm_spec
from fastattn.testing import Sample, all_specs
from fastattn.testing.check import check_sample
from fastattn.testing.oracle import Oracle
from fastattn.testing.properties import fill_positions

pytest.importorskip("hypothesis", reason="part of the development extra only")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SPECS = all_specs()
CPU = torch.device("cpu")
Options = dict[str, Any]


def examples(number: int) -> settings:
    # No deadline, as the machine may be busy.
    return settings(
        max_examples=number, derandomize=True, deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip


def _sample(op: str, make: Any, options: Options) -> Sample:
    """A sample of an op's make_inputs with these options, which also determine its random seed."""
    return Sample(str(options), "", partial(make, **options), SPECS[op].samples[0].gradients)


def _assert_reference_is_torch(op: str, sample: Sample) -> None:
    spec = SPECS[op]
    inputs = sample.inputs(CPU, torch.float64)
    form = spec.torch_form(inputs)
    if form is None:
        return
    expected = results_of(spec, sample, inputs, form)
    actual = results_of(spec, sample, inputs, spec.function(**inputs, backend="reference"))
    for name, value in actual.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def _assert_passes(op: str, sample: Sample, dtype: torch.dtype, backend: str) -> None:
    rows = check_sample(Oracle(SPECS[op], sample, dtype), backend, CPU)
    bad = [row for row in rows if row.status != "ok"]
    assert not bad, bad


# -- attention -------------------------------------------------------------------------------------
HALVES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@pytest.mark.parametrize("name", ["both_lengths", "bias_dead", "all_restrictions"])
def test_second_derivatives_do_not_depend_on_padding(name: str) -> None:
    """NaN at dead positions, also of the output gradient, gives the same bits as finite values."""
    [sample] = [s for s in attention_spec.SAMPLES if s.name == name]
    found = []
    for value in (0.5, torch.nan):
        inputs = sample.inputs(CPU, torch.float64)
        dead = dead_positions(inputs)
        for key in inputs.keys() & dead.keys():
            fill_positions(inputs[key], dead[key], value)
        out, _ = fastattn.attention(**inputs, backend="reference")
        torch.manual_seed(0)
        dout = torch.where(dead["out"], value, torch.randn_like(out).cos()).requires_grad_()
        varied = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
        first = torch.autograd.grad(out, varied, dout, create_graph=True)
        second = torch.autograd.grad([x.sin().sum() for x in first], [*varied, dout])
        names = ["q", "k", "v", *(["mask"] if "mask" in inputs else []), "out"]
        for key, gradient in zip(names, second, strict=True):
            assert not gradient.masked_select(dead[key]).any()
        found.append([*first, *second])
    for finite, poisoned in zip(*found, strict=True):
        assert torch.equal(finite, poisoned)


# -- norms -----------------------------------------------------------------------------------------
@st.composite
def norm_options(draw: st.DrawFn, op: str) -> Options:
    leading = draw(st.lists(st.integers(0, 5), max_size=3))
    columns = st.integers(1, 70) | st.sampled_from([127, 128, 257, 1024])
    options: Options = {"op": op, "shape": (*leading, draw(columns))}
    layouts = ["contiguous", "rows", "misaligned", "repeated", *["transposed"] * bool(leading)]
    options["layout"] = draw(st.sampled_from(layouts))
    for name in ("weight", "bias", "wide_parameters"):
        options[name] = draw(st.booleans())
    options["offset"] = draw(st.sampled_from([0.0, 0.0, 100.0]))
    options["amplitude"] = draw(st.sampled_from([1.0, 1.0, 1e-3, 300.0]))
    options["eps"] = draw(st.sampled_from([1e-5, 1e-2]))
    if op == "add_layer_norm":
        options |= {"x_bias": draw(st.booleans()), "wide_residual": draw(st.booleans())}
        options["dropout_p"] = draw(st.sampled_from([0.0, 0.3, 1.0]))
    return options


NORMS = st.sampled_from(["layer_norm", "add_layer_norm", "rms_norm"]).flatmap(norm_options)


def _norm(options: Options) -> Sample:
    return _sample(options["op"], norm_spec.make_inputs, options)


@examples(100)
@given(NORMS)
def test_norms_equal_torch(options: Options) -> None:
    # The gradients of fp32 parameters are rounded, which is not comparable in fp64.
    options |= {"wide_parameters": False, "wide_residual": False}
    _assert_reference_is_torch(options["op"], _norm(options))


@needs_library
@examples(150)
@given(NORMS, HALVES)
def test_cpu_norms_within_the_budget(options: Options, dtype: torch.dtype) -> None:
    _assert_passes(options["op"], _norm(options), dtype, "cpu")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "rms_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_rows_are_independent(op: str, backend: str, value: float) -> None:
    """NaN in a row does not change the results and gradients of other rows."""
    if backend == "cpu" and NO_LIBRARY:
        pytest.skip(f"fastattn {NO_LIBRARY}")
    found = []
    for poisoned in (False, True):
        inputs = _norm({"op": op, "shape": (9, 65)}).inputs(CPU, torch.float32)
        if poisoned:
            with torch.no_grad():
                inputs["x"][4] = value
        outputs = SPECS[op].function(**inputs, backend=backend)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        (dx,) = torch.autograd.grad(outputs, [inputs["x"]], [torch.ones_like(y) for y in outputs])
        found.append((*outputs, dx))
    others = torch.arange(9) != 4
    for clean, beside in zip(*found, strict=True):
        assert torch.equal(clean[others], beside[others])
    assert not any(bool(x[4].isfinite().all()) for x in found[1])


# -- ffn -------------------------------------------------------------------------------------------
@st.composite
def ffn_options(draw: st.DrawFn) -> Options:
    sizes = st.integers(1, 20) | st.sampled_from([63, 65])
    options: Options = {"rows": tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))}
    options |= {"D": draw(sizes), "hidden": draw(sizes), "out": draw(sizes)}
    options["activation"] = draw(st.sampled_from(list(ACTIVATIONS)))
    options["bias"] = draw(st.booleans())
    options["residual"] = draw(st.sampled_from(["", "same"]))
    options["layout"] = draw(st.sampled_from(["contiguous", "rows", "weights"]))
    for name in ("dropout_p", "output_dropout_p"):
        options[name] = draw(st.sampled_from([0.0, 0.2]))
    return options


def _ffn(options: Options) -> Sample:
    return _sample("ffn", ffn_spec.make_inputs, options)


@examples(100)
@given(ffn_options())
def test_ffn_equals_torch(options: Options) -> None:
    _assert_reference_is_torch("ffn", _ffn(options))
