// What blocks hand one another within a launch: 64-bit words of a value and the launch's number.
//
// A reader takes a word whose number is this launch's, and loads it again otherwise; so nobody waits
// for fences or counters, and a row of h is used as soon as it is there. All blocks are resident (a
// cooperative launch) and no writer waits for a reader, so that every word comes.
#pragma once
#include "plan.cuh"

struct Word {
  u32 value, launch;
};

__device__ __forceinline__ void put(Word* at, u32 value, u32 launch) {
  asm volatile("{ .reg .b64 w; mov.b64 w, {%1, %2}; st.relaxed.gpu.global.b64 [%0], w; }"
               :: "l"(at), "r"(value), "r"(launch) : "memory");
}

__device__ __forceinline__ Word get(const Word* at) {
  Word v;
  asm volatile("{ .reg .b64 w; ld.relaxed.gpu.global.b64 w, [%2]; mov.b64 {%0, %1}, w; }"
               : "=r"(v.value), "=r"(v.launch) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ void get2(const Word* at, Word* v) {
  asm volatile(
      "{ .reg .b64 a, b; ld.relaxed.gpu.global.v2.b64 {a, b}, [%4]; mov.b64 {%0, %1}, a;\n"
      "mov.b64 {%2, %3}, b; }"
      : "=r"(v[0].value), "=r"(v[0].launch), "=r"(v[1].value), "=r"(v[1].launch)
      : "l"(at) : "memory");
}

// The blocks' arrivals in all launches. A block arrives at its end, so that what it reads before is
// this launch's number times the blocks, and less than one launch more.
struct Launches {
  u64* arrivals;

  // Never 0, which is what a cleared word has.
  __device__ u32 number() const { return u32(load_relaxed(arrivals) / gridDim.x % 0xFFFFFFFFu) + 1; }
  __device__ void arrive() const { atomicAdd(arrivals, 1ull); }
};

// The buffers of an instance, by pair.
struct Exchange {
  Word* h;        // [pairs][INTER / 2]: two BF16 values a word (0: h is elsewhere)
  Word* largest;  // [pairs][INTER / 32]: of |h|, as BF16 bits, by unit
  Word* partial;  // [pairs][HIDDEN]: an expert's output, float32
  u32 launch;

  // Clears the pair that is this launch's turn, unless the launch writes it anyway: no word keeps
  // its number for kMaxPairs launches, so that numbers may come round. By one warp.
  __device__ void forget(const Plan& plan, int pairs, int lane) const {
    const int pair = launch % kMaxPairs;
    if (blockIdx.x || (pair < pairs && plan.chosen[pair] != kNone)) return;
    if (h)
      for (int i = lane; i < INTER / 2; i += 32) put(h + u64(pair) * (INTER / 2) + i, 0, 0);
    for (int i = lane; i < kInterBlocks; i += 32) put(largest + pair * kInterBlocks + i, 0, 0);
    for (int i = lane; i < HIDDEN; i += 32) put(partial + u64(pair) * HIDDEN + i, 0, 0);
  }
};

// out[t] (+)= Σ weight · partial over t's pairs, ascending by expert; by all consumer warps.
__device__ __forceinline__ void weighted_sum(const Plan& plan, const Exchange& exchange,
                                             const float* topk_weights, void* out, int tokens,
                                             bool add) {
  // A warp's 32 columns at a time, dealt to the blocks in turn.
  const int first = (threadIdx.x / 32 * gridDim.x + blockIdx.x) * 32 + threadIdx.x % 32;
  for (int i = first; i < tokens * HIDDEN; i += gridDim.x * kConsumers) {
    const int token = i / HIDDEN, column = i % HIDDEN;
    Word words[TOPK];
#pragma unroll
    for (int k = 0; k < TOPK; k++) {
      const int pair = plan.order[token * TOPK + k];
      if (pair != kNone) words[k] = get(exchange.partial + u64(pair) * HIDDEN + column);
    }
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
      if (pair == kNone) continue;
      while (words[k].launch != exchange.launch)
        words[k] = get(exchange.partial + u64(pair) * HIDDEN + column);
      sum += topk_weights[pair] * __uint_as_float(words[k].value);
    }
#if OUT_BF16
    *to = float_to_bf16(sum);
#else
    *to = sum;
#endif
  }
}
