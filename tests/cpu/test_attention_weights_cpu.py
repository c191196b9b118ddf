"""The CPU kernels of attention with weights: the bits of attention, every instruction set, threads,
gradients of some results, and memory.
"""

from typing import Any

import pytest
import torch
from cpu_library import assert_threads_change_no_bit, needs_library
from torch import Tensor

import fastattn
from fastattn.ops.attention.op import CAUSAL, ForwardCall
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import Sample, all_specs

SPECS = all_specs()
SPEC = SPECS["attention_with_weights"]
pytestmark = needs_library
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FWD = torch.ops.fastattn.attention_with_weights_fwd


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", SPEC.samples, ids=lambda sample: sample.name)
def test_the_context_has_the_bits_of_attention(sample: Sample, dtype: torch.dtype) -> None:
    inputs = sample.inputs("cpu", dtype)
    out, _ = fastattn.attention_with_weights(**inputs, backend="cpu")
    del inputs["average"]
    assert torch.equal(out, fastattn.attention(**inputs, backend="cpu"))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("sample", ["plain", "extreme_logits"])
def test_rows_sum_to_one(sample: str, average: bool) -> None:
    """Also with scores that are so large that lse is not accurate enough to compute weights."""
    inputs = next(s for s in SPEC.samples if s.name == sample).inputs("cpu", torch.float32)
    _, weights = fastattn.attention_with_weights(
        **inputs | {"average": average, "scale": 3e3}, backend="cpu"
    )
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-6, rtol=0)


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B, H, K, M, N", [(2, 4, 2, 260, 300), (1, 2, 1, 300, 400), (3, 8, 4, 1, 3000), (1, 4, 4, 3, 9)]
)
def test_threads_change_no_bit(B, H, K, M, N, dtype, average):
    q = _randn(B, H, M, 40, dtype=dtype, seed=1).requires_grad_()
    k, v = (_randn(B, K, N, 40, dtype=dtype, seed=s).requires_grad_() for s in (2, 3))

    def compute() -> list[Tensor]:
        outputs = fastattn.attention_with_weights(
            q, k, v, average=average, key_lengths=torch.tensor([N, N // 2, 0])[:B],
            causal="bottom_right", dropout_p=0.1, dropout_seed=torch.tensor([5]), backend="cpu",
        )  # fmt: skip
        gradients = [_randn(*x.shape, dtype=x.dtype, seed=6) for x in outputs]
        return [*outputs, *torch.autograd.grad(outputs, (q, k, v), gradients)]

    assert_threads_change_no_bit(compute)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("used", [("out",), ("lse",), ("weights",), ("out", "lse", "weights")])
def test_gradients_of_some_results(used, dtype, average):
    """Without the weights they have the bits of attention's. The others' gradients are added."""
    q, k, v = (_randn(2, 4, 70, 24, dtype=dtype, seed=s).requires_grad_() for s in range(3))
    options = {"average": average, "causal": CAUSAL["top_left"], "scale": 24**-0.5}
    names = ("out", "lse", "weights")
    given = dict(zip(names, _all_results(q, k, v, "cpu", **options), strict=True))
    right = dict(zip(names, _all_results(q, k, v, "reference", **options), strict=True))
    gradients = [_randn(*given[n].shape, dtype=given[n].dtype, seed=9) for n in used]

    def grad(results: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        chosen = [results[n] for n in used]
        return torch.autograd.grad(chosen, (q, k, v), gradients, allow_unused=True)

    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    found = grad(given)
    for a, b in zip(found, grad(right), strict=True):
        zero = torch.zeros_like(q)
        a, b = (zero if x is None else x for x in (a, b))
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    if "weights" not in used:
        attention = fastattn.attention(q, k, v, causal=True, return_lse=True, backend="cpu")
        alone = grad(dict(zip(names, attention, strict=False)))
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True) if b is not None)


def _all_results(q: Tensor, k: Tensor, v: Tensor, backend: str, **changes: Any) -> Any:
    return _FWD.backend(**_arguments(q, k, v, **changes), backend=backend)


def _arguments(q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> dict[str, Any]:
    return ForwardCall(q, k, v)._asdict() | {"average": False} | changes


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_of_the_results(dtype: torch.dtype, average: bool) -> None:
    """The overload for given results writes weights in any layout."""
    q, k, v = (_randn(2, 3, 70, 24, dtype=dtype, seed=s) for s in range(3))
    arguments = _arguments(q, k, v, average=average)
    expected = _FWD.default(*arguments.values())
    weights = torch.full_like(expected[2].mT, float("nan")).mT
    given = {"out": torch.empty_like(q), "lse": torch.empty(2, 3, 70), "weights": weights}
    _FWD.out(**arguments, **given)
    for x, y in zip(given.values(), expected, strict=True):
        assert torch.equal(x, y)


def test_more_positions_than_the_kernels_support_use_another_backend() -> None:
    q = torch.zeros(1, 1, 1, 1)
    for keys, chosen in ((2**28, "cpu"), (2**28 + 1, "torch")):
        k = q.expand(1, 1, keys, 1)
        explained = fastattn.explain("attention_with_weights", q, k, k)
        assert explained.chosen == chosen


def test_a_score_of_infinity_gives_nan() -> None:
    mask = torch.tensor([[0.0, torch.inf, 0.0]])
    q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 3, 4)
    out, weights = fastattn.attention_with_weights(q, k, k, mask=mask)
    assert out.isnan().all() and weights.isnan().all()


def test_the_mean_over_no_heads_is_zero() -> None:
    q = torch.zeros(1, 0, 3, 4)
    with poisoned_results():
        for backend in ("cpu", "torch", "reference"):
            _, weights = fastattn.attention_with_weights(q, q, q, average=True, backend=backend)
            assert torch.equal(weights, torch.zeros(1, 3, 3))
