"""Reproduces failures of PyTorch's operators on a CPU that the conformance page lists, by PyTorch
alone: each is compared with the same computation in fp64.

    python -m examples.conformance.pytorch_cpu
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    s = q @ k.mT * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1) @ v


def causal_with_scale(scale: float, backend: SDPBackend) -> float:
    """The largest error of causal attention; inf if it is not finite."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    exact = exact_attention(q.double(), k.double(), v.double(), scale, causal=True)
    return float((out - exact).abs().nan_to_num(torch.inf).max())


def gradients_of_large_scores(amplitude: float, backend: SDPBackend) -> list[float]:
    """The largest errors of dq, dk and dv, relative to the largest element of each; q and k have
    whole numbers times a power of two, so that fp32 computes the scores without an error.
    """
    torch.manual_seed(1)
    q, k = (torch.randn(1, 2, 65, 16).round() * amplitude for _ in range(2))
    v, dout = (torch.randn(1, 2, 65, 16) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*leaves, scale=1.0)
    found = torch.autograd.grad(out, leaves, dout)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(exact_attention(*wide, 1.0, False), wide, dout.double())
    return [
        float((x - y).abs().nan_to_num(torch.inf).max() / y.abs().max().clamp_min(1e-30))
        for x, y in zip(found, exact, strict=True)
    ]


def not_finite_gradients(backend: SDPBackend) -> list[int]:
    """How many elements of dq, dk and dv are NaN or inf for scores of up to 3e11."""
    torch.manual_seed(3)
    q, k = (1e4 * torch.randn(1, 2, 65, 32) for _ in range(2))
    v, dout = (torch.randn(1, 2, 65, 32) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*leaves, scale=100.0)
    return [int((~x.isfinite()).sum()) for x in torch.autograd.grad(out, leaves, dout)]


def bias_gradient_of_layer_norm(dtype: torch.dtype, rows: int) -> tuple[float, float]:
    """The largest error of dbias, fp32 parameters and data in `dtype`; the largest element."""
    torch.manual_seed(2)
    x, dout = (torch.randn(rows, 96).to(dtype) for _ in range(2))
    weight, bias = torch.randn(96), torch.zeros(96, requires_grad=True)
    (found,) = torch.autograd.grad(F.layer_norm(x, (96,), weight, bias), bias, dout)
    exact = dout.double().sum(0)
    return float((found - exact).abs().max()), float(exact.abs().max())


def main() -> None:
    print(f"torch {torch.__version__}")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        print(f"\nscaled_dot_product_attention, {backend.name}")
        for scale in (0.25, 0.0, -0.25):
            error = causal_with_scale(scale, backend)
            print(f"  is_causal=True, scale={scale}: largest error {error:.3g}")
        for amplitude in (1.0, 2.0**8, 2.0**14):
            errors = ", ".join(f"{e:.2g}" for e in gradients_of_large_scores(amplitude, backend))
            print(f"  scores of {16 * amplitude**2:.1g}: relative errors of dq, dk, dv {errors}")
        counts = ", ".join(map(str, not_finite_gradients(backend)))
        print(f"  scores of 3e11: elements of dq, dk, dv that are not finite {counts} of 4160")
    print("\nlayer_norm, data in half precision, parameters in fp32")
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (19, 1500):
            error, largest = bias_gradient_of_layer_norm(dtype, rows)
            print(f"  {dtype}, {rows} rows: dbias has an error of {error:.3g} of {largest:.4g}")


if __name__ == "__main__":
    main()
