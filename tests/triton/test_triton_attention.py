"""The forward of attention in Triton: values.

On a GPU every sample runs natively. Without one, test_in_the_interpreter.py runs this file
in Triton's interpreter, on the samples that are small enough.
"""

# ruff: noqa: E402  (the interpreter is patched before kernels are imported)

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

import triton.language as tl
from attention_options import (
    BASE,
    CHANGES,
    PACKED_BASE,
    PACKED_CHANGES,
    packed_call,
    packing,
    padded_call,
)

from benchmarks import tune
from benchmarks.tune_task import Task
from fastattn.ops import _triton_dropout as bits
from fastattn.ops._dropout import attention_keep, threshold
from fastattn.ops.attention import prepared, reference, spec, spec_varlen
from fastattn.ops.attention.calls import ForwardCall
from fastattn.ops.attention.op import CAUSAL
from fastattn.ops.attention.spec_inputs import (
    make_inputs,
)
from fastattn.ops.attention.triton import call_shape
from fastattn.ops.attention.triton import forward as kernels
from fastattn.ops.attention.triton import tiles as device_tiles
from fastattn.ops.attention.triton.fwd_config import ForwardConfig
from fastattn.testing.compare import compare
from fastattn.testing.spec import Sample

DEVICE, FP16 = _env.default_device(), torch.float16
RUNS = DEVICE.type == "cuda" or _env.interpreting()
runs = pytest.mark.skipif(not RUNS, reason="runs on a GPU, or in the interpreter's own process")
# Kernels divide by empty sums and select the result away, and dead rows hold NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


# -- values ---------------------------------------------------------------------------------------


def _arguments(sample: Sample, dtype: torch.dtype) -> ForwardCall:
    """A sample as the op sees it."""
    generator = torch.Generator().manual_seed(zlib.crc32(sample.name.encode()))
    inputs = sample.make(generator, dtype)
    return padded_call(inputs)


def _move(x: Any) -> Any:
    """To the device, strides kept."""
    if not isinstance(x, Tensor) or DEVICE.type == "cpu":
        return x
    storage = torch.empty(0, dtype=x.dtype, device=DEVICE).set_(x.untyped_storage().to(DEVICE))
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def _wide(args: ForwardCall) -> tuple[Any, ...]:
    """In fp64 with the same meaning: what a narrow mask blocks stays blocked."""
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    mask = args[3]
    if mask is not None and mask.is_floating_point():
        blocked = mask <= torch.finfo(mask.dtype).min
        wide[3] = torch.where(blocked, -torch.inf, mask.double())
    return tuple(wide)


def _check(args: ForwardCall, config: ForwardConfig | None = None) -> None:
    """The launcher's results against the reference, within the one error budget."""
    (B, H, M, _), E = args[0].shape, args[2].shape[3]
    nan = {"fill_value": float("nan"), "device": DEVICE}
    out = torch.full((B, M, H, E), dtype=args[0].dtype, **nan).transpose(1, 2)
    lse = torch.full((B, H, M), dtype=torch.float32, **nan)
    call = ForwardCall(*(_move(x) for x in args))
    if config is not None:
        kernels.attention_fwd_with_config(config, call, out, lse)
    else:
        workspace = [
            torch.full(shape, 1 << 30, dtype=dtype, device=DEVICE)
            for shape, dtype, _ in kernels.attention_fwd_workspace(call)
        ]
        kernels.attention_fwd(call, out, lse, *workspace)
    wide, same = reference.attention_fwd(*_wide(args)), reference.attention_fwd(*args)
    # Size of a value: the sum of its terms' sizes; of a score: its own rounding, a few terms.
    size = reference.attention_fwd(*_wide(args)[:2], args[2].double().abs(), *_wide(args)[3:])[0]
    mags = (size.nan_to_num(), 1 + wide[1].abs())
    for name, got, w, s, mag in zip(("out", "lse"), (out, lse), wide, same, mags, strict=True):
        result = compare(got.cpu(), w, s, mag, slice_dims=2)
        assert result.ok, f"{name}: {result.message}, allowed {result.allowed:.3g}"


NATIVE = DEVICE.type == "cuda"


def _chosen(samples: Sequence[Sample]) -> list[tuple[Sample, Any]]:
    """The samples that run, with their marks: without a GPU every other one is slow."""
    chosen = [s for s in samples if NATIVE or "interpreter" in s.tags]
    return [(s, () if NATIVE or i % 2 == 0 else pytest.mark.slow) for i, s in enumerate(chosen)]


def _samples() -> list[Any]:
    return [
        pytest.param(sample, dtype, marks=marks, id=f"{sample.name}-{str(dtype)[6:]}")
        for sample, marks in _chosen(spec.SAMPLES)
        for dtype in sample.dtypes
        if NATIVE or dtype == torch.bfloat16
    ]


def _sample(name: str) -> Sample:
    return next(s for s in spec.SAMPLES if s.name == name)


@runs
@pytest.mark.parametrize("sample, dtype", _samples())
def test_sample(sample: Sample, dtype: torch.dtype) -> None:
    args = _arguments(sample, dtype)
    if reason := kernels.attention_fwd_unsupported(ForwardCall(*(_move(x) for x in args))):
        pytest.skip(reason)
    _check(args)


def _packed_samples() -> list[Any]:
    chosen = _chosen(spec_varlen.SAMPLES)
    return [pytest.param(sample, marks=marks, id=sample.name) for sample, marks in chosen]


def _check_packed(sample: Sample) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(sample.name.encode()))
    inputs = sample.make(generator, torch.float16)
    args = packed_call(inputs)
    (T, H, _), E = args.q.shape, args.v.shape[2]
    out = torch.full((T, H, E), float("nan"), dtype=args.q.dtype, device=DEVICE)
    lse = torch.full((H, T), float("nan"), device=DEVICE)
    call = ForwardCall(*(_move(x) for x in args))
    if reason := kernels.attention_fwd_unsupported(call):
        pytest.skip(reason)
    workspace = [
        torch.full(shape, 1 << 30, dtype=dtype, device=DEVICE)
        for shape, dtype, _ in kernels.attention_fwd_workspace(call)
    ]
    kernels.attention_fwd(call, out, lse, *workspace)
    wide = reference.attention_fwd(
        *(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
    )
    same = reference.attention_fwd(*args)
    for got, w, s in zip((out.transpose(0, 1), lse), (wide[0].transpose(0, 1), wide[1]),
                         (same[0].transpose(0, 1), same[1]), strict=True):  # fmt: skip
        result = compare(got.cpu(), w, s, 1 + w.abs(), slice_dims=1)
        assert result.ok, f"{result.message}, allowed {result.allowed:.3g}"


@runs
@pytest.mark.parametrize("sample", _packed_samples())
def test_packed_sample(sample: Sample) -> None:
    _check_packed(sample)


def _calls(**options: Any) -> Sample:
    return Sample("calls", "", partial(make_inputs, **BASE | options), ())


@functools.cache
def _check_base() -> None:
    _check(_arguments(_calls(), FP16))


@runs
@pytest.mark.parametrize("change", CHANGES)
def test_cache_tells_calls_apart_by_options(change: str) -> None:
    """Cached launches of one call are not used for the other."""
    _check_base()
    _check(_arguments(_calls(**CHANGES[change]), FP16))


@runs
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "key_lengths", "query_lengths"])
def test_cache_tells_calls_apart_by_strides(name: str) -> None:
    options = {"M": 20, "N": 40, "D": 16, "mask": "min BHMN", "key_lengths": "per query"}
    options["query_lengths"] = [20, 7]
    args = _arguments(Sample("strides", "", partial(make_inputs, **options), ()), FP16)
    _check(args)
    at = ForwardCall._fields.index(name)
    wider = torch.stack([args[at], args[at]], 1).flatten(0, 1)[::2]
    assert wider.stride() != args[at].stride()
    _check(args._replace(**{name: wider}))


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
@pytest.mark.parametrize("name", ["prepared_mask_restricted", "prepared_bias_column"])
def test_prepared_mask_is_bitwise_equal_to_its_mask(name: str) -> None:
    call = ForwardCall(*(_move(x) for x in _arguments(_sample(name), torch.float16)))
    results = []
    for prepared_tiles in (call.mask_tiles, None):
        out, lse = torch.empty_like(call.q), torch.empty(call.q.shape[:3], device=DEVICE)
        config = ForwardConfig(32, 32, 4, 1)
        kernels.attention_fwd_with_config(
            config, call._replace(mask_tiles=prepared_tiles), out, lse
        )
        results.append((out, lse))
    for prepared_result, result in zip(*results, strict=True):
        assert torch.equal(prepared_result, result)


@runs
def test_prepared_masks_with_and_without_broadcast_tiles() -> None:
    """The tiles of one head are broadcast where all heads have equal masks."""
    q, k, v = _arguments(Sample("tiles", "", partial(make_inputs, B=1, **BASE), ()), FP16)[:3]
    mask = torch.ones(1, 2, 20, 40, dtype=torch.bool)
    mask[..., 32:] = False
    _check(ForwardCall(q, k, v, mask, prepared.classify(mask[:, :1]), scale=0.25))
    mask[:, 1] = True
    _check(ForwardCall(q, k, v, mask, prepared.classify(mask), scale=0.25))


@runs
@pytest.mark.parametrize("tma", [False, True])
def test_head_dim_padded_to_one_tile(tma: bool) -> None:
    config = ForwardConfig(32, 32, 4, 1, tma=tma, whole=True)
    assert config.widths(80) == (128, 0)
    _check(_arguments(_sample("d80"), torch.float16), config)


TILINGS = {
    "wide": ForwardConfig(16, 64, 4, 1),
    "tall": ForwardConfig(64, 16, 4, 2),
    "descriptors": ForwardConfig(64, 32, 4, 2, tma=True, overlap=1),
    "values_last": ForwardConfig(32, 32, 4, 2, overlap=2),
    "whole": ForwardConfig(128, 128, 8, 1),
    "wide_values": ForwardConfig(64, 32, 4, 2, tma=True, overlap=1, value_columns=64),
}


def _tiled() -> list[Any]:
    """In the interpreter's quick run, each tiling with one sample."""
    names = ("both_lengths_causal", "bool_mask_keys", "dropout")
    turns = [(names[i % len(names)], tiling) for i, tiling in enumerate(TILINGS)]
    return [
        pytest.param(*pair, marks=() if NATIVE or pair in turns else pytest.mark.slow)
        for pair in itertools.product(names, TILINGS)
    ]


@runs
@pytest.mark.parametrize("name, tiling", _tiled())
def test_results_do_not_depend_on_tiles(name: str, tiling: str) -> None:
    _check(_arguments(_sample(name), torch.float16), TILINGS[tiling])


@runs
def test_partial_last_key_tile() -> None:
    """The number of keys is a multiple of BLOCK_M, but not of BLOCK_N."""
    make = partial(make_inputs, B=1, H=1, M=5, N=48, D=16)
    _check(_arguments(Sample("last tile", "", make, ()), FP16), ForwardConfig(16, 32, 4, 1))


@runs
@pytest.mark.parametrize("mask", ["blocks MN", "min HMN", "float N"])
def test_masks_with_strides_of_eight(mask: str) -> None:
    options = {"M": 70, "N": 104, "mask": mask, "D": 16, "causal": "bottom_right"}
    sample = Sample("steps", "", partial(make_inputs, **options), ())
    _check(_arguments(sample, torch.float16))


@runs
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("mask", ["bool BM", "min HM"])
def test_masks_with_one_column(mask: str, restricted: bool) -> None:
    lengths = {"causal": "bottom_right", "key_lengths": [50, 33]} if restricted else {}
    options = {"B": 2, "M": 70, "N": 50, "mask": mask, "D": 16, **lengths}
    sample = Sample("column", "", partial(make_inputs, **options), ())
    _check(_arguments(sample, torch.float16))


@runs
def test_mask_that_is_a_column_of_a_wider_one() -> None:
    """Rows have strides of eight, so partial tiles are loaded without bounds checks."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 2, 70, 16, generator=generator).half()
    k, v = (torch.randn(1, 2, 104, 16, generator=generator).half() for _ in range(2))
    mask = (torch.rand(1, 1, 70, 104, generator=generator) > 0.3)[..., :1]
    _check(ForwardCall(q, k, v, mask, scale=0.25))


@runs
def test_broadcast_mask_row_is_not_read_beyond_its_end() -> None:
    """Partial tiles load it without bounds checks; NaN follows it in memory."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 1, 40, 16, generator=generator).half()
    k, v = (torch.randn(1, 1, 72, 16, generator=generator).half() for _ in range(2))
    row = torch.full((1, 1, 1, 80), float("nan"))
    row[..., :72] = torch.randn(72, generator=generator)
    _check(ForwardCall(q, k, v, row[..., :72], scale=0.25))


@runs
@pytest.mark.parametrize("value", [-3.0e38, -1e30, -60000.0])
def test_only_the_lowest_bias_blocks(value: float) -> None:
    """Only finfo.min blocks: a row of equal large negative values is a mean."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, 40, 16, generator=generator) for _ in range(3))
    mask = torch.zeros(1, 1, 40, 40)
    mask[..., 3, :] = value
    mask[..., 5, 1:] = value
    _check(ForwardCall(q, k, v, mask, scale=0.25))


@runs
def test_head_dims_of_one_two_and_padded_tiles() -> None:
    """One tile, two tiles, padded tiles, not a multiple of 8."""
    generator = torch.Generator().manual_seed(1)
    for D, E in ((8, 24), (20, 40), (48, 100), (72, 8), (120, 64)):
        q, k = (torch.randn(1, 2, 33, D, generator=generator).half() for _ in range(2))
        v = torch.randn(1, 2, 33, E, generator=generator).half()
        _check(ForwardCall(q, k, v, causal=1, scale=D**-0.5))


@triton.jit
def _tanh_kernel(x_ptr, out_ptr):
    offs = tl.arange(0, 4096)
    tl.store(out_ptr + offs, device_tiles.tanh(tl.load(x_ptr + offs)))


@runs
def test_tanh_has_a_small_relative_error() -> None:
    x = torch.cat([torch.logspace(-30, 2, 2046), torch.tensor([0.0, torch.inf])])
    x = torch.cat([x, -x]).to(DEVICE)
    out = torch.empty_like(x)
    _tanh_kernel[(1,)](x, out)
    exact = x.double().tanh()
    assert ((out - exact).abs() <= 5e-7 * exact.abs()).all()
    _tanh_kernel[(1,)](torch.full_like(x, torch.nan), out)
    assert out.isnan().all()


@runs
@pytest.mark.parametrize("amplitude", [1e-2, 4.0])
def test_soft_cap_in_fp32(amplitude: float) -> None:
    """Scores far below the cap and around it."""
    options = {"B": 1, "H": 1, "M": 40, "N": 50, "D": 16, "softcap": 5.0, "amplitude": amplitude}
    _check(_arguments(Sample("cap", "", partial(make_inputs, **options), ()), torch.float32))


@runs
@pytest.mark.parametrize("dtype", [torch.float32, FP16])
def test_only_rows_without_keys_have_the_sink_as_lse(dtype: torch.dtype) -> None:
    """Other rows' lse is above it, if by rounding up alone: the backward recognises them by lse."""
    sinks = torch.tensor([0.0, -0.0, 30.0, -50.0, -torch.inf])
    q = torch.full((1, 5, 3, 16), 8.0, dtype=dtype)
    lengths = torch.tensor([[4, 0, 1]], dtype=torch.int32)
    call = ForwardCall(q, -q, q, key_lengths=lengths, sinks=sinks)
    call = ForwardCall(*(_move(x) for x in call))
    out, lse = torch.empty_like(call.q), torch.empty(1, 5, 3, device=DEVICE)
    kernels.attention_fwd(call, out, lse)
    assert torch.equal(lse[0, :, 1].cpu(), sinks)
    assert (lse[0, :, ::2].cpu() > sinks[:, None]).all()
    assert torch.equal(lse[0, -1, ::2].cpu() > -1e4, torch.tensor([True, True]))


@pytest.mark.skipif(not _env.interpreting(), reason="counts what the interpreter computes")
@pytest.mark.parametrize("packed", [False, True])
def test_rows_beyond_query_lengths_are_not_computed(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 of 256 rows are within their length; their keys are in one tile."""
    from triton.runtime.interpreter import InterpreterBuilder

    products: list[Any] = []
    dot = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda *args: (products.append(1), dot(*args))[1]
    )
    options: dict[str, Any] = {"causal": CAUSAL["top_left"], "window_left": 64, "window_right": 0}
    if packed:
        q, offsets = torch.randn(32, 1, 16), torch.tensor([0, 32], dtype=torch.int32)
        out, lse = torch.empty_like(q), torch.empty(1, 32)
        call = ForwardCall(q, q, q, **packing(offsets, offsets, 256, 256), **options)
        kernels.attention_fwd(call, out, lse)
    else:
        q, length = torch.randn(1, 1, 256, 16), torch.tensor([32], dtype=torch.int32)
        out, lse = torch.empty_like(q), torch.empty(1, 1, 256)
        call = ForwardCall(q, q, q, key_lengths=length, query_lengths=length, **options)
        kernels.attention_fwd(call, out, lse)
        kernels.attention_fwd(call._replace(key_lengths=None), out, lse)
    assert len(products) == (2 if packed else 4)


# -- dropout --------------------------------------------------------------------------------------


@triton.jit
def _kept_kernel(out_ptr, x_ptr, seed, stream, least, b, h, start, KIND: tl.constexpr):
    """Drops elements of a tile [32, 64] of ones with one of the functions for it."""
    rows = tl.arange(0, 32)[:, None]
    columns = tl.arange(0, 64)[None, :]
    row_base, column_base = bits.dropout_bases(seed, stream, b, h)
    row_keys = bits.unit_keys(row_base, start, 16)
    column_keys = bits.unit_keys(column_base, start, 32)
    offs = rows * 64 + columns
    x = tl.load(x_ptr + offs)
    words = bits.kept_bits(row_keys, column_keys, least, 32, 64)
    if KIND == "select":
        keep = bits.dropout_kept(row_keys, column_keys, rows, columns, least, 32, 64)
        x = tl.where(keep, x, 0.0)
    elif KIND == "negate":
        x = tl.maximum(bits.negate_dropped(x.to(tl.float32), words, rows, columns), 0.0)
    else:
        x = bits.zero_dropped(x, words, rows, columns)
    tl.store(out_ptr + offs, x.to(out_ptr.dtype.element_ty))


@runs
@pytest.mark.parametrize(
    "kind, dtype",
    [
        ("select", torch.float32),
        ("negate", torch.float32),
        pytest.param("zero", torch.float32, marks=pytest.mark.gpu),
        pytest.param("zero", torch.float16, marks=pytest.mark.gpu),
        pytest.param("zero", torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
@pytest.mark.parametrize("origin", [(), (2**32 - 2, 2**35 + 1, 2**33 - 32, -16)], ids=str)
def test_dropout_bits_are_those_of_the_definition(
    kind: str, dtype: torch.dtype, origin: tuple[int, ...]
) -> None:
    """On both sides of a threshold of 128, and where bytes have no value below or above it."""
    if kind == "zero" and not _env.architecture("cuda", 0).startswith("sm_"):
        pytest.skip("an instruction of NVIDIA's")
    seed, stream, b, h, start = torch.tensor([(5 << 40) + 77, *origin]), 3, 1, 2, 32
    given = call_shape.attention_seed(seed.to(DEVICE))
    x, out = (torch.ones(32, 64, dtype=dtype, device=DEVICE) for _ in range(2))
    for p in (0.001, 0.1, 0.496, 0.5, 0.504, 0.9, 0.999):
        numbers = (stream, threshold(p), b, h, start)
        _kept_kernel[(1,)](out, x, given, *numbers, KIND=kind)
        keep = attention_keep(seed, stream, p, 2, 3, 64, 96)[b, h, start:, start:]
        assert torch.equal(out.cpu() == 1.0, keep) and torch.equal(out.cpu() == 0.0, ~keep)


def test_dead_keys_match_allowed_pairs() -> None:
    """Values that no query attends may be NaN."""
    for M, N, causal in itertools.product(range(1, 5), range(1, 5), range(3)):
        q, k = torch.empty(1, 1, M, 8), torch.empty(1, 1, N, 8)
        for left, right in itertools.product(range(-1, 4), range(-1, 4)):
            call = ForwardCall(q, k, k, causal=causal, window_left=left, window_right=right)
            pairs = reference.allowed_pairs(call)
            dead = not pairs.expand(1, 1, M, N).any(2).all()
            assert call_shape.call_shape_of(call).dead_keys == dead, (M, N, causal, left, right)


def test_descriptors_need_strides_of_16_bytes() -> None:
    x = torch.empty(2, 3, 5, 16, dtype=FP16)
    one_head = torch.empty_strided((1, 1, 5, 16), (3, 5, 16, 1), dtype=FP16)
    parts = x[:, :1, :, :8], x[:1, 1:2], torch.empty(1, 1, 5, 8), one_head
    for described in (x, x.transpose(1, 2), *parts):
        assert call_shape.fits_descriptor(described)
        [template, _] = call_shape.descriptor_templates(described, 16, (16, 0))
        assert template is not None and template.descriptor.base is None
    for other in (x[:, :0], x[:, :, :1].expand(2, 3, 5, 16), torch.empty(2, 3, 5, 12, dtype=FP16)):
        assert not call_shape.fits_descriptor(other)


@pytest.mark.parametrize("M, N", [(1, 600), (600, 1)])
def test_workspace_holds_dropout_keys_of_all_columns(M: int, N: int) -> None:
    q, k = torch.empty(1, 1, M, 8), torch.empty(1, 1, N, 8)
    call, offsets = ForwardCall(q, k, k, dropout_p=0.5), torch.tensor([0])
    packed = call._replace(q=q[0], k=k[0], v=k[0], **packing(offsets, offsets, M, N))
    for each in (call, packed):
        [((columns,), _, _)] = kernels.attention_fwd_workspace(each)
        assert 2 * columns >= N


# -- refusals -------------------------------------------------------------------------------------


def test_refusals() -> None:
    q = torch.randn(1, 1, 4, 16)
    wide, far = torch.randn(1, 1, 4, 264), (1 << 22) + 16

    def refusal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> str:
        return str(kernels.attention_fwd_unsupported(ForwardCall(q, k, v, mask)))

    def strided(row: int, column: int) -> Tensor:
        return torch.empty_strided((1, 1, 4, 16), (0, 0, row, column), device="meta")

    assert refusal(q, q, q) == "None"
    assert "float64" in refusal(q.double(), q.double(), q.double())
    assert "head dims up to 256, got 264" in refusal(wide, wide, q)
    assert "contiguous last dimension, got k" in refusal(q, q.mT.contiguous().mT, q)
    assert f"row strides up to 4194304, got {far} in v" in refusal(q, q, strided(far, 1))
    assert refusal(q, q, strided(far, 1)[:, :, :1]) == "None"
    for strides in ((far, 1), (1, far)):
        assert "mask strides up to 4194304" in refusal(q, q, q, strided(*strides))


# -- tuning ---------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("feature", ["causal", "both_lengths", "mask", "dropout"])
def test_tuning_rejects_wrong_results(
    direction: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task("attention", direction, "fp16", (2, 2, 64, 16), feature)
    config = task.candidates("interpreter")[0]
    row = tune.measure(task, config, 1.0, DEVICE)
    assert row["status"] == "ok" and row["ms"] > 0.0, row
    launcher = Task.launcher

    def launch_wrong(task: Task, call: Any, results: Any) -> Any:
        launch = launcher(task, call, results)
        return lambda config: (launch(config), results[0][0, 0, 5].zero_())

    monkeypatch.setattr(Task, "launcher", launch_wrong)
    row = tune.measure(task, config, 1.0, DEVICE)
    name = "out" if direction == "fwd" else "dq"
    assert row["status"] == "wrong" and name in row["message"], row
