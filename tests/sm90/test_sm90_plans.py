"""Which blocks of keys the Hopper attention forward computes, and in which order.

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
