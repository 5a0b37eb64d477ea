#include "common/ort_op.h"
#include "markov_chain/kernel.h"

namespace dspark {
namespace {

// Inputs: base, hidden, bonus, temperature, uniforms, noise, the kind's weights, and with Confidence conf_w, conf_b.
template <int Kind, bool Confidence>
struct Draft {
  static constexpr int kWeights = Kind == DSPARK_PLAIN ? 0 : Kind == DSPARK_MARKOV ? 2 : 4;
  static constexpr const char* kNames[] = {"DraftPlain", "DraftPlainC", "DraftMarkov", "DraftMarkovC",
                                           "DraftGated", "DraftGatedC", "DraftRnn",    "DraftRnnC"};
  static constexpr const char* kName = kNames[2 * Kind + (Confidence ? 1 : 0)];
  struct Inputs {
    Type types[6 + kWeights + (Confidence ? 2 : 0)];
    constexpr Type operator[](size_t i) const { return types[i]; }
    constexpr size_t size() const { return std::size(types); }
  };
  static constexpr Inputs inputs() {
    Inputs found{};
    size_t at = 0;
    for (Type type : {Type::F32, Type::T, Type::I64, Type::F32, Type::F32, Type::F32}) found.types[at++] = type;
    for (int i = 0; i < kWeights; ++i) found.types[at++] = Type::T;
    if (Confidence) found.types[at++] = Type::F32;
    if (Confidence) found.types[at++] = Type::F32;
    return found;
  }
  static constexpr Inputs kInputs = inputs();
  struct Outputs {
    constexpr Type operator[](size_t i) const { return i == 0 ? Type::I64 : Type::F32; }
    constexpr size_t size() const { return Confidence ? 3 : 2; }
  };
  static constexpr Outputs kOutputs{};

  explicit Draft(Ort::ConstKernelInfo info) : sample_(info.GetAttribute<int64_t>("sample") != 0) {}

  int run(const Call& call) const {
    const auto base = call.shape(0, 3), hidden = call.shape(1, 3), noise = call.shape(5, 3);
    dspark_chain_args args{};
    args.base = call.in_f32(0);
    args.hidden = call.in(1);
    args.bonus = call.in_i64(2);
    args.temperature = call.in_f32(3);
    args.uniforms = call.in_f32(4);
    args.batch = base[0];
    args.steps = base[1];
    args.vocab = base[2];
    args.hidden_size = hidden[2];
    args.kind = Kind;
    if (hidden[0] != base[0] || hidden[1] != base[1] || (noise[2] != 1 && noise[2] != base[2])) {
      throw std::invalid_argument("hidden or noise don't fit base");
    }
    // A vocabulary of one token needs no noise either.
    args.noise = noise[2] == 1 ? nullptr : call.in_f32(5);
    if (kWeights >= 2) {
      const auto w1 = call.shape(6, 2), w2 = call.shape(7, 2);
      args.rank = w1[1];
      args.w1 = call.in(6);
      args.w2 = call.in(7);
      if (w2 != w1 || w1[0] != base[2]) throw std::invalid_argument("W1 or W2 don't fit the vocabulary");
    }
    if (kWeights == 4) {
      args.proj_w = call.in(8);
      args.proj_b = call.in(9);
    }
    args.ids = call.out_i64(0, {base[0], base[1]});
    float* q = call.out_f32(1, {base[0], base[1], sample_ ? base[2] : 1});
    args.q = sample_ ? q : nullptr;
    if (Confidence) {
      const int64_t width = call.shape(6 + kWeights, 2)[1];
      if (width != hidden[2] && width != hidden[2] + args.rank) throw std::invalid_argument("conf_w doesn't fit");
      args.conf_rows = args.rank > 0 && width == hidden[2] + args.rank ? 1 : 0;
      args.conf_w = call.in_f32(6 + kWeights);
      args.conf_b = call.in_f32(7 + kWeights);
      args.confidence = call.out_f32(2, {base[0], base[1]});
    }
    args.workspace = call.workspace(dspark_markov_chain_workspace(args.batch, args.steps, args.rank));
    return dspark_markov_chain(&args, call.dtype(), call.stream());
  }

 private:
  bool sample_;
};

template <int Kind>
void register_kind(Ort::CustomOpDomain& domain) {
  register_op<Draft<Kind, false>>(domain);
  register_op<Draft<Kind, true>>(domain);
}

}  // namespace

void register_markov_chain(Ort::CustomOpDomain& domain) {
  register_kind<DSPARK_PLAIN>(domain);
  register_kind<DSPARK_MARKOV>(domain);
  register_kind<DSPARK_GATED>(domain);
  register_kind<DSPARK_RNN>(domain);
}

}  // namespace dspark
