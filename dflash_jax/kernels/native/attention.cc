// Attention of queries [B, T, K, N, H], the first G of N, to keys and values [B, K, S, H] in several formats, as an XLA
// FFI handler: softmax(scale q · k) · v over the slots that each query sees.
//
// A query's result depends neither on the other queries of a call nor on slots that it does not see:
// dot products and sums are computed in one order, that of the slots, and slots that only other
// queries see add zeros. Results of queries that see no slot are zeros, unless it is
// told that they do not count: those are not written.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "common.h"
#include "live_rows.h"

namespace dflash {
namespace {

constexpr int kQueries = DFLASH_AVX512 ? 8 : 4;  // that share the keys and values of a tile
constexpr int kQuad = 4;                 // of these, queries whose sums fit the registers
constexpr int64_t kBlock = 32;           // slots whose values stay in the nearest cache for a tile
constexpr int kSlots = 4;                // slots whose dot products are computed together
constexpr int64_t kSerial = 1 << 17;     // calls with fewer multiplications run on one thread
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// -- vectors ------------------------------------------------------------------------------------

// The sums of four vectors.
inline __m128 SumsOf4(const Floats (&v)[kSlots]) {
#if DFLASH_AVX512
  const Floats first = _mm512_unpacklo_ps(v[0], v[1]) + _mm512_unpackhi_ps(v[0], v[1]);
  const Floats second = _mm512_unpacklo_ps(v[2], v[3]) + _mm512_unpackhi_ps(v[2], v[3]);
  const __m512d a = _mm512_castps_pd(first), b = _mm512_castps_pd(second);
  const Floats quads = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) +
                       _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  const __m256 half = _mm512_castps512_ps256(quads) + _mm512_extractf32x8_ps(quads, 1);
#else
  const Floats first = _mm256_unpacklo_ps(v[0], v[1]) + _mm256_unpackhi_ps(v[0], v[1]);
  const Floats second = _mm256_unpacklo_ps(v[2], v[3]) + _mm256_unpackhi_ps(v[2], v[3]);
  const __m256d a = _mm256_castps_pd(first), b = _mm256_castps_pd(second);
  const __m256 half = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)) +
                      _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
#endif
  return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}

#if DFLASH_AVX512
// The numbers where `seen` is true, `other` elsewhere.
inline Floats Where(const uint8_t* seen, Floats v, Floats other) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(seen));
  return _mm512_mask_blend_ps(_mm_test_epi8_mask(bytes, bytes), other, v);
}
#else
inline Floats Where(const uint8_t* seen, Floats v, Floats other) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(seen));
  const __m256i kept = _mm256_cmpgt_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_setzero_si256());
  return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(kept));
}
#endif

// Reads the last numbers of a row, fewer than a vector has; the others are zero.
template <typename Format>
Floats Part(const typename Format::Stored* at, int64_t count) {
  typename Format::Stored part[kLanes] = {};
  std::copy_n(at, count, part);
  return Format::Read(part);
}

// Reads a vector of scales, or the last ones.
inline Floats Scales(const float* at, int64_t count) {
  return count < kLanes ? Part<Float32>(at, count) : Load(at);
}

// -- the shapes of a call -----------------------------------------------------------------------

struct Range {
  int64_t begin, end;
};

template <typename Format>
struct Call {
  using Stored = typename Format::Stored;
  const float* q;
  const Stored *k, *v;
  const uint8_t* seen;                  // [B, T, S]
  const float *k_scale, *v_scale;       // [B, K, S], or null
  const float* sinks;                   // [K, G], or null
  const bool* counts;                   // [B, T], whether a query counts, or null
  float* out;                           // [B, T, K, G, H]
  float scale;
  int64_t batch, tokens, heads, groups, width, slots;
  int64_t pitch;  // of the queries of two heads, in vectors
  std::vector<Range> live = {};         // [B, T]: from the first slot that a query sees to the last
  std::vector<std::vector<int64_t>> seeing = {};  // of each row, the tokens that see any
};

// Queries of a row and a head, in the order of the tokens that see any slot, and of groups.
struct Queries {
  int64_t b, head, first, count;
};

// Returns the range of the bytes that are not zero, beginning at a multiple of the lanes; {0, 0} if all
// are zero.
Range NotZero(const uint8_t* bytes, int64_t count) {
  auto empty = [bytes](int64_t at) {
    uint64_t word;
    std::memcpy(&word, bytes + at, 8);
    return word == 0;
  };
  int64_t begin = 0, end = count;
  while (begin + 8 <= count && empty(begin)) begin += 8;
  while (begin < count && !bytes[begin]) begin++;
  while (end - 8 >= begin && empty(end - 8)) end -= 8;
  while (end > begin && !bytes[end - 1]) end--;
  if (begin == end) return {0, 0};
  return {begin / kLanes * kLanes, end};
}

// -- one tile of queries ------------------------------------------------------------------------

template <typename Format, int R>
class Tile {
  using Stored = typename Format::Stored;

 public:
  Tile(const Call<Format>& call, const Queries& queries, float* scores)
      : call_(call), b_(queries.b), head_(queries.head), range_{call.slots, 0}, scores_(scores),
        pitch_((call.slots + kLanes - 1) / kLanes * kLanes) {
    const int64_t b = b_, head = head_;
    for (int r = 0; r < R; r++) {
      const int64_t i = queries.first + r, g = i % call.groups;
      const int64_t t = call.seeing[b][i / call.groups];
      const int64_t of_head = (b * call.tokens + t) * call.heads + head;
      q_[r] = call.q + (of_head * call.pitch + g) * call.width;
      out_[r] = call.out + (of_head * call.groups + g) * call.width;
      seen_[r] = call.seen + (b * call.tokens + t) * call.slots;
      sink_[r] = call.sinks ? call.sinks[head * call.groups + g] : -kInfinity;
      const Range live = call.live[b * call.tokens + t];
      range_ = {std::min(range_.begin, live.begin), std::max(range_.end, live.end)};
    }
  }

  void Attend() {
    for (int64_t s = range_.begin; s < range_.end; s += kLanes) Score(s);
    for (int r = 0; r < R; r++) Normalise(r);
    const int64_t wide = 4 * kLanes;
    int64_t h = 0;
    for (; h + wide <= call_.width; h += wide) {
      int64_t s = range_.begin;
      do {
        const int64_t until = kRest ? std::min(s + kBlock, range_.end) : range_.end;
        Sums<4>(h, {s, until});
        s = until;
      } while (s < range_.end);
    }
    for (; h < call_.width; h += kLanes) Sums<1>(h, range_, std::min(kLanes, call_.width - h));
  }

 private:
  static constexpr int kFirst = std::min(R, kQuad), kRest = R - kFirst;

  const Stored* Row(const Stored* all, int64_t slot) const {
    return all + ((b_ * call_.heads + head_) * call_.slots + slot) * call_.width;
  }

  float* scores(int r, int64_t slot) const { return scores_ + r * pitch_ + slot; }

  // Writes the scaled scores of the slots of one vector, minus infinity where they are not seen.
  void Score(int64_t s) {
    alignas(64) float dots[R][kLanes];
    for (int64_t i = 0; i < kLanes; i += kSlots) {
      Dots<0, kFirst>(s + i, dots, i);
      if constexpr (kRest > 0) Dots<kFirst, kRest>(s + i, dots, i);
    }
    const int64_t count = std::min(kLanes, call_.slots - s);
    for (int r = 0; r < R; r++) {
      Floats score = Load(dots[r]) * All(call_.scale);
      if (call_.k_scale) {
        const float* scale = call_.k_scale + (b_ * call_.heads + head_) * call_.slots + s;
        score *= Scales(scale, count);
      }
      alignas(64) uint8_t seen[kLanes] = {};
      const uint8_t* bytes = seen_[r] + s;
      if (count < kLanes) bytes = std::copy_n(bytes, count, seen) - count;
      Store(scores(r, s), Where(bytes, score, All(-kInfinity)));
    }
  }

  // Writes the dot products of Q queries with some slots.
  template <int first, int Q>
  void Dots(int64_t s, float (&dots)[R][kLanes], int64_t at) const {
    Floats sums[Q][kSlots];
    for (auto& line : sums)
      for (auto& sum : line) sum = Zeros();
    const Stored* keys[kSlots];
    for (int i = 0; i < kSlots; i++) keys[i] = Row(call_.k, std::min(s + i, call_.slots - 1));
    const int64_t whole = call_.width / kLanes * kLanes;
    for (int64_t h = 0; h < whole; h += kLanes) {
      Floats key[kSlots];
      for (int i = 0; i < kSlots; i++) key[i] = Format::Read(keys[i] + h);
      for (int r = 0; r < Q; r++) {
        const Floats query = Load(q_[first + r] + h);
        for (int i = 0; i < kSlots; i++) sums[r][i] = MultiplyAdd(query, key[i], sums[r][i]);
      }
    }
    if (whole < call_.width) {
      const int64_t count = call_.width - whole;
      for (int r = 0; r < Q; r++) {
        const Floats query = Part<Float32>(q_[first + r] + whole, count);
        for (int i = 0; i < kSlots; i++)
          sums[r][i] = MultiplyAdd(query, Part<Format>(keys[i] + whole, count), sums[r][i]);
      }
    }
    for (int r = 0; r < Q; r++) _mm_storeu_ps(dots[first + r] + at, SumsOf4(sums[r]));
  }

  // Makes scores exp(score - greatest), and keeps the inverse of their sum.
  void Normalise(int r) {
    Floats greatest = All(sink_[r]);
    for (int64_t s = range_.begin; s < range_.end; s += kLanes)
      greatest = Maximum(greatest, Load(scores(r, s)));
    const float top = Greatest(greatest);
    Floats total = Zeros();
    for (int64_t s = range_.begin; s < range_.end; s += kLanes) {
      const Floats e = Exp(Load(scores(r, s)) - All(top));
      total += e;
      Store(scores(r, s), e);
      if (call_.v_scale) {
        const float* scale = call_.v_scale + (b_ * call_.heads + head_) * call_.slots + s;
        Store(scores(r, s), e * Scales(scale, call_.slots - s));
      }
    }
    alignas(64) float sink[kLanes];
    Store(sink, Exp(All(sink_[r] - top)));
    inverse_[r] = 1.0f / (dflash::Sum(total) + sink[0]);
  }

  // Adds the values of some slots to C vectors of the weighted sums; the only one of them may have
  // `count` numbers.
  template <int C>
  void Sums(int64_t h, Range slots, int64_t count = kLanes) const {
    SumsOf<0, kFirst, C>(h, slots, count);
    if constexpr (kRest > 0) SumsOf<kFirst, kRest, C>(h, slots, count);
  }

  template <int first, int Q, int C>
  void SumsOf(int64_t h, Range slots, int64_t count) const {
    Floats sums[Q][C];
    for (int r = 0; r < Q; r++)
      for (int c = 0; c < C; c++)
        sums[r][c] =
            slots.begin == range_.begin ? Zeros() : Load(out_[first + r] + h + c * kLanes);
    for (int64_t s = slots.begin; s < slots.end; s++) {
      const Stored* row = Row(call_.v, s) + h;
      Floats value[C];
      if (C == 1 && count < kLanes) {
        value[0] = Part<Format>(row, count);
      } else {
        for (int c = 0; c < C; c++) value[c] = Format::Read(row + c * kLanes);
      }
      for (int r = 0; r < Q; r++) {
        const Floats weight = All(*scores(first + r, s));
        for (int c = 0; c < C; c++) sums[r][c] = MultiplyAdd(weight, value[c], sums[r][c]);
      }
    }
    for (int r = 0; r < Q; r++)
      for (int c = 0; c < C; c++) {
        Floats result = sums[r][c];
        if (slots.end == range_.end) result *= All(inverse_[first + r]);
        float* to = out_[first + r] + h + c * kLanes;
        if (count == kLanes) {
          Store(to, result);
          continue;
        }
        alignas(64) float part[kLanes];
        Store(part, result);
        std::copy_n(part, count, to);
      }
  }

  const Call<Format>& call_;
  const int64_t b_, head_;
  Range range_;
  float* const scores_;
  const int64_t pitch_;
  const float* q_[R];
  float* out_[R];
  const uint8_t* seen_[R];
  float sink_[R], inverse_[R];
};

template <typename Format, int R = kQueries>
void AttendTile(const Call<Format>& call, const Queries& queries, float* scores) {
  if constexpr (R > 1) {
    if (queries.count < R) return AttendTile<Format, R - 1>(call, queries, scores);
  }
  Tile<Format, R>(call, queries, scores).Attend();
}

template <typename Format>
void Run(ffi::ThreadPool pool, Call<Format>& call) {
  const int64_t size = call.heads * call.groups * call.width;  // of a token's results
  int64_t seen = 0;
  std::vector<Queries> tiles;
  call.seeing.resize(call.batch);
  for (int64_t b = 0; b < call.batch; b++) {
    for (int64_t t = 0; t < call.tokens; t++) {
      const int64_t at = b * call.tokens + t;
      const bool dead = call.counts && !call.counts[at];
      const Range live = dead ? Range{0, 0} : NotZero(call.seen + at * call.slots, call.slots);
      call.live.push_back(live);
      seen += live.end - live.begin;
      if (live.end)
        call.seeing[b].push_back(t);
      else if (!dead)
        std::fill_n(call.out + at * size, size, 0.0f);
    }
    const int64_t queries = static_cast<int64_t>(call.seeing[b].size()) * call.groups;
    for (int64_t head = 0; head < call.heads; head++)
      for (int64_t first = 0; first < queries; first += kQueries)
        tiles.push_back({b, head, first, std::min<int64_t>(queries - first, kQueries)});
  }
  Split(pool, tiles.size(), 1, 2 * seen * size < kSerial, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(kQueries * ((call.slots + kLanes - 1) / kLanes * kLanes));
    for (int64_t i = begin; i < end; i++) AttendTile<Format>(call, tiles[i], scores.data());
  });
}

// -- the handler --------------------------------------------------------------------------------

using Heads = ffi::Buffer<ffi::F32, 5>;
using Mask = ffi::Buffer<ffi::PRED, 3>;

ffi::Error Attend(ffi::ThreadPool pool, Heads q, ffi::AnyBuffer k, ffi::AnyBuffer v, Mask seen,
                  ffi::Buffer<ffi::F32> k_scale, ffi::Buffer<ffi::F32> v_scale,
                  ffi::Buffer<ffi::F32> sinks, Live live, ffi::ResultBuffer<ffi::F32> out, float scale, int32_t groups) {
  const auto queries = q.dimensions(), keys = k.dimensions(), values = v.dimensions();
  const auto mask = seen.dimensions();
  const auto holds = [](const ffi::Buffer<ffi::F32>& buffer, int64_t count) {
    const auto size = static_cast<int64_t>(buffer.element_count());
    return size == 0 || size == count;  // these are optional
  };
  if (keys.size() != 4 || values.size() != 4 || k.element_type() != v.element_type() ||
      !std::equal(keys.begin(), keys.end(), values.begin()) || keys[0] != queries[0] ||
      keys[1] != queries[2] || keys[3] != queries[4] || mask[0] != queries[0] ||
      mask[1] != queries[1] || mask[2] != keys[2] || !holds(sinks, queries[2] * groups) || !Fits(live, queries[0] * queries[1]) || groups > queries[3] ||
      !holds(k_scale, keys[0] * keys[1] * keys[2]) || !holds(v_scale, keys[0] * keys[1] * keys[2]))
    return ffi::Error::InvalidArgument("the shapes of queries, keys, values and mask do not fit");
  auto optional = [](const ffi::Buffer<ffi::F32>& buffer) {
    return buffer.element_count() ? buffer.typed_data() : nullptr;
  };
  auto run = [&](auto format) {
    using Format = decltype(format);
    using Stored = typename Format::Stored;
    Call<Format> call{q.typed_data(), static_cast<const Stored*>(k.untyped_data()),
                      static_cast<const Stored*>(v.untyped_data()),
                      reinterpret_cast<const uint8_t*>(seen.typed_data()), optional(k_scale),
                      optional(v_scale), optional(sinks), live.element_count() ? live.typed_data() : nullptr, out->typed_data(), scale, queries[0],
                      queries[1], queries[2], groups, queries[4], keys[2], queries[3]};
    Run(pool, call);
    return ffi::Error::Success();
  };
  switch (k.element_type()) {
    case ffi::F32: return run(Float32{});
    case ffi::BF16: return run(BFloat16{});
    case ffi::F16: return run(Float16{});
    case ffi::S8: return run(Int8{});
    default: return ffi::Error::InvalidArgument("keys must be floats or int8");
  }
}

}  // namespace
}  // namespace dflash

using namespace dflash;

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_attend, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Heads>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Mask>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<Live>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("groups"));
