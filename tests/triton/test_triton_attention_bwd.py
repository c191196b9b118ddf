"""The Triton backward of attention: values and lists of tiles.

On a GPU every sample runs natively. Without one, this file runs itself once more in Triton's
interpreter, on samples that are small enough.
"""

# ruff: noqa: E402  (the interpreter is patched before kernels are imported)

import copy
import functools
import itertools
import zlib
from collections.abc import Sequence
from functools import partial
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

from attention_options import BASE, CHANGES, PACKED_BASE, PACKED_CHANGES
from compiled_kernels import compiles

from benchmarks.tune_attention_bwd import candidates
from fastattn.ops.attention import prepared, reference, spec, spec_varlen
from fastattn.ops.attention.calls import (
    BackwardCall,
    ForwardCall,
    Gradients,
    PackedBackwardCall,
)
from fastattn.ops.attention.spec_inputs import (
    dead,
    dropout_of,
    make_inputs,
    restrictions,
    scale_of,
)
from fastattn.ops.attention.triton import backward as launchers
from fastattn.ops.attention.triton import bwd_bind, bwd_config, mask_lists
from fastattn.ops.attention.triton.bwd_config import BwdConfig, BwdTile
from fastattn.ops.attention.triton.bwd_parts import LSE_DELTA_ALIGNMENT
from fastattn.ops.attention.triton.launch import facts_of
from fastattn.ops.attention.triton.tiles import Case
from fastattn.testing.compare import compare
from fastattn.testing.spec import Sample

DEVICE = _env.default_device()
NATIVE = DEVICE.type == "cuda"
runs = pytest.mark.skipif(
    not NATIVE and not _env.interpreting(),
    reason="runs on a GPU, or in the interpreter's own process",
)
# Dead rows and keys hold NaN, and what the kernels make of them is selected away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
RESULTS = ("dq", "dk", "dv", "dmask")
NAN = float("nan")


# -- values ---------------------------------------------------------------------------------------


def _move(x: Any) -> Any:
    """To the device, strides kept."""
    if not isinstance(x, Tensor) or not NATIVE:
        return x
    storage = torch.empty(0, dtype=x.dtype, device=DEVICE).set_(x.untyped_storage().to(DEVICE))
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


class Call:
    """One call of the backward on a sample's data: its arguments, and what should come of it.

    dout and dlse hold NaN where a row has no key, which must not be seen; either may be absent.
    """

    def __init__(
        self, sample: Sample, dtype: torch.dtype, dout: bool = True, dlse: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(sample.name.encode()))
        self.inputs = sample.make(generator, dtype)
        inputs = self.inputs
        restricted = restrictions(inputs)
        mask, lengths = restricted[0], restricted[1:3]
        mask_tiles = prepared.classify(mask) if inputs.get("prepared") else None
        self.tensors = (inputs["q"], inputs["k"], inputs["v"], mask, mask_tiles, *lengths)
        self.options = (*restricted[3:], scale_of(inputs), *dropout_of(inputs))
        self.out, self.lse = reference.attention_fwd(*self.tensors, *self.options)
        rows, _ = dead(inputs)
        # Values that every dtype has.
        self.dout = torch.randn(self.out.shape, generator=generator).bfloat16().to(dtype)
        self.dlse = torch.randn(self.lse.shape, generator=generator).bfloat16().float()
        self.dout = torch.where(rows[..., None], NAN, self.dout) if dout else None
        self.dlse = torch.where(rows, NAN, self.dlse) if dlse else None
        mask = self.tensors[3]
        self.needs = [True, True, True, mask is not None and mask.is_floating_point()]

    def run(
        self, config: BwdConfig | None = None, needs: Sequence[bool] | None = None
    ) -> dict[str, Tensor]:
        """What the launcher writes, by name; unwanted results have no elements."""
        needs = self.needs if needs is None else list(needs)
        moved = [_move(x) for x in self.tensors]
        results = [
            torch.full_like(x, NAN) if needed else torch.empty(0, device=DEVICE)
            for x, needed in zip(moved[:4], needs, strict=True)
        ]
        call = BackwardCall(
            _move(self.dout), _move(self.dlse), *moved, _move(self.out), _move(self.lse),
            *(_move(x) for x in self.options), needs,
        )  # fmt: skip
        if reason := launchers.attention_bwd_unsupported(call):
            pytest.skip(reason)
        if config is not None:
            launchers.attention_bwd_with_config(config, call, *results)
        else:
            workspace = [
                torch.full(shape, 1 << 6, dtype=dtype, device=DEVICE)
                for shape, dtype, _ in launchers.attention_bwd_workspace(call)
            ]
            launchers.attention_bwd(call, *results, *workspace)
        return dict(zip(RESULTS, results, strict=True))

    def check(self, results: dict[str, Tensor]) -> None:
        """Against the reference in fp64, within the one error budget."""
        attention = spec.SPECS[0]
        wide_inputs = attention.widen(self.inputs)
        mask = wide_inputs.get("mask")
        wide = [
            None if x is None or not x.is_floating_point() else x.double() for x in self.tensors
        ]
        wide = [x if w is None else w for w, x in zip(wide, self.tensors, strict=True)]
        if mask is not None:
            wide[3] = mask[(None,) * (4 - mask.dim())]
        d = [None if x is None else x.double() for x in (self.dout, self.dlse)]
        both = (reference.attention_fwd(*wide, *self.options), (self.out, self.lse))
        exact = reference.attention_bwd(*d, *wide, *both[0], *self.options, self.needs)
        same = reference.attention_bwd(
            self.dout, self.dlse, *self.tensors, *both[1], *self.options, self.needs
        )
        sizes = [
            torch.zeros(like.shape, dtype=torch.float64) if x is None else x.nan_to_num()
            for x, like in zip(d, both[1], strict=True)
        ]
        magnitudes = attention.magnitudes(wide_inputs, tuple(sizes))
        for name, e, s in zip(RESULTS, exact, same, strict=True):
            got = results[name]
            if got.numel() == 0 or e is None:
                continue
            mag = magnitudes[name].reshape(e.shape)
            verdict = compare(got, e, s, mag, min(2, max(0, magnitudes[name].dim() - 2)))
            assert verdict.ok, f"{name}: {verdict.message}, allowed {verdict.allowed:.3g}"


def _small(name: str, **options: Any) -> Sample:
    return Sample(name, "", partial(make_inputs, **options), ())


# The whole suite's samples for the interpreter take minutes; these meet every line of the kernels.
_INTERPRETED = (
    "d80", "gqa", "bottom_right", "window", "key_lengths_rows", "both_lengths", "bool_mask_keys",
    "bias_row", "no_keys", "huge_logits",
)  # fmt: skip
# A quarter of the rest's time, for tiles that others have too.
_FOR_GPUS = (
    "one_query_long", "one_query_everything", "d128_mask_dropout", "d256_mask_dropout",
    "d256_bias_lengths",
)  # fmt: skip
_EVERYTHING = _small(
    "everything at once", B=2, H=2, K=1, M=40, N=50, D=24, E=40, mask="min BMN",
    causal="bottom_right", window=(25, -1), key_lengths=[50, 30], query_lengths=[40, 21],
    dropout_p=0.2,
)  # fmt: skip


def _samples() -> list[Any]:
    cases = []
    for sample in (*spec.SAMPLES, _EVERYTHING):
        if sample.name in _FOR_GPUS and not NATIVE:
            continue
        short = sample.name in _INTERPRETED or sample is _EVERYTHING
        marks = () if NATIVE or short else (pytest.mark.slow,)
        interpreted = torch.bfloat16 if torch.bfloat16 in sample.dtypes else sample.dtypes[0]
        for dtype in sample.dtypes if NATIVE else (interpreted,):
            id = f"{sample.name}-{str(dtype).removeprefix('torch.')}"
            cases.append(pytest.param(sample, dtype, marks=marks, id=id))
    return cases


@runs
@pytest.mark.parametrize("sample, dtype", _samples())
def test_sample(sample: Sample, dtype: torch.dtype) -> None:
    if sample.name == "columns":
        pytest.skip("the last dimension is not contiguous: refused")
    call = Call(sample, dtype)
    call.check(call.run())


TILINGS = {
    "descriptors": BwdConfig(
        BwdTile(32, 64, 4, 2, tma=True), BwdTile(64, 32, 4, 2, tma=True, late=True)
    ),
    "separate": BwdConfig(BwdTile(64, 64, 4, 1), BwdTile(16, 64, 4, 1), separate=True, halves=16),
    "whole": BwdConfig(BwdTile(128, 128, 8, 1), BwdTile(128, 128, 8, 1, late=True)),
}
_SHAPES = {
    "lengths": {"M": 70, "causal": True, "key_lengths": [70, 33], "query_lengths": [65, 70]},
    "mask": {"M": 70, "N": 66, "mask": "rows BMN"},
    "mask in steps of eight": {"M": 70, "N": 72, "mask": "min HMN"},
    "mask of one column": {"M": 70, "N": 50, "mask": "bool BM"},
    "dropout": {"H": 1, "M": 70, "N": 50, "dropout_p": 0.25},
}


def _tiled() -> list[Any]:
    """Every shape and every tiling, in the interpreter's quick run in one pair each."""
    turns = [(name, list(TILINGS)[i % len(TILINGS)]) for i, name in enumerate(_SHAPES)]
    return [
        pytest.param(*pair, marks=() if NATIVE or pair in turns else pytest.mark.slow)
        for pair in itertools.product(_SHAPES, TILINGS)
    ]


@runs
@pytest.mark.parametrize("name, tiling", _tiled())
def test_results_do_not_depend_on_tiles(name: str, tiling: str) -> None:
    call = Call(_small(name, B=_SHAPES[name].get("B", 2), **_SHAPES[name]), torch.float16)
    call.check(call.run(TILINGS[tiling]))


@runs
@pytest.mark.parametrize("dout, dlse", [(True, False), (False, True), (False, False)])
def test_an_output_without_gradient(dout: bool, dlse: bool) -> None:
    sample = _small("one output", B=1, M=40, N=50, causal="bottom_right", mask="float HMN")
    call = Call(sample, torch.float32, dout, dlse)
    call.check(call.run())


@runs
def test_only_what_is_wanted_is_written() -> None:
    """And what is written does not depend on it."""
    call = Call(_small("wanted", B=1, H=1, M=40, mask="float MN", dropout_p=0.1), torch.float32)
    everything = call.run()
    for wanted in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 1, 1, 0)):
        results = call.run(needs=[bool(x) for x in wanted])
        for name, needed in zip(RESULTS, wanted, strict=True):
            if needed:
                assert torch.equal(results[name], everything[name]), name
            else:
                assert results[name].numel() == 0


# With their draws.
_FEW: dict[str, dict[str, Any]] = {
    "two keys 2": {"M": 1, "N": 2, "D": 16},
    "a window of them 5": {"M": 40, "N": 2, "D": 24, "window": (0, -1)},
    "the first rows 2": {
        "M": 17, "D": 24, "dropout_p": 0.25, "causal": "bottom_right", "query_lengths": [1, 10],
    },
}  # fmt: skip


@runs
@pytest.mark.parametrize("name", _FEW)
def test_rows_of_few_keys(name: str) -> None:
    """Their gradients nearly vanish, and out's rounding does not."""
    call = Call(_small(name, **_FEW[name]), torch.bfloat16)
    call.check(call.run())


@runs
@pytest.mark.parametrize("N", [60, 80])
def test_gradients_of_what_is_hardly_kept(N: int) -> None:
    """fp16 holds dS at its own size, but not divided by 256, dropout's factor: of peaked softmax
    that is too small.
    """
    options = {"B": 1, "H": 1, "M": 20, "N": N, "D": 1, "dropout_p": 0.999, "amplitude": 20.0}
    call = Call(_small("hardly kept 0", **options), torch.float16, True, False)
    call.check(call.run())


@runs
def test_scores_far_below_zero() -> None:
    """Rows whose lse is below log of the smallest float, in tiles that are not whole."""
    sample = _small("low scores", B=1, H=1, M=192, D=16, mask="bool MN", amplitude=0.01)
    call = Call(sample, torch.float32)
    q, k = call.tensors[:2]
    q[..., 0] = -150.0
    k[..., 0] = 4.0
    call.out, call.lse = reference.attention_fwd(*call.tensors, *call.options)
    assert call.lse.max() < -88
    call.check(call.run())


@runs
@pytest.mark.parametrize("mask", [None, "float MN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_a_query_reaches_the_gradients(mask: str | None, dtype: torch.dtype) -> None:
    call = Call(_small("NaN", B=1, H=1, M=20, N=70, D=16, mask=mask), dtype)
    call.tensors[0][0, 0, 3, 5] = NAN
    call.out, call.lse = reference.attention_fwd(*call.tensors, *call.options)
    results = call.run()
    for name in ("dk", "dv"):
        assert results[name].isnan().all(), name


@runs
@pytest.mark.parametrize("letters", ["1", "H", "N", "BM", "HMN"])
def test_gradient_of_a_broadcast_bias(letters: str) -> None:
    """Summed over what it is broadcast over, in shares that are always the same."""
    sample = _small(f"bias {letters}", B=2, M=40, N=33, D=16, mask=f"fp32 {letters}")
    call = Call(sample, torch.float16)
    first, again = call.run(needs=[False, False, False, True]), call.run()
    call.check(first)
    assert torch.equal(first["dmask"], again["dmask"])


@runs
@pytest.mark.parametrize("letters", ["N", "M"])
def test_a_line_that_serves_all_is_read_up_to_its_end(letters: str) -> None:
    """Partial tiles read it without tests, and NaN lies behind it."""
    options = {"B": 1, "H": 1, "M": 40, "N": 40, "D": 16, "mask": f"float {letters}"}
    call = Call(_small(f"line {letters}", **options), torch.float16)
    mask = call.tensors[3]
    assert mask is not None
    dim = 3 if letters == "N" else 2
    beyond = torch.full_like(mask.narrow(dim, 0, 8), NAN)
    padded = torch.cat((mask, beyond), dim).narrow(dim, 0, mask.shape[dim])
    call.tensors = (*call.tensors[:3], padded, *call.tensors[4:])
    call.check(call.run(needs=[True, True, True, False]))


@runs
def test_strides_of_every_kind() -> None:
    """Rows inside heads or heads inside rows, steps that are no multiple of 8, expanded dout."""
    call = Call(_small("strides", B=2, M=33, N=40, D=24, layout="bshd"), torch.float32)
    q, k, v, *rest = call.tensors
    padded = torch.randn(*k.shape[:3], 27)
    padded[..., :24] = k
    call.tensors = (q, padded[..., :24], v, *rest)
    call.inputs["k"] = call.tensors[1]
    assert call.dout is not None
    call.dout = call.dout[:, :1, :1].expand(call.out.shape)
    call.check(call.run())


def _packed_samples() -> list[Any]:
    short = ("cross", "gqa", "slack", "dropout", "one_query_each")
    return [
        pytest.param(s, marks=() if NATIVE or s.name in short else (pytest.mark.slow,), id=s.name)
        for s in spec_varlen.SAMPLES
    ]


def _check_packed(sample: Sample) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(sample.name.encode()))
    inputs = sample.make(generator, torch.float16)
    q, k, v = (inputs[name].transpose(0, 1) for name in "qkv")
    offsets = (inputs["cu_seqlens_q"], inputs["cu_seqlens_k"])
    options = (
        inputs["max_seqlen_q"], inputs["max_seqlen_k"], *restrictions(inputs)[3:],
        scale_of(inputs), *dropout_of(inputs),
    )  # fmt: skip
    out, lse = (x.contiguous() for x in reference.attention_varlen_fwd(q, k, v, *offsets, *options))
    dout = torch.randn(out.shape, generator=generator).half()
    dlse = torch.randn(lse.shape, generator=generator)
    args = (dout, dlse, q, k, v, *offsets, out, lse, *options, [True] * 3)
    call = PackedBackwardCall(*(_move(x) for x in args))
    assert launchers.attention_varlen_bwd_unsupported(call) is None
    results = [torch.full_like(x, NAN) for x in (call.q, call.k, call.v)]
    workspace = [
        torch.full(shape, 1 << 6, dtype=dtype, device=DEVICE)
        for shape, dtype, _ in launchers.attention_varlen_bwd_workspace(call)
    ]
    launchers.attention_varlen_bwd(call, *results, *workspace)
    wide = [x.double() if x.is_floating_point() else x for x in args[:7]]  # type: ignore[union-attr]
    exact = reference.attention_varlen_bwd(*wide, out.double(), lse.double(), *args[9:])
    same = reference.attention_varlen_bwd(*args)
    for name, got, e, s in zip(RESULTS[:3], results, exact, same, strict=True):
        got, e, s = (x.transpose(0, 1) for x in (got, e, s))
        verdict = compare(got, e, s, 1 + e.abs(), slice_dims=1)
        assert verdict.ok, f"{name}: {verdict.message}, allowed {verdict.allowed:.3g}"


@runs
@pytest.mark.parametrize("sample", _packed_samples())
def test_packed_sample(sample: Sample) -> None:
    _check_packed(sample)


# -- what is remembered ---------------------------------------------------------------------------


@functools.cache
def _check_base(**options: Any) -> Call:
    call = Call(_small("calls", **BASE | options), torch.float16)
    call.check(call.run())
    return call


# With a mask, those that decide for whom it is looked at.
_WITH_MASK = ("bottom right", "key lengths", "query lengths", "bias")
# Whose like the others are.
_LATER = ("heads inside rows", "wider values", "fewer keys", "top left", "keys ahead", "mask")


def _changes() -> list[Any]:
    cases: list[Any] = [(change, "bool MN") for change in _WITH_MASK]
    for change in CHANGES:
        marks = pytest.mark.slow if change in _LATER and not NATIVE else ()
        cases.append(pytest.param(change, None, marks=marks))
    return cases


@runs
@pytest.mark.parametrize("change, mask", _changes())
def test_calls_that_differ_in_one_option(change: str, mask: str | None) -> None:
    """Nothing that is remembered of a call is used for the other."""
    _check_base(mask=mask)
    call = Call(_small("calls", **BASE | {"mask": mask} | CHANGES[change]), torch.float16)
    call.check(call.run())


@runs
@pytest.mark.parametrize("change", PACKED_CHANGES)
def test_packed_calls_that_differ_in_one_option(change: str) -> None:
    for options in (PACKED_BASE, PACKED_BASE | PACKED_CHANGES[change]):
        _check_packed(Sample("calls", "", partial(spec_varlen.make_inputs, **options), ()))


@runs
@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {}) for name in ("q", "k", "v", "out", "dout", "dlse")),
        ("mask", {"mask": "bool BHMN"}),
        ("key_lengths", {"key_lengths": "per query"}),
    ],
)
def test_calls_that_differ_in_strides(name: str, options: dict[str, str]) -> None:
    call = copy.copy(_check_base(**options))
    names = ("q", "k", "v", "mask", "mask_tiles", "key_lengths", "query_lengths")
    tensors = dict(zip(names, call.tensors, strict=True))
    tensors |= {"out": call.out, "dout": call.dout, "dlse": call.dlse}
    x = tensors[name]
    tensors[name] = wider = torch.stack([x, x], 1).flatten(0, 1)[::2]
    assert wider.stride() != x.stride()
    call.tensors = tuple(tensors[n] for n in names)
    call.out, call.dout, call.dlse = (tensors[n] for n in ("out", "dout", "dlse"))
    call.check(call.run())


# -- lists of tiles -------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("letters", ["BHMN", "MN", "HN", "none"])
def test_listed_tiles_are_what_the_pairs_say(letters: str, looked_at: bool, by_key: bool) -> None:
    """Every tile with an allowed pair is listed once. Full tiles have nothing else, and only edge
    tiles have lines without a pair. looked_at: the mask was prepared.
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
    allowed = reference.allowed_pairs(q, k, mask, lengths, queries, 2, -1, -1).expand(B, H, M, N)

    mask, lengths, queries = _move(mask), _move(lengths), _move(queries)
    words = prepared.classify(mask) if looked_at and mask is not None else None
    inputs = _move(q), _move(k), _move(k), mask, words, lengths, queries
    facts = facts_of(ForwardCall(*inputs, 2, -1, -1, 1.0, 0.0, None, 0))
    base = mask_lists.base_tiles(facts, 16, 16)
    lists = base.lists(block_m, block_n, by_key)
    kinds = torch.full(base.shape, 1 << 6, dtype=torch.uint8, device=DEVICE)
    alive = torch.full((*base.shape, 16), 1 << 6, dtype=torch.uint8, device=DEVICE)
    listed = torch.full(lists.shape, 1 << 30, dtype=torch.int32, device=DEVICE)
    mask_lists.classifier(base, facts, words)(mask, words, lengths, queries, kinds, alive)
    mask_lists.tile_lister(base, lists, by_key)(kinds, listed)

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


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_statistics_of_packed_sequences_fit(length: int) -> None:
    """Each sequence's begin at a multiple of a step, behind the last one's."""
    sequences, step = 40, LSE_DELTA_ALIGNMENT.value
    offsets = length * torch.arange(sequences + 1, dtype=torch.int32)
    q = torch.empty(sequences * length, 1, 8)
    inputs = (q, None, q, q, q, offsets, offsets, q, q[..., 0].T, length, length)
    call = PackedBackwardCall(*inputs, 0, -1, -1, 1.0, 0.0, None, 0, [True] * 3)
    [((_, rows), _, _)] = launchers.attention_varlen_bwd_workspace(call)
    end = 0
    for b, query0 in enumerate(offsets[:-1].tolist()):
        begin = (query0 + b * (step - 1)) // step * step
        assert begin >= end and begin % step == 0
        end = begin + length
    assert end <= rows


def test_dead_rows_and_keys_are_what_the_pairs_say() -> None:
    for M, N, causal in itertools.product(range(1, 5), range(1, 5), range(3)):
        q, k = torch.empty(1, 1, M, 8), torch.empty(1, 1, N, 8)
        for left, right in itertools.product(range(-1, 4), range(-1, 4)):
            restrictions = (None, None, None, causal, left, right)
            inputs = (q, None, q, k, k, None, *restrictions[:3], q, q[..., 0], *restrictions[3:])
            call = BackwardCall(*inputs, 1.0, 0.0, None, 0, [True, True, True, False])
            facts = facts_of(call)
            pairs = reference.allowed_pairs(q, k, *restrictions).expand(1, 1, M, N)
            assert facts.dead_rows != pairs.any(3).all(), (M, N, causal, left, right)
            assert facts.dead_keys != pairs.any(2).all(), (M, N, causal, left, right)


def _constants(
    tiling: BwdConfig, M: int = 64, N: int = 64, expanded: str = ""
) -> tuple[Case, Case]:
    """Of the kernels for dq and for dk and dv. expanded: the tensor that serves both batches."""
    sizes = {"q": M, "k": N, "v": N, "dout": M, "out": M}
    x = {name: torch.empty(2, 2, n, 16, dtype=torch.float16) for name, n in sizes.items()}
    if expanded:
        x[expanded] = x[expanded][:1].expand(2, -1, -1, -1)
    inputs = (x["dout"], None, x["q"], x["k"], x["v"], *[None] * 4, x["out"], x["out"][..., 0])
    call = BackwardCall(*inputs, 0, -1, -1, 1.0, 0.0, None, 0, [True, True, True, False])
    gradients = Gradients(*(torch.empty_like(x[name]) for name in "qkv"), torch.empty(0))
    layout = bwd_bind.layout_of(tiling, call)
    binder = bwd_bind._Binder(layout, facts_of(call), call, gradients, True)
    [(dkdv, _, _)] = binder.dkdv()
    return binder.dq().func.constants["CASE"], dkdv.func.constants["CASE"]


@pytest.mark.parametrize("expanded", ["", "q", "k", "v", "dout"])
def test_descriptors_go_by_what_the_kernel_reads(expanded: str) -> None:
    tile = BwdTile(32, 32, 4, 1, tma=True)
    dq, dkdv = _constants(BwdConfig(tile, tile), expanded=expanded)
    assert dq.TMA.value == (expanded not in ("k", "v"))
    assert dkdv.TMA.value == (expanded not in ("q", "dout"))


def test_edges_go_by_the_tiles_of_the_loop() -> None:
    tiling = BwdConfig(BwdTile(32, 64, 4, 1), BwdTile(64, 32, 4, 1))
    for size in (32, 64, 96, 128):
        dq, dkdv = _constants(tiling, M=size, N=160 - size)
        assert not dq.ARITHMETIC.value and not dkdv.ARITHMETIC.value
        assert dq.RAGGED.value == ((160 - size) % 64 != 0)
        assert dkdv.RAGGED.value == (size % 64 != 0)


# -- tilings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_every_head_dim_has_a_tiling(arch: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for D in (8, 64, 72, 128, 136, 192, 256):
            for bounded, dense in ((False, False), (True, False), (True, True)):
                config = bwd_config.bwd_config(arch, dtype, D, D, bounded, dense)
                for tile in (config.dq, config.dkdv):
                    assert tile.block_m % 16 == tile.block_n % 16 == 128 % tile.block_m == 0
                for first, second in (config.widths(D), config.widths(8)):
                    assert first + second >= 8 and max(first, second) <= 256
                assert sum(config.widths(D)) >= D
                assert config.precision in ("ieee", "tf32x3")
                found = candidates(arch, dtype, D, D, bounded, dense)
                assert found[0] == config and len(set(found)) == len(found)
    for dtype in (torch.bfloat16, torch.float32):
        assert len(candidates("sm_90", dtype, 128, 128)) > 5
    for D in (96, 192):
        found = candidates("sm_90", torch.bfloat16, D, D)
        assert {len([w for w in c.widths(D) if w]) for c in found} == {1, 2}


def test_gpus_of_a_generation_share_tilings() -> None:
    for dtype, D in itertools.product((torch.bfloat16, torch.float32), (64, 128, 256)):
        for archs in (("sm_100", "sm_103"), ("sm_86", "sm_89", "sm_120"), ("gfx90a", "gfx942")):
            assert len({bwd_config.bwd_config(arch, dtype, D, D) for arch in archs}) == 1


def test_refuses_what_it_cannot_run() -> None:
    q = torch.randn(1, 1, 4, 16)
    rest = (0, -1, -1, 1.0, 0.0, None, 0, [True] * 4)

    def refusal(q: Tensor, k: Tensor, v: Tensor) -> str:
        args = (v, None, q, k, v, None, None, None, None, v, v[..., 0])
        return str(launchers.attention_bwd_unsupported(BackwardCall(*args, *rest)))

    wide = torch.randn(1, 1, 4, 264)
    assert refusal(q, q, q) == "None"
    assert "float64" in refusal(q.double(), q, q)
    assert "head dims up to 256, got 264" in refusal(wide, wide, q)
    assert "contiguous last dimension, got k" in refusal(q, q.mT.contiguous().mT, q)


# -- the interpreter's own process ----------------------------------------------------------------


@pytest.mark.long
@compiles
@pytest.mark.skipif(NATIVE, reason="the GPU runs them")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(which: str) -> None:
    assert passed_in_the_interpreter(__file__, "-m", which) >= 25
