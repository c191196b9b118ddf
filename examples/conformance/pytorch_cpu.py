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


def gradients_of_large_scores(
    amplitude: float, backend: SDPBackend, dtype: torch.dtype = torch.float32
) -> list[float]:
    """The largest errors of dq, dk and dv, relative to the largest element of each; q and k have
    whole numbers times a power of two, so that fp32 computes the scores without an error.
    """
    torch.manual_seed(1)
    q, k = (torch.randn(1, 2, 65, 16).round() * amplitude for _ in range(2))
    v, dout = torch.randn(1, 2, 65, 16), 0.25 * torch.randn(1, 2, 65, 16)
    return gradient_errors([x.to(dtype) for x in (q, k, v, dout)], 1.0, backend)


def gradients_of_two_keys(backend: SDPBackend) -> list[float]:
    """The same in bf16 for one query over two keys, whose weights' gradients almost cancel."""
    torch.manual_seed(4)
    q = torch.randn(64, 1, 1, 24)
    k, v, dout = torch.randn(64, 1, 2, 24), torch.randn(64, 1, 2, 24), torch.randn(64, 1, 1, 24)
    return gradient_errors([x.bfloat16() for x in (q, k, v, dout)], 0.5, backend, slices=True)


def gradient_errors(
    tensors: list[Tensor], scale: float, backend: SDPBackend, slices: bool = False
) -> list[float]:
    """slices: relative to the largest element of each entry of the batch."""
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*leaves, scale=scale)
    found = torch.autograd.grad(out, leaves, tensors[3])
    wide = [x.double().requires_grad_() for x in tensors[:3]]
    exact = torch.autograd.grad(exact_attention(*wide, scale, False), wide, tensors[3].double())
    errors = []
    for x, y in zip(found, exact, strict=True):
        largest = y.abs().amax((1, 2, 3), keepdim=True) if slices else y.abs().max()
        error = (x - y).abs().nan_to_num(torch.inf, torch.inf)
        errors.append(float((error / largest.clamp_min(1e-30)).max()))
    return errors


def not_finite_gradients(backend: SDPBackend) -> list[int]:
    """How many elements of dq, dk and dv are NaN or inf for scores of up to 3e11."""
    torch.manual_seed(3)
    q, k = (1e4 * torch.randn(1, 2, 65, 32) for _ in range(2))
    v, dout = (torch.randn(1, 2, 65, 32) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*leaves, scale=100.0)
    return [int((~x.isfinite()).sum()) for x in torch.autograd.grad(out, leaves, dout)]


def weights_with_added_number(number: float, dtype: torch.dtype) -> float:
    """The largest error of MultiheadAttention(need_weights=True) with a mask that adds the number
    to all scores, which leaves the softmax as it is.
    """
    torch.manual_seed(5)
    attention = torch.nn.MultiheadAttention(32, 2, batch_first=True).requires_grad_(False).to(dtype)
    x, mask = torch.randn(1, 33, 32).to(dtype), torch.full((33, 33), number, dtype=dtype)
    out, _ = attention(x, x, x, attn_mask=mask)
    exact, _ = attention.double()(*[x.double()] * 3)
    return float((out - exact).abs().max())


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
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for amplitude in (1.0, 2.0**8, 2.0**13):
                found = gradients_of_large_scores(amplitude, backend, dtype)
                errors = ", ".join(f"{e:.2g}" for e in found)
                scores = f"{dtype}, scores of {16 * amplitude**2:.1g}"
                print(f"  {scores}: relative errors of dq, dk, dv {errors}")
        errors = ", ".join(f"{e:.2g}" for e in gradients_of_two_keys(backend))
        print(f"  bf16, two keys: relative errors of dq, dk, dv {errors}")
        counts = ", ".join(map(str, not_finite_gradients(backend)))
        print(f"  scores of 3e11: elements of dq, dk, dv that are not finite {counts} of 4160")
    print("\nMultiheadAttention(need_weights=True), a number added to all scores")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for number in (0.0, -1e4, max(-1e9, torch.finfo(dtype).min / 2)):
            error = weights_with_added_number(number, dtype)
            print(f"  {dtype}, {number:g}: largest error {error:.2g}")
    print("\nlayer_norm, data in half precision, parameters in fp32")
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (19, 1500):
            error, largest = bias_gradient_of_layer_norm(dtype, rows)
            print(f"  {dtype}, {rows} rows: dbias has an error of {error:.3g} of {largest:.4g}")


if __name__ == "__main__":
    main()
