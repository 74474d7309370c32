// What every block works out first: which experts the tokens chose, and which units are its own.
//
// Compile-time: HIDDEN, INTER, SLICES, EXPERTS, TOPK, MAX_TOKENS, WARPS; and, from the including
// kernel, kDownRows, kHelperWarps and tokens_per_pass().
#pragma once
#include "row.cuh"

constexpr int kMaxPairs = MAX_TOKENS * TOPK;
constexpr int kConsumers = WARPS * 32;
constexpr int kThreads = kConsumers + 32 * kHelperWarps;
// A unit of gate/up is a row group of both; one of down is kDownRows rows.
constexpr int kGateUpUnits = kInterBlocks;
constexpr int kDownUnits = HIDDEN / kDownRows;
// PCIe is slow, but so few blocks saturate it that the others can do the rest meanwhile: rows in
// host memory get this many blocks' time.
constexpr float kRemoteBlocks = 8.0f;
constexpr int kNone = 0xFFFF;
constexpr int kBitmapWords = (EXPERTS + 31) / 32;
constexpr int kPairChunks = (kMaxPairs + 31) / 32;
static_assert(HIDDEN % kDownRows == 0, "whole down units");
static_assert(TOPK <= 32 && kMaxPairs <= 256 && kBitmapWords <= 32, "lanes and bytes suffice");

// A layer's work, sorted by expert; every block makes the same plan. A "rank" is the position of
// an expert among those that some token chose; a "pair" is an index into topk_ids.
struct Plan {
  u64 address[kMaxPairs];
  u32 bitmap[kBitmapWords];
  float before[kMaxPairs];     // the cost of the ranks before
  bool remote[kMaxPairs];
  int count[kMaxPairs];
  int range[2][kMaxPairs][2];  // this block's units of gate/up and of down, by rank
  int first[2], end[2];        // the ranks that it has units of
  u16 expert[kMaxPairs];       // by rank
  u16 chosen[kMaxPairs];       // by pair, kNone if none
  u8 precision[kMaxPairs];
  u8 pair[kMaxPairs][MAX_TOKENS];
  u16 order[kMaxPairs];        // a token's pairs, ascending by expert; kNone at the end
};

// Of an expert's gate and up, in 32 bytes a tile; its down costs half as much.
__device__ __forceinline__ float cost_of(int precision, int tokens) {
  constexpr int kMost = tokens_per_pass(BASE), kFew = tokens_per_pass(NVFP4);
  if (precision == NVFP4) return 18 * ((tokens + kFew - 1) / kFew);
  return (precision == BASE ? 9 : 17) * ((tokens + kMost - 1) / kMost);
}

// To about 2^-23: alike for all who ask, which is all that matters here.
__device__ __forceinline__ float reciprocal(float v) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
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
  for (int i = lane; i < pairs; i += 32)
    plan.count[i] = 0, plan.order[i] = kNone, plan.chosen[i] = kNone;
  __syncwarp();
  int ranks = 0, rank[kPairChunks] = {};
  if (tokens == 1) {  // whose experts differ: any order will do
    const u32 valid = __ballot_sync(kAll, row[0] != 0);
    ranks = __popc(valid), rank[0] = __popc(valid & ((1u << lane) - 1));
  } else {
#pragma unroll
    for (int c = 0; c < kPairChunks; c++)
      if (row[c]) atomicOr(&plan.bitmap[expert[c] / 32], 1u << (expert[c] % 32));
    __syncwarp();
#pragma unroll
    for (int word = 0; word < kBitmapWords; word++) {
      const u32 bits = plan.bitmap[word];
#pragma unroll
      for (int c = 0; c < kPairChunks; c++) {
        const int below = expert[c] - word * 32;
        if (below > 0) rank[c] += __popc(below < 32 ? bits & ((1u << below) - 1) : bits);
      }
      ranks += __popc(bits);
    }
  }
#pragma unroll
  for (int c = 0; c < kPairChunks; c++)
    if (row[c]) {
      // The order of an expert's tokens may differ between blocks and runs: a token's column does
      // not change its result.
      const int position = atomicAdd(&plan.count[rank[c]], 1);
      if (position < MAX_TOKENS) plan.pair[rank[c]][position] = c * 32 + lane;
      plan.address[rank[c]] = row[c];
      plan.precision[rank[c]] = kind[c] & ~kRemote;
      plan.remote[rank[c]] = kind[c] & kRemote;
      plan.expert[rank[c]] = expert[c];
      plan.chosen[c * 32 + lane] = expert[c];
    }
  __syncwarp();

  const auto cost_at = [&](int i) { return cost_of(plan.precision[i], plan.count[i]); };
  float weight = 1.0f;  // of remote rows
  bool any = false;
#pragma unroll
  for (int c = 0; c < kPairChunks; c++) any |= row[c] && kind[c] & kRemote;
  if (__any_sync(kAll, any)) {
    float all = 0.0f, remote = 0.0f;
    for (int i = lane; i < ranks; i += 32) {
      all += cost_at(i);
      if (plan.remote[i]) remote += cost_at(i);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      all += __shfl_xor_sync(kAll, all, step);
      remote += __shfl_xor_sync(kAll, remote, step);
    }
    const float blocks = fminf(kRemoteBlocks, 0.5f * gridDim.x);
    weight = fmaxf(1.0f, blocks / (gridDim.x - blocks) * (all - remote) / remote);
  }
  const auto weighted = [&](int i) { return cost_at(i) * (plan.remote[i] ? weight : 1.0f); };

  float total = 0.0f, dearest = 0.0f;
#pragma unroll 1
  for (int first = 0; first < ranks; first += 32) {
    const int i = first + lane;
    const float cost = i < ranks ? weighted(i) : 0.0f;
    float scan = cost;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(kAll, scan, step);
      if (lane >= step) scan += other;
    }
    if (i < ranks) plan.before[i] = total + scan - cost;
    total += __shfl_sync(kAll, scan, 31);
    dearest = fmaxf(dearest, __uint_as_float(__reduce_max_sync(kAll, __float_as_uint(cost))));
  }

  // Neighbours must agree on the border between them: both work it out alike, from its number.
  const float share = total * reciprocal(gridDim.x);
  const bool level = share >= 2.1f * dearest / kGateUpUnits;
  float at[2] = {share * blockIdx.x, share * (blockIdx.x + 1)};
#pragma unroll 1
  for (int d = 0; d < 2; d++) {
    const int units = d ? kDownUnits : kGateUpUnits;
    float start[2] = {total, total};
    int used[2] = {kNone, 0};
#pragma unroll 1
    for (int first = 0; first < ranks; first += 32) {
      const int i = first + lane;
      float begin[2] = {total, total};
      if (i < ranks) {
        const float cost = weighted(i), prefix = plan.before[i];
        const float scale = units * reciprocal(cost);
        int range[2];
#pragma unroll
        for (int side = 0; side < 2; side++) {
          const int unit = max(0, min(units, int(ceilf((at[side] - prefix) * scale))));
          range[side] = blockIdx.x + side == gridDim.x ? units : unit;
          if (unit < units) begin[side] = prefix + unit * cost * (1.0f / units);
          plan.range[d][i][side] = range[side];
        }
        if (range[0] < range[1]) used[0] = min(used[0], i), used[1] = i + 1;
      }
#pragma unroll
      for (int side = 0; side < 2; side++)
        start[side] = fminf(start[side], __uint_as_float(__reduce_min_sync(
                                             kAll, __float_as_uint(begin[side]))));
    }
    used[0] = __reduce_min_sync(kAll, used[0]), used[1] = __reduce_max_sync(kAll, used[1]);
    if (lane == 0) plan.first[d] = used[0], plan.end[d] = used[1];
    if (level)
#pragma unroll
      for (int side = 0; side < 2; side++)
        at[side] = fmaxf(0.0f, 3.0f * share * (blockIdx.x + side) - 2.0f * start[side]);
  }
}

// A token's pairs in the order in which their outputs are added. By one warp.
__device__ void order_pairs(Plan& plan, int pairs, int lane) {
#pragma unroll 1
  for (int pair = lane; pair < pairs; pair += 32) {
    const int expert = plan.chosen[pair], first = pair - pair % TOPK;
    if (expert == kNone) continue;
    int position = first;  // (a token may name an expert twice)
    for (int i = first; i < first + TOPK; i++)
      position += plan.chosen[i] < expert || (plan.chosen[i] == expert && i < pair);
    plan.order[position] = pair;
  }
}

// Units [unit, end) of an expert for its tokens [first, first + tokens).
struct Pass {
  int rank, unit, end, first, tokens;
};

// The passes of this block, one after another; all its warps walk alike. A pass goes through all of
// the block's units of an expert, for converting activations anew takes longer than reading weights.
struct Passes {
  const Plan* plan_at;
  int down, rank, first = 0;

  __device__ __forceinline__ Passes(const Plan& p, int d)
      : plan_at(&p), down(d), rank(p.first[d]) {}

  __device__ __forceinline__ bool next(Pass& pass) {
    const Plan& plan = *plan_at;
    for (; rank < plan.end[down]; rank++, first = 0) {
      const int begin = plan.range[down][rank][0], end = plan.range[down][rank][1];
      if (begin >= end || first >= plan.count[rank]) continue;
      const int step = tokens_per_pass(plan.precision[rank]);
      pass = {rank, begin, end, first, min(plan.count[rank] - first, step)};
      first += step;
      return true;
    }
    return false;
  }
};

template <class F>
__device__ __forceinline__ void each_pass(const Plan& plan, int down, F f) {
  Passes passes(plan, down);
  for (Pass pass; passes.next(pass);) f(pass);
}
