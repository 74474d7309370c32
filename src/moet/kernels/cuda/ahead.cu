// Rows that hash-routed layers are about to use, told to the host before any of them waits.
//
// A block a layer, at the start of a pass: these layers' experts follow from the token ids alone. Rows
// that the host's table has no place for are posted as bitmaps, and the number is raised if there are
// any; nobody waits. It runs before the step begins and reads entries of the table, never a row: an
// entry may change at once, and the host may read the bitmaps of two passes mixed. So all that is said
// is a hint.
//
// Compile-time: see tiers.cuh; AHEAD: layers; VOCABULARY, TOP_K: of their tables.
#include "tiers.cuh"

__device__ __forceinline__ u64 load_id(const void* ids, int wide, u64 i) {
  return wide ? __ldg(static_cast<const u64*>(ids) + i) : __ldg(static_cast<const u32*>(ids) + i);
}

// ids: [count], of the pass's tokens. routes: addresses of the layers' tables [VOCABULARY, TOP_K].
// wide: bit 0: ids have 64 bits, bit 1: tables do. layers: indices in the table of rows.
// code: [layers, experts], the precision wanted.
extern "C" __global__ void __launch_bounds__(kThreads)
ahead(const void* ids, int count, const u64* routes, int wide, const int* layers, const u64* table,
      const u8* code, Posting* posting, Hints<AHEAD>* hints) {
  __shared__ u8 used[kEach * kThreads];
  const int lane = threadIdx.x % 32, layer = layers[blockIdx.x];
  const void* route = reinterpret_cast<const void*>(routes[blockIdx.x]);
#pragma unroll
  for (int i = 0; i < kEach; i++) used[i * kThreads + threadIdx.x] = 0;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < count * TOP_K; i += kThreads) {
    const u64 id = load_id(ids, wide & 1, i / TOP_K);
    if (id >= VOCABULARY) continue;
    const u64 expert = load_id(route, wide & 2, id * TOP_K + i % TOP_K);
    if (expert < EXPERTS) used[expert] = 1;
  }
  __syncthreads();

  bool lost = false;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int expert = i * kThreads + threadIdx.x, word = expert / 32;
    const bool mine = expert < EXPERTS && used[expert];
    const u8 kind = mine ? code[layer * EXPERTS + expert] : 0;
    const bool missing = mine && !find(table, layer, expert, kind);
    lost |= missing;
#pragma unroll
    for (int p = 0; p < kPlanes; p++) {
      const u32 of = __ballot_sync(kAll, missing && plane_of(kind) == p);
      if (lane == 0 && word < MASK_WORDS) hints->missing[blockIdx.x][p][word] = of;
    }
  }
  __threadfence_system();
  lost = __syncthreads_or(lost);
  if (threadIdx.x) return;
  if (lost) atomicExch(&posting->lost, 1u);
  __threadfence();
  if (atomicAdd(&posting->arrived, 1u) != AHEAD - 1) return;
  posting->arrived = 0;
  __threadfence_system();
  if (atomicExch(&posting->lost, 0u)) store_release_system(&hints->number, ++posting->number);
}
