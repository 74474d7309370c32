// What the kernels of the tiers share: the table, and what they and the host tell one another.
//
// Compile-time: LAYERS, EXPERTS, PLANES (bit c: there are rows of precision code c), MASK_WORDS.
#pragma once
#include "device.cuh"

constexpr int kThreads = 256;
constexpr int kEach = (EXPERTS + kThreads - 1) / kThreads;  // experts a thread
constexpr u32 kAll = 0xFFFFFFFF;
// Added to an entry, and to a snapshot's precision, whose row lies in host memory.
constexpr u64 kHostEntry = 1;
constexpr u8 kRemote = 0x80;

__host__ __device__ constexpr int bits(int mask) { return mask ? (mask & 1) + bits(mask >> 1) : 0; }
constexpr int kPlanes = bits(PLANES);
// Planes of the table and of the counts: precision codes without gaps.
__device__ __forceinline__ int plane_of(int code) { return __popc(PLANES & ((1 << code) - 1)); }

// In host memory; residency/cuda/mailbox.py has the same. Lines of 128 bytes, one writer each.
struct Mailbox {
  u64 begun, done, failures, failed_step, steps, steps_local, line0[10];
  u64 request, layer, line1[14];
  u32 missing[kPlanes][MASK_WORDS], present[kPlanes][MASK_WORDS];
  u64 rows[kPlanes][2][3];  // by decode or scan, and by tier
  u64 line2[16 - kPlanes * 6 % 16];
  u64 use[kPlanes][LAYERS][EXPERTS];
};

// In GPU memory, of the steps' own.
struct State {
  u64 begun, requests, failures, steps, steps_local;
  u32 open, failed, decode, local, stale;
  u32 unanswered;  // the newest request was given up, and the host may still serve it
  u64 rows[kPlanes][2][3];
  u64 use[kPlanes][LAYERS][EXPERTS];
  u64 entries[kPlanes][LAYERS][EXPERTS];  // the table as the step found it; not if `stale`
};

// In host memory, of ahead.cu; residency/cuda/ahead.py has the same.
template <int kLayers>
struct Hints {
  u64 number, line[15];
  u32 missing[kLayers][kPlanes][MASK_WORDS];
};

// In GPU memory.
struct Posting {
  u64 number;
  u32 arrived, lost;
};

__device__ __forceinline__ u64 load_system(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u64 load_acquire_system(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 v;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
  return v;
}

__device__ __forceinline__ void store_release_system(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ void add(u64* p, u64 v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ u64 load_entry(const u64* table, int plane, int layer, int expert) {
  return load_system(table + (u64(plane) * LAYERS + layer) * EXPERTS + expert);
}

// An expert's entry, of the precision code that it is computed at.
__device__ __forceinline__ u64 find(const u64* table, int layer, int expert, const u8& kind) {
  u64 planes[kPlanes], entry = 0;
#pragma unroll
  for (int p = 0; p < kPlanes; p++) planes[p] = load_entry(table, p, layer, expert);
#pragma unroll
  for (int p = 0; p < kPlanes; p++)
    if (plane_of(kind) == p) entry = planes[p];
  return entry;
}
