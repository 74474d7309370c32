// The work of a prefill call, and where an expert's tiles lie in memory and in a stage.
//
// Compile-time: HIDDEN, INTER, SLICES, EXPERTS, TOPK, TILE_TOKENS (the most tokens of a tile),
// FP8_ACTIVATIONS: whether the activations of base rows are E4M3; PRECISIONS: those that there are
// rows of, a bit each.
#pragma once
#include "fp8.cuh"
#include "row.cuh"

static_assert(EXPERTS <= 1024, "a thread an expert");

// Some tokens of one expert: sorted positions [first, first + count).
struct __align__(16) Tile {
  u64 address;
  int first, count;
  float factor[3];
  int precision;
#if GPT_OSS
  int expert;
#endif
};

// What the kernels of a call hand on besides tiles.
struct State {
  int tiles;
  int taken[2];  // work items of gate/up and of down, taken by blocks
};

// How a row's activations are stored: k within a block of 32 in the order of the MMA's fragments.
// BF16 of either kind: position 16s + 8c + 2t + i holds k = 8t + 4s + 2c + i (base) or
// k = 8t + 2s + c + 4i (FP4). E4M3: position 16s + 4t + i holds k = 8t + {4, 0, 5, 1}[i] + 2s.
__host__ __device__ constexpr bool in_e4m3(int precision) {
  return FP8_ACTIVATIONS && precision == BASE;
}

// Decoded weight · activation = true product ÷ power_of.
__host__ __device__ constexpr float power_of(int precision) {
  return precision == BASE ? 1.0f : precision == MXFP4 ? 0x1p64f : 0x1p8f;
}

__host__ __device__ constexpr int largest_divisor(int n, int most) {
  while (n % most) most--;
  return most;
}

__host__ __device__ constexpr int least_common_multiple(int a, int b) {
  int n = a;
  while (n % b) n += a;
  return n;
}

// A block's 256 rows: eight 32 × 32 tiles a k block, of four gate and up row groups or of eight of
// down. A stage holds kMost or fewer k blocks of them: of gate/up [group][block][gate, up], of down
// [run][group][block] where a run is within one slice.
template <int P, bool DOWN, int MOST>
struct Stage {
  static constexpr int kGroups = DOWN ? 8 : 4;
  static constexpr int kAllGroups = DOWN ? kHiddenBlocks : kInterBlocks;
  static constexpr int kRowTiles = (kAllGroups + kGroups - 1) / kGroups;
  static constexpr int kAllBlocks = DOWN ? kInterBlocks : kHiddenBlocks;
  static constexpr int kRun = DOWN ? largest_divisor(kSliceBlocks, MOST) : MOST;
  static constexpr int kBlocks = MOST / kRun * kRun;
  static constexpr bool kEven = !DOWN || kRun == kBlocks;  // a group's tiles are evenly apart
  static constexpr int kScaleOffset = 8 * MOST * Format<P>::kCodeBytes;
  static constexpr int kBytes = kScaleOffset + 8 * MOST * Format<P>::kScaleBytes;
  static constexpr int kStages = (kAllBlocks + kBlocks - 1) / kBlocks;

  // The tile of a group (m: gate or up) in a stage.
  __device__ static __forceinline__ int tile(int group, int block, int m) {
    if (!DOWN) return (group * MOST + block) * 2 + m;
    const int run = kRun == kBlocks ? 0 : block / kRun;
    return run * (8 * kRun) + group * kRun + block - run * kRun;
  }
};

// A block's share of a tile's rows.
struct Item {
  Tile tile;
  int row_tile;
};

// Of a launch of gate/up or of down.
struct Arguments {
  const State* state;
  const Tile* tiles;
  int* taken;
  const int* sorted;
  const u8* base;     // activations of base rows, by token (gate/up) or sorted position (down)
  const u8* fp4;      // and of FP4 rows
  const float* scale;  // of base's rows in E4M3
  u8* out;            // h by sorted position, or the experts' outputs by pair
  Activation activation;
};

template <int VALUE>
struct Kind {
  static constexpr int kValue = VALUE;
};

constexpr bool compiled_for(int precision) { return PRECISIONS >> precision & 1; }

// f(Kind<precision>), compiled for each of PRECISIONS: most of the compiler's time goes into it.
template <class F>
__device__ __forceinline__ void each_precision(int precision, F f) {
  if (compiled_for(BASE) && precision == BASE) {
    if constexpr (compiled_for(BASE)) f(Kind<BASE>());
  } else if (compiled_for(MXFP4) && precision == MXFP4) {
    if constexpr (compiled_for(MXFP4)) f(Kind<MXFP4>());
  } else if constexpr (compiled_for(NVFP4)) {
    f(Kind<NVFP4>());
  }
}
