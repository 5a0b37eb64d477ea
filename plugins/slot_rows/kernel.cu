#include "slot_rows/kernel.h"

#include "common/cuda_util.cuh"

namespace dspark {
namespace {

constexpr int kThreads = 256;

// A block copies a part of one row. Unit is the widest type that every row begins on a boundary of.
template <typename Unit>
__global__ void read_rows(const Unit* state, const int64_t* slot, const int64_t* row, Unit* out, int64_t rows,
                          int64_t state_rows, int64_t width) {
  const int64_t column = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  const int64_t b = blockIdx.x / rows, i = blockIdx.x % rows;
  if (column >= width) return;
  const int64_t from = row[i];
  if (from < 0 || from >= state_rows) return;
  out[(b * rows + i) * width + column] = state[(slot[b] * state_rows + from) * width + column];
}

template <typename Unit>
__global__ void write_rows(Unit* state, const Unit* rows, const int64_t* start, const int64_t* count,
                           const int64_t* slot, int64_t row_count, int64_t state_rows, int64_t width) {
  const int64_t column = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  const int64_t b = blockIdx.x / row_count, j = blockIdx.x % row_count;
  const int64_t to = start[b] + j;
  if (column >= width || j >= count[b] || to < 0 || to >= state_rows) return;
  state[(slot[b] * state_rows + to) * width + column] = rows[(b * row_count + j) * width + column];
}

// Calls `launch` with the widest unit that divides rows of `bytes` bytes; their addresses are multiples of 256, as
// allocators give them.
template <typename F>
int with_unit(int64_t bytes, F&& launch) {
  if (bytes % 16 == 0) return launch(Tag<int4>{}, bytes / 16);
  if (bytes % 4 == 0) return launch(Tag<int32_t>{}, bytes / 4);
  return launch(Tag<int16_t>{}, bytes / 2);
}

int itemsize(int dtype) { return dtype == kFloat32 ? 4 : dtype == kFloat16 || dtype == kBFloat16 ? 2 : 0; }

bool valid(int64_t batch, int64_t rows, int64_t state_rows, int64_t width, int dtype) {
  return batch >= 0 && rows >= 0 && state_rows > 0 && width > 0 && batch * rows < (int64_t{1} << 31) &&
         itemsize(dtype) > 0 && ceil_div(width, int64_t{kThreads}) < 65536;
}

}  // namespace
}  // namespace dspark

using namespace dspark;

extern "C" int dspark_slot_read(const void* state, const int64_t* slot, const int64_t* row, void* out, int64_t batch,
                                int64_t rows, int64_t state_rows, int64_t width, int dtype, void* stream) {
  if (!valid(batch, rows, state_rows, width, dtype)) return kInvalid;
  if (batch * rows == 0) return 0;
  return with_unit(width * itemsize(dtype), [&](auto tag, int64_t units) {
    using Unit = typename decltype(tag)::type;
    const dim3 grid(static_cast<unsigned>(batch * rows), static_cast<unsigned>(ceil_div(units, int64_t{kThreads})));
    read_rows<Unit><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const Unit*>(state), slot, row, static_cast<Unit*>(out), rows, state_rows, units);
    return launch_status();
  });
}

extern "C" int dspark_slot_write(void* state, const void* rows, const int64_t* start, const int64_t* count,
                                 const int64_t* slot, int64_t batch, int64_t row_count, int64_t state_rows,
                                 int64_t width, int dtype, void* stream) {
  if (!valid(batch, row_count, state_rows, width, dtype)) return kInvalid;
  if (batch * row_count == 0) return 0;
  return with_unit(width * itemsize(dtype), [&](auto tag, int64_t units) {
    using Unit = typename decltype(tag)::type;
    const dim3 grid(static_cast<unsigned>(batch * row_count),
                    static_cast<unsigned>(ceil_div(units, int64_t{kThreads})));
    write_rows<Unit><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<Unit*>(state), static_cast<const Unit*>(rows), start, count, slot, row_count, state_rows, units);
    return launch_status();
  });
}
