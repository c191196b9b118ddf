"""Whether the simulator of Hopper detects faults in the forward that runs on it.

Every fault that it supports (a missing wait, an extra arrival, the other parity, ...) is injected
at every place of a kernel where it is possible, one at a time. The simulator itself must detect
all but the harmless ones: results are not compared here.
"""

from functools import partial
from pathlib import Path

import pytest
import test_sm90_on_host as forward
from sm90_on_host import bindings
from sm90_on_host.build import MUTATION, Mutation, Place, build, changed_sources, missing
from sm90_on_host.fault_injector import ORDERS, FaultInjector, Harmless

TESTS = Path(__file__).resolve().parent
pytestmark = [pytest.mark.slow, pytest.mark.long]

# All of these stay in the kernel: they are harmless on this simulator, or because of the code
# around them. PTX does not say that the end of a launch completes its asynchronous stores, and
# barriers that replace another one serve a different purpose.
HARMLESS = (
    Harmless("no pin", "ptx::pin(rP)", "the operand's next values come from pinned scores"),
    Harmless(
        "no bulk wait", "} ptx::cp_async_bulk_wait_group();", "the end of a launch completes stores"
    ),
    Harmless(
        "no bar.sync",
        "clear_dead_values(state, tile, n);",
        "the ping-pong barrier follows, or clear_dead_values of the last block",
    ),
    Harmless("bulk wait for reads only", "} ptx::cp_async_bulk_wait_group();", "as before"),
)
# One instance, cases that between them need everything it has, the quickest first.
FORWARD = (
    # Dead keys to the left of the window: in the last of several blocks.
    forward.Case(128, "kBounded", M=200, N=600, causal="bottom_right", window=(40, 0), H=1),
    forward.Case(128, "kBounded", queries=[40] * 14, keys=[50] * 14, H=1),
    forward.Case(128, "kBounded", M=520, N=100, H=3, K=3, causal="top_left"),
    forward.CASES["128 packed window"],
    forward.Case(128, "kBounded", M=300, N=420, causal="bottom_right", scale=-0.1),
)


class Forward(FaultInjector):
    """Takes the place of a machine: a call is examined."""

    def call(self, function: str, *arguments: object) -> str | None:
        return self.examine(partial(self.run, function, *arguments))

    def run(self, function: str, *arguments: object) -> str | None:
        bindings.HOST.poison_workspace()
        return self.machine.call(function, *arguments)


def test_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    defines = forward.defines(FORWARD[0].instance)
    injector = Forward(build(TESTS / "sm90_attention.cpp", defines))
    for case in FORWARD:
        monkeypatch.setitem(forward.CASES, "here", case)
        forward.test_forward(lambda _: injector, monkeypatch, "here")
    assert len(injector.detected) > 100
    assert not injector.undetected(HARMLESS)
    assert not injector.unused(HARMLESS)


# Faults that need other instances: a path below csrc/attention/sm90/forward, its text, a wrong one,
# and a case that detects it.
REBUILT = {
    # A late warp misses a phase.
    "no barrier between skipped blocks": (
        "fwd_part.cuh",
        "        sync_group();\n        release_key(false);",
        "        release_key(false);",
        forward.Case(64, "kBounded", M=70, N=1500, causal="bottom_right", H=1),
    ),
    # The next metadata overwrites what is still read.
    "as many slots of metadata as of K": (
        "fwd_config.cuh",
        "kMetadataSlots = 2 * kStages",
        "kMetadataSlots = kStages",
        forward.Case(64, "kDropout", M=70, N=1000, dropout_p=0.3, H=1),
    ),
    # The copy overtakes a warp that still reads.
    "one arrival frees a slot of the mask": (
        "fwd_storage.cuh",
        "slot.empty.init(kWarpsPerGroup);",
        "slot.empty.init(1);",
        forward.Case(128, "kBias", own_mask="bf16 BMN", M=130, N=400, H=1),
    ),
}


@pytest.mark.parametrize("name", REBUILT)
def test_other_instances(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    file, right, wrong, case = REBUILT[name]
    monkeypatch.setitem(forward.CASES, "here", case)
    defines, source = forward.defines(case.instance), TESTS / "sm90_attention.cpp"
    faulty = changed_sources(tmp_path, f"attention/sm90/forward/{file}", right, wrong)
    machine = build(source, defines)
    for machine.order in ORDERS:
        forward.test_forward(lambda _: machine, monkeypatch, "here")
    machine = build(source, defines, csrc=faulty)
    with pytest.raises(RuntimeError, match=r"block \d+"):
        for machine.order in ORDERS:
            forward.test_forward(lambda _: machine, monkeypatch, "here")


# Mutations of sinks and score modifications, by the case whose results are wrong with each.
_SINK = "sinks.data[int64_t{head} * (queries / sinks.rows) + row / sinks.rows]"
CHANGES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "64 sinks": (
        ("forward/sinks.cuh", _SINK, "sinks.data[0]"),
        ("forward/sinks.cuh", "factor *= keys / sum;", ""),
        ("forward/sinks.cuh", "lse == kMinusInfinity", "false"),
    ),
    "128 decoding, sinks, no splits": (
        ("forward/sinks.cuh", "queries / sinks.rows", "1"),
        ("forward/sinks.cuh", "row / sinks.rows", "0"),
    ),
    "64 high sinks, dropout": (
        ("forward/sinks.cuh", "result < least ? least : result", "result"),
    ),
    "64 splits, sinks": (
        ("forward/output.cuh", "Traits::kSinks && !is_split(state)", "Traits::kSinks"),
        ("forward/combine_splits.cuh",
         "query < clamped_length(args.query_lengths, static_cast<int>(batch), args.queries)",
         "true"),
        ("forward/combine_splits.cuh", "sink_of(args.sinks, head_here, args.queries, query)",
         "args.sinks.data[0]"),
    ),
    "64 sinks, no row has a key": (
        ("forward/output.cuh",
         "Traits::kDense ? computed_queries(args, tile.batch, args.queries) : tile.queries",
         "tile.queries"),
    ),
    "64 scores": (
        ("forward/fwd_blocks.cuh", "n * Traits::kBlock + state.thread_here().first_column()",
         "state.thread_here().first_column()"),
        ("forward/fwd_blocks.cuh", "first_key - state.upper_row(tile)", "first_key"),
        ("masks/score_modifications.cuh", "fabsf(x) < kNear", "true"),
    ),
    "128 own diagonals, distances": (
        ("masks/score_modifications.cuh", "batch * bias.batch_stride", "0"),
        ("masks/score_modifications.cuh", "limits.own_diagonals ? keys - queries : 0", "0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_sinks_and_changes_of_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    mutations = [Mutation(f"attention/sm90/{file}", *texts) for file, *texts in CHANGES[name]]
    defines = forward.defines(forward.CASES[name].instance)
    machine = build(TESTS / "sm90_attention.cpp", defines, mutations=mutations)
    forward.test_forward(lambda _: machine, monkeypatch, name)
    for number in range(len(mutations)):
        machine.inject(Place(MUTATION, number, 1))
        with pytest.raises((AssertionError, RuntimeError)):
            forward.test_forward(lambda _: machine, monkeypatch, name)
