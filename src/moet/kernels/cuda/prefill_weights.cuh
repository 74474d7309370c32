// Two half tiles (16 rows × 32 k) of a warp, packed as they lie in a stage → A fragments, with the
// block scales in the weights: BF16 holds every product of code and scale exactly (E8M0 bytes of 66
// to 192; beyond, the result is infinite or vanishes).
#pragma once
#include "prefill_layout.cuh"

// A scale byte → a pair of equal BF16 values.
template <int P>
__device__ __forceinline__ u32 scale_pair(u32 byte) {
  if (P == MXFP4) return mul_bf16x2(byte * 0x00800080u, 0x5E805E80u);  // 2^(byte − 127) · 2^62
  const u32 scale = mul_bf16x2(byte * 0x00100010u, P == BASE ? 0x7B807B80u : 0x7F007F00u);
  return P == BASE ? scale : mul_bf16x2(scale, 0x77007700u);  // 2^120, or 2^127 · 2^111
}

// Base: a pair's signs are at 15 − 2i and 31 − 2i, its magnitudes 3 bits below (mod 32). They go to
// 15 and 31, and to 8 and 24, where 1 adds 2 to the exponent.
__device__ __forceinline__ void base_to_bf16(u32 w, u32 s0, u32 s1, u32 (*a)[4]) {
  const u32 right = w >> 4;
  const u32 left = __funnelshift_l(w, w, 10);
  u32 r[8];
  r[0] = (right & 0x01000100u) + s0;
  r[1] = masked_times_plus(right, 0x00400040u, 4, s1);
  r[2] = (w & 0x01000100u) + s0;
  r[3] = masked_times_plus(w, 0x00400040u, 4, s1);
  r[4] = masked_times_plus(w, 0x00100010u, 16, s0);
  r[5] = masked_times_plus(w, 0x00040004u, 64, s1);
  r[6] = masked_times_plus(w, 0x00010001u, 256, s0);
  r[7] = (left & 0x01000100u) + s1;
#pragma unroll
  for (int i = 0; i < 8; i++) a[i / 4][i % 4] = (w << 2 * i) & 0x80008000u | r[i];
}

// The two half tiles of one k block: gate and up of the same rows, or both halves of a down tile.
template <int P, bool DOWN>
struct HalfTiles {
  static constexpr int kWords = P == BASE ? 1 : 2;
  u32 codes[2][kWords];
  u32 scales[DOWN ? 1 : 2];

  // Where in a tile this lane's words are. half: which rows of the gate and up tiles.
  __device__ static __forceinline__ u32 code_offset(int g, int t, int half) {
    return ((t * 8 + g) * 2 + (DOWN ? 0 : half)) * (4 * kWords);
  }
  __device__ static __forceinline__ u32 scale_offset(int g, int t, int half) {
    return (P == NVFP4 ? (t >> 1) * 32 : 0) + g * 4 + (DOWN ? 0 : half * 2);
  }

  // codes_at, scales_at: of the (gate) tile, offsets included.
  __device__ __forceinline__ void load(u32 codes_at, u32 scales_at) {
    if (DOWN) {
      if (P == BASE) {
        const uint2 w = load_shared2(codes_at);
        codes[0][0] = w.x, codes[1][0] = w.y;
      } else {
        const uint4 w = load_shared4(codes_at);
        codes[0][0] = w.x, codes[0][kWords - 1] = w.y;
        codes[1][0] = w.z, codes[1][kWords - 1] = w.w;
      }
      scales[0] = load_shared1(scales_at);
    } else {
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const u32 from = codes_at + m * Format<P>::kCodeBytes;
        if (P == BASE) {
          codes[m][0] = load_shared1(from);
        } else {
          const uint2 w = load_shared2(from);
          codes[m][0] = w.x, codes[m][kWords - 1] = w.y;
        }
        scales[m * !DOWN] = load_shared_u16(scales_at + m * Format<P>::kScaleBytes);
      }
    }
  }

  // Decoding begins here: not before what precedes it, where registers would not suffice.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
      for (int i = 0; i < kWords; i++) codes[m][i] = kept(codes[m][i]);
      if (!DOWN || m == 0) scales[m * !DOWN] = kept(scales[m * !DOWN]);
    }
  }

  __device__ __forceinline__ u32 scale(int m, int c) const {
    return __byte_perm(scales[DOWN ? 0 : m], 0, 0x4440 + (DOWN ? 2 * m + c : c));
  }

  // a[m][s]: the fragments of k16 step s.
  __device__ __forceinline__ void to_bf16(u32 (*a)[2][4]) const {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const u32 s[2] = {scale_pair<P>(scale(m, 0)), scale_pair<P>(scale(m, 1))};
      if (P == BASE) {
        base_to_bf16(codes[m][0], s[0], s[1], a[m]);
      } else {
#pragma unroll
        for (int c = 0; c < 2; c++) {
          u32 pair[4];
          decode_fp4(codes[m][c * (kWords - 1)], pair);
#pragma unroll
          for (int j = 0; j < 4; j++) a[m][j / 2][j % 2 * 2 + c] = mul_bf16x2(pair[j], s[c]);
        }
      }
    }
  }

  // a[m][0]: the fragments of a k32 step.
  __device__ __forceinline__ void to_e4m3(u32 (*a)[2][4]) const {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const int first = DOWN ? 2 * m : 0;
      const u32 s = scales[DOWN ? 0 : m];
      base_to_e4m3(codes[m][0], __byte_perm(s, 0, first * 0x1111),
                   __byte_perm(s, 0, (first + 1) * 0x1111), a[m][0]);
    }
  }
};
