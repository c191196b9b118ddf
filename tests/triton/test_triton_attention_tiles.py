"""Which tiles attention's kernels in Triton visit, and what else follows from a call's sizes:
bounds, dead rows and keys, column tiles of head dims, workspaces.

On a GPU everything runs natively. Without one, test_in_the_interpreter.py runs this file
in Triton's interpreter.
"""

# ruff: noqa: E402  (the interpreter is patched before kernels are imported)

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn.ops import _env

triton = pytest.importorskip("triton")
if _env.interpreting():
    import patched_interpreter

    patched_interpreter.install()

import triton.language as tl
from attention_options import packing

from fastattn.ops.attention import prepared, reference
from fastattn.ops.attention.calls import BackwardCall, ForwardCall, Gradients
from fastattn.ops.attention.triton import backward, base_tiles, bwd_bind, mask_lists
from fastattn.ops.attention.triton import tiles as device_tiles
from fastattn.ops.attention.triton.bwd_config import BwdConfig, BwdTile
from fastattn.ops.attention.triton.bwd_parts import LSE_DELTA_ALIGNMENT
from fastattn.ops.attention.triton.call_shape import call_shape_of
from fastattn.ops.attention.triton.tiles import KernelConstants

DEVICE = _env.default_device()
NATIVE = DEVICE.type == "cuda"
runs = pytest.mark.skipif(
    not NATIVE and not _env.interpreting(),
    reason="runs on a GPU, or in the interpreter's own process",
)


# -- tiles to visit -------------------------------------------------------------------------------


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
    """The expected results of tile_range, from all pairs: first, full_first, full_last, last."""
    q, k = torch.empty(1, 1, M, 1), torch.empty(1, 1, N, 1)
    call = ForwardCall(q, k, k, causal=causal, window_left=left, window_right=right)
    allowed = reference.allowed_pairs(call)[0, 0]
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
def test_tile_range_matches_allowed_pairs(causal: int, left: int, right: int) -> None:
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
def test_forward_lists_match_the_mask(letters: str, words: bool) -> None:
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


@runs
@pytest.mark.parametrize(
    "letters, is_prepared, by_key",
    [
        ("BHMN", False, False),
        ("BHMN", True, True),
        ("MN", True, False),
        ("HN", False, True),
        ("none", False, False),
        ("none", False, True),
    ],
)
def test_backward_lists_match_allowed_pairs(letters: str, is_prepared: bool, by_key: bool) -> None:
    """Every tile with an allowed pair is listed once. Full tiles have nothing else, and only edge
    tiles have lines without a pair. is_prepared: the mask was prepared.
    """
    (B, H, M, N), (block_m, block_n) = (2, 2, 70, 50), (32, 16)
    generator = torch.Generator().manual_seed(len(letters))
    shape = [size if d in letters else 1 for size, d in zip((B, H, M, N), "BHMN", strict=True)]
    mask = torch.rand(shape, generator=generator) > 0.1
    mask[..., :40, :33] = True
    mask[..., 40:] = mask[..., 40:] & (shape[3] == 1)
    mask = None if letters == "none" else mask
    lengths = torch.randint(20, N + 1, (B, M), generator=generator, dtype=torch.int32)
    lengths[:, :35] = 50
    queries = torch.tensor([70, 33], dtype=torch.int32)
    q, k = torch.empty(B, H, M, 1), torch.empty(B, H, N, 1)
    call = ForwardCall(q, k, k, mask, None, lengths, queries, causal=2)
    allowed = reference.allowed_pairs(call).expand(B, H, M, N)

    mask = None if mask is None else mask.to(DEVICE)
    lengths, queries = lengths.to(DEVICE), queries.to(DEVICE)
    words = prepared.classify(mask) if is_prepared and mask is not None else None
    inputs = q.to(DEVICE), k.to(DEVICE), k.to(DEVICE), mask, words, lengths, queries
    facts = call_shape_of(ForwardCall(*inputs, causal=2))
    base = base_tiles.base_tiles(facts, 16, 16)
    lists = mask_lists.base_tile_lists(base, block_m, block_n, by_key)
    bits = torch.full(base.shape, 1 << 6, dtype=torch.uint8, device=DEVICE)
    alive = torch.full((*base.shape, 16), 1 << 6, dtype=torch.uint8, device=DEVICE)
    listed = torch.full(lists.shape, 1 << 30, dtype=torch.int32, device=DEVICE)
    base_tiles.classifier(base, facts, words)(
        mask, words, device_tiles.LengthTensors(lengths, queries), bits, alive
    )
    mask_lists.tile_lister(base, lists, by_key)(bits, listed)

    outer, inner = (block_n, block_m) if by_key else (block_m, block_n)
    for b in range(B):
        for h in range(H):
            pairs = allowed[b, h].T if by_key else allowed[b, h]
            for o, lines in enumerate(pairs.split(outer)):
                row = listed[b, min(h, lists.heads - 1), o].tolist()
                entries = row[4 : 4 + sum(row[:3])]
                full, rest = entries[: row[0]], entries[row[0] :]
                partial_, edge = rest[: row[1]], rest[row[1] :]
                some = [t for t, tile in enumerate(lines.split(inner, 1)) if tile.any()]
                assert sorted(entries) == some
                for t in full + partial_:
                    tile = lines.split(inner, 1)[t]
                    assert tile.any(0).all() and tile.shape[1] == inner
                    assert t in partial_ or tile.all()
                assert all(x == sorted(x) for x in (full, partial_, edge))
    if not by_key:
        for m in range(base.tiles_m):
            rows = allowed[:, : base.heads, m * 16 : m * 16 + 16].any(2)
            assert torch.equal(alive.cpu()[:, :, m].flatten(2)[..., :N] > 0, rows)


# -- what follows from sizes ----------------------------------------------------------------------


def test_diagonal_bounds_match_allowed_pairs() -> None:
    for M, N, causal in itertools.product(range(1, 5), range(1, 5), range(3)):
        q, k = torch.empty(1, 1, M, 1), torch.empty(1, 1, N, 1)
        ahead = torch.arange(N) - torch.arange(M)[:, None]
        for left, right in itertools.product(range(-1, 4), range(-1, 4)):
            call = ForwardCall(q, k, k, causal=causal, window_left=left, window_right=right)
            allowed = reference.allowed_pairs(call)[0, 0]
            bounds = device_tiles.diagonal_bounds(causal, left, right, M, N)
            above_low = (ahead >= bounds.low) | (not bounds.has_low)
            below_high = (ahead <= bounds.high) | (not bounds.has_high)
            case = M, N, causal, left, right
            assert torch.equal(above_low & below_high, allowed.expand(M, N)), case
            assert bounds.has_low == (not above_low.all()), case
            assert bounds.has_high == (not below_high.all()), case


def test_diagonal_bounds_drop_unrestricting_sides() -> None:
    assert device_tiles.diagonal_bounds(0, -1, -1, 5, 9) == (0, 0, False, False)
    assert device_tiles.diagonal_bounds(2, -1, -1, 1, 9) == (0, 0, False, False)  # decoding
    assert device_tiles.diagonal_bounds(1, -1, 3, 5, 9) == (0, 0, False, True)
    assert device_tiles.diagonal_bounds(0, 100, 2, 5, 9) == (0, 2, False, True)
    assert device_tiles.diagonal_bounds(2, 3, -1, 5, 9) == (1, 4, True, True)


def test_head_dims_are_split_to_pad_less() -> None:
    widths = {8: (16, 0), 24: (32, 0), 40: (32, 16), 64: (64, 0), 72: (64, 16), 96: (64, 32)}
    widths |= {120: (128, 0), 160: (128, 32), 192: (128, 64), 256: (256, 0)}
    for width, tiles in widths.items():
        assert device_tiles.split_width(width) == tiles, width


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_lse_and_delta_of_packed_sequences_fit(length: int) -> None:
    """lse and delta of each sequence begin at a multiple of a step, behind those of the last."""
    sequences, step = 40, LSE_DELTA_ALIGNMENT.value
    offsets = length * torch.arange(sequences + 1, dtype=torch.int32)
    q = torch.empty(sequences * length, 1, 8)
    needs = [True, True, True, False, False, False]
    packed = packing(offsets, offsets, length, length)
    call = BackwardCall(q, None, q, q[..., 0].T, q, q, q, **packed, needs=needs)
    [((_, rows), _, _)] = backward.attention_bwd_workspace(call)
    end = 0
    for b, query0 in enumerate(offsets[:-1].tolist()):
        begin = (query0 + b * (step - 1)) // step * step
        assert begin >= end and begin % step == 0
        end = begin + length
    assert end <= rows


def test_dead_rows_and_keys_match_allowed_pairs() -> None:
    for M, N, causal in itertools.product(range(1, 5), range(1, 5), range(3)):
        q, k = torch.empty(1, 1, M, 8), torch.empty(1, 1, N, 8)
        for left, right in itertools.product(range(-1, 4), range(-1, 4)):
            call = ForwardCall(q, k, k, causal=causal, window_left=left, window_right=right)
            facts = call_shape_of(call)
            pairs = reference.allowed_pairs(call).expand(1, 1, M, N)
            assert facts.dead_rows != pairs.any(3).all(), (M, N, causal, left, right)
            assert facts.dead_keys != pairs.any(2).all(), (M, N, causal, left, right)


def _constants(
    tiling: BwdConfig, M: int = 64, N: int = 64, expanded: str = ""
) -> tuple[KernelConstants, KernelConstants]:
    """Constants of the kernels for dq and for dk and dv. expanded: the tensor that serves both
    batches.
    """
    sizes = {"q": M, "k": N, "v": N, "dout": M, "out": M}
    x = {name: torch.empty(2, 2, n, 16, dtype=torch.float16) for name, n in sizes.items()}
    if expanded:
        x[expanded] = x[expanded][:1].expand(2, -1, -1, -1)
    lse, needs = x["out"][..., 0], [True, True, True, False, False, False]
    call = BackwardCall(x["dout"], None, x["out"], lse, x["q"], x["k"], x["v"], needs=needs)
    none = torch.empty(0)
    gradients = Gradients(*(torch.empty_like(x[name]) for name in "qkv"), none, none, none)
    layout = bwd_bind.layout_of(tiling, call)
    binder = bwd_bind._Binder(layout, call_shape_of(call), call, gradients, True)
    [(dkdv, _, _)] = binder.dkdv()
    return binder.dq().func.constants["CASE"], dkdv.func.constants["CASE"]


@pytest.mark.parametrize("expanded", ["", "q", "k", "v", "dout"])
def test_descriptors_depend_on_the_tensors_that_the_loop_reads(expanded: str) -> None:
    tile = BwdTile(32, 32, 4, 1, tma=True)
    dq, dkdv = _constants(BwdConfig(tile, tile), expanded=expanded)
    assert dq.TMA.value == (expanded not in ("k", "v"))
    assert dkdv.TMA.value == (expanded not in ("q", "dout"))


def test_ragged_depends_on_the_tiles_of_the_loop() -> None:
    tiling = BwdConfig(BwdTile(32, 64, 4, 1), BwdTile(64, 32, 4, 1))
    for size in (32, 64, 96, 128):
        dq, dkdv = _constants(tiling, M=size, N=160 - size)
        assert not dq.ARITHMETIC.value and not dkdv.ARITHMETIC.value
        assert dq.RAGGED.value == ((160 - size) % 64 != 0)
        assert dkdv.RAGGED.value == (size % 64 != 0)
