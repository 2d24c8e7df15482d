// Packed weights in strips of 16 columns, and activations quantised for them.
//
// Weights share a scale in groups of 32 along K. Numbers of the columns of a strip lie side by side,
// so that one vector holds a number of every column, or four codes of every column: a quad. The codes
// of a group are eight quads. Of 4-bit codes, a byte holds one of quad i and, in its high half, one
// of quad i + 4. High bits of wider codes are apart. A byte holds the fifth bit of quad i as bit i; of
// 6-bit codes it holds two bits of quads i, i + 4, i + 1 and i + 5, from its lowest bits on, for i = 0
// and 2.

#ifndef DFLASH_NATIVE_FORMATS_H_
#define DFLASH_NATIVE_FORMATS_H_

#include <limits>
#include <memory>
#include <vector>

#include "integers.h"
#include "live_rows.h"

namespace dflash {

constexpr int64_t kStrip = 16;       // columns of a strip
constexpr int64_t kQuads = 4 * kStrip;  // bytes of a quad of each column
constexpr int64_t kGroup = 32;       // weights that share a scale
constexpr int64_t kSuper = 8;        // groups of a super-block, which share the scale of their scales
constexpr float kSmallest = 1e-36f;  // activations below it are quantised to zero

// -- weights ------------------------------------------------------------------------------------

// The arrays of a weight, in the order in which handlers take those that a format has.
enum Part { kCodes, kScale, kLow, kZero, kSub, kSubLow, kParts };

struct Arrays {
  const void* data[kParts];
  int64_t groups;  // of a column

  template <typename T = uint16_t>
  const T* At(Part part, int64_t strip, int64_t size, int64_t offset) const {
    return static_cast<const T*>(data[part]) + strip * size + offset;
  }
};

struct Pair {
  Ints first, second;  // quads i and i + 4 of a group
};

inline Pair Nibbles(const uint8_t* at) {
  const Ints both = LoadBytes(at), mask = AllBytes(15);
  return {And(both, mask), And(Right<4>(both), mask)};
}

// The scales of a vector of columns: a weight is scale * (code - kZeroPoint) - low. With kHalves, the
// first and the last 16 weights of a group have a scale and a low each.
struct Scales {
  Floats first, second = Zeros(), low = Zeros(), second_low = Zeros();
};

// A place among the arrays [groups, 16] of a strip.
struct Spot {
  int64_t strip, group, lane;
};

struct Grouped {
  static constexpr bool kBytewise = false;    // whether codes have eight bits when they are read
  static constexpr bool kHalves = false, kHasLow = false;
  static constexpr int64_t kScaled = 1;       // groups that share a `scale` and a `low`
  static constexpr int64_t kScaleBytes = 2;   // of one of these
  static constexpr int64_t kGroupBytes = 4 * kQuads;  // of the codes of 16 columns
  static constexpr int kMostCode = 15;

  static Pair Codes(const uint8_t* at, int i) { return Nibbles(at + i * kQuads); }
  static Scales Read(const Arrays& w, Spot at) { return {Half(w, kScale, at)}; }

  static Floats Half(const Arrays& w, Part part, Spot at, int64_t scaled = 1) {
    const int64_t offset = at.group / scaled * kStrip + at.lane;
    return Float16::Read(w.At(part, at.strip, w.groups / scaled * kStrip, offset));
  }
  // The numbers of the first half of a group; those of the second follow.
  template <typename T>
  static const T* OfHalves(const Arrays& w, Part part, Spot at) {
    return w.At<T>(part, at.strip, 2 * w.groups * kStrip, 2 * at.group * kStrip + at.lane);
  }
  static Floats Byte(const Arrays& w, Part part, Spot at) {
    const int64_t offset = at.group * kStrip + at.lane;
    return UInt8::Read(w.At<uint8_t>(part, at.strip, w.groups * kStrip, offset));
  }
};

struct Q8_0 : Grouped {
  static constexpr Part kArrays[] = {kCodes, kScale};
  static constexpr bool kBytewise = true;
  static constexpr int32_t kZeroPoint = 128;
  static constexpr int64_t kGroupBytes = 8 * kQuads;

  static Pair Codes(const uint8_t* at, int i) {
    return {LoadBytes(at + i * kQuads), LoadBytes(at + (i + 4) * kQuads)};
  }
};

struct Q4_0 : Grouped {
  static constexpr Part kArrays[] = {kCodes, kScale};
  static constexpr int32_t kZeroPoint = 8;
};

struct Q4_1 : Grouped {
  static constexpr Part kArrays[] = {kCodes, kScale, kLow};
  static constexpr int32_t kZeroPoint = 0;
  static constexpr bool kHasLow = true;

  static Scales Read(const Arrays& w, Spot at) {
    return {.first = Half(w, kScale, at), .low = Half(w, kLow, at)};
  }
};

struct Int4Z : Grouped {
  static constexpr Part kArrays[] = {kCodes, kScale, kZero};
  static constexpr int32_t kZeroPoint = 0;
  static constexpr bool kHasLow = true;

  static Scales Read(const Arrays& w, Spot at) {
    const Floats scale = Half(w, kScale, at);
    return {.first = scale, .low = Multiply(scale, Byte(w, kZero, at))};
  }
};

struct Q4_K : Grouped {
  static constexpr Part kArrays[] = {kCodes, kScale, kLow, kSub, kSubLow};
  static constexpr int32_t kZeroPoint = 0;
  static constexpr bool kHasLow = true;
  static constexpr int64_t kScaled = kSuper;

  static Scales Read(const Arrays& w, Spot at) {
    return {.first = Multiply(Half(w, kScale, at, kSuper), Byte(w, kSub, at)),
            .low = Multiply(Half(w, kLow, at, kSuper), Byte(w, kSubLow, at))};
  }
};

// Names of 16 numbers of eight bits, whose zero point is added here.
template <typename Scaled>
struct OfIQ4 : Scaled {
  static constexpr bool kBytewise = true;
  static constexpr int32_t kZeroPoint = 128;
  static constexpr int8_t kNumbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};

  static Pair Codes(const uint8_t* at, int i) {
    const __m128i signs = _mm_set1_epi8(-128);
    const __m128i numbers = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kNumbers)), signs);
    const Pair codes = Nibbles(at + i * kQuads);
    return {LookUp(numbers, codes.first), LookUp(numbers, codes.second)};
  }
};

using IQ4_NL = OfIQ4<Q4_0>;

struct NestedScales : Grouped {
  static constexpr Part kArrays[] = {kCodes, kScale, kSub};
  static constexpr int64_t kScaled = kSuper;

  static Scales Read(const Arrays& w, Spot at) {
    const int64_t offset = at.group * kStrip + at.lane;
    const int8_t* sub = w.At<int8_t>(kSub, at.strip, w.groups * kStrip, offset);
    return {Multiply(Half(w, kScale, at, kSuper), Int8::Read(sub))};
  }
};

using IQ4_XS = OfIQ4<NestedScales>;

// Floats of four bits. Twice these are whole numbers from -12 on.
struct MXFP4 : Grouped {
  static constexpr Part kArrays[] = {kCodes, kScale};
  static constexpr int32_t kZeroPoint = 12;
  static constexpr int kMostCode = 24;

  static Pair Codes(const uint8_t* at, int i) {
    const __m128i numbers = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    const Pair codes = Nibbles(at + i * kQuads);
    return {LookUp(numbers, codes.first), LookUp(numbers, codes.second)};
  }
  static Scales Read(const Arrays& w, Spot at) {
    return {BFloat16::Read(w.At(kScale, at.strip, w.groups * kStrip, at.group * kStrip + at.lane))};
  }
};

inline Pair FiveBits(const uint8_t* at, int i) {
  const Ints high = LoadBytes(at + 4 * kQuads), mask = AllBytes(0x10);
  const Pair low = Nibbles(at + i * kQuads);
  const Ints first = i == 0 ? Left<4>(high) : i == 1 ? Left<3>(high) : i == 2 ? Left<2>(high) : Left<1>(high);
  const Ints second = i == 0 ? high : i == 1 ? Right<1>(high) : i == 2 ? Right<2>(high) : Right<3>(high);
  return {Or(low.first, And(first, mask)), Or(low.second, And(second, mask))};
}

inline Pair SixBits(const uint8_t* at, int i) {
  const Ints high = LoadBytes(at + (4 + i / 2) * kQuads), mask = AllBytes(0x30);
  const Pair low = Nibbles(at + i * kQuads);
  const Ints first = i % 2 ? high : Left<4>(high), second = i % 2 ? Right<2>(high) : Left<2>(high);
  return {Or(low.first, And(first, mask)), Or(low.second, And(second, mask))};
}

// The format of the same scales with codes of five bits.
template <typename Format>
struct OfFiveBits : Format {
  static constexpr int64_t kGroupBytes = 5 * kQuads;
  static constexpr int kMostCode = 31;

  static Pair Codes(const uint8_t* at, int i) { return FiveBits(at, i); }
};

struct Q5_0 : OfFiveBits<Q4_0> {
  static constexpr int32_t kZeroPoint = 16;
};
using Q5_1 = OfFiveBits<Q4_1>;
using Q5_K = OfFiveBits<Q4_K>;

struct Q2_K : Grouped {
  static constexpr Part kArrays[] = {kCodes, kScale, kLow, kSub, kSubLow};
  static constexpr int32_t kZeroPoint = 0;
  static constexpr bool kHalves = true, kHasLow = true;
  static constexpr int64_t kScaled = kSuper;

  static Scales Read(const Arrays& w, Spot at) {
    const Floats scale = Half(w, kScale, at, kSuper), low = Half(w, kLow, at, kSuper);
    const uint8_t *sub = OfHalves<uint8_t>(w, kSub, at), *sub_low = OfHalves<uint8_t>(w, kSubLow, at);
    return {Multiply(scale, UInt8::Read(sub)), Multiply(scale, UInt8::Read(sub + kStrip)),
            Multiply(low, UInt8::Read(sub_low)), Multiply(low, UInt8::Read(sub_low + kStrip))};
  }
};

struct Q3_K : Grouped {
  static constexpr Part kArrays[] = {kCodes, kScale, kSub};
  static constexpr int32_t kZeroPoint = 4;
  static constexpr bool kHalves = true;
  static constexpr int64_t kScaled = kSuper;

  static Scales Read(const Arrays& w, Spot at) {
    const Floats scale = Half(w, kScale, at, kSuper);
    const int8_t* sub = OfHalves<int8_t>(w, kSub, at);
    return {Multiply(scale, Int8::Read(sub)), Multiply(scale, Int8::Read(sub + kStrip))};
  }
};

struct Q6_K : Q3_K {
  static constexpr int32_t kZeroPoint = 32;
  static constexpr int64_t kGroupBytes = 6 * kQuads;
  static constexpr int kMostCode = 63;

  static Pair Codes(const uint8_t* at, int i) { return SixBits(at, i); }
};

// Bytes with scales in float32 for each 16 weights.
struct Int8_16 : Q8_0 {
  static constexpr bool kHalves = true;
  static constexpr int64_t kScaleBytes = 4;

  static Scales Read(const Arrays& w, Spot at) {
    const float* scale = OfHalves<float>(w, kScale, at);
    return {Load(scale), Load(scale + kStrip)};
  }
};

struct Int8_16_Low : Int8_16 {
  static constexpr Part kArrays[] = {kCodes, kScale, kLow};
  static constexpr bool kHasLow = true;

  static Scales Read(const Arrays& w, Spot at) {
    const float *scale = OfHalves<float>(w, kScale, at), *low = OfHalves<float>(w, kLow, at);
    return {Load(scale), Load(scale + kStrip), Load(low), Load(low + kStrip)};
  }
};

// The numbers of one of a format's arrays, for a strip.
template <typename Format>
constexpr int64_t PerStrip(Part part, int64_t groups) {
  const int64_t nearest = groups * kStrip * (Format::kHalves ? 2 : 1);
  switch (part) {
    case kCodes: return groups * Format::kGroupBytes;
    case kScale: case kLow: return Format::kScaled > 1 ? groups / Format::kScaled * kStrip : nearest;
    case kSub: case kSubLow: return nearest;
    default: return groups * kStrip;
  }
}

// -- activations --------------------------------------------------------------------------------

// Where codes lie: row after row, or in tiles of 16 rows, each of 2^`tile` codes of each row.
struct CodeLayout {
  int rows = 0, tile = 5;  // binary logarithms; with one row in a tile, these follow each other

  // Rows with those that fill the last tile.
  int64_t Padded(int64_t count) const { return (((count - 1) >> rows) + 1) << rows; }
  int64_t At(int64_t row, int64_t k, int64_t width) const {
    const int64_t first = row >> rows, run = k >> tile;
    return (first * width << rows) + (run << tile << rows) + ((row - (first << rows)) << tile) +
           (k - (run << tile));
  }
};
constexpr int kTiled = 4;  // `rows` of a layout in tiles

// Calls use(k, numbers) for each vector of a row, the last of which may end in zeros.
template <typename Use>
void Each(const float* x, int64_t count, const Use& use) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) use(k, Load(x + k));
  if (k == count) return;
  float rest[kLanes] = {};
  std::copy_n(x + k, count - k, rest);
  use(k, Load(rest));
}

inline int32_t Bits(float number) {
  int32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

inline float Number(int32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// Activations in int8, each group of a row with a scale: max|x| / 127, as in ggml.
struct Quantised {
  const int64_t depth, group;        // K, and the activations that share a scale
  const int64_t groups, width;       // groups of a row, and codes stored for it
  const int64_t parts;               // equal parts of a group, each with a start
  const int32_t zero;                // zero point of the weights
  const CodeLayout layout;
  const std::unique_ptr<int8_t[]> codes;   // [M, width]
  const std::unique_ptr<float[]> scale;    // at Group(row, group)
  const std::unique_ptr<float[]> total;    // [.., parts]: the sums of the quantised activations
  const std::unique_ptr<int32_t[]> start;  // [.., parts]: - zero * the sums of the codes

  Quantised(int64_t rows, int64_t depth, int64_t group, int64_t parts, int32_t zero,
            CodeLayout layout = {})
      : depth(depth), group(group), groups(group ? depth / group : 1),
        width((depth + kStrip - 1) / kStrip * kStrip), parts(parts), zero(zero), layout(layout),
        codes(new int8_t[layout.Padded(rows) * width]),
        scale(new float[layout.Padded(rows) * groups]()),
        total(new float[layout.Padded(rows) * groups * parts]()),
        start(new int32_t[layout.Padded(rows) * groups * parts]) {}

  // Where the scale of a group of a row lies: those of the rows of a tile are side by side.
  int64_t Group(int64_t row, int64_t group) const {
    const int64_t first = row >> layout.rows;
    return ((first * groups + group) << layout.rows) + row - (first << layout.rows);
  }

  // Quantises rows of activations in groups of kGroup.
  void Fill(const LiveRows& x, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      for (int64_t g = 0; g < groups; g++) FillGroup(x[row] + g * kGroup, row, g);
  }

  // Quantises a row that is one group, whose largest magnitude is known.
  void FillRow(const float* x, int64_t row, float largest) {
    const bool finite = Finite(largest);
    const Floats inverse = Inverse(largest);
    Ints sums = AllInts(0);
    const auto codes_of = [&](int64_t k) {
      return finite ? Rounded(Multiply(Load(x + k), inverse)) : AllInts(0);
    };
    constexpr int64_t kFour = 4 * kLanes;
    int64_t k = 0;
    for (; k + kFour <= depth; k += kFour) {
      const Ints bytes = Bytes(codes_of(k), codes_of(k + kLanes), codes_of(k + 2 * kLanes),
                               codes_of(k + 3 * kLanes));
      sums = Dot(sums, AllBytes(1), bytes);
      StoreInts(codes.get() + layout.At(row, k, width), bytes);
    }
    int32_t sum = Sum(sums);
    if (k < depth) {
      Ints last = AllInts(0);
      Each(x + k, depth - k, [&](int64_t i, Floats v) {
        const Ints rounded = finite ? Rounded(Multiply(v, inverse)) : AllInts(0);
        last = Add(last, rounded);
        StoreBytes(codes.get() + layout.At(row, k + i, width), rounded);
      });
      sum += Sum(last);
    }
    scale[row] = finite ? largest * (1.0f / 127.0f) : std::numeric_limits<float>::quiet_NaN();
    start[row] = -zero * sum;
  }

 private:
  static bool Finite(float largest) {  // false of NaN, too
    return largest <= std::numeric_limits<float>::max();
  }
  // Of smaller numbers the inverse would be infinite; they are as good as zero.
  static Floats Inverse(float largest) {
    return All(Finite(largest) && largest > kSmallest ? 127.0f / largest : 0.0f);
  }

  // Quantises a group, whose activations stay in registers.
  void FillGroup(const float* x, int64_t row, int64_t g) {
    constexpr int kCount = kGroup / kLanes;
    const int64_t at = Group(row, g);
    Floats values[kCount];
    Ints most = AllInts(0);
    for (int i = 0; i < kCount; i++) {
      values[i] = Load(x + i * kLanes);
      most = Max(most, Magnitude(values[i]));
    }
    const float largest = Number(Max(most));
    const bool finite = Finite(largest);
    const Floats inverse = Inverse(largest);
    Ints sums[2] = {AllInts(0), AllInts(0)};
    int8_t* const to = codes.get() + layout.At(row, g * kGroup, width);
    for (int i = 0; i < kCount; i++) {
      const Ints rounded = finite ? Rounded(Multiply(values[i], inverse)) : AllInts(0);
      Ints& sum = sums[i >= kCount / 2];
      sum = Add(sum, rounded);
      StoreBytes(to + i * kLanes, rounded);
    }
    const int32_t sum = Sum(Add(sums[0], sums[1])), first = parts == 2 ? Sum(sums[0]) : sum;
    scale[at] = finite ? largest * (1.0f / 127.0f) : std::numeric_limits<float>::quiet_NaN();
    for (int part = 0; part < parts; part++) {
      const int32_t of_part = part ? sum - first : first;
      total[at * parts + part] = scale[at] * static_cast<float>(of_part);
      start[at * parts + part] = -zero * of_part;
    }
  }
};

// The largest activations of a row, if they stand out. In int8, a scale that covers them would leave
// few codes to the others; so they have wide codes of the others' scale, summed apart.
struct Outliers {
  static constexpr int kMost = 4;
  static constexpr float kLeast = 2, kFarthest = 8192;  // of the largest over the largest other

  int count = 0;
  int64_t places[kMost];
  int32_t codes[kMost];  // at most 127 * kFarthest, about 2^20

  Outliers() = default;
  Outliers(const float* x, int64_t depth) {
    int32_t sizes[kMost + 1] = {};  // the largest, as bits, and the largest other
    int64_t at[kMost + 1] = {};
    const auto insert = [&](int32_t size, int64_t place) {
      if (size <= sizes[kMost]) return;  // among equals, the first is larger
      int i = kMost;
      for (; i > 0 && sizes[i - 1] < size; i--) sizes[i] = sizes[i - 1], at[i] = at[i - 1];
      sizes[i] = size, at[i] = place;
    };
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) {
      const Ints magnitudes = Magnitude(Load(x + k));
      unsigned greater = Greater(magnitudes, AllInts(sizes[kMost]));
      if (!greater) continue;
      int32_t each[kLanes];
      std::memcpy(each, &magnitudes, sizeof each);
      for (; greater; greater &= greater - 1) {
        const int i = __builtin_ctz(greater);
        insert(each[i], k + i);
      }
    }
    for (; k < depth; k++) insert(Bits(x[k]) & 0x7fffffff, k);
    const float largest = Number(sizes[0]), other = Number(sizes[kMost]);
    // False where one is not a number, too.
    if (!(largest > kLeast * other && largest <= kFarthest * other && other > kSmallest)) return;
    count = kMost;
    for (int i = 0; i < kMost; i++) {
      places[i] = at[i];
      codes[i] = _mm_cvtss_si32(_mm_set_ss(x[at[i]] * (127.0f / other)));
    }
  }

  // Whether none can stand out, as more than kMost numbers are within kLeast of the largest, given the
  // largest magnitudes of the lanes, which are as many numbers of the row.
  static bool Absent(Ints of_lanes, int32_t largest) {
    constexpr int32_t kTwice = 1 << 23;  // of the bits of a float32 number
    static_assert(kLeast == 2);
    return __builtin_popcount(Greater(Add(of_lanes, AllInts(kTwice)), AllInts(largest - 1))) > kMost;
  }
};

// Rows of activations in int8 with a scale each, and their outliers, for weights [K, N] + 128.
struct QuantisedRows {
  Quantised others;
  const std::unique_ptr<Outliers[]> outliers;  // [M]

  QuantisedRows(int64_t rows, int64_t depth, int32_t zero, CodeLayout layout = {})
      : others(rows, depth, depth, 1, zero, layout), outliers(new Outliers[rows]) {}

  // The largest magnitude of each lane of a row's vectors.
  Ints Magnitudes(const float* x) const {
    Ints most = AllInts(0);
    Each(x, others.depth, [&](int64_t, Floats v) { most = Max(most, Magnitude(v)); });
    return most;
  }

  // Whether any of some rows has outliers.
  bool AnyOutliers(int64_t begin, int64_t end) const {
    return std::any_of(&outliers[begin], &outliers[end], [](const Outliers& o) { return o.count; });
  }

  void Fill(const LiveRows& x, int64_t begin, int64_t end) {
    std::vector<float> rest;
    for (int64_t row = begin; row < end; row++) {
      const float* from = x[row];
      const Ints most = Magnitudes(from);
      const int32_t largest = Max(most);
      if (!Outliers::Absent(most, largest)) outliers[row] = Outliers(from, others.depth);
      const Outliers& found = outliers[row];
      if (!found.count) {
        others.FillRow(from, row, Number(largest));
        continue;
      }
      rest.assign(from, from + others.depth);
      for (int i = 0; i < found.count; i++) rest[found.places[i]] = 0;
      others.FillRow(rest.data(), row, Number(Max(Magnitudes(rest.data()))));
      for (int i = 0; i < found.count; i++) others.start[row] -= 128 * found.codes[i];
    }
  }
};

}  // namespace dflash

#endif  // DFLASH_NATIVE_FORMATS_H_
