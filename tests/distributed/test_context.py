"""Attention over sequences sharded across processes: results equal those of one process."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sharded_attention import check, random_sample, sample
from support import gradients, in_processes, needs_distributed
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn.distributed import context_parallel_attention, shard_sequence, unshard_sequence
from fastattn.distributed.blocks import Call, rectangles
from fastattn.distributed.ring import Ring, Route, Transfers, routes
from fastattn.distributed.sequence import chunk_count
from fastattn.ops import _env
from fastattn.ops.attention.op import CAUSAL, ForwardCall

pytestmark = needs_distributed
attend: Any = context_parallel_attention


# -- without processes ----------------------------------------------------------------------------
@pytest.mark.parametrize("unit", [1, 4])
def test_rectangles_have_each_allowed_pair_once(unit: int) -> None:
    for m, n, low, high in [
        (m, n, low, low + width)
        for m in (1, 5, 8, 11)
        for n in (1, 6, 8, 13)
        for low in range(-14, 15)
        for width in (0, 1, 3, 4, 9, 30)
        if any(d % unit == 0 for d in range(low, low + width + 1))
    ]:
        pairs = []
        for i, r in enumerate(rectangles(m, n, low, high, unit)):
            assert r.first_row % unit == r.first_key % unit == 0
            if not r.low <= 0 <= r.high:
                assert i == 0 and max(r.rows, r.keys) <= unit
            pairs += [
                (r.first_row + i, r.first_key + j)
                for i in range(r.rows)
                for j in range(r.keys)
                if r.low <= j - i <= r.high
            ]
        expected = [(i, j) for i in range(m) for j in range(n) if low <= j - i <= high]
        assert sorted(pairs) == expected


def test_chunks_are_passed_as_far_as_they_are_needed() -> None:
    everything = (-99, 99)
    assert routes(4, 8, 8, everything, False, False) == 4 * (Route(1, 3),)
    causal = (-99, 0)
    own = Route(0, 0)
    assert routes(4, 8, 8, causal, False, False) == (Route(1, 3), Route(1, 2), Route(1, 1), own)
    # Balanced, process r has chunks r and 7 - r: the last of 8 chunks belongs to process 0.
    assert routes(4, 8, 8, causal, True, True)[:4] == 4 * (Route(1, 3),)
    assert routes(4, 8, 8, causal, True, True)[4:] == (Route(1, 3), Route(2, 3), Route(3, 3), own)
    window = (-2, 0)  # of two positions, the size of a chunk
    assert routes(4, 8, 8, window, False, False) == (*3 * (Route(1, 1),), own)
    assert routes(1, 8, 8, everything, True, True) == 2 * (own,)


def test_balanced_chunks_divide_causal_work_equally() -> None:
    P, M = 4, 32
    x = torch.empty(0)
    call = Call(M, M, ForwardCall(x, x, x, causal=CAUSAL["top_left"]), None)

    def pairs(rank: int, balanced: bool) -> int:
        ring = Ring(None, P, rank, balanced, balanced)
        chunks = range(chunk_count(P, balanced))
        found = [block.at for chunk in chunks for block in ring.blocks(call, chunk)]
        return sum(
            r.low <= j - i <= r.high for r in found for i in range(r.rows) for j in range(r.keys)
        )

    every = M * (M + 1) // 2
    assert [pairs(rank, True) for rank in range(P)] == [every // P] * P
    assert [pairs(rank, False) for rank in range(P)] == [36, 100, 164, 228]


# -- in each process ------------------------------------------------------------------------------
RING = {
    "plain": {"M": 24},
    "causal": {"M": 24, "K": 2, "causal": "top_left", "layout": "bshd"},
    "cross": {"M": 16, "N": 40, "E": 24, "causal": "bottom_right", "window": (9, -1),
              "mask": "float BHMN", "key_lengths": [40, 23], "query_lengths": [7, 16]},
    "own lengths": {"M": 16, "N": 32, "causal": "bottom_right_lengths", "window": (5, -1),
                    "key_lengths": [29, 12], "query_lengths": [15, 9], "alibi": "BH", "sinks": 0.0,
                    "relative": ("t5", 8, 16), "mask": "bool MN"},
    "mask": {"M": 24, "N": 16, "mask": "bool BMN", "key_lengths": "per query", "softcap": 2.0,
             "sinks": 1.0, "query_lengths": [24, 11]},
    "window": {"M": 40, "mask": "min_rows HMN", "causal": "top_left", "window": (3, 3),
               "relative": ("clipped", 9, 128), "sinks": 0.0},
    "row for all": {"M": 16, "mask": "float H", "window": (2, 5), "alibi": "H", "softcap": 2.0},
}  # fmt: skip
# Chunks of 16 positions.
DROPOUT = {
    "dropped": {"M": 128, "causal": "top_left", "window": (37, -1), "mask": "float MN", "K": 2,
                "dropout_p": 0.3, "sinks": 0.0},
    "dropped aside": {"M": 128, "N": 256, "window": (5, 100), "key_lengths": [200, 256],
                      "dropout_p": 0.3},
}  # fmt: skip
HEADS = {
    "causal": {"M": 24, "K": 4, "causal": "top_left", "layout": "bshd"},
    "everything": {"M": 16, "N": 40, "mask": "float HMN", "key_lengths": "per query",
                   "causal": "bottom_right", "alibi": "BH", "sinks": 0.0, "dropout_p": 0.3},
    "mask of rows": {"M": 24, "N": 16, "mask": "float BM", "window": (9, 4), "softcap": 2.0,
                     "relative": ("t5", 8, 16), "query_lengths": [24, 11]},
    "mask of keys": {"M": 8, "mask": "bool HN", "E": 24},
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LAYOUTS = ((True, None), (False, None), (True, False), (False, True))


def _check_samples(method: str, cases: dict[str, dict[str, Any]]) -> None:
    for i, (name, options) in enumerate(cases.items()):
        heads = {"B": 2, "H": 8 if method == "all_to_all" else 4, "D": 8} | options
        balanced, key_balanced = LAYOUTS[i % len(LAYOUTS)]
        check(
            sample(f"{method} {name}", **heads), DTYPES[i % len(DTYPES)], i, method=method,
            balanced=balanced, key_balanced=key_balanced,
        )  # fmt: skip


def ring_equals_attention() -> None:
    _check_samples("ring", RING)


def ring_drops_the_same_weights() -> None:
    _check_samples("ring", DROPOUT)


def numbers_added_to_whole_rows() -> None:
    """In fp32, -1e9 and -1e38 make all keys equal, and an lse holds no sum beside them."""
    q, k, v, dout = (torch.randn(2, 4, 24, 8) for _ in range(4))
    for backend in ("", "torch"):
        for number, tolerance in ((-1e4, 2e-3), (-1e9, 1e-5), (-1e38, 1e-5)):
            mask = torch.zeros(24, 24)
            mask[::3] = number
            whole = [x.clone().requires_grad_() for x in (q, k, v)]
            parts = [shard_sequence(x, 2).requires_grad_() for x in (q, k, v)]
            with mock.patch.dict(os.environ, {_env.BACKEND_VARIABLE: backend}):
                expected = fastattn.attention(*whole, mask=mask)
                found = attend(*parts, mask=shard_sequence(mask, 0))
            dparts = gradients([found], [shard_sequence(dout, 2)], parts)
            dwhole = gradients([expected], [dout], whole)
            for x, y in zip((found, *dparts), (expected, *dwhole), strict=True):
                x = unshard_sequence(x, 2)
                torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance)


def seeds_with_an_origin() -> None:
    """Dropout seeds of whole sequences that are themselves a part of a larger attention."""
    q, k, v = (torch.randn(2, 4, 64, 8) for _ in range(3))
    drop = {"dropout_p": 0.5, "dropout_seed": torch.tensor([7, 3, 4, 16, 32])}
    expected = fastattn.attention(q, k, v, **drop)
    parts = [shard_sequence(x, 2) for x in (q, k, v)]
    for method in ("ring", "all_to_all"):
        found = unshard_sequence(attend(*parts, method=method, **drop), 2)
        torch.testing.assert_close(found, expected)


def heads_equal_attention() -> None:
    _check_samples("all_to_all", HEADS)


def random_samples_equal_attention() -> None:
    for seed in range(40):
        given, layout = random_sample(seed)
        check(given, DTYPES[seed % len(DTYPES)], seed, **layout)


def some_gradients() -> None:
    """Gradients of lse alone, of q alone, and of k without v."""
    q, k, v = (torch.randn(2, 4, 24, 8) for _ in range(3))
    weights = torch.randn(2, 4, 24, 8), torch.randn(2, 4, 24)
    for method in ("ring", "all_to_all"):
        for needed, results in (((0,), (0,)), ((0, 1), (1,)), ((1,), (0, 1))):
            whole = [x.clone().requires_grad_(i in needed) for i, x in enumerate((q, k, v))]
            parts = [
                shard_sequence(x, 2, balanced=True).requires_grad_(i in needed)
                for i, x in enumerate((q, k, v))
            ]
            expected = fastattn.attention(*whole, causal=True, return_lse=True)
            found = attend(*parts, causal=True, balanced=True, return_lse=True, method=method)
            own = [shard_sequence(w, 2, balanced=True) for w in weights]

            def select(tensors: Any, indices: Any = results) -> list[Any]:
                return [tensors[i] for i in indices]

            dparts = gradients(select(found), select(own), select(parts, needed))
            dwhole = gradients(select(expected), select(weights), select(whole, needed))
            for x, y in zip(dparts, dwhole, strict=True):
                x = unshard_sequence(x, 2, balanced=True)
                torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


class _Events(TorchDispatchMode):
    """One letter for each of a series of sends, receives, calls of attention and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = ""

    def add(self, letter: str) -> None:
        self.letters += "" if self.letters.endswith(letter) else letter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        known = {"c10d::send": "s", "c10d::recv_": "r", "fastattn::attention_bwd": "a"}
        self.add(known.get(name, "a" if name == "fastattn::attention_fwd" else ""))
        return func(*args, **(kwargs or {}))


def transfers_are_under_way_during_attention() -> None:
    """A step starts transfers, computes, and waits. In the backward, gradients are sent after it,
    and waited for after the next one has been computed.
    """
    wait = Transfers.wait
    q = torch.randn(1, 2, 8, 8, requires_grad=True)
    with _Events() as events:

        def waits(transfers: Transfers) -> None:
            events.add("w")
            wait(transfers)

        with mock.patch.object(Transfers, "wait", waits):
            out = attend(q, q, q)
            assert events.letters == 3 * "sraw" + "aw"
            events.letters = ""
            out.sum().backward()
    assert events.letters == "sraw" + 2 * "srawsrw" + "awsrw"


def layouts_are_inverse() -> None:
    x = torch.randn(3, 24)
    for balanced in (False, True):
        part = shard_sequence(x, 1, balanced=balanced)
        assert part.shape == (3, 24 // dist.get_world_size())
        assert torch.equal(unshard_sequence(part, 1, balanced=balanced), x)
    with pytest.raises(ValueError, match=r"x must have a size along dim 1 that \d divides, got 13"):
        shard_sequence(torch.randn(3, 13), 1, balanced=True)


def errors() -> None:
    q = torch.randn(1, 2, 5, 8)
    for error, message, arguments, options in [
        (ValueError, "q must hold two chunks of equal length, got 5", (q, q, q),
         {"balanced": True}),
        (ValueError, "k must hold two chunks of equal length, got 5", (q[:, :, 1:], q, q),
         {"balanced": True}),
        (ValueError, 'method must be "ring" or "all_to_all", got \'heads\'', (q, q, q),
         {"method": "heads"}),
        (ValueError, 'k must have a number of heads that 4 divides for method="all_to_all", got 2',
         (q, q, q), {"method": "all_to_all"}),
        (ValueError, r"k must have 4 dimensions \[B, K, N, D\], got", (q, q[0], q), {}),
        (ValueError, "v must be", (q, q, q[:, :1]), {}),
        (TypeError, r"q must be fp16, bf16, fp32 or fp64, got torch\.int64", 3 * (q.long(),), {}),
        (ValueError, "scale must be finite, got nan", (q, q, q), {"scale": float("nan")}),
        (ValueError, r"mask must be broadcastable to \[1, 2, 5, 20\], got", (q, q, q),
         {"mask": torch.ones(5, 5)}),
        (ValueError, r"key_lengths must be \[1\] or \[1, 5\], got", (q, q, q),
         {"key_lengths": torch.ones(1, 20, dtype=torch.int64)}),
        (ValueError, "causal=True is ambiguous for 20 queries and 16 keys",
         (q, q[:, :, 1:], q[:, :, 1:]), {"causal": True}),
        (ValueError, "q must hold chunks of a multiple of 16 positions for dropout .* got 5",
         (q, q, q), {"dropout_p": 0.5}),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            attend(*arguments, **options)
    others = dist.new_group([0])
    if dist.get_rank() > 0:
        with pytest.raises(ValueError, match="group must contain the calling process"):
            attend(q, q, q, group=others)


def autocast() -> None:
    q = torch.randn(1, 4, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for method in ("ring", "all_to_all"):
            assert attend(q, q, q, method=method).dtype is torch.bfloat16


def second_derivatives_are_refused() -> None:
    q = torch.randn(1, 4, 6, 8, requires_grad=True)
    for method in ("ring", "all_to_all"):
        out = attend(q, q, q, method=method)
        [dq] = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="context_parallel_attention has no second"):
            dq.sum().backward()


def some_processes() -> None:
    """Ranks in a group are not the ranks of the processes."""
    group = dist.new_group([1, 2])
    if dist.get_rank() not in (1, 2):
        return
    q = torch.randn(1, 2, 8, 8)
    part = shard_sequence(q, 2, balanced=True, group=group)
    for method in ("ring", "all_to_all"):
        out = attend(part, part, part, causal=True, balanced=True, group=group, method=method)
        whole = unshard_sequence(out, 2, balanced=True, group=group)
        torch.testing.assert_close(whole, fastattn.attention(q, q, q, causal=True))


def test_context_parallel_attention() -> None:
    in_processes(
        ring_equals_attention, ring_drops_the_same_weights, numbers_added_to_whole_rows,
        seeds_with_an_origin, heads_equal_attention, some_gradients,
        transfers_are_under_way_during_attention, layouts_are_inverse, errors, autocast,
        second_derivatives_are_refused, some_processes,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_samples(size: int) -> None:
    in_processes(random_samples_equal_attention, size=size)
