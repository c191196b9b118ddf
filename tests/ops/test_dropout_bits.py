"""Dropout bits: the C++ functions, PyTorch's operators and the definition written out in Python."""

import random
from types import ModuleType

import pytest
import torch

from fastattn.ops import _dropout

MASK = 0xFFFFFFFF
ROW_TAG, COLUMN_TAG = 0x243F6A88, 0x85A308D3


def finalise(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D & MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & MASK
    return x ^ (x >> 16)


def keys(tag: int, seed: int, stream: int, *values: int) -> int:
    state = tag
    for value in (seed & MASK, (seed >> 32) & MASK, stream, *values):
        state = finalise(((state ^ value) + 0x9E3779B9) & MASK)
    return state


def attention_byte(seed: int, stream: int, b: int, h: int, i: int, j: int) -> int:
    row = keys(ROW_TAG, seed, stream, b, h, i // 16 * 8 + i % 8)
    column = keys(COLUMN_TAG, seed, stream, j // 16 * 8 + j % 8)
    index = 2 * (i // 8 % 2) + j // 8 % 2
    return finalise(row ^ column) >> (8 * index) & 0xFF


def row_byte(seed: int, stream: int, row: int, column: int) -> int:
    key = keys(ROW_TAG, seed, stream, row >> 32, 0, row & MASK)
    word = finalise(key ^ keys(COLUMN_TAG, seed, stream, column // 4))
    return word >> (8 * (column % 4)) & 0xFF


@pytest.fixture(scope="module")
def host() -> ModuleType:
    return pytest.importorskip("fastattn._host", reason="part of development installs only")


SEEDS = (0, 1, -1, 0x1234_5678_9ABC, -(2**63), 2**63 - 1)
STREAMS = (0, 3, 2**31 - 1, 2**31 + 5)


def test_the_definition_does_not_change(host: ModuleType) -> None:
    """Published bits: a change changes what a saved seed reproduces."""
    assert host.finalise(1) == 0x688990C0 == finalise(1)
    assert [host.row_byte(42, 7, 5, c) for c in range(8)] == [204, 34, 21, 20, 147, 163, 158, 249]
    found = [host.attention_byte(42, 7, 1, 2, i, j) for i in (0, 8) for j in (3, 11)]
    assert found == [127, 58, 68, 254]


def test_bits_follow_the_definition(host: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(300):
        seed, stream = draw.choice(SEEDS), draw.choice(STREAMS)
        b, h, i, j = (draw.randrange(1 << 20) for _ in range(4))
        row, column = draw.randrange(1 << 40), draw.randrange(1 << 33)
        x, y = draw.randrange(1 << 32), draw.randrange(1 << 32)
        assert host.absorb(x, y) == finalise(((x ^ y) + 0x9E3779B9) & MASK)
        assert host.row_key(seed, stream, b, h, i) == keys(ROW_TAG, seed, stream, b, h, i)
        assert host.column_key(seed, stream, j) == keys(COLUMN_TAG, seed, stream, j)
        assert host.attention_byte(seed, stream, b, h, i, j) == attention_byte(
            seed, stream, b, h, i, j
        )
        assert host.row_byte(seed, stream, row, column) == row_byte(seed, stream, row, column)


@pytest.mark.parametrize("seed", SEEDS)
def test_torch_draws_the_same_bits(host: ModuleType, seed: int) -> None:
    p, stream = 0.37, 9
    t, tensor = host.threshold(p), torch.tensor([seed])
    rows = torch.from_numpy(host.row_bytes(seed, stream, 19, 37))
    assert torch.equal(_dropout.row_keep(tensor, stream, p, 19, 37), rows >= t)
    lattice = torch.from_numpy(host.attention_bytes(seed, stream, 2, 3, 35, 50))
    assert torch.equal(_dropout.attention_keep(tensor, stream, p, 2, 3, 35, 50), lattice >= t)


@pytest.mark.parametrize("p", [0.0, 1e-9, 1 / 512, 0.1, 0.5, 0.9, 0.997, 1 - 1e-12, 1.0])
def test_threshold(host: ModuleType, p: float) -> None:
    t = host.threshold(p)
    assert t == _dropout.threshold(p)
    assert (t == 0) == (p == 0) and (t == 256) == (p == 1)
    assert abs(t / 256 - p) <= 1 / 256
    assert host.keep_scale(t) == pytest.approx(_dropout.keep_scale(p), rel=1e-6)
    assert host.keep_scale(t) * (256 - t) == pytest.approx(256 if t < 256 else 0)
