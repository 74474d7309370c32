// Prefill's matrix products on Hopper: D[256 weight rows × tokens of one expert], a persistent
// block an SM.
//
// Weights enter wgmma from registers, where they are decoded once for all tokens of the tile (up to
// 128); activations are gathered into shared memory. Two warpgroups multiply 128 rows each; of a
// third, one warp takes work items and streams packed tiles, and three warps gather. While the
// tensor cores work on a k block, the next one is decoded and the words after that are loaded.
#include "prefill_epilogue.cuh"
#include "prefill_weights.cuh"
#include "prefill_wgmma.cuh"

constexpr int kMultiplyWarps = 8;
constexpr int kGatherWarps = 3;
constexpr int kThreads = (kMultiplyWarps + 1 + kGatherWarps) * 32;
constexpr int kColumns = TILE_TOKENS;
constexpr int kBStages = 7;
constexpr int kBBytes = kColumns * 128;  // 128 bytes of k a column
constexpr int kWeightStages = 5;
constexpr int kWeightBytes = 8 * 8 * (256 + 32);
constexpr int kItems = 4;
constexpr int kLag = 3;  // gathered stages under way before the first of them is handed on
static_assert(kLag < kBStages, "the multiplying warps must have something to work on");
static_assert(kColumns <= 128, "accumulators for so many fit the registers");

template <int P>
constexpr int kMostBlocks = P == BASE ? 8 : 4;
template <int P, bool DOWN>
using StageOf = Stage<P, DOWN, kMostBlocks<P>>;
static_assert(StageOf<NVFP4, true>::kBytes <= kWeightBytes, "a stage of the largest kind fits");

struct Shared {
  u8 columns[kBStages][kBBytes];
  u8 weights[kWeightStages][kWeightBytes];
  u8 staging[2][kStagingBytes];
  Item items[kItems];
  int pair[2][kColumns];     // of a tile's tokens, by warpgroup
  float scale[2][kColumns];  // of their activations, in E4M3
  u64 columns_full[kBStages], columns_empty[kBStages];
  u64 weights_full[kWeightStages], weights_empty[kWeightStages];
  u64 items_full[kItems], items_empty[kItems];
};

// Position in a ring of N barrier pairs.
template <int N>
struct Place {
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == N) stage = 0, parity ^= 1;
  }
};

// ---- the loading warp ----

template <int P, bool DOWN>
__device__ __forceinline__ void load_stage(Shared& shared, Place<kWeightStages>& ring,
                                           const Item& item, int stage, int lane, u64 policy) {
  using S = StageOf<P, DOWN>;
  using F = Format<P>;
  const u8* row = reinterpret_cast<const u8*>(item.tile.address);
  const int group = item.row_tile * S::kGroups;
  const int groups = min(S::kGroups, S::kAllGroups - group);
  const int first = stage * S::kBlocks;
  const int blocks = min(S::kBlocks, S::kAllBlocks - first);
  const u32 full = shared_address(&shared.weights_full[ring.stage]);
  const u32 to = shared_address(shared.weights[ring.stage]);
  const u32 tile_count = groups * blocks * (DOWN ? 1 : 2);
  barrier_wait(shared_address(&shared.weights_empty[ring.stage]), ring.parity ^ 1);
  if (lane == 0) barrier_expect(full, tile_count * (F::kCodeBytes + F::kScaleBytes));
  __syncwarp();
  // A piece is a run of tiles that are contiguous both in the row and in the stage.
  const auto copy = [&](int piece, const u8* slice, u64 codes, u64 scales, int from, int tile,
                        int tiles) {
    if (piece % 2 == 0)
      bulk_copy(to + tile * F::kCodeBytes, slice + codes + u64(from) * F::kCodeBytes,
                tiles * F::kCodeBytes, full, policy);
    else
      bulk_copy(to + S::kScaleOffset + tile * F::kScaleBytes,
                slice + scales + u64(from) * F::kScaleBytes, tiles * F::kScaleBytes, full, policy);
  };
  using O = Row<P>;
  if (!DOWN) {
    if (lane < 2 * groups) {
      const int g = group + lane / 2;
      copy(lane, row + g / kSliceBlocks * O::kSliceBytes, 0, O::kGateUpScales,
           (g % kSliceBlocks * kHiddenBlocks + first) * 2, S::tile(lane / 2, 0, 0), blocks * 2);
    }
  } else {
    constexpr bool kWhole = S::kRun == kSliceBlocks;  // a run of all groups is contiguous
    const int pieces = blocks / S::kRun * (kWhole ? 1 : groups) * 2;
    for (int piece = lane; piece < pieces; piece += 32) {
      const int run = kWhole ? piece / 2 : piece / 2 / groups;
      const int g = kWhole ? 0 : piece / 2 - run * groups;
      const int block = first + run * S::kRun;
      copy(piece, row + block / kSliceBlocks * O::kSliceBytes, O::kDownCodes, O::kDownScales,
           (group + g) * kSliceBlocks + block % kSliceBlocks, S::tile(g, run * S::kRun, 0),
           S::kRun * (kWhole ? groups : 1));
    }
  }
  ring.advance();
}

template <bool DOWN>
__device__ __forceinline__ void load_weights(Shared& shared, const Arguments& arguments, int lane) {
  constexpr int kRowTiles = StageOf<BASE, DOWN>::kRowTiles;
  const u64 policy = streaming_policy();
  const int total = arguments.state->tiles * kRowTiles;
  Place<kWeightStages> ring;
  Place<kItems> place;
  int index = blockIdx.x;
  Item item = {};
  if (index < total) item = {arguments.tiles[index / kRowTiles], index % kRowTiles};
  while (true) {
    barrier_wait(shared_address(&shared.items_empty[place.stage]), place.parity ^ 1);
    if (lane == 0) {
      shared.items[place.stage] = item;
      barrier_arrive(shared_address(&shared.items_full[place.stage]));
    }
    place.advance();
    if (index >= total) return;
    // The next item is asked for now and needed when this one's copies are all under way.
    int next = 0;
    if (lane == 0) next = atomicAdd(arguments.taken, 1);
    Item after = {};
    const auto stages = [&](auto precision) {
      constexpr int P = decltype(precision)::kValue;
      load_stage<P, DOWN>(shared, ring, item, 0, lane, policy);
      next = __shfl_sync(0xFFFFFFFFu, next, 0) + gridDim.x;
      if (next < total) after = {arguments.tiles[next / kRowTiles], next % kRowTiles};
#pragma unroll 1
      for (int stage = 1; stage < StageOf<P, DOWN>::kStages; stage++)
        load_stage<P, DOWN>(shared, ring, item, stage, lane, policy);
    };
    each_precision(item.tile.precision, stages);
    index = next;
    item = after;
  }
}

// ---- the gathering warps ----

template <bool DOWN>
__device__ __forceinline__ void gather(Shared& shared, const Arguments& arguments, int warp,
                                       int lane) {
  constexpr int kRows = (kColumns + 4 * kGatherWarps - 1) / (4 * kGatherWarps);
  constexpr int K = DOWN ? INTER : HIDDEN;
  Place<kBStages> ring, handed;
  Place<kItems> place;
  const u32 chunk = lane % 8;
  const int first_row = warp * 4 + lane / 8;
  const auto hand_on = [&] {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads by the other way
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.columns_full[handed.stage]));
    handed.advance();
  };
  while (true) {
    barrier_wait(shared_address(&shared.items_full[place.stage]), place.parity);
    const Tile& tile = shared.items[place.stage].tile;
    const int first = tile.first, precision = tile.precision;
    const int columns = tile.count;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.items_empty[place.stage]));
    place.advance();
    if (columns == 0) return;
    const bool e4m3 = in_e4m3(precision);
    const u8* from = (precision == BASE ? arguments.base : arguments.fp4) + chunk * 16;
    const u32 row_bytes = e4m3 ? K : K * 2;
    u32 offset[kRows];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const int column = first_row + i * 4 * kGatherWarps;
      const int position = first + column;
      const int row = column >= columns ? 0 : DOWN ? position : arguments.sorted[position] / TOPK;
      offset[i] = row * row_bytes;
    }
    const int stages = (row_bytes + 127) / 128;
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++) {
      barrier_wait(shared_address(&shared.columns_empty[ring.stage]), ring.parity ^ 1);
      const u32 to = shared_address(shared.columns[ring.stage]);
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        const int column = first_row + i * 4 * kGatherWarps;
        const u32 place = column * 128 + ((chunk ^ column % 8) << 4);
        if (column < columns) copy16(to + place, from + offset[i]);
      }
      from += 128;
      copy_commit();
      ring.advance();
      if (stage >= kLag) {
        copy_wait<kLag>();
        hand_on();
      }
    }
    copy_wait<0>();
    for (int left = min(stages, kLag); left > 0; left--) hand_on();
  }
}

// ---- the multiplying warps ----

struct Multiplier {
  Shared& shared;
  const Arguments& arguments;
  int warp, lane;
  Place<kBStages> columns;
  Place<kWeightStages> weights;

  __device__ __forceinline__ void release(u64* barriers, u32 stage) {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&barriers[stage]));
  }

  // acc = the products of an item's rows and columns. The loop's body is so many k blocks that
  // places within stages are constants, or four where a stage's tiles are evenly apart.
  template <int P, bool DOWN, int V>
  __device__ __forceinline__ void multiply(float (*acc)[8 * V]) {
    using S = StageOf<P, DOWN>;
    using H = HalfTiles<P, DOWN>;
    constexpr bool kE4m3 = in_e4m3(P);
    constexpr int kStep = kE4m3 ? 4 : 2;  // k blocks in 128 bytes of a column
    constexpr int kBlocks = S::kAllBlocks;
    constexpr int kPart = S::kEven && S::kBlocks % 4 == 0 ? 4 : S::kBlocks;
    constexpr int kBody = least_common_multiple(kPart, kStep);
    // Kept: worked out anew for each item, or the variants' offsets would take registers all along.
    const int w = kept(warp), g = kept(lane) / 4, t = kept(lane) % 4;
    const int group = DOWN ? w : w / 2, half = w % 2;
    const int first_tile = S::tile(group, 0, 0);
    const u32 code_offset = first_tile * Format<P>::kCodeBytes + H::code_offset(g, t, half);
    const u32 scale_offset = first_tile * Format<P>::kScaleBytes +
                             H::scale_offset(g, t, half) + S::kScaleOffset;
    u32 a[2][2][2][4];  // by block parity, half tile and k16 step
    H words;
    u32 codes_at, scales_at;
    int part = 0;  // of the stage
    const auto load = [&](int block) {  // of the body, as below
      const int tile = S::tile(0, block % kPart, 0);
      if (block % kPart == 0) {
        if (part == 0) {
          barrier_wait(shared_address(&shared.weights_full[weights.stage]), weights.parity);
          const u32 stage = shared_address(shared.weights[weights.stage]);
          codes_at = stage + code_offset, scales_at = stage + scale_offset;
        } else {
          codes_at += S::tile(0, kPart, 0) * Format<P>::kCodeBytes;
          scales_at += S::tile(0, kPart, 0) * Format<P>::kScaleBytes;
        }
      }
      words.load(codes_at + tile * Format<P>::kCodeBytes,
                 scales_at + tile * Format<P>::kScaleBytes);
    };
    const auto decode = [&](int block, bool last) {
      words.pin();
      if (kE4m3) words.to_e4m3(a[block % 2]);
      else words.to_bf16(a[block % 2]);
      if (last || (block % kPart == kPart - 1 && ++part == S::kBlocks / kPart)) {
        release(shared.weights_empty, weights.stage);
        weights.advance();
        part = 0;
      }
    };
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < 8 * V; i++) acc[m][i] = 0.0f;
    load(0);
    decode(0, kBlocks == 1);
    if (kBlocks > 1) load(1);
    u32 before = 0;  // the columns' stage before this one
    u32 b;
#pragma unroll 1
    for (int first = 0; first < kBlocks; first += kBody) {
#pragma unroll
      for (int i = 0; i < kBody; i++) {
        // Asked even where it is known: without these branches the compiler moves so much work
        // about that it runs out of registers, and serializes wgmma (warning C7512).
        const auto exists = [&](int block) { return first + block < kBlocks; };
        if (exists(i)) {
          if (i % kStep == 0) {
            barrier_wait(shared_address(&shared.columns_full[columns.stage]), columns.parity);
            b = shared_address(shared.columns[columns.stage]) >> 4;
          }
          wgmma_fence();
#pragma unroll
          for (int s = 0; s < (kE4m3 ? 1 : 2); s++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
              const u64 at = b_descriptor(b + i % kStep * (8 / kStep) + s * 2);
              if (kE4m3) Wgmma<V>::e4m3(acc[m], a[i % 2][m][s], at);
              else Wgmma<V>::bf16(acc[m], a[i % 2][m][s], at);
            }
          wgmma_commit();
          wgmma_wait<1>();
          if (i % kStep == 0) {
            if (i > 0 || first > 0) release(shared.columns_empty, before);
            before = columns.stage;
            columns.advance();
          }
          if (exists(i + 1)) {
            decode(i + 1, !exists(i + 2));
            if (exists(i + 2)) load(i + 2);
          }
        }
      }
    }
    wgmma_wait<0>();
    release(shared.columns_empty, before);
  }

  template <int P, bool DOWN, int V>
  __device__ __forceinline__ void item(const Item& item) {
    const int side = warp / 4, thread = threadIdx.x % 128;
    int pair = 0;
    float scale = 0.0f;
    if (thread < item.tile.count) {
      pair = arguments.sorted[item.tile.first + thread];
      if (in_e4m3(P))
        scale = arguments.scale[DOWN ? item.tile.first + thread : pair / TOPK];
    }
    float acc[2][8 * V];
    multiply<P, DOWN, V>(acc);
    if (DOWN) shared.pair[side][thread] = pair;
    if (in_e4m3(P)) shared.scale[side][thread] = scale;
    if (DOWN || in_e4m3(P)) named_barrier(1 + side, 128);
    const Epilogue epilogue{shared_address(shared.staging[side]), shared.pair[side],
                            shared.scale[side], arguments.out, arguments.activation, int(kept(warp)),
                            int(kept(lane))};
    if constexpr (DOWN) epilogue.output<P, V>(item, acc);
    else epilogue.hidden<P, V>(item, acc);
    if (DOWN) named_barrier(1 + side, 128);
  }

  template <bool DOWN>
  __device__ __forceinline__ void run() {
    Place<kItems> place;
    while (true) {
      barrier_wait(shared_address(&shared.items_full[place.stage]), place.parity);
      const Item item = shared.items[place.stage];
      release(shared.items_empty, place.stage);
      place.advance();
      if (item.tile.count == 0) return;
      each_precision(item.tile.precision, [&](auto precision) {
        constexpr int P = decltype(precision)::kValue;
        const auto with = [&](auto sixteens) {
          constexpr int V = decltype(sixteens)::kValue;
          if constexpr (V * 16 <= TILE_TOKENS) this->item<P, DOWN, V>(item);
        };
        switch ((item.tile.count + 15) / 16) {
          case 1: return with(Kind<1>());
          case 2: return with(Kind<2>());
          case 3: return with(Kind<3>());
          case 4: return with(Kind<4>());
          case 5: return with(Kind<5>());
          case 6: return with(Kind<6>());
          case 7: return with(Kind<7>());
          default: return with(Kind<8>());
        }
      });
    }
  }
};

template <bool DOWN>
__device__ __forceinline__ void experts(const Arguments& arguments) {
  extern __shared__ u8 buffer[];
  const u32 unaligned = shared_address(buffer);
  Shared& shared = *reinterpret_cast<Shared*>(buffer + (1024 - unaligned % 1024) % 1024);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    const auto initialize = [&](u64* full, u64* empty, int n, int filling, int emptying) {
      if (lane < n) {
        barrier_init(shared_address(full + lane), filling);
        barrier_init(shared_address(empty + lane), emptying);
      }
    };
    initialize(shared.columns_full, shared.columns_empty, kBStages, kGatherWarps, kMultiplyWarps);
    initialize(shared.weights_full, shared.weights_empty, kWeightStages, 1, kMultiplyWarps);
    initialize(shared.items_full, shared.items_empty, kItems, 1, kMultiplyWarps + kGatherWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp >= kMultiplyWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp == kMultiplyWarps) load_weights<DOWN>(shared, arguments, lane);
    else gather<DOWN>(shared, arguments, warp - kMultiplyWarps - 1, lane);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    Multiplier{shared, arguments, warp, lane}.run<DOWN>();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
gate_up(State* state, const Tile* tiles, const int* sorted, const u8* base, const u8* fp4,
        const float* scale, u8* h, float limit BIAS_PARAMETER) {
  experts<false>({state, tiles, &state->taken[0], sorted, base, fp4, scale, h,
                  {limit BIAS_ARGUMENT}});
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
down(State* state, const Tile* tiles, const int* sorted, const u8* base, const u8* fp4,
     const float* scale, u8* partial, float limit BIAS_PARAMETER) {
  experts<true>({state, tiles, &state->taken[1], sorted, base, fp4, scale, partial,
                 {limit BIAS_ARGUMENT}});
}
