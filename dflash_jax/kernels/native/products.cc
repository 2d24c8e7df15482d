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

#include "amx.h"
#include "tiled_products.h"
#include "whole_product.h"

namespace dflash {
namespace {

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

// -- handlers -----------------------------------------------------------------------------------

ffi::Error FloatProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, Live live,
                        ffi::Buffer<ffi::F32> onto, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> result,
                        int32_t activation) {
  const Finish finish = FinishOf(activation, onto);
  const int64_t depth = x.dimensions()[1];
  if (!Fits(live, x.dimensions()[0])) return Unfit();
  const LiveRows rows(x.typed_data(), x.dimensions()[0], depth, live);
  const Output out = OutputOf(result, rows, live);
  const int64_t strips = Strips(out, finish);
  const auto run = [&](auto format) {
    using Format = decltype(format);
    constexpr int64_t kBytes = sizeof(typename Format::Stored);
    if (!strips || !Holds(w, strips * depth * kStrip * kBytes)) return Unfit();
    const auto* stored = static_cast<const typename Format::Stored*>(w.untyped_data());
    const FloatTile<Format> tile{rows, stored, depth};
    Run(pool, depth, out, finish, [&](int64_t begin, int64_t end, const Output& part) {
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
// Calls run(out) if the arrays of int8 weights fit the activations.
template <typename Work>
ffi::Error Int8Product(ffi::Buffer<ffi::F32> x, Live live, ffi::Buffer<ffi::U8> w, ffi::Buffer<ffi::F32> scale,
                       ffi::ResultBuffer<ffi::F32> result, Finish finish, const Work& run) {
  const int64_t depth = x.dimensions()[1], quads = (depth + 3) / 4;
  if (!Fits(live, x.dimensions()[0])) return Unfit();
  const LiveRows rows(x.typed_data(), x.dimensions()[0], depth, live);
  const Output out = OutputOf(result, rows, live);
  const int64_t strips = Strips(out, finish);
  if (!strips || !Holds(w, strips * quads * kQuads) || !Holds(scale, strips * kStrip * 4)) return Unfit();
  run(depth, out);
  return ffi::Error::Success();
}

ffi::Error Int8ByInt8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, Live live,
                      ffi::Buffer<ffi::F32> onto, ffi::Buffer<ffi::U8> w, ffi::Buffer<ffi::F32> scale,
                      ffi::ResultBuffer<ffi::F32> result, int32_t activation) {
  const Finish finish = FinishOf(activation, onto);
  return Int8Product(x, live, w, scale, result, finish, [&](int64_t depth, const Output& out) {
    const int64_t rows = out.rows.count();
    const bool tiled = Tiled(rows, kInt8TileRows) && depth && depth % kTileBytes == 0;
    QuantisedRows quantised(rows, depth, kUnsignedDot ? 128 : 0, tiled ? kInt8Tiles : CodeLayout());
    Fill(pool, quantised, out.rows, depth);
    const Int8Operands operands{quantised, w.typed_data(), scale.typed_data(), depth};
    Run(pool, depth, out, finish, [&](int64_t begin, int64_t end, const Output& part) {
      if (tiled) return Int8Tiles{operands}.Multiply(rows, begin, end, part);
      MultiplyColumns(Int8Tile{operands}, begin, end, part);
    });
  });
}

ffi::Error Int8ByFloats(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, Live live,
                        ffi::Buffer<ffi::F32> onto, ffi::Buffer<ffi::U8> w, ffi::Buffer<ffi::F32> scale,
                        ffi::ResultBuffer<ffi::F32> result, int32_t activation) {
  const Finish finish = FinishOf(activation, onto);
  return Int8Product(x, live, w, scale, result, finish, [&](int64_t depth, const Output& out) {
    const Int8ByFloatsTile tile{out.rows, w.typed_data(), scale.typed_data(), depth};
    Run(pool, depth, out, finish, [&](int64_t begin, int64_t end, const Output& part) {
      MultiplyColumns(tile, begin, end, part);
    });
  });
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

}  // namespace
}  // namespace dflash

using namespace dflash;

// Turns tiles of AMX on, if this process may use them, or off; returns a TileState.
extern "C" int32_t dflash_use_tiles(int32_t wanted) {
  const TileState state = wanted ? FindTiles() : kUsable;
  use_tiles = wanted && state == kUsable;
  return state;
}

PRODUCT(dflash_float, FloatProduct, .Arg<ffi::AnyBuffer>());
PRODUCT(dflash_int8, Int8ByInt8, .Arg<ffi::Buffer<ffi::U8>>().Arg<ffi::Buffer<ffi::F32>>());
PRODUCT(dflash_int8_by_floats, Int8ByFloats,
        .Arg<ffi::Buffer<ffi::U8>>().Arg<ffi::Buffer<ffi::F32>>());
EXPERTS(dflash_experts_float, FloatExperts, .Arg<ffi::AnyBuffer>());
