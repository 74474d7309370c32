// Prefill's matrix products with the warp-wide MMA, where there is no wgmma: D[256 weight rows ×
// tokens of one expert], blocks taking work items in turn.
//
// Eight warps have 32 rows each and decode their weights in registers, once for all tokens of the
// tile (up to 64). A stage holds 128 bytes of k: the columns, gathered, and the packed tiles.
#include "prefill_epilogue.cuh"
#include "prefill_weights.cuh"

constexpr int kThreads = 256;
constexpr int kColumns = TILE_TOKENS;
static_assert(kColumns <= 64, "accumulators for so many fit the registers");
constexpr int kStages = 4;
constexpr int kWeightBytes = 16 * (512 + 64);  // two k blocks of NVFP4, or four of base

struct Shared {
  u8 columns[kStages][kColumns * 128];
  u8 weights[kStages][kWeightBytes];
  u8 staging[2][kStagingBytes];
  u32 row[kColumns];      // where a column's activations are
  int pair[kColumns];     // of a tile's tokens
  float scale[kColumns];  // of their activations, in E4M3
  Item item;
};

template <int P, bool DOWN>
struct Products {
  static constexpr bool kE4m3 = in_e4m3(P);
  static constexpr int kStep = kE4m3 ? 4 : 2;  // k blocks in a stage
  static constexpr int kBlocks = DOWN ? kInterBlocks : kHiddenBlocks;
  static constexpr int kSteps = (kBlocks + kStep - 1) / kStep;
  // Of a stage: [group][block][gate, up] or [group][block].
  static constexpr int kTiles = 8 * kStep;
  static constexpr int kScaleOffset = kTiles * Format<P>::kCodeBytes;
  static constexpr int kGroups = DOWN ? 8 : 4;
  static_assert(kScaleOffset + kTiles * Format<P>::kScaleBytes <= kWeightBytes, "a stage fits");
  using H = HalfTiles<P, DOWN>;
  using O = Row<P>;

  Shared& shared;
  const Arguments& arguments;
  int warp, lane;

  // A stage's tiles, `BYTES` each, from section `section` of the slices.
  template <int BYTES>
  __device__ __forceinline__ void copy_tiles(const Item& item, u32 to, u64 section, int first) {
    constexpr int kChunks = BYTES / 16;
#pragma unroll
    for (int i = threadIdx.x; i < kTiles * kChunks; i += kThreads) {
      const int tile = i / kChunks, m = DOWN ? 0 : tile % 2, local = DOWN ? tile : tile / 2;
      const int group = item.row_tile * kGroups + local / kStep, block = first + local % kStep;
      if (group >= (DOWN ? kHiddenBlocks : kInterBlocks) || block >= kBlocks) continue;
      const int slice = (DOWN ? block : group) / kSliceBlocks;
      const int at = DOWN ? group * kSliceBlocks + block % kSliceBlocks
                          : (group % kSliceBlocks * kHiddenBlocks + block) * 2 + m;
      copy16(to + i * 16, reinterpret_cast<const u8*>(item.tile.address) + slice * O::kSliceBytes +
                              section + u64(at) * BYTES + i % kChunks * 16);
    }
  }

  __device__ __forceinline__ void load(const Item& item, int columns, int step) {
    const int stage = step % kStages;
    const u8* from = (P == BASE ? arguments.base : arguments.fp4) + step * 128;
    const u32 to = shared_address(shared.columns[stage]);
    for (int i = threadIdx.x; i < columns * 8; i += kThreads)
      copy16(to + i / 8 * 128 + ((i ^ i / 8) % 8 << 4), from + shared.row[i / 8] + i % 8 * 16);
    const u32 weights = shared_address(shared.weights[stage]);
    copy_tiles<Format<P>::kCodeBytes>(item, weights, DOWN ? O::kDownCodes : 0, step * kStep);
    copy_tiles<Format<P>::kScaleBytes>(item, weights + kScaleOffset,
                                       DOWN ? O::kDownScales : O::kGateUpScales, step * kStep);
  }

  template <int V>
  __device__ __forceinline__ void multiply(int step, float (*acc)[8 * V]) {
    const int g = lane / 4, t = lane % 4, half = warp % 2;
    const int tile = (DOWN ? warp : warp / 2) * kStep;
    const u32 stage = shared_address(shared.weights[step % kStages]);
    const u32 columns = shared_address(shared.columns[step % kStages]) +
                        (lane / 16 * 8 + lane % 8) * 128;
#pragma unroll
    for (int i = 0; i < kStep; i++) {
      if (kBlocks % kStep != 0 && step * kStep + i >= kBlocks) break;
      const int here = (tile + i) * (DOWN ? 1 : 2);
      H words;
      const u32 scales = stage + kScaleOffset + H::scale_offset(g, t, half);
      words.load(stage + H::code_offset(g, t, half) + here * Format<P>::kCodeBytes,
                 scales + here * Format<P>::kScaleBytes);
      u32 a[2][2][4];
      if constexpr (kE4m3) words.to_e4m3(a);
      else words.to_bf16(a);
#pragma unroll
      for (int s = 0; s < (kE4m3 ? 1 : 2); s++) {
        const u32 chunk = i * (8 / kStep) + s * 2 + lane / 8 % 2;
#pragma unroll
        for (int v = 0; v < V; v++) {  // 16 columns
          u32 b[4];
          load_matrices(columns + v * (16 * 128) + ((chunk ^ lane % 8) << 4), b);
#pragma unroll
          for (int m = 0; m < 2; m++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
              float* d = acc[m] + v * 8 + j * 4;
              if constexpr (kE4m3) mma_e4m3(d, a[m][s], b[2 * j], b[2 * j + 1]);
              else mma(d, a[m][s], b[2 * j], b[2 * j + 1]);
            }
        }
      }
    }
  }

  template <int V>
  __device__ __forceinline__ void run(const Item& item, int columns) {
    float acc[2][8 * V] = {};
#pragma unroll
    for (int step = 0; step < kStages - 1; step++) {
      if (step < kSteps) load(item, columns, step);
      copy_commit();
    }
#pragma unroll 1
    for (int step = 0; step < kSteps; step++) {
      copy_wait<kStages - 2>();
      __syncthreads();
      if (step + kStages - 1 < kSteps) load(item, columns, step + kStages - 1);
      copy_commit();
      multiply<V>(step, acc);
    }
    copy_wait<0>();
    const int side = warp / 4;
    const Epilogue epilogue{shared_address(shared.staging[side]), shared.pair, shared.scale,
                            arguments.out, arguments.activation, warp, lane};
    if constexpr (DOWN) epilogue.template output<P, V>(item, acc);
    else epilogue.template hidden<P, V>(item, acc);
  }

  __device__ __forceinline__ void item(const Item& item) {
    constexpr u32 kRowBytes = (DOWN ? INTER : HIDDEN) * (kE4m3 ? 1 : 2);
    const int columns = item.tile.count, column = threadIdx.x;
    if (column < columns) {
      const int position = item.tile.first + column, pair = arguments.sorted[position];
      const int row = DOWN ? position : pair / TOPK;
      shared.row[column] = row * kRowBytes;
      shared.pair[column] = pair;
      if (kE4m3) shared.scale[column] = arguments.scale[row];
    }
    __syncthreads();
    const auto with = [&](auto sixteens) {
      constexpr int V = decltype(sixteens)::kValue;
      if constexpr (V * 16 <= TILE_TOKENS) run<V>(item, columns);
    };
    switch ((columns + 15) / 16) {
      case 1: return with(Kind<1>());
      case 2: return with(Kind<2>());
      case 3: return with(Kind<3>());
      default: return with(Kind<4>());
    }
  }
};

template <bool DOWN>
__device__ __forceinline__ void experts(const Arguments& arguments) {
  extern __shared__ __align__(128) u8 buffer[];
  Shared& shared = *reinterpret_cast<Shared*>(buffer);
  constexpr int kRowTiles = Stage<BASE, DOWN, 8>::kRowTiles;
  const int total = arguments.state->tiles * kRowTiles;
  while (true) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const int index = atomicAdd(arguments.taken, 1);
      shared.item = {};
      if (index < total) shared.item = {arguments.tiles[index / kRowTiles], index % kRowTiles};
    }
    __syncthreads();
    const Item item = shared.item;
    if (item.tile.count == 0) return;
    each_precision(item.tile.precision, [&](auto precision) {
      constexpr int P = decltype(precision)::kValue;
      Products<P, DOWN>{shared, arguments, int(threadIdx.x / 32), int(threadIdx.x % 32)}.item(item);
    });
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
gate_up(State* state, const Tile* tiles, const int* sorted, const u8* base, const u8* fp4,
        const float* scale, u8* h, float limit BIAS_PARAMETER) {
  experts<false>({state, tiles, &state->taken[0], sorted, base, fp4, scale, h,
                  {limit BIAS_ARGUMENT}});
}

extern "C" __global__ void __launch_bounds__(kThreads)
down(State* state, const Tile* tiles, const int* sorted, const u8* base, const u8* fp4,
     const float* scale, u8* partial, float limit BIAS_PARAMETER) {
  experts<true>({state, tiles, &state->taken[1], sorted, base, fp4, scale, partial,
                 {limit BIAS_ARGUMENT}});
}
