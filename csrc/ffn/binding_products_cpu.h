// Common code of the bindings of the products: operands and results of products, their workspace,
// and a team on PyTorch's threads.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/binding.h"
#include "cpu/large_pages.h"
#include "ffn/cpu/team.h"
#include "ffn/ffn.h"

namespace fastattn::ffn {

// -- arguments ------------------------------------------------------------------------------------
// x is contiguous, or has two dimensions of which one is contiguous.
inline Matrix matrix(const Tensor& x, const char* name, int64_t rows, int64_t columns, DType type) {
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

inline void* vector_if(const std::optional<Tensor>& x, const char* name, int64_t count,
                       DType type) {
  if (!x) {
    return nullptr;
  }
  STD_TORCH_CHECK(dtype_of(*x, name) == type, name, " must have the expected type");
  return data_of<void>(*x, name, count, x->scalar_type());
}

// x if the products can read it in place, otherwise a copy.
inline Tensor readable(const Tensor& x) {
  const bool strided = x.dim() == 2 && (x.stride(0) == 1 || x.stride(1) == 1);
  return strided || x.is_contiguous() ? x : contiguous_copy(x);
}

// The same with contiguous rows.
inline Tensor readable_rows(const Tensor& x) {
  return x.is_contiguous() || (x.dim() == 2 && x.stride(1) == 1) ? x : contiguous_copy(x);
}

// -- results --------------------------------------------------------------------------------------
// Contiguous, with the leading dimensions of x.
inline Tensor new_rows(const Tensor& x, int64_t columns, std::optional<ScalarType> type = {}) {
  const auto n = x.sizes();
  std::vector<int64_t> sizes(n.begin(), n.end());
  sizes.back() = columns;
  return new_contiguous(sizes, type.value_or(x.scalar_type()));
}

// The gradient of x, contiguous; of shape [0] if not wanted.
inline Tensor new_gradient(const Tensor& x, bool wanted) {
  return wanted ? new_contiguous(x.sizes(), x.scalar_type()) : new_vector(0, x.scalar_type());
}

inline Tensor new_gradient(const Tensor& x, const std::optional<Tensor>& vector, bool wanted) {
  return new_vector(vector && wanted ? vector->numel() : 0, x.scalar_type());
}

// -- workspace ------------------------------------------------------------------------------------
// A large workspace is padded, so that both ends can be aligned to large pages.
constexpr int64_t kLargePages = 4;

inline int64_t with_room_for_large_pages(int64_t floats) {
  const bool large = floats * static_cast<int64_t>(sizeof(float)) >= kLargePages * kLargePage;
  return large ? floats + 2 * kLargePage / static_cast<int64_t>(sizeof(float)) : floats;
}

// Largest workspace on the stack: that of linear in place for 4 rows and two workers.
using Workspace = Workspace<4096>;

// Sections of the workspace; without one it only counts their size.
class Arena {
 public:
  Arena() = default;
  explicit Arena(Workspace& workspace)
      : next_(workspace.take(workspace.floats())), left_(workspace.floats()) {
    if (left_ * static_cast<int64_t>(sizeof(float)) >= (kLargePages + 2) * kLargePage) {
      float* first = static_cast<float*>(request_large_pages(next_, left_ * sizeof(float)));
      left_ -= first - next_;
      next_ = first;
    }
  }

  float* take(int64_t floats) {
    floats = ceil_div(floats, kMaxLanes) * kMaxLanes;
    used_ += floats;
    if (!next_) {
      return nullptr;
    }
    STD_TORCH_CHECK(floats <= left_, "workspace must have ", floats - left_, " more elements");
    float* section = next_;
    next_ += floats;
    left_ -= floats;
    return section;
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

// -- products -------------------------------------------------------------------------------------
inline Matrix inner(float* data, int64_t rows, int64_t columns, DType type) {
  return {data, rows, columns, inner_pitch(columns, type), 1};
}

// out = a b, for which there is memory to pack either operand
inline Product stored(const Matrix& a, const Matrix& b, const Tensor& out, const char* name,
                      DType type) {
  Product result(type);
  result.a = a;
  result.b = b;
  result.epilogue.out_type = type;
  result.epilogue.out = matrix(with_large_pages(out), name, a.rows, b.columns, type);
  result.may_transpose = true;
  return result;
}

// -- threads --------------------------------------------------------------------------------------
// Whether a row's products have the same bits among any number of rows.
inline thread_local bool batch_invariant = false;

// The left operand of a forward's product. A batch-invariant one has contiguous rows: others are
// packed, and their sums have another order.
inline Tensor readable_left(const Tensor& x) {
  return batch_invariant ? readable_rows(x) : readable(x);
}

// The workspace of an op that uses `used` floats and whose products cost `work` (product_work) and
// need `worker` floats a worker.
inline int64_t with_workers(int64_t used, int64_t work, int64_t worker) {
  return with_room_for_large_pages(used + workers_for(work, threads()) * worker);
}

// The floats of a worker for the product of x and a weight [columns, depth], whose result, if there
// are other weights, is multiplied by these.
inline int64_t worker_floats_of(const Matrix& x, std::initializer_list<Matrix> weights,
                                DType type) {
  const int64_t bytes = type == DType::kFloat32 ? 4 : 2;
  const int of_type = static_cast<int>(type);
  bool in_place = x.column_stride == 1 && are_unpacked(x.rows, type, batch_invariant);
  for (const Matrix& w : weights) {
    in_place &= w.column_stride == 1 &&
                !copies_columns(x.rows, kernels().copy_rows[of_type],
                                kernels().converts_copies[of_type], w.row_stride * bytes);
  }
  return worker_floats(std::max<int64_t>(x.rows, 1), in_place);
}

// The workers share what is left of the workspace, `each` floats. at_once: see Team.
inline Team team_of(Arena& arena, int64_t each, bool at_once = false) {
  const int64_t workers = std::min(arena.left() / each, threads());
  STD_TORCH_CHECK(workers > 0, "workspace must be large enough for one worker");
  return Team(workers, arena.take(workers * each), each, batch_invariant, at_once);
}

}  // namespace fastattn::ffn
