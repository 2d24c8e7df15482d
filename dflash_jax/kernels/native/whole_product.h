// What all products share: how they are split among threads, and how their results end.

#ifndef DFLASH_NATIVE_WHOLE_PRODUCT_H_
#define DFLASH_NATIVE_WHOLE_PRODUCT_H_

#include <algorithm>
#include <cstdint>

#include "gates.h"
#include "output.h"
#include "routed_rows.h"

namespace dflash {
namespace {

constexpr int64_t kPart = 256;        // columns that a thread takes at a time, or more
constexpr int64_t kClose = 128;       // of these, columns that are multiplied with all rows first
constexpr int64_t kSerial = 1 << 18;  // products with fewer multiplications run on one thread
constexpr int kRows = DFLASH_AVX512 ? 8 : 4;   // most rows of a tile

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

// What becomes of the numbers of a product.
struct Finish {
  Activation activation;  // with one, the weight has twice as many columns, those of gates first
  bool adds;              // whether they are added to what the result has
};

// Splits a product in parts of multiply(begin, end, out), which multiplies all rows by some vectors of
// columns. With an activation the result is activation(gate) times the other half.
template <typename Multiply>
void Run(ffi::ThreadPool pool, int64_t depth, const Output& out, Finish finish, const Multiply& multiply) {
  const int64_t rows = out.rows.count();
  const bool gated = finish.activation != Activation::kNone;
  if (!gated && !finish.adds)
    return SplitColumns(pool, rows, depth, out.columns, [&](int64_t begin, int64_t end) {
      out.Clear(begin, end);
      multiply(begin, end, out);
    });
  const int64_t halves = gated ? 2 : 1, others = out.columns / kLanes;
  SplitColumns(pool, rows, halves * depth, out.columns, [&](int64_t begin, int64_t end) {
    if (!finish.adds) out.Clear(begin, end);
    const int64_t width = (end - begin) * kLanes;
    const std::unique_ptr<float[]> products(new float[rows * halves * width]);
    const LiveRows each(rows);
    for (int64_t half = 0; half < halves; half++) {
      const int64_t first = half * others;
      const Output part{products.get() + half * width, halves * width, each, false, true, first + begin};
      multiply(first + begin, first + end, part);
    }
    const int64_t whole = std::min(width, out.columns - begin * kLanes);
    for (int64_t row = 0; row < rows; row++) {
      const float* from = products.get() + row * halves * width;
      float* to = out.Row(row) + begin * kLanes;
      if (gated)
        GateRow(finish.activation, from, width, to);
      else
        for (int64_t i = 0; i < whole; i++) to[i] += from[i];
    }
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

// Returns whether a buffer has so many bytes.
template <typename Buffer>
bool Holds(const Buffer& buffer, int64_t bytes) {
  return static_cast<int64_t>(buffer.size_bytes()) == bytes;
}

// Strips of the weight of a product; 0 if it cannot end so.
int64_t Strips(const Output& out, Finish finish) {
  if (finish.activation != Activation::kNone && finish.adds) return 0;
  if (finish.activation == Activation::kNone) return (out.columns + kStrip - 1) / kStrip;
  return out.columns % kStrip ? 0 : 2 * out.columns / kStrip;
}

ffi::Error Unfit() {
  return ffi::Error::InvalidArgument("a weight's shape does not fit its format and activations");
}

// The result of a product. Where it is told which rows are live, the others stay as they are; else they are zeros.
Output OutputOf(ffi::ResultBuffer<ffi::F32> result, const LiveRows& rows, const Live& live) {
  return {result->typed_data(), result->dimensions()[1], rows, live.element_count() == 0};
}

// A product is added to `onto`, which has the memory of the result, unless that is empty.
Finish FinishOf(int32_t activation, ffi::Buffer<ffi::F32> onto) {
  return {static_cast<Activation>(activation), onto.element_count() > 0};
}

// Returns whether each row has an expert, of which there is at least one.
bool AreRouted(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> expert, ffi::AnyBuffer w) {
  return expert.element_count() == x.dimensions()[0] && w.dimensions().size() && w.dimensions()[0] > 0;
}

}  // namespace
}  // namespace dflash

#define PRODUCT(name, function, ...)                                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                                                      \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>() \
                                    .Arg<Live>().Arg<ffi::Buffer<ffi::F32>>()                        \
                                    __VA_ARGS__.Ret<ffi::Buffer<ffi::F32>>().Attr<int32_t>("activation"))

#define EXPERTS(name, function, ...)                                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                                                      \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>() \
                                    .Arg<ffi::Buffer<ffi::S32>>() __VA_ARGS__                        \
                                    .Ret<ffi::Buffer<ffi::F32>>())

#endif  // DFLASH_NATIVE_WHOLE_PRODUCT_H_
