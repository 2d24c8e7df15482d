// Gates of MLPs: activations of a gate, times what follows it; and the tanh of caps of logits.

#ifndef DFLASH_NATIVE_GATES_H_
#define DFLASH_NATIVE_GATES_H_

#include <algorithm>
#include <cstdint>

#include "common.h"

namespace dflash {

// x / (1 + exp(-y)), by a power that is at most 1.
inline Floats TimesSigmoid(Floats x, Floats y) {
  const Floats e = Exp(Zeros() - Maximum(y, Zeros() - y));
  return x * WhereNegative(y, e, All(1.0f)) / (All(1.0f) + e);
}

struct Silu {
  static Floats Of(Floats x) { return TimesSigmoid(x, x); }
};

// The tanh approximation of GELU: (1 + tanh(y)) / 2 is the sigmoid of 2 y.
struct Gelu {
  static Floats Of(Floats x) {
    const Floats cube = x * x * x;
    return TimesSigmoid(x, All(2 * 0.7978845608f) * MultiplyAdd(cube, All(0.044715f), x));
  }
};

// (1 - e) / (1 + e) with e = exp(-2 |x|), which cancels where |x| is small: there, the series.
struct Tanh {
  static Floats Of(Floats x) {
    constexpr float kSmall = 0.35f;  // the first term left out is less than a rounding
    const Floats size = Maximum(x, Zeros() - x), square = x * x;
    const Floats e = Exp(Zeros() - (size + size));
    Floats series = All(-1382.0f / 155925);
    for (const float term : {62.0f / 2835, -17.0f / 315, 2.0f / 15, -1.0f / 3})
      series = MultiplyAdd(series, square, All(term));
    series = MultiplyAdd(series * square, size, size);
    const Floats result = WhereNegative(size - All(kSmall), series, (All(1.0f) - e) / (All(1.0f) + e));
    return WhereNegative(x, Zeros() - result, result);
  }
};

// activation(gate) times up, which follows gate.
template <typename Kind>
void GateRowBy(const float* gate, int64_t width, float* out) {
  const float* up = gate + width;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    Store(out + i, Kind::Of(Load(gate + i)) * Load(up + i));
  if (i == width) return;
  float last[2][kLanes] = {};
  std::copy_n(gate + i, width - i, last[0]);
  std::copy_n(up + i, width - i, last[1]);
  Store(last[0], Kind::Of(Load(last[0])) * Load(last[1]));
  std::copy_n(last[0], width - i, out + i);
}

enum class Activation : int32_t { kNone, kSilu, kGelu };

// As above, for one row.
inline void GateRow(Activation activation, const float* gate, int64_t width, float* out) {
  if (activation == Activation::kGelu) return GateRowBy<Gelu>(gate, width, out);
  GateRowBy<Silu>(gate, width, out);
}

}  // namespace dflash

#endif  // DFLASH_NATIVE_GATES_H_
