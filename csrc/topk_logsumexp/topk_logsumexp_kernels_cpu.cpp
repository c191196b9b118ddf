// The CPU kernel of topk_logsumexp, compiled once for each instruction set: one pass over a row for
// its maximum, one for everything else while the row is in the L1 cache.
#include <cmath>
#include <limits>

#include "cpu/exponential.h"
#include "topk_logsumexp/topk_logsumexp.h"

namespace fastattn::topk_logsumexp::FASTATTN_ISA {

using namespace fastattn::FASTATTN_ISA;

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

inline bool any_above(Float v, float threshold) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(v, splat(threshold), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(v, splat(threshold), _CMP_GT_OQ)) != 0;
#else
  const Mask above = v > threshold;
  return (above[0] | above[1] | above[2] | above[3]) != 0;
#endif
}

// Calls body(vector, index of its first lane); lanes beyond the row are -inf.
template <class Body>
inline __attribute__((always_inline)) void for_row(const float* row, int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    body(load(row + i), i);
  }
  if (i < n) {
    float rest[kLanes];
    store(rest, splat(kNegInf));
    memcpy(rest, row + i, sizeof(float) * (n - i));
    body(load(rest), i);
  }
}

// The largest values so far in descending order.
class TopK {
 public:
  TopK(float* values, int64_t* indices, int64_t count, int64_t first)
      : values_(values), indices_(indices), count_(count) {
    for (int64_t i = 0; i < count; ++i) {
      values[i] = kNegInf;
      indices[i] = first;
    }
  }

  float smallest() const { return values_[count_ - 1]; }

  void insert(float value, int64_t index) {
    if (!(value > smallest())) {
      return;
    }
    int64_t i = count_ - 1;
    for (; i > 0 && value > values_[i - 1]; --i) {
      values_[i] = values_[i - 1];
      indices_[i] = indices_[i - 1];
    }
    values_[i] = value;
    indices_[i] = index;
  }

 private:
  float* values_;
  int64_t* indices_;
  int64_t count_;
};

inline void run_row(const float* row, const Problem& p, float* logsumexp, float* values,
                    int64_t* indices) {
  Float high = splat(kNegInf);
  decltype(high != high) nan = {};  // comparisons ignore NaN
  for_row(row, p.V, [&](Float v, int64_t) {
    high = larger_of(v, high);
    nan |= v != v;
  });
  bool has_nan = false;
  for (int i = 0; i < kLanes; ++i) {
    has_nan |= nan[i] != 0;
  }
  const float m = largest(high);

  TopK topk(values, indices, p.count, p.first);
  Float total = {};
  for_row(row, p.V, [&](Float v, int64_t at) {
    total += exponential(v - m);
    if (__builtin_expect(any_above(v, topk.smallest()), 0)) {
      float found[kLanes];
      store(found, v);
      for (int i = 0; i < kLanes; ++i) {
        if (at + i >= p.first) {
          topk.insert(found[i], at + i);
        }
      }
    }
  });
  *logsumexp = has_nan         ? std::numeric_limits<float>::quiet_NaN()
               : std::isinf(m) ? m
                               : m + std::log(sum(total));
}

inline void run(const Problem& p, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) {
    run_row(p.logits + row * p.V, p, p.logsumexp + row, p.values + row * p.count,
            p.indices + row * p.count);
  }
}

const Kernels kKernels = {run};

}  // namespace fastattn::topk_logsumexp::FASTATTN_ISA
