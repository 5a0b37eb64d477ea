#include "linear/kernel.h"

#include <type_traits>

#include "linear/cublas.h"
#include "linear/stream.cuh"

using namespace dspark;

namespace {

int64_t aligned(int64_t bytes) { return ceil_div<int64_t>(bytes, 256) * 256; }

constexpr int kNoCublas = static_cast<int>(cudaErrorSharedObjectInitFailed);

int64_t halves(int64_t mode) { return mode == DSPARK_LINEAR_SWIGLU ? 2 : 1; }

template <typename T, int Tiles, int Halves, int Ahead>
int launch_mma(const Product<T>& p, cudaStream_t stream) {
  constexpr size_t kShared = sizeof(float) * kStreamWarps * Halves * 16 * (Tiles * 8 + 1);
  if constexpr (kShared > (48u << 10)) {
    static const cudaError_t raised = cudaFuncSetAttribute(stream_mma<T, Tiles, Halves, Ahead>,
                                                           cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (raised != cudaSuccess) return static_cast<int>(raised);
  }
  const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(p.outputs, 16));
  stream_mma<T, Tiles, Halves, Ahead><<<blocks, kStreamThreads, kShared, stream>>>(p);
  return launch_status();
}

template <typename T, int Tiles, int AheadOne, int AheadTwo>
int launch_tiles(const Product<T>& p, cudaStream_t stream) {
  if (p.mode == DSPARK_LINEAR_SWIGLU) return launch_mma<T, Tiles, 2, AheadTwo>(p, stream);
  return launch_mma<T, Tiles, 1, AheadOne>(p, stream);
}

template <typename T>
int launch_stream(const Product<T>& p, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, float>) {
    if (p.inputs % 8 == 0) {
      if (p.rows <= 8) return launch_tiles<T, 1, 8, 4>(p, stream);
      if (p.rows <= 16) return launch_tiles<T, 2, 8, 4>(p, stream);
      if (p.rows <= 32) return launch_tiles<T, 4, 8, 4>(p, stream);
      return launch_tiles<T, 8, 8, 4>(p, stream);
    }
  }
  const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(p.outputs, kStreamWarps)), static_cast<unsigned>(p.rows));
  stream_fma<T><<<grid, kStreamThreads, 0, stream>>>(p);
  return launch_status();
}

template <typename T>
constexpr cudaDataType library_type() {
  return std::is_same_v<T, float> ? CUDA_R_32F : std::is_same_v<T, __half> ? CUDA_R_16F : CUDA_R_16BF;
}

// In 16 bits cuBLAS streams weights faster than the kernel here. In float32 the order of a row's sum counts for more than
// speed, and only the kernel's is the same for any number of rows.
template <typename T>
bool by_library(int64_t rows) {
  return !std::is_same_v<T, float> || rows > kStreamRows;
}

template <typename T>
int run(const dspark_linear_args& a, cudaStream_t stream) {
  auto* memory = static_cast<unsigned char*>(a.workspace);
  Product<T> p{static_cast<const T*>(a.x), static_cast<const T*>(a.w), static_cast<const T*>(a.residual), a.y,
               static_cast<int>(a.rows), static_cast<int>(a.inputs), a.outputs, static_cast<int>(a.mode)};
  if (a.gamma != nullptr) {
    T* normed = reinterpret_cast<T*>(memory);
    memory += aligned(a.rows * a.inputs * sizeof(T));
    const auto blocks = static_cast<unsigned>(a.rows);
    norm_rows<T><<<blocks, kNormThreads, 0, stream>>>(p.x, static_cast<const T*>(a.gamma), normed, p.inputs, a.epsilon);
    if (const int status = launch_status(); status != 0) return status;
    p.x = normed;
  }
  Cublas* cublas = by_library<T>(a.rows) ? Cublas::get() : nullptr;
  if (cublas == nullptr) return a.rows <= kStreamRows ? launch_stream(p, stream) : kNoCublas;
  void* scratch = memory;
  memory += Cublas::kWorkspace;
  // Where nothing follows, the library writes the result itself.
  const bool whole = a.mode == DSPARK_LINEAR_FLOAT || a.mode == DSPARK_LINEAR;
  void* product = whole ? a.y : memory;
  const cudaDataType made = a.mode == DSPARK_LINEAR ? library_type<T>() : CUDA_R_32F;
  const bool done = cublas->product(p.x, p.w, product, a.rows, a.inputs, halves(a.mode) * a.outputs, library_type<T>(),
                                    made, scratch, stream);
  if (!done) return static_cast<int>(cudaErrorUnknown);
  if (whole) return 0;
  const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(a.outputs, 256)), static_cast<unsigned>(a.rows));
  finish_rows<T><<<grid, 256, 0, stream>>>(p, static_cast<const float*>(product));
  return launch_status();
}

}  // namespace

extern "C" int64_t dspark_linear_workspace(int64_t rows, int64_t inputs, int64_t outputs, int64_t mode, int dtype) {
  const int64_t item = dtype == kFloat32 ? 4 : 2;
  int64_t bytes = aligned(rows * inputs * item);
  if (dtype != kFloat32 || rows > kStreamRows) {
    bytes += Cublas::kWorkspace;
    if (mode == DSPARK_LINEAR_ADD || mode == DSPARK_LINEAR_SWIGLU) bytes += aligned(4 * rows * halves(mode) * outputs);
  }
  return bytes;
}

extern "C" int dspark_linear(const dspark_linear_args* args, int dtype, void* stream) {
  const dspark_linear_args& a = *args;
  const bool sizes = a.rows >= 0 && a.rows < 65536 && a.inputs > 0 && a.inputs < (1 << 30) && a.outputs > 0;
  const bool residual = (a.mode == DSPARK_LINEAR_ADD) == (a.residual != nullptr);
  if (!sizes || !residual || a.mode < DSPARK_LINEAR || a.mode > DSPARK_LINEAR_SWIGLU) return kInvalid;
  if (a.rows == 0) return 0;
  return with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return run<T>(a, static_cast<cudaStream_t>(stream));
  });
}
