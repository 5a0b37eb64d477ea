#include "common/ort_op.h"
#include "slot_rows/kernel.h"

namespace dspark {
namespace {

struct SlotRead {
  static constexpr const char* kName = "SlotRead";
  static constexpr Type kInputs[] = {Type::T, Type::I64, Type::I64};  // state, slot, row
  static constexpr Type kOutputs[] = {Type::T};

  explicit SlotRead(Ort::ConstKernelInfo) {}

  int run(const Call& call) const {
    const auto state = call.shape(0, 3);
    const int64_t batch = call.shape(1, 1)[0], rows = call.shape(2, 1)[0];
    return dspark_slot_read(call.in(0), call.in_i64(1), call.in_i64(2), call.out(0, {batch, rows, state[2]}), batch,
                            rows, state[1], state[2], call.dtype(), call.stream());
  }
};

struct SlotWrite {
  static constexpr const char* kName = "SlotWrite";
  static constexpr Type kInputs[] = {Type::T, Type::T, Type::I64, Type::I64, Type::I64};  // state, rows, start, count, slot
  static constexpr Type kOutputs[] = {Type::T};

  explicit SlotWrite(Ort::ConstKernelInfo) {}

  int run(const Call& call) const {
    const auto state = call.shape(0, 3), rows = call.shape(1, 3);
    if (rows[2] != state[2]) throw std::invalid_argument("rows and state differ in their last dimension");
    return dspark_slot_write(call.state(0, 0), call.in(1), call.in_i64(2), call.in_i64(3), call.in_i64(4), rows[0],
                             rows[1], state[1], state[2], call.dtype(), call.stream());
  }
};

}  // namespace

void register_slot_rows(Ort::CustomOpDomain& domain) {
  register_op<SlotRead>(domain);
  register_op<SlotWrite>(domain);
}

}  // namespace dspark
