"""Faults of the Hopper attention backward, for test_sm90_bwd_faults.py: mutations of its source
(the right text and a wrong one), and harmless faults; then those of the launches that compute an
additive mask's gradient.
"""

from dataclasses import dataclass, field

from sm90_on_host.build import Mutation
from sm90_on_host.fault_injector import Harmless

# Head dim and variant. Together they have every role, and every division of a step.
BOUNDED = ("64 kBounded", "128 kBounded", "256 kBounded")
DROPOUT, DENSE, BIAS = ("128 kDropout",), ("128 kMask",), ("128 kBias", "256 kBias")
INSTANCES = BOUNDED + DROPOUT + DENSE + BIAS
# Instances of the mask's gradient: two blocks in shared memory, or one.
DMASK = ("64 kBias", "192 kBiasDropout")
STAGES = BOUNDED[1:2]  # two buffers of all that a step loads
ONE_DOUT = BOUNDED[2:]  # two of Q and one of dO, dQ in two pieces
ONCE = BOUNDED[1:2]
MUTATED = BOUNDED[1:]  # 64 has the source of 128, and faults of the machine of its own
ONE_BIAS = BIAS[:1]  # with buffers of dS that the mask is loaded into


@dataclass
class _Source:
    """Mutations of one file; `only`: the instances that a mutation is tried in."""

    file: str
    found: list[tuple[Mutation, tuple[str, ...]]] = field(default_factory=list)

    def __call__(self, right: str, wrong: str, only: tuple[str, ...] = MUTATED) -> None:
        self.found.append((Mutation(f"attention/sm90/{self.file}", right, wrong), only))


# -- the launch before, and the one after
ends = _Source("backward/main/prepare_finish.cuh")
ends("contains(live, row) ? args.lse[at] : kMinusInfinity", "args.lse[at]")
ends("lse != kMinusInfinity && column < args.value_dim", "column < args.value_dim")
ends("lanes > 0", "lanes > 1")
ends("dead ? -kMinusInfinity : kNatural ? lse : lse * kLog2e", "kNatural ? lse : lse * kLog2e")
ends("dead || !args.dlse ? sum : sum - args.dlse[at]", "sum - args.dlse[at]")
ends("lse == kMinusInfinity ? 0.0f : -ptx::ex2((sink - lse) * kLog2e) * delta",
     "-ptx::ex2((sink - lse) * kLog2e) * delta", only=ONCE)  # fmt: skip
ends("exists ? sink_term(sink, args.lse[at], args.dlse ? sum - args.dlse[at] : sum) : 0.0f",
     "exists ? sink_term(sink, lse, args.dlse ? sum - args.dlse[at] : sum) : 0.0f",
     only=ONCE)  # fmt: skip
ends("(batch * gridDim.x + blockIdx.x) * args.rows", "batch * gridDim.x * args.rows", only=ONCE)
ends("sums[threadIdx.x] += sums[threadIdx.x + threads];",
     "if (threads > 1) { sums[threadIdx.x] += sums[threadIdx.x + threads]; }",
     only=ONCE)  # fmt: skip
ends("threadIdx.x < Traits::kGroups", "threadIdx.x < 1")
ends("*args.counter = 0;", "*args.counter = 1;")
ends("dropout::units(first_row) + i", "i", only=DROPOUT)
ends("is_added_to<Traits>(args, block)", "true")
ends("values[i] * args.scale", "values[i]")
ends("smaller(sequence.query_rows - first_row, Traits::kRows)", "Traits::kRows")
ends("column < args.head_dim", "true")
ends("has_sum ? *from : Piece<Element>{}", "*from")

# -- which blocks
tiles = _Source("backward/bwd_tiles.cuh")
tiles("rest ? 0 : queries", "queries")
tiles("rest ? 0 : keys", "keys")
tiles("block - sequence.first_row_block", "block")
tiles("work.sequence.first_row_block + step.row_block", "step.row_block")
sizes = _Source("common.cuh")
sizes("clamped_length(limits.query_lengths, batch, all)", "all")
sizes("clamped_length(limits.key_lengths, batch, all)", "all")
sizes("bounds.diagonal = keys - queries;", "")
classes = _Source("backward/mask_classes_bwd_sm90.cuh")
classes("block.flags & kHasWork ? 1 : 0", "1", only=DENSE)

tiles("args.order.row_tiles - 1 - place.row_tile", "place.row_tile", only=ONCE)
tiles("packing.query_offsets ? kNoEnd : args.queries", "args.queries")
tiles("first_step<Traits>(args, work).head < args.heads_per_kv ? 1 : 0", "1", only=DENSE)

# -- the main launch: barriers
barriers = _Source("backward/main/bwd_storage.cuh")
barriers(
    "shared.q_slots[stage].empty.init(Traits::kGroups);", "shared.q_slots[stage].empty.init(1);"
)
barriers("slot.full.init(kWarpsPerGroup);", "slot.full.init(1);")
barriers("shared.dout_empty.init(Traits::kGroups);", "shared.dout_empty.init(1);", only=ONE_DOUT)

# -- loads, and the dQ semaphores
producer = _Source("backward/main/bwd_producer.cuh")
producer("sequence.key_origin + work.first_key", "work.first_key")
producer("sequence.query_origin + step.row_block * Traits::kRows", "step.row_block * Traits::kRows")
producer("next.head == args.heads_per_kv", "false", only=DENSE)
producer("shared.dropout.rows[stage.index()]", "shared.dropout.rows[0]", only=DROPOUT)
producer(
    "args.row_keys + row_offset / Traits::kRows * dropout::units(Traits::kRows)",
    "args.row_keys",
    only=DROPOUT,
)
for buffer in ("q", "lse2"):
    producer(f"shared.{buffer}[stage.index()]", f"shared.{buffer}[0]")
for buffer in ("dout", "delta"):
    producer(f"shared.{buffer}[dout_stage.index()]", f"shared.{buffer}[0]", only=STAGES)
producer("args.lse2 + row_offset", "args.lse2")
producer("args.delta + row_offset", "args.delta")
producer("stage.advance();", "")
dense_loads = _Source("backward/main/dense_loads.cuh")
dense_loads("now.flags", "kHasWork", only=DENSE)
dense_loads("one_row ? 0 : metadata.step.row_block * Traits::kRows", "0", only=BIAS)
dq = _Source("backward/main/dq.cuh")
dq("position.advance();", "if (piece == 0) { position.advance(); }", only=ONE_DOUT)
dq("work.first_key / Traits::kKeys - added.begin", "work.first_key / Traits::kKeys")
dq(
    "classes_of<Traits>(args, work, step.head)[step.row_block].rank",
    "work.first_key / Traits::kKeys",
    only=DENSE,
)
dq("args.dq_semaphores + chunk", "args.dq_semaphores + chunk / Traits::kGroups")
dq("args.dq_sum + chunk * Traits::kChunkFloats", "args.dq_sum")
dq(
    "ptx::load_acquire(semaphore) < (args.in_order ? rank : smaller(rank, 1))",
    "ptx::load_acquire(semaphore) < (args.in_order ? rank : 0)",
)
dq("ptx::fence_proxy_async_global();", "ptx::fence_proxy_async();")
dq("to + piece * Traits::kPieceFloats", "to", only=ONE_DOUT)
dq("(rank == 0)", "true")
dq("args.in_order || rank == 0", "rank == 0")
dq("rank + 1", "rank + 2")

# -- consumers
consumer = _Source("backward/main/bwd_consumer.cuh")
consumer("clear(rDk);", "")
consumer("hash_keys(state);", "", only=DROPOUT)
consumer("steps.clear_keys();", "")
consumer("steps.open();", "")
consumer("steps.mask(rP, rDs);", "")
consumer(
    "store_scores(shared.ds[state.dout_slot()], rDs);\n"
    "      issue_gradient(rDv, rP, dout_columns, state.dout_slot());",
    "store_scores(shared.ds[0], rDs); issue_gradient(rDv, rP, dout_columns, state.dout_slot());",
    only=STAGES,
)
consumer("sm90::descriptor_at(ds_dq, slot * Traits::ScoreTile::kBytes)", "ds_dq", only=STAGES)
consumer(
    "issue_product(rS, k_rows, q_rows, state.slot());",
    "issue_product(rS, k_rows, q_rows, state.dout_slot());",
    only=ONE_DOUT,
)
consumer(
    "issue_gradient(rDk, shared.ds[state.dout_slot()], q_columns, state.slot());",
    "issue_gradient(rDk, shared.ds[state.dout_slot()], q_columns, state.dout_slot());",
    only=ONE_DOUT,
)
consumer(
    "if constexpr (Traits::kStages > 1) {\n        state.sync_consumers();",
    "state.sync_group();",
    only=ONE_DOUT,
)
consumer(
    "ptx::wgmma_wait_group<Part::kDqParts>();\n      ptx::pin(rDv);\n      state.release_dout();",
    "state.release_dout(); ptx::wgmma_wait_group<Part::kDqParts>(); ptx::pin(rDv);",
    only=ONE_DOUT,
)
consumer("ptx::fence_proxy_async();\n    state.sync_consumers();",
         "ptx::fence_proxy_async(); state.sync_group();")  # fmt: skip
consumer("steps.before_stores();", "", only=BIAS)
consumer("sm90::scale_rows(rDk, factors);", "")
consumer(
    "state.release_rows();",
    "const auto before = state.stage; state.release_rows();"
    "const auto after = state.stage; state.stage = before; steps.close(); state.stage = after;",
    only=DENSE,
)
steps = _Source("backward/main/steps.cuh")
steps("row_block > plan.visited.begin ? row_block - 1 : plan.visited.end - 1", "row_block")
steps("!contains(plan.full, row_block)", "false")
gradients = _Source("backward/main/gradients.cuh")
gradients("state.stage.passed * Traits::kDqPieces + kPiece",
          "state.stage.passed * Traits::kDqPieces", only=ONE_DOUT)  # fmt: skip
gradients("kPiece * kFours + i", "i", only=ONE_DOUT)
gradients("!view.data", "false")
gradients("sequence.key_rows - key", "Traits::kKeys")
gradients("columns - column", "BackwardPart<Traits>::kOwnColumns")
weights = _Source("backward/main/weights.cuh")
weights("state.shared.lse2[state.slot()]", "state.shared.lse2[0]")
weights("state.shared.delta[state.dout_slot()]", "state.shared.delta[0]", only=STAGES)
weights(
    "pairs[i] = *reinterpret_cast<const float2*>(lse2 + 8 * i);",
    "pairs[i] = *reinterpret_cast<const float2*>(lse2);",
    only=STAGES,
)
weights("state.shared.dropout.rows[state.slot()]", "state.shared.dropout.rows[0]", only=DROPOUT)
masks = _Source("backward/main/bwd_masks.cuh")
masks("contains(state.shared.work.plan.clean, row_block)", "true")
masks("state.args.packing.key_offsets", "nullptr")
dense = _Source("backward/main/bwd_dense.cuh")
dense("metadata.flags & kHasDead", "false", only=DENSE)
dense("tile->clear_unmarked_rows(live, threadIdx.x % kWarpgroup, kWarpgroup);", "", only=DENSE)
bias = _Source("backward/main/bias.cuh")
bias(
    "state.shared.bias.scores_read.arrive();",
    # one warpgroup for both
    "if (state.group == 0) { for (int i = 0; i < 2; ++i) "
    "{ state.shared.bias.scores_read.arrive(); } }",
    only=ONE_BIAS,
)
bias("state.sync_consumers();", "state.sync_group();", only=BIAS[1:])
part = _Source("backward/main/bwd_part.cuh")
part("Traits::kGroups * kWarpgroup", "kWarpgroup")
part(
    "if (leader) {\n      shared.q_slots[slot()].empty.arrive();\n    }",
    "shared.q_slots[slot()].empty.arrive();",
)
part("Traits::kDoutStages < Traits::kStages && leader", "true", only=ONE_DOUT)

_SOURCES = (
    ends, tiles, sizes, classes, barriers, producer, dense_loads, dq, consumer, steps, gradients,
    weights, masks, dense, bias, part,
)  # fmt: skip


def mutations_of(instance: str) -> list[Mutation]:
    return [m for source in _SOURCES for m, only in source.found if instance in only]


# -- what does no harm -----------------------------------------------------------------------------
# All of these stay in the kernels: they are harmless on this simulator, or because of the code
# around them. The reasons given for fences and pins hold for one order of instructions; PTX and the
# compiler require them in any case. Whether they are detected depends on g++'s register allocation.
BY_LAYOUT = (
    Harmless(
        "no wgmma fence",
        "issue_product(rDp, v_rows, dout_rows, state.dout_slot());",
        "nothing has touched the accumulator since the fence of the product before",
    ),
    Harmless("no wgmma fence", "(rDq, state.dout_slot());", "as before"),
    Harmless(
        "no pin",
        "issue_product(rDp, v_rows, dout_rows, state.dout_slot());",
        "ordinary code only reads the accumulator, and the product overwrites it",
    ),
    Harmless("no pin", "(rDq, state.dout_slot());", "as before"),
    Harmless("no pin", "issue_product(s, tiles.q, tiles.k);", "as before"),
    Harmless("no pin", "issue_product(dp, tiles.dout, tiles.v);", "as before"),
    Harmless("no pin", "ptx::pin(rP);", "the operand's next values come from pinned scores"),
    Harmless("no pin", "ptx::pin(rDs);", "as before"),
    Harmless("no pin", "ptx::pin(lane);", "no product has it: it saves registers"),
)
HARMLESS = (
    Harmless(
        "no mbarrier wait",
        "shared.passed.wait(",
        "passes at once: it keeps exponentials before the wait for dP",
    ),
    # PTX does not say that the end of a launch completes its asynchronous additions.
    Harmless("no bulk wait", "} ptx::cp_async_bulk_wait_group();", "launches end with it here"),
    Harmless("bulk wait for reads only", "} ptx::cp_async_bulk_wait_group();", "as before"),
)
BOUNDED_HARMLESS = (
    Harmless("mutation", "rest ? 0 : queries", "there are no keys either"),
    Harmless("mutation", "rest ? 0 : keys", "there are no rows either"),
    # A packed sequence that ends where the tensor does, from its beginning, is the only one.
    Harmless("mutation", "kNoEnd : args.queries -> args.queries", "behind it TMA has zeroed"),
    Harmless("mutation", "args.packing.key_offsets -> nullptr", "as before"),
)


# Without buffers of Q that dO has not.
SAME_STAGES_HARMLESS = (
    Harmless("one more arrival expected", "shared.dout_empty.init(", "nobody waits for it"),
)


def harmless_of(instance: str) -> tuple[Harmless, ...]:
    bounded = BOUNDED_HARMLESS if instance in MUTATED else ()
    return (*HARMLESS, *bounded, *(() if instance in ONE_DOUT else SAME_STAGES_HARMLESS))


# -- an additive mask's gradient -------------------------------------------------------------------
_DROPS = ("192 kBiasDropout",)
DISTANCE = ("64 kScores", "192 kScoresDense")  # two blocks in shared memory, or one
_dmask_tiles = _Source("backward/dmask/dmask_tiles.cuh")
for right, wrong in (
    ("sizes[0] == 1 ? args.batch : 1", "1"),
    ("sizes[1] == 1 ? args.heads : 1", "1"),
    ("sizes[2] == 1 ? row_tiles : 1", "1"),
    ("sizes[3] == 1 ? key_tiles : 1", "1"),
    ("loop.row_tile = tile % own_rows;", "loop.row_tile = 0;"),
    ("loop.key_tile = tile % own_keys;", "loop.key_tile = 0;"),
    ("loop.head = tile % sizes[1];", "loop.head = 0;"),
    ("loop.head + number % loop.heads", "loop.head"),
    ("static_cast<int>(all * split / args.dmask.splits)", "0"),
    ("static_cast<int>(all * (split + 1) / args.dmask.splits)", "static_cast<int>(all)"),
    ("slot.empty.init(Traits::kGroups);", "slot.empty.init(1);"),
    ("shared.bias_slot.empty.init(Traits::kGroups * kWarpsPerGroup);",
     "shared.bias_slot.empty.init(1);"),
):  # fmt: skip
    _dmask_tiles(right, wrong, only=DMASK)
_dmask_producer = _Source("backward/dmask/dmask_producer.cuh")
for right, wrong in (
    ("one_row ? 0 : item.row", "0"),
    ("layout.heads > 1 ? item.head : 0", "0"),
    ("layout.batches > 1 ? item.batch : 0", "0"),
    ("item.key * halves + half * sm90::kChunkColumns", "item.key * halves"),
    ("item.head / args.heads_per_kv", "0"),
):
    _dmask_producer(right, wrong, only=DMASK)
_tile_products = _Source("backward/dmask/tile_products.cuh")  # of the gradient by distance, too
for right, wrong in (
    ("threadIdx.x % kWarpgroup == 0", "true"),
    ("group * kMmaRows * sm90::kRowBytes", "0"),
):
    _tile_products(right, wrong, only=(*DMASK, *DISTANCE))
for right, wrong in (
    ("dropout::lattice_unit(tile_key) + thread.first_column()", "thread.first_column()"),
    ("word << (24 - 8 * byte)", "word << 24"),
):
    _tile_products(right, wrong, only=(*_DROPS, *DISTANCE[1:]))
_dmask_consumer = _Source("backward/dmask/dmask_consumer.cuh")
for right, wrong in (
    ("smaller(item.row + line, args.queries - 1)", "item.row + line"),
    ("smaller(item.key + key, args.keys - 1)", "item.key + key"),
    ("args.bias_by_tma && has_one_row(args.mask)", "false"),
    ("row < queries ? keys_of_row(row, bounds, keys) : Range{0, 0}",
     "keys_of_row(row, bounds, keys)"),
    ("contains(allowed[half], key)", "true"),
    ("!(added <= kLowest<MaskElement>)", "true"),
    ("args.delta[head + existing]", "0.0f"),
    ("first[half] ^ place % sm90::kRowBytes", "first[half]"),
    ("is_allowed ? p * (kept - delta[half]) : 0.0f", "p * (kept - delta[half])"),
):  # fmt: skip
    _dmask_consumer(right, wrong, only=DMASK)
for right, wrong in (
    ("head * (args.lse_delta_rows / 2) + dropout::lattice_unit(row)", "dropout::lattice_unit(row)"),
    ("Products::draw_words(row_key, item.key, words);", "Products::draw_words(row_key, 0, words);"),
    ("words[octet / 2 * 2 + j]", "words[j]"),
):
    _dmask_consumer(right, wrong, only=_DROPS)
_dmask_sum = _Source("backward/dmask/dmask_sum.cuh")
for right, wrong in (
    ("sums_rows ? Traits::kRows : row + 1", "row + 1"),
    ("sums_keys ? kKeys : key + 1", "key + 1"),
    ("smaller(dmask.sizes[2] - loop.row_tile * Traits::kRows, Traits::kRows)", "Traits::kRows"),
    ("smaller(dmask.sizes[3] - loop.key_tile * kKeys, kKeys)", "kKeys"),
    ("sum -= args.dlse[head * args.queries + at.row];", ""),
    ("int64_t{split} * sizes[0] + at.batch", "at.batch"),
    ("dmask.partial[split * count + number]", "dmask.partial[number]"),
):
    _dmask_sum(right, wrong, only=DMASK)
_dmask_launch = _Source("backward/dmask/dmask_launch.cuh")
_dmask_launch("exact.delta = nullptr;", "", only=DMASK)
_dmask_launch("exact.dlse = p.dlse;", "", only=DMASK)
_dmask_launch("p.dmask.type == MaskType::kFloat32 || sizes[3] == 1", "false", only=DMASK)


DMASK_HARMLESS = (
    Harmless(
        "no wgmma commit", "issue_product(s, tiles.q, tiles.k);", "the next product's covers it"
    ),
)


def dmask_mutations_of(instance: str) -> list[Mutation]:
    sources = (
        _tile_products, _dmask_tiles, _dmask_producer, _dmask_consumer, _dmask_sum, _dmask_launch,
    )  # fmt: skip
    return [m for source in sources for m, only in source.found if instance in only]


# -- score modifications, and the gradient of a bias by distance ----------------------------------
SCORES = ("64 kScores", "256 kScoresDense")
_changes = _Source("masks/score_modifications.cuh")
for right, wrong in (
    ("fabsf(x) < kNear ? near : far", "near"),
    ("fmaf(-ratio, ratio, 1.0f)", "1.0f"),
    ("modifications.cap_log2 > 0.0f", "false"),
    ("limits.own_diagonals ? keys - queries : 0", "0"),
    ("batch * bias.batch_stride", "0"),
    ("head * bias.head_stride", "0"),
    ("from[-kStep * sm90::kRowStep]", "from[0]"),
    ("from[kStep * (1 - sm90::kRowStep)]", "from[kStep]"),
    ("from[kStep * (8 * i + j)]", "from[kStep * 8 * i]"),
):
    _changes(right, wrong, only=SCORES)
_scores = _Source("backward/main/bwd_scores.cuh")
for right, wrong in (
    ("work.kv_head * args.heads_per_kv + head", "work.kv_head * args.heads_per_kv"),
    ("work.first_key + state.first_own_key() + here.upper_row()", "state.first_own_key()"),
    ("row_block * Traits::kRows + state.first_score_row() + here.first_column()",
     "state.first_score_row() + here.first_column()"),
    ("fmaf(bias, -kLog2e, score)", "score"),
    ("from[half * sm90::kRowStep - 8 * i - j]", "from[-8 * i - j]"),
):  # fmt: skip
    _scores(right, wrong, only=SCORES)
_scores("bias += bias_at(state, i, half, j);", "", only=SCORES[1:])
_score_bias = _Source("backward/main/bias.cuh")
for right, wrong in (
    ("fmaf(bias, kLog2e, score)", "score + bias"),
    ("here.first_column() + 8 * i + j", "here.first_column() + 8 * i"),
    ("own_bias(state, 0) + sm90::swizzled_offset(row, key / kPieceHalves)", "own_bias(state, 0)"),
):
    _score_bias(right, wrong, only=SCORES[1:])
_score_steps = _Source("backward/main/steps.cuh")
_score_steps("static_cast<int>(state.stage.passed) / (plan.visited.end - plan.visited.begin)", "0",
             only=SCORES[:1])  # fmt: skip


def score_mutations_of(instance: str) -> list[Mutation]:
    sources = (_changes, _scores, _score_bias, _score_steps)
    return [m for source in sources for m, only in source.found if instance in only]


_distance_tiles = _Source("backward/distance/distance_tiles.cuh")
for right, wrong in (
    ("kFirstBand + band", "band"),
    ("args.own_diagonals ? sequence.keys - sequence.queries : 0", "0"),
    ("row = tiles * kRows;", ""),
    ("slot.empty.init(Traits::kGroups);", "slot.empty.init(1);"),
):
    _distance_tiles(right, wrong, only=DISTANCE)
_distance_tiles("gradient.batches == 1", "true", only=DISTANCE[:1])
_distance_tiles("smaller(row + kRows, sequence.queries)", "row + 1", only=DISTANCE[:1])
_distance_consumer = _Source("backward/distance/distance_consumer.cuh")
for right, wrong in (
    ("last_shift != kNone && last_shift != shift", "false"),
    ("smaller(kRows, kKeys - distance)", "kRows"),
    ("larger(0, -distance)", "0"),
    ("args.delta[rows + existing]", "0.0f"),
    ("contains(allowed, key)", "true"),
    ("is_allowed ? p * (kept - delta) : 0.0f", "p * (kept - delta)"),
):
    _distance_consumer(right, wrong, only=DISTANCE)
for right, wrong in (
    ("added != kMinusInfinity", "true"),
    ("fmaf(added, kLog2e, score)", "score"),
    ("unless_lowest(static_cast<const __nv_bfloat16*>(mask.data)[at])", "0.0f"),
    ("rows / 2 + dropout::lattice_unit(row)", "dropout::lattice_unit(row)"),
    ("Products::draw_words(row_key, tile_key, words);", "Products::draw_words(row_key, 0, words);"),
):
    _distance_consumer(right, wrong, only=DISTANCE[1:])
_distance = _Source("backward/distance/distance.cuh")
for right, wrong in (
    ("row += sequence.query_origin;", ""),
    ("key += sequence.key_origin;", ""),
    ("work.head / args.heads_per_kv", "0"),
):
    _distance(right, wrong, only=DISTANCE[:1])
for right, wrong in (
    ("row >= gradient.rows", "false"),
    ("band < bands.end", "band + 1 < bands.end"),
    ("row * gradient.bands + band - kFirstBand", "row * gradient.bands + band"),
    ("entry - band * kDmaskKeys + kBandOrigin", "entry - band * kDmaskKeys + kBandOrigin - 1"),
):
    _distance(right, wrong, only=DISTANCE)


def distance_mutations_of(instance: str) -> list[Mutation]:
    sources = (_tile_products, _distance_tiles, _distance_consumer, _distance)
    return [m for source in sources for m, only in source.found if instance in only]
