// The attention kernels: `attend` goes over the rows, `merge_parts` puts splits together that thread blocks shared.
#pragma once

#include "attention/tile_fma.cuh"
#include "attention/tile_mma.cuh"

namespace dspark {

// Shared memory of a thread block, in the order of the members. Stages 2: a tile is on its way while the one before is
// used. Stages 1 is for GPUs that have no room for two.
template <typename T, typename Tile, int D, int Stages>
struct Shared {
  static constexpr int kColumns = D < 32 ? D : 32;  // of a slice, in which the warps' values are added up
  static constexpr int kSliceStride = kColumns + 8;

  T q[Tile::kQueries * Tile::kStride];
  T kv[Stages][2][Tile::kTile * Tile::kStride];  // K and V
  float slice[kWarps][Tile::kQueries * kSliceStride];
  float scratch[kWarps][Tile::kScratch + (Tile::kScratch == 0)];
  float maximum[kWarps][Tile::kQueries], sum[kWarps][Tile::kQueries];
  float factor[kWarps][Tile::kQueries];
  float old_scale[Tile::kQueries], new_scale[Tile::kQueries];
  float merged_maximum[Tile::kQueries], merged_sum[Tile::kQueries];
  int limit[Tile::kQueries];
};

// The visible tiles of splits first, first + step, …, one after another.
struct TileWalk {
  int split, row;
  bool valid;

  template <typename T>
  __device__ void next(const AttentionArgs<T>& a, const VisibleRows& visible, int tile, int step) {
    row += tile;
    for (;;) {
      if (row >= (split + 1) * a.split) {
        split += step;
        row = split * a.split;
      }
      if (split >= a.splits || (!visible.ring && row >= visible.end)) break;
      if (visible.any(row, tile)) return;
      row += tile;
    }
    valid = false;
  }
};

// Starts the copy of one tile of K and V; invisible rows become zero, so that whatever lies there is not even multiplied
// by 0. The block's own keys are made on the spot.
template <typename T, typename Tile, int D>
__device__ void load_tile(const AttentionArgs<T>& a, const VisibleRows& visible, int b, int kv_head, int first,
                          T (&stage)[2][Tile::kTile * Tile::kStride]) {
  constexpr int kWord = 16 / sizeof(T), kWords = D / kWord;
  const bool block = first >= a.block_base;
  const int64_t row_stride = block ? int64_t{a.heads + 2 * a.kv_heads} * a.head_dim : a.head_dim;
  const int64_t state = (a.slot[b] * a.kv_heads + kv_head) * a.rows * a.head_dim;
  const int64_t block_row = int64_t{b} * a.width * row_stride + int64_t{a.heads + kv_head} * a.head_dim;
  const T* const k = block ? a.qkv + block_row : a.k + state;
  const T* const v = block ? k + int64_t{a.kv_heads} * a.head_dim : a.v + state;
  const int from = block ? first - a.block_base : first;
#pragma unroll 4
  for (int i = threadIdx.x; i < Tile::kTile * kWords; i += kThreads) {
    const int r = i / kWords, word = i % kWords * kWord;
    const bool valid = visible.one(first + r) && word < a.head_dim;
    const int64_t offset = valid ? (from + r) * row_stride + word : 0;
    if (!block) copy_async_16(&stage[0][r * Tile::kStride + word], k + offset, valid);
    copy_async_16(&stage[1][r * Tile::kStride + word], v + offset, valid);
  }
  if (!block) return;
  constexpr int kPairs = D < 64 ? 1 : D / 64;
  const int half = a.head_dim / 2, lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < Tile::kTile; r += kWarps) {
    T* const to = &stage[0][r * Tile::kStride];
    for (int i = lane; i < D; i += 32) {
      if (i >= a.head_dim || from + r >= a.width) to[i] = from_float<T>(0.f);
    }
    if (from + r >= a.width) continue;
    HeadRow<kPairs> key;
    key.load(k + (from + r) * row_stride, half);
    if (a.k_norm != nullptr) key.norm(a.k_norm, half, a.epsilon);
    key.rotate(a.phases, a.start[b] + from + r, half);
    key.store(to, half);
  }
}

// Query m of a tile of queries is (m0 + m) % group of the heads that share kv_head, at row (m0 + m) / group.
template <typename T, typename Tile, int D>
__device__ void load_queries(const AttentionArgs<T>& a, int b, int kv_head, int m0, T* queries) {
  constexpr int kPairs = D < 64 ? 1 : D / 64;
  constexpr int kBatch = D == 256 ? 1 : 4;  // rows of a warp whose loads are in flight together
  const int group = a.group(), half = a.head_dim / 2, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row_stride = int64_t{a.heads + 2 * a.kv_heads} * a.head_dim;
#pragma unroll 1
  for (int first = warp * kBatch; first < Tile::kQueries; first += kWarps * kBatch) {
    HeadRow<kPairs> query[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int m = m0 + first + i;
      if (m >= a.width * group) continue;
      const int64_t head = int64_t{kv_head} * group + m % group;
      query[i].load(a.qkv + (int64_t{b} * a.width + m / group) * row_stride + head * a.head_dim, half);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int m = m0 + first + i;
      T* const to = &queries[(first + i) * Tile::kStride];
      const bool valid = m < a.width * group;
      for (int c = lane; c < D; c += 32) {
        if (c >= a.head_dim || !valid) to[c] = from_float<T>(0.f);
      }
      if (!valid) continue;
      if (a.q_norm != nullptr) query[i].norm(a.q_norm, half, a.epsilon);
      query[i].rotate(a.phases, a.start[b] + m / group, half);
      query[i].store(to, half);
    }
  }
}

// Values of a split, added up over the warps, in slices of columns; a thread holds every kThreads-th of a slice's.
template <typename T, typename Tile, int D, int Stages>
struct Merged {
  using Memory = Shared<T, Tile, D, Stages>;
  static constexpr int kSlices = D / Memory::kColumns;
  static constexpr int kItems = Tile::kQueries * Memory::kColumns / kThreads;

  float values[kSlices][kItems];

  __device__ static int column() { return threadIdx.x % Memory::kColumns; }
  __device__ static int query(int item) {
    return threadIdx.x / Memory::kColumns + item * (kThreads / Memory::kColumns);
  }

  // Ends a split: merges it into `values`, or writes it as a part of its own. Every thread comes here.
  template <int Slice = 0>
  __device__ void add(const AttentionArgs<T>& a, const Tile& tile, Memory& shared, int64_t part, int queries) {
    const int warp = threadIdx.x / 32;
    if constexpr (Slice == 0) tile.store_state(shared.maximum[warp], shared.sum[warp]);
    tile.template store_values<Slice, Memory::kColumns>(shared.slice[warp], Memory::kSliceStride);
    __syncthreads();
    if constexpr (Slice == 0) {
      if (threadIdx.x < Tile::kQueries) add_state(a, shared, part, queries);
      __syncthreads();
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int m = query(item), at = m * Memory::kSliceStride + column();
      float value = __fmul_rn(shared.factor[0][m], shared.slice[0][at]);
#pragma unroll
      for (int w = 1; w < kWarps; ++w) value = __fmaf_rn(shared.factor[w][m], shared.slice[w][at], value);
      const int c = Slice * Memory::kColumns + column();
      if (a.part_values == nullptr) {
        values[Slice][item] =
            __fmaf_rn(shared.new_scale[m], value, __fmul_rn(shared.old_scale[m], values[Slice][item]));
      } else if (m < queries && c < a.head_dim) {
        a.part_values[(part + m) * a.head_dim + c] = value;
      }
    }
    __syncthreads();
    if constexpr (Slice + 1 < kSlices) add<Slice + 1>(a, tile, shared, part, queries);
  }

 private:
  // Thread m, of query m.
  __device__ static void add_state(const AttentionArgs<T>& a, Memory& shared, int64_t part, int queries) {
    const int m = threadIdx.x;
    float maximum = shared.maximum[0][m];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) maximum = fmaxf(maximum, shared.maximum[w][m]);
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float theirs = shared.maximum[w][m];
      const float factor = theirs == -INFINITY ? 0.f : exp2f(theirs - maximum);
      shared.factor[w][m] = factor;
      sum = __fmaf_rn(factor, shared.sum[w][m], sum);
    }
    if (a.part_values == nullptr) {
      const MergeScales scales(shared.merged_maximum[m], maximum);
      shared.merged_maximum[m] = scales.maximum;
      shared.merged_sum[m] = scales(shared.merged_sum[m], sum);
      shared.old_scale[m] = scales.old_scale;
      shared.new_scale[m] = scales.new_scale;
    } else if (m < queries) {
      a.part_state[part + m] = make_float2(maximum, sum);
    }
  }
};

// Grid: (thread blocks that share the splits, tiles of queries, batch · kv_heads).
template <typename T, int D, int Queries, int Stages>
__global__ void __launch_bounds__(kThreads, 2) attend(const AttentionArgs<T> a) {
  using Tile = WarpTile<T, D, Queries>;
  using Memory = Shared<T, Tile, D, Stages>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Memory*>(memory);
  const int b = blockIdx.z / a.kv_heads, kv_head = blockIdx.z % a.kv_heads, group = a.group();
  const int m0 = blockIdx.y * Queries, all = a.width * group, warp = threadIdx.x / 32;
  const int queries = all - m0 < Queries ? all - m0 : Queries;
  const int64_t start = a.start[b];
  const VisibleRows visible(a, b, start + (m0 + queries - 1) / group);

  const int step = gridDim.x;
  TileWalk now{static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.x) * a.split - Tile::kTile, true};
  now.next(a, visible, Tile::kTile, step);
  // Nothing to see in these splits: there is no part to write, and whoever merges knows.
  if (!now.valid && a.part_values != nullptr) return;
  TileWalk next = now;
  if (now.valid) {
    load_tile<T, Tile, D>(a, visible, b, kv_head, now.row, shared.kv[0]);
    copy_async_commit();
    next.next(a, visible, Tile::kTile, step);
    if constexpr (Stages == 2) {
      if (next.valid) load_tile<T, Tile, D>(a, visible, b, kv_head, next.row, shared.kv[1]);
      copy_async_commit();
    }
  }
  load_queries<T, Tile, D>(a, b, kv_head, m0, shared.q);
  if (threadIdx.x < Queries) {
    const int m = threadIdx.x;
    const int64_t last = start + (m0 + m) / group;
    shared.limit[m] = m >= queries ? -1 : visible.ring ? INT_MAX : static_cast<int>(last < a.rows ? last : a.rows - 1);
    shared.merged_maximum[m] = -INFINITY;
    shared.merged_sum[m] = 0.f;
  }

  Merged<T, Tile, D, Stages> merged;
#pragma unroll
  for (auto& slice : merged.values) {
#pragma unroll
    for (float& value : slice) value = 0.f;
  }
  Tile tile;
  tile.clear();
  for (int stage = 0; now.valid; stage ^= Stages - 1) {
    copy_async_wait<Stages - 1>();
    __syncthreads();
    const int mine = warp * Tile::kRows;
    tile.step(shared.q, &shared.kv[stage][0][mine * Tile::kStride], &shared.kv[stage][1][mine * Tile::kStride],
              now.row + mine, visible, shared.limit, a.scale, shared.scratch[warp]);
    __syncthreads();
    TileWalk after = next;
    if (next.valid) after.next(a, visible, Tile::kTile, step);
    const TileWalk& coming = Stages == 2 ? after : next;
    if (coming.valid) load_tile<T, Tile, D>(a, visible, b, kv_head, coming.row, shared.kv[stage]);
    copy_async_commit();
    if (!next.valid || next.split != now.split) {
      const int64_t rows = int64_t{a.batch} * a.kv_heads * all;
      merged.add(a, tile, shared, now.split * rows + int64_t{blockIdx.z} * all + m0, queries);
      tile.clear();
    }
    now = next;
    next = after;
  }
  if (a.part_values != nullptr) return;
  __syncthreads();
#pragma unroll
  for (int slice = 0; slice < merged.kSlices; ++slice) {
#pragma unroll
    for (int item = 0; item < merged.kItems; ++item) {
      const int m = merged.query(item), c = slice * Memory::kColumns + merged.column();
      if (m >= queries || c >= a.head_dim) continue;
      const int row = (m0 + m) / group, head = kv_head * group + (m0 + m) % group;
      const float sum = shared.merged_sum[m];
      a.out[((int64_t{b} * a.width + row) * a.heads + head) * a.head_dim + c] =
          from_float<T>(sum > 0.f ? __fdiv_rn(merged.values[slice][item], sum) : 0.f);
    }
  }
}

// A warp merges the splits of one query, in their order.
template <typename T, int Columns>
__global__ void __launch_bounds__(kThreads) merge_parts(const AttentionArgs<T> a) {
  constexpr int kBatch = 8;  // splits whose loads are in flight together
  const int group = a.group(), all = a.width * group, lane = threadIdx.x % 32;
  const int64_t rows = int64_t{a.batch} * a.kv_heads * all;
  const int64_t query = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (query >= rows) return;
  const int m = static_cast<int>(query % all), kv_head = static_cast<int>(query / all) % a.kv_heads;
  const int b = static_cast<int>(query / all / a.kv_heads), row = m / group;
  const VisibleRows visible(a, b, a.start[b] + row);

  float maximum = -INFINITY, sum = 0.f, values[Columns] = {};
  for (int first = 0; first < a.splits; first += kBatch) {
    if (!visible.ring && first * a.split >= visible.end) break;
    bool seen[kBatch];
    float2 state[kBatch];
    float part[kBatch][Columns];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      seen[i] = first + i < a.splits && visible.any((first + i) * a.split, a.split);
      if (!seen[i]) continue;
      const int64_t at = (first + i) * rows + query;
      state[i] = a.part_state[at];
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        part[i][c] = lane + 32 * c < a.head_dim ? a.part_values[at * a.head_dim + lane + 32 * c] : 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (!seen[i]) continue;
      const MergeScales scales(maximum, state[i].x);
      maximum = scales.maximum;
      sum = scales(sum, state[i].y);
#pragma unroll
      for (int c = 0; c < Columns; ++c) values[c] = scales(values[c], part[i][c]);
    }
  }
  const int64_t to = ((int64_t{b} * a.width + row) * a.heads + kv_head * group + m % group) * a.head_dim;
#pragma unroll
  for (int c = 0; c < Columns; ++c) {
    if (lane + 32 * c >= a.head_dim) continue;
    a.out[to + lane + 32 * c] = from_float<T>(sum > 0.f ? __fdiv_rn(values[c], sum) : 0.f);
  }
}

}  // namespace dspark
