"""Which blocks of rows the Hopper attention backward visits, in which order; where dS and dQ lie.

The kernel's own arithmetic, compiled for the host, against the definitions; and gradients computed
by a loop over its steps.
"""

import ctypes
import itertools
import random

import numpy as np
import pytest
from sm90_plans import backward
from sm90_plans.backward import CONFIGS, PROBLEMS, Arithmetic, Problem
from sm90_plans.shim import Range

WARPS = 4  # of a warpgroup


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return backward.arithmetic(tmp_path_factory.mktemp("shim"))


def test_plans_against_the_definition(native: ctypes.CDLL) -> None:
    sizes, limits = (1, 63, 200, 390), (0, 1, 50, 200, 1 << 20)
    chance = random.Random(0)
    cases = list(itertools.product(sizes, sizes, limits, limits, (False, True), CONFIGS))
    for M, N, left, right, bottom, head_dim in chance.sample(cases, 60):
        lengths = ((M, N), (chance.randint(0, M), chance.randint(0, N)))
        p = Problem(M, N, left, right, N - M if bottom else 0, lengths, head_dim=head_dim)
        arithmetic = Arithmetic(native, p)
        for batch in range(len(lengths)):
            pairs = [[p.allowed(batch, i, j) for j in range(N)] for i in range(M)]
            for n in range(p.key_blocks):
                _check_plan(p, batch, pairs, n, arithmetic)


def _check_plan(
    p: Problem, batch: int, pairs: list[list[bool]], n: int, arithmetic: Arithmetic
) -> None:
    """pairs: [M][N], what is allowed by definition."""
    plan, queries = arithmetic.plan(n, batch), p.sizes(batch)[0]
    c = p.config
    own = range(n * c.keys, min((n + 1) * c.keys, p.N))
    live_keys = {j - n * c.keys for j in own if any(row[j] for row in pairs)}
    visited = set()
    for m in range(p.row_blocks):
        rows = range(m * c.rows, min((m + 1) * c.rows, p.M))
        if not any(pairs[i][j] for i in rows for j in own):
            continue
        visited.add(m)
        begin, end = arithmetic.visitors(m, batch)
        assert begin <= n < end
        computed = [i for i in rows if i < queries]
        whole = len(own) == c.keys and all(pairs[i][j] for i in computed for j in own)
        assert (plan.full[0] <= m < plan.full[1]) == whole
        alive = all(any(pairs[i]) for i in rows)
        assert (plan.clean[0] <= m < plan.clean[1]) == alive
    assert set(range(*plan.visited)) == visited
    if visited:  # no keys are read otherwise
        assert set(range(*plan.keys)) == live_keys


def _block(x: np.ndarray, index: int, size: int, live: Range) -> np.ndarray:
    """Rows of a block as products see them: 0 past the end and where nothing may be read."""
    block = np.zeros((size, x.shape[1]))
    rows = x[index * size : (index + 1) * size]
    block[: len(rows)] = rows
    block[: live[0]], block[live[1] :] = 0, 0
    return block


def _loop(arithmetic: Arithmetic, x: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """The gradients by the kernel's steps; x: q, k, v, dout, lse, delta, [B, heads, rows, ...]."""
    p, c = arithmetic.problem, arithmetic.problem.config
    # Nothing is there before the first block of keys has stored it.
    dq = np.full((*x["q"].shape[:2], p.row_blocks * c.rows, x["q"].shape[3]), np.nan)
    dk, dv = np.full_like(x["k"], np.nan), np.full_like(x["v"], np.nan)
    every = (0, 1 << 30)
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(arithmetic.blocks):
            w = arithmetic.work(number)
            live = arithmetic.live_rows(w.batch)
            k, v = (
                _block(x[n][w.batch, w.kv_head], w.key_block, c.keys, w.plan.keys) for n in "kv"
            )
            sum_k, sum_v = np.zeros_like(k), np.zeros_like(v)
            for step in arithmetic.steps(w):
                m, head = step.row_block, step.head - w.batch * x["q"].shape[1]
                clean = w.plan.clean[0] <= m < w.plan.clean[1]
                own = every if clean else (max(live[0] - m * c.rows, 0), live[1] - m * c.rows)
                q, dout = (_block(x[n][w.batch, head], m, c.rows, own) for n in ("q", "dout"))
                rows = np.arange(m * c.rows, (m + 1) * c.rows)
                dead = (rows < live[0]) | (rows >= live[1])
                at = np.minimum(rows, p.M - 1)
                lse = np.where(dead, np.inf, x["lse"][w.batch, head, at])
                delta = np.where(dead, 0, x["delta"][w.batch, head, at])
                weights = np.exp(k @ q.T * scale - lse)
                ds = weights * (v @ dout.T - delta)
                if not w.plan.full[0] <= m < w.plan.full[1]:
                    allowed = arithmetic.mask(w.key_block, m, w.batch)
                    weights, ds = np.where(allowed, weights, 0), np.where(allowed, ds, 0)
                sum_v += weights @ dout
                sum_k += ds @ q
                first = arithmetic.visitors(m, w.batch)[0] == w.key_block
                part = dq[w.batch, head, m * c.rows : (m + 1) * c.rows]
                part[:] = ds.T @ k + (0 if first else part)
            keys = slice(w.key_block * c.keys, min((w.key_block + 1) * c.keys, p.N))
            dk[w.batch, w.kv_head, keys] = sum_k[: keys.stop - keys.start] * scale
            dv[w.batch, w.kv_head, keys] = sum_v[: keys.stop - keys.start]
    for batch, m in itertools.product(range(len(p.lengths)), range(p.row_blocks)):
        begin, end = arithmetic.visitors(m, batch)
        if begin >= end:
            dq[batch, :, m * c.rows : (m + 1) * c.rows] = 0
    return {"dq": dq[:, :, : p.M] * scale, "dk": dk, "dv": dv}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_loop_gives_the_gradients(native: ctypes.CDLL, problem: str) -> None:
    """Plans, masks and zeroing together, with NaN wherever nothing may be read."""
    p, chance, D = PROBLEMS[problem], np.random.default_rng(0), 4
    B, H, K, scale = len(p.lengths), p.kv_heads * p.group, p.kv_heads, -0.7
    q, dout = (chance.standard_normal((B, H, p.M, D)) for _ in range(2))
    k, v = (chance.standard_normal((B, K, p.N, D)) for _ in range(2))
    allowed = np.array(
        [[[p.allowed(b, i, j) for j in range(p.N)] for i in range(p.M)] for b in range(B)]
    )[:, None]
    dead_rows, dead_keys = ~allowed.any(3)[..., None], ~allowed.any(2)[..., None]
    keys, values = (x.repeat(p.group, 1) for x in (k, v))
    scores = np.where(allowed, q @ keys.swapaxes(2, 3) * scale, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(np.exp(scores).sum(3))
        weights = np.where(allowed, np.exp(scores - lse[..., None]), 0)
    dlse = chance.standard_normal(lse.shape)
    delta = ((weights @ values) * dout).sum(3) - dlse
    ds = weights * (dout @ values.swapaxes(2, 3) - delta[..., None])
    expected = {"dq": ds @ keys * scale}
    for name, pairs in (
        ("dk", ds.swapaxes(2, 3) @ q * scale),
        ("dv", weights.swapaxes(2, 3) @ dout),
    ):
        expected[name] = pairs.reshape(B, K, p.group, p.N, D).sum(2)
    x = {"lse": lse, "delta": delta}
    for name, value, dead in (
        ("q", q, dead_rows),
        ("dout", dout, dead_rows),
        ("k", k, dead_keys),
        ("v", v, dead_keys),
    ):
        x[name] = np.where(dead, np.nan, value)
    x["lse"] = np.where(dead_rows[..., 0], -np.inf, lse)
    found = _loop(Arithmetic(native, p), x, scale)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
        nothing = np.broadcast_to(dead_rows if name == "dq" else dead_keys, value.shape)
        assert (found[name][nothing] == 0).all()


@pytest.mark.parametrize(("blocks", "heads", "swizzle_group"), [(1, 1, 1), (5, 7, 1), (5, 7, 4)])
def test_first_keys_come_first(
    native: ctypes.CDLL, blocks: int, heads: int, swizzle_group: int
) -> None:
    """A block of keys only waits for blocks with smaller numbers."""
    result, places = (ctypes.c_int * 2)(), []
    for number in range(blocks * heads):
        native.place(blocks, heads, swizzle_group, number, result)
        places.append((result[0], result[1]))
    assert sorted(places) == sorted(itertools.product(range(blocks), range(heads)))
    for head in range(heads):
        assert [n for n, h in places if h == head] == list(range(blocks))


@pytest.mark.parametrize(
    "lengths", [[], [0], [1], [80], [65, 0, 130, 1, 64], [0, 0, 79, 81, 160, 0], [7] * 50]
)
@pytest.mark.parametrize(("size", "slack"), [(64, 0), (80, 1), (128, 300)])
def test_every_block_of_packed_sequences_has_a_number(
    native: ctypes.CDLL, lengths: list[int], size: int, slack: int
) -> None:
    """Blocks of the rows behind the last sequence too, and at most one a sequence holds nothing."""
    offsets, sequences = [0, *itertools.accumulate(lengths)], len(lengths)
    rows, result = offsets[-1] + slack, (ctypes.c_int * 2)()
    found = []
    for number in range(native.packed_blocks(rows, sequences, size)):
        native.packed_block(
            (ctypes.c_int * len(offsets))(*offsets), sequences, size, number, result
        )
        found.append((result[0], result[1]))
    assert found == sorted(set(found))
    for sequence, count in enumerate([*lengths, slack]):
        blocks = [block for owner, block in found if owner == sequence]
        assert blocks == list(range(len(blocks)))
        assert -(-count // size) <= len(blocks) <= -(-count // size) + 1


def test_scores_reach_the_layout_that_wgmma_reads(native: ctypes.CDLL) -> None:
    """stmatrix.trans of a warp's 16 x 16 piece of dS^T: rows are queries, keys contiguous."""
    for warp in range(WARPS):
        for matrix in range(4):
            # Registers of the accumulator: keys 0 to 7 or 8 to 15, queries 0 to 7 or 8 to 15.
            first_key, first_query = 16 * warp + matrix % 2 * 8, matrix // 2 * 8
            for row in range(8):
                expected = native.swizzled(first_query + row, first_key // 8)
                assert native.scores_offset(warp, 8 * matrix + row) == expected


def test_sums_of_dq_keep_every_element(native: ctypes.CDLL) -> None:
    """The finishing kernel finds each element where a thread of the accumulator's layout put it."""
    columns, result = 80, (ctypes.c_int * 2)()
    elements = {}
    for thread, register in itertools.product(range(128), range(columns // 2)):
        lane = thread % 32
        row = thread // 32 * 16 + lane // 4 + register % 4 // 2 * 8
        column = register // 4 * 8 + lane % 4 * 2 + register % 2
        elements[(register // 4 * 128 + thread) * 4 + register % 4] = (row, column)
    assert sorted(elements) == list(range(64 * columns))
    for number, element in elements.items():
        native.sum_element(number, result)
        assert (result[0], result[1]) == element
