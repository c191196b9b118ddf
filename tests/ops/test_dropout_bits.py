"""The dropout bits: in PyTorch's operators, in C++ and by their definition; their statistics."""

import itertools
import random
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from dropout_definition import COLUMN_TAG, ROW_TAG, absorb, attention_byte, finalise, key, row_byte
from torch import Tensor

from fastattn.ops import _dropout as bits
from fastattn.testing import dropout_mask

SEEDS = (0, 1, -1, 0x0123_4567_89AB_CDEF, -(2**63), 2**63 - 1, 2**32)
STREAMS = (0, 3, 2**31 - 1, 2**31 + 5)


def _seed(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


@pytest.fixture(scope="module")
def host() -> ModuleType:
    return pytest.importorskip("fastattn._host", reason="part of development installs only")


# Fixed values: a change of the definition changes all stored results of seeded calls.
KNOWN_WORDS = {0: 0, 1: 0x688990C0, 0x12345678: 0xF5E71C96, 0xFFFFFFFF: 0x6768824A}
KNOWN_BYTES = {
    "attention": [137, 199, 162, 215, 183, 194, 189, 160, 201, 60, 143, 49],
    "rows": [246, 79, 191, 98, 152, 185, 60, 6, 130, 242, 51, 117],
}


def test_known_vectors() -> None:
    for x, word in KNOWN_WORDS.items():
        assert finalise(x) == word == int(bits.finalise(torch.tensor(x)))
    assert [attention_byte(42, 7, 1, 2, i, 9) for i in range(12)] == KNOWN_BYTES["attention"]
    assert [row_byte(-42, 7, 3, c) for c in range(12)] == KNOWN_BYTES["rows"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stream", [0, 7, 2**31 - 1])
def test_masks_follow_the_definition(seed: int, stream: int) -> None:
    B, H, M, N = 2, 3, 19, 35
    written = [
        [[[attention_byte(seed, stream, b, h, i, j) for j in range(N)] for i in range(M)]
         for h in range(H)] for b in range(B)
    ]  # fmt: skip
    rows = [[row_byte(seed, stream, r, c) for c in range(N)] for r in range(M)]
    output_rows = [[row_byte(seed, stream + 2**31, r, c) for c in range(N)] for r in range(M)]
    for p, t in ((0.004, 1), (0.3, 77), (0.9, 230)):
        keep = dropout_mask(_seed(seed), stream, p, (B, H, M, N))
        assert torch.equal(keep, torch.tensor(written) >= t)
        keep = dropout_mask(_seed(seed), stream, p, (M, N))
        assert torch.equal(keep, torch.tensor(rows) >= t)
        keep = dropout_mask(_seed(seed), stream + 2**31, p, (M, N))
        assert torch.equal(keep, torch.tensor(output_rows) >= t)


@pytest.mark.parametrize(
    "origin",
    [(1, 2, 16, 48), (2**32 - 1, 2**32 + 3, 2**33 - 16, 2**40), (-1, 2**63 - 1, -(2**63), -32)],
)
def test_an_origin_moves_the_mask(host: ModuleType, origin: tuple[int, int, int, int]) -> None:
    """Sequences and heads count modulo 2^32, queries and keys modulo 2^33."""
    (B, H, M, N), (b0, h0, i0, j0), p = (2, 2, 19, 35), origin, 0.3
    written = [
        [[[attention_byte(-7, 3, b0 + b, h0 + h, i0 + i, j0 + j) for j in range(N)]
          for i in range(M)] for h in range(H)] for b in range(B)
    ]  # fmt: skip
    keep = torch.tensor(written) >= bits.threshold(p)
    seed = torch.tensor([-7, *origin])
    assert torch.equal(dropout_mask(seed, 3, p, (B, H, M, N)), keep)
    assert torch.equal(bits.attention_dropped(seed, 3, p, B, H, M, N), ~keep)
    assert torch.equal(
        bits.attention_dropped(seed, 3, p, 1, 1, 3, N, first=1, first_head=1, first_row=16),
        ~keep[1:, 1:, 16:],
    )
    assert host.attention_bytes([-7, *origin], 3, B, H, M, N).tolist() == written


def test_rows_beyond_32_bits() -> None:
    """A mask of this size does not fit in memory, but its keys can be tested."""
    row = 2**32 + 5
    row_key = bits.row_key(_seed(3), 0, row >> 32, 0, torch.tensor([row & 0xFFFFFFFF]))
    word = bits.finalise(row_key ^ bits.column_key(_seed(3), 0, torch.tensor([2])))
    assert [int(word) >> 8 * i & 255 for i in range(4)] == [
        row_byte(3, 0, row, 8 + i) for i in range(4)
    ]
    assert row_byte(3, 0, row, 8) != row_byte(3, 0, 5, 8)


def test_finaliser_is_a_bijection() -> None:
    """No collisions among 2^20 words in three ranges."""
    for start in (0, 2**31 - 2**19, 2**32 - 2**20):
        words = bits.finalise(torch.arange(start, start + 2**20))
        assert words.unique().numel() == 2**20
        assert int(words.min()) >= 0 and int(words.max()) < 2**32


def test_finaliser_avalanches() -> None:
    """Flipping any input bit flips every output bit in about half of the words."""
    x = torch.randint(0, 2**32, (4096,), generator=torch.Generator().manual_seed(0))
    for bit in range(32):
        changed = bits.finalise(x) ^ bits.finalise(x ^ (1 << bit))
        flips = torch.stack([(changed >> i & 1).double().mean() for i in range(32)])
        # 8 sigma of a fair coin is 0.0625; this finaliser's bias is far below.
        assert float((flips - 0.5).abs().max()) < 0.0625, bit


@pytest.mark.parametrize(
    "p, t",
    [
        (0.0, 0),
        (1e-9, 1),
        (0.001, 1),
        (1 / 256, 1),
        (1.49 / 256, 1),
        (1.5 / 256, 2),
        (0.1, 26),
        (0.5, 128),
        (0.75, 192),
        (0.998, 255),
        (0.9999, 255),
        (1.0, 256),
    ],
)
def test_threshold(p: float, t: int) -> None:
    assert bits.threshold(p) == t
    scale = bits.keep_scale(p)
    assert scale == (0.0 if t == 256 else 256 / (256 - t))
    if t < 256:
        assert (256 - t) / 256 * scale == 1.0, "the expectation is exact"
    keep = dropout_mask(_seed(1), 0, p, (64, 1024))
    if t in (0, 256):
        assert bool(keep.all()) == (t == 0) and bool(keep.any()) == (t == 0)
    expected = 1 - t / 256
    sigma = (expected * (1 - expected) / keep.numel()) ** 0.5
    assert abs(float(keep.double().mean()) - expected) <= 5 * sigma


@pytest.mark.parametrize(
    "seed, shape, message",
    [
        (torch.tensor([1], dtype=torch.int32), (2, 3), "seed must be int64"),
        (torch.tensor(1), (2, 3), r"seed must be int64 \[1\]"),
        (torch.zeros(5, dtype=torch.int64), (2, 3), r"seed must be int64 \[1\]"),
        (torch.zeros(2, dtype=torch.int64), (1, 1, 2, 3), r"or \[5\] for attention"),
        (_seed(1), (2, 3, 4), r"shape must be \[B, H, M, N\] or \[rows, N\]"),
    ],
)
def test_dropout_mask_refuses(seed: Tensor, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dropout_mask(seed, 0, 0.5, shape)


# -- statistics -----------------------------------------------------------------------------------
def _histogram(shape: tuple[int, ...], seed: int) -> Tensor:
    """How often each byte occurs, derived from masks."""
    kept = [int(dropout_mask(_seed(seed), 0, t / 256, shape).sum()) for t in range(257)]
    return torch.tensor([a - b for a, b in itertools.pairwise(kept)], dtype=torch.float64)


@pytest.mark.parametrize("shape", [(2, 2, 64, 128), (128, 256)])
@pytest.mark.parametrize("seed", [0, -3])
def test_bytes_are_balanced(shape: tuple[int, ...], seed: int) -> None:
    histogram = _histogram(shape, seed)
    expected = torch.Size(shape).numel() / 256
    assert histogram.sum() == torch.Size(shape).numel()
    chi2 = float(((histogram - expected) ** 2 / expected).sum())
    # 255 degrees of freedom: mean 255, deviation 22.6.
    assert 255 - 5 * 22.6 < chi2 < 255 + 5 * 22.6


def _signs(shape: tuple[int, ...], seed: int = 5, stream: int = 0) -> Tensor:
    """+1 or -1, each with probability 1/2."""
    return dropout_mask(_seed(seed), stream, 0.5, shape).double() * 2 - 1


def _assert_uncorrelated(a: Tensor, b: Tensor, what: str) -> None:
    correlation = float((a * b).mean())
    assert abs(correlation) < 5 * a.numel() ** -0.5, f"{what}: {correlation}"


LAGS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 32, 33, 64)


@pytest.mark.parametrize("shape", [(2, 2, 192, 192), (384, 384)])
def test_rows_and_columns_are_uncorrelated(shape: tuple[int, ...]) -> None:
    x = _signs(shape)
    for lag in LAGS:
        _assert_uncorrelated(x[..., lag:, :], x[..., :-lag, :], f"rows {lag} apart")
        _assert_uncorrelated(x[..., lag:], x[..., :-lag], f"columns {lag} apart")
        _assert_uncorrelated(x[..., lag:, lag:], x[..., :-lag, :-lag], f"diagonal {lag}")
        _assert_uncorrelated(x[..., lag:, :-lag], x[..., :-lag, lag:], f"other diagonal {lag}")


@pytest.mark.parametrize("shape", [(2, 2, 192, 192), (384, 384)])
def test_rectangles_are_uncorrelated(shape: tuple[int, ...]) -> None:
    """Words are made from (row key xor column key): the four corners must not be correlated."""
    x = _signs(shape)
    for lag in LAGS:
        rows = x[..., lag:, :] * x[..., :-lag, :]
        _assert_uncorrelated(rows[..., lag:], rows[..., :-lag], f"rectangles of side {lag}")


def test_heads_and_batches_are_uncorrelated() -> None:
    x = _signs((4, 5, 96, 128))
    for lag in (1, 2, 3):
        _assert_uncorrelated(x[:, lag:], x[:, :-lag], f"heads {lag} apart")
        _assert_uncorrelated(x[lag:], x[:-lag], f"batches {lag} apart")
    for b, h in itertools.combinations(range(4), 2):
        _assert_uncorrelated(x[b, h], x[h, b], f"b {b} and h {h} exchanged")


def _pairs_of_seeds_and_streams() -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    for a, b in ((0, 1), (1, 2), (0, 2**32), (1, 2**32 + 1), (5, -5), (-1, 0), (3, 3 << 32)):
        yield f"seeds {a} and {b}", (a, 0), (b, 0)
    for a, b in ((0, 1), (1, 2), (0, 2**31), (2**31 - 1, 2**31), (5, 5 + 2**31)):
        yield f"streams {a} and {b}", (9, a), (9, b)
    yield "seed and stream exchanged", (4, 7), (7, 4)


@pytest.mark.parametrize("shape", [(2, 2, 128, 128), (256, 256)])
def test_seeds_and_streams_are_uncorrelated(shape: tuple[int, ...]) -> None:
    for what, (seed, stream), (other_seed, other_stream) in _pairs_of_seeds_and_streams():
        a, b = _signs(shape, seed, stream), _signs(shape, other_seed, other_stream)
        _assert_uncorrelated(a, b, what)
        _assert_uncorrelated(a[..., 1:], b[..., :-1], f"{what}, shifted")


def test_row_sums_have_the_right_variance() -> None:
    """Rows that are too even or too uneven would pass the tests of pairs at small lags."""
    x = _signs((4, 4, 128, 256))
    for dim in (-1, -2):
        variance = float((x.sum(dim) / x.shape[dim] ** 0.5).square().mean())
        count = x.numel() / x.shape[dim]
        assert abs(variance - 1) < 5 * (2 / count) ** 0.5


@pytest.mark.parametrize("p", [1e-4, 0.3, 1.0])
def test_fast_bits_equal_the_definition(p: float) -> None:
    """With sizes that no block divides, first = 3, and a negative seed."""
    seed, M, N = _seed(-5), 37, 53
    keep = bits.attention_keep(seed, 9, p, 4, 3, M, N)
    assert torch.equal(bits.attention_dropped(seed, 9, p, 2, 3, M, N, first=2), ~keep[2:])
    assert torch.equal(bits.rows_dropped(seed, 9, p, M, N), ~bits.row_keep(seed, 9, p, M, N))


# -- in C++ ---------------------------------------------------------------------------------------
def test_known_vectors_in_cpp(host: ModuleType) -> None:
    """Published bits: a change changes what a saved seed reproduces."""
    assert host.finalise(1) == 0x688990C0 == finalise(1)
    assert [host.row_byte(42, 7, 5, c) for c in range(8)] == [204, 34, 21, 20, 147, 163, 158, 249]
    seed = [42, 0, 0, 0, 0]
    found = [host.attention_byte(seed, 7, 1, 2, i, j) for i in (0, 8) for j in (3, 11)]
    assert found == [127, 58, 68, 254]


def test_cpp_follows_the_definition(host: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(300):
        seed, stream = draw.choice(SEEDS), draw.choice(STREAMS)
        b, h, i, j = (draw.randrange(1 << 20) for _ in range(4))
        row, column = draw.randrange(1 << 40), draw.randrange(1 << 33)
        x, y = draw.randrange(1 << 32), draw.randrange(1 << 32)
        assert host.absorb(x, y) == absorb(x, y)
        assert host.row_key(seed, stream, b, h, i) == key(ROW_TAG, seed, stream, b, h, i)
        assert host.column_key(seed, stream, j) == key(COLUMN_TAG, seed, stream, j)
        found = host.attention_byte([seed, 0, 0, 0, 0], stream, b, h, i, j)
        assert found == attention_byte(seed, stream, b, h, i, j)
        assert host.row_byte(seed, stream, row, column) == row_byte(seed, stream, row, column)


@pytest.mark.parametrize("seed", SEEDS)
def test_cpp_and_torch_draw_the_same_bits(host: ModuleType, seed: int) -> None:
    p, stream = 0.37, 9
    t, tensor = host.threshold(p), torch.tensor([seed])
    rows = torch.from_numpy(host.row_bytes(seed, stream, 19, 37))
    assert torch.equal(bits.row_keep(tensor, stream, p, 19, 37), rows >= t)
    attention = torch.from_numpy(host.attention_bytes([seed, 0, 0, 0, 0], stream, 2, 3, 35, 50))
    assert torch.equal(bits.attention_keep(tensor, stream, p, 2, 3, 35, 50), attention >= t)


@pytest.mark.parametrize("p", [0.0, 1e-9, 1 / 512, 0.1, 0.5, 0.9, 0.997, 1 - 1e-12, 1.0])
def test_threshold_in_cpp(host: ModuleType, p: float) -> None:
    t = host.threshold(p)
    assert t == bits.threshold(p)
    assert (t == 0) == (p == 0) and (t == 256) == (p == 1)
    assert abs(t / 256 - p) <= 1 / 256
    assert host.keep_scale(t) == pytest.approx(bits.keep_scale(p), rel=1e-6)
    assert host.keep_scale(t) * (256 - t) == pytest.approx(256 if t < 256 else 0)
