// Rows of a layer copied from host memory ahead of its step's kernels: each crosses PCIe once,
// however many tiles of tokens use it, and while the layer before is computed.
//
// Beside the other kernels, on a few multiprocessors. Which experts the layer will use is not known
// yet: a long prompt uses nearly all.
//
// Compile-time: see tiers.cuh; ROW_BYTES_0, _1, _2: of a row, by plane.
#include "tiers.cuh"

constexpr u32 kPieceBytes = 32 << 10;  // that a block copies at a time

struct Source {
  u64 address;
  u64 bytes;
};

__device__ __forceinline__ u32 row_bytes(int plane) {
  constexpr u32 kBytes[3] = {ROW_BYTES_0, ROW_BYTES_1, ROW_BYTES_2};
  return plane == 0 ? kBytes[0] : plane == 1 ? kBytes[1] : kBytes[2];
}

// Gives each row of the layer that lies in host memory one of `slots`, as far as they go. Only one
// block may read the table for that: entries change meanwhile. By one warp.
extern "C" __global__ void __launch_bounds__(32)
plan_stage(int layer, const u64* table, const u8* code, int slots, int* slot, Source* sources,
           int* count) {
  const int lane = threadIdx.x;
  int taken = 0;
#pragma unroll 4
  for (int first = 0; first < EXPERTS; first += 32) {
    const int expert = first + lane;
    const u8 kind = expert < EXPERTS ? code[layer * EXPERTS + expert] : 0;
    const u64 entry = expert < EXPERTS ? find(table, layer, expert, kind) : 0;
    const bool host = entry & kHostEntry;
    const u32 found = __ballot_sync(kAll, host);
    const int mine = taken + __popc(found & ((1u << lane) - 1));
    const bool staged = host && mine < slots;
    if (staged) sources[mine] = {entry - kHostEntry, row_bytes(plane_of(kind))};
    if (expert < EXPERTS) slot[expert] = staged ? mine : -1;
    taken += __popc(found);
  }
  if (lane == 0) *count = min(taken, slots);
}

extern "C" __global__ void __launch_bounds__(kThreads)
copy_stage(const Source* sources, const int* count, u8* stage, int stage_bytes) {
  constexpr int kInFlight = 8;
  const int pieces = (stage_bytes + kPieceBytes - 1) / kPieceBytes, all = *count * pieces;
  for (int piece = blockIdx.x; piece < all; piece += gridDim.x) {
    const Source source = sources[piece / pieces];
    const u64 first = u64(piece % pieces) * kPieceBytes;
    const u64 end = min(first + kPieceBytes, source.bytes);
    const uint4* from = reinterpret_cast<const uint4*>(source.address);
    uint4* to = reinterpret_cast<uint4*>(stage + u64(piece / pieces) * stage_bytes);
    for (u64 i = first / 16 + threadIdx.x; i < end / 16; i += kInFlight * kThreads) {
      uint4 words[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; j++)
        if (i + j * kThreads < end / 16) words[j] = __ldcs(from + i + j * kThreads);
#pragma unroll
      for (int j = 0; j < kInFlight; j++)
        if (i + j * kThreads < end / 16) to[i + j * kThreads] = words[j];
    }
  }
}
