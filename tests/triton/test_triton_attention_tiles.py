"""Which tiles attention's kernels in Triton visit, and what else follows from a call's sizes:
bounds, dead rows and keys, column tiles of head dims, workspaces.

On a GPU everything runs natively. Without one, test_in_the_interpreter.py runs this file
in Triton's interpreter.
"""

import itertools
from functools import partial

import pytest
import torch
from attention_options import packing
from triton_values import DEVICE, interpreted, launched_by, runs

from fastattn.ops.attention import prepared, reference, spec
from fastattn.ops.attention.calls import BackwardCall, ForwardCall, Gradients
from fastattn.ops.attention.spec_inputs import allowed_of, make_inputs
from fastattn.ops.attention.triton import backward, base_tiles, bwd_bind, forward, mask_lists
from fastattn.ops.attention.triton import tiles as device_tiles
from fastattn.ops.attention.triton.bwd_config import BwdConfig, BwdTile
from fastattn.ops.attention.triton.bwd_parts import LSE_DELTA_ALIGNMENT
from fastattn.ops.attention.triton.call_shape import call_shape_of
from fastattn.ops.attention.triton.fwd_config import ForwardConfig
from fastattn.ops.attention.triton.tiles import KernelConstants

# -- tiles to visit -------------------------------------------------------------------------------
_SIZES = {"B": 1, "M": 70, "N": 75, "D": 16}
_MASK = {"B": 2, "H": 3, "mask": "blocks BHMN"}


@interpreted
@pytest.mark.parametrize("options", [
    *({"causal": causal, **_SIZES} for causal in (False, "top_left", "bottom_right")),
    *({"window": window, **_SIZES} for window in ((5, 3), (0, 0), (-1, 9))),
    {**_SIZES, "causal": "top_left", "window": (20, -1), "key_lengths": [33]},
    {**_SIZES, "causal": "top_left", "window": (20, -1), "query_lengths": [33]},
    *({**_SIZES, **_MASK, "prepared": prepared} for prepared in (False, True)),
    *({**_SIZES, **_MASK, "mask": f"blocks {letters}"} for letters in ("MN", "HMN")),
    {**_SIZES, "mask": "rows N"},
    {**_SIZES, "mask": "min_rows M"},
])  # fmt: skip
def test_only_tiles_with_allowed_pairs_are_computed(options, monkeypatch):
    """Two products for each tile of keys that some row of a tile of rows may attend."""
    from triton.runtime.interpreter import InterpreterBuilder

    products: list[int] = []
    dot = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda *args: (products.append(1), dot(*args))[1]
    )
    inputs = make_inputs(torch.Generator().manual_seed(1), torch.float32, **options)
    launch = partial(forward.attention_fwd_with_config, ForwardConfig(32, 16, 4, 1))
    with launched_by("attention_fwd", launch):
        spec.SPECS[0].function(**inputs, backend="triton")
    allowed = allowed_of(inputs).flatten(0, 1)
    tiles = [tile for rows in allowed.split(32, 1) for tile in rows.split(16, 2)]
    assert len(products) == 2 * sum(int(tile.flatten(1).any(1).sum()) for tile in tiles)


@runs
@pytest.mark.parametrize("letters, is_prepared, by_key", [
    ("BHMN", False, False), ("BHMN", True, True), ("MN", True, False), ("HN", False, True),
    ("none", False, False), ("none", False, True),
])  # fmt: skip
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
