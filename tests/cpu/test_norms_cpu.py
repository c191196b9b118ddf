"""The norms' CPU kernels beyond the samples that test_ops.py runs: every instruction set, layouts,
bits that do not depend on the threads, and memory.
"""

from collections.abc import Callable

import pytest
import torch
from cpu_library import assert_threads_change_no_bit, every_isa, needs_library
from torch import Tensor

import fastattn
from fastattn.testing import poisoned_results

pytestmark = needs_library
NORMS = ("layer_norm", "add_layer_norm", "rms_norm")
HALVES = (torch.bfloat16, torch.float16)


@every_isa
@pytest.mark.parametrize("dtype", HALVES)
def test_every_value_survives(isa: str, dtype: torch.dtype) -> None:
    """x = 0: z is the residual, bit for bit, for each of the 65536 values."""
    residual = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(256, 256)
    _, z = fastattn.add_layer_norm(
        torch.zeros_like(residual), residual, return_sum=True, backend="cpu"
    )
    same = (z.view(torch.int16) == residual.view(torch.int16)) | (residual == 0)
    assert (same | (z.isnan() & residual.isnan())).all()
    assert torch.equal(z == 0, residual == 0)


@every_isa
@pytest.mark.parametrize("dtype", HALVES)
def test_rounds_to_nearest_even(isa: str, dtype: torch.dtype) -> None:
    """fp32 to half, as torch rounds: ties, overflow, denormals, NaN with any payload."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (64, 1024), generator=generator)
    ties = bits & ~0xFFFF | 0x8000  # halfway between two bf16
    ties[32:] = bits[32:] & ~0x1FFF | 0x1000  # halfway between two fp16
    small = torch.randn(64, 1024, generator=generator) * torch.logspace(-8, 6, 64)[:, None]
    floats = [t.to(torch.int32).view(torch.float32) for t in (bits, ties)]
    x = torch.cat([*floats, small, small * 1e-37])
    zero = torch.zeros_like(x, dtype=dtype)
    _, z = fastattn.add_layer_norm(x, zero, return_sum=True, backend="cpu")
    wanted = x.to(dtype)
    assert torch.equal(z.isnan(), wanted.isnan())
    assert torch.equal(z.nan_to_num(), wanted.nan_to_num())


@every_isa
def test_one_column_has_no_gradient(isa: str) -> None:
    """A row of one element is normalised to 0 for any value."""
    x = torch.randn(9, 1, requires_grad=True)
    y = fastattn.layer_norm(x, torch.randn(1), torch.tensor([2.0]), backend="cpu")
    y.backward(torch.randn(9, 1))
    assert (y == 2).all() and x.grad is not None and (x.grad == 0).all()


def _outputs_and_gradients(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of the three norms."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    x, residual = randn(rows, columns), randn(rows, columns)
    weight, bias, x_bias = (randn(columns, dtype=torch.float32) for _ in range(3))
    outputs = [
        fastattn.layer_norm(x, weight, bias, backend="cpu"),
        fastattn.rms_norm(x, weight, backend="cpu"),
        *fastattn.add_layer_norm(
            x, residual, weight, bias, x_bias=x_bias, dropout_p=0.2, dropout_seed=torch.tensor([3]),
            return_sum=True, backend="cpu",
        ),
    ]  # fmt: skip
    gradients = [randn(rows, columns).detach() for _ in outputs]
    return [*outputs, *torch.autograd.grad(outputs, (x, residual, weight, bias, x_bias), gradients)]


@pytest.mark.parametrize("rows, columns", [(700, 515), (37, 4100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(rows: int, columns: int, dtype: torch.dtype) -> None:
    assert_threads_change_no_bit(lambda: _outputs_and_gradients(rows, columns, dtype))


# -- layouts and memory ---------------------------------------------------------------------------
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed rows": lambda t: t.view(6, 10, 40).transpose(0, 1),
    "rows of a larger tensor": lambda t: t.view(15, 160)[:, 33:73],
    "a plane of each": lambda t: t.view(5, 4, 3, 40)[:, 1],
    "one of each, within rows": lambda t: t.view(5, 2, 3, 80)[:, 1:2, :, :40].transpose(1, 2),
    "reversed dimensions": lambda t: t.view(3, 4, 5, 40).permute(2, 1, 0, 3),
    "columns first": lambda t: t.view(60, 40).t(),
    "one row, repeated": lambda t: t[:40].expand(7, 40),
    "one value, repeated": lambda t: t[:1].expand(7, 40),
    "one column": lambda t: t.view(60, 40)[:, 3:4],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_layouts(view: Callable[[Tensor], Tensor]) -> None:
    """Every layout gives the bits of its contiguous copy."""
    x, residual, dy = (view(torch.randn(2400)) for _ in range(3))

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        x, residual, dy = tensors
        y, z, mean, rstd = torch.ops.fastattn.add_layer_norm_fwd(
            x, residual, None, None, None, 1e-5, 0.0, None, 0, backend="cpu"
        )
        gradients = torch.ops.fastattn.layer_norm_bwd(
            dy, x, None, None, mean, rstd, 1e-5, [True, False, False], backend="cpu"
        )
        return y, z, mean, rstd, *gradients

    for strided, dense in zip(
        results(x, residual, dy), results(*(t.contiguous() for t in (x, residual, dy))), strict=True
    ):
        assert torch.equal(strided, dense)


@pytest.mark.parametrize("rows", [0, 1, 32, 33, 2048, 9000])
def test_sums_over_partitions_of_the_rows(rows: int) -> None:
    x, rstd = torch.randn(rows, 8), torch.ones(rows)
    with poisoned_results():
        _, dweight = torch.ops.fastattn.rms_norm_bwd(x, x, torch.ones(8), rstd, 0.0, [False, True])
    torch.testing.assert_close(dweight, x.square().sum(0))


def test_unsupported() -> None:
    x, reason = torch.zeros(2, 8).double(), "has kernels for fp32, bf16 and fp16"
    assert reason in fastattn.explain("layer_norm", x).refusals["cpu"]
    with pytest.raises(NotImplementedError, match=f"backend cpu {reason}"):
        fastattn.layer_norm(x, backend="cpu")
