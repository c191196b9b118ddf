// fastattn_cpu's feed-forward network: from tensors to products, their scratch memory, and the
// steps that torch's threads share. The forward is one parallel region, and so is the backward.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <utility>
#include <vector>

#include "common/dropout.h"
#include "common/torch_binding.h"
#include "ffn/ffn.h"
#include "ffn/steps.h"

namespace fastattn::ffn {
namespace {

// Multiply-adds below which another thread costs more than it brings, and numbers packed, dropped
// or summed by a task.
constexpr int64_t kGrain = 1 << 21;
constexpr int64_t kPackGrain = 1 << 15;
// Tasks for each worker, where the shape allows them.
constexpr int64_t kTasksPerWorker = 4;
constexpr int64_t kLeastPanels = 2;

// -- arguments ------------------------------------------------------------------------------------
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

// -- scratch memory -------------------------------------------------------------------------------
// Fresh memory gets its pages when it is touched: 4 KB take 1.3 us, 2 MB 90 us (Linux 6.18 on a
// virtual EPYC), so small pages are a tenth of a backward pass in bf16. A large workspace has room
// to begin and end where large pages do.
constexpr int64_t kLargePage = 2 << 20, kLargePages = 4;

int64_t with_room_for_large_pages(int64_t floats) {
  const bool large = floats * static_cast<int64_t>(sizeof(float)) >= kLargePages * kLargePage;
  return large ? floats + 2 * kLargePage / static_cast<int64_t>(sizeof(float)) : floats;
}

// Pieces of the workspace; without one it only measures.
class Carver {
 public:
  explicit Carver(const Tensor* workspace) {
    if (workspace) {
      left_ = workspace->numel();
      next_ = data_of<float>(*workspace, "scratch", left_, ScalarType::Float);
      if (left_ * static_cast<int64_t>(sizeof(float)) >= (kLargePages + 2) * kLargePage) {
        use_large_pages();
      }
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
  void use_large_pages() {
#if defined(__linux__)
    const uintptr_t start = reinterpret_cast<uintptr_t>(next_);
    const uintptr_t first = ceil_div(start, kLargePage) * kLargePage;
    next_ = reinterpret_cast<float*>(first);
    left_ -= (first - start) / sizeof(float);
    const int64_t bytes = left_ * static_cast<int64_t>(sizeof(float)) / kLargePage * kLargePage;
    madvise(next_, bytes, MADV_HUGEPAGE);  // a refusal changes nothing
#endif
  }

  float* next_ = nullptr;
  int64_t left_ = 0, used_ = 0;
};

struct Shape {
  DType type;
  int64_t rows, D, wide, F, out;  // of x, hidden, activated, y

  bool gated() const { return wide != F; }
  int64_t row_blocks() const { return ceil_div(rows, kBlockRows); }
};

// Memory for the panels of one product at a time. An op has two, used in turn: one product's panels
// are packed while another's are read.
struct Panels {
  float* data;
  int reader = -1;  // the step that reads them
};

struct ForwardScratch {
  float *first, *second, *activated, *keys, *output_keys;

  ForwardScratch(const Shape& s, bool keeps_activated, Carver& carver) {
    first = carver.take(Product::packed_floats(s.rows, s.D, s.wide, s.gated()));
    second = carver.take(Product::packed_floats(s.rows, s.F, s.out));
    activated = carver.take(keeps_activated ? 0 : s.rows * inner_pitch(s.F, s.type), s.type);
    keys = carver.take(ceil_div(s.F, 4));
    output_keys = carver.take(ceil_div(s.out, 4));
  }
};

struct BackwardScratch {
  float *first, *second, *activated, *dropped, *dhidden, *partials, *output_partials, *keys,
      *output_keys;

  // kept_activated: `hidden` is what the second product read; drops: dy is not what it gives.
  BackwardScratch(const Shape& s, bool kept_activated, bool drops, Carver& carver) {
    // By turns; either operand of a gradient may be the packed one.
    first = carver.take(std::max({Product::packed_floats(s.rows, s.out, s.F),
                                  Product::packed_floats(s.wide, s.rows, s.D),
                                  Product::packed_floats(s.D, s.rows, s.wide)}));
    second = carver.take(std::max(
        {Product::packed_floats(s.rows, s.wide, s.D), Product::packed_floats(s.D, s.wide, s.rows),
         Product::packed_floats(s.out, s.rows, s.F), Product::packed_floats(s.F, s.rows, s.out)}));
    activated = carver.take(kept_activated ? 0 : s.rows * inner_pitch(s.F, s.type), s.type);
    dropped = carver.take(drops ? s.rows * s.out : 0, s.type);
    dhidden = carver.take(s.rows * inner_pitch(s.wide, s.type), s.type);
    partials = carver.take(s.row_blocks() * s.wide);
    output_partials = carver.take(s.row_blocks() * s.out);
    keys = carver.take(ceil_div(s.F, 4));
    output_keys = carver.take(ceil_div(s.out, 4));
  }
};

int64_t workers_for(int64_t work) {
  return std::clamp<int64_t>(work / kGrain, 1, torch::stable::get_num_threads());
}
// The forward's; the backward has twice the work.
int64_t work_of(const Shape& s) {
  return s.rows * (s.wide * s.D + s.F * s.out);
}

// Whether a row's fp32 products have the same bits among any number of rows.
thread_local bool batch_invariant = false;

bool be_batch_invariant(bool on) {
  const bool before = batch_invariant;
  batch_invariant = on;
  return before;
}

// -- steps ----------------------------------------------------------------------------------------
class Team {
 public:
  // What is left of the workspace belongs to the workers.
  explicit Team(Carver& carver)
      : workers_(
            std::min<int64_t>(carver.left() / kWorkerFloats, torch::stable::get_num_threads())),
        scratch_(carver.take(workers_ * kWorkerFloats)) {
    STD_TORCH_CHECK(workers_ > 0, "scratch must have room for a worker");
  }

  // Adds a product and the packing of its right operand; returns the former's step. left, right:
  // the steps that write its operands, -1 for none; by_blocks: the left one's groups are blocks of
  // rows.
  int multiply(Product p, Panels& panels, int left, int right, bool by_blocks = false,
               bool in_turns = false) {
    // Of a weight's gradient, both of whose operands lie across the depth, the smaller one is
    // packed; other results are written as they lie.
    const bool across = p.a.column_stride != 1 && p.b.column_stride == 1;
    if (p.finish.kind == Finish::kStore &&
        (across ? p.b.columns > p.a.rows : p.finish.out.column_stride != 1)) {
      const Matrix a = p.a;
      p.a = p.b.transposed();
      p.b = a.transposed();
      p.finish.out = p.finish.out.transposed();
      std::swap(left, right);
      by_blocks = false;
    }
    if (p.a.rows == 0 || p.b.columns == 0) {
      return -1;
    }
    const Kernels& isa = kernels();
    p.unpacked = p.can_be_unpacked() && (batch_invariant || p.a.rows <= isa.unpacked_rows);
    const bool gated = p.gate > 0 && p.gate != p.b.columns;
    const int64_t count =
        gated ? ceil_div(p.gate, isa.panel / 2) : ceil_div(p.b.columns, isa.panel);
    Needs needs;
    (by_blocks ? needs.same_group : needs.step) = left;
    if (p.shares_panels()) {
      p.packed = panels.data;
      needs.other_step =
          for_pieces(count, std::max<int64_t>(p.b.rows, 1) * isa.panel, {right, panels.reader},
                     [&isa, p](int64_t first, int64_t last) { isa.pack(p, first, last); });
    } else {
      p.packed = nullptr;
      needs.other_step = right;
    }

    const int64_t row_blocks = p.row_blocks();
    int64_t most = kBlockPanels;
    while (most > kLeastPanels && workers_ > 1 &&
           row_blocks * ceil_div(count, most) < kTasksPerWorker * workers_) {
      most /= 2;
    }
    const int64_t column_blocks = ceil_div(count, most);
    const int step = steps_.add(
        row_blocks * column_blocks, column_blocks, needs,
        [&isa, p, column_blocks, most, count](int64_t task, float* scratch) {
          const int64_t first = task % column_blocks * most;
          isa.multiply(p, task / column_blocks, first, std::min(first + most, count), scratch);
        });
    panels.reader = step;
    if (by_blocks && left >= 0 && in_turns) {
      steps_.draw_in_turns(left, workers_ == 1 ? 0 : ceil_div(workers_, column_blocks));
    }
    return step;
  }

  // run(first, last) for pieces of [0, count), each item of which is `numbers` numbers.
  template <class Run>
  int for_pieces(int64_t count, int64_t numbers, const Needs& needs, Run run) {
    const int64_t each = std::max<int64_t>(1, kPackGrain / std::max<int64_t>(numbers, 1));
    return steps_.add(ceil_div(count, each), 1, needs, [run, each, count](int64_t task, float*) {
      run(task * each, std::min(count, (task + 1) * each));
    });
  }

  // Drops an output's gradient and sums its columns by blocks of rows, which are the step's groups.
  int drop_output(const Output& output) {
    const Kernels& isa = kernels();
    return steps_.add(ceil_div(output.rows, kBlockRows), 1, {},
                      [&isa, output](int64_t block, float*) { isa.drop_output(output, block); });
  }

  // Adds up the sums of blocks that the step `needed` leaves.
  void reduce(const float* partials, int64_t blocks, const Tensor& result, const char* name,
              int64_t columns, DType type, int needed) {
    const Kernels& isa = kernels();
    void* data = vector_if(result, name, columns, type);
    for_pieces(columns, blocks, {needed},
               [&isa, partials, blocks, columns, data, type](int64_t first, int64_t last) {
                 isa.reduce(partials, blocks, columns, data, type, first, last);
               });
  }

  // Runs what was added.
  void run() {
    torch::stable::parallel_for(0, workers_, 1, [&](int64_t first, int64_t last) {
      for (int64_t worker = first; worker < last; ++worker) {
        steps_.work(scratch_ + worker * kWorkerFloats);
      }
    });
  }

 private:
  int64_t workers_;
  float* scratch_;
  Steps steps_;
};

Matrix inner(float* data, int64_t rows, int64_t columns, DType type) {
  return {data, rows, columns, inner_pitch(columns, type), 1};
}

// out = a b
Product stored(const Matrix& a, const Matrix& b, const Tensor& out, const char* name, DType type) {
  Product result(type);
  result.a = a;
  result.b = b;
  result.finish.out_type = type;
  result.finish.out = matrix(out, name, a.rows, b.columns, type);
  return result;
}

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

Shape shape_of(const Tensor& x, const Tensor& w1, const Tensor& w2) {
  STD_TORCH_CHECK(x.dim() >= 1 && w1.dim() == 2 && w2.dim() == 2,
                  "x must have a dimension, w1 and w2 two");
  return {dtype_of(x, "x"), rows_in(x), x.size(-1), w1.size(0), w2.size(1), w2.size(0)};
}

// -- ops ------------------------------------------------------------------------------------------
bool keeps_activated(int64_t activation, const Shape& s) {
  return static_cast<Activation>(activation) == Activation::kRelu && !s.gated();
}

DType type_of_size(int64_t bytes) {
  return bytes == 4 ? DType::kFloat32 : DType::kBFloat16;
}

int64_t ffn_fwd_scratch(int64_t rows, int64_t D, int64_t wide, int64_t F, int64_t out,
                        int64_t element_bytes, int64_t activation) {
  const Shape s = {type_of_size(element_bytes), rows, D, wide, F, out};
  Carver carver(nullptr);
  ForwardScratch(s, keeps_activated(activation, s), carver);
  return with_room_for_large_pages(carver.used() + workers_for(work_of(s)) * kWorkerFloats);
}

int64_t ffn_bwd_scratch(int64_t rows, int64_t D, int64_t wide, int64_t F, int64_t out,
                        int64_t element_bytes, int64_t activation, bool drops) {
  const Shape s = {type_of_size(element_bytes), rows, D, wide, F, out};
  Carver carver(nullptr);
  BackwardScratch(s, keeps_activated(activation, s), drops, carver);
  return with_room_for_large_pages(carver.used() + workers_for(2 * work_of(s)) * kWorkerFloats);
}

void ffn_fwd(Tensor x, Tensor w1, std::optional<Tensor> b1, Tensor w2, std::optional<Tensor> b2,
             std::optional<Tensor> residual, int64_t activation, double dropout_p,
             double output_dropout_p, std::optional<Tensor> dropout_seed, int64_t dropout_stream,
             Tensor y, Tensor hidden, Tensor scratch) {
  const Shape s = shape_of(x, w1, w2);
  const bool keeps = keeps_activated(activation, s);
  Carver carver(&scratch);
  const ForwardScratch memory(s, keeps, carver);
  Panels first_panels = {memory.first}, second_panels = {memory.second};
  Team team(carver);
  const uint32_t stream = static_cast<uint32_t>(dropout_stream);

  Product first(s.type);
  first.a = matrix(x, "x", s.rows, s.D, s.type);
  first.b = matrix(w1, "w1", s.wide, s.D, s.type).transposed();
  first.gate = s.gated() ? s.F : 0;
  first.finish.kind = Finish::kActivate;
  first.finish.bias = vector_if(b1, "b1", s.wide, s.type);
  first.finish.dropout = dropout_of(dropout_p, dropout_seed, stream, s.F, memory.keys);
  first.finish.activation = static_cast<Activation>(activation);
  first.finish.hidden = vector_if(hidden, "hidden", s.rows * s.wide, s.type);
  first.finish.activated = memory.activated;
  const int first_step = team.multiply(first, first_panels, -1, -1);

  Product second(s.type);
  second.a = keeps ? Matrix{first.finish.hidden, s.rows, s.F, s.F, 1}
                   : inner(memory.activated, s.rows, s.F, s.type);
  second.b = matrix(w2, "w2", s.out, s.F, s.type).transposed();
  second.finish.bias = vector_if(b2, "b2", s.out, s.type);
  second.finish.dropout = dropout_of(output_dropout_p, dropout_seed,
                                     stream + dropout::kSecondStream, s.out, memory.output_keys);
  second.finish.out_type = dtype_of(y, "y");
  second.finish.out = matrix(y, "y", s.rows, s.out, second.finish.out_type);
  second.finish.residual = vector_if(residual, "residual", s.rows * s.out, second.finish.out_type);
  STD_TORCH_CHECK(second.finish.out.column_stride == 1, "y must be contiguous");
  team.multiply(second, second_panels, first_step, -1, true, true);
  team.run();
}

// Calls whose results and scratch memory are made here: of few rows, making them in Python takes a
// good part of the time.
// A matrix that the products read as it lies, or a copy.
Tensor readable(const Tensor& x) {
  const bool strided = x.dim() == 2 && (x.stride(0) == 1 || x.stride(1) == 1);
  return strided || x.is_contiguous() ? x : torch::stable::contiguous(x);
}

std::optional<Tensor> contiguous_if(const std::optional<Tensor>& x) {
  return x && !x->is_contiguous() ? torch::stable::contiguous(*x) : x;
}

// Contiguous, with the leading dimensions of x.
Tensor new_rows(const Tensor& x, int64_t columns) {
  const auto n = x.sizes();
  std::vector<int64_t> sizes(n.begin(), n.end()), strides(n.size());
  sizes.back() = columns;
  int64_t stride = 1;
  for (size_t d = n.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) {
    strides[d] = stride;
  }
  return new_tensor(sizes, strides, x.scalar_type());
}

Tensor new_scratch(int64_t floats) {
  const int64_t stride = 1;
  return new_tensor({&floats, 1}, {&stride, 1}, ScalarType::Float);
}

std::tuple<Tensor, Tensor> ffn_plain_fwd(Tensor x, Tensor w1, std::optional<Tensor> b1, Tensor w2,
                                         std::optional<Tensor> b2, int64_t activation) {
  const Shape s = shape_of(x, w1, w2);
  Tensor y = new_rows(x, s.out), hidden = new_rows(x, s.wide);
  ffn_fwd(
      readable(x), readable(w1), contiguous_if(b1), readable(w2), contiguous_if(b2), {}, activation,
      0.0, 0.0, {}, 0, y, hidden,
      new_scratch(ffn_fwd_scratch(s.rows, s.D, s.wide, s.F, s.out, x.element_size(), activation)));
  return {y, hidden};
}

void ffn_bwd(Tensor dy, Tensor x, Tensor w1, Tensor w2, Tensor hidden, int64_t activation,
             double dropout_p, double output_dropout_p, std::optional<Tensor> dropout_seed,
             int64_t dropout_stream, Tensor dx, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2,
             Tensor scratch) {
  const Shape s = shape_of(x, w1, w2);
  const bool kept_activated = keeps_activated(activation, s);
  const DType dy_type = dtype_of(dy, "dy");
  const bool drops = output_dropout_p > 0 || dy_type != s.type;
  Carver carver(&scratch);
  const BackwardScratch memory(s, kept_activated, drops, carver);
  Panels first_panels = {memory.first}, second_panels = {memory.second};
  Team team(carver);
  const uint32_t stream = static_cast<uint32_t>(dropout_stream);
  const int64_t blocks = s.row_blocks();

  // The gradient of the second product, and b2's.
  Output output = {s.rows, s.out, dy_type, {}, {}, s.type};
  output.dy = matrix(dy, "dy", s.rows, s.out, dy_type);
  STD_TORCH_CHECK(output.dy.column_stride == 1, "dy must have contiguous rows");
  output.dropout = dropout_of(output_dropout_p, dropout_seed, stream + dropout::kSecondStream,
                              s.out, memory.output_keys);
  output.partials = db2.numel() > 0 ? memory.output_partials : nullptr;
  Matrix dy_dropped = output.dy;
  if (drops) {
    output.dropped = memory.dropped;
    dy_dropped = {memory.dropped, s.rows, s.out, s.out, 1};
  }
  int dropped = -1;
  if (output.dropped || output.partials) {
    dropped = team.drop_output(output);
  }
  if (output.partials) {
    team.reduce(output.partials, blocks, db2, "db2", s.out, s.type, dropped);
  }
  if (!drops) {
    dropped = -1;
  }

  // The gradient of the hidden layer, b1's, and the activations again.
  const bool wants_w2 = dw2.numel() > 0, wants_b1 = db1.numel() > 0;
  Product product(s.type);
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
  const Matrix dhidden = inner(memory.dhidden, s.rows, s.wide, s.type);
  const Matrix activated = kept_activated ? Matrix{product.finish.hidden, s.rows, s.F, s.F, 1}
                                          : inner(memory.activated, s.rows, s.F, s.type);
  int differentiated = -1;
  if (dx.numel() > 0 || dw1.numel() > 0 || wants_b1 || product.finish.activated) {
    differentiated = team.multiply(product, first_panels, dropped, -1, true);
  }
  if (dx.numel() > 0) {
    const Matrix weight = matrix(w1, "w1", s.wide, s.D, s.type);
    team.multiply(stored(dhidden, weight, dx, "dx", s.type), second_panels, differentiated, -1,
                  true, true);
  }
  if (wants_b1) {
    team.reduce(memory.partials, blocks, db1, "db1", s.wide, s.type, differentiated);
  }
  if (dw1.numel() > 0) {
    const Matrix input = matrix(x, "x", s.rows, s.D, s.type);
    team.multiply(stored(dhidden.transposed(), input, dw1, "dw1", s.type), first_panels,
                  differentiated, -1);
  }
  if (wants_w2) {
    team.multiply(stored(dy_dropped.transposed(), activated, dw2, "dw2", s.type), second_panels,
                  dropped, kept_activated ? -1 : differentiated);
  }
  team.run();
}

// -- a product alone -----------------------------------------------------------------------------
// y = x w^T + b: x [rows, D], w [out, D].
struct LinearShape {
  DType type;
  int64_t rows, D, out;

  int64_t row_blocks() const { return ceil_div(rows, kBlockRows); }
  int64_t work() const { return rows * D * out; }
};

struct LinearBackwardScratch {
  float *first, *second, *partials;

  LinearBackwardScratch(const LinearShape& s, Carver& carver) {
    // Either operand may be the packed one.
    first = carver.take(std::max(Product::packed_floats(s.rows, s.out, s.D),
                                 Product::packed_floats(s.D, s.out, s.rows)));
    second = carver.take(std::max(Product::packed_floats(s.out, s.rows, s.D),
                                  Product::packed_floats(s.D, s.rows, s.out)));
    partials = carver.take(s.row_blocks() * s.out);
  }
};

LinearShape linear_shape_of(const Tensor& x, const Tensor& w) {
  STD_TORCH_CHECK(x.dim() >= 1 && w.dim() == 2, "x must have a dimension, w two");
  return {dtype_of(x, "x"), rows_in(x), x.size(-1), w.size(0)};
}

int64_t linear_fwd_scratch(int64_t rows, int64_t D, int64_t out, int64_t element_bytes) {
  const LinearShape s = {type_of_size(element_bytes), rows, D, out};
  Carver carver(nullptr);
  carver.take(Product::packed_floats(rows, D, out));
  return with_room_for_large_pages(carver.used() + workers_for(s.work()) * kWorkerFloats);
}

int64_t linear_bwd_scratch(int64_t rows, int64_t D, int64_t out, int64_t element_bytes) {
  const LinearShape s = {type_of_size(element_bytes), rows, D, out};
  Carver carver(nullptr);
  LinearBackwardScratch(s, carver);
  return with_room_for_large_pages(carver.used() + workers_for(2 * s.work()) * kWorkerFloats);
}

void linear_fwd(Tensor x, Tensor w, std::optional<Tensor> b, Tensor y, Tensor scratch) {
  const LinearShape s = linear_shape_of(x, w);
  Carver carver(&scratch);
  Panels panels = {carver.take(Product::packed_floats(s.rows, s.D, s.out))};
  Team team(carver);
  Product product(s.type);
  product.a = matrix(x, "x", s.rows, s.D, s.type);
  product.b = matrix(w, "w", s.out, s.D, s.type).transposed();
  product.finish.bias = vector_if(b, "b", s.out, s.type);
  product.finish.out_type = s.type;
  product.finish.out = matrix(y, "y", s.rows, s.out, s.type);
  STD_TORCH_CHECK(product.finish.out.column_stride == 1, "y must be contiguous");
  team.multiply(product, panels, -1, -1);
  team.run();
}

Tensor linear_plain_fwd(Tensor x, Tensor w, std::optional<Tensor> b) {
  const LinearShape s = linear_shape_of(x, w);
  Tensor y = new_rows(x, s.out);
  linear_fwd(readable(x), readable(w), contiguous_if(b), y,
             new_scratch(linear_fwd_scratch(s.rows, s.D, s.out, x.element_size())));
  return y;
}

void linear_bwd(Tensor dy, Tensor x, Tensor w, Tensor dx, Tensor dw, Tensor db, Tensor scratch) {
  const LinearShape s = linear_shape_of(x, w);
  Carver carver(&scratch);
  const LinearBackwardScratch memory(s, carver);
  Panels first_panels = {memory.first}, second_panels = {memory.second};
  Team team(carver);
  const Matrix gradient = matrix(dy, "dy", s.rows, s.out, s.type);
  const Output output = {s.rows, s.out, s.type, gradient, {}, s.type, nullptr, memory.partials};
  if (db.numel() > 0) {
    STD_TORCH_CHECK(gradient.column_stride == 1, "dy must have contiguous rows");
    team.reduce(memory.partials, s.row_blocks(), db, "db", s.out, s.type, team.drop_output(output));
  }
  if (dx.numel() > 0) {
    const Matrix weight = matrix(w, "w", s.out, s.D, s.type);
    team.multiply(stored(gradient, weight, dx, "dx", s.type), first_panels, -1, -1);
  }
  if (dw.numel() > 0) {
    const Matrix input = matrix(x, "x", s.rows, s.D, s.type);
    team.multiply(stored(gradient.transposed(), input, dw, "dw", s.type), second_panels, -1, -1);
  }
  team.run();
}

}  // namespace
}  // namespace fastattn::ffn

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_cpu, m) {
  m.def(
      "ffn_fwd_scratch(int rows, int d, int wide, int f, int out, int element_bytes, "
      "int activation) -> int");
  m.def(
      "ffn_bwd_scratch(int rows, int d, int wide, int f, int out, int element_bytes, "
      "int activation, bool drops) -> int");
  m.def(
      "ffn_fwd(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? residual, "
      "int activation, float dropout_p, float output_dropout_p, Tensor? dropout_seed, "
      "int dropout_stream, Tensor(a!) y, Tensor(b!) hidden, Tensor(c!) scratch) -> ()");
  m.def(
      "ffn_bwd(Tensor dy, Tensor x, Tensor w1, Tensor w2, Tensor hidden, int activation, "
      "float dropout_p, float output_dropout_p, Tensor? dropout_seed, int dropout_stream, "
      "Tensor(a!) dx, Tensor(b!) dw1, Tensor(c!) db1, Tensor(d!) dw2, Tensor(e!) db2, "
      "Tensor(f!) scratch) -> ()");
  m.def(
      "ffn_plain_fwd(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, int activation) "
      "-> (Tensor y, Tensor hidden)");
  m.def("linear_plain_fwd(Tensor x, Tensor w, Tensor? b) -> Tensor");
  m.def("batch_invariant(bool on) -> bool");
  m.def("linear_fwd_scratch(int rows, int d, int out, int element_bytes) -> int");
  m.def("linear_bwd_scratch(int rows, int d, int out, int element_bytes) -> int");
  m.def("linear_fwd(Tensor x, Tensor w, Tensor? b, Tensor(a!) y, Tensor(b!) scratch) -> ()");
  m.def(
      "linear_bwd(Tensor dy, Tensor x, Tensor w, Tensor(a!) dx, Tensor(b!) dw, Tensor(c!) db, "
      "Tensor(d!) scratch) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("ffn_fwd_scratch", TORCH_BOX(&fastattn::ffn::ffn_fwd_scratch));
  m.impl("ffn_bwd_scratch", TORCH_BOX(&fastattn::ffn::ffn_bwd_scratch));
  m.impl("batch_invariant", TORCH_BOX(&fastattn::ffn::be_batch_invariant));
  m.impl("linear_fwd_scratch", TORCH_BOX(&fastattn::ffn::linear_fwd_scratch));
  m.impl("linear_bwd_scratch", TORCH_BOX(&fastattn::ffn::linear_bwd_scratch));
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CPU, m) {
  m.impl("ffn_fwd", TORCH_BOX(&fastattn::ffn::ffn_fwd));
  m.impl("ffn_bwd", TORCH_BOX(&fastattn::ffn::ffn_bwd));
  m.impl("ffn_plain_fwd", TORCH_BOX(&fastattn::ffn::ffn_plain_fwd));
  m.impl("linear_plain_fwd", TORCH_BOX(&fastattn::ffn::linear_plain_fwd));
  m.impl("linear_fwd", TORCH_BOX(&fastattn::ffn::linear_fwd));
  m.impl("linear_bwd", TORCH_BOX(&fastattn::ffn::linear_bwd));
}
