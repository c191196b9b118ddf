"""Which blocks of keys the Hopper attention forward computes, in which order, and where they lie.

The kernel's own arithmetic, compiled for the host, against the definitions.
"""

import ctypes
import itertools
import random
from dataclasses import replace

import pytest
from sm90_plans import forward
from sm90_plans.forward import CONFIGS, ROWS, Arithmetic, Config, Plan, Problem, Tile

UNLIMITED = 1 << 20


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return forward.arithmetic(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize("order", [None, (6, 1, 5, 4, 0, 2, 3, 7), (0, 1, 2, 3, 7, 4, 6, 5)])
def test_packed_tile_scheduler(native: ctypes.CDLL, order: tuple[int, ...] | None) -> None:
    """Growing numbers, some left out, each find their sequence; every tile has one place."""
    rows, heads, tile_rows = [0, 130, 0, 0, 1, 128, 400, 0], 3, 128
    offsets = (ctypes.c_int * 9)(*itertools.accumulate(rows, initial=0))
    given = None if order is None else (ctypes.c_int * 8)(*order)
    rows = [rows[b] for b in order or range(8)]
    wanted = [b for b, n in enumerate(rows) for _ in range(heads * -(-n // tile_rows))]
    for step in (1, 2, 5, 50):
        state = (ctypes.c_int * 3)()
        for number in range(0, len(wanted) + step, step):
            native.advance(state, offsets, len(rows), heads, tile_rows, number, given)
            if number >= len(wanted):
                assert state[0] == len(rows)
                continue
            assert state[0] == wanted[number]
            assert state[1] == wanted.index(wanted[number])
            assert state[2] == -(-rows[state[0]] // tile_rows)


@pytest.mark.parametrize(
    ("queries", "heads_inside", "bounds", "key_lengths", "merged", "keys", "bounded"),
    [
        (1, True, (UNLIMITED, UNLIMITED, 0), True, True, (0, 100), False),
        (1, False, (UNLIMITED, 0, 99), True, True, (0, 100), False),  # decoding, the last row
        (1, False, (UNLIMITED, 0, 0), True, True, (0, 1), False),  # the first row
        (1, False, (9, 0, 99), False, True, (90, 100), False),  # a window
        (1, False, (9, 0, 99), True, False, (0, 100), True),  # key lengths count from key 0
        (1, False, (9, 0, -5), False, False, (0, 100), True),  # no key at all
        (7, False, (UNLIMITED, UNLIMITED, 0), False, True, (0, 100), False),
        (7, True, (UNLIMITED, UNLIMITED, 0), False, False, (0, 100), False),  # no single stride
        (7, False, (UNLIMITED, 0, 93), False, False, (0, 100), True),  # rows differ
        (7, False, (UNLIMITED, 6, 93), False, True, (0, 100), False),  # the bounds allow all
    ],
)
def test_few_queries(
    native: ctypes.CDLL,
    queries: int,
    heads_inside: bool,
    bounds: tuple[int, int, int],
    key_lengths: bool,
    merged: bool,
    keys: tuple[int, int],
    bounded: bool,
) -> None:
    """Grouped heads become rows only where that addresses the same memory and the same keys."""
    D, H, K, N = 64, 8, 2, 100
    head, row = (D, H * D) if heads_inside else (queries * D, D)
    numbers = [head, row, head, row, K * D, H, K, queries, N, *bounds, key_lengths, False]
    n = (ctypes.c_longlong * 14)(*numbers)
    native.shorten(n)
    assert n[4] == keys[0] * K * D * 2
    assert (n[8], bool(n[9])) == (keys[1] - keys[0], bounded)
    if not merged:
        assert (n[0], n[1], n[5], n[7]) == (head, row, H, queries)
        return
    group = H // K
    assert (n[5], n[7]) == (K, group * queries)
    for h, i in itertools.product(range(H), range(queries)):
        kv_head, member = divmod(h, group)
        for merged_head, merged_row in ((n[0], n[1]), (n[2], n[3])):
            place = kv_head * merged_head + (member * queries + i) * merged_row
            assert place == h * head + i * row


@pytest.mark.parametrize("head_dim", CONFIGS)
def test_instance_for_warpgroups_without_rows(native: ctypes.CDLL, head_dim: int) -> None:
    """The bounded instance, if it lets them skip blocks and they are many."""
    c = CONFIGS[head_dim]
    for dims in ((head_dim, 8), (8, head_dim)):
        for queries in (1, 64, 65, 192, 193, 512, 1024, 2048, 16384):
            groups = -(-queries // c.tile_rows) * c.groups
            spare = groups - -(-queries // ROWS)
            expected = c.skips and 16 * spare >= groups
            assert native.wants_bounded(queries, 1000, *dims, UNLIMITED, 0) == expected
        assert native.wants_bounded(500, 1000, *dims, UNLIMITED, 9) == c.skips  # packed
        assert not native.wants_bounded(500, 1000, *dims, UNLIMITED, 3)
        assert native.wants_bounded(65, 1000, *dims, 0, 0)  # causal


@pytest.mark.parametrize("head_dim", CONFIGS)
def test_blocks_against_the_definition(native: ctypes.CDLL, head_dim: int) -> None:
    c = CONFIGS[head_dim]
    sizes, limits = (1, 63, 200, 390), (0, 1, 50, 200, 1 << 20)
    chance = random.Random(0)
    cases = list(itertools.product(sizes, sizes, limits, limits, (False, True)))
    for M, N, left, right, bottom in chance.sample(cases, 40):
        lengths = ((M, N), (chance.randint(0, M), chance.randint(0, N)))
        problem = Problem(M, N, left, right, N - M if bottom else 0, lengths, heads=1)
        arithmetic = Arithmetic(native, c, problem)
        keys = [
            [{j for j in range(N) if problem.allowed(batch, i, j)} for i in range(M)]
            for batch in range(len(lengths))
        ]
        for number in range(arithmetic.tiles):
            tile = arithmetic.tile(number)
            assert tile is not None
            for group in range(c.groups):
                _check_plan(keys[tile.batch], c, tile, group, arithmetic.plan(tile, group))


def _check_plan(keys_of: list[set[int]], c: Config, tile: Tile, group: int, plan: Plan) -> None:
    """keys_of: for each row of the sequence, the keys it may attend by definition."""
    first = tile.row + group * ROWS
    own = keys_of[first : min(first + ROWS, tile.queries)]
    whole = keys_of[tile.row : min(tile.row + c.tile_rows, tile.queries)]
    needed = {j // c.block for keys in own for j in keys}
    loaded = {j // c.block for keys in whole for j in keys}
    assert set(range(*plan.loaded)) == loaded
    assert needed <= set(range(*plan.own)) <= loaded
    assert bool(loaded) == (plan.own[0] < plan.own[1])
    if needed:
        assert set(range(*plan.own)) == (needed if c.skips else loaded)
    full = {
        n
        for n in range(*plan.own)
        if own and all(keys >= set(range(n * c.block, (n + 1) * c.block)) for keys in own)
    }
    assert set(range(*plan.full)) & set(range(*plan.own)) == full


@pytest.mark.parametrize("head_dim", [64, 128])
def test_splits_of_a_plan(native: ctypes.CDLL, head_dim: int) -> None:
    """Splits are contiguous, differ by a block at most and keep what a warpgroup must compute."""
    c = CONFIGS[head_dim]
    for N, left, splits in itertools.product((1, 300, 1500), (0, 70, 1 << 20), (2, 3, 7)):
        problem = Problem(400, N, left=left, right=0, diagonal=N - 400, heads=1)
        whole = Arithmetic(native, c, problem)
        cut = Arithmetic(native, c, replace(problem, splits=splits))
        assert cut.tiles == splits * whole.tiles
        for number, group in itertools.product(range(whole.tiles), range(c.groups)):
            tile, plan = whole.tile(number), whole.plan(whole.tile(number), group)
            split_tiles = [cut.tile(number * splits + i) for i in range(splits)]
            assert [replace(p, number=number, split=0) for p in split_tiles] == [tile] * splits
            plans = [cut.plan(p, group) for p in split_tiles]
            loaded = [list(range(*p.loaded)) for p in plans]
            assert list(itertools.chain(*loaded)) == list(range(*plan.loaded))
            assert max(map(len, loaded)) - min(map(len, loaded)) <= 1
            for split, blocks in zip(plans, loaded, strict=True):
                own, wanted = set(range(*split.own)), set(range(*plan.own)) & set(blocks)
                assert wanted <= own <= set(blocks)
                # At least one block: every warpgroup takes part in every tile.
                assert own == wanted or (not wanted and own == set(blocks[:1]))
                assert split.full == plan.full


@pytest.mark.parametrize(
    ("row_tiles", "heads", "swizzle_group"), [(1, 1, 1), (5, 7, 1), (5, 7, 4), (3, 8, 16)]
)
def test_tile_order(native: ctypes.CDLL, row_tiles: int, heads: int, swizzle_group: int) -> None:
    result, places = (ctypes.c_int * 2)(), []
    for tile in range(row_tiles * heads):
        native.place(row_tiles, heads, swizzle_group, tile, result)
        places.append((result[0], result[1]))
    assert sorted(places) == sorted(itertools.product(range(row_tiles), range(heads)))
    for start in range(0, heads, swizzle_group):
        within = [row for row, head in places if start <= head < start + swizzle_group]
        assert within == sorted(within, reverse=True), "the longest tiles come first"


def test_descriptors(native: ctypes.CDLL) -> None:
    """Fields as the PTX manual's matrix descriptor has them."""
    address = 0x2A400
    k_major, n_major = native.k_major(address), native.n_major(address, 80 * 128)
    for value, leading in ((k_major, 1), (n_major, 80 * 128 // 16)):
        assert value & 0x3FFF == address // 16
        assert value >> 16 & 0x3FFF == leading
        assert value >> 32 & 0x3FFF == 1024 // 16
        assert value >> 62 == 1
    # 16 columns on: 32 bytes inside a chunk of 64 columns, then the next chunk.
    assert [native.k_step(i, 80) for i in (0, 1, 3, 4, 9)] == [0, 32, 96, 10240, 20512]
    assert native.n_step(3) == 3 * 16 * 128


def test_swizzle_is_a_permutation_without_bank_conflicts(native: ctypes.CDLL) -> None:
    offsets = {native.swizzled(row, piece) for row in range(64) for piece in range(8)}
    assert offsets == {16 * i for i in range(64 * 8)}
    for piece in range(
        8
    ):  # eight rows of one piece, as a matrix store writes them, touch all banks
        assert len({native.swizzled(row, piece) // 16 % 8 for row in range(8)}) == 8
