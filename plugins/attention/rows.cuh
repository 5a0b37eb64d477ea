// Which rows of K and V an attention reads, how they are split, and how the parts are put together again.
//
// The rows are numbered: those of the state first, and from `block_base` the rows of the block itself. They are cut into
// splits of `split` rows, whose results (a maximum, a sum, a weighted sum of values) are merged one after another. What
// is merged, and in which order, follows from a row's number alone; a part without visible rows changes nothing, to the
// bit. So it doesn't matter which thread block works on which split, nor what else the call holds.
#pragma once

#include "common/cuda_util.cuh"
#include "common/heads.cuh"

namespace dspark {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

template <typename T>
struct AttentionArgs {
  const T* qkv;
  const T* q_norm;  // null: q and k as they are
  const T* k_norm;
  Phases phases;
  const T* k;
  const T* v;
  const int64_t* start;
  const int64_t* valid_len;  // null: causal, over a cache
  const int64_t* slot;
  T* out;
  float* part_values;  // [splits, batch·kv_heads·width·group, head_dim]; null: splits are merged in the thread block
  float2* part_state;  // [splits, batch·kv_heads·width·group]: maximum and sum
  int batch, width, heads, kv_heads, head_dim, rows;
  int split, state_splits, splits, block_base;
  float epsilon, scale;  // of the scores, which are base-2 exponents

  __host__ __device__ int group() const { return heads / kv_heads; }
  __host__ __device__ bool ring() const { return valid_len != nullptr; }
};

// The rows that some query of a batch row sees.
struct VisibleRows {
  bool ring;
  int rows;              // of the state
  int first, last;       // of the ring, the last as a row, first counted back from it: negative where it wraps
  int block_base, width;
  int end;               // causal: what comes before it is visible

  // `newest`: causal, the last position that a query has.
  template <typename T>
  __device__ VisibleRows(const AttentionArgs<T>& a, int b, int64_t newest)
      : ring(a.ring()), rows(a.rows), first(0), last(0), block_base(a.block_base), width(a.width), end(0) {
    if (ring) {
      const int64_t valid = a.valid_len[b] < rows ? a.valid_len[b] : rows;
      last = static_cast<int>(floor_mod(a.start[b] - 1, rows));
      first = last - static_cast<int>(valid < 0 ? 0 : valid) + 1;
    } else {
      const int64_t after = newest + 1 < rows ? newest + 1 : rows;
      end = static_cast<int>(after < 0 ? 0 : after);
    }
  }

  __device__ bool one(int row) const {
    if (!ring) return row < end;
    if (row >= block_base) return row - block_base < width;
    if (row >= rows || first > last) return false;
    return first >= 0 ? row >= first && row <= last : row <= last || row >= first + rows;
  }

  // Whether one of `count` rows from `row` on is; they don't cross from the state into the block.
  __device__ bool any(int row, int count) const {
    if (!ring) return row < end;
    if (row >= block_base) return row - block_base < width;
    if (row >= rows || first > last) return false;
    const int after = row + count < rows ? row + count : rows;
    return first >= 0 ? row <= last && after > first : row <= last || after > first + rows;
  }
};

// Factors of two parts by which they become one with the greater maximum.
struct MergeScales {
  float maximum, old_scale, new_scale;

  __device__ MergeScales(float old_maximum, float new_maximum)
      : maximum(fmaxf(old_maximum, new_maximum)),
        old_scale(old_maximum == -INFINITY ? 0.f : exp2f(old_maximum - maximum)),
        new_scale(new_maximum == -INFINITY ? 0.f : exp2f(new_maximum - maximum)) {}

  __device__ float operator()(float old_value, float new_value) const {
    return __fmaf_rn(new_scale, new_value, __fmul_rn(old_scale, old_value));
  }
};

}  // namespace dspark
