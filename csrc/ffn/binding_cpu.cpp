// The feed-forward network on the CPU: its products, their epilogues and their dependencies. The
// forward is one parallel region, and so is the backward.
#include <algorithm>

#include "ffn/binding_products_cpu.h"

namespace fastattn::ffn {
namespace {

struct Shape {
  DType type;
  int64_t rows, D, wide, F, out;  // of x, hidden, activated, y

  bool gated() const { return wide != F; }
  int64_t row_blocks() const { return ceil_div(rows, kBlockRows); }
};

Shape shape_of(const Tensor& x, const Tensor& w1, const Tensor& w2) {
  STD_TORCH_CHECK(x.dim() >= 1 && w1.dim() == 2 && w2.dim() == 2,
                  "x must have a dimension, w1 and w2 two");
  return {dtype_of(x, "x"), rows_in(x), x.size(-1), w1.size(0), w2.size(1), w2.size(0)};
}

// The cost of the forward; that of the backward is twice as much.
int64_t work_of(const Shape& s) {
  return product_work(s.rows, s.D, s.wide) + product_work(s.rows, s.F, s.out);
}

Activation activation_of(const std::string& name, const Shape& s) {
  const bool gated = name == "reglu" || name == "geglu" || name == "swiglu";
  STD_TORCH_CHECK(s.wide == (gated ? 2 : 1) * s.F, "w1 must have ", (gated ? 2 : 1) * s.F,
                  " rows for ", name, " and w2, got ", s.wide);
  if (name == "relu" || name == "reglu") {
    return Activation::kRelu;
  }
  if (name == "gelu" || name == "geglu") {
    return Activation::kGelu;
  }
  if (name == "gelu_tanh") {
    return Activation::kGeluTanh;
  }
  STD_TORCH_CHECK(name == "silu" || name == "swiglu", "activation must be known, got ", name);
  return Activation::kSilu;
}

bool keeps_activated(Activation activation, const Shape& s) {
  return activation == Activation::kRelu && !s.gated();
}

// -- workspace ------------------------------------------------------------------------------------
struct ForwardWorkspace {
  float *first, *second, *activated, *keys, *output_keys;

  ForwardWorkspace(const Shape& s, bool keeps_activated, Arena& arena) {
    first = arena.take(Product::packed_floats(s.rows, s.D, s.wide, s.gated()));
    second = arena.take(Product::packed_floats(s.rows, s.F, s.out));
    activated = arena.take(keeps_activated ? 0 : s.rows * inner_pitch(s.F, s.type), s.type);
    keys = arena.take(ceil_div(s.F, 4));
    output_keys = arena.take(ceil_div(s.out, 4));
  }
};

struct BackwardWorkspace {
  float *first, *second, *activated, *dropped, *dhidden, *partials, *output_partials, *keys,
      *output_keys;

  // kept_activated: `hidden` holds the activations; drops: dy needs dropout or another dtype.
  BackwardWorkspace(const Shape& s, bool kept_activated, bool drops, Arena& arena) {
    // Products alternate between them; either operand of a gradient may be packed.
    first = arena.take(std::max({Product::packed_floats(s.rows, s.out, s.F),
                                 Product::packed_floats(s.wide, s.rows, s.D),
                                 Product::packed_floats(s.D, s.rows, s.wide)}));
    second = arena.take(std::max(
        {Product::packed_floats(s.rows, s.wide, s.D), Product::packed_floats(s.D, s.wide, s.rows),
         Product::packed_floats(s.out, s.rows, s.F), Product::packed_floats(s.F, s.rows, s.out)}));
    activated = arena.take(kept_activated ? 0 : s.rows * inner_pitch(s.F, s.type), s.type);
    dropped = arena.take(drops ? s.rows * s.out : 0, s.type);
    dhidden = arena.take(s.rows * inner_pitch(s.wide, s.type), s.type);
    partials = arena.take(s.row_blocks() * s.wide);
    output_partials = arena.take(s.row_blocks() * s.out);
    keys = arena.take(ceil_div(s.F, 4));
    output_keys = arena.take(ceil_div(s.out, 4));
  }
};

// The floats of a workspace for what memory(arena) takes, and for workers.
template <class Memory>
int64_t workspace_floats(int64_t work, int64_t worker, const Memory& memory) {
  Arena measure;
  memory(measure);
  return with_workers(measure.used(), work, worker);
}

// -- forward --------------------------------------------------------------------------------------
std::tuple<Tensor, Tensor> ffn_fwd_out(Tensor x, Tensor w1, std::optional<Tensor> b1, Tensor w2,
                                       std::optional<Tensor> b2, std::optional<Tensor> residual,
                                       std::string activation, double dropout_p,
                                       double output_dropout_p, std::optional<Tensor> dropout_seed,
                                       int64_t dropout_stream, Tensor y, Tensor hidden) {
  x = readable_left(x);
  w1 = readable(w1);
  w2 = readable(w2);
  b1 = as_contiguous(b1);
  b2 = as_contiguous(b2);
  residual = as_contiguous(residual);
  const Shape s = shape_of(x, w1, w2);
  const Activation act = activation_of(activation, s);
  const bool keeps = keeps_activated(act, s);
  const Matrix input = matrix(x, "x", s.rows, s.D, s.type);
  const Matrix up = matrix(w1, "w1", s.wide, s.D, s.type);
  const Matrix down = matrix(w2, "w2", s.out, s.F, s.type);
  const int64_t worker = worker_floats_of(input, {up, down}, s.type);
  Workspace workspace(workspace_floats(work_of(s), worker,
                                       [&](Arena& arena) { ForwardWorkspace(s, keeps, arena); }));
  Arena arena(workspace);
  const ForwardWorkspace memory(s, keeps, arena);
  Panels first_panels = {memory.first}, second_panels = {memory.second};
  Team team = team_of(arena, worker, s.row_blocks() == 1);
  const uint32_t stream = static_cast<uint32_t>(dropout_stream);

  Product first(s.type);
  first.a = input;
  first.b = up.transposed();
  first.gate = s.gated() ? s.F : 0;
  first.epilogue.kind = Epilogue::kActivate;
  first.epilogue.bias = vector_if(b1, "b1", s.wide, s.type);
  first.epilogue.dropout = dropout_of(dropout_p, dropout_seed, stream, s.F, memory.keys);
  first.epilogue.activation = act;
  first.epilogue.hidden = vector_if(with_large_pages(hidden), "hidden", s.rows * s.wide, s.type);
  first.epilogue.activated = memory.activated;
  const int first_step = team.multiply(first, first_panels, -1, -1);

  Product second(s.type);
  second.a = keeps ? Matrix{first.epilogue.hidden, s.rows, s.F, s.F, 1}
                   : inner(memory.activated, s.rows, s.F, s.type);
  second.b = down.transposed();
  second.epilogue.bias = vector_if(b2, "b2", s.out, s.type);
  second.epilogue.dropout = dropout_of(output_dropout_p, dropout_seed,
                                       stream + dropout::kSecondStream, s.out, memory.output_keys);
  second.epilogue.out_type = dtype_of(y, "y");
  second.epilogue.out = matrix(with_large_pages(y), "y", s.rows, s.out, second.epilogue.out_type);
  second.epilogue.residual =
      vector_if(residual, "residual", s.rows * s.out, second.epilogue.out_type);
  STD_TORCH_CHECK(second.epilogue.out.column_stride == 1, "y must be contiguous");
  team.multiply(second, second_panels, first_step, -1, true, true);
  team.run(kOnThreads);
  return {y, hidden};
}

std::tuple<Tensor, Tensor> ffn_fwd(Tensor x, Tensor w1, std::optional<Tensor> b1, Tensor w2,
                                   std::optional<Tensor> b2, std::optional<Tensor> residual,
                                   std::string activation, double dropout_p,
                                   double output_dropout_p, std::optional<Tensor> dropout_seed,
                                   int64_t dropout_stream) {
  const ScalarType type = residual ? residual->scalar_type() : x.scalar_type();
  return ffn_fwd_out(x, w1, b1, w2, b2, residual, activation, dropout_p, output_dropout_p,
                     dropout_seed, dropout_stream, new_rows(x, w2.size(0), type),
                     new_rows(x, w1.size(0)));
}

// -- backward -------------------------------------------------------------------------------------
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

FiveTensors ffn_bwd_out(Tensor dy, Tensor x, Tensor w1, std::optional<Tensor> /*b1*/, Tensor w2,
                        std::optional<Tensor> /*b2*/, Tensor hidden, std::string activation,
                        double dropout_p, double output_dropout_p,
                        std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                        std::vector<bool> /*needs*/, Tensor dx, Tensor dw1, Tensor db1, Tensor dw2,
                        Tensor db2) {
  dy = readable_rows(dy);
  x = readable(x);
  w1 = readable(w1);
  w2 = readable(w2);
  hidden = as_contiguous(hidden);
  const Shape s = shape_of(x, w1, w2);
  const Activation act = activation_of(activation, s);
  const bool kept_activated = keeps_activated(act, s);
  const DType dy_type = dtype_of(dy, "dy");
  const bool drops = output_dropout_p > 0 || dy_type != s.type;
  const int64_t worker = worker_floats(kBlockRows);
  Workspace workspace(workspace_floats(2 * work_of(s), worker, [&](Arena& arena) {
    BackwardWorkspace(s, kept_activated, drops, arena);
  }));
  Arena arena(workspace);
  const BackwardWorkspace memory(s, kept_activated, drops, arena);
  Panels first_panels = {memory.first}, second_panels = {memory.second};
  Team team = team_of(arena, worker);
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
    team.reduce(output.partials, blocks, vector_if(db2, "db2", s.out, s.type), s.out, s.type,
                dropped);
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
  product.epilogue.kind = Epilogue::kDifferentiate;
  product.epilogue.dropout = dropout_of(dropout_p, dropout_seed, stream, s.F, memory.keys);
  product.epilogue.activation = act;
  product.epilogue.hidden = vector_if(hidden, "hidden", s.rows * s.wide, s.type);
  product.epilogue.dhidden = memory.dhidden;
  product.epilogue.activated = !kept_activated && wants_w2 ? memory.activated : nullptr;
  product.epilogue.partials = wants_b1 ? memory.partials : nullptr;
  const Matrix dhidden = inner(memory.dhidden, s.rows, s.wide, s.type);
  const Matrix activated = kept_activated ? Matrix{product.epilogue.hidden, s.rows, s.F, s.F, 1}
                                          : inner(memory.activated, s.rows, s.F, s.type);
  int differentiated = -1;
  if (dx.numel() > 0 || dw1.numel() > 0 || wants_b1 || product.epilogue.activated) {
    differentiated = team.multiply(product, first_panels, dropped, -1, true);
  }
  if (dx.numel() > 0) {
    const Matrix weight = matrix(w1, "w1", s.wide, s.D, s.type);
    team.multiply(stored(dhidden, weight, dx, "dx", s.type), second_panels, differentiated, -1,
                  true, true);
  }
  if (wants_b1) {
    team.reduce(memory.partials, blocks, vector_if(db1, "db1", s.wide, s.type), s.wide, s.type,
                differentiated);
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
  team.run(kOnThreads);
  return {dx, dw1, db1, dw2, db2};
}

FiveTensors ffn_bwd(Tensor dy, Tensor x, Tensor w1, std::optional<Tensor> b1, Tensor w2,
                    std::optional<Tensor> b2, Tensor hidden, std::string activation,
                    double dropout_p, double output_dropout_p, std::optional<Tensor> dropout_seed,
                    int64_t dropout_stream, std::vector<bool> needs) {
  STD_TORCH_CHECK(needs.size() == 5, "needs must have 5 entries");
  return ffn_bwd_out(dy, x, w1, b1, w2, b2, hidden, activation, dropout_p, output_dropout_p,
                     dropout_seed, dropout_stream, needs, new_gradient(x, needs[0]),
                     new_gradient(w1, needs[1]), new_gradient(x, b1, needs[2]),
                     new_gradient(w2, needs[3]), new_gradient(x, b2, needs[4]));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  FASTATTN_CPU_OP(m, ffn_fwd, have_kernels(stack, {0}, {5}));  // x; residual
  FASTATTN_CPU_OP(m, ffn_bwd, have_kernels(stack, {0, 1}));    // dy, x
}

}  // namespace fastattn::ffn
