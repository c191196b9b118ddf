// The passes of attention on CPU in their order, and their split over workers, for any kind of
// threads: `parallel(workers, body)` calls body(worker) for each of [0, workers), in parallel or
// not, and returns when all have returned. Scratch memory is given; how much, `*_floats` says.
#pragma once

#include <algorithm>

#include "attention/cpu/problem.h"

namespace fastattn::attention {

// Multiply-adds below which another thread costs more than it brings; one query (decoding) is bound
// by memory.
constexpr double kGrain = 1 << 20;
constexpr double kDecodeGrain = 1 << 16;
// Pieces of work for a worker, where tasks differ in length.
constexpr int64_t kPiecesPerWorker = 8;
// Products of a pair's row and column, by which a pass is weighed.
constexpr double kForwardProducts = 1.0;
constexpr double kBackwardProducts = 3.0;

// Pairs of a query and a key in all sequences.
inline double pairs_of(const Problem& a) {
  if (!a.cu_seqlens_q) {
    return static_cast<double>(a.batch) * a.queries * a.keys;
  }
  double pairs = 0.0;
  for (int64_t b = 0; b < a.batch; ++b) {
    const Sequence s = a.sequence(b);
    pairs += static_cast<double>(s.queries) * s.keys;
  }
  return pairs;
}

// Workers worth starting for them.
inline int64_t workers_for(const Problem& a, double products, int64_t threads) {
  const double columns = static_cast<double>(a.heads) * (a.head_dim + a.value_dim);
  const double grains = pairs_of(a) * columns * products / (a.queries == 1 ? kDecodeGrain : kGrain);
  return std::clamp<int64_t>(static_cast<int64_t>(std::min(grains, 1e6)), 1, threads);
}

// Tasks that a worker draws at once: those of a (batch, kv head) where there are enough of them.
inline int64_t piece_of(const Problem& a, int64_t tasks_of_kv_head, int64_t workers) {
  const int64_t kv_heads = a.batch * a.kv_heads;
  if (workers == 1 || kv_heads >= 4 * workers) {
    return tasks_of_kv_head;
  }
  return kv_heads * tasks_of_kv_head / (kPiecesPerWorker * workers);
}

// Workers with a piece of scratch memory each.
template <class Parallel>
struct Team {
  int64_t workers;
  float* scratch;
  int64_t floats;
  const Parallel& parallel;

  template <class Arguments>
  void run(void (*kernel)(const Arguments&, Queue&, float*), const Arguments& a, int64_t tasks,
           int64_t piece) const {
    Queue queue(tasks, piece);
    parallel(std::clamp<int64_t>(tasks, 1, workers),
             [&](int64_t worker) { kernel(a, queue, scratch + worker * floats); });
  }
};

// As many workers as were counted on when the scratch memory was measured, or fewer.
template <class Parallel>
Team<Parallel> team_of(int64_t workers, float* scratch, int64_t available, int64_t floats,
                       const Parallel& parallel) {
  return {std::clamp<int64_t>(available / floats, 1, workers), scratch, floats, parallel};
}

// -- forward -------------------------------------------------------------------------------------
inline int64_t forward_floats(const Problem& problem, int64_t threads) {
  const Forward a = {problem, {}, nullptr, nullptr};
  return a.parts_floats() +
         workers_for(a, kForwardProducts, threads) * ForwardScratch(a, nullptr).floats;
}

template <class Parallel>
void launch_forward(const Kernels& kernels, Forward& a, float* scratch, int64_t available,
                    int64_t threads, const Parallel& parallel) {
  a.parts = scratch;
  const int64_t parts = a.parts_floats();
  const auto team = team_of(workers_for(a, kForwardProducts, threads), scratch + parts,
                            available - parts, ForwardScratch(a, nullptr).floats, parallel);
  const auto run = [&](auto kernel, int64_t tasks_of_kv_head) {
    team.run(kernel, a, a.batch * a.kv_heads * tasks_of_kv_head,
             piece_of(a, tasks_of_kv_head, team.workers));
  };
  if (a.queries != 1) {
    return run(kernels.forward, a.group() * a.row_tiles());
  }
  run(kernels.forward, a.splits());
  if (a.splits() > 1) {
    run(kernels.join_splits, 1);
  }
}

// -- backward ------------------------------------------------------------------------------------
// statistics: rows of lse in all heads.
inline int64_t backward_floats(const Problem& a, int64_t statistics, int64_t threads) {
  return padded(statistics) +
         workers_for(a, kBackwardProducts, threads) * BackwardScratch(a, nullptr).floats;
}

template <class Parallel>
void launch_backward(const Kernels& kernels, Backward& a, int64_t statistics, float* scratch,
                     int64_t available, int64_t threads, const Parallel& parallel) {
  a.delta = scratch;
  const int64_t delta = padded(statistics);
  const auto team = team_of(workers_for(a, kBackwardProducts, threads), scratch + delta,
                            available - delta, BackwardScratch(a, nullptr).floats, parallel);
  const int64_t kv_heads = a.batch * a.kv_heads;
  const auto run = [&](auto kernel, int64_t tasks_of_kv_head) {
    team.run(kernel, a, kv_heads * tasks_of_kv_head, piece_of(a, tasks_of_kv_head, team.workers));
  };
  run(kernels.delta, a.group() * a.row_tiles());
  if (a.dmask.type != MaskType::kNone) {
    const int64_t row_tasks = a.dmask.sizes[2] == 1 ? 1 : a.row_tiles();
    const int64_t key_tasks = a.dmask.sizes[3] == 1 ? 1 : a.key_tiles();
    team.run(kernels.dmask, a, a.dmask.sizes[0] * a.dmask.sizes[1] * row_tasks * key_tasks, 1);
  }
  const bool wants_queries = a.dq.data, wants_keys = a.dk.data || a.dv.data;
  // Five products a tile in one pass, seven in two. One pass has fewer tasks, and the last round of
  // them may leave workers idle.
  const int64_t rounds = ceil_div(kv_heads, team.workers);
  if (wants_queries && wants_keys && 5 * rounds * team.workers <= 7 * kv_heads) {
    return team.run(kernels.all_gradients, a, kv_heads, 1);
  }
  if (wants_queries) {
    run(kernels.dq, a.group() * a.row_tiles());
  }
  if (wants_keys) {
    run(kernels.dkv, a.key_tiles());
  }
}

}  // namespace fastattn::attention
