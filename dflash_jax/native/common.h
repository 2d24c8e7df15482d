// What the native kernels share: vectors of the widest kind that the processor has, the arithmetic of
// XLA's threads, and loops that are split over these.

#ifndef DFLASH_NATIVE_COMMON_H_
#define DFLASH_NATIVE_COMMON_H_

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
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

inline int32_t SumOf8(__m256i v) {
  __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1));
  return _mm_cvtsi128_si32(a);
}

// Adds products of int8 numbers, four to a lane: |w| <= 128 and |x| <= 127.
inline __m256i Dot8(__m256i sum, __m256i w, __m256i x) {
  const __m256i magnitude = _mm256_abs_epi8(w), signed_x = _mm256_sign_epi8(x, w);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(sum, magnitude, signed_x);
#else
  const __m256i pairs = _mm256_maddubs_epi16(magnitude, signed_x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// -- vectors ------------------------------------------------------------------------------------
// The widest that the processor has: float32 numbers, and int32 sums of products of int8 numbers.

#if DFLASH_AVX512
using Floats = __m512;
using Ints = __m512i;
inline Floats Zeros() { return _mm512_setzero_ps(); }
inline Ints IntZeros() { return _mm512_setzero_si512(); }
inline Floats Load(const float* at) { return _mm512_loadu_ps(at); }
inline Ints LoadInts(const int8_t* at) { return _mm512_loadu_si512(at); }
inline Floats MultiplyAdd(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
inline float Sum(Floats v) { return _mm512_reduce_add_ps(v); }
inline int32_t Sum(Ints v) { return _mm512_reduce_add_epi32(v); }
// Weights are made unsigned by adding kShift; kShift times the sum of activations is taken off again.
constexpr int32_t kShift = 128;
inline Ints Prepared(Ints w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
inline Ints Dot(Ints sum, Ints w, Ints x) { return _mm512_dpbusd_epi32(sum, w, x); }
#else
using Floats = __m256;
using Ints = __m256i;
inline Floats Zeros() { return _mm256_setzero_ps(); }
inline Ints IntZeros() { return _mm256_setzero_si256(); }
inline Floats Load(const float* at) { return _mm256_loadu_ps(at); }
inline Ints LoadInts(const int8_t* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}
inline Floats MultiplyAdd(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
inline float Sum(Floats v) { return SumOf8(v); }
inline int32_t Sum(Ints v) { return SumOf8(v); }
constexpr int32_t kShift = 0;
inline Ints Prepared(Ints w) { return w; }
inline Ints Dot(Ints sum, Ints w, Ints x) { return Dot8(sum, w, x); }
#endif
constexpr int64_t kLanes = sizeof(Floats) / sizeof(float);
constexpr int64_t kCodes = sizeof(Ints);  // int8 numbers in a vector

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

// Runs `work(begin, end)` over `count` items, `tile` at a time, on the threads of the runtime that are free. The caller
// takes part, and waits only for parts that have begun, so that a busy pool cannot block it.
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
