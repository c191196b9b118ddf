"""Dropout in every op: which weights are dropped, by which seed and stream; the random bits."""

import itertools
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from dropout_definition import COLUMN_TAG, ROW_TAG, absorb, attention_byte, finalise, key, row_byte
from op_examples import DEVICE, SPECS, backends_of
from torch import Tensor

import fastattn
from fastattn.ops import _dropout as bits
from fastattn.testing import dropout_mask


def _seed(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


# -- the ops --------------------------------------------------------------------------------------
def _run(op: str, backend: str, **inputs: Any) -> Any:
    inputs = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in inputs.items()}
    explanation = fastattn.explain(op, **inputs, backend=backend)
    if explanation.chosen != backend:
        pytest.skip(explanation.refusals[backend])
    results = SPECS[op].function(**inputs, backend=backend)
    return results.cpu() if isinstance(results, Tensor) else tuple(x.cpu() for x in results)


def _dropout(seed: int, stream: int, p: float) -> dict[str, Any]:
    return {"dropout_p": p, "dropout_seed": _seed(seed), "dropout_stream": stream}


_PARTS = 4


def _parts(
    axis: str, seed: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """q, k, v and the dropout seed of each part."""
    of_q, of_k, place = {
        "sequences": (0, 0, 1), "heads": (1, 1, 2), "queries": (2, None, 3), "keys": (None, 2, 4),
    }[axis]  # fmt: skip
    queries = [q] * _PARTS if of_q is None else q.chunk(_PARTS, of_q)
    keys, values = ([x] * _PARTS if of_k is None else x.chunk(_PARTS, of_k) for x in (k, v))
    first = 0
    for q_part, k_part, v_part in zip(queries, keys, values, strict=True):
        origin = [first if n == place else 0 for n in range(1, 5)]
        yield q_part, k_part, v_part, torch.cat([seed, seed.new_tensor(origin)])
        dim = place - 1 if place < 4 else 2
        first += (q_part if place < 4 else k_part).shape[dim]


def _joined(axis: str, parts: list[Tensor], lses: list[Tensor]) -> Tensor:
    if axis != "keys":
        return torch.cat(parts, {"sequences": 0, "heads": 1, "queries": 2}[axis])
    lse = torch.stack(lses)
    weights = torch.exp(lse - torch.logsumexp(lse, 0))
    return (torch.stack(parts) * weights[..., None]).sum(0)


@pytest.mark.parametrize("backend", backends_of("attention"))
@pytest.mark.parametrize("axis", ["sequences", "heads", "queries", "keys"])
def test_parts_drop_what_the_whole_drops(axis: str, backend: str) -> None:
    """With an origin, a quarter of an attention drops the same pairs as the whole; the quarters
    have its results and gradients.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = ((4, 8, 64, 32), (4, 4, 64, 32), (4, 4, 64, 64))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    dout = torch.randn(4, 8, 64, 64, generator=generator)
    inputs = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]
    options = {"return_lse": True, **_dropout(77, 5, 0.3), "backend": backend}
    options["dropout_seed"] = seed = options["dropout_seed"].to(DEVICE)
    if fastattn.explain("attention", *inputs, **options).chosen != backend:
        pytest.skip("does not run this call")

    def parts(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        found = [
            fastattn.attention(*x, **options | {"dropout_seed": own})
            for *x, own in _parts(axis, seed, q, k, v)
        ]
        return [out for out, _ in found], [lse for _, lse in found]

    out, _ = fastattn.attention(*inputs, **options)
    joined = _joined(axis, *parts(*inputs))
    torch.testing.assert_close(joined, out)
    gradients, wanted = (torch.autograd.grad(x, inputs, dout.to(DEVICE)) for x in (joined, out))
    torch.testing.assert_close(gradients, wanted)

    q, k = (torch.zeros_like(x) for x in inputs[:2])
    v = torch.eye(64, device=DEVICE).expand(4, 4, 64, 64).contiguous()
    dropped = _joined(axis, *parts(q, k, v)) == 0  # with v the identity, of every pair
    keep = dropout_mask(seed.cpu(), 5, 0.3, (4, 8, 64, 64))
    assert torch.equal(dropped.cpu(), ~keep)


@pytest.mark.parametrize("backend", backends_of("add_layer_norm"))
def test_add_layer_norm_drops_the_mask(backend: str) -> None:
    """With x = 1 and residual = 0, z is the mask times the scale; leading dimensions are rows."""
    x = torch.ones(3, 5, 130)
    _, z = _run(
        "add_layer_norm", backend, x=x, residual=torch.zeros_like(x), return_sum=True,
        **_dropout(-8, 2**31 - 1, 0.25),
    )  # fmt: skip
    keep = dropout_mask(_seed(-8), 2**31 - 1, 0.25, (15, 130)).view(x.shape)
    assert torch.equal(z, keep * torch.tensor(256 / 192, dtype=torch.float32))


@pytest.mark.parametrize("backend", backends_of("ffn"))
@pytest.mark.parametrize("where", ["hidden", "output"])
def test_ffn_drops_the_mask(backend: str, where: str) -> None:
    """The first layer gives ones, which the second passes on; either has dropout."""
    rows, F, stream = (4, 9), 48, 6
    dropout = _dropout(13, stream, 0.5 if where == "hidden" else 0.0)
    dropout["output_dropout_p"] = 0.0 if where == "hidden" else 0.5
    y = _run(
        "ffn", backend, x=torch.zeros(*rows, 16), w1=torch.zeros(F, 16), b1=torch.ones(F),
        w2=torch.eye(F), b2=torch.zeros(F), **dropout,
    )  # fmt: skip
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


def test_calls_with_any_origin_share_a_compiled_graph() -> None:
    q = torch.ones(1, 1, 20, 8, device=DEVICE)

    def dropped(seed: Tensor) -> Tensor:
        return fastattn.attention(q, q, q, dropout_p=0.5, dropout_seed=seed)

    compiled = torch.compile(dropped, fullgraph=True, backend="aot_eager")
    seeds = [torch.tensor([1, b, 0, 16 * b, 0], device=DEVICE) for b in range(3)]
    compiled(seeds[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in seeds:
            assert torch.equal(compiled(seed), dropped(seed))


def test_an_origin_must_be_a_multiple_of_16() -> None:
    q = torch.ones(1, 1, 4, 8)
    with pytest.raises(ValueError, match="must have multiples of 16 as the index"):
        fastattn.attention(q, q, q, dropout_p=0.1, dropout_seed=torch.tensor([1, 3, 3, 0, 8]))


def test_only_attention_takes_an_origin() -> None:
    x = torch.ones(4, 8, device=DEVICE)
    seed = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"must be int64 \[1\], got torch.int64 \[5\]"):
        fastattn.add_layer_norm(x, x, dropout_p=0.1, dropout_seed=seed)


def test_new_seeds() -> None:
    torch.manual_seed(0)
    seeds = torch.cat([fastattn.new_dropout_seed(DEVICE) for _ in range(200)])
    assert seeds.dtype == torch.int64 and seeds.device.type == DEVICE.type
    assert seeds.unique().numel() == 200
    means = torch.stack([(seeds >> i & 1).double().mean() for i in range(64)])
    # All 64 bits vary: 5 sigma of a fair coin over 200 draws is 0.18.
    assert float((means - 0.5).abs().max()) < 0.18
    assert fastattn.new_dropout_seed(str(DEVICE)).shape == (1,)


# -- bits ------------------------------------------------------------------------------------------
SEEDS = (0, 1, -1, 0x0123_4567_89AB_CDEF, -(2**63), 2**63 - 1, 2**32)
STREAMS = (0, 3, 2**31 - 1, 2**31 + 5)


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


THRESHOLDS = {
    0.0: 0, 1e-9: 1, 0.001: 1, 1 / 256: 1, 1.49 / 256: 1, 1.5 / 256: 2, 0.1: 26, 0.5: 128,
    0.75: 192, 0.998: 255, 0.9999: 255, 1 - 1e-12: 255, 1.0: 256,
}  # fmt: skip


@pytest.mark.parametrize("p, t", THRESHOLDS.items())
def test_threshold(host: ModuleType, p: float, t: int) -> None:
    assert bits.threshold(p) == host.threshold(p) == t
    scale = bits.keep_scale(p)
    assert scale == (0.0 if t == 256 else 256 / (256 - t))  # the expectation is exact
    assert host.keep_scale(t) == pytest.approx(scale, rel=1e-6)
    keep = dropout_mask(_seed(1), 0, p, (64, 1024))
    if t in (0, 256):
        assert bool(keep.all()) == (t == 0) and bool(keep.any()) == (t == 0)
    expected = 1 - t / 256
    sigma = (expected * (1 - expected) / keep.numel()) ** 0.5
    assert abs(float(keep.double().mean()) - expected) <= 5 * sigma


@pytest.mark.parametrize("seed, shape, message", [
    (torch.tensor([1], dtype=torch.int32), (2, 3), "seed must be int64"),
    (torch.tensor(1), (2, 3), r"seed must be int64 \[1\]"),
    (torch.zeros(5, dtype=torch.int64), (2, 3), r"seed must be int64 \[1\]"),
    (torch.zeros(2, dtype=torch.int64), (1, 1, 2, 3), r"or \[5\] for attention"),
    (_seed(1), (2, 3, 4), r"shape must be \[B, H, M, N\] or \[rows, N\]"),
])  # fmt: skip
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
