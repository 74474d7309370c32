// From accumulators to h and to the experts' outputs, in BF16.
//
// A warp has two half tiles, m: acc[m][4i + 2c + e] is row 8c + g at column 8i + 2t + e.
#pragma once
#include "prefill_device.cuh"
#include "prefill_layout.cuh"

constexpr int kHiddenStride = 64 * 2 + 16;   // bytes of a token in the staging of h: 64 rows
constexpr int kOutputStride = 32 * 2 + 16;   // and in that of the output: a warp's 32 rows
constexpr int kStagingBytes = 32 * kHiddenStride;
static_assert(4 * 8 * kOutputStride <= kStagingBytes, "eight tokens of four warps");

// h of 32 tokens and a warpgroup's 64 rows, staged in natural order → memory, in the order of the
// expert's kind. By 128 threads; to: of the first token's 64 values.
template <bool FP4>
__device__ __forceinline__ void copy_hidden(u32 staging, u8* to, int tokens, int blocks,
                                            int thread) {
#pragma unroll
  for (int i = thread; i < 256; i += 128) {
    const int token = i / 8, block = i / 4 % 2, s = i / 2 % 2, c = i % 2;
    const u32 from = staging + token * kHiddenStride + block * 64;
    u32 v[4];
#pragma unroll
    for (int t = 0; t < 4; t++)
      v[t] = FP4 ? __byte_perm(load_shared1(from + t * 16 + s * 4),
                               load_shared1(from + t * 16 + s * 4 + 8), c ? 0x7632 : 0x5410)
                 : load_shared1(from + t * 16 + s * 8 + c * 4);
    if (token < tokens && block < blocks)
      *reinterpret_cast<uint4*>(to + u64(token) * (INTER * 2) + i % 8 * 16) =
          make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// One item's results, by eight warps in two groups of 128 threads, which share what is below.
struct Epilogue {
  u32 staging;          // kStagingBytes
  const int* pairs;     // of the tile's tokens
  const float* scales;  // of their activations, in E4M3
  u8* out;              // h, by sorted position, or the experts' outputs, by pair
  Activation activation;
  int warp, lane;

  // What is left to multiply for columns 8i + 2t and the next.
  template <int P>
  __device__ __forceinline__ float2 column_scale(int i, float factor) const {
    if (!in_e4m3(P)) return make_float2(factor, factor);
    const float* scale = scales + 8 * i + lane % 4 * 2;
    return make_float2(scale[0] * factor, scale[1] * factor);
  }

  template <int P, int V>
  __device__ __forceinline__ void hidden(const Item& item, const float (*acc)[8 * V]) const {
    const int side = warp / 4, thread = threadIdx.x % 128;
    const int group = item.row_tile * 4 + side * 2;
    // Lane 8k + j stores column j of block k: rows 8 (k % 2) at columns 8 (k / 2).
    const u32 place = staging + lane % 8 * kHiddenStride + warp % 4 * 32 + lane / 8 % 2 * 16;
#if GPT_OSS
    const int expert = item.tile.expert, row = group * 32 + warp % 4 * 16 + lane / 4;
#else
    constexpr int expert = 0, row = 0;
#endif
    const float gate_factor = item.tile.factor[0] * power_of(P);
    const float up_factor = item.tile.factor[1] * power_of(P);
#pragma unroll
    for (int first = 0; first < 2 * V; first += 4) {  // 32 tokens at a time
#pragma unroll
      for (int i = first; i < min(first + 4, 2 * V); i += 2) {
        u32 packed[4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float2 a = column_scale<P>(i + j, gate_factor);
          const float2 b = column_scale<P>(i + j, up_factor);
          const float *gate = acc[0] + 4 * (i + j), *up = acc[1] + 4 * (i + j);
#pragma unroll
          for (int c = 0; c < 2; c++)
            packed[2 * j + c] = to_bf16x2(
                activation(gate[2 * c] * a.x, up[2 * c] * b.x, expert, row + 8 * c),
                activation(gate[2 * c + 1] * a.y, up[2 * c + 1] * b.y, expert, row + 8 * c));
        }
        store_transposed(place + ((i - first) * 8 + lane / 16 * 8) * kHiddenStride, packed);
      }
      named_barrier(1 + side, 128);
      u8* to = out + (u64(item.tile.first + first * 8) * INTER + group * 32) * 2;
      copy_hidden<P != BASE>(staging, to, item.tile.count - first * 8, kInterBlocks - group,
                             thread);
      named_barrier(1 + side, 128);
    }
  }

  template <int P, int V>
  __device__ __forceinline__ void output(const Item& item, const float (*acc)[8 * V]) const {
    const int group = item.row_tile * 8 + warp;
    const u32 mine = staging + warp % 4 * (8 * kOutputStride);
    const u32 place = mine + lane % 8 * kOutputStride + lane / 8 * 16;
    const u32 from = mine + lane / 4 * kOutputStride + lane % 4 * 16;
    const float factor = item.tile.factor[2] * power_of(P);
    const int* pair = pairs + lane / 4;
#pragma unroll
    for (int i = 0; i < 2 * V; i++) {
      const float2 s = column_scale<P>(i, factor);
      u32 packed[4];
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int c = 0; c < 2; c++)
          packed[2 * m + c] =
              to_bf16x2(acc[m][4 * i + 2 * c] * s.x, acc[m][4 * i + 2 * c + 1] * s.y);
      store_transposed(place, packed);
      __syncwarp();
      const uint4 v = load_shared4(from);
      if (i * 8 + lane / 4 < item.tile.count && group < kHiddenBlocks)
        *reinterpret_cast<uint4*>(out + (u64(pair[i * 8]) * HIDDEN + group * 32) * 2 +
                                  lane % 4 * 16) = v;
      __syncwarp();
    }
  }
};
