// Attention over a slot's rows of K and V: a drafter's ring (BlockAttention) or the target's cache (CausalAttention).
//
// qkv T[batch, width, (heads + 2·kv_heads)·head_dim] holds the new rows, at positions start[b] …; cos and sin are
// float32[phases, head_dim/2]; state is T[slots+1, kv_heads, rows, head_dim]; out T[batch, width, heads·head_dim]. A row's
// result depends on no other row and not on how many there are, to the bit. Sums are float32; in 16 bits, the weights of
// the values are rounded to T.
#pragma once

#include <cstdint>

extern "C" {

// Bytes of workspace of either operator; rows is the ring's or the cache's. Negative for sizes that are refused.
int64_t dspark_attention_workspace(int64_t batch, int64_t width, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                   int64_t rows, int64_t ring);

// q and k normed and rotated; each row attends to the ring rows of age (start-1-r) mod rows < valid_len, and to all rows
// of its own block, which are written nowhere.
int dspark_block_attention(const void* qkv, const void* q_norm, const void* k_norm, const float* cos, const float* sin,
                           const void* ring_k, const void* ring_v, const int64_t* start, const int64_t* valid_len,
                           const int64_t* slot, void* out, void* workspace, int64_t batch, int64_t width, int64_t heads,
                           int64_t kv_heads, int64_t head_dim, int64_t rows, int64_t phases, float epsilon, int dtype,
                           void* stream);

// q and k normed (where q_norm and k_norm are not null) and rotated; K and V go to rows start … of the cache, in place,
// those past its end nowhere; then row j attends to rows 0 … start+j.
int dspark_causal_attention(const void* qkv, const void* q_norm, const void* k_norm, const float* cos, const float* sin,
                            void* k_cache, void* v_cache, const int64_t* start, const int64_t* slot, void* out,
                            void* workspace, int64_t batch, int64_t width, int64_t heads, int64_t kv_heads,
                            int64_t head_dim, int64_t rows, int64_t phases, float epsilon, int dtype, void* stream);
}
