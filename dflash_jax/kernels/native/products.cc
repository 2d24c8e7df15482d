// Products x · w of float32 activations [M, K] with weights [K, N] in strips of 16 columns, for CPUs
// with AVX2, as XLA FFI handlers.
//
// Each element of the result is computed by the same operations in the same order whatever M is, so
// that a token has the same bits alone and in a block. Float weights: products are added one after
// the other along K. Integer weights: activations are quantised to int8 with one scale for each row
// (int8) or for each 32 of K, products within those are summed exactly, and groups are added in order.
// int8 weights can be multiplied by floats, too, as float weights are.
//
// Products by experts have a stack of weights [E, K, N], and a row is multiplied with those of its
// expert, alike.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>

#include "amx.h"
#include "gates.h"
#include "output.h"
#include "routed_rows.h"
#include "tiled_products.h"

namespace dflash {
namespace {

constexpr int64_t kPart = 256;        // columns that a thread takes at a time, or more
constexpr int64_t kClose = 128;       // of these, columns that are multiplied with all rows first
constexpr int64_t kSerial = 1 << 18;  // products with fewer multiplications run on one thread
constexpr int kRows = DFLASH_AVX512 ? 8 : 4;   // most rows of a tile

// -- tiles --------------------------------------------------------------------------------------
// Each computes the products of R rows with C vectors of columns, C = kColumns or 1. Packed weights are
// read fastest strip by strip, as they lie in memory.

template <typename Format>
struct FloatTile {
  const LiveRows& x;
  const typename Format::Stored* w;  // [strips, K, 16]
  int64_t depth;

  static constexpr int kColumns = 2;

  template <int R, int C>
  void Multiply(int64_t row, int64_t vector, const Output& out) const {
    Floats sums[R][C];
    const typename Format::Stored* from[C];
    for (auto& line : sums)
      for (auto& sum : line) sum = Zeros();
    for (int c = 0; c < C; c++) {
      const Place place(vector + c);
      from[c] = w + place.strip * depth * kStrip + place.lane;
    }
    const float* rows[R];
    for (int r = 0; r < R; r++) rows[r] = x[row + r];
    for (int64_t k = 0; k < depth; k++) {
      Floats weights[C];
      for (int c = 0; c < C; c++) {
        if (R > 2) Prefetch(from[c] + k * kStrip);
        weights[c] = Format::Read(from[c] + k * kStrip);
      }
      for (int r = 0; r < R; r++) {
        const Floats activation = All(rows[r][k]);
        for (int c = 0; c < C; c++) sums[r][c] = MultiplyAdd(activation, weights[c], sums[r][c]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) out.Put(row + r, vector + c, sums[r][c]);
  }
};

struct Int8Tile : Int8Operands {
  static constexpr int kColumns = 1;

  template <int R, int C>
  void Multiply(int64_t row, int64_t vector, const Output& out) const {
    static_assert(C == 1);
    const Quantised& others = x.others;
    const int64_t quads = (depth + 3) / 4;
    const uint8_t* from = Quads(w, depth, Place(vector));
    const int8_t* rows = others.codes.get() + row * others.width;
    Ints sums[R];
    for (int r = 0; r < R; r++) sums[r] = AllInts(others.start[row + r]);
    for (int64_t q = 0; q < quads; q++) {
      if (R > 2) Prefetch(from + q * kQuads);
      const Ints weights = LoadBytes(from + q * kQuads);
      for (int r = 0; r < R; r++)
        sums[r] = DotBytes(sums[r], weights, Quad(rows + r * others.width + q * 4));
    }
    for (int r = 0; r < R; r++) Finish(row + r, vector, sums[r], out);
  }
};

struct Int8ByFloatsTile {
  const LiveRows& x;
  const uint8_t* w;    // [strips, K / 4, 16, 4], codes + 128
  const float* scale;  // [strips, 16]
  int64_t depth;

  static constexpr int kColumns = 1;

  template <int R, int C>
  void Multiply(int64_t row, int64_t vector, const Output& out) const {
    static_assert(C == 1);
    const uint8_t* from = Quads(w, depth, Place(vector));
    const float* rows[R];
    for (int r = 0; r < R; r++) rows[r] = x[row + r];
    Floats sums[R];
    for (auto& sum : sums) sum = Zeros();
    for (int64_t k = 0; k < depth; k++) {
      if (R > 2 && k % 4 == 0) Prefetch(from + k / 4 * kQuads);
      const Ints codes = ByteOf(LoadBytes(from + k / 4 * kQuads), k % 4);
      const Floats weights = ToFloats(Add(codes, AllInts(-128)));
      for (int r = 0; r < R; r++)
        sums[r] = MultiplyAdd(All(rows[r][k]), weights, sums[r]);
    }
    const Floats scales = Load(scale + vector * kLanes);
    for (int r = 0; r < R; r++) out.Put(row + r, vector, dflash::Multiply(sums[r], scales));
  }
};

template <typename Format>
struct GroupTile {
  const Quantised& x;
  const Arrays& w;

  static constexpr int kColumns = 1;

  template <int R, int C>
  void Multiply(int64_t row, int64_t vector, const Output& out) const {
    static_assert(C == 1);
    Floats sums[R];
    for (auto& sum : sums) sum = Zeros();
    for (int64_t g = 0; g < x.groups; g++) AddGroup<R>(row, Place(vector), g, sums);
    for (int r = 0; r < R; r++) out.Put(row + r, vector, sums[r]);
  }

  template <int R>
  inline void AddGroup(int64_t row, Place place, int64_t group, Floats (&sums)[R]) const {
    constexpr int kScales = Format::kHalves ? 2 : 1;
    constexpr int kDots = R == 1 ? 2 : kScales;  // more sums than scales to wait less for each
    const int64_t offset = group * Format::kGroupBytes + place.lane * 4;
    const auto* codes = w.At<uint8_t>(kCodes, place.strip, x.groups * Format::kGroupBytes, offset);
    const int8_t* rows = x.codes.get() + row * x.width + group * kGroup;
    Ints dots[R][kDots];
    for (int r = 0; r < R; r++)
      for (int part = 0; part < kDots; part++) {
        const int64_t at = ((row + r) * x.groups + group) * kScales + part;
        dots[r][part] = part < kScales ? AllInts(x.start[at]) : AllInts(0);
      }
    for (int64_t i = 0; i < Format::kGroupBytes; i += 64) Prefetch(codes + i);
    AddDots<R, kDots>(codes, rows, dots);
    const Scales scales = Format::Read(w, {place.strip, group, place.lane});
    for (int r = 0; r < R; r++) {
      if constexpr (kDots > kScales) dots[r][0] = Add(dots[r][0], dots[r][1]);
      const int64_t at = (row + r) * x.groups + group;
      AddScaled<Format>(scales, dots[r], x.scale[at], &x.total[at * kScales], sums[r]);
    }
  }

  // Adds the products of a group's codes with those of R rows.
  template <int R, int kDots>
  inline void AddDots(const uint8_t* codes, const int8_t* rows, Ints (&dots)[R][kDots]) const {
    if constexpr (kUnsignedDot || Format::kBytewise) {
      for (int i = 0; i < 4; i++) {
        const Pair pair = Format::Codes(codes, i);
        for (int r = 0; r < R; r++) {
          const int8_t* quads = rows + r * x.width + i * 4;
          Ints &first = dots[r][0], &second = dots[r][kDots - 1];
          if constexpr (Format::kBytewise) {
            first = DotBytes(first, pair.first, Quad(quads));
            second = DotBytes(second, pair.second, Quad(quads + 16));
          } else {
            first = Dot(first, pair.first, Quad(quads));
            second = Dot(second, pair.second, Quad(quads + 16));
          }
        }
      }
    } else {
      AddPairs<R, kDots, 0>(codes, rows, dots);
      AddPairs<R, kDots, 1>(codes, rows + 16, dots);
    }
  }

  // The same for half of a group: products of small codes are summed in 16 bits while they fit.
  template <int R, int kDots, int kHalf>
  inline void AddPairs(const uint8_t* codes, const int8_t* rows, Ints (&dots)[R][kDots]) const {
    constexpr int kFit = 32767 / (2 * Format::kMostCode * 127), kTogether = kFit >= 4 ? 4 : 2;
    static_assert(kFit >= 2);
    for (int i = 0; i < 4; i += kTogether) {
      Ints pairs[R];
      for (int k = i; k < i + kTogether; k++) {
        const Pair both = Format::Codes(codes, k);
        const Ints w = kHalf ? both.second : both.first;
        for (int r = 0; r < R; r++) {
          const Ints products = Pairs(w, Quad(rows + r * x.width + k * 4));
          pairs[r] = k == i ? products : dflash::AddPairs(pairs[r], products);
        }
      }
      for (int r = 0; r < R; r++) {
        Ints& sum = dots[r][kHalf ? kDots - 1 : 0];
        sum = AddSumsOf(pairs[r], sum);
      }
    }
  }
};

// -- the whole product --------------------------------------------------------------------------

template <int R, typename Tile>
void MultiplyRows(const Tile& tile, int64_t row, int64_t begin, int64_t end, const Output& out) {
  constexpr int kColumns = Tile::kColumns;
  int64_t vector = begin;
  for (; vector + kColumns <= end; vector += kColumns)
    tile.template Multiply<R, kColumns>(row, vector, out);
  for (; vector < end; vector++) tile.template Multiply<R, 1>(row, vector, out);
}

// Multiplies the rows from `row` on, R at a time, then fewer.
template <int R, typename Tile>
void MultiplyFrom(const Tile& tile, int64_t row, int64_t rows, int64_t begin, int64_t end,
                  const Output& out) {
  for (; row + R <= rows; row += R) MultiplyRows<R>(tile, row, begin, end, out);
  constexpr int kFewer = R > 4 ? R - 2 : R - 1;  // 8, 6, 4, 3, 2, 1
  if constexpr (R > 1) MultiplyFrom<kFewer>(tile, row, rows, begin, end, out);
}

// Splits the columns of a product in equal parts, as many for each thread: one that has no part left
// would wait for the others.
template <typename Work>
void SplitColumns(ffi::ThreadPool pool, int64_t rows, int64_t depth, int64_t columns,
                  const Work& work) {
  const int64_t vectors = (columns + kLanes - 1) / kLanes;
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t parts = threads * std::max<int64_t>(vectors * kLanes / (threads * kPart), 1);
  const bool serial = rows * depth * columns < kSerial;
  Split(pool, vectors, (vectors + parts - 1) / parts, serial, work);
}

// Multiplies all rows by some vectors of columns. Compiled once for all handlers, as compiling takes long.
template <typename Tile>
__attribute__((noinline)) void MultiplyColumns(const Tile& tile, int64_t begin, int64_t end, const Output& out) {
  const int64_t rows = out.rows.count();
  // Few columns at a time, so that their weights stay in the cache for all rows.
  const int64_t step = rows <= kRows ? kClose / kLanes : 2;
  for (int64_t at = begin; at < end; at += step)
    MultiplyFrom<kRows>(tile, 0, rows, at, std::min(at + step, end), out);
}

// Splits a product in parts of multiply(begin, end, out), which multiplies all rows by some vectors of
// columns. With an activation, the weight has twice as many columns, those of gates first, and the result
// is activation(gate) times the other.
template <typename Multiply>
void Run(ffi::ThreadPool pool, int64_t depth, const Output& out, Activation activation,
         const Multiply& multiply) {
  const int64_t rows = out.rows.count();
  if (activation == Activation::kNone)
    return SplitColumns(pool, rows, depth, out.columns, [&](int64_t begin, int64_t end) {
      out.Clear(begin, end);
      multiply(begin, end, out);
    });
  const int64_t others = out.columns / kLanes;
  SplitColumns(pool, rows, 2 * depth, out.columns, [&](int64_t begin, int64_t end) {
    out.Clear(begin, end);
    const int64_t width = (end - begin) * kLanes;
    const std::unique_ptr<float[]> both(new float[rows * 2 * width]);
    const LiveRows each(rows);
    multiply(begin, end, Output{both.get(), 2 * width, each, false, true, begin});
    multiply(others + begin, others + end,
             Output{both.get() + width, 2 * width, each, false, true, others + begin});
    for (int64_t row = 0; row < rows; row++)
      GateRow(activation, both.get() + row * 2 * width, width, out.Row(row) + begin * kLanes);
  });
}

// Calls multiply(i, begin, end, out) for some vectors of columns of the i-th expert that has rows, until
// all are done.
template <typename Multiply>
void RunExperts(ffi::ThreadPool pool, const RoutedRows& routed, int64_t depth, float* result,
                int64_t columns, const Multiply& multiply) {
  const int64_t vectors = (columns + kLanes - 1) / kLanes;
  Output{result, columns, routed.live(), true}.Clear(0, vectors);
  if (!routed.count()) return;
  const int64_t rows = (routed.live().count() + routed.count() - 1) / routed.count();  // of an expert
  // The columns of all experts side by side: one after the other, each would end with a wait.
  const int64_t together = routed.count() * vectors * kLanes;
  SplitColumns(pool, rows, depth, together, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t i = begin / vectors, first = i * vectors, last = std::min(end, first + vectors);
      const Output out{result, columns, routed[i].rows, false};
      multiply(i, begin - first, last - first, out);
      begin = last;
    }
  });
}

template <typename Activations>
void Fill(ffi::ThreadPool pool, Activations& quantised, const LiveRows& x, int64_t depth) {
  Split(pool, x.count(), 16, x.count() * depth < kSerial,
        [&](int64_t begin, int64_t end) { quantised.Fill(x, begin, end); });
}

// -- handlers -----------------------------------------------------------------------------------

// Returns whether a buffer has so many bytes.
template <typename Buffer>
bool Holds(const Buffer& buffer, int64_t bytes) {
  return static_cast<int64_t>(buffer.size_bytes()) == bytes;
}

// Strips of the weight of a product; 0 if it cannot have such an activation.
int64_t Strips(const Output& out, Activation activation) {
  if (activation == Activation::kNone) return (out.columns + kStrip - 1) / kStrip;
  return out.columns % kStrip ? 0 : 2 * out.columns / kStrip;
}

ffi::Error Unfit() {
  return ffi::Error::InvalidArgument("a weight's shape does not fit its format and activations");
}

ffi::Error FloatProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                        ffi::ResultBuffer<ffi::F32> result, bool fill, int32_t kind) {
  const Activation activation = static_cast<Activation>(kind);
  const int64_t depth = x.dimensions()[1];
  const LiveRows rows(x.typed_data(), x.dimensions()[0], depth);
  const Output out{result->typed_data(), result->dimensions()[1], rows, fill};
  const int64_t strips = Strips(out, activation);
  const auto run = [&](auto format) {
    using Format = decltype(format);
    constexpr int64_t kBytes = sizeof(typename Format::Stored);
    if (!strips || !Holds(w, strips * depth * kStrip * kBytes)) return Unfit();
    const auto* stored = static_cast<const typename Format::Stored*>(w.untyped_data());
    const FloatTile<Format> tile{rows, stored, depth};
    Run(pool, depth, out, activation, [&](int64_t begin, int64_t end, const Output& part) {
      MultiplyColumns(tile, begin, end, part);
    });
    return ffi::Error::Success();
  };
  switch (w.element_type()) {
    case ffi::F32: return run(Float32());
    case ffi::BF16: return run(BFloat16());
    case ffi::F16: return run(Float16());
    default: return ffi::Error::InvalidArgument("weights must be float32, bfloat16 or float16");
  }
}

// Calls run(out) if the arrays of int8 weights fit the activations.
template <typename Work>
ffi::Error Int8Product(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> w, ffi::Buffer<ffi::F32> scale,
                       ffi::ResultBuffer<ffi::F32> result, bool fill, Activation activation,
                       const Work& run) {
  const int64_t depth = x.dimensions()[1], quads = (depth + 3) / 4;
  const LiveRows rows(x.typed_data(), x.dimensions()[0], depth);
  const Output out{result->typed_data(), result->dimensions()[1], rows, fill};
  const int64_t strips = Strips(out, activation);
  if (!strips || !Holds(w, strips * quads * kQuads) || !Holds(scale, strips * kStrip * 4)) return Unfit();
  run(depth, out);
  return ffi::Error::Success();
}

ffi::Error Int8ByInt8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> w,
                      ffi::Buffer<ffi::F32> scale, ffi::ResultBuffer<ffi::F32> result, bool fill,
                      int32_t kind) {
  const Activation activation = static_cast<Activation>(kind);
  return Int8Product(x, w, scale, result, fill, activation, [&](int64_t depth, const Output& out) {
    const int64_t rows = out.rows.count();
    const bool tiled = Tiled(rows, kInt8TileRows) && depth && depth % kTileBytes == 0;
    QuantisedRows quantised(rows, depth, kUnsignedDot ? 128 : 0, tiled ? kInt8Tiles : CodeLayout());
    Fill(pool, quantised, out.rows, depth);
    const Int8Operands operands{quantised, w.typed_data(), scale.typed_data(), depth};
    Run(pool, depth, out, activation, [&](int64_t begin, int64_t end, const Output& part) {
      if (tiled) return Int8Tiles{operands}.Multiply(rows, begin, end, part);
      MultiplyColumns(Int8Tile{operands}, begin, end, part);
    });
  });
}

ffi::Error Int8ByFloats(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> w,
                        ffi::Buffer<ffi::F32> scale, ffi::ResultBuffer<ffi::F32> result, bool fill,
                        int32_t kind) {
  const Activation activation = static_cast<Activation>(kind);
  return Int8Product(x, w, scale, result, fill, activation, [&](int64_t depth, const Output& out) {
    const Int8ByFloatsTile tile{out.rows, w.typed_data(), scale.typed_data(), depth};
    Run(pool, depth, out, activation, [&](int64_t begin, int64_t end, const Output& part) {
      MultiplyColumns(tile, begin, end, part);
    });
  });
}

// Arrays of weights of a format, or of a stack of these, one after the other.
template <typename Format>
struct Stack {
  Arrays first;
  int64_t strips;  // of each

  Stack(int64_t depth, int64_t columns)
      : first{{}, depth / kGroup}, strips((columns + kStrip - 1) / kStrip) {}

  // Takes the arrays; returns false if they do not fit.
  bool Take(ffi::RemainingArgs arrays, int64_t depth, int64_t count) {
    if (depth % (kGroup * Format::kScaled) || arrays.size() != std::size(Format::kArrays)) return false;
    for (size_t i = 0; i < arrays.size(); i++) {
      const Part part = Format::kArrays[i];
      const auto array = arrays.get<ffi::AnyBuffer>(i);
      if (!array || !Holds(*array, count * Bytes(part))) return false;
      first.data[part] = array->untyped_data();
    }
    return true;
  }

  Arrays operator[](int64_t i) const {
    Arrays found = first;
    for (const Part part : Format::kArrays)
      found.data[part] = static_cast<const uint8_t*>(first.data[part]) + i * Bytes(part);
    return found;
  }

 private:
  // Bytes of one of the arrays of one weight.
  int64_t Bytes(Part part) const {
    const int64_t size = part == kScale || part == kLow ? Format::kScaleBytes : 1;
    return strips * PerStrip<Format>(part, first.groups) * size;
  }
};

// Rows and weights that are multiplied. The codes of the rows are filled in before.
template <typename Format>
struct GroupOperands {
  const Arrays w;
  const bool tiled;
  Quantised x;

  GroupOperands(const LiveRows& rows, const Arrays& w, int64_t depth)
      : w(w), tiled(Tiled(rows.count(), Format::kHalves ? kHalvesTileRows : kGroupTileRows)),
        x(rows.count(), depth, kGroup, Format::kHalves ? 2 : 1, kShifted ? 0 : Format::kZeroPoint,
          tiled ? kGroupTiles : CodeLayout()) {}

  // Multiplies all rows by some vectors of columns.
  __attribute__((noinline)) void Multiply(int64_t begin, int64_t end, const Output& out) const {
    if (tiled)
      GroupTiles<Format>{x, w}.Multiply(out.rows.count(), begin, end, out);
    else
      MultiplyColumns(GroupTile<Format>{x, w}, begin, end, out);
  }

 private:
  static constexpr bool kShifted = Format::kBytewise && !kUnsignedDot;  // DotBytes takes the zero point off
};

template <typename Format>
ffi::Error GroupProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs arrays,
                        ffi::ResultBuffer<ffi::F32> result, bool fill, int32_t kind) {
  const Activation activation = static_cast<Activation>(kind);
  const int64_t depth = x.dimensions()[1];
  const LiveRows rows(x.typed_data(), x.dimensions()[0], depth);
  const Output out{result->typed_data(), result->dimensions()[1], rows, fill};
  const int64_t strips = Strips(out, activation);
  Stack<Format> stack(depth, strips * kStrip);
  if (!strips || !stack.Take(arrays, depth, 1)) return Unfit();
  GroupOperands<Format> operands(rows, stack[0], depth);
  Fill(pool, operands.x, rows, depth);
  Run(pool, depth, out, activation, [&](int64_t begin, int64_t end, const Output& part) {
    operands.Multiply(begin, end, part);
  });
  return ffi::Error::Success();
}

// -- handlers of products by experts ------------------------------------------------------------

// Returns whether each row has an expert, of which there is at least one.
bool AreRouted(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> expert, ffi::AnyBuffer w) {
  return expert.element_count() == x.dimensions()[0] && w.dimensions().size() && w.dimensions()[0] > 0;
}

ffi::Error FloatExperts(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> expert,
                        ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> result) {
  if (!AreRouted(x, expert, w)) return Unfit();
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], experts = w.dimensions()[0];
  const int64_t columns = result->dimensions()[1];
  const int64_t each = (columns + kStrip - 1) / kStrip * depth * kStrip;  // numbers of an expert
  const RoutedRows routed(x.typed_data(), expert.typed_data(), rows, depth, experts);
  const auto run = [&](auto format) {
    using Format = decltype(format);
    if (!Holds(w, experts * each * static_cast<int64_t>(sizeof(typename Format::Stored)))) return Unfit();
    const auto* stored = static_cast<const typename Format::Stored*>(w.untyped_data());
    const auto multiply = [&](int64_t i, int64_t begin, int64_t end, const Output& out) {
      const FloatTile<Format> tile{out.rows, stored + routed[i].expert * each, depth};
      MultiplyColumns(tile, begin, end, out);
    };
    RunExperts(pool, routed, depth, result->typed_data(), columns, multiply);
    return ffi::Error::Success();
  };
  switch (w.element_type()) {
    case ffi::F32: return run(Float32());
    case ffi::BF16: return run(BFloat16());
    case ffi::F16: return run(Float16());
    default: return ffi::Error::InvalidArgument("weights must be float32, bfloat16 or float16");
  }
}

template <typename Format>
ffi::Error GroupExperts(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> expert,
                        ffi::RemainingArgs arrays, ffi::ResultBuffer<ffi::F32> result) {
  const auto codes = arrays.get<ffi::AnyBuffer>(0);
  if (!codes || !AreRouted(x, expert, *codes)) return Unfit();
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], experts = codes->dimensions()[0];
  const int64_t columns = result->dimensions()[1];
  Stack<Format> stack(depth, columns);
  if (!stack.Take(arrays, depth, experts)) return Unfit();
  const RoutedRows routed(x.typed_data(), expert.typed_data(), rows, depth, experts);
  std::deque<GroupOperands<Format>> operands;
  for (int64_t i = 0; i < routed.count(); i++)
    operands.emplace_back(routed[i].rows, stack[routed[i].expert], depth);
  const bool serial = routed.live().count() * depth < kSerial;
  const auto fill = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      operands[i].x.Fill(routed[i].rows, 0, routed[i].rows.count());
  };
  if (routed.count()) Split(pool, routed.count(), 1, serial, fill);
  const auto multiply = [&](int64_t i, int64_t begin, int64_t end, const Output& out) {
    operands[i].Multiply(begin, end, out);
  };
  RunExperts(pool, routed, depth, result->typed_data(), columns, multiply);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dflash

using namespace dflash;

// Turns tiles of AMX on, if this process may use them, or off; returns a TileState.
extern "C" int32_t dflash_use_tiles(int32_t wanted) {
  const TileState state = wanted ? FindTiles() : kUsable;
  use_tiles = wanted && state == kUsable;
  return state;
}

#define PRODUCT(name, function, ...)                                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                                                      \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>() \
                                    __VA_ARGS__.Ret<ffi::Buffer<ffi::F32>>()            \
                                    .Attr<bool>("fill").Attr<int32_t>("activation"))

PRODUCT(dflash_float, FloatProduct, .Arg<ffi::AnyBuffer>());
PRODUCT(dflash_int8, Int8ByInt8, .Arg<ffi::Buffer<ffi::U8>>().Arg<ffi::Buffer<ffi::F32>>());
PRODUCT(dflash_int8_by_floats, Int8ByFloats,
        .Arg<ffi::Buffer<ffi::U8>>().Arg<ffi::Buffer<ffi::F32>>());
PRODUCT(dflash_q8_0, GroupProduct<Q8_0>, .RemainingArgs());
PRODUCT(dflash_q4_0, GroupProduct<Q4_0>, .RemainingArgs());
PRODUCT(dflash_q4_1, GroupProduct<Q4_1>, .RemainingArgs());
PRODUCT(dflash_int4z, GroupProduct<Int4Z>, .RemainingArgs());
PRODUCT(dflash_q4_k, GroupProduct<Q4_K>, .RemainingArgs());
PRODUCT(dflash_q5_k, GroupProduct<Q5_K>, .RemainingArgs());
PRODUCT(dflash_q6_k, GroupProduct<Q6_K>, .RemainingArgs());
PRODUCT(dflash_mxfp4, GroupProduct<MXFP4>, .RemainingArgs());
PRODUCT(dflash_int8_16, GroupProduct<Int8_16>, .RemainingArgs());
PRODUCT(dflash_int8_16_low, GroupProduct<Int8_16_Low>, .RemainingArgs());

#define EXPERTS(name, function, ...)                                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                                                      \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>() \
                                    .Arg<ffi::Buffer<ffi::S32>>() __VA_ARGS__                        \
                                    .Ret<ffi::Buffer<ffi::F32>>())

EXPERTS(dflash_experts_float, FloatExperts, .Arg<ffi::AnyBuffer>());
EXPERTS(dflash_experts_q8_0, GroupExperts<Q8_0>, .RemainingArgs());
EXPERTS(dflash_experts_q4_0, GroupExperts<Q4_0>, .RemainingArgs());
EXPERTS(dflash_experts_q4_1, GroupExperts<Q4_1>, .RemainingArgs());
EXPERTS(dflash_experts_int4z, GroupExperts<Int4Z>, .RemainingArgs());
EXPERTS(dflash_experts_q4_k, GroupExperts<Q4_K>, .RemainingArgs());
EXPERTS(dflash_experts_q5_k, GroupExperts<Q5_K>, .RemainingArgs());
EXPERTS(dflash_experts_q6_k, GroupExperts<Q6_K>, .RemainingArgs());
EXPERTS(dflash_experts_mxfp4, GroupExperts<MXFP4>, .RemainingArgs());
EXPERTS(dflash_experts_int8_16, GroupExperts<Int8_16>, .RemainingArgs());
EXPERTS(dflash_experts_int8_16_low, GroupExperts<Int8_16_Low>, .RemainingArgs());
