// What the native kernels share: vectors of the widest kind that the processor has, the arithmetic of
// XLA's threads, and loops that are split over these.

#ifndef DFLASH_NATIVE_COMMON_H_
#define DFLASH_NATIVE_COMMON_H_

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define DFLASH_AVX512 1
#else
#define DFLASH_AVX512 0
#endif

namespace dflash {

namespace ffi = xla::ffi;

// Rounds to nearest and treats denormal numbers as zero, as XLA's threads do, on whichever thread a
// part of a product runs.
class Arithmetic {
 public:
  Arithmetic() : saved_(_mm_getcsr()) {
    constexpr unsigned kRounding = 0x6000, kDenormalsAreZero = 0x8040;
    _mm_setcsr((saved_ & ~kRounding) | kDenormalsAreZero);
  }
  ~Arithmetic() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
};

// -- vectors of eight ---------------------------------------------------------------------------

inline float SumOf8(__m256 v) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  a = _mm_add_ss(a, _mm_movehdup_ps(a));
  return _mm_cvtss_f32(a);
}

// -- vectors ------------------------------------------------------------------------------------
// Of float32 numbers, the widest that the processor has.

constexpr float kLowest = -87.3f;  // exp of anything less is zero

#if DFLASH_AVX512
using Floats = __m512;
inline Floats Zeros() { return _mm512_setzero_ps(); }
inline Floats Load(const float* at) { return _mm512_loadu_ps(at); }
inline Floats MultiplyAdd(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
inline float Sum(Floats v) { return _mm512_reduce_add_ps(v); }
inline Floats All(float value) { return _mm512_set1_ps(value); }
inline void Store(float* at, Floats v) { _mm512_storeu_ps(at, v); }
inline void StorePastCaches(float* at, Floats v) { _mm512_stream_ps(at, v); }
inline Floats Maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline float Greatest(Floats v) { return _mm512_reduce_max_ps(v); }
// A bit for each lane whose numbers are equal.
inline unsigned Equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
// The numbers of `a` where those of `x` are negative, of `b` elsewhere.
inline Floats WhereNegative(Floats x, Floats a, Floats b) {
  return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x)), b, a);
}
inline Floats Exp(Floats x) {
  const Floats n = _mm512_roundscale_ps(_mm512_mul_ps(x, All(1.44269504f)), 0);
  Floats r = _mm512_fnmadd_ps(n, All(0.693145752f), x);  // the first 16 bits of ln 2, and the rest
  r = _mm512_fnmadd_ps(n, All(1.42860677e-6f), r);
  Floats sum = All(1.0f / 5040);
  for (const float inverse : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = MultiplyAdd(sum, r, All(inverse));
  const __mmask16 low = _mm512_cmp_ps_mask(x, All(kLowest), _CMP_LT_OQ);
  return _mm512_mask_blend_ps(low, _mm512_scalef_ps(sum, n), Zeros());
}
#else
using Floats = __m256;
inline Floats Zeros() { return _mm256_setzero_ps(); }
inline Floats Load(const float* at) { return _mm256_loadu_ps(at); }
inline Floats MultiplyAdd(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
inline float Sum(Floats v) { return SumOf8(v); }
inline Floats All(float value) { return _mm256_set1_ps(value); }
inline void Store(float* at, Floats v) { _mm256_storeu_ps(at, v); }
inline void StorePastCaches(float* at, Floats v) { _mm256_stream_ps(at, v); }
inline Floats Maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline float Greatest(Floats v) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
inline unsigned Equal(Floats a, Floats b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}
inline Floats WhereNegative(Floats x, Floats a, Floats b) { return _mm256_blendv_ps(b, a, x); }
inline Floats Exp(Floats x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const Floats n = _mm256_round_ps(_mm256_mul_ps(x, All(1.44269504f)), kNearest);
  Floats r = _mm256_fnmadd_ps(n, All(0.693145752f), x);
  r = _mm256_fnmadd_ps(n, All(1.42860677e-6f), r);
  Floats sum = All(1.0f / 5040);
  for (const float inverse : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = MultiplyAdd(sum, r, All(inverse));
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  sum = _mm256_mul_ps(sum, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  return _mm256_blendv_ps(sum, Zeros(), _mm256_cmp_ps(x, All(kLowest), _CMP_LT_OQ));
}
#endif
constexpr int64_t kLanes = sizeof(Floats) / sizeof(float);

// -- formats ---------------------------------------------------------------------------------------

// A vector of numbers as float32, from each format.
struct Float32 {
  using Stored = float;
  static Floats Read(const float* at) { return Load(at); }
};

struct BFloat16 {
  using Stored = uint16_t;
  static Floats Read(const uint16_t* at) {
#if DFLASH_AVX512
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#else
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#endif
  }
};

struct Float16 {
  using Stored = uint16_t;
  static Floats Read(const uint16_t* at) {
#if DFLASH_AVX512
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#else
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#endif
  }
};

struct Int8 {
  using Stored = int8_t;
  static Floats Read(const int8_t* at) {
#if DFLASH_AVX512
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
#else
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
#endif
  }
};

// -- threads ---------------------------------------------------------------------------------------

// Runs `work(begin, end)` over `count` items, `tile` at a time, on the threads of the runtime that
// are free. The caller takes part, and waits only for parts that have begun, so that a busy pool
// cannot block it.
template <typename Work>
void Split(ffi::ThreadPool pool, int64_t count, int64_t tile, bool serial, const Work& work) {
  const int64_t parts = (count + tile - 1) / tile;
  const int64_t helpers = serial ? 0 : std::min<int64_t>(pool.num_threads(), parts) - 1;
  if (helpers <= 0) {
    const Arithmetic arithmetic;
    return work(0, count);
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  const Work* task = &work;
  auto take = [shared, task, parts, count, tile] {
    const Arithmetic arithmetic;
    for (int64_t part; (part = shared->next.fetch_add(1)) < parts;) {
      (*task)(part * tile, std::min((part + 1) * tile, count));
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; i++) pool.Schedule(decltype(take)(take));
  take();
  while (shared->done.load(std::memory_order_acquire) < parts) std::this_thread::yield();
}

}  // namespace dflash

#endif  // DFLASH_NATIVE_COMMON_H_
