// What becomes of a tile's sums. The four threads of a row exchange them, so that each has eight
// adjacent columns of every 32: it reads and writes 16 bytes at a time, and two words of dropout
// decide its values. Rows and columns outside the result are not written.
#pragma once

#include "ffn/sm90/activation.cuh"
#include "ffn/sm90/piece.cuh"
#include "ffn/sm90/storage.cuh"
#include "ffn/sm90/tiles.cuh"

namespace fastattn::ffn {

// Columns of the four threads of a row.
constexpr int kGroupColumns = 4 * kPieceColumns;

// Of the steps without an activation.
struct NoActivation {};

template <class Traits, class Activation>
struct TileEpilogue {
  using Element = typename Traits::Element;
  static constexpr int kRows = 2 * Traits::kBlocks;  // of a thread
  static constexpr int kColumnGroups = Traits::kOutColumns / kGroupColumns;
  static constexpr int kPairs = Traits::kGated ? 2 : 1;
  static constexpr bool kLoads = Traits::kStep == Step::kDown || Traits::kDhidden;
  // Pieces that are loaded ahead of their use: none for gated activations, for which there are no
  // registers.
  static constexpr int kAhead = Traits::kGated ? 0 : 4;
  static constexpr bool kHasBias = Traits::kUp || Traits::kStep == Step::kDown;
  static constexpr bool kHasDropout = Traits::kUp || kLoads;
  // The derivative of relu without a gate: a is 0 where it was dropped.
  static constexpr bool kFromSign =
      Traits::kStep == Step::kDhidden && std::is_same_v<Activation, Relu>;

  // What a row's piece needs from memory: of hidden (gate and up), or the residual, which is twice
  // as long in fp32.
  struct Loaded {
    uint4 words[2];
  };
  // The same for all rows.
  struct Columns {
    float bias[kPairs][kPieceColumns];
    PieceDropout::ColumnKeys keys;
  };
  struct Values {
    float of[kPairs][kPieceColumns];
  };

  const ProductArguments& args;
  const Epilogue& epilogue;
  const PieceDropout dropout;
  const int lane;
  const int first_row, first_column, part;
  uint32_t row_state[1];

  __device__ __forceinline__ TileEpilogue(const ProductArguments& args, const TilePlace& place,
                                          int group, int warp, int lane)
      : args(args),
        epilogue(args.epilogue),
        dropout(args.epilogue.dropout),
        lane(lane),
        first_row(place.row_tile * kTileRows + (Traits::kPingPong ? 0 : group * kMmaRows) +
                  sm90::AccumulatorThread{warp, lane}.upper_row()),
        first_column(place.column_tile * Traits::kOutColumns + lane % 4 * kPieceColumns),
        part(place.part) {
    row_state[0] = kHasDropout && !kFromSign ? dropout.row_state() : 0;
  }

  __device__ __forceinline__ int row(int i) const {
    return first_row + i / 2 * kMmaRows + i % 2 * sm90::kRowStep;
  }
  __device__ __forceinline__ int column(int group) const {
    return first_column + group * kGroupColumns;
  }
  __device__ __forceinline__ bool inside(int i, int group) const {
    return row(i) < args.rows && column(group) < args.columns;
  }
  // Computed for every piece, where registers for the keys of all rows are missing.
  __device__ __forceinline__ uint32_t row_key(int i) {
    if constexpr (Traits::kDhidden) {
      ptx::pin(row_state);
    }
    return dropout::flat_row_key(row_state[0], row(i));
  }
  // Columns of hidden and dpre.
  __device__ __forceinline__ int width() const { return kPairs * args.columns; }

  // All threads of the warp: sums of columns go to `sums` [kPairs * kColumns], of this warp's rows.
  __device__ __forceinline__ void run(const float (&rSums)[Traits::kBlocks][Traits::kColumns / 2],
                                      float* sums) {
    constexpr int kPieces = kColumnGroups * kRows;
    Loaded loaded[kAhead + 1];
#pragma unroll
    for (int piece = 0; piece < kAhead; ++piece) {
      load(loaded[piece], piece);
    }
    Columns columns;
    float total[kPairs][kPieceColumns];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int group = piece / kRows, i = piece % kRows;
      __syncwarp();  // keeps the compiler from loading further ahead, for which registers are few
      if (piece + kAhead < kPieces) {
        load(loaded[(piece + kAhead) % (kAhead + 1)], piece + kAhead);
      }
      if (i == 0) {
        columns = columns_of(group);
        clear(total);
      }
      Values v = {};
      take(v.of[0], rSums[i / 2], group, i % 2);
      if constexpr (Traits::kPairsRows) {
        take(v.of[1], rSums[i / 2], group + kColumnGroups, i % 2);
      }
      finish(v, columns, loaded[piece % (kAhead + 1)], i, group);
      if constexpr (Traits::kDhidden) {
        add(total, v);
        if (i == kRows - 1) {
          write_sums(sums, total, group);
        }
      }
    }
  }

  // -- reads --------------------------------------------------------------------------------------
  // Columns of 32-column group `group` of one of the two rows of a block.
  __device__ __forceinline__ void take(float (&v)[kPieceColumns],
                                       const float (&block)[Traits::kColumns / 2], int group,
                                       int half) const {
    float even[4], odd[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* pair = &block[16 * group + 4 * j + 2 * half];
      even[j] = pair[0];
      odd[j] = pair[1];
    }
    sm90::transpose_quad(even, lane);
    sm90::transpose_quad(odd, lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[2 * j] = even[j];
      v[2 * j + 1] = odd[j];
    }
  }

  __device__ __forceinline__ void load(Loaded& loaded, int piece) const {
    if constexpr (kLoads) {
      const int group = piece / kRows, i = piece % kRows;
      loaded = {};
      if (!inside(i, group)) {
        return;
      }
      if constexpr (Traits::kDhidden) {
        const Element* hidden = static_cast<const Element*>(epilogue.hidden) +
                                static_cast<int64_t>(row(i)) * width() + column(group);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          loaded.words[pair] = *reinterpret_cast<const uint4*>(hidden + pair * args.columns);
        }
      } else if (epilogue.residual) {
        const int64_t at = row(i) * epilogue.residual_stride + column(group);
        const int size = epilogue.out_is_float ? sizeof(float) : sizeof(Element);
        const uint4* from =
            reinterpret_cast<const uint4*>(static_cast<const char*>(epilogue.residual) + at * size);
        loaded.words[0] = from[0];
        if (epilogue.out_is_float) {
          loaded.words[1] = from[1];
        }
      }
    }
  }

  __device__ __forceinline__ Columns columns_of(int group) const {
    Columns columns = {};
    const int first = column(group);
    if constexpr (kHasBias) {
      if (epilogue.bias && first < args.columns) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const Element* bias = static_cast<const Element*>(epilogue.bias) + pair * args.columns;
          const auto piece = *reinterpret_cast<const Piece<Element>*>(bias + first);
          widen(columns.bias[pair], piece);
        }
      }
    }
    if (kHasDropout && !kFromSign && epilogue.dropout.seed) {
      columns.keys = dropout.column_keys(first);
    }
    return columns;
  }

  template <class From>
  static __device__ __forceinline__ void widen(float (&v)[kPieceColumns], const Piece<From>& from) {
#pragma unroll
    for (int j = 0; j < kPieceColumns; ++j) {
      v[j] = static_cast<float>(from.data[j]);
    }
  }
  // `words` as a piece of another type.
  static __device__ __forceinline__ void widen(float (&v)[kPieceColumns], const uint4& words) {
    widen(v, reinterpret_cast<const Piece<Element>&>(words));
  }

  // -- the steps ----------------------------------------------------------------------------------
  // Row i of the thread. v: the sums; of kDhidden dpre in the end.
  __device__ __forceinline__ void finish(Values& v, const Columns& columns, const Loaded& loaded,
                                         int i, int group) {
    PieceDropout::Words words = {};
    if (kHasDropout && !kFromSign && epilogue.dropout.seed) {
      words = dropout.words(row_key(i), columns.keys);
    }
    if constexpr (kHasBias) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int j = 0; j < kPieceColumns; ++j) {
          v.of[pair][j] += columns.bias[pair][j];
        }
      }
    }
    uint32_t here[] = {static_cast<uint32_t>(row(i))};
    if constexpr (Traits::kDhidden) {
      ptx::pin(here);
    }
    const int64_t in_row = static_cast<int>(here[0]), at = in_row * args.columns + column(group);
    const int64_t hidden_at = in_row * width() + column(group);
    const bool stores = inside(i, group);
    if constexpr (Traits::kUp) {
      store_hidden(v, hidden_at, stores);
      activate(v);
      dropout.apply(v.of[0], words);
      store<Element>(epilogue.activated, at, v.of[0], stores);
    } else if constexpr (Traits::kDhidden) {
      float a[kPieceColumns];
      differentiate(v, a, loaded, words);
      if constexpr (!kFromSign) {
        dropout.apply(a, words);
        store<Element>(epilogue.activated, at, a, stores);
      }
      store_hidden(v, hidden_at, stores);
    } else if constexpr (Traits::kStep == Step::kDown) {
      dropout.apply(v.of[0], words);
      add_residual(v.of[0], loaded);
      if (epilogue.out_is_float) {
        store<float>(epilogue.out, at, v.of[0], stores);
      } else {
        store<Element>(epilogue.out, at, v.of[0], stores);
      }
    } else if (Traits::kStep == Step::kDw && epilogue.out_is_float) {
      const int64_t of_part = static_cast<int64_t>(part) * args.rows * args.columns;
      store<float>(epilogue.out, of_part + at, v.of[0], stores);
    } else {
      store<Element>(epilogue.out, at, v.of[0], stores);
    }
  }

  __device__ __forceinline__ void activate(Values& v) const {
#pragma unroll
    for (int j = 0; j < kPieceColumns; ++j) {
      v.of[0][j] = Activation::at(v.of[0][j]).value;
      if constexpr (Traits::kGated) {
        v.of[0][j] *= v.of[1][j];
      }
    }
  }

  // v: the gradient of a becomes that of hidden. a: the activation, before dropout.
  __device__ __forceinline__ void differentiate(Values& v, float (&a)[kPieceColumns],
                                                const Loaded& loaded,
                                                const PieceDropout::Words& words) const {
    float hidden[kPairs][kPieceColumns];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      widen(hidden[pair], loaded.words[pair]);
    }
    if constexpr (!kFromSign) {
      dropout.apply(v.of[0], words);
    }
#pragma unroll
    for (int j = 0; j < kPieceColumns; ++j) {
      if constexpr (kFromSign) {
        v.of[0][j] = hidden[0][j] > 0.0f ? v.of[0][j] * epilogue.dropout.keep_scale : 0.0f;
      } else {
        const ValueAndSlope act = Activation::at(hidden[0][j]);
        const float da = v.of[0][j];
        a[j] = act.value;
        v.of[0][j] = da * act.slope;
        if constexpr (Traits::kGated) {
          a[j] *= hidden[1][j];
          v.of[0][j] *= hidden[1][j];
          v.of[1][j] = da * act.value;
        }
      }
    }
  }

  __device__ __forceinline__ void add_residual(float (&v)[kPieceColumns],
                                               const Loaded& loaded) const {
    if (!epilogue.residual) {
      return;
    }
    float residual[kPieceColumns];
    if (epilogue.out_is_float) {
      widen(residual, reinterpret_cast<const Piece<float>&>(loaded.words));
    } else {
      widen(residual, loaded.words[0]);
    }
#pragma unroll
    for (int j = 0; j < kPieceColumns; ++j) {
      v[j] += residual[j];
    }
  }

  // -- writes -------------------------------------------------------------------------------------
  template <class Out>
  static __device__ __forceinline__ void store(void* matrix, int64_t at,
                                               const float (&v)[kPieceColumns], bool stores) {
    if (matrix && stores) {
      store_piece<Out>(matrix, at, v);
    }
  }
  // hidden or dpre.
  __device__ __forceinline__ void store_hidden(const Values& v, int64_t at, bool stores) const {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      store<Element>(epilogue.out, at + pair * args.columns, v.of[pair], stores);
    }
  }

  static __device__ __forceinline__ void clear(float (&total)[kPairs][kPieceColumns]) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int j = 0; j < kPieceColumns; ++j) {
        total[pair][j] = 0.0f;
      }
    }
  }
  // Rows outside the result add 0: their da is 0.
  static __device__ __forceinline__ void add(float (&total)[kPairs][kPieceColumns],
                                             const Values& v) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int j = 0; j < kPieceColumns; ++j) {
        total[pair][j] += v.of[pair][j];
      }
    }
  }

  // Adds the sums of the eight threads with the same columns, always in the same order.
  __device__ __forceinline__ void write_sums(float* sums, float (&total)[kPairs][kPieceColumns],
                                             int group) const {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int j = 0; j < kPieceColumns; ++j) {
        for (int lanes = 4; lanes < kWarp; lanes *= 2) {
          total[pair][j] += __shfl_xor_sync(~0u, total[pair][j], lanes);
        }
      }
      if (lane < 4) {
        const int at = pair * Traits::kColumns + group * kGroupColumns + lane * kPieceColumns;
        store_piece<float>(sums, at, total[pair]);
      }
    }
  }
};

// The number of this thread. What is derived from it is computed here and takes no registers
// before.
__device__ __forceinline__ int thread_here() {
  uint32_t thread[] = {threadIdx.x};
  ptx::pin(thread);
  return static_cast<int>(thread[0]);
}

// Adds the sums of the four warps. The barrier before the next tile's products separates these
// reads from its writes.
template <class Traits>
__device__ __forceinline__ void finish_sums(SharedStorage<Traits>& shared,
                                            const ProductArguments& args, const TilePlace& place,
                                            int group) {
  static_assert(Traits::kPingPong, "a warpgroup has all rows of the tile");
  ptx::bar_sync(kSumsBarrier + group, kWarpgroup);
  constexpr int kPairs = Traits::kSumColumns / Traits::kColumns;
  const int64_t first = static_cast<int64_t>(place.row_tile) * kPairs * args.columns;
  for (int i = thread_here() % kWarpgroup; i < Traits::kSumColumns; i += kWarpgroup) {
    const int column = place.column_tile * Traits::kColumns + i % Traits::kColumns;
    if (column < args.columns) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarpsPerGroup; ++warp) {
        sum += shared.sums.of[group][warp][i];
      }
      args.epilogue.sums[first + i / Traits::kColumns * args.columns + column] = sum;
    }
  }
}

// Brings what the epilogue reads into the L2 cache while the products of the tile are computed. Not
// for gated activations, whose kernel has no registers left for it.
template <class Traits>
__device__ __forceinline__ void prefetch_tile(const ProductArguments& args, const TilePlace& place,
                                              int group) {
  constexpr bool kDown = Traits::kStep == Step::kDown;
  if constexpr (kDown || (Traits::kDhidden && !Traits::kGated)) {
    constexpr int kLine = 128;  // bytes
    constexpr int kRows = kTileRows / (Traits::kPingPong ? 1 : kGroups);
    constexpr int kThreadsOfRow = kWarpgroup / kRows;
    const Epilogue& e = args.epilogue;
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    const int row = place.row_tile * kTileRows + (Traits::kPingPong ? 0 : group * kRows) +
                    thread / kThreadsOfRow;
    const char* data = static_cast<const char*>(kDown ? e.residual : e.hidden);
    if (!data || row >= args.rows) {
      return;
    }
    const int size = kDown && e.out_is_float ? 4 : 2;
    data += row * (kDown ? e.residual_stride : int64_t{args.columns}) * size;
    const int first = place.column_tile * Traits::kColumns + thread % kThreadsOfRow * kLine / size;
    const int end = (place.column_tile + 1) * Traits::kColumns;
    for (int column = first; column < end && column < args.columns;
         column += kThreadsOfRow * kLine / size) {
      ptx::prefetch_l2(data + int64_t{column} * size);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void finish_tile(
    SharedStorage<Traits>& shared, const ProductArguments& args, const TilePlace& place, int group,
    const float (&rSums)[Traits::kBlocks][Traits::kColumns / 2]) {
  const int thread = thread_here();
  const int warp = thread / kWarp % kWarpsPerGroup, lane = thread % kWarp;
  if constexpr (Traits::kUp) {
    with_activation<Traits::kGated>(args.epilogue.activation, [&](auto activation) {
      TileEpilogue<Traits, decltype(activation)>(args, place, group, warp, lane)
          .run(rSums, nullptr);
    });
  } else if constexpr (Traits::kDhidden) {
    with_activation<Traits::kGated>(args.epilogue.activation, [&](auto activation) {
      TileEpilogue<Traits, decltype(activation)>(args, place, group, warp, lane)
          .run(rSums, shared.sums.of[group][warp]);
    });
    if (args.epilogue.sums) {
      finish_sums(shared, args, place, group);
    }
  } else {
    TileEpilogue<Traits, NoActivation>(args, place, group, warp, lane).run(rSums, nullptr);
  }
}

}  // namespace fastattn::ffn
