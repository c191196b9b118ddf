// One instance of the kernel: the build compiles this file once for each row of INSTANCES in
// setup.py, which defines the macros.
#include "ffn/sm90/ffn_product_sm90.cuh"

namespace fastattn::ffn {
template const char* ffn_product_sm90<DType::FASTATTN_DTYPE, Step::FASTATTN_STEP>(const Product&,
                                                                                  cudaStream_t);
}  // namespace fastattn::ffn
