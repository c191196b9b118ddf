// The forward with attention weights on CPU, [batch, heads, queries, keys] or their mean over
// heads.
//
// The loop over tiles of keys is that of forward.h, so out and lse have its bits. The weights of
// every tile stay in the workspace, relative to the highest exponent so far; at the end they are
// rescaled to the row's highest exponent and sum, as its earlier sums were, and written or added to
// those of the heads before. For few queries decode.h computes out and lse, and a pass without
// values the weights.
//
// A task computes all heads of its rows in order, so the bits of a mean depend neither on the
// number of threads nor on which rows share a chunk.
#pragma once

#include "attention/cpu/forward.h"

namespace fastattn::attention::cpu::FASTATTN_ISA {

// The weights of a tile of queries of one head.
class TileWeights {
 public:
  static constexpr bool kWanted = true;

  TileWeights(const Forward& a, const QueryTile& at, const ForwardWorkspace& memory)
      : a_(a), memory_(memory), rows_(a.rows_in_tile()), count_(at.end - at.first) {
    const int64_t head = a.average ? at.sequence.b : at.sequence.b * a.heads + at.h;
    result_ = a.weights + (head * a.queries + at.first) * a.keys;
    add_ = a.average && at.h > 0;
    part_ = a.average ? 1.0f / a.heads : 1.0f;
    std::fill_n(memory.highest, a.key_tiles() * rows_, kNotComputed);
  }
  // Rows that forward_tile did not write have no key.
  ~TileWeights() { clear(written_, count_, 0, a_.keys); }

  float* scores_of(int n, float* s) const { return s + n * rows_ * kTileKeys; }

  void end_tile(int n, Range live, const SoftmaxState& state) const {
    std::copy(state.m + live.begin, state.m + live.end, memory_.highest + n * rows_ + live.begin);
  }

  // factors: what the weights relative to the row's highest exponent are multiplied by.
  void write(const RowRanges& rows, const SoftmaxState& state, const float* factors) const {
    written_ = rows.count;
    for (int n = 0; n < a_.key_tiles(); ++n) {
      const int first = n * kTileKeys, in_tile = smaller(a_.keys - first, kTileKeys);
      const int keys = larger(smaller(rows.some.end - first, in_tile), 0);
      clear(0, rows.count, first + keys, in_tile - keys);
      for (int i = 0; i < rows.count; ++i) {
        const float then = memory_.highest[n * rows_ + i], now = state.m[i];
        if (then != then) {
          clear(i, i + 1, first, keys);
          continue;
        }
        const float rescale = then == now ? 1.0f : power(splat(then - now))[0];
        const float factor = rescale * factors[i] * part_;
        const float* const weights = scores_of(n, memory_.s) + i * kTileKeys;
        float* const result = result_ + i * int64_t{a_.keys} + first;
        for_vectors(keys, [&](auto lanes, int64_t j) {
          Float w = lanes.load(weights + j) * factor;
          if (add_) {
            w += lanes.load(result + j);
          }
          lanes.store(result + j, w);
        });
      }
    }
  }

 private:
  static constexpr float kNotComputed = std::numeric_limits<float>::quiet_NaN();

  void clear(int from, int end, int first, int keys) const {
    for (int i = from; i < end && !add_; ++i) {
      memset(result_ + i * int64_t{a_.keys} + first, 0, sizeof(float) * keys);
    }
  }

  const Forward& a_;
  const ForwardWorkspace& memory_;
  int64_t rows_;
  int count_;
  float* result_;
  bool add_;
  float part_;
  mutable int written_ = 0;
};

template <class C>
void weights_of_rows(const Forward& a, Queue& queue, const ForwardWorkspace& memory) {
  const int64_t tiles = a.row_tiles();
  int64_t task, last;
  while (queue.take(&task, &last)) {
    // The tiles of one sequence after the other.
    for (int64_t end; task < last; task = end) {
      const int64_t b = task / tiles;
      end = std::min(last, (b + 1) * tiles);
      for (int64_t first_head = 0; first_head < a.heads; first_head += a.group()) {
        const int64_t head = (b * a.heads + first_head) * tiles;
        PackedKeys<C> keys(a, memory, QueryTile(a, head));
        for (int64_t h = 0; h < a.group(); ++h) {
          for (int64_t t = task; t < end; ++t) {
            const QueryTile at(a, head + h * tiles + t % tiles);
            forward_tile<C>(a, at, keys, memory, TileWeights(a, at, memory));
          }
        }
      }
    }
  }
}

void weights(const Forward& a, Queue& queue, float* workspace) {
  const ForwardWorkspace memory(a, workspace, true);
  with_units(a.type, [&](auto u) { weights_of_rows<decltype(u)>(a, queue, memory); });
}

}  // namespace fastattn::attention::cpu::FASTATTN_ISA
