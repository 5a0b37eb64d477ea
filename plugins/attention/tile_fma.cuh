// A warp's part of a tile of K and V in float32, with plain products: no precision is lost to tensor cores.
#pragma once

#include "attention/tile_mma.cuh"

namespace dspark {

template <int D, int Queries_>
struct WarpTile<float, D, Queries_> {
  static constexpr int kQueries = Queries_;
  static constexpr int kTile = D == 256 ? 32 : 64;  // two tiles of K and V fit into shared memory
  static constexpr int kRows = kTile / kWarps;
  static constexpr int kStride = D + 4;
  static constexpr int kLanes = 32 / kRows;          // that share a row
  static constexpr int kScores = Queries_ / kLanes;  // of a lane: queries lane/kRows, + kLanes, …
  static constexpr int kColumns = D < 32 ? 1 : D / 32;
  static constexpr int kScratch = Queries_ * (kRows + 1);  // weights [Queries][kRows], then rescale [Queries]

  float values[Queries_][kColumns];  // columns lane, lane + 32, …
  float maximum[kScores], sum[kScores];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      maximum[i] = -INFINITY;
      sum[i] = 0.f;
    }
#pragma unroll
    for (int m = 0; m < Queries_; ++m) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) values[m][c] = 0.f;
    }
  }

  __device__ void step(const float* q, const float* k, const float* v, int row, const VisibleRows& visible,
                       const int* limit, float scale, float* scratch) {
    const int lane = threadIdx.x % 32, mine = lane % kRows, part = lane / kRows;
    float* weights = scratch;
    float* rescales = scratch + Queries_ * kRows;
    float score[kScores] = {};
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
      const float4 key = *reinterpret_cast<const float4*>(k + mine * kStride + d);
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const float4 query = *reinterpret_cast<const float4*>(q + (part + i * kLanes) * kStride + d);
        score[i] = __fmaf_rn(query.x, key.x, score[i]);
        score[i] = __fmaf_rn(query.y, key.y, score[i]);
        score[i] = __fmaf_rn(query.z, key.z, score[i]);
        score[i] = __fmaf_rn(query.w, key.w, score[i]);
      }
    }
    const bool seen = visible.one(row + mine);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int m = part + i * kLanes;
      const float s = seen && row + mine <= limit[m] ? __fmul_rn(score[i], scale) : -INFINITY;
      float top = s;
#pragma unroll
      for (int offset = kRows / 2; offset > 0; offset /= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
      }
      const float old = maximum[i], now = fmaxf(old, top);
      maximum[i] = now;
      const float base = now == -INFINITY ? 0.f : now;
      const float rescale = exp2f(old - base), weight = exp2f(s - base);
      float total = weight;
#pragma unroll
      for (int offset = kRows / 2; offset > 0; offset /= 2) {
        total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, offset));
      }
      sum[i] = __fmaf_rn(sum[i], rescale, total);
      weights[m * kRows + mine] = weight;
      if (mine == 0) rescales[m] = rescale;
    }
    __syncwarp();
    if (lane < D) {
#pragma unroll
      for (int m = 0; m < Queries_; ++m) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) values[m][c] = __fmul_rn(values[m][c], rescales[m]);
      }
      for (int r = 0; r < kRows; ++r) {
        float column[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) column[c] = v[r * kStride + lane + 32 * c];
#pragma unroll
        for (int m = 0; m < Queries_; ++m) {
          const float weight = weights[m * kRows + r];
#pragma unroll
          for (int c = 0; c < kColumns; ++c) values[m][c] = __fmaf_rn(weight, column[c], values[m][c]);
        }
      }
    }
    __syncwarp();
  }

  __device__ void store_state(float* maxima, float* sums) const {
    const int lane = threadIdx.x % 32;
    if (lane % kRows != 0) return;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      maxima[lane / kRows + i * kLanes] = maximum[i];
      sums[lane / kRows + i * kLanes] = sum[i];
    }
  }

  template <int Slice, int Columns>
  __device__ void store_values(float* to, int stride) const {
    const int lane = threadIdx.x % 32;
    if (lane >= Columns) return;
#pragma unroll
    for (int m = 0; m < Queries_; ++m) to[m * stride + lane] = values[m][Slice];
  }
};

}  // namespace dspark
