// Attention's CPU kernels on std::thread, for ThreadSanitizer: OpenMP's runtime, on which torch
// runs them, is not instrumented and would look like races. Each case runs on one thread and then
// on several, and must give the same bits. Prints the cases; the exit status says whether all
// agreed.
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>
#include <vector>

#include "attention/cpu/launch.h"

using namespace fastattn;
using namespace fastattn::attention::cpu;

namespace {

constexpr int kThreads = 4;

constexpr auto kOnThreads = [](int64_t workers, const auto& body) {
  std::vector<std::thread> threads;
  for (int64_t worker = 0; worker < workers; ++worker) {
    threads.emplace_back([&body, worker] { body(worker); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
};

using Floats = std::vector<float>;

// Numbers in [-1, 1) without a pattern that tiles could share.
Floats numbers(int64_t count, uint32_t seed) {
  Floats result(count);
  for (float& x : result) {
    seed = seed * 1664525u + 1013904223u;
    x = static_cast<float>(seed >> 8) * 0x1p-23f - 1.0f;
  }
  return result;
}

struct Case {
  const char* name;
  int64_t batch, heads, kv_heads;
  int queries, keys;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k;  // empty: not packed
  bool mask, dropout, changes;                      // changes: bias by distance, soft cap and sinks
};

// Results of one run: out, lse, the mean of the weights and the gradients, which include those of
// the weights.
std::vector<Floats> results(const Case& c, int64_t threads) {
  constexpr int kHeadDim = 24, kValueDim = 20;
  const bool packed = !c.cu_seqlens_q.empty();
  const int64_t rows = packed ? c.cu_seqlens_q.back() : c.batch * c.queries;
  const int64_t key_rows = packed ? c.cu_seqlens_k.back() : c.batch * c.keys;
  const int64_t lse_rows = rows * c.heads;
  Floats q = numbers(lse_rows * kHeadDim, 1), dout = numbers(lse_rows * kValueDim, 2);
  Floats k = numbers(key_rows * c.kv_heads * kHeadDim, 3);
  Floats v = numbers(key_rows * c.kv_heads * kValueDim, 4);
  Floats bias = numbers(c.heads * c.keys, 5);
  const int64_t distances = c.queries + c.keys - 1;
  Floats distance_bias = numbers(c.heads * distances, 6), sinks = numbers(c.heads, 7);
  Floats out(dout.size()), lse(lse_rows), dq(q.size()), dk(k.size()), dv(v.size()),
      dbias(bias.size()), ddistance_bias(distance_bias.size()), dsinks(sinks.size());
  const bool with_weights = !packed;
  Floats weights(with_weights ? c.batch * c.queries * c.keys : 0);
  Floats dweights = numbers(static_cast<int64_t>(weights.size()), 8);

  // Storage [batch, positions, heads, columns], which is [positions, heads, columns] when packed.
  const auto view = [&](Floats& x, int64_t heads, int64_t positions, int64_t columns) {
    return TensorView{x.data(), packed ? 0 : positions * heads * columns, columns, heads * columns};
  };
  Problem a = {};
  a.type = DType::kFloat32;
  a.batch = c.batch;
  a.heads = c.heads;
  a.kv_heads = c.kv_heads;
  a.queries = c.queries;
  a.keys = c.keys;
  a.head_dim = kHeadDim;
  a.value_dim = kValueDim;
  a.q = view(q, c.heads, c.queries, kHeadDim);
  a.k = view(k, c.kv_heads, c.keys, kHeadDim);
  a.v = view(v, c.kv_heads, c.keys, kValueDim);
  a.lse_strides = packed ? TensorView{nullptr, 0, rows, 1}
                         : TensorView{nullptr, c.heads * c.queries, c.queries, 1};
  if (packed) {
    a.cu_seqlens_q = c.cu_seqlens_q.data();
    a.cu_seqlens_k = c.cu_seqlens_k.data();
  }
  const auto mask_view = [&](Floats& x) {
    MaskView mask = {MaskType::kFloat32, x.data(), {1, c.heads, 1, c.keys}, {0, c.keys, 0, 1}};
    return mask;
  };
  if (c.mask) {
    a.mask = mask_view(bias);
  }
  a.window_left = c.queries + c.keys;
  a.causal = attention::kBottomRight;
  a.scale = 0.3f;
  if (c.changes) {
    a.distance_bias = {distance_bias.data(), 1, 0, distances, distances, c.keys - 1};
    a.softcap = 2.0f;
    a.sinks = sinks.data();
  }
  a.dropout = {c.dropout ? 40 : 0, c.dropout ? 256.0f / 216.0f : 1.0f, 17u, 23u};

  Forward forward = {a, view(out, c.heads, c.queries, kValueDim), lse.data(), nullptr};
  if (with_weights) {
    forward.weights = weights.data();
    forward.average = true;
  }
  Floats workspace(forward_floats(forward, threads));
  const int64_t forward_size = static_cast<int64_t>(workspace.size());
  launch_forward(portable::kKernels, forward, workspace.data(), forward_size, threads, kOnThreads);

  Backward backward = {};
  static_cast<Problem&>(backward) = a;
  backward.out = forward.out;
  backward.dout = view(dout, c.heads, c.queries, kValueDim);
  backward.lse = lse.data();
  if (with_weights) {
    backward.dweights = dweights.data();
    backward.average = true;
    backward.exact_delta = true;
  }
  backward.dq = view(dq, c.heads, c.queries, kHeadDim);
  backward.dk = view(dk, c.kv_heads, c.keys, kHeadDim);
  backward.dv = view(dv, c.kv_heads, c.keys, kValueDim);
  if (c.mask) {
    backward.dmask = mask_view(dbias);
  }
  if (c.changes) {
    backward.ddistance_bias = {ddistance_bias.data(), 1, 0, distances, distances, c.keys - 1};
    backward.dsinks = dsinks.data();
  }
  workspace.assign(backward_floats(backward, lse_rows, threads), 0.0f);
  const int64_t backward_size = static_cast<int64_t>(workspace.size());
  launch_backward(portable::kKernels, backward, lse_rows, workspace.data(), backward_size, threads,
                  kOnThreads);
  return {out, lse, weights, dq, dk, dv, dbias, ddistance_bias, dsinks};
}

}  // namespace

int main() {
  const Case cases[] = {
      {"one pass over the gradients", 4, 4, 4, 200, 230, {}, {}, true, true, true},
      {"queries and keys in passes of their own", 1, 2, 1, 330, 400, {}, {}, false, true, true},
      {"one query, several splits", 1, 4, 2, 1, 2500, {}, {}, false, false, true},
      {"few queries, several splits", 1, 4, 2, 3, 2500, {}, {}, true, true, true},
      {"packed",
       4,
       3,
       3,
       210,
       300,
       {0, 210, 210, 211, 330},
       {0, 300, 320, 450, 450},
       false,
       true,
       true},
      {"packed, one query each",
       3,
       4,
       1,
       1,
       2100,
       {0, 1, 1, 2},
       {0, 2100, 2110, 3600},
       false,
       false,
       true},
      {"no change of scores", 4, 4, 4, 200, 230, {}, {}, true, true, false},
  };
  bool all_agree = true;
  for (const Case& c : cases) {
    const std::vector<Floats> alone = results(c, 1), together = results(c, kThreads);
    bool agrees = true;
    for (size_t i = 0; i < alone.size(); ++i) {
      agrees =
          agrees && !memcmp(alone[i].data(), together[i].data(), alone[i].size() * sizeof(float));
    }
    std::printf("%s: %s\n", c.name, agrees ? "the same bits" : "OTHER BITS");
    all_agree = all_agree && agrees;
  }
  return all_agree ? 0 : 1;
}
