// Routed experts of one layer for a few tokens: one persistent kernel, one block an SM.
//
// A producer warp streams the rows' tiles through a ring of shared-memory stages; the consumer
// warps decode words in registers, straight into tensor-core fragments. Every warp takes each
// WARPS-th k block of a row group, and the warps' sums are added in a fixed order. A block waits for
// others' results before an expert's down matrix (whose tiles are already under way), and for the
// weighted sum.
//
// Compile-time: HIDDEN, INTER, SLICES, EXPERTS, TOPK, MAX_TOKENS, WARPS, OUT_BF16.
#include "weights.cuh"

constexpr int kStageTiles = 64;  // 18 KiB
constexpr int kDownRows = 32;
constexpr int kHelperWarps = 1;  // the producer
__host__ __device__ constexpr int tokens_per_pass(int) { return 8; }

#include "exchange.cuh"
#include "producer.cuh"

struct Shared {
  Plan plan;
  float partial[2][WARPS][2][64];
  u32 launch;
  u64 full[32], empty[32];  // of the ring's stages
};

struct Consumer {
  Shared& shared;
  const Exchange& exchange;
  const float* factors;  // [EXPERTS][3]
  Ring ring;
  int warp, lane, g, t;
  u32 sequence = 0;  // reductions done: parity chooses the partial buffer, value the adding warp

  // acc[matrix][h] = this warp's share of a row group's sums for the token in row `activations`.
  template <int P, bool DOWN>
  __device__ void accumulate(const u16* activations, float (*acc)[2][4]) {
    using F = Format<P>;
    constexpr int kMatrices = DOWN ? 1 : 2;
    constexpr int kBlocks = DOWN ? kInterBlocks : kHiddenBlocks;
    constexpr int kStageBlocks = DOWN ? DownStage<P>::kBlocks : Stage<P>::kBlocks;
    uint4 next;
    if (warp < kBlocks) next = *reinterpret_cast<const uint4*>(activations + warp * 32);
    for (int first = 0; first < kBlocks; first += kStageBlocks) {
      barrier_wait(ring.full(), ring.parity);
      const u32 codes = ring.here(), scales = codes + Stage<P>::kScaleOffset;
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
      if (lane == 0) barrier_arrive(ring.empty());
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
  __device__ void unit(int rank, int index, int first, int columns, const u16* x, u16* h,
                       const Activation& activation) {
    const Plan& plan = shared.plan;
    const int pair = plan.pair[rank][first + min(g, columns - 1)];
    const u16* row = DOWN ? h + u64(pair) * INTER : x + u64(pair / TOPK) * HIDDEN;
    float acc[DOWN ? 1 : 2][2][4] = {};
    accumulate<P, DOWN>(row + t * 8, acc);
    const float* factor = factors + plan.expert[rank] * 3;
    reduce<DOWN ? 1 : 2>(acc, columns, [&](int column, const float* sum) {
      const u64 to = plan.pair[rank][first + column];
      const float power = Format<P>::kFactor;
      if constexpr (DOWN) {
        put(exchange.partial + to * HIDDEN + index * 32 + lane,
            __float_as_uint(sum[0] * factor[2] * power), exchange.launch);
      } else {
        h[to * INTER + index * 32 + lane] =
            float_to_bf16(activation(sum[0] * factor[0] * power, sum[1] * factor[1] * power,
                                     plan.expert[rank], index * 32 + lane));
        __threadfence();
        __syncwarp();
        if (lane == 0) put(exchange.largest + to * kInterBlocks + index, 0, exchange.launch);
      }
    });
  }

  // Until all of h is there for the tokens of a pass. By one warp.
  __device__ void await(int rank, int first, int columns) {
    for (int column = 0; column < columns; column++) {
      const Word* from = exchange.largest + shared.plan.pair[rank][first + column] * kInterBlocks;
      for (int i = lane; i < kInterBlocks; i += 32)
        while (get(from + i).launch != exchange.launch) {
        }
    }
    __threadfence();
  }

  template <bool DOWN>
  __device__ void phase(const u16* x, u16* h, const Activation& activation) {
    each_pass(shared.plan, DOWN, [&](const Pass& pass) {
      const int rank = pass.rank, first = pass.first, columns = pass.tokens;
      const int precision = shared.plan.precision[rank];
      if (DOWN) {
        if (warp == 0) await(rank, first, columns);
        named_barrier(1, kConsumers);
      }
      for (int i = pass.unit; i < pass.end; i++)
        if (precision == BASE) unit<BASE, DOWN>(rank, i, first, columns, x, h, activation);
        else if (precision == MXFP4) unit<MXFP4, DOWN>(rank, i, first, columns, x, h, activation);
        else unit<NVFP4, DOWN>(rank, i, first, columns, x, h, activation);
    });
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
decode_experts(const u16* x, const int* topk_ids, const float* topk_weights, const u64* address,
               const u8* precision, const float* factor, u16* h, Word* done, Word* partial,
               void* out, u64* arrivals, int tokens, int stages, float limit, int add
               BIAS_PARAMETER) {
  extern __shared__ __align__(128) u8 buffer[];
  __shared__ Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Ring ring(stages, shared_address(shared.full), shared_address(buffer));
  const Launches launches{arrivals};
  if (warp == 0) {
    make_plan(shared.plan, topk_ids, tokens, address, precision);
    order_pairs(shared.plan, tokens * TOPK, lane);
  } else if (warp == WARPS) {
    if (lane < stages) {
      barrier_init(shared_address(shared.full + lane), kFullArrivals);
      barrier_init(shared_address(shared.empty + lane), WARPS);
#if __CUDA_ARCH__ >= 900
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // for the copy engine
#endif
    }
    if (lane == 0) shared.launch = launches.number();
  }
  __syncthreads();
  const Exchange exchange{nullptr, done, partial, shared.launch};
  if (warp == WARPS) {
    produce(shared.plan, ring, lane);
    exchange.forget(shared.plan, tokens * TOPK, lane);
    if (lane == 0) launches.arrive();
    return;
  }
  Consumer consumer{shared, exchange, factor, ring, warp, lane, lane / 4, lane % 4};
  const Activation activation{limit BIAS_ARGUMENT};
  consumer.phase<false>(x, h, activation);
  consumer.phase<true>(x, h, activation);
  weighted_sum(shared.plan, exchange, topk_weights, out, tokens, add);
}
