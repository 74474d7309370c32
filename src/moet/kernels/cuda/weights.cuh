// One lane's words of a 16 × 32 half tile → the A fragments of two m16n8k16 BF16 MMAs, and what
// undoes the decoded values' power of two. Layout: moet/formats/layout.py.
#pragma once
#include "device.cuh"

enum Precision { BASE = 0, MXFP4 = 1, NVFP4 = 2 };

template <int P>
struct Format {
  static constexpr int kCodeBytes = P == BASE ? 256 : 512;  // of a 32 × 32 tile
  static constexpr int kScaleBytes = P == NVFP4 ? 64 : 32;
  // Decoded value × activation = true product ÷ kFactor.
  static constexpr float kFactor = P == BASE ? 4.0f : P == MXFP4 ? 0x1p26f : 0x1p8f;
};

// Base: sign and magnitude bit of BF16 values ¼ and 1, whose exponents 125 and 127 differ in one
// bit, bit 8. Pair i's signs are at 15 − 2i and 31 − 2i and go to 15 and 31; its magnitudes, 3 bits
// below (mod 32), go to 8 and 24. first: k 0..3 of the lane's eight, second: k 4..7.
__device__ __forceinline__ void decode_base(u32 w, u32* first, u32* second) {
  const u32 magnitude[8] = {w >> 4, w >> 2, w, w << 2, w << 4, w << 6, w << 8,
                            __funnelshift_l(w, w, 10)};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 sign = and_or(w << 2 * i, 0x80008000u, 0x3E803E80u);
    (i < 4 ? first : second)[i % 4] = and_or(magnitude[i], 0x01000100u, sign);
  }
}

// FP4: E2M1's bits as the low exponent bits and the top mantissa bit of a BF16: the value × 2^-126
// (0.5 is a BF16 subnormal). Pair j holds k = j and j + 4. pair: 4 of them.
__device__ __forceinline__ void decode_fp4(u32 w, u32* pair) {
  u32 mag[4] = {w << 6, w << 2, w >> 2, w >> 6};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 sign = (w << (12 - 4 * j)) & 0x80008000u;
    pair[j] = and_or(mag[j], 0x01C001C0u, sign);
  }
}

// Four E4M3 scale bytes → float32, exactly.
__device__ __forceinline__ void e4m3_scales(u32 bytes, float* s) {
#if __CUDA_ARCH__ >= 890
  u32 lo, hi;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; "
      "cvt.rn.f16x2.e4m3x2 %1, b; }" : "=r"(lo), "=r"(hi) : "r"(bytes));
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(s[0]), "=f"(s[1]) : "r"(lo));
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(s[2]), "=f"(s[3]) : "r"(hi));
#else
  // Subnormal bytes become float32 subnormals, which the product makes normal again.
  s[0] = __uint_as_float((bytes << 20) & 0x07F00000u) * 0x1p120f;
  s[1] = __uint_as_float((bytes << 12) & 0x07F00000u) * 0x1p120f;
  s[2] = __uint_as_float((bytes << 4) & 0x07F00000u) * 0x1p120f;
  s[3] = __uint_as_float((bytes >> 4) & 0x07F00000u) * 0x1p120f;
#endif
}

__device__ __forceinline__ void e8m0_scales(u32 bytes, float* s) {
  s[0] = __uint_as_float((bytes << 23) & 0x7F800000u);
  s[1] = __uint_as_float((bytes << 15) & 0x7F800000u);
  s[2] = __uint_as_float((bytes << 7) & 0x7F800000u);
  s[3] = __uint_as_float((bytes >> 1) & 0x7F800000u);
}

// A lane's eight activations as B fragments, in the order of the decoded pairs.
template <int P>
__device__ __forceinline__ uint4 arrange(uint4 x) {
  if (P == BASE) return x;
  uint4 b = make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                       __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
  if (P == MXFP4) {  // × 2^100 keeps products with values × 2^-126 in float32's normal range
    b.x = mul_bf16x2(b.x, 0x71807180u);
    b.y = mul_bf16x2(b.y, 0x71807180u);
    b.z = mul_bf16x2(b.z, 0x71807180u);
    b.w = mul_bf16x2(b.w, 0x71807180u);
  }
  return b;
}

// acc[h] += tile[32 × 32] · activations, for one tile in shared memory.
template <int P>
__device__ __forceinline__ void tile_mma(u32 codes, u32 scales, int g, int t, uint4 b,
                                         float (*acc)[4]) {
  u32 words[4];
  float scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if (P == BASE) {
    uint2 w = load_shared2(codes + (t * 8 + g) * 8);
    words[0] = w.x, words[1] = w.y;
    e4m3_scales(load_shared1(scales + g * 4), scale);
  } else {
    uint4 w = load_shared4(codes + (t * 8 + g) * 16);
    words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
    if (P == MXFP4)
      e8m0_scales(load_shared1(scales + g * 4), scale);
    else
      e4m3_scales(load_shared1(scales + (t >> 1) * 32 + g * 4), scale);
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    u32 first[4], second[4];
    if (P == BASE) {
      decode_base(words[h], first, second);
    } else {
      u32 row[2][4];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        decode_fp4(words[2 * h + c], row[c]);
        if (P == NVFP4) {  // the scale differs within the MMA's k: it goes into the weights
          u32 s = __float_as_uint(scale[2 * h + c] * 0x1p118f);
          s = __byte_perm(s, s, 0x3232);
#pragma unroll
          for (int j = 0; j < 4; j++) row[c][j] = mul_bf16x2(row[c][j], s);
        }
      }
      first[0] = row[0][0], first[1] = row[1][0], first[2] = row[0][1], first[3] = row[1][1];
      second[0] = row[0][2], second[1] = row[1][2], second[2] = row[0][3], second[3] = row[1][3];
    }
    if (P == NVFP4) {
      mma(acc[h], first, b.x, b.y);
      mma(acc[h], second, b.z, b.w);
    } else {
      float block[4];
      mma_first(block, first, b.x, b.y);
      mma(block, second, b.z, b.w);
      acc[h][0] += scale[2 * h] * block[0];
      acc[h][1] += scale[2 * h] * block[1];
      acc[h][2] += scale[2 * h + 1] * block[2];
      acc[h][3] += scale[2 * h + 1] * block[3];
    }
  }
}
