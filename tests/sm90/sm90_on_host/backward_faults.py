"""Faults of the Hopper attention backward, for test_sm90_bwd_faults.py: mutations of its source, of
the launches that compute an additive mask's gradient, of score modifications and of the gradient of
a bias by distance; harmless faults.

A list of mutations names a file of csrc/attention/sm90, then has a line `right => wrong` for each
expression or statement, which may continue in indented lines. INSTANCES: before it restricts it to
these instances.
"""

import re
from collections.abc import Mapping
from functools import partial

from sm90_on_host.build import Mutation
from sm90_on_host.fault_injector import Harmless

Instances = tuple[str, ...]
# Head dim and variant. Together they have every role, and every division of a step.
BOUNDED = ("64 kBounded", "128 kBounded", "256 kBounded")
DROPOUT, DENSE, BIAS = ("128 kDropout",), ("128 kMask",), ("128 kBias", "256 kBias")
INSTANCES = BOUNDED + DROPOUT + DENSE + BIAS
ONE_DOUT = BOUNDED[2:]  # two buffers of Q and one of dO, dQ in two pieces; 128 has two of all
MUTATED = BOUNDED[1:]  # 64 has the source of 128, and faults of the machine of its own
# Instances of the mask's gradient: two blocks in shared memory, or one.
DMASK = ("64 kBias", "192 kBiasDropout")
SCORES = ("64 kScores", "256 kScoresDense")
DISTANCE = ("64 kScores", "192 kScoresDense")  # two blocks in shared memory, or one

_MAIN = r"""
backward/main/prepare_finish.cuh
contains(live, row) ? args.lse[at] : kMinusInfinity => args.lse[at]
lse != kMinusInfinity && column < args.value_dim => column < args.value_dim
lanes > 0 => lanes > 1
dead ? -kMinusInfinity : kNatural ? lse : lse * kLog2e => kNatural ? lse : lse * kLog2e
dead || !args.dlse ? sum : sum - args.dlse[at] => sum - args.dlse[at]
D128: lse == kMinusInfinity ? 0.0f : -ptx::ex2((sink - lse) * kLog2e) * delta
    => -ptx::ex2((sink - lse) * kLog2e) * delta
D128: exists ? sink_term(sink, args.lse[at], args.dlse ? sum - args.dlse[at] : sum) : 0.0f
    => exists ? sink_term(sink, lse, args.dlse ? sum - args.dlse[at] : sum) : 0.0f
D128: (batch * gridDim.x + blockIdx.x) * args.rows => batch * gridDim.x * args.rows
D128: sums[threadIdx.x] += sums[threadIdx.x + threads];
    => if (threads > 1) { sums[threadIdx.x] += sums[threadIdx.x + threads]; }
threadIdx.x < Traits::kGroups => threadIdx.x < 1
*args.counter = 0; => *args.counter = 1;
DROPOUT: dropout::units(first_row) + i => i
is_added_to<Traits>(args, block) => true
values[i] * args.scale => values[i]
smaller(sequence.query_rows - first_row, Traits::kRows) => Traits::kRows
column < args.head_dim => true
has_sum ? *from : Piece<Element>{} => *from
backward/bwd_tiles.cuh
rest ? 0 : queries => queries
rest ? 0 : keys => keys
block - sequence.first_row_block => block
work.sequence.first_row_block + step.row_block => step.row_block
D128: args.order.row_tiles - 1 - place.row_tile => place.row_tile
packing.query_offsets ? kNoEnd : args.queries => args.queries
DENSE: first_step<Traits>(args, work).head < args.heads_per_kv ? 1 : 0 => 1
common.cuh
clamped_length(limits.query_lengths, batch, all) => all
clamped_length(limits.key_lengths, batch, all) => all
bounds.diagonal = keys - queries; =>
backward/mask_classes_bwd_sm90.cuh
DENSE: block.flags & kHasWork ? 1 : 0 => 1
backward/main/bwd_storage.cuh
shared.q_slots[stage].empty.init(Traits::kGroups); => shared.q_slots[stage].empty.init(1);
slot.full.init(kWarpsPerGroup); => slot.full.init(1);
D256: shared.dout_empty.init(Traits::kGroups); => shared.dout_empty.init(1);
backward/main/bwd_producer.cuh
sequence.key_origin + work.first_key => work.first_key
sequence.query_origin + step.row_block * Traits::kRows => step.row_block * Traits::kRows
DENSE: next.head == args.heads_per_kv => false
DROPOUT: shared.dropout.rows[stage.index()] => shared.dropout.rows[0]
DROPOUT: args.row_keys + row_offset / Traits::kRows * dropout::units(Traits::kRows) => args.row_keys
shared.q[stage.index()] => shared.q[0]
shared.lse2[stage.index()] => shared.lse2[0]
D128: shared.dout[dout_stage.index()] => shared.dout[0]
D128: shared.delta[dout_stage.index()] => shared.delta[0]
args.lse2 + row_offset => args.lse2
args.delta + row_offset => args.delta
stage.advance(); =>
backward/main/dense_loads.cuh
DENSE: now.flags => kHasWork
BIAS: one_row ? 0 : metadata.step.row_block * Traits::kRows => 0
backward/main/dq.cuh
D256: position.advance(); => if (piece == 0) { position.advance(); }
work.first_key / Traits::kKeys - added.begin => work.first_key / Traits::kKeys
DENSE: classes_of<Traits>(args, work, step.head)[step.row_block].rank
    => work.first_key / Traits::kKeys
args.dq_semaphores + chunk => args.dq_semaphores + chunk / Traits::kGroups
args.dq_sum + chunk * Traits::kChunkFloats => args.dq_sum
ptx::load_acquire(semaphore) < (args.in_order ? rank : smaller(rank, 1))
    => ptx::load_acquire(semaphore) < (args.in_order ? rank : 0)
ptx::fence_proxy_async_global(); => ptx::fence_proxy_async();
D256: to + piece * Traits::kPieceFloats => to
(rank == 0) => true
args.in_order || rank == 0 => rank == 0
rank + 1 => rank + 2
backward/main/bwd_consumer.cuh
clear(rDk); =>
DROPOUT: hash_keys(state); =>
steps.clear_keys(); =>
steps.open(); =>
steps.mask(rP, rDs); =>
D128: store_scores(shared.ds[state.dout_slot()], rDs);\n      issue_gradient(rDv, rP,
    dout_columns, state.dout_slot()); => store_scores(shared.ds[0], rDs); issue_gradient(rDv, rP,
    dout_columns, state.dout_slot());
D128: sm90::descriptor_at(ds_dq, slot * Traits::ScoreTile::kBytes) => ds_dq
D256: issue_product(rS, k_rows, q_rows, state.slot());
    => issue_product(rS, k_rows, q_rows, state.dout_slot());
D256: issue_gradient(rDk, shared.ds[state.dout_slot()], q_columns, state.slot());
    => issue_gradient(rDk, shared.ds[state.dout_slot()], q_columns, state.dout_slot());
D256: if constexpr (Traits::kStages > 1) {\n        state.sync_consumers();
    => state.sync_group();
D256: ptx::wgmma_wait_group<Part::kDqParts>();\n      ptx::pin(rDv);\n      state.release_dout();
    => state.release_dout(); ptx::wgmma_wait_group<Part::kDqParts>(); ptx::pin(rDv);
ptx::fence_proxy_async();\n    state.sync_consumers();
    => ptx::fence_proxy_async(); state.sync_group();
BIAS: steps.before_stores(); =>
sm90::scale_rows(rDk, factors); =>
DENSE: state.release_rows();
    => const auto before = state.stage; state.release_rows(); const auto after = state.stage;
    state.stage = before; steps.close(); state.stage = after;
backward/main/steps.cuh
row_block > plan.visited.begin ? row_block - 1 : plan.visited.end - 1 => row_block
!contains(plan.full, row_block) => false
backward/main/gradients.cuh
D256: state.stage.passed * Traits::kDqPieces + kPiece => state.stage.passed * Traits::kDqPieces
D256: kPiece * kFours + i => i
!view.data => false
sequence.key_rows - key => Traits::kKeys
columns - column => BackwardPart<Traits>::kOwnColumns
backward/main/weights.cuh
state.shared.lse2[state.slot()] => state.shared.lse2[0]
D128: state.shared.delta[state.dout_slot()] => state.shared.delta[0]
D128: pairs[i] = *reinterpret_cast<const float2*>(lse2 + 8 * i);
    => pairs[i] = *reinterpret_cast<const float2*>(lse2);
DROPOUT: state.shared.dropout.rows[state.slot()] => state.shared.dropout.rows[0]
backward/main/bwd_masks.cuh
contains(state.work().plan.clean, row_block) => true
state.args.packing.key_offsets => nullptr
backward/main/bwd_dense.cuh
DENSE: metadata.flags & kHasDead => false
DENSE: tile->clear_unmarked_rows(live, threadIdx.x % kWarpgroup, kWarpgroup); =>
backward/main/bias.cuh
BIAS_128: state.shared.bias.scores_read.arrive();
    => if (state.group == 0) { for (int i = 0; i < 2; ++i) { state.shared.bias.scores_read.arrive();
    } }
BIAS_256: state.sync_consumers(); => state.sync_group();
backward/main/bwd_part.cuh
Traits::kGroups * kWarpgroup => kWarpgroup
if (leader) {\n      shared.q_slots[slot()].empty.arrive();\n    }
    => shared.q_slots[slot()].empty.arrive();
D256: Traits::kDoutStages < Traits::kStages && leader => true
"""
_TILE_PRODUCTS = r"""
backward/dmask/tile_products.cuh
threadIdx.x % kWarpgroup == 0 => true
group * kMmaRows * sm90::kRowBytes => 0
DROPS: dropout::lattice_unit(tile_key) + thread.first_column() => thread.first_column()
DROPS: word << (24 - 8 * byte) => word << 24
"""
_DMASK = r"""
backward/dmask/dmask_tiles.cuh
sizes[0] == 1 ? args.batch : 1 => 1
sizes[1] == 1 ? args.heads : 1 => 1
sizes[2] == 1 ? row_tiles : 1 => 1
sizes[3] == 1 ? key_tiles : 1 => 1
loop.row_tile = tile % own_rows; => loop.row_tile = 0;
loop.key_tile = tile % own_keys; => loop.key_tile = 0;
loop.head = tile % sizes[1]; => loop.head = 0;
loop.head + number % loop.heads => loop.head
static_cast<int>(all * split / args.dmask.splits) => 0
static_cast<int>(all * (split + 1) / args.dmask.splits) => static_cast<int>(all)
slot.empty.init(Traits::kGroups); => slot.empty.init(1);
shared.bias_slot.empty.init(Traits::kGroups * kWarpsPerGroup); => shared.bias_slot.empty.init(1);
backward/dmask/dmask_producer.cuh
one_row ? 0 : item.row => 0
layout.heads > 1 ? item.head : 0 => 0
layout.batches > 1 ? item.batch : 0 => 0
item.key * halves + half * sm90::kChunkColumns => item.key * halves
item.head / args.heads_per_kv => 0
backward/dmask/dmask_consumer.cuh
smaller(item.row + line, args.queries - 1) => item.row + line
smaller(item.key + key, args.keys - 1) => item.key + key
args.bias_by_tma && has_one_row(args.mask) => false
row < queries ? keys_of_row(row, bounds, keys) : Range{0, 0} => keys_of_row(row, bounds, keys)
contains(allowed[half], key) => true
!(added <= kLowest<MaskElement>) => true
args.delta[head + existing] => 0.0f
first[half] ^ place % sm90::kRowBytes => first[half]
is_allowed ? p * (kept - delta[half]) : 0.0f => p * (kept - delta[half])
DROPS: head * (args.lse_delta_rows / 2) + dropout::lattice_unit(row) => dropout::lattice_unit(row)
DROPS: Products::draw_words(row_key, item.key, words); => Products::draw_words(row_key, 0, words);
DROPS: words[octet / 2 * 2 + j] => words[j]
backward/dmask/dmask_sum.cuh
sums_rows ? Traits::kRows : row + 1 => row + 1
sums_keys ? kKeys : key + 1 => key + 1
smaller(dmask.sizes[2] - loop.row_tile * Traits::kRows, Traits::kRows) => Traits::kRows
smaller(dmask.sizes[3] - loop.key_tile * kKeys, kKeys) => kKeys
sum -= args.dlse[head * args.queries + at.row]; =>
int64_t{split} * sizes[0] + at.batch => at.batch
dmask.partial[split * count + number] => dmask.partial[number]
backward/dmask/dmask_launch.cuh
exact.delta = nullptr; =>
exact.dlse = p.dlse; =>
p.dmask.type == MaskType::kFloat32 || sizes[3] == 1 => false
"""
_SCORES = r"""
masks/score_modifications.cuh
fabsf(x) < kNear ? near : far => near
fmaf(-ratio, ratio, 1.0f) => 1.0f
modifications.cap_log2 > 0.0f => false
limits.own_diagonals ? keys - queries : 0 => 0
batch * bias.batch_stride => 0
head * bias.head_stride => 0
from[-kStep * sm90::kRowStep] => from[0]
from[kStep * (1 - sm90::kRowStep)] => from[kStep]
from[kStep * (8 * i + j)] => from[kStep * 8 * i]
backward/main/bwd_scores.cuh
work.kv_head * args.heads_per_kv + head => work.kv_head * args.heads_per_kv
work.first_key + state.first_own_key() + here.upper_row() => state.first_own_key()
row_block * Traits::kRows + state.first_score_row() + here.first_column()
    => state.first_score_row() + here.first_column()
fmaf(bias, -kLog2e, score) => score
from[half * sm90::kRowStep - 8 * i - j] => from[-8 * i - j]
DENSE: bias += bias_at(state, i, half, j); =>
backward/main/bias.cuh
DENSE: fmaf(bias, kLog2e, score) => score + bias
DENSE: here.first_column() + 8 * i + j => here.first_column() + 8 * i
DENSE: own_bias(state, 0) + sm90::swizzled_offset(row, key / kPieceHalves) => own_bias(state, 0)
backward/main/steps.cuh
ONE: state.passed() / (plan.visited.end - plan.visited.begin) => 0
"""
_DISTANCE = r"""
backward/distance/distance_tiles.cuh
kFirstBand + band => band
args.own_diagonals ? sequence.keys - sequence.queries : 0 => 0
row = tiles * kRows; =>
slot.empty.init(Traits::kGroups); => slot.empty.init(1);
ONE: gradient.batches == 1 => true
ONE: smaller(row + kRows, sequence.queries) => row + 1
backward/distance/distance_consumer.cuh
last_shift != kNone && last_shift != shift => false
smaller(kRows, kKeys - distance) => kRows
larger(0, -distance) => 0
args.delta[rows + existing] => 0.0f
contains(allowed, key) => true
is_allowed ? p * (kept - delta) : 0.0f => p * (kept - delta)
DENSE: added != kMinusInfinity => true
DENSE: fmaf(added, kLog2e, score) => score
DENSE: unless_lowest(static_cast<const __nv_bfloat16*>(mask.data)[at]) => 0.0f
DENSE: rows / 2 + dropout::lattice_unit(row) => dropout::lattice_unit(row)
DENSE: Products::draw_words(row_key, tile_key, words); => Products::draw_words(row_key, 0, words);
backward/distance/distance.cuh
ONE: row += sequence.query_origin; =>
ONE: key += sequence.key_origin; =>
ONE: work.head / args.heads_per_kv => 0
row >= gradient.rows => false
band < bands.end => band + 1 < bands.end
row * gradient.bands + band - kFirstBand => row * gradient.bands + band
entry - band * kDmaskKeys + kBandOrigin => entry - band * kDmaskKeys + kBandOrigin - 1
"""


def _mutations(
    text: str, default: Instances, named: Mapping[str, Instances], instance: str
) -> list[Mutation]:
    found, file = [], ""
    for entry in re.sub(r"\n    (?=\S)", " ", text).split("\n"):
        mutation = re.fullmatch(r"(?:([A-Z_0-9]+): )?(.+) =>(?: (.+))?", entry)
        if mutation is None:
            file = entry
        elif instance in (named[mutation[1]] if mutation[1] else default):
            right = mutation[2].replace(r"\n", "\n")
            found.append(Mutation(f"attention/sm90/{file}", right, mutation[3] or ""))
    return found


mutations_of = partial(
    _mutations, _MAIN, MUTATED,
    dict(DROPOUT=DROPOUT, DENSE=DENSE, BIAS=BIAS, BIAS_128=BIAS[:1], BIAS_256=BIAS[1:],
         D128=BOUNDED[1:2], D256=ONE_DOUT),
)  # fmt: skip
dmask_mutations_of = partial(_mutations, _TILE_PRODUCTS + _DMASK, DMASK, {"DROPS": DMASK[1:]})
score_mutations_of = partial(_mutations, _SCORES, SCORES, {"ONE": SCORES[:1], "DENSE": SCORES[1:]})
distance_mutations_of = partial(
    _mutations, _TILE_PRODUCTS + _DISTANCE, DISTANCE,
    {"ONE": DISTANCE[:1], "DENSE": DISTANCE[1:], "DROPS": DISTANCE[1:]},
)  # fmt: skip

# -- what does no harm -----------------------------------------------------------------------------
# All of these stay in the kernels: they are harmless on this simulator, or because of the code
# around them. The reasons given for fences and pins hold for one order of instructions; PTX and the
# compiler require them in any case. Whether they are detected depends on g++'s register allocation.
_DP = "issue_product(rDp, v_rows, dout_rows, state.dout_slot());"
BY_LAYOUT = (
    Harmless("no wgmma fence", _DP, "nothing has touched the accumulator since the last fence"),
    Harmless("no wgmma fence", "(rDq, state.dout_slot());", "as before"),
    Harmless("no pin", _DP, "ordinary code only reads it, and the product overwrites it"),
    Harmless("no pin", "(rDq, state.dout_slot());", "as before"),
    Harmless("no pin", "issue_product(s, tiles.q, tiles.k);", "as before"),
    Harmless("no pin", "issue_product(dp, tiles.dout, tiles.v);", "as before"),
    Harmless("no pin", "ptx::pin(rP);", "the operand's next values come from pinned scores"),
    Harmless("no pin", "ptx::pin(rDs);", "as before"),
    Harmless("no pin", "ptx::pin(lane);", "no product has it: it saves registers"),
)
HARMLESS = (
    Harmless("no mbarrier wait", "shared.passed.wait(", "it never blocks, it orders exponentials"),
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
DMASK_HARMLESS = (
    Harmless("no wgmma commit", "issue_product(s, tiles.q, tiles.k);", "the next one covers it"),
)


def harmless_of(instance: str) -> tuple[Harmless, ...]:
    bounded = BOUNDED_HARMLESS if instance in MUTATED else ()
    return (*HARMLESS, *bounded, *(() if instance in ONE_DOUT else SAME_STAGES_HARMLESS))
