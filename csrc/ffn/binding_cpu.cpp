// fastattn_cpu's feed-forward network: from tensors to products, their scratch memory, and the
// split over torch's threads.
#include <algorithm>

#include "common/dropout.h"
#include "common/torch_binding.h"
#include "ffn/ffn.h"

namespace fastattn::ffn {
namespace {

// Multiply-adds, and numbers packed or dropped, below which another thread costs more than it
// brings.
constexpr int64_t kGrain = 1 << 20;
constexpr int64_t kPackGrain = 1 << 16;
// Tasks for each worker, where the shape allows them.
constexpr int64_t kTasksPerWorker = 4;
constexpr int64_t kLeastPanels = 2;

// -- arguments -----------------------------------------------------------------------------------
int64_t rows_in(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) {
    rows *= x.size(d);
  }
  return rows;
}

// Contiguous of any rank, or of two dimensions, one of them contiguous.
Matrix matrix(const Tensor& x, const char* name, int64_t rows, int64_t columns, DType type) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() >= 1 && dtype_of(x, name) == type && rows_in(x) == rows &&
                      x.size(-1) == columns,
                  name, " must be a CPU tensor of ", rows, " rows of ", columns,
                  " elements of the expected type");
  Matrix result = {memory_of(x, name), rows, columns, columns, 1};
  if (x.is_contiguous()) {
    return result;
  }
  STD_TORCH_CHECK(x.dim() == 2, name, " must be contiguous or have two dimensions");
  result.row_stride = x.stride(0);
  result.column_stride = x.stride(1);
  if (columns <= 1) {
    result.column_stride = 1;
  } else if (result.column_stride != 1 && rows <= 1) {
    result.row_stride = 1;
  }
  STD_TORCH_CHECK(result.row_stride == 1 || result.column_stride == 1, name,
                  " must be contiguous in one dimension");
  return result;
}

void* vector_if(const std::optional<Tensor>& x, const char* name, int64_t count, DType type) {
  if (!x || x->numel() == 0) {
    return nullptr;
  }
  STD_TORCH_CHECK(dtype_of(*x, name) == type, name, " must have the expected type");
  return data_of<void>(*x, name, count, x->scalar_type());
}

// -- scratch memory ------------------------------------------------------------------------------
// Pieces of the workspace; without one it only measures.
class Carver {
 public:
  explicit Carver(const Tensor* workspace) {
    if (workspace) {
      left_ = workspace->numel();
      next_ = data_of<float>(*workspace, "scratch", left_, ScalarType::Float);
    }
  }

  float* take(int64_t floats) {
    floats = ceil_div(floats, kMaxLanes) * kMaxLanes;
    used_ += floats;
    if (!next_) {
      return nullptr;
    }
    STD_TORCH_CHECK(floats <= left_, "scratch must have ", floats - left_, " more elements");
    float* piece = next_;
    next_ += floats;
    left_ -= floats;
    return piece;
  }
  float* take(int64_t count, DType type) {
    return take(type == DType::kFloat32 ? count : ceil_div(count, 2));
  }
  int64_t used() const { return used_; }
  int64_t left() const { return left_; }

 private:
  float* next_ = nullptr;
  int64_t left_ = 0, used_ = 0;
};

struct Shape {
  DType type;
  int64_t rows, D, wide, F, out;  // of x, hidden, activated, y

  bool gated() const { return wide != F; }
  int64_t row_blocks() const { return ceil_div(rows, kBlockRows); }
};

struct ForwardScratch {
  float *packed, *activated, *keys, *output_keys;

  ForwardScratch(const Shape& s, bool keeps_activated, Carver& carver) {
    packed = carver.take(std::max(Product::packed_floats(s.rows, s.D, s.wide, s.gated()),
                                  Product::packed_floats(s.rows, s.F, s.out)));
    activated = carver.take(keeps_activated ? 0 : s.rows * s.F, s.type);
    keys = carver.take(ceil_div(s.F, 4));
    output_keys = carver.take(ceil_div(s.out, 4));
  }
};

struct BackwardScratch {
  float *packed, *activated, *dropped, *dhidden, *partials, *output_partials, *keys, *output_keys;

  BackwardScratch(const Shape& s, Carver& carver) {
    packed = carver.take(std::max({
        Product::packed_floats(s.rows, s.out, s.F),
        Product::packed_floats(s.rows, s.wide, s.D),
        Product::packed_floats(s.wide, s.rows, s.D),
        Product::packed_floats(s.out, s.rows, s.F),
        // Gradients whose columns lie together are computed transposed.
        Product::packed_floats(s.D, s.wide, s.rows),
        Product::packed_floats(s.D, s.rows, s.wide),
        Product::packed_floats(s.F, s.rows, s.out),
    }));
    activated = carver.take(s.rows * s.F, s.type);
    dropped = carver.take(s.rows * s.out, s.type);
    dhidden = carver.take(s.rows * s.wide, s.type);
    partials = carver.take(s.row_blocks() * s.wide);
    output_partials = carver.take(s.row_blocks() * s.out);
    keys = carver.take(ceil_div(s.F, 4));
    output_keys = carver.take(ceil_div(s.out, 4));
  }
};

int64_t workers_for(const Shape& s) {
  const int64_t work = s.rows * s.wide * std::max(s.D, s.out);
  return std::clamp<int64_t>(work / kGrain, 1, torch::stable::get_num_threads());
}

// -- products ------------------------------------------------------------------------------------
class Team {
 public:
  // What is left of the workspace belongs to the workers.
  explicit Team(Carver& carver)
      : workers_(carver.left() / kWorkerFloats), scratch_(carver.take(workers_ * kWorkerFloats)) {
    STD_TORCH_CHECK(workers_ > 0, "scratch must have room for a worker");
  }

  void run(Product p) const {
    if (p.finish.kind == Finish::kStore && p.finish.out.column_stride != 1) {
      const Matrix a = p.a;
      p.a = p.b.transposed();
      p.b = a.transposed();
      p.finish.out = p.finish.out.transposed();
    }
    if (p.a.rows == 0 || p.b.columns == 0) {
      return;
    }
    const Kernels& isa = kernels();
    const bool gated = p.gate > 0 && p.gate != p.b.columns;
    const int64_t panels =
        gated ? ceil_div(p.gate, isa.panel / 2) : ceil_div(p.b.columns, isa.panel);
    if (p.shares_panels()) {
      const int64_t grain =
          std::max<int64_t>(1, kPackGrain / (std::max<int64_t>(p.b.rows, 1) * isa.panel));
      torch::stable::parallel_for(0, panels, grain,
                                  [&](int64_t first, int64_t last) { isa.pack(p, first, last); });
    } else {
      p.packed = nullptr;
    }

    const int64_t work = p.a.rows * p.b.columns * p.a.columns;
    const int64_t workers = std::clamp<int64_t>(work / kGrain, 1, workers_);
    const int64_t row_blocks = p.row_blocks();
    int64_t most = kBlockPanels;
    while (most > kLeastPanels && workers > 1 &&
           row_blocks * ceil_div(panels, most) < kTasksPerWorker * workers) {
      most /= 2;
    }
    const int64_t column_blocks = ceil_div(panels, most);
    const int64_t tasks = row_blocks * column_blocks;
    Queue queue(tasks);
    torch::stable::parallel_for(0, std::min(workers, tasks), 1, [&](int64_t first, int64_t last) {
      for (int64_t worker = first; worker < last; ++worker) {
        for (int64_t task; queue.draw(&task);) {
          const int64_t first_panel = task % column_blocks * most;
          isa.multiply(p, task / column_blocks, first_panel, std::min(first_panel + most, panels),
                       scratch_ + worker * kWorkerFloats);
        }
      }
    });
  }

 private:
  int64_t workers_;
  float* scratch_;
};

Dropout dropout_of(double p, const std::optional<Tensor>& seed, uint32_t stream, int64_t columns,
                   float* keys) {
  Dropout result;
  result.threshold = dropout::threshold(p);
  if (result.threshold == 0) {
    return result;
  }
  STD_TORCH_CHECK(seed.has_value(), "dropout_seed must be given when dropout_p > 0");
  result.scale = dropout::keep_scale(result.threshold);
  result.seed = *data_of<const int64_t>(*seed, "dropout_seed", 1, ScalarType::Long);
  result.stream = stream;
  uint32_t* words = reinterpret_cast<uint32_t*>(keys);
  const uint32_t key = dropout::stream_key(dropout::kColumnTag, result.seed, stream);
  for (int64_t unit = 0; unit < ceil_div(columns, 4); ++unit) {
    words[unit] = dropout::absorb(key, static_cast<uint32_t>(unit));
  }
  result.column_keys = words;
  return result;
}

void reduce(const float* partials, int64_t count, int64_t columns, const Tensor& result,
            const char* name, DType type) {
  void* data = vector_if(result, name, columns, type);
  const Kernels& isa = kernels();
  const int64_t grain = std::max<int64_t>(64, kPackGrain / std::max<int64_t>(count, 1));
  torch::stable::parallel_for(0, columns, grain, [&](int64_t first, int64_t last) {
    isa.reduce(partials, count, columns, data, type, first, last);
  });
}

Shape shape_of(const Tensor& x, const Tensor& w1, const Tensor& w2) {
  STD_TORCH_CHECK(x.dim() >= 1 && w1.dim() == 2 && w2.dim() == 2,
                  "x must have a dimension, w1 and w2 two");
  return {dtype_of(x, "x"), rows_in(x), x.size(-1), w1.size(0), w2.size(1), w2.size(0)};
}

// -- ops -----------------------------------------------------------------------------------------
int64_t floats_for(const Shape& s, int64_t used) {
  return used + workers_for(s) * kWorkerFloats;
}

DType type_of_size(int64_t bytes) {
  return bytes == 4 ? DType::kFloat32 : DType::kBFloat16;
}

int64_t ffn_fwd_scratch(int64_t rows, int64_t D, int64_t wide, int64_t F, int64_t out,
                        int64_t element_bytes, bool keeps_activated) {
  const Shape s = {type_of_size(element_bytes), rows, D, wide, F, out};
  Carver carver(nullptr);
  ForwardScratch(s, keeps_activated, carver);
  return floats_for(s, carver.used());
}

int64_t ffn_bwd_scratch(int64_t rows, int64_t D, int64_t wide, int64_t F, int64_t out,
                        int64_t element_bytes) {
  const Shape s = {type_of_size(element_bytes), rows, D, wide, F, out};
  Carver carver(nullptr);
  BackwardScratch(s, carver);
  return floats_for(s, carver.used());
}

void ffn_fwd(Tensor x, Tensor w1, std::optional<Tensor> b1, Tensor w2, std::optional<Tensor> b2,
             std::optional<Tensor> residual, int64_t activation, double dropout_p,
             double output_dropout_p, std::optional<Tensor> dropout_seed, int64_t dropout_stream,
             Tensor y, Tensor hidden, Tensor scratch) {
  const Shape s = shape_of(x, w1, w2);
  const bool keeps_activated =
      static_cast<Activation>(activation) == Activation::kRelu && !s.gated();
  Carver carver(&scratch);
  const ForwardScratch memory(s, keeps_activated, carver);
  const Team team(carver);
  const uint32_t stream = static_cast<uint32_t>(dropout_stream);

  Product first(s.type);
  first.a = matrix(x, "x", s.rows, s.D, s.type);
  first.b = matrix(w1, "w1", s.wide, s.D, s.type).transposed();
  first.gate = s.gated() ? s.F : 0;
  first.packed = memory.packed;
  first.finish.kind = Finish::kActivate;
  first.finish.bias = vector_if(b1, "b1", s.wide, s.type);
  first.finish.dropout = dropout_of(dropout_p, dropout_seed, stream, s.F, memory.keys);
  first.finish.activation = static_cast<Activation>(activation);
  first.finish.hidden = vector_if(hidden, "hidden", s.rows * s.wide, s.type);
  first.finish.activated = memory.activated;
  team.run(first);

  Product second(s.type);
  void* activated = keeps_activated ? first.finish.hidden : memory.activated;
  second.a = {activated, s.rows, s.F, s.F, 1};
  second.b = matrix(w2, "w2", s.out, s.F, s.type).transposed();
  second.packed = memory.packed;
  second.finish.bias = vector_if(b2, "b2", s.out, s.type);
  second.finish.dropout = dropout_of(output_dropout_p, dropout_seed,
                                     stream + dropout::kSecondStream, s.out, memory.output_keys);
  second.finish.out_type = dtype_of(y, "y");
  second.finish.out = matrix(y, "y", s.rows, s.out, second.finish.out_type);
  second.finish.residual = vector_if(residual, "residual", s.rows * s.out, second.finish.out_type);
  STD_TORCH_CHECK(second.finish.out.column_stride == 1, "y must be contiguous");
  team.run(second);
}

void ffn_bwd(Tensor dy, Tensor x, Tensor w1, Tensor w2, Tensor hidden, int64_t activation,
             double dropout_p, double output_dropout_p, std::optional<Tensor> dropout_seed,
             int64_t dropout_stream, Tensor dx, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2,
             Tensor scratch) {
  const Shape s = shape_of(x, w1, w2);
  const bool kept_activated =
      static_cast<Activation>(activation) == Activation::kRelu && !s.gated();
  Carver carver(&scratch);
  const BackwardScratch memory(s, carver);
  const Team team(carver);
  const Kernels& isa = kernels();
  const uint32_t stream = static_cast<uint32_t>(dropout_stream);
  const int64_t blocks = s.row_blocks();

  // The gradient of the second product, and b2's.
  Output output = {s.rows, s.out, dtype_of(dy, "dy"), {}, {}, s.type};
  output.dy = matrix(dy, "dy", s.rows, s.out, output.dy_type);
  STD_TORCH_CHECK(output.dy.column_stride == 1, "dy must have contiguous rows");
  output.dropout = dropout_of(output_dropout_p, dropout_seed, stream + dropout::kSecondStream,
                              s.out, memory.output_keys);
  output.partials = db2.numel() > 0 ? memory.output_partials : nullptr;
  Matrix dy_dropped = output.dy;
  if (output.dropout.threshold > 0 || output.dy_type != s.type) {
    output.dropped = memory.dropped;
    dy_dropped = {memory.dropped, s.rows, s.out, s.out, 1};
  }
  if (output.dropped || output.partials) {
    const int64_t grain = std::max<int64_t>(1, kPackGrain / (kBlockRows * (s.out + 1)));
    torch::stable::parallel_for(0, blocks, grain, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        isa.drop_output(output, block);
      }
    });
  }
  if (output.partials) {
    reduce(memory.output_partials, blocks, s.out, db2, "db2", s.type);
  }

  // The gradient of the hidden layer, b1's, and the activations again.
  const bool wants_w2 = dw2.numel() > 0, wants_b1 = db1.numel() > 0;
  Product product(s.type);
  product.packed = memory.packed;
  product.a = dy_dropped;
  product.b = matrix(w2, "w2", s.out, s.F, s.type);
  product.gate = s.gated() ? s.F : 0;
  product.finish.kind = Finish::kDifferentiate;
  product.finish.dropout = dropout_of(dropout_p, dropout_seed, stream, s.F, memory.keys);
  product.finish.activation = static_cast<Activation>(activation);
  product.finish.hidden = vector_if(hidden, "hidden", s.rows * s.wide, s.type);
  product.finish.dhidden = memory.dhidden;
  product.finish.activated = !kept_activated && wants_w2 ? memory.activated : nullptr;
  product.finish.partials = wants_b1 ? memory.partials : nullptr;
  const Matrix dhidden = {memory.dhidden, s.rows, s.wide, s.wide, 1};
  const Matrix activated = {kept_activated ? product.finish.hidden : memory.activated, s.rows, s.F,
                            s.F, 1};
  if (dx.numel() > 0 || dw1.numel() > 0 || wants_b1 || product.finish.activated) {
    team.run(product);
  }
  if (wants_b1) {
    reduce(memory.partials, blocks, s.wide, db1, "db1", s.type);
  }

  const auto store = [&](const Matrix& a, const Matrix& b, const Tensor& out, const char* name) {
    if (out.numel() > 0) {
      Product gradient(s.type);
      gradient.packed = memory.packed;
      gradient.a = a;
      gradient.b = b;
      gradient.finish.out_type = s.type;
      gradient.finish.out = matrix(out, name, a.rows, b.columns, s.type);
      team.run(gradient);
    }
  };
  store(dhidden, matrix(w1, "w1", s.wide, s.D, s.type), dx, "dx");
  store(dhidden.transposed(), matrix(x, "x", s.rows, s.D, s.type), dw1, "dw1");
  store(dy_dropped.transposed(), activated, dw2, "dw2");
}

}  // namespace
}  // namespace fastattn::ffn

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_cpu, m) {
  m.def(
      "ffn_fwd_scratch(int rows, int d, int wide, int f, int out, int element_bytes, "
      "bool keeps_activated) -> int");
  m.def("ffn_bwd_scratch(int rows, int d, int wide, int f, int out, int element_bytes) -> int");
  m.def(
      "ffn_fwd(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? residual, "
      "int activation, float dropout_p, float output_dropout_p, Tensor? dropout_seed, "
      "int dropout_stream, Tensor(a!) y, Tensor(b!) hidden, Tensor(c!) scratch) -> ()");
  m.def(
      "ffn_bwd(Tensor dy, Tensor x, Tensor w1, Tensor w2, Tensor hidden, int activation, "
      "float dropout_p, float output_dropout_p, Tensor? dropout_seed, int dropout_stream, "
      "Tensor(a!) dx, Tensor(b!) dw1, Tensor(c!) db1, Tensor(d!) dw2, Tensor(e!) db2, "
      "Tensor(f!) scratch) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("ffn_fwd_scratch", TORCH_BOX(&fastattn::ffn::ffn_fwd_scratch));
  m.impl("ffn_bwd_scratch", TORCH_BOX(&fastattn::ffn::ffn_bwd_scratch));
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CPU, m) {
  m.impl("ffn_fwd", TORCH_BOX(&fastattn::ffn::ffn_fwd));
  m.impl("ffn_bwd", TORCH_BOX(&fastattn::ffn::ffn_bwd));
}
