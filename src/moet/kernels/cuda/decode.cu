// Routed experts of one layer for a few tokens: one persistent kernel, one block an SM.
//
// A producer warp streams the rows' tiles through a ring of shared-memory stages; the consumer
// warps decode words in registers, straight into tensor-core fragments. Every warp takes each
// WARPS-th k block of a row group, and the warps' sums are added in a fixed order. The blocks meet
// twice: before the down matrices (whose tiles are already under way), and before the weighted sum.
//
// Compile-time: HIDDEN, INTER, SLICES, EXPERTS, TOPK, MAX_TOKENS, WARPS, OUT_BF16.
#include "weights.cuh"

constexpr int kDownRows = 32;
constexpr int kHelperWarps = 1;  // the producer
__host__ __device__ constexpr int tokens_per_pass(int) { return 8; }

#include "meeting.cuh"
#include "producer.cuh"

struct Shared {
  Plan plan;
  float partial[2][WARPS][2][64];
  u64 full[32];
  u64 empty[32];
};

struct Consumer {
  Shared& shared;
  Ring ring;
  int warp, lane, g, t;
  u32 sequence = 0;  // reductions done: parity chooses the partial buffer, value the adding warp

  // acc[matrix][h] = this warp's share of a row group's sums for the token in row `activations`.
  template <int P, bool DOWN>
  __device__ void accumulate(const u16* activations, float (*acc)[2][4]) {
    using F = Format<P>;
    constexpr int kMatrices = DOWN ? 1 : 2;
    constexpr int kBlocks = DOWN ? kInterBlocks : kHiddenBlocks;
    constexpr int kStageBlocks = DOWN ? DownStage<P>::kBlocks : F::kTiles / 2;
    uint4 next;
    if (warp < kBlocks) next = *reinterpret_cast<const uint4*>(activations + warp * 32);
    for (int first = 0; first < kBlocks; first += kStageBlocks) {
      barrier_wait(ring.full + ring.stage * 8, ring.parity);
      const u32 codes = ring.here(), scales = codes + F::kScaleOffset;
#pragma unroll
      for (int i = 0; i < (kStageBlocks + WARPS - 1) / WARPS; i++) {
        const int local = i * WARPS + warp, block = first + local;
        if (local < kStageBlocks && block < kBlocks) {
          const uint4 b = arrange<P>(next);
          const int ahead = local + WARPS < kStageBlocks ? block + WARPS : first + kStageBlocks + warp;
          if (ahead < kBlocks) next = *reinterpret_cast<const uint4*>(activations + ahead * 32);
#pragma unroll
          for (int m = 0; m < kMatrices; m++)
            tile_mma<P>(codes + (local * kMatrices + m) * F::kCodeBytes,
                        scales + (local * kMatrices + m) * F::kScaleBytes, g, t, b, acc[m]);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.empty + ring.stage * 8);
      ring.advance();
    }
  }

  // Adds the warps' sums, two columns a time, and hands (column, row's sums) to `store` in one warp
  // a column, a lane a row.
  template <int MATRICES, class Store>
  __device__ void reduce(const float (*acc)[2][4], int columns, Store store) {
    for (int column = 0; column < columns; column += 2) {
      float(*sums)[2][64] = shared.partial[sequence & 1];
      if (t == column / 2)
#pragma unroll
        for (int m = 0; m < MATRICES; m++)
#pragma unroll
          for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 4; e++)
              sums[warp][e & 1][m * 32 + h * 16 + (e >> 1) * 8 + g] = acc[m][h][e];
      named_barrier(1, kConsumers);
      const int mine = (warp + 2 * WARPS - 2 * sequence % WARPS) % WARPS;
      if (mine < min(2, columns - column)) {
        float sum[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; m++) {
          sum[m] = 0.0f;
#pragma unroll
          for (int w = 0; w < WARPS; w++) sum[m] += sums[w][mine][m * 32 + lane];
        }
        store(column + mine, sum);
      }
      sequence++;
    }
  }

  // One unit for one pass of tokens.
  template <int P, bool DOWN>
  __device__ void unit(int rank, int index, int first, const u16* x, u16* h, float* partial,
                       float limit) {
    const Plan& plan = shared.plan;
    const int columns = min(plan.count[rank] - first, tokens_per_pass(P));
    const int pair = plan.pair[rank][first + min(g, columns - 1)];
    const u16* row = DOWN ? h + u64(pair) * INTER : x + u64(pair / TOPK) * HIDDEN;
    float acc[DOWN ? 1 : 2][2][4] = {};
    accumulate<P, DOWN>(row + t * 8, acc);
    const float* factor = plan.factor[rank];
    reduce<DOWN ? 1 : 2>(acc, columns, [&](int column, const float* sum) {
      const u64 to = plan.pair[rank][first + column];
      const float power = Format<P>::kFactor;
      if constexpr (DOWN)
        partial[to * HIDDEN + index * 32 + lane] = sum[0] * factor[2] * power;
      else
        h[to * INTER + index * 32 + lane] =
            swiglu(sum[0] * factor[0] * power, sum[1] * factor[1] * power, limit);
    });
  }

  template <bool DOWN>
  __device__ void phase(const u16* x, u16* h, float* partial, float limit) {
    const Plan& plan = shared.plan;
    for (int rank = 0; rank < plan.ranks; rank++) {
      const int precision = plan.precision[rank], tokens = plan.count[rank];
      const int end = plan.range[DOWN][rank][1];
      for (int run = plan.range[DOWN][rank][0]; run < end; run += kPassUnits)
        for (int first = 0; first < tokens; first += tokens_per_pass(precision))
          for (int index = run; index < min(run + kPassUnits, end); index++) {
            if (precision == BASE) unit<BASE, DOWN>(rank, index, first, x, h, partial, limit);
            else if (precision == MXFP4) unit<MXFP4, DOWN>(rank, index, first, x, h, partial, limit);
            else unit<NVFP4, DOWN>(rank, index, first, x, h, partial, limit);
          }
    }
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
  const Meeting meeting(counter);  // before any thread of this block can have arrived
  make_plan(shared.plan, topk_ids, tokens, address, precision, factor);
  if (warp == WARPS) {
    produce(shared.plan, ring, lane);
    return;
  }
  Consumer consumer{shared, ring, warp, lane, lane / 4, lane % 4};
  consumer.phase<false>(x, h, partial, limit);
  named_barrier(1, kConsumers);
  if (threadIdx.x == 0) meeting.arrive();
  meeting.wait(1);
  consumer.phase<true>(x, h, partial, limit);
  named_barrier(1, kConsumers);
  if (threadIdx.x == 0) meeting.arrive();
  meeting.wait(2);
  weighted_sum(shared.plan, topk_weights, partial, out, tokens, add);
}
