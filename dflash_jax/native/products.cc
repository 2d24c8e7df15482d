// Products x · w of float32 activations [M, K] with weights [N, K] in several formats, for CPUs with
// AVX2, as XLA FFI handlers.
//
// Each element of the result is computed by the same operations in the same order whatever M is, so
// that a token has the same bits alone and in a block. Float weights: a partial sum along K for each
// lane of a vector, then their sum. Integer weights: activations are quantised to int8 with one scale
// for each row (int8) or for each 32 of K (ggml's blocks), and within those, products are summed
// exactly.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "common.h"

namespace dflash {
namespace {

constexpr float kSmallest = 1e-36f;  // activations below it are quantised to zero
constexpr int64_t kGroup = 32;       // weights that share a scale in ggml's blocks
constexpr int64_t kTile = 32;        // columns that a thread takes at a time
constexpr int64_t kRows = 64;        // rows whose activations stay in the cache meanwhile
constexpr int64_t kSerial = 1 << 18; // products with fewer multiplications run on one thread

inline float Half(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return _cvtsh_ss(bits);
}

// -- formats ------------------------------------------------------------------------------------

// ggml's blocks of 32 weights: scale · code + low.
struct Block {
  __m256i codes;
  float scale, low;
};

inline __m256i Nibbles(const uint8_t* at) {
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  const __m256i wide = _mm256_set_m128i(_mm_srli_epi16(both, 4), both);
  return _mm256_and_si256(wide, _mm256_set1_epi8(15));
}

struct Q8_0 {
  static constexpr int64_t kBytes = 34;
  static constexpr bool kLow = false;
  static Block Load(const uint8_t* at) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 2)), Half(at), 0.0f};
  }
};

struct Q4_0 {
  static constexpr int64_t kBytes = 18;
  static constexpr bool kLow = false;
  static Block Load(const uint8_t* at) {
    return {_mm256_sub_epi8(Nibbles(at + 2), _mm256_set1_epi8(8)), Half(at), 0.0f};
  }
};

struct Q4_1 {
  static constexpr int64_t kBytes = 20;
  static constexpr bool kLow = true;
  static Block Load(const uint8_t* at) {
    return {Nibbles(at + 4), Half(at), Half(at + 2)};
  }
};

// -- activations --------------------------------------------------------------------------------

// Activations in int8, each group of a row with a scale: max|x| / 127, as in ggml.
struct Quantised {
  int64_t groups, width;        // groups of a row, and codes stored for each of them
  std::vector<int8_t> codes;    // [M, groups * width]
  std::vector<float> scale;     // [M, groups]
  std::vector<int32_t> sum;     // [M, groups]: of the codes

  Quantised(const float* x, int64_t rows, int64_t depth, int64_t group, int64_t width)
      : groups(depth / group), width(width),
        codes(rows * groups * width), scale(rows * groups), sum(rows * groups) {
    const Arithmetic arithmetic;
    for (int64_t i = 0; i < rows * groups; i++) {
      const float* from = x + i * group;
      int8_t* to = codes.data() + i * width;
      float most = 0.0f;
      bool finite = true;
      for (int64_t k = 0; k < group; k++) {
        most = std::max(most, std::fabs(from[k]));
        finite &= std::fabs(from[k]) <= std::numeric_limits<float>::max();
      }
      // Of smaller numbers the inverse would be infinite; they are as good as zero.
      const float inverse = most > kSmallest ? 127.0f / most : 0.0f;
      const float unit = finite ? most * (1.0f / 127.0f) : std::numeric_limits<float>::quiet_NaN();
      int32_t total = 0;
      for (int64_t k = 0; finite && k < group; k++) {
        const auto code = static_cast<int8_t>(std::nearbyint(from[k] * inverse));
        to[k] = code;
        total += code;
      }
      scale[i] = unit;
      sum[i] = total;
    }
  }
};

// -- tiles --------------------------------------------------------------------------------------
// Each computes the products of R rows with C columns.

template <typename Format>
struct FloatTile {
  const float* x;
  const typename Format::Stored* w;
  int64_t depth;

  template <int R, int C>
  void Multiply(int64_t row, int64_t column, float* out, int64_t columns) const {
    Floats sums[R][C];
    for (auto& line : sums)
      for (auto& sum : line) sum = Zeros();
    const float* rows = x + row * depth;
    const typename Format::Stored* from = w + column * depth;
    const int64_t whole = depth / kLanes * kLanes;
    for (int64_t k = 0; k < whole; k += kLanes) Step<R, C>(rows + k, from + k, depth, depth, sums);
    if (whole < depth) {
      float rest[R][kLanes] = {};
      typename Format::Stored last[C][kLanes] = {};
      for (int r = 0; r < R; r++) std::copy_n(rows + r * depth + whole, depth - whole, rest[r]);
      for (int c = 0; c < C; c++) std::copy_n(from + c * depth + whole, depth - whole, last[c]);
      Step<R, C>(rest[0], last[0], kLanes, kLanes, sums);
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) out[(row + r) * columns + column + c] = Sum(sums[r][c]);
  }

  template <int R, int C>
  static inline void Step(const float* rows, const typename Format::Stored* from, int64_t stride,
                          int64_t pitch, Floats (&sums)[R][C]) {
    Floats weights[C];
    for (int c = 0; c < C; c++) weights[c] = Format::Read(from + c * pitch);
    for (int r = 0; r < R; r++) {
      const Floats activations = Load(rows + r * stride);
      for (int c = 0; c < C; c++) sums[r][c] = MultiplyAdd(activations, weights[c], sums[r][c]);
    }
  }
};

struct Int8Tile {
  const Quantised& x;
  const int8_t* w;
  const float* scale;
  int64_t depth;

  template <int R, int C>
  void Multiply(int64_t row, int64_t column, float* out, int64_t columns) const {
    Ints sums[R][C];
    for (auto& line : sums)
      for (auto& sum : line) sum = IntZeros();
    const int8_t* rows = x.codes.data() + row * x.width;
    const int8_t* from = w + column * depth;
    const int64_t whole = depth / kCodes * kCodes;
    for (int64_t k = 0; k < whole; k += kCodes) Step<R, C>(rows + k, x.width, from + k, depth, sums);
    if (whole < depth) {
      int8_t last[C][kCodes] = {};
      for (int c = 0; c < C; c++) std::copy_n(from + c * depth + whole, depth - whole, last[c]);
      Step<R, C>(rows + whole, x.width, last[0], kCodes, sums);
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) {
        const int32_t sum = Sum(sums[r][c]) - kShift * x.sum[row + r];
        const float factor = x.scale[row + r] * scale[column + c];
        out[(row + r) * columns + column + c] = static_cast<float>(sum) * factor;
      }
  }

  template <int R, int C>
  static inline void Step(const int8_t* rows, int64_t stride, const int8_t* from, int64_t pitch,
                          Ints (&sums)[R][C]) {
    Ints weights[C];
    for (int c = 0; c < C; c++) weights[c] = Prepared(LoadInts(from + c * pitch));
    for (int r = 0; r < R; r++) {
      const Ints activations = LoadInts(rows + r * stride);
      for (int c = 0; c < C; c++) sums[r][c] = Dot(sums[r][c], weights[c], activations);
    }
  }
};

template <typename Format>
struct BlockTile {
  const Quantised& x;
  const uint8_t* w;

  template <int R, int C>
  void Multiply(int64_t row, int64_t column, float* out, int64_t columns) const {
    __m256 sums[R][C];
    float lows[R][C] = {};
    for (auto& line : sums)
      for (auto& sum : line) sum = _mm256_setzero_ps();
    const int64_t groups = x.groups, pitch = groups * Format::kBytes;
    for (int64_t g = 0; g < groups; g++) {
      Block blocks[C];
      for (int c = 0; c < C; c++)
        blocks[c] = Format::Load(w + (column + c) * pitch + g * Format::kBytes);
      for (int r = 0; r < R; r++) {
        const int64_t at = (row + r) * groups + g;
        const auto* codes = reinterpret_cast<const __m256i*>(x.codes.data() + at * kGroup);
        const __m256i activations = _mm256_loadu_si256(codes);
        for (int c = 0; c < C; c++) {
          const __m256i sum = Dot8(_mm256_setzero_si256(), blocks[c].codes, activations);
          const __m256 factor = _mm256_set1_ps(x.scale[at] * blocks[c].scale);
          sums[r][c] = _mm256_fmadd_ps(factor, _mm256_cvtepi32_ps(sum), sums[r][c]);
          if (Format::kLow)
            lows[r][c] += x.scale[at] * static_cast<float>(x.sum[at]) * blocks[c].low;
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++)
        out[(row + r) * columns + column + c] = SumOf8(sums[r][c]) + lows[r][c];
  }
};

// -- the whole product --------------------------------------------------------------------------

template <typename Tile, int R>
void MultiplyRows(const Tile& tile, int64_t row, int64_t begin, int64_t end, float* out, int64_t n) {
  constexpr int kWide = R == 1 ? 4 : 2;
  int64_t column = begin;
  for (; column + kWide <= end; column += kWide)
    tile.template Multiply<R, kWide>(row, column, out, n);
  for (; column < end; column++) tile.template Multiply<R, 1>(row, column, out, n);
}

template <typename Tile>
void MultiplyColumns(const Tile& tile, int64_t rows, int64_t begin, int64_t end, float* out,
                     int64_t n) {
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t last = std::min(first + kRows, rows);
    for (int64_t at = begin; at < end; at += 4) {
      const int64_t until = std::min(at + 4, end);
      int64_t row = first;
      for (; kLanes == 16 && row + 8 <= last; row += 8)
        MultiplyRows<Tile, 8>(tile, row, at, until, out, n);
      for (; row + 4 <= last; row += 4) MultiplyRows<Tile, 4>(tile, row, at, until, out, n);
      switch (last - row) {
        case 3: MultiplyRows<Tile, 3>(tile, row, at, until, out, n); break;
        case 2: MultiplyRows<Tile, 2>(tile, row, at, until, out, n); break;
        case 1: MultiplyRows<Tile, 1>(tile, row, at, until, out, n); break;
      }
    }
  }
}

template <typename Tile>
void Run(ffi::ThreadPool pool, const Tile& tile, int64_t rows, int64_t depth, int64_t columns,
         float* out) {
  Split(pool, columns, kTile, rows * depth * columns < kSerial, [&](int64_t begin, int64_t end) {
    MultiplyColumns(tile, rows, begin, end, out, columns);
  });
}

template <typename Weights>
ffi::Error Shapes(int64_t depth, const Weights& w, int64_t bytes_of_32) {
  const auto dims = w.dimensions();
  const bool whole = bytes_of_32 == 0 || depth % kGroup == 0;
  const int64_t expected = bytes_of_32 ? depth / kGroup * bytes_of_32 : depth;
  if (dims.size() == 2 && whole && dims[1] == expected) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("a weight's shape does not fit its format and activations");
}

ffi::Error FloatProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                        ffi::ResultBuffer<ffi::F32> out) {
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1];
  if (auto error = Shapes(depth, w, 0); error.failure()) return error;
  const int64_t columns = w.dimensions()[0];
  float* to = out->typed_data();
  const auto* halves = static_cast<const uint16_t*>(w.untyped_data());
  switch (w.element_type()) {
    case ffi::F32: {
      FloatTile<Float32> tile{x.typed_data(), static_cast<const float*>(w.untyped_data()), depth};
      Run(pool, tile, rows, depth, columns, to);
      return ffi::Error::Success();
    }
    case ffi::BF16:
      Run(pool, FloatTile<BFloat16>{x.typed_data(), halves, depth}, rows, depth, columns, to);
      return ffi::Error::Success();
    case ffi::F16:
      Run(pool, FloatTile<Float16>{x.typed_data(), halves, depth}, rows, depth, columns, to);
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("weights must be float32, bfloat16 or float16");
  }
}

ffi::Error Int8Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> w,
                       ffi::Buffer<ffi::F32> scale, ffi::ResultBuffer<ffi::F32> out) {
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1];
  if (auto error = Shapes(depth, w, 0); error.failure()) return error;
  const int64_t width = (depth + kCodes - 1) / kCodes * kCodes;
  const Quantised quantised(x.typed_data(), rows, depth, depth, width);
  const Int8Tile tile{quantised, w.typed_data(), scale.typed_data(), depth};
  Run(pool, tile, rows, depth, w.dimensions()[0], out->typed_data());
  return ffi::Error::Success();
}

template <typename Format>
ffi::Error BlockProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> w,
                        ffi::ResultBuffer<ffi::F32> out) {
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1];
  if (auto error = Shapes(depth, w, Format::kBytes); error.failure()) return error;
  const Quantised quantised(x.typed_data(), rows, depth, kGroup, kGroup);
  const BlockTile<Format> tile{quantised, w.typed_data()};
  Run(pool, tile, rows, depth, w.dimensions()[0], out->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dflash

using namespace dflash;

#define PRODUCT(name, function, ...)                                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                                            \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>() \
                                    __VA_ARGS__.Ret<ffi::Buffer<ffi::F32>>())

PRODUCT(dflash_float, FloatProduct, .Arg<ffi::AnyBuffer>());
PRODUCT(dflash_int8, Int8Product, .Arg<ffi::Buffer<ffi::S8>>().Arg<ffi::Buffer<ffi::F32>>());
PRODUCT(dflash_q8_0, BlockProduct<Q8_0>, .Arg<ffi::Buffer<ffi::U8>>());
PRODUCT(dflash_q4_0, BlockProduct<Q4_0>, .Arg<ffi::Buffer<ffi::U8>>());
PRODUCT(dflash_q4_1, BlockProduct<Q4_1>, .Arg<ffi::Buffer<ffi::U8>>());
