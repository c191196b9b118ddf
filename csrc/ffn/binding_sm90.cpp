// fastattn_sm90's feed-forward network: the products of a call and their dependencies.
#include <algorithm>
#include <string>
#include <type_traits>

#include "common/cuda_stream.h"
#include "common/dropout.h"
#include "common/torch_binding.h"
#include "ffn/sm90/workspace.h"

namespace fastattn::ffn {
namespace {

// Limits that keep positions and numbers of tiles within 32 bits.
constexpr int64_t kMaxSize = int64_t{1} << 28;
constexpr int64_t kMaxTiles = int64_t{1} << 30;
constexpr int kAlignedColumns = 8;  // 16 bytes

// -- arguments ------------------------------------------------------------------------------------
// Arguments of a call, the same for both directions.
struct Call {
  DType type;
  ScalarType scalar_type;
  Sizes sizes;
  Activation activation;
  bool saves_activation;
  int device;
  cuda::Stream stream;
};

Activation activation_of(const std::string& name) {
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

Call call_of(const Tensor& x, const Tensor& w1, const Tensor& w2, const std::string& activation) {
  STD_TORCH_CHECK(x.dim() >= 2 && w1.dim() == 2 && w2.dim() == 2 && x.numel() > 0,
                  "x must have rows, w1 and w2 two dimensions");
  const int64_t D = x.size(-1), rows = x.numel() / D;
  const int64_t W = w1.size(0), F = w2.size(1), E = w2.size(0);
  const bool gated = activation == "reglu" || activation == "geglu" || activation == "swiglu";
  STD_TORCH_CHECK(W == (gated ? 2 : 1) * F, "w1 must have ", (gated ? 2 : 1) * F, " rows for ",
                  activation, " and w2, got ", W);
  for (const int64_t size : {rows, D, W, F, E}) {
    STD_TORCH_CHECK(size > 0 && size <= kMaxSize, "sizes must be 1 to ", kMaxSize, ", got ", size);
  }
  for (const int64_t columns : {D, F, E}) {
    STD_TORCH_CHECK(columns % kAlignedColumns == 0, "columns must be a multiple of ",
                    kAlignedColumns, ", got ", columns);
  }
  const int64_t most = std::max({D, W, E});
  for (const int64_t a : {rows, most}) {
    STD_TORCH_CHECK((a / 128 + 1) * (most / 64 + 1) <= kMaxTiles, "the tensors are too large");
  }
  Call call;
  call.type = dtype_of(x, "x");
  call.scalar_type = x.scalar_type();
  STD_TORCH_CHECK(call.type != DType::kFloat32, "x must be bfloat16 or float16");
  call.sizes = {static_cast<int>(rows), static_cast<int>(D), static_cast<int>(W),
                static_cast<int>(F), static_cast<int>(E)};
  call.activation = activation_of(activation);
  call.saves_activation = saves_activation(call.activation, call.sizes);
  call.device = x.get_device_index();
  STD_TORCH_CHECK(cuda::current_stream(call.device, &call.stream),
                  "this torch has no CUDA streams");
  return call;
}

// A tensor [rows, columns] with contiguous columns, or a contiguous one whose leading dimensions
// are the rows.
Matrix rows_of(const Tensor& x, const char* name, const Call& call, ScalarType type, int rows,
               int columns) {
  const bool is_matrix = x.dim() == 2 && x.stride(1) == 1;
  STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == call.device && x.scalar_type() == type &&
                      (is_matrix || x.is_contiguous()) && x.size(-1) == columns &&
                      x.numel() == int64_t{1} * rows * columns,
                  name, " must be a CUDA tensor of ", rows, " rows of ", columns,
                  " contiguous elements of the expected type on x's device");
  return {x.data_ptr(), rows, columns, is_matrix && rows > 1 ? x.stride(0) : columns};
}

// The same of x's type.
Matrix matrix_of(const Tensor& x, const char* name, const Call& call, int rows, int columns) {
  return rows_of(x, name, call, call.scalar_type, rows, columns);
}

// The data of a contiguous tensor of `count` elements.
void* data_of(const Tensor& x, const char* name, const Call& call, ScalarType type, int64_t count) {
  STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == call.device && x.scalar_type() == type &&
                      x.is_contiguous() && x.numel() == count &&
                      reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0,
                  name, " must be contiguous, aligned to 16 bytes, on x's device, of the expected ",
                  "type and have ", count, " elements, got ", x.numel());
  return x.data_ptr();
}

// The same of x's type; null for a result that is not wanted.
void* vector_of(const Tensor& x, const char* name, const Call& call, int64_t count) {
  return x.numel() == 0 ? nullptr : data_of(x, name, call, call.scalar_type, count);
}
const void* bias_of(const std::optional<Tensor>& x, const char* name, const Call& call,
                    int64_t count) {
  return x ? data_of(*x, name, call, call.scalar_type, count) : nullptr;
}

// Whether a tensor of y's type is fp32.
bool is_float(const Tensor& x, const char* name, const Call& call) {
  const DType type = dtype_of(x, name);
  STD_TORCH_CHECK(type == call.type || type == DType::kFloat32, name,
                  " must have x's type or float32");
  return type == DType::kFloat32;
}

Dropout dropout_of(double p, const std::optional<Tensor>& seed, uint32_t stream, const Call& call) {
  if (p <= 0.0) {
    return {};
  }
  STD_TORCH_CHECK(seed && seed->is_cuda() && seed->get_device_index() == call.device &&
                      seed->scalar_type() == ScalarType::Long && seed->numel() == 1,
                  "dropout needs dropout_seed, int64 [1] on x's device");
  const int threshold = dropout::threshold(p);
  return {static_cast<const int64_t*>(seed->data_ptr()), stream, threshold,
          dropout::keep_scale(threshold)};
}

// The sections of the workspace. Without the memory that is needed, `size` is its size in bytes.
template <class Sections, class Plan>
struct Memory {
  int64_t size = 0;
  Sections sections;

  Memory(const Call& call, Plan plan, const std::optional<Tensor>& workspace)
      : Memory(call, plan, workspace,
               WorkspaceLayout(workspace ? workspace->data_ptr() : nullptr)) {}

 private:
  Memory(const Call& call, Plan plan, const std::optional<Tensor>& workspace,
         WorkspaceLayout layout)
      : sections(call.sizes, plan, layout) {
    if (!workspace) {
      size = layout.bytes();
      return;
    }
    STD_TORCH_CHECK(workspace->is_cuda() && workspace->get_device_index() == call.device &&
                        workspace->scalar_type() == ScalarType::Byte &&
                        workspace->is_contiguous() && workspace->numel() >= layout.bytes(),
                    "workspace must have ", layout.bytes(), " bytes on x's device");
  }
};

// -- launches -------------------------------------------------------------------------------------
void check(const char* failure) {
  STD_TORCH_CHECK(failure == nullptr, failure);
}

template <Step kStep>
void multiply(const Call& call, const Matrix& a, const Matrix& b, const Epilogue& epilogue,
              int parts = 1, bool independent = false) {
  const Product product = {call.type, a, b, epilogue, parts, independent};
  check(call.type == DType::kBFloat16
            ? ffn_product_sm90<DType::kBFloat16, kStep>(product, call.stream)
            : ffn_product_sm90<DType::kFloat16, kStep>(product, call.stream));
}

// The gradient of a weight. workspace: of the parts, if there are more than one.
void multiply_dw(const Call& call, const Matrix& a, const Matrix& b, void* out, int parts,
                 float* workspace, bool independent) {
  Epilogue epilogue;
  epilogue.out_is_float = parts > 1;
  epilogue.out = parts > 1 ? workspace : out;
  multiply<Step::kDw>(call, a, b, epilogue, parts, independent);
  if (parts > 1) {
    check(sum_columns({call.type, workspace, out, parts, a.columns * b.columns}, call.stream));
  }
}

// -- forward --------------------------------------------------------------------------------------
int64_t ffn_fwd(Tensor x, Tensor w1, std::optional<Tensor> b1, Tensor w2, std::optional<Tensor> b2,
                std::optional<Tensor> residual, std::string activation, double dropout_p,
                double output_dropout_p, std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                Tensor y, Tensor hidden, std::optional<Tensor> workspace) {
  const Call call = call_of(x, w1, w2, activation);
  const DeviceGuard guard(call.device);
  const Sizes& s = call.sizes;
  const Memory<ForwardWorkspace, bool> memory(call, call.saves_activation, workspace);
  if (memory.size > 0) {
    return memory.size;
  }
  const uint32_t stream = static_cast<uint32_t>(dropout_stream);
  void* saved = vector_of(hidden, "hidden", call, int64_t{1} * s.rows * s.W);
  void* activated = call.saves_activation ? saved : memory.sections.activated;

  Epilogue up;
  up.out = call.saves_activation ? nullptr : saved;
  up.activated = activated;
  up.activation = call.activation;
  up.dropout = dropout_of(dropout_p, dropout_seed, stream, call);
  up.bias = bias_of(b1, "b1", call, s.W);
  const Matrix first = matrix_of(x, "x", call, s.rows, s.D);
  const Matrix weight = matrix_of(w1, "w1", call, s.W, s.D);
  s.gated() ? multiply<Step::kUpGated>(call, first, weight, up)
            : multiply<Step::kUp>(call, first, weight, up);

  Epilogue down;
  down.out_is_float = is_float(y, "y", call);
  down.out = data_of(y, "y", call, y.scalar_type(), int64_t{1} * s.rows * s.E);
  down.dropout = dropout_of(output_dropout_p, dropout_seed, stream + dropout::kSecondStream, call);
  down.bias = bias_of(b2, "b2", call, s.E);
  if (residual) {
    const Matrix rows = rows_of(*residual, "residual", call, y.scalar_type(), s.rows, s.E);
    down.residual = rows.data;
    down.residual_stride = rows.stride;
  }
  multiply<Step::kDown>(call, {activated, s.rows, s.F, s.F}, matrix_of(w2, "w2", call, s.E, s.F),
                        down);
  return 0;
}

// -- backward -------------------------------------------------------------------------------------
int64_t ffn_bwd(Tensor dy, Tensor x, Tensor w1, Tensor w2, Tensor hidden, std::string activation,
                double dropout_p, double output_dropout_p, std::optional<Tensor> dropout_seed,
                int64_t dropout_stream, Tensor dx, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2,
                std::optional<Tensor> workspace) {
  const Call call = call_of(x, w1, w2, activation);
  const DeviceGuard guard(call.device);
  const Sizes& s = call.sizes;
  void* to_x = vector_of(dx, "dx", call, int64_t{1} * s.rows * s.D);
  void* to_w1 = vector_of(dw1, "dw1", call, int64_t{1} * s.W * s.D);
  void* to_b1 = vector_of(db1, "db1", call, s.W);
  void* to_w2 = vector_of(dw2, "dw2", call, int64_t{1} * s.E * s.F);
  void* to_b2 = vector_of(db2, "db2", call, s.E);

  BackwardPlan plan;
  const bool dy_is_float = is_float(dy, "dy", call);
  plan.drops = output_dropout_p > 0.0 || dy_is_float;
  // One kernel computes dpre and the activation.
  plan.activates = to_w2 && !call.saves_activation;
  plan.differentiates = to_x || to_w1 || to_b1 || plan.activates;
  plan.sums_dy = to_b2;
  plan.sums_dpre = to_b1;
  plan.parts_of_dw1 = to_w1 ? parts_of_dw({s.W, s.D, s.rows}) : 1;
  plan.parts_of_dw2 = to_w2 ? parts_of_dw({s.E, s.F, s.rows}) : 1;
  const Memory<BackwardWorkspace, BackwardPlan> memory(call, plan, workspace);
  if (memory.size > 0) {
    return memory.size;
  }
  const BackwardWorkspace& at = memory.sections;
  const uint32_t stream = static_cast<uint32_t>(dropout_stream);

  // The gradient of the second product's result, and b2's.
  DropGradient drop = {};
  drop.dtype = call.type;
  drop.dy = data_of(dy, "dy", call, dy.scalar_type(), int64_t{1} * s.rows * s.E);
  drop.dy_is_float = dy_is_float;
  drop.dropped = at.dropped;
  drop.sums = at.dy_sums;
  drop.rows = s.rows;
  drop.columns = s.E;
  drop.dropout = dropout_of(output_dropout_p, dropout_seed, stream + dropout::kSecondStream, call);
  if (plan.drops || plan.sums_dy) {
    check(drop_gradient(drop, call.stream));
  }
  if (to_b2) {
    check(sum_columns({call.type, at.dy_sums, to_b2, row_tiles(s.rows), s.E}, call.stream));
  }
  const Matrix gradient = {plan.drops ? at.dropped : const_cast<void*>(drop.dy), s.rows, s.E, s.E};

  // The gradient of hidden, b1's, and the activation again.
  void* saved = vector_of(hidden, "hidden", call, int64_t{1} * s.rows * s.W);
  if (plan.differentiates) {
    Epilogue epilogue;
    epilogue.out = at.dpre;
    epilogue.activated = at.activated;
    epilogue.activation = call.activation;
    epilogue.dropout = dropout_of(dropout_p, dropout_seed, stream, call);
    epilogue.hidden = saved;
    epilogue.sums = at.dpre_sums;
    const Matrix weight = matrix_of(w2, "w2", call, s.E, s.F);
    s.gated() ? multiply<Step::kDhiddenGated>(call, gradient, weight, epilogue)
              : multiply<Step::kDhidden>(call, gradient, weight, epilogue);
  }
  if (to_b1) {
    check(sum_columns({call.type, at.dpre_sums, to_b1, row_tiles(s.rows), s.W}, call.stream));
  }
  const Matrix dpre = {at.dpre, s.rows, s.W, s.W};
  if (to_w2) {
    const Matrix activated = {call.saves_activation ? saved : at.activated, s.rows, s.F, s.F};
    multiply_dw(call, gradient, activated, to_w2, plan.parts_of_dw2, at.parts, false);
  }
  // The products that follow another one of these three need nothing of it, but the parts of dw1
  // may overwrite those of dw2.
  if (to_w1) {
    multiply_dw(call, dpre, matrix_of(x, "x", call, s.rows, s.D), to_w1, plan.parts_of_dw1,
                at.parts, to_w2 && plan.parts_of_dw2 == 1);
  }
  if (to_x) {
    Epilogue epilogue;
    epilogue.out = to_x;
    multiply<Step::kDx>(call, dpre, matrix_of(w1, "w1", call, s.W, s.D), epilogue, 1,
                        to_w1 || to_w2);
  }
  return 0;
}

}  // namespace
}  // namespace fastattn::ffn

// An op that needs workspace and gets none launches nothing and returns the size in bytes,
// otherwise 0. Gradients without elements are not computed.
STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_sm90, m) {
  m.def(
      "ffn_fwd(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? residual, "
      "str activation, float dropout_p, float output_dropout_p, Tensor? dropout_seed, "
      "int dropout_stream, Tensor(a!) y, Tensor(b!) hidden, Tensor(z!)? workspace) -> int");
  m.def(
      "ffn_bwd(Tensor dy, Tensor x, Tensor w1, Tensor w2, Tensor hidden, str activation, "
      "float dropout_p, float output_dropout_p, Tensor? dropout_seed, int dropout_stream, "
      "Tensor(a!) dx, Tensor(b!) dw1, Tensor(c!) db1, Tensor(d!) dw2, Tensor(e!) db2, "
      "Tensor(z!)? workspace) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_sm90, CUDA, m) {
  m.impl("ffn_fwd", TORCH_BOX(&fastattn::ffn::ffn_fwd));
  m.impl("ffn_bwd", TORCH_BOX(&fastattn::ffn::ffn_bwd));
}
