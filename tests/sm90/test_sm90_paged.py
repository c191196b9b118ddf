"""The Hopper attention forward over keys and values in pages, computed without a GPU.

Samples of the op; test_sm90_on_host.py has each instance. Pages that no sequence uses, and rows
beyond a sequence's last key, hold NaN; entries of the block table beyond it are no pages.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import test_sm90_on_host as forward
import torch
from sm90_on_host import bindings
from sm90_on_host.bindings import Instance
from sm90_on_host.build import RANDOM, Machine, Mutation, build, missing
from sm90_on_host.fault_injector import OpInjector
from torch import Tensor

from fastattn.ops import _env
from fastattn.ops._op import OPS
from fastattn.ops.attention import sm90
from fastattn.ops.attention.spec_paged import SAMPLES
from fastattn.testing.instances import make_attention
from fastattn.testing.oracle import Oracle, run_op
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import Sample, all_specs

machine = forward.machine  # a fixture
SPEC = all_specs()["attention"]
OP = OPS["attention_fwd"]


# -- the op's samples ------------------------------------------------------------------------------
REFUSED = {
    "one_query_mask": "has no mask with block_table",
    "chunk_mask": "has no mask with block_table",
    "chunk_bias": "has no mask with block_table",
    "all_scores": "has no mask with block_table",
    "chunk_lengths_rows": "takes key_lengths per sequence",
}


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_samples(
    machine: Callable[[Instance], Machine], monkeypatch: pytest.MonkeyPatch, sample: Sample
) -> None:
    """Judged like any backend. So many multiprocessors that keys are split in decoding."""
    refusal = REFUSED.get(sample.name.removeprefix("paged_"))

    def launch(args: Sequence[Any]) -> Sequence[Tensor]:
        why = sm90.attention_fwd_unsupported(*OP.backend_args(args))
        if refusal is not None:
            assert why is not None and refusal in why
            raise NotImplementedError
        bindings.run_simulated(OP, args, results := OP.allocate(args))
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
        (_SOURCE, "page_box_rows(pages, Traits::kBlock)",
         "2 * page_box_rows(pages, Traits::kBlock)"),
        (_SOURCE, "tile.batch * pages.stride", "0"),
        (_SOURCE, "page_of(first_of(last))", "page_of(0)"),
        (_SOURCE, "key < keys", "true"),
        (_SOURCE, "key >> pages.log2_size", "key >> (pages.log2_size + 1)"),
        (_SOURCE, "after < Traits::kBlock ? key + after : next", "key + after"),
        (_SOURCE, "(key + row) & (page_size(pages) - 1)", "key + row"),
        ("attention/sm90/forward/fwd_producer.cuh", "source.first_of(next)", "key"),
        ("sm90/tile/shared_tile.cuh", "to * kRowBytes", "0"),
    )
]  # fmt: skip


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
        bindings.run_simulated,
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
