// The products of a feed-forward network as steps that a team of workers shares: how each is
// divided into tasks, where its right operand is packed, and what it depends on. For any kind of
// threads: `parallel(workers, body)` calls body(worker) for each of [0, workers), in parallel or
// not, and returns when all have returned.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/threads.h"
#include "ffn/ffn.h"

namespace fastattn::ffn {

// Multiply-adds below which another thread costs more than it saves (docs/pages/kernels/cpu.md),
// and elements that a task packs, drops or sums.
constexpr int64_t kGrain = 3 << 17;
constexpr int64_t kPackGrain = 1 << 15;
// Fewer rows take nearly as long as these: reading the weight takes the time.
constexpr int64_t kMinRows = 4;
// Tasks for each worker, where the shape allows them.
constexpr int64_t kTasksPerWorker = 4;
constexpr int64_t kMinPanels = 2;

// The cost of a product, in multiply-adds.
inline int64_t product_work(int64_t rows, int64_t depth, int64_t columns) {
  return std::max(rows, kMinRows) * depth * columns;
}

// Number of workers for `work` multiply-adds.
inline int64_t workers_for(int64_t work, int64_t threads) {
  return std::clamp<int64_t>(work / kGrain, 1, threads);
}

// Memory for the panels of one product at a time. An op alternates between two: one product's
// panels are packed while another's are read.
struct Panels {
  float* data;
  int reader = -1;  // the step that reads them
};

class Team {
 public:
  // workspace: worker_floats for each worker. batch_invariant: a row's products have the same bits
  // among any number of rows. at_once: a single worker runs a step when it is added, and
  // interleaves none.
  Team(int64_t workers, float* workspace, int64_t worker_floats, bool batch_invariant,
       bool at_once = false)
      : workers_(workers),
        workspace_(workspace),
        worker_floats_(worker_floats),
        batch_invariant_(batch_invariant),
        at_once_(at_once && workers == 1) {}

  // Adds a product and the packing of its right operand; returns the former's step. left, right:
  // the steps that write its operands, -1 for none; by_blocks: the left one's groups are blocks of
  // rows; interleaved: with that step.
  int multiply(Product p, Panels& panels, int left, int right, bool by_blocks = false,
               bool interleaved = false) {
    // For a deep gradient of a weight, neither of whose operands is contiguous along the depth, the
    // smaller one is packed; other gradients are computed for contiguous stores.
    const bool across = p.a.column_stride != 1 && p.b.column_stride == 1;
    const bool by_size = across && !p.is_shallow();
    if (p.may_transpose && (by_size ? p.b.columns > p.a.rows : p.epilogue.out.column_stride != 1)) {
      const Matrix a = p.a;
      p.a = p.b.transposed();
      p.b = a.transposed();
      p.epilogue.out = p.epilogue.out.transposed();
      std::swap(left, right);
      by_blocks = false;
    }
    if (p.a.rows == 0 || p.b.columns == 0) {
      return -1;
    }
    const Kernels& isa = kernels();
    p.unpacked = p.can_be_unpacked() && are_unpacked(p.a.rows, p.type, batch_invariant_);
    const bool gated = p.gate > 0 && p.gate != p.b.columns;
    const int64_t count =
        gated ? ceil_div(p.gate, isa.panel / 2) : ceil_div(p.b.columns, isa.panel);
    Dependencies needs;
    (by_blocks ? needs.same_group : needs.step) = left;
    if (p.shares_panels()) {
      p.packed = panels.data;
      needs.other_step =
          for_chunks(count, std::max<int64_t>(p.b.rows, 1) * isa.panel, {right, panels.reader},
                     [&isa, p](int64_t first, int64_t last) { isa.pack(p, first, last); });
    } else {
      p.packed = nullptr;
      needs.other_step = right;
    }

    const int64_t row_blocks = p.row_blocks();
    int64_t most = kBlockPanels;
    while (most > kMinPanels && workers_ > 1 &&
           row_blocks * ceil_div(count, most) < kTasksPerWorker * workers_) {
      most /= 2;
    }
    const int64_t column_blocks = ceil_div(count, most);
    const int step = add(row_blocks * column_blocks, column_blocks, needs,
                         [&isa, p, column_blocks, most, count](int64_t task, float* workspace) {
                           const int64_t first = task % column_blocks * most;
                           isa.multiply(p, task / column_blocks, first,
                                        std::min(first + most, count), workspace);
                         });
    panels.reader = step;
    if (by_blocks && left >= 0 && interleaved) {
      steps_.interleave(left, workers_ == 1 ? 0 : ceil_div(workers_, column_blocks));
    }
    return step;
  }

  // Adds run(first, last) for chunks of [0, count); each item has `numbers` elements.
  template <class Run>
  int for_chunks(int64_t count, int64_t numbers, const Dependencies& needs, Run run) {
    const int64_t each = std::max<int64_t>(1, kPackGrain / std::max<int64_t>(numbers, 1));
    return add(ceil_div(count, each), 1, needs, [run, each, count](int64_t task, float*) {
      run(task * each, std::min(count, (task + 1) * each));
    });
  }

  // Applies dropout to an output's gradient and sums its columns by blocks of rows, which are the
  // step's groups.
  int drop_output(const Output& output) {
    const Kernels& isa = kernels();
    return add(ceil_div(output.rows, kBlockRows), 1, {},
               [&isa, output](int64_t block, float*) { isa.drop_output(output, block); });
  }

  // Adds up the sums of blocks that the step `needed` writes: result [columns].
  void reduce(const float* partials, int64_t blocks, void* result, int64_t columns, DType type,
              int needed) {
    const Kernels& isa = kernels();
    for_chunks(columns, blocks, {needed},
               [&isa, partials, blocks, columns, result, type](int64_t first, int64_t last) {
                 isa.reduce(partials, blocks, columns, result, type, first, last);
               });
  }

  // Runs all steps that have not run.
  template <class Parallel>
  void run(const Parallel& parallel) {
    if (at_once_) {
      return;
    }
    steps_.assign_shares(workers_);
    parallel(workers_,
             [&](int64_t worker) { steps_.work(worker, workspace_ + worker * worker_floats_); });
  }

 private:
  // Adds a step, see Steps; -1 if it has run.
  template <class Run>
  int add(int64_t tasks, int64_t group, const Dependencies& needs, const Run& run) {
    if (!at_once_) {
      return steps_.add(tasks, group, needs, run);
    }
    for (int64_t task = 0; task < tasks; ++task) {
      run(task, workspace_);
    }
    return -1;
  }

  int64_t workers_;
  float* workspace_;
  int64_t worker_floats_;
  bool batch_invariant_, at_once_;
  Steps steps_;
};

}  // namespace fastattn::ffn
