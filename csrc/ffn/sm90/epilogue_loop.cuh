// Epilogue of a tile: from the accumulators to the results in global memory.
//
// A warp finishes its part of a tile box by box: 16 rows of 128 bytes. TMA loads what the epilogue
// reads (hidden, or the residual) while the products are computed, and stores the results of a box
// while the warp computes the next one; a result replaces in shared memory what was loaded. Threads
// keep the values that wgmma gives them: matrices of 8 x 8 elements pass between registers and
// shared memory. TMA reads zeros outside tensors and does not write there.
//
// FASTATTN_TRIALS=ffn_loop compiles this file, which has passed in the simulator only, instead of
// epilogue.cuh. There each box has code of its own, which does not fit in the instruction cache: a
// third of the stalls of dhidden with gelu are waits for instructions (H200, Nsight Compute). Here
// one loop body serves all boxes: it takes the first box's sums, and the sums of the others move up
// in registers.
#pragma once

#include "ffn/sm90/activation.cuh"
#include "ffn/sm90/box_dropout_loop.cuh"
#include "ffn/sm90/storage.cuh"
#include "ffn/sm90/tiles.cuh"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::ffn {

// Placeholder for steps without an activation.
struct NoActivation {};

template <class Traits>
struct TileEpilogue {
  using Element = typename Traits::Element;
  using Shared = SharedStorage<Traits>;
  static constexpr int kPairs = Traits::kPairs, kBlocks = Traits::kBlocks;
  static constexpr bool kUp = Traits::kUp, kDhidden = Traits::kDhidden;
  static constexpr bool kHasBias = kUp || Traits::kStep == Step::kDown;
  static constexpr bool kHasDropout = kHasBias || kDhidden;
  // In each group of eight columns a thread has two adjacent ones, of two rows.
  static constexpr int kGroupColumns = 8;
  static constexpr int kTileGroups = Traits::kOutColumns / kGroupColumns;
  // Values in registers: one slice of a box at a time, as two matrices of 16 x 16 elements:
  // [matrix][group of eight][row of two][column of two].
  static constexpr int kMatrices = kSliceColumns / sm90::kMmaK;
  static constexpr int kMatrixValues = sm90::kMmaK / 2, kValues = kMatrices * kMatrixValues;
  static constexpr int kMatrixGroups = sm90::kMmaK / kGroupColumns;
  static constexpr int kSliceGroups = kMatrices * kMatrixGroups;
  // Sums of columns of a thread, [group of eight][column of two].
  static constexpr int kSums = kDhidden ? 2 * BoxOf<Element>::kColumns / kGroupColumns : 1;

  struct TwoColumns {
    Element of[2];
  };
  struct Values {
    float of[kPairs][kValues];
  };
  struct Place {
    int row, column;  // of a box
  };

  Shared& shared;
  const ProductArguments& args;
  const Epilogue& epilogue;
  const int group, warp, lane;
  const int first_row, first_column, part;
  const int tiles_before;                              // of this warpgroup
  uint32_t bias[kHasBias ? kPairs * kTileGroups : 1];  // two adjacent columns each

  __device__ __forceinline__ TileEpilogue(Shared& shared, const ProductArguments& args,
                                          const TilePlace& place, int group, int tiles_before)
      : shared(shared),
        args(args),
        epilogue(args.epilogue),
        group(group),
        warp(static_cast<int>(threadIdx.x) / kWarp % kWarpsPerGroup),
        lane(static_cast<int>(threadIdx.x) % kWarp),
        first_row(place.row_tile * kTileRows + (Traits::kPingPong ? 0 : group * kMmaRows) +
                  warp * sm90::kWarpRows),
        first_column(place.column_tile * Traits::kOutColumns),
        part(place.part),
        tiles_before(tiles_before) {}

  // Calls `of` with the type of the result and of what is loaded.
  template <class Of>
  __device__ __forceinline__ void with_type(Of of) const {
    if constexpr (Traits::kMayBeFloat) {
      if (epilogue.out_is_float) {
        of(float());
        return;
      }
    }
    of(Element());
  }

  // -- before the products are complete -----------------------------------------------------------
  // Starts the loads of the tile's first boxes.
  __device__ __forceinline__ void begin() const {
    if constexpr (Traits::kLoads) {
      if (loads() && lane == 0) {
        ptx::cp_async_bulk_wait_group_read<0>();
        with_type([&](auto out) {
          for (int box = 0; box < Traits::kSlots; ++box) {
            load<decltype(out)>(box);
          }
        });
      }
      __syncwarp();  // converges for the barrier that follows
    }
  }

  __device__ __forceinline__ void load_bias() {
    if constexpr (kHasBias) {
      const auto* elements = static_cast<const Element*>(epilogue.bias);
      const int column = first_column + sm90::AccumulatorThread{warp, lane}.first_column();
#pragma unroll
      for (int i = 0; i < kTileGroups; ++i) {
        const int at = column + i * kGroupColumns;
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const auto* from = reinterpret_cast<const uint32_t*>(elements + at + pair * args.columns);
          bias[pair * kTileGroups + i] = elements && at < args.columns ? *from : 0;
        }
      }
    }
  }

  // -- boxes --------------------------------------------------------------------------------------
  // Boxes of a warp in a tile. Their rows change first.
  template <class Out>
  static constexpr int kBoxes = kBlocks * Traits::kOutColumns / BoxOf<Out>::kColumns;

  template <class Out>
  __device__ __forceinline__ Place place_of(int box) const {
    return {first_row + box % kBlocks * kMmaRows,
            first_column + box / kBlocks * BoxOf<Out>::kColumns};
  }
  __device__ __forceinline__ uint32_t result_box(int box, int pair) const {
    return shared.results[group][warp][box % Traits::kSlots][pair].address();
  }
  __device__ __forceinline__ uint32_t activated_box(int box) const {
    return shared.activated.of[group][warp][box % Traits::kActivatedSlots].address();
  }
  __device__ __forceinline__ bool loads() const {
    return kDhidden || (Traits::kLoads && epilogue.residual);
  }

  // One thread.
  template <class Out>
  __device__ __forceinline__ void load(int box) const {
    const Place place = place_of<Out>(box);
    Barrier& full = shared.loaded[group][warp][box % Traits::kSlots];
    full.arrive_expect_bytes(kPairs * kBoxBytes);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      ptx::cp_async_bulk_tensor_load(result_box(box, pair), &args.loaded, full.address(),
                                     place.column, place.row, pair, 0, ptx::kEvictFirst);
    }
  }

  // Waits until the box's shared memory may be written, and until what is loaded is there. Loads a
  // later box into the memory of an earlier one, which TMA has stored.
  template <class Out>
  __device__ __forceinline__ void begin_box(int box) const {
    if constexpr (Traits::kLoads) {
      if (loads()) {
        constexpr int kLag = Traits::kSlots > 2 ? 2 : 1;  // from the earlier box to this one
        const int later = box - kLag + Traits::kSlots;
        const bool loads_later = box >= kLag && later < kBoxes<Out>;
        const bool activates = kDhidden && epilogue.activated;  // in the memory of the box before
        if (lane == 0) {
          if (activates) {
            ptx::cp_async_bulk_wait_group_read<0>();
          } else if (loads_later) {
            ptx::cp_async_bulk_wait_group_read<kLag - 1>();
          }
          if (loads_later) {
            load<Out>(later);
          }
        }
        const int use = (tiles_before * kBoxes<Out> + box) / Traits::kSlots;
        shared.loaded[group][warp][box % Traits::kSlots].wait(use % 2);
        __syncwarp();  // converges, and lane 0 has waited for the box before
        return;
      }
    }
    if (lane == 0) {
      ptx::cp_async_bulk_wait_group_read<Traits::kSlots - 1>();
    }
    __syncwarp();
  }

  // Starts the stores of the box's results.
  template <class Out>
  __device__ __forceinline__ void end_box(int box) const {
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane != 0) {
      return;
    }
    const Place place = place_of<Out>(box);
    if (epilogue.out) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        ptx::cp_async_bulk_tensor_store(&args.out, result_box(box, pair), place.column, place.row,
                                        pair, part);
      }
    }
    if constexpr (Traits::kActivates) {
      if (epilogue.activated) {
        ptx::cp_async_bulk_tensor_store(&args.activated, activated_box(box), place.column,
                                        place.row, 0, 0);
      }
    }
    ptx::cp_async_bulk_commit_group();
  }

  // -- values in shared memory --------------------------------------------------------------------
  // The address of a lane's 16 bytes in a matrix: of row lane % 16, the left or the right half.
  __device__ __forceinline__ uint32_t piece_of(uint32_t box, int matrix) const {
    return box + sm90::swizzled_offset(lane % sm90::kWarpRows,
                                       kMatrixGroups * matrix + lane / sm90::kWarpRows);
  }
  // Values i and i + 1 of a slice in fp32, of two adjacent columns.
  __device__ __forceinline__ float2* two_columns_of(int box, int i) const {
    const sm90::AccumulatorThread thread = {0, lane};
    const int row = thread.upper_row() + i / 2 % 2 * sm90::kRowStep;
    const int column = i / 4 * kGroupColumns + thread.first_column();
    constexpr int kPieceColumns = sm90::kPieceBytes / static_cast<int>(sizeof(float));
    static_assert(BoxOf<float>::kColumns == kSliceColumns);
    char* data = shared.results[group][warp][box % Traits::kSlots][0].data;
    return reinterpret_cast<float2*>(data + sm90::swizzled_offset(row, column / kPieceColumns) +
                                     column % kPieceColumns * sizeof(float));
  }

  template <class Out>
  __device__ __forceinline__ void read(float (&v)[kValues], int box, int pair, int slice) const {
    if constexpr (std::is_same_v<Out, float>) {
#pragma unroll
      for (int i = 0; i < kValues; i += 2) {
        const float2 two = *two_columns_of(box, i);
        v[i] = two.x;
        v[i + 1] = two.y;
      }
    } else {
#pragma unroll
      for (int matrix = 0; matrix < kMatrices; ++matrix) {
        uint32_t words[kMatrixValues / 2];
        ptx::ldmatrix_x4(piece_of(result_box(box, pair), kMatrices * slice + matrix), words);
#pragma unroll
        for (int i = 0; i < kMatrixValues; ++i) {
          v[matrix * kMatrixValues + i] = widen(words[i / 2], i % 2);
        }
      }
    }
  }
  template <class Out>
  __device__ __forceinline__ void write(const Values& v, int box, int slice) const {
    if constexpr (std::is_same_v<Out, float>) {
#pragma unroll
      for (int i = 0; i < kValues; i += 2) {
        *two_columns_of(box, i) = {v.of[0][i], v.of[0][i + 1]};
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        write(v.of[pair], result_box(box, pair), slice);
      }
    }
  }
  __device__ __forceinline__ void write(const float (&v)[kValues], uint32_t box, int slice) const {
#pragma unroll
    for (int matrix = 0; matrix < kMatrices; ++matrix) {
      const float* m = v + matrix * kMatrixValues;
      ptx::stmatrix_x4(piece_of(box, kMatrices * slice + matrix), ptx::pack<Element>(m[0], m[1]),
                       ptx::pack<Element>(m[2], m[3]), ptx::pack<Element>(m[4], m[5]),
                       ptx::pack<Element>(m[6], m[7]));
    }
  }
  static __device__ __forceinline__ float widen(uint32_t two, int i) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      // The upper half of an fp32: one instruction, where a conversion is two.
      return __uint_as_float(i == 1 ? two & 0xffff0000u : two << 16);
    }
    return static_cast<float>(reinterpret_cast<const TwoColumns&>(two).of[i]);
  }

  // -- the tile -----------------------------------------------------------------------------------
  using Sums = float[kBlocks][Traits::kColumns / 2];

  // Leaves nothing of use in rSums.
  __device__ __forceinline__ void run(Sums& rSums) {
    if constexpr (Traits::kActivates) {
      with_activation<Traits::kGated>(epilogue.activation, [&](auto activation) {
        finish<decltype(activation), Element>(rSums);
      });
    } else {
      with_type([&](auto out) { finish<NoActivation, decltype(out)>(rSums); });
    }
    if constexpr (kDhidden) {
      if (epilogue.sums) {
        finish_sums();
      }
    }
  }

  // The derivative of relu without a gate: a is 0 where it was dropped.
  template <class Activation>
  static constexpr bool kFromSign =
      Traits::kStep == Step::kDhidden && std::is_same_v<Activation, Relu>;

  template <class Activation, class Out>
  __device__ __forceinline__ void finish(Sums& rSums) {
    if constexpr (kHasDropout && !kFromSign<Activation>) {
      if (epilogue.dropout.seed) {
        finish_boxes<Activation, Out, true>(rSums);
        return;
      }
    }
    finish_boxes<Activation, Out, false>(rSums);
  }

  template <class Activation, class Out, bool kDrops>
  __device__ __forceinline__ void finish_boxes(Sums& rSums) {
    constexpr int kSlices = BoxOf<Out>::kColumns / kSliceColumns;
    BoxDropout<kDrops> dropout(epilogue.dropout, lane);
    float sums[kPairs][kSums] = {};  // of columns
#pragma unroll 1
    for (int box = 0; box < kBoxes<Out>; ++box) {
      const Place place = place_of<Out>(box);
      dropout.set_box(place.row, place.column);
      begin_box<Out>(box);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Values v;
        take(v, rSums[0], slice);
        finish_slice<Activation, Out>(v, dropout, box, slice);
        if constexpr (kDhidden) {
          add(sums, v, slice);
        }
      }
      end_box<Out>(box);
      move_up<Out>(rSums, box);
      if constexpr (kDhidden) {
        if (box % kBlocks == kBlocks - 1 && epilogue.sums) {
          write_sums(sums, box / kBlocks);
        }
      }
    }
  }

  // The sums of a slice of the first box, and the bias.
  __device__ __forceinline__ void take(Values& v, const float (&sums)[Traits::kColumns / 2],
                                       int slice) const {
    constexpr int kTaken = kUp ? kPairs : 1;  // of kDhiddenGated one, that of a
#pragma unroll
    for (int pair = 0; pair < kTaken; ++pair) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        v.of[pair][i] = sums[pair * Traits::kOutColumns / 2 + slice * kValues + i];
        if constexpr (kHasBias) {
          const int of_group = pair * kTileGroups + slice * kSliceGroups + i / 4;
          v.of[pair][i] += widen(bias[of_group], i % 2);
        }
      }
    }
  }

  // Moves the sums of the boxes behind this one, and their biases, to where the first one's were.
  template <class Out>
  __device__ __forceinline__ void move_up(Sums& rSums, int box) {
    constexpr int kBoxValues = BoxOf<Out>::kColumns / 2;
#pragma unroll
    for (int to = 0; to < kBoxes<Out> - 1; ++to) {
#pragma unroll
      for (int i = 0; i < kBoxValues * (kUp ? kPairs : 1); ++i) {
        const int at = i / kBoxValues * Traits::kOutColumns / 2 + i % kBoxValues;
        rSums[to % kBlocks][to / kBlocks * kBoxValues + at] =
            rSums[(to + 1) % kBlocks][(to + 1) / kBlocks * kBoxValues + at];
      }
    }
    if constexpr (kHasBias) {
      constexpr int kBoxGroups = BoxOf<Out>::kColumns / kGroupColumns;
      if (box % kBlocks == kBlocks - 1) {
#pragma unroll
        for (int i = 0; i < kPairs * kTileGroups - kBoxGroups; ++i) {
          bias[i] = bias[i + kBoxGroups];
        }
      }
    }
  }

  // -- the steps ----------------------------------------------------------------------------------
  // v: the sums; of kDhidden dpre in the end.
  template <class Activation, class Out, bool kDrops>
  __device__ __forceinline__ void finish_slice(Values& v, const BoxDropout<kDrops>& dropout,
                                               int box, int slice) const {
    const typename BoxDropout<kDrops>::Words words = dropout.words(slice);
    if constexpr (kUp) {
      // relu without a gate saves the activation instead.
      if constexpr (Traits::kGated || !std::is_same_v<Activation, Relu>) {
        write<Out>(v, box, slice);
      }
      float a[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        a[i] = Activation::at(v.of[0][i]).value;
        if constexpr (Traits::kGated) {
          a[i] *= v.of[1][i];
        }
      }
      dropout.apply(a, words);
      write(a, activated_box(box), slice);
    } else if constexpr (kDhidden) {
      float a[kValues];
      differentiate<Activation>(v, a, dropout, words, box, slice);
      if constexpr (!kFromSign<Activation>) {
        dropout.apply(a, words);
        write(a, activated_box(box), slice);
      }
      write<Out>(v, box, slice);
    } else {
      dropout.apply(v.of[0], words);
      if (loads()) {
        float residual[kValues];
        read<Out>(residual, box, 0, slice);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          v.of[0][i] += residual[i];
        }
      }
      write<Out>(v, box, slice);
    }
  }

  // v: the gradient of a becomes that of hidden. a: the activation, before dropout.
  template <class Activation, bool kDrops>
  __device__ __forceinline__ void differentiate(Values& v, float (&a)[kValues],
                                                const BoxDropout<kDrops>& dropout,
                                                const typename BoxDropout<kDrops>::Words& words,
                                                int box, int slice) const {
    float hidden[kPairs][kValues];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      read<Element>(hidden[pair], box, pair, slice);
    }
    dropout.apply(v.of[0], words);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if constexpr (kFromSign<Activation>) {
        v.of[0][i] = hidden[0][i] > 0.0f ? v.of[0][i] * epilogue.dropout.keep_scale : 0.0f;
      } else {
        const ValueAndSlope act = Activation::at(hidden[0][i]);
        const float da = v.of[0][i];
        a[i] = act.value;
        v.of[0][i] = da * act.slope;
        if constexpr (Traits::kGated) {
          a[i] *= hidden[1][i];
          v.of[0][i] *= hidden[1][i];
          v.of[1][i] = da * act.value;
        }
      }
    }
  }

  // -- sums of columns ----------------------------------------------------------------------------
  // Adds the sums of a slice. Rows outside the result add 0: their da is 0.
  static __device__ __forceinline__ void add(float (&sums)[kPairs][kSums], const Values& v,
                                             int slice) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        sums[pair][2 * (kSliceGroups * slice + i / 4) + i % 2] += v.of[pair][i];
      }
    }
  }

  // Adds the sums of the eight threads with the same columns, always in the same order; then they
  // are 0 again.
  __device__ __forceinline__ void write_sums(float (&sums)[kPairs][kSums], int column_box) const {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        for (int lanes = 4; lanes < kWarp; lanes *= 2) {
          sums[pair][i] += __shfl_xor_sync(~0u, sums[pair][i], lanes);
        }
      }
      if (lane < 4) {
        const int first = pair * Traits::kOutColumns + column_box * BoxOf<Element>::kColumns;
        float* to = &shared.sums.of[group][warp][first + 2 * lane];
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          to[i / 2 * kGroupColumns + i % 2] = sums[pair][i];
        }
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        sums[pair][i] = 0.0f;
      }
    }
  }

  // Adds the sums of the four warps. The barrier before the next tile's products separates these
  // reads from its writes.
  __device__ __forceinline__ void finish_sums() const {
    static_assert(Traits::kPingPong, "a warpgroup has all rows of the tile");
    __syncwarp();  // converges for the barrier that follows
    ptx::bar_sync(kSumsBarrier + group, kWarpgroup);
    const int64_t first = int64_t{first_row / kTileRows} * kPairs;
    for (int i = warp * kWarp + lane; i < Traits::kSumColumns; i += kWarpgroup) {
      const int column = first_column + i % Traits::kOutColumns;
      if (column < args.columns) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < kWarpsPerGroup; ++other) {
          sum += shared.sums.of[group][other][i];
        }
        epilogue.sums[(first + i / Traits::kOutColumns) * args.columns + column] = sum;
      }
    }
  }
};

}  // namespace fastattn::ffn
