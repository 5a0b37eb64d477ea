#include "best_token/kernel.h"

#include "common/cuda_util.cuh"

namespace dspark {
namespace {

constexpr int kThreads = 1024;

// Orders values before ids, so that the greatest key is the first of the greatest values; NaN is above all.
__device__ uint64_t key_of(float value, int64_t id) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t ordered = isnan(value) ? 0xffffffffu : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return (uint64_t{ordered} << 32) | (0xffffffffu - static_cast<uint32_t>(id));
}

__device__ uint64_t warp_max_key(uint64_t key) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, key, offset);
    key = other > key ? other : key;
  }
  return key;
}

// A block a row.
__global__ void __launch_bounds__(kThreads) best_token(const float* logits, int64_t* ids, float* best, int64_t vocab) {
  __shared__ uint64_t keys[kThreads / 32];
  const float* const row = logits + int64_t{blockIdx.x} * vocab;
  uint64_t key = 0;
  // Four loads in flight a thread.
  for (int64_t first = threadIdx.x; first < vocab; first += 4 * kThreads) {
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = first + i * kThreads < vocab ? row[first + i * kThreads] : -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i * kThreads >= vocab) continue;
      const uint64_t mine = key_of(values[i], first + i * kThreads);
      key = mine > key ? mine : key;
    }
  }
  key = warp_max_key(key);
  if (threadIdx.x % 32 == 0) keys[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  key = warp_max_key(keys[threadIdx.x]);
  if (threadIdx.x != 0) return;
  const int64_t id = 0xffffffffu - static_cast<uint32_t>(key);
  ids[blockIdx.x] = id;
  best[blockIdx.x] = row[id];
}

}  // namespace
}  // namespace dspark

extern "C" int dspark_best_token(const float* logits, int64_t* ids, float* best, int64_t rows, int64_t vocab,
                                 void* stream) {
  if (rows < 0 || rows > 0x7fffffff || vocab <= 0 || vocab > 0x7fffffff) return dspark::kInvalid;
  if (rows == 0) return 0;
  dspark::best_token<<<static_cast<unsigned>(rows), dspark::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      logits, ids, best, vocab);
  return dspark::launch_status();
}
