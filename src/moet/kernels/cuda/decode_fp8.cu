// Routed experts of one layer for a few tokens, on FP8 tensor cores (sm_89 and later).
//
// One persistent kernel, one block an SM. A producer warp streams rows' tiles through a ring of
// shared-memory stages; converter warps make E4M3 columns of the activations; the consumer warps
// decode words in registers to E4M3 weights, base scale included, that enter the MMA from there; a
// finishing warp adds the warps' sums in a fixed order. The blocks meet twice: before the down
// matrices (whose tiles are already under way), and before the weighted sum.
//
// Compile-time: HIDDEN, INTER, SLICES, EXPERTS, TOPK, MAX_TOKENS, WARPS, OUT_BF16,
// FP8_ACTIVATIONS; WGMMA on sm_90a, BLOCK_SCALED on sm_120a.
#include "fp8.cuh"

constexpr int kDownRows = 64;
constexpr int kHelperWarps = 4;  // the producer, the finisher, two converters
// NVFP4 has two scales a k block: a token takes twice the columns, k 0..15 apart from k 16..31.
__host__ __device__ constexpr int tokens_per_pass(int precision) {
  return (precision == NVFP4 ? 2 : 4) * (FP8_ACTIVATIONS ? 2 : 1);
}

#include "consumer.cuh"

struct Shared {
  Plan plan;
  Columns columns;
  Sums sums;
  u32 launch;
  u64 full[32];
  u64 empty[32];
};

// By one warp: barriers, and the launch's number.
__device__ __forceinline__ void initialize(Shared& shared, int stages, const Launches& launches,
                                           int lane) {
  if (lane < stages) {
    barrier_init(shared_address(shared.full + lane), kFullArrivals);
    barrier_init(shared_address(shared.empty + lane), WARPS);
  }
  if (lane < 2) {
    barrier_init(shared_address(shared.sums.summed + lane), WARPS);
    barrier_init(shared_address(shared.sums.freed + lane), 1);
    barrier_init(shared_address(shared.columns.converted + lane), kConverters * 32);
    barrier_init(shared_address(shared.columns.consumed + lane), WARPS);
  }
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // for the copy engine
#endif
  if (lane == 0) shared.launch = launches.number();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
decode_experts(const u16* x, const int* topk_ids, const float* topk_weights, const u64* address,
               const u8* precision, const float* factor, Word* h, Word* largest, Word* partial,
               void* out, u64* arrivals, int tokens, int stages, float limit, int add) {
  extern __shared__ __align__(128) u8 buffer[];
  __shared__ Shared shared;
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Plan& plan = shared.plan;
  const Launches launches{arrivals};
  if (warp == 0) make_plan(shared.plan, topk_ids, tokens, address, precision);
  else if (warp < WARPS) largest_values(shared.columns, x, tokens);
  else if (warp == WARPS) initialize(shared, stages, launches, lane);
  __syncthreads();

  const Exchange exchange{h, largest, partial, shared.launch};
  const Ring ring(stages, kept(shared_address(shared.full)), kept(shared_address(shared.empty)),
                  kept(shared_address(buffer)));
  const u32 columns = ring.buffer + stages * kStageBytes;
  if (warp == WARPS) {
    produce(plan, ring, lane);
  } else if (warp == WARPS + 1) {
    Finisher finisher{plan, shared.sums, exchange, factor, lane};
    finisher.phase<false>(limit);
    finisher.phase<true>(limit);
    exchange.forget(plan, tokens * TOPK, lane);
    if (lane == 0) launches.arrive();
  } else if (warp > WARPS + 1) {
    Converter converter{plan, shared.columns, exchange, x, columns,
                        int(threadIdx.x) - (WARPS + 2) * 32};
    converter.phase(false);
    converter.phase(true);
  } else {
    Consumer consumer{plan, shared.columns, shared.sums, exchange, x, ring, columns,
                      Lane{warp, lane, lane / 4, lane % 4}};
    consumer.phase<false>();
    consumer.phase<true>();
    weighted_sum(plan, exchange, topk_weights, out, tokens, add);
  }
}
