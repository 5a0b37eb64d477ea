#include "context_write/kernel.h"

#include "common/heads.cuh"

using namespace dspark;

extern "C" int dspark_context_write(const void* kv, const void* k_norm, const float* cos, const float* sin,
                                    const int64_t* start, const int64_t* count, const int64_t* slot, void* ring_k,
                                    void* ring_v, int64_t batch, int64_t width, int64_t kv_heads, int64_t head_dim,
                                    int64_t window, int64_t phases, float epsilon, int dtype, void* stream) {
  if (batch < 0 || width < 0 || width > window || kv_heads <= 0 || !valid_head_dim(head_dim) || phases <= 0) {
    return kInvalid;
  }
  return with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    KvRows<T> rows{};
    rows.x = static_cast<const T*>(kv);
    rows.k_norm = static_cast<const T*>(k_norm);
    rows.phases = {cos, sin, phases};
    rows.start = start;
    rows.count = count;
    rows.slot = slot;
    rows.k = static_cast<T*>(ring_k);
    rows.v = static_cast<T*>(ring_v);
    rows.batch = batch;
    rows.width = width;
    rows.heads = 0;
    rows.kv_heads = kv_heads;
    rows.head_dim = head_dim;
    rows.rows = window;
    rows.ring = true;
    rows.epsilon = epsilon;
    return launch_write_kv_rows(rows, static_cast<cudaStream_t>(stream));
  });
}
