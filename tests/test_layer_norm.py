"""add_layer_norm's two equal gradients: x and residual share one where dropout and dtypes allow it.

Values were checked against fp64 in test_ops.py; here is when the tensor is shared, and that sharing
shows no more than that of torch's own sum does.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn.ops._op import OPS


class _Needs(TorchDispatchMode):
    """What the backward op was asked for: x, residual, x_bias, weight, bias."""

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
def test_one_gradient_for_both(
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


def test_shared_like_that_of_a_sum() -> None:
    """Accumulated gradients are independent memory, and those of one tensor given twice add up."""
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


def test_a_hook_on_one_leaves_the_other() -> None:
    """What happens to x's gradient upstream does not reach the residual's, as behind a sum."""

    def gradient_of_residual(add: Any) -> Tensor:
        x, residual = _leaves(FP32, FP32)
        branch = x * 2
        branch.register_hook(lambda gradient: gradient * 0)
        add(branch, residual * 3).sin().sum().backward()
        assert x.grad is not None and not x.grad.any()
        assert residual.grad is not None
        return residual.grad

    ours = gradient_of_residual(fastattn.add_layer_norm)
    torchs = gradient_of_residual(lambda a, b: F.layer_norm(a + b, (40,)))
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_rounded_sum_is_normalised(backend: str) -> None:
    """Backward passes see the sum as it was returned: the statistics must be its own."""
    if why := OPS["layer_norm_fwd"].refusal(backend, (torch.ones(2, 3), None, None, 0.0)):
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
    for ours, eager in zip(gradients(compiled), gradients(fastattn.add_layer_norm), strict=True):
        assert torch.equal(ours, eager)
