// The workspace of the feed-forward network on Hopper. Elements have 16 bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/workspace_layout.h"
#include "ffn/sm90/ffn_sm90.h"

namespace fastattn::ffn {

// hidden has W columns, the activation F.
struct Sizes {
  int rows, D, W, F, E;

  bool gated() const { return W != F; }
};

// relu without a gate saves its result: nothing else has to be kept or computed again.
inline bool saves_activation(Activation activation, const Sizes& s) {
  return activation == Activation::kRelu && !s.gated();
}

struct ForwardWorkspace {
  uint16_t* activated = nullptr;  // [rows, F], unless it is saved

  ForwardWorkspace(const Sizes& s, bool saved, WorkspaceLayout& layout) {
    if (!saved) {
      activated = layout.take<uint16_t>(int64_t{1} * s.rows * s.F);
    }
  }
};

// Steps of a backward.
struct BackwardPlan {
  bool drops;           // dy needs dropout, or another type
  bool differentiates;  // some gradient needs dpre, or `activated`
  bool activates;       // w2's gradient needs the activation, which is not saved
  bool sums_dy, sums_dpre;
  int parts_of_dw1 = 1, parts_of_dw2 = 1;
};

struct BackwardWorkspace {
  uint16_t* dropped = nullptr;    // [rows, E]
  uint16_t* dpre = nullptr;       // [rows, W]
  uint16_t* activated = nullptr;  // [rows, F]
  float* dy_sums = nullptr;       // [row_tiles(rows), E]
  float* dpre_sums = nullptr;     // [row_tiles(rows), W]
  float* parts = nullptr;         // of dw2, then of dw1: [parts, result]

  BackwardWorkspace(const Sizes& s, const BackwardPlan& plan, WorkspaceLayout& layout) {
    const auto take = [&](bool needed, auto*& section, int64_t count) {
      if (needed) {
        section = layout.take<std::remove_reference_t<decltype(*section)>>(count);
      }
    };
    take(plan.drops, dropped, int64_t{1} * s.rows * s.E);
    take(plan.differentiates, dpre, int64_t{1} * s.rows * s.W);
    take(plan.activates, activated, int64_t{1} * s.rows * s.F);
    take(plan.sums_dy, dy_sums, int64_t{1} * row_tiles(s.rows) * s.E);
    take(plan.sums_dpre, dpre_sums, int64_t{1} * row_tiles(s.rows) * s.W);
    const auto parts_size = [](int parts, int rows, int columns) {
      return parts > 1 ? int64_t{1} * parts * rows * columns : 0;
    };
    const int64_t of_dw1 = parts_size(plan.parts_of_dw1, s.W, s.D);
    const int64_t of_dw2 = parts_size(plan.parts_of_dw2, s.E, s.F);
    take(of_dw1 + of_dw2 > 0, parts, of_dw1 > of_dw2 ? of_dw1 : of_dw2);
  }
};

}  // namespace fastattn::ffn
