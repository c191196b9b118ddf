// The CPU kernels of the feed-forward network, compiled once for each instruction set: blocks of
// the products and their epilogues.
#include "cpu/row_dropout.h"
#include "ffn/cpu/activation.h"
#include "ffn/cpu/dot.h"
#include "ffn/cpu/panels.h"
#include "ffn/cpu/shallow.h"

namespace fastattn::ffn::FASTATTN_ISA {

// -- helpers --------------------------------------------------------------------------------------
// partials[c] (+)= v
template <class Lanes>
inline void add_to(Lanes lanes, float* partials, int64_t c, Float v, bool first) {
  if (partials) {
    lanes.store(partials + c, first ? v : lanes.load(partials + c) + v);
  }
}

// Calls body(lanes, column, offset of its sum) for the columns of panels without a gate.
template <class Body>
inline __attribute__((always_inline)) void for_columns(int64_t first_panel, int64_t last_panel,
                                                       int64_t columns, const Body& body) {
  const int64_t first = first_panel * kPanel;
  const int64_t last = last_panel * kPanel < columns ? last_panel * kPanel : columns;
  for_vectors(last - first, [&](auto lanes, int64_t i) { body(lanes, first + i, i); });
}

// The same for gated panels: a vector of the gate and one of what it multiplies.
template <class Body>
inline __attribute__((always_inline)) void for_gates(int64_t first_panel, int64_t last_panel,
                                                     int64_t gates, const Body& body) {
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    const int64_t column = panel * kLanes, offset = (panel - first_panel) * kPanel;
    if (column + kLanes <= gates) {
      body(Whole{}, column, offset);
    } else {
      body(Part{static_cast<int>(gates - column)}, column, offset);
    }
  }
}

// A block's place in the result, and its sums.
struct Block {
  int64_t first_row;
  int rows;
  int64_t first_panel, last_panel;
  const float* sums;
};

// -- epilogues ------------------------------------------------------------------------------------
template <class T, class O>
void store_block(const Product& p, const Block& block) {
  const Epilogue& epilogue = p.epilogue;
  const int64_t columns = p.b.columns;
  const int64_t first = block.first_panel * kPanel;
  const int64_t last = block.last_panel * kPanel < columns ? block.last_panel * kPanel : columns;
  const T* bias = static_cast<const T*>(epilogue.bias);
  const Dropout dropout = epilogue.dropout;
  RowDropout<kSumPitch> mask;
  for (int r = 0; r < block.rows; ++r) {
    const int64_t row = block.first_row + r;
    O* out = static_cast<O*>(epilogue.out.data) + row * epilogue.out.row_stride;
    const O* residual =
        epilogue.residual ? static_cast<const O*>(epilogue.residual) + row * columns : nullptr;
    const float* sums = block.sums + r * kSumPitch;
    if (dropout) {
      mask.draw(dropout, row, first, last - first);
    }
    for_vectors(last - first, [&](auto lanes, int64_t i) {
      const int64_t c = first + i;
      Float v = load(sums + i);
      if (bias) {
        v += lanes.load(bias + c);
      }
      if (dropout) {
        v = mask.apply(dropout, v, i);
      }
      if (residual) {
        v += lanes.load(residual + c);
      }
      lanes.store(out + c, v);
    });
  }
}

// Stores the sums alone, to a result with contiguous columns (row_stride 1).
template <class O>
void store_transposed_block(const Product& p, const Block& block) {
  const Matrix& out = p.epilogue.out;
  const int64_t first = block.first_panel * kPanel;
  const int64_t last =
      block.last_panel * kPanel < p.b.columns ? block.last_panel * kPanel : p.b.columns;
  float tile[kLanes * kLanes];
  for (int64_t c = first; c < last; c += kLanes) {
    const int columns = clamped(last - c, kLanes);
    for (int r = 0; r < block.rows; r += kLanes) {
      const int rows = clamped(block.rows - r, kLanes);
      Float v[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        v[i] = i < rows ? load(block.sums + (r + i) * kSumPitch + c - first) : Float{};
      }
      store_transposed(v, tile, kLanes);
      O* at = static_cast<O*>(out.data) + c * out.column_stride + block.first_row + r;
      for (int i = 0; i < columns; ++i, at += out.column_stride) {
        if (rows == kLanes) {
          store(at, load(tile + i * kLanes));
        } else {
          store(at, load(tile + i * kLanes), rows);
        }
      }
    }
  }
}

template <class T, Activation kActivation, bool kGated>
void activate_block(const Product& p, const Block& block) {
  constexpr bool kKeepsActivated = kActivation == Activation::kRelu && !kGated;
  const Epilogue& epilogue = p.epilogue;
  const int64_t wide = p.b.columns, F = kGated ? p.gate : wide;
  const T* bias = static_cast<const T*>(epilogue.bias);
  const Dropout dropout = epilogue.dropout;
  RowDropout<kSumPitch> mask;
  constexpr int kColumns = kGated ? kLanes : kPanel;  // activated columns of a panel
  const int64_t first = block.first_panel * kColumns;
  const int64_t last = block.last_panel * kColumns < F ? block.last_panel * kColumns : F;
  for (int r = 0; r < block.rows; ++r) {
    const int64_t row = block.first_row + r;
    T* hidden = static_cast<T*>(epilogue.hidden) + row * wide;
    T* activated = static_cast<T*>(epilogue.activated) + row * inner_pitch(F, p.type);
    const float* sums = block.sums + r * kSumPitch;
    if (dropout) {
      mask.draw(dropout, row, first, last - first);
    }
    const auto body = [&](auto lanes, int64_t c, int64_t offset) {
      Float v = load(sums + offset);
      if (bias) {
        v += lanes.load(bias + c);
      }
      if constexpr (!kKeepsActivated) {
        lanes.store(hidden + c, v);
        v = rounded<T>(v);
      }
      v = activate<kActivation>(v).f;
      if constexpr (kGated) {
        Float up = load(sums + offset + kLanes);
        if (bias) {
          up += lanes.load(bias + F + c);
        }
        lanes.store(hidden + F + c, up);
        v *= rounded<T>(up);
      }
      if (dropout) {
        v = mask.apply(dropout, v, c - first);
      }
      lanes.store((kKeepsActivated ? hidden : activated) + c, v);
    };
    if constexpr (kGated) {
      for_gates(block.first_panel, block.last_panel, F, body);
    } else {
      for_columns(block.first_panel, block.last_panel, F, body);
    }
  }
}

template <class T, Activation kActivation, bool kGated>
void differentiate_block(const Product& p, const Block& block) {
  constexpr bool kKeptActivated = kActivation == Activation::kRelu && !kGated;
  const Epilogue& epilogue = p.epilogue;
  const int64_t F = p.b.columns, wide = kGated ? 2 * F : F;
  float* partials =
      epilogue.partials ? epilogue.partials + block.first_row / kBlockRows * wide : nullptr;
  const Dropout dropout = epilogue.dropout;
  RowDropout<kSumPitch> mask;
  const int64_t first = block.first_panel * kPanel;
  const int64_t last = block.last_panel * kPanel < F ? block.last_panel * kPanel : F;
  for (int r = 0; r < block.rows; ++r) {
    const int64_t row = block.first_row + r;
    const T* hidden = static_cast<const T*>(epilogue.hidden) + row * wide;
    T* dhidden = static_cast<T*>(epilogue.dhidden) + row * inner_pitch(wide, p.type);
    T* activated = epilogue.activated
                       ? static_cast<T*>(epilogue.activated) + row * inner_pitch(F, p.type)
                       : nullptr;
    const float* sums = block.sums + r * kSumPitch;
    // With relu, dropped elements are 0 in hidden.
    if (!kKeptActivated && dropout) {
      mask.draw(dropout, row, first, last - first);
    }
    for_columns(block.first_panel, block.last_panel, F, [&](auto lanes, int64_t c, int64_t offset) {
      Float d = load(sums + offset);
      const Float pre = lanes.load(hidden + c);
      if constexpr (kKeptActivated) {
        d = pre > 0.0f ? d * dropout.scale : Float{};
        lanes.store(dhidden + c, d);
        add_to(lanes, partials, c, d, r == 0);
        return;
      }
      if (dropout) {
        d = mask.apply(dropout, d, offset);
      }
      const Value value = activate<kActivation>(pre);
      Float a = value.f;
      Float dpre = d * value.derivative;
      if constexpr (kGated) {
        const Float up = lanes.load(hidden + F + c);
        const Float dup = d * a;
        lanes.store(dhidden + F + c, dup);
        add_to(lanes, partials, F + c, dup, r == 0);
        a *= up;
        dpre = d * up * value.derivative;
      }
      lanes.store(dhidden + c, dpre);
      add_to(lanes, partials, c, dpre, r == 0);
      if (activated) {
        lanes.store(activated + c, dropout ? mask.apply(dropout, a, offset) : a);
      }
    });
  }
}

template <class Visit>
inline void with_activation(Activation activation, const Visit& visit) {
  switch (activation) {
    case Activation::kRelu:
      return visit(std::integral_constant<Activation, Activation::kRelu>{});
    case Activation::kGelu:
      return visit(std::integral_constant<Activation, Activation::kGelu>{});
    case Activation::kGeluTanh:
      return visit(std::integral_constant<Activation, Activation::kGeluTanh>{});
    case Activation::kSilu:
      return visit(std::integral_constant<Activation, Activation::kSilu>{});
  }
}

template <class T>
void run_epilogue(const Product& p, const Block& block) {
  const Epilogue& epilogue = p.epilogue;
  if (epilogue.kind == Epilogue::kStore) {
    return with_type(epilogue.out_type, [&](auto out) {
      const auto run = epilogue.out.column_stride == 1 ? store_block<T, decltype(out)>
                                                       : store_transposed_block<decltype(out)>;
      run(p, block);
    });
  }
  with_activation(epilogue.activation, [&](auto kind) {
    constexpr Activation kActivation = decltype(kind)::value;
    if (epilogue.kind == Epilogue::kActivate) {
      const auto run =
          p.gate > 0 ? activate_block<T, kActivation, true> : activate_block<T, kActivation, false>;
      return run(p, block);
    }
    const auto run = p.gate > 0 ? differentiate_block<T, kActivation, true>
                                : differentiate_block<T, kActivation, false>;
    run(p, block);
  });
}

template <class D, class T>
void drop_output_block(const Output& o, int64_t first_row, int rows) {
  const Dropout dropout = o.dropout;
  RowDropout<kSumPitch> mask;
  float* partials = o.partials ? o.partials + first_row / kBlockRows * o.columns : nullptr;
  for (int64_t first = 0; first < o.columns; first += kSumPitch) {
    const int count = clamped(o.columns - first, kSumPitch);
    for (int r = 0; r < rows; ++r) {
      const int64_t row = first_row + r;
      const D* dy = static_cast<const D*>(o.dy.data) + row * o.dy.row_stride;
      T* dropped = o.dropped ? static_cast<T*>(o.dropped) + row * o.columns : nullptr;
      if (dropout) {
        mask.draw(dropout, row, first, count);
      }
      for_vectors(count, [&](auto lanes, int64_t i) {
        Float v = lanes.load(dy + first + i);
        if (dropout) {
          v = mask.apply(dropout, v, i);
        }
        if (dropped) {
          lanes.store(dropped + first + i, v);
        }
        add_to(lanes, partials, first + i, rounded<T>(v), r == 0);
      });
    }
  }
}

// -- entries: from run-time to compile-time types -------------------------------------------------
inline void pack(const Product& p, int64_t first_panel, int64_t last_panel) {
  with_type(p.type, [&](auto x) { pack_panels<decltype(x)>(p, first_panel, last_panel); });
}

inline void multiply(const Product& p, int64_t row_block, int64_t first_panel, int64_t last_panel,
                     float* workspace) {
  const int64_t first_row = row_block * kBlockRows;
  const int rows = clamped(p.a.rows - first_row, kBlockRows);
  with_type(p.type, [&](auto x) {
    using T = decltype(x);
    if (p.is_shallow()) {
      return shallow_block<T>(p, first_row, rows, first_panel, last_panel, workspace);
    }
    if (p.unpacked) {
      dot_block<T>(p, first_row, rows, first_panel, last_panel, workspace);
    } else {
      multiply_block<T>(p, first_row, rows, first_panel, last_panel, workspace);
    }
    run_epilogue<T>(p, {first_row, rows, first_panel, last_panel, workspace});
  });
}

inline void drop_output(const Output& o, int64_t row_block) {
  const int64_t first_row = row_block * kBlockRows;
  const int rows = clamped(o.rows - first_row, kBlockRows);
  with_type(o.dy_type, [&](auto dy) {
    with_type(o.type,
              [&](auto x) { drop_output_block<decltype(dy), decltype(x)>(o, first_row, rows); });
  });
}

inline void reduce(const float* partials, int64_t count, int64_t columns, void* result, DType type,
                   int64_t first, int64_t last) {
  with_type(type, [&](auto element) {
    auto* out = static_cast<decltype(element)*>(result);
    for_vectors(last - first, [&](auto lanes, int64_t i) {
      Float total = {};
      for (int64_t n = 0; n < count; ++n) {
        total += lanes.load(partials + n * columns + first + i);
      }
      lanes.store(out + first + i, total);
    });
  });
}

const Kernels kKernels = {
    kPanel,
    {kUnpackedRows<float>, kUnpackedRows<BFloat16>, kUnpackedRows<Float16>},
    {kCopyRows<float>, kCopyRows<BFloat16>, kCopyRows<Float16>},
    {kConvertsCopies<float>, kConvertsCopies<BFloat16>, kConvertsCopies<Float16>},
    pack,
    multiply,
    drop_output,
    reduce};

}  // namespace fastattn::ffn::FASTATTN_ISA
