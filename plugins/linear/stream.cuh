// Few rows of x by many of w: w is read once, at the speed of memory.
//
// A block takes 16 neighbouring outputs (of SwiGLU, 16 of each half). Its warps share the inputs, a chunk of 32 each in
// turn, and add up what they have in the end, in the order of the warps. Within a warp the tensor cores take 16 outputs
// as the 16-row operand and rows of x as the 8-column one. A lane loads 16 bytes, eight neighbours of k, so it holds another
// order of k than the instruction's; x is loaded in the same order, and the sums are the same. Which sums are made in
// which order depends on the inputs alone: a row of x gives the same bits, however many rows there are.
#pragma once

#include "common/cuda_util.cuh"
#include "linear/kernel.h"

namespace dspark {

constexpr int kStreamWarps = 8;
constexpr int kStreamThreads = 32 * kStreamWarps;
constexpr int kStreamRows = 64;  // most rows of x
constexpr int kStreamChunk = 32;

template <typename T>
struct Product {
  const T* x;
  const T* w;
  const T* residual;
  void* y;
  int rows;
  int inputs;
  int64_t outputs;
  int mode;
};

__device__ inline float silu(float x) { return x / (1.f + expf(-x)); }

template <typename T>
__device__ inline void store(const Product<T>& p, int row, int64_t output, float value) {
  const int64_t at = row * p.outputs + output;
  if (p.mode == DSPARK_LINEAR_FLOAT) {
    static_cast<float*>(p.y)[at] = value;
    return;
  }
  if (p.mode == DSPARK_LINEAR_ADD) value += to_float(p.residual[at]);
  static_cast<T*>(p.y)[at] = from_float<T>(value);
}

// Tiles of 8 rows of x; Halves is 2 for SwiGLU; Ahead chunks of w are loaded before the first is used.
template <typename T, int Tiles, int Halves, int Ahead>
__global__ void __launch_bounds__(kStreamThreads, Tiles <= 2 ? 2 : 1) stream_mma(Product<T> p) {
  extern __shared__ float parts[];  // [warps][Halves][16][Tiles * 8 + 1]
  constexpr int kColumns = Tiles * 8 + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 16;
  const T* w_rows[Halves][2];
  bool there[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t output = first + group + 8 * i;
    there[i] = output < p.outputs;
#pragma unroll
    for (int half = 0; half < Halves; ++half) {
      w_rows[half][i] = p.w + (half * p.outputs + (there[i] ? output : 0)) * p.inputs;
    }
  }
  float sums[Halves][Tiles][4] = {};
  const int chunks = ceil_div(p.inputs, kStreamChunk);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  for (int c0 = warp; c0 < chunks; c0 += kStreamWarps * Ahead) {
    uint4 a[Ahead][Halves][2];
#pragma unroll
    for (int c = 0; c < Ahead; ++c) {
      const int k = (c0 + c * kStreamWarps) * kStreamChunk + quad * 8;
#pragma unroll
      for (int half = 0; half < Halves; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool valid = k < p.inputs && there[i];
          a[c][half][i] = valid ? __ldcs(reinterpret_cast<const uint4*>(w_rows[half][i] + k)) : zero;
        }
      }
    }
#pragma unroll
    for (int c = 0; c < Ahead; ++c) {
      const int k = (c0 + c * kStreamWarps) * kStreamChunk + quad * 8;
      if (k - quad * 8 >= p.inputs) break;
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        const int row = tile * 8 + group;
        const bool valid = row < p.rows && k < p.inputs;
        const uint4 b = valid ? *reinterpret_cast<const uint4*>(p.x + static_cast<int64_t>(row) * p.inputs + k) : zero;
#pragma unroll
        for (int half = 0; half < Halves; ++half) {
          const uint4 low = a[c][half][0], high = a[c][half][1];
          const uint32_t first_half[4] = {low.x, high.x, low.y, high.y};
          const uint32_t second_half[4] = {low.z, high.z, low.w, high.w};
          mma_16816<T>(sums[half][tile], first_half, b.x, b.y);
          mma_16816<T>(sums[half][tile], second_half, b.z, b.w);
        }
      }
    }
  }
#pragma unroll
  for (int half = 0; half < Halves; ++half) {
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int output = group + (i < 2 ? 0 : 8), row = tile * 8 + quad * 2 + i % 2;
        parts[((warp * Halves + half) * 16 + output) * kColumns + row] = sums[half][tile][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * p.rows; i += kStreamThreads) {
    const int output = i % 16, row = i / 16;
    if (first + output >= p.outputs) continue;
    float total[Halves] = {};
#pragma unroll
    for (int half = 0; half < Halves; ++half) {
      for (int other = 0; other < kStreamWarps; ++other) {
        total[half] += parts[((other * Halves + half) * 16 + output) * kColumns + row];
      }
    }
    if constexpr (Halves == 2) {
      static_cast<T*>(p.y)[row * p.outputs + first + output] = from_float<T>(silu(total[0]) * total[1]);
    } else {
      store(p, row, first + output, total[0]);
    }
  }
}

// Any precision and any inputs: a warp an output of a row.
template <typename T>
__global__ void __launch_bounds__(kStreamThreads) stream_fma(Product<T> p) {
  const int lane = threadIdx.x % 32;
  const int64_t output = static_cast<int64_t>(blockIdx.x) * kStreamWarps + threadIdx.x / 32;
  if (output >= p.outputs) return;
  for (int row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const T* x = p.x + static_cast<int64_t>(row) * p.inputs;
    float sums[2] = {};
    const int halves = p.mode == DSPARK_LINEAR_SWIGLU ? 2 : 1;
    for (int half = 0; half < halves; ++half) {
      const T* w = p.w + (half * p.outputs + output) * p.inputs;
      float sum = 0.f;
      for (int k = lane; k < p.inputs; k += 32) sum += to_float(w[k]) * to_float(x[k]);
      sums[half] = warp_sum(sum);
    }
    if (lane == 0) {
      if (halves == 2) {
        static_cast<T*>(p.y)[row * p.outputs + output] = from_float<T>(silu(sums[0]) * sums[1]);
      } else {
        store(p, row, output, sums[0]);
      }
    }
  }
}

constexpr int kNormThreads = 512;
constexpr int kNormPieces = 4;  // of 16 bytes that a thread keeps between its two passes

// y = T(x / rms(x) * gamma); a block a row. Pieces of 16 bytes, where rows are made of such.
template <typename T>
__global__ void __launch_bounds__(kNormThreads) norm_rows(const T* x, const T* gamma, T* y, int inputs, float epsilon) {
  constexpr int kWidth = 16 / sizeof(T);
  __shared__ float scratch[32];
  const T* row = x + static_cast<int64_t>(blockIdx.x) * inputs;
  T* out = y + static_cast<int64_t>(blockIdx.x) * inputs;
  const bool pieces = inputs % kWidth == 0 && inputs <= kNormPieces * kNormThreads * kWidth;
  uint4 kept[kNormPieces];
  float sum = 0.f;
  if (pieces) {
#pragma unroll
    for (int i = 0; i < kNormPieces; ++i) {
      const int k = (i * kNormThreads + threadIdx.x) * kWidth;
      if (k >= inputs) break;
      kept[i] = *reinterpret_cast<const uint4*>(row + k);
      const T* values = reinterpret_cast<const T*>(&kept[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += to_float(values[j]) * to_float(values[j]);
    }
  } else {
    for (int k = threadIdx.x; k < inputs; k += kNormThreads) sum += to_float(row[k]) * to_float(row[k]);
  }
  const float scale = rsqrtf(block_sum(sum, scratch) / static_cast<float>(inputs) + epsilon);
  if (pieces) {
#pragma unroll
    for (int i = 0; i < kNormPieces; ++i) {
      const int k = (i * kNormThreads + threadIdx.x) * kWidth;
      if (k >= inputs) break;
      const uint4 weights = *reinterpret_cast<const uint4*>(gamma + k);
      const T *values = reinterpret_cast<const T*>(&kept[i]), *by = reinterpret_cast<const T*>(&weights);
      uint4 result;
      T* normed = reinterpret_cast<T*>(&result);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) normed[j] = from_float<T>(to_float(values[j]) * scale * to_float(by[j]));
      *reinterpret_cast<uint4*>(out + k) = result;
    }
  } else {
    for (int k = threadIdx.x; k < inputs; k += kNormThreads) {
      out[k] = from_float<T>(to_float(row[k]) * scale * to_float(gamma[k]));
    }
  }
}

// What follows a product that a library made, float32 [rows, outputs] or, for SwiGLU, [rows, 2 outputs].
template <typename T>
__global__ void __launch_bounds__(256) finish_rows(Product<T> p, const float* product) {
  const int64_t output = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int row = blockIdx.y;
  if (output >= p.outputs) return;
  if (p.mode == DSPARK_LINEAR_SWIGLU) {
    const float* both = product + 2 * row * p.outputs;
    static_cast<T*>(p.y)[row * p.outputs + output] = from_float<T>(silu(both[output]) * both[p.outputs + output]);
  } else {
    store(p, row, output, product[row * p.outputs + output]);
  }
}

}  // namespace dspark
