"""Tangents of an op's results, those of the reference, and the error budget between them."""

from typing import Any

import pytest
import torch
from op_examples import as_tuple, varied_inputs
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import fastattn
from fastattn.ops import _select
from fastattn.testing.compare import compare
from fastattn.testing.oracle import output_gradients
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import Inputs, OpSpec, Sample


def _tangents_of(spec: OpSpec, sample: Sample, inputs: Inputs) -> dict[str, Tensor]:
    """A tangent of each input that has gradients, of values that every dtype holds."""
    names = varied_inputs(inputs)
    values = output_gradients(spec, sample, tuple(inputs[n].detach() for n in names))
    return dict(zip(names, values, strict=True))


def _duals(inputs: Inputs, tangents: dict[str, Tensor]) -> Inputs:
    # A dual tensor cannot be expanded.
    plain = {n: x.detach().clone() if isinstance(x, Tensor) else x for n, x in inputs.items()}
    return plain | {n: forward_ad.make_dual(plain[n], t) for n, t in tangents.items()}


def computed(spec: OpSpec, inputs: Inputs, tangents: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The tangents of the results; zeros where a result has none."""
    with forward_ad.dual_level():
        results = as_tuple(spec.function(**_duals(inputs, tangents)))
        duals = [forward_ad.unpack_dual(x) for x in results]
        return tuple(torch.zeros_like(x) if t is None else t for x, t in duals)


class Reference(TorchFunctionMode):
    """Calls the reference's operators in place of an op, so that PyTorch differentiates them."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(f, "namespace", None) != "fastattn":
            return f(*args, **kwargs or {})
        op = _select.OPS[f._schema.name.removeprefix("fastattn::")]
        return op.as_declared(getattr(op.module("reference"), op.name)(*args))


_RESTRICTIONS = ("mask", "key_lengths", "query_lengths", "causal", "window")


def _magnitudes(spec: OpSpec, inputs: Inputs, tangents: dict[str, Tensor]) -> list[Tensor]:
    """The sum of the absolute tangents that each input alone would cause. For attention also the
    largest tangent of a row's scores, in place of what cancels in p (s' - lse'), and in lse' the
    errors of the weights, which grow with the sizes of the scores.
    """
    alone = [computed(spec, inputs, {name: t}) for name, t in tangents.items()]
    found = [torch.stack([x.abs() for x in results]).sum(0) for results in zip(*alone, strict=True)]
    if spec.name == "attention" and inputs["k"].shape[1]:
        q, k = inputs["q"].detach(), inputs["k"].detach()
        group, scale = q.shape[1] // k.shape[1], inputs.get("scale") or q.shape[3] ** -0.5
        changes = [(tangents.get("q"), k), (q, tangents.get("k"))]
        ds = (
            sum(
                (x @ y.repeat_interleave(group, 1).transpose(2, 3) * scale).abs()
                for x, y in changes
                if x is not None and y is not None
            )
            + tangents.get("mask", torch.zeros(())).abs()
        )
        if isinstance(ds, Tensor) and ds.dim() == 4 and ds.shape[3]:
            largest = ds.nan_to_num(0, 0, 0).amax(3)
            with torch.no_grad():
                out = spec.function(**inputs | {"v": inputs["v"].abs()})
                restrictions = {n: inputs[n] for n in _RESTRICTIONS if n in inputs}
                p = fastattn.attention_weights(q, k, scale=scale, **restrictions)
            found[0] = found[0] + 2 * largest[..., None] * as_tuple(out)[0]
            size = q.abs() @ k.abs().repeat_interleave(group, 1).transpose(2, 3) * abs(scale)
            if "mask" in tangents:
                size = size + inputs["mask"].detach().abs()
            found[1] = found[1] + torch.where(p > 0, p * size * ds, 0).sum(3)
    return found


def check_tangents(spec: OpSpec, sample: Sample, dtype: torch.dtype) -> None:
    """The tangents of a sample, by the error budget."""
    inputs = sample.inputs("cpu", dtype)
    tangents = _tangents_of(spec, sample, inputs)
    if not tangents:
        pytest.skip("no input has gradients")
    wide = spec.widen(inputs)
    wide_tangents = {name: t.to(wide[name].dtype) for name, t in tangents.items()}
    with poisoned_results():
        found = computed(spec, inputs, tangents)
    with Reference():
        expected = computed(spec, wide, wide_tangents)
        same = computed(spec, inputs, tangents)
        magnitudes = _magnitudes(spec, wide, wide_tangents)
    for name, x, ref64, near, mag in zip(
        spec.results, found, expected, same, magnitudes, strict=False
    ):
        comparison = compare(x, ref64, near, mag, spec.slice_dims(name, ref64))
        assert comparison.ok, f"tangent of {name}: {comparison.message}"
