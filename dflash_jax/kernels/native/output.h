// What all products share: the result, and places in weights in strips of 16 columns.

#ifndef DFLASH_NATIVE_OUTPUT_H_
#define DFLASH_NATIVE_OUTPUT_H_

#include <algorithm>
#include <cstdint>

#include "formats.h"

namespace dflash {

constexpr int64_t kAhead = 8192;               // bytes between what is multiplied and what is prefetched
constexpr int64_t kVectors = kStrip / kLanes;  // of a strip

// The place of a vector of columns.
struct Place {
  int64_t strip, lane;
  explicit Place(int64_t vector) : strip(vector / kVectors), lane(vector % kVectors * kLanes) {}
};

// The result, [M, N], whose rows are counted as the live rows of activations are.
struct Output {
  float* data;
  int64_t columns;
  const LiveRows& rows;
  bool fill;  // whether zeros are written for rows that are not live
  bool is_read_next = false;  // while it is in the cache
  int64_t first = 0;          // vectors of columns that come before those that it has
  bool past_caches = false;  // whether it is larger than the caches, so that storing it there only costs

  float* Row(int64_t row) const { return data + rows.at(row) * columns; }
  float* At(int64_t row, int64_t vector) const { return Row(row) + (vector - first) * kLanes; }
  // Whether all lanes of a vector of columns are in the result.
  bool IsWhole(int64_t vector) const { return (vector - first + 1) * kLanes <= columns; }

  // Writes zeros for rows that are not live in some vectors of columns; past the caches where they would take the
  // place of weights.
  void Clear(int64_t begin, int64_t end) const {
    constexpr int64_t kMuch = 1 << 14;  // numbers of a row
    if (!fill || rows.count() == rows.all()) return;
    const int64_t first = begin * kLanes, count = std::min(end * kLanes, columns) - first;
    const bool aligned = reinterpret_cast<uintptr_t>(data) % 64 == 0 && columns % kLanes == 0;
    rows.EachDead([&](int64_t row) {
      float* to = data + row * columns + first;
      if (!aligned || columns < kMuch) {
        std::fill_n(to, count, 0.0f);
        return;
      }
      for (int64_t i = 0; i < count; i += kLanes) StorePastCaches(to + i, Zeros());
    });
    _mm_sfence();
  }

  void Put(int64_t row, int64_t vector, Floats values) const {
    float* to = At(row, vector);
    if (IsWhole(vector)) return Store(to, values);
    float last[kLanes];
    Store(last, values);
    std::copy_n(last, columns - (vector - first) * kLanes, to);
  }
};

inline void Prefetch(const void* at) {
  _mm_prefetch(static_cast<const char*>(at) + kAhead, _MM_HINT_T0);
}

// The quads of a vector of columns of int8 weights.
inline const uint8_t* Quads(const uint8_t* w, int64_t depth, Place place) {
  return w + place.strip * ((depth + 3) / 4) * kQuads + place.lane * 4;
}

// Int8 weights and activations, and the end of their products.
struct Int8Operands {
  const QuantisedRows& x;
  const uint8_t* w;    // [strips, K / 4, 16, 4], codes + 128
  const float* scale;  // [strips, 16]
  int64_t depth;

  // Puts what follows from sums of products of codes, which began with the row's `start`.
  void Finish(int64_t row, int64_t vector, Ints sum, const Output& out) const {
    const Outliers& outliers = x.outliers[row];
    for (int i = 0; i < outliers.count; i++) {
      const int64_t k = outliers.places[i];
      const uint8_t* quad = Quads(w, depth, Place(vector)) + k / 4 * kQuads;
      sum = Add(sum, Multiply(AllInts(outliers.codes[i]), ByteOf(LoadBytes(quad), k % 4)));
    }
    const Floats factor = Multiply(All(x.others.scale[row]), Load(scale + vector * kLanes));
    out.Put(row, vector, Multiply(ToFloats(sum), factor));
  }
};

// Adds products of a group to the sums of a row, given their sums of products of codes and the totals
// of the activations, one for each scale of the weights, and the scale of the activations.
template <typename Format>
inline void AddScaled(const Scales& scales, const Ints* dots, float scale, const float* totals,
                      Floats& sum) {
  Floats scaled = Multiply(ToFloats(dots[0]), scales.first);
  if constexpr (Format::kHalves) scaled = MultiplyAdd(ToFloats(dots[1]), scales.second, scaled);
  sum = MultiplyAdd(scaled, All(scale), sum);
  if constexpr (!Format::kHasLow) return;
  sum = MultiplySubtract(scales.low, All(totals[0]), sum);
  if constexpr (Format::kHalves) sum = MultiplySubtract(scales.second_low, All(totals[1]), sum);
}

}  // namespace dflash

#endif  // DFLASH_NATIVE_OUTPUT_H_
