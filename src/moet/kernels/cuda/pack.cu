// Level 0 of packing: what moet/quantize/search.py, moet/formats/fp4_search.py, the statistics and
// the row layout say of an expert's matrix, to the same bits.
//
// Products and sums go through intrinsics, which the compiler does not contract, in the order of
// the definitions.
#include "device.cuh"

typedef long long i64;

constexpr int kBlock = 32;
constexpr int kWindow = 24;
constexpr int kScaleMin = 0x08, kScaleMax = 0x6E;
constexpr int kByteShift = 20, kByteBias = 960;
constexpr int kMagnitude = 0x7FFFFFFF, kExponent = 0x7F800000;
constexpr u32 kFixedOne = (254u + 25u) << 23;
constexpr int kLeastExponent = 25 << 23;
constexpr int kMaxBlocks = 1024;  // of a row

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int most(int a, int b) { return a > b ? a : b; }

__device__ __forceinline__ void load_block(const float* from, float* w) {
#pragma unroll
  for (int i = 0; i < kBlock; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
  }
}

// What is left to do for a block once the whole row's drift is known.
struct Drift {
  double change;  // of Σ (q − w), zeros left out
  double scale;
  u32 zeros;      // a bit a weight
};

// One block of 32 weights: its scale byte, its codes and its part of the row's drift.
__device__ __forceinline__ Drift search_block(const float* w, float inverse, double factor,
                                              const double* scale_values, u8* codes, u8* scale) {
  int top = 0;
#pragma unroll
  for (int i = 0; i < kBlock; i++) top = most(top, __float_as_int(w[i]) & kMagnitude);
  const u32 exponent = most(top & kExponent, kLeastExponent);
  const float to_fixed = __int_as_float(int(kFixedOne - exponent));
  int fixed[kBlock], bucket[kBlock];
  int total = 0, with_signs = 0;
  u32 zeros = 0;
  const int last =
      (__float_as_int(__fmul_rn(__int_as_float(top), inverse)) >> kByteShift) - kByteBias;
  const int first = most(least(last, kScaleMax) - (kWindow - 1), kScaleMin);
  const int below = first + kByteBias - 1;
#pragma unroll
  for (int i = 0; i < kBlock; i++) {
    fixed[i] = static_cast<int>(__fmul_rn(fabsf(w[i]), to_fixed));
    total += fixed[i];
    const int mask = __float_as_int(w[i]) >> 31;
    with_signs += (fixed[i] ^ mask) - mask;
    zeros |= u32((__float_as_int(w[i]) & kMagnitude) == 0) << i;
    const int ratio = __float_as_int(__fmul_rn(fabsf(w[i]), inverse));
    bucket[i] = least(most((ratio >> kByteShift) - below, 0), kWindow);
  }
  const double unit = __dmul_rn(double(to_fixed), factor);
  i64 best = 0;
#pragma unroll 1
  for (int c = 0; c < kWindow; c++) {
    int count = 0, big = 0;
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
      const bool is_big = bucket[i] > c;
      count += is_big;
      big += is_big ? fixed[i] : 0;
    }
    const double s = __dmul_rn(scale_values[first + c], unit);
    const double gain = __dmul_rn(2.0, __dadd_rn(double(total), __dmul_rn(3.0, double(big))));
    const double cost = __dmul_rn(s, __dadd_rn(32.0, __dmul_rn(15.0, double(count))));
    const i64 worth = __double_as_longlong(__dmul_rn(s, __dsub_rn(gain, cost)));
    const i64 marked = (worth & ~i64(31)) | c;
    best = marked > best ? marked : best;
  }
  const double away = __ddiv_rn(double(with_signs), double(to_fixed));
  u32 packed[kBlock / 4] = {};
  Drift drift = {-away, 0.0, 0};
  int byte = 0;
  if (best != 0) {
    byte = first + int(best & 31);
    const int threshold = (byte + kByteBias) << kByteShift;
    int levels = 0;
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
      const int is_big = __float_as_int(__fmul_rn(fabsf(w[i]), inverse)) >= threshold;
      const int mask = __float_as_int(w[i]) >> 31;
      const int level = (zeros >> i & 1) ? 0 : 1 + 3 * is_big;
      levels += (level ^ mask) - mask;
      packed[i / 4] |= u32((mask & 2) | is_big) << (i % 4 * 8);
    }
    drift.scale = __dmul_rn(scale_values[byte], factor);
    drift.change = __dsub_rn(__dmul_rn(double(levels), drift.scale), away);
    drift.zeros = zeros;
  }
  *scale = byte;
#pragma unroll
  for (int i = 0; i < kBlock / 16; i++)
    reinterpret_cast<uint4*>(codes)[i] =
        make_uint4(packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]);
  return drift;
}

// The zeros of a row take the sign that leads its drift back. By one thread.
__device__ __forceinline__ void sign_zeros(const Drift* drifts, int blocks, u8* codes) {
  double drift = 0.0;
  for (int b = 0; b < blocks; b++) {
    drift = __dadd_rn(drift, drifts[b].change);
    const double scale = drifts[b].scale;
    for (u32 zeros = drifts[b].zeros; zeros; zeros &= zeros - 1) {
      const bool lean = drift > 0.0;
      codes[b * kBlock + __ffs(zeros) - 1] = lean ? 2 : 0;
      drift = __dadd_rn(drift, lean ? -scale : scale);
    }
  }
}

// The 2-bit codes and scales of W [rows, 32 · blocks]; a row a block of threads.
extern "C" __global__ void __launch_bounds__(256)
search(const float* weight, const double* scale_values, u8* codes, u8* scales, int blocks,
       float factor, float inverse) {
  __shared__ Drift drifts[kMaxBlocks];
  const u64 row = blockIdx.x;
  bool zeros = false;
  for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
    const u64 at = row * blocks + b;
    float w[kBlock];
    load_block(weight + at * kBlock, w);
    drifts[b] =
        search_block(w, inverse, factor, scale_values, codes + at * kBlock, scales + at);
    zeros |= drifts[b].zeros != 0;
  }
  if (__syncthreads_or(zeros) && threadIdx.x == 0)
    sign_zeros(drifts, blocks, codes + row * blocks * kBlock);
}

constexpr int kRowsAtOnce = 8;  // a warp each

// The sums of `MatrixStatistics` over each row of W, in the order of the definition: lane i adds
// every block's weight i, and the lanes are added as a tree. sums: [rows][4], squares, magnitudes,
// squared errors, errors. counts, zero before: codes +1, +4, −1, −4, zeros, negative zeros. used,
// zero before: [256], which scales there are.
extern "C" __global__ void __launch_bounds__(kRowsAtOnce * 32)
statistics(const float* weight, const u8* codes, const u8* scales, const double* scale_values,
           double* sums, u64* counts, u8* used, int rows, int blocks, float factor) {
  __shared__ double lanes[kRowsAtOnce][4][kBlock];
  __shared__ double values[256];
  __shared__ u8 seen[256];
  __shared__ u32 all[6];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < 256; i += blockDim.x) {
    values[i] = __dmul_rn(scale_values[i], double(factor));
    seen[i] = 0;
  }
  if (threadIdx.x < 6) all[threadIdx.x] = 0;
  __syncthreads();
  const u64 row = u64(blockIdx.x) * (blockDim.x / 32) + warp;
  if (row < rows) {
    double squares = 0.0, magnitudes = 0.0, squared_errors = 0.0, errors = 0.0;
    u32 count[6] = {};
#pragma unroll 4
    for (int b = 0; b < blocks; b++) {
      const u64 at = row * blocks + b;
      const double w = weight[at * kBlock + lane];
      const int code = codes[at * kBlock + lane], scale = scales[at];
      const int level = (1 + 3 * (code & 1)) * (1 - (code & 2));
      const double error = __dsub_rn(__dmul_rn(double(level), values[scale]), w);
      squares = __dadd_rn(squares, __dmul_rn(w, w));
      magnitudes = __dadd_rn(magnitudes, fabs(w));
      squared_errors = __dadd_rn(squared_errors, __dmul_rn(error, error));
      errors = __dadd_rn(errors, error);
#pragma unroll
      for (int c = 0; c < 4; c++) count[c] += code == c;
      count[4] += w == 0.0;
      count[5] += w == 0.0 && code >> 1;
      if (lane == 0) seen[scale] = 1;
    }
    lanes[warp][0][lane] = squares;
    lanes[warp][1][lane] = magnitudes;
    lanes[warp][2][lane] = squared_errors;
    lanes[warp][3][lane] = errors;
    for (int c = 0; c < 6; c++) atomicAdd(&all[c], count[c]);
  }
  __syncthreads();
  if (row < rows && lane < 4) {
    double* const terms = lanes[warp][lane];
    for (int half = kBlock / 2; half; half /= 2)
      for (int i = 0; i < half; i++) terms[i] = __dadd_rn(terms[i], terms[i + half]);
    sums[row * 4 + lane] = terms[0];
  }
  for (int i = threadIdx.x; i < 256; i += blockDim.x)
    if (seen[i]) used[i] = 1;
  if (threadIdx.x < 6) atomicAdd(&counts[threadIdx.x], u64(all[threadIdx.x]));
}

// Of a value ≥ 0, the nearest number of E2M1, ties to the even code.
__device__ __forceinline__ double round_e2m1(double value) {
  const double steps = value < 2.0 ? 0x1p51 : value < 4.0 ? 0x1p52 : 0x1p53;
  const double rounded = __dsub_rn(__dadd_rn(value, steps), steps);
  return rounded < 6.0 ? rounded : 6.0;
}

__device__ __forceinline__ double power_of_two(int e8m0) {  // 2^(byte − 127)
  return __longlong_as_double(i64(e8m0 - 127 + 1023) << 52);
}

// MXFP4 of W by the rule `least_error`, codes one a byte; a thread a block of 32.
extern "C" __global__ void __launch_bounds__(256)
encode_mxfp4(const float* weight, u8* codes, u8* scales, int blocks) {
  const u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= blocks) return;
  float w[kBlock];
  load_block(weight + at * kBlock, w);
  int top = 0;
#pragma unroll
  for (int i = 0; i < kBlock; i++) top = most(top, __float_as_int(w[i]) & kMagnitude);
  const int exponent = most(top >> 23, 0);  // floor(log2) + 127; subnormal numbers count as 0
  const int first = most(most(exponent - 2, 0) - 1, 0);
  int best = least(first, 254);
  double fewest = __longlong_as_double(0x7FF0000000000000);
#pragma unroll 1
  for (int step = 0; step < 3; step++) {
    const int byte = least(first + step, 254);
    const double scale = power_of_two(byte), inverse = power_of_two(254 - byte);
    double term[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
      const double magnitude = fabsf(w[i]);
      const double near = round_e2m1(__dmul_rn(magnitude, inverse));
      const double error = __dsub_rn(__dmul_rn(near, scale), magnitude);
      term[i] = __dmul_rn(error, error);
    }
#pragma unroll
    for (int half = kBlock / 2; half; half /= 2)
#pragma unroll
      for (int i = 0; i < half; i++) term[i] = __dadd_rn(term[i], term[i + half]);
    if (term[0] < fewest) fewest = term[0], best = byte;
  }
  scales[at] = best;
  const double inverse = power_of_two(254 - best);
  u32 packed[kBlock / 4] = {};
#pragma unroll
  for (int i = 0; i < kBlock; i++) {
    const double near = round_e2m1(__dmul_rn(double(fabsf(w[i])), inverse));
    const u32 code = near < 2.0 ? 2.0 * near : near < 4.0 ? near + 2.0 : near / 2.0 + 4.0;
    packed[i / 4] |= (code | (__float_as_uint(w[i]) >> 31) << 3) << (i % 4 * 8);
  }
#pragma unroll
  for (int i = 0; i < kBlock / 16; i++)
    reinterpret_cast<uint4*>(codes + at * kBlock)[i] =
        make_uint4(packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]);
}

// A matrix's tiles of 32 × 32 into a row (moet/formats/layout.py), a tile a block of 128 threads.
// columns: tiles across. run: tiles of a slice, of those across (down) or of those downwards.
// matrices, which: 2 and 0 or 1 for gate and up. codes_at, scales_at: of their sections in a slice.
// words: of a tile, 64 of 2 bits or 128 of 4. halves: scales for 32 k.
extern "C" __global__ void __launch_bounds__(128)
tiles(const u8* codes, const u8* scales, u8* row, int columns, int run, int down, int matrices,
      int which, int slice_bytes, int codes_at, int scales_at, int words, int halves) {
  const int group = blockIdx.x / columns, block = blockIdx.x % columns, i = threadIdx.x;
  const int slice = (down ? block : group) / run;
  const u64 tile = (down ? u64(group) * run + block % run : u64(group % run) * columns + block) *
                       matrices + which;
  u8* const start = row + u64(slice) * slice_bytes;
  const u64 width = u64(columns) * 32;
  if (i < words) {
    u32 word = 0;
    if (words == 64) {
      const int t = i / 16, g = i / 2 % 8, h = i % 2;
      for (int c = 0; c < 2; c++) {
        const uint2 eight = *reinterpret_cast<const uint2*>(
            codes + (group * 32 + h * 16 + c * 8 + g) * width + block * 32 + t * 8);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const u32 code = (j < 4 ? eight.x : eight.y) >> (j % 4 * 8) & 0xFF;
          const int p = 15 + 16 * (j & 1) - 2 * (2 * (j >> 1) + c);
          word |= (code >> 1) << p | (code & 1) << ((p - 3) & 31);
        }
      }
    } else {
      const int t = i / 32, g = i / 4 % 8, h = i / 2 % 2, c = i % 2;
      const uint2 eight = *reinterpret_cast<const uint2*>(
          codes + (group * 32 + h * 16 + c * 8 + g) * width + block * 32 + t * 8);
#pragma unroll
      for (int j = 0; j < 8; j++)
        word |= ((j < 4 ? eight.x : eight.y) >> (j % 4 * 8) & 0xFF) << (4 * j);
    }
    reinterpret_cast<u32*>(start + codes_at)[tile * words + i] = word;
  }
  if (i < 32 * halves) {
    const int q = i / 32, g = i / 4 % 8, h = i / 2 % 2, c = i % 2;
    start[scales_at + tile * (32 * halves) + i] =
        scales[u64(group * 32 + h * 16 + c * 8 + g) * (columns * halves) + block * halves + q];
  }
}
