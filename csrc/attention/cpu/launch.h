// Runs the passes of attention on CPU, split over workers, for any kind of threads:
// `parallel(workers, body)` calls body(worker) for each of [0, workers), in parallel or not, and
// returns when all have returned. The caller allocates the workspace; `*_floats` return its size.
#pragma once

#include <algorithm>

#include "attention/cpu/problem.h"

namespace fastattn::attention::cpu {

// Multiply-adds below which another thread costs more than it saves; kDecodeGrain: with few
// queries, which are bound by memory and counted as one.
constexpr double kGrain = 1 << 20;
constexpr double kDecodeGrain = 1 << 16;
// Chunks of tasks per worker, because tasks differ in length.
constexpr int64_t kChunksPerWorker = 8;
// Cost of a pass per (query, key) pair, relative to the forward's.
constexpr double kForwardProducts = 1.0;
constexpr double kBackwardProducts = 3.0;

// Number of workers for a pass of this cost.
inline int64_t workers_for(const Problem& a, double products, int64_t threads) {
  const auto grains_of = [&](int queries, int keys) {
    return a.is_few(queries, keys) ? std::min(queries, 1) * (keys / kDecodeGrain)
                                   : queries * (keys / kGrain);
  };
  double grains = 0.0;  // of a column
  if (a.cu_seqlens_q) {
    for (int64_t b = 0; b < a.batch; ++b) {
      const Sequence s = a.sequence(b);
      grains += grains_of(s.queries, s.keys);
    }
  } else {
    grains = a.batch * grains_of(a.queries, a.keys);
  }
  grains *= a.heads * static_cast<double>(a.head_dim + a.value_dim) * products;
  return std::clamp<int64_t>(static_cast<int64_t>(std::min(grains, 1e6)), 1, threads);
}

// Tasks in a chunk: all those of a (batch, kv head) if there are enough of these.
inline int64_t chunk_of(const Problem& a, int64_t tasks_of_kv_head, int64_t workers) {
  const int64_t kv_heads = a.batch * a.kv_heads;
  if (workers == 1 || kv_heads >= 4 * workers) {
    return tasks_of_kv_head;
  }
  return kv_heads * tasks_of_kv_head / (kChunksPerWorker * workers);
}

// Workers with a section of the workspace each.
template <class Parallel>
struct Team {
  int64_t workers;
  float* workspace;
  int64_t floats;
  const Parallel& parallel;

  template <class Arguments>
  void run(void (*kernel)(const Arguments&, Queue&, float*), const Arguments& a, int64_t tasks,
           int64_t chunk) const {
    Queue queue(tasks, chunk);
    parallel(std::clamp<int64_t>(tasks, 1, workers),
             [&](int64_t worker) { kernel(a, queue, workspace + worker * floats); });
  }
};

// The number of workers that fit into the workspace, at most `workers`.
template <class Parallel>
Team<Parallel> team_of(int64_t workers, float* workspace, int64_t available, int64_t floats,
                       const Parallel& parallel) {
  return {std::clamp<int64_t>(available / floats, 1, workers), workspace, floats, parallel};
}

// -- forward -------------------------------------------------------------------------------------
// The weights need tiles, also for few queries.
inline int64_t forward_worker_floats(const Forward& a) {
  return ForwardWorkspace(a, nullptr, a.weights || !a.all_few()).floats;
}

inline int64_t forward_floats(const Forward& a, int64_t threads) {
  return a.partials_floats() + workers_for(a, kForwardProducts, threads) * forward_worker_floats(a);
}

template <class Parallel>
void launch_forward(const Kernels& kernels, Forward& a, float* workspace, int64_t available,
                    int64_t threads, const Parallel& parallel) {
  a.partials = workspace;
  const int64_t partials = a.partials_floats();
  const auto team = team_of(workers_for(a, kForwardProducts, threads), workspace + partials,
                            available - partials, forward_worker_floats(a), parallel);
  const auto run = [&](auto kernel, int64_t tasks_of_kv_head) {
    team.run(kernel, a, a.batch * a.kv_heads * tasks_of_kv_head,
             chunk_of(a, tasks_of_kv_head, team.workers));
  };
  const auto run_weights = [&](const Forward& call) {
    const int64_t tasks = call.batch * call.row_tiles();
    const int64_t chunk = tasks / (team.workers == 1 ? 1 : kChunksPerWorker * team.workers);
    team.run(kernels.weights, call, tasks, chunk);
  };
  if (!a.all_few()) {
    return a.weights ? run_weights(a) : run(kernels.forward, a.group() * a.row_tiles());
  }
  run(kernels.forward, a.splits());
  if (a.splits() > 1) {
    run(kernels.combine_splits, 1);
  }
  if (a.weights) {
    Forward without_out = a;
    without_out.lse = nullptr;
    without_out.v.data = nullptr;
    run_weights(without_out);
  }
}

// -- backward ------------------------------------------------------------------------------------
// delta, m and log_sum.
constexpr int64_t kRowFloats = 3;

// lse_rows: rows of lse in all heads.
inline int64_t backward_floats(const Backward& a, int64_t lse_rows, int64_t threads) {
  return kRowFloats * padded(lse_rows) + a.distance_sums_floats() +
         workers_for(a, kBackwardProducts, threads) * BackwardWorkspace(a, nullptr).floats;
}

template <class Parallel>
void launch_backward(const Kernels& kernels, Backward& a, int64_t lse_rows, float* workspace,
                     int64_t available, int64_t threads, const Parallel& parallel) {
  const int64_t rows = padded(lse_rows);
  a.delta = workspace;
  a.m = workspace + rows;
  a.log_sum = workspace + 2 * rows;
  a.distance_sums = workspace + kRowFloats * rows;
  const int64_t shared = kRowFloats * rows + a.distance_sums_floats();
  const auto team = team_of(workers_for(a, kBackwardProducts, threads), workspace + shared,
                            available - shared, BackwardWorkspace(a, nullptr).floats, parallel);
  const int64_t kv_heads = a.batch * a.kv_heads;
  const auto run = [&](auto kernel, int64_t tasks_of_kv_head) {
    team.run(kernel, a, kv_heads * tasks_of_kv_head, chunk_of(a, tasks_of_kv_head, team.workers));
  };
  run(kernels.delta, a.group() * a.row_tiles());
  if (a.dmask.type != MaskType::kNone) {
    const int64_t row_tasks = a.dmask.sizes[2] == 1 ? 1 : a.row_tiles();
    const int64_t key_tasks = a.dmask.sizes[3] == 1 ? 1 : a.key_tiles();
    team.run(kernels.dmask, a, a.dmask.sizes[0] * a.dmask.sizes[1] * row_tasks * key_tasks, 1);
  }
  if (a.dsinks) {
    team.run(kernels.dsinks, a, a.heads, 1);
  }
  const bool wants_queries = a.dq.data;
  const bool wants_keys = a.dk.data || a.dv.data || a.ddistance_bias.data;
  // One pass takes five products per tile, two take seven. One pass has fewer tasks, and their last
  // round may leave workers idle.
  const int64_t rounds = ceil_div(kv_heads, team.workers);
  if (wants_queries && wants_keys && 5 * rounds * team.workers <= 7 * kv_heads) {
    team.run(kernels.all_gradients, a, kv_heads, 1);
  } else {
    if (wants_queries) {
      run(kernels.dq, a.group() * a.row_tiles());
    }
    if (wants_keys) {
      run(kernels.dkv, a.key_tasks());
    }
  }
  if (a.ddistance_bias.data) {
    team.run(kernels.ddistance_bias, a, a.ddistance_bias.batch * a.heads, 1);
  }
}

}  // namespace fastattn::attention::cpu
