// What every kernel needs: the three precisions, loads of 16 bytes, sums over a warp and a block.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace dspark {

// As the C interface numbers them.
enum DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);

template <typename T>
struct Tag {
  using type = T;
};

// Calls `launch(Tag<T>{})` for the type that `dtype` names, and returns what it returns.
template <typename F>
int with_dtype(int dtype, F&& launch) {
  switch (dtype) {
    case kFloat32:
      return launch(Tag<float>{});
    case kFloat16:
      return launch(Tag<__half>{});
    case kBFloat16:
      return launch(Tag<__nv_bfloat16>{});
    default:
      return kInvalid;
  }
}

inline int launch_status() { return static_cast<int>(cudaGetLastError()); }

// Bytes of shared memory that a thread block may have, on the device in use: at least `kLeastShared` from sm_80 on.
// DSPARK_SHARED_LIMIT, for tests, takes a large GPU for a small one.
constexpr int kLeastShared = 99 << 10;
inline int shared_limit() {
#ifdef DSPARK_SHARED_LIMIT
  return DSPARK_SHARED_LIMIT;
#else
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
#endif
}

template <typename I>
__host__ __device__ constexpr I ceil_div(I a, I b) {
  return (a + b - 1) / b;
}

// The floor kind: 0 … n-1 for negative x too.
__host__ __device__ inline int64_t floor_mod(int64_t x, int64_t n) {
  const int64_t r = x % n;
  return r < 0 ? r + n : r;
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Two neighbours of a 16-bit type in the register that tensor cores take; `lo` has the lower address.
template <typename T>
__device__ inline uint32_t pack2(float lo, float hi);
template <>
__device__ inline uint32_t pack2<__half>(float lo, float hi) {
  const __half2 pair = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ inline uint32_t pack2<__nv_bfloat16>(float lo, float hi) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// D += A·B of 16×16 by 16×8 with float32 sums, A row-major, B column-major. Lane l holds, with g = l/4 and t = l%4,
// a[0]: A[g][2t,2t+1], a[1]: A[g+8][2t…], a[2]: A[g][2t+8…], a[3]: A[g+8][2t+8…]; b[0]: B[2t,2t+1][g], b[1]: B[2t+8…][g];
// d[0,1]: D[g][2t,2t+1], d[2,3]: D[g+8][2t,2t+1].
template <typename T>
__device__ inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma_16816<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma_16816<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes from global into shared memory, asynchronously; where `valid` is false, 16 bytes of zero without a read.
__device__ inline void copy_async_16(void* shared, const void* global, bool valid = true) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global), "r"(bytes) : "memory");
}
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int Pending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// Every lane gets the sum, made in the same order whatever the lane.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Sum over a block of whole warps, 1024 threads at most; every thread gets it. `scratch` holds 32 floats of shared memory,
// and may be used again at once.
__device__ inline float block_sum(float x, float* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_sum(x);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = warp_sum(lane < warps ? scratch[lane] : 0.f);
  __syncthreads();
  return x;
}

}  // namespace dspark
