// Hopper's D[64 × 16V] += A[64 × K] · B[K × 16V] for V of 1 to 8, A from registers: K is 16 in BF16
// and 32 in E4M3.
#pragma once
#include "fp8.cuh"

// B: 128-byte rows (a token's k), eight rows to 1024 bytes, 16-byte chunks exclusive-ored with the
// row (swizzle 128). `at` is a shared address ÷ 16; 2 further is the next K.
__device__ __forceinline__ u64 b_descriptor(u32 at) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(at | 1 << 16), "r"(1024 >> 4 | 1 << 30));
  return d;
}

template <int V>
struct Wgmma;

#define D0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define D1 D0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define D2 D1 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define D3 D2 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define D4 D3 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define D5 D4 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define D6 D5 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define D7 D6 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define EIGHT(i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define O0 EIGHT(0)
#define O1 O0, EIGHT(8)
#define O2 O1, EIGHT(16)
#define O3 O2, EIGHT(24)
#define O4 O3, EIGHT(32)
#define O5 O4, EIGHT(40)
#define O6 O5, EIGHT(48)
#define O7 O6, EIGHT(56)
#define MULTIPLY(SHAPE, TYPES, D, A, B, TRANSPOSED, ...)                                       \
  asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0;\n"                                       \
               "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES " {" D "}, {" A "}, " B    \
               ", p, 1, 1" TRANSPOSED "; }"                                                   \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define WGMMA_OF(V, N, D, A, B, ...)                                                          \
  template <>                                                                                 \
  struct Wgmma<V> {                                                                           \
    __device__ static __forceinline__ void bf16(float* d, const u32* a, u64 b) {              \
      MULTIPLY("m64n" N "k16", "bf16.bf16", D, A, B, ", 0", __VA_ARGS__);                     \
    }                                                                                         \
    __device__ static __forceinline__ void e4m3(float* d, const u32* a, u64 b) {              \
      MULTIPLY("m64n" N "k32", "e4m3.e4m3", D, A, B, "", __VA_ARGS__);                        \
    }                                                                                         \
  };
WGMMA_OF(1, "16", D0, "%8,%9,%10,%11", "%12", O0)
WGMMA_OF(2, "32", D1, "%16,%17,%18,%19", "%20", O1)
WGMMA_OF(3, "48", D2, "%24,%25,%26,%27", "%28", O2)
WGMMA_OF(4, "64", D3, "%32,%33,%34,%35", "%36", O3)
WGMMA_OF(5, "80", D4, "%40,%41,%42,%43", "%44", O4)
WGMMA_OF(6, "96", D5, "%48,%49,%50,%51", "%52", O5)
WGMMA_OF(7, "112", D6, "%56,%57,%58,%59", "%60", O6)
WGMMA_OF(8, "128", D7, "%64,%65,%66,%67", "%68", O7)
