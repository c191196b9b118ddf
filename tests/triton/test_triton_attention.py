"""Attention in Triton: values of the forward and the backward, and tilings.

On a GPU the samples of the op run in tests/ops/test_ops.py. Without one, test_in_the_interpreter.py
runs this file in Triton's interpreter, where each sample has one dtype.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from attention_options import BASE, CHANGES, PACKED_BASE, PACKED_CHANGES, packing, padded_call
from op_examples import assert_same_bits
from torch import Tensor
from triton_values import (
    DEVICE,
    NAN,
    apart,
    check,
    interpreted,
    launched_by,
    made,
    runs,
    samples_of,
)

from benchmarks import tune
from benchmarks.tune_attention_bwd import candidates
from benchmarks.tune_task import Task
from fastattn.ops import _env
from fastattn.ops import _triton_dropout as bits
from fastattn.ops._dropout import attention_keep, threshold
from fastattn.ops._op import OPS
from fastattn.ops.attention import spec, spec_varlen
from fastattn.ops.attention.calls import BackwardCall, ForwardCall
from fastattn.ops.attention.op import CAUSAL
from fastattn.ops.attention.spec_inputs import make_inputs
from fastattn.ops.attention.triton import backward, bwd_config, call_shape, forward
from fastattn.ops.attention.triton import tiles as device_tiles
from fastattn.ops.attention.triton.bwd_config import BwdConfig, BwdTile
from fastattn.ops.attention.triton.fwd_config import ForwardConfig
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import Inputs, Sample

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
[ATTENTION], [PACKED] = spec.SPECS, spec_varlen.SPECS
# Kernels divide by empty sums and select the result away, and dead rows hold NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


# -- values ---------------------------------------------------------------------------------------
# With the CHANGES below, these meet every line of the kernels.
_QUICK = (
    "one_query", "d80", "gqa", "no_keys", "huge_logits", "key_lengths_rows", "key_lengths_zero",
    "bool_mask_keys", "bias_padding_dropout", "prepared_mask_restricted", "add_1e9", "exact_1e6",
    "dropout_origin", "sinks_dead_rows", "sinks_mask_rows", "alibi_own_diagonals",
    "relative_clipped", "paged_one_query_lengths", "paged_shared", "paged_all_scores",
    "paged_no_keys",
)  # fmt: skip
# A quarter of the rest's time, for tiles that others have too.
_FOR_GPUS = (
    "one_query_long", "one_query_everything", "few_queries_long", "few_queries_everything",
    "sinks_one_query_long", "d128_mask_dropout", "d256_mask_dropout", "d256_bias_lengths",
)  # fmt: skip


@interpreted
@pytest.mark.parametrize("sample, dtype", samples_of(ATTENTION, _QUICK, _FOR_GPUS))
def test_sample(sample: Sample, dtype: torch.dtype) -> None:
    check(ATTENTION, sample, dtype)


_QUICK_PACKED = ("cross", "gqa", "slack", "dropout", "sinks", "alibi_cross", "empty_sequences")


@interpreted
@pytest.mark.parametrize("sample, dtype", samples_of(PACKED, _QUICK_PACKED))
def test_packed_sample(sample: Sample, dtype: torch.dtype) -> None:
    check(PACKED, sample, dtype)


def _sample(name: str, make: Callable[..., Inputs] = make_inputs, **options: Any) -> Sample:
    gradients = "q k v mask alibi_slopes sinks relative_bias"
    return made(make, gradients, name, **{"B": 1, **options})


def _mask_is_a_wide_column(inputs: Inputs) -> None:
    """Rows have strides of eight, so partial tiles are loaded without bounds checks."""
    inputs["mask"] = inputs["mask"].expand(-1, -1, -1, 104).contiguous()[..., :1]


def _nan_behind(dim: int, inputs: Inputs) -> None:
    """Partial tiles load a broadcast mask without bounds checks; NaN follows it in memory."""
    mask = inputs["mask"].detach()
    beyond = torch.full_like(mask.narrow(dim, 0, 8), NAN)
    inputs["mask"] = torch.cat((mask, beyond), dim).narrow(dim, 0, mask.shape[dim])


def _odd_strides(inputs: Inputs) -> None:
    k = inputs["k"].detach()
    inputs["k"] = torch.cat([k, k[..., :3]], 3)[..., :24].requires_grad_()


CASES: dict[str, tuple[Any, ...]] = {
    **{
        f"strides of eight, {mask}": (
            FP16, {"M": 70, "N": 104, "D": 16, "mask": mask, "causal": "bottom_right"},
        )
        for mask in ("blocks MN", "min HMN", "float N")
    },
    **{
        f"one column, {mask}, {restricted}": (
            FP16, {"B": 2, "M": 70, "N": 50, "D": 16, "mask": mask} | restricted,
        )
        for mask in ("bool BM", "min HM")
        for restricted in ({}, {"causal": "bottom_right", "key_lengths": [50, 33]})
    },
    **{  # one tile, two tiles, padded tiles, not a multiple of 8
        f"head dims {D} and {E}": (FP16, {"M": 33, "D": D, "E": E, "causal": True})
        for D, E in ((8, 24), (20, 40), (48, 100), (72, 8), (120, 64))
    },
    **{  # scores far below the cap and around it
        f"cap {amplitude}": (
            FP32, {"H": 1, "M": 40, "N": 50, "D": 16, "softcap": 5.0, "dropout_p": 0.1,
                   "amplitude": amplitude},
        )
        for amplitude in (1e-2, 4.0)
    },
    **{  # gradients nearly vanish, unlike the rounding error of out
        f"few keys {i}": (BF16, {"H": 1, "D": 24} | options)
        for i, options in enumerate((
            {"M": 1, "N": 2, "D": 16}, {"M": 40, "N": 2, "window": (0, -1)},
            {"B": 2, "M": 17, "dropout_p": 0.25, "causal": "bottom_right",
             "query_lengths": [1, 10]},
        ))
    },
    **{
        f"broadcast bias {letters}": (
            FP16, {"B": 2, "M": 40, "N": 70, "D": 16, "mask": f"fp32 {letters}"},
        )
        for letters in ("1", "H", "BM", "HMN")
    },
    **{
        f"mask of one {name}": (
            FP16, {"H": 1, "M": 40, "N": 72, "D": 16, "mask": f"float {name}"},
            partial(_nan_behind, dim),
        )
        for name, dim in (("N", 3), ("M", 2))
    },
    "column of a wider mask": (
        FP16, {"M": 70, "N": 104, "D": 16, "mask": "bool M"}, _mask_is_a_wide_column,
    ),
    "everything at once": (
        BF16, {"B": 2, "H": 2, "K": 1, "M": 40, "N": 50, "D": 24, "E": 40, "mask": "min BMN",
               "causal": "bottom_right", "window": (25, -1), "key_lengths": [50, 30],
               "query_lengths": [40, 21], "dropout_p": 0.2},
    ),
    "strides": (FP32, {"B": 2, "M": 33, "N": 40, "D": 24, "layout": "bshd"}, _odd_strides),
    # Bounds that leave few diagonals, with dropped weights.
    "distances": (
        FP32, {"B": 2, "H": 1, "M": 70, "N": 50, "D": 16, "dropout_p": 0.25, "window": (40, -1),
               "causal": "bottom_right", "mask": "blocks BMN", "relative": ("clipped", 81, 128)},
    ),
}  # fmt: skip


@runs
@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    dtype, options, *change = CASES[name]
    check(ATTENTION, _sample(name, **options), dtype, *change)


@runs
@pytest.mark.parametrize("through", ["out", "lse"])
def test_gradient_of_one_result(through: str) -> None:
    options = {"M": 40, "N": 50, "causal": "bottom_right", "mask": "float HMN"}
    check(ATTENTION, _sample("one output", **options), FP32, through=(through,))


@runs
@pytest.mark.parametrize("N", [60, 80])
def test_gradients_at_high_dropout(N: int) -> None:
    """fp16 holds dS at its own size, but not divided by 256, dropout's factor: of peaked softmax
    that is too small.
    """
    options = {"H": 1, "M": 20, "N": N, "D": 1, "dropout_p": 0.999, "amplitude": 20.0}
    check(ATTENTION, _sample("hardly kept 0", **options), FP16, through=("out",), outputs=False)


@runs
def test_very_negative_scores() -> None:
    """Rows whose lse is below log of the smallest float, in tiles that are not whole."""

    def make(*args: Any, **options: Any) -> Inputs:
        inputs = make_inputs(*args, **options)
        inputs["q"][..., 0], inputs["k"][..., 0] = -150.0, 4.0
        return inputs

    options = {"H": 1, "M": 192, "D": 16, "mask": "bool MN", "amplitude": 0.01}
    check(ATTENTION, _sample("low scores", make, **options), FP32)


@runs
@pytest.mark.parametrize("value", [-3.0e38, -1e30, -60000.0])
def test_only_the_lowest_bias_blocks(value: float) -> None:
    """Only finfo.min blocks: a row of equal large negative values is a mean."""

    def make(*args: Any) -> Inputs:
        inputs = make_inputs(*args, B=1, H=1, M=40, D=16, mask="float MN")
        inputs["mask"].zero_()[..., 3, :] = value
        inputs["mask"][..., 5, 1:] = value
        return inputs

    check(ATTENTION, Sample("low", "made here", make, ()), FP32)


def _backward_call(sample: Sample, dtype: torch.dtype) -> BackwardCall:
    """The backward of a sample with random output gradients, on its own forward's results."""
    inputs = sample.inputs(DEVICE, dtype)
    call = padded_call({k: x.detach() if isinstance(x, Tensor) else x for k, x in inputs.items()})
    out, lse = OPS["attention_fwd"](*call, backend="triton")
    has_bias = call.mask is not None and call.mask.is_floating_point()
    needs = [True, True, True, has_bias, call.distance_bias is not None, call.sinks is not None]
    return BackwardCall(torch.randn_like(out), torch.randn_like(lse), out, lse, *call, needs)


def _gradients(call: BackwardCall) -> tuple[Tensor, ...]:
    with poisoned_results():
        return tuple(OPS["attention_bwd"](*call, backend="triton"))


@interpreted
def test_only_needed_gradients_are_written() -> None:
    """Their bits do not depend on which are needed; those of absent tensors are empty."""
    options = {"H": 1, "M": 40, "mask": "fp32 MN", "dropout_p": 0.1, "alibi": "H", "sinks": 0.0}
    call = _backward_call(_sample("wanted", **options), FP32)
    everything = _gradients(call)
    for wanted in ({0}, {1}, {2}, {3}, {4}, {5}, {1, 2}):
        needs = [i in wanted for i in range(6)]
        for i, x in enumerate(_gradients(call._replace(needs=needs))):
            assert torch.equal(x, everything[i]) if i in wanted else x.numel() == 0
    absent = call._replace(mask=call.mask > 0, distance_bias=None, sinks=None)
    for needs in ([True] * 3 + [False, True, True], [True] * 3 + [False] * 3):
        first, *rest = _gradients(absent._replace(needs=needs))
        assert first.numel() > 0 and all(x.numel() == 0 for x in rest[2:])
    assert not any(x.any() for x in _gradients(call._replace(dout=None, dlse=None)))


@runs
@pytest.mark.parametrize(
    "mask, blocks, dtype", [("bool MN", False, FP32), ("min MN", -torch.inf, FP16)]
)
def test_a_bias_by_distance_that_only_blocked_pairs_have_may_be_nan(mask, blocks, dtype):
    """The bits are those of a finite bias."""
    M, N = 40, 70
    distance = torch.arange(N) - torch.arange(M)[:, None]

    def make(*args: Any) -> Inputs:
        inputs = make_inputs(*args, B=1, H=1, M=M, N=N, D=16, mask=mask, alibi="H")
        inputs["mask"].masked_fill_(distance % 3 != 0, blocks)
        return inputs

    call = _backward_call(Sample("blocked", "made here", make, ()), dtype)
    bias = call.distance_bias
    assert bias is not None
    blocked = (torch.arange(1 - M, N) % 3 != 0).to(DEVICE)
    forward_call = ForwardCall._make(call[4:-1])
    forward_call = forward_call._replace(distance_bias=bias.masked_fill(blocked, NAN))
    out, lse = OPS["attention_fwd"](*forward_call, backend="triton")
    assert_same_bits((out, lse), (call.out, call.lse))
    with_nan = call._replace(distance_bias=forward_call.distance_bias)
    assert_same_bits(_gradients(with_nan), _gradients(call))


@runs
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("mask", [None, "float MN"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_nan_in_a_query_reaches_the_gradients(mask, dtype, dropout_p):
    """Results of all keys; where dropout drops the pair, the key's value may be left out."""

    def make(*args: Any) -> Inputs:
        inputs = make_inputs(*args, B=1, H=1, M=20, N=70, D=16, mask=mask, dropout_p=dropout_p)
        inputs["q"][0, 0, 3, 5] = NAN
        return inputs

    _, dk, dv, *_ = _gradients(_backward_call(Sample("NaN", "made here", make, ()), dtype))
    assert dk.isnan().all()
    keys = dv.isnan().all(-1)
    assert keys.float().mean() > 0.7 if dropout_p else keys.all()


@runs
def test_weights_of_huge_scores_under_dropout() -> None:
    """The rounding error of a score of 1e8 does not multiply its weight by more than 2."""
    options = {"H": 1, "M": 65, "N": 128, "D": 16, "scale": 0.0625, "dropout_p": 0.1}
    huge = {"amplitude": 1e4, "key_amplitude": 1e4}
    call = _backward_call(_sample("huge", **options, **huge), FP16)
    exact = OPS["attention_bwd"](*call._replace(dlse=None), backend="reference")[2]
    assert _gradients(call._replace(dlse=None))[2].abs().max() <= 2 * exact.abs().max()


# -- the cache of launches: cached launches of one call are not used for another ------------------
def _padded(**options: Any) -> Sample:
    return _sample("calls", **{"B": 2, **BASE, **options})


def _packed(**options: Any) -> Sample:
    return made(spec_varlen.make_inputs, "q k v alibi_slopes", "calls", **PACKED_BASE | options)


# Repeated with a mask: these change which tiles it is classified in.
_WITH_MASK = ("bottom right", "key lengths", "query lengths", "bias")
_CALLS = [
    *((ATTENTION, _padded, change, {}) for change in CHANGES.values()),
    *((ATTENTION, _padded, CHANGES[name], {"mask": "bool MN"}) for name in _WITH_MASK),
    *((PACKED, _packed, change, {}) for change in PACKED_CHANGES.values()),
]
_NAMES = [
    *CHANGES,
    *(f"{name}, mask" for name in _WITH_MASK),
    *(f"{n}, packed" for n in PACKED_CHANGES),
]


@runs
@pytest.mark.slow
@pytest.mark.parametrize("spec, sample, change, options", _CALLS, ids=_NAMES)
def test_cache_tells_calls_apart_by_options(spec, sample, change, options):
    key = spec.name, *options
    if key not in _CHECKED:
        check(spec, sample(**options), FP16)
        _CHECKED.add(key)
    check(spec, sample(**options | change), FP16)


_CHECKED: set[tuple[str, ...]] = set()


@interpreted
@pytest.mark.slow
def test_cache_tells_calls_apart_by_strides() -> None:
    options = {"mask": "min BHMN", "key_lengths": "per query", "query_lengths": [20, 7]}
    call = _backward_call(_padded(**options, H=1, alibi="BH"), FP32)
    given = ForwardCall._make(call[4:-1])
    expected = call.out, call.lse
    for name in ("q", "k", "v", "mask", "distance_bias", "key_lengths", "query_lengths"):
        strided = given._replace(**{name: apart(getattr(given, name))})
        assert_same_bits(tuple(OPS["attention_fwd"](*strided, backend="triton")), expected)
    gradients = _gradients(call)
    for name in ("q", "k", "v", "out", "dout", "dlse", "mask", "distance_bias", "key_lengths"):
        strided = call._replace(**{name: apart(getattr(call, name))})
        assert_same_bits(_gradients(strided), gradients)
    expanded = call._replace(dout=call.dout[:, :1, :1].expand_as(call.out))
    assert_same_bits(
        _gradients(expanded), _gradients(expanded._replace(dout=expanded.dout.contiguous()))
    )


# -- prepared masks and tilings --------------------------------------------------------------------
@runs
@pytest.mark.parametrize("name", ["prepared_mask_restricted", "prepared_bias_column"])
def test_prepared_mask_is_bitwise_equal_to_its_mask(name: str) -> None:
    call = _backward_call(ATTENTION.sample(name), FP16)
    given = ForwardCall._make(call[4:-1])
    config = ForwardConfig(32, 32, 4, 1)
    with launched_by("attention_fwd", partial(forward.attention_fwd_with_config, config)):
        results = [
            tuple(OPS["attention_fwd"](*given._replace(mask_tiles=tiles), backend="triton"))
            for tiles in (given.mask_tiles, None)
        ]
    assert_same_bits(*results)


@runs
def test_prepared_masks_with_and_without_broadcast_tiles() -> None:
    """The tiles of one head are broadcast where all heads have equal masks."""
    for second_head in (False, True):

        def make(*args: Any, second_head: bool = second_head) -> Inputs:
            inputs = make_inputs(*args, B=1, **BASE, mask="bool HMN", prepared=True)
            inputs["mask"][:] = True
            inputs["mask"][..., 32:] = False
            inputs["mask"][:, 1] |= second_head
            return inputs

        check(ATTENTION, Sample("tiles", "made here", make, ("q", "k", "v")), FP16)


_T = BwdTile
TILINGS = {
    "wide": (
        ForwardConfig(16, 64, 4, 1),
        BwdConfig(_T(32, 64, 4, 2, tma=True), _T(64, 32, 4, 2, tma=True, late=True)),
    ),
    "tall": (
        ForwardConfig(64, 16, 4, 2),
        BwdConfig(_T(64, 64, 4, 1), _T(16, 64, 4, 1), separate=True, halves=16),
    ),
    "whole": (
        ForwardConfig(128, 128, 8, 1),
        BwdConfig(_T(128, 128, 8, 1), _T(128, 128, 8, 1, late=True)),
    ),
    "descriptors": (ForwardConfig(64, 32, 4, 2, tma=True, overlap=1), None),
    "values_last": (ForwardConfig(32, 32, 4, 2, overlap=2), None),
    "wide_values": (ForwardConfig(64, 32, 4, 2, tma=True, overlap=1, value_columns=64), None),
    "one_tile": (ForwardConfig(32, 32, 4, 1, whole=True), None),
    "one_tile_by_descriptors": (ForwardConfig(32, 32, 4, 1, tma=True, whole=True), None),
}
_SHAPES: dict[str, dict[str, Any]] = {
    "lengths": {"M": 70, "causal": True, "key_lengths": [70, 33], "query_lengths": [65, 70]},
    "mask": {"H": 1, "M": 70, "N": 66, "mask": "rows BMN"},
    "mask in steps of eight": {"M": 70, "N": 72, "mask": "min HMN"},
    "mask of keys": {"M": 70, "N": 50, "mask": "bool BN", "D": 80},
    "mask of one column": {"M": 70, "N": 50, "mask": "bool BM"},
    "dropout": {"H": 1, "M": 70, "N": 50, "dropout_p": 0.25},
}


def _tiled() -> list[Any]:
    """In the quick run each tiling with one shape, in the slow run with two more."""
    shapes = list(_SHAPES)
    return [
        pytest.param(
            shapes[(i + turn) % len(shapes)], tiling, marks=pytest.mark.slow if turn else ()
        )
        for i, tiling in enumerate(TILINGS)
        for turn in ((0, 1, 3) if TILINGS[tiling][1] else (0, 3))
    ]


@runs
@pytest.mark.parametrize("name, tiling", _tiled())
def test_results_do_not_depend_on_tiles(name: str, tiling: str) -> None:
    fwd, bwd = TILINGS[tiling]
    sample = _sample(name, **{"B": 2, **_SHAPES[name]})
    with launched_by("attention_fwd", partial(forward.attention_fwd_with_config, fwd)):
        if bwd is None:
            check(ATTENTION, Sample(name, "made here", sample.make, ()), FP16)
            return
        with launched_by("attention_bwd", partial(backward.attention_bwd_with_config, bwd)):
            check(ATTENTION, sample, FP16)


@runs
def test_partial_last_key_tile() -> None:
    """The number of keys is a multiple of BLOCK_M, but not of BLOCK_N."""
    launch = partial(forward.attention_fwd_with_config, ForwardConfig(16, 32, 4, 1))
    with launched_by("attention_fwd", launch):
        check(ATTENTION, _sample("last tile", H=1, M=5, N=48, D=16), FP16)


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
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_only_rows_without_keys_have_the_sink_as_lse(dtype: torch.dtype) -> None:
    """Other rows' lse is above it, if by rounding up alone: the backward recognises them by lse."""
    sinks = torch.tensor([0.0, -0.0, 30.0, -50.0, -torch.inf])
    q = torch.full((1, 5, 3, 16), 8.0, dtype=dtype)
    lengths = torch.tensor([[4, 0, 1]], dtype=torch.int32)
    call = ForwardCall(q, -q, q, key_lengths=lengths, sinks=sinks)
    call = ForwardCall(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in call))
    out, lse = torch.empty_like(call.q), torch.empty(1, 5, 3, device=DEVICE)
    forward.attention_fwd(call, out, lse)
    assert torch.equal(lse[0, :, 1].cpu(), sinks)
    assert (lse[0, :, ::2].cpu() > sinks[:, None]).all()
    assert torch.equal(lse[0, -1, ::2].cpu() > -1e4, torch.tensor([True, True]))


@interpreted
def test_rows_beyond_the_length_of_a_packed_sequence_are_not_computed(monkeypatch):
    """32 of 256 rows are within their length; their keys are in one tile."""
    from triton.runtime.interpreter import InterpreterBuilder

    products: list[Any] = []
    dot = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda *args: (products.append(1), dot(*args))[1]
    )
    options: dict[str, Any] = {"causal": CAUSAL["top_left"], "window_left": 64, "window_right": 0}
    q, offsets = torch.randn(32, 1, 16), torch.tensor([0, 32], dtype=torch.int32)
    out, lse = torch.empty_like(q), torch.empty(1, 32)
    call = ForwardCall(q, q, q, **packing(offsets, offsets, 256, 256), **options)
    forward.attention_fwd(call, out, lse)
    assert len(products) == 2


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
@pytest.mark.parametrize("kind, dtype", [
    ("select", FP32),
    ("negate", FP32),
    pytest.param("zero", FP32, marks=pytest.mark.gpu),
    pytest.param("zero", FP16, marks=pytest.mark.gpu),
    pytest.param("zero", BF16, marks=pytest.mark.gpu),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("origin", [(), (2**32 - 2, 2**35 + 1, 2**33 - 32, -16)], ids=str)
def test_dropout_bits_are_those_of_the_definition(kind, dtype, origin):
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
        [((columns,), _, _)] = forward.attention_fwd_workspace(each)
        assert 2 * columns >= N


# -- refusals -------------------------------------------------------------------------------------
def test_refusals() -> None:
    q = torch.randn(1, 1, 4, 16)
    wide, far = torch.randn(1, 1, 4, 264), (1 << 22) + 16

    def refusal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> str:
        return str(forward.attention_fwd_unsupported(ForwardCall(q, k, v, mask)))

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
@pytest.mark.slow
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("feature", ["causal", "both_lengths", "mask", "dropout"])
def test_tuning_rejects_wrong_results(direction, feature, monkeypatch):
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


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_every_head_dim_has_a_tiling(arch: str) -> None:
    for dtype in (FP16, BF16, FP32):
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
    for dtype in (BF16, FP32):
        assert len(candidates("sm_90", dtype, 128, 128)) > 5
    for D in (96, 192):
        found = candidates("sm_90", BF16, D, D)
        assert {len([w for w in c.widths(D) if w]) for c in found} == {1, 2}


def test_generations_share_tilings() -> None:
    for dtype, D in itertools.product((BF16, FP32), (64, 128, 256)):
        for archs in (("sm_100", "sm_103"), ("sm_86", "sm_89", "sm_120"), ("gfx90a", "gfx942")):
            assert len({bwd_config.bwd_config(arch, dtype, D, D) for arch in archs}) == 1
