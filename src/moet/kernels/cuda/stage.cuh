// What is copied ahead of its layer.
//
// Compile-time: see tiers.cuh; ROW_BYTES_0, _1, _2: of a row, by plane.
#pragma once
#include "tiers.cuh"

struct Source {
  u64 address;
  u64 bytes;
};

__device__ __forceinline__ u32 row_bytes(int plane) {
  constexpr u32 kBytes[3] = {ROW_BYTES_0, ROW_BYTES_1, ROW_BYTES_2};
  return plane == 0 ? kBytes[0] : plane == 1 ? kBytes[1] : kBytes[2];
}
