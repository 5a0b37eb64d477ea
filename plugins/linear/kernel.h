// Products with weights as they lie, [outputs, inputs], and what stands before and after them in a decoder layer.
#pragma once

#include <cstdint>

extern "C" {

enum dspark_linear_mode {
  DSPARK_LINEAR = 0,        // y = x wᵀ
  DSPARK_LINEAR_FLOAT = 1,  // the same in float32
  DSPARK_LINEAR_ADD = 2,    // y = residual + x wᵀ
  DSPARK_LINEAR_SWIGLU = 3  // y = silu(g) · u, g and u being the halves of x wᵀ
};

// T is the precision that the launcher is told. Sums are float32; y is rounded once.
typedef struct {
  const void* x;         // T [rows, inputs]
  const void* gamma;     // T [inputs]: x is RMS-normed by it first; null for none
  const void* w;         // T [outputs, inputs], of DSPARK_LINEAR_SWIGLU [2 outputs, inputs]
  const void* residual;  // T [rows, outputs] of DSPARK_LINEAR_ADD
  void* y;               // T [rows, outputs], float32 of DSPARK_LINEAR_FLOAT
  void* workspace;       // dspark_linear_workspace bytes, aligned to 256
  int64_t rows, inputs, outputs;
  int64_t mode;
  float epsilon;
} dspark_linear_args;

int64_t dspark_linear_workspace(int64_t rows, int64_t inputs, int64_t outputs, int64_t mode, int dtype);
int dspark_linear(const dspark_linear_args* args, int dtype, void* stream);
}
