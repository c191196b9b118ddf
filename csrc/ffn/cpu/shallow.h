// Products of a small depth, whose sums go from registers into rows of the result: storing them
// takes longer than the products do. The bits are those of multiply_block and finish_block.
#pragma once

#include "ffn/cpu/gemm.h"

namespace fastattn::ffn::FASTATTN_ISA {

// Half the rows of a micro-kernel times two panels: the fewer rows are written side by side, the
// better. (Depth 1 in bf16, two Zen 4 threads: 512 rows of 2048 take 135 us in 12 rows times a
// panel and 97 us in 6 times two. With the panels as the outer loop 8000 rows of 256 take 2.5
// times as long.)
constexpr int kShallowRows = kRows / 2;
constexpr int kShallowPanels = 2;

// out[row][pitch], of which there are `columns`, = rows of the left operand times kPanels panels.
template <class T, int kR, int kPanels>
void shallow_kernel(const typename UnitsOf<T>::Unit* a, const typename UnitsOf<T>::Unit* b,
                    int64_t depth, T* out, int64_t pitch, int columns) {
  using C = UnitsOf<T>;
  constexpr int kVectors = 2 * kPanels;
  Float c[kR][kVectors];
#pragma GCC unroll 6
  for (int i = 0; i < kR; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      c[i][v] = Float{};
    }
  }
  const int64_t next_panel = depth * kPanel;
  for (int64_t d = 0; d < depth; ++d, a += kAcrossPitch, b += kPanel) {
#pragma GCC unroll 6
    for (int i = 0; i < kR; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        c[i][v] = C::product(a + i, b + v / 2 * next_panel + v % 2 * kLanes, c[i][v]);
      }
    }
  }
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

template <class T>
using ShallowKernel = void (*)(const typename UnitsOf<T>::Unit*, const typename UnitsOf<T>::Unit*,
                               int64_t, T*, int64_t, int);

template <class T, int kPanels, int... kR>
ShallowKernel<T> shallow_kernel_of(int rows, std::integer_sequence<int, kR...>) {
  static constexpr ShallowKernel<T> table[] = {shallow_kernel<T, kR + 1, kPanels>...};
  return table[rows - 1];
}

// As multiply_block and finish_block, for a product that is shallow.
template <class T>
void shallow_block(const Product& p, int64_t first_row, int rows, int64_t first_panel,
                   int64_t last_panel, float* worker) {
  using Unit = typename UnitsOf<T>::Unit;
  constexpr auto kAnyRows = std::make_integer_sequence<int, kShallowRows>{};
  // A worker's own panels lie where its sums would.
  static_assert(kShallowDepth <= kBlockDepth && kShallowDepth <= kBlockRows);
  const int units = static_cast<int>(ceil_div(p.a.columns, UnitsOf<T>::kDepth));
  const int64_t panel_units = units * kPanel, pitch = p.finish.out.row_stride;
  const int step = strip_rows(rows, kShallowRows);
  Unit* left = reinterpret_cast<Unit*>(worker);
  pack_left<T>(p.a, first_row, rows, 0, units, left);
  Unit* own = reinterpret_cast<Unit*>(worker + kSumsAt);
  for (int64_t panel = first_panel; !p.packed && panel < last_panel; ++panel) {
    pack_panel<T>(p, panel, 0, units, own + (panel - first_panel) * panel_units);
  }
  const Unit* right =
      p.packed ? reinterpret_cast<const Unit*>(p.packed) + first_panel * panel_units : own;
  for (int r = 0; r < rows; r += step) {
    const int height = step < rows - r ? step : rows - r;
    const auto several = shallow_kernel_of<T, kShallowPanels>(height, kAnyRows);
    const auto one = shallow_kernel_of<T, 1>(height, kAnyRows);
    T* row = static_cast<T*>(p.finish.out.data) + (first_row + r) * pitch;
    for (int64_t panel = first_panel; panel < last_panel;) {
      const bool enough = panel + kShallowPanels <= last_panel;
      const int panels = enough ? kShallowPanels : 1;
      const int64_t column = panel * kPanel;
      (enough ? several : one)(left + r, right + (panel - first_panel) * panel_units, units,
                               row + column, pitch, clamped(p.b.columns - column, panels * kPanel));
      panel += panels;
    }
  }
}

}  // namespace fastattn::ffn::FASTATTN_ISA
