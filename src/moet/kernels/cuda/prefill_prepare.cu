// Prefill around its matrix products: routing sorted by expert, activations in the order of the
// fragments, and the weighted sum.
#include "prefill_layout.cuh"
#include "prefill_device.cuh"

constexpr u32 kAll = 0xFFFFFFFFu;
constexpr int kThreads = 1024;

// ---- routing: by one block ----

struct Count {
  int pairs[EXPERTS];
  int next[EXPERTS];  // the sorted position that the expert's next pair takes
  u8 live[EXPERTS];
  int warp[32];
  int tiles[9];  // by size, in 16 tokens; then where those tiles begin
};

// Calls f(pair, expert, same) with all lanes; same: the lanes of this warp with the same expert.
template <class F>
__device__ __forceinline__ void each_pair(const Count& count, const int* topk_ids, int pairs, F f) {
#pragma unroll 4
  for (int first = 0; first < pairs; first += kThreads) {
    const int pair = first + threadIdx.x;
    int expert = pair < pairs ? topk_ids[pair] : -1;
    if (expert < 0 || expert >= EXPERTS || !count.live[expert]) expert = -1;
    f(pair, expert, __match_any_sync(kAll, expert));
  }
}

__device__ void route(const int* topk_ids, int pairs, const u64* address, const u8* precision,
                      const float* factor, State* state, Tile* tiles, int* sorted) {
  __shared__ Count count;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, expert = threadIdx.x;
  const u64 row = expert < EXPERTS ? address[expert] : 0;
  if (expert < EXPERTS) count.pairs[expert] = 0, count.live[expert] = row != 0;
  if (expert < 9) count.tiles[expert] = 0;
  __syncthreads();
  each_pair(count, topk_ids, pairs, [&](int, int e, u32 same) {
    if (e >= 0 && lane == __ffs(same) - 1) atomicAdd(&count.pairs[e], __popc(same));
  });
  __syncthreads();

  const int own = expert < EXPERTS ? count.pairs[expert] : 0;
  int before = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAll, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) count.warp[warp] = before;
  // Tiles of equal sizes in steps of 16, the last one smaller; the largest tiles come first.
  const int parts = (own + TILE_TOKENS - 1) / TILE_TOKENS;
  const int size = parts ? ((own + parts - 1) / parts + 15) / 16 * 16 : 16;
  if (parts) atomicAdd(&count.tiles[size / 16], parts);
  __syncthreads();
  before -= own;
  for (int w = 0; w < warp; w++) before += count.warp[w];
  if (expert < EXPERTS) count.next[expert] = before;
  if (threadIdx.x == 0) {
    int first = 0;
    for (int c = 8; c >= 0; c--) {
      const int n = count.tiles[c];
      count.tiles[c] = first;
      first += n;
    }
    *state = {first, {0, 0}};
  }
  __syncthreads();
  if (parts) {
    const int at = atomicAdd(&count.tiles[size / 16], parts);
    const float* f = factor + expert * 3;
    for (int i = 0; i < parts; i++)
      tiles[at + i] = {row, before + i * size, min(size, own - i * size), {f[0], f[1], f[2]},
                       precision[expert] & ~kRemote
#if GPT_OSS
                       , expert
#endif
      };
  }
  each_pair(count, topk_ids, pairs, [&](int pair, int e, u32 same) {
    const int leader = __ffs(same) - 1;
    int at = 0;
    if (e >= 0 && lane == leader) at = atomicAdd(&count.next[e], __popc(same));
    at = __shfl_sync(kAll, at, leader) + __popc(same & ((1u << lane) - 1));
    if (e >= 0) sorted[at] = pair;
  });
}

// ---- activations ----

#if FP8_ACTIVATIONS
// One row of K values as E4M3: a scale a row. By one warp.
// word(block, t, j): the pair of values k = 8t + j and k + 1, j even.
template <int K, class Word>
__device__ void row_to_e4m3(Word word, u8* to, float* scale_to, int lane) {
  u32 largest = 0;
  for (int i = lane; i < K / 2; i += 32) {
    const u32 v = word(i / 16, i / 4 % 4, i % 4 * 2);
    largest = max(largest, max(v & 0x7FFF, v >> 16 & 0x7FFF));
  }
  largest = __reduce_max_sync(kAll, largest);
  const float inverse = __uint_as_float(largest << 16) * (1.0f / 448.0f);
  const float scale = inverse > 0x1p-120f ? 1.0f / inverse : 0.0f;
  if (lane == 0) *scale_to = inverse;
  for (int i = lane; i < K / 16; i += 32) {  // 16 bytes: four lanes' words of a k half block
    const int block = i / 2, half = i % 2;
    u32 v[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const u32 a = word(block, t, 4 + 2 * half), b = word(block, t, 2 * half);
      v[t] = to_e4m3x4(__uint_as_float(a << 16) * scale, __uint_as_float(b << 16) * scale,
                       __uint_as_float(a & 0xFFFF0000u) * scale,
                       __uint_as_float(b & 0xFFFF0000u) * scale);
    }
    *reinterpret_cast<uint4*>(to + i * 16) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}
#endif

// A token's row in the order of BF16 fragments.
template <bool FP4>
__device__ void row_to_bf16(const u32* x, uint4* to, int lane) {
#pragma unroll 2
  for (int i = lane; i < HIDDEN / 8; i += 32) {
    const u32* from = x + i / 4 * 16;
    const int s = i / 2 % 2, c = i % 2;
    u32 v[4];
#pragma unroll
    for (int t = 0; t < 4; t++)
      v[t] = FP4 ? __byte_perm(from[4 * t + s], from[4 * t + s + 2], c ? 0x7632 : 0x5410)
                 : from[4 * t + 2 * s + c];
    to[i] = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// The first block sorts the routing; the others put x in the order that base rows and FP4 rows
// want, as far as there are any.
extern "C" __global__ void __launch_bounds__(kThreads)
prepare(const u16* x, const int* topk_ids, int tokens, const u64* address, const u8* precision,
        const float* factor, State* state, Tile* tiles, int* sorted, u8* x_base, u8* x_fp4,
        float* x_scale) {
  if (blockIdx.x == 0) {
    route(topk_ids, tokens * TOPK, address, precision, factor, state, tiles, sorted);
    return;
  }
  const bool live = threadIdx.x < EXPERTS && address[threadIdx.x];
  const int kind = live ? precision[threadIdx.x] & ~kRemote : BASE;
  const bool fp4 = __syncthreads_or(live && kind != BASE);
  const bool base = __syncthreads_or(live && kind == BASE);
  const int lane = threadIdx.x % 32, warps = (gridDim.x - 1) * (kThreads / 32);
  for (int token = (blockIdx.x - 1) * (kThreads / 32) + threadIdx.x / 32; token < tokens;
       token += warps) {
    const u32* row = reinterpret_cast<const u32*>(x + u64(token) * HIDDEN);
    if (fp4)
      row_to_bf16<true>(row, reinterpret_cast<uint4*>(x_fp4 + u64(token) * HIDDEN * 2), lane);
    if (!base) continue;
#if FP8_ACTIVATIONS
    row_to_e4m3<HIDDEN>([&](int block, int t, int j) { return row[block * 16 + t * 4 + j / 2]; },
                        x_base + u64(token) * HIDDEN, x_scale + token, lane);
#else
    row_to_bf16<false>(row, reinterpret_cast<uint4*>(x_base + u64(token) * HIDDEN * 2), lane);
#endif
  }
}

#if FP8_ACTIVATIONS
// The hidden activations of base rows, BF16 in base order → E4M3. A block a tile in turn.
extern "C" __global__ void __launch_bounds__(256)
quantize_hidden(const State* state, const Tile* tiles, const u8* h, u8* h_e4m3, float* h_scale) {
  const int lane = threadIdx.x % 32;
  for (int i = blockIdx.x / 4; i < state->tiles; i += gridDim.x / 4) {
    const Tile tile = tiles[i];
    if (tile.precision != BASE) continue;
    for (int at = blockIdx.x % 4 * 8 + threadIdx.x / 32; at < tile.count; at += 32) {
      const u64 position = tile.first + at;
      const u32* row = reinterpret_cast<const u32*>(h + position * INTER * 2);
      row_to_e4m3<INTER>([&](int block, int t, int j) { return row[block * 16 + j * 2 + t]; },
                         h_e4m3 + position * INTER, h_scale + position, lane);
    }
  }
}
#endif

// ---- out[t] (+)= Σ weight · partial over t's pairs, ascending by expert; a block a token ----

extern "C" __global__ void __launch_bounds__(256)
weighted_sum(const uint4* partial, const int* topk_ids, const float* topk_weights,
             const u64* address, void* out, int add) {
  __shared__ int order[TOPK];  // pairs; −1 after the last
  const int token = blockIdx.x;
  if (threadIdx.x < TOPK) order[threadIdx.x] = -1;
  __syncthreads();
  if (threadIdx.x < TOPK) {
    const auto expert_of = [&](int k) {
      const int expert = topk_ids[token * TOPK + k];
      return expert >= 0 && expert < EXPERTS && address[expert] ? expert : -1;
    };
    const int own = expert_of(threadIdx.x);
    int place = 0;
    for (int k = 0; k < TOPK; k++) {
      const int other = expert_of(k);
      place += other >= 0 && (other < own || other == own && k < threadIdx.x);
    }
    if (own >= 0) order[place] = token * TOPK + threadIdx.x;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < HIDDEN / 8; i += 256) {
    float sum[8] = {};
    const u64 at = u64(token) * (HIDDEN / 8) + i;
#if OUT_BF16
    uint4* to = static_cast<uint4*>(out) + at;
    if (add) {
      const uint4 v = *to;
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] = bf16_to_float(u16(words[j / 2] >> 16 * (j % 2)));
    }
#else
    float4* to = static_cast<float4*>(out) + at * 2;
    if (add) {
      const float4 low = to[0], high = to[1];
      sum[0] = low.x, sum[1] = low.y, sum[2] = low.z, sum[3] = low.w;
      sum[4] = high.x, sum[5] = high.y, sum[6] = high.z, sum[7] = high.w;
    }
#endif
    uint4 values[TOPK];
#pragma unroll
    for (int k = 0; k < TOPK; k++)
      if (order[k] >= 0) values[k] = partial[u64(order[k]) * (HIDDEN / 8) + i];
#pragma unroll
    for (int k = 0; k < TOPK; k++) {
      if (order[k] < 0) continue;
      const float weight = topk_weights[order[k]];
      const u32 words[4] = {values[k].x, values[k].y, values[k].z, values[k].w};
#pragma unroll
      for (int j = 0; j < 8; j++)
        sum[j] += weight * bf16_to_float(u16(words[j / 2] >> 16 * (j % 2)));
    }
#if OUT_BF16
    *to = make_uint4(to_bf16x2(sum[0], sum[1]), to_bf16x2(sum[2], sum[3]),
                     to_bf16x2(sum[4], sum[5]), to_bf16x2(sum[6], sum[7]));
#else
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
#endif
  }
}
