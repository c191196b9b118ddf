"""Which blocks of rows the Hopper attention backward visits.

The kernel's own arithmetic, compiled for the host, against the definitions. The order of blocks and
what they compute is tested on the simulator (test_sm90_bwd_on_host.py).
"""

import ctypes
import itertools
import random

import pytest
from sm90_plans import backward
from sm90_plans.backward import CONFIGS, Arithmetic, Problem


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
