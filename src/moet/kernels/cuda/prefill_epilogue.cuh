// From accumulators to h and to the experts' outputs, in BF16.
//
// A warp has two half tiles: acc[m][4i..4i + 3] are rows g, g (+ 1 column), g + 8, g + 8 (+ 1 column)
// at columns 8i + 2t.
#pragma once
#include "prefill_device.cuh"
#include "prefill_layout.cuh"

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

constexpr int kHiddenStride = 64 * 2 + 16;   // bytes of a token in the staging of h: 64 rows
constexpr int kOutputStride = 32 * 2 + 16;   // and in that of the output: a warp's 32 rows

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
