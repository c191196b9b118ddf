"""Which tiles attention's kernels in Triton visit, and how head dims are cut in two.

On a GPU everything runs natively. Without one, this file runs itself once more in Triton's
interpreter.
"""

# ruff: noqa: E402  (the interpreter is patched before kernels are imported)

import itertools
from typing import Any

import pytest
import torch
from subprocesses import passed_in_the_interpreter
from torch import Tensor

from fastattn.ops import _env

triton = pytest.importorskip("triton")
if _env.interpreting():
    import patched_interpreter

    patched_interpreter.install()

import triton.language as tl
from compiled_kernels import compiles

from fastattn.ops.attention import prepared, reference
from fastattn.ops.attention.triton import mask_lists
from fastattn.ops.attention.triton import tiles as device_tiles

DEVICE = _env.default_device()
NATIVE = DEVICE.type == "cuda"
runs = pytest.mark.skipif(
    not NATIVE and not _env.interpreting(),
    reason="runs on a GPU, or in the interpreter's own process",
)


@triton.jit
def _tile_range_kernel(
    out_ptr,
    begin,
    end,
    limit,
    low,
    high,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    found = device_tiles.tile_range(
        begin, end, limit, limit, low, high, HAS_LOW, HAS_HIGH, BLOCK
    )  # fmt: skip
    tl.store(out_ptr + 0, found[0])
    tl.store(out_ptr + 1, found[1])
    tl.store(out_ptr + 2, found[2])
    tl.store(out_ptr + 3, found[3])


def _allowed_by_tiles(
    M: int, N: int, causal: int, left: int, right: int, rows: tuple[int, int], block: int
) -> tuple[int, int, int, int]:
    """What tile_range should say, by looking at every pair: first, full_first, full_last, last."""
    q, k = torch.empty(1, 1, M, 1), torch.empty(1, 1, N, 1)
    allowed = reference.allowed_pairs(q, k, None, None, None, causal, left, right)[0, 0]
    tiles = allowed[rows[0] : rows[1]].split(block, dim=1)
    some = [i for i, tile in enumerate(tiles) if tile.any()]
    full = [i for i, tile in enumerate(tiles) if tile.all() and tile.shape[1] == block]
    if not some:
        return (0, 0, 0, 0)
    full = full or [some[-1] + 1]
    return (some[0], full[0], full[-1] + 1 if full[0] <= some[-1] else full[0], some[-1] + 1)


@runs
@pytest.mark.parametrize(
    "causal, left, right",
    [
        *((0, -1, -1), (1, -1, -1), (2, -1, -1)),
        *((0, 5, 3), (1, 20, -1), (2, 40, -1), (0, 0, 0), (0, -1, 9)),
    ],
)
def test_tile_range_is_what_the_pairs_say(causal: int, left: int, right: int) -> None:
    large, small = ((70, 70), (40, 100), (100, 40)), ((2, 2), (2, 9), (9, 2))
    for (M, N), block in (*((sizes, 16) for sizes in large), *((sizes, 1) for sizes in small)):
        bounds = device_tiles.diagonal_bounds(causal, left, right, M, N)
        for start in range(0, M, 32):
            rows = (start, min(start + 32, M))
            out = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)
            _tile_range_kernel[(1,)](
                out, *rows, N, bounds.low, bounds.high, HAS_LOW=bounds.has_low,
                HAS_HIGH=bounds.has_high, BLOCK=block,
            )  # fmt: skip
            first, full_first, full_last, last = out.tolist()
            expected = _allowed_by_tiles(M, N, causal, left, right, rows, block)
            if expected[3] == expected[0]:
                assert first == last, (M, N, rows)
                continue
            assert (first, last) == (expected[0], expected[3]), (M, N, rows)
            if expected[1] < expected[2]:
                assert (full_first, full_last) == expected[1:3], (M, N, rows)
            else:
                assert full_first == full_last, (M, N, rows)


def _lists_of(mask: Tensor, M: int, N: int, block_m: int, block_n: int) -> list[Any]:
    """For every (batch, head, query tile) the FULL, PARTIAL and EDGE key tiles, by definition."""
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    plain = mask if mask.dtype == torch.bool else mask == 0
    rows = []
    for b in range(mask.shape[0]):
        for h in range(mask.shape[1]):
            a, p = (x[b, h].expand(M, N) for x in (allowed, plain))
            for lines_a, lines_p in zip(a.split(block_m), p.split(block_m), strict=True):
                lists: list[list[int]] = [[], [], []]
                pairs = zip(lines_a.split(block_n, 1), lines_p.split(block_n, 1), strict=True)
                for t, (tile, zero) in enumerate(pairs):
                    if tile.shape[1] < block_n or not tile.any(0).all():
                        kind = 2
                    else:
                        kind = 0 if zero.all() else 1
                    if tile.any():
                        lists[kind].append(t)
                rows.append(lists)
    return rows


@runs
@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("letters", ["BHMN", "MN", "BN", "HM", "HMN", ""])
def test_mask_tiles_are_what_the_mask_says(letters: str, words: bool) -> None:
    """words: listed from a prepared mask."""
    generator = torch.Generator().manual_seed(len(letters))
    sizes = {"B": 2, "H": 3, "M": 70, "N": 75}
    M, N = sizes["M"], sizes["N"]
    shape = [sizes[d] if d in letters else 1 for d in "BHMN"]
    mask = torch.rand(shape, generator=generator) > 0.2
    mask[:, :, :33, :32] = True
    mask[..., 40:, :] = mask[..., 40:, :] & (shape[2] == 1)
    mask[..., 64:] = False
    for values in (mask, torch.where(mask, 0.0, -torch.inf).half()):
        values = values.to(DEVICE)
        described = device_tiles.mask_shape(values)
        layout = mask_lists.mask_lists(described, M, N, 32, 16)
        lists = torch.full(layout.shape, 1 << 30, dtype=torch.int32, device=DEVICE)
        if words:
            tiled = prepared.classify(values)
            mask_lists.prepared_lister(layout, tiled, M, N)(tiled, lists)
        else:
            mask_lists.mask_lister(described, layout, M, N, 32, 16)(values, lists)
        expected = _lists_of(values.cpu(), M, N, 32, 16)
        outer = len(expected) // (layout.shape[0] * layout.shape[1])
        for n, kinds in enumerate(expected):
            batch_head, tile = divmod(n, outer)
            row = lists.flatten(0, 1)[batch_head, min(tile, layout.shape[2] - 1)].tolist()
            for kind, tiles in enumerate(kinds):
                begin = 4 + kind * layout.inner
                assert row[begin : begin + row[kind]] == tiles, (n, kind)


def test_band_is_what_the_pairs_say() -> None:
    for M, N, causal in itertools.product(range(1, 5), range(1, 5), range(3)):
        q, k = torch.empty(1, 1, M, 1), torch.empty(1, 1, N, 1)
        ahead = torch.arange(N) - torch.arange(M)[:, None]
        for left, right in itertools.product(range(-1, 4), range(-1, 4)):
            allowed = reference.allowed_pairs(q, k, None, None, None, causal, left, right)[0, 0]
            bounds = device_tiles.diagonal_bounds(causal, left, right, M, N)
            above_low = (ahead >= bounds.low) | (not bounds.has_low)
            below_high = (ahead <= bounds.high) | (not bounds.has_high)
            case = M, N, causal, left, right
            assert torch.equal(above_low & below_high, allowed.expand(M, N)), case
            assert bounds.has_low == (not above_low.all()), case
            assert bounds.has_high == (not below_high.all()), case


def test_band_drops_what_restricts_nothing() -> None:
    assert device_tiles.diagonal_bounds(0, -1, -1, 5, 9) == (0, 0, False, False)
    assert device_tiles.diagonal_bounds(2, -1, -1, 1, 9) == (0, 0, False, False)  # decoding
    assert device_tiles.diagonal_bounds(1, -1, 3, 5, 9) == (0, 0, False, True)
    assert device_tiles.diagonal_bounds(0, 100, 2, 5, 9) == (0, 2, False, True)
    assert device_tiles.diagonal_bounds(2, 3, -1, 5, 9) == (1, 4, True, True)


def test_head_dims_are_split_where_that_pads_less() -> None:
    widths = {8: (16, 0), 24: (32, 0), 40: (32, 16), 64: (64, 0), 72: (64, 16), 96: (64, 32)}
    widths |= {120: (128, 0), 160: (128, 32), 192: (128, 64), 256: (256, 0)}
    for width, tiles in widths.items():
        assert device_tiles.split_width(width) == tiles, width


@pytest.mark.long
@compiles
@pytest.mark.skipif(NATIVE, reason="the GPU runs them")
def test_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(__file__) >= 20
