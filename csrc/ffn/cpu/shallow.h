// Products of a small depth, whose sums are stored from registers to rows of the result: storing
// takes longer than computing them. The bits are those of multiply_block and run_epilogue.
#pragma once

#include "ffn/cpu/panels.h"

namespace fastattn::ffn::FASTATTN_ISA {

// Half the rows of a micro-kernel times two panels: writing fewer rows at a time is faster
// (docs/pages/kernels/cpu.md).
constexpr int kShallowRows = kRows / 2;
constexpr int kShallowPanels = 2;

// out[row][pitch], of which there are `columns`, = rows of the left operand times kPanels panels.
template <class T, int kR, int kPanels>
__attribute__((noinline)) void shallow_kernel(const typename UnitsOf<T>::Unit* a,
                                              const typename UnitsOf<T>::Unit* b, int64_t depth,
                                              T* out, int64_t pitch, int columns) {
  using C = UnitsOf<T>;
  constexpr int kVectors = 2 * kPanels;
  constexpr std::integral_constant<int, 1> kRow;
  constexpr std::integral_constant<int, kAcrossPitch> kDepth;
  constexpr std::integral_constant<int, kPanel> kNextRow;
  Float c[kR][kVectors] = {};
  multiply_add<C>(c, a, kRow, kDepth, b, depth * kPanel, kNextRow, depth, [] {});
#pragma GCC unroll 6
  for (int i = 0; i < kR; ++i) {
    T* row = out + i * pitch;
    if (columns >= kPanels * kPanel) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v += 2) {
        C::store_sums(row + v * kLanes, c[i][v], c[i][v + 1]);
      }
      continue;
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      store(row + v * kLanes, c[i][v], clamped(columns - v * kLanes, kLanes));
    }
  }
}

// As multiply_block and run_epilogue, for a product that is shallow.
template <class T>
void shallow_block(const Product& p, int64_t first_row, int rows, int64_t first_panel,
                   int64_t last_panel, float* workspace) {
  using Unit = typename UnitsOf<T>::Unit;
  // A worker's own panels use the memory of the sums of kBlockRows.
  static_assert(kShallowDepth <= kBlockDepth && kShallowDepth <= kBlockRows);
  const int units = static_cast<int>(ceil_div(p.a.columns, UnitsOf<T>::kDepth));
  const int64_t panel_units = units * kPanel, pitch = p.epilogue.out.row_stride;
  const int step = strip_rows(rows, kShallowRows);
  Unit* left = reinterpret_cast<Unit*>(workspace + sum_floats(kBlockRows));
  pack_left<T>(p.a, first_row, rows, 0, units, left);
  Unit* own = reinterpret_cast<Unit*>(workspace);
  for (int64_t panel = first_panel; !p.packed && panel < last_panel; ++panel) {
    pack_panel<T>(p, panel, 0, units, own + (panel - first_panel) * panel_units);
  }
  const Unit* right =
      p.packed ? reinterpret_cast<const Unit*>(p.packed) + first_panel * panel_units : own;
  for (int r = 0; r < rows; r += step) {
    T* row = static_cast<T*>(p.epilogue.out.data) + (first_row + r) * pitch;
    with_count<kShallowRows>(step < rows - r ? step : rows - r, [&](auto height) {
      constexpr int kR = decltype(height)::value;
      for (int64_t panel = first_panel; panel < last_panel;) {
        const bool enough = panel + kShallowPanels <= last_panel;
        const int panels = enough ? kShallowPanels : 1;
        const auto kernel =
            enough ? shallow_kernel<T, kR, kShallowPanels> : shallow_kernel<T, kR, 1>;
        const int64_t column = panel * kPanel;
        kernel(left + r, right + (panel - first_panel) * panel_units, units, row + column, pitch,
               clamped(p.b.columns - column, panels * kPanel));
        panel += panels;
      }
    });
  }
}

}  // namespace fastattn::ffn::FASTATTN_ISA
