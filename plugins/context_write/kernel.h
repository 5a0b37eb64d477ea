// ContextWrite: context rows into a drafter layer's ring.
#pragma once

#include <cstdint>

extern "C" {

// The first count[b] rows of kv T[batch, width, 2·kv_heads·head_dim], at positions start[b] …, into ring_k and ring_v
// T[slots+1, kv_heads, window, head_dim] at rows position mod window, in place: K normed by k_norm T[head_dim] and rotated
// by cos and sin float32[phases, head_dim/2], V as it is. width is at most window.
int dspark_context_write(const void* kv, const void* k_norm, const float* cos, const float* sin, const int64_t* start,
                         const int64_t* count, const int64_t* slot, void* ring_k, void* ring_v, int64_t batch,
                         int64_t width, int64_t kv_heads, int64_t head_dim, int64_t window, int64_t phases,
                         float epsilon, int dtype, void* stream);
}
