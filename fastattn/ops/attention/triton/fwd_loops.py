"""The loops of attention's forward in Triton over the key tiles of a tile of queries.

Full tiles need no mask work, partial tiles read the dense mask, edge tiles pass every test and read
as zero the values of keys that no query of the tile may attend. Without a dense mask the tiles are
ranges, with one they are lists, of which restrictions by arithmetic leave ranges: what is full or
partial and lies at a boundary of these is processed with the edge tiles. One tile's work is in
fwd_parts.py.

Every loop is in an if: where a loop of no trips joins accumulators with products in flight, ptxas
gives up overlapping any products (C7515).
"""

# ruff: noqa: E741  (l is the row sum everywhere in this project)

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.ops.attention.triton.fwd_parts import (
    Sums,
    add_values,
    attend_tile,
    changed,
    online_softmax,
    tile_scores,
)
from fastattn.ops.attention.triton.mask_lists import list_counts, list_of, listed_below
from fastattn.ops.attention.triton.tiles import EDGE, FULL, PARTIAL

# -- which tiles ----------------------------------------------------------------------------------


class TileBounds(NamedTuple):
    """The result of tile_range: [full_first, full_last) is full, the rest of [first, last) edge."""

    first: Any
    full_first: Any
    full_last: Any
    last: Any


class Spans(NamedTuple):
    """[begin, end) of the full and partial ones, numbers of tiles or, with a dense mask, places in
    their lists; how many edge tiles.
    """

    full_begin: Any
    full_end: Any
    partial_begin: Any
    partial_end: Any
    n_edge: Any


class Runs(NamedTuple):
    """The edge loop under a dense mask and arithmetic: from `edge` on the EDGE list, until that
    many have been processed, then the two ends of the FULL list and those of the PARTIAL list.
    """

    edge: Any
    until_edge: Any
    full_left: Any
    until_full_left: Any
    full_right: Any
    until_full_right: Any
    partial_left: Any
    until_partial_left: Any
    partial_right: Any


class Tiles(NamedTuple):
    """Under a dense mask lists_ptr points at the three lists of `inner` places each, partial_ptr at
    the second; runs: where arithmetic bounds them, too.
    """

    bounds: TileBounds
    spans: Spans
    runs: Runs | None
    lists_ptr: Any
    partial_ptr: Any
    inner: Any


@triton.jit
def whole_lists(lists_ptr):
    """Spans under a dense mask alone."""
    n_full, n_partial, n_edge = list_counts(lists_ptr)
    return Spans(0, n_full, 0, n_partial, n_edge)


@triton.jit
def bounded_lists(lists_ptr, inner, bounds):
    """(Spans, Runs) under a dense mask where arithmetic bounds the lists, too."""
    n_full, n_partial, edge_count = list_counts(lists_ptr)
    partial_ptr = list_of(lists_ptr, inner, PARTIAL)
    edge_ptr = list_of(lists_ptr, inner, EDGE)
    full_0, full_1, full_2, full_3 = crossings(list_of(lists_ptr, inner, FULL), n_full, bounds)
    partial_0, partial_1, partial_2, partial_3 = crossings(partial_ptr, n_partial, bounds)
    edge_0 = listed_below(edge_ptr, edge_count, bounds.first)
    edge_3 = listed_below(edge_ptr, edge_count, bounds.last)
    until_edge = edge_3 - edge_0
    until_full_left = until_edge + full_1 - full_0
    until_full_right = until_full_left + full_3 - full_2
    until_partial_left = until_full_right + partial_1 - partial_0
    n_edge = until_partial_left + partial_3 - partial_2
    runs = Runs(
        edge_0, until_edge, full_0, until_full_left, full_2, until_full_right, partial_0,
        until_partial_left, partial_2,
    )  # fmt: skip
    return Spans(full_1, full_2, partial_1, partial_2, n_edge), runs


@triton.jit
def crossings(list_ptr, count, bounds):
    """The entries at which an ascending list of tiles crosses the bounds."""
    return (
        listed_below(list_ptr, count, bounds.first),
        listed_below(list_ptr, count, bounds.full_first),
        listed_below(list_ptr, count, bounds.full_last),
        listed_below(list_ptr, count, bounds.last),
    )


@triton.jit
def full_tile(tiles, index, AHEAD: tl.constexpr, CASE: tl.constexpr):
    """The tile AHEAD places behind the index-th of the full ones."""
    if CASE.DENSE:
        return tl.load(tiles.lists_ptr + index + AHEAD)
    else:
        return index + AHEAD


@triton.jit
def edge_tile(tiles, index, CASE: tl.constexpr):
    """The index-th of the edge loop."""
    if CASE.DENSE:
        position = EDGE * tiles.inner + index
        if CASE.ARITHMETIC:
            runs = tiles.runs
            full = FULL * tiles.inner
            partial = PARTIAL * tiles.inner
            position += runs.edge
            past = index - runs.until_edge
            position = tl.where(past >= 0, full + runs.full_left + past, position)
            past = index - runs.until_full_left
            position = tl.where(past >= 0, full + runs.full_right + past, position)
            past = index - runs.until_full_right
            position = tl.where(past >= 0, partial + runs.partial_left + past, position)
            past = index - runs.until_partial_left
            position = tl.where(past >= 0, partial + runs.partial_right + past, position)
        return tl.load(tiles.lists_ptr + position)
    else:
        first, full_first, full_last, _ = tiles.bounds
        tile = first + index
        return tl.where(tile < full_first, tile, tile + full_last - full_first)


# -- loops ----------------------------------------------------------------------------------------


@triton.jit
def attend_edge_tiles(sums, tiles, given, CASE: tl.constexpr):
    n_edge = tiles.spans.n_edge
    if n_edge > 0:
        for index in tl.range(0, n_edge, num_stages=CASE.EDGE_STAGES):
            sums = attend_tile(sums, edge_tile(tiles, index, CASE), given, EDGE, CASE)
    return sums


@triton.jit
def attend_partial_tiles(sums, tiles, given, CASE: tl.constexpr):
    begin, end = tiles.spans.partial_begin, tiles.spans.partial_end
    if begin < end:
        for index in tl.range(begin, end, num_stages=CASE.STAGES):
            sums = attend_tile(sums, tl.load(tiles.partial_ptr + index), given, PARTIAL, CASE)
    return sums


@triton.jit
def attend_full_tiles(sums, tiles, given, CASE: tl.constexpr):
    begin, end = tiles.spans.full_begin, tiles.spans.full_end
    if begin < end:
        for index in tl.range(begin, end, num_stages=CASE.STAGES):
            sums = attend_tile(sums, full_tile(tiles, index, 0, CASE), given, FULL, CASE)
    return sums


@triton.jit
def attend_full_tiles_ahead(sums, tiles, given, SCORES_FIRST: tl.constexpr, CASE: tl.constexpr):
    """The product of the next scores is under way while the tensor cores would else wait for the
    exponentials: SCORES_FIRST starts it before them, else they have the last product with values.
    """
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
    m, l, acc = sums
    begin, end = tiles.spans.full_begin, tiles.spans.full_end
    if begin < end:
        s = tile_scores(given, full_tile(tiles, begin, 0, CASE) * BLOCK_N, None, False, CASE)
        if begin + 1 < end:
            for index in tl.range(begin, end - 1, num_stages=CASE.STAGES):
                tile = full_tile(tiles, index, 0, CASE)
                next_tile = full_tile(tiles, index, 1, CASE)
                n_start = tile * BLOCK_N
                n_next = next_tile * BLOCK_N
                if SCORES_FIRST:
                    s_next = tile_scores(given, n_next, None, False, CASE)
                s = changed(s, given, n_start, CASE)
                p, alpha, m, l = online_softmax(s, m, l, given, n_start, CASE.DISTANCE, CASE)
                p = p.to(given.q[0].dtype)
                if not SCORES_FIRST:
                    s_next = tile_scores(given, n_next, None, False, CASE)
                acc = add_values(acc, p, alpha, given, n_start, None, False, CASE)
                s = s_next
        n_start = full_tile(tiles, end - 1, 0, CASE) * BLOCK_N
        s = changed(s, given, n_start, CASE)
        p, alpha, m, l = online_softmax(s, m, l, given, n_start, CASE.DISTANCE, CASE)
        acc = add_values(acc, p, alpha, given, n_start, None, False, CASE)
    return Sums(m, l, acc)
