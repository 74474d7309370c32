// What every block works out first: which experts the tokens chose, and which units are its own.
//
// Compile-time: HIDDEN, INTER, SLICES, EXPERTS, TOPK, MAX_TOKENS, WARPS; and, from the including
// kernel, kDownRows, kHelperWarps and tokens_per_pass().
#pragma once
#include "weights.cuh"

constexpr int kMaxPairs = MAX_TOKENS * TOPK;
constexpr int kConsumers = WARPS * 32;
constexpr int kThreads = kConsumers + 32 * kHelperWarps;
constexpr int kHiddenBlocks = HIDDEN / 32;
constexpr int kInterBlocks = INTER / 32;
constexpr int kSliceBlocks = INTER / SLICES / 32;
// A unit of gate/up is a row group of both; one of down is kDownRows rows.
constexpr int kGateUpUnits = kInterBlocks;
constexpr int kDownUnits = HIDDEN / kDownRows;
// An expert with more tokens than a pass takes does so many units a pass, so that it loads
// activations seldom and reads the units again while the L2 cache has them.
constexpr int kPassUnits = 4;
constexpr int kNone = 0xFF;
static_assert(HIDDEN % kDownRows == 0, "whole down units");
static_assert(kMaxPairs <= 255 && kMaxPairs <= kThreads, "a thread a pair, a byte an index");

template <int P>
struct Row {  // offsets in a slice
  static constexpr u64 kTiles = u64(kSliceBlocks) * kHiddenBlocks;
  static constexpr u64 kGateUpScales = 2 * kTiles * Format<P>::kCodeBytes;
  static constexpr u64 kDownCodes = kGateUpScales + 2 * kTiles * Format<P>::kScaleBytes;
  static constexpr u64 kDownScales = kDownCodes + kTiles * Format<P>::kCodeBytes;
  static constexpr u64 kSliceBytes = kDownScales + kTiles * Format<P>::kScaleBytes;
};

// A layer's work, sorted by expert; every block makes the same plan. A "rank" is the position of
// an expert among those that some token chose; a "pair" is an index into topk_ids.
struct Plan {
  u64 address[kMaxPairs];
  float factor[kMaxPairs][3];
  u32 bitmap[(EXPERTS + 31) / 32];
  int count[kMaxPairs];
  int range[2][kMaxPairs][2];  // this block's units of gate/up and of down, by rank
  u32 start[2];                // where this and the next block's gate/up work starts
  int ranks;
  u8 precision[kMaxPairs];
  u8 rank_of[kMaxPairs];
  u8 pair[kMaxPairs][MAX_TOKENS];
  u8 order[kMaxPairs];  // a token's pairs, ascending by expert; kNone at the end
};

__device__ __forceinline__ u32 unit_cost(int precision, int tokens, bool down) {
  u32 tile = precision == BASE ? 9 : precision == MXFP4 ? 17 : 18;  // in 32 bytes
  tile *= (tokens + tokens_per_pass(precision) - 1) / tokens_per_pass(precision);
  return tile * (down ? kInterBlocks * (kDownRows / 32) : 2 * kHiddenBlocks);
}

// The first of n units, each `cost` long and the first at `prefix`, that starts at or after `at`.
__device__ __forceinline__ int first_unit(u32 at, u32 prefix, u32 cost, int n) {
  if (at <= prefix) return 0;
  return min(n, int((at - prefix + cost - 1) / cost));
}

__device__ void make_plan(Plan& plan, const int* topk_ids, int tokens, const u64* address,
                          const u8* precision, const float* factor) {
  const int tid = threadIdx.x, pairs = tokens * TOPK;
  for (int i = tid; i < (EXPERTS + 31) / 32; i += kThreads) plan.bitmap[i] = 0;
  if (tid < kMaxPairs) plan.count[tid] = 0, plan.order[tid] = kNone;
  __syncthreads();

  int expert = -1, kind = 0;
  u64 row = 0;
  float factors[3];
  if (tid < pairs) {
    expert = topk_ids[tid];
    if (expert >= 0 && expert < EXPERTS) {  // all at once: the loads' latencies overlap
      row = address[expert];
      kind = precision[expert];
      for (int i = 0; i < 3; i++) factors[i] = factor[expert * 3 + i];
    }
    if (!row) expert = -1;
    if (expert >= 0) atomicOr(&plan.bitmap[expert / 32], 1u << (expert % 32));
  }
  __syncthreads();

  if (tid < pairs) {
    int rank = kNone;
    if (expert >= 0) {
      rank = __popc(plan.bitmap[expert / 32] & ((1u << (expert % 32)) - 1));
      for (int i = 0; i < expert / 32; i++) rank += __popc(plan.bitmap[i]);
      // The order of an expert's tokens may differ between blocks and runs: a token's column does
      // not change its result.
      int position = atomicAdd(&plan.count[rank], 1);
      if (position < MAX_TOKENS) plan.pair[rank][position] = tid;
      plan.address[rank] = row;
      plan.precision[rank] = kind;
      for (int i = 0; i < 3; i++) plan.factor[rank][i] = factors[i];
    }
    plan.rank_of[tid] = rank;
  }
  if (tid == 0) {
    int ranks = 0;
    for (int i = 0; i < (EXPERTS + 31) / 32; i++) ranks += __popc(plan.bitmap[i]);
    plan.ranks = ranks;
    plan.start[0] = plan.start[1] = 0xFFFFFFFFu;
  }
  __syncthreads();

  // Contiguous ranges of equal cost for every block; what a block's gate/up units exceed its share
  // by (they are large) is taken off its down units.
  const int ranks = plan.ranks;
  u32 before[2] = {0, 0}, total[2] = {0, 0}, cost[2] = {1, 1};
  if (tid < pairs && plan.rank_of[tid] != kNone) {
    int first = tid - tid % TOPK, position = 0;
    for (int i = first; i < first + TOPK; i++) position += plan.rank_of[i] < plan.rank_of[tid];
    plan.order[first + position] = tid;
  }
  if (tid < ranks) {
    for (int i = 0; i < ranks; i++) {
      u32 up = unit_cost(plan.precision[i], plan.count[i], false) * kGateUpUnits;
      u32 down = unit_cost(plan.precision[i], plan.count[i], true) * kDownUnits;
      if (i < tid) before[0] += up, before[1] += down;
      total[0] += up, total[1] += down;
    }
    for (int d = 0; d < 2; d++) cost[d] = unit_cost(plan.precision[tid], plan.count[tid], d);
    for (int i = 0; i < 2; i++) {
      u32 share = u32(u64(total[0]) * (blockIdx.x + i) / gridDim.x);
      int unit = first_unit(share, before[0], cost[0], kGateUpUnits);
      plan.range[0][tid][i] = unit;
      if (unit < kGateUpUnits) atomicMin(&plan.start[i], before[0] + unit * cost[0]);
    }
  }
  __syncthreads();
  if (tid < ranks) {
    bool level = total[1] / gridDim.x >= 2 * unit_cost(NVFP4, 1, false);
    for (int i = 0; i < 2; i++) {
      u32 share = u32(u64(total[1]) * (blockIdx.x + i) / gridDim.x);
      if (level || blockIdx.x + i == gridDim.x) {
        u64 both = (u64(total[0]) + total[1]) * (blockIdx.x + i) / gridDim.x;
        share = u32(both - min(u64(min(plan.start[i], total[0])), both));
      }
      plan.range[1][tid][i] = first_unit(share, before[1], cost[1], kDownUnits);
    }
  }
  __syncthreads();
}
