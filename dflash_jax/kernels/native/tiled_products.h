// Products of many rows with packed weights by tiles of AMX. Sums of products of codes are exact, so
// that results have the bits of those without tiles.

#ifndef DFLASH_NATIVE_TILED_PRODUCTS_H_
#define DFLASH_NATIVE_TILED_PRODUCTS_H_

#include "amx.h"
#include "output.h"

namespace dflash {

constexpr int64_t kInt8TileRows = 2;  // rows from which tiles are faster
constexpr CodeLayout kInt8Tiles{kTiled, 6};  // tiles of 64 codes of a row
constexpr int64_t kNear = 1 << 20;    // bytes of activations that stay in the cache

inline bool Tiled(int64_t rows, int64_t least) {
  return rows >= least && use_tiles.load(std::memory_order_relaxed);
}

struct Int8Tiles : Int8Operands {
  // Multiplies all rows by strips.
  void Multiply(int64_t rows, int64_t begin, int64_t end, const Output& out) const {
    Tiles tiles;
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
  }

 private:
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
      LoadTile<6>(from + at, kTileBytes);
      LoadTile<4>(codes + at, kTileBytes);
      MultiplyTiles<0, 4, 6>();
      if constexpr (S == 2) LoadTile<7>(from + size + at, kTileBytes), MultiplyTiles<1, 4, 7>();
      if constexpr (A == 2) LoadTile<5>(codes + size + at, kTileBytes), MultiplyTiles<2, 5, 6>();
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
    StoreTile<tile>(sums, kTileBytes);
    for (int64_t r = 0; r < count; r++) {
      const Ints sum = Add(LoadBytes(sums[r]), AllInts(x.others.start[row + r]));
      Int8Operands::Finish(row + r, strip, sum, out);
    }
  }
};

}  // namespace dflash

#endif  // DFLASH_NATIVE_TILED_PRODUCTS_H_
