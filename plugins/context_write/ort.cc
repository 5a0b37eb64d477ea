#include "common/ort_op.h"
#include "context_write/kernel.h"

namespace dspark {
namespace {

struct ContextWrite {
  static constexpr const char* kName = "ContextWrite";
  // kv, k_norm, cos, sin, start, count, slot, ring_k, ring_v
  static constexpr Type kInputs[] = {Type::T,   Type::T,   Type::F32, Type::F32, Type::I64,
                                     Type::I64, Type::I64, Type::T,   Type::T};
  static constexpr Type kOutputs[] = {Type::T, Type::T};

  explicit ContextWrite(Ort::ConstKernelInfo info) : epsilon_(info.GetAttribute<float>("epsilon")) {}

  int run(const Call& call) const {
    const auto kv = call.shape(0, 3), phases = call.shape(2, 2), ring = call.shape(7, 4);
    if (kv[2] != 2 * ring[1] * ring[3] || 2 * phases[1] != ring[3]) {
      throw std::invalid_argument("kv or the phases don't fit the ring's heads");
    }
    return dspark_context_write(call.in(0), call.in(1), call.in_f32(2), call.in_f32(3), call.in_i64(4), call.in_i64(5),
                                call.in_i64(6), call.state(0, 7), call.state(1, 8), kv[0], kv[1], ring[1], ring[3],
                                ring[2], phases[0], epsilon_, call.dtype(), call.stream());
  }

 private:
  float epsilon_;
};

}  // namespace

void register_context_write(Ort::CustomOpDomain& domain) { register_op<ContextWrite>(domain); }

}  // namespace dspark
