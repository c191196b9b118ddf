// fastattn_cpu's matrix product alone: y = x w^T + b, x [rows, D], w [out, D].
#include <algorithm>

#include "ffn/binding_products_cpu.h"

namespace fastattn::ffn {
namespace {

bool be_batch_invariant(bool on) {
  const bool before = batch_invariant;
  batch_invariant = on;
  return before;
}

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
  return with_workers(carver.used(), s.work());
}

int64_t linear_bwd_scratch(int64_t rows, int64_t D, int64_t out, int64_t element_bytes) {
  const LinearShape s = {type_of_size(element_bytes), rows, D, out};
  Carver carver(nullptr);
  LinearBackwardScratch(s, carver);
  return with_workers(carver.used(), 2 * s.work());
}

void linear_fwd(Tensor x, Tensor w, std::optional<Tensor> b, Tensor y, Tensor scratch) {
  const LinearShape s = linear_shape_of(x, w);
  Carver carver(&scratch);
  Panels panels = {carver.take(Product::packed_floats(s.rows, s.D, s.out))};
  Team team = team_of(carver);
  Product product(s.type);
  product.a = matrix(x, "x", s.rows, s.D, s.type);
  product.b = matrix(w, "w", s.out, s.D, s.type).transposed();
  product.finish.bias = vector_if(b, "b", s.out, s.type);
  product.finish.out_type = s.type;
  product.finish.out = matrix(fresh(y), "y", s.rows, s.out, s.type);
  STD_TORCH_CHECK(product.finish.out.column_stride == 1, "y must be contiguous");
  team.multiply(product, panels, -1, -1);
  run(team);
}

Tensor linear_plain_fwd(Tensor x, Tensor w, std::optional<Tensor> b) {
  const LinearShape s = linear_shape_of(x, w);
  STD_TORCH_CHECK(!b || (b->dim() == 1 && b->size(0) == s.out), "b must be [", s.out, "]");
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
  Team team = team_of(carver);
  const Matrix gradient = matrix(dy, "dy", s.rows, s.out, s.type);
  const Output output = {s.rows, s.out, s.type, gradient, {}, s.type, nullptr, memory.partials};
  if (db.numel() > 0) {
    STD_TORCH_CHECK(gradient.column_stride == 1, "dy must have contiguous rows");
    team.reduce(memory.partials, s.row_blocks(), vector_if(db, "db", s.out, s.type), s.out, s.type,
                team.drop_output(output));
  }
  if (dx.numel() > 0) {
    const Matrix weight = matrix(w, "w", s.out, s.D, s.type);
    team.multiply(stored(gradient, weight, dx, "dx", s.type), first_panels, -1, -1);
  }
  if (dw.numel() > 0) {
    const Matrix input = matrix(x, "x", s.rows, s.D, s.type);
    team.multiply(stored(gradient.transposed(), input, dw, "dw", s.type), second_panels, -1, -1);
  }
  run(team);
}

std::tuple<Tensor, Tensor, Tensor> linear_plain_bwd(Tensor dy, Tensor x, Tensor w, bool needs_x,
                                                    bool needs_w, bool needs_b) {
  const LinearShape s = linear_shape_of(x, w);
  Tensor dx = new_gradient(x, needs_x), dw = new_gradient(w, needs_w);
  Tensor db = new_vector(needs_b ? s.out : 0, x.scalar_type());
  linear_bwd(readable(dy), readable(x), readable(w), dx, dw, db,
             new_scratch(linear_bwd_scratch(s.rows, s.D, s.out, x.element_size())));
  return {dx, dw, db};
}

}  // namespace
}  // namespace fastattn::ffn

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_cpu, m) {
  m.def("batch_invariant(bool on) -> bool");
  m.def("linear_fwd_scratch(int rows, int d, int out, int element_bytes) -> int");
  m.def("linear_bwd_scratch(int rows, int d, int out, int element_bytes) -> int");
  m.def("linear_fwd(Tensor x, Tensor w, Tensor? b, Tensor(a!) y, Tensor(b!) scratch) -> ()");
  m.def("linear_plain_fwd(Tensor x, Tensor w, Tensor? b) -> Tensor");
  m.def(
      "linear_plain_bwd(Tensor dy, Tensor x, Tensor w, bool needs_x, bool needs_w, bool needs_b) "
      "-> (Tensor dx, Tensor dw, Tensor db)");
  m.def(
      "linear_bwd(Tensor dy, Tensor x, Tensor w, Tensor(a!) dx, Tensor(b!) dw, Tensor(c!) db, "
      "Tensor(d!) scratch) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("batch_invariant", TORCH_BOX(&fastattn::ffn::be_batch_invariant));
  m.impl("linear_fwd_scratch", TORCH_BOX(&fastattn::ffn::linear_fwd_scratch));
  m.impl("linear_bwd_scratch", TORCH_BOX(&fastattn::ffn::linear_bwd_scratch));
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CPU, m) {
  m.impl("linear_fwd", TORCH_BOX(&fastattn::ffn::linear_fwd));
  m.impl("linear_plain_fwd", TORCH_BOX(&fastattn::ffn::linear_plain_fwd));
  m.impl("linear_plain_bwd", TORCH_BOX(&fastattn::ffn::linear_plain_bwd));
  m.impl("linear_bwd", TORCH_BOX(&fastattn::ffn::linear_bwd));
}
