// Which rows in host memory the next layer will probably read: its router, applied to this layer's
// input. `guess` runs beside this layer's ensure, `plan_guess` when that has ended: entries that were
// read before an answer to a request must not be used after it.
//
// Compile-time: see stage.cuh; HIDDEN, TOP_K.
#include "stage.cuh"

constexpr int kWarps = kThreads / 32;  // experts a block
constexpr int kOfLane = (EXPERTS + 31) / 32;
static_assert(HIDDEN % 8 == 0, "whole loads");

__device__ __forceinline__ float product(uint4 a, uint4 b) {
  const u32 v[4] = {a.x, a.y, a.z, a.w}, w[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++)
    sum += __uint_as_float(v[i] << 16) * __uint_as_float(w[i] << 16) +
           __uint_as_float(v[i] & 0xFFFF0000u) * __uint_as_float(w[i] & 0xFFFF0000u);
  return sum;
}

// A number in the order of the scores. scoring: 0: of the logits, 1: of their sigmoids + bias,
// 2: of √softplus + bias.
__device__ __forceinline__ u32 rank_of(float logit, int scoring, const float* bias, int expert) {
  float score = logit;
  if (scoring == 1) score = 1.0f / (1.0f + __expf(-logit));
  if (scoring == 2) score = sqrtf(logit > 20.0f ? logit : __logf(1.0f + __expf(logit)));
  if (scoring) score += __ldg(bias + expert);
  const u32 bits = __float_as_uint(score);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// x: bfloat16 [tokens, HIDDEN]. ids: [tokens, TOP_K], this layer's experts; −1 for padding. router: bfloat16 [EXPERTS, HIDDEN]; bias: [EXPERTS], if `scoring`.
// logits: float32 [tokens, EXPERTS], for itself. arrived: 0, as it leaves it. wanted: [EXPERTS], by
// how many tokens; written. Every block has kWarps experts.
extern "C" __global__ void __launch_bounds__(kThreads)
guess(const u16* x, const int* ids, int tokens, const u16* router, const float* bias, int scoring,
      float* logits, u32* arrived, u32* wanted) {
  constexpr int kAtOnce = 4;  // tokens, for the weights to be loaded once
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int expert = blockIdx.x * kWarps + warp;
  for (int first = 0; expert < EXPERTS && first < tokens; first += kAtOnce) {
    float sum[kAtOnce] = {};
#pragma unroll 2
    for (int k = lane * 8; k < HIDDEN; k += 256) {
      const uint4 w = __ldg(reinterpret_cast<const uint4*>(router + u64(expert) * HIDDEN + k));
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const u16* of = x + u64(min(first + i, tokens - 1)) * HIDDEN;
        sum[i] += product(w, __ldg(reinterpret_cast<const uint4*>(of + k)));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum[i] += __shfl_xor_sync(kAll, sum[i], step);
      if (lane == 0 && first + i < tokens) logits[(first + i) * EXPERTS + expert] = sum[i];
    }
  }

  __shared__ u32 used[EXPERTS];
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrived, 1) == gridDim.x - 1;
  for (int i = threadIdx.x; i < EXPERTS; i += kThreads) used[i] = 0;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int token = warp; token < tokens; token += kWarps) {
    if (__ldg(ids + token * TOP_K) < 0) continue;
    u32 rank[kOfLane];
#pragma unroll
    for (int i = 0; i < kOfLane; i++) {
      const int e = i * 32 + lane;
      rank[i] = e < EXPERTS ? rank_of(__ldcg(logits + token * EXPERTS + e), scoring, bias, e) : 0;
    }
    for (int k = 0; k < TOP_K; k++) {
      u32 best = 0;
      int at = 0;
#pragma unroll
      for (int i = 0; i < kOfLane; i++)
        if (rank[i] > best) best = rank[i], at = i;
      const u32 most = __reduce_max_sync(kAll, best);
      const int holder = __ffs(__ballot_sync(kAll, best == most)) - 1;
      if (lane != holder || !most) continue;
      atomicAdd(&used[at * 32 + lane], 1u);
#pragma unroll
      for (int i = 0; i < kOfLane; i++)
        if (i == at) rank[i] = 0;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < EXPERTS; i += kThreads) wanted[i] = used[i];
  if (threadIdx.x == 0) *arrived = 0;
}

// Gives those of the wanted rows that lie in host memory one of `slots` each, the ones that most
// tokens want first. By one block.
extern "C" __global__ void __launch_bounds__(kThreads)
plan_guess(int layer, const u64* table, const u8* code, const u32* wanted, int slots, int* slot,
           Source* sources, int* count) {
  __shared__ u32 key[EXPERTS];
  __shared__ Source source[EXPERTS];
  for (int expert = threadIdx.x; expert < EXPERTS; expert += kThreads) {
    const u32 tokens = wanted[expert];
    const u8 kind = code[layer * EXPERTS + expert];
    const u64 entry = tokens ? find(table, layer, expert, kind) : 0;
    source[expert] = {entry - kHostEntry, row_bytes(plane_of(kind))};
    key[expert] = entry & kHostEntry ? min(tokens, 0xFFFFu) << 16 | (0xFFFF - expert) : 0;
    slot[expert] = -1;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  int taken = 0;
  for (; taken < slots; taken++) {
    u32 best = 0;
    for (int i = threadIdx.x; i < EXPERTS; i += 32) best = max(best, key[i]);
    best = __reduce_max_sync(kAll, best);
    if (!best) break;
    const int expert = 0xFFFF - (best & 0xFFFF);
    __syncwarp();
    if (threadIdx.x == 0) slot[expert] = taken, sources[taken] = source[expert], key[expert] = 0;
    __syncwarp();
  }
  if (threadIdx.x == 0) *count = taken;
}
