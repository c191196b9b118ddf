"""Faults of the Hopper attention backward, for test_sm90_bwd_faults.py: those that are written in
its source, what is there and what would be wrong instead; and those that do no harm.
"""

from dataclasses import dataclass, field

from sm90_on_host.build import Mutation
from sm90_on_host.saboteur import Harmless

# Head dim and variant. Between them they have every role, and every way of sharing a step.
BAND = ("64 kBand", "128 kBand", "256 kBand")
DROPOUT, DENSE, BIAS = ("128 kDropout",), ("128 kMask",), ("128 kBias", "256 kBias")
INSTANCES = BAND + DROPOUT + DENSE + BIAS
STAGES = BAND[:2]  # two of them
ONCE = BAND[1:2]


@dataclass
class _Source:
    """Of one file; `only`: the instances that it is tried in."""

    file: str
    found: list[tuple[Mutation, tuple[str, ...]]] = field(default_factory=list)

    def __call__(self, right: str, *wrong: str, only: tuple[str, ...] = BAND) -> None:
        self.found += [(Mutation(f"attention/{self.file}", right, w), only) for w in wrong]


# -- the launch before, and the one after
ends = _Source("backward_ends.cuh")
ends("contains(live, row) ? args.lse[at] : kMinusInfinity", "args.lse[at]")
ends("lse != kMinusInfinity && column < args.value_dim", "lse != kMinusInfinity",
     "column < args.value_dim")  # fmt: skip
ends("lanes > 0", "lanes > 1")
ends(
    "dead ? -kMinusInfinity : Traits::kBias ? lse : lse * kLog2e",
    "Traits::kBias ? lse : lse * kLog2e",
    "dead ? -kMinusInfinity : lse",
)
ends("dead || !args.dlse ? sum : sum - args.dlse[at]", "sum", "sum - args.dlse[at]")
ends("threadIdx.x < Traits::kGroups", "false", "threadIdx.x < 1")
ends("sum[i] = {};", "")
ends("*args.counter = 0;", "*args.counter = 1;")
ends("dropout::units(first_row) + i", "i", only=DROPOUT)
ends("is_added_to<Traits>(args, block)", "true", "false")
ends("values[i] * args.scale", "values[i]")
ends("smaller(sequence.query_rows - first_row, Traits::kRows)", "Traits::kRows")
ends("column < args.head_dim", "true")
ends("has_sum ? *from : Piece<Element>{}", "*from")

# -- which blocks
tiles = _Source("backward_tiles.cuh")
tiles("clamped_length(args.query_lengths, batch, args.queries)", "args.queries")
tiles("clamped_length(args.key_lengths, batch, args.keys)", "args.keys")
tiles("rest ? 0 : queries", "queries")
tiles("rest ? 0 : keys", "keys")
tiles("band.diagonal = keys - queries;", "")
tiles("block - sequence.first_row_block", "block")
tiles("work.sequence.first_row_block + step.row_block", "step.row_block")
classes = _Source("backward_classes_sm90.cuh")
classes("block.flags & kHasWork ? 1 : 0", "1", only=DENSE)

# -- the main launch: barriers, the draw of a block of keys
main = _Source("attention_bwd_sm90.cuh")
main("slot->empty.init(Traits::kGroups);", "slot->empty.init(1);")
main("slot.full.init(kWarpsPerGroup);", "slot.full.init(1);")
main("args.order.row_tiles - 1 - place.row_tile", "place.row_tile", only=ONCE)
main("packing.query_offsets ? kNoEnd : args.queries", "args.queries")
main("first_step<Traits>(args, work).head < args.heads_per_kv ? 1 : 0", "1", only=DENSE)

# -- loads, and the turns of dQ
movers = _Source("backward_movers.cuh")
movers("sequence.key_origin + work.first_key", "work.first_key")
movers("sequence.query_origin + step.row_block * Traits::kRows", "step.row_block * Traits::kRows")
movers("next.head == args.heads_per_kv", "false", only=DENSE)
movers("now.flags", "kHasWork", only=DENSE)
movers("shared.dropout.rows[stage.index()]", "shared.dropout.rows[0]", only=DROPOUT)
movers("args.row_keys + statistics / Traits::kRows * kUnits", "args.row_keys", only=DROPOUT)
for buffer in ("q", "dout", "lse2", "delta"):
    movers(f"shared.{buffer}[stage.index()]", f"shared.{buffer}[0]", only=STAGES)
movers("args.lse2 + statistics", "args.lse2")
movers("args.delta + statistics", "args.delta")
movers("stage.advance();", "")
movers("position.advance();", "")
movers("work.first_key / Traits::kKeys - added.begin", "work.first_key / Traits::kKeys")
movers(
    "classes_of<Traits>(args, work, step.head)[step.row_block].rank",
    "work.first_key / Traits::kKeys",
    only=DENSE,
)
movers("one_row ? 0 : note.step.row_block * Traits::kRows", "0", only=BIAS)
movers("args.turns + chunk", "args.turns", "args.turns + chunk / Traits::kGroups")
movers("args.dq_sum + chunk * Traits::kChunkFloats", "args.dq_sum")
movers("ptx::load_acquire(turn) != rank", "false", "ptx::load_acquire(turn) + 1 < rank")
movers("ptx::fence_proxy_async_global();", "ptx::fence_proxy_async();")
movers("rank == 0", "false", "true")
movers("rank + 1", "rank", "rank + 2")

# -- consumers
consumer = _Source("backward_consumer.cuh")
consumer("clear(rDk);", "")
consumer("hash_keys();", "", only=DROPOUT)
consumer("clear_dead_keys();", "")
consumer("clear_dead_rows(row_block);", "")
consumer("mask_operands(rP, rDs, row_block);", "")
consumer("row_block > plan.visited.begin ? row_block - 1 : plan.visited.end - 1", "row_block")
consumer(
    "store_scores(shared.ds[stage.index()], rDs);\n      issue_gradient(rDv, rP, dout_columns);",
    "store_scores(shared.ds[0], rDs); issue_gradient(rDv, rP, dout_columns);",
    only=STAGES,
)
consumer("shared.lse2[stage.index()]", "shared.lse2[0]", only=STAGES)
consumer("shared.delta[stage.index()]", "shared.delta[0]", only=STAGES)
consumer("shared.dropout.rows[stage.index()]", "shared.dropout.rows[0]", only=DROPOUT)
consumer(
    "sm90::descriptor_at(ds_dq, stage.index() * Traits::ScoreTile::kBytes)", "ds_dq", only=STAGES
)
consumer(
    "release(shared.q_slots[stage.index()]);",
    "release(shared.q_slots[stage.index()]);"
    "if constexpr (Traits::kDense) { last = shared.dense.notes[stage.index()].last; }",
    only=DENSE,
)
consumer("if (leader) {\n      slot.empty.arrive();\n    }", "slot.empty.arrive();")
_SHOWN = "ptx::fence_proxy_async();\n    ptx::bar_sync({}, {});"
consumer(
    _SHOWN.format("kScoresBarrier", "Traits::kGroups * kWarpgroup"),
    _SHOWN.format("kScoresBarrier", "kWarpgroup").replace("\n", ""),
    _SHOWN.format("kMeetBarrier + group", "kWarpgroup").replace("\n", ""),
)
consumer("contains(shared.work.plan.clean, row_block)", "true")
consumer("!contains(shared.work.plan.full, row_block)", "false")
consumer("note.flags & kHasDead", "false", only=DENSE)
consumer("tile->clear_unmarked_rows(live, threadIdx.x % kWarpgroup, kWarpgroup);", "", only=DENSE)
consumer(
    "args.packing.key_offsets ? kKeys : smaller(args.keys - shared.work.first_key, kKeys)",
    "smaller(args.keys - shared.work.first_key, kKeys)",
)
consumer("sm90::scale_rows(rDk, factors);", "")
consumer("meet_before_stores();", "", only=BIAS)
consumer("!view.data", "false", "!view.data")
consumer("sequence.key_rows - key", "kKeys")
consumer("columns - column", "kOwnColumns")

_SOURCES = (ends, tiles, classes, main, movers, consumer)


def mutations_of(instance: str) -> list[Mutation]:
    return [m for source in _SOURCES for m, only in source.found if instance in only]


# -- what does no harm -----------------------------------------------------------------------------
# Whether these show depends on where g++ puts the registers of a thread.
BY_LAYOUT = (
    Harmless(
        "no wgmma fence",
        "issue_product(rDp, v_rows, dout_rows);",
        "nothing has touched the accumulator since the fence of the product before",
    ),
    Harmless("no wgmma fence", "issue_dq(rDq);", "as before"),
    Harmless(
        "no pin",
        "issue_product(rDp, v_rows, dout_rows);",
        "ordinary code only reads the accumulator, and the product overwrites it",
    ),
    Harmless("no pin", "issue_dq(rDq);", "as before"),
    Harmless("no pin", "ptx::pin(rP);", "the operand's next values come from pinned scores"),
    Harmless("no pin", "ptx::pin(rDs);", "as before"),
    Harmless("no pin", "ptx::pin(lane);", "no product has it: it saves registers"),
)
_FULL = "full.wait(stage.phase());"
HARMLESS = (
    # Whoever has handed back Q has handed back dO before.
    Harmless("no mbarrier wait", "dout_slot.empty.wait(", "the wait for Q covers it"),
    Harmless("no mbarrier wait", "shared.passed.wait(", "passes at once"),
    Harmless("no bulk wait", "} ptx::cp_async_bulk_wait_group();", "launches end with it"),
    Harmless("bulk wait for reads only", "} ptx::cp_async_bulk_wait_group();", "as before"),
)
BAND_HARMLESS = (
    Harmless("mutation", "rest ? 0 : queries", "there are no keys either"),
    Harmless("mutation", "rest ? 0 : keys", "there are no rows either"),
    Harmless("mutation", "!view.data -> !view.data", "the same: what is noticed falsely shows"),
    # A packed sequence that ends where the tensor does, from its beginning, is the only one.
    Harmless("mutation", "kNoEnd : args.queries -> args.queries", "behind it TMA has zeroed"),
    Harmless("mutation", "args.packing.key_offsets ? kKeys : ", "as before"),
)
DENSE_HARMLESS = (
    Harmless(
        "no mbarrier wait",
        f"clear_dead_rows(row_block); shared.q_slots[stage.index()].{_FULL} < "
        f"shared.q_slots[stage.index()].{_FULL} last = take_rows(",
        "the loop has waited for Q and the note that comes with it",
    ),
)


COLUMNS_HARMLESS = (
    Harmless(
        "one more arrival expected",
        "shared.bias.scores_read.init(",
        "only who shares out keys arrives there, or waits",
    ),
)


def harmless_of(instance: str) -> tuple[Harmless, ...]:
    return (
        *HARMLESS,
        *(BAND_HARMLESS if instance in BAND else ()),
        *(DENSE_HARMLESS if instance in DENSE + BIAS else ()),
        *(COLUMNS_HARMLESS if instance == "256 kBias" else ()),
    )
