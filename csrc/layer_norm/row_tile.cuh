// Building blocks of the norms' kernels: vectors of elements, the columns and values of a thread,
// sums over a row, dropout.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/dropout.h"
#include "layer_norm/norm_cuda.h"
#include "sm90/ptx/warp.cuh"  // bar_sync, which every GPU has

namespace fastattn::norm {

// -- elements ------------------------------------------------------------------------------------
template <DType kType>
struct TypeOf;
template <>
struct TypeOf<DType::kFloat32> {
  using Element = float;
};
template <>
struct TypeOf<DType::kBFloat16> {
  using Element = __nv_bfloat16;
};
template <>
struct TypeOf<DType::kFloat16> {
  using Element = __half;
};

// Calls `of` with an element of a type that is known at run time.
template <class Of>
__device__ __forceinline__ void with_type(DType type, Of of) {
  if (type == DType::kFloat32) {
    of(float());
  } else if (type == DType::kBFloat16) {
    of(__nv_bfloat16());
  } else {
    of(__half());
  }
}

__device__ __forceinline__ float widen(float x) {
  return x;
}
__device__ __forceinline__ float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ __forceinline__ float widen(__half x) {
  return __half2float(x);
}

// -- vectors -------------------------------------------------------------------------------------
// Adjacent elements; more than 16 bytes are several accesses.
template <class T, int kWidth>
struct alignas(kWidth * sizeof(T) < 16 ? kWidth * sizeof(T) : 16) Vector {
  T at[kWidth];
};

// Rounds to nearest; two at a time is one instruction.
template <int kWidth>
__device__ __forceinline__ void narrow(const float* from, Vector<float, kWidth>& to) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    to.at[i] = from[i];
  }
}
template <int kWidth>
__device__ __forceinline__ void narrow(const float* from, Vector<__nv_bfloat16, kWidth>& to) {
#pragma unroll
  for (int i = 0; i + 1 < kWidth; i += 2) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(from[i], from[i + 1]);
    to.at[i] = pair.x;
    to.at[i + 1] = pair.y;
  }
  if constexpr (kWidth == 1) {
    to.at[0] = __float2bfloat16_rn(from[0]);
  }
}
template <int kWidth>
__device__ __forceinline__ void narrow(const float* from, Vector<__half, kWidth>& to) {
#pragma unroll
  for (int i = 0; i + 1 < kWidth; i += 2) {
    const __half2 pair = __floats2half2_rn(from[i], from[i + 1]);
    to.at[i] = pair.x;
    to.at[i + 1] = pair.y;
  }
  if constexpr (kWidth == 1) {
    to.at[0] = __float2half_rn(from[0]);
  }
}

// A vector as the words that memory is accessed by: 16 bytes, or all of it.
template <class T, int kWidth>
union Words {
  using Word =
      std::conditional_t<sizeof(Vector<T, kWidth>) >= 16, uint4,
                         std::conditional_t<sizeof(Vector<T, kWidth>) == 8, uint2,
                                            std::conditional_t<sizeof(Vector<T, kWidth>) == 4,
                                                               unsigned, unsigned short>>>;
  static constexpr int kCount = sizeof(Vector<T, kWidth>) / sizeof(Word);
  static_assert(kCount * sizeof(Word) == sizeof(Vector<T, kWidth>));

  Word words[kCount];
  Vector<T, kWidth> vector;
  uint32_t pairs[kWidth > 1 ? sizeof(vector) / sizeof(uint32_t) : 1];  // of 16-bit elements
};

// kConstant: of memory that the kernel does not write. The compiler may load it before earlier
// stores.
template <bool kConstant = false, class T, int kWidth>
__device__ __forceinline__ void load(const T* from, Words<T, kWidth>& to) {
  const auto* words = reinterpret_cast<const typename Words<T, kWidth>::Word*>(from);
#pragma unroll
  for (int i = 0; i < to.kCount; ++i) {
    to.words[i] = kConstant ? __ldg(words + i) : words[i];
  }
}
template <class T, int kWidth>
__device__ __forceinline__ Words<T, kWidth> load_constant(const void* data, int column) {
  Words<T, kWidth> loaded;
  load<true>(static_cast<const T*>(data) + column, loaded);
  return loaded;
}

// Values of a parameter, or `absent` if there is none.
template <class T, int kWidth>
__device__ __forceinline__ Words<T, kWidth> parameter(const void* data, int column, float absent) {
  if (data) {
    return load_constant<T, kWidth>(data, column);
  }
  Words<T, kWidth> filled;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    filled.vector.at[i] = T(absent);
  }
  return filled;
}

template <class T, int kWidth>
__device__ __forceinline__ float widen(const Words<T, kWidth>& words, int i) {
  // From the words, so that the compiler keeps two 16-bit elements in a register.
  if constexpr (sizeof(T) == 2 && kWidth > 1) {
    const uint32_t pair = words.pairs[i / 2];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      // The upper half of an fp32: one instruction, where a conversion may be two.
      return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
    } else {
      return widen(__half(__half_raw{static_cast<unsigned short>(i % 2 ? pair >> 16 : pair)}));
    }
  }
  return widen(words.vector.at[i]);
}

// By an intrinsic: the compiler splits an assignment into stores of the 4 bytes that it rounds at a
// time (nvcc 13.0).
template <class T, int kWidth>
__device__ __forceinline__ void store(T* to, const Vector<T, kWidth>& vector) {
  using Vectors = Words<T, kWidth>;
  Vectors stored;
  stored.vector = vector;
#pragma unroll
  for (int i = 0; i < Vectors::kCount; ++i) {
    __stwb(reinterpret_cast<typename Vectors::Word*>(to) + i, stored.words[i]);
  }
}

// -- a thread's share of a row -------------------------------------------------------------------
// Which thread of which row of its block this is. together: see kRowsTogether. Otherwise the
// divisor is a constant: all thread blocks of several rows have the same number of threads.
struct RowThread {
  int row, lane;
  __device__ __forceinline__ explicit RowThread(const Tiling& tiling, bool together = false)
      : row(tiling.rows > 1 ? together ? static_cast<int>(threadIdx.x) / tiling.threads
                                       : static_cast<int>(threadIdx.x) * tiling.rows / kShortThreads
                            : 0),
        lane(static_cast<int>(threadIdx.x) & (tiling.threads - 1)) {}
};

// The columns of a thread in a part of a row: vector i begins at first + i * step, if that is
// before the end. Adjacent lanes have adjacent vectors.
struct Columns {
  int first, step, end;
  // The columns before `end` of a row, none if the row does not exist. The first one depends on the
  // row, so that in a loop over rows the compiler does not keep all addresses in registers.
  __device__ __forceinline__ Columns of_row(bool is_there, int end) const {
    return {is_there ? first : kMaxColumns, step, end};
  }
  __device__ __forceinline__ int of(int vector) const { return first + vector * step; }
  __device__ __forceinline__ bool has(int vector) const { return of(vector) < end; }
};

// The columns before `end` of a thread: a warp has adjacent ones. Unless a row may be short
// (is_short), the distance of a thread's vectors is a constant, which is added to an address.
template <int kWidth, int kValues, bool kMayBeShort>
__device__ __forceinline__ Columns columns_of_thread(const Tiling& tiling, int lane, int end) {
  const int lanes = kMayBeShort && is_short(tiling) ? tiling.threads : kWarp;
  return {lane / lanes * lanes * kValues + lane % lanes * kWidth, lanes * kWidth, end};
}

template <class T>
__device__ __forceinline__ T* row_of(const RowsView& rows, int64_t row) {
  return static_cast<T*>(rows.data) + row * rows.stride;
}

// Values as they are in memory, and 0 in columns that do not exist.
template <class T, int kWidth, int kValues>
struct Tile {
  static constexpr int kVectors = kValues / kWidth;
  Words<T, kWidth> vectors[kVectors];

  // first: the thread's first column of the row.
  __device__ __forceinline__ void load(const T* first, const Columns& columns) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < vectors[v].kCount; ++i) {
        vectors[v].words[i] = {};
      }
      if (columns.has(v)) {
        norm::load(first + v * columns.step, vectors[v]);
      }
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    return widen(vectors[i / kWidth], i % kWidth);
  }
};

template <class T, int kWidth>
__device__ __forceinline__ void store(const RowsView& rows, int64_t row, int column,
                                      const Vector<T, kWidth>& vector) {
  store(row_of<T>(rows, row) + column, vector);
}

// -- sums over a row -----------------------------------------------------------------------------
// All threads of the block add up, the same number of times. Every thread of a row gets its sum, by
// additions in the same order in every run.
class RowSum {
 public:
  __device__ __forceinline__ explicit RowSum(int threads, bool together = false)
      : threads_(threads), together_(together) {}

  template <int kCount>
  __device__ __forceinline__ void add_up(float (&sums)[kCount]) {
    constexpr int kWarps = kMaxThreads / kWarp;
    if (threads_ < kWarp) {
      add_lanes(sums, threads_);
      return;
    }
    add_lanes(sums, kWarp);
    if (threads_ == kWarp) {
      return;
    }
    // Two buffers: whoever writes the first again has passed the barrier after its last reads.
    __shared__ float shared[2][kWarps][kCount];
    const int warps = threads_ / kWarp;
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        shared[buffer_][threadIdx.x / kWarp][i] = sums[i];
      }
    }
    int first_warp = 0;
    if (together_) {
      // Each row has a barrier of its own; 0 is __syncthreads.
      const int row = static_cast<int>(threadIdx.x) / threads_;
      first_warp = row * warps;
      sm90::ptx::bar_sync(1 + row, threads_);
    } else {
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums[i] = shared[buffer_][first_warp + (threadIdx.x & (warps - 1))][i];
    }
    add_lanes(sums, warps);
    buffer_ ^= 1;
  }

 private:
  // Adds the sums of that many adjacent lanes, a power of two.
  template <int kCount>
  static __device__ __forceinline__ void add_lanes(float (&sums)[kCount], int lanes) {
#pragma unroll
    for (int distance = lanes >> 1; distance > 0; distance >>= 1) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sums[i] += __shfl_xor_sync(~0u, sums[i], distance);
      }
    }
  }

  int threads_, buffer_ = 0;
  bool together_;
};

// -- dropout -------------------------------------------------------------------------------------
// One word decides four adjacent columns (common/dropout.h).
class DroppedRow {
 public:
  __device__ __forceinline__ DroppedRow(const Dropout& dropout, int64_t row)
      : threshold_(dropout.threshold), scale_(dropout.scale) {
    if (threshold_ > 0) {
      const int64_t seed = *dropout.seed;
      row_ = dropout::flat_row_key(dropout::flat_row_state(seed, dropout.stream, row), row);
      columns_ = dropout::stream_key(dropout::kColumnTag, seed, dropout.stream);
    }
  }
  __device__ __forceinline__ explicit operator bool() const { return threshold_ > 0; }

  // Drops or scales adjacent values from `column` on. Dropped ones are 0 even if they were NaN.
  template <int kWidth>
  __device__ __forceinline__ void drop(float* values, int column) const {
    constexpr int kColumnsOfWord = 4;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i % kColumnsOfWord == 0) {
        const uint32_t unit = static_cast<uint32_t>((column + i) / kColumnsOfWord);
        word = dropout::word(row_, dropout::absorb(columns_, unit));
      }
      const int byte = kWidth == 1 ? column % kColumnsOfWord : i % kColumnsOfWord;
      const bool is_kept = static_cast<int>(dropout::byte_of(word, byte)) >= threshold_;
      values[i] = is_kept ? values[i] * scale_ : 0.0f;
    }
  }

 private:
  int threshold_;
  float scale_;
  uint32_t row_ = 0, columns_ = 0;
};

}  // namespace fastattn::norm
