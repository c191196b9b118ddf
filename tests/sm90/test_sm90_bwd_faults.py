"""Whether the simulator of Hopper detects faults in the backward that runs on it.

As test_sm90_faults.py for the forward: every fault that the simulator supports, at every place of
the launches, one at a time. Also mutations of the source (backward_faults.py): zeroing left out, a
missing bound, another stage, dQ semaphores. These may also be detected by wrong results.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sm90_on_host import bindings
from sm90_on_host.backward_faults import (
    BY_LAYOUT,
    DISTANCE,
    DMASK,
    DMASK_HARMLESS,
    INSTANCES,
    SCORES,
    distance_mutations_of,
    dmask_mutations_of,
    harmless_of,
    mutations_of,
    score_mutations_of,
)
from sm90_on_host.build import RANDOM, Mutation, build, changed_sources, missing
from sm90_on_host.fault_injector import Harmless, OpInjector
from sm90_plans.backward import CONFIGS

from fastattn.ops import _env
from fastattn.ops._op import OPS
from fastattn.ops.attention import sm90
from fastattn.ops.attention.spec_inputs import make_inputs
from fastattn.ops.attention.spec_varlen import make_inputs as make_packed
from fastattn.testing.oracle import run_op
from fastattn.testing.properties import deterministic_algorithms
from fastattn.testing.spec import OpSpec, Sample, all_specs

TESTS = Path(__file__).resolve().parent
SPECS = all_specs()
pytestmark = [pytest.mark.slow, pytest.mark.long]
_injector = partial(OpInjector, bindings.HOST, bindings.run_simulated, ignored=BY_LAYOUT)


# -- what the kernels are asked --------------------------------------------------------------------
def _sample(name: str, gradients: str = "q k v", **options: object) -> Sample:
    made = partial(make_packed if "queries" in options else make_inputs, **options)
    return Sample(name, "has faults", made, tuple(gradients.split()))


def _samples(instance: str) -> Iterator[Sample]:
    """Small, and between them everything that an instance has, the quickest first, which examines
    most faults: R rows are a block, N keys.
    """
    D, kind = int(instance.split()[0]), instance.split()[1]
    R, N = CONFIGS[D].rows, CONFIGS[D].keys
    one: dict[str, Any] = {"D": D, "B": 1, "H": 1}
    if kind == "kBounded":
        most = 2 * N + 20 if D == 128 else N + 20
        yield _sample("dead rows", M=R + 9, N=N, query_lengths=[R - 9], **one)
        yield _sample("dead keys", M=R, N=N, key_lengths=[33], **one)
        yield _sample("only dq", gradients="q", M=R, N=N, **one)
        yield _sample("sinks", gradients="q sinks", M=R + 9, N=R - 20, causal="bottom_right",
                      query_lengths=[R], sinks=0.5, **one | {"H": 2})  # fmt: skip
        # Three blocks of keys add to a block of rows, but only two to a row: any order is the same.
        yield _sample("any order", M=3 * R, N=2 * N + 9, window=(N // 2, N // 2), **one)
        # With fewer blocks of keys, additions in another order may happen not to be noticed.
        yield _sample("order of sums", gradients="q", M=R, N=6 * N, **one)
        yield _sample("gqa", causal="bottom_right", M=R + 20, N=most, **one | {"H": 2, "K": 1})
        yield _sample("window", M=3 * R, N=3 * N, window=(9, 5), **one | {"D": D - 8, "E": D - 16})
        yield _sample("packed", queries=[R + 9, 0, 9], keys=[9, 30, N + 9], slack=9, D=D, H=1,
                      causal="bottom_right")  # fmt: skip
    if kind == "kDropout":
        yield _sample("a block", dropout_p=0.3, M=R, N=N, **one)
        yield _sample("dropout", dropout_p=0.3, M=5 * R, N=N + 12, **one)
    if kind == "kMask":
        yield _sample("mask, dead keys", mask="bool MN", M=R, N=N, key_lengths=[20], **one)
        yield _sample("mask, nothing", mask="none MN", M=R, N=N, **one)
        yield _sample("mask, window", mask="bool MN", M=3 * R, N=2 * N, window=(9, 9), **one)
        yield _sample("mask", mask="rows MN", M=4 * R, N=N + 12, **one)
    if kind == "kBias":  # by TMA, or fetched where rows do not begin at multiples of 16 bytes
        yield _sample("a block", mask="fp32 MN", M=R, N=N, **one)
        yield _sample("fp32 bias", mask="fp32 MN", M=3 * R, N=N + 12, **one)
        if D == 128:
            yield _sample("fp32 bias, fetched", mask="fp32 MN", M=3 * R, N=N + 13, **one)
            yield _sample("bias", mask="min_rows MN", M=3 * R, N=N + 16, **one)
            yield _sample("bias of keys", mask="float N", M=4 * R, N=N + 13, **one)
        else:
            yield _sample("fp32 bias of keys", mask="fp32 N", M=3 * R, N=N + 12, **one)


def _dmask_samples(instance: str) -> Iterator[Sample]:
    """The same for the gradient of an additive mask: R rows and N keys of a tile."""
    D, R, N = int(instance.split()[0]), 128, 64
    one: dict[str, Any] = {"D": D, "B": 1, "H": 1}
    if instance.endswith("Dropout"):
        one["dropout_p"] = 0.3
    yield _sample("all summed, fetched", "mask", mask="float N", M=R, N=N - 3, window=(20, 9),
                  **one | {"B": 2, "H": 2})  # fmt: skip
    yield _sample("heads summed", "mask", mask="min_rows BMN", M=R, N=N, key_lengths=[N, 20],
                  query_lengths=[R, R - 9], **one | {"B": 2, "H": 4, "K": 2})  # fmt: skip
    yield _sample("rows summed", "mask", mask="float HN", M=3 * R, N=N + 8, **one | {"H": 2})
    yield _sample("fp32, fetched", "mask", mask="fp32 MN", M=R + 9, N=3 * N + 13, **one)
    yield _sample("fp32", "mask", mask="fp32 MN", M=R + 12, N=3 * N + 12, **one)


def _score_samples(instance: str) -> Iterator[Sample]:
    """Several heads, sequences and blocks; R rows are a block, N keys."""
    D, variant = int(instance.split()[0]), instance.split()[1]
    R, N = CONFIGS[D].rows, CONFIGS[D].keys
    options: dict[str, Any] = {"D": D, "B": 2, "H": 2, "K": 1, "M": R + 20, "N": N + 20}
    options |= {"alibi": "BH", "softcap": 1.0, "amplitude": 3.0, "key_lengths": [N + 20, N - 9]}
    options |= {"causal": "bottom_right_lengths", "query_lengths": [R + 20, 30]}
    masks = (None,) if variant == "kScores" else ("bool BHMN", "float BHMN", "fp32 HMN")
    for mask in masks:
        yield _sample(f"scores, {mask}", **options, mask=mask)


def _distance_samples(instance: str) -> Iterator[Sample]:
    """The same for the gradient of distance_bias: 128 rows and 64 keys of a tile."""
    D = int(instance.split()[0])
    one: dict[str, Any] = {"D": D, "alibi": "BH", "gradients": "alibi_slopes"}
    dense = instance.endswith("kScoresDense")
    yield _sample("shared", B=3, H=1, K=1, M=40, N=200, mask="rows BMN" if dense else None,
                  key_lengths=[200, 90, 40], dropout_p=0.3 if dense else 0.0,
                  causal="bottom_right_lengths", **one | {"alibi": "H"})  # fmt: skip
    if dense:
        one |= {"dropout_p": 0.3, "B": 1, "H": 2, "K": 1, "N": 150}
        yield _sample("bias", mask="min BHMN", M=140, **one)
        yield _sample("mask", mask="rows BHMN", M=270, **one)
    else:
        yield _sample("packed", queries=[30, 140], keys=[150, 9], H=2, causal="bottom_right", **one)
        yield _sample("lengths", B=2, H=2, K=2, M=150, N=270, causal="bottom_right_lengths",
                      key_lengths=[270, 99], query_lengths=[150, 20], **one)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Launches with faults. defines: of the build, besides the instance's. least: the number of
    detected faults. only_mutations: whether other instances have the faults of the machine.
    """

    defines: tuple[str, ...]
    mutations: Callable[[str], list[Mutation]]
    samples: Callable[[str], Iterator[Sample]]
    harmless: Callable[[str], tuple[Harmless, ...]]
    least: int
    only_mutations: bool = False


KINDS = {
    "main": Kind((), mutations_of, _samples, harmless_of, 100),
    "mask gradient": Kind(
        ("ONLY_DMASK",), dmask_mutations_of, _dmask_samples, lambda _: DMASK_HARMLESS, 60
    ),
    "scores": Kind((), score_mutations_of, _score_samples, lambda _: (), 0, True),
    "distances": Kind(
        ("ONLY_DISTANCE",), distance_mutations_of, _distance_samples, lambda _: DMASK_HARMLESS, 50
    ),
}
_INSTANCES = {"main": INSTANCES, "mask gradient": DMASK, "scores": SCORES, "distances": DISTANCE}


@pytest.mark.parametrize(
    "kind, instance", [(kind, i) for kind, instances in _INSTANCES.items() for i in instances]
)
def test_faults(kind: str, instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    of, (head_dim, variant) = KINDS[kind], instance.split()
    defines = [*of.defines, f"ONLY_HEAD_DIM={head_dim}", f"ONLY_VARIANT={variant}"]
    mutations = of.mutations(instance)
    machine = build(TESTS / "sm90_attention_bwd.cpp", defines, mutations=mutations)
    injector = _injector(machine, mutations, later=(RANDOM,), only_mutations=of.only_mutations)
    if kind == "mask gradient":  # each tile sums several pairs of blocks, in one split or two
        monkeypatch.setattr(_env, "multiprocessors", lambda *device: 1)
    for sample in of.samples(instance):
        with monkeypatch.context() as patch:
            _examine(patch, injector, sample)
    harmless = of.harmless(instance)
    assert len(injector.detected) > of.least
    assert not injector.unreached()
    assert not injector.undetected(harmless)
    assert not injector.unused(harmless)


_RELEASE = "      steps.after_dq();\n"
_FINISH_DQ = "      ptx::wgmma_wait_group<1>();\n      ptx::pin(rDq[0]);\n"


def test_scores_released_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next mask is loaded over dS while the products of dQ still read it."""
    if reason := missing():
        pytest.skip(reason)
    source, defines = TESTS / "sm90_attention_bwd.cpp", ["ONLY_HEAD_DIM=128", "ONLY_VARIANT=kBias"]
    faulty = changed_sources(
        tmp_path, "attention/sm90/backward/main/bwd_consumer.cuh", _FINISH_DQ + _RELEASE,
        _RELEASE + _FINISH_DQ,
    )  # fmt: skip
    machine = build(source, defines, csrc=faulty)
    sample = next(s for s in _samples("128 kBias") if s.name == "fp32 bias")
    injector = _injector(machine)  # examines it in every order
    with pytest.raises(RuntimeError, match=r"block \d+"):
        _examine(monkeypatch, injector, sample)


def _examine(patch: pytest.MonkeyPatch, injector: OpInjector, sample: Sample) -> None:
    host = injector.host
    bindings.use(patch, lambda op, problem, _: injector.call(op, ctypes.c_void_p(problem)), host)
    if "fetched" in sample.name:  # not copied to where TMA can read it
        patch.setattr(sm90, "as_readable", lambda mask: mask)
    patch.setitem(
        OPS["attention_bwd"]._launchers, "reference", partial(injector.launch, OPS["attention_bwd"])
    )
    spec: OpSpec = SPECS["attention_varlen" if sample.name == "packed" else "attention"]
    with deterministic_algorithms(sample.name != "any order"):
        run_op(spec, sample, sample.inputs("cpu", torch.bfloat16), "reference")
