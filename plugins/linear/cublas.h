// cuBLAS for many rows, found when it is first needed: whoever loads these kernels has it, under one name or another.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <library_types.h>

#include <cstdint>
#include <mutex>

namespace dspark {

// As cublas_v2.h declares them, whose names and numbers are cuBLAS's binary interface: so these kernels build with the
// compiler alone.
namespace cublas {
using Handle = struct Context*;
constexpr int kSuccess = 0, kNo = 0, kTransposed = 1, kFloat = 68, kFloatPedantic = 69, kDefault = -1;
using Create = int (*)(Handle*);
using SetStream = int (*)(Handle, cudaStream_t);
using SetWorkspace = int (*)(Handle, void*, size_t);
using Gemm = int (*)(Handle, int, int, int, int, int, const void*, const void*, cudaDataType, int, const void*,
                     cudaDataType, int, const void*, void*, cudaDataType, int, int, int);
}  // namespace cublas

class Cublas {
 public:
  // Null where there is no cuBLAS.
  static Cublas* get() {
    static Cublas* const found = make();
    return found;
  }

  // y [rows, outputs] = x [rows, inputs] wᵀ, w [outputs, inputs], both of `type`, y of `made`. From any thread.
  bool product(const void* x, const void* w, void* y, int64_t rows, int64_t inputs, int64_t outputs, cudaDataType type,
               cudaDataType made, void* workspace, cudaStream_t stream) {
    const float one = 1.f, none = 0.f;
    const int m = static_cast<int>(outputs), n = static_cast<int>(rows), k = static_cast<int>(inputs);
    // Pedantic in float32: no TF32.
    const int compute = type == CUDA_R_32F ? cublas::kFloatPedantic : cublas::kFloat;
    // Stream and workspace are the handle's: no other thread's may come between them and the product.
    const std::lock_guard<std::mutex> lock(mutex_);
    return set_stream_(handle_, stream) == cublas::kSuccess &&
           set_workspace_(handle_, workspace, kWorkspace) == cublas::kSuccess &&
           gemm_(handle_, cublas::kTransposed, cublas::kNo, m, n, k, &one, w, type, k, x, type, k, &none, y, made, m,
                 compute, cublas::kDefault) == cublas::kSuccess;
  }

  static constexpr size_t kWorkspace = 32u << 20;  // what cuBLAS recommends for Hopper

 private:
  static Cublas* make() {
    void* library = nullptr;
    for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
      library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library != nullptr) break;
    }
    if (library == nullptr) return nullptr;
    auto* made = new Cublas;  // as long as the process: captured graphs may outlive everything else
    const auto create = reinterpret_cast<cublas::Create>(dlsym(library, "cublasCreate_v2"));
    made->set_stream_ = reinterpret_cast<cublas::SetStream>(dlsym(library, "cublasSetStream_v2"));
    made->set_workspace_ = reinterpret_cast<cublas::SetWorkspace>(dlsym(library, "cublasSetWorkspace_v2"));
    made->gemm_ = reinterpret_cast<cublas::Gemm>(dlsym(library, "cublasGemmEx"));
    const bool complete = create != nullptr && made->set_stream_ != nullptr && made->set_workspace_ != nullptr &&
                          made->gemm_ != nullptr && create(&made->handle_) == cublas::kSuccess;
    return complete ? made : nullptr;
  }

  std::mutex mutex_;
  cublas::Handle handle_ = nullptr;
  cublas::SetStream set_stream_ = nullptr;
  cublas::SetWorkspace set_workspace_ = nullptr;
  cublas::Gemm gemm_ = nullptr;
};

}  // namespace dspark
