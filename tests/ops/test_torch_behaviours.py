"""Behaviours of PyTorch's modules that PyTorch's tests check: nested tensors, settings, odd
sizes, constructors. Bugs of other libraries.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
import fastattn.nn as fnn
from fastattn.ops import _env
from fastattn.testing import all_specs, poisoned_results

B, S, E, H, FFN = 2, 5, 12, 3, 16
pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
]


def pair(name: str, *args: Any, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """PyTorch's module and fastattn's, with the same parameters."""
    torch.manual_seed(0)
    reference, fast = getattr(nn, name)(*args, **kwargs), getattr(fnn, name)(*args, **kwargs)
    fast.load_state_dict(reference.state_dict())
    return reference, fast


def same(actual: Any, expected: Any) -> None:
    """The results are equal, also in tuples."""
    both = (x if isinstance(x, tuple) else (x,) for x in (actual, expected))
    for got, wanted in zip(*both, strict=True):
        if wanted is None:
            assert got is None
        else:
            torch.testing.assert_close(got, wanted)


# -- nested tensors -------------------------------------------------------------------------------
def nested(*lengths: int) -> Tensor:
    parts = [torch.randn(n, E) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize(
    "mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__
)
def test_jagged_tensors(extra: dict[str, bool], mode: Callable[[], Any]) -> None:
    """fastattn's attention has the results and raises the errors of PyTorch's."""
    reference, fast = pair("MultiheadAttention", E, H, batch_first=True, **extra)
    x, keys, values = nested(4, 6), nested(7, 9), nested(7, 9)
    for module in (reference, fast):
        module.eval()
    for args in ((x, x, x), (x, keys, values)):
        answers = []
        for module in (reference, fast):
            try:
                with mode():
                    out = module(*args)[0]
                answers.append([part.detach() for part in out.unbind()])
            except Exception as error:
                answers.append((type(error), str(error)))
        assert type(answers[0]) is type(answers[1])
        if isinstance(answers[0], list):
            for expected, got in zip(*answers, strict=True):
                torch.testing.assert_close(got, expected)
        else:
            assert answers[0] == answers[1]


# -- settings, warnings, logs ---------------------------------------------------------------------
def test_torchs_settings_have_no_effect() -> None:
    """The setting of the fast path, and the choice of PyTorch's attention kernels."""
    torch.manual_seed(0)
    fast = fnn.Transformer(E, H, 1, 1, FFN, dropout=0.0, batch_first=True).eval()
    src, tgt = torch.randn(B, S, E), torch.randn(B, S, E)
    expected = fast(src, tgt)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert torch.equal(fast(src, tgt), expected)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(fast(src, tgt), expected)


def test_constructors_warn_as_torchs() -> None:
    layer = fnn.TransformerEncoderLayer(E, 4, bias=False, batch_first=True)
    with pytest.warns(UserWarning, match="encoder_layer.self_attn was passed bias=False"):
        fnn.TransformerEncoder(layer, 1)
    with pytest.warns(UserWarning, match="self_attn was passed bias=False"):
        fnn.Transformer(E, 4, bias=False, batch_first=True)


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_batches_as_long_as_their_sequences(training: bool, with_grad: bool) -> None:
    reference, fast = pair(
        "TransformerEncoder", nn.TransformerEncoderLayer(4, 2, 16, 0.0, batch_first=True), 2
    )
    x = torch.arange(16.0).reshape(2, 2, 4)
    mask = torch.tensor([[False, True], [False, False]])
    with torch.set_grad_enabled(with_grad):
        same(fast.train(training)(x, mask=mask), reference.train(training)(x, mask=mask))


# -- sizes and types ------------------------------------------------------------------------------
@pytest.mark.parametrize("name, args, kwargs", [
    ("MultiheadAttention", (5, 2), {}), ("MultiheadAttention", (0, 1), {}),
    ("MultiheadAttention", (4, 0), {}), ("TransformerEncoderLayer", (5, 2), {}),
    ("TransformerEncoderLayer", (4, 2), {"activation": "tanh"}),
    ("TransformerDecoderLayer", (4, 2), {"activation": "swish"}),
    ("TransformerEncoderLayer", (4, 2), {"dropout": 1.5}),
    ("TransformerDecoderLayer", (4, 2), {"unknown": 1}), ("Transformer", (5, 2), {}),
    ("Transformer", (4, 2, 1, 1, 8, -0.5), {}), ("LayerNorm", (4,), {"elementwise_afine": True}),
], ids=str)  # fmt: skip
def test_constructors_raise_what_torchs_raise(name, args, kwargs):
    with pytest.raises(Exception) as expected:
        getattr(nn, name)(*args, **kwargs)
    with pytest.raises(type(expected.value)) as got:
        getattr(fnn, name)(*args, **kwargs)
    assert str(got.value) == str(expected.value)


# -- bugs of other libraries -----------------------------------------------------------------------
SPECS = all_specs()
DEVICE = _env.default_device()
ATTENTION_BACKENDS = [b for b in SPECS["attention"].backends if _env.why_not_on(b, DEVICE) is None]


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
