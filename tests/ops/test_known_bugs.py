"""Bugs of other libraries that no sample can show: settings of PyTorch, large offsets.

(NaN gradients under low masks, masks of another dtype, NaN in padding and finite masks are samples:
bias_low, bias_fp32, bias_fp32_padded, key_lengths, bool_mask_rows, bias_min_rows, bias_dead, ...)
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_examples import results_of
from torch import Tensor

import fastattn
from fastattn.ops import _env
from fastattn.testing import all_specs, poisoned_results
from fastattn.testing.spec import OpSpec

SPECS = all_specs()
DEVICE = _env.default_device()
ATTENTION_BACKENDS = [b for b in SPECS["attention"].backends if _env.why_not_on(b, DEVICE) is None]


# -- deterministic algorithms, compiled ------------------------------------------------------------
@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _compiled(spec: OpSpec, name: str, compiler: str | None) -> list[Tensor]:
    """Outputs and gradients of a sample; compiler None: eager."""
    [sample] = [s for s in spec.samples if s.name == name]
    inputs = sample.inputs(DEVICE, torch.float32)

    def call(**given: Any) -> Any:
        return spec.function(**given)

    function = torch.compile(call, backend=compiler, fullgraph=True) if compiler else call
    return [*results_of(spec, sample, inputs, function(**inputs)).values()]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "op, sample, compiler",
    [
        ("attention", "bias_row", "inductor"),
        ("attention", "all_restrictions", "aot_eager"),
        ("attention_varlen", "causal", "aot_eager"),
        ("layer_norm", "odd_width", "aot_eager"),
        ("add_layer_norm", "dropout", "aot_eager"),
        ("rms_norm", "odd_width", "aot_eager"),
        ("ffn", "swiglu", "aot_eager"),
    ],
)
def test_deterministic_algorithms_under_compile(op: str, sample: str, compiler: str) -> None:
    """Other libraries ignore the flag in a compiled backward, or raise for deterministic ops."""
    torch._dynamo.reset()
    first = _compiled(SPECS[op], sample, compiler)
    again = _compiled(SPECS[op], sample, compiler)
    eager = _compiled(SPECS[op], sample, None)
    for a, b, c in zip(first, again, eager, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


# -- offsets beyond 32 bits ------------------------------------------------------------------------
def _far_apart(x: Tensor, distance: int) -> Tensor:
    """The same values with batch entries `distance` elements apart; the gap is not accessed."""
    try:
        storage = torch.empty(distance + x[0].numel(), dtype=x.dtype, device=x.device)
    except (RuntimeError, MemoryError) as error:
        pytest.skip(f"not enough memory: {error}")
    far = storage.as_strided(x.shape, (distance, *x[0].contiguous().stride()))
    return far.copy_(x)


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
@pytest.mark.parametrize("far", ["mask", "bias", "q", "k", "v"])
def test_offsets_beyond_32_bits(backend: str, far: str) -> None:
    """Other libraries compute mask offsets in 32 bits and read wrong values for the last entry."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(2, 2, 65, 64, generator=generator).to(DEVICE, torch.bfloat16)
        for name in ("q", "k", "v")
    }
    if far == "mask":
        inputs["mask"] = (torch.rand(2, 1, 65, 65, generator=generator) < 0.7).to(DEVICE)
    elif far == "bias":
        bias = torch.randn(2, 1, 65, 65, generator=generator)
        inputs["mask"] = bias.to(DEVICE, torch.bfloat16)
    name = "mask" if far == "bias" else far
    moved = inputs | {name: _far_apart(inputs[name], (1 << 32) + 64)}
    found = []
    for given in (inputs, moved):
        leaves = {n: x.detach().requires_grad_(x.is_floating_point()) for n, x in given.items()}
        wanted = [x for x in leaves.values() if x.requires_grad]
        try:
            with poisoned_results():
                out = fastattn.attention(**leaves, backend=backend)
                assert isinstance(out, Tensor)
                found.append([out, *torch.autograd.grad(out.float().square().sum(), wanted)])
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
    for near, beyond in zip(*found, strict=True):
        assert torch.equal(near, beyond)
