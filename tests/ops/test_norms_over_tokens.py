"""PowerNorm and batch norm over tokens: their formulas, padding, running statistics, gradients."""

import copy

import pytest
import torch
from torch import nn

from fastattn.nn.power_norm import PowerNorm, TokenBatchNorm, real_tokens
from fastattn.testing.compare import compare

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
