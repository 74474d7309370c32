// The warp that streams rows through the ring of shared-memory stages.
#pragma once
#include "plan.cuh"

// A stage holds kStageTiles tiles of base, or half as many of FP4 and their scales.
template <int P>
struct Stage {
  static constexpr int kTiles = P == BASE ? kStageTiles : kStageTiles / 2;
  static constexpr int kScaleOffset = kTiles * Format<P>::kCodeBytes;
  static constexpr int kBlocks = kTiles / 2;  // of gate/up
};
constexpr int kStageBytes = kStageTiles * (256 + 32);

// Little state, for the consumers' registers are few.
struct Ring {
  u32 stages, barriers, buffer;  // barriers: 32 that say full, then 32 that say empty
  u32 stage = 0, parity = 0;

  __device__ Ring(u32 n, u32 barriers_at, u32 buffer_at)
      : stages(n), barriers(barriers_at), buffer(buffer_at) {}
  __device__ __forceinline__ u32 here() const { return buffer + stage * kStageBytes; }
  __device__ __forceinline__ u32 full() const { return barriers + stage * 8; }
  __device__ __forceinline__ u32 empty() const { return barriers + 256 + stage * 8; }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Arrivals that make a stage full: of the thread that announces the bytes, or of a warp's lanes.
#if __CUDA_ARCH__ >= 900
constexpr int kFullArrivals = 1;
#else
constexpr int kFullArrivals = 32;
#endif

struct Copier {
  Ring ring;
  int lane;
#if __CUDA_ARCH__ >= 900
  u64 policy;
#endif

  __device__ void begin(u32 bytes) {
    barrier_wait(ring.empty(), ring.parity ^ 1);
#if __CUDA_ARCH__ >= 900
    if (lane == 0) barrier_expect(ring.full(), bytes);
    __syncwarp();
#endif
  }

  // On sm_90 a lane issues a whole piece and the lanes take turns; else the warp shares each piece.
#if __CUDA_ARCH__ >= 900
  __device__ int first_piece() const { return lane; }
  __device__ static constexpr int piece_step() { return 32; }
  __device__ void copy(u32 offset, const u8* from, u32 bytes) {
    bulk_copy(ring.here() + offset, from, bytes, ring.full(), policy);
  }
#else
  __device__ int first_piece() const { return 0; }
  __device__ static constexpr int piece_step() { return 1; }
  __device__ void copy(u32 offset, const u8* from, u32 bytes) {
    warp_copy(ring.here() + offset, from, bytes, lane);
  }
#endif

  __device__ void end() {
#if __CUDA_ARCH__ < 900
    barrier_arrive_after_copies(ring.full());
#endif
    ring.advance();
  }
};

template <int P>
__device__ void produce_gate_up(Copier& to, const u8* row, int unit) {
  using F = Format<P>;
  const u8* slice = row + (unit / kSliceBlocks) * Row<P>::kSliceBytes;
  const u32 first = (unit % kSliceBlocks) * (2 * kHiddenBlocks);
  for (int tile = 0; tile < 2 * kHiddenBlocks; tile += Stage<P>::kTiles) {
    const u32 tiles = min(Stage<P>::kTiles, 2 * kHiddenBlocks - tile);
    to.begin(tiles * (F::kCodeBytes + F::kScaleBytes));
    for (int piece = to.first_piece(); piece < 2; piece += to.piece_step())
      if (piece == 0)
        to.copy(0, slice + (first + tile) * F::kCodeBytes, tiles * F::kCodeBytes);
      else
        to.copy(Stage<P>::kScaleOffset,
                slice + Row<P>::kGateUpScales + (first + tile) * F::kScaleBytes,
                tiles * F::kScaleBytes);
    to.end();
  }
}

// A stage of down holds k blocks of kDownRows / 32 row groups: slice by slice where whole slices fit
// (a slice's row groups are contiguous, so that is one copy), else row group by row group.
template <int P>
struct DownStage {
  static constexpr int kGroups = kDownRows / 32;
  static constexpr int kMost = Stage<P>::kTiles / kGroups;
  static constexpr bool kBySlice = kSliceBlocks <= kMost;
  static constexpr int kBlocks = kBySlice ? kMost / kSliceBlocks * kSliceBlocks : kMost;

  // The place, in tiles, of k block `block` of the stage.
  static __device__ __forceinline__ int tile(int group, int block) {
    if (kGroups == 1) return block;
    if (!kBySlice) return group * kBlocks + block;
    return (block / kSliceBlocks * kGroups + group) * kSliceBlocks + block % kSliceBlocks;
  }
};

template <int P>
__device__ void produce_down(Copier& to, const u8* row, int unit) {
  using F = Format<P>;
  using Down = DownStage<P>;
  for (int block = 0; block < kInterBlocks; block += Down::kBlocks) {
    const int end = min(block + Down::kBlocks, kInterBlocks);
    to.begin((end - block) * Down::kGroups * (F::kCodeBytes + F::kScaleBytes));
    // Piece 2i is the codes and 2i + 1 the scales of the stage's i-th run of tiles.
    constexpr int kRuns = Down::kBySlice ? Down::kBlocks / kSliceBlocks
                                          : Down::kGroups * (Down::kBlocks / kSliceBlocks + 2);
    for (int piece = to.first_piece(); piece < 2 * kRuns; piece += to.piece_step()) {
      const int run = piece / 2;
      const int group = Down::kBySlice ? 0 : run % Down::kGroups;
      const int slice = block / kSliceBlocks + (Down::kBySlice ? run : run / Down::kGroups);
      const int begin = max(slice * kSliceBlocks, block);
      const int blocks = min((slice + 1) * kSliceBlocks, end) - begin;
      if (blocks <= 0) continue;
      const u32 tiles = blocks * (Down::kBySlice ? Down::kGroups : 1);
      const u32 place = Down::tile(group, begin - block);
      const u32 first =
          (unit * Down::kGroups + group) * kSliceBlocks + (begin - slice * kSliceBlocks);
      const u8* from = row + slice * Row<P>::kSliceBytes;
      if (piece % 2 == 0)
        to.copy(place * F::kCodeBytes, from + Row<P>::kDownCodes + first * F::kCodeBytes,
                tiles * F::kCodeBytes);
      else
        to.copy(Stage<P>::kScaleOffset + place * F::kScaleBytes,
                from + Row<P>::kDownScales + first * F::kScaleBytes, tiles * F::kScaleBytes);
    }
    to.end();
  }
}

template <int P>
__device__ __forceinline__ void produce_units(Copier& to, int down, const u8* row, int unit,
                                              int end) {
  for (; unit < end; unit++)
    down ? produce_down<P>(to, row, unit) : produce_gate_up<P>(to, row, unit);
}

__device__ void produce(const Plan& plan, Ring ring, int lane) {
#if __CUDA_ARCH__ >= 900
  Copier to{ring, lane, streaming_policy()};
#else
  Copier to{ring, lane};
#endif
  for (int down = 0; down < 2; down++)
    each_pass(plan, down, [&](const Pass& pass) {
      const u8* row = reinterpret_cast<const u8*>(plan.address[pass.rank]);
      const int precision = plan.precision[pass.rank];
      if (precision == BASE) produce_units<BASE>(to, down, row, pass.unit, pass.end);
      else if (precision == MXFP4) produce_units<MXFP4>(to, down, row, pass.unit, pass.end);
      else produce_units<NVFP4>(to, down, row, pass.unit, pass.end);
    });
#if __CUDA_ARCH__ < 900
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
