// BestToken: the greatest logit of a row, and which token has it.
#pragma once

#include <cstdint>

extern "C" {

// ids int64[rows] and best float32[rows] of logits float32[rows, vocab]: of equals the first, and NaN before all else.
int dspark_best_token(const float* logits, int64_t* ids, float* best, int64_t rows, int64_t vocab, void* stream);
}
