// Hashes every pair of columns once per call, instead of once per row in the forward.
#pragma once

#include "attention/attention.h"
#include "common/dropout.h"
#include "sm90/ptx/grid.cuh"

namespace fastattn::attention {

constexpr int kHashThreads = 128;

#ifdef FASTATTN_TRIAL_FWD_COUNTER
static __global__ void hash_columns_kernel(Dropout dropout, int units, int* counter) {
  sm90::ptx::griddepcontrol_launch_dependents();
  if (counter && blockIdx.x == 0 && threadIdx.x == 0) {
    *counter = 0;
  }
#else
static __global__ void hash_columns_kernel(Dropout dropout, int units) {
#endif
  const int unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit < units) {
    dropout.column_keys[unit] = column_key(dropout, unit);
  }
}

}  // namespace fastattn::attention
