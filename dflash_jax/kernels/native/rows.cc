// Norms, rotations, gates, caps, routers, largest numbers, filters and draws of rows, as XLA FFI handlers. A row has
// the same bits in any company, which XLA does not promise: it compiles a loop over one row otherwise than a loop over
// several.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "common.h"
#include "gates.h"
#include "live_rows.h"

namespace dflash {
namespace {

constexpr int64_t kRows = 4;            // rows that a thread takes at a time
constexpr int64_t kSerial = 1 << 17;    // calls with fewer numbers run on one thread
constexpr int64_t kSearched = 1 << 14;  // the same of filters and draws, whose numbers take longer

void NormaliseRow(const float* x, const float* w, int64_t width, float eps, float* out) {
  const int64_t whole = width / kLanes * kLanes;
  Floats squares = Zeros();
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats v = Load(x + i);
    squares = MultiplyAdd(v, v, squares);
  }
  float sum = Sum(squares);
  for (int64_t i = whole; i < width; i++) sum = std::fma(x[i], x[i], sum);
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale * w[i];
}

using Rows = ffi::Buffer<ffi::F32, 2>;

// Weights [W, D] apply to W rows, and again to the next W. Where it is told which rows are live, the others are
// not written; else they are zeros.
ffi::Error Norm(ffi::ThreadPool pool, Rows x, Live live, Rows w, ffi::Result<Rows> out, float eps) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1], kinds = w.dimensions()[0];
  if (w.dimensions()[1] != width || kinds < 1 || !Fits(live, rows))
    return ffi::Error::InvalidArgument("the weights of a norm do not fit its rows");
  const float *from = x.typed_data(), *weights = w.typed_data();
  float* to = out->typed_data();
  Split(pool, rows, kRows, rows * width < kSerial, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      if (IsLive(live, i, from, width))
        NormaliseRow(from + i * width, weights + i % kinds * width, width, eps, to + i * width);
      else if (!live.element_count())
        std::fill_n(to + i * width, width, 0.0f);
  });
  return ffi::Error::Success();
}

// Rotates pairs (m, m + H/2) of a vector by the angles of its row.
void RotateRow(float* __restrict x, const float* __restrict cos, const float* __restrict sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = std::fma(a, cos[i], -(b * sin[i]));
    x[i + half] = std::fma(b, cos[i], a * sin[i]);
  }
}

using Vectors = ffi::Buffer<ffi::F32, 3>;

// Normalises the first `count` of every `group` vectors of rows [M, N * H] by weights [W, H], which apply to W of
// these and again to the next W, and rotates their first A numbers by angles [M, A/2], in place. Without
// weights they are not normalised, without angles not rotated.
ffi::Error Heads(ffi::ThreadPool pool, Rows, Live live, Rows w, Rows cos, Rows sin, ffi::Result<Rows> x, float eps,
                 int32_t group, int32_t count) {
  const int64_t rows = x->dimensions()[0], width = w.dimensions()[1], half = cos.dimensions()[1];
  const int64_t kinds = w.dimensions()[0], heads = width > 0 ? x->dimensions()[1] / width : 0;
  const auto fits = [&](const Rows& angles) {
    return half == 0 || (angles.dimensions()[0] == rows && angles.dimensions()[1] == half);
  };
  if (half * 2 > width || !fits(cos) || !fits(sin) || group < 1 || heads % group ||
      heads * width != x->dimensions()[1] || !Fits(live, rows))
    return ffi::Error::InvalidArgument("the weights or angles of heads do not fit their vectors");
  const float *c = cos.typed_data(), *s = sin.typed_data(), *weights = w.typed_data();
  float* const all = x->typed_data();
  Split(pool, rows, kRows, rows * heads * width < kSerial, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      if (!IsLive(live, row, all, heads * width)) continue;
      for (int64_t head = 0; head < heads; head++) {
        float* const vector = all + (row * heads + head) * width;
        if (head % group >= count) continue;
        if (kinds) NormaliseRow(vector, weights + head % group % kinds * width, width, eps, vector);
        if (half) RotateRow(vector, c + row * half, s + row * half, half);
      }
    }
  });
  return ffi::Error::Success();
}

// Gate and up [M, 2, F] of M rows; those of dead tokens are zeros, and stay so.
ffi::Error Gate(ffi::ThreadPool pool, Vectors x, ffi::Result<Rows> out, bool gelu) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[2];
  if (x.dimensions()[1] != 2) return ffi::Error::InvalidArgument("expected a gate and a factor");
  const float* from = x.typed_data();
  float* to = out->typed_data();
  Split(pool, rows, kRows, rows * width < kSerial, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const float* gate = from + i * 2 * width;
      if (!AnyLive(gate, 2 * width))
        std::fill_n(to + i * width, width, 0.0f);
      else
        GateRow(gelu ? Activation::kGelu : Activation::kSilu, gate, width, to + i * width);
    }
  });
  return ffi::Error::Success();
}

// cap * tanh(x / cap).
ffi::Error Softcap(ffi::ThreadPool pool, Rows x, ffi::Result<Rows> out, float cap) {
  const int64_t count = static_cast<int64_t>(x.element_count()), vectors = (count + kLanes - 1) / kLanes;
  const float* from = x.typed_data();
  float* to = out->typed_data();
  const auto capped = [cap](const float* at) { return All(cap) * Tanh::Of(Load(at) / All(cap)); };
  Split(pool, vectors, 1024, count < kSerial, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kLanes; i < end * kLanes; i += kLanes) {
      if (i + kLanes <= count) {
        Store(to + i, capped(from + i));
        continue;
      }
      float last[kLanes] = {};
      std::copy_n(from + i, count - i, last);
      Store(last, capped(last));
      std::copy_n(last, count - i, to + i);
    }
  });
  return ffi::Error::Success();
}

// The experts of a token with the largest logits, of equal ones the first, and the softmax of these logits, over those
// of all experts or of the chosen ones.
void RouteRow(const float* logits, int64_t experts, int64_t count, bool chosen_only, int32_t* ids, float* shares) {
  std::vector<bool> taken(experts);
  for (int64_t i = 0; i < count; i++) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; e++)
      if (!taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
    taken[best] = true;
    ids[i] = static_cast<int32_t>(best);
    shares[i] = std::exp(logits[best] - logits[ids[0]]);
  }
  float sum = 0;
  if (chosen_only)
    for (int64_t i = 0; i < count; i++) sum += shares[i];
  else
    for (int64_t e = 0; e < experts; e++) sum += std::exp(logits[e] - logits[ids[0]]);
  for (int64_t i = 0; i < count; i++) shares[i] /= sum;
}

ffi::Error Route(ffi::ThreadPool pool, Rows logits, ffi::ResultBuffer<ffi::S32> ids, ffi::Result<Rows> shares,
                 bool chosen_only) {
  const int64_t rows = logits.dimensions()[0], experts = logits.dimensions()[1], count = shares->dimensions()[1];
  if (count > experts || shares->dimensions()[0] != rows || static_cast<int64_t>(ids->element_count()) != rows * count)
    return ffi::Error::InvalidArgument("more experts are to be chosen than there are");
  Split(pool, rows, kRows, rows * experts * count < kSerial, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      RouteRow(logits.typed_data() + i * experts, experts, count, chosen_only, ids->typed_data() + i * count,
               shares->typed_data() + i * count);
  });
  return ffi::Error::Success();
}

// The first of the largest numbers of a row, which has one, and whether all are finite. A row with NaN
// gets some index.
void LargestOf(const float* x, int64_t width, int32_t* index, bool* finite) {
  constexpr int kChains = 4;  // vectors at a time, so that none waits for the one before
  Floats top[kChains], rest[kChains];  // sums of numbers times zero: NaN unless all are finite
  for (int c = 0; c < kChains; c++) top[c] = All(x[0]), rest[c] = Zeros();
  const int64_t whole = width / kLanes * kLanes;
  int64_t i = 0;
  for (; i + kChains * kLanes <= whole; i += kChains * kLanes)
    for (int c = 0; c < kChains; c++) {
      const Floats v = Load(x + i + c * kLanes);
      top[c] = Maximum(v, top[c]);
      rest[c] = MultiplyAdd(v, Zeros(), rest[c]);
    }
  for (; i < whole; i += kLanes) {
    top[0] = Maximum(Load(x + i), top[0]);
    rest[0] = MultiplyAdd(Load(x + i), Zeros(), rest[0]);
  }
  for (int c = 1; c < kChains; c++) top[0] = Maximum(top[0], top[c]), rest[0] += rest[c];
  float largest = Greatest(top[0]), zero = Sum(rest[0]);
  for (; i < width; i++) largest = std::max(largest, x[i]), zero += x[i] * 0.0f;
  *finite = zero == 0.0f;
  for (i = 0; i < whole; i += kLanes)
    if (const unsigned equal = Equal(Load(x + i), All(largest))) {
      *index = static_cast<int32_t>(i + __builtin_ctz(equal));
      return;
    }
  while (i < width - 1 && x[i] != largest) i++;
  *index = static_cast<int32_t>(std::min(i, width - 1));
}

using Flags = ffi::Buffer<ffi::PRED, 1>;

// Rows that are not live are taken to be zeros, and not read.
ffi::Error Largest(ffi::ThreadPool pool, Rows x, Flags live,
                   ffi::ResultBuffer<ffi::S32> index, ffi::ResultBuffer<ffi::PRED> finite) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  if (width < 1 || live.dimensions()[0] != rows)
    return ffi::Error::InvalidArgument("rows without numbers have no largest");
  const bool* counts = live.typed_data();
  const float* from = x.typed_data();
  int32_t* to = index->typed_data();
  bool* good = finite->typed_data();
  Split(pool, rows, 1, rows * width < kSerial, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      if (counts[i])
        LargestOf(from + i * width, width, to + i, good + i);
      else
        to[i] = 0, good[i] = true;
  });
  return ffi::Error::Success();
}

// Two random words of a counter and a key: Threefry-2x32 with 20 rounds (Salmon and others, 2011, "Parallel
// random numbers: as easy as 1, 2, 3").
inline void Threefry(const uint32_t (&key)[2], uint32_t& a, uint32_t& b) {
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
  a += keys[0], b += keys[1];
  for (uint32_t i = 0; i < 5; i++) {
    for (const int turn : kTurns[i % 2]) {
      a += b;
      b = (b << turn | b >> (32 - turn)) ^ a;
    }
    a += keys[(i + 1) % 3], b += keys[(i + 2) % 3] + i + 1;
  }
}

// The Gumbel noise of a number `of`, at each of its places.
float Gumbel(const uint32_t (&key)[2], uint32_t of, int64_t place) {
  uint32_t word = of, other = static_cast<uint32_t>(place);
  Threefry(key, word, other);
  const float uniform = (static_cast<float>(word >> 8) + 0.5f) * 0x1p-24f;  // in (0, 1)
  return -std::log(-std::log(uniform));
}

constexpr int64_t kChunk = 128;  // numbers that are drawn together first
constexpr float kLeast = -std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

// The last number that a row keeps: larger ones are kept, too, and equal ones up to its index.
struct Cut {
  float value = kLeast;
  int32_t index = std::numeric_limits<int32_t>::max();

  bool Keeps(float number, int64_t i) const {
    return number > value || (number == value && i <= index);
  }
};

// The logits of a row over its temperature. A tiny one would make some infinite.
struct Scaled {
  const float* from;
  int64_t width;
  float temperature;

  float operator[](int64_t i) const { return std::min(from[i] / temperature, kLargest); }

  // A chunk of numbers, kLeast for those that are not kept, and past the end.
  void Chunk(int64_t first, const Cut& cut, float (&to)[kChunk]) const {
    const int32_t count = static_cast<int32_t>(std::min(width - first, kChunk));
    const int32_t last = static_cast<int32_t>(std::min<int64_t>(cut.index - first, kChunk));
    for (int32_t i = 0; i < count; i++) {
      const float number = std::min(from[first + i] / temperature, kLargest);
      to[i] = (number > cut.value) | ((number == cut.value) & (i <= last)) ? number : kLeast;
    }
    std::fill(to + count, to + kChunk, kLeast);
  }

  // Whether there is a number, and none is NaN or too large.
  bool Sound(float largest) const {
    float zero = 0;
    for (int64_t i = 0; i < width; i++) zero += from[i] == kLeast ? 0.0f : from[i] * 0.0f;
    return largest > kLeast && zero == 0.0f;
  }
};

// The logarithm of the sum of exp(x), and kLeast if there is none above kLeast.
float LogSum(const float* x) {
  Floats top = Load(x);
  for (int64_t i = kLanes; i < kChunk; i += kLanes) top = Maximum(Load(x + i), top);
  const float most = Greatest(top);
  if (!(most > kLeast)) return kLeast;
  Floats sum = Zeros();
  for (int64_t i = 0; i < kChunk; i += kLanes) sum += Exp(Load(x + i) - All(most));
  return most + std::log(Sum(sum));
}

// A sum of exp(x - most).
float Mass(const float (&x)[kChunk], float most) {
  Floats sum = Zeros();
  for (int64_t i = 0; i < kChunk; i += kLanes) sum += Exp(Load(x + i) - All(most));
  return Sum(sum);
}

struct Filters {
  int32_t top_k;      // largest numbers; 0 keeps all
  float top_p;        // part of the mass; 1 keeps all
  float min_p;        // of the mass of the largest number
};

// Numbers and their indices.
using Listed = std::vector<std::pair<float, int32_t>>;

inline bool Before(const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}

// Returns the numbers that a cut keeps, from `low` on.
Listed NumbersFrom(float low, const Scaled& x, const Cut& cut) {
  Listed found;
  float part[kChunk];
  for (int64_t first = 0; first < x.width; first += kChunk) {
    x.Chunk(first, cut, part);
    Floats most = Load(part);
    for (int64_t i = kLanes; i < kChunk; i += kLanes) most = Maximum(Load(part + i), most);
    if (Greatest(most) < low) continue;
    for (int64_t i = 0; i < kChunk; i++)
      if (part[i] >= low && part[i] > kLeast) found.emplace_back(part[i], static_cast<int32_t>(first + i));
  }
  return found;
}

// Returns a number that at least `count` numbers reach: the count-th largest of the maxima of groups.
// kLeast if there are too few groups.
float ReachedBy(int64_t count, const Scaled& x) {
  constexpr int64_t kFew = 16;  // numbers of a small group
  const int64_t group = x.width / kChunk >= count ? kChunk : kFew;
  std::vector<float> largest;
  for (int64_t first = 0; first + group <= x.width; first += group)
    largest.push_back(*std::max_element(x.from + first, x.from + first + group));
  if (static_cast<int64_t>(largest.size()) < count) return kLeast;
  std::nth_element(largest.begin(), largest.begin() + (count - 1), largest.end(), std::greater<float>());
  return std::min(largest[count - 1] / x.temperature, kLargest);
}

// Returns the last of the largest numbers whose mass reaches a budget, or false if all do not.
bool WithinMass(Listed& numbers, float largest, double budget, Cut* cut) {
  constexpr size_t kFirst = 64, kGrowth = 4;  // numbers that are sorted, more while those are too few
  double through = 0;
  size_t begin = 0;
  for (size_t sorted = kFirst; begin < numbers.size(); sorted *= kGrowth) {
    const size_t end = std::min(sorted, numbers.size());
    std::partial_sort(numbers.begin() + begin, numbers.begin() + end, numbers.end(), Before);
    for (; begin < end; begin++) {
      through += std::exp(numbers[begin].first - largest);
      if (through < budget) continue;
      *cut = {numbers[begin].first, numbers[begin].second};
      return true;
    }
  }
  return false;
}

// Finds what top-k and min-p keep, and of that the largest numbers whose mass reaches top_p, as
// graph/steps/filters.py does. Only the largest numbers are listed, more of them if those are not
// enough. A row whose numbers are not finite keeps all.
Cut LastKept(const Scaled& x, const Filters& filters) {
  constexpr float kNegligible = 104;  // exp is zero this far below the largest number
  constexpr float kDepths[] = {6, 12, 24, kNegligible};
  int32_t best;
  bool finite;
  LargestOf(x.from, x.width, &best, &finite);
  const float largest = x[best];
  Cut cut;
  if (!finite && !x.Sound(largest)) return cut;
  if (filters.min_p > 0) cut.value = largest + std::log(filters.min_p);
  const float least = std::max(cut.value, largest - kNegligible);
  const double part = filters.top_p, smallest = std::numeric_limits<float>::min();
  if (filters.top_k > 0 && filters.top_k < x.width) {
    const size_t count = static_cast<size_t>(filters.top_k);
    Listed kept = NumbersFrom(std::max(ReachedBy(filters.top_k, x), least), x, cut);
    if (kept.size() >= count) {
      std::nth_element(kept.begin(), kept.begin() + (count - 1), kept.end(), Before);
      kept.resize(count);
      cut = {kept.back().first, kept.back().second};
    }
    if (part >= 1) return cut;
    double total = 0;
    for (const auto& [number, index] : kept) total += std::exp(number - largest);
    WithinMass(kept, largest, std::max(part * total, smallest), &cut);
    return cut;
  }
  if (part >= 1) return cut;
  double total = 0;  // mass of what is kept
  float chunk[kChunk];
  for (int64_t first = 0; first < x.width; first += kChunk) {
    x.Chunk(first, cut, chunk);
    total += Mass(chunk, largest);
  }
  const double budget = std::max(part * total, smallest);
  for (const float depth : kDepths) {
    const float low = std::max(largest - depth, least);
    Listed found = NumbersFrom(low, x, cut);
    if (WithinMass(found, largest, budget, &cut) || low == least) return cut;
  }
  return cut;
}

// Draws from softmax(x): a chunk by the mass of its numbers, then a number of it, each by its largest sum
// of logarithm and noise. So little noise is made.
int32_t DrawFrom(const Scaled& x, const Cut& cut, const uint32_t (&key)[2]) {
  const int64_t width = x.width;
  float part[kChunk];
  const auto best_of = [&](uint32_t of, int64_t count, const auto& value) {
    int64_t best = 0;
    float most = kLeast;
    for (int64_t i = 0; i < count; i++) {
      const float found = value(i);
      if (!(found > kLeast)) continue;  // also where it is NaN
      if (const float noisy = found + Gumbel(key, of, i); noisy > most) most = noisy, best = i;
    }
    return best;
  };
  const int64_t chunks = (width + kChunk - 1) / kChunk;
  const int64_t drawn = best_of(0, chunks, [&](int64_t c) {
    x.Chunk(c * kChunk, cut, part);
    return LogSum(part);
  });
  x.Chunk(drawn * kChunk, cut, part);
  const int64_t place = best_of(1 + static_cast<uint32_t>(drawn), kChunk, [&](int64_t i) { return part[i]; });
  return static_cast<int32_t>(std::min(drawn * kChunk + place, width - 1));
}

using Keys = ffi::Buffer<ffi::U32, 2>;
using Numbers = ffi::Buffer<ffi::F32, 1>;
using Counts = ffi::Buffer<ffi::S32, 1>;

template <typename... Buffers>
bool HaveRows(int64_t rows, const Buffers&... buffers) {
  return ((buffers.dimensions()[0] == rows) && ...);
}

// Rows that are not live keep all, and are not read.
ffi::Error Filter(ffi::ThreadPool pool, Rows x, Flags live, Numbers temperature, Counts top_k, Numbers top_p,
                  Numbers min_p, ffi::ResultBuffer<ffi::F32> value, ffi::ResultBuffer<ffi::S32> index) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  if (width < 1 || !HaveRows(rows, live, temperature, top_k, top_p, min_p))
    return ffi::Error::InvalidArgument("the filters do not fit their rows");
  Split(pool, rows, 1, rows * width < kSearched, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Filters filters{top_k.typed_data()[i], top_p.typed_data()[i], min_p.typed_data()[i]};
      const Scaled row{x.typed_data() + i * width, width, temperature.typed_data()[i]};
      const Cut cut = live.typed_data()[i] ? LastKept(row, filters) : Cut();
      value->typed_data()[i] = cut.value;
      index->typed_data()[i] = cut.index;
    }
  });
  return ffi::Error::Success();
}

// Rows that are not live get 0, and are not read.
ffi::Error Draw(ffi::ThreadPool pool, Rows x, Keys keys, Flags live, Numbers temperature, Numbers value,
                Counts last, ffi::ResultBuffer<ffi::S32> index) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  if (width < 1 || !HaveRows(rows, keys, live, temperature, value, last) || keys.dimensions()[1] != 2)
    return ffi::Error::InvalidArgument("the keys of a draw do not fit its rows");
  const uint32_t* key = keys.typed_data();
  int32_t* to = index->typed_data();
  constexpr int64_t kNoise = 4096;  // numbers that take as long as the noise of a row
  Split(pool, rows, 1, rows * (width + kNoise) < kSerial, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Scaled row{x.typed_data() + i * width, width, temperature.typed_data()[i]};
      const Cut cut{value.typed_data()[i], last.typed_data()[i]};
      to[i] = live.typed_data()[i] ? DrawFrom(row, cut, {key[2 * i], key[2 * i + 1]}) : 0;
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dflash

using namespace dflash;

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_draw, Draw,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Rows>()
                                  .Arg<Keys>()
                                  .Arg<Flags>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Counts>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_filter, Filter,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Rows>()
                                  .Arg<Flags>()
                                  .Arg<Numbers>()
                                  .Arg<Counts>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_gate, Gate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Vectors>()
                                  .Ret<Rows>()
                                  .Attr<bool>("gelu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_softcap, Softcap,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Rows>().Ret<Rows>().Attr<float>("cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_route, Route,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Rows>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<Rows>()
                                  .Attr<bool>("chosen_only"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_largest, Largest,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Rows>()
                                  .Arg<Flags>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::PRED>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_norm, Norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Rows>()
                                  .Arg<Live>()
                                  .Arg<Rows>()
                                  .Ret<Rows>()
                                  .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_heads, Heads,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Rows>()
                                  .Arg<Live>()
                                  .Arg<Rows>()
                                  .Arg<Rows>()
                                  .Arg<Rows>()
                                  .Ret<Rows>()
                                  .Attr<float>("eps")
                                  .Attr<int32_t>("group")
                                  .Attr<int32_t>("count"));
