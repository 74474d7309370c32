// Routed experts of one layer for a few tokens: one persistent kernel, one block an SM.
//
// A producer warp streams the rows' tiles through a ring of shared-memory stages; the consumer
// warps decode words in registers, straight into tensor-core fragments. Every warp takes each
// WARPS-th k block of a row group, and the warps' sums are added in a fixed order. The blocks meet
// twice: before the down matrices (whose tiles are already under way), and before the weighted sum.
//
// Compile-time: HIDDEN, INTER, SLICES, EXPERTS, TOPK, MAX_TOKENS, WARPS, OUT_BF16.
#include "weights.cuh"

constexpr int kMaxPairs = MAX_TOKENS * TOPK;
constexpr int kConsumers = WARPS * 32;
constexpr int kThreads = kConsumers + 32;
constexpr int kHiddenBlocks = HIDDEN / 32;
constexpr int kInterBlocks = INTER / 32;
constexpr int kSliceBlocks = INTER / SLICES / 32;
constexpr int kNone = 0xFF;
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

struct Shared {
  Plan plan;
  float partial[2][WARPS][2][64];
  u64 full[32];
  u64 empty[32];
};

struct Ring {
  u32 stages, full, empty, buffer;
  u32 stage = 0, parity = 0;

  __device__ u32 here() const { return buffer + stage * kStageBytes; }
  __device__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ u32 unit_cost(int precision, bool down) {
  u32 tile = precision == BASE ? 9 : precision == MXFP4 ? 17 : 18;  // in 32 bytes
  return tile * (down ? kInterBlocks : 2 * kHiddenBlocks);
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

  int expert = -1;
  u64 row = 0;
  if (tid < pairs) {
    expert = topk_ids[tid];
    if (expert >= 0 && expert < EXPERTS) row = address[expert];
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
      plan.precision[rank] = precision[expert];
      for (int i = 0; i < 3; i++) plan.factor[rank][i] = factor[expert * 3 + i];
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
      u32 up = unit_cost(plan.precision[i], false) * kInterBlocks;
      u32 down = unit_cost(plan.precision[i], true) * kHiddenBlocks;
      if (i < tid) before[0] += up, before[1] += down;
      total[0] += up, total[1] += down;
    }
    for (int d = 0; d < 2; d++) cost[d] = unit_cost(plan.precision[tid], d);
    for (int i = 0; i < 2; i++) {
      u32 share = u32(u64(total[0]) * (blockIdx.x + i) / gridDim.x);
      int unit = first_unit(share, before[0], cost[0], kInterBlocks);
      plan.range[0][tid][i] = unit;
      if (unit < kInterBlocks) atomicMin(&plan.start[i], before[0] + unit * cost[0]);
    }
  }
  __syncthreads();
  if (tid < ranks) {
    bool level = total[1] / gridDim.x >= 2 * unit_cost(NVFP4, false);
    for (int i = 0; i < 2; i++) {
      u32 share = u32(u64(total[1]) * (blockIdx.x + i) / gridDim.x);
      if (level || blockIdx.x + i == gridDim.x) {
        u64 both = (u64(total[0]) + total[1]) * (blockIdx.x + i) / gridDim.x;
        share = u32(both - min(u64(min(plan.start[i], total[0])), both));
      }
      plan.range[1][tid][i] = first_unit(share, before[1], cost[1], kHiddenBlocks);
    }
  }
  __syncthreads();
}

// ---- producer ----

struct Copier {
  Ring ring;
  int lane;
#if __CUDA_ARCH__ >= 900
  u64 policy;
#endif

  __device__ void begin(u32 bytes) {
    barrier_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
#if __CUDA_ARCH__ >= 900
    if (lane == 0) barrier_expect(ring.full + ring.stage * 8, bytes);
    __syncwarp();
#endif
  }

  // Copies piece `which` of the stage; on sm_90 one lane issues it, else all share it.
  __device__ void copy(int which, u32 offset, const u8* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    if (lane == which % 32)
      bulk_copy(ring.here() + offset, from, bytes, ring.full + ring.stage * 8, policy);
#else
    warp_copy(ring.here() + offset, from, bytes, lane);
#endif
  }

  __device__ void end() {
#if __CUDA_ARCH__ < 900
    barrier_arrive_after_copies(ring.full + ring.stage * 8);
#endif
    ring.advance();
  }
};

template <int P>
__device__ void produce_gate_up(Copier& to, const u8* row, int unit) {
  using F = Format<P>;
  const u8* slice = row + (unit / kSliceBlocks) * Row<P>::kSliceBytes;
  const u32 first = (unit % kSliceBlocks) * (2 * kHiddenBlocks);
  for (int tile = 0; tile < 2 * kHiddenBlocks; tile += F::kTiles) {
    const u32 tiles = min(F::kTiles, 2 * kHiddenBlocks - tile);
    to.begin(tiles * (F::kCodeBytes + F::kScaleBytes));
    to.copy(0, 0, slice + (first + tile) * F::kCodeBytes, tiles * F::kCodeBytes);
    to.copy(1, F::kScaleOffset, slice + Row<P>::kGateUpScales + (first + tile) * F::kScaleBytes,
            tiles * F::kScaleBytes);
    to.end();
  }
}

template <int P>
__device__ void produce_down(Copier& to, const u8* row, int unit) {
  using F = Format<P>;
  const u32 first = unit * kSliceBlocks;
  for (int tile = 0; tile < kInterBlocks; tile += F::kTiles) {
    const int end = min(tile + F::kTiles, kInterBlocks);
    to.begin((end - tile) * (F::kCodeBytes + F::kScaleBytes));
    for (int at = tile, piece = 0; at < end; piece += 2) {
      const int slice = at / kSliceBlocks, inside = at % kSliceBlocks;
      const u32 tiles = min(kSliceBlocks - inside, end - at), place = at - tile;
      const u8* from = row + slice * Row<P>::kSliceBytes;
      to.copy(piece, place * F::kCodeBytes,
              from + Row<P>::kDownCodes + (first + inside) * F::kCodeBytes, tiles * F::kCodeBytes);
      to.copy(piece + 1, F::kScaleOffset + place * F::kScaleBytes,
              from + Row<P>::kDownScales + (first + inside) * F::kScaleBytes,
              tiles * F::kScaleBytes);
      at += tiles;
    }
    to.end();
  }
}

__device__ void produce(const Plan& plan, Ring ring, int lane) {
#if __CUDA_ARCH__ >= 900
  Copier to{ring, lane, streaming_policy()};
#else
  Copier to{ring, lane};
#endif
  for (int down = 0; down < 2; down++)
    for (int rank = 0; rank < plan.ranks; rank++) {
      const u8* row = reinterpret_cast<const u8*>(plan.address[rank]);
      const int precision = plan.precision[rank];
      for (int unit = plan.range[down][rank][0]; unit < plan.range[down][rank][1]; unit++) {
        if (precision == BASE)
          down ? produce_down<BASE>(to, row, unit) : produce_gate_up<BASE>(to, row, unit);
        else if (precision == MXFP4)
          down ? produce_down<MXFP4>(to, row, unit) : produce_gate_up<MXFP4>(to, row, unit);
        else
          down ? produce_down<NVFP4>(to, row, unit) : produce_gate_up<NVFP4>(to, row, unit);
      }
    }
#if __CUDA_ARCH__ < 900
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// ---- consumers ----

struct Consumer {
  Shared& shared;
  Ring ring;
  int warp, lane, g, t;
  u32 sequence = 0;  // units done: parity chooses the partial buffer, value the finalizing warp

  // acc[matrix][h][n] = this warp's share of a row group's sums; activations are rows of `width`.
  template <int P, int NB, bool DOWN>
  __device__ void accumulate(const u16* const* activations, float (*acc)[2][NB][4]) {
    using F = Format<P>;
    constexpr int kMatrices = DOWN ? 1 : 2;
    constexpr int kBlocks = DOWN ? kInterBlocks : kHiddenBlocks;
    constexpr int kStageBlocks = F::kTiles / kMatrices;
    uint4 next[NB];
#pragma unroll
    for (int n = 0; n < NB; n++)
      if (warp < kBlocks) next[n] = *reinterpret_cast<const uint4*>(activations[n] + warp * 32);
    for (int first = 0; first < kBlocks; first += kStageBlocks) {
      barrier_wait(ring.full + ring.stage * 8, ring.parity);
      const u32 codes = ring.here(), scales = codes + F::kScaleOffset;
#pragma unroll
      for (int i = 0; i < kStageBlocks / WARPS; i++) {
        const int local = i * WARPS + warp, block = first + local;
        if (block < kBlocks) {
          uint4 b[NB];
#pragma unroll
          for (int n = 0; n < NB; n++) {
            b[n] = arrange<P>(next[n]);
            if (block + WARPS < kBlocks)
              next[n] = *reinterpret_cast<const uint4*>(activations[n] + (block + WARPS) * 32);
          }
#pragma unroll
          for (int m = 0; m < kMatrices; m++)
            tile_mma<P, NB>(codes + (local * kMatrices + m) * F::kCodeBytes,
                            scales + (local * kMatrices + m) * F::kScaleBytes, g, t, b, acc[m]);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.empty + ring.stage * 8);
      ring.advance();
    }
  }

  // Adds the warps' sums, two columns a pass, and hands (column, row's sums) to `store` in one warp
  // a column, a lane a row.
  template <int NB, int MATRICES, class Store>
  __device__ void reduce(const float (*acc)[2][NB][4], int columns, Store store) {
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
      for (int p = 0; p < 4; p++) {
        const int column = n * 8 + p * 2;
        if (column >= columns) break;
        float(*mine)[64] = shared.partial[sequence & 1][warp];
        if (t == p)
#pragma unroll
          for (int m = 0; m < MATRICES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
              for (int e = 0; e < 4; e++)
                mine[e & 1][m * 32 + h * 16 + (e >> 1) * 8 + g] = acc[m][h][n][e];
        named_barrier(1, kConsumers);
        for (int c = 0; c < min(2, columns - column); c++)
          if (warp == (2 * sequence + c) % WARPS) {
            float sum[MATRICES];
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
              sum[m] = 0.0f;
#pragma unroll
              for (int w = 0; w < WARPS; w++)
                sum[m] += shared.partial[sequence & 1][w][c][m * 32 + lane];
            }
            store(column + c, sum);
          }
        sequence++;
      }
  }

  template <int P, int NB>
  __device__ void gate_up(int rank, int unit, const u16* x, u16* h, float limit) {
    const Plan& plan = shared.plan;
    const int columns = plan.count[rank];
    const u16* rows[NB];
#pragma unroll
    for (int n = 0; n < NB; n++)
      rows[n] = x + u64(plan.pair[rank][min(n * 8 + g, columns - 1)] / TOPK) * HIDDEN + t * 8;
    float acc[2][2][NB][4] = {};
    accumulate<P, NB, false>(rows, acc);
    const float gate_factor = plan.factor[rank][0] * Format<P>::kFactor;
    const float up_factor = plan.factor[rank][1] * Format<P>::kFactor;
    reduce<NB, 2>(acc, columns, [&](int column, const float* sum) {
      const float gate = fminf(sum[0] * gate_factor, limit);
      const float up = fminf(fmaxf(sum[1] * up_factor, -limit), limit);
      const float value = gate / (1.0f + __expf(-gate)) * up;
      h[u64(plan.pair[rank][column]) * INTER + unit * 32 + lane] = float_to_bf16(value);
    });
  }

  template <int P, int NB>
  __device__ void down(int rank, int unit, const u16* h, float* partial) {
    const Plan& plan = shared.plan;
    const int columns = plan.count[rank];
    const u16* rows[NB];
#pragma unroll
    for (int n = 0; n < NB; n++)
      rows[n] = h + u64(plan.pair[rank][min(n * 8 + g, columns - 1)]) * INTER + t * 8;
    float acc[1][2][NB][4] = {};
    accumulate<P, NB, true>(rows, acc);
    const float factor = plan.factor[rank][2] * Format<P>::kFactor;
    reduce<NB, 1>(acc, columns, [&](int column, const float* sum) {
      partial[u64(plan.pair[rank][column]) * HIDDEN + unit * 32 + lane] = sum[0] * factor;
    });
  }

  template <int P>
  __device__ void unit(bool is_down, int rank, int index, const u16* x, u16* h, float* partial,
                       float limit) {
    const bool narrow = MAX_TOKENS <= 8 || shared.plan.count[rank] <= 8;
    if (narrow && is_down) down<P, 1>(rank, index, h, partial);
    if (narrow && !is_down) gate_up<P, 1>(rank, index, x, h, limit);
    if (MAX_TOKENS > 8 && !narrow && is_down) down<P, 2>(rank, index, h, partial);
    if (MAX_TOKENS > 8 && !narrow && !is_down) gate_up<P, 2>(rank, index, x, h, limit);
  }

  __device__ void pass(bool is_down, const u16* x, u16* h, float* partial, float limit) {
    const Plan& plan = shared.plan;
    for (int rank = 0; rank < plan.ranks; rank++) {
      const int end = plan.range[is_down][rank][1], precision = plan.precision[rank];
      for (int index = plan.range[is_down][rank][0]; index < end; index++) {
        if (precision == BASE) unit<BASE>(is_down, rank, index, x, h, partial, limit);
        else if (precision == MXFP4) unit<MXFP4>(is_down, rank, index, x, h, partial, limit);
        else unit<NVFP4>(is_down, rank, index, x, h, partial, limit);
      }
    }
  }

  // All blocks meet. The counter only grows, so that a launch needs no reset; all blocks are
  // resident (a cooperative launch), so that waiting ends.
  __device__ void meet(u64* counter) {
    named_barrier(1, kConsumers);
    if (warp == 0 && lane == 0) {
      __threadfence();
      const u64 before = atomicAdd(counter, 1ull);
      const u64 target = before - before % gridDim.x + gridDim.x;
      u64 now;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(counter) : "memory");
      } while (now < target);
    }
    named_barrier(1, kConsumers);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
decode_experts(const u16* x, const int* topk_ids, const float* topk_weights, const u64* address,
               const u8* precision, const float* factor, u16* h, float* partial, void* out,
               u64* counter, int tokens, int stages, float limit, int add) {
  extern __shared__ __align__(128) u8 buffer[];
  __shared__ Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring ring{u32(stages), shared_address(shared.full), shared_address(shared.empty),
            shared_address(buffer)};
  if (threadIdx.x < stages) {
#if __CUDA_ARCH__ >= 900
    barrier_init(ring.full + threadIdx.x * 8, 1);
#else
    barrier_init(ring.full + threadIdx.x * 8, 32);
#endif
    barrier_init(ring.empty + threadIdx.x * 8, WARPS);
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // for the copy engine
#endif
  }
  make_plan(shared.plan, topk_ids, tokens, address, precision, factor);
  if (warp == WARPS) {
    produce(shared.plan, ring, lane);
    return;
  }
  Consumer consumer{shared, ring, warp, lane, lane / 4, lane % 4};
  consumer.pass(false, x, h, partial, limit);
  consumer.meet(counter);
  consumer.pass(true, x, h, partial, limit);
  consumer.meet(counter);

  const int total = tokens * HIDDEN;
  for (int i = blockIdx.x * kConsumers + threadIdx.x; i < total; i += gridDim.x * kConsumers) {
    const int token = i / HIDDEN, column = i % HIDDEN;
#if OUT_BF16
    u16* to = static_cast<u16*>(out) + i;
    float sum = add ? bf16_to_float(*to) : 0.0f;
#else
    float* to = static_cast<float*>(out) + i;
    float sum = add ? *to : 0.0f;
#endif
    for (int k = 0; k < TOPK; k++) {
      const int pair = shared.plan.order[token * TOPK + k];
      if (pair == kNone) break;
      sum += topk_weights[pair] * partial[u64(pair) * HIDDEN + column];
    }
#if OUT_BF16
    *to = float_to_bf16(sum);
#else
    *to = sum;
#endif
  }
}
