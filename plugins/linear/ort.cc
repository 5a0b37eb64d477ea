#include "common/ort_op.h"
#include "linear/kernel.h"

namespace dspark {
namespace {

// x is [batch, width, inputs], or of any other leading dimensions.
int linear(const Call& call, int64_t mode, bool normed, float epsilon) {
  const size_t w_input = normed ? 2 : 1;
  Call::Shape shape = call.shape(0);
  const auto w = call.shape(w_input, 2);
  if (shape.empty() || shape.back() != w[1] || (mode == DSPARK_LINEAR_SWIGLU && w[0] % 2 != 0)) {
    throw std::invalid_argument("x doesn't fit the weights");
  }
  dspark_linear_args args{};
  args.rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) args.rows *= shape[i];
  args.inputs = w[1];
  args.outputs = mode == DSPARK_LINEAR_SWIGLU ? w[0] / 2 : w[0];
  args.mode = mode;
  args.epsilon = epsilon;
  args.x = call.in(0);
  args.gamma = normed ? call.in(1) : nullptr;
  args.w = call.in(w_input);
  shape.back() = args.outputs;
  if (mode == DSPARK_LINEAR_ADD) {
    if (call.shape(2) != shape) throw std::invalid_argument("the residual doesn't fit the product");
    args.residual = call.in(2);
  }
  args.y = call.out(0, shape);
  args.workspace = call.workspace(dspark_linear_workspace(args.rows, args.inputs, args.outputs, mode, call.dtype()));
  return dspark_linear(&args, call.dtype(), call.stream());
}

struct Linear {
  static constexpr const char* kName = "Linear";
  static constexpr Type kInputs[] = {Type::T, Type::T};
  static constexpr Type kOutputs[] = {Type::T};
  explicit Linear(Ort::ConstKernelInfo) {}
  int run(const Call& call) const { return linear(call, DSPARK_LINEAR, false, 0.f); }
};

struct LinearFloat {
  static constexpr const char* kName = "LinearFloat";
  static constexpr Type kInputs[] = {Type::T, Type::T};
  static constexpr Type kOutputs[] = {Type::F32};
  explicit LinearFloat(Ort::ConstKernelInfo) {}
  int run(const Call& call) const { return linear(call, DSPARK_LINEAR_FLOAT, false, 0.f); }
};

struct LinearAdd {
  static constexpr const char* kName = "LinearAdd";
  static constexpr Type kInputs[] = {Type::T, Type::T, Type::T};
  static constexpr Type kOutputs[] = {Type::T};
  explicit LinearAdd(Ort::ConstKernelInfo) {}
  int run(const Call& call) const { return linear(call, DSPARK_LINEAR_ADD, false, 0.f); }
};

struct NormLinear {
  static constexpr const char* kName = "NormLinear";
  static constexpr Type kInputs[] = {Type::T, Type::T, Type::T};
  static constexpr Type kOutputs[] = {Type::T};
  explicit NormLinear(Ort::ConstKernelInfo info) : epsilon_(info.GetAttribute<float>("epsilon")) {}
  int run(const Call& call) const { return linear(call, DSPARK_LINEAR, true, epsilon_); }
  float epsilon_;
};

struct NormSwiGLU {
  static constexpr const char* kName = "NormSwiGLU";
  static constexpr Type kInputs[] = {Type::T, Type::T, Type::T};
  static constexpr Type kOutputs[] = {Type::T};
  explicit NormSwiGLU(Ort::ConstKernelInfo info) : epsilon_(info.GetAttribute<float>("epsilon")) {}
  int run(const Call& call) const { return linear(call, DSPARK_LINEAR_SWIGLU, true, epsilon_); }
  float epsilon_;
};

}  // namespace

void register_linear(Ort::CustomOpDomain& domain) {
  register_op<Linear>(domain);
  register_op<LinearFloat>(domain);
  register_op<LinearAdd>(domain);
  register_op<NormLinear>(domain);
  register_op<NormSwiGLU>(domain);
}

}  // namespace dspark
