"""The backward of attention in Triton: values and tilings.

On a GPU every sample runs natively. Without one, test_in_the_interpreter.py runs this file
in Triton's interpreter, on samples that are small enough.
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
from torch import Tensor

from fastattn.ops import _env

triton = pytest.importorskip("triton")
if _env.interpreting():
    import patched_interpreter

    patched_interpreter.install()

from attention_options import (
    BASE,
    CHANGES,
    PACKED_BASE,
    PACKED_CHANGES,
    packed_call,
    padded_call,
)

from benchmarks.tune_attention_bwd import candidates
from fastattn.ops.attention import reference, spec, spec_paged, spec_varlen
from fastattn.ops.attention.calls import (
    BackwardCall,
    ForwardCall,
    Gradients,
)
from fastattn.ops.attention.spec_inputs import (
    allowed_of,
    call_of,
    dead_positions,
    make_inputs,
)
from fastattn.ops.attention.triton import backward as launchers
from fastattn.ops.attention.triton import bwd_config
from fastattn.ops.attention.triton.bwd_config import BwdConfig, BwdTile
from fastattn.testing.compare import compare
from fastattn.testing.spec import Inputs, Sample

DEVICE = _env.default_device()
NATIVE = DEVICE.type == "cuda"
runs = pytest.mark.skipif(
    not NATIVE and not _env.interpreting(),
    reason="runs on a GPU, or in the interpreter's own process",
)
# Dead rows and keys hold NaN, and what the kernels make of them is selected away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
_LATE = () if NATIVE else pytest.mark.slow
RESULTS = Gradients._fields
# The public functions return these in the parameter's dtype, samples in the data's.
PARAMETERS = ("ddistance_bias", "dsinks")
NAN = float("nan")


# -- values ---------------------------------------------------------------------------------------


def _move(x: Any) -> Any:
    """To the device, strides kept."""
    if not isinstance(x, Tensor) or not NATIVE:
        return x
    storage = torch.empty(0, dtype=x.dtype, device=DEVICE).set_(x.untyped_storage().to(DEVICE))
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _by_distance(inputs: Inputs, douts: Sequence[Tensor], distance_bias: Tensor) -> Tensor:
    """Magnitudes of ddistance_bias: sums of those of each pair's score."""
    call = call_of(inputs)
    added = 0.0 if call.mask is None or call.mask.dtype == torch.bool else call.mask
    pairs = torch.where(allowed_of(inputs), added, -torch.inf)
    sizes = spec.SPECS[0].magnitudes(inputs | {"mask": pairs}, tuple(douts))["dmask"]
    return reference._sum_by_distance(sizes, call._replace(distance_bias=distance_bias))


class Call:
    """One call of the backward on a sample's data: its arguments and expected results.

    dout and dlse hold NaN where a row has no key, which must not be seen; either may be absent.
    """

    def __init__(
        self, sample: Sample, dtype: torch.dtype, dout: bool = True, dlse: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(sample.name.encode()))
        self.inputs = sample.make(generator, dtype)
        inputs = self.inputs
        self.forward = padded_call(inputs)
        self.out, self.lse = reference.attention_fwd(*self.forward)
        dead = dead_positions(inputs)
        # Values that every dtype has.
        self.dout = torch.randn(self.out.shape, generator=generator).bfloat16().to(dtype)
        self.dlse = torch.randn(self.lse.shape, generator=generator).bfloat16().float()
        self.dout = torch.where(dead["out"], NAN, self.dout) if dout else None
        self.dlse = torch.where(dead["lse"], NAN, self.dlse) if dlse else None
        mask, bias, sinks = self.forward.mask, self.forward.distance_bias, self.forward.sinks
        self.needs = [
            True, True, True, mask is not None and mask.is_floating_point(), bias is not None,
            sinks is not None,
        ]  # fmt: skip

    def run(
        self, config: BwdConfig | None = None, needs: Sequence[bool] | None = None
    ) -> dict[str, Tensor]:
        """The launcher's results by name; those not needed have no elements."""
        needs = self.needs if needs is None else list(needs)
        moved = ForwardCall._make(map(_move, self.forward))
        likes = (*moved[:4], moved.distance_bias, moved.sinks)
        results = [
            torch.empty(0, device=DEVICE) if x is None or not needed else torch.full_like(x, NAN)
            for x, needed in zip(likes, needs, strict=True)
        ]
        outputs = map(_move, (self.dout, self.dlse, self.out, self.lse))
        call = BackwardCall._make([*outputs, *moved, needs])
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
        d = [None if x is None else x.double() for x in (self.dout, self.dlse)]
        wide = [x.double() if _floating(x) else x for x in self.forward]
        wide_call = ForwardCall._make(wide)._replace(mask=call_of(wide_inputs).mask)
        both = (reference.attention_fwd(*wide_call), (self.out, self.lse))
        exact = reference.attention_bwd(*d, *both[0], *wide_call, self.needs)
        same = reference.attention_bwd(self.dout, self.dlse, *both[1], *self.forward, self.needs)
        sizes = [
            torch.zeros(like.shape, dtype=torch.float64) if x is None else x.nan_to_num()
            for x, like in zip(d, both[1], strict=True)
        ]
        magnitudes = attention.magnitudes(wide_inputs, tuple(sizes))
        if self.needs[4]:
            magnitudes["ddistance_bias"] = _by_distance(wide_inputs, sizes, wide_call.distance_bias)
        for name, e, s in zip(RESULTS, exact, same, strict=True):
            got = results[name]
            if got.numel() == 0 or e is None:
                continue
            if name in PARAMETERS:
                got, s = got.to(self.out.dtype), s.to(self.out.dtype)
            mag = magnitudes[name].reshape(e.shape)
            by_head = name == "ddistance_bias"
            slice_dims = 2 if by_head else min(2, max(0, magnitudes[name].dim() - 2))
            verdict = compare(got, e, s, mag, slice_dims)
            assert verdict.ok, f"{name}: {verdict.message}, allowed {verdict.allowed:.3g}"


def _small(name: str, **options: Any) -> Sample:
    return Sample(name, "", partial(make_inputs, **options), ())


# The whole suite's samples for the interpreter take minutes; these, with the CHANGES below, meet
# every line of the kernels.
_INTERPRETED = (
    "d80", "gqa", "no_keys", "huge_logits", "sinks_dead_rows", "sinks_mask_rows",
    "alibi_own_diagonals", "relative_clipped",
)  # fmt: skip
# A quarter of the rest's time, for tiles that others have too.
_FOR_GPUS = (
    "one_query_long", "one_query_everything", "few_queries_long", "few_queries_everything",
    "sinks_one_query_long", "d128_mask_dropout", "d256_mask_dropout", "d256_bias_lengths",
)  # fmt: skip
_EVERYTHING = _small(
    "everything at once", B=2, H=2, K=1, M=40, N=50, D=24, E=40, mask="min BMN",
    causal="bottom_right", window=(25, -1), key_lengths=[50, 30], query_lengths=[40, 21],
    dropout_p=0.2,
)  # fmt: skip


def _samples() -> list[Any]:
    cases = []
    for sample in (*spec.SAMPLES, _EVERYTHING):
        if sample in spec_paged.SAMPLES:
            continue
        if "triton" in sample.wrong_gradients | sample.wrong_results:
            continue
        if sample.name in _FOR_GPUS and not NATIVE:
            continue
        short = sample.name in _INTERPRETED or sample is _EVERYTHING
        marks = () if short else _LATE
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
    "mask": {"H": 1, "M": 70, "N": 66, "mask": "rows BMN"},
    "mask in steps of eight": {"M": 70, "N": 72, "mask": "min HMN"},
    "mask of one column": {"M": 70, "N": 50, "mask": "bool BM"},
    "dropout": {"H": 1, "M": 70, "N": 50, "dropout_p": 0.25},
}


def _tiled() -> list[Any]:
    """Every shape and every tiling, in the interpreter's quick run in one pair each."""
    turns = [(name, list(TILINGS)[i % len(TILINGS)]) for i, name in enumerate(_SHAPES)]
    return [
        pytest.param(*pair, marks=() if pair in turns else _LATE)
        for pair in itertools.product(_SHAPES, TILINGS)
    ]


@runs
@pytest.mark.parametrize("name, tiling", _tiled())
def test_results_do_not_depend_on_tiles(name: str, tiling: str) -> None:
    call = Call(_small(name, B=_SHAPES[name].get("B", 2), **_SHAPES[name]), torch.float16)
    call.check(call.run(TILINGS[tiling]))


@runs
@pytest.mark.parametrize("dout, dlse", [(True, False), (False, True), (False, False)])
def test_missing_output_gradients(dout: bool, dlse: bool) -> None:
    sample = _small("one output", B=1, M=40, N=50, causal="bottom_right", mask="float HMN")
    call = Call(sample, torch.float32, dout, dlse)
    call.check(call.run())


@runs
def test_only_needed_gradients_are_written() -> None:
    """Their values do not depend on which are needed."""
    call = Call(_small("wanted", B=1, H=1, M=40, mask="float MN", dropout_p=0.1), torch.float32)
    everything = call.run()
    for wanted in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 1, 1, 0)):
        needs = [*(bool(x) for x in wanted), False, False]
        results = call.run(needs=needs)
        for name, needed in zip(RESULTS, needs, strict=True):
            if needed:
                assert torch.equal(results[name], everything[name]), name
            else:
                assert results[name].numel() == 0


@runs
def test_requested_gradients_of_absent_tensors_are_empty() -> None:
    """They take no workspace either: the tile lists of the mask have their places."""
    call = Call(_small("absent", B=1, M=40, mask="bool BMN"), torch.float32)
    results = call.run(needs=[True, True, True, False, True, True])
    call.check(results)
    assert results["ddistance_bias"].numel() == results["dsinks"].numel() == 0


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
def test_rows_with_few_keys(name: str) -> None:
    """Their gradients nearly vanish, unlike the rounding error of out."""
    call = Call(_small(name, **_FEW[name]), torch.bfloat16)
    call.check(call.run())


@runs
@pytest.mark.parametrize("N", [60, 80])
def test_gradients_at_high_dropout(N: int) -> None:
    """fp16 holds dS at its own size, but not divided by 256, dropout's factor: of peaked softmax
    that is too small.
    """
    options = {"B": 1, "H": 1, "M": 20, "N": N, "D": 1, "dropout_p": 0.999, "amplitude": 20.0}
    call = Call(_small("hardly kept 0", **options), torch.float16, True, False)
    call.check(call.run())


@runs
def test_very_negative_scores() -> None:
    """Rows whose lse is below log of the smallest float, in tiles that are not whole."""
    sample = _small("low scores", B=1, H=1, M=192, D=16, mask="bool MN", amplitude=0.01)
    call = Call(sample, torch.float32)
    q, k = call.tensors[:2]
    q[..., 0] = -150.0
    k[..., 0] = 4.0
    call.out, call.lse = reference.attention_fwd(*call.forward)
    assert call.lse.max() < -88
    call.check(call.run())


@runs
def test_gradient_of_a_bias_by_distance() -> None:
    """Bounds that leave few diagonals, with dropped weights, in fp32: the same in every run."""
    options = {"B": 2, "H": 1, "M": 70, "N": 50, "D": 16, "dropout_p": 0.25}
    bounds = {"causal": "bottom_right", "window": (40, -1), "mask": "blocks BMN"}
    call = Call(_small("distance", alibi="H", **options, **bounds), torch.float32)
    first, again = call.run(), call.run(needs=[False] * 4 + [True, False])
    call.check(first)
    assert torch.equal(first["ddistance_bias"], again["ddistance_bias"])


@runs
@pytest.mark.parametrize(
    "mask, blocks, dtype",
    [("bool MN", False, torch.float32), ("min MN", -torch.inf, torch.float16)],
)
def test_a_bias_by_distance_that_only_blocked_pairs_have_may_be_nan(
    mask: str, blocks: float, dtype: torch.dtype
) -> None:
    """The bits are those of a finite bias."""
    M, N = 40, 70
    call = Call(_small("blocked", B=1, H=1, M=M, N=N, D=16, mask=mask, alibi="H"), dtype)
    distance = torch.arange(N) - torch.arange(M)[:, None]
    mask_of_call, bias = call.forward.mask, call.forward.distance_bias
    assert mask_of_call is not None and bias is not None
    mask_of_call.masked_fill_(distance % 3 != 0, blocks)
    call.out, call.lse = reference.attention_fwd(*call.forward)
    finite = call.run()
    entries = torch.arange(1 - M, N)
    bias[..., entries % 3 != 0] = NAN
    for name, result in call.run().items():
        assert torch.equal(result, finite[name]), name


@runs
@pytest.mark.parametrize("amplitude", [1e-2, 4.0])
def test_soft_cap_in_fp32(amplitude: float) -> None:
    """Scores far below the cap and around it, with dropped weights."""
    options = {"B": 1, "H": 1, "M": 40, "N": 50, "D": 16, "softcap": 5.0, "dropout_p": 0.1}
    call = Call(_small(f"cap {amplitude}", amplitude=amplitude, **options), torch.float32)
    call.check(call.run())


@runs
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("mask", [None, "float MN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_a_query_reaches_the_gradients(
    mask: str | None, dtype: torch.dtype, dropout_p: float
) -> None:
    """Results of all keys; where dropout drops the pair, the key's value may be left out."""
    options = {"B": 1, "H": 1, "M": 20, "N": 70, "D": 16, "mask": mask, "dropout_p": dropout_p}
    call = Call(_small("NaN", **options), dtype)
    call.tensors[0][0, 0, 3, 5] = NAN
    call.out, call.lse = reference.attention_fwd(*call.forward)
    results = call.run()
    assert results["dk"].isnan().all()
    keys = results["dv"].isnan().all(-1)
    assert keys.float().mean() > 0.7 if dropout_p else keys.all()


@runs
def test_weights_of_huge_scores_under_dropout() -> None:
    """The rounding error of a score of 1e8 does not multiply its weight by more than 2."""
    options = {"B": 1, "H": 1, "M": 65, "N": 128, "D": 16, "scale": 0.0625, "dropout_p": 0.1}
    call = Call(_small("huge", **options), torch.float16, dlse=False)
    for x in call.tensors[:2]:
        assert x is not None
        x *= 1e4
    call.out, call.lse = reference.attention_fwd(*call.forward)
    exact = reference.attention_bwd(
        call.dout, None, call.out, call.lse, *call.forward(), call.needs
    )[2]
    assert exact is not None
    assert call.run()["dv"].abs().max() <= 2 * exact.abs().max()


@runs
@pytest.mark.parametrize(
    "letters", ["1", *(pytest.param(s, marks=_LATE) for s in ("H", "N")), "BM", "HMN"]
)
def test_gradient_of_a_broadcast_bias(letters: str) -> None:
    """Summed over broadcast dimensions, in splits that are the same in every run."""
    sample = _small(f"bias {letters}", B=2, M=40, N=33, D=16, mask=f"fp32 {letters}")
    call = Call(sample, torch.float16)
    first, again = call.run(needs=[False, False, False, True, False, False]), call.run()
    call.check(first)
    assert torch.equal(first["dmask"], again["dmask"])


@runs
@pytest.mark.parametrize("letters", ["N", "M"])
def test_broadcast_mask_line_is_not_read_beyond_its_end(letters: str) -> None:
    """Partial tiles load it without bounds checks; NaN follows it in memory."""
    options = {"B": 1, "H": 1, "M": 40, "N": 40, "D": 16, "mask": f"float {letters}"}
    call = Call(_small(f"line {letters}", **options), torch.float16)
    mask = call.tensors[3]
    assert mask is not None
    dim = 3 if letters == "N" else 2
    beyond = torch.full_like(mask.narrow(dim, 0, 8), NAN)
    padded = torch.cat((mask, beyond), dim).narrow(dim, 0, mask.shape[dim])
    call.tensors = (*call.tensors[:3], padded, *call.tensors[4:])
    call.check(call.run(needs=[True, True, True, False, False, False]))


@runs
def test_strides() -> None:
    """Heads inside rows or rows inside heads, strides that are no multiple of 8, expanded dout."""
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
    short = ("cross", "gqa", "slack", "dropout", "sinks", "alibi_cross")
    return [
        pytest.param(s, marks=() if s.name in short else _LATE, id=s.name)
        for s in spec_varlen.SAMPLES
        if "triton" not in s.wrong_results
    ]


def _check_packed(sample: Sample) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(sample.name.encode()))
    inputs = sample.make(generator, torch.float16)
    forward = packed_call(inputs)
    out, lse = (x.contiguous() for x in reference.attention_fwd(*forward))
    dout = torch.randn(out.shape, generator=generator).half()
    dlse = torch.randn(lse.shape, generator=generator)
    changes = forward.distance_bias, forward.sinks
    needs = [True, True, True, False, *(x is not None for x in changes)]
    args = (dout, dlse, out, lse, *forward, needs)
    call = BackwardCall(*(_move(x) for x in args))
    if reason := launchers.attention_bwd_unsupported(call):
        pytest.skip(reason)
    given = call.q, call.k, call.v, None, call.distance_bias, call.sinks
    results = [
        torch.empty(0, device=DEVICE) if x is None else torch.full_like(x, NAN) for x in given
    ]
    workspace = [
        torch.full(shape, 1 << 6, dtype=dtype, device=DEVICE)
        for shape, dtype, _ in launchers.attention_bwd_workspace(call)
    ]
    launchers.attention_bwd(call, *results, *workspace)
    exact = reference.attention_bwd(*(x.double() if _floating(x) else x for x in args))
    same = reference.attention_bwd(*args)
    for name, got, e, s in zip(RESULTS, results, exact, same, strict=True):
        if e is None:
            continue
        mag = 1 + e.abs()
        if name in PARAMETERS:
            got, s = got.to(out.dtype), s.to(out.dtype)
        if name == "dsinks":
            packed, sizes = spec_varlen.SPECS[0], (dout.transpose(0, 1).double(), dlse.double())
            mag = packed.magnitudes(packed.widen(inputs), sizes)["dsinks"]
        if e.dim() == 3 and name != "ddistance_bias":
            got, e, s, mag = (x.transpose(0, 1) for x in (got, e, s, mag))
        slice_dims = {"ddistance_bias": 2, "dsinks": 0}.get(name, 1)
        verdict = compare(got, e, s, mag, slice_dims)
        assert verdict.ok, f"{name}: {verdict.message}, allowed {verdict.allowed:.3g}"


@runs
@pytest.mark.parametrize("sample", _packed_samples())
def test_packed_sample(sample: Sample) -> None:
    _check_packed(sample)


# -- the cache of launches ------------------------------------------------------------------------


@functools.cache
def _check_base(**options: Any) -> Call:
    call = Call(_small("calls", **BASE | options), torch.float16)
    call.check(call.run())
    return call


# Repeated with a mask: these change which tiles it is classified in.
_WITH_MASK = ("bottom right", "key lengths", "query lengths", "bias")
# Similar to others.
_LATER = (
    "heads inside rows",
    "wider values",
    "fewer keys",
    "top left",
    "keys ahead",
    "mask",
    "a higher soft cap",
)


def _changes() -> list[Any]:
    cases: list[Any] = [(change, "bool MN") for change in _WITH_MASK]
    for change in CHANGES:
        cases.append(pytest.param(change, None, marks=_LATE if change in _LATER else ()))
    return cases


@runs
@pytest.mark.parametrize("change, mask", _changes())
def test_cache_tells_calls_apart_by_options(change: str, mask: str | None) -> None:
    """Cached launches of one call are not used for the other."""
    _check_base(mask=mask)
    call = Call(_small("calls", **BASE | {"mask": mask} | CHANGES[change]), torch.float16)
    call.check(call.run())


def _packed_calls(**options: Any) -> Sample:
    return Sample("calls", "", partial(spec_varlen.make_inputs, **PACKED_BASE | options), ())


@functools.cache
def _check_packed_base() -> None:
    _check_packed(_packed_calls())


@runs
@pytest.mark.parametrize("change", PACKED_CHANGES)
def test_cache_tells_packed_calls_apart_by_options(change: str) -> None:
    _check_packed_base()
    _check_packed(_packed_calls(**PACKED_CHANGES[change]))


@runs
@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {}) for name in ("q", "k", "v", "out", "dout", "dlse")),
        ("mask", {"mask": "bool BHMN"}),
        ("key_lengths", {"key_lengths": "per query"}),
    ],
)
def test_cache_tells_calls_apart_by_strides(name: str, options: dict[str, str]) -> None:
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


def test_generations_share_tilings() -> None:
    for dtype, D in itertools.product((torch.bfloat16, torch.float32), (64, 128, 256)):
        for archs in (("sm_100", "sm_103"), ("sm_86", "sm_89", "sm_120"), ("gfx90a", "gfx942")):
            assert len({bwd_config.bwd_config(arch, dtype, D, D) for arch in archs}) == 1


def test_refusals() -> None:
    q = torch.randn(1, 1, 4, 16)
    needs = [True] * 4 + [False] * 2

    def refusal(q: Tensor, k: Tensor, v: Tensor) -> str:
        call = BackwardCall(v, None, v, v[..., 0], q, k, v, needs=needs)
        return str(launchers.attention_bwd_unsupported(call))

    wide = torch.randn(1, 1, 4, 264)
    assert refusal(q, q, q) == "None"
    assert "float64" in refusal(q.double(), q, q)
    assert "head dims up to 256, got 264" in refusal(wide, wide, q)
    assert "contiguous last dimension, got k" in refusal(q, q.mT.contiguous().mT, q)
