"""The Hopper attention forward, computed without a GPU.

The unchanged kernels, all of their threads, run on a simulator of the hardware (sm90_on_host):
barriers, TMA, wgmma and the rest behave as the PTX manual says. Results are checked here; the
simulator checks the order of events, which test_sm90_faults.py puts to the test.
"""

import ctypes
import functools
import itertools
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_options import packing
from sm90_on_host import bindings
from sm90_on_host.bindings import Instance
from sm90_on_host.build import Machine, build, missing
from torch import Tensor

from fastattn.ops.attention import reference, sm90
from fastattn.ops.attention.calls import ForwardCall
from fastattn.testing.compare import compare

TESTS = Path(__file__).resolve().parent
DTYPES = {torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}


@dataclass(frozen=True)
class Case:
    """packed: lengths of (queries, keys) of packed sequences, instead of B, M and N. Dead keys and
    values, and queries that are not computed, hold NaN.
    """

    D: int
    variant: str
    dtype: torch.dtype = torch.bfloat16
    B: int = 1
    H: int = 2
    K: int = 2
    M: int = 200
    N: int = 300
    E: int | None = None
    scale: float | None = None
    causal: int = 0
    window: tuple[int, int] = (-1, -1)
    query_lengths: list[int] | None = None
    key_lengths: list[int] | None = None
    packed: tuple[tuple[int, int], ...] = ()
    slack: int = 0
    dropout_p: float = 0.0
    mask: torch.dtype | None = None
    mask_dims: tuple[int, ...] = (0, 2, 3)  # which of B, H, M, N the mask has
    sinks: float | None = None  # about as high
    softcap: float = 0.0
    distance: str = ""  # "H" or "BH": what distance_bias differs by
    blocked_distance: int | None = None  # distance_bias is -inf from this distance on
    heads_inside: bool = True  # [B, M, H, D] storage
    counted: bool = True
    splits: int = 1
    ordered: bool = False
    seed: Tensor = field(default_factory=lambda: torch.tensor([0x1234_5678_9ABC]), compare=False)

    @property
    def instance(self) -> Instance:
        widest = max(self.D, self.E or self.D)
        dim = next(d for d in (64, 128, 192, 256) if widest <= d)
        return Instance(DTYPES[self.dtype], dim, self.variant)


# A seed with an origin: the first sequence, head, query and key.
_PART = torch.tensor([0x1234_5678_9ABC, 3, 2**32 - 1, 48, 2**33 - 64])
_SEQUENCES = ((65, 40), (0, 30), (130, 200), (1, 0), (64, 129))
CASES = {
    "64": Case(64, "kFull", B=2, query_lengths=[130, 200], key_lengths=[300, 129]),
    "64 fixed strides": Case(64, "kFull", H=3, K=3, counted=False, heads_inside=False),
    "64 causal": Case(64, "kBounded", M=400, N=400, causal=1),
    "64 packed": Case(64, "kFull", packed=_SEQUENCES, slack=70),
    "64 packed bottom right": Case(64, "kBounded", packed=_SEQUENCES, causal=2, window=(50, -1)),
    "64 packed, short ones": Case(64, "kBounded", packed=_SEQUENCES, slack=70),
    "64 own diagonals": Case(
        64, "kBounded", B=3, K=1, causal=3, query_lengths=[130, 200, 0], key_lengths=[300, 77, 129]
    ),
    "64 dropout": Case(64, "kDropout", B=2, dropout_p=0.3, causal=1),
    "64 dropout of a part": Case(64, "kDropout", B=2, M=70, dropout_p=0.3, causal=1, seed=_PART),
    "64 mask": Case(64, "kMask", B=2, mask=torch.bool, key_lengths=[300, 100]),
    "64 bias": Case(64, "kBias", mask=torch.float32, mask_dims=(1, 2, 3), causal=2, K=1),
    "40 to 24": Case(40, "kBounded", E=24, dtype=torch.float16, causal=2, window=(100, 30)),
    "96 negative scale": Case(96, "kFull", dtype=torch.float16, scale=-0.2, K=1),
    "128": Case(128, "kFull", M=130, key_lengths=[257]),
    "128 window": Case(128, "kBounded", window=(40, 20), B=2, key_lengths=[300, 0], K=1),
    "128 packed window": Case(128, "kBounded", packed=_SEQUENCES, slack=3, window=(30, 10)),
    "128 packed dropout": Case(
        128, "kDropout", packed=_SEQUENCES, dropout_p=0.5, ordered=True, seed=_PART
    ),
    "128 own diagonals, window": Case(
        128,
        "kBounded",
        B=2,
        M=140,
        N=400,
        causal=3,
        splits=2,
        window=(90, 9),
        key_lengths=[400, 50],
    ),
    "128 own diagonals, one query": Case(
        128, "kFull", H=8, K=2, B=2, M=1, N=700, splits=7, causal=3, key_lengths=[700, 100]
    ),
    "128 own diagonals, mask": Case(
        128, "kMask", B=2, mask=torch.bool, causal=3, query_lengths=[77, 200]
    ),
    "128 dropout, everything": Case(128, "kDropout", M=70, dropout_p=1.0),
    "128 mask": Case(128, "kMask", mask=torch.bool, causal=1, M=300, scale=-0.1),
    "128 key padding": Case(128, "kMask", B=2, mask=torch.bool, mask_dims=(0, 3)),
    "128 bias": Case(128, "kBias", mask=torch.bfloat16, B=2, query_lengths=[77, 200]),
    "128 fp32 bias": Case(128, "kBias", mask=torch.float32, mask_dims=(0, 1, 2, 3), causal=1),
    "128 bias, copied": Case(128, "kBias", mask=torch.bfloat16, N=301, scale=-0.1, K=1),
    "128 bias of another type": Case(128, "kBias", mask=torch.float16, mask_dims=(1, 2, 3)),
    "128 bias of keys": Case(128, "kBias", mask=torch.bfloat16, B=2, mask_dims=(0, 3), N=304),
    "96 bias, nothing computed": Case(96, "kBias", mask=torch.float32, query_lengths=[0]),
    "64 splits": Case(
        64, "kFull", B=2, M=70, N=600, splits=3, query_lengths=[20, 70], key_lengths=[600, 130]
    ),
    "64 decoding": Case(64, "kFull", H=6, K=2, B=2, M=1, N=700, splits=4, key_lengths=[700, 1]),
    "64 decoding, one warpgroup": Case(
        64, "kBounded", H=6, K=2, B=2, M=1, N=700, splits=3, key_lengths=[700, 1]
    ),
    "64 many splits": Case(64, "kFull", M=3, N=300, splits=43),
    "64 causal splits": Case(64, "kBounded", M=300, N=700, causal=2, splits=3, window=(400, -1)),
    "64 packed splits": Case(64, "kFull", packed=_SEQUENCES, slack=70, splits=3, ordered=True),
    "128 decoding": Case(
        128, "kFull", H=8, K=2, M=1, N=700, splits=7, causal=2, dtype=torch.float16, counted=False
    ),
    "128 causal splits": Case(128, "kBounded", M=140, N=400, causal=1, splits=5, scale=-0.1),
    "128 packed splits": Case(
        128, "kBounded", packed=_SEQUENCES, causal=2, slack=3, splits=2, window=(90, -1)
    ),
    "64 sinks": Case(64, "kSinks", B=2, sinks=5.0, query_lengths=[130, 200], key_lengths=[300, 0]),
    "64 high sinks, dropout": Case(
        64, "kScoresDropout", sinks=30.0, causal=2, M=300, N=260, dropout_p=0.3
    ),
    "128 packed sinks": Case(128, "kSinks", packed=_SEQUENCES, slack=70, sinks=-1.0, causal=2),
    "64 sinks, no row has a key": Case(
        64,
        "kScoresDense",
        B=2,
        mask=torch.bool,
        sinks=2.0,
        query_lengths=[77, 200],
        key_lengths=[50, 0],
    ),
    "64 splits, sinks": Case(
        64,
        "kSinks",
        B=2,
        M=70,
        N=600,
        splits=3,
        query_lengths=[20, 70],
        key_lengths=[600, 0],
        sinks=5.0,
    ),
    "128 decoding, sinks": Case(
        128, "kSinks", H=8, K=2, B=2, M=1, N=700, splits=7, key_lengths=[700, 0], sinks=3.0
    ),
    "128 decoding, sinks, no splits": Case(
        128, "kSinks", H=8, K=2, M=2, N=300, key_lengths=[300], sinks=3.0, heads_inside=False
    ),
    "64 packed splits, sinks": Case(
        64, "kSinks", packed=_SEQUENCES, slack=70, splits=3, ordered=True, sinks=1.0
    ),
    "192 sinks": Case(192, "kSinks", sinks=0.0, window=(60, 9)),
    "256 sinks": Case(256, "kSinks", sinks=0.0, M=140, N=170, causal=2),
    "64 scores": Case(64, "kScores", distance="H", softcap=2.0, causal=1, M=300),
    "64 soft cap": Case(64, "kScores", B=2, softcap=1.0, scale=-0.4, key_lengths=[300, 0]),
    "64 distances, one query": Case(
        64, "kScores", H=4, K=2, B=2, M=1, N=700, splits=4, key_lengths=[700, 1], distance="BH"
    ),
    "64 distances, blocked": Case(
        64, "kScores", M=70, N=700, distance="H", blocked_distance=64, sinks=1.0
    ),
    "64 soft cap, decoding": Case(
        64, "kScores", H=6, K=2, M=1, N=700, splits=3, causal=2, window=(600, -1), softcap=3.0
    ),
    "64 scores, dropout": Case(
        64, "kScoresDropout", distance="H", softcap=2.0, window=(70, 30), dropout_p=0.3
    ),
    "128 packed scores": Case(
        128, "kScores", packed=_SEQUENCES, slack=70, causal=2, distance="BH", sinks=0.0
    ),
    "128 packed distances": Case(
        128, "kScores", packed=_SEQUENCES, window=(60, 30), distance="H", dtype=torch.float16
    ),
    "128 own diagonals, distances": Case(
        128,
        "kScores",
        B=3,
        K=1,
        causal=3,
        query_lengths=[130, 200, 0],
        key_lengths=[300, 77, 129],
        distance="BH",
        softcap=4.0,
        splits=2,
    ),
    "128 scores, mask": Case(
        128, "kScoresDense", B=2, mask=torch.bool, causal=2, distance="BH", softcap=1.0
    ),
    "128 scores, mask, dropout": Case(
        128, "kScoresDense", mask=torch.bool, mask_dims=(0, 3), distance="H", dropout_p=0.2
    ),
    "192 scores": Case(192, "kScores", distance="H", softcap=2.0, causal=2, N=100, sinks=1.0),
    "192 scores, dropout": Case(192, "kScoresDropout", distance="H", dropout_p=0.2, causal=2),
    "256 scores": Case(256, "kScores", M=140, N=170, distance="H", softcap=2.0, causal=2),
    "256 scores, dropout": Case(
        256, "kScoresDropout", M=140, N=170, distance="H", softcap=2.0, dropout_p=0.2
    ),
    "256 scores, mask": Case(256, "kScoresDense", M=140, N=170, distance="H", mask=torch.bool),
    "64 scores, bias": Case(
        64, "kScoresDense", B=2, mask=torch.bfloat16, distance="BH", softcap=2.0, causal=2, K=1
    ),
    "64 sinks, fp32 bias, dropout": Case(
        64, "kScoresDense", mask=torch.float32, mask_dims=(1, 2, 3), sinks=2.0, dropout_p=0.3
    ),
    "128 scores, fp32 bias": Case(
        128, "kScoresDense", mask=torch.float32, distance="H", softcap=1.0, window=(150, 60)
    ),
    "128 distances, bias of keys": Case(
        128,
        "kScoresDense",
        B=2,
        mask=torch.bfloat16,
        mask_dims=(0, 3),
        distance="H",
        query_lengths=[77, 200],
        key_lengths=[300, 0],
        sinks=0.0,
        dropout_p=0.2,
    ),
    "192 scores, bias, copied": Case(
        192, "kScoresDense", mask=torch.float32, N=299, distance="H", softcap=2.0, sinks=1.0
    ),
    "256 scores, bias, dropout": Case(
        256,
        "kScoresDense",
        mask=torch.float16,
        M=140,
        N=200,
        distance="BH",
        softcap=2.0,
        dropout_p=0.1,
    ),
    "192 packed": Case(192, "kBounded", packed=_SEQUENCES, causal=2, dtype=torch.float16),
    "192 mask": Case(192, "kMask", mask=torch.bool, mask_dims=(1, 2, 3)),
    "192 bias": Case(192, "kBias", mask=torch.bfloat16, N=304, key_lengths=[290], K=1),
    "192 fp32 bias, copied": Case(192, "kBias", mask=torch.float32, N=299, window=(150, 60)),
    "256": Case(256, "kFull", E=200, M=70, N=170),
    "256 causal": Case(256, "kBounded", causal=2, M=140, N=170, heads_inside=False),
    "256 bias": Case(256, "kBias", mask=torch.float16, dtype=torch.float16, M=140, N=200, causal=2),
    "256 fp32 bias": Case(256, "kBias", mask=torch.float32, mask_dims=(0, 1, 2, 3), M=70, N=172),
    "256 decoding": Case(256, "kFull", H=4, K=2, M=3, N=400, splits=5, E=200, key_lengths=[330]),
    "256 splits": Case(256, "kBounded", M=70, N=400, splits=2, window=(150, 9)),
    "64 mask, dropout": Case(
        64, "kMaskDropout", B=2, mask=torch.bool, dropout_p=0.3, key_lengths=[300, 100]
    ),
    "64 bias, dropout": Case(
        64, "kBiasDropout", mask=torch.float32, dropout_p=0.2, causal=2, K=1, dtype=torch.float16
    ),
    "96 mask, dropout": Case(
        96, "kMaskDropout", mask=torch.bool, mask_dims=(1, 2, 3), dropout_p=0.5, dtype=torch.float16
    ),
    "96 bias, dropout": Case(96, "kBiasDropout", mask=torch.bfloat16, dropout_p=0.1, causal=1),
    "128 mask, dropout": Case(
        128, "kMaskDropout", B=2, mask=torch.bool, mask_dims=(0, 3), dropout_p=0.1, scale=-0.1
    ),
    "128 bias, dropout": Case(
        128, "kBiasDropout", mask=torch.float16, dtype=torch.float16, dropout_p=0.9, K=1
    ),
    "192 mask, dropout": Case(192, "kMaskDropout", mask=torch.bool, dropout_p=0.4, causal=1),
    "192 bias, dropout": Case(
        192, "kBiasDropout", mask=torch.float32, N=299, dropout_p=0.3, query_lengths=[140]
    ),
    "256 mask, dropout": Case(
        256, "kMaskDropout", mask=torch.bool, M=140, N=170, dropout_p=0.3, dtype=torch.float16
    ),
    "256 bias, dropout": Case(
        256, "kBiasDropout", mask=torch.bfloat16, M=140, N=200, dropout_p=1.0, window=(90, 9)
    ),
    "256 dropout": Case(256, "kDropout", dropout_p=0.1, M=70, N=170, window=(90, 9)),
}
# The others are for test-all: each instance compiles for some seconds.
QUICK = ("128 packed window", "64 mask", "128 packed splits")


def defines(instance: Instance) -> list[str]:
    names = ("ONLY_DTYPE", "ONLY_HEAD_DIM", "ONLY_VARIANT")
    return [f"{name}={value}" for name, value in zip(names, astuple(instance), strict=True)]


@pytest.fixture(scope="session")
def machine() -> Callable[[Instance], Machine]:
    """The machine with an instance."""
    if reason := missing():
        pytest.skip(reason)

    @functools.cache
    def load(instance: Instance) -> Machine:
        return build(TESTS / "sm90_attention.cpp", defines(instance))

    return load


def _data(c: Case, heads: int, rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """[B, heads, rows, dim]; packed: one batch entry."""
    x = torch.randn(c.B, rows, heads, dim, generator=generator).to(c.dtype)
    return x.transpose(1, 2) if c.heads_inside else x.transpose(1, 2).contiguous()


def _mask(c: Case, generator: torch.Generator) -> Tensor | None:
    if c.mask is None:
        return None
    whole = (c.B, c.H, c.M, c.N)
    shape = [n if d in c.mask_dims else 1 for d, n in enumerate(whole)]
    allowed = torch.rand(shape, generator=generator) < 0.7
    allowed[..., 128:256] = True  # full blocks
    allowed[..., 290:] = False  # dead keys
    if shape[2] > 1:
        allowed[:, :, 64:128, :128] = False  # blocks that one warpgroup does not need
        allowed[:, :, 128:, :128] = False  # a block that a whole tile may pass over
    if c.mask == torch.bool:
        return allowed
    values = torch.randn(shape, generator=generator) * ~allowed.all(-2, keepdim=True)
    return torch.where(allowed, values.to(c.mask), torch.finfo(c.mask).min)


def _distance_bias(c: Case, generator: torch.Generator) -> Tensor | None:
    if not c.distance:
        return None
    M, N = (max(n) for n in zip(*c.packed, strict=True)) if c.packed else (c.M, c.N)
    B = (len(c.packed) or c.B) if c.distance == "BH" else 1
    bias = torch.randn(B, c.H, M + N - 1, generator=generator)
    if c.blocked_distance is not None:
        bias[..., M - 1 + c.blocked_distance :] = -torch.inf
    return bias


def _poison(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> None:
    """NaN in keys and values without a row, and in rows without a key."""
    allowed = allowed.expand(*q.shape[:3], k.shape[2])
    live = allowed.any(2).unflatten(1, (k.shape[1], -1)).any(2)[..., None]
    k.masked_fill_(~live, torch.nan)
    v.masked_fill_(~live, torch.nan)
    q.masked_fill_(~allowed.any(3)[..., None], torch.nan)


def _spans(lengths: list[int]) -> list[slice]:
    ends = list(itertools.accumulate(lengths, initial=0))
    return [slice(*span) for span in itertools.pairwise(ends)]


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _lengths(values: list[int] | None) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_forward(
    machine: Callable[[Instance], Machine], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    c = CASES[name]
    bindings.use(
        monkeypatch, lambda op, problem, _: machine(c.instance).call(op, ctypes.c_void_p(problem))
    )
    bindings.plan(c.splits, c.counted, c.ordered)
    try:
        check_forward(c)
    finally:
        bindings.plan(0, False, False)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("64 mask", 3),  # bits, plain, classes
        ("128 causal splits", 2),  # out, max_sum
        pytest.param("64 bias, dropout", 4, marks=pytest.mark.slow),
        pytest.param("128 bias, copied", 4, marks=pytest.mark.slow),
    ],
)
def test_a_short_section_is_detected(
    machine: Callable[[Instance], Machine],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    sections: int,
) -> None:
    """Each section behind the counter is accessed up to its end, and accesses behind it fault."""
    for section in range(1, sections + 1):
        bindings.HOST.native.on_host_short_section(section)
        try:
            with pytest.raises(RuntimeError, match="there is no memory"):
                test_forward(machine, monkeypatch, name)
        finally:
            bindings.HOST.native.on_host_short_section(-1)


@pytest.mark.parametrize("name", ["64 mask", "128 packed splits"])
def test_adjacent_sections(
    machine: Callable[[Instance], Machine], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the library's own layout of the workspace; other tests have guards between sections."""
    with bindings.own_layout():
        test_forward(machine, monkeypatch, name)


def check_forward(c: Case, shared_keys: int = 0) -> tuple[ForwardCall, Tensor, Tensor]:
    """The call, out and lse. shared_keys: number of first keys that all sequences share."""
    generator = torch.Generator().manual_seed(3)
    E = c.D if c.E is None else c.E
    queries, keys = ([pair[i] for pair in c.packed] for i in range(2))
    M, N = (sum(queries) + c.slack, sum(keys) + c.slack) if c.packed else (c.M, c.N)
    q = _data(c, c.H, M, c.D, generator)
    k, v = _data(c, c.K, N, c.D, generator), _data(c, c.K, N, E, generator)
    for x in (k, v):
        x[1:, :, :shared_keys] = x[:1, :, :shared_keys]
    mask = _mask(c, generator)
    scale = c.D**-0.5 if c.scale is None else c.scale
    sinks = None if c.sinks is None else c.sinks + torch.randn(c.H, generator=generator)
    left, right = c.window
    options: dict[str, Any] = {
        "distance_bias": _distance_bias(c, generator), "sinks": sinks, "softcap": c.softcap,
        "causal": c.causal, "window_left": left, "window_right": right, "scale": scale,
        "dropout_p": c.dropout_p, "dropout_seed": c.seed, "dropout_stream": 5,
    }  # fmt: skip
    lengths = _lengths(c.key_lengths), _lengths(c.query_lengths)
    if c.packed:
        options |= packing(_offsets(queries), _offsets(keys), max(queries), max(keys))
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        q[sum(queries) :] = k[sum(keys) :] = v[sum(keys) :] = torch.nan
        for rows, columns in zip(_spans(queries), _spans(keys), strict=True):
            own = [x.transpose(0, 1)[None] for x in (q[rows], k[columns], v[columns])]
            bounds = {"causal": c.causal, "window_left": left, "window_right": right}
            _poison(*own, reference.allowed_pairs(ForwardCall(*own, **bounds)))
        out, lse = torch.empty(M, c.H, E, dtype=c.dtype), torch.empty(c.H, M)
    else:
        options |= {"mask": mask, "key_lengths": lengths[0], "query_lengths": lengths[1]}
        _poison(q, k, v, reference.allowed_pairs(ForwardCall(q, k, v, **options)))
        out = torch.empty(c.B, M, c.H, E, dtype=c.dtype).transpose(1, 2)
        if not c.heads_inside:
            out = out.contiguous()
        lse = torch.empty(c.B, c.H, M)

    def expected(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention_fwd(*ForwardCall(q, k, v, **options))

    call = ForwardCall(q, k, v, **options)
    sm90.attention_fwd(call, out.fill_(torch.nan), lse.fill_(torch.nan))
    wide = [x.double() for x in (q, k, v)]
    ref64, same = expected(*wide), expected(q, k, v)
    magnitude = expected(*wide[:2], wide[2].abs())[0], ref64[1].abs().nan_to_num(0.0, 0.0, 0.0)
    for actual, exact, like, mag in zip((out, lse), ref64, same, magnitude, strict=True):
        if c.packed and actual is out:  # slices are heads
            actual, exact, like, mag = (x.transpose(0, 1) for x in (actual, exact, like, mag))
        result = compare(actual, exact, like, mag, 1 if actual is lse else 2)
        assert result.ok, result
    if sinks is not None:  # the backward identifies rows without keys by this
        assert torch.equal(lse <= sinks[:, None], same[1] <= sinks[:, None])
    return call, out, lse


@pytest.mark.parametrize("count", [1, 7, 3000])
def test_longest_sequences_first(machine: Callable[[Instance], Machine], count: int) -> None:
    """Every sequence has one place; one that is longer by a 255th of the longest comes before."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(0, 5000, (count,), generator=generator)
    lengths[torch.rand(count, generator=generator) < 0.2] = 0
    offsets, order = _offsets(lengths.tolist()), torch.full((count,), -1, dtype=torch.int32)
    most = int(lengths.max())
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (offsets, order))
    of = machine(CASES["128 packed splits"].instance)
    first, second = pointers
    assert of.call("order", first, count, most, second) is None
    assert order.sort().values.tolist() == list(range(count))
    sorted_lengths = lengths[order.long()]
    rest = sorted_lengths.flip(0).cummax(0).values.flip(0)  # the longest from here on
    assert (rest - sorted_lengths <= most / 255 + 128).all()


@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 2), (0,)])
def test_one_value_for_all_keys(monkeypatch: pytest.MonkeyPatch, dims: tuple[int, ...]) -> None:
    """An additive mask without a dimension of keys becomes a boolean one: only lse depends on
    values.
    """
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, n, 8, generator=generator) for n in (9, 5, 5))
    shape = [n if dim in dims else 1 for dim, n in enumerate(q.shape[:3])]
    mask = torch.randn(*shape, 1, generator=generator)
    if 2 in dims:
        mask[..., :1, :] = torch.finfo(mask.dtype).min
    mask = mask.expand(2, *mask.shape[1:])  # a stride of 0, unless there is one for every entry
    out, lse = torch.empty(2, 3, 9, 8), torch.empty(2, 3, 9)

    def attend(*arguments: Any) -> int:
        fields = len(ForwardCall._fields)
        given = ForwardCall(*arguments[:fields])
        assert given.mask is not None and given.mask.dtype == torch.bool
        assert list(given.mask.shape) == [*shape, 1]
        results = reference.attention_fwd(*given)
        for to, x in zip(arguments[fields : fields + 2], results, strict=True):
            to.copy_(x)
        return 0

    library = SimpleNamespace(attention_fwd=SimpleNamespace(default=attend))
    monkeypatch.setattr(sm90, "_library", library)
    monkeypatch.setattr(sm90, "unavailable", lambda: None)
    call = ForwardCall(q, k, v, mask, scale=0.3)
    half = call._replace(q=q.bfloat16(), k=k.bfloat16(), v=v.bfloat16())
    assert sm90.attention_fwd_unsupported(half) is None
    sm90.attention_fwd(call, out, lse)
    wanted = reference.attention_fwd(*call)
    for actual, expected in zip((out, lse), wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
