"""The forms of Hopper kernels that FASTATTN_TRIALS builds, on the simulator: results, and whether
faults in what is new are detected. Those of `ffn_loop` are in test_sm90_ffn.py.
"""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_cuda_sources as sources
import test_sm90_bwd_faults as bwd_faults
import test_sm90_bwd_on_host as backward
import test_sm90_ffn as ffn
import test_sm90_on_host as forward
import torch
from native_build import build_script
from sm90_on_host import backward_faults, bindings, ffn_bindings
from sm90_on_host.backward_faults import BY_LAYOUT, harmless_of
from sm90_on_host.build import (
    FAULTS,
    HERE,
    MUTATION,
    RANDOM,
    Machine,
    Mutation,
    Place,
    build,
    missing,
)
from sm90_on_host.fault_injector import Harmless, OpInjector, _lines
from sm90_on_host.host_library import HostLibrary
from sm90_plans.backward import CONFIGS, Config
from test_sm90_faults import HARMLESS, Forward
from torch import Tensor

from fastattn.ops._op import OPS, Op
from fastattn.ops.attention import sm90
from fastattn.ops.attention.calls import ForwardCall
from fastattn.ops.ffn import sm90 as ffn_sm90
from fastattn.ops.ffn.calls import BackwardCall
from fastattn.testing.oracle import Oracle, run_op
from fastattn.testing.poison import poisoned_results
from fastattn.testing.properties import deterministic_algorithms
from fastattn.testing.spec import OpSpec, Sample

TESTS = Path(__file__).resolve().parent
pytestmark = pytest.mark.slow


def machine_of(
    source: str, trials: str, defines: list[str], mutations: tuple[Mutation, ...] = ()
) -> Machine:
    """The machine that FASTATTN_TRIALS builds."""
    if reason := missing():
        pytest.skip(reason)
    macros = [flag.removeprefix("-D") for flag in build_script().trial_flags(trials)]
    return build(TESTS / source, defines + macros, mutations=mutations)


def _run_cases(
    monkeypatch: pytest.MonkeyPatch, machine: Machine | Forward, cases: Sequence[forward.Case]
) -> None:
    for case in cases:
        monkeypatch.setitem(forward.CASES, "case", case)
        forward.test_forward(lambda _: machine, monkeypatch, "case")


def _detected(
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    cases: Sequence[forward.Case],
    mutations: Sequence[Mutation],
) -> list[Mutation]:
    """The mutations with which some case has wrong results or ends with an error."""
    found = []
    for number, mutation in enumerate(mutations):
        machine.inject(Place(MUTATION, number, 1))
        try:
            _run_cases(monkeypatch, machine, cases)
        except (AssertionError, RuntimeError):
            found.append(mutation)
    machine.inject(None)
    return found


class Within(Forward):
    """Injects the faults of the machine below a line of source alone."""

    def __init__(self, machine: Machine, line: str) -> None:
        super().__init__(machine)
        self.line = line

    def _injects(self, place: Place) -> bool:
        return place.fault != MUTATION and self.line in _lines(self.machine, place.address)


class Waits(Forward):
    """Injects the faults "no grid wait" alone."""

    def _injects(self, place: Place) -> bool:
        return FAULTS[place.fault] == "no grid wait"


# -- the forward's tile scheduler ------------------------------------------------------------------
_FORWARD = partial(machine_of, "sm90_attention.cpp", "fwd_swizzle,fwd_counter")
_ZEROING = Mutation("attention/sm90/masks/hash_columns.cuh", "*counter = 0;", "*counter = 1;")
_CASES = ("64 causal", "64 packed splits", "64 mask", "128 packed dropout", "128 causal splits")


@pytest.mark.parametrize("name", _CASES)
def test_forward(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = _FORWARD(forward.defines(forward.CASES[name].instance))
    forward.test_forward(lambda _: machine, monkeypatch, name)


@pytest.mark.parametrize("name", ["64 causal", "128 packed dropout"])
def test_counter_is_zeroed_before_it_is_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = _FORWARD(forward.defines(forward.CASES[name].instance), (_ZEROING,))
    injector = Waits(machine)
    forward.test_forward(lambda _: injector, monkeypatch, name)
    assert injector.detected and not injector.undetected()
    machine.inject(Place(MUTATION, 0, 1))
    with pytest.raises((AssertionError, RuntimeError)):
        forward.test_forward(lambda _: machine, monkeypatch, name)


def test_swizzle_group() -> None:
    """At most two waves of tiles, and keys and values that fit into L2."""
    instance = forward.CASES["128 causal splits"].instance
    capped, today = (build_of(forward.defines(instance)).library for build_of in (_FORWARD, _today))
    for queries, most in ((512, 64), (2048, 16), (4096, 8), (16384, 2), (1 << 20, 1)):
        at = (256, queries, queries, 128, 128)
        assert capped.swizzle_group(*at) == min(most, today.swizzle_group(*at)) >= 1


def _today(defines: list[str]) -> Machine:
    return build(TESTS / "sm90_attention.cpp", defines)


# -- the forward's blocks at the diagonal ----------------------------------------------------------
_DIAGONAL = partial(machine_of, "sm90_attention.cpp", "fwd_diagonal")
_HALF = "end <= n * Traits::kBlock + Traits::kBlock / 2"
_NEXT_IS_FULL = "blocks.halved && blocks.full()"
_DIAGONAL_MUTATIONS = (
    Mutation("attention/sm90/forward/fwd_blocks.cuh", _HALF, _HALF.replace(" / 2", "")),
    Mutation("attention/sm90/forward/fwd_consumer.cuh", _NEXT_IS_FULL, "blocks.full()"),
    Mutation("attention/sm90/forward/fwd_consumer.cuh", _NEXT_IS_FULL, "blocks.halved"),
    Mutation(
        "attention/sm90/masks/mask.cuh",
        "keys_of_row(last_row, bounds, keys).begin > first_key",
        "false",
    ),
    Mutation(
        "attention/sm90/masks/mask.cuh",
        "upper_row - thread.lane / 4 + sm90::kWarpRows - 1",
        "upper_row - 2 * sm90::kWarpRows",
    ),
)
_CUT = (
    "64 causal", "128 window", "128 packed window", "128 causal splits", "128 own diagonals, window"
)  # fmt: skip


@pytest.mark.parametrize("name", _CUT)
def test_diagonal(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = _DIAGONAL(forward.defines(forward.CASES[name].instance))
    forward.test_forward(lambda _: machine, monkeypatch, name)


def test_faults_at_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutations of what is new: some case has wrong results with each."""
    instance = forward.CASES["128 window"].instance
    machine = _DIAGONAL(forward.defines(instance), _DIAGONAL_MUTATIONS)
    sizes: dict[str, Any] = {"M": 270, "N": 270, "causal": "top_left", "H": 1, "K": 1}
    cases = {
        "causal": forward.Case(128, "kBounded", **sizes),
        "window": forward.Case(128, "kBounded", **sizes, window=(40, 0)),
    }
    for name, case in cases.items():
        monkeypatch.setitem(forward.CASES, name, case)
        forward.test_forward(lambda _: machine, monkeypatch, name)
    for number, name in enumerate(("causal", "causal", "window", "window", "window")):
        machine.inject(Place(MUTATION, number, 1))
        with pytest.raises((AssertionError, RuntimeError)):
            forward.test_forward(lambda _: machine, monkeypatch, name)


@pytest.mark.long
def test_machine_faults_at_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the block after one with half of its keys."""
    case = forward.Case(128, "kBounded", M=256, N=256, causal="top_left", H=8, K=1)
    monkeypatch.setitem(forward.CASES, "case", case)
    injector = Within(_DIAGONAL(forward.defines(case.instance)), "next_block<false, kBlock / 2>")
    forward.test_forward(lambda _: injector, monkeypatch, "case")
    assert len(injector.detected) > 10
    assert not injector.undetected(HARMLESS)


# -- block plans by the load warp, and warpgroups that skip blocks -------------------------------
_PRODUCER = "attention/sm90/forward/fwd_producer.cuh"
_PART = "attention/sm90/forward/fwd_part.cuh"
_PLAN_MUTATIONS = (
    Mutation(_PRODUCER, "plan_for_group<Traits>(args, tile, group)",
             "plan_for_group<Traits>(args, tile, 0)"),
    Mutation(_PART, "(shared.plans[at.index()][group])", "(shared.plans[0][group])"),
)  # fmt: skip
_SKIP_MUTATIONS = (
    Mutation(_PART, "wait_ping_pong();\n        arrive_ping_pong();", ""),
    Mutation(_PART, "release_key(false);", ""),
)
_CAUSAL: dict[str, Any] = {"H": 1, "K": 1, "causal": "bottom_right"}
_PLANNED: dict[str, tuple[str, tuple[Mutation, ...], tuple[forward.Case, ...]]] = {
    "64": ("fwd_plan", _PLAN_MUTATIONS, (
        forward.Case(64, "kBounded", M=400, N=700, **_CAUSAL),
        # More tiles than the queue has, most of them empty.
        forward.Case(64, "kBounded", **_CAUSAL, queries=[40] * 24, keys=[50, 0, 0, 0, 0, 0] * 4),
    )),
    # A warpgroup skips the first block of a tile, the other one the last.
    "128": ("fwd_plan,fwd_skip", (*_PLAN_MUTATIONS, *_SKIP_MUTATIONS), (
        forward.Case(128, "kBounded", M=200, N=600, **_CAUSAL, window=(100, 0)),
        forward.CASES["128 packed window"],
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", _PLANNED)
def test_plans_and_skipping(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Results, wrong forms of expressions, and plans that are written while they are read."""
    trials, mutations, cases = _PLANNED[name]
    defines = forward.defines(cases[0].instance)
    machine = machine_of("sm90_attention.cpp", trials, defines, mutations)
    _run_cases(monkeypatch, machine, cases)
    assert _detected(monkeypatch, machine, cases, mutations) == list(mutations)
    if name == "64":
        injector = Within(machine, "if constexpr (Traits::kPlansAhead) {")
        _run_cases(monkeypatch, injector, cases[1:])
        assert len(injector.detected) > 1 and not injector.undetected()


# -- one consumer warpgroup ------------------------------------------------------------------------
_DECODING: dict[str, Any] = {"B": 2, "N": 400, "key_lengths": [400, 129]}


def test_one_warpgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    """For up to 64 queries."""
    cases = {
        forward.Case(128, "kFull", splits=3, H=8, K=2, M=1, **_DECODING): 1,
        forward.Case(128, "kFull", M=64, H=1, **_DECODING, query_lengths=[64, 20]): 1,
        forward.Case(128, "kFull", M=65, H=1, **_DECODING): 2,
        forward.Case(128, "kFull", H=1, queries=[64, 0, 3], keys=[40, 30, 200], slack=70): 1,
    }
    defines = forward.defines(next(iter(cases)).instance)
    machine = machine_of("sm90_attention.cpp", "fwd_one_warpgroup", defines)
    for case, warpgroups in cases.items():
        _run_cases(monkeypatch, machine, [case])
        assert machine.library.last_threads() == 128 * (1 + warpgroups)


# -- the forward across tiles ----------------------------------------------------------------------
_ACROSS = partial(machine_of, "sm90_attention.cpp", "fwd_across_tiles")
_IN_ORDER = re.compile("k(Full|Bounded|Dropout|Sinks|Scores|ScoresDropout|Paged|PagedScores)")
_ACROSS_NAMES = [
    name
    for name, case in forward.CASES.items()
    if case.instance.head_dim <= 128 and _IN_ORDER.fullmatch(case.instance.variant)
]
_FIRST = "c.softmax.template update<true>(c.rS, alpha, scale_log2<Traits>(state.args));"
# Wrong forms of expressions: a case of the instance detects each of them.
_ACROSS_MUTATIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "128 kScoresDropout": (
        ("blocks.is_last()", "!blocks.is_last()"),
        ("hash_rows(state, blocks.tile);", ""),
        ("blocks.change(c.rS);", ""),
        ("blocks.mask_first(c.rS);", ""),
        (f"c.softmax.start();\n  {_FIRST}", _FIRST),
        (f"c.softmax.start();\n  {_FIRST}", f"c.softmax.start(); {_FIRST}".replace("<t", "<!t")),
        ("state.value.next()", "state.value"),
        ("sm90::to_operand<typename Traits::Element>(c.rP, c.rS);", ""),
        ("blocks.close_first();", ""),
        ("c.clear(c.rO);", ""),
        ("!begun", "true"),
        ("--blocks.n;", ""),
        ("hash_rows(state, tile);", ""),
        ("state.query.advance();", ""),
        ("c.position.next()", "c.position"),
        ("!is_empty(next_plan.loaded)", "true"),
    ),
    "64 kBounded": (
        ("skipped > 0", "true"),
        ("skipped > 0", "false"),
        ("state.release_key(false);", "state.release_key(true);"),
        ("state.release_value();", ""),
        ("state.skip_blocks(plan.loaded.end - plan.own.end);", ""),
        ("plan.own.begin - plan.loaded.begin", "0"),
        ("next_plan.loaded.end - next_plan.own.end", "0"),
        ("skipped <= kMaxSkipped<Traits>", "true"),
        ("state.skip_blocks(again.own.begin - again.loaded.begin);", ""),
    ),
}  # fmt: skip
_OWN_PLAN = Mutation(
    _PART, "plan_for_group<Traits>(args, tile, group)", "plan_for_group<Traits>(args, tile, 0)"
)
# More tiles than the queue has, some of them empty, and dead keys on both sides.
_MANY: dict[str, Any] = {"H": 1, "queries": [40] * 18, "keys": 3 * [50, 50, 200, 200, 0, 0],
                         "causal": "bottom_right", "window": (60, -1)}  # fmt: skip
_ACROSS_CASES = {
    "128 kScoresDropout": (
        forward.Case(128, "kScoresDropout", H=1, M=300, N=270, B=3, causal="bottom_right",
                     key_lengths=[270, 0, 140], alibi="BH", softcap=2.0, dropout_p=0.3),
        # The window cuts a block for the second warpgroup that is full for the first.
        forward.Case(128, "kScoresDropout", H=1, M=256, N=256, window=(200, 0), softcap=2.0,
                     dropout_p=0.3),
        forward.Case(128, "kScoresDropout", **_MANY, softcap=2.0, dropout_p=0.3),
    ),
    "64 kBounded": (
        forward.Case(64, "kBounded", M=700, N=700, H=1, causal="top_left"),
        forward.Case(64, "kBounded", counted=False, B=8, M=192, N=700, H=1, window=(20, -1),
                     causal="bottom_right", key_lengths=[*4 * [700], 0, 0, 700, 700]),
        forward.Case(64, "kBounded", H=1, queries=[300, 20, 200, 20], keys=[700, 500, 600, 500],
                     causal="bottom_right"),
        forward.Case(64, "kBounded", **_MANY),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _ACROSS_NAMES)
def test_across_tiles(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = _ACROSS(forward.defines(forward.CASES[name].instance))
    forward.test_forward(lambda _: machine, monkeypatch, name)


@pytest.mark.parametrize("name", _ACROSS_MUTATIONS)
def test_mutations_across_tiles(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cases = _ACROSS_CASES[name]
    file = "attention/sm90/forward/fwd_across_tiles.cuh"
    mutations = (_OWN_PLAN, *(Mutation(file, *texts) for texts in _ACROSS_MUTATIONS[name]))
    machine = _ACROSS(forward.defines(cases[0].instance), mutations)
    _run_cases(monkeypatch, machine, cases)
    found = _detected(monkeypatch, machine, cases, mutations)
    assert not [x for x in mutations if x not in found]


@pytest.mark.long
@pytest.mark.parametrize("name", _ACROSS_CASES)
def test_faults_across_tiles(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every fault of the machine in the loop over tiles."""
    cases = _ACROSS_CASES[name]
    machine = _ACROSS(forward.defines(cases[0].instance))
    passed = Harmless("no mbarrier wait", "shared.passed.wait(", "it never blocks")
    injector = Forward(machine, ignored=(*HARMLESS, passed), only_in="fwd_across_tiles.cuh")
    _run_cases(monkeypatch, injector, cases)
    assert len(injector.detected) > 50
    assert not injector.undetected()


# -- splits by number of keys ----------------------------------------------------------------------
_SPLITS = HostLibrary(
    HERE / "bindings.cpp", sm90, "fastattn_sm90_splits", codes=3,
    defines=["fastattn_sm90=fastattn_sm90_splits", "FASTATTN_TRIAL_FWD_SPLITS"],
)  # fmt: skip
_EXISTS = "__shfl_sync(~0u, weights.own[i], split - first + j) > 0.0f"
_SPLIT_MUTATIONS = (
    Mutation("attention/sm90/forward/fwd_producer.cuh", "clear_split(tile);", ""),
    Mutation("attention/sm90/forward/combine_splits.cuh", _EXISTS, f"{_EXISTS} || true"),
    Mutation("attention/sm90/forward/fwd_producer.cuh", "head * args.queries + tile.origin",
             "tile.origin"),
)  # fmt: skip


def _split(monkeypatch: pytest.MonkeyPatch, machine: Machine, case: forward.Case) -> None:
    use = bindings.use
    with monkeypatch.context() as patch:
        patch.setitem(forward.CASES, "case", case)
        patch.setattr(bindings, "use", lambda patch, launch: use(patch, launch, _SPLITS))
        patch.setattr(bindings, "plan", lambda *plan: _SPLITS.native.on_host_plan(*map(int, plan)))
        forward.test_forward(lambda _: machine, patch, "case")


def _splits_of(case: forward.Case, mutations: tuple[Mutation, ...] = ()) -> Machine:
    defines = forward.defines(case.instance)
    return machine_of("sm90_attention.cpp", "fwd_splits", defines, mutations)


@pytest.mark.parametrize(
    "name",
    ["64 decoding, one warpgroup", "128 own diagonals, window", "64 packed splits", "64 splits",
     "128 causal splits", "64 splits, sinks"],
)  # fmt: skip
def test_splits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Short sequences have fewer splits than long ones."""
    case = forward.CASES[name]
    _split(monkeypatch, _splits_of(case), case)


def test_faults_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = forward.Case(
        64, "kFull", H=6, K=2, B=3, M=1, N=700, splits=4, key_lengths=[0, 700, 140]
    )  # fmt: skip
    _split(monkeypatch, machine := _splits_of(case, _SPLIT_MUTATIONS), case)
    for number in range(len(_SPLIT_MUTATIONS)):
        machine.inject(Place(MUTATION, number, 1))
        with pytest.raises((AssertionError, RuntimeError)):
            _split(monkeypatch, machine, case)


@pytest.mark.parametrize(
    ("has_lengths", "H", "M", "N", "splits"),
    [(False, 8, 1, 9000, 1), (True, 8, 1, 9000, 2), (True, 8, 64, 33000, 3),
     (True, 32, 64, 33000, 1)],
)  # fmt: skip
def test_plan_of_splits(
    monkeypatch: pytest.MonkeyPatch, has_lengths: bool, H: int, M: int, N: int, splits: int
) -> None:
    """Splits although there are enough tiles: two for 9,000 keys, if lengths may differ, and fewer
    than eight for 33,000 keys if these would need more than 64 MiB.
    """
    if reason := missing():
        pytest.skip(reason)
    found: list[int] = []

    def launch(_: str, problem: int, __: bindings.Instance) -> None:
        result = (ctypes.c_int * 4)()
        _SPLITS.native.on_host_forward_plan(ctypes.c_void_p(problem), result)
        found.append(result[0])

    bindings.use(monkeypatch, launch, _SPLITS)
    _SPLITS.native.on_host_plan(0, 0, 0)
    q = torch.zeros(64, H, M, 128, dtype=torch.bfloat16)
    k = q.new_zeros(1, 1, N, 128).expand(64, H, N, 128)
    given = torch.full((64,), N, dtype=torch.int32) if has_lengths else None
    monkeypatch.setattr(sm90._env, "multiprocessors", lambda *device: 132)
    call = ForwardCall(q, k, k, key_lengths=given, scale=0.1)
    sm90.attention_fwd(call, torch.empty_like(q), torch.empty(64, H, M))
    assert found == [splits]
    used = _SPLITS.last_workspace  # not in the assertion: guarded memory cannot be printed
    size = 0 if used is None else used.numel()
    assert size < 65 << 20


# -- the backward: blocks of 64 rows, and a limit of the waits for dQ -----------------------------
_BACKWARD = partial(
    machine_of,
    "sm90_attention_bwd.cpp",
    "bwd_rows,dq_limit",
    ["ONLY_HEAD_DIM=128", "ONLY_VARIANT=kBounded"],
)
# The workspace has as many rows as the kernel.
_SHORT = HostLibrary(
    HERE / "bindings.cpp", sm90, "fastattn_sm90_short", codes=3,
    defines=["fastattn_sm90=fastattn_sm90_short", "FASTATTN_TRIAL_BWD_ROWS"],
)  # fmt: skip
_LIMIT = Mutation(
    "attention/sm90/backward/main/dq.cuh", "++polls == kMaxPolls", "++polls == kMaxPolls >> 27"
)


def _gradients(
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    spec: OpSpec,
    sample: Sample,
    host: HostLibrary = _SHORT,
    in_order: bool = True,
) -> None:
    with monkeypatch.context() as patch, deterministic_algorithms(in_order):
        bindings.use(patch, lambda op, problem, _: machine.call(op, ctypes.c_void_p(problem)), host)
        launchers = OPS["attention_bwd"]._launchers
        launch = partial(backward._launch, OPS["attention_bwd"])
        backward._compare(
            lambda: patch.setitem(launchers, "reference", launch), spec, sample, torch.bfloat16
        )


@pytest.mark.parametrize("name", ["causal_gqa_128", "lengths_128", "packed_causal_128"])
def test_backward(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Causal ones have blocks of 64 rows, the others of 80."""
    spec, sample = next((spec, s) for spec, s in backward.CASES if s.name == name)
    _gradients(monkeypatch, _BACKWARD((_LIMIT,)), spec, sample)


def test_waits_for_dq_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that polls more often than the limit ends with an error."""
    # Four blocks of keys, which run at the same time.
    sample = backward._sample("limit", B=1, H=1, M=64, N=500, D=128, causal="bottom_right")
    _gradients(monkeypatch, machine := _BACKWARD((_LIMIT,)), backward.SPEC, sample)
    machine.inject(Place(MUTATION, 0, 1))
    with pytest.raises(RuntimeError, match="there is no memory"):
        _gradients(monkeypatch, machine, backward.SPEC, sample)


@pytest.mark.long
def test_faults_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As test_sm90_bwd_faults.py, with causal samples; without mutations: blocks of 80 rows have
    the same source.
    """
    made = bwd_faults._sample

    def causal(name: str, gradients: str = "q k v", **options: object) -> Sample:
        if isinstance(window := options.get("window"), tuple):
            options["window"] = (window[0], 0)
        return made(name, gradients, **{"causal": "bottom_right"} | options)

    monkeypatch.setattr(bwd_faults, "_sample", causal)
    monkeypatch.setitem(CONFIGS, 128, Config(64, 128))
    injector = OpInjector(
        _SHORT, bindings.run_simulated, _BACKWARD(), later=(RANDOM,),
        ignored=(*harmless_of("128 kBounded"), *BY_LAYOUT),
    )  # fmt: skip
    for sample in bwd_faults._samples("128 kBounded"):
        with monkeypatch.context() as patch:
            bwd_faults._examine(patch, injector, sample)
    assert len(injector.detected) > 90
    assert not injector.undetected()


class MoreRegisters(OpInjector):
    """Injects these faults alone."""

    def _injects(self, place: Place) -> bool:
        return FAULTS[place.fault] == "more registers"


def test_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers get all of those that producers leave."""
    defines = ["ONLY_HEAD_DIM=64", "ONLY_VARIANT=kBounded"]
    machine = machine_of("sm90_attention_bwd.cpp", "bwd_registers", defines)
    spec, sample = next((spec, s) for spec, s in backward.CASES if s.name == "causal_gqa_64")
    _gradients(monkeypatch, machine, spec, sample, bindings.HOST)
    injector = MoreRegisters(bindings.HOST, bindings.run_simulated, machine)
    with monkeypatch.context() as patch:
        bwd_faults._examine(patch, injector, sample)
    assert len(injector.detected) == 2 and not injector.undetected()


# -- the backward: dQ that is no sum ---------------------------------------------------------------
_ONCE = HostLibrary(
    HERE / "bindings.cpp", sm90, "fastattn_sm90_once", codes=3,
    defines=["fastattn_sm90=fastattn_sm90_once", "FASTATTN_TRIAL_BWD_DQ_ONCE"],
)  # fmt: skip
_BEHIND: dict[str, Any] = {"queries": [65, 0, 270, 1, 64], "keys": [40, 30, 50, 0, 64], "slack": 70,
                           "H": 2, "K": 1, "causal": "bottom_right"}  # fmt: skip
# Blocks of rows without keys, rows behind a sequence, two blocks of keys, and no dq.
_ONCE_SAMPLES = {
    "64 kBounded": (
        backward._sample("gqa", causal="bottom_right", H=2, K=1, M=300, N=100, D=56, B=1),
        bwd_faults._sample("packed", **_BEHIND, D=64),
        backward._sample("lengths", M=140, N=128, D=64, H=1, layout="bshd", query_lengths=[140, 70],
                         key_lengths=[33, 0]),
        backward._sample("two blocks", M=140, N=129, D=64, B=1, H=1),
        bwd_faults._sample("no dq", "k v", M=300, N=60, D=64, B=1, H=1, causal="bottom_right"),
    ),
    "256 kMask": (
        backward._sample("mask", mask="blocks BMN", M=270, N=60, D=200, key_lengths=[60, 20],
                         query_lengths=[270, 70], H=1),
    ),
}  # fmt: skip


_CLEARS = "!sums_dq(args) && args.dq.data && !is_added_to<Traits>(args, rows)"
_ONCE_MUTATIONS = {
    "64 kBounded": (
        ("main/dq_once", "Traits::kTransposesDq ? 0 : state.group * kMmaRows", "0"),
        ("main/dq_once", "work.kv_head * args.heads_per_kv + step.head", "work.kv_head"),
        ("main/dq_once", "work.sequence.query_origin + first_row", "first_row"),
        ("main/dq_once", "work.sequence.query_rows - first_row", "Traits::kRows"),
        ("main/dq_once", "sm90::scale_rows(parts[part], factors);", ""),
        ("main/dq_once", "!view.data", "false"),
        ("main/steps", "passed / count", "0"),
        ("main/steps", "plan.visited.end - 1 - passed % count", "plan.visited.end - 1"),
        ("main/prepare_finish", _CLEARS, "false"),
        ("main/prepare_finish", _CLEARS, _CLEARS.replace("args.dq.data && ", "")),
    ),
    "256 kMask": (
        ("main/dq_once", "part * kPartBytes", "0"),
        ("main/dq_once", "piece / kChunkPieces * kPartBytes", "0"),
        ("main/dq_once", "smaller(rows, Traits::kRows)", "Traits::kRows"),
        ("main/dq_once", "column < args.head_dim", "true"),
        ("main/dq_once", "state.first_own_chunk() * sm90::kChunkColumns", "0"),
        ("main/dq_once", "state.sync_group();", ""),
        ("main/bwd_consumer", "kPiece == Traits::kDqPieces - 1", "kPiece == 0"),
        ("main/prepare_finish", _CLEARS, "false"),
    ),
}


def _once(instance: str) -> tuple[Machine, tuple[Mutation, ...]]:
    return _backward_of("bwd_dq_once", instance, _ONCE_MUTATIONS)


def _backward_of(
    trials: str, instance: str, texts: dict[str, tuple[tuple[str, str, str], ...]]
) -> tuple[Machine, tuple[Mutation, ...]]:
    head_dim, variant = instance.split()
    defines = [f"ONLY_HEAD_DIM={head_dim}", f"ONLY_VARIANT={variant}"]
    mutations = tuple(
        Mutation(f"attention/sm90/backward/{file}.cuh", right, wrong)
        for file, right, wrong in texts[instance]
    )
    return machine_of("sm90_attention_bwd.cpp", trials, defines, mutations), mutations


@pytest.mark.parametrize("instance", _ONCE_SAMPLES)
def test_dq_that_is_no_sum(monkeypatch: pytest.MonkeyPatch, instance: str) -> None:
    machine, _ = _once(instance)
    for sample in _ONCE_SAMPLES[instance]:
        spec = backward.PACKED if sample.name == "packed" else backward.SPEC
        _gradients(monkeypatch, machine, spec, sample, _ONCE)


@pytest.mark.parametrize("instance", _ONCE_SAMPLES)
def test_faults_of_dq_that_is_no_sum(monkeypatch: pytest.MonkeyPatch, instance: str) -> None:
    """Faults of the machine in what is new, and wrong forms of its expressions."""
    machine, mutations = _once(instance)
    injector = OpInjector(
        _ONCE, bindings.run_simulated, machine, mutations, later=(RANDOM,), only_in="dq_once.cuh"
    )
    for sample in _ONCE_SAMPLES[instance]:
        with monkeypatch.context() as patch:
            bwd_faults._examine(patch, injector, sample)
    assert not injector.unreached() and not injector.undetected()


# -- the backward: sums of dQ in any order ---------------------------------------------------------
# Any block of keys may be the first to store. Two add to a row: any order has the same bits.
_ROTATION_SAMPLES = {
    "64 kBounded": bwd_faults._sample("any order", D=64, H=2, K=1, M=256, N=265, B=1,
                                   window=(64, 64)),
    "256 kMask": bwd_faults._sample("any order", mask="rows MN", D=256, H=1, M=256, N=128, B=1,
                                    window=(32, 32)),
}  # fmt: skip
_RANK = "ready || atomicCAS(semaphore, 0, kClaimed) != 0"
_SUM_MUTATIONS = (
    ("main/dq", _RANK, "ready"),
    ("main/dq", _RANK, _RANK.replace("!=", "==")),
    ("main/dq", "ready || rank == 0", "ready"),
    ("main/dq", "ready || rank == 0", "true"),
    ("main/dq", "ptx::load_acquire(semaphore) == kStored", "true"),
)
_ROTATION_MUTATIONS = {
    "64 kBounded": (
        *_SUM_MUTATIONS,
        ("bwd_tiles", "block % count", "block"),
        ("bwd_tiles", "next == work.first_row_block", "next == visited.end - 1"),
        ("bwd_tiles", "step.row_block > visited.begin ? step.row_block : visited.end",
         "step.row_block"),
        ("main/steps", "state.work().first_row_block", "plan.visited.end - 1"),
    ),
    "256 kMask": _SUM_MUTATIONS,
}  # fmt: skip
_rotation = partial(_backward_of, "bwd_rotation", texts=_ROTATION_MUTATIONS)


@pytest.mark.parametrize(
    ("instance", "in_order"), [("64 kBounded", False), ("64 kBounded", True), ("256 kMask", False)]
)
def test_sums_in_any_order(monkeypatch: pytest.MonkeyPatch, instance: str, in_order: bool) -> None:
    machine, _ = _rotation(instance)
    sample = backward._sample(
        "sums", D=int(instance.split()[0]), B=1, H=2, K=1, M=300, N=306, causal="bottom_right",
        mask="rows BHMN" if instance.endswith("kMask") else None,
    )  # fmt: skip
    _gradients(monkeypatch, machine, backward.SPEC, sample, bindings.HOST, in_order)


@pytest.mark.parametrize("instance", _ROTATION_SAMPLES)
def test_faults_of_sums_in_any_order(monkeypatch: pytest.MonkeyPatch, instance: str) -> None:
    """Wrong forms of new expressions, and with one instance faults of the machine in additions."""
    machine, mutations = _rotation(instance)
    # Before the claim and after it: without an order these have the same phase.
    waits = [
        Harmless("no mbarrier wait", f"{before}; slot.full.wait(", "the other one is enough")
        for before in ("== kStored", "piece * Traits::kPieceFloats")
    ]
    injector = OpInjector(
        bindings.HOST, bindings.run_simulated, machine, mutations, later=(RANDOM,),
        ignored=(*backward_faults.HARMLESS, *waits), only_in="dq.cuh",
        only_mutations=instance != "64 kBounded",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        bwd_faults._examine(patch, injector, _ROTATION_SAMPLES[instance])
    assert not injector.unreached() and not injector.undetected()


# -- the backward: persistent thread blocks --------------------------------------------------------
_PERSISTENT_MUTATIONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "64 kBounded": (
        ("main/bwd_producer", "number < args.order.row_tiles * args.order.heads",
         "number <= args.order.row_tiles * args.order.heads"),
        ("main/bwd_producer", "shared.persistent.steps[block.index()] = stage.passed;",
         "shared.persistent.steps[block.index()] = 0;"),
        ("main/bwd_producer", "shared.persistent.parity[block.index()] = loaded.phase();",
         "shared.persistent.parity[block.index()] = 0;"),
        ("main/bwd_producer", "loaded.advance();", ""),
        ("main/bwd_producer", "block.advance();", ""),
        ("main/bwd_producer", "work.steps > 0", "true"),
        ("main/bwd_consumer", "state.block.advance();", ""),
        ("main/bwd_consumer", "state.leader && state.work().steps > 0", "state.leader"),
        ("main/dq", "work.steps > 0 && sums_dq(args)", "true"),
        ("main/dq", "block.advance();", ""),
    ),
    "256 kDropout": (),
    "64 kMaskDropout": (
        ("main/dense_loads", "classes_of<Traits>(args, work, step.head)",
         "classes_of<Traits>(args, shared.works[0], step.head)"),
        ("main/bwd_producer", "next.head == args.heads_per_kv", "false"),
    ),
    "128 kBias": (
        ("main/dense_loads", "work.first_key * halves", "shared.works[0].first_key * halves"),
        ("main/dense_loads", "layout.batches > 1 ? work.sequence.number : 0",
         "layout.batches > 1 ? shared.works[0].sequence.number : 0"),
    ),
    "256 kBias": (),
}  # fmt: skip
_persistent = partial(_backward_of, "bwd_persistent", texts=_PERSISTENT_MUTATIONS)


def _two_lengths(instance: str) -> Sample:
    """Twelve blocks of keys and more for two thread blocks, some without rows."""
    D, variant = int(instance.split()[0]), instance.split()[1]
    masks = {"64 kMaskDropout": "rows BHMN", "128 kBias": "fp32 BHMN", "256 kBias": "float BHMN"}
    return backward._sample(
        "lengths", D=D, M=140, N=D + 220, H=2, key_lengths=[20, D + 220],
        dropout_p=0.3 * variant.endswith("Dropout"), mask=masks.get(instance),
    )  # fmt: skip


class Persistent(OpInjector):
    """Injects faults of the machine where thread blocks continue."""

    def _injects(self, place: Place) -> bool:
        new = r"persistent|take_block\(\); __syncwarp|kWarpsPerGroup \+ 1"
        return place.fault == MUTATION or bool(re.search(new, _lines(self.machine, place.address)))


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("instance", _PERSISTENT_MUTATIONS)
def test_persistent(monkeypatch: pytest.MonkeyPatch, instance: str, in_order: bool) -> None:
    machine, _ = _persistent(instance)
    sample = _two_lengths(instance)
    _gradients(monkeypatch, machine, backward.SPEC, sample, bindings.HOST, in_order)


@pytest.mark.parametrize("instance", ["64 kBounded", "64 kMaskDropout", "128 kBias"])
def test_faults_of_persistent(monkeypatch: pytest.MonkeyPatch, instance: str) -> None:
    machine, mutations = _persistent(instance)
    injector = Persistent(
        bindings.HOST, bindings.run_simulated, machine, mutations, later=(RANDOM,)
    )
    with monkeypatch.context() as patch:
        bwd_faults._examine(patch, injector, _two_lengths(instance))
    assert len(injector.detected) > 20 and not injector.unreached()
    assert not injector.undetected()


# -- products of ffn as dependent launches ---------------------------------------------------------
_FFN = partial(machine_of, "sm90_ffn.cpp", "ffn_dependent", ["ONLY_DTYPE=kBFloat16"])
_SIZES: dict[str, Any] = {"rows": (140,), "D": 72, "hidden": 136, "out": 72}
_FFN_SAMPLES = (
    # No sums of columns between the products.
    ffn._sample("all", **_SIZES, bias=False, activation="gelu"),
    replace(ffn._sample("dx", **_SIZES, bias=False), gradients=("x",)),
    ffn._sample("sums", **_SIZES, dropout_p=0.2, output_dropout_p=0.3, residual="same"),
)


def test_ffn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of a call are launched before the simulator runs them, also without the waits
    for the launch before.
    """
    injector = Waits(machine := _FFN())

    def launch(op: str, problem: int, instance: ffn_bindings.Instance) -> str | None:
        step = [ffn_bindings.STEPS.index(instance.step)] if instance.step else []
        return machine.call(op, ctypes.c_void_p(problem), *step)

    def launch_all(op: Op, args: Sequence[Any]) -> Sequence[Tensor]:
        results = ffn._launch(op, args)
        if message := machine.call("ffn_synchronize"):
            raise RuntimeError(message)
        return results

    def run(sample: Sample, oracle: Oracle) -> str | None:
        """Faults in the order of events, or in results."""
        try:
            with monkeypatch.context() as patch, poisoned_results():
                ffn_bindings.use(patch, launch)
                ffn.replace_reference(patch, launch_all)
                inputs = sample.inputs("cpu", torch.bfloat16)
                results = run_op(ffn.SPEC, sample, inputs, "reference")
        except RuntimeError as error:
            return str(error)
        wrong = [name for name, x in results.items() if not oracle.judge(name, x).ok]
        return f"wrong: {wrong}" if wrong else None

    for sample in _FFN_SAMPLES:
        oracle = Oracle(ffn.SPEC, sample, torch.bfloat16)
        assert injector.examine(partial(run, sample, oracle)) is None
    found: dict[bool, list[bool]] = {False: [], True: []}
    for (_, where), detected in injector.detected.items():
        found["independent" in _lines(machine, where)].append(detected)
    # The first products of a direction, kUp and kDhidden, have nothing to wait for. The waits at
    # the end of a launch are for later ones, for all of which the simulator waits by itself.
    assert sorted(found[True]) == [False, False, True, True, True]
    assert found[False] == [False] * 5


@pytest.mark.parametrize("rows", [1024, 32768])
def test_dw1_waits_for_the_sums_of_parts(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The parts of dw2 and of dw1, eight for 32,768 rows, are in the same memory."""
    if reason := missing():
        pytest.skip(reason)
    found: list[tuple[str, bool]] = []

    def launch(_: str, problem: int, instance: ffn_bindings.Instance) -> None:
        native = ffn_bindings.HOST.native
        if instance.step:
            independent = native.on_host_independent(ctypes.c_void_p(problem))
            found.append((instance.step, bool(independent)))

    ffn_bindings.use(monkeypatch, launch)
    x = torch.zeros(rows, 64, dtype=torch.bfloat16)
    w1, w2, hidden = x.new_zeros(256, 64), x.new_zeros(64, 256), x.new_zeros(rows, 256)
    gradients = [True, True, False, True, False]
    call = BackwardCall(x, x, w1, None, w2, None, hidden, "relu", 0.0, 0.0, None, 0, gradients)
    results = (x.new_empty(n) if n else x.new_empty(0) for n in (x.shape, w1.shape, 0, w2.shape, 0))
    ffn_sm90.ffn_bwd(call, *results)
    assert found == [("kDhidden", False), ("kDw", False), ("kDw", rows == 1024), ("kDx", True)]


# -- compiler output -------------------------------------------------------------------------------
_COMPILED = (
    ("attention_fwd_sm90_bf16_d64_bounded", "fwd_counter,fwd_plan"),
    ("attention_fwd_sm90_bf16_d128_dropout", "fwd_counter,fwd_plan,fwd_skip"),
    ("attention_fwd_sm90_bf16_d64_dropout", "fwd_counter,fwd_diagonal"),
    ("attention_bwd_sm90_bf16_d128_bounded", "bwd_rows,dq_limit"),
    ("attention_bwd_sm90_bf16_d64_bounded", "bwd_dq_once,bwd_rotation"),
    ("attention_bwd_sm90_fp16_d64_bounded", "bwd_registers"),
    ("attention_bwd_sm90_fp16_d128_bounded", "bwd_dq_once"),
    ("attention_bwd_sm90_fp16_d128_bounded", "bwd_persistent"),
    ("attention_bwd_sm90_bf16_d64_bounded", "bwd_persistent"),
    ("ffn_product_sm90_bf16_up", "ffn_dependent"),
    ("ffn_product_sm90_bf16_dw", "ffn_dependent"),
)


@pytest.mark.parametrize(("name", "trials"), _COMPILED)
def test_instance(monkeypatch: pytest.MonkeyPatch, name: str, trials: str, tmp_path: Path) -> None:
    """What test_cuda_sources.py checks of today's forms."""
    today = sources._compile

    def compiled(source: str, folder: Path, *_: object) -> tuple[str, dict[str, list[str]]]:
        return today(source, folder, name, trials)

    def of_64_rows(*arguments: Any) -> tuple[str, dict[str, list[str]]]:
        """The kernels whose last template argument is true."""
        log, kernels = compiled(*arguments)
        first, *parts = re.split(r"(?=ptxas info +: Compiling entry function)", log)
        own = "".join(part for part in parts if "ELb1EE" in part.partition(" for ")[0])
        return first + own, {k: sass for k, sass in kernels.items() if "ELb1EE" in k}

    is_short = "bwd_rows" in trials
    monkeypatch.setattr(sources, "_compile", of_64_rows if is_short else compiled)
    configs = sources.BACKWARD_CONFIGS
    if is_short:
        monkeypatch.setitem(configs, 128, replace(configs[128], rows=64))
    if "bwd_dq_once" in trials:
        monkeypatch.setitem(configs, 128, replace(configs[128], dq_stores=5))
    if "bwd_registers" in trials:
        monkeypatch.setitem(configs, 64, replace(configs[64], budget=(40, 232)))
    if name.startswith("attention_bwd"):
        sources.test_backward_instance(name, tmp_path)
    elif name.startswith("attention"):
        sources.test_instance(name, tmp_path)
    else:
        sources.test_ffn_instance(name, None, tmp_path)


def _forward_events(folder: Path, name: str, trials: str) -> str:
    """The events of an instance, in which nothing is serialised and nothing spills."""
    log, kernels = sources._compile(sources.FORWARD, folder, f"attention_fwd_sm90_{name}", trials)
    assert not re.findall(r"C75\d\d", log), log
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", log), log
    (sass,) = kernels.values()
    return "".join(sources._events(sass))


@pytest.mark.parametrize(
    "name", ["bf16_d64_bounded", "fp16_d64_full", "bf16_d128_dropout", "fp16_d128_bounded"]
)
def test_products_across_tiles(tmp_path: Path, name: str) -> None:
    """Both products of a step are in flight together, also where they are of two tiles."""
    events = _forward_events(tmp_path, name, "fwd_across_tiles")
    step = "m{12}1e{66}0" if "d64" in name else "m{16}1e*0e*"
    first = "m{4}0e*" if "d64" in name else "m{8}0e*"
    loops = 1 if "full" in name else 2
    assert re.fullmatch(f"{first}({step}){{{loops}}}m{{8}}0{step}", events), events


def test_half_of_the_first_scores(tmp_path: Path) -> None:
    """Q K^T of the first block in two widths."""
    events = _forward_events(tmp_path, "bf16_d128_bounded", "fwd_counter,fwd_diagonal")
    assert re.fullmatch("m{8}0m{8}00e*m{12}1e*0e*(m{16}1e*0e*){2}m{8}0", events), events


def test_products_of_one_warpgroup(tmp_path: Path) -> None:
    """The exponentials of a block run beside P V: no other warpgroup has products."""
    name = "attention_fwd_sm90_fp16_d128_full"
    log, kernels = sources._compile(sources.FORWARD, tmp_path, name, "fwd_one_warpgroup")
    assert not re.findall(r"C75\d\d", log), log
    assert len(re.findall(r"\b0 bytes spill stores, 0 bytes spill loads", log)) == 2, log
    (sass,) = (code for kernel, code in kernels.items() if "OneWarpgroup" in kernel)
    assert not any("USETMAXREG" in line for line in sass)
    events = "".join(sources._events(sass))
    assert re.fullmatch("m{8}0e{66}m{16}1e{66}0m{8}0", events), events
