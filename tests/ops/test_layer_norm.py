"""add_layer_norm's equal gradients: x and residual share a tensor if dropout and dtypes allow it.
Parameters with gaps. Values of eps.

test_ops.py checks values against fp64; here, the gradients are shared when expected, and sharing
has no other effects than in PyTorch's own sum.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cpu_library import needs_library
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
import fastattn.nn
from fastattn.ops._select import OPS, why_unsupported
from fastattn.testing.poison import poisoned_results


class _Needs(TorchDispatchMode):
    """The backward op's `needs`: x, residual, x_bias, weight, bias."""

    def __init__(self) -> None:
        super().__init__()
        self.needs: list[list[bool]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.name() == "fastattn::add_layer_norm_bwd":
            self.needs.append(list(args[[a.name for a in op._schema.arguments].index("needs")]))
        return op(*args, **kwargs or {})


def _leaves(*dtypes: torch.dtype, requires_grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(6, 40, generator=generator).to(dtype).requires_grad_(requires_grad)
        for dtype in dtypes
    ]


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    "dtypes, dropout_p, shared",
    [((FP32, FP32), 0.0, True), ((BF16, BF16), 0.0, True), ((BF16, FP32), 0.0, False),
     ((FP32, FP32), 0.3, False)],
    ids=["fp32", "bf16", "mixed", "dropout"],
)  # fmt: skip
def test_x_and_residual_share_a_gradient(
    dtypes: tuple[torch.dtype, ...], dropout_p: float, shared: bool
) -> None:
    x, residual = _leaves(*dtypes)
    options = {"dropout_p": dropout_p, "dropout_seed": torch.tensor([5]), "return_sum": True}

    def gradients(wanted: list[Tensor]) -> tuple[Tensor, ...]:
        for leaf in (x, residual):
            leaf.requires_grad_(any(leaf is w for w in wanted))
        y, z = fastattn.add_layer_norm(x, residual, **options)  # type: ignore[arg-type]
        return torch.autograd.grad(y.float().sin().sum() + z.float().cos().sum(), wanted)

    with _Needs() as mode:
        both = gradients([x, residual])
    assert mode.needs == [[not shared, True, False, False, False]]
    for gradient, leaf in zip(both, (x, residual), strict=True):
        assert gradient.dtype == leaf.dtype
        assert torch.equal(gradient, *gradients([leaf]))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("wanted", ["x", "residual", "x_bias", "weight", "bias"])
def test_some_gradients(wanted: str, dropout_p: float) -> None:
    """The bits of a gradient do not depend on which others are needed."""
    x, residual = _leaves(FP32, FP32, requires_grad=False)
    inputs = {"x": x, "residual": residual, "x_bias": x[0], "weight": x[1], "bias": x[2]}
    options: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": torch.tensor([5])}

    def gradients(*names: str) -> dict[str, Tensor]:
        given = {n: x.clone().requires_grad_(n in names) for n, x in inputs.items()}
        with poisoned_results():
            y = fastattn.add_layer_norm(**given, **options)
            values = torch.autograd.grad(y.sin().sum(), [given[n] for n in names])
        return dict(zip(names, values, strict=True))

    assert torch.equal(gradients(wanted)[wanted], gradients(*inputs)[wanted])


def test_sharing_has_the_effects_of_a_sum() -> None:
    """Accumulated gradients do not share memory; those of a tensor passed twice are added."""
    x, residual = _leaves(FP32, FP32)
    weight = torch.randn(40, requires_grad=True)
    for _ in range(2):
        fastattn.add_layer_norm(x, residual, weight).sin().sum().backward()
    assert x.grad is not None and residual.grad is not None
    assert torch.equal(x.grad, residual.grad)
    x.grad.zero_()
    assert residual.grad.abs().sum() > 0

    [twice] = torch.autograd.grad(fastattn.add_layer_norm(x, x, weight).sin().sum(), x)
    [expected] = torch.autograd.grad(F.layer_norm(x + x, (40,), weight).sin().sum(), x)
    torch.testing.assert_close(twice, expected)


def test_a_hook_on_x_does_not_change_the_residuals_gradient() -> None:
    """A hook on x's gradient does not change the residual's, as for a sum."""

    def gradient_of_residual(add: Any) -> Tensor:
        x, residual = _leaves(FP32, FP32)
        branch = x * 2
        branch.register_hook(lambda gradient: gradient * 0)
        add(branch, residual * 3).sin().sum().backward()
        assert x.grad is not None and not x.grad.any()
        assert residual.grad is not None
        return residual.grad

    actual = gradient_of_residual(fastattn.add_layer_norm)
    expected = gradient_of_residual(lambda a, b: F.layer_norm(a + b, (40,)))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_rounded_sum_is_normalised(backend: str) -> None:
    """The backward uses the rounded sum, so the statistics must be those of the rounded sum."""
    if why := why_unsupported(OPS["layer_norm_fwd"], backend, (torch.ones(2, 3), None, None, 0.0)):
        pytest.skip(f"backend {backend} {why}")
    x, residual = (100 * torch.randn(5, 70).bfloat16() for _ in range(2))
    arguments = (x, residual, None, None, None, 1e-5, 0.0, None, 0)
    y, z, *statistics = torch.ops.fastattn.add_layer_norm_fwd(*arguments, backend=backend)
    normalised = torch.ops.fastattn.layer_norm_fwd(z, None, None, 1e-5, backend=backend)
    for one, other in zip((y, *statistics), normalised, strict=True):
        assert torch.equal(one, other)


def test_second_derivatives() -> None:
    x, residual = (t.detach().double()[:2, :5].requires_grad_() for t in _leaves(FP32, FP32))
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def function(*tensors: Tensor) -> Any:
        return fastattn.add_layer_norm(*tensors, return_sum=True)

    assert torch.autograd.gradcheck(function, (x, residual, weight))
    assert torch.autograd.gradgradcheck(function, (x, residual, weight))


def test_compiled() -> None:
    x, residual = _leaves(FP32, FP32)

    def gradients(function: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(x * 2, residual).sin().sum(), (x, residual))

    torch._dynamo.reset()
    compiled = torch.compile(fastattn.add_layer_norm, fullgraph=True, backend="aot_eager")
    for actual, eager in zip(gradients(compiled), gradients(fastattn.add_layer_norm), strict=True):
        assert torch.equal(actual, eager)


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "rms_norm"])
def test_parameters_with_gaps(op: str) -> None:
    """The same bits, forward and backward, as contiguous copies."""
    x, residual = _leaves(FP32, FP32)
    wide = torch.linspace(1, 2, 80, requires_grad=True)

    def results(weight: Tensor) -> list[Tensor]:
        given = {"x": x, "weight": weight} | ({"residual": residual} if "add" in op else {})
        y = getattr(fastattn, op)(**given)
        return [y, *torch.autograd.grad(y.sin().sum(), [x, wide])]

    for one, other in zip(results(wide[::2]), results(wide[::2].contiguous()), strict=True):
        assert torch.equal(one, other)


# -- eps -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("eps", [0.0, 0, -0.5, math.nan, math.inf])
def test_drop_ins_accept_what_torch_accepts(eps: float) -> None:
    """The ops refuse an invalid eps; the drop-in modules compute with it, as PyTorch's do."""
    x, residual = _leaves(FP32, FP32, requires_grad=False)

    def results(module: Any) -> list[Tensor]:
        torch.manual_seed(0)
        rows = [module.LayerNorm(40, eps=eps)(x), module.RMSNorm(40, eps=eps)(x)]
        encoder = module.TransformerEncoderLayer(40, 2, 48, 0.0, layer_norm_eps=eps)
        return [*rows, encoder(x.unsqueeze(1))]

    for actual, wanted in zip(results(fastattn.nn), results(torch.nn), strict=True):
        torch.testing.assert_close(actual, wanted, equal_nan=True)
    add_norm = fastattn.nn.AddNorm(40, eps=eps)
    expected = F.layer_norm(x + residual, (40,), eps=float(eps))
    torch.testing.assert_close(add_norm(x, residual), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_default_of_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    """For rows with values so small that eps matters."""
    x = torch.randn(6, 40, dtype=dtype) * torch.finfo(dtype).eps ** 0.5
    torch.testing.assert_close(fastattn.rms_norm(x), F.rms_norm(x, (40,)))


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("backend", [None, "torch"])
def test_rows_of_any_rank(norm: str, backend: str | None) -> None:
    """Any number of leading dimensions, and rows without columns."""
    call = partial(getattr(fastattn, norm), backend=backend)
    x = torch.randn(8, requires_grad=True)
    many = call(*[x.reshape([1] * 69 + [8])] * (2 if norm == "add_layer_norm" else 1))
    one = call(*[x] * (2 if norm == "add_layer_norm" else 1))
    assert torch.equal(many.flatten(), one)
    many.sum().backward()
    empty = torch.randn(3, 0, requires_grad=True)
    y = call(*[empty] * (2 if norm == "add_layer_norm" else 1))
    y.sum().backward()
    assert y.shape == empty.shape


def test_raw_ops_refuse_numbers() -> None:
    number, ops = torch.tensor(1.0), torch.ops.fastattn
    for call in (
        lambda: ops.layer_norm_fwd(number, None, None, 1e-5),
        lambda: ops.rms_norm_fwd(number, None, 1e-5),
        lambda: ops.add_layer_norm_fwd(
            torch.randn(2, 3), number, None, None, None, 1e-5, 0.0, None, 0
        ),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            call()


def test_raw_backward_of_a_missing_weight_is_empty() -> None:
    x = torch.randn(2, 3)
    results = torch.ops.fastattn.rms_norm_bwd(x, x, None, torch.ones(2), 1e-5, [True, True])
    assert results[1].shape == (0,)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_rows_without_columns_have_gradients(backend: str) -> None:
    x, weight, bias = (torch.zeros(s, requires_grad=True) for s in ((3, 0), (0,), (0,)))
    for y in (
        fastattn.layer_norm(x, weight, bias, backend=backend),
        fastattn.add_layer_norm(x, x, weight, bias, backend=backend),
    ):
        gradients = torch.autograd.grad(y.sum(), (x, weight, bias))
        assert [g.shape for g in gradients] == [x.shape, weight.shape, bias.shape]


@needs_library
def test_raw_backward_needs_a_flag_for_each_gradient() -> None:
    x, one = torch.randn(2, 3), torch.ones(2)
    for needs in ([True], [True] * 4):
        with pytest.raises(RuntimeError, match=r"needs must have 3 entries"):
            torch.ops.fastattn.layer_norm_bwd(x, x, None, None, one, one, 1e-5, needs)
