// One head's row of q, k or v: RMS norm and rotary embedding, by a warp, in float32. Roundings are spelled out, so that
// every kernel that includes this gives the same bits.
#pragma once

#include "common/cuda_util.cuh"

namespace dspark {

// cos and sin float32[rows, d/2]. A position past them is padding's, whose results nobody reads.
struct Phases {
  const float* cos;
  const float* sin;
  int64_t rows;

  __device__ int64_t at(int64_t position) const { return position < 0 ? 0 : position < rows ? position : rows - 1; }
};

// A row of d elements, at most 64·Pairs: a lane holds elements i and i + d/2, which turn together, for i = lane, lane + 32 …
template <int Pairs>
struct HeadRow {
  float low[Pairs], high[Pairs];

  template <typename T>
  __device__ void load(const T* row, int half) {
#pragma unroll
    for (int p = 0; p < Pairs; ++p) {
      const int i = threadIdx.x % 32 + 32 * p;
      low[p] = i < half ? to_float(row[i]) : 0.f;
      high[p] = i < half ? to_float(row[i + half]) : 0.f;
    }
  }

  template <typename T>
  __device__ void norm(const T* gamma, int half, float epsilon) {
    float squares = 0.f;
#pragma unroll
    for (int p = 0; p < Pairs; ++p) squares = __fmaf_rn(high[p], high[p], __fmaf_rn(low[p], low[p], squares));
    const float scale = 1.f / sqrtf(warp_sum(squares) / static_cast<float>(2 * half) + epsilon);
#pragma unroll
    for (int p = 0; p < Pairs; ++p) {
      const int i = threadIdx.x % 32 + 32 * p;
      if (i >= half) continue;
      low[p] = low[p] * scale * to_float(gamma[i]);
      high[p] = high[p] * scale * to_float(gamma[i + half]);
    }
  }

  __device__ void rotate(const Phases& phases, int64_t position, int half) {
    const int64_t row = phases.at(position) * half;
#pragma unroll
    for (int p = 0; p < Pairs; ++p) {
      const int i = threadIdx.x % 32 + 32 * p;
      if (i >= half) continue;
      const float c = phases.cos[row + i], s = phases.sin[row + i], x = low[p], y = high[p];
      low[p] = __fmaf_rn(x, c, -__fmul_rn(y, s));
      high[p] = __fmaf_rn(y, c, __fmul_rn(x, s));
    }
  }

  template <typename T>
  __device__ void store(T* row, int half) const {
#pragma unroll
    for (int p = 0; p < Pairs; ++p) {
      const int i = threadIdx.x % 32 + 32 * p;
      if (i >= half) continue;
      row[i] = from_float<T>(low[p]);
      row[i + half] = from_float<T>(high[p]);
    }
  }
};

// Heads are multiples of 8, so that a row is whole 16-byte words, and 256 at most.
inline bool valid_head_dim(int64_t d) { return d >= 8 && d <= 256 && d % 8 == 0; }

// New rows of K and V from the last 2·kv_heads heads of x T[batch, width, heads + 2·kv_heads, d], into state T[slots+1,
// kv_heads, rows, d]: K normed (where k_norm is given) and rotated, V as it is.
template <typename T>
struct KvRows {
  const T* x;
  const T* k_norm;
  Phases phases;
  const int64_t* start;
  const int64_t* count;  // valid rows of each; null: all
  const int64_t* slot;
  T* k;
  T* v;
  int64_t batch, width, heads, kv_heads, head_dim, rows;
  bool ring;  // position p lies in row p mod rows; else in row p, and rows past the state's are dropped
  float epsilon;
};

constexpr int kKvWarps = 4;

// A warp a row of a head.
template <typename T, int Pairs>
__global__ void write_kv_rows(const KvRows<T> a) {
  const int64_t item = int64_t{blockIdx.x} * kKvWarps + threadIdx.x / 32;
  const int64_t head = item % (2 * a.kv_heads), j = item / (2 * a.kv_heads) % a.width;
  const int64_t b = item / (2 * a.kv_heads) / a.width;
  if (b >= a.batch || (a.count != nullptr && j >= a.count[b])) return;
  const int64_t position = a.start[b] + j;
  if (position < 0 || (!a.ring && position >= a.rows)) return;
  const int64_t row = a.ring ? position % a.rows : position;
  const bool is_key = head < a.kv_heads;
  const int64_t kv_head = is_key ? head : head - a.kv_heads;
  const int half = static_cast<int>(a.head_dim / 2);
  HeadRow<Pairs> values;
  values.load(a.x + ((b * a.width + j) * (a.heads + 2 * a.kv_heads) + a.heads + head) * a.head_dim, half);
  if (is_key) {
    if (a.k_norm != nullptr) values.norm(a.k_norm, half, a.epsilon);
    values.rotate(a.phases, position, half);
  }
  values.store((is_key ? a.k : a.v) + ((a.slot[b] * a.kv_heads + kv_head) * a.rows + row) * a.head_dim, half);
}

template <typename T>
int launch_write_kv_rows(const KvRows<T>& a, cudaStream_t stream) {
  const int64_t blocks = ceil_div(a.batch * a.width * 2 * a.kv_heads, int64_t{kKvWarps});
  if (blocks == 0) return 0;
  if (blocks >= (int64_t{1} << 31)) return kInvalid;
  const unsigned grid = static_cast<unsigned>(blocks);
  if (a.head_dim <= 64) {
    write_kv_rows<T, 1><<<grid, 32 * kKvWarps, 0, stream>>>(a);
  } else if (a.head_dim <= 128) {
    write_kv_rows<T, 2><<<grid, 32 * kKvWarps, 0, stream>>>(a);
  } else {
    write_kv_rows<T, 4><<<grid, 32 * kKvWarps, 0, stream>>>(a);
  }
  return launch_status();
}

}  // namespace dspark
