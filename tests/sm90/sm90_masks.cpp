// Runs the Hopper forward's masks and dropout on the host for test_sm90_masks.py: the unchanged
// classification kernels, then what every consumer thread does to its scores, collected into a
// matrix.
#include "machine.h"

#include <cstring>
#include <vector>

#include "attention/sm90/masks/dense_mask.cuh"
#include "attention/sm90/masks/dropout_sm90.cuh"
#include "attention/sm90/masks/mask_classes_sm90.cuh"

using namespace fastattn;
using namespace fastattn::attention;

namespace {

constexpr int kThreads = 128;
constexpr int kWarpSize = 32;

// The position of register i of a thread's accumulators in a block of 64 rows.
struct Place {
  int row, column;
};
Place place(sm90::AccumulatorThread thread, int i) {
  return {thread.upper_row() + i / 2 % 2 * sm90::kRowStep,
          i / 4 * 8 + thread.first_column() + i % 2};
}

struct MaskedScores : LengthsAndBounds {
  int heads, queries, keys, tile_rows;
  DenseMask mask;
  std::vector<int> bits, plain;
  std::vector<BlockClass> classes;
};

constexpr int kBiasBytes = kMaskRows * sm90::kRowBytes;

// Loads an additive mask as TMA does: rows of 128 bytes, zero outside of the mask, and in each row
// the 16-byte pieces permuted by the row number.
void load_bias(const MaskedScores& p, int batch, int head, int first_row, int first_key, int keys) {
  const MaskLayout& layout = p.mask.layout;
  const int bytes = p.mask.type == MaskType::kFloat32 ? 4 : 2, columns = sm90::kRowBytes / bytes;
  const int rows = layout.rows == 1 ? 1 : kMaskRows, there = layout.rows == 1 ? 1 : p.queries;
  for (int i = 0; i < rows * keys; ++i) {
    const int row = (layout.rows == 1 ? 0 : first_row) + i / keys, key = i % keys;
    const int at = key / columns * kBiasBytes + i / keys * sm90::kRowBytes + key % columns * bytes;
    char* to = on_host::shared + (at ^ (at >> 7 & 7) << 4);
    std::memset(to, 0, bytes);
    if (row < there && first_key + key < p.keys) {
      const int64_t from = batch * p.mask.batch_stride + head * p.mask.head_stride +
                           row * p.mask.row_stride + first_key + key;
      std::memcpy(to, static_cast<const char*>(p.mask.data) + from * bytes, bytes);
    }
  }
}

template <class Element, int kCount>
void add_pieces(float (&s)[kCount], bool one_row, float scale, sm90::AccumulatorThread thread) {
  constexpr int kColumns = sm90::kRowBytes / sizeof(Element);
  for (int column = 0; column < 2 * kCount; column += kColumns) {
    add_bias_piece<Element, false>(&s[column / 2], on_host::shared + column / kColumns * kBiasBytes,
                                   one_row, scale, thread);
  }
}

// scores[head of all batches][queries][keys] as the consumers leave them, -inf where a pair is
// blocked; live[head][row tile][keys]: which values are not zeroed in that tile.
template <int kBlock>
void attend(MaskedScores& p, int batch_count, float scale, float* scores, uint8_t* live) {
  constexpr int kCount = kBlock / 2;
  const MaskLayout& layout = p.mask.layout;
  const bool additive = p.mask.type != MaskType::kBool;
  const int row_tiles = ceil_div(p.queries, p.tile_rows);
  for (int bh = 0; bh < batch_count * p.heads; ++bh) {
    const int batch = bh / p.heads, head = bh % p.heads;
    const int queries = computed_queries(p, batch, p.queries);
    const int keys = computed_keys(p, batch, p.keys);
    const Bounds bounds = bounds_of(p, queries, keys);
    for (int row = 0; row < row_tiles * p.tile_rows; row += kMaskRows) {
      const int tile = row / p.tile_rows, group = row % p.tile_rows / kMaskRows;
      const BlockClass* classes =
          p.mask.classes + classes_at(layout, class_head(layout, batch, head), tile);
      const int first_row = tile * p.tile_rows;
      const Range rows = {first_row, smaller(first_row + p.tile_rows, queries)};
      const Range loaded = blocks_touching(keys_of_some(rows, bounds, keys), kBlock);
      for (int n = last_with_work(classes, loaded.end - 1, loaded.begin); n >= 0;
           n = last_with_work(classes, n - 1, loaded.begin)) {
        const bool masked = classes[n].flags >> group & 1;
        for (int key = 0; key < kBlock && n * kBlock + key < p.keys; ++key) {
          live[(bh * row_tiles + tile) * p.keys + n * kBlock + key] =
              !(classes[n].flags & kHasDead) || (classes[n].live[key / 32] >> key % 32 & 1);
        }
        for (int t = 0; t < kThreads; ++t) {
          const sm90::AccumulatorThread thread = {t / kWarpSize, t % kWarpSize};
          float s[kCount];
          for (int i = 0; i < kCount; ++i) {
            const int column = n * kBlock + place(thread, i).column;
            const int r = row + place(thread, i).row;
            // Scores of rows and keys past the end may be anything.
            s[i] =
                r < queries && column < keys ? scores[(bh * p.queries + r) * p.keys + column] : NAN;
          }
          const int upper = row + thread.upper_row();
          if (masked) {
            if (additive) {
              if (t == 0) {
                load_bias(p, batch, head, row, n * kBlock, kBlock);
              }
              const bool one_row = layout.rows == 1;
              if (p.mask.type == MaskType::kFloat32) {
                add_pieces<float>(s, one_row, scale, thread);
              } else {
                add_pieces<__nv_bfloat16>(s, one_row, scale, thread);
              }
            } else {
              mask_bits(s, p.mask.bits, layout, mask_head(layout, batch, head), upper, p.queries, n,
                        thread);
            }
            if (classes[n].flags >> (kRestrictedBit + group) & 1) {
              mask_block<true>(s, n * kBlock, upper, bounds, keys, thread);
            }
          } else if (additive) {
            sm90::scale_rows(s, {scale, scale});
          }
          for (int i = 0; i < kCount; ++i) {
            const int column = n * kBlock + place(thread, i).column;
            const int r = row + place(thread, i).row;
            // In the second half of `scores`: the computed ones.
            if (r < queries && column < p.keys) {
              scores[(int64_t{batch_count} * p.heads + bh) * p.queries * p.keys +
                     int64_t{r} * p.keys + column] = s[i];
            } else if (r < queries && s[i] != -INFINITY) {
              scores[0] = NAN;  // a key past the end has a weight
            }
          }
        }
      }
    }
  }
}

}  // namespace

// sizes: batch, heads, queries, keys, head_dim, type, then the mask's sizes and strides.
// bounds: left, right, diagonal, whether sequences have their own diagonals.
// tile_strides: of its tiles. scores: the input, then space for as many results, initially -inf.
extern "C" void classify_and_mask(const int64_t* sizes, const void* data, const int64_t* tiles,
                                  const int64_t* tile_strides, const int* bounds,
                                  const int* query_lengths, const int* key_lengths, float scale,
                                  float* scores, uint8_t* live) {
  MaskedScores p;
  const int batch = static_cast<int>(sizes[0]), head_dim = static_cast<int>(sizes[4]);
  p.heads = static_cast<int>(sizes[1]);
  p.queries = static_cast<int>(sizes[2]);
  p.keys = static_cast<int>(sizes[3]);
  p.bounds = {bounds[0], bounds[1], bounds[2]};
  p.own_diagonals = bounds[3];
  p.query_lengths = {query_lengths, false};
  p.key_lengths = {key_lengths, false};
  p.mask.data = data;
  p.mask.type = static_cast<MaskType>(sizes[5]);
  const int64_t* mask_sizes = sizes + 6;
  const int64_t* strides = sizes + 10;
  p.mask.batch_stride = strides[0];
  p.mask.head_stride = strides[1];
  p.mask.row_stride = strides[2];
  p.mask.column_stride = strides[3];
  p.mask.tiles = tiles;
  for (int i = 0; i < 4; ++i) {
    p.mask.tile_strides[i] = tiles ? tile_strides[i] : 0;
  }
  const Variant variant = p.mask.type == MaskType::kBool ? Variant::kMask : Variant::kBias;
  p.tile_rows = forward_tile_rows(head_dim, variant);
  p.mask.layout = mask_layout(static_cast<int>(mask_sizes[0]), static_cast<int>(mask_sizes[1]),
                              static_cast<int>(mask_sizes[2]), batch, query_lengths || key_lengths,
                              p.queries, p.keys, p.tile_rows, forward_block(head_dim, variant));
  const MaskLayout& layout = p.mask.layout;
  // Filled, because workspace is not initialised.
  p.bits.assign(bit_words(layout), -1);
  p.plain.assign(plain_count(layout), -1);
  p.classes.resize(class_count(layout));
  std::memset(static_cast<void*>(p.classes.data()), 0xFF, p.classes.size() * sizeof(BlockClass));
  p.mask.bits = reinterpret_cast<uint32_t*>(p.bits.data());
  p.mask.plain = p.plain.data();
  p.mask.classes = p.classes.data();
  on_host::launch(plain_count(layout), kPackThreads,
                  [&] { pack_mask_kernel(p.mask, p.queries, p.keys); });
  on_host::launch(class_count(layout), p.tile_rows,
                  [&] { classify_mask_kernel(p.mask, p, p.queries, p.keys); });
  switch (layout.block) {
    case 128:
      attend<128>(p, batch, scale, scores, live);
      break;
    case 112:
      attend<112>(p, batch, scale, scores, live);
      break;
    case 64:
      attend<64>(p, batch, scale, scores, live);
      break;
    default:
      attend<80>(p, batch, scale, scores, live);
  }
}

// kept [64, 128] of the block of weights at (row, column), all of them 1 before.
extern "C" void drop(int64_t seed, uint32_t stream, uint32_t batch, uint32_t head, int threshold,
                     int first_row, int first_column, float* kept) {
  constexpr int kBlock = 128;
  std::vector<uint32_t> keys(dropout::units(kBlock));
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = dropout::column_key(seed, stream, dropout::units(first_column) + i);
  }
  for (int t = 0; t < kThreads; ++t) {
    const sm90::AccumulatorThread thread = {t / kWarpSize, t % kWarpSize};
    float p[kBlock / 2];
    for (float& weight : p) {
      weight = 1.0f;
    }
    const uint32_t unit = dropout::lattice_unit(first_row + thread.upper_row());
    drop_block(p, keys.data(), dropout::row_key(seed, stream, batch, head, unit), threshold,
               thread);
    for (int i = 0; i < kBlock / 2; ++i) {
      kept[place(thread, i).row * kBlock + place(thread, i).column] = p[i];
    }
  }
}
