"""The dropout bits: their definition, their statistics, and their use in every op."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.ops import _dropout as bits
from fastattn.ops import _env
from fastattn.testing import all_specs, dropout_mask

DEVICE = _env.default_device()
SPECS = all_specs()
SEEDS = (0, 1, -1, 0x0123_4567_89AB_CDEF, -(2**63), 2**63 - 1, 2**32)
WORD = 2**32


def _seed(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


# -- the definition, on Python's integers ---------------------------------------------------------
def _finalise(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ x >> 16


def _absorb(state: int, *values: int) -> int:
    for value in values:
        state = _finalise(((state ^ value) + 0x9E3779B9) % WORD)
    return state


def _byte(seed: int, stream: int, row: tuple[int, int, int], column: int, index: int) -> int:
    halves = seed % WORD, (seed >> 32) % WORD
    row_key = _absorb(0x243F6A88, *halves, stream, *row)
    column_key = _absorb(0x85A308D3, *halves, stream, column)
    return _finalise(row_key ^ column_key) >> 8 * index & 255


def _attention_byte(seed: int, stream: int, b: int, h: int, i: int, j: int) -> int:
    row, row_bit = i // 16 * 8 + i % 8, i // 8 % 2
    column, column_bit = j // 16 * 8 + j % 8, j // 8 % 2
    return _byte(seed, stream, (b, h, row), column, 2 * row_bit + column_bit)


def _row_byte(seed: int, stream: int, row: int, column: int) -> int:
    return _byte(seed, stream, (row >> 32, 0, row % WORD), column // 4, column % 4)


# Fixed values: a change of the definition changes all stored results of seeded calls.
KNOWN_WORDS = {0: 0, 1: 0x688990C0, 0x12345678: 0xF5E71C96, 0xFFFFFFFF: 0x6768824A}
KNOWN_BYTES = {
    "attention": [137, 199, 162, 215, 183, 194, 189, 160, 201, 60, 143, 49],
    "rows": [246, 79, 191, 98, 152, 185, 60, 6, 130, 242, 51, 117],
}


def test_known_vectors() -> None:
    for x, word in KNOWN_WORDS.items():
        assert _finalise(x) == word == int(bits.finalise(torch.tensor(x)))
    assert [_attention_byte(42, 7, 1, 2, i, 9) for i in range(12)] == KNOWN_BYTES["attention"]
    assert [_row_byte(-42, 7, 3, c) for c in range(12)] == KNOWN_BYTES["rows"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stream", [0, 7, 2**31 - 1])
def test_masks_follow_the_definition(seed: int, stream: int) -> None:
    B, H, M, N = 2, 3, 19, 35
    written = [
        [[[_attention_byte(seed, stream, b, h, i, j) for j in range(N)] for i in range(M)]
         for h in range(H)] for b in range(B)
    ]  # fmt: skip
    rows = [[_row_byte(seed, stream, r, c) for c in range(N)] for r in range(M)]
    output_rows = [[_row_byte(seed, stream + 2**31, r, c) for c in range(N)] for r in range(M)]
    for p, t in ((0.004, 1), (0.3, 77), (0.9, 230)):
        keep = dropout_mask(_seed(seed), stream, p, (B, H, M, N))
        assert torch.equal(keep, torch.tensor(written) >= t)
        keep = dropout_mask(_seed(seed), stream, p, (M, N))
        assert torch.equal(keep, torch.tensor(rows) >= t)
        keep = dropout_mask(_seed(seed), stream + 2**31, p, (M, N))
        assert torch.equal(keep, torch.tensor(output_rows) >= t)


def test_rows_beyond_32_bits() -> None:
    """A mask of this size does not fit in memory, but its keys can be tested."""
    row = 2**32 + 5
    key = bits.row_key(_seed(3), 0, row >> 32, 0, torch.tensor([row & 0xFFFFFFFF]))
    word = bits.finalise(key ^ bits.column_key(_seed(3), 0, torch.tensor([2])))
    assert [int(word) >> 8 * i & 255 for i in range(4)] == [
        _row_byte(3, 0, row, 8 + i) for i in range(4)
    ]
    assert _row_byte(3, 0, row, 8) != _row_byte(3, 0, 5, 8)


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


# -- the ops --------------------------------------------------------------------------------------
def _each_backend(op: str) -> list[str]:
    return [b for b in SPECS[op].backends if _env.refuses_device(b, DEVICE) is None]


def _run(op: str, backend: str, **inputs: Any) -> Any:
    inputs = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in inputs.items()}
    explanation = fastattn.explain(op, **inputs, backend=backend)
    if explanation.chosen != backend:
        pytest.skip(explanation.refusals[backend])
    results = SPECS[op].function(**inputs, backend=backend)
    return results.cpu() if isinstance(results, Tensor) else tuple(x.cpu() for x in results)


def _dropout(seed: int, stream: int, p: float) -> dict[str, Any]:
    return {"dropout_p": p, "dropout_seed": _seed(seed), "dropout_stream": stream}


@pytest.mark.parametrize("backend", _each_backend("attention"))
def test_attention_drops_the_mask(backend: str) -> None:
    """With v the identity, the output is the weights after dropout, all 0 or scaled 1 / N."""
    B, H, M, N, p = 2, 4, 50, 64, 0.3
    inputs = {"q": torch.zeros(B, H, M, 32), "k": torch.ones(B, 2, N, 32)}
    inputs["v"] = torch.eye(N).expand(B, 2, N, N).contiguous()
    weights = _run("attention", backend, **inputs, **_dropout(77, 5, p))
    keep = dropout_mask(_seed(77), 5, p, (B, H, M, N))
    assert torch.equal(weights != 0, keep)
    torch.testing.assert_close(weights, keep * torch.tensor(256 / (256 - 77) / N))


@pytest.mark.parametrize("backend", _each_backend("add_layer_norm"))
def test_add_layer_norm_drops_the_mask(backend: str) -> None:
    """With x = 1 and residual = 0, z is the mask times the scale; leading dimensions are rows."""
    x = torch.ones(3, 5, 130)
    _, z = _run(
        "add_layer_norm",
        backend,
        x=x,
        residual=torch.zeros_like(x),
        return_sum=True,
        **_dropout(-8, 2**31 - 1, 0.25),
    )
    keep = dropout_mask(_seed(-8), 2**31 - 1, 0.25, (15, 130)).view(x.shape)
    assert torch.equal(z, keep * torch.tensor(256 / 192, dtype=torch.float32))


@pytest.mark.parametrize("backend", _each_backend("ffn"))
@pytest.mark.parametrize("where", ["hidden", "output"])
def test_ffn_drops_the_mask(backend: str, where: str) -> None:
    """The first layer gives ones, which the second passes on; either has dropout."""
    rows, F, stream = (4, 9), 48, 6
    dropout = _dropout(13, stream, 0.5 if where == "hidden" else 0.0)
    dropout["output_dropout_p"] = 0.0 if where == "hidden" else 0.5
    y = _run(
        "ffn",
        backend,
        x=torch.zeros(*rows, 16),
        w1=torch.zeros(F, 16),
        b1=torch.ones(F),
        w2=torch.eye(F),
        b2=torch.zeros(F),
        **dropout,
    )
    stream += 0 if where == "hidden" else 2**31
    keep = dropout_mask(_seed(13), stream, 0.5, (36, F)).view(*rows, F)
    assert torch.equal(y, keep * 2.0)


# -- seeds ----------------------------------------------------------------------------------------
def _dropped(**dropout: Any) -> Tensor:
    x = torch.ones(40, 64, device=DEVICE)
    _, z = fastattn.add_layer_norm(
        x, torch.zeros_like(x), return_sum=True, dropout_p=0.5, **dropout
    )
    return z


def test_manual_seed_determines_the_drawn_seeds() -> None:
    torch.manual_seed(5)
    first, second = _dropped(), _dropped()
    torch.manual_seed(5)
    assert torch.equal(_dropped(), first) and torch.equal(_dropped(), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("where", ["dropout_p", "output_dropout_p"])
def test_a_network_draws_its_seed(where: str) -> None:
    x, w = torch.ones(4, 16, device=DEVICE), torch.ones(16, 16, device=DEVICE)

    def dropped(**seed: Tensor) -> Tensor:
        torch.manual_seed(5)
        options: dict[str, Any] = {where: 0.5, **seed}
        return fastattn.ffn(x, w, None, w, None, **options)

    torch.manual_seed(5)
    given = dropped(dropout_seed=fastattn.new_dropout_seed(DEVICE))
    assert torch.equal(dropped(), given)


def test_a_seed_and_a_stream_repeat_a_call() -> None:
    seed = fastattn.new_dropout_seed(DEVICE)
    assert torch.equal(_dropped(dropout_seed=seed), _dropped(dropout_seed=seed))
    other = _dropped(dropout_seed=seed, dropout_stream=1)
    assert not torch.equal(_dropped(dropout_seed=seed), other)


def test_a_given_seed_draws_nothing() -> None:
    generator = torch.cuda if DEVICE.type == "cuda" else torch
    state = generator.get_rng_state()
    _dropped(dropout_seed=_seed(1).to(DEVICE))
    x = torch.ones(3, 4, device=DEVICE)
    fastattn.add_layer_norm(x, x)
    assert torch.equal(generator.get_rng_state(), state), "nor does p = 0"


def test_new_seeds() -> None:
    torch.manual_seed(0)
    seeds = torch.cat([fastattn.new_dropout_seed(DEVICE) for _ in range(200)])
    assert seeds.dtype == torch.int64 and seeds.device.type == DEVICE.type
    assert seeds.unique().numel() == 200
    means = torch.stack([(seeds >> i & 1).double().mean() for i in range(64)])
    # All 64 bits vary: 5 sigma of a fair coin over 200 draws is 0.18.
    assert float((means - 0.5).abs().max()) < 0.18
    assert fastattn.new_dropout_seed(str(DEVICE)).shape == (1,)


def test_dropped_attention_keeps_its_expectation() -> None:
    """The mean over many streams approximates the output without dropout."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    outs = [
        fastattn.attention(q, k, v, dropout_p=0.3, dropout_seed=_seed(1), dropout_stream=s)
        for s in range(1000)
    ]
    samples = torch.stack(outs)
    error = samples.mean(0) - fastattn.attention(q, k, v)
    sigma = samples.std(0) / len(outs) ** 0.5
    assert float((error / sigma).abs().max()) < 5
