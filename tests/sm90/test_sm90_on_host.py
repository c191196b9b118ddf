"""The Hopper attention forward, computed without a GPU and judged like any backend.

The unchanged kernels, all of their threads, run on a simulator of the hardware (sm90_on_host):
barriers, TMA, wgmma and the rest behave as the PTX manual says. Results are checked here; the
simulator checks the order of events, which test_sm90_faults.py puts to the test.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sm90_on_host import bindings
from sm90_on_host.bindings import Instance
from sm90_on_host.build import Machine, build, missing
from torch import Tensor

from fastattn.ops._op import OPS
from fastattn.ops.attention.spec_inputs import make_inputs, write_poison
from fastattn.ops.attention.spec_varlen import make_inputs as make_packed
from fastattn.testing.oracle import Oracle, run_op
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import Inputs, Sample, all_specs

TESTS = Path(__file__).resolve().parent
DTYPES = {torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}
MASKS = {"bool": torch.bool, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SPECS = all_specs()


def _own_mask(generator: torch.Generator, kind: str, inputs: Inputs, blocked: float) -> Tensor:
    """kind: the dtype, and the dimensions that are not broadcast. blocked: the share of pairs,
    besides those of whole blocks.
    """
    what, letters = kind.split(" ")
    sizes = zip("BHMN", (*inputs["q"].shape[:3], inputs["k"].shape[2]), strict=True)
    shape = [n if d in letters else 1 for d, n in sizes]
    allowed = torch.rand(shape, generator=generator) >= blocked
    allowed[..., 128:256] = blocked < 1.0  # full blocks
    if shape[3] > 1:
        allowed[..., 290:] = False  # dead keys
    if shape[2] > 1:
        allowed[:, :, 64:128, :128] = False  # blocks that one warpgroup does not need
        allowed[:, :, 128:, :128] = False  # a block that a whole tile may pass over
        # Tiles of a prepared mask: whole and empty ones, with others below.
        allowed[:, :, :20, 256:280] = blocked < 1.0
        allowed[:, :, :20, 20:60] = False
    if what == "bool":
        return allowed
    values = torch.randn(shape, generator=generator) * ~allowed.all(-2, keepdim=True)
    return torch.where(allowed, values.to(MASKS[what]), torch.finfo(MASKS[what]).min)


def _make(
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    own_mask: str | None = None,
    mask_layout: str = "",
    blocked: float = 0.3,
    blocked_distance: int | None = None,
    page: int = 0,
    shared_pages: int = 0,
    **options: Any,
) -> Inputs:
    """blocked_distance: the bias is -inf from this distance on. page, shared_pages: as in
    `in_pages`. Dead positions hold NaN.
    """
    if "queries" in options:
        return make_packed(generator, dtype, **options)
    sizes = {"B": 1, "M": 200, "N": 300, "layout": "bshd"}
    inputs = make_inputs(generator, dtype, **sizes | options, poison=False)
    for name in ("k", "v"):
        inputs[name][1:, :, : shared_pages * page] = inputs[name][:1, :, : shared_pages * page]
    if own_mask is not None:
        mask = _own_mask(generator, own_mask, inputs, blocked)
        inputs["mask"] = mask.mT.contiguous().mT if mask_layout == "transposed" else mask
    if blocked_distance is not None:
        table = inputs["relative_bias"]
        table[:, table.shape[1] // 2 + blocked_distance :] = -torch.inf
    write_poison(inputs)
    return inputs | ({"page": page, "shared_pages": shared_pages} if page else {})


class Case:
    """A call, and the instance and plan that compute it."""

    def __init__(
        self,
        D: int,
        variant: str,
        dtype: torch.dtype = torch.bfloat16,
        *,
        counted: bool = True,
        splits: int = 1,
        ordered: bool = False,
        **options: Any,
    ) -> None:
        self.dtype, self.plan = dtype, (splits, counted, ordered)
        self.spec = SPECS["attention_varlen" if "queries" in options else "attention"]
        self.sample = Sample("case", "made here", partial(_make, D=D, **options), ())
        dim = next(d for d in (64, 128, 192, 256) if max(D, options.get("E", D)) <= d)
        self.instance = Instance(DTYPES[dtype], dim, variant)


# The first sequence, head, query and key for dropout bits.
_ORIGIN = (3, 2**32 - 1, 48, 2**33 - 64)
_SEQUENCES = {"queries": [65, 0, 130, 1, 64], "keys": [40, 30, 200, 0, 129]}
_LENGTHS: dict[str, Any] = {"B": 3, "key_lengths": [1, 256, 299], "N": 320}
# A value of its own for each distance.
_TABLE = ("clipped", 2001, 1000)
CASES = {
    "64": Case(64, "kFull", B=2, query_lengths=[130, 200], key_lengths=[300, 129]),
    "64 fixed strides": Case(64, "kFull", counted=False, H=3, K=3, layout="bhsd"),
    "64 causal": Case(64, "kBounded", M=400, N=400, causal="top_left"),
    "64 packed": Case(64, "kFull", **_SEQUENCES, slack=70),
    "64 packed bottom right": Case(
        64, "kBounded", **_SEQUENCES, causal="bottom_right", window=(50, -1),
    ),
    "64 packed, short ones": Case(64, "kBounded", **_SEQUENCES, slack=70),
    "64 own diagonals": Case(
        64, "kBounded", B=3, K=1, causal="bottom_right_lengths", query_lengths=[130, 200, 0],
        key_lengths=[300, 77, 129],
    ),
    "64 dropout": Case(64, "kDropout", B=2, dropout_p=0.3, causal="top_left"),
    "64 dropout of a part": Case(
        64, "kDropout", B=2, M=70, dropout_p=0.3, causal="top_left", origin=_ORIGIN,
    ),
    "64 mask": Case(64, "kMask", B=2, key_lengths=[300, 100], own_mask="bool BMN"),
    "64 bias": Case(64, "kBias", causal="bottom_right", K=1, own_mask="fp32 HMN"),
    "40 to 24": Case(
        40, "kBounded", dtype=torch.float16, E=24, causal="bottom_right", window=(100, 30),
    ),
    "96 negative scale": Case(96, "kFull", dtype=torch.float16, scale=-0.2, K=1),
    "128": Case(128, "kFull", M=130, key_lengths=[257]),
    "128 window": Case(128, "kBounded", window=(40, 20), B=2, key_lengths=[300, 0], K=1),
    "128 packed window": Case(128, "kBounded", **_SEQUENCES, slack=3, window=(30, 10)),
    "128 packed dropout": Case(
        128, "kDropout", ordered=True, **_SEQUENCES, dropout_p=0.5, origin=_ORIGIN,
    ),
    "128 own diagonals, window": Case(
        128, "kBounded", splits=2, B=2, M=140, N=400, causal="bottom_right_lengths", window=(90, 9),
        key_lengths=[400, 50],
    ),
    "128 own diagonals, one query": Case(
        128, "kFull", splits=7, H=8, K=2, B=2, M=1, N=700, causal="bottom_right_lengths",
        key_lengths=[700, 100],
    ),
    "128 dropout, everything": Case(128, "kDropout", M=70, dropout_p=1.0),
    "128 mask": Case(128, "kMask", causal="top_left", M=300, scale=-0.1, own_mask="bool BMN"),
    "128 key padding": Case(128, "kMask", B=2, own_mask="bool BN"),
    "128 query padding": Case(128, "kMask", B=2, own_mask="bool BM"),
    "128 mask for all": Case(128, "kMask", B=2, own_mask="bool MN"),
    "128 mask of heads, own diagonals": Case(
        128, "kMask", B=2, causal="bottom_right_lengths", window=(90, -1), query_lengths=[70, 200],
        key_lengths=[300, 90], own_mask="bool HMN",
    ),
    "128 transposed mask": Case(
        128, "kMask", causal="top_left", own_mask="bool BMN", mask_layout="transposed",
    ),
    "128 nothing allowed": Case(128, "kMask", own_mask="bool MN", blocked=1.0),
    "128 nothing blocked": Case(
        128, "kMask", B=2, query_lengths=[3, 150], own_mask="bool ", blocked=0.0,
    ),
    "128 prepared": Case(
        128, "kMask", B=2, key_lengths=[130, 200], own_mask="bool BMN", prepared=True,
    ),
    "128 prepared key padding": Case(128, "kMask", B=2, own_mask="bool BN", prepared=True),
    "128 prepared bias": Case(128, "kBias", window=(30, 40), own_mask="bf16 HMN", prepared=True),
    # Without a dimension of keys an additive mask becomes a boolean one: only lse has its values.
    "128 value of all keys": Case(128, "kMask", B=2, own_mask="fp32 BHM"),
    "128 value of all keys, heads": Case(128, "kMask", own_mask="bf16 HM", key_lengths=[250]),
    "128 value of all pairs": Case(128, "kMask", B=2, M=70, own_mask="fp32 B", blocked=0.0),
    "128 bias": Case(128, "kBias", B=2, query_lengths=[77, 200], own_mask="bf16 BMN"),
    "128 fp32 bias": Case(128, "kBias", causal="top_left", own_mask="fp32 BHMN"),
    "128 bias, copied": Case(128, "kBias", N=301, scale=-0.1, K=1, own_mask="bf16 BMN"),
    "128 bias of another type": Case(128, "kBias", own_mask="fp16 HMN"),
    "128 bias of keys": Case(128, "kBias", B=2, N=304, own_mask="bf16 BN"),
    "96 bias, nothing computed": Case(96, "kBias", query_lengths=[0], own_mask="fp32 BMN"),
    "64 splits": Case(
        64, "kFull", splits=3, B=2, M=70, N=600, query_lengths=[20, 70], key_lengths=[600, 130],
    ),
    "64 decoding": Case(64, "kFull", splits=4, H=6, K=2, B=2, M=1, N=700, key_lengths=[700, 1]),
    "64 decoding, one warpgroup": Case(
        64, "kBounded", splits=3, H=6, K=2, B=2, M=1, N=700, key_lengths=[700, 1],
    ),
    # Grouped heads become rows where these have the same keys and one stride.
    "64 few queries": Case(64, "kFull", H=8, K=2, M=7, N=100, layout="bhsd"),
    "64 few queries, heads inside": Case(64, "kFull", H=8, K=2, M=7, N=100),
    "64 few queries, causal": Case(
        64, "kBounded", H=8, K=2, M=7, N=100, layout="bhsd", causal="bottom_right",
    ),
    "64 one query, window": Case(
        64, "kFull", H=8, K=2, M=1, N=100, causal="bottom_right", window=(9, -1),
    ),
    "64 one query, window and lengths": Case(
        64, "kBounded", H=8, K=2, B=2, M=1, N=100, causal="bottom_right", window=(9, -1),
        key_lengths=[100, 93],
    ),
    "64 many splits": Case(64, "kFull", splits=43, M=3, N=300),
    "64 causal splits": Case(
        64, "kBounded", splits=3, M=300, N=700, causal="bottom_right", window=(400, -1),
    ),
    "64 packed splits": Case(64, "kFull", splits=3, ordered=True, **_SEQUENCES, slack=70),
    "128 decoding": Case(
        128, "kFull", dtype=torch.float16, splits=7, counted=False, H=8, K=2, M=1, N=700,
        causal="bottom_right",
    ),
    "128 causal splits": Case(
        128, "kBounded", splits=5, M=140, N=400, causal="top_left", scale=-0.1,
    ),
    "128 packed splits": Case(
        128, "kBounded", splits=2, **_SEQUENCES, causal="bottom_right", slack=3, window=(90, -1),
    ),
    "64 sinks": Case(64, "kSinks", B=2, sinks=5.0, query_lengths=[130, 200], key_lengths=[300, 0]),
    "64 high sinks, dropout": Case(
        64, "kScoresDropout", sinks=30.0, causal="bottom_right", M=300, N=260, dropout_p=0.3,
    ),
    "128 packed sinks": Case(
        128, "kSinks", **_SEQUENCES, slack=70, sinks=-1.0, causal="bottom_right",
    ),
    "64 sinks, no row has a key": Case(
        64, "kScoresDense", B=2, sinks=2.0, query_lengths=[77, 200], key_lengths=[50, 0],
        own_mask="bool BMN",
    ),
    "64 splits, sinks": Case(
        64, "kSinks", splits=3, B=2, M=70, N=600, query_lengths=[20, 70], key_lengths=[600, 0],
        sinks=5.0,
    ),
    "128 decoding, sinks": Case(
        128, "kSinks", splits=7, H=8, K=2, B=2, M=1, N=700, key_lengths=[700, 0], sinks=3.0,
    ),
    "128 decoding, sinks, no splits": Case(
        128, "kSinks", H=8, K=2, M=2, N=300, key_lengths=[300], sinks=3.0, layout="bhsd",
    ),
    "64 packed splits, sinks": Case(
        64, "kSinks", splits=3, ordered=True, **_SEQUENCES, slack=70, sinks=1.0,
    ),
    "192 sinks": Case(192, "kSinks", sinks=0.0, window=(60, 9)),
    "256 sinks": Case(256, "kSinks", sinks=0.0, M=140, N=170, causal="bottom_right"),
    "64 scores": Case(64, "kScores", relative=_TABLE, softcap=2.0, causal="top_left", M=300),
    "64 soft cap": Case(64, "kScores", B=2, softcap=1.0, scale=-0.4, key_lengths=[300, 0]),
    "64 distances, one query": Case(
        64, "kScores", splits=4, H=4, K=2, B=2, M=1, N=700, key_lengths=[700, 1], alibi="BH",
    ),
    "64 distances, blocked": Case(
        64, "kScores", M=70, N=700, relative=_TABLE, blocked_distance=64, sinks=1.0,
    ),
    "64 soft cap, decoding": Case(
        64, "kScores", splits=3, H=6, K=2, M=1, N=700, causal="bottom_right", window=(600, -1),
        softcap=3.0,
    ),
    "64 scores, dropout": Case(
        64, "kScoresDropout", relative=_TABLE, softcap=2.0, window=(70, 30), dropout_p=0.3,
    ),
    "128 packed scores": Case(
        128, "kScores", **_SEQUENCES, slack=70, causal="bottom_right", alibi="BH", sinks=0.0,
    ),
    "128 packed distances": Case(
        128, "kScores", dtype=torch.float16, **_SEQUENCES, window=(60, 30), relative=_TABLE,
    ),
    "128 own diagonals, distances": Case(
        128, "kScores", splits=2, B=3, K=1, causal="bottom_right_lengths",
        query_lengths=[130, 200, 0], key_lengths=[300, 77, 129], alibi="BH", softcap=4.0,
    ),
    "128 scores, mask": Case(
        128, "kScoresDense", B=2, causal="bottom_right", alibi="BH", softcap=1.0,
        own_mask="bool BMN",
    ),
    "128 scores, mask, dropout": Case(
        128, "kScoresDense", relative=_TABLE, dropout_p=0.2, own_mask="bool BN",
    ),
    "192 scores": Case(
        192, "kScores", relative=_TABLE, softcap=2.0, causal="bottom_right", N=100, sinks=1.0,
    ),
    "192 scores, dropout": Case(
        192, "kScoresDropout", relative=_TABLE, dropout_p=0.2, causal="bottom_right",
    ),
    "256 scores": Case(
        256, "kScores", M=140, N=170, relative=_TABLE, softcap=2.0, causal="bottom_right",
    ),
    "256 scores, dropout": Case(
        256, "kScoresDropout", M=140, N=170, relative=_TABLE, softcap=2.0, dropout_p=0.2,
    ),
    "256 scores, mask": Case(
        256, "kScoresDense", M=140, N=170, relative=_TABLE, own_mask="bool BMN",
    ),
    "64 scores, bias": Case(
        64, "kScoresDense", B=2, alibi="BH", softcap=2.0, causal="bottom_right", K=1,
        own_mask="bf16 BMN",
    ),
    "64 sinks, fp32 bias, dropout": Case(
        64, "kScoresDense", sinks=2.0, dropout_p=0.3, own_mask="fp32 HMN",
    ),
    "128 scores, fp32 bias": Case(
        128, "kScoresDense", relative=_TABLE, softcap=1.0, window=(150, 60), own_mask="fp32 BMN",
    ),
    "128 distances, bias of keys": Case(
        128, "kScoresDense", B=2, relative=_TABLE, query_lengths=[77, 200], key_lengths=[300, 0],
        sinks=0.0, dropout_p=0.2, own_mask="bf16 BN",
    ),
    "192 scores, bias, copied": Case(
        192, "kScoresDense", N=299, relative=_TABLE, softcap=2.0, sinks=1.0, own_mask="fp32 BMN",
    ),
    "256 scores, bias, dropout": Case(
        256, "kScoresDense", M=140, N=200, alibi="BH", softcap=2.0, dropout_p=0.1,
        own_mask="fp16 BMN",
    ),
    "192 packed": Case(192, "kBounded", dtype=torch.float16, **_SEQUENCES, causal="bottom_right"),
    "192 mask": Case(192, "kMask", own_mask="bool HMN"),
    "192 bias": Case(192, "kBias", N=304, key_lengths=[290], K=1, own_mask="bf16 BMN"),
    "192 fp32 bias, copied": Case(192, "kBias", N=299, window=(150, 60), own_mask="fp32 BMN"),
    "256": Case(256, "kFull", E=200, M=70, N=170),
    "256 causal": Case(256, "kBounded", causal="bottom_right", M=140, N=170, layout="bhsd"),
    "256 bias": Case(
        256, "kBias", dtype=torch.float16, M=140, N=200, causal="bottom_right", own_mask="fp16 BMN",
    ),
    "256 fp32 bias": Case(256, "kBias", M=70, N=172, own_mask="fp32 BHMN"),
    "256 decoding": Case(256, "kFull", splits=5, H=4, K=2, M=3, N=400, E=200, key_lengths=[330]),
    "256 splits": Case(256, "kBounded", splits=2, M=70, N=400, window=(150, 9)),
    "64 mask, dropout": Case(
        64, "kMaskDropout", B=2, dropout_p=0.3, key_lengths=[300, 100], own_mask="bool BMN",
    ),
    "64 bias, dropout": Case(
        64, "kBiasDropout", dtype=torch.float16, dropout_p=0.2, causal="bottom_right", K=1,
        own_mask="fp32 BMN",
    ),
    "96 mask, dropout": Case(
        96, "kMaskDropout", dtype=torch.float16, dropout_p=0.5, own_mask="bool HMN",
    ),
    "96 bias, dropout": Case(
        96, "kBiasDropout", dropout_p=0.1, causal="top_left", own_mask="bf16 BMN",
    ),
    "128 mask, dropout": Case(
        128, "kMaskDropout", B=2, dropout_p=0.1, scale=-0.1, own_mask="bool BN",
    ),
    "128 bias, dropout": Case(
        128, "kBiasDropout", dtype=torch.float16, dropout_p=0.9, K=1, own_mask="fp16 BMN",
    ),
    "192 mask, dropout": Case(
        192, "kMaskDropout", dropout_p=0.4, causal="top_left", own_mask="bool BMN",
    ),
    "192 bias, dropout": Case(
        192, "kBiasDropout", N=299, dropout_p=0.3, query_lengths=[140], own_mask="fp32 BMN",
    ),
    "256 mask, dropout": Case(
        256, "kMaskDropout", dtype=torch.float16, M=140, N=170, dropout_p=0.3, own_mask="bool BMN",
    ),
    "256 bias, dropout": Case(
        256, "kBiasDropout", M=140, N=200, dropout_p=1.0, window=(90, 9), own_mask="bf16 BMN",
    ),
    "256 dropout": Case(256, "kDropout", dropout_p=0.1, M=70, N=170, window=(90, 9)),
    "64 paged decoding": Case(
        64, "kPaged", splits=3, K=1, M=1, page=64, shared_pages=1, **_LENGTHS,
    ),
    "64 paged window": Case(
        64, "kPaged", M=70, causal="bottom_right", window=(90, 9), page=32, **_LENGTHS,
    ),
    "64 paged scores": Case(
        64, "kPagedScores", M=7, causal="bottom_right_lengths", softcap=2.0, alibi="BH", sinks=0.0,
        page=16, **_LENGTHS,
    ),
    "128 paged, first key": Case(128, "kPaged", M=1, causal="top_left", N=48, page=16),
    "128 paged": Case(128, "kPaged", M=66, causal="bottom_right_lengths", page=16, **_LENGTHS),
    "128 paged, few queries": Case(
        128, "kPaged", dtype=torch.float16, splits=4, H=4, K=1, M=7, N=1024, key_lengths=[900],
        layout="bhsd", page=256,
    ),
    # Boxes of 16 rows, blocks of 112 and 80 keys.
    "192 paged": Case(192, "kPaged", M=7, causal="bottom_right_lengths", page=64, **_LENGTHS),
    "256 paged": Case(256, "kPaged", splits=2, M=3, N=384, key_lengths=[330], page=128),
    "256 paged scores": Case(
        256, "kPagedScores", M=7, N=208, softcap=2.0, key_lengths=[190], page=16,
    ),
}  # fmt: skip
# The others are for test-all: each instance compiles for some seconds.
QUICK = (
    "128 packed window", "64 mask", "128 paged", "128 paged, first key", "128 packed splits",
    "128 mask of heads, own diagonals", "128 prepared",
)  # fmt: skip


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


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_forward(
    machine: Callable[[Instance], Machine], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    c, op = CASES[name], OPS["attention_fwd"]
    oracle = Oracle(c.spec, c.sample, c.dtype)
    of = machine(c.instance)

    def launch(args: Any) -> tuple[Tensor, ...]:
        results = op.allocate(args)
        bindings.run_simulated(op, args, results)
        return results

    with monkeypatch.context() as patch, poisoned_results():
        bindings.use(patch, lambda op, problem, _: of.call(op, ctypes.c_void_p(problem)))
        bindings.plan(*c.plan)
        patch.setitem(op._launchers, "reference", launch)
        try:
            results = run_op(c.spec, c.sample, c.sample.inputs("cpu", c.dtype), "reference")
        finally:
            bindings.plan(0, False, False)
    for result, value in results.items():
        comparison = oracle.judge(result, value)
        assert comparison.ok, f"{result}: {comparison.message}"
    if (sinks := c.sample.inputs("cpu", c.dtype).get("sinks")) is not None:
        # The backward identifies rows without keys by this.
        assert torch.equal(*((x <= sinks[:, None]) for x in (results["lse"], oracle.same["lse"])))


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


@pytest.mark.slow
def test_only_the_last_machine_keeps_memory(
    machine: Callable[[Instance], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pages_after(name: str) -> int:
        test_forward(machine, monkeypatch, name)
        return int(Path("/proc/self/statm").read_text().split()[0])

    before = pages_after("64")
    assert max(map(pages_after, ("64 causal", "64 dropout", "64 mask"))) - before < 80_000


@pytest.mark.parametrize("count", [1, 7, 3000])
def test_longest_sequences_first(machine: Callable[[Instance], Machine], count: int) -> None:
    """Every sequence has one place; one that is longer by a 255th of the longest comes before."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(0, 5000, (count,), generator=generator)
    lengths[torch.rand(count, generator=generator) < 0.2] = 0
    offsets = torch.tensor([0, *lengths.tolist()]).cumsum(0).int()
    order = torch.full((count,), -1, dtype=torch.int32)
    most = int(lengths.max())
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (offsets, order))
    of = machine(CASES["128 packed splits"].instance)
    first, second = pointers
    assert of.call("order", first, count, most, second) is None
    assert order.sort().values.tolist() == list(range(count))
    sorted_lengths = lengths[order.long()]
    rest = sorted_lengths.flip(0).cummax(0).values.flip(0)  # the longest from here on
    assert (rest - sorted_lengths <= most / 255 + 128).all()
