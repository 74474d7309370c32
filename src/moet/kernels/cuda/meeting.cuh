// Blocks that wait for one another, and the weighted sum that follows the last meeting.
#pragma once
#include "plan.cuh"

// Two meetings of all blocks in a launch. The counter only grows, by twice the number of blocks a
// launch, so that it needs no reset and tells which launch this is until this block has arrived
// twice. All blocks are resident (a cooperative launch), so that waiting ends.
struct Meeting {
  u64* counter;
  u64 start;

  __device__ explicit Meeting(u64* c) : counter(c) {
    const u64 now = load_acquire(c);
    start = now - now % (2 * gridDim.x);
  }

  // One thread a block, after a barrier with those whose writes the others shall see. A block must
  // not arrive the second time before it has seen the first meeting.
  __device__ void arrive() const {
    __threadfence();
    atomicAdd(counter, 1ull);
  }

  // One thread: waits until every block has arrived `times` times.
  __device__ void await(int times) const {
    while (load_acquire(counter) < start + times * gridDim.x) {
    }
  }

  // The same for all consumer warps.
  __device__ void wait(int times) const {
    if (threadIdx.x == 0) await(times);
    named_barrier(1, kConsumers);
  }
};

// out[t] (+)= Σ weight · partial over t's pairs, ascending by expert.
__device__ __forceinline__ void weighted_sum(const Plan& plan, const float* topk_weights,
                                             const float* partial, void* out, int tokens,
                                             bool add) {
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
#pragma unroll
    for (int k = 0; k < TOPK; k++) {
      const int pair = plan.order[token * TOPK + k];
      if (pair != kNone) sum += topk_weights[pair] * partial[u64(pair) * HIDDEN + column];
    }
#if OUT_BF16
    *to = float_to_bf16(sum);
#else
    *to = sum;
#endif
  }
}

__device__ __forceinline__ u16 swiglu(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return float_to_bf16(gate / (1.0f + __expf(-gate)) * up);
}
