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
// An expert with more tokens than a pass takes does so many units a pass, so that it converts
// activations seldom and reads the units again while the L2 cache has them.
constexpr int kPassUnits = 4;
constexpr int kNone = 0xFF;
constexpr int kBitmapWords = (EXPERTS + 31) / 32;
constexpr int kPairChunks = (kMaxPairs + 31) / 32;
static_assert(HIDDEN % kDownRows == 0, "whole down units");
static_assert(kMaxPairs <= 255 && kBitmapWords <= 32, "a byte an index, a lane a word");

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
  u32 bitmap[kBitmapWords];
  int ranks_before[32];      // by word of the bitmap
  u32 before[2][kMaxPairs];  // the cost of the ranks before, gate/up and down
  int count[kMaxPairs];
  int range[2][kMaxPairs][2];  // this block's units of gate/up and of down, by rank
  int first[2], end[2];        // the ranks that it has units of
  u16 expert[kMaxPairs];  // by rank
  u8 precision[kMaxPairs];
  u8 rank_of[kMaxPairs];
  u8 pair[kMaxPairs][MAX_TOKENS];
  u8 order[kMaxPairs];  // a token's pairs, ascending by expert; kNone at the end
};

// In 32 bytes. All experts of a launch stay below 2^32: 255 rows of 32 MiB, 16 passes.
__device__ __forceinline__ u32 unit_cost(int precision, int tokens, bool down) {
  constexpr int kMost = tokens_per_pass(BASE), kFew = tokens_per_pass(NVFP4);
  u32 tile = precision == BASE ? 9 : precision == MXFP4 ? 17 : 18;
  tile *= precision == NVFP4 ? (tokens + kFew - 1) / kFew : (tokens + kMost - 1) / kMost;
  return tile * (down ? kInterBlocks * (kDownRows / 32) : 2 * kHiddenBlocks);
}

// To about 2^-23: alike for all who ask, which is all that matters here.
__device__ __forceinline__ float reciprocal(u32 v) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(float(v)));
  return d;
}

// Where block `block`'s share of `total` begins. Rounded, but alike for all who ask.
__device__ __forceinline__ u32 share_of(u32 total, u32 block) {
  return block == gridDim.x ? total : u32(float(total) * (float(block) * reciprocal(gridDim.x)));
}

// The first of n units, each 1 ÷ inverse long and the first at `prefix`, that starts at or after
// `at`, of `total` in all. Rounded likewise.
__device__ __forceinline__ int first_unit(u32 at, u32 total, u32 prefix, float inverse, int n) {
  if (at <= prefix) return 0;
  return at == total ? n : min(n, int(ceilf(float(at - prefix) * inverse)));
}

// By one warp. Blocks take contiguous ranges of equal cost; what a block's gate/up units exceed its
// share by (they are large) is taken off its down units.
__device__ void make_plan(Plan& plan, const int* topk_ids, int tokens, const u64* address,
                          const u8* precision) {
  const int lane = threadIdx.x % 32, pairs = tokens * TOPK;
  constexpr u32 kAll = 0xFFFFFFFFu;
  int expert[kPairChunks];
  u64 row[kPairChunks];
  u8 kind[kPairChunks];
#pragma unroll
  for (int c = 0; c < kPairChunks; c++) {  // all at once: the loads' latencies overlap
    const int pair = c * 32 + lane;
    expert[c] = pair < pairs ? topk_ids[pair] : -1;
  }
#pragma unroll
  for (int c = 0; c < kPairChunks; c++) {
    const bool chosen = expert[c] >= 0 && expert[c] < EXPERTS;
    row[c] = chosen ? address[expert[c]] : 0;
    kind[c] = chosen ? precision[expert[c]] : 0;
  }
  if (lane < kBitmapWords) plan.bitmap[lane] = 0;
#pragma unroll 1
  for (int i = lane; i < pairs; i += 32) plan.count[i] = 0, plan.order[i] = plan.rank_of[i] = kNone;
  __syncwarp();
#pragma unroll
  for (int c = 0; c < kPairChunks; c++)
    if (row[c]) atomicOr(&plan.bitmap[expert[c] / 32], 1u << (expert[c] % 32));
  __syncwarp();

  int before = lane < kBitmapWords ? __popc(plan.bitmap[lane]) : 0;
  const int own = before;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAll, before, step);
    if (lane >= step) before += other;
  }
  plan.ranks_before[lane] = before - own;
  const int ranks = __shfl_sync(kAll, before, 31);
  __syncwarp();
#pragma unroll
  for (int c = 0; c < kPairChunks; c++)
    if (row[c]) {
      const int word = expert[c] / 32, pair = c * 32 + lane;
      const int rank = plan.ranks_before[word] +
                       __popc(plan.bitmap[word] & ((1u << (expert[c] % 32)) - 1));
      // The order of an expert's tokens may differ between blocks and runs: a token's column does
      // not change its result.
      const int position = atomicAdd(&plan.count[rank], 1);
      if (position < MAX_TOKENS) plan.pair[rank][position] = pair;
      plan.address[rank] = row[c];
      plan.precision[rank] = kind[c];
      plan.expert[rank] = expert[c];
      plan.rank_of[pair] = rank;
    }
  __syncwarp();
#pragma unroll 1
  for (int pair = lane; pair < pairs; pair += 32) {
    const int rank = plan.rank_of[pair], first = pair - pair % TOPK;
    if (rank == kNone) continue;
    int position = first;
    for (int i = first; i < first + TOPK; i++) position += plan.rank_of[i] < rank;
    plan.order[position] = pair;
  }

  u32 total[2] = {0, 0};
#pragma unroll 1
  for (int first = 0; first < ranks; first += 32) {
    const int rank = first + lane;
#pragma unroll
    for (int d = 0; d < 2; d++) {
      const u32 cost = rank < ranks ? unit_cost(plan.precision[rank], plan.count[rank], d) *
                                          (d ? kDownUnits : kGateUpUnits)
                                    : 0;
      u32 scan = cost;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(kAll, scan, step);
        if (lane >= step) scan += other;
      }
      if (rank < ranks) plan.before[d][rank] = total[d] + scan - cost;
      total[d] += __shfl_sync(kAll, scan, 31);
    }
  }

  u32 at[2] = {share_of(total[0], blockIdx.x), share_of(total[0], blockIdx.x + 1)};
#pragma unroll 1
  for (int d = 0; d < 2; d++) {
    u32 start[2] = {total[0], total[0]};
    int used[2] = {kNone, 0};
#pragma unroll 1
    for (int first = 0; first < ranks; first += 32) {
      const int rank = first + lane;
      u32 begin[2] = {kAll, kAll};
      if (rank < ranks) {
        const u32 cost = unit_cost(plan.precision[rank], plan.count[rank], d);
        const float inverse = reciprocal(cost);
        const int units = d ? kDownUnits : kGateUpUnits;
        const u32 prefix = plan.before[d][rank];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int unit = first_unit(at[i], total[d], prefix, inverse, units);
          plan.range[d][rank][i] = unit;
          if (unit < units) begin[i] = prefix + unit * cost;
        }
        if (plan.range[d][rank][0] < plan.range[d][rank][1])
          used[0] = min(used[0], rank), used[1] = rank + 1;
      }
#pragma unroll
      for (int i = 0; i < 2; i++) start[i] = min(start[i], __reduce_min_sync(kAll, begin[i]));
    }
    used[0] = __reduce_min_sync(kAll, used[0]), used[1] = __reduce_max_sync(kAll, used[1]);
    if (lane == 0) plan.first[d] = used[0], plan.end[d] = used[1];
    const bool level = total[1] >= gridDim.x * (2 * unit_cost(NVFP4, 1, false));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 block = blockIdx.x + i;
      const u32 both = share_of(total[0] + total[1], block);
      at[i] = level && block < gridDim.x ? both - min(start[i], both) : share_of(total[1], block);
    }
  }
}

// Calls f(rank, unit, end, first, tokens) for every pass of this block: units [unit, end) of an
// expert for its tokens [first, first + tokens). All warps of a block walk alike.
template <class F>
__device__ __forceinline__ void each_pass(const Plan& plan, int down, F f) {
  for (int rank = plan.first[down]; rank < plan.end[down]; rank++) {
    const int begin = plan.range[down][rank][0], end = plan.range[down][rank][1];
    if (begin >= end) continue;
    const int count = plan.count[rank], step = tokens_per_pass(plan.precision[rank]);
    const int units = count <= step ? end - begin : kPassUnits;
    for (int unit = begin; unit < end; unit += units)
      for (int first = 0; first < count; first += step)
        f(rank, unit, min(unit + units, end), first, min(count - first, step));
  }
}
