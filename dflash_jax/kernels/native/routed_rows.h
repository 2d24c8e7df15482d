// Rows of activations that are multiplied with the weights of an expert each.

#ifndef DFLASH_NATIVE_ROUTED_ROWS_H_
#define DFLASH_NATIVE_ROUTED_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "live_rows.h"

namespace dflash {

// The live rows of an expert, in their order.
struct ExpertRows {
  int64_t expert;
  LiveRows rows;
};

class RoutedRows {
 public:
  // Sorts the live rows of x [M, K] by their experts, of which those that do not exist are clipped.
  RoutedRows(const float* x, const int32_t* expert, int64_t rows, int64_t depth, int64_t experts)
      : live_(x, rows, depth) {
    std::vector<std::vector<int64_t>> places(experts);
    for (int64_t i = 0; i < live_.count(); i++) {
      const int64_t row = live_.at(i);
      places[std::clamp<int64_t>(expert[row], 0, experts - 1)].push_back(row);
    }
    for (int64_t e = 0; e < experts; e++)
      if (!places[e].empty()) chosen_.push_back({e, LiveRows(live_, std::move(places[e]))});
  }

  const LiveRows& live() const { return live_; }
  // The experts that have live rows.
  int64_t count() const { return static_cast<int64_t>(chosen_.size()); }
  const ExpertRows& operator[](int64_t i) const { return chosen_[i]; }

 private:
  const LiveRows live_;
  std::vector<ExpertRows> chosen_;
};

}  // namespace dflash

#endif  // DFLASH_NATIVE_ROUTED_ROWS_H_
