// fastattn_cpu's feed-forward network: its products, what becomes of their sums, and which waits
// for which. The forward is one parallel region, and so is the backward.
#include <algorithm>
#include <tuple>

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

// The forward's; the backward has twice the work.
int64_t work_of(const Shape& s) {
  return s.rows * (s.wide * s.D + s.F * s.out);
}

bool keeps_activated(int64_t activation, const Shape& s) {
  return static_cast<Activation>(activation) == Activation::kRelu && !s.gated();
}

// -- scratch memory -------------------------------------------------------------------------------
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

int64_t ffn_fwd_scratch(int64_t rows, int64_t D, int64_t wide, int64_t F, int64_t out,
                        int64_t element_bytes, int64_t activation) {
  const Shape s = {type_of_size(element_bytes), rows, D, wide, F, out};
  Carver carver(nullptr);
  ForwardScratch(s, keeps_activated(activation, s), carver);
  return with_workers(carver.used(), work_of(s));
}

int64_t ffn_bwd_scratch(int64_t rows, int64_t D, int64_t wide, int64_t F, int64_t out,
                        int64_t element_bytes, int64_t activation, bool drops) {
  const Shape s = {type_of_size(element_bytes), rows, D, wide, F, out};
  Carver carver(nullptr);
  BackwardScratch(s, keeps_activated(activation, s), drops, carver);
  return with_workers(carver.used(), 2 * work_of(s));
}

// -- forward --------------------------------------------------------------------------------------
void ffn_fwd(Tensor x, Tensor w1, std::optional<Tensor> b1, Tensor w2, std::optional<Tensor> b2,
             std::optional<Tensor> residual, int64_t activation, double dropout_p,
             double output_dropout_p, std::optional<Tensor> dropout_seed, int64_t dropout_stream,
             Tensor y, Tensor hidden, Tensor scratch) {
  const Shape s = shape_of(x, w1, w2);
  const bool keeps = keeps_activated(activation, s);
  Carver carver(&scratch);
  const ForwardScratch memory(s, keeps, carver);
  Panels first_panels = {memory.first}, second_panels = {memory.second};
  Team team = team_of(carver);
  const uint32_t stream = static_cast<uint32_t>(dropout_stream);

  Product first(s.type);
  first.a = matrix(x, "x", s.rows, s.D, s.type);
  first.b = matrix(w1, "w1", s.wide, s.D, s.type).transposed();
  first.gate = s.gated() ? s.F : 0;
  first.finish.kind = Finish::kActivate;
  first.finish.bias = vector_if(b1, "b1", s.wide, s.type);
  first.finish.dropout = dropout_of(dropout_p, dropout_seed, stream, s.F, memory.keys);
  first.finish.activation = static_cast<Activation>(activation);
  first.finish.hidden = vector_if(fresh(hidden), "hidden", s.rows * s.wide, s.type);
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
  second.finish.out = matrix(fresh(y), "y", s.rows, s.out, second.finish.out_type);
  second.finish.residual = vector_if(residual, "residual", s.rows * s.out, second.finish.out_type);
  STD_TORCH_CHECK(second.finish.out.column_stride == 1, "y must be contiguous");
  team.multiply(second, second_panels, first_step, -1, true, true);
  run(team);
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

// -- backward -------------------------------------------------------------------------------------
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
  Team team = team_of(carver);
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
  run(team);
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
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("ffn_fwd_scratch", TORCH_BOX(&fastattn::ffn::ffn_fwd_scratch));
  m.impl("ffn_bwd_scratch", TORCH_BOX(&fastattn::ffn::ffn_bwd_scratch));
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CPU, m) {
  m.impl("ffn_fwd", TORCH_BOX(&fastattn::ffn::ffn_fwd));
  m.impl("ffn_bwd", TORCH_BOX(&fastattn::ffn::ffn_bwd));
  m.impl("ffn_plain_fwd", TORCH_BOX(&fastattn::ffn::ffn_plain_fwd));
}
