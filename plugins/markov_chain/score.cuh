// One step of the chain for all rows of a batch: corrected logits of the whole vocabulary, of which each row keeps the best.
//
// W2 is read once a step, whatever the batch. A warp owns neighbouring vocabulary rows and takes 16 of them at a time as
// the 16-row operand of the tensor cores, rows of the batch being the 8-column one. What a lane loads is 16 bytes, eight
// neighbours of k, so lanes hold another order of k than the instruction's: since the other operand is read in the same
// order, the sums are the same. The order of a row's sum depends on k alone, never on the batch.
#pragma once

#include "common/cuda_util.cuh"

namespace dspark {

constexpr int kScoreThreads = 256;
constexpr int kScoreWarps = kScoreThreads / 32;
constexpr int kChunk = 32;       // of k: eight elements for each of a group's four lanes
constexpr int kPadding = 32;     // elements after each row in shared memory, so that 8 lanes' 16 bytes meet 32 banks
// Chunks loaded before the first is used: fewer where sums take the registers, so that two blocks fit side by side.
template <int Tiles>
constexpr int kChunksAhead = Tiles == 1 ? 8 : 4;

// Greater is better; of equals the lower id. NaN is never better than anything.
__device__ inline unsigned long long best_key(float value, uint32_t id) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (static_cast<unsigned long long>(ordered) << 32) | (0xffffffffu - id);
}
// Id 0 where nothing was better than nothing.
__device__ inline int64_t best_id(unsigned long long key) {
  return key == 0 ? 0 : static_cast<int64_t>(0xffffffffu - static_cast<uint32_t>(key));
}

struct Step {
  const float* base;   // of this step: row b at b * row_stride
  const float* noise;  // likewise, or null
  float* corrected;    // likewise, or null: what the logits are kept in for those who draw
  int64_t row_stride;
  int64_t vocab;
  int rank;
  int batch;
  unsigned long long* best;  // [batch]: of this step, 0 before
};

// Where the mixed vector of row b comes from: row b of `mixed`, or W1's row of the token before.
template <typename T>
struct Mixed {
  const T* mixed;
  const T* w1;
  const int64_t* bonus;              // the tokens before, in the first step
  const unsigned long long* before;  // else their keys
};

template <typename T>
__device__ inline const T* mixed_row(const Mixed<T>& from, int row, int rank) {
  if (from.mixed != nullptr) return from.mixed + static_cast<int64_t>(row) * rank;
  const int64_t token = from.before == nullptr ? from.bonus[row] : best_id(from.before[row]);
  return from.w1 + token * rank;
}

__device__ inline void keep_best(const Step& step, int row, float value, int64_t token, float& best, int64_t& best_token) {
  if (step.noise != nullptr) value += step.noise[row * step.row_stride + token];
  if (step.corrected != nullptr) step.corrected[row * step.row_stride + token] = value;
  if (value > best || best_token < 0) {
    // A NaN that comes first would keep its place: it is not taken.
    if (value == value) {
      best = value;
      best_token = token;
    }
  }
}

// Until then, a kernel that was launched beside the end of the one before may only read what nothing writes. GPUs before
// Hopper launch none so.
__device__ inline void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may start beside this one's end.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Tiles is the number of 8-row tiles that hold the batch.
template <typename T, int Tiles>
__global__ void __launch_bounds__(kScoreThreads, Tiles <= 4 ? 2 : 1)
    score_mma(Step step, const T* __restrict__ w2, Mixed<T> from, int64_t rows_a_warp) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* mixed = reinterpret_cast<T*>(shared);
  __shared__ unsigned long long block_best[Tiles * 8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int rank = step.rank, chunks = ceil_div(rank, kChunk), stride = chunks * kChunk + kPadding;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kScoreWarps + warp) * rows_a_warp;
  const int64_t end = min(first + rows_a_warp, step.vocab);
  let_next_kernel_start();
  // W2 doesn't depend on the token before: its first rows come while that is still being found.
  for (int64_t i = first * rank + lane * 64; i < min(first + 16, end) * rank; i += 32 * 64) prefetch(w2 + i);
  for (int i = threadIdx.x; i < Tiles * 8; i += kScoreThreads) block_best[i] = 0;
  wait_for_last_kernel();
  for (int i = threadIdx.x; i < Tiles * 8 * (stride / 8); i += kScoreThreads) {
    const int row = i / (stride / 8), k = i % (stride / 8) * 8;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row < step.batch && k < rank) value = *reinterpret_cast<const uint4*>(mixed_row(from, row, rank) + k);
    *reinterpret_cast<uint4*>(mixed + row * stride + k) = value;
  }
  __syncthreads();

  float best[Tiles][2];
  int64_t best_token[Tiles][2];
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
    best[tile][0] = best[tile][1] = 0.f;
    best_token[tile][0] = best_token[tile][1] = -1;
  }
  for (int64_t token = first; token < end; token += 16) {
    const int64_t low = token + group, high = low + 8;
    float base[Tiles][4], sums[Tiles][4] = {};
    // Asked for before the products, so that it is there after them.
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile * 8 + quad * 2 + i % 2;
        const int64_t at = i < 2 ? low : high;
        base[tile][i] = row < step.batch && at < end ? __ldcs(step.base + row * step.row_stride + at) : 0.f;
      }
    }
    for (int c0 = 0; c0 < chunks; c0 += kChunksAhead<Tiles>) {
      uint4 a_low[kChunksAhead<Tiles>], a_high[kChunksAhead<Tiles>];
#pragma unroll
      for (int c = 0; c < kChunksAhead<Tiles>; ++c) {
        const int k = (c0 + c) * kChunk + quad * 8;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        a_low[c] = k < rank && low < end ? __ldg(reinterpret_cast<const uint4*>(w2 + low * rank + k)) : zero;
        a_high[c] = k < rank && high < end ? __ldg(reinterpret_cast<const uint4*>(w2 + high * rank + k)) : zero;
      }
#pragma unroll
      for (int c = 0; c < kChunksAhead<Tiles>; ++c) {
        if (c0 + c >= chunks) break;
        const uint32_t first_half[4] = {a_low[c].x, a_high[c].x, a_low[c].y, a_high[c].y};
        const uint32_t second_half[4] = {a_low[c].z, a_high[c].z, a_low[c].w, a_high[c].w};
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
          const T* b_row = mixed + (tile * 8 + group) * stride + (c0 + c) * kChunk + quad * 8;
          const uint4 b = *reinterpret_cast<const uint4*>(b_row);
          mma_16816<T>(sums[tile], first_half, b.x, b.y);
          mma_16816<T>(sums[tile], second_half, b.z, b.w);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile * 8 + quad * 2 + i % 2;
        const int64_t at = i < 2 ? low : high;
        if (row < step.batch && at < end) {
          keep_best(step, row, base[tile][i] + sums[tile][i], at, best[tile][i % 2], best_token[tile][i % 2]);
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile * 8 + quad * 2 + i;
      if (row < step.batch && best_token[tile][i] >= 0) {
        atomicMax(&block_best[row], best_key(best[tile][i], static_cast<uint32_t>(best_token[tile][i])));
      }
    }
  }
  __syncthreads();
  for (int row = threadIdx.x; row < step.batch; row += kScoreThreads) {
    if (block_best[row] != 0) atomicMax(step.best + row, block_best[row]);
  }
}

// In float32, and where there is no W2 at all (rank 0): a warp a vocabulary row.
template <typename T>
__global__ void __launch_bounds__(kScoreThreads) score_fma(Step step, const T* __restrict__ w2, Mixed<T> from) {
  extern __shared__ unsigned long long keys[];  // [batch]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int row = threadIdx.x; row < step.batch; row += kScoreThreads) keys[row] = 0;
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kScoreWarps;
  if (step.rank == 0) {
    for (int row = 0; row < step.batch; ++row) {
      float best = 0.f;
      int64_t best_token = -1;
      const int64_t all = static_cast<int64_t>(gridDim.x) * kScoreThreads;
      for (int64_t token = static_cast<int64_t>(blockIdx.x) * kScoreThreads + threadIdx.x; token < step.vocab; token += all) {
        keep_best(step, row, step.base[row * step.row_stride + token], token, best, best_token);
      }
      if (best_token >= 0) atomicMax(&keys[row], best_key(best, static_cast<uint32_t>(best_token)));
    }
  }
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * kScoreWarps + warp; step.rank > 0 && token < step.vocab;
       token += stride) {
    for (int row = 0; row < step.batch; ++row) {
      const T* mixed = mixed_row(from, row, step.rank);
      float sum = 0.f;
      for (int k = lane; k < step.rank; k += 32) sum += to_float(w2[token * step.rank + k]) * to_float(mixed[k]);
      sum = warp_sum(sum);
      if (lane == 0) {
        float best = 0.f;
        int64_t best_token = -1;
        keep_best(step, row, step.base[row * step.row_stride + token] + sum, token, best, best_token);
        if (best_token >= 0) atomicMax(&keys[row], best_key(best, static_cast<uint32_t>(best_token)));
      }
    }
  }
  __syncthreads();
  for (int row = threadIdx.x; row < step.batch; row += kScoreThreads) {
    if (keys[row] != 0) atomicMax(step.best + row, keys[row]);
  }
}

}  // namespace dspark
