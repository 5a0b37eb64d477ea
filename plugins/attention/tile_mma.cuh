// A warp's part of a tile of K and V in 16 bits, on tensor cores.
#pragma once

#include "attention/rows.cuh"

namespace dspark {

// Four 8×8 matrices of 16-bit elements: lane l names row l%8 of matrix l/8, and gets elements 2t, 2t+1 of row g (g = l/4,
// t = l%4) of each; with Transposed, of column g.
template <bool Transposed>
__device__ inline void load_matrices(uint32_t (&r)[4], const void* shared) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (Transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

// Queries rows of up to D elements against 16 of a tile's 64 rows, with the maximum, sum and weighted values so far.
template <typename T, int D, int Queries_>
struct WarpTile {
  static constexpr int kQueries = Queries_;
  static constexpr int kTile = 64;
  static constexpr int kRows = kTile / kWarps;
  static constexpr int kStride = D + 8;  // an odd number of 16-byte words: eight rows lie in different banks
  static constexpr int kScratch = 0;     // floats of shared memory a warp
  static constexpr int kGroups = Queries_ / 16;

  float values[kGroups][D / 8][4];
  float maximum[kGroups][2], sum[kGroups][2];

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        maximum[m][i] = -INFINITY;
        sum[m][i] = 0.f;
      }
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[m][n][i] = 0.f;
      }
    }
  }

  // q [Queries][kStride]; k and v [kRows][kStride], rows row … of the numbering; query m sees those up to limit[m].
  __device__ void step(const T* q, const T* k, const T* v, int row, const VisibleRows& visible, const int* limit,
                       float scale, float*) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, matrix = lane / 8, line = lane % 8;
    float score[kGroups][2][4] = {};
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      uint32_t keys[4];  // rows 0–7 in [0], [1], rows 8–15 in [2], [3]
      load_matrices<false>(keys, k + (matrix / 2 * 8 + line) * kStride + d + matrix % 2 * 8);
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        uint32_t queries[4];
        load_matrices<false>(queries, q + (m * 16 + matrix % 2 * 8 + line) * kStride + d + matrix / 2 * 8);
        mma_16816<T>(score[m][0], queries, keys[0], keys[1]);
        mma_16816<T>(score[m][1], queries, keys[2], keys[3]);
      }
    }

    // This lane's columns: rows 2t, 2t+1, 2t+8, 2t+9.
    bool seen[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) seen[n][c] = visible.one(row + 8 * n + 2 * t + c);
    }
    uint32_t weights[kGroups][4];
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      float rescale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int last = limit[m * 16 + half * 8 + g];
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& s = score[m][n][2 * half + c];
            s = seen[n][c] && row + 8 * n + 2 * t + c <= last ? __fmul_rn(s, scale) : -INFINITY;
            top = fmaxf(top, s);
          }
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float old = maximum[m][half], now = fmaxf(old, top);
        maximum[m][half] = now;
        // Nothing seen so far: every score is -inf, and so is its difference to 0.
        const float base = now == -INFINITY ? 0.f : now;
        rescale[half] = exp2f(old - base);
        float total = 0.f;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float& a = score[m][n][2 * half];
          float& b = score[m][n][2 * half + 1];
          a = exp2f(a - base);
          b = exp2f(b - base);
          total = __fadd_rn(total, __fadd_rn(a, b));
          weights[m][2 * n + half] = pack2<T>(a, b);
        }
        total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 1));
        total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 2));
        sum[m][half] = __fmaf_rn(sum[m][half], rescale[half], total);
      }
      // Most of the time no maximum moves, and ×1 changes nothing.
      if (__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) values[m][n][i] = __fmul_rn(values[m][n][i], rescale[i / 2]);
        }
      }
    }

#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t columns[4];  // columns 8n … in [0], [1], the next eight in [2], [3]
      load_matrices<true>(columns, v + (matrix % 2 * 8 + line) * kStride + n * 8 + matrix / 2 * 8);
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        mma_16816<T>(values[m][n], weights[m], columns[0], columns[1]);
        mma_16816<T>(values[m][n + 1], weights[m], columns[2], columns[3]);
      }
    }
  }

  __device__ void store_state(float* maxima, float* sums) const {
    const int lane = threadIdx.x % 32;
    if (lane % 4 != 0) return;
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maxima[m * 16 + half * 8 + lane / 4] = maximum[m][half];
        sums[m * 16 + half * 8 + lane / 4] = sum[m][half];
      }
    }
  }

  // Columns Slice·Columns … of the values, as [Queries][stride].
  template <int Slice, int Columns>
  __device__ void store_values(float* to, int stride) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
#pragma unroll
      for (int n = 0; n < Columns / 8; ++n) {
        const float(&from)[4] = values[m][Slice * (Columns / 8) + n];
        float* row = to + (m * 16 + g) * stride + n * 8 + 2 * t;
        *reinterpret_cast<float2*>(row) = make_float2(from[0], from[1]);
        *reinterpret_cast<float2*>(row + 8 * stride) = make_float2(from[2], from[3]);
      }
    }
  }
};

}  // namespace dspark
