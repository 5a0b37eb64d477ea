// The rest of a step and of the chain: what mixes W1's row with the hidden state, drawing a token, and the results.
#pragma once

#include "markov_chain/score.cuh"

namespace dspark {

constexpr int kMixWarps = 8;
constexpr int kDrawThreads = 1024;
constexpr int kFinishThreads = 128;

__device__ inline float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

template <typename T>
struct Mix {
  Mixed<T> from;
  const T* hidden;  // row b of this step at b * hidden_stride
  int64_t hidden_stride;
  const T* proj_w;
  const T* proj_b;
  const float* state;  // [batch, rank]
  float* state_out;
  T* mixed;  // [batch, rank]
  int rank;
  int hidden_size;
};

// A lane's part of the product of x with a row of weights.
template <typename T, typename X>
__device__ inline float lane_dot(const T* weights, const X* x, int count) {
  float sum = 0.f;
  for (int k = threadIdx.x % 32; k < count; k += 32) sum += to_float(weights[k]) * to_float(x[k]);
  return sum;
}

// mixed = sigmoid(proj [h; W1 row]) * W1 row; a warp an element.
template <typename T>
__global__ void mix_gated(Mix<T> mix) {
  const int i = blockIdx.x * kMixWarps + threadIdx.x / 32, row = blockIdx.y;
  if (i >= mix.rank) return;
  const T* w1 = mixed_row(mix.from, row, mix.rank);
  const T* weights = mix.proj_w + static_cast<int64_t>(i) * (mix.hidden_size + mix.rank);
  float sum = lane_dot(weights, mix.hidden + row * mix.hidden_stride, mix.hidden_size);
  sum = warp_sum(sum + lane_dot(weights + mix.hidden_size, w1, mix.rank));
  if (threadIdx.x % 32 == 0) {
    const float gate = sigmoid(sum + to_float(mix.proj_b[i]));
    mix.mixed[static_cast<int64_t>(row) * mix.rank + i] = from_float<T>(gate * to_float(w1[i]));
  }
}

// g, c, o = proj [s; W1 row; h]; s = sigmoid(g) s + (1 - sigmoid(g)) tanh(c); mixed = tanh(o); a warp an element.
template <typename T>
__global__ void mix_rnn(Mix<T> mix) {
  const int i = blockIdx.x * kMixWarps + threadIdx.x / 32, row = blockIdx.y;
  if (i >= mix.rank) return;
  const T* w1 = mixed_row(mix.from, row, mix.rank);
  const float* state = mix.state + static_cast<int64_t>(row) * mix.rank;
  float parts[3];
#pragma unroll
  for (int part = 0; part < 3; ++part) {
    const int64_t output = static_cast<int64_t>(part) * mix.rank + i;
    const T* weights = mix.proj_w + output * (2 * mix.rank + mix.hidden_size);
    float sum = lane_dot(weights, state, mix.rank) + lane_dot(weights + mix.rank, w1, mix.rank);
    sum += lane_dot(weights + 2 * mix.rank, mix.hidden + row * mix.hidden_stride, mix.hidden_size);
    parts[part] = warp_sum(sum) + to_float(mix.proj_b[output]);
  }
  if (threadIdx.x % 32 == 0) {
    const int64_t at = static_cast<int64_t>(row) * mix.rank + i;
    const float gate = sigmoid(parts[0]);
    mix.state_out[at] = gate * state[i] + (1.f - gate) * tanhf(parts[1]);
    mix.mixed[at] = from_float<T>(tanhf(parts[2]));
  }
}

// Logits of a row into q in place, and for rows that draw the token where the running sum of q, in float64, passes
// uniform times its total. A block a row; a thread's logits are neighbours, so that the running sum has one order.
__global__ void __launch_bounds__(kDrawThreads)
    draw(Step step, const float* __restrict__ temperature, const float* __restrict__ uniforms, int64_t uniform_stride) {
  __shared__ double sums[kDrawThreads];
  __shared__ float scratch[32];
  __shared__ double all_q;
  __shared__ unsigned long long passed;
  const int row = blockIdx.x, thread = threadIdx.x;
  float* q = step.corrected + row * step.row_stride;
  const float t = temperature[row], inverse = t > 0.f ? 1.f / t : 1.f;
  float top = -INFINITY;
  for (int64_t v = thread; v < step.vocab; v += kDrawThreads) top = fmaxf(top, q[v]);
  top = warp_max(top);
  if (thread % 32 == 0) scratch[thread / 32] = top;
  if (thread == 0) passed = 0;
  __syncthreads();
  top = warp_max(scratch[thread % 32]);
  __syncthreads();
  const int64_t share = ceil_div<int64_t>(step.vocab, kDrawThreads);
  const int64_t begin = min(thread * share, step.vocab), end = min(begin + share, step.vocab);
  double sum = 0.;
  for (int64_t v = begin; v < end; ++v) {
    const float e = expf((q[v] - top) * inverse);
    q[v] = e;
    sum += e;
  }
  sums[thread] = sum;
  __syncthreads();
  // Few enough to add one after another, in the order that a running sum has.
  if (thread == 0) {
    double total = 0.;
    for (int i = 0; i < kDrawThreads; ++i) total += sums[i];
    sums[0] = total;
  }
  __syncthreads();
  const double total = sums[0];
  __syncthreads();
  double mine = 0.;
  for (int64_t v = begin; v < end; ++v) {
    const float p = static_cast<float>(q[v] / total);
    q[v] = p;
    mine += p;
  }
  if (t <= 0.f) return;  // the whole block
  sums[thread] = mine;
  __syncthreads();
  if (thread == 0) {
    double before = 0.;
    for (int i = 0; i < kDrawThreads; ++i) {
      const double next = before + sums[i];
      sums[i] = before;
      before = next;
    }
    all_q = before;  // of the rounded q, which the uniform is a share of
  }
  __syncthreads();
  const double threshold = static_cast<double>(uniforms[row * uniform_stride]) * all_q;
  double cdf = sums[thread];
  unsigned long long count = 0;
  for (int64_t v = begin; v < end; ++v) {
    cdf += q[v];
    count += cdf <= threshold;
  }
  if (count > 0) atomicAdd(&passed, count);
  __syncthreads();
  if (thread == 0) {
    const int64_t token = min(static_cast<int64_t>(passed), step.vocab - 1);
    step.best[row] = best_key(0.f, static_cast<uint32_t>(token));
  }
}

template <typename T>
struct Finish {
  const unsigned long long* best;  // [steps, batch]
  const int64_t* bonus;
  const T* w1;
  const T* hidden;  // [batch, steps, hidden_size]
  const float* conf_w;
  const float* conf_b;
  int64_t* ids;       // [batch, steps]
  float* confidence;  // [batch, steps], or null
  int batch;
  int steps;
  int rank;  // of W1's rows in the confidence; 0: they are not in it
  int hidden_size;
};

// Ids of every step, and how sure the drafter is of each: a block a token.
template <typename T>
__global__ void __launch_bounds__(kFinishThreads) finish_chain(Finish<T> finish) {
  __shared__ float scratch[32];
  const int j = blockIdx.x, row = blockIdx.y;
  const int64_t at = static_cast<int64_t>(row) * finish.steps + j;
  if (threadIdx.x == 0) finish.ids[at] = best_id(finish.best[j * finish.batch + row]);
  if (finish.confidence == nullptr) return;
  const T* hidden = finish.hidden + at * finish.hidden_size;
  float sum = 0.f;
  for (int k = threadIdx.x; k < finish.hidden_size; k += kFinishThreads) sum += finish.conf_w[k] * to_float(hidden[k]);
  if (finish.rank > 0) {
    const int64_t token = j == 0 ? finish.bonus[row] : best_id(finish.best[(j - 1) * finish.batch + row]);
    const T* w1 = finish.w1 + token * finish.rank;
    const float* weights = finish.conf_w + finish.hidden_size;
    for (int k = threadIdx.x; k < finish.rank; k += kFinishThreads) sum += weights[k] * to_float(w1[k]);
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) finish.confidence[at] = sum + finish.conf_b[0];
}

}  // namespace dspark
