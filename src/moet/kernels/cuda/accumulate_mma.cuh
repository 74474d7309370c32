// sm_100, and where wgmma is not: the warp-wide MMA, both operands from registers.
#pragma once

// The sums of `units` units one after another, each handed to `finish` (total).
template <int P, bool DOWN, class Finish>
__device__ __forceinline__ void accumulate(Ring& ring, const Lane& at, u32 columns, int units,
                                           Finish finish) {
  using S = Steps<P, DOWN>;
  Step<P, DOWN> words;
  barrier_wait(ring.full(), ring.parity);
  words.load(at, ring.here(), 0, 0);
#pragma unroll 1
  for (; units > 0; units--) {
    float sum[2][4] = {};
    Total total = {};
#pragma unroll 1
    for (int first = 0; first < S::kBlocks; first += S::kStageBlocks) {
      const int next = first + S::kStageBlocks < S::kBlocks ? first + S::kStageBlocks : 0;
#pragma unroll
      for (int step = 0; step < S::kSteps; step++) {
        u32 a[S::kBatch][2][4], b[S::kBatch][2];
        float scale[S::kBatch][4];
        words.decode(a, scale);
#pragma unroll
        for (int i = 0; i < S::kBatch; i++) {
          const int block = words.inside[i] ? first + at.block<S::kBatch>(step, i) : 0;
          const u32 from = columns + block * 256 + at.g * 16 + at.t * 4;
          b[i][0] = load_shared1(from), b[i][1] = load_shared1(from + 128);
        }
        if (step + 1 < S::kSteps) {
          words.load(at, ring.here(), first, step + 1);
        } else {
          __syncwarp();
          if (at.lane == 0) barrier_arrive(ring.empty());
          ring.advance();
          if (next || units > 1) {
            barrier_wait(ring.full(), ring.parity);
            words.load(at, ring.here(), next, 0);
          }
        }
#pragma unroll
        for (int i = 0; i < S::kBatch; i++) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            if (P != BASE) sum[h][0] = sum[h][1] = sum[h][2] = sum[h][3] = 0.0f;
            mma_e4m3(sum[h], a[i][h], b[i][0], b[i][1]);
          }
          if (P != BASE) add_columns(sum, scale[i], total);
        }
      }
    }
    if (P == BASE) {
      const float one[4] = {1.0f, 1.0f, 1.0f, 1.0f};
      add_columns(sum, one, total);
    }
    finish(total);
  }
}
