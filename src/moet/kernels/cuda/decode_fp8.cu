// Routed experts of one layer for a few tokens, on FP8 tensor cores (sm_89 and later).
//
// One persistent kernel, one block an SM. A producer warp streams rows' tiles through a ring of
// shared-memory stages; converter warps make E4M3 columns of the activations; the consumer warps
// decode words in registers to E4M3 weights, base scale included, that enter the MMA from there; a
// finishing warp adds the warps' sums in a fixed order. A block waits for others' results word by
// word (exchange.cuh): h before an expert's down matrix, whose tiles are already under way, and the
// experts' outputs before the weighted sum.
//
// Compile-time: HIDDEN, INTER, SLICES, EXPERTS, TOPK, MAX_TOKENS, WARPS, OUT_BF16,
// FP8_ACTIVATIONS; WGMMA on sm_90a.
#include "fp8.cuh"

constexpr int kStageTiles = 64;  // 18 KiB
constexpr int kDownRows = 64;
constexpr int kHelperWarps = 4;  // the producer, the finisher, two converters
// NVFP4 has two scales a k block: a token takes twice the columns, k 0..15 apart from k 16..31.
__host__ __device__ constexpr int tokens_per_pass(int precision) {
  return (precision == NVFP4 ? 2 : 4) * (FP8_ACTIVATIONS ? 2 : 1);
}

#include "consumer.cuh"

// By one warp.
__device__ __forceinline__ void initialize(int stages, int lane) {
  if (lane < stages) {
    barrier_init(shared_address(shared.full + lane), kFullArrivals);
    barrier_init(shared_address(shared.empty + lane), WARPS);
  }
  if (lane == 0) barrier_init(shared_address(&shared.ordered), 32);
  if (lane < 2) {
    barrier_init(shared_address(shared.sums.freed + lane), 32);
    barrier_init(shared_address(shared.columns.converted + lane), kConverters * 32);
    // All lanes of the first warp arrive, for they read what undoes a token's scaling.
    barrier_init(shared_address(shared.columns.consumed + lane), WARPS - 1 + 32);
  }
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // for the copy engine
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
decode_experts(const u16* x, const int* topk_ids, const float* topk_weights, const u64* address,
               const u8* precision, const float* factor, Word* h, Word* largest, Word* partial,
               void* out, u64* arrivals, int tokens, int stages, float limit, int add
               BIAS_PARAMETER) {
  extern __shared__ __align__(128) u8 buffer[];
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Plan& plan = shared.plan;
  const Launches launches{arrivals};
  const Ring ring(stages, shared_address(shared.full), shared_address(buffer));
  const u32 columns = ring.buffer + stages * kStageBytes;
  if (warp >= WARPS) {
    if (warp == WARPS) initialize(stages, lane);
    if (threadIdx.x == kConsumers + 32)
      shared.exchange = Exchange{h, largest, partial, launches.number()};
    __syncthreads();
    if (warp == WARPS) {
      produce(plan, ring, lane);
    } else if (warp == WARPS + 1) {
      order_pairs(shared.plan, tokens * TOPK, lane);
      barrier_arrive(shared_address(&shared.ordered));
      const Activation activation{limit BIAS_ARGUMENT};
      Finisher finisher{factor, lane};
      finisher.phase<false>(activation);
      finisher.phase<true>(activation);
      shared.exchange.forget(plan, tokens * TOPK, lane);
      if (lane == 0) launches.arrive();
    } else {
      Converter converter{x, columns, int(threadIdx.x) - (WARPS + 2) * 32};
      converter.phase(false);
      converter.phase(true);
    }
  } else {
    if (warp == 0) {
      make_plan(shared.plan, topk_ids, tokens, address, precision);
    } else {
      largest_values(x, tokens);
      if (tokens == 1) convert_early(x, topk_ids, precision, columns);
    }
    __syncthreads();
    const int first = plan.precision[plan.first[0] % kMaxPairs];
    Consumer consumer{x, ring, columns, Lane{warp, lane, lane / 4, lane % 4}};
    consumer.phase<false>(tokens == 1 && shared.columns.early == first);
    consumer.phase<true>(false);
    barrier_wait(shared_address(&shared.ordered), 0);
    weighted_sum(plan, shared.exchange, topk_weights, out, tokens, add);
  }
}
