"""`topk_logsumexp`: the largest logits in descending order, and the logsumexp of each row."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from cpu_library import ISAS
from torch import Tensor

from fastattn import functional
from fastattn.functional import topk_logsumexp
from fastattn.ops import _env, _native


@pytest.fixture(params=("reference", *ISAS), autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every instruction set of the CPU kernel, and PyTorch's operators."""
    if request.param == "reference":
        op = functional._topk_logsumexp
        monkeypatch.setattr(functional, "_topk_logsumexp", partial(op, backend="reference"))
        yield request.param
        return
    _native.use_cpu_isa(request.param)
    yield request.param
    _native.use_cpu_isa(ISAS[-1])


def _logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 4


@pytest.mark.parametrize(
    "shape, first, count",
    [((3, 8001), 2, 1), ((2, 4, 317), 2, 8), ((5, 7), 3, 4), ((1, 16), 0, 16), ((0, 9), 2, 3)],
)
def test_against_torch(shape: tuple[int, ...], first: int, count: int) -> None:
    logits = _logits(*shape)
    kept = logits.clone()
    logsumexp, values, indices = topk_logsumexp(logits, first, count)
    torch.testing.assert_close(
        logsumexp.double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-6
    )
    wanted = logits[..., first:].topk(count, dim=-1)
    assert torch.equal(values, wanted.values) and torch.equal(indices, wanted.indices + first)
    assert torch.equal(logits, kept)


def test_rows_of_a_larger_tensor() -> None:
    logits = _logits(4, 100)
    expected = topk_logsumexp(logits[:, :50].contiguous(), 2, 3)
    for actual, wanted in zip(topk_logsumexp(logits[:, :50], 2, 3), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_the_largest_logits_may_be_excluded() -> None:
    logits = _logits(2, 40)
    logits[:, :2] = 90.0
    logsumexp, values, indices = topk_logsumexp(logits, 2, 2)
    assert (indices >= 2).all() and (values < 50).all()
    torch.testing.assert_close(logsumexp, logits.logsumexp(-1))


def test_logits_of_minus_infinity_and_large_logits() -> None:
    logits = torch.full((3, 37), float("-inf"))
    logits[0, 5], logits[0, 36] = -3e4, -3e4 + 1
    logits[1, 3] = 3e38
    logsumexp, values, indices = topk_logsumexp(logits, 2, 2)
    assert indices[0].tolist() == [36, 5] and int(indices[1, 0]) == 3
    assert ((indices >= 2) & (indices < 37)).all() and values[1, 1] == float("-inf")
    torch.testing.assert_close(logsumexp, logits.logsumexp(-1))


def test_ascending_logits() -> None:
    """Each logit is larger than all before it."""
    logsumexp, values, indices = topk_logsumexp(torch.arange(1000.0)[None], 0, 5)
    assert indices[0].tolist() == [999, 998, 997, 996, 995] == values[0].tolist()
    torch.testing.assert_close(logsumexp, torch.arange(1000.0).logsumexp(0)[None])


def test_equal_logits_are_in_the_order_of_their_tokens(isa: str) -> None:
    if isa == "reference":
        pytest.skip("torch promises no order")
    logits = torch.zeros(1, 70)
    logits[0, [20, 50]] = 1.0
    assert topk_logsumexp(logits, 2, 5)[2].tolist() == [[20, 50, 2, 3, 4]]


def test_nan_gives_a_nan_logsumexp() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0, nan, 1, 2, 3], [nan] * 5, [0, nan, inf, 2, 3], [inf, 0, 0, 0, 0]])
    logsumexp = topk_logsumexp(logits, 0, 1)[0]
    assert logsumexp.isnan().tolist() == [True, True, True, False] and logsumexp[3] == inf


def test_requested_backends_do_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.BACKEND_VARIABLE, "triton")
    assert topk_logsumexp(_logits(2, 9), 1, 2)[1].shape == (2, 2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.BACKEND_VARIABLE, "triton")
    search = torch.compile(
        lambda x: topk_logsumexp(x.sin(), 2, 3), fullgraph=True, backend="aot_eager",
        dynamic=dynamic,
    )  # fmt: skip
    for rows in (3, 5):
        logits = _logits(rows, 40)
        wanted = topk_logsumexp(logits.sin(), 2, 3)
        for actual, expected in zip(search(logits), wanted, strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("first, count", [(0, 0), (0, 10), (8, 2), (-1, 1)])
def test_counts_out_of_range(first: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"got first {first} and count {count}"):
        topk_logsumexp(_logits(2, 9), first, count)
