// Rows of activations of live tokens. The others are those of dead ones: padding, rows that wait, drafts
// that were not made. Which tokens are live is told by the caller, or seen from their numbers: those of dead
// tokens are zeros, whose products are zeros, which need no weights.

#ifndef DFLASH_NATIVE_LIVE_ROWS_H_
#define DFLASH_NATIVE_LIVE_ROWS_H_

#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "common.h"

namespace dflash {

// Returns whether any number is not zero.
inline bool AnyLive(const float* x, int64_t count) {
  constexpr int64_t kTogether = 64;  // numbers between two branches
  const auto bits = [x](int64_t i) {  // but for the sign
    uint32_t word;
    std::memcpy(&word, x + i, sizeof word);
    return word << 1;
  };
  int64_t i = 0;
  for (; i + kTogether <= count; i += kTogether) {
    uint32_t any = 0;
    for (int64_t k = 0; k < kTogether; k++) any |= bits(i + k);
    if (any) return true;
  }
  while (i < count && !bits(i)) i++;
  return i < count;
}

// Which tokens are live, or an empty array if that is to be seen from their numbers.
using Live = ffi::Buffer<ffi::PRED>;

// Returns whether an array says of each row whether it is live, or says nothing.
inline bool Fits(const Live& live, int64_t rows) {
  const auto count = static_cast<int64_t>(live.element_count());
  return count == 0 || count == rows;
}

// Returns whether a row counts.
inline bool IsLive(const Live& live, int64_t row, const float* x, int64_t width) {
  return live.element_count() ? live.typed_data()[row] : AnyLive(x + row * width, width);
}

class LiveRows {
 public:
  // Finds the live rows of x [M, K], in their order.
  LiveRows(const float* x, int64_t rows, int64_t depth, const Live& live) : LiveRows(x, depth, rows, {}) {
    for (int64_t row = 0; row < rows; row++)
      if (IsLive(live, row, x, depth)) at_.push_back(row);
  }

  // The same, seen from their numbers.
  LiveRows(const float* x, int64_t rows, int64_t depth) : LiveRows(x, depth, rows, {}) {
    for (int64_t row = 0; row < rows; row++)
      if (AnyLive(x + row * depth, depth)) at_.push_back(row);
  }

  // Some of the live rows, by their places among all.
  LiveRows(const LiveRows& live, std::vector<int64_t> at)
      : x_(live.x_), depth_(live.depth_), all_(live.all_), at_(std::move(at)) {}

  // As many rows, all of them live, that have no numbers.
  explicit LiveRows(int64_t rows) : x_(nullptr), depth_(0), all_(rows), at_(rows) {
    std::iota(at_.begin(), at_.end(), 0);
  }

  int64_t count() const { return static_cast<int64_t>(at_.size()); }
  int64_t all() const { return all_; }
  // The place of the i-th live row among all, and its numbers.
  int64_t at(int64_t i) const { return at_[i]; }
  const float* operator[](int64_t i) const { return x_ + at_[i] * depth_; }

  // Calls work(row) for the rows that are not live.
  template <typename Work>
  void EachDead(const Work& work) const {
    int64_t next = 0;
    for (int64_t row = 0; row < all_; row++)
      if (next < count() && at_[next] == row)
        next++;
      else
        work(row);
  }

 private:
  LiveRows(const float* x, int64_t depth, int64_t rows, std::vector<int64_t> at)
      : x_(x), depth_(depth), all_(rows), at_(std::move(at)) {}

  const float* const x_;
  const int64_t depth_, all_;
  std::vector<int64_t> at_;
};

}  // namespace dflash

#endif  // DFLASH_NATIVE_LIVE_ROWS_H_
