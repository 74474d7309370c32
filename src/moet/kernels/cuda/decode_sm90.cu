// Routed experts of one layer for a few tokens, on Hopper's FP8 tensor cores.
//
// As decode.cu (one persistent kernel, a producer warp, a ring of stages), but a weight becomes an
// E4M3 byte, base scale included, that enters wgmma from registers, and a BF16 activation becomes
// two E4M3 columns: hi, and 16 × what hi lost. Four warps of a warpgroup take 64 rows of one k
// block; the warpgroups take every WARPS/4-th k block and their sums are added in a fixed order.
//
// Compile-time: HIDDEN, INTER, SLICES, EXPERTS, TOPK, MAX_TOKENS, WARPS, OUT_BF16.
#include "weights.cuh"

constexpr int kDownRows = 64;
constexpr int kHelperWarps = 2;  // the producer, and one that adds the warps' sums
// NVFP4 has two scales a k block: a token takes four columns, k 0..15 apart from k 16..31.
__host__ __device__ constexpr int tokens_per_pass(int precision) {
  return precision == NVFP4 ? 2 : 4;
}

#include "meeting.cuh"
#include "producer.cuh"

constexpr int kGroups = WARPS / 4;
static_assert(kSliceBlocks > 0 && WARPS % 4 == 0, "warpgroups");

struct Shared {
  Plan plan;
  float partial[2][WARPS / 2][4][64];  // by warp pair: tiles of one k block
  u32 largest[4][WARPS];  // |activation|, BF16 bits
  float inverse[4];       // what undoes a token's scaling
  float unit_inverse[2][4];
  u64 summed[2];  // the partial buffer holds all sums of a unit
  u64 freed[2];   // it may be written again
  u64 full[32];
  u64 empty[32];
};

// D[64 × 16] (+)= A[64 × 32] · B[32 × 16], E4M3.
template <bool ADD>
__device__ __forceinline__ void wgmma(float* d, const u32* a, u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, "
      "{%8,%9,%10,%11}, %12, p, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD ? 1 : 0));
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ u32 to_e4m3x2(float low, float high) {
  u16 d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ void from_e4m3x2(u32 pair, float* v) {
  asm("{ .reg .b16 a, b; .reg .b32 h; cvt.rn.f16x2.e4m3x2 h, %2; mov.b32 {a, b}, h;\n"
      "cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(v[0]), "=f"(v[1]) : "h"(u16(pair)));
}

// (w & mask) · factor + addend, in two instructions (the compiler would shift before the mask).
__device__ __forceinline__ u32 masked_times_plus(u32 w, u32 mask, u32 factor, u32 addend) {
  u32 d;
  asm("{ .reg .b32 x; and.b32 x, %1, %2; mad.lo.u32 %0, x, %3, %4; }"
      : "=r"(d) : "r"(w), "r"(mask), "r"(factor), "r"(addend));
  return d;
}

// Base: a byte is the sign, and the scale byte + 0x10 if large.
__device__ __forceinline__ void decode_base(u32 w, u32 s0, u32 s1, u32* a) {
  a[0] = (w & 0x90909090u) + s0;
  a[1] = masked_times_plus(w, 0x24242424u, 4, s1);
  a[2] = masked_times_plus(w, 0x09090909u, 16, s0);
  a[3] = (__funnelshift_l(w, w, 6) & 0x90909090u) + s1;
}

// FP4: the value × 2^-6. Even nibbles to `even`, odd to `odd`.
__device__ __forceinline__ void decode_fp4(u32 w, u32& even, u32& odd) {
  even = and_or(w << 2, 0x1C1C1C1Cu, (w << 4) & 0x80808080u);
  odd = and_or(w >> 2, 0x1C1C1C1Cu, w & 0x80808080u);
}

  // The activations of a pass (x by token, or h by pair), BF16 in global memory, to hi and lo
  // columns, scaled by a power of two a token. Not inlined: its registers would crowd the MMAs'.
  template <int P, bool DOWN>
  __device__ __noinline__ void load_activations(Shared& shared, u32 activations, const u16* source,
                                              int rank, int first, int tokens) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int K = DOWN ? INTER : HIDDEN;
    const auto row = [&](int token) {
      const int pair = shared.plan.pair[rank][first + token];
      return source + u64(DOWN ? pair : pair / TOPK) * K;
    };
    for (int token = 0; token < tokens; token++) {
      u32 largest = 0;
      for (int k = threadIdx.x * 8; k < K; k += kConsumers * 8) {
        const uint4 v = *reinterpret_cast<const uint4*>(row(token) + k);
        for (u32 pair : {v.x, v.y, v.z, v.w})
          largest = max(max(largest, pair & 0x7FFF), (pair >> 16) & 0x7FFF);
      }
      largest = __reduce_max_sync(0xFFFFFFFFu, largest);
      if (lane == 0) shared.largest[token][warp] = largest;
    }
    named_barrier(1, kConsumers);
    constexpr int kColumns = P == NVFP4 ? 4 : 2;
    for (int token = 0; token < tokens; token++) {
      u32 largest = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) largest = max(largest, shared.largest[token][w]);
      const int exponent = largest >> 7;  // scaled, the largest lies in [128, 256)
      const float scale = __uint_as_float(u32(min(max(261 - exponent, 1), 254)) << 23);
      if (threadIdx.x == 0)
        shared.inverse[token] = __uint_as_float(u32(min(max(exponent - 7, 0), 253)) << 23);
      for (int k = threadIdx.x * 8; k < K; k += kConsumers * 8) {
        const uint4 v = *reinterpret_cast<const uint4*>(row(token) + k);
        const u32 pairs[4] = {v.x, v.y, v.z, v.w};
        u32 hi[4], lo[4];  // two bytes each: k and k + 1
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float a = __uint_as_float(pairs[i] << 16) * scale;
          const float b = __uint_as_float(pairs[i] & 0xFFFF0000u) * scale;
          float back[2];
          hi[i] = to_e4m3x2(a, b);
          from_e4m3x2(hi[i], back);
          lo[i] = to_e4m3x2((a - back[0]) * 16.0f, (b - back[1]) * 16.0f);
        }
        const int block = k / 32, part = k / 8 % 4;
        const u32 at = activations + block * 256 + token * kColumns * 16 + part * 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 h, l;
          if (P == BASE) {  // bytes are k = 4, 0, 5, 1 and 6, 2, 7, 3
            h = __byte_perm(hi[half], hi[2 + half], 0x1504);
            l = __byte_perm(lo[half], lo[2 + half], 0x1504);
          } else {  // even and odd k
            const u32 pick = half ? 0x7531 : 0x6420;
            h = __byte_perm(hi[0] | hi[1] << 16, hi[2] | hi[3] << 16, pick);
            l = __byte_perm(lo[0] | lo[1] << 16, lo[2] | lo[3] << 16, pick);
          }
          const u32 to = at + half * 128;
          if (P == NVFP4) {
            const bool low = part < 2;
            store_shared(to, low ? h : 0);
            store_shared(to + 16, low ? l : 0);
            store_shared(to + 32, low ? 0 : h);
            store_shared(to + 48, low ? 0 : l);
          } else {
            store_shared(to, h);
            store_shared(to + 16, l);
          }
        }
      }
    }
    if (threadIdx.x < 64) store_shared(activations + K * 8 + threadIdx.x * 4, 0);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    named_barrier(1, kConsumers);
  }

struct Consumer {
  Shared& shared;
  Ring ring;
  u32 activations;  // shared memory: [K / 16][8 columns][16] bytes
  int warp, lane, g, t;
  int loaded = -1;   // whose x the activations are, where that can serve again
  u32 sequence = 0;  // units done: the lowest bit chooses the partial buffer, the next its phase

  __device__ int group() const { return warp / 4; }

  // total[h][c] = this warp's share of the sum of its row 16h + 8c + g and the token (BASE, MXFP4)
  // or half token (NVFP4) of column pair t.
  //
  // A warpgroup takes two k blocks of two tiles at once: warps 0 and 1 the first k block, 2 and 3
  // the second. B's columns 0..7 are the activations of the first, 8..15 those of the second: each
  // warp drops the half that is not its own.
  template <int P, bool DOWN>
  __device__ void accumulate(float (*total)[2]) {
    using F = Format<P>;
    constexpr int kBlocks = DOWN ? kInterBlocks : kHiddenBlocks;
    constexpr int kStageBlocks = DOWN ? DownStage<P>::kBlocks : F::kTiles / 2;
    constexpr int kStride = 2 * kGroups;
    constexpr int kBatch = P == BASE ? 2 : 1;
    constexpr int kSteps = (kStageBlocks + kStride * kBatch - 1) / (kStride * kBatch) * kBatch;
    constexpr bool kRagged = kBlocks % kStageBlocks || kStageBlocks % (kStride * kBatch);
    const int matrix = warp % 2, mine = warp % 4 / 2;
    // K-major without swizzle: 8 columns × 16 bytes are contiguous, 128 bytes apart along k, 256
    // from one k block to the next.
    const u64 columns = u64(activations >> 4) | u64(128 >> 4) << 16 | u64(256 >> 4) << 32;
    const u32 word = (t * 8 + g) * (P == BASE ? 8 : 16);
    const u32 byte = F::kScaleOffset + (P == NVFP4 ? (t & 1) * 32 : 0) + g * 4;
    float sum[P == BASE ? 1 : kBatch][2][8] = {};
    for (int first = 0; first < kBlocks; first += kStageBlocks) {
      barrier_wait(ring.full + ring.stage * 8, ring.parity);
      const u32 stage = ring.here();
      const u64 here = columns + first * 16 + group() * 32;
#pragma unroll
      for (int step = 0; step < kSteps; step += kBatch) {
        u32 a[kBatch][2][4];
        float scale[kBatch][4];
        u64 b[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
          int block = (step + i) * kStride + group() * 2 + mine;
          b[i] = here + (step + i) * (kStride * 16);
          const bool inside = !kRagged || (block < kStageBlocks && first + block < kBlocks);
          if (kRagged && !inside) block = 0;
          if (kRagged && first + (step + i) * kStride + group() * 2 >= kBlocks) b[i] = columns;
          const u32 tile = DOWN ? DownStage<P>::tile(matrix, block) : block * 2 + matrix;
          const u32 scales = load_shared1(stage + byte + tile * F::kScaleBytes);
          const u32 at = stage + word + tile * F::kCodeBytes;
          if (P == BASE) {
            const uint2 w = load_shared2(at);
            decode_base(w.x, __byte_perm(scales, 0, 0x0000), __byte_perm(scales, 0, 0x1111),
                        a[i][0]);
            decode_base(w.y, __byte_perm(scales, 0, 0x2222), __byte_perm(scales, 0, 0x3333),
                        a[i][1]);
          } else {
            const uint4 w = load_shared4(at);
            decode_fp4(w.x, a[i][0][0], a[i][0][2]);
            decode_fp4(w.y, a[i][0][1], a[i][0][3]);
            decode_fp4(w.z, a[i][1][0], a[i][1][2]);
            decode_fp4(w.w, a[i][1][1], a[i][1][3]);
            if (P == MXFP4) e8m0_scales(scales, scale[i]);
            else e4m3_scales(scales, scale[i]);
          }
          if (kRagged && !inside) {
#pragma unroll
            for (int r = 0; r < 4; r++) a[i][0][r] = a[i][1][r] = 0;
          }
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) wgmma<P == BASE>(sum[P == BASE ? 0 : i][h], a[i][h], b[i]);
        wgmma_commit();
        if (P == BASE) {
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < kBatch; i++) add(sum[P == BASE ? 0 : i], scale[i], mine, total);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.empty + ring.stage * 8);
      ring.advance();
    }
    if (P == BASE) {
      wgmma_wait<0>();
      const float one[4] = {1.0f, 1.0f, 1.0f, 1.0f};
      add(sum[0], one, mine, total);
    }
  }

  // total += scale · (hi + lo ÷ 16), of the half of the columns that is this warp's.
  static __device__ __forceinline__ void add(const float (*sum)[8], const float* scale, int mine,
                                             float (*total)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float hi = mine ? sum[h][4 + 2 * c] : sum[h][2 * c];
        const float lo = mine ? sum[h][5 + 2 * c] : sum[h][2 * c + 1];
        total[h][c] += scale[2 * h + c] * (hi + lo * 0.0625f);
      }
  }

  // One unit for one pass of tokens.
  template <int P, bool DOWN>
  __device__ __forceinline__ void unit(int tokens) {
    float total[2][2] = {};
    accumulate<P, DOWN>(total);
    // NVFP4: column pairs 2i and 2i + 1 are the halves of token i's k blocks.
    if (P == NVFP4)
      for (int i = 0; i < 4; i++)
        total[i / 2][i % 2] += __shfl_down_sync(0xFFFFFFFFu, total[i / 2][i % 2], 1);
    const u32 buffer = sequence & 1;
    barrier_wait(shared_address(&shared.freed[buffer]), (sequence >> 1 & 1) ^ 1);
    const int token = P == NVFP4 ? t / 2 : t;
    if (token < tokens && !(P == NVFP4 && t % 2)) {
      float* to = shared.partial[buffer][warp / 2][token] + warp % 2 * 32 + g;
      to[0] = total[0][0], to[8] = total[0][1], to[16] = total[1][0], to[24] = total[1][1];
    }
    if (warp == 0 && lane < 4) shared.unit_inverse[buffer][lane] = shared.inverse[lane];
    barrier_arrive(shared_address(&shared.summed[buffer]));
    sequence++;
  }

  // This block's units of one expert.
  template <int P, bool DOWN>
  __device__ void units(int rank, int count, const u16* x, const u16* h) {
    constexpr int kTokens = tokens_per_pass(P);
    const int tokens = shared.plan.count[rank];
    const u16* source = DOWN ? h : x;
    if (tokens <= kTokens) {
      // A lone token's x often serves the next expert as well.
      const int key = DOWN || tokens > 1 ? -1 : shared.plan.pair[rank][0] / TOPK * 3 + P;
      if (key < 0 || key != loaded) load_activations<P, DOWN>(shared, activations, source, rank, 0, tokens);
      loaded = key;
      for (; count > 0; count--) unit<P, DOWN>(tokens);
    } else {
      for (; count > 0; count -= kPassUnits)
        for (int first = 0; first < tokens; first += kTokens) {
          const int pass = min(tokens - first, kTokens);
          load_activations<P, DOWN>(shared, activations, source, rank, first, pass);
          for (int i = 0; i < min(count, kPassUnits); i++) unit<P, DOWN>(pass);
        }
      loaded = -1;
    }
  }

  template <bool DOWN>
  __device__ void phase(const u16* x, const u16* h) {
    const Plan& plan = shared.plan;
    for (int rank = 0; rank < plan.ranks; rank++) {
      const int count = plan.range[DOWN][rank][1] - plan.range[DOWN][rank][0];
      if (count <= 0) continue;
      if (plan.precision[rank] == BASE) units<BASE, DOWN>(rank, count, x, h);
      else if (plan.precision[rank] == MXFP4) units<MXFP4, DOWN>(rank, count, x, h);
      else units<NVFP4, DOWN>(rank, count, x, h);
    }
  }
};

// The warp that turns the consumers' sums into h (gate/up) or a pair's output (down).
struct Finisher {
  Shared& shared;
  int lane;
  u32 sequence = 0;

  template <bool DOWN>
  __device__ void phase(u16* h, float* partial, float limit) {
    const Plan& plan = shared.plan;
    for (int rank = 0; rank < plan.ranks; rank++) {
      const int precision = plan.precision[rank], step = tokens_per_pass(precision);
      const int end = plan.range[DOWN][rank][1];
      for (int run = plan.range[DOWN][rank][0]; run < end; run += kPassUnits)
        for (int first = 0; first < plan.count[rank]; first += step)
          for (int index = run; index < min(run + kPassUnits, end); index++) {
            const u32 buffer = sequence & 1;
            barrier_wait(shared_address(&shared.summed[buffer]), sequence >> 1 & 1);
            for (int i = 0; i < min(plan.count[rank] - first, step); i++) {
              float sum[2] = {0.0f, 0.0f};
#pragma unroll
              for (int w = 0; w < WARPS / 2; w++) {
                sum[0] += shared.partial[buffer][w][i][lane];
                sum[1] += shared.partial[buffer][w][i][32 + lane];
              }
              const float* factor = plan.factor[rank];
              const float power = shared.unit_inverse[buffer][i] * (precision == BASE ? 1.0f : 64.0f);
              const u64 pair = plan.pair[rank][first + i];
              if (DOWN) {
                float* to = partial + pair * HIDDEN + index * 64 + lane;
                to[0] = sum[0] * power * factor[2];
                to[32] = sum[1] * power * factor[2];
              } else {
                h[pair * INTER + index * 32 + lane] =
                    swiglu(sum[0] * power * factor[0], sum[1] * power * factor[1], limit);
              }
            }
            barrier_arrive(shared_address(&shared.freed[buffer]));
            sequence++;
          }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
decode_experts(const u16* x, const int* topk_ids, const float* topk_weights, const u64* address,
               const u8* precision, const float* factor, u16* h, float* partial, void* out,
               u64* counter, int tokens, int stages, float limit, int add) {
  extern __shared__ __align__(128) u8 buffer[];
  __shared__ Shared shared;
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  Ring ring{u32(stages), shared_address(shared.full), shared_address(shared.empty),
            shared_address(buffer)};
  if (threadIdx.x < stages) {
    barrier_init(ring.full + threadIdx.x * 8, 1);
    barrier_init(ring.empty + threadIdx.x * 8, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // for the copy engine
  }
  if (threadIdx.x < 2) {
    barrier_init(shared_address(&shared.summed[threadIdx.x]), kConsumers);
    barrier_init(shared_address(&shared.freed[threadIdx.x]), 32);
  }
  const Meeting meeting(counter);  // before any thread of this block can have arrived
  make_plan(shared.plan, topk_ids, tokens, address, precision, factor);
  if (warp == WARPS) {
    produce(shared.plan, ring, lane);
    return;
  }
  if (warp > WARPS) {
    Finisher finisher{shared, lane};
    finisher.phase<false>(h, partial, limit);
    __syncwarp();
    if (lane == 0) meeting.arrive();
    finisher.phase<true>(h, partial, limit);
    __syncwarp();
    if (lane == 0) {
      meeting.await(1);
      meeting.arrive();
    }
    return;
  }
  Consumer consumer{shared, ring, ring.buffer + stages * kStageBytes,
                    warp,   lane, lane / 4, lane % 4};
  consumer.phase<false>(x, h);
  meeting.wait(1);
  consumer.phase<true>(x, h);
  meeting.wait(2);
  weighted_sum(shared.plan, topk_weights, partial, out, tokens, add);
}
