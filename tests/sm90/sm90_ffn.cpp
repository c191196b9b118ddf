// Runs the feed-forward network for Hopper on the host for test_sm90_ffn.py: the unchanged kernels
// over the simulator in sm90_on_host. The product is that of ONLY_DTYPE and ONLY_STEP; without
// ONLY_STEP launches of the steps without gates are enqueued and run together.
#include "machine.h"

extern "C" const char* cudaGetErrorString(cudaError_t) {
  return "an error of CUDA";
}

#include "ffn/sm90/column_sums.cuh"
#include "ffn/sm90/ffn_product_sm90.cuh"

using namespace fastattn;
using namespace fastattn::ffn;

#ifdef ONLY_STEP
extern "C" const char* ffn_product(const Product* problem) {
  const char* failure = ffn_product_sm90<DType::ONLY_DTYPE, Step::ONLY_STEP>(*problem, nullptr);
  on_host::synchronize();
  return failure;
}
#else
extern "C" const char* ffn_product(const Product* p, int step) {
  constexpr DType kType = DType::ONLY_DTYPE;
  switch (static_cast<Step>(step)) {
    case Step::kUp:
      return ffn_product_sm90<kType, Step::kUp>(*p, nullptr);
    case Step::kDown:
      return ffn_product_sm90<kType, Step::kDown>(*p, nullptr);
    case Step::kDhidden:
      return ffn_product_sm90<kType, Step::kDhidden>(*p, nullptr);
    case Step::kDx:
      return ffn_product_sm90<kType, Step::kDx>(*p, nullptr);
    case Step::kDw:
      return ffn_product_sm90<kType, Step::kDw>(*p, nullptr);
    default:
      return "a step with gates";
  }
}
extern "C" const char* ffn_synchronize() {
  on_host::synchronize();
  return nullptr;
}
#endif
extern "C" const char* ffn_drop_gradient(const DropGradient* problem) {
  const char* failure = drop_gradient_of<DType::ONLY_DTYPE>(*problem, nullptr);
  on_host::synchronize();
  return failure;
}
extern "C" const char* ffn_sum_columns(const SumColumns* problem) {
  const char* failure = sum_columns_of<DType::ONLY_DTYPE>(*problem, nullptr);
  on_host::synchronize();
  return failure;
}
// Results of each of them: three addresses and sizes in bytes, 0 for none.
extern "C" void ffn_drop_gradient_results(const DropGradient* problem, void** data,
                                          int64_t* bytes) {
  data[0] = problem->dropped;
  bytes[0] = problem->dropped ? int64_t{2} * problem->rows * problem->columns : 0;
  data[1] = problem->sums;
  bytes[1] = problem->sums ? int64_t{4} * row_tiles(problem->rows) * problem->columns : 0;
  data[2] = nullptr;
  bytes[2] = 0;
}
extern "C" void ffn_sum_columns_results(const SumColumns* problem, void** data, int64_t* bytes) {
  data[0] = problem->out;
  bytes[0] = int64_t{2} * problem->columns;
  data[1] = data[2] = nullptr;
  bytes[1] = bytes[2] = 0;
}
#ifdef ONLY_STEP
extern "C" void ffn_product_results(const Product* problem, void** data, int64_t* bytes) {
  constexpr Step kStep = Step::ONLY_STEP;
  const Epilogue& e = problem->epilogue;
  const ProductShape shape = shape_of(kStep, problem->a, problem->b);
  const int64_t values = int64_t{1} * shape.rows * shape.columns;
  const int pairs = is_gated(kStep) ? 2 : 1;
  data[0] = e.out;
  bytes[0] = e.out ? values * pairs * problem->parts * (e.out_is_float ? 4 : 2) : 0;
  data[1] = e.activated;
  bytes[1] = e.activated ? values * 2 : 0;
  data[2] = e.sums;
  bytes[2] = e.sums ? int64_t{4} * row_tiles(shape.rows) * shape.columns * pairs : 0;
}
#endif
