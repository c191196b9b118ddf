// The linear layer on the CPU: y = x w^T + b, x [rows, D], w [out, D].
//
// PyTorch's matrix products are faster for some dtypes and numbers of rows on some processors;
// there the default overload calls them.
#include <array>
#include <atomic>

#include "ffn/binding_products_cpu.h"

namespace fastattn::ffn {
namespace {

// Products of more rows are faster in PyTorch. By dtype: fp32, bf16, fp16. Set when the library is
// loaded, and by tests.
std::array<std::atomic<int64_t>, 3> most_rows = {};

void set_product_limits(std::vector<int64_t> by_dtype) {
  STD_TORCH_CHECK(by_dtype.size() == most_rows.size(), "a number for each dtype");
  for (size_t i = 0; i < most_rows.size(); ++i) {
    most_rows[i].store(by_dtype[i], std::memory_order_relaxed);
  }
}

// PyTorch's products are not batch-invariant. Given results are always written here.
bool supports(const TensorOnStack& x, bool results_are_given) {
  if (!has_kernels_for(x.scalar_type()) || results_are_given) {
    return has_kernels_for(x.scalar_type());
  }
  const auto type = static_cast<size_t>(dtype_of(x, "x"));
  const int64_t most = most_rows[type].load(std::memory_order_relaxed);
  return rows_in(x) <= most || (batch_invariant && most > 0);
}

bool be_batch_invariant(bool on) {
  const bool before = batch_invariant;
  batch_invariant = on;
  return before;
}

struct LinearShape {
  DType type;
  int64_t rows, D, out;

  int64_t row_blocks() const { return ceil_div(rows, kBlockRows); }
  int64_t work() const { return product_work(rows, D, out); }
};

struct LinearBackwardWorkspace {
  float *first, *second, *partials;

  LinearBackwardWorkspace(const LinearShape& s, Arena& arena) {
    // Either operand may be packed.
    first = arena.take(std::max(Product::packed_floats(s.rows, s.out, s.D),
                                Product::packed_floats(s.D, s.out, s.rows)));
    second = arena.take(std::max(Product::packed_floats(s.out, s.rows, s.D),
                                 Product::packed_floats(s.D, s.rows, s.out)));
    partials = arena.take(s.row_blocks() * s.out);
  }
};

LinearShape linear_shape_of(const Tensor& x, const Tensor& w) {
  STD_TORCH_CHECK(x.dim() >= 1 && w.dim() == 2, "x must have a dimension, w two");
  return {dtype_of(x, "x"), rows_in(x), x.size(-1), w.size(0)};
}

std::tuple<Tensor> linear_fwd_out(Tensor x, Tensor w, std::optional<Tensor> b, Tensor y) {
  x = readable_left(x);
  w = readable(w);
  b = as_contiguous(b);
  const LinearShape s = linear_shape_of(x, w);
  const Matrix input = matrix(x, "x", s.rows, s.D, s.type);
  const Matrix weight = matrix(w, "w", s.out, s.D, s.type);
  const int64_t packed = Product::packed_floats(s.rows, s.D, s.out);
  const int64_t worker = worker_floats_of(input, {weight}, s.type);
  Arena measure;
  measure.take(packed);
  Workspace workspace(with_workers(measure.used(), s.work(), worker));
  Arena arena(workspace);
  Panels panels = {arena.take(packed)};
  Team team = team_of(arena, worker, true);
  Product product(s.type);
  product.a = input;
  product.b = weight.transposed();
  product.epilogue.bias = vector_if(b, "b", s.out, s.type);
  product.epilogue.out_type = s.type;
  product.epilogue.out = matrix(with_large_pages(y), "y", s.rows, s.out, s.type);
  STD_TORCH_CHECK(product.epilogue.out.column_stride == 1, "y must be contiguous");
  team.multiply(product, panels, -1, -1);
  team.run(kOnThreads);
  return {y};
}

Tensor linear_fwd(Tensor x, Tensor w, std::optional<Tensor> b) {
  return std::get<0>(linear_fwd_out(x, w, b, new_rows(x, w.size(0))));
}

using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// x may be absent if dw is not needed, and w if dx is not.
ThreeTensors linear_bwd_out(Tensor dy, std::optional<Tensor> x, std::optional<Tensor> w,
                            std::vector<bool> needs, Tensor dx, Tensor dw, Tensor db) {
  STD_TORCH_CHECK(needs.size() == 3 && dy.dim() >= 1, "needs must have 3 entries, dy a dimension");
  STD_TORCH_CHECK((w || dx.numel() == 0) && (x || dw.numel() == 0), "dx needs w, and dw needs x");
  dy = readable_rows(dy);
  x = x ? std::optional(readable(*x)) : x;
  w = w ? std::optional(readable(*w)) : w;
  const int64_t columns = w ? w->size(1) : x ? x->size(-1) : 0;
  const LinearShape s = {dtype_of(dy, "dy"), rows_in(dy), columns, dy.size(-1)};
  const int64_t worker = worker_floats(kBlockRows);
  Arena measure;
  LinearBackwardWorkspace(s, measure);
  Workspace workspace(with_workers(measure.used(), 2 * s.work(), worker));
  Arena arena(workspace);
  const LinearBackwardWorkspace memory(s, arena);
  Panels first_panels = {memory.first}, second_panels = {memory.second};
  Team team = team_of(arena, worker);
  const Matrix gradient = matrix(dy, "dy", s.rows, s.out, s.type);
  const Output output = {s.rows, s.out, s.type, gradient, {}, s.type, nullptr, memory.partials};
  if (db.numel() > 0) {
    STD_TORCH_CHECK(gradient.column_stride == 1, "dy must have contiguous rows");
    team.reduce(memory.partials, s.row_blocks(), vector_if(db, "db", s.out, s.type), s.out, s.type,
                team.drop_output(output));
  }
  if (dx.numel() > 0) {
    const Matrix weight = matrix(*w, "w", s.out, s.D, s.type);
    team.multiply(stored(gradient, weight, dx, "dx", s.type), first_panels, -1, -1);
  }
  if (dw.numel() > 0) {
    const Matrix input = matrix(*x, "x", s.rows, s.D, s.type);
    team.multiply(stored(gradient.transposed(), input, dw, "dw", s.type), second_panels, -1, -1);
  }
  team.run(kOnThreads);
  return {dx, dw, db};
}

ThreeTensors linear_bwd(Tensor dy, std::optional<Tensor> x, std::optional<Tensor> w,
                        std::vector<bool> needs) {
  STD_TORCH_CHECK(needs.size() == 3 && (w || !needs[0]) && (x || !needs[1]),
                  "needs must have 3 entries, dx needs w, and dw needs x");
  const int64_t out = dy.size(-1), sizes[] = {out, needs[1] ? x->size(-1) : 0};
  const ScalarType type = dy.scalar_type();
  return linear_bwd_out(dy, x, w, needs, needs[0] ? new_rows(dy, w->size(1)) : new_vector(0, type),
                        needs[1] ? new_contiguous({sizes, 2}, type) : new_vector(0, type),
                        new_vector(needs[2] ? out : 0, type));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  FASTATTN_CPU_OP(m, linear_fwd, supports(TensorOnStack(stack[0]), kGiven));
  FASTATTN_CPU_OP(m, linear_bwd, supports(TensorOnStack(stack[0]), kGiven));
}

}  // namespace fastattn::ffn

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_cpu, m) {
  m.def("batch_invariant(bool on) -> bool");
  m.def("set_product_limits(int[] by_dtype) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("batch_invariant", TORCH_BOX(&fastattn::ffn::be_batch_invariant));
  m.impl("set_product_limits", TORCH_BOX(&fastattn::ffn::set_product_limits));
}
