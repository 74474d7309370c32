// A layer's experts as the device tables have them: where a row's parts lie, what marks it, and the
// activation between its matrices.
//
// Compile-time: HIDDEN, INTER, SLICES; GPT_OSS: gpt-oss's activation and biases.
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

// From gate's and up's products to h; `limit` is infinite where the model has none.
#if GPT_OSS
#define BIAS_PARAMETER , const float* bias
#define BIAS_ARGUMENT , bias

struct Activation {
  float limit;
  const float* bias;  // [EXPERTS][2][INTER]

  // row: of the expert's INTER.
  __device__ __forceinline__ float operator()(float gate, float up, int expert, int row) const {
    const float* mine = bias + u64(expert) * (2 * INTER) + min(row, INTER - 1);
    gate = smaller(gate + mine[0], limit);
    up += mine[INTER];
    up = smaller(-smaller(-up, limit), limit);
    return __fdividef(gate, 1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
  }
};
#else
#define BIAS_PARAMETER
#define BIAS_ARGUMENT

struct Activation {
  float limit;

  __device__ __forceinline__ float operator()(float gate, float up, int, int) const {
    gate = smaller(gate, limit);
    up = smaller(-smaller(-up, limit), limit);
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
  }
};
#endif
