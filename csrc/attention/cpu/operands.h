// Small matrix products for the CPU kernels of attention, and the packed forms of their operands.
// Forms of a matrix X [positions, dim], in units (cpu/gemm.h):
//
//   rows     [positions][dim]        A, summed over dim
//   columns  [dim][kTileKeys]        B, summed over dim
//   pairs    [positions][dim]        B, summed over positions (for Floats the same as rows); read
//                                    with swapped strides it is A transposed
#pragma once

#include "attention/cpu/problem.h"
#include "cpu/gemm.h"

namespace fastattn::attention::cpu::FASTATTN_ISA {

using namespace fastattn::FASTATTN_ISA;

// -- products ------------------------------------------------------------------------------------
// 32 vector registers hold 6 x 4 sums and a row of B; 16 hold 6 x 2.
constexpr int kRows = 6;
#if defined(__AVX512F__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif

template <class C, int kR, int kV>
__attribute__((noinline)) void micro_kernel(const typename C::Unit* A, int64_t a_row,
                                            int64_t a_depth, const typename C::Unit* B,
                                            int64_t b_depth, int64_t depth, float* sums,
                                            int64_t stride, bool add) {
  constexpr std::integral_constant<int, 2 * kLanes> kNextTwo;
  Float c[kR][kV];
#pragma GCC unroll 8
  for (int i = 0; i < kR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kV; ++j) {
      c[i][j] = add ? load(sums + i * stride + j * kLanes) : Float{};
    }
  }
  multiply_add<C>(c, A, a_row, a_depth, B, kNextTwo, b_depth, depth, [] {});
#pragma GCC unroll 8
  for (int i = 0; i < kR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kV; ++j) {
      store(sums + i * stride + j * kLanes, c[i][j]);
    }
  }
}

// Strides and depth count units; columns are whole vectors.
template <class C>
void multiply(int rows, int columns, int64_t depth, const typename C::Unit* A, int64_t a_row,
              int64_t a_depth, const typename C::Unit* B, int64_t b_depth, float* sums,
              int64_t stride, bool add) {
  for (int c = 0; c < columns; c += kVectors * kLanes) {
    with_count<kVectors>(smaller((columns - c) / kLanes, kVectors), [&](auto vectors) {
      for (int i = 0; i < rows; i += kRows) {
        with_count<kRows>(smaller(rows - i, kRows), [&](auto height) {
          micro_kernel<C, decltype(height)::value, decltype(vectors)::value>(
              A + i * a_row, a_row, a_depth, B + c, b_depth, depth, sums + i * stride + c, stride,
              add);
        });
      }
    });
  }
}

#if defined(__AVX512BF16__)
// -- rows of bf16 --------------------------------------------------------------------------------
inline Short rounded_to_bf16(Float v) {
  return bit_cast<Short>(_mm512_cvtneps_pbh(v));
}
// Two rows of bf16, one after the other.
using TwoRows = uint16_t __attribute__((vector_size(4 * kLanes)));

inline TwoRows rounded_to_bf16(Float first, Float second) {
  return bit_cast<TwoRows>(_mm512_cvtne2ps_pbh(second, first));
}
inline TwoRows two_rows(Short first, Short second) {
  constexpr __mmask16 kAll = 0xFFFF;  // GCC 12 warns about the forms without a mask
  return bit_cast<TwoRows>(_mm512_maskz_inserti32x8(
      kAll, _mm512_castsi256_si512(bit_cast<__m256i>(first)), bit_cast<__m256i>(second), 1));
}
inline void store_halves(uint16_t* first, uint16_t* second, TwoRows rows) {
  constexpr __mmask8 kAll = 0xFF;
  const __m512i both = bit_cast<__m512i>(rows);
  store_bits(first, _mm512_castsi512_si256(both));
  store_bits(second, _mm512_maskz_extracti32x8_epi32(kAll, both, 1));
}
// The units of two rows, the first row in the low halves.
inline Word joined(TwoRows rows) {
  constexpr TwoRows kColumns = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  constexpr __mmask32 kAll = ~__mmask32{0};
  return bit_cast<Word>(
      _mm512_maskz_permutexvar_epi16(kAll, bit_cast<__m512i>(kColumns), bit_cast<__m512i>(rows)));
}
#endif

// -- packing -------------------------------------------------------------------------------------
// Copies one position to `width` floats, zero-padded after dim. False if an element is infinite or
// NaN.
template <class T>
inline bool pack_row(const T* source, int dim, int64_t width, float* result) {
  Float check = {};
  int64_t c = 0;
  for_vectors(dim, [&](auto lanes, int64_t d) {
    const Float v = lanes.load(source + d);
    store(result + d, v);
    check = fma(v, Float{}, check);
    c = d + kLanes;
  });
  for (; c < width; c += kLanes) {
    store(result + c, Float{});
  }
  return !holds_nan(check);
}

#if defined(__AVX512BF16__)
constexpr uint16_t kBf16Exponent = 0x7F80;  // all of these bits set: infinite or NaN

// The same to units of bf16, from bf16 data only.
template <class T>
inline bool pack_row(const T* source, int dim, int64_t width, uint32_t* result) {
  uint16_t* row = reinterpret_cast<uint16_t*>(result);
  const __m512i exponent = _mm512_set1_epi16(kBf16Exponent);
  __mmask32 found = 0;
  for (int64_t c = 0; c < width; c += 2 * kLanes) {
    const int64_t left = dim - c < 0 ? 0 : dim - c;
    const __mmask32 in = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    const __mmask32 out = width - c >= 32 ? ~__mmask32{0} : (__mmask32{1} << (width - c)) - 1;
    const __m512i v = _mm512_maskz_loadu_epi16(in, source + c);
    found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent);
    _mm512_mask_storeu_epi16(row + c, out, v);
  }
  return found == 0;
}
#endif

// A matrix in the rows form, packed or in place.
template <class C>
struct Operand {
  const typename C::Unit* data;
  int64_t stride;

  const typename C::Unit* row(int64_t i) const { return data + i * stride; }
};

// The positions of a tensor from an offset on as an operand, if their dtype and layout allow it;
// null data otherwise. The units of a position must be a multiple of `block`.
template <class C>
inline Operand<C> in_place(DType type, const TensorView& x, int64_t offset, int dim, int block) {
  if (type != (C::kDepth == 1 ? DType::kFloat32 : DType::kBFloat16)) {
    return {nullptr, 0};
  }
  constexpr int kBytes = sizeof(typename C::Unit) / C::kDepth;
  const char* data = static_cast<const char*>(x.data) + kBytes * offset;
  if (dim % (C::kDepth * block) || x.row_stride % C::kDepth ||
      reinterpret_cast<uintptr_t>(data) % sizeof(typename C::Unit)) {
    return {nullptr, 0};
  }
  return {reinterpret_cast<const typename C::Unit*>(data), x.row_stride / C::kDepth};
}

// Whether no element of these rows, which are whole vectors, is infinite or NaN.
inline bool all_finite(const Operand<Floats>& rows, int count, int dim) {
  Float check = {};
  for (int i = 0; i < count; ++i) {
    for (int d = 0; d < dim; d += kLanes) {
      check = fma(load(rows.row(i) + d), Float{}, check);
    }
  }
  return !holds_nan(check);
}
#if defined(__AVX512BF16__)
inline bool all_finite(const Operand<Pairs>& rows, int count, int dim) {
  const __m512i exponent = _mm512_set1_epi16(kBf16Exponent);
  __mmask32 found = 0;
  for (int i = 0; i < count; ++i) {
    for (int d = 0; d < dim / Pairs::kDepth; d += kLanes) {
      const __m512i v = _mm512_loadu_si512(rows.row(i) + d);
      found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent);
    }
  }
  return found == 0;
}
#endif

// Packs X's positions [0, count) in the rows form; dead positions and those in [count, upto) are 0.
template <class C, class Dead>
void pack_rows(DType type, const void* data, int64_t offset, int64_t stride, int count, int upto,
               int dim, typename C::Unit* result, const Dead& dead) {
  const int64_t width = padded(dim), units = width / C::kDepth;
  with_type(type, [&](auto element) {
    using T = decltype(element);
    const T* source = static_cast<const T*>(data) + offset;
    for (int i = 0; i < upto; ++i) {
      typename C::Unit* row = result + i * units;
      bool finite = true;
      const bool inside = i < count && !dead.before(i);
      if (inside) {
        finite = pack_row(source + i * stride, dim, width, row);
      }
      if (!inside || (!finite && dead.after(i))) {
        memset(row, 0, units * sizeof(*row));
      }
    }
  });
}

// Positions that are known to be dead before they are read; no others are.
template <class Before>
struct DeadBefore {
  Before known;
  bool before(int i) const { return known(i); }
  bool after(int) const { return false; }
};
template <class Before>
DeadBefore<Before> dead_if(Before known) {
  return {known};
}

// Converts a tile of keys from the rows form to the columns form; `keys` is a multiple of 16.
template <class C>
void to_columns(const Operand<C>& rows, int keys, int dim, typename C::Unit* columns) {
  const int64_t width = padded(dim) / C::kDepth;
  const int64_t units = (dim + C::kDepth - 1) / C::kDepth;
  for (int64_t d = 0; d < units; d += kLanes) {
    if (d + kLanes <= width) {
      for (int j = 0; j < keys; j += kLanes) {
        typename C::Vector block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          block[i] = load_bits<typename C::Vector>(rows.row(j + i) + d);
        }
        store_transposed(block, columns + d * kTileKeys + j, kTileKeys);
      }
    } else {
      for (int j = 0; j < keys; ++j) {
        for (int64_t u = d; u < units; ++u) {
          columns[u * kTileKeys + j] = rows.row(j)[u];
        }
      }
    }
  }
}

// Converts `count` positions, an even number, from the rows form to the pairs form.
inline void to_pairs(const Operand<Floats>& rows, int count, int dim, float* pairs) {
  for (int i = 0; i < count; ++i) {
    memcpy(pairs + i * padded(dim), rows.row(i), sizeof(float) * padded(dim));
  }
}
#if defined(__AVX512BF16__)
inline void to_pairs(const Operand<Pairs>& rows, int count, int dim, uint32_t* pairs) {
  const int64_t width = padded(dim);
  for (int i = 0; i < count; i += 2) {
    for (int64_t d = 0; d < width; d += kLanes) {
      const auto at = [&](int row) { return load_bits<Short>(rows.row(row) + d / 2); };
      store_bits(pairs + i / 2 * width + d, joined(two_rows(at(i), at(i + 1))));
    }
  }
}
#endif

// Stores rows of sums, times factor(row), to a tensor's rows.
template <class Factor>
inline void store_rows(DType type, void* data, int64_t offset, int64_t stride, int count, int dim,
                       const float* sums, const Factor& factor) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    T* result = static_cast<T*>(data) + offset;
    for (int i = 0; i < count; ++i) {
      const float* row = sums + i * padded(dim);
      const float by = factor(i);
      for_vectors(dim, [&](auto lanes, int64_t d) {
        lanes.store(result + i * stride + d, lanes.load(row + d) * by);
      });
    }
  });
}

}  // namespace fastattn::attention::cpu::FASTATTN_ISA
