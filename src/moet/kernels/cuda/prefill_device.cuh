// What prefill needs of the machine beyond device.cuh.
#pragma once
#include "device.cuh"

__device__ __forceinline__ void copy16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 × 8 matrices of 16-bit values; lane 8i + j gives the address of row j of matrix i.
__device__ __forceinline__ void load_matrices(u32 at, u32* m) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void store_shared2(u32 at, u16 v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(v) : "memory");
}

// Accumulators of four 8 × 8 blocks, rows g and columns 2t, 2t + 1, stored column by column: lane
// 8i + j gives the address of the 16 bytes that column j of block i takes.
__device__ __forceinline__ void store_transposed(u32 at, const u32* m) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
#else
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      store_shared2(__shfl_sync(0xFFFFFFFFu, at, i * 8 + 2 * t + e) + 2 * g, u16(m[i] >> 16 * e));
#endif
}

// Two floats → BF16, to nearest even; `low` in the low half.
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ u32 to_e4m3x4(float a, float b, float c, float d) {
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return u32(low) | u32(high) << 16;
}
#endif
