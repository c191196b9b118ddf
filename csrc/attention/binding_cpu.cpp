// fastattn_cpu's attention: from tensors to the kernels' arguments, and the split over torch's
// threads.
#include <algorithm>

#include "attention/problem_cpu.h"
#include "common/dropout.h"
#include "common/torch_binding.h"

namespace fastattn::attention {
namespace {

// Multiply-adds below which another thread costs more than it brings; one query (decoding) is bound
// by memory.
constexpr int64_t kGrain = 1 << 20;
constexpr int64_t kDecodeGrain = 1 << 17;
// Pieces of work for a worker, where tasks differ in length.
constexpr int64_t kPiecesPerWorker = 8;
// Positions are added up in 32 bits.
constexpr int64_t kMaxPositions = 1 << 28;

// -- arguments -----------------------------------------------------------------------------------
TensorView view(const Tensor& x, const char* name, DType type, int64_t batch, int64_t heads,
                int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 4 && dtype_of(x, name) == type && x.size(0) == batch &&
                      x.size(1) == heads && x.size(2) == rows && x.size(3) == columns,
                  name, " must be a CPU tensor of shape [", batch, ", ", heads, ", ", rows, ", ",
                  columns, "] and the type of q");
  STD_TORCH_CHECK(columns <= 1 || x.numel() == 0 || x.stride(3) == 1, name,
                  " must have a contiguous last dimension");
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

MaskType mask_type(const Tensor& mask) {
  switch (mask.scalar_type()) {
    case ScalarType::Bool:
      return MaskType::kBool;
    case ScalarType::Float:
      return MaskType::kFloat32;
    case ScalarType::BFloat16:
      return MaskType::kBFloat16;
    case ScalarType::Half:
      return MaskType::kFloat16;
    case ScalarType::Double:
      return MaskType::kFloat64;
    default:
      STD_TORCH_CHECK(false, "mask must be bool, float64, float32, bfloat16 or float16");
  }
}

MaskView mask_view(const Tensor& mask, const char* name, const Problem& a) {
  const int64_t wanted[4] = {a.batch, a.heads, a.queries, a.keys};
  STD_TORCH_CHECK(mask.is_cpu() && mask.dim() == 4, name, " must be a CPU tensor of 4 dimensions");
  MaskView result;
  result.type = mask_type(mask);
  result.data = mask.data_ptr();
  for (int d = 0; d < 4; ++d) {
    STD_TORCH_CHECK(mask.size(d) == wanted[d] || mask.size(d) == 1, name, " must have size 1 or ",
                    wanted[d], " in dimension ", d, ", got ", mask.size(d));
    result.sizes[d] = mask.size(d);
    result.strides[d] = mask.size(d) == 1 ? 0 : mask.stride(d);
  }
  return result;
}

Lengths lengths(const std::optional<Tensor>& tensor, const char* name, int64_t batch,
                int64_t queries) {
  if (!tensor) {
    return {};
  }
  const bool per_query = tensor->dim() == 2;
  const ScalarType type = tensor->scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, name,
                  " must be int32 or int64");
  Lengths result;
  result.data = data_of<void>(*tensor, name, per_query ? batch * queries : batch, type);
  result.wide = type == ScalarType::Long;
  result.stride = per_query ? queries : 0;
  return result;
}

// The shape alone: what scratch memory and the split of the work depend on.
Problem shape(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys,
              int64_t head_dim, int64_t value_dim) {
  STD_TORCH_CHECK(queries <= kMaxPositions && keys <= kMaxPositions, "at most ", kMaxPositions,
                  " queries and keys, got ", queries, " and ", keys);
  STD_TORCH_CHECK(kv_heads == 0 ? heads == 0 : heads % kv_heads == 0,
                  "heads of q must be a multiple of those of k");
  Problem a = {};
  a.batch = batch;
  a.heads = heads;
  a.kv_heads = kv_heads;
  a.queries = static_cast<int>(queries);
  a.keys = static_cast<int>(keys);
  a.head_dim = static_cast<int>(head_dim);
  a.value_dim = static_cast<int>(value_dim);
  return a;
}

struct Options {
  int64_t causal, window_left, window_right;
  double scale, dropout_p;
  const std::optional<Tensor>& dropout_seed;
  int64_t dropout_stream;
};

Problem problem(const Tensor& q, const Tensor& k, const Tensor& v,
                const std::optional<Tensor>& mask, const std::optional<Tensor>& key_lengths,
                const std::optional<Tensor>& query_lengths, const Options& options) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
                  "q, k and v must have 4 dimensions");
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), head_dim = q.size(3);
  const int64_t kv_heads = k.size(1), keys = k.size(2), value_dim = v.size(3);
  Problem a = shape(batch, heads, kv_heads, queries, keys, head_dim, value_dim);
  a.type = dtype_of(q, "q");
  a.q = view(q, "q", a.type, batch, heads, queries, head_dim);
  a.k = view(k, "k", a.type, batch, kv_heads, keys, head_dim);
  a.v = view(v, "v", a.type, batch, kv_heads, keys, value_dim);
  if (mask) {
    a.mask = mask_view(*mask, "mask", a);
  }
  a.key_lengths = lengths(key_lengths, "key_lengths", batch, queries);
  a.query_lengths = lengths(query_lengths, "query_lengths", batch, queries);
  constexpr int64_t kBottomRight = 2;
  const int64_t unlimited = queries + keys;
  const auto side = [&](int64_t window) {
    return static_cast<int>(window < 0 ? unlimited : std::min(window, unlimited));
  };
  a.band = {side(options.window_left), options.causal ? 0 : side(options.window_right),
            options.causal == kBottomRight ? a.keys - a.queries : 0};
  a.scale = static_cast<float>(options.scale);
  a.dropout.threshold = dropout::threshold(options.dropout_p);
  if (a.dropout.threshold > 0) {
    STD_TORCH_CHECK(options.dropout_seed.has_value(),
                    "dropout_seed must be given when dropout_p > 0");
    const int64_t seed =
        *data_of<const int64_t>(*options.dropout_seed, "dropout_seed", 1, ScalarType::Long);
    const uint32_t stream = static_cast<uint32_t>(options.dropout_stream);
    a.dropout.scale = dropout::keep_scale(a.dropout.threshold);
    a.dropout.row_key = dropout::stream_key(dropout::kRowTag, seed, stream);
    a.dropout.column_key = dropout::stream_key(dropout::kColumnTag, seed, stream);
  }
  return a;
}

// -- the split over threads ----------------------------------------------------------------------
// Workers worth starting for all the pairs of a shape.
int64_t workers_for(const Problem& a, int64_t products) {
  const double pairs = static_cast<double>(a.batch * a.heads) * a.queries * a.keys;
  const double work = pairs * (a.head_dim + a.value_dim) * static_cast<double>(products);
  const double grain = static_cast<double>(a.queries == 1 ? kDecodeGrain : kGrain);
  const int64_t threads = torch::stable::get_num_threads();
  return std::clamp<int64_t>(static_cast<int64_t>(std::min(work / grain, 1e6)), 1, threads);
}

constexpr int64_t kForwardProducts = 1;
constexpr int64_t kBackwardProducts = 3;

// Each worker's piece of scratch memory.
struct Team {
  int64_t workers;
  float* scratch;
  int64_t floats;

  template <class Work>
  void run(int64_t tasks, int64_t piece, const Work& work) const {
    Queue queue(tasks, piece);
    const int64_t busy = std::clamp<int64_t>(tasks, 1, workers);
    torch::stable::parallel_for(0, busy, 1, [&](int64_t first, int64_t last) {
      for (int64_t worker = first; worker < last; ++worker) {
        work(queue, scratch + worker * floats);
      }
    });
  }
};

Team team_of(int64_t workers, int64_t floats, Scratch& memory) {
  return {workers, memory.take<float>(workers * floats), floats};
}

// Tasks that a worker draws at once: those of a (batch, kv head) where there are enough of them.
int64_t piece_of(const Problem& a, int64_t tasks_of_kv_head, int64_t workers) {
  const int64_t kv_heads = a.batch * a.kv_heads;
  if (workers == 1 || kv_heads >= 4 * workers) {
    return tasks_of_kv_head;
  }
  return kv_heads * tasks_of_kv_head / (kPiecesPerWorker * workers);
}

// -- ops -----------------------------------------------------------------------------------------
int64_t forward_scratch(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries,
                        int64_t keys, int64_t head_dim, int64_t value_dim) {
  const Problem a = shape(batch, heads, kv_heads, queries, keys, head_dim, value_dim);
  return workers_for(a, kForwardProducts) * ForwardScratch(a, nullptr).floats;
}

int64_t backward_scratch(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries,
                         int64_t keys, int64_t head_dim, int64_t value_dim) {
  const Problem a = shape(batch, heads, kv_heads, queries, keys, head_dim, value_dim);
  return padded(batch * heads * queries) +
         workers_for(a, kBackwardProducts) * BackwardScratch(a, nullptr).floats;
}

// Threads may have become more since the scratch memory was measured.
int64_t workers_within(const Problem& a, int64_t products, int64_t available, int64_t floats) {
  return std::clamp<int64_t>(available / floats, 1, workers_for(a, products));
}

void attention_fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask,
                   std::optional<Tensor> key_lengths, std::optional<Tensor> query_lengths,
                   int64_t causal, int64_t window_left, int64_t window_right, double scale,
                   double dropout_p, std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                   Tensor out, Tensor lse, Tensor scratch) {
  const Options options = {causal,    window_left,  window_right,  scale,
                           dropout_p, dropout_seed, dropout_stream};
  Forward a = {problem(q, k, v, mask, key_lengths, query_lengths, options), {}, nullptr};
  a.out = view(out, "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.lse = data_of<float>(lse, "lse", a.batch * a.heads * a.queries, ScalarType::Float);
  Scratch memory(scratch);
  const int64_t floats = ForwardScratch(a, nullptr).floats;
  const int64_t workers = workers_within(a, kForwardProducts, scratch.numel(), floats);
  const Team team = team_of(workers, floats, memory);
  const auto run = [&](Queue& queue, float* mine) { kernels().forward(a, queue, mine); };
  if (a.queries == 1) {
    team.run(a.batch * a.kv_heads, piece_of(a, 1, workers), run);
  } else {
    team.run(a.batch * a.heads * a.row_tiles(), piece_of(a, a.group() * a.row_tiles(), workers),
             run);
  }
}

void attention_bwd(std::optional<Tensor> dout, std::optional<Tensor> dlse, Tensor q, Tensor k,
                   Tensor v, std::optional<Tensor> mask, std::optional<Tensor> key_lengths,
                   std::optional<Tensor> query_lengths, Tensor out, Tensor lse, int64_t causal,
                   int64_t window_left, int64_t window_right, double scale, double dropout_p,
                   std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                   std::optional<Tensor> dq, std::optional<Tensor> dk, std::optional<Tensor> dv,
                   std::optional<Tensor> dmask, Tensor scratch) {
  const Options options = {causal,    window_left,  window_right,  scale,
                           dropout_p, dropout_seed, dropout_stream};
  Backward a = {};
  static_cast<Problem&>(a) = problem(q, k, v, mask, key_lengths, query_lengths, options);
  const int64_t statistics = a.batch * a.heads * a.queries;
  const auto view_if = [&](const std::optional<Tensor>& x, const char* name, int64_t heads,
                           int64_t rows, int64_t columns) {
    return x ? view(*x, name, a.type, a.batch, heads, rows, columns) : TensorView{};
  };
  a.out = view(out, "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.dout = view_if(dout, "dout", a.heads, a.queries, a.value_dim);
  a.dq = view_if(dq, "dq", a.heads, a.queries, a.head_dim);
  a.dk = view_if(dk, "dk", a.kv_heads, a.keys, a.head_dim);
  a.dv = view_if(dv, "dv", a.kv_heads, a.keys, a.value_dim);
  a.lse = data_of<const float>(lse, "lse", statistics, ScalarType::Float);
  a.dlse = dlse ? data_of<const float>(*dlse, "dlse", statistics, ScalarType::Float) : nullptr;
  if (dmask) {
    a.dmask = mask_view(*dmask, "dmask", a);
  }
  a.exact_delta = dmask.has_value() && a.type != DType::kFloat32;

  Scratch memory(scratch);
  a.delta = memory.take<float>(padded(statistics));
  const int64_t floats = BackwardScratch(a, nullptr).floats;
  const int64_t workers =
      workers_within(a, kBackwardProducts, scratch.numel() - padded(statistics), floats);
  const Team team = team_of(workers, floats, memory);
  const auto run = [&](void (*kernel)(const Backward&, Queue&, float*), int64_t tasks,
                       int64_t piece) {
    team.run(tasks, piece, [&](Queue& queue, float* mine) { kernel(a, queue, mine); });
  };
  const Kernels& isa = kernels();
  const int64_t kv_heads = a.batch * a.kv_heads;
  const int64_t query_tiles = a.group() * a.row_tiles();
  run(isa.delta, kv_heads * query_tiles, piece_of(a, query_tiles, workers));
  if (dmask) {
    run(isa.dmask,
        a.dmask.sizes[0] * a.dmask.sizes[1] * (a.dmask.sizes[2] == 1 ? 1 : a.row_tiles()) *
            (a.dmask.sizes[3] == 1 ? 1 : a.key_tiles()),
        1);
  }
  const bool wants_keys = dk.has_value() || dv.has_value();
  // Five products a tile in one pass, seven in two. One pass has fewer tasks, and the last round of
  // them may leave workers idle.
  const int64_t rounds = ceil_div(kv_heads, workers);
  if (dq && wants_keys && 5 * rounds * workers <= 7 * kv_heads) {
    return run(isa.all_gradients, kv_heads, 1);
  }
  if (dq) {
    run(isa.dq, kv_heads * query_tiles, piece_of(a, query_tiles, workers));
  }
  if (wants_keys) {
    run(isa.dkv, kv_heads * a.key_tiles(), piece_of(a, a.key_tiles(), workers));
  }
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_cpu, m) {
  m.def(
      "attention_fwd_scratch(int batch, int heads, int kv_heads, int queries, int keys, "
      "int head_dim, int value_dim) -> int");
  m.def(
      "attention_bwd_scratch(int batch, int heads, int kv_heads, int queries, int keys, "
      "int head_dim, int value_dim) -> int");
  m.def(
      "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key_lengths, "
      "Tensor? query_lengths, int causal, int window_left, int window_right, float scale, "
      "float dropout_p, Tensor? dropout_seed, int dropout_stream, Tensor(a!) out, Tensor(b!) lse, "
      "Tensor(c!) scratch) -> ()");
  m.def(
      "attention_bwd(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? mask, "
      "Tensor? key_lengths, Tensor? query_lengths, Tensor out, Tensor lse, int causal, "
      "int window_left, int window_right, float scale, float dropout_p, Tensor? dropout_seed, "
      "int dropout_stream, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dmask, "
      "Tensor(e!) scratch) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("attention_fwd_scratch", TORCH_BOX(&fastattn::attention::forward_scratch));
  m.impl("attention_bwd_scratch", TORCH_BOX(&fastattn::attention::backward_scratch));
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CPU, m) {
  m.impl("attention_fwd", TORCH_BOX(&fastattn::attention::attention_fwd));
  m.impl("attention_bwd", TORCH_BOX(&fastattn::attention::attention_bwd));
}
