#include "best_token/kernel.h"
#include "common/ort_op.h"

namespace dspark {
namespace {

struct BestToken {
  static constexpr const char* kName = "BestToken";
  static constexpr Type kInputs[] = {Type::F32};  // logits
  static constexpr Type kOutputs[] = {Type::I64, Type::F32};

  explicit BestToken(Ort::ConstKernelInfo) {}

  int run(const Call& call) const {
    Call::Shape rows = call.shape(0);
    if (rows.empty()) throw std::invalid_argument("logits have no dimensions");
    const int64_t vocab = rows.back();
    rows.pop_back();
    int64_t count = 1;
    for (int64_t size : rows) count *= size;
    return dspark_best_token(call.in_f32(0), call.out_i64(0, rows), call.out_f32(1, rows), count, vocab, call.stream());
  }
};

}  // namespace

void register_best_token(Ort::CustomOpDomain& domain) { register_plain_op<BestToken>(domain); }

}  // namespace dspark
