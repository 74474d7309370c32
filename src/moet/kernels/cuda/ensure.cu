// Where the rows are that a layer's step reads: the table's entries, read once into a snapshot.
//
// One block, in front of the layer's kernels. The table, the mailbox and the counts for the host lie
// in host memory that the GPU reaches: so the host changes the table with plain stores, also while
// the GPU waits for it, and nothing here needs the driver. A step copies the whole table when it
// begins, since a load over PCIe in each layer would take longer. It may use the copy as it could use
// an entry that it had read then, until it asks for rows: an answer may have taken the place of any
// row that the asking layer does not use, and from then on the step looks at the table itself.
// Rows that are on disk only are posted, and the block waits until the host has answered. It gives up
// when the host shows no life for long: the thread that launches kernels can be stopped by the driver
// until this kernel ends, and may hold the interpreter meanwhile. The host may serve that request later,
// and take the place of any row for it; so until it has answered no step reads a row, and all fail.
//
// Compile-time: see tiers.cuh.
#include "tiers.cuh"

// The step may read the table from here on; the host that changes an entry and then looks at
// `begun` sees either this number or a step that reads the change.
__device__ void begin_step(State* state, Mailbox* mail, int layer, int begin, int decode) {
  const u64 number = state->begun + 1;
  state->begun = number;
  state->open = begin;
  state->decode = decode;
  state->local = 1;
  state->failed = 0;
  state->stale = layer != 0;
  store_release_system(&mail->begun, number);
  __threadfence_system();
}

__device__ void copy_table(State* state, const u64* table) {
  constexpr int kEntries = kPlanes * LAYERS * EXPERTS, kInFlight = 16;
  u64* to = &state->entries[0][0][0];
  for (int first = threadIdx.x; first < kEntries; first += kInFlight * kThreads) {
    u64 entry[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; j++)
      if (first + j * kThreads < kEntries) entry[j] = load_system(table + first + j * kThreads);
#pragma unroll
    for (int j = 0; j < kInFlight; j++)
      if (first + j * kThreads < kEntries) to[first + j * kThreads] = entry[j];
  }
}

// Posts the bitmaps that have been written, and waits. By one thread.
__device__ void ask(State* state, Mailbox* mail, const u64* answer, int layer, int patience) {
  const u64 number = state->requests + 1;
  state->requests = number;
  state->stale = 1;
  mail->layer = layer;
  __threadfence_system();
  store_release_system(&mail->request, number);
  u64 life = load_system(answer + 1), seen = nanoseconds();
  while (load_acquire_system(answer) != number) {
    __nanosleep(100);
    if (nanoseconds() - seen < u64(patience) * 1000000) continue;
    const u64 now = load_system(answer + 1);
    if (now == life) {
      state->unanswered = 1;
      return;
    }
    life = now, seen = nanoseconds();
  }
}

__device__ void fail(State* state, Mailbox* mail) {
  if (state->failed) return;
  state->failed = 1;
  mail->failed_step = state->begun;
  store_release_system(&mail->failures, ++state->failures);
}

// begin: 2: of a step of the model; 1: of another pass (a draft's, or one that repeats tokens of a
// step), 0: none. decode: whether it counts as one of decode's. table: u64 [planes, layers, experts];
// an entry is an address, + kHostEntry, or 0. code: [layers, experts], the precision wanted.
// answer: number of the newest request answered, and a number that changes while the host lives.
// patience: ms without a change of that, after which a request is given up. dummy: zeros, as many as
// the largest row has.
// slot: of each expert's staged copy in `stage`, −1: none (see stage.cu); read only if `staged`.
extern "C" __global__ void __launch_bounds__(kThreads)
ensure(const int* ids, int count, int layer, int begin, int decode, const u64* table,
       const u8* code, State* state, Mailbox* mail, const u64* answer, int patience, const u8* dummy,
       u64* address, u8* precision, int staged, const int* slot, const u8* stage, int stage_bytes) {
  __shared__ u8 used[kEach * kThreads];
  const int lane = threadIdx.x % 32;
  if (begin) {
    if (threadIdx.x == 0) begin_step(state, mail, layer, begin, decode);
    __syncthreads();
    if (layer == 0) copy_table(state, table);
    __syncthreads();
  }
  const bool stale = state->stale;
  bool silent = state->unanswered;  // the same for all threads
  if (silent) {
    silent = __syncthreads_or(load_acquire_system(answer) != state->requests);
    if (threadIdx.x == 0) state->unanswered = silent;
  }
  u64 entry[kEach];
  u8 kind[kEach];
  int copy[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int expert = i * kThreads + threadIdx.x;
    used[expert] = 0;
    entry[i] = 0, kind[i] = 0, copy[i] = -1;
    if (expert >= EXPERTS) continue;
    kind[i] = code[layer * EXPERTS + expert];
    entry[i] = find(&state->entries[0][0][0], layer, expert, kind[i]);
    if (stale) entry[i] = find(table, layer, expert, kind[i]);
    if (staged) copy[i] = slot[expert];
    if (silent) entry[i] = 0, copy[i] = -1;
  }
  __syncthreads();
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const u32 id = __ldg(ids + i);
    if (id < EXPERTS) used[id] = 1;
  }
  __syncthreads();

  bool mine[kEach], lost = false, remote = false;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    mine[i] = used[i * kThreads + threadIdx.x];
    lost |= mine[i] && !entry[i] && copy[i] < 0;
    remote |= mine[i] && (!entry[i] || entry[i] & kHostEntry);
  }
  if (__syncthreads_or(remote) && threadIdx.x == 0) state->local = 0;

#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int expert = i * kThreads + threadIdx.x;
    if (mine[i] && decode) add(&state->use[plane_of(kind[i])][layer][expert], 1);
    const int tier = !entry[i] ? 2 : entry[i] & kHostEntry;
#pragma unroll
    for (int p = 0; p < kPlanes; p++)
#pragma unroll
      for (int t = 0; t < 3; t++) {
        const u32 found = __ballot_sync(kAll, mine[i] && plane_of(kind[i]) == p && tier == t);
        if (lane == 0 && found) add(&state->rows[p][!decode][t], __popc(found));
      }
  }

  if (__syncthreads_or(lost)) {
    const auto look_again = [&] {
      lost = false;
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        if (mine[i] && !entry[i])
          entry[i] = load_entry(table, plane_of(kind[i]), layer, i * kThreads + threadIdx.x);
        lost |= mine[i] && !entry[i] && copy[i] < 0;
      }
      return __syncthreads_or(lost);
    };
    // A step that has failed waits for nothing more.
    if (!silent && look_again() && !state->failed) {
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const int word = (i * kThreads + threadIdx.x) / 32;
#pragma unroll
        for (int p = 0; p < kPlanes; p++) {
          const bool here = mine[i] && plane_of(kind[i]) == p;
          const u32 missing = __ballot_sync(kAll, here && !entry[i] && copy[i] < 0);
          const u32 present = __ballot_sync(kAll, here && entry[i]);
          if (lane == 0 && word < MASK_WORDS)
            mail->missing[p][word] = missing, mail->present[p][word] = present;
        }
      }
      __threadfence_system();
      __syncthreads();
      if (threadIdx.x == 0) ask(state, mail, answer, layer, patience);
      __syncthreads();
      if (!state->unanswered) look_again();
    }
    if (__syncthreads_or(lost) && threadIdx.x == 0) fail(state, mail);
  }

#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int expert = i * kThreads + threadIdx.x;
    if (expert >= EXPERTS) continue;
    const bool host = entry[i] & kHostEntry && copy[i] < 0;
    u64 at = entry[i] ? entry[i] - host : u64(dummy);
    if (copy[i] >= 0) at = u64(stage) + u64(copy[i]) * stage_bytes;
    address[expert] = mine[i] ? at : 0;
    precision[expert] = kind[i] | (mine[i] && host ? kRemote : 0);
  }
}

// After the last reader of a step's rows: hands the counts over and says that the step is done.
extern "C" __global__ void __launch_bounds__(kThreads) finish(State* state, Mailbox* mail) {
  constexpr int kCounts = kPlanes * LAYERS * EXPERTS;
  const int first = blockIdx.x * kThreads + threadIdx.x;
  for (int i = first; i < kCounts; i += gridDim.x * kThreads)
    (&mail->use[0][0][0])[i] = (&state->use[0][0][0])[i];
  if (first < kPlanes * 6) (&mail->rows[0][0][0])[first] = (&state->rows[0][0][0])[first];
  if (first || !state->open) return;
  if (state->open == 2 && state->decode) {
    mail->steps = ++state->steps;
    mail->steps_local = state->steps_local += state->local;
  }
  state->open = 0;
  store_release_system(&mail->done, state->begun);
}
