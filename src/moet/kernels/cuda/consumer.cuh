// The warps that multiply: words decoded in registers, activations in columns of shared memory.
//
// Four warps take 64 rows of two k blocks, warps 0 and 1 the first, 2 and 3 the second; such groups
// take the pairs of k blocks in turn.
#pragma once
#include "finisher.cuh"
#include "producer.cuh"

constexpr int kGroups = WARPS / 4;
constexpr int kStride = 2 * kGroups;  // k blocks from one of a warp's to its next
static_assert(kSliceBlocks > 0 && WARPS % 4 == 0, "groups of four warps");

// Where a warp finds its words. A step is what it decodes between two waits.
template <int P, bool DOWN>
struct Steps {
  static constexpr int kBlocks = DOWN ? kInterBlocks : kHiddenBlocks;
  static constexpr int kStageBlocks = DOWN ? DownStage<P>::kBlocks : Stage<P>::kBlocks;
  static constexpr int kBatch = P == BASE ? 2 : 1;  // k blocks of a warp a step
  static constexpr int kLeast = (kStageBlocks + kStride * kBatch - 1) / (kStride * kBatch);
  // Operands alternate between two sets of registers, so that a stage has an even number of steps.
  static constexpr int kSteps = (kLeast + 1) / 2 * 2;
  static constexpr bool kRagged = kBlocks % kStageBlocks || kStageBlocks != kSteps * kStride * kBatch;
};

struct Lane {
  int warp, lane, g, t;

  __device__ int matrix() const { return warp % 2; }
  __device__ int mine() const { return warp % 4 / 2; }
  // The warp's k block i of a step, counted within the stage.
  template <int BATCH>
  __device__ int block(int step, int i) const {
    return (step * BATCH + i) * kStride + warp / 4 * 2 + mine();
  }
};

// A step's words of one lane.
template <int P, bool DOWN>
struct Step {
  using S = Steps<P, DOWN>;
  using F = Format<P>;
  Words<P> words[S::kBatch];
  bool inside[S::kBatch];

  __device__ __forceinline__ void load(const Lane& at, u32 stage, int first, int step) {
    const u32 word = (at.t * 8 + at.g) * (P == BASE ? 8 : 16);
    const u32 byte = Stage<P>::kScaleOffset + (P == NVFP4 ? (at.t & 1) * 32 : 0) + at.g * 4;
#pragma unroll
    for (int i = 0; i < S::kBatch; i++) {
      int block = at.block<S::kBatch>(step, i);
      inside[i] = !S::kRagged || (block < S::kStageBlocks && first + block < S::kBlocks);
      if (!inside[i]) block = 0;
      const u32 tile =
          DOWN ? DownStage<P>::tile(at.matrix(), block) : block * 2 + at.matrix();
      words[i].load(stage + word + tile * F::kCodeBytes, stage + byte + tile * F::kScaleBytes);
    }
  }

  __device__ __forceinline__ void decode(u32 (*a)[2][4], float (*scale)[4]) const {
#pragma unroll
    for (int i = 0; i < S::kBatch; i++) {
      words[i].decode(a[i], scale[i]);
      if (S::kRagged && !inside[i])
#pragma unroll
        for (int r = 0; r < 4; r++) a[i][0][r] = a[i][1][r] = 0;
    }
  }
};

// total[h][c][j]: a warp's share of the sum of its row 16h + 8c + g, for the token of column pair t
// (two columns a token) or of column 2t + j (one). NVFP4: of one half of the k blocks.
typedef float Total[2][2][2 / kParts];

// total += scale · sum, whose element 2c + j of half h is column 2t + j of row 16h + 8c + g.
__device__ __forceinline__ void add_columns(const float (*sum)[4], const float* scale,
                                            Total& total) {
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float a = sum[h][2 * c], b = sum[h][2 * c + 1];
      const float s = scale[2 * h + c];
      if (kParts == 2) {
        total[h][c][0] += s * (a + b * 0.0625f);
      } else {
        total[h][c][0] += s * a;
        total[h][c][2 / kParts - 1] += s * b;
      }
    }
}

#ifdef WGMMA
#include "accumulate_wgmma.cuh"
#else
#include "accumulate_mma.cuh"
#endif

// A unit's sums, to the finisher. units: those before in this launch, whose lowest bit chooses the
// side of the sums, the next its phase; passes likewise, for the columns.
template <int P>
__device__ __forceinline__ void finish(Total& total, const Lane& at, int tokens, u32 units,
                                       u32 passes) {
  Sums& sums = shared.sums;
  constexpr int kEach = 2 / kParts;  // tokens of a lane
  const u32 side = units & 1;
  if (P == NVFP4)  // the halves of a token's k blocks are in neighbouring lanes
#pragma unroll
    for (int i = 0; i < 4 * kEach; i++) {
      float& v = total[i / 2 % 2][i % 2][i / 4];
      v += __shfl_down_sync(0xFFFFFFFFu, v, 1);
    }
  barrier_wait(shared_address(&sums.freed[side]), (units >> 1 & 1) ^ 1);
#pragma unroll
  for (int j = 0; j < kEach; j++) {
    const int token = (P == NVFP4 ? at.t / 2 : at.t) * kEach + j;
    if (token < tokens && !(P == NVFP4 && at.t % 2)) {
      float* to = sums.sum[side][at.warp / 2][token] + at.matrix() * 32 + at.g;
      to[0] = total[0][0][j], to[8] = total[0][1][j];
      to[16] = total[1][0][j], to[24] = total[1][1][j];
    }
  }
  if (at.warp == 0 && at.lane < kMostTokens)
    sums.inverse[side][at.lane] = shared.columns.inverse[passes & 1][at.lane];
  __syncwarp();
  named_arrive(kSummed + side, kConsumers + 32);
}

struct Consumer {
  const u16* x;
  Ring ring;
  u32 buffer;  // shared memory: the columns
  Lane at;
  u32 units = 0, passes = 0;

  template <int P, bool DOWN>
  __device__ __forceinline__ void run(const Pass& pass) {
    accumulate<P, DOWN>(ring, at, buffer + (passes & 1) * kColumnBytes, pass.end - pass.unit,
                        [&](Total& total) {
                          finish<P>(total, at, pass.tokens, units++, passes);
                        });
  }

  // converted: the first pass's columns are there.
  template <bool DOWN>
  __device__ __forceinline__ void phase(bool converted) {
    Columns& columns = shared.columns;
    each_pass(shared.plan, DOWN, [&](const Pass& pass) {
      const u32 side = passes & 1;
      barrier_wait(shared_address(&columns.converted[side]), passes >> 1 & 1);
      if (!converted) {  // nothing to multiply yet: all warps convert the first pass
        named_barrier(1, kConsumers);
        convert_pass(shared.plan.precision[pass.rank], shared.plan.pair[pass.rank] + pass.first,
                     pass.tokens, x, buffer, side, DOWN, threadIdx.x, kConsumers, 1);
        named_barrier(1, kConsumers);
        converted = true;
      }
      const int precision = shared.plan.precision[pass.rank];
      if (precision == BASE) run<BASE, DOWN>(pass);
      else if (precision == MXFP4) run<MXFP4, DOWN>(pass);
      else run<NVFP4, DOWN>(pass);
      __syncwarp();
      if (at.lane == 0 || at.warp == 0) barrier_arrive(shared_address(&columns.consumed[side]));
      passes++;
    });
  }
};

// The warps that convert ahead: every pass of a phase but the first.
struct Converter {
  const u16* x;
  u32 buffer;
  int thread;
  u32 passes = 0;

  __device__ void phase(bool down) {
    bool first_pass = true;
    each_pass(shared.plan, down, [&](const Pass& pass) {
      const u32 side = passes & 1;
      barrier_wait(shared_address(&shared.columns.consumed[side]), (passes >> 1 & 1) ^ 1);
      if (!first_pass)
        convert_pass(shared.plan.precision[pass.rank], shared.plan.pair[pass.rank] + pass.first,
                     pass.tokens, x, buffer, side, down, thread, kConverters * 32, 3);
      first_pass = false;
      barrier_arrive(shared_address(&shared.columns.converted[side]));
      passes++;
    });
  }
};
