// Products of many rows with packed weights by tiles of AMX. Sums of products of codes are exact, so
// that results have the bits of those without tiles.

#ifndef DFLASH_NATIVE_TILED_PRODUCTS_H_
#define DFLASH_NATIVE_TILED_PRODUCTS_H_

#include "amx.h"
#include "output.h"

namespace dflash {

// Rows from which tiles are faster.
constexpr int64_t kInt8TileRows = 2, kGroupTileRows = 12, kHalvesTileRows = 12;
constexpr CodeLayout kInt8Tiles{kTiled, 6};  // tiles of 64 codes of a row
constexpr CodeLayout kGroupTiles{kTiled, 5};  // tiles of a group of a row
constexpr int64_t kNear = 1 << 20;    // bytes of activations or results that stay in the cache

inline bool Tiled(int64_t rows, int64_t least) {
  return rows >= least && use_tiles.load(std::memory_order_relaxed);
}

struct Int8Tiles : Int8Operands {
  // Multiplies all rows by strips.
  void Multiply(int64_t rows, int64_t begin, int64_t end, Output out) const {
    Tiles tiles;
    out.past_caches = !out.is_read_next && rows * out.columns * 4 > kNear && Aligned(out);
    const int64_t close = std::max<int64_t>(kNear / depth / (2 * kTileRows), 1) * 2 * kTileRows;
    for (int64_t first = 0; first < rows; first += close) {
      const int64_t last = std::min(first + close, rows);
      for (int64_t strip = begin; strip < end; strip += 2) {
        const bool two = strip + 1 < end;
        for (int64_t row = first; row < last; row += 2 * kTileRows) {
          const int64_t count = std::min(2 * kTileRows, last - row);
          tiles.Shape(count, Shapes);
          if (count > kTileRows)
            two ? Block<2, 2>(row, count, strip, out) : Block<2, 1>(row, count, strip, out);
          else
            two ? Block<1, 2>(row, count, strip, out) : Block<1, 1>(row, count, strip, out);
        }
      }
    }
    if (out.past_caches) _mm_sfence();
  }

 private:
  static bool Aligned(const Output& out) {
    return out.columns % kStrip == 0 && reinterpret_cast<uintptr_t>(out.data) % kTileBytes == 0;
  }

  // Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 strips.
  static TileShapes Shapes(int64_t rows) {
    TileShapes shapes;
    for (int i = 0; i < 2; i++) {
      const int64_t count = std::clamp<int64_t>(rows - i * kTileRows, 1, kTileRows);
      for (const int tile : {2 * i, 2 * i + 1, 4 + i}) shapes.Set(tile, count, kTileBytes);
      shapes.Set(6 + i, kTileRows, kTileBytes);
    }
    return shapes;
  }

  // Multiplies `count` rows, in A tiles, by S strips.
  template <int A, int S>
  void Block(int64_t row, int64_t count, int64_t strip, const Output& out) const {
    const int64_t size = depth * kStrip;  // bytes of a strip, and of the codes of 16 rows
    const uint8_t* from = w + strip * size;
    const int8_t* codes = x.others.codes.get() + row / kTileRows * size;
    ClearTile<0>(), ClearTile<1>(), ClearTile<2>(), ClearTile<3>();
    for (int64_t at = 0; at < size; at += kTileRows * kTileBytes) {
      LoadTile<6>(from + at);
      LoadTile<4>(codes + at);
      MultiplyTiles<0, 4, 6>();
      if constexpr (S == 2) LoadTile<7>(from + size + at), MultiplyTiles<1, 4, 7>();
      if constexpr (A == 2) LoadTile<5>(codes + size + at), MultiplyTiles<2, 5, 6>();
      if constexpr (A == 2 && S == 2) MultiplyTiles<3, 5, 7>();
      if (S == 2 && row == 0) FetchTile(from + 2 * size + at), FetchTile(from + 3 * size + at);
    }
    Finish<0>(row, std::min(count, kTileRows), strip, out);
    if constexpr (S == 2) Finish<1>(row, std::min(count, kTileRows), strip + 1, out);
    if constexpr (A == 2) Finish<2>(row + kTileRows, count - kTileRows, strip, out);
    if constexpr (A == 2 && S == 2) Finish<3>(row + kTileRows, count - kTileRows, strip + 1, out);
  }

  // Reads weights of the next strips into the cache, while the first rows are multiplied.
  static void FetchTile(const uint8_t* at) {
    for (int64_t row = 0; row < kTileRows; row++)
      _mm_prefetch(reinterpret_cast<const char*>(at + row * kTileBytes), _MM_HINT_T1);
  }

  template <int tile>
  void Finish(int64_t row, int64_t count, int64_t strip, const Output& out) const {
    alignas(64) uint8_t sums[kTileRows][kTileBytes];
    StoreTile<tile>(sums);
    const auto sum_of = [&](int64_t r) {
      return Add(LoadBytes(sums[r]), AllInts(x.others.start[row + r]));
    };
    if (!out.IsWhole(strip) || x.AnyOutliers(row, row + count)) {
      for (int64_t r = 0; r < count; r++) Int8Operands::Finish(row + r, strip, sum_of(r), out);
      return;
    }
    const Floats scales = Load(scale + strip * kStrip);
    for (int64_t r = 0; r < count; r++) {
      float* to = out.At(row + r, strip);
      const Floats factor = dflash::Multiply(All(x.others.scale[row + r]), scales);
      const Floats result = dflash::Multiply(ToFloats(sum_of(r)), factor);
      out.past_caches ? StorePastCaches(to, result) : Store(to, result);
    }
  }
};

// Codes are unpacked, less their zero point, while the first 16 rows are multiplied, some groups at a
// time, which are then multiplied with the other rows. Tiles have 4, 8, 12 or 16 rows.
template <typename Format>
struct GroupTiles {
  const Quantised& x;
  const Arrays& w;

  // Multiplies all rows by strips.
  void Multiply(int64_t rows, int64_t begin, int64_t end, const Output& out) const {
    Tiles tiles;
    Work work;
    for (int64_t first = 0; first < rows; first += kPanel)
      for (int64_t strip = begin; strip < end; strip++)
        for (int64_t group = 0; group < x.groups; group += kUnpacked) {
          const int64_t last = std::min(first + kPanel, rows);
          for (int64_t row = first; row < last; row += kTileRows) {
            const int64_t count = std::min(kTileRows, last - row), four = (count + 3) / 4;
            tiles.Shape(4 * four, Shapes);
            const int64_t groups = std::min(kUnpacked, x.groups - group);
            const Piece piece{strip, group, groups, row, count, row == first};
            float* sums = work.sums[(row - first) / kTileRows][0];
            if (four == 1) Block<4>(piece, work, sums, out);
            if (four == 2) Block<8>(piece, work, sums, out);
            if (four == 3) Block<12>(piece, work, sums, out);
            if (four == 4) Block<16>(piece, work, sums, out);
          }
        }
  }

 private:
  static constexpr int64_t kPanel = 256;    // rows
  static constexpr int64_t kUnpacked = 32;  // groups
  static constexpr int kScales = Format::kHalves ? 2 : 1;
  static constexpr int64_t kStep = 2 / kScales;  // groups whose sums fill two tiles
  static constexpr int64_t kBefore = 3 * kStep;  // groups from unpacking to multiplying
  static constexpr int64_t kAfter = 2 * kStep;   // groups from multiplying to scaling
  static constexpr uint64_t kSteps = 4;          // whose sums of products are kept, of a power of two

  struct alignas(64) Work {
    uint8_t codes[kUnpacked][8 * kQuads];
    float sums[kPanel / kTileRows][kTileRows][kStrip];
    uint8_t dots[kSteps][2][kTileRows][kTileBytes];
  };

  // Some groups of a strip, and rows.
  struct Piece {
    int64_t strip, group, groups, row, rows;
    bool first;  // whether to unpack the groups
  };

  // Tiles 0 and 1 are sums, 4 and 5 rows, 6 and 7 weights.
  static TileShapes Shapes(int64_t rows) {
    TileShapes shapes;
    for (int i = 0; i < 2; i++) {
      shapes.Set(i, rows, kTileBytes);
      shapes.Set(4 + i, rows, kGroup / kScales);
      shapes.Set(6 + i, kGroup / 4 / kScales, kTileBytes);
    }
    return shapes;
  }

  // Unpacks the groups of a step.
  static void Unpack(const Piece& piece, const uint8_t* packed, int64_t step, uint8_t* to) {
    const Ints zero = AllBytes(static_cast<int8_t>(Format::kZeroPoint));
    for (int64_t group = step; group < std::min(step + kStep, piece.groups); group++) {
      const uint8_t* codes = packed + group * Format::kGroupBytes;
      uint8_t* quads = to + group * 8 * kQuads;
      for (int64_t i = 0; i < Format::kGroupBytes; i += 64) Prefetch(codes + i);
      for (int i = 0; i < 4; i++) {
        Pair pair = Format::Codes(codes, i);
        if (Format::kZeroPoint)
          pair = {SubtractBytes(pair.first, zero), SubtractBytes(pair.second, zero)};
        StoreInts(quads + i * kQuads, pair.first);
        StoreInts(quads + (i + 4) * kQuads, pair.second);
      }
    }
  }

  // Multiplies the codes of the groups of a step; `full` if it has kStep groups.
  static void MultiplyStep(const uint8_t* codes, const int8_t* rows, bool full,
                           uint8_t (*dots)[kTileRows][kTileBytes]) {
    ClearTile<0>();
    LoadTile<6>(codes);
    LoadTile<4, kGroup>(rows);
    MultiplyTiles<0, 4, 6, true>();
    StoreTile<0>(dots[0]);
    if (!full) return;
    ClearTile<1>();
    LoadTile<7>(codes + kQuads * 8 / kScales);
    LoadTile<5, kGroup>(rows + kGroup * (kScales == 1 ? kTileRows : 1) / kScales);
    MultiplyTiles<1, 5, 7, true>();
    StoreTile<1>(dots[1]);
  }

  // Multiplies R rows by the groups of a piece.
  template <int R>
  void Block(const Piece& piece, Work& work, float* kept, const Output& out) const {
    // Copies stay in registers; others are read anew after each store of a tile, which may change
    // anything as far as compilers know.
    const Arrays arrays = w;
    const Piece at = piece;
    const int64_t all = x.groups, place = at.row * all + at.group * kTileRows;
    const int8_t* const rows = x.codes.get() + place * kGroup;
    const float *const scale = x.scale.get() + place, *const total = x.total.get() + place * kScales;
    const auto* packed = w.At<uint8_t>(kCodes, at.strip, all * Format::kGroupBytes,
                                       at.group * Format::kGroupBytes);
    uint8_t* const codes = work.codes[0];
    Floats sums[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sums[r] = Zeros();
    if (at.group) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sums[r] = Load(kept + r * kStrip);
    }
    if (at.first)
      for (int64_t step = 0; step < kBefore; step += kStep) Unpack(at, packed, step, codes);
    // Tiles take a while: a step is multiplied while one before is scaled.
    for (int64_t step = 0; step < at.groups + kAfter; step += kStep) {
      if (step < at.groups) {
        MultiplyStep(codes + step * 8 * kQuads, rows + step * kTileRows * kGroup,
                     step + kStep <= at.groups, work.dots[step / kStep % kSteps]);
        if (at.first) Unpack(at, packed, step + kBefore, codes);
      }
      if (step < kAfter) continue;
      const int64_t scaled = step - kAfter;
      const auto* dots = work.dots[scaled / kStep % kSteps];
      for (int64_t group = scaled; group < std::min(scaled + kStep, at.groups); group++, dots++) {
        const Scales scales = Format::Read(arrays, {at.strip, at.group + group, 0});
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          Ints both[kScales];
          for (int half = 0; half < kScales; half++) both[half] = LoadBytes(dots[half][r]);
          const int64_t of_row = group * kTileRows + r;
          AddScaled<Format>(scales, both, scale[of_row], total + of_row * kScales, sums[r]);
        }
      }
    }
    const bool more = at.group + at.groups < all;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      if (more) Store(kept + r * kStrip, sums[r]);
      else if (r < at.rows) out.Put(at.row + r, at.strip, sums[r]);
    }
  }
};

}  // namespace dflash

#endif  // DFLASH_NATIVE_TILED_PRODUCTS_H_
