// The Markov chain of a draft: token after token, base logits plus a bias made from the token before.
#pragma once

#include <cstdint>

extern "C" {

enum dspark_chain_kind { DSPARK_PLAIN = 0, DSPARK_MARKOV = 1, DSPARK_GATED = 2, DSPARK_RNN = 3 };

// T is the precision that the launcher is told. Token j of row b is the argmax of base[b, j] + noise[b, j] + W2·mixed,
// where mixed is made of W1[token before] as `kind` says (builder/graphs/ops.py, markov_chain), or drawn from their
// softmax at temperature[b] if that is above 0.
typedef struct {
  const float* base;         // [batch, steps, vocab]
  const void* hidden;        // T [batch, steps, hidden_size]
  const int64_t* bonus;      // [batch]: the token before the first
  const float* temperature;  // [batch]
  const float* uniforms;     // [batch, steps]
  const float* noise;        // [batch, steps, vocab], or null for none
  const void* w1;            // T [vocab, rank]; null for DSPARK_PLAIN, as all that follow
  const void* w2;            // T [vocab, rank]
  const void* proj_w;        // T [rank, hidden_size + rank] of DSPARK_GATED, [3 rank, 2 rank + hidden_size] of DSPARK_RNN
  const void* proj_b;        // T
  const float* conf_w;       // [hidden_size], or [hidden_size + rank]: then W1's rows are in it; null for no confidence
  const float* conf_b;       // [1]
  int64_t* ids;              // out: [batch, steps]
  float* q;                  // out: [batch, steps, vocab], the probabilities drawn from; null: every row takes the best
  float* confidence;         // out: [batch, steps] logits
  void* workspace;           // dspark_markov_chain_workspace bytes, aligned to 256
  int64_t batch, steps, vocab, rank, hidden_size;
  int64_t conf_rows;  // 1 if conf_w has a part for W1's rows
  int64_t kind;
} dspark_chain_args;

int64_t dspark_markov_chain_workspace(int64_t batch, int64_t steps, int64_t rank);
int dspark_markov_chain(const dspark_chain_args* args, int dtype, void* stream);
}
