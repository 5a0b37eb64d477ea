#include "markov_chain/kernel.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "markov_chain/pick.cuh"
#include "markov_chain/score.cuh"

using namespace dspark;

namespace {

constexpr int64_t kBatchAtOnce = 64;  // rows that one pass over W2 serves

struct Workspace {
  unsigned long long* best;  // [steps, batch]
  float* state;              // [2, batch, rank]: of the step before, and of this one
  void* mixed;               // T [batch, rank]
};

int64_t aligned(int64_t bytes) { return ceil_div<int64_t>(bytes, 256) * 256; }

Workspace split(void* memory, int64_t batch, int64_t steps, int64_t rank) {
  auto* at = static_cast<unsigned char*>(memory);
  Workspace parts{};
  parts.best = reinterpret_cast<unsigned long long*>(at);
  at += aligned(batch * steps * 8);
  parts.state = reinterpret_cast<float*>(at);
  at += aligned(2 * batch * rank * 4);
  parts.mixed = at;
  return parts;
}

struct Device {
  int multiprocessors;
  int shared;
};

const Device& device() {
  static const Device found = [] {
    Device d{};
    int id = 0;
    cudaGetDevice(&id);
    cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, id);
    d.shared = shared_limit();
    return d;
  }();
  return found;
}

// Whether a kernel was compiled for a GPU that launches one beside the end of another (Hopper or later): it waits then.
template <typename Kernel>
bool waits(Kernel kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}

template <typename T, int Tiles>
int launch_mma(const Step& step, const T* w2, const Mixed<T>& from, cudaStream_t stream) {
  const size_t shared = sizeof(T) * Tiles * 8 * (ceil_div(step.rank, kChunk) * kChunk + kPadding);
  static const cudaError_t raised =
      cudaFuncSetAttribute(score_mma<T, Tiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, device().shared - 2048);
  if (raised != cudaSuccess) return static_cast<int>(raised);
  if (shared > static_cast<size_t>(device().shared - 2048)) return kInvalid;
  // Neighbouring rows in eights, so that all warps have the same share of W2.
  const int64_t blocks = device().multiprocessors * (Tiles <= 4 ? 2 : 1);
  const int64_t warps = blocks * kScoreWarps;
  const int64_t rows = ceil_div<int64_t>(ceil_div(step.vocab, warps), 8) * 8;
  const int64_t used = ceil_div(step.vocab, rows * kScoreWarps);
  cudaLaunchAttribute beside_last{};
  beside_last.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside_last.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(used));
  config.blockDim = dim3(kScoreThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &beside_last;
  // The first step follows no kernel of this chain.
  static const bool beside = waits(score_mma<T, Tiles>);
  config.numAttrs = from.before != nullptr && beside ? 1 : 0;
  return static_cast<int>(cudaLaunchKernelEx(&config, score_mma<T, Tiles>, step, w2, from, rows));
}

template <typename T>
int launch_score(const Step& step, const T* w2, const Mixed<T>& from, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, float>) {
    if (step.rank > 0) {
      if (step.batch <= 8) return launch_mma<T, 1>(step, w2, from, stream);
      if (step.batch <= 16) return launch_mma<T, 2>(step, w2, from, stream);
      if (step.batch <= 32) return launch_mma<T, 4>(step, w2, from, stream);
      return launch_mma<T, 8>(step, w2, from, stream);
    }
  }
  const unsigned blocks = static_cast<unsigned>(device().multiprocessors * 4);
  score_fma<T><<<blocks, kScoreThreads, sizeof(unsigned long long) * step.batch, stream>>>(step, w2, from);
  return launch_status();
}

template <typename T>
int run(const dspark_chain_args& a, int64_t row0, int64_t batch, cudaStream_t stream) {
  const Workspace work = split(a.workspace, batch, a.steps, a.rank);
  const T* w1 = static_cast<const T*>(a.w1);
  const T* hidden = static_cast<const T*>(a.hidden) + row0 * a.steps * a.hidden_size;
  const int64_t* bonus = a.bonus + row0;
  cudaError_t error = cudaMemsetAsync(work.best, 0, 8 * batch * a.steps, stream);
  if (error == cudaSuccess && a.kind == DSPARK_RNN) error = cudaMemsetAsync(work.state, 0, 8 * batch * a.rank, stream);
  if (error != cudaSuccess) return static_cast<int>(error);
  for (int64_t j = 0; j < a.steps; ++j) {
    const int64_t from0 = (row0 * a.steps + j) * a.vocab;
    Step step{};
    step.base = a.base + from0;
    step.noise = a.noise == nullptr ? nullptr : a.noise + from0;
    step.corrected = a.q == nullptr ? nullptr : a.q + from0;
    step.row_stride = a.steps * a.vocab;
    step.vocab = a.vocab;
    step.rank = static_cast<int>(a.kind == DSPARK_PLAIN ? 0 : a.rank);
    step.batch = static_cast<int>(batch);
    step.best = work.best + j * batch;
    const unsigned long long* before = j == 0 ? nullptr : work.best + (j - 1) * batch;
    Mixed<T> from{nullptr, w1, bonus, before};
    if (a.kind == DSPARK_GATED || a.kind == DSPARK_RNN) {
      Mix<T> mix{};
      mix.from = from;
      mix.hidden = hidden + j * a.hidden_size;
      mix.hidden_stride = a.steps * a.hidden_size;
      mix.proj_w = static_cast<const T*>(a.proj_w);
      mix.proj_b = static_cast<const T*>(a.proj_b);
      mix.state = work.state + j % 2 * batch * a.rank;
      mix.state_out = work.state + (j + 1) % 2 * batch * a.rank;
      mix.mixed = static_cast<T*>(work.mixed);
      mix.rank = static_cast<int>(a.rank);
      mix.hidden_size = static_cast<int>(a.hidden_size);
      const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(a.rank, kMixWarps)), static_cast<unsigned>(batch));
      if (a.kind == DSPARK_GATED) {
        mix_gated<T><<<grid, kMixWarps * 32, 0, stream>>>(mix);
      } else {
        mix_rnn<T><<<grid, kMixWarps * 32, 0, stream>>>(mix);
      }
      if (const int status = launch_status(); status != 0) return status;
      from.mixed = mix.mixed;
    }
    if (const int status = launch_score<T>(step, static_cast<const T*>(a.w2), from, stream); status != 0) return status;
    if (a.q != nullptr) {
      const float* uniforms = a.uniforms + row0 * a.steps + j;
      draw<<<static_cast<unsigned>(batch), kDrawThreads, 0, stream>>>(step, a.temperature + row0, uniforms, a.steps);
      if (const int status = launch_status(); status != 0) return status;
    }
  }
  Finish<T> finish{};
  finish.best = work.best;
  finish.bonus = bonus;
  finish.w1 = w1;
  finish.hidden = hidden;
  finish.conf_w = a.conf_w;
  finish.conf_b = a.conf_b;
  finish.ids = a.ids + row0 * a.steps;
  finish.confidence = a.confidence == nullptr ? nullptr : a.confidence + row0 * a.steps;
  finish.batch = static_cast<int>(batch);
  finish.steps = static_cast<int>(a.steps);
  finish.rank = static_cast<int>(a.conf_rows != 0 ? a.rank : 0);
  finish.hidden_size = static_cast<int>(a.hidden_size);
  const dim3 grid(static_cast<unsigned>(a.steps), static_cast<unsigned>(batch));
  finish_chain<T><<<grid, kFinishThreads, 0, stream>>>(finish);
  return launch_status();
}

}  // namespace

extern "C" int64_t dspark_markov_chain_workspace(int64_t batch, int64_t steps, int64_t rank) {
  const int64_t rows = std::min(batch, kBatchAtOnce);
  return aligned(rows * steps * 8) + aligned(2 * rows * rank * 4) + aligned(rows * rank * 4);
}

extern "C" int dspark_markov_chain(const dspark_chain_args* args, int dtype, void* stream) {
  const dspark_chain_args& a = *args;
  const bool weights = a.kind == DSPARK_PLAIN || (a.w1 != nullptr && a.w2 != nullptr && a.rank > 0 && a.rank % 8 == 0);
  const bool projects = a.kind == DSPARK_GATED || a.kind == DSPARK_RNN;
  const bool projection = !projects || (a.proj_w != nullptr && a.proj_b != nullptr);
  const bool confidence = (a.conf_w == nullptr) == (a.confidence == nullptr);
  const bool sizes = a.batch >= 0 && a.steps >= 0 && a.vocab > 0 && a.vocab < 0xffffffff && a.hidden_size > 0;
  if (a.kind < DSPARK_PLAIN || a.kind > DSPARK_RNN || !sizes || !weights || !projection || !confidence) return kInvalid;
  if (a.batch == 0 || a.steps == 0) return 0;
  return with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t row = 0; row < a.batch; row += kBatchAtOnce) {
      const int status = run<T>(a, row, std::min(kBatchAtOnce, a.batch - row), static_cast<cudaStream_t>(stream));
      if (status != 0) return status;
    }
    return 0;
  });
}
