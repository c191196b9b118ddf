// The norms on the CPU: from tensors to the kernels' arguments, and the split over torch's threads.
// Parameters are copied to the workspace if they are not contiguous or not fp32. Parameter
// gradients are summed in two stages: partitions of rows, which do not depend on the number of
// threads, then the partitions.
#include <algorithm>

#include "cpu/binding.h"
#include "layer_norm/layer_norm.h"

namespace fastattn::norm {
namespace {

// Elements below which another thread costs more than it saves.
constexpr int64_t kGrain = 16384;
// Rows of a partition when no parameter gradient is wanted.
constexpr int64_t kFreePartitionRows = 16;
// Otherwise: enough to make the second stage cheap.
constexpr int64_t kPartitionRows = 32;
constexpr int64_t kMaxPartitions = 64;
// Workspace up to this size is on the stack.
constexpr int64_t kLocalFloats = 8192;
using Workspace = Workspace<kLocalFloats>;

// Merges the leading dimensions of x into at most two strides. Returns false where its rows have
// more, or are not contiguous.
bool merge(const Tensor& x, Rows& result) {
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  const size_t leading = sizes.size() - 1;
  if (sizes[leading] > 1 && strides[leading] != 1) {
    return false;
  }
  int64_t levels = 0, extent = 1;
  int64_t level_strides[2] = {sizes[leading], 0};
  for (size_t d = leading; d-- > 0;) {
    if (sizes[d] == 1) {
      continue;
    }
    const bool continues = levels > 0 && strides[d] == level_strides[levels - 1] * extent;
    if (!continues) {
      if (levels == 2) {
        return false;
      }
      if (levels == 1) {
        result.inner = extent;
      }
      level_strides[levels++] = strides[d];
      extent = 1;
    }
    extent *= sizes[d];
  }
  result.stride = level_strides[0];
  result.outer_stride = level_strides[1];
  return true;
}

Rows rows_of(const Tensor& tensor, const char* name, int64_t rows, int64_t columns, DType type) {
  STD_TORCH_CHECK(tensor.is_cpu() && dtype_of(tensor, name) == type && tensor.dim() >= 1 &&
                      tensor.numel() == rows * columns && tensor.size(-1) == columns,
                  name, " must be a CPU tensor of ", rows, " rows of ", columns,
                  " elements of the expected type");
  Rows result = {memory_of(tensor, name), std::max<int64_t>(rows, 1), columns, 0};
  STD_TORCH_CHECK(tensor.numel() == 0 || tensor.is_contiguous() || merge(tensor, result), name,
                  " must have contiguous rows with at most two strides");
  return result;
}

Rows rows_if(const std::optional<Tensor>& tensor, const char* name, int64_t rows, int64_t columns,
             DType type) {
  return tensor ? rows_of(*tensor, name, rows, columns, type) : Rows{};
}

// Rows of a gradient; one that is not wanted has no elements.
Rows rows_of_wanted(const Tensor& gradient, const char* name, int64_t rows, int64_t columns,
                    DType type) {
  return gradient.numel() > 0 ? rows_of(gradient, name, rows, columns, type) : Rows{};
}

void check_needs(const std::vector<bool>& needs, size_t count) {
  STD_TORCH_CHECK(needs.size() == count, "needs must have ", count, " entries, got ", needs.size());
}

// In fp32: in place, or in the workspace.
const float* parameter(const std::optional<Tensor>& tensor, const char* name, int64_t columns,
                       Workspace& workspace) {
  if (!tensor) {
    return nullptr;
  }
  const DType type = dtype_of(*tensor, name);
  STD_TORCH_CHECK(tensor->dim() == 1, name, " must have one dimension, got ", tensor->dim());
  const Tensor dense = as_contiguous(*tensor);
  const void* data = data_of<void>(dense, name, columns, tensor->scalar_type());
  if (type == DType::kFloat32 && tensor->is_contiguous()) {
    return static_cast<const float*>(data);
  }
  float* converted = workspace.take<float>(columns);
  kernels().to_float(data, type, converted, columns);
  return converted;
}

// Partitions of rows whose parameter gradients are summed in two stages.
int64_t partitions_of(int64_t rows) {
  return std::min((rows + kPartitionRows - 1) / kPartitionRows, kMaxPartitions);
}

void run(const Forward& a) {
  const Kernels& isa = kernels();
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(a.columns, 1));
  torch::stable::parallel_for(0, a.rows, grain,
                              [&](int64_t first, int64_t last) { isa.forward(a, first, last); });
}

// A parameter's gradient and where its shares are collected.
struct Wanted {
  const Tensor& gradient;
  const char* name;
  int* share;
};

void run(Backward& a, Workspace& workspace, std::initializer_list<Wanted> parameters) {
  const Kernels& isa = kernels();
  for (const Wanted& wanted : parameters) {
    if (wanted.gradient.numel() > 0) {
      *wanted.share = a.shares++;
    }
  }
  int64_t partitions = 0;
  a.partition_rows = kFreePartitionRows;
  if (a.shares > 0) {
    partitions = partitions_of(a.rows);
    a.partials = workspace.take<float>(partitions * a.shares * a.columns);
    // Whole groups of rows: the kernels process up to four together.
    const int64_t even = (a.rows + partitions - 1) / std::max<int64_t>(partitions, 1);
    a.partition_rows = std::max<int64_t>((even + 3) / 4 * 4, 4);
  } else {
    partitions = (a.rows + a.partition_rows - 1) / a.partition_rows;
  }
  const int64_t elements = std::max<int64_t>(a.partition_rows * a.columns, 1);
  const int64_t grain = std::max<int64_t>(1, kGrain / elements);
  torch::stable::parallel_for(0, partitions, grain,
                              [&](int64_t first, int64_t last) { isa.backward(a, first, last); });
  const int64_t column_grain = std::max<int64_t>(64, kGrain / std::max<int64_t>(partitions, 1));
  for (const Wanted& wanted : parameters) {
    if (*wanted.share < 0) {
      continue;
    }
    const DType type = dtype_of(wanted.gradient, wanted.name);
    void* result =
        data_of<void>(wanted.gradient, wanted.name, a.columns, wanted.gradient.scalar_type());
    torch::stable::parallel_for(0, a.columns, column_grain, [&](int64_t first, int64_t last) {
      isa.reduce(a, partitions, *wanted.share, result, type, first, last);
    });
  }
}

// -- arguments and results -----------------------------------------------------------------------
Tensor new_rows(const Tensor& like, std::optional<ScalarType> type = {}) {
  return with_large_pages(new_contiguous(like.sizes(), type.value_or(like.scalar_type())));
}

// One fp32 value per row.
Tensor new_statistic(const Tensor& x) {
  const auto sizes = x.sizes();
  STD_TORCH_CHECK(sizes.size() > 0, "rows must have a dimension, got a number");
  return new_contiguous({sizes.data(), sizes.size() - 1}, ScalarType::Float);
}

// A gradient like rows, or of shape [0] where it is not wanted.
Tensor new_gradient(const Tensor& like, bool wanted, std::optional<ScalarType> type = {}) {
  return wanted ? new_rows(like, type) : new_vector(0, like.scalar_type());
}

// The gradient of a parameter for rows x.
Tensor new_gradient(const Tensor& x, const std::optional<Tensor>& parameter, bool wanted) {
  return parameter && wanted ? new_vector(parameter->numel(), parameter->scalar_type())
                             : new_vector(0, x.scalar_type());
}

// x, or a copy where `rows_of` cannot read it.
Tensor readable_rows(const Tensor& x) {
  Rows rows;
  return x.is_contiguous() || merge(x, rows) ? x : contiguous_copy(x);
}

std::optional<Tensor> readable_rows(const std::optional<Tensor>& x) {
  return x ? std::optional(readable_rows(*x)) : x;
}

// Floats of workspace: `parameters` in fp32, the hashed columns of dropout, and the
// partial sums of `wanted` parameter gradients.
int64_t floats_for(const Tensor& z, int64_t parameters, double dropout_p, int wanted) {
  const int64_t columns = z.size(-1);
  int64_t floats = parameters * columns + floats_for_dropout(dropout_p, columns);
  if (wanted > 0) {
    floats += partitions_of(rows_in(z)) * wanted * columns;
  }
  return floats;
}

// -- layer_norm and rms_norm ---------------------------------------------------------------------
using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Arguments of all forward passes. `z`: the tensor that is normalised; add_layer_norm writes it.
Forward forward_of(const Tensor& z, const char* name, const std::optional<Tensor>& weight,
                   const std::optional<Tensor>& bias, double eps, const Tensor& y,
                   const Tensor* mean, const Tensor& rstd, Workspace& workspace) {
  Forward a = {};
  a.rows = rows_in(z);
  a.columns = z.size(-1);
  a.z_type = dtype_of(z, name);
  a.centred = mean != nullptr;
  a.eps = static_cast<float>(eps);
  a.z = rows_of(z, name, a.rows, a.columns, a.z_type);
  a.y = rows_of(y, "y", a.rows, a.columns, a.z_type);
  a.weight = parameter(weight, "weight", a.columns, workspace);
  a.bias = parameter(bias, "bias", a.columns, workspace);
  a.mean = mean ? data_of<float>(*mean, "mean", a.rows, ScalarType::Float) : nullptr;
  a.rstd = data_of<float>(rstd, "rstd", a.rows, ScalarType::Float);
  return a;
}

void norm_fwd(const Tensor& given, const std::optional<Tensor>& weight,
              const std::optional<Tensor>& bias, double eps, const Tensor& y, const Tensor* mean,
              const Tensor& rstd) {
  const Tensor x = readable_rows(given);
  Workspace workspace(floats_for(x, 2, 0.0, 0));
  run(forward_of(x, "x", weight, bias, eps, y, mean, rstd, workspace));
}

ThreeTensors layer_norm_fwd_out(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias,
                                double eps, Tensor y, Tensor mean, Tensor rstd) {
  norm_fwd(x, weight, bias, eps, y, &mean, rstd);
  return {y, mean, rstd};
}

ThreeTensors layer_norm_fwd(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias,
                            double eps) {
  return layer_norm_fwd_out(x, weight, bias, eps, new_rows(x), new_statistic(x), new_statistic(x));
}

TwoTensors rms_norm_fwd_out(Tensor x, std::optional<Tensor> weight, double eps, Tensor y,
                            Tensor rstd) {
  norm_fwd(x, weight, std::nullopt, eps, y, nullptr, rstd);
  return {y, rstd};
}

TwoTensors rms_norm_fwd(Tensor x, std::optional<Tensor> weight, double eps) {
  return rms_norm_fwd_out(x, weight, eps, new_rows(x), new_statistic(x));
}

// Arguments of all backward passes. `z`: the normalised tensor.
Backward backward_of(const Tensor& z, const std::optional<Tensor>& dy,
                     const std::optional<Tensor>& weight, const Tensor* mean, const Tensor& rstd,
                     const Tensor& dsum, Workspace& workspace) {
  const int64_t columns = z.size(-1);
  const int64_t rows = rows_in(z);
  const DType type = dtype_of(z, "the normalised tensor");
  Backward a = {};
  a.rows = rows;
  a.columns = columns;
  a.z_type = a.x_type = type;
  a.centred = mean != nullptr;
  a.dy = rows_if(dy, "dy", rows, columns, type);
  a.z = rows_of(z, "the normalised tensor", rows, columns, type);
  a.weight = parameter(weight, "weight", columns, workspace);
  a.mean = mean ? data_of<float>(*mean, "mean", rows, ScalarType::Float) : nullptr;
  a.rstd = data_of<float>(rstd, "rstd", rows, ScalarType::Float);
  a.dsum = rows_of_wanted(dsum, "the gradient of the normalised tensor", rows, columns, type);
  return a;
}

ThreeTensors layer_norm_bwd_out(Tensor dy, Tensor x, std::optional<Tensor> weight,
                                std::optional<Tensor> /*bias*/, Tensor mean, Tensor rstd,
                                double /*eps*/, std::vector<bool> needs, Tensor dx, Tensor dweight,
                                Tensor dbias) {
  check_needs(needs, 3);
  const Tensor rows[] = {readable_rows(dy), readable_rows(x), as_contiguous(mean),
                         as_contiguous(rstd)};
  Workspace workspace(floats_for(x, 1, 0.0, needs[1] + needs[2]));
  Backward a = backward_of(rows[1], rows[0], weight, &rows[2], rows[3], dx, workspace);
  run(a, workspace, {{dweight, "dweight", &a.dweight_share}, {dbias, "dbias", &a.dbias_share}});
  return {dx, dweight, dbias};
}

ThreeTensors layer_norm_bwd(Tensor dy, Tensor x, std::optional<Tensor> weight,
                            std::optional<Tensor> bias, Tensor mean, Tensor rstd, double eps,
                            std::vector<bool> needs) {
  check_needs(needs, 3);
  return layer_norm_bwd_out(dy, x, weight, bias, mean, rstd, eps, needs, new_gradient(x, needs[0]),
                            new_gradient(x, weight, needs[1]), new_gradient(x, bias, needs[2]));
}

TwoTensors rms_norm_bwd_out(Tensor dy, Tensor x, std::optional<Tensor> weight, Tensor rstd,
                            double /*eps*/, std::vector<bool> needs, Tensor dx, Tensor dweight) {
  check_needs(needs, 2);
  const Tensor rows[] = {readable_rows(dy), readable_rows(x), as_contiguous(rstd)};
  Workspace workspace(floats_for(x, 1, 0.0, needs[1]));
  Backward a = backward_of(rows[1], rows[0], weight, nullptr, rows[2], dx, workspace);
  run(a, workspace, {{dweight, "dweight", &a.dweight_share}});
  return {dx, dweight};
}

TwoTensors rms_norm_bwd(Tensor dy, Tensor x, std::optional<Tensor> weight, Tensor rstd, double eps,
                        std::vector<bool> needs) {
  check_needs(needs, 2);
  return rms_norm_bwd_out(dy, x, weight, rstd, eps, needs, new_gradient(x, needs[0]),
                          new_gradient(x, weight, needs[1]));
}

// -- add_layer_norm ------------------------------------------------------------------------------
FourTensors add_layer_norm_fwd_out(Tensor x, Tensor residual, std::optional<Tensor> x_bias,
                                   std::optional<Tensor> weight, std::optional<Tensor> bias,
                                   double eps, double dropout_p, std::optional<Tensor> dropout_seed,
                                   int64_t dropout_stream, Tensor y, Tensor z, Tensor mean,
                                   Tensor rstd) {
  const Tensor inputs[] = {readable_rows(x), readable_rows(residual)};
  Workspace workspace(floats_for(x, 3, dropout_p, 0));
  Forward a = forward_of(z, "z", weight, bias, eps, y, &mean, rstd, workspace);
  a.add = true;
  a.x_type = dtype_of(x, "x");
  a.x = rows_of(inputs[0], "x", a.rows, a.columns, a.x_type);
  a.residual = rows_of(inputs[1], "residual", a.rows, a.columns, a.z_type);
  a.x_bias = parameter(x_bias, "x_bias", a.columns, workspace);
  a.dropout = dropout_of(dropout_p, dropout_seed, dropout_stream, a.columns,
                         workspace.take(floats_for_dropout(dropout_p, a.columns)));
  run(a);
  return {y, z, mean, rstd};
}

FourTensors add_layer_norm_fwd(Tensor x, Tensor residual, std::optional<Tensor> x_bias,
                               std::optional<Tensor> weight, std::optional<Tensor> bias, double eps,
                               double dropout_p, std::optional<Tensor> dropout_seed,
                               int64_t dropout_stream) {
  return add_layer_norm_fwd_out(x, residual, x_bias, weight, bias, eps, dropout_p, dropout_seed,
                                dropout_stream, new_rows(residual), new_rows(residual),
                                new_statistic(residual), new_statistic(residual));
}

FiveTensors add_layer_norm_bwd_out(std::optional<Tensor> dy, std::optional<Tensor> dz, Tensor z,
                                   std::optional<Tensor> /*x_bias*/, std::optional<Tensor> weight,
                                   std::optional<Tensor> /*bias*/, Tensor mean, Tensor rstd,
                                   double /*eps*/, ScalarType /*x_dtype*/, double dropout_p,
                                   std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                                   std::vector<bool> needs, Tensor dx, Tensor dresidual,
                                   Tensor dx_bias, Tensor dweight, Tensor dbias) {
  check_needs(needs, 5);
  const Tensor rows[] = {readable_rows(z), as_contiguous(mean), as_contiguous(rstd)};
  dy = readable_rows(dy);
  dz = readable_rows(dz);
  const int wanted = needs[2] + needs[3] + needs[4];
  Workspace workspace(floats_for(z, 1, dropout_p, wanted));
  Backward a = backward_of(rows[0], dy, weight, &rows[1], rows[2], dresidual, workspace);
  a.dz = rows_if(dz, "dz", a.rows, a.columns, a.z_type);
  a.x_type = dtype_of(dx, "dx");
  a.dx = rows_of_wanted(dx, "dx", a.rows, a.columns, a.x_type);
  a.dropout = dropout_of(dropout_p, dropout_seed, dropout_stream, a.columns,
                         workspace.take(floats_for_dropout(dropout_p, a.columns)));
  run(a, workspace,
      {{dx_bias, "dx_bias", &a.dx_bias_share},
       {dweight, "dweight", &a.dweight_share},
       {dbias, "dbias", &a.dbias_share}});
  return {dx, dresidual, dx_bias, dweight, dbias};
}

FiveTensors add_layer_norm_bwd(std::optional<Tensor> dy, std::optional<Tensor> dz, Tensor z,
                               std::optional<Tensor> x_bias, std::optional<Tensor> weight,
                               std::optional<Tensor> bias, Tensor mean, Tensor rstd, double eps,
                               ScalarType x_dtype, double dropout_p,
                               std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                               std::vector<bool> needs) {
  check_needs(needs, 5);
  return add_layer_norm_bwd_out(dy, dz, z, x_bias, weight, bias, mean, rstd, eps, x_dtype,
                                dropout_p, dropout_seed, dropout_stream, needs,
                                new_gradient(z, needs[0], x_dtype), new_gradient(z, needs[1]),
                                new_gradient(z, x_bias, needs[2]),
                                new_gradient(z, weight, needs[3]), new_gradient(z, bias, needs[4]));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  // The places of x, residual or z, then those of the parameters, which may be None.
  FASTATTN_CPU_OP(m, layer_norm_fwd, have_kernels(stack, {0}, {1, 2}));
  FASTATTN_CPU_OP(m, layer_norm_bwd, have_kernels(stack, {1}, {2, 3}));
  FASTATTN_CPU_OP(m, rms_norm_fwd, have_kernels(stack, {0}, {1}));
  FASTATTN_CPU_OP(m, rms_norm_bwd, have_kernels(stack, {1}, {2}));
  FASTATTN_CPU_OP(m, add_layer_norm_fwd, have_kernels(stack, {0, 1}, {2, 3, 4}));
  FASTATTN_CPU_OP(m, add_layer_norm_bwd,
                  has_kernels_for(torch::stable::detail::to<ScalarType>(stack[9])) &&  // x_dtype
                      have_kernels(stack, {2}, {3, 4, 5}));
}

}  // namespace fastattn::norm
