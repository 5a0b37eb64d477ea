#include "attention/kernel.h"

#include <algorithm>
#include <climits>
#include <cmath>

#include "attention/attend.cuh"

namespace dspark {
namespace {

// How a call is cut up. In float32 the splits follow from the state's size alone, so that a row gets the same bits in any
// company. In 16 bits, where products don't keep that promise either, a thread block gets as long a split as the device
// stays busy with: merging splits costs about as much as reading 64 rows.
struct Plan {
  int64_t queries, query_tiles, split, state_splits, splits, sharing;

  Plan(int64_t batch, int64_t width, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rows, bool ring,
       bool exact) {
    const int64_t all = width * (heads / kv_heads);
    queries = all > 16 && head_dim <= 128 ? 32 : 16;
    query_tiles = ceil_div(all, queries);
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    const int64_t blocks = batch * kv_heads * query_tiles, wave = int64_t{2} * processors;
    // At most 128 splits, so that parts of a very long cache still fit into memory.
    split = 128;
    while (ceil_div(rows, split) > (exact ? 128 : std::max<int64_t>(1, wave / blocks))) split += 64;
    state_splits = ceil_div(rows, split);
    splits = state_splits + (ring ? ceil_div(width, split) : 0);
    // Three thread blocks a multiprocessor keep its memory busy. What has two without sharing needs no parts.
    sharing = blocks >= wave ? 1 : std::min(ceil_div(int64_t{3} * processors, blocks), splits);
    // Rather than begin a second wave, whoever has the first split goes on with the block's own rows.
    if (!exact && sharing * blocks > wave) sharing = std::min(sharing, state_splits);
  }

  int64_t part_rows(int64_t batch, int64_t width, int64_t heads) const {
    return sharing > 1 ? splits * batch * width * heads : 0;
  }
};

bool valid(int64_t batch, int64_t width, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rows) {
  return batch > 0 && width > 0 && kv_heads > 0 && heads > 0 && heads % kv_heads == 0 && valid_head_dim(head_dim) &&
         rows > 0 && rows < (int64_t{1} << 30) && width < (int64_t{1} << 20) && batch * kv_heads < 65536 &&
         width * (heads / kv_heads) < 65536 * 16;
}

// float32 tiles hold 16 queries: more would not fit into registers.
template <typename T>
constexpr int wide_tile(int head_dim) {
  return sizeof(T) == 4 || head_dim == 256 ? 16 : 32;
}

template <typename T, int D, int Queries, int Stages>
int launch_attend(const AttentionArgs<T>& a, const Plan& plan, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared<T, WarpTile<T, D, Queries>, D, Stages>);
  if constexpr (Stages == 2 && bytes > kLeastShared) {
    if (bytes > shared_limit()) return launch_attend<T, D, Queries, 1>(a, plan, stream);
  }
  const cudaError_t error =
      cudaFuncSetAttribute(attend<T, D, Queries, Stages>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const dim3 grid(static_cast<unsigned>(plan.sharing), static_cast<unsigned>(ceil_div(a.width * a.group(), Queries)),
                  static_cast<unsigned>(a.batch * a.kv_heads));
  attend<T, D, Queries, Stages><<<grid, kThreads, bytes, stream>>>(a);
  if (const int failed = launch_status()) return failed;
  if (plan.sharing == 1) return 0;
  const int64_t queries = int64_t{a.batch} * a.width * a.heads;
  merge_parts<T, (D < 32 ? 1 : D / 32)>
      <<<static_cast<unsigned>(ceil_div(queries, int64_t{kWarps})), kThreads, 0, stream>>>(a);
  return launch_status();
}

template <typename T, int D>
int launch_for(const AttentionArgs<T>& a, const Plan& plan, cudaStream_t stream) {
  return plan.queries == 16 ? launch_attend<T, D, 16, 2>(a, plan, stream)
                            : launch_attend<T, D, wide_tile<T>(D), 2>(a, plan, stream);
}

template <typename T>
int launch(AttentionArgs<T>& a, void* workspace, cudaStream_t stream) {
  const Plan plan(a.batch, a.width, a.heads, a.kv_heads, a.head_dim, a.rows, a.ring(), sizeof(T) == 4);
  a.split = static_cast<int>(plan.split);
  a.state_splits = static_cast<int>(plan.state_splits);
  a.splits = static_cast<int>(plan.splits);
  a.block_base = a.ring() ? static_cast<int>(plan.state_splits * plan.split) : INT_MAX;
  a.scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(a.head_dim)));
  if (const int64_t rows = plan.part_rows(a.batch, a.width, a.heads)) {
    if (workspace == nullptr) return kInvalid;
    a.part_state = static_cast<float2*>(workspace);
    a.part_values = reinterpret_cast<float*>(a.part_state + rows);
  }
  if (a.head_dim <= 16) return launch_for<T, 16>(a, plan, stream);
  if (a.head_dim <= 64) return launch_for<T, 64>(a, plan, stream);
  if (a.head_dim <= 128) return launch_for<T, 128>(a, plan, stream);
  return launch_for<T, 256>(a, plan, stream);
}

}  // namespace
}  // namespace dspark

using namespace dspark;

extern "C" int64_t dspark_attention_workspace(int64_t batch, int64_t width, int64_t heads, int64_t kv_heads,
                                              int64_t head_dim, int64_t rows, int64_t ring) {
  if (!valid(batch, width, heads, kv_heads, head_dim, rows)) return -1;
  // Of float32, which takes most: it has the most splits.
  const Plan plan(batch, width, heads, kv_heads, head_dim, rows, ring != 0, true);
  return plan.part_rows(batch, width, heads) * static_cast<int64_t>(sizeof(float2) + head_dim * sizeof(float));
}

extern "C" int dspark_block_attention(const void* qkv, const void* q_norm, const void* k_norm, const float* cos,
                                      const float* sin, const void* ring_k, const void* ring_v, const int64_t* start,
                                      const int64_t* valid_len, const int64_t* slot, void* out, void* workspace,
                                      int64_t batch, int64_t width, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                      int64_t rows, int64_t phases, float epsilon, int dtype, void* stream) {
  if (!valid(batch, width, heads, kv_heads, head_dim, rows) || phases <= 0 || valid_len == nullptr) return kInvalid;
  return with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    AttentionArgs<T> a{};
    a.qkv = static_cast<const T*>(qkv);
    a.q_norm = static_cast<const T*>(q_norm);
    a.k_norm = static_cast<const T*>(k_norm);
    a.phases = {cos, sin, phases};
    a.k = static_cast<const T*>(ring_k);
    a.v = static_cast<const T*>(ring_v);
    a.start = start;
    a.valid_len = valid_len;
    a.slot = slot;
    a.out = static_cast<T*>(out);
    a.batch = static_cast<int>(batch);
    a.width = static_cast<int>(width);
    a.heads = static_cast<int>(heads);
    a.kv_heads = static_cast<int>(kv_heads);
    a.head_dim = static_cast<int>(head_dim);
    a.rows = static_cast<int>(rows);
    a.epsilon = epsilon;
    return launch(a, workspace, static_cast<cudaStream_t>(stream));
  });
}

extern "C" int dspark_causal_attention(const void* qkv, const void* q_norm, const void* k_norm, const float* cos,
                                       const float* sin, void* k_cache, void* v_cache, const int64_t* start,
                                       const int64_t* slot, void* out, void* workspace, int64_t batch, int64_t width,
                                       int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rows, int64_t phases,
                                       float epsilon, int dtype, void* stream) {
  if (!valid(batch, width, heads, kv_heads, head_dim, rows) || phases <= 0) return kInvalid;
  return with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    KvRows<T> kv{};
    kv.x = static_cast<const T*>(qkv);
    kv.k_norm = static_cast<const T*>(k_norm);
    kv.phases = {cos, sin, phases};
    kv.start = start;
    kv.slot = slot;
    kv.k = static_cast<T*>(k_cache);
    kv.v = static_cast<T*>(v_cache);
    kv.batch = batch;
    kv.width = width;
    kv.heads = heads;
    kv.kv_heads = kv_heads;
    kv.head_dim = head_dim;
    kv.rows = rows;
    kv.epsilon = epsilon;
    if (const int error = launch_write_kv_rows(kv, static_cast<cudaStream_t>(stream))) return error;

    AttentionArgs<T> a{};
    a.qkv = kv.x;
    a.q_norm = static_cast<const T*>(q_norm);
    a.k_norm = kv.k_norm;
    a.phases = kv.phases;
    a.k = kv.k;
    a.v = kv.v;
    a.start = start;
    a.slot = slot;
    a.out = static_cast<T*>(out);
    a.batch = static_cast<int>(batch);
    a.width = static_cast<int>(width);
    a.heads = static_cast<int>(heads);
    a.kv_heads = static_cast<int>(kv_heads);
    a.head_dim = static_cast<int>(head_dim);
    a.rows = static_cast<int>(rows);
    a.epsilon = epsilon;
    return launch(a, workspace, static_cast<cudaStream_t>(stream));
  });
}
