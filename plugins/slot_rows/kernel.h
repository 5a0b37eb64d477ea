// SlotRead and SlotWrite: rows of a slot's state.
#pragma once

#include <cstdint>

extern "C" {

// rows T[batch, rows, width] = state T[slots+1, state_rows, width] at (slot[b], row[i]).
int dspark_slot_read(const void* state, const int64_t* slot, const int64_t* row, void* out, int64_t batch, int64_t rows,
                     int64_t state_rows, int64_t width, int dtype, void* stream);

// The first count[b] of rows T[batch, rows, width] into state at (slot[b], start[b] …), in place; rows past the state's
// are dropped.
int dspark_slot_write(void* state, const void* rows, const int64_t* start, const int64_t* count, const int64_t* slot,
                      int64_t batch, int64_t row_count, int64_t state_rows, int64_t width, int dtype, void* stream);
}
