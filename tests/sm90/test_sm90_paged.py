"""The Hopper attention forward over keys and values in pages, computed without a GPU.

Its results are the bits of the same call with contiguous keys, whose values are those of the
reference. Pages that no sequence uses, and rows beyond a sequence's last key, hold NaN; entries of
the block table beyond it are no pages.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import test_sm90_on_host as forward
import torch
from sm90_on_host import bindings
from sm90_on_host.bindings import Instance
from sm90_on_host.build import RANDOM, Machine, Mutation, build, missing
from sm90_on_host.fault_injector import OpInjector
from sm90_on_host.guarded import guarded
from test_sm90_on_host import Case
from torch import Tensor

from fastattn.ops import _env
from fastattn.ops._op import OPS, Op
from fastattn.ops.attention import sm90
from fastattn.ops.attention.calls import ForwardCall
from fastattn.ops.attention.spec_paged import SAMPLES, in_pages
from fastattn.testing.instances import make_attention
from fastattn.testing.oracle import Oracle, run_op
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import Sample, all_specs

machine = forward.machine  # a fixture
SPEC = all_specs()["attention"]
OP = OPS["attention_fwd"]
_LENGTHS: dict[str, Any] = {"B": 3, "H": 2, "key_lengths": [1, 256, 299], "N": 320}


@dataclass(frozen=True)
class Paged:
    """contiguous: the same call, whose instance is that of contiguous keys."""

    page: int
    contiguous: Case
    shared_pages: int = 0

    @property
    def instance(self) -> Instance:
        variant = "kPagedScores" if "Scores" in self.contiguous.variant else "kPaged"
        return replace(self.contiguous.instance, variant=variant)


# Boxes of 16 rows at head dims 192 and 256, whose blocks are 112 and 80 keys.
CASES = {
    "64 decoding": Paged(64, Case(64, "kBounded", K=1, M=1, splits=3, **_LENGTHS), shared_pages=1),
    "64 window": Paged(32, Case(64, "kBounded", M=70, causal=2, window=(90, 9), **_LENGTHS)),
    "64 scores": Paged(
        16, Case(64, "kScores", M=7, causal=3, softcap=2.0, distance="BH", sinks=0.0, **_LENGTHS)
    ),
    "128 first key": Paged(16, Case(128, "kFull", M=1, causal=1, N=48)),
    "128": Paged(16, Case(128, "kBounded", M=66, causal=3, **_LENGTHS)),
    "128 few queries": Paged(
        256, Case(128, "kFull", dtype=torch.float16, H=4, K=1, M=7, N=1024, splits=4,
                  key_lengths=[900], heads_inside=False),
    ),
    "192": Paged(64, Case(192, "kBounded", M=7, causal=3, **_LENGTHS)),
    "256": Paged(128, Case(256, "kBounded", M=3, N=384, splits=2, key_lengths=[330])),
    "256 scores": Paged(16, Case(256, "kScores", M=7, N=208, softcap=2.0, key_lengths=[190])),
}  # fmt: skip
QUICK = ("128", "128 first key")


def paged_call(call: ForwardCall, page: int, shared_pages: int = 0) -> ForwardCall:
    """The call with its keys and values in pages, between inaccessible memory."""
    inputs = {name: getattr(call, name) for name in ("k", "v", "key_lengths")}
    inputs = in_pages(inputs, page, shared_pages)
    return call._replace(**{name: guarded(inputs[name]) for name in ("k", "v", "block_table")})


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_forward(
    machine: Callable[[Instance], Machine],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    case = CASES[name]
    c = case.contiguous
    launched = []

    def launch(op: str, problem: int, instance: Instance) -> str | None:
        launched.append(instance)
        return machine(instance).call(op, ctypes.c_void_p(problem))

    bindings.use(monkeypatch, launch)
    bindings.plan(c.splits, c.counted, c.ordered)
    try:
        call, out, lse = forward.check_forward(c, case.shared_pages * case.page)
        paged = paged_call(call, case.page, case.shared_pages)
        assert sm90.attention_fwd_unsupported(paged) is None
        found = [torch.full_like(x, torch.nan) for x in (out, lse)]
        sm90.attention_fwd(paged, *found)
    finally:
        bindings.plan(0, False, False)
    assert launched == [c.instance, case.instance]
    assert all(map(same_bits, found, (out, lse)))


# -- the op's samples ------------------------------------------------------------------------------
REFUSED = {
    "one_query_mask": "has no mask with block_table",
    "chunk_mask": "has no mask with block_table",
    "chunk_bias": "has no mask with block_table",
    "all_scores": "has no mask with block_table",
    "chunk_lengths_rows": "takes key_lengths per sequence",
}


def run_simulated(op: Op, args: Sequence[Any], results: Sequence[Tensor]) -> None:
    (call,) = op.backend_args(args)
    assert getattr(sm90, f"{op.name}_unsupported")(call) is None
    getattr(sm90, op.name)(call, *results)


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_samples(
    machine: Callable[[Instance], Machine],
    monkeypatch: pytest.MonkeyPatch,
    sample: Sample,
) -> None:
    """Judged like any backend. So many multiprocessors that keys are split in decoding."""
    refusal = REFUSED.get(sample.name.removeprefix("paged_"))

    def launch(args: Sequence[Any]) -> Sequence[Tensor]:
        why = sm90.attention_fwd_unsupported(*OP.backend_args(args))
        if refusal is not None:
            assert why is not None and refusal in why
            raise NotImplementedError
        run_simulated(OP, args, results := OP.allocate(args))
        return results

    oracle = Oracle(SPEC, sample, torch.bfloat16)
    bindings.use(monkeypatch, lambda op, problem, i: machine(i).call(op, ctypes.c_void_p(problem)))
    monkeypatch.setattr(_env, "multiprocessors", lambda *device: 16)
    monkeypatch.setitem(OP._launchers, "reference", launch)
    with poisoned_results():
        try:
            results = run_op(SPEC, sample, sample.inputs("cpu", torch.bfloat16), "reference")
        except NotImplementedError:
            assert refusal is not None
            return
    for name in SPEC.results:
        comparison = oracle.judge(name, results[name])
        assert comparison.ok, f"{name}: {comparison.message}"


# -- faults ----------------------------------------------------------------------------------------
_SOURCE = "attention/sm90/forward/key_source.cuh"
MUTATIONS = [
    Mutation(file, right, wrong)
    for file, right, wrong in (
        (
            _SOURCE,
            "page_box_rows(pages, Traits::kBlock)",
            "2 * page_box_rows(pages, Traits::kBlock)",
        ),
        (_SOURCE, "tile.batch * pages.stride", "0"),
        (_SOURCE, "page_of(first_of(last))", "page_of(0)"),
        (_SOURCE, "key < keys", "true"),
        (_SOURCE, "key >> pages.log2_size", "key >> (pages.log2_size + 1)"),
        (_SOURCE, "after < Traits::kBlock ? key + after : next", "key + after"),
        (_SOURCE, "(key + row) & (page_size(pages) - 1)", "key + row"),
        ("attention/sm90/forward/fwd_producer.cuh", "source.first_of(next)", "key"),
        ("sm90/tile/shared_tile.cuh", "to * kRowBytes", "0"),
    )
]


def _sample(**options: Any) -> Sample:
    make = partial(make_attention, B=2, H=2, K=1, M=3, D=128, **options)
    return Sample("pages", "has faults", make, ())


# Blocks of several pages, the last of which ends beyond the table; pages of several blocks.
FAULTY = (
    _sample(page=16, N=336, key_lengths=[300, 336], causal="bottom_right_lengths"),
    _sample(page=256, N=512, key_lengths=[512, 300]),
)


@pytest.mark.slow
@pytest.mark.long
def test_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong page, row or number of bytes; what the producer does otherwise is examined by
    test_sm90_faults.py.
    """
    if reason := missing():
        pytest.skip(reason)
    kernels = forward.TESTS / "sm90_attention.cpp"
    defines = forward.defines(Instance("kBFloat16", 128, "kPaged"))
    injector = OpInjector(
        bindings.HOST,
        run_simulated,
        build(kernels, defines, mutations=MUTATIONS),
        MUTATIONS,
        later=(RANDOM,),
        only_in=_SOURCE.rpartition("/")[2],
    )
    bindings.use(monkeypatch, lambda op, problem, _: injector.call(op, ctypes.c_void_p(problem)))
    for sample in FAULTY:
        oracle = Oracle(SPEC, sample, torch.bfloat16)
        with monkeypatch.context() as patch:
            patch.setitem(OP._launchers, "reference", partial(injector.launch, OP))
            results = run_op(SPEC, sample, sample.inputs("cpu", torch.bfloat16), "reference")
        assert all(oracle.judge(name, results[name]).ok for name in SPEC.results)
    assert not injector.unreached()
    assert not injector.undetected()
    assert len(injector.detected) > len(MUTATIONS)
