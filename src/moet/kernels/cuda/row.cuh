// A layer's experts as the device tables have them: where a row's parts lie, what marks it, and the
// activation between its matrices.
//
// Compile-time: HIDDEN, INTER, SLICES.
#pragma once
#include "weights.cuh"

constexpr int kHiddenBlocks = HIDDEN / 32;
constexpr int kInterBlocks = INTER / 32;
constexpr int kSliceBlocks = INTER / SLICES / 32;
// The precision table marks rows in host memory with this bit.
constexpr int kRemote = 0x80;

template <int P>
struct Row {  // offsets in a slice
  static constexpr u64 kTiles = u64(kSliceBlocks) * kHiddenBlocks;
  static constexpr u64 kGateUpScales = 2 * kTiles * Format<P>::kCodeBytes;
  static constexpr u64 kDownCodes = kGateUpScales + 2 * kTiles * Format<P>::kScaleBytes;
  static constexpr u64 kDownScales = kDownCodes + kTiles * Format<P>::kCodeBytes;
  static constexpr u64 kSliceBytes = kDownScales + kTiles * Format<P>::kScaleBytes;
};

// What is not a number stays so (CUDA's fminf takes the other operand).
__device__ __forceinline__ float smaller(float a, float b) {
  float d;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  gate = smaller(gate, limit);
  up = smaller(-smaller(-up, limit), limit);
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}
