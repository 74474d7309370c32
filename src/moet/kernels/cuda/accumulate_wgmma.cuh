// Hopper: weights enter wgmma from registers, the columns from shared memory.
#pragma once

// wgmma's descriptor of columns, whose lower word is address ÷ 16 | 128 ÷ 16 << 16: K-major without
// swizzle; 8 columns × 16 bytes are contiguous, 128 bytes apart along k, 256 from one k block to
// the next.
__device__ __forceinline__ u64 descriptor(u32 low) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(256 >> 4));
  return d;
}

// The sums of `units` units one after another, each handed to `finish` (total).
//
// A group's B operand has the activations of its first k block in columns 0..7 and of its second
// in 8..15: each warp drops the half that is not its own (16 columns cost what 8 do). While the
// tensor cores work on a step, the next one is decoded and the words after that are loaded, across
// units as well; a stage is free as soon as its last words are decoded.
template <int P, bool DOWN, class Finish>
__device__ __forceinline__ void accumulate(Ring& ring, const Lane& at, u32 columns, int units,
                                           Finish finish) {
  using S = Steps<P, DOWN>;
  const u32 base = columns >> 4 | 128 >> 4 << 16;
  const u32 from = kept(base + at.warp / 4 * 2 * 16);
  // What a group without k blocks of its own multiplies its zeros by: columns that are there, for
  // what lies behind them may be NaN.
  const u32 filler = S::kBlocks < kStride ? base : from;
  const bool second = at.mine();
  float scale[2][S::kBatch][4];
  u32 a[2][S::kBatch][2][4];
  Step<P, DOWN> words;
  barrier_wait(ring.full(), ring.parity);
  words.load(at, ring.here(), 0, 0);
  words.decode(a[0], scale[0]);
  words.load(at, ring.here(), 0, 1);
#pragma unroll 1
  for (; units > 0; units--) {
    float sum[2][8] = {};
    Total total = {};
    const auto add = [&](const float* factors) {
      float own[2][4];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < 4; c++) own[h][c] = second ? sum[h][4 + c] : sum[h][c];
      add_columns(own, factors, total);
    };
#pragma unroll 1
    for (int first = 0; first < S::kBlocks; first += S::kStageBlocks) {
      const int next = first + S::kStageBlocks < S::kBlocks ? first + S::kStageBlocks : 0;
      const bool more = next || units > 1;
#pragma unroll
      for (int step = 0; step < S::kSteps; step++) {
        const int now = step % 2;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < S::kBatch; i++) {
          const int block = first + (step * S::kBatch + i) * kStride;
          const bool beyond = S::kRagged && block + at.warp / 4 * 2 >= S::kBlocks;
          const u64 b = descriptor(beyond ? filler : from + block * 16);
#pragma unroll
          for (int h = 0; h < 2; h++) wgmma<P == BASE>(sum[h], a[now][i][h], b);
        }
        wgmma_commit();
        if (P == BASE) wgmma_wait<1>();
        if (step < S::kSteps - 1 || more) words.decode(a[now ^ 1], scale[now ^ 1]);
        if (step + 2 < S::kSteps) {
          words.load(at, ring.here(), first, step + 2);
        } else if (step + 2 == S::kSteps) {
          __syncwarp();
          if (at.lane == 0) barrier_arrive(ring.empty());
          ring.advance();
          if (more) {
            barrier_wait(ring.full(), ring.parity);
            words.load(at, ring.here(), next, 0);
          }
        } else if (more) {
          words.load(at, ring.here(), next, 1);
        }
        if (P != BASE) {
          wgmma_wait<0>();
          add(scale[now][0]);
        }
      }
    }
    if (P == BASE) {
      wgmma_wait<0>();
      const float one[4] = {1.0f, 1.0f, 1.0f, 1.0f};
      add(one);
    }
    finish(total);
  }
}
