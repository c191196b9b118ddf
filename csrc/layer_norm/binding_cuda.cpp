// fastattn_cuda's norms: from tensors to the kernels' arguments, and the choice of the instance.
// Rows have one stride; weight, bias and x_bias have one type, that of the rows or fp32.
#include <algorithm>
#include <initializer_list>
#include <string>

#include "common/dropout.h"
#include "common/torch_binding.h"
#include "layer_norm/norm_cuda.h"

namespace fastattn::norm {
namespace {

// -- memory --------------------------------------------------------------------------------------
void check_device(const Tensor& x, const char* name, const Tensor& z) {
  STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == z.get_device_index(), name,
                  " must be a CUDA tensor on the device of the rows");
}

// The data of a contiguous tensor of `count` elements or more.
template <class T>
T* data_of(const Tensor& x, const char* name, const Tensor& z, ScalarType type, int64_t count) {
  check_device(x, name, z);
  STD_TORCH_CHECK(x.scalar_type() == type && x.is_contiguous() && x.numel() >= count, name,
                  " must be contiguous, of the expected type and have ", count, " elements, got ",
                  x.numel());
  return static_cast<T*>(x.data_ptr());
}
template <class T>
T* data_if(const std::optional<Tensor>& x, const char* name, const Tensor& z, ScalarType type,
           int64_t count) {
  return x ? data_of<T>(*x, name, z, type, count) : nullptr;
}

// Merges the leading dimensions, which must have a single stride.
RowsView rows_of(const Tensor& x, const char* name, const Tensor& z, DType type) {
  check_device(x, name, z);
  const auto sizes = x.sizes(), strides = x.strides();
  const size_t last = sizes.size() - 1;
  const int64_t columns = z.size(-1);
  STD_TORCH_CHECK(dtype_of(x, name) == type && !sizes.empty() && x.numel() == z.numel() &&
                      sizes[last] == columns && (strides[last] == 1 || columns == 1),
                  name, " must have rows of ", columns,
                  " contiguous elements of the expected type");
  RowsView result = {x.data_ptr(), columns};
  int64_t expected = -1;
  for (size_t d = last; d-- > 0;) {
    if (sizes[d] == 1) {
      continue;
    }
    STD_TORCH_CHECK(expected < 0 || strides[d] == expected, name, " must have rows of one stride");
    result.stride = expected < 0 ? strides[d] : result.stride;
    expected = strides[d] * sizes[d];
  }
  return result;
}
RowsView rows_if(const std::optional<Tensor>& x, const char* name, const Tensor& z, DType type) {
  return x ? rows_of(*x, name, z, type) : RowsView();
}

// -- the problem ---------------------------------------------------------------------------------
// Sets the arguments of both directions.
template <class Problem>
void set_problem(Problem& p, const Tensor& z, std::initializer_list<const Tensor*> parameters) {
  p.type = dtype_of(z, "the rows");
  p.columns = static_cast<int>(z.size(-1));
  p.rows = z.numel() / std::max<int64_t>(p.columns, 1);
  STD_TORCH_CHECK(z.numel() > 0 && z.size(-1) <= kMaxColumns, "rows must have 1 to ", kMaxColumns,
                  " columns, got ", z.size(-1));
  p.parameter_type = p.type;
  const Tensor* first = nullptr;
  for (const Tensor* parameter : parameters) {
    if (parameter) {
      first = first ? first : parameter;
      p.parameter_type = dtype_of(*first, "a parameter");
      STD_TORCH_CHECK(parameter->scalar_type() == first->scalar_type(),
                      "parameters must have the same type");
    }
  }
  STD_TORCH_CHECK(p.parameter_type == p.type || p.parameter_type == DType::kFloat32,
                  "parameters must have the type of the rows or float32");
}

Dropout dropout_of(double p, const std::optional<Tensor>& seed, int64_t stream, const Tensor& z) {
  if (p <= 0.0) {
    return {};
  }
  STD_TORCH_CHECK(seed, "dropout needs dropout_seed");
  const int threshold = dropout::threshold(p);
  return {data_of<const int64_t>(*seed, "dropout_seed", z, ScalarType::Long, 1),
          static_cast<uint32_t>(stream), threshold, dropout::keep_scale(threshold)};
}

// Whether vectors of `width` elements lie at multiples of their size, or of 16 bytes if they are
// larger: these are loaded 16 bytes at a time.
bool is_aligned(const void* data, DType type, int width) {
  const uintptr_t bytes = std::min(16, width * bytes_of(type));
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}
bool is_aligned(const RowsView& rows, DType type, int width) {
  return !rows.data || (is_aligned(rows.data, type, width) && rows.stride % width == 0);
}

// Calls `of` with the types of the rows and of the parameters as compile-time constants.
template <DType kType, class Of>
const char* of_parameters(DType parameter_type, Of of) {
  using Type = std::integral_constant<DType, kType>;
  using Single = std::integral_constant<DType, DType::kFloat32>;
  return parameter_type == kType ? of(Type(), Type()) : of(Type(), Single());
}
template <class Problem, class Of>
void launch(const Problem& p, const Tensor& z, Of of) {
  const DeviceGuard guard(z.get_device_index());
  cuda::Stream stream = nullptr;
  STD_TORCH_CHECK(cuda::current_stream(z.get_device_index(), &stream),
                  "this torch has no CUDA streams");
  const auto run = [&](auto type, auto parameter_type) {
    return of(type, parameter_type)(p, stream);
  };
  const char* failure =
      p.type == DType::kFloat32    ? of_parameters<DType::kFloat32>(p.parameter_type, run)
      : p.type == DType::kBFloat16 ? of_parameters<DType::kBFloat16>(p.parameter_type, run)
                                   : of_parameters<DType::kFloat16>(p.parameter_type, run);
  STD_TORCH_CHECK(failure == nullptr, failure);
}

const Tensor* pointer_to(const std::optional<Tensor>& x) {
  return x ? &*x : nullptr;
}

// -- forward -------------------------------------------------------------------------------------
void norm_fwd_op(Tensor x, std::optional<Tensor> residual, std::optional<Tensor> x_bias,
                 std::optional<Tensor> weight, std::optional<Tensor> bias, double eps,
                 double dropout_p, std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                 Tensor y, std::optional<Tensor> z, std::optional<Tensor> mean, Tensor rstd) {
  ForwardProblem p;
  set_problem(p, y, {pointer_to(x_bias), pointer_to(weight), pointer_to(bias)});
  STD_TORCH_CHECK(residual.has_value() == z.has_value(), "z is the sum with the residual");
  const ScalarType parameter_type =
      p.parameter_type == p.type ? y.scalar_type() : ScalarType::Float;
  p.centred = mean.has_value();
  p.eps = static_cast<float>(eps);
  p.x_type = dtype_of(x, "x");
  STD_TORCH_CHECK(residual || p.x_type == p.type, "y must have the type of x");
  p.x = rows_of(x, "x", y, p.x_type);
  p.residual = rows_if(residual, "residual", y, p.type);
  p.z = rows_if(z, "z", y, p.type);
  p.y = rows_of(y, "y", y, p.type);
  p.x_bias = data_if<void>(x_bias, "x_bias", y, parameter_type, p.columns);
  p.weight = data_if<void>(weight, "weight", y, parameter_type, p.columns);
  p.bias = data_if<void>(bias, "bias", y, parameter_type, p.columns);
  p.mean = data_if<float>(mean, "mean", y, ScalarType::Float, p.rows);
  p.rstd = data_of<float>(rstd, "rstd", y, ScalarType::Float, p.rows);
  p.dropout = dropout_of(residual ? dropout_p : 0.0, dropout_seed, dropout_stream, y);
  const int width = vector_width(p.type);
  bool vectors = p.columns % width == 0 && is_aligned(p.x, p.x_type, width);
  for (const RowsView& rows : {p.residual, p.z, p.y}) {
    vectors = vectors && is_aligned(rows, p.type, width);
  }
  for (const void* parameter : {p.x_bias, p.weight, p.bias}) {
    vectors = vectors && is_aligned(parameter, p.parameter_type, width);
  }
  p.tiling = forward_tiling(p.columns, p.type, vectors);
  launch(p, y, [](auto type, auto parameter_type) { return &norm_fwd<type(), parameter_type()>; });
}

// -- backward ------------------------------------------------------------------------------------
ParameterGradient gradient_of(const std::optional<Tensor>& x, const char* name, const Tensor& z) {
  if (!x) {
    return {};
  }
  return {data_of<void>(*x, name, z, x->scalar_type(), z.size(-1)), dtype_of(*x, name), nullptr};
}

int64_t norm_bwd_op(std::optional<Tensor> dy, std::optional<Tensor> dz, Tensor z,
                    std::optional<Tensor> weight, std::optional<Tensor> mean, Tensor rstd,
                    double dropout_p, std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                    std::optional<Tensor> dx, std::optional<Tensor> dsum,
                    std::optional<Tensor> dweight, std::optional<Tensor> dbias,
                    std::optional<Tensor> dx_bias, int64_t num_sms,
                    std::optional<Tensor> workspace) {
  BackwardProblem p;
  set_problem(p, z, {pointer_to(weight)});
  STD_TORCH_CHECK(dy || dz, "there must be a gradient");
  p.centred = mean.has_value();
  p.dy = rows_if(dy, "dy", z, p.type);
  p.dz = rows_if(dz, "dz", z, p.type);
  p.z = rows_of(z, "z", z, p.type);
  p.weight =
      data_if<void>(weight, "weight", z,
                    p.parameter_type == p.type ? z.scalar_type() : ScalarType::Float, p.columns);
  p.mean = data_if<const float>(mean, "mean", z, ScalarType::Float, p.rows);
  p.rstd = data_of<const float>(rstd, "rstd", z, ScalarType::Float, p.rows);
  p.dsum = rows_if(dsum, "dsum", z, p.type);
  p.x_type = dx ? dtype_of(*dx, "dx") : p.type;
  p.dx = rows_if(dx, "dx", z, p.x_type);
  p.dropout = dropout_of(dropout_p, dropout_seed, dropout_stream, z);
  p.dweight = gradient_of(dweight, "dweight", z);
  p.dbias = gradient_of(dbias, "dbias", z);
  p.dx_bias = gradient_of(dx_bias, "dx_bias", z);
  const int width = vector_width(p.type);
  bool vectors = p.columns % width == 0 && is_aligned(p.dx, p.x_type, width) &&
                 is_aligned(p.weight, p.parameter_type, width);
  for (const RowsView& rows : {p.dy, p.dz, p.z, p.dsum}) {
    vectors = vectors && is_aligned(rows, p.type, width);
  }
  plan_backward(p, vectors, static_cast<int>(num_sms));
  WorkspaceLayout layout(workspace ? workspace->data_ptr() : nullptr);
  lay_out(p, layout);
  if (workspace) {
    data_of<void>(*workspace, "workspace", z, ScalarType::Byte, layout.bytes());
  } else if (layout.bytes() > 0) {
    return layout.bytes();
  }
  launch(p, z, [](auto type, auto parameter_type) { return &norm_bwd<type(), parameter_type()>; });
  return 0;
}

}  // namespace
}  // namespace fastattn::norm

// An op that needs workspace and gets none launches nothing and returns the size in bytes,
// otherwise 0.
STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_cuda, m) {
  m.def(
      "norm_fwd(Tensor x, Tensor? residual, Tensor? x_bias, Tensor? weight, Tensor? bias, "
      "float eps, float dropout_p, Tensor? dropout_seed, int dropout_stream, Tensor(a!) y, "
      "Tensor(b!)? z, Tensor(c!)? mean, Tensor(d!) rstd) -> ()");
  m.def(
      "norm_bwd(Tensor? dy, Tensor? dz, Tensor z, Tensor? weight, Tensor? mean, Tensor rstd, "
      "float dropout_p, Tensor? dropout_seed, int dropout_stream, Tensor(a!)? dx, "
      "Tensor(b!)? dsum, Tensor(c!)? dweight, Tensor(d!)? dbias, Tensor(e!)? dx_bias, int num_sms, "
      "Tensor(z!)? workspace) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cuda, CUDA, m) {
  m.impl("norm_fwd", TORCH_BOX(&fastattn::norm::norm_fwd_op));
  m.impl("norm_bwd", TORCH_BOX(&fastattn::norm::norm_bwd_op));
}
