"""add_layer_norm's equal gradients: x and residual share a tensor if dropout and dtypes allow it.
Parameters with gaps. Values of eps. Norms over tokens.

test_ops.py checks values against fp64; here, the gradients are shared when expected, and sharing
has no other effects than in PyTorch's own sum.
"""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from call_recorder import CallRecorder
from cpu_library import needs_library
from torch import Tensor, nn

import fastattn
import fastattn.nn
from fastattn.nn.power_norm import PowerNorm, TokenBatchNorm, real_tokens
from fastattn.ops._select import OPS, why_unsupported
from fastattn.testing.compare import compare


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
def test_x_and_residual_share_a_gradient(dtypes, dropout_p, shared):
    x, residual = _leaves(*dtypes)
    options = {"dropout_p": dropout_p, "dropout_seed": torch.tensor([5]), "return_sum": True}

    def gradients(wanted: list[Tensor]) -> tuple[Tensor, ...]:
        for leaf in (x, residual):
            leaf.requires_grad_(any(leaf is w for w in wanted))
        y, z = fastattn.add_layer_norm(x, residual, **options)  # type: ignore[arg-type]
        return torch.autograd.grad(y.float().sin().sum() + z.float().cos().sum(), wanted)

    with CallRecorder() as recorder:
        both = gradients([x, residual])
    (op, args, _) = recorder.calls[1]
    needs = args[[a.name for a in op._schema.arguments].index("needs")]
    assert recorder.names == ["add_layer_norm_fwd", "add_layer_norm_bwd"]
    assert needs == [not shared, True, False, False, False]  # x, residual, x_bias, weight, bias
    for gradient, leaf in zip(both, (x, residual), strict=True):
        assert gradient.dtype == leaf.dtype
        assert torch.equal(gradient, *gradients([leaf]))


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


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "rms_norm"])
def test_parameters_with_gaps(op: str) -> None:
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


@needs_library
def test_raw_backward_needs_a_flag_for_each_gradient() -> None:
    x, one = torch.randn(2, 3), torch.ones(2)
    for needs in ([True], [True] * 4):
        with pytest.raises(RuntimeError, match=r"needs must have 3 entries"):
            torch.ops.fastattn.layer_norm_bwd(x, x, None, None, one, one, 1e-5, needs)


# -- norms over tokens -----------------------------------------------------------------------------
E = 6


def batches(count: int = 5) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 4, E) * torch.arange(1, E + 1) + 0.5 for _ in range(count)]


def test_power_norm_follows_its_algorithm():
    """Algorithm 2 of Shen et al. 2020: forward, backward, both running estimates."""
    alpha, eps = 0.8, 1e-5
    norm = PowerNorm(E, alpha=alpha, eps=eps, warmup=0)
    norm.weight.data.uniform_(0.5, 1.5)
    norm.bias.data.uniform_(-1, 1)
    psi2, nu = torch.ones(E), torch.zeros(E)
    for x in batches():
        x.requires_grad_()
        dy = torch.randn(3, 4, E)
        y = norm(x)
        y.backward(dy)

        z = x.detach() / (psi2 + eps).sqrt()
        torch.testing.assert_close(y.detach(), norm.weight.data * z + norm.bias.data)
        dz = norm.weight.data * dy
        torch.testing.assert_close(x.grad, (dz - nu * z) / (psi2 + eps).sqrt())
        psi2 = alpha * psi2 + (1 - alpha) * x.detach().square().mean((0, 1))
        gamma, inner = (z * z).mean((0, 1)), (dz * z).mean((0, 1))
        nu = nu * (1 - (1 - alpha) * gamma) + (1 - alpha) * inner
        torch.testing.assert_close(norm.psi2, psi2)
        torch.testing.assert_close(norm.nu, nu)
    norm.eval()
    x = batches()[0]
    torch.testing.assert_close(norm(x), norm.weight * x / (psi2 + eps).sqrt() + norm.bias)


def test_power_norm_uses_the_batch_during_warmup():
    norm = PowerNorm(E, warmup=4).double()
    x = batches()[0].double().requires_grad_()

    def normed(x):
        return x / (x.square().mean((0, 1)) + norm.eps).sqrt()

    for _ in range(2):
        torch.testing.assert_close(norm(x), normed(x))
        weights = torch.randn(3, 4, E, dtype=torch.float64)
        (actual,) = torch.autograd.grad((norm(x) * weights).sum(), x)
        (expected,) = torch.autograd.grad((normed(x) * weights).sum(), x)
        torch.testing.assert_close(actual, expected)
        assert norm.nu.abs().max() == 0
    # The fifth batch is the first one that is divided by the running estimate.
    assert not torch.allclose(norm(x), normed(x), rtol=1e-2)


@pytest.mark.parametrize("kind", [PowerNorm, TokenBatchNorm])
def test_one_program_for_any_number_of_tokens(kind):
    eager = kind(4)
    compiled = torch.compile(copy.deepcopy(eager), backend="aot_eager", dynamic=True)
    for tokens in (5, 7):
        x = torch.randn(2, tokens, 4)
        gradients = []
        for module in (eager, compiled):
            leaf = x.clone().requires_grad_()
            gradients += torch.autograd.grad(module(leaf).square().sum(), leaf)
        torch.testing.assert_close(*gradients)


def test_batch_norm_equals_torchs():
    fast, reference = TokenBatchNorm(E), nn.BatchNorm1d(E)
    for x in batches():
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = fast(a), reference(b.flatten(0, 1)).view(3, 4, E)
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
        dy = torch.randn(3, 4, E)
        y.backward(dy), z.backward(dy)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(fast.running_mean, reference.running_mean)
    # PyTorch stores the unbiased variance, 12/11 of the batch's.
    kept = 0.9 ** len(batches())
    unbiased = (reference.running_var - kept) * 11 / 12 + kept
    torch.testing.assert_close(fast.running_variance, unbiased)
    fast.eval(), reference.eval()
    reference.running_var.copy_(fast.running_variance)
    x = batches()[0]
    torch.testing.assert_close(fast(x), reference(x.flatten(0, 1)).view(3, 4, E))


@pytest.mark.parametrize("warmup", [0, 100])
@pytest.mark.parametrize("kind", [PowerNorm, TokenBatchNorm])
def test_padding_does_not_count(kind, warmup):
    real = torch.tensor([[True] * 4, [True, False, False, False], [True, True, False, False]])
    padded = kind(E, warmup=warmup) if kind is PowerNorm else kind(E)
    alone = copy.deepcopy(padded)
    stack = nn.Sequential(padded)
    for x in batches(3):
        x[~real] = 1e6
        a, rows = x.clone().requires_grad_(), x[real].clone().requires_grad_()
        with real_tokens(stack, real):
            y = stack(a)
        z = alone(rows)
        torch.testing.assert_close(y[real], z, rtol=1e-4, atol=1e-5)
        y[real].sin().sum().backward(), z.sin().sum().backward()
        torch.testing.assert_close(a.grad[real], rows.grad, rtol=1e-3, atol=1e-5)
    for (name, actual), expected in zip(padded.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=name)
    assert padded.real is None


@pytest.mark.parametrize("kind", [PowerNorm, TokenBatchNorm])
def test_statistics_of_half_precision_are_fp32(kind):
    half, single = kind(E), kind(E)
    for x in batches(2):
        y = half(x.bfloat16())
        torch.testing.assert_close(y, single(x.bfloat16().float()).bfloat16())
    for (name, actual), expected in zip(half.named_buffers(), single.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_batch_norm_of_a_half_precision_module_equals_torchs(dtype):
    fast, same, exact = TokenBatchNorm(E).to(dtype), nn.BatchNorm1d(E), nn.BatchNorm1d(E)
    fast.weight.data.uniform_(0.5, 1.5), fast.bias.data.uniform_(-1, 1)
    for reference, its_dtype in ((same, dtype), (exact, torch.float64)):
        reference.load_state_dict(fast.state_dict(), strict=False)
        reference.to(its_dtype)
    modules = fast, same, exact

    def check(results):
        for got, of_torch, ref64 in zip(*results, strict=True):
            mag, feature = ref64.abs(), ref64.dim() - 1
            comparison = compare(got.t(), ref64.t(), of_torch.t(), mag.t(), feature)
            assert got.dtype is dtype
            assert comparison.ok, comparison.message

    def variance(module):
        if module is fast:
            return module.running_variance
        kept = 0.9 ** int(module.num_batches_tracked)  # torch stores the unbiased variance
        return (module.running_var - kept) * 11 / 12 + kept

    def results(module, x, dy):
        x, own = x.flatten(0, 1).to(dtype), module.weight.dtype
        x = x.to(own).requires_grad_()
        y = module(x)
        grads = torch.autograd.grad(y, [x, module.weight, module.bias], dy.to(dtype).to(own))
        return [y.detach(), *grads, module.running_mean, variance(module)]

    for x in batches():
        dy = torch.randn(12, E)
        check([results(module, x, dy) for module in modules])
    for reference in (same, exact):
        reference.running_mean.copy_(fast.running_mean)
        reference.running_var.copy_(fast.running_variance)
    for module in modules:
        module.eval()
    check([results(module, x, dy)[:4] for module in modules])


@pytest.mark.parametrize("kind", [PowerNorm, TokenBatchNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_modules_of_other_dtypes_compute_as_in_fp32(kind, dtype):
    options = {"warmup": 1} if kind is PowerNorm else {}
    module, single = kind(E, **options).to(dtype), kind(E, **options)
    for x in batches(4):
        for x_dtype in {dtype, torch.float32}:
            leaves = [x.bfloat16().to(d).requires_grad_() for d in (x_dtype, torch.float32)]
            y, z = module(leaves[0]), single(leaves[1])
            assert y.dtype is x_dtype
            torch.testing.assert_close(y.float(), z, rtol=0.03, atol=0.05)
            y.sin().sum().backward(), z.sin().sum().backward()
            torch.testing.assert_close(leaves[0].grad.float(), leaves[1].grad, rtol=0.1, atol=0.05)
    for (name, actual), expected in zip(module.named_buffers(), single.buffers(), strict=True):
        assert actual.dtype is dtype or name == "batches"
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0.03, atol=0.02, msg=name)


@pytest.mark.parametrize("kind", [PowerNorm, TokenBatchNorm])
def test_errors_name_the_argument(kind):
    norm = kind(E)
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., 6\], got \[2, 5\]"):
        norm(torch.zeros(2, 5))
    with (
        pytest.raises(ValueError, match=r"real must be \[2, 3\], got \[2\]"),
        real_tokens(norm, torch.ones(2).bool()),
    ):
        norm(torch.zeros(2, 3, E))
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        kind(0)
    wrong = {"alpha": 1.0} if kind is PowerNorm else {"momentum": 0.0}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(E, **wrong)
