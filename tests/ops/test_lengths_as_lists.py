"""Lengths given as lists or tuples of integers: the same as the tensor of these integers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import nn as fnn

B, H, M, N, D = 2, 2, 5, 7, 8
KEYS, QUERIES = [7, 3], [5, 2]


@pytest.fixture
def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, size, D, requires_grad=True) for size in (M, N, N)]


@pytest.mark.parametrize("kind", [list, tuple], ids=["list", "tuple"])
def test_attention(qkv: list[Tensor], kind: Callable[..., Any]) -> None:
    tensors = {"key_lengths": torch.tensor(KEYS), "query_lengths": torch.tensor(QUERIES)}
    given = {"key_lengths": kind(KEYS), "query_lengths": kind(QUERIES)}
    results = []
    for lengths in (tensors, given):
        out, lse = fastattn.attention(*qkv, **lengths, return_lse=True)
        loss = out.square().sum() + lse[lse.isfinite()].sum()
        weights = fastattn.attention_weights(*qkv[:2], **lengths)
        results.append([out, lse, weights, *torch.autograd.grad(loss, qkv)])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    chosen = fastattn.explain("attention", *qkv, **given).chosen
    assert chosen == fastattn.explain("attention", *qkv, **tensors).chosen


def test_integers_of_numpy(qkv: list[Tensor]) -> None:
    lengths = [np.int32(7), np.int64(3)]
    actual = fastattn.attention(*qkv, key_lengths=lengths)  # type: ignore[arg-type]
    assert torch.equal(actual, fastattn.attention(*qkv, key_lengths=torch.tensor(KEYS)))


def test_under_compile(qkv: list[Tensor]) -> None:
    """One graph for the first lengths, one more for all others."""
    compilations = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal compilations
        compilations += 1
        return graph.forward

    def call(keys: list[int], queries: tuple[int, int]) -> Tensor:
        return fastattn.attention(*qkv, key_lengths=keys, query_lengths=queries)

    compiled = torch.compile(call, backend=count, fullgraph=True)
    for keys, queries in (([7, 3], (5, 2)), ([4, 6], (3, 4)), ([6, 5], (4, 3))):
        assert torch.equal(compiled(keys, queries), call(keys, queries))
    assert compilations == 2


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "module",
    [fnn.LengthMaskedMultiheadAttention(8, 8, 8, 8, 2), fnn.AdditiveAttention(8, 8, 4)],
    ids=lambda module: type(module).__name__,
)
def test_modules(module: torch.nn.Module, need_weights: bool) -> None:
    x = torch.randn(B, N, D)
    results = [
        module(x, x, x, lengths, need_weights=need_weights)
        for lengths in (KEYS, tuple(KEYS), torch.tensor(KEYS))
    ]
    for other in results[:2]:
        torch.testing.assert_close(other, results[2], rtol=0.0, atol=0.0)


def test_lengths_of_the_memory() -> None:
    decoder = fnn.TransformerDecoder(fnn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)
    decoder.eval()
    memory, token, counts = torch.randn(B, N, 8), torch.randn(B, 1, 8), {"max_length": 2}
    results = []
    for lengths in (KEYS, torch.tensor(KEYS)):
        cache = decoder.init_cache(memory, memory_lengths=lengths, memory_size=N, **counts)
        first = decoder.step(token, cache)
        decoder.restart(cache, memory, [1, 2] if lengths is KEYS else torch.tensor([1, 2]))
        results.append((first, decoder.step(token, cache)))
    torch.testing.assert_close(*results, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("lengths, error, message", [
    ([5.0, 6], TypeError, r"must hold integers, got \[5\.0, 6\]"),
    ([True, 6], TypeError, r"must hold integers, got \[True, 6\]"),
    ([[5, 6], [5, 6]], TypeError, r"must hold integers, got \[\[5"),
    ([5, 6, 7], ValueError, r"must be \[2\].*, got \[3\]"),
    ("56", TypeError, "must hold integers, got '56'"),
    (5, TypeError, "must be a tensor or a list of integers, got int"),
    ({5, 6}, TypeError, "must be a tensor or a list of integers, got set"),
    ([2**70, 1], ValueError, r"must fit int64, got \[1180591620717411303424, 1\]"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["key_lengths", "query_lengths"])
def test_wrong_lists(qkv, name, lengths, error, message):
    with pytest.raises(error, match=f"^{name} {message}"):
        fastattn.attention(*qkv, **{name: lengths})


def test_given_in_the_layout_of_other_packages() -> None:
    """[B, S, H, D]: the hint comes where swapping would give heads that fit."""
    hint = r"q must have a multiple of k's 10 heads, got 7; if q, k and v are \[B, S, H, D\], pass"
    q, k = torch.randn(2, 7, 8, 16), torch.randn(2, 10, 4, 16)
    for function, rest in ((fastattn.attention, (k,)), (fastattn.attention_weights, ())):
        with pytest.raises(ValueError, match=hint):
            function(q, k, *rest)  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"10 heads, got 7$"):
            function(q[:, :, :6], k, *rest)  # type: ignore[operator]
    fastattn.attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2))
