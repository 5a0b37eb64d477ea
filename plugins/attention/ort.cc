#include "attention/kernel.h"
#include "common/ort_op.h"

namespace dspark {
namespace {

// Sizes that the three operators share; qkv is input 0, and `state` the input that holds K.
struct Sizes {
  int64_t batch, width, heads, kv_heads, head_dim, rows, phases;

  Sizes(const Call& call, int64_t num_heads, size_t cos, size_t state) : heads(num_heads) {
    const auto qkv = call.shape(0, 3), tables = call.shape(cos, 2), k = call.shape(state, 4);
    batch = qkv[0], width = qkv[1], kv_heads = k[1], rows = k[2], head_dim = k[3], phases = tables[0];
    if (qkv[2] != (heads + 2 * kv_heads) * head_dim || 2 * tables[1] != head_dim) {
      throw std::invalid_argument("qkv or the phases don't fit the state's heads");
    }
  }

  void* out(const Call& call) const { return call.out(0, {batch, width, heads * head_dim}); }

  void* workspace(const Call& call, bool ring) const {
    const int64_t bytes = dspark_attention_workspace(batch, width, heads, kv_heads, head_dim, rows, ring ? 1 : 0);
    if (bytes < 0) throw std::invalid_argument("sizes of attention that no kernel takes");
    return call.workspace(static_cast<size_t>(bytes));
  }
};

struct BlockAttention {
  static constexpr const char* kName = "BlockAttention";
  // qkv, q_norm, k_norm, cos, sin, ring_k, ring_v, start, valid_len, slot
  static constexpr Type kInputs[] = {Type::T, Type::T, Type::T,   Type::F32, Type::F32,
                                     Type::T, Type::T, Type::I64, Type::I64, Type::I64};
  static constexpr Type kOutputs[] = {Type::T};

  explicit BlockAttention(Ort::ConstKernelInfo info)
      : heads_(info.GetAttribute<int64_t>("num_heads")), epsilon_(info.GetAttribute<float>("epsilon")) {}

  int run(const Call& call) const {
    const Sizes n(call, heads_, 3, 5);
    return dspark_block_attention(call.in(0), call.in(1), call.in(2), call.in_f32(3), call.in_f32(4), call.in(5),
                                  call.in(6), call.in_i64(7), call.in_i64(8), call.in_i64(9), n.out(call),
                                  n.workspace(call, true), n.batch, n.width, n.heads, n.kv_heads, n.head_dim, n.rows,
                                  n.phases, epsilon_, call.dtype(), call.stream());
  }

 private:
  int64_t heads_;
  float epsilon_;
};

// Inputs from `tables` on: cos, sin, k_cache, v_cache, start, slot.
int run_causal(const Call& call, int64_t heads, size_t tables, const void* q_norm, const void* k_norm, float epsilon) {
  const Sizes n(call, heads, tables, tables + 2);
  return dspark_causal_attention(call.in(0), q_norm, k_norm, call.in_f32(tables), call.in_f32(tables + 1),
                                 call.state(1, tables + 2), call.state(2, tables + 3), call.in_i64(tables + 4),
                                 call.in_i64(tables + 5), n.out(call), n.workspace(call, false), n.batch, n.width,
                                 n.heads, n.kv_heads, n.head_dim, n.rows, n.phases, epsilon, call.dtype(),
                                 call.stream());
}

struct CausalAttention {
  static constexpr const char* kName = "CausalAttention";
  // qkv, cos, sin, k_cache, v_cache, start, slot
  static constexpr Type kInputs[] = {Type::T, Type::F32, Type::F32, Type::T, Type::T, Type::I64, Type::I64};
  static constexpr Type kOutputs[] = {Type::T, Type::T, Type::T};

  explicit CausalAttention(Ort::ConstKernelInfo info) : heads_(info.GetAttribute<int64_t>("num_heads")) {}

  int run(const Call& call) const { return run_causal(call, heads_, 1, nullptr, nullptr, 0.f); }

 private:
  int64_t heads_;
};

struct NormedCausalAttention {
  static constexpr const char* kName = "NormedCausalAttention";
  // qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, start, slot
  static constexpr Type kInputs[] = {Type::T, Type::T, Type::T,   Type::F32, Type::F32,
                                     Type::T, Type::T, Type::I64, Type::I64};
  static constexpr Type kOutputs[] = {Type::T, Type::T, Type::T};

  explicit NormedCausalAttention(Ort::ConstKernelInfo info)
      : heads_(info.GetAttribute<int64_t>("num_heads")), epsilon_(info.GetAttribute<float>("epsilon")) {}

  int run(const Call& call) const { return run_causal(call, heads_, 3, call.in(1), call.in(2), epsilon_); }

 private:
  int64_t heads_;
  float epsilon_;
};

}  // namespace

void register_attention(Ort::CustomOpDomain& domain) {
  register_op<BlockAttention>(domain);
  register_op<CausalAttention>(domain);
  register_op<NormedCausalAttention>(domain);
}

}  // namespace dspark
