// A consumer warpgroup of the kernel of an additive mask's gradient. See dmask.cuh.
#pragma once

#include "attention/sm90/backward/dmask/dmask_sum.cuh"
#include "attention/sm90/backward/dmask/tile_products.cuh"

namespace fastattn::attention {

template <class Traits>
struct DmaskConsumer : TileProducts<Traits, DmaskStorage<Traits>, DmaskArguments> {
  using Products = TileProducts<Traits, DmaskStorage<Traits>, DmaskArguments>;
  using Products::kCount, Products::kKeys, Products::kWords;
  using Products::shared, Products::args, Products::group, Products::thread;

  RingPosition<1> bias;
  float rSum[kCount];

  using Products::Products;

  __device__ __forceinline__ void run(const DmaskLoop& loop, Range items) {
#pragma unroll
    for (float& sum : rSum) {
      sum = 0.0f;
    }
#pragma unroll 1
    for (int number = items.begin; number < items.end; ++number) {
      const DmaskItem item = item_of<Traits>(loop, number);
      if (has_pairs<Traits>(args, item)) {
        add_item(item);
      }
    }
    write_sum(shared, args, loop, group, thread, rSum);
  }

  __device__ __forceinline__ void add_item(const DmaskItem& item) {
    float rS[kCount], rDp[kCount];
    this->issue_products(rS, rDp);
    if (!args.bias_by_tma) {
      is_wide(args.mask) ? fetch_bias<uint32_t>(item) : fetch_bias<uint16_t>(item);
    }
    this->await_products(rS, rDp);
    if (args.bias_by_tma) {
      shared.bias_slot.full.wait(bias.phase());
    }
    switch (args.mask.type) {
      case MaskType::kBFloat16:
        add_gradients<__nv_bfloat16>(item, rS, rDp);
        break;
      case MaskType::kFloat16:
        add_gradients<__half>(item, rS, rDp);
        break;
      default:
        add_gradients<float>(item, rS, rDp);
    }
    __syncwarp();
    if (args.bias_by_tma && thread.lane == 0) {
      shared.bias_slot.empty.arrive();
    }
    bias.advance();
  }

  // For a mask that TMA cannot read: each warp loads its 16 rows while the products run.
  template <class Word>
  __device__ __forceinline__ void fetch_bias(const DmaskItem& item) {
    constexpr int kPieceKeys = sm90::kPieceBytes / sizeof(Word);
    constexpr int kRowKeys = sm90::kRowBytes / sizeof(Word);
    const DenseMask& mask = args.mask;
    const int own_row = group * kMmaRows + thread.warp * sm90::kWarpRows;
    const Word* from = static_cast<const Word*>(mask.data) + item.batch * mask.batch_stride +
                       item.head * mask.head_stride;
#pragma unroll 8
    for (int i = thread.lane; i < sm90::kWarpRows * kKeys; i += kWarp) {
      const int line = own_row + i / kKeys, key = i % kKeys;
      // Rows and keys past the end read the last one.
      const Word word = from[smaller(item.row + line, args.queries - 1) * mask.row_stride +
                             smaller(item.key + key, args.keys - 1) * mask.column_stride];
      char* to = shared.bias[key / kRowKeys] +
                 sm90::swizzled_offset(line, key % kRowKeys / kPieceKeys) +
                 key % kPieceKeys * sizeof(Word);
      *reinterpret_cast<Word*>(to) = word;
    }
    __syncwarp();
  }

  template <class MaskElement>
  __device__ __forceinline__ void add_gradients(const DmaskItem& item, float (&s)[kCount],
                                                const float (&dp)[kCount]) {
    const int queries = computed_queries(args, item.batch, args.queries);
    const int keys = computed_keys(args, item.batch, args.keys);
    const Bounds bounds = bounds_of(args, queries, keys);
    const int first_key = item.key + thread.first_column();
    if constexpr (Traits::kScores) {
      cap_scores(s, args.modifications, args.scale_log2);
      if (const float* biases =
              biases_of(args, args.modifications, item.batch, item.head, queries, keys)) {
        add_biases<1>(s, biases + (first_key - item.row - group * kMmaRows - thread.upper_row()));
      }
    }
    const int64_t head = (int64_t{1} * item.batch * args.heads + item.head) * args.lse_delta_rows;
    constexpr int kOctetBytes = kOctet * sizeof(MaskElement);
    const bool one_row = args.bias_by_tma && has_one_row(args.mask);
    const uint32_t byte = thread.first_column() * sizeof(MaskElement);
    float lse[2], delta[2];
    Range allowed[2];
    uint32_t first[2];  // of the thread's bytes in its rows of the mask
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = item.row + group * kMmaRows + thread.upper_row() + half * sm90::kRowStep;
      // Rows and keys past the end read the last one.
      const int existing = smaller(row, args.queries - 1);
      lse[half] = args.lse[head + existing];
      delta[half] = args.delta ? args.delta[head + existing] : 0.0f;
      allowed[half] = row < queries ? keys_of_row(row, bounds, keys) : Range{0, 0};
      const uint32_t line = one_row ? 0 : row - item.row;
      first[half] =
          sm90::swizzled_offset(line, byte / sm90::kPieceBytes) + byte % sm90::kPieceBytes;
    }
    uint32_t words[kWords] = {};
    draw_words(item, words);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const int octet = i / 2, half = i % 2;
      const int place = octet * kOctetBytes;
      // The swizzle is an xor, and so is the offset of another octet.
      const char* from =
          shared.bias[place / sm90::kRowBytes] + (first[half] ^ place % sm90::kRowBytes);
      const float2 pair = pair_of(reinterpret_cast<const MaskElement*>(from));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int key = first_key + octet * kOctet + j;
        const int at = octet * kOctetRegisters + 2 * half + j;
        const float added = j ? pair.y : pair.x;
        const float p = Traits::kScores
                            ? ptx::ex2(fmaf(added, kLog2e, s[at]) - lse[half])
                            : ptx::ex2((fmaf(s[at], args.scale, added) - lse[half]) * kLog2e);
        const bool is_allowed = contains(allowed[half], key) && !(added <= kLowest<MaskElement>);
        float kept = dp[at];
        if constexpr (Traits::kDropout) {
          kept *= this->is_kept(words[octet / 2 * 2 + j], 2 * half + octet % 2)
                      ? args.dropout.keep_scale
                      : 0.0f;
        }
        rSum[at] += is_allowed ? p * (kept - delta[half]) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void draw_words(const DmaskItem& item,
                                             uint32_t (&words)[kWords]) const {
    if (drops<Traits>(args.dropout)) {
      const int row = smaller(item.row + group * kMmaRows + thread.upper_row(), args.queries - 1);
      const int64_t head = int64_t{1} * item.batch * args.heads + item.head;
      const uint32_t row_key =
          args.row_keys[head * (args.lse_delta_rows / 2) + dropout::lattice_unit(row)];
      Products::draw_words(row_key, item.key, words);
    }
  }
};

}  // namespace fastattn::attention
