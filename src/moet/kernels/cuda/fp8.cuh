// Weights as E4M3 bytes in MMA fragments, and the MMAs that take them.
//
// A lane's word of a 16 × 32 half tile → the four A registers of m16n8k32 or of a warp's quarter
// of wgmma m64nNk32: rows g, g + 8 at k 4t..4t + 3 and at k 16 + 4t... Layout: formats/layout.py.
#pragma once
#include "weights.cuh"

// (w & mask) · factor + addend, in two instructions (the compiler would shift before the mask).
__device__ __forceinline__ u32 masked_times_plus(u32 w, u32 mask, u32 factor, u32 addend) {
  u32 d;
  asm("{ .reg .b32 x; and.b32 x, %1, %2; mad.lo.u32 %0, x, %3, %4; }"
      : "=r"(d) : "r"(w), "r"(mask), "r"(factor), "r"(addend));
  return d;
}

// Base: a byte is the sign, and the scale byte + 0x10 if large. s0: row g's scale byte four times,
// s1: row g + 8's.
__device__ __forceinline__ void base_to_e4m3(u32 w, u32 s0, u32 s1, u32* a) {
  a[0] = (w & 0x90909090u) + s0;
  a[1] = masked_times_plus(w, 0x24242424u, 4, s1);
  a[2] = masked_times_plus(w, 0x09090909u, 16, s0);
  a[3] = (__funnelshift_l(w, w, 6) & 0x90909090u) + s1;
}

// FP4: the value × 2^-6. Even nibbles to `even`, odd to `odd`.
__device__ __forceinline__ void fp4_to_e4m3(u32 w, u32& even, u32& odd) {
  even = and_or(w << 2, 0x1C1C1C1Cu, (w << 4) & 0x80808080u);
  odd = and_or(w >> 2, 0x1C1C1C1Cu, w & 0x80808080u);
}

// What a lane holds of one 32 × 32 tile (MXFP4, NVFP4) or of its codes and scales (base).
template <int P>
struct Words {
  uint4 codes;  // base: x and y
  u32 scales;

  __device__ __forceinline__ void load(u32 codes_at, u32 scales_at) {
    if (P == BASE) {
      const uint2 w = load_shared2(codes_at);
      codes.x = w.x, codes.y = w.y;
    } else {
      codes = load_shared4(codes_at);
    }
    scales = load_shared1(scales_at);
  }

  // a[h]: rows 16h + g and 16h + 8 + g. scale[2h + c]: what is left to multiply (FP4).
  __device__ __forceinline__ void decode(u32 (*a)[4], float* scale) const {
    if (P == BASE) {
      base_to_e4m3(codes.x, __byte_perm(scales, 0, 0x0000), __byte_perm(scales, 0, 0x1111), a[0]);
      base_to_e4m3(codes.y, __byte_perm(scales, 0, 0x2222), __byte_perm(scales, 0, 0x3333), a[1]);
    } else {
      fp4_to_e4m3(codes.x, a[0][0], a[0][2]);
      fp4_to_e4m3(codes.y, a[0][1], a[0][3]);
      fp4_to_e4m3(codes.z, a[1][0], a[1][2]);
      fp4_to_e4m3(codes.w, a[1][1], a[1][3]);
      if (P == MXFP4) e8m0_scales(scales, scale);
      else e4m3_scales(scales, scale);
    }
  }
};

#ifdef WGMMA
// D[64 × 16] (+)= A[64 × 32] · B[32 × 16], E4M3; A from registers, B from shared memory.
template <bool ADD>
__device__ __forceinline__ void wgmma(float* d, const u32* a, u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, "
      "{%8,%9,%10,%11}, %12, p, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD ? 1 : 0));
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
#else
// D[16 × 8] += A[16 × 32] · B[32 × 8], E4M3. On sm_120 the plain instruction runs at half the rate
// of the block-scaled one, whose scales (E8M0, all 1) do not change the product.
__device__ __forceinline__ void mma_e4m3(float* d, const u32* a, u32 b0, u32 b1) {
#ifdef BLOCK_SCALED
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
      ".f32.e4m3.e4m3.f32.ue8m0 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, "
      "{%10}, {0, 0}, {%10}, {0, 0};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0x7F7F7F7Fu));
#else
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
#endif
