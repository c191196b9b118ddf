// fastattn_cpu's norms: from tensors to the kernels' arguments, and the split over torch's threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/dropout.h"
#include "common/torch_binding.h"
#include "layer_norm/layer_norm.h"

namespace fastattn::norm {
namespace {

// Elements below which another thread costs more than it brings.
constexpr int64_t kGrain = 16384;
// Rows of a partition when no parameter gradient is wanted.
constexpr int64_t kFreePartitionRows = 16;
// Otherwise: what fastattn/ops/layer_norm/cpu.py gives room for.
constexpr int64_t kPartitionRows = 32;
constexpr int64_t kMaxPartitions = 64;

// Merges the leading dimensions into at most two strides.
Rows rows_of(const Tensor& tensor, const char* name, int64_t rows, int64_t columns, DType type) {
  STD_TORCH_CHECK(tensor.is_cpu() && dtype_of(tensor, name) == type && tensor.dim() >= 1 &&
                      tensor.numel() == rows * columns && tensor.size(-1) == columns,
                  name, " must be a CPU tensor of ", rows, " rows of ", columns,
                  " elements of the expected type");
  Rows result = {memory_of(tensor, name), std::max<int64_t>(rows, 1), columns, 0};
  if (tensor.numel() == 0 || tensor.is_contiguous()) {
    return result;
  }
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  STD_TORCH_CHECK(columns == 1 || strides[sizes.size() - 1] == 1, name,
                  " must have a contiguous last dimension");
  int64_t levels = 0, extent = 1;
  int64_t level_strides[2] = {columns, 0};
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 2; d >= 0; --d) {
    if (sizes[d] == 1) {
      continue;
    }
    const bool continues = levels > 0 && strides[d] == level_strides[levels - 1] * extent;
    if (!continues) {
      STD_TORCH_CHECK(levels < 2, name, " must have rows with at most two strides");
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
  return result;
}

// A tensor that may be absent: not given, or of no elements.
Rows rows_if(const std::optional<Tensor>& tensor, const char* name, int64_t rows, int64_t columns,
             DType type) {
  if (!tensor || tensor->numel() == 0) {
    return {};
  }
  return rows_of(*tensor, name, rows, columns, type);
}

const float* parameter(const std::optional<Tensor>& tensor, const char* name, int64_t columns,
                       Scratch& scratch) {
  if (!tensor) {
    return nullptr;
  }
  const DType type = dtype_of(*tensor, name);
  const void* data = data_of<void>(*tensor, name, columns, tensor->scalar_type());
  STD_TORCH_CHECK(tensor->dim() == 1, name, " must have one dimension, got ", tensor->dim());
  if (type == DType::kFloat32) {
    return static_cast<const float*>(data);
  }
  float* converted = scratch.take<float>(columns);
  kernels().to_float(data, type, converted, columns);
  return converted;
}

Dropout dropout_of(double p, const std::optional<Tensor>& seed, int64_t stream, int64_t columns,
                   Scratch& scratch) {
  Dropout result;
  result.threshold = dropout::threshold(p);
  if (result.threshold == 0) {
    return result;
  }
  STD_TORCH_CHECK(seed.has_value(), "dropout_seed must be given when dropout_p > 0");
  result.scale = dropout::keep_scale(result.threshold);
  result.seed = *data_of<const int64_t>(*seed, "dropout_seed", 1, ScalarType::Long);
  result.stream = static_cast<uint32_t>(stream);
  const int64_t units = (columns + 3) / 4;
  uint32_t* keys = scratch.take<uint32_t>(units);
  const uint32_t key = dropout::stream_key(dropout::kColumnTag, result.seed, result.stream);
  for (int64_t unit = 0; unit < units; ++unit) {
    keys[unit] = dropout::absorb(key, static_cast<uint32_t>(unit));
  }
  result.column_keys = keys;
  return result;
}

int64_t rows_in(const Tensor& tensor, int64_t columns) {
  if (columns > 0) {
    return tensor.numel() / columns;
  }
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) {
    rows *= tensor.size(d);
  }
  return rows;
}

// Of the rows whose parameter gradients are summed in two stages.
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

void run(Backward& a, Scratch& scratch, std::initializer_list<Wanted> parameters) {
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
    a.partials = scratch.take<float>(partitions * a.shares * a.columns);
    // Whole groups of rows: the kernels take up to four together.
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

// -- ops -----------------------------------------------------------------------------------------
void forward_op(const Tensor& x, const std::optional<Tensor>& weight,
                const std::optional<Tensor>& bias, double eps, const Tensor& y, const Tensor* mean,
                const Tensor& rstd, Scratch& scratch) {
  const int64_t columns = x.size(-1);
  const int64_t rows = rows_in(x, columns);
  const DType type = dtype_of(x, "x");
  Forward a = {};
  a.rows = rows;
  a.columns = columns;
  a.z_type = type;
  a.centred = mean != nullptr;
  a.eps = static_cast<float>(eps);
  a.z = rows_of(x, "x", rows, columns, type);
  a.y = rows_of(y, "y", rows, columns, type);
  a.weight = parameter(weight, "weight", columns, scratch);
  a.bias = parameter(bias, "bias", columns, scratch);
  a.mean = mean ? data_of<float>(*mean, "mean", rows, ScalarType::Float) : nullptr;
  a.rstd = data_of<float>(rstd, "rstd", rows, ScalarType::Float);
  run(a);
}

void layer_norm_fwd(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps,
                    Tensor y, Tensor mean, Tensor rstd, std::optional<Tensor> workspace) {
  Scratch scratch(workspace);
  forward_op(x, weight, bias, eps, y, &mean, rstd, scratch);
}

void rms_norm_fwd(Tensor x, std::optional<Tensor> weight, double eps, Tensor y, Tensor rstd,
                  std::optional<Tensor> workspace) {
  Scratch scratch(workspace);
  forward_op(x, weight, std::nullopt, eps, y, nullptr, rstd, scratch);
}

void add_forward_op(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& x_bias,
                    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                    double eps, double dropout_p, const std::optional<Tensor>& dropout_seed,
                    int64_t dropout_stream, const Tensor& y, const Tensor& z, const Tensor& mean,
                    const Tensor& rstd, Scratch& scratch) {
  const int64_t columns = x.size(-1);
  const int64_t rows = rows_in(x, columns);
  const DType type = dtype_of(residual, "residual");
  Forward a = {};
  a.rows = rows;
  a.columns = columns;
  a.z_type = type;
  a.centred = true;
  a.eps = static_cast<float>(eps);
  a.z = rows_of(z, "z", rows, columns, type);
  a.y = rows_of(y, "y", rows, columns, type);
  a.weight = parameter(weight, "weight", columns, scratch);
  a.bias = parameter(bias, "bias", columns, scratch);
  a.mean = data_of<float>(mean, "mean", rows, ScalarType::Float);
  a.rstd = data_of<float>(rstd, "rstd", rows, ScalarType::Float);
  a.add = true;
  a.x_type = dtype_of(x, "x");
  a.x = rows_of(x, "x", rows, columns, a.x_type);
  a.residual = rows_of(residual, "residual", rows, columns, type);
  a.x_bias = parameter(x_bias, "x_bias", columns, scratch);
  a.dropout = dropout_of(dropout_p, dropout_seed, dropout_stream, columns, scratch);
  run(a);
}

void add_layer_norm_fwd(Tensor x, Tensor residual, std::optional<Tensor> x_bias,
                        std::optional<Tensor> weight, std::optional<Tensor> bias, double eps,
                        double dropout_p, std::optional<Tensor> dropout_seed,
                        int64_t dropout_stream, Tensor y, Tensor z, Tensor mean, Tensor rstd,
                        std::optional<Tensor> workspace) {
  Scratch scratch(workspace);
  add_forward_op(x, residual, x_bias, weight, bias, eps, dropout_p, dropout_seed, dropout_stream, y,
                 z, mean, rstd, scratch);
}

// What the backward passes share. `z` is what was normalised.
Backward backward_of(const Tensor& z, const std::optional<Tensor>& dy,
                     const std::optional<Tensor>& weight, const Tensor* mean, const Tensor& rstd,
                     const Tensor& dsum, Scratch& scratch) {
  const int64_t columns = z.size(-1);
  const int64_t rows = rows_in(z, columns);
  const DType type = dtype_of(z, "the normalised tensor");
  Backward a = {};
  a.rows = rows;
  a.columns = columns;
  a.z_type = a.x_type = type;
  a.centred = mean != nullptr;
  a.dy = rows_if(dy, "dy", rows, columns, type);
  a.z = rows_of(z, "the normalised tensor", rows, columns, type);
  a.weight = parameter(weight, "weight", columns, scratch);
  a.mean = mean ? data_of<float>(*mean, "mean", rows, ScalarType::Float) : nullptr;
  a.rstd = data_of<float>(rstd, "rstd", rows, ScalarType::Float);
  a.dsum = rows_if(dsum, "the gradient of the normalised tensor", rows, columns, type);
  return a;
}

void backward_op(const Tensor& dy, const Tensor& x, const std::optional<Tensor>& weight,
                 const Tensor& mean, const Tensor& rstd, const Tensor& dx, const Tensor& dweight,
                 const Tensor& dbias, Scratch& scratch) {
  Backward a = backward_of(x, dy, weight, &mean, rstd, dx, scratch);
  run(a, scratch, {{dweight, "dweight", &a.dweight_share}, {dbias, "dbias", &a.dbias_share}});
}

void layer_norm_bwd(Tensor dy, Tensor x, std::optional<Tensor> weight, Tensor mean, Tensor rstd,
                    Tensor dx, Tensor dweight, Tensor dbias, std::optional<Tensor> workspace) {
  Scratch scratch(workspace);
  backward_op(dy, x, weight, mean, rstd, dx, dweight, dbias, scratch);
}

void rms_backward_op(const Tensor& dy, const Tensor& x, const std::optional<Tensor>& weight,
                     const Tensor& rstd, const Tensor& dx, const Tensor& dweight,
                     Scratch& scratch) {
  Backward a = backward_of(x, dy, weight, nullptr, rstd, dx, scratch);
  run(a, scratch, {{dweight, "dweight", &a.dweight_share}});
}

void rms_norm_bwd(Tensor dy, Tensor x, std::optional<Tensor> weight, Tensor rstd, Tensor dx,
                  Tensor dweight, std::optional<Tensor> workspace) {
  Scratch scratch(workspace);
  rms_backward_op(dy, x, weight, rstd, dx, dweight, scratch);
}

void add_backward_op(const std::optional<Tensor>& dy, const std::optional<Tensor>& dz,
                     const Tensor& z, const std::optional<Tensor>& weight, const Tensor& mean,
                     const Tensor& rstd, double dropout_p,
                     const std::optional<Tensor>& dropout_seed, int64_t dropout_stream,
                     const Tensor& dx, const Tensor& dresidual, const Tensor& dx_bias,
                     const Tensor& dweight, const Tensor& dbias, Scratch& scratch) {
  Backward a = backward_of(z, dy, weight, &mean, rstd, dresidual, scratch);
  a.dz = rows_if(dz, "dz", a.rows, a.columns, a.z_type);
  a.x_type = dtype_of(dx, "dx");
  a.dx = rows_if(dx, "dx", a.rows, a.columns, a.x_type);
  a.dropout = dropout_of(dropout_p, dropout_seed, dropout_stream, a.columns, scratch);
  run(a, scratch,
      {{dx_bias, "dx_bias", &a.dx_bias_share},
       {dweight, "dweight", &a.dweight_share},
       {dbias, "dbias", &a.dbias_share}});
}

void add_layer_norm_bwd(std::optional<Tensor> dy, std::optional<Tensor> dz, Tensor z,
                        std::optional<Tensor> weight, Tensor mean, Tensor rstd, double dropout_p,
                        std::optional<Tensor> dropout_seed, int64_t dropout_stream, Tensor dx,
                        Tensor dresidual, Tensor dx_bias, Tensor dweight, Tensor dbias,
                        std::optional<Tensor> workspace) {
  Scratch scratch(workspace);
  add_backward_op(dy, dz, z, weight, mean, rstd, dropout_p, dropout_seed, dropout_stream, dx,
                  dresidual, dx_bias, dweight, dbias, scratch);
}

// -- ops that make their results -----------------------------------------------------------------
// And their scratch memory: where rows are few, making them in Python takes as long as the kernel.
// So does looking at arguments there: these refuse what fastattn.functional refuses, by name then.
constexpr size_t kUsualDims = 16;

Tensor new_contiguous(const int64_t* sizes, size_t dims, ScalarType type) {
  int64_t usual[kUsualDims], stride = 1;
  std::vector<int64_t> many(dims > kUsualDims ? dims : 0);
  int64_t* strides = dims > kUsualDims ? many.data() : usual;
  for (size_t d = dims; d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return fresh(new_tensor({sizes, dims}, {strides, dims}, type));
}

Tensor new_rows(const Tensor& like) {
  const auto sizes = like.sizes();
  return new_contiguous(sizes.data(), sizes.size(), like.scalar_type());
}

// A number for each row.
Tensor new_statistic(const Tensor& x) {
  const auto sizes = x.sizes();
  STD_TORCH_CHECK(sizes.size() > 0, "rows must have a dimension, got a number");
  return new_contiguous(sizes.data(), sizes.size() - 1, ScalarType::Float);
}

// A gradient like rows, or of shape [0] where nobody wants it.
Tensor new_gradient(const Tensor& like, bool wanted, std::optional<ScalarType> type = {}) {
  const auto sizes = like.sizes();
  const int64_t nothing = 0;
  return wanted ? new_contiguous(sizes.data(), sizes.size(), type.value_or(like.scalar_type()))
                : new_contiguous(&nothing, 1, like.scalar_type());
}

// That of a parameter of rows x.
Tensor new_gradient(const Tensor& x, const std::optional<Tensor>& parameter, bool wanted) {
  const bool made = parameter && wanted;
  const int64_t columns = made ? parameter->numel() : 0;
  return new_contiguous(&columns, 1, (made ? *parameter : x).scalar_type());
}

// Scratch memory for `parameters` converted to float, the columns of a dropout and the shares of
// `wanted` parameter gradients: up to 32 KiB on the stack, else a tensor.
class OwnScratch {
 public:
  OwnScratch(const Tensor& z, int64_t parameters, bool dropout, int wanted)
      : tensor_(made(z, parameters, dropout, wanted)), scratch(tensor_, floats_, kFloats) {}

 private:
  static constexpr int64_t kFloats = 8192;

  static std::optional<Tensor> made(const Tensor& z, int64_t parameters, bool dropout, int wanted) {
    const int64_t columns = z.size(-1);
    int64_t floats = parameters * columns + (dropout ? (columns + 3) / 4 : 0);
    if (wanted > 0) {
      floats += partitions_of(rows_in(z, columns)) * wanted * columns;
    }
    return floats <= kFloats ? std::nullopt
                             : std::optional(new_contiguous(&floats, 1, ScalarType::Float));
  }

  std::optional<Tensor> tensor_;
  float floats_[kFloats];

 public:
  Scratch scratch;
};

Tensor dense(const Tensor& x) {
  return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

// x, or a copy where `rows_of` cannot read it.
Tensor readable_rows(const Tensor& x) {
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  const size_t leading = sizes.size() - 1;
  if (sizes.empty() || x.is_contiguous()) {
    return x;
  }
  if (sizes[leading] > 1 && strides[leading] != 1) {
    return torch::stable::contiguous(x);
  }
  int64_t breaks = 0, expected = -1;
  for (size_t d = leading; d-- > 0;) {
    if (sizes[d] == 1) {
      continue;
    }
    breaks += expected >= 0 && strides[d] != expected;
    expected = strides[d] * sizes[d];
  }
  return breaks > 1 ? torch::stable::contiguous(x) : x;
}

std::optional<Tensor> readable_rows(const std::optional<Tensor>& x) {
  return x ? std::optional(readable_rows(*x)) : x;
}

void check_eps(double eps) {
  STD_TORCH_CHECK(eps >= 0.0 && std::isfinite(eps), "eps must be a finite number >= 0, got ", eps);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd_direct(Tensor x, std::optional<Tensor> weight,
                                                         std::optional<Tensor> bias, double eps) {
  check_eps(eps);
  Tensor y = new_rows(x), mean = new_statistic(x), rstd = new_statistic(x);
  OwnScratch own(x, 2, false, 0);
  forward_op(readable_rows(x), weight, bias, eps, y, &mean, rstd, own.scratch);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_fwd_direct(Tensor x, std::optional<Tensor> weight, double eps) {
  check_eps(eps);
  Tensor y = new_rows(x), rstd = new_statistic(x);
  OwnScratch own(x, 1, false, 0);
  forward_op(readable_rows(x), weight, std::nullopt, eps, y, nullptr, rstd, own.scratch);
  return {y, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd_direct(
    Tensor x, Tensor residual, std::optional<Tensor> x_bias, std::optional<Tensor> weight,
    std::optional<Tensor> bias, double eps, double dropout_p, std::optional<Tensor> dropout_seed,
    int64_t dropout_stream) {
  check_eps(eps);
  STD_TORCH_CHECK(std::equal(x.sizes().begin(), x.sizes().end(), residual.sizes().begin(),
                             residual.sizes().end()),
                  "residual must have x's shape");
  STD_TORCH_CHECK(dropout_p >= 0.0 && dropout_p <= 1.0 && dropout_stream >= 0 &&
                      dropout_stream < dropout::kSecondStream,
                  "dropout_p and dropout_stream must be in their ranges");
  STD_TORCH_CHECK(!dropout_seed || (dropout_seed->dim() == 1 && dropout_seed->numel() == 1 &&
                                    dropout_seed->scalar_type() == ScalarType::Long),
                  "dropout_seed must be int64 [1]");
  Tensor y = new_rows(residual), z = new_rows(residual);
  Tensor mean = new_statistic(residual), rstd = new_statistic(residual);
  OwnScratch own(x, 3, dropout_p > 0.0, 0);
  add_forward_op(readable_rows(x), readable_rows(residual), x_bias, weight, bias, eps, dropout_p,
                 dropout_seed, dropout_stream, y, z, mean, rstd, own.scratch);
  return {y, z, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd_direct(Tensor dy, Tensor x,
                                                         std::optional<Tensor> weight,
                                                         std::optional<Tensor> bias, Tensor mean,
                                                         Tensor rstd, bool needs_x,
                                                         bool needs_weight, bool needs_bias) {
  Tensor dx = new_gradient(x, needs_x);
  Tensor dweight = new_gradient(x, weight, needs_weight);
  Tensor dbias = new_gradient(x, bias, needs_bias);
  OwnScratch own(x, 1, false, needs_weight + needs_bias);
  backward_op(readable_rows(dy), readable_rows(x), weight, dense(mean), dense(rstd), dx, dweight,
              dbias, own.scratch);
  return {dx, dweight, dbias};
}

std::tuple<Tensor, Tensor> rms_norm_bwd_direct(Tensor dy, Tensor x, std::optional<Tensor> weight,
                                               Tensor rstd, bool needs_x, bool needs_weight) {
  Tensor dx = new_gradient(x, needs_x), dweight = new_gradient(x, weight, needs_weight);
  OwnScratch own(x, 1, false, needs_weight);
  rms_backward_op(readable_rows(dy), readable_rows(x), weight, dense(rstd), dx, dweight,
                  own.scratch);
  return {dx, dweight};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_layer_norm_bwd_direct(
    std::optional<Tensor> dy, std::optional<Tensor> dz, Tensor z, std::optional<Tensor> x_bias,
    std::optional<Tensor> weight, std::optional<Tensor> bias, Tensor mean, Tensor rstd,
    ScalarType x_dtype, double dropout_p, std::optional<Tensor> dropout_seed,
    int64_t dropout_stream, bool needs_x, bool needs_residual, bool needs_x_bias, bool needs_weight,
    bool needs_bias) {
  Tensor dx = new_gradient(z, needs_x, x_dtype), dresidual = new_gradient(z, needs_residual);
  Tensor dx_bias = new_gradient(z, x_bias, needs_x_bias);
  Tensor dweight = new_gradient(z, weight, needs_weight);
  Tensor dbias = new_gradient(z, bias, needs_bias);
  OwnScratch own(z, 1, dropout_p > 0.0, needs_x_bias + needs_weight + needs_bias);
  add_backward_op(readable_rows(dy), readable_rows(dz), readable_rows(z), weight, dense(mean),
                  dense(rstd), dropout_p, dropout_seed, dropout_stream, dx, dresidual, dx_bias,
                  dweight, dbias, own.scratch);
  return {dx, dresidual, dx_bias, dweight, dbias};
}

}  // namespace
}  // namespace fastattn::norm

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_cpu, m) {
  m.def(
      "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor(a!) y, "
      "Tensor(b!) mean, Tensor(c!) rstd, Tensor(d!)? scratch) -> ()");
  m.def(
      "layer_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
      "Tensor(a!) dx, Tensor(b!) dweight, Tensor(c!) dbias, Tensor(d!)? scratch) -> ()");
  m.def(
      "rms_norm_fwd(Tensor x, Tensor? weight, float eps, Tensor(a!) y, Tensor(b!) rstd, "
      "Tensor(c!)? scratch) -> ()");
  m.def(
      "rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor(a!) dx, "
      "Tensor(b!) dweight, Tensor(c!)? scratch) -> ()");
  m.def(
      "add_layer_norm_fwd(Tensor x, Tensor residual, Tensor? x_bias, Tensor? weight, "
      "Tensor? bias, float eps, float dropout_p, Tensor? dropout_seed, int dropout_stream, "
      "Tensor(a!) y, Tensor(b!) z, Tensor(c!) mean, Tensor(d!) rstd, Tensor(e!)? scratch) -> ()");
  m.def(
      "add_layer_norm_bwd(Tensor? dy, Tensor? dz, Tensor z, Tensor? weight, Tensor mean, "
      "Tensor rstd, float dropout_p, Tensor? dropout_seed, int dropout_stream, Tensor(a!) dx, "
      "Tensor(b!) dresidual, Tensor(c!) dx_bias, Tensor(d!) dweight, Tensor(e!) dbias, "
      "Tensor(f!)? scratch) -> ()");
  m.def(
      "layer_norm_fwd_direct(Tensor x, Tensor? weight, Tensor? bias, float eps) "
      "-> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_bwd_direct(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, "
      "Tensor rstd, bool needs_x, bool needs_weight, bool needs_bias) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias)");
  m.def("rms_norm_fwd_direct(Tensor x, Tensor? weight, float eps) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_bwd_direct(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, bool needs_x, "
      "bool needs_weight) -> (Tensor dx, Tensor dweight)");
  m.def(
      "add_layer_norm_fwd_direct(Tensor x, Tensor residual, Tensor? x_bias, Tensor? weight, "
      "Tensor? bias, float eps, float dropout_p, Tensor? dropout_seed, int dropout_stream) "
      "-> (Tensor y, Tensor z, Tensor mean, Tensor rstd)");
  m.def(
      "add_layer_norm_bwd_direct(Tensor? dy, Tensor? dz, Tensor z, Tensor? x_bias, "
      "Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, ScalarType x_dtype, "
      "float dropout_p, Tensor? dropout_seed, int dropout_stream, bool needs_x, "
      "bool needs_residual, bool needs_x_bias, bool needs_weight, bool needs_bias) "
      "-> (Tensor dx, Tensor dresidual, Tensor dx_bias, Tensor dweight, Tensor dbias)");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CPU, m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&fastattn::norm::layer_norm_fwd));
  m.impl("layer_norm_bwd", TORCH_BOX(&fastattn::norm::layer_norm_bwd));
  m.impl("rms_norm_fwd", TORCH_BOX(&fastattn::norm::rms_norm_fwd));
  m.impl("rms_norm_bwd", TORCH_BOX(&fastattn::norm::rms_norm_bwd));
  m.impl("add_layer_norm_fwd", TORCH_BOX(&fastattn::norm::add_layer_norm_fwd));
  m.impl("add_layer_norm_bwd", TORCH_BOX(&fastattn::norm::add_layer_norm_bwd));
  m.impl("layer_norm_fwd_direct", TORCH_BOX(&fastattn::norm::layer_norm_fwd_direct));
  m.impl("layer_norm_bwd_direct", TORCH_BOX(&fastattn::norm::layer_norm_bwd_direct));
  m.impl("rms_norm_fwd_direct", TORCH_BOX(&fastattn::norm::rms_norm_fwd_direct));
  m.impl("rms_norm_bwd_direct", TORCH_BOX(&fastattn::norm::rms_norm_bwd_direct));
  m.impl("add_layer_norm_fwd_direct", TORCH_BOX(&fastattn::norm::add_layer_norm_fwd_direct));
  m.impl("add_layer_norm_bwd_direct", TORCH_BOX(&fastattn::norm::add_layer_norm_bwd_direct));
}
