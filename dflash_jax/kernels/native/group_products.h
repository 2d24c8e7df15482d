// Products with weights whose groups of 32 along K have scales, as XLA FFI handlers; see products.cc.
// The formats are spread over two sources, which compilers take at the same time.

#ifndef DFLASH_NATIVE_GROUP_PRODUCTS_H_
#define DFLASH_NATIVE_GROUP_PRODUCTS_H_

#include <deque>
#include <iterator>

#include "tiled_products.h"
#include "whole_product.h"

namespace dflash {
namespace {

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
ffi::Error GroupProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, Live live, ffi::Buffer<ffi::F32> onto,
                        ffi::RemainingArgs arrays,
                        ffi::ResultBuffer<ffi::F32> result, int32_t activation) {
  const Finish finish = FinishOf(activation, onto);
  const int64_t depth = x.dimensions()[1];
  if (!Fits(live, x.dimensions()[0])) return Unfit();
  const LiveRows rows(x.typed_data(), x.dimensions()[0], depth, live);
  const Output out = OutputOf(result, rows, live);
  const int64_t strips = Strips(out, finish);
  Stack<Format> stack(depth, strips * kStrip);
  if (!strips || !stack.Take(arrays, depth, 1)) return Unfit();
  GroupOperands<Format> operands(rows, stack[0], depth);
  Fill(pool, operands.x, rows, depth);
  Run(pool, depth, out, finish, [&](int64_t begin, int64_t end, const Output& part) {
    operands.Multiply(begin, end, part);
  });
  return ffi::Error::Success();
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

#define GROUPED(name, Format)                                              \
  PRODUCT(dflash_##name, GroupProduct<Format>, .RemainingArgs()); \
  EXPERTS(dflash_experts_##name, GroupExperts<Format>, .RemainingArgs())

#endif  // DFLASH_NATIVE_GROUP_PRODUCTS_H_
