// The warp that turns the consumers' sums into h (gate/up) or a pair's output (down).
#pragma once
#include "converter.cuh"

struct Finisher {
  const float* factors;  // [EXPERTS][3]
  int lane;
  u32 sequence = 0;

  template <bool DOWN>
  __device__ void phase(const Activation& activation) {
    const Plan& plan = shared.plan;
    const Exchange& exchange = shared.exchange;
    Sums& sums = shared.sums;
    each_pass(plan, DOWN, [&](const Pass& pass) {
      const int rank = pass.rank;
      const float* factor = factors + plan.expert[rank] * 3;
      const float gate = DOWN ? factor[2] : factor[0], up = DOWN ? gate : factor[1];
      const float undo = plan.precision[rank] == BASE ? 1.0f : 64.0f;
      for (int unit = pass.unit; unit < pass.end; unit++) {
        const u32 side = sequence & 1;
        named_barrier(kSummed + side, kConsumers + 32);
        for (int token = 0; token < pass.tokens; token++) {
          float sum[2] = {0.0f, 0.0f};
#pragma unroll
          for (int w = 0; w < WARPS / 2; w++) {
            sum[0] += sums.sum[side][w][token][lane];
            sum[1] += sums.sum[side][w][token][32 + lane];
          }
          const float power = sums.inverse[side][token] * undo;
          const u64 pair = plan.pair[rank][pass.first + token];
          if (DOWN) {
            Word* to = exchange.partial + pair * HIDDEN + unit * 64 + lane;
            put(to, __float_as_uint(sum[0] * power * gate), exchange.launch);
            put(to + 32, __float_as_uint(sum[1] * power * gate), exchange.launch);
          } else {
            const u32 value = float_to_bf16(activation(sum[0] * power * gate, sum[1] * power * up,
                                                       plan.expert[rank], unit * 32 + lane));
            const u32 next = __shfl_down_sync(0xFFFFFFFFu, value, 1);
            if (lane % 2 == 0)
              put(exchange.h + (pair * INTER + unit * 32 + lane) / 2, value | next << 16,
                  exchange.launch);
            const u32 largest = __reduce_max_sync(0xFFFFFFFFu, value & 0x7FFF);
            if (lane == 0)
              put(exchange.largest + pair * kInterBlocks + unit, largest, exchange.launch);
          }
        }
        barrier_arrive(shared_address(&sums.freed[side]));
        sequence++;
      }
    });
  }
};
