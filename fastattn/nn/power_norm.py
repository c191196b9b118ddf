"""Norms whose statistics run over tokens instead of features: `PowerNorm` and `TokenBatchNorm`.

They are alternatives to `LayerNorm`, for comparison. Both normalise each feature by statistics
gathered in training; in evaluation the result of a token depends on nothing else. In training
`real_tokens` marks the real tokens; padding does not count.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class _TokenNorm(nn.Module):
    """Weight and bias for `[..., E]`, and which tokens count."""

    def __init__(
        self, size: int, eps: float, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))
        self.real: Tensor | None = None  # bool [...], set by `real_tokens`

    def _check(self, x: Tensor) -> None:
        if x.dim() < 1 or x.shape[-1] != self.size:
            raise ValueError(f"x must be [..., {self.size}], got {list(x.shape)}")
        if self.real is not None and self.real.shape != x.shape[:-1]:
            raise ValueError(f"real must be {list(x.shape[:-1])}, got {list(self.real.shape)}")

    def _affine(self, x: Tensor, like: Tensor) -> Tensor:
        return (x * self.weight + self.bias).to(like.dtype)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class PowerNorm(_TokenNorm):
    """x / psi * weight + bias, psi² the running mean of x² (Shen et al. 2020, algorithm 2).

    Forward uses psi from before the batch. Backward replaces the term of the batch's statistics by
    a running estimate, nu: dx = (dz - nu z) / psi for z = x / psi. Both are updated with weight
    1 - alpha per batch. In the first `warmup` training batches psi is that of the batch itself,
    with its exact gradient ("PN-V", equation 4), while the running mean settles.
    """

    psi2: Tensor
    nu: Tensor
    batches: Tensor

    def __init__(
        self,
        size: int,
        alpha: float = 0.9,
        eps: float = 1e-5,
        warmup: int = 100,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(size, eps, device, dtype)
        if not 0.0 <= alpha < 1.0:
            raise ValueError(f"alpha must lie in [0, 1), got {alpha}")
        if warmup < 0:
            raise ValueError(f"warmup must be at least 0, got {warmup}")
        self.alpha, self.warmup = alpha, warmup
        self.register_buffer("psi2", torch.ones(size, device=device))
        self.register_buffer("nu", torch.zeros(size, device=device))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., size]`, each row a token; under `real_tokens` padding does not count."""
        self._check(x)
        if not self.training:
            return self._affine(_wide(x) * (self.psi2 + self.eps).rsqrt(), x)
        power = _mean(_wide(x).square(), self.real)
        warming = self.batches < self.warmup
        batch = _wide(x) * (power + self.eps).rsqrt()
        running = _PowerNormFunction.apply(
            _wide(x),
            (self.psi2 + self.eps).rsqrt(),
            self.nu,
            _wide(self.nu).new_full((), 1.0 - self.alpha),  # a varying float does not compile
            self.real,
            warming,
        )
        with torch.no_grad():
            _update(self.psi2, power, 1.0 - self.alpha)
            self.batches.add_(1)
        return self._affine(torch.where(warming, batch, running), x)


class _PowerNormFunction(torch.autograd.Function):
    """z = x * inverse_psi; the backward of algorithm 2, which updates `nu` with weight `rest`,
    1 - alpha, unless `frozen`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        inverse_psi: Tensor,
        nu: Tensor,
        rest: Tensor,
        real: Tensor | None,
        frozen: Tensor,
    ) -> Tensor:
        z = x * inverse_psi
        ctx.save_for_backward(z, inverse_psi, frozen, rest)
        ctx.nu, ctx.real = nu, real
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        z, inverse_psi, frozen, rest = ctx.saved_tensors
        # The paper's nu_t = nu_{t-1} (1 - rest * Gamma) + rest * Lambda, both means over tokens.
        gamma, inner = _mean(z.square(), ctx.real), _mean(dz * z, ctx.real)
        moved = ctx.nu * (1.0 - rest * gamma) + rest * inner
        dx = (dz - ctx.nu * z) * inverse_psi
        ctx.nu.copy_(torch.where(frozen, ctx.nu, moved))
        return dx, None, None, None, None, None


class TokenBatchNorm(_TokenNorm):
    """(x - mean) / sqrt(variance + eps) * weight + bias over tokens (Ioffe and Szegedy 2015).

    Training uses the batch's statistics (algorithm 1), evaluation the running ones, which are
    updated with weight `momentum` per batch. In a decoder the batch's statistics include later
    tokens, so training is not strictly causal: one reason why layer norm replaced it.
    """

    running_mean: Tensor
    running_variance: Tensor

    def __init__(
        self,
        size: int,
        momentum: float = 0.1,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(size, eps, device, dtype)
        if not 0.0 < momentum <= 1.0:
            raise ValueError(f"momentum must lie in (0, 1], got {momentum}")
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(size, device=device))
        self.register_buffer("running_variance", torch.ones(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., size]`, each row a token; under `real_tokens` padding does not count."""
        self._check(x)
        mean, variance = self.running_mean, self.running_variance
        if self.training:
            mean = _mean(_wide(x), self.real)
            variance = _mean((_wide(x) - mean).square(), self.real)
            with torch.no_grad():
                _update(self.running_mean, mean, self.momentum)
                _update(self.running_variance, variance, self.momentum)
        return self._affine((_wide(x) - mean) * (variance + self.eps).rsqrt(), x)


def _wide(x: Tensor) -> Tensor:
    """x in the dtype of the statistics: fp32, or fp64 for fp64 data."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _update(running: Tensor, value: Tensor, weight: float) -> None:
    """Moves a running statistic, which has the module's dtype, to `value`, rounded once."""
    wide = torch.promote_types(running.dtype, value.dtype)
    running.copy_(running.to(wide).lerp(value.to(wide), weight))


def _mean(x: Tensor, real: Tensor | None) -> Tensor:
    """The mean of the real tokens over all dimensions but the last, [E]."""
    rows = x.flatten(0, -2)
    if real is None:
        return rows.mean(dim=0)
    weights = real.flatten().to(rows.dtype)
    return (weights @ rows.masked_fill(~real.flatten()[:, None], 0.0)) / weights.sum().clamp(min=1)


@contextmanager
def real_tokens(stack: nn.Module, real: Tensor) -> Iterator[None]:
    """Within this context the token norms of `stack` count tokens where `real` [B, S] is True."""
    norms = [module for module in stack.modules() if isinstance(module, _TokenNorm)]
    for norm in norms:
        norm.real = real
    try:
        yield
    finally:
        for norm in norms:
            norm.real = None
