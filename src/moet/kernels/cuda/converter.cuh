// BF16 activations → E4M3 columns for the FP8 tensor cores.
//
// A BF16 value becomes two E4M3 columns, hi and 16 × what hi lost (FP8_ACTIVATIONS: hi alone),
// after a power of two a token that brings its largest value into [128, 256). Shared memory holds
// [K / 16][8 columns][16] bytes, twice: one side is converted while the other is used.
#pragma once
#include "exchange.cuh"

constexpr int kParts = FP8_ACTIVATIONS ? 1 : 2;  // columns a token (NVFP4: twice as many)
constexpr int kMostTokens = 8 / kParts;          // a pass
constexpr int kConverters = 2;                   // warps
constexpr u32 kColumnBytes = 8 * (HIDDEN > INTER ? HIDDEN : INTER) + 256;  // a k block of zeros

struct Columns {
  u32 part[MAX_TOKENS][WARPS];      // a warp's largest |x| of a token, as BF16 bits
  u32 scale[2][kMostTokens];        // of a side's tokens: a float's bits
  float inverse[2][kMostTokens];    // what undoes a token's scaling
  u8 token0;                        // a pair of the first token: 0
  int early;                        // the precision that a lone token's columns are for
  u64 converted[2];                 // barriers: a side's columns are there; it may be written again
  u64 consumed[2];
};

struct Sums {
  float sum[2][WARPS / 2][kMostTokens][64];  // by warp pair, tiles of one k block
  float inverse[2][kMostTokens];
  u64 freed[2];  // barriers: a side may be written again
};
constexpr int kSummed = 5;  // the first of two named barriers: all sums of a unit are there

struct Shared {
  Plan plan;
  Columns columns;
  Sums sums;
  Exchange exchange;  // (in local memory it would be slow to reach while the copies run)
  u64 ordered;              // barrier: the plan's order is there
  u64 full[32], empty[32];  // of the ring's stages
};
__shared__ Shared shared;

__device__ __forceinline__ u32 largest_of(uint4 v) {
  const u32 a = max(max(v.x & 0x7FFF, v.y & 0x7FFF), max(v.z & 0x7FFF, v.w & 0x7FFF));
  const u32 b =
      max(max(v.x & 0x7FFF0000, v.y & 0x7FFF0000), max(v.z & 0x7FFF0000, v.w & 0x7FFF0000));
  return max(a, b >> 16);
}

// The largest |x| of every token, by the consumer warps but the first, which makes the plan.
__device__ __forceinline__ void largest_values(const u16* x, int tokens) {
  constexpr int kAtOnce = 4;  // tokens, for their loads' latencies to overlap
  for (int first = 0; first < tokens; first += kAtOnce) {
    u32 largest[kAtOnce] = {};
    for (int k = (threadIdx.x - 32) * 8; k < HIDDEN; k += (kConsumers - 32) * 8) {
      uint4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++)
        v[i] = *reinterpret_cast<const uint4*>(x + u64(min(first + i, tokens - 1)) * HIDDEN + k);
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) largest[i] = max(largest[i], largest_of(v[i]));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const u32 all = __reduce_max_sync(0xFFFFFFFFu, largest[i]);
      if (threadIdx.x % 32 == 0 && first + i < tokens)
        shared.columns.part[first + i][threadIdx.x / 32] = all;
    }
  }
}

// Two values → two E4M3 bytes, and two of 16 × the remainder. (F16 holds a BF16 of at most 256
// exactly down to 2^-17; what is smaller is 2^-25 of the token's largest.)
__device__ __forceinline__ void split(float a, float b, u32* part) {
  u16 hi, lo;
  asm("{ .reg .b32 v, back; .reg .b16 h;\n"
      "cvt.rn.satfinite.e4m3x2.f32 h, %3, %2;\n"
      "cvt.rn.f16x2.e4m3x2 back, h; cvt.rn.f16x2.f32 v, %3, %2;\n"
      "sub.rn.f16x2 v, v, back; mul.rn.f16x2 v, v, %4;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 %1, v; mov.b16 %0, h; }"
      : "=h"(hi), "=h"(lo) : "f"(a), "f"(b), "r"(0x4C004C00u));
  part[0] = hi, part[1] = lo;
}

// Eight values, and where their columns go.
struct Chunk {
  uint4 v;

  __device__ __forceinline__ void load(const Exchange& exchange, const u16* x, int pair, int k,
                                       bool down) {
    if (down) {
      const Word* from = exchange.h + u64(pair) * (INTER / 2) + k / 2;
      Word w[4];
      do {
        get2(from, w), get2(from + 2, w + 2);
      } while (w[0].launch != exchange.launch || w[1].launch != exchange.launch ||
               w[2].launch != exchange.launch || w[3].launch != exchange.launch);
      v = make_uint4(w[0].value, w[1].value, w[2].value, w[3].value);
    } else {
      v = *reinterpret_cast<const uint4*>(x + u64(pair / TOPK) * HIDDEN + k);
    }
  }

  // `to`: of the token's first column in the k block. order: which k the low and the high four
  // bytes of a half are; base 4, 0, 5, 1 and 6, 2, 7, 3, FP4 the even and the odd ones.
  __device__ __forceinline__ void store(u32 to, int k, float scale, u32 order, bool halves) const {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
    u32 hi[2], lo[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 part[2];
      split(__uint_as_float(pairs[i] << 16) * scale, __uint_as_float(pairs[i] & 0xFFFF0000u) * scale,
            part);
      hi[i / 2] = i % 2 ? hi[i / 2] | part[0] << 16 : part[0];
      lo[i / 2] = i % 2 ? lo[i / 2] | part[1] << 16 : part[1];
    }
    const int quarter = k / 8 % 4;
    // NVFP4: the columns of k 0..15, then those of k 16..31, each zero in the other half.
    constexpr u32 kApart = 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 at = to + k / 32 * 256 + quarter * 4 + half * 128;
      const u32 pick = half ? order >> 16 : order;
      const u32 h = __byte_perm(hi[0], hi[1], pick), l = __byte_perm(lo[0], lo[1], pick);
      const bool high = halves && quarter >= 2;
      store_shared(at, high ? 0 : h);
      if (kParts == 2) store_shared(at + 16, high ? 0 : l);
      if (halves) {
        store_shared(at + kApart, high ? h : 0);
        if (kParts == 2) store_shared(at + kApart + 16, high ? l : 0);
      }
    }
  }
};

// One pass's columns on one side, for the tokens of `pairs`, by `threads` threads in whole warps that
// share named barrier `barrier`. Not inlined: consumers and converters share its instructions.
__device__ __noinline__ void convert_pass(int precision, const u8* pairs, int tokens,
                                          const u16* x, u32 buffer, int side, bool down,
                                          int thread, int threads, int barrier) {
  Columns& columns = shared.columns;
  const Exchange& exchange = shared.exchange;
  const int K = down ? INTER : HIDDEN;
  const bool halves = precision == NVFP4;
  const u32 order = precision == BASE ? 0x37261504u : 0x75316420u;
  const u32 to = buffer + side * kColumnBytes;
  if (thread < 32)
    for (int token = 0; token < tokens; token++) {
      const int pair = pairs[token];
      u32 largest = 0;
      if (down) {
        for (int i = thread; i < kInterBlocks; i += 32) {
          Word w;
          do w = get(exchange.largest + pair * kInterBlocks + i);
          while (w.launch != exchange.launch);
          largest = max(largest, w.value);
        }
      } else if (thread > 0 && thread < WARPS) {
        largest = columns.part[pair / TOPK][thread];
      }
      largest = __reduce_max_sync(0xFFFFFFFFu, largest);
      if (thread == 0) {
        const int exponent = largest >> 7;
        // Infinity would be clamped: the token's columns become NaN, as they are for NaN.
        columns.scale[side][token] =
            exponent == 255 ? 0x7FC00000u : u32(min(max(261 - exponent, 1), 254)) << 23;
        columns.inverse[side][token] = __uint_as_float(u32(min(max(exponent - 7, 0), 253)) << 23);
      }
    }
  named_barrier(barrier, threads);
#pragma unroll 1
  for (int token = 0; token < tokens; token++) {
    const int pair = pairs[token];
    const float scale = __uint_as_float(columns.scale[side][token]);
    // The token's first column: tokens follow one another, but NVFP4's with one column a token go
    // in pairs, so that a lane's two columns have the same scale.
    const u32 column = !halves ? token * kParts
                       : kParts == 2 ? token * 4 : token / 2 * 4 + token % 2;
#pragma unroll 1
    for (int k = thread * 8; k < K; k += threads * 16) {
      Chunk a, b;
      const int second = k + threads * 8;
      a.load(exchange, x, pair, k, down);
      if (second < K) b.load(exchange, x, pair, second, down);
      a.store(to + column * 16, k, scale, order, halves);
      if (second < K) b.store(to + column * 16, second, scale, order, halves);
    }
  }
  for (int i = thread; i < 64; i += threads) store_shared(to + K * 8 + i * 4, 0);
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A lone token's columns, made on side 0 while the plan is being made, for the precision of its
// first expert, which mostly is all experts'. By the consumer warps but the first.
__device__ __forceinline__ void convert_early(const u16* x, const int* topk_ids,
                                              const u8* precision, u32 buffer) {
  const int expert = topk_ids[0], thread = threadIdx.x - 32;
  const int guess = expert >= 0 && expert < EXPERTS ? precision[expert] & ~kRemote : BASE;
  if (thread == 0) shared.columns.early = guess, shared.columns.token0 = 0;
  named_barrier(4, kConsumers - 32);
  convert_pass(guess, &shared.columns.token0, 1, x, buffer, 0, false, thread, kConsumers - 32, 4);
}
