// Epilogue of a tile: from the accumulators to the results in global memory.
//
// A warp finishes its part of a tile box by box: 16 rows of 128 bytes. TMA loads what the epilogue
// reads (hidden, or the residual) while the products are computed, and stores the results of a box
// while the warp computes the next one; a result replaces in shared memory what was loaded. Threads
// keep the values that wgmma gives them: matrices of 8 x 8 elements pass between registers and
// shared memory. TMA reads zeros outside tensors and does not write there.
#pragma once

#include "ffn/sm90/activation.cuh"
#include "ffn/sm90/box_dropout.cuh"
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
  // 16 columns of a box are in registers at a time: [group of eight][row of two][column of two].
  static constexpr int kPartColumns = sm90::kMmaK, kPartGroups = kPartColumns / kGroupColumns;
  static constexpr int kValues = 4 * kPartGroups;
  // Sums of columns of a thread, [group of eight][column of two].
  static constexpr int kSums = kDhidden ? 2 * BoxOf<Element>::kColumns / kGroupColumns : 1;

  struct Pair {
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
  uint32_t bias[kHasBias ? kPairs * kTileGroups : 1];  // pairs of adjacent columns

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
    if (Traits::kMayBeFloat && epilogue.out_is_float) {
      of(float());
    } else {
      of(Element());
    }
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
        if (activates) {
          __syncwarp();
        }
        const int use = (tiles_before * kBoxes<Out> + box) / Traits::kSlots;
        shared.loaded[group][warp][box % Traits::kSlots].wait(use % 2);
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
  // The address of a lane's 16 bytes in 16 columns of a box: of row lane % 16, the left or the
  // right half.
  __device__ __forceinline__ uint32_t piece_of(uint32_t box, int part) const {
    return box + sm90::swizzled_offset(lane % sm90::kWarpRows,
                                       kPartGroups * part + lane / sm90::kWarpRows);
  }
  // Address of the fp32 values i and i + 1.
  __device__ __forceinline__ float2* pair_of(int box, int part, int i) const {
    const sm90::AccumulatorThread thread = {0, lane};
    const int row = thread.upper_row() + i / 2 % 2 * sm90::kRowStep;
    const int column = (kPartGroups * part + i / 4) * kGroupColumns + thread.first_column();
    constexpr int kPieceColumns = sm90::kPieceBytes / static_cast<int>(sizeof(float));
    char* data = reinterpret_cast<char*>(&shared.results[group][warp][box % Traits::kSlots][0]);
    return reinterpret_cast<float2*>(data + sm90::swizzled_offset(row, column / kPieceColumns) +
                                     column % kPieceColumns * sizeof(float));
  }

  template <class Out>
  __device__ __forceinline__ void read(float (&v)[kValues], int box, int pair, int part) const {
    if constexpr (std::is_same_v<Out, float>) {
#pragma unroll
      for (int i = 0; i < kValues; i += 2) {
        const float2 two = *pair_of(box, part, i);
        v[i] = two.x;
        v[i + 1] = two.y;
      }
    } else {
      uint32_t words[kValues / 2];
      ptx::ldmatrix_x4(piece_of(result_box(box, pair), part), words);
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        v[i] = widen(words[i / 2], i % 2);
      }
    }
  }
  template <class Out>
  __device__ __forceinline__ void write(const Values& v, int box, int part) const {
    if constexpr (std::is_same_v<Out, float>) {
#pragma unroll
      for (int i = 0; i < kValues; i += 2) {
        *pair_of(box, part, i) = {v.of[0][i], v.of[0][i + 1]};
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        write(v.of[pair], result_box(box, pair), part);
      }
    }
  }
  __device__ __forceinline__ void write(const float (&v)[kValues], uint32_t box, int part) const {
    ptx::stmatrix_x4(piece_of(box, part), ptx::pack<Element>(v[0], v[1]),
                     ptx::pack<Element>(v[2], v[3]), ptx::pack<Element>(v[4], v[5]),
                     ptx::pack<Element>(v[6], v[7]));
  }
  static __device__ __forceinline__ float widen(uint32_t pair, int i) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      // The upper half of an fp32: one instruction, where a conversion is two.
      return __uint_as_float(i == 1 ? pair & 0xffff0000u : pair << 16);
    }
    return static_cast<float>(reinterpret_cast<const Pair&>(pair).of[i]);
  }

  // -- the tile -----------------------------------------------------------------------------------
  using Accumulators = float[kBlocks][Traits::kColumns / 2];

  __device__ __forceinline__ void run(const Accumulators& rSums) {
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

  template <class Activation, class Out>
  __device__ __forceinline__ void finish(const Accumulators& rSums) {
    // The derivative of relu without a gate: a is 0 where it was dropped.
    constexpr bool kFromSign = Traits::kStep == Step::kDhidden && std::is_same_v<Activation, Relu>;
    constexpr int kParts = BoxOf<Out>::kColumns / kPartColumns;
    const bool drops = kHasDropout && !kFromSign && epilogue.dropout.seed;
    BoxDropout dropout(epilogue.dropout, lane);
    float sums[kPairs][kSums];  // of columns
#pragma unroll
    for (int box = 0; box < kBoxes<Out>; ++box) {
      const int block = box % kBlocks;
      if (drops) {
        const Place place = place_of<Out>(box);
        dropout.set_rows(place.row);
        if (block == 0) {
          dropout.set_columns(place.column);
        }
      }
      begin_box<Out>(box);
      if constexpr (kHasBias) {
        ptx::pin(bias);  // the compiler would keep all of it in fp32, from box to box
      }
#pragma unroll
      for (int part_of_box = 0; part_of_box < kParts; ++part_of_box) {
        Values v;
        take(v, rSums[block], box / kBlocks * kParts + part_of_box);
        BoxDropout::Words words = {};
        if (drops) {
          words = dropout.words(part_of_box);
        }
        finish_part<Activation, Out, kFromSign>(v, dropout, words, box, part_of_box);
        if constexpr (kDhidden) {
          add(sums, v, part_of_box, block == 0);
        }
      }
      end_box<Out>(box);
      if constexpr (kDhidden) {
        if (block == kBlocks - 1) {
          write_sums(sums, box / kBlocks);
        }
      }
    }
  }

  // The sums of 16 columns of the tile, and the bias.
  __device__ __forceinline__ void take(Values& v, const float (&sums)[Traits::kColumns / 2],
                                       int part_of_tile) const {
    constexpr int kTaken = kUp ? kPairs : 1;  // of kDhiddenGated one, that of a
#pragma unroll
    for (int pair = 0; pair < kTaken; ++pair) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        v.of[pair][i] = sums[pair * Traits::kOutColumns / 2 + part_of_tile * kValues + i];
        if constexpr (kHasBias) {
          const int of_group = pair * kTileGroups + part_of_tile * kPartGroups + i / 4;
          v.of[pair][i] += widen(bias[of_group], i % 2);
        }
      }
    }
  }

  // -- the steps ----------------------------------------------------------------------------------
  // v: the sums; of kDhidden dpre in the end.
  template <class Activation, class Out, bool kFromSign>
  __device__ __forceinline__ void finish_part(Values& v, const BoxDropout& dropout,
                                              const BoxDropout::Words& words, int box,
                                              int part_of_box) const {
    if constexpr (kUp) {
      if (epilogue.out) {
        write<Out>(v, box, part_of_box);
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
      write(a, activated_box(box), part_of_box);
    } else if constexpr (kDhidden) {
      float a[kValues];
      differentiate<Activation, kFromSign>(v, a, dropout, words, box, part_of_box);
      if constexpr (!kFromSign) {
        if (epilogue.activated) {
          dropout.apply(a, words);
          write(a, activated_box(box), part_of_box);
        }
      }
      write<Out>(v, box, part_of_box);
    } else {
      if constexpr (kHasDropout) {
        dropout.apply(v.of[0], words);
      }
      if (loads()) {
        float residual[kValues];
        read<Out>(residual, box, 0, part_of_box);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          v.of[0][i] += residual[i];
        }
      }
      write<Out>(v, box, part_of_box);
    }
  }

  // v: the gradient of a becomes that of hidden. a: the activation, before dropout.
  template <class Activation, bool kFromSign>
  __device__ __forceinline__ void differentiate(Values& v, float (&a)[kValues],
                                                const BoxDropout& dropout,
                                                const BoxDropout::Words& words, int box,
                                                int part_of_box) const {
    float hidden[kPairs][kValues];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      read<Element>(hidden[pair], box, pair, part_of_box);
    }
    if constexpr (!kFromSign) {
      dropout.apply(v.of[0], words);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if constexpr (kFromSign) {
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
  // Adds 16 columns to the sums. Rows outside the result add 0: their da is 0.
  static __device__ __forceinline__ void add(float (&sums)[kPairs][kSums], const Values& v,
                                             int part_of_box, bool is_first) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        float& sum = sums[pair][2 * (kPartGroups * part_of_box + i / 4) + i % 2];
        const bool is_upper = i / 2 % 2 == 0;
        sum = is_first && is_upper ? v.of[pair][i] : sum + v.of[pair][i];
      }
    }
  }

  // Adds the sums of the eight threads with the same columns, always in the same order.
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
    }
  }

  // Adds the sums of the four warps. The barrier before the next tile's products separates these
  // reads from its writes.
  __device__ __forceinline__ void finish_sums() const {
    static_assert(Traits::kPingPong, "a warpgroup has all rows of the tile");
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
