// Vectors of integers, and dot products of bytes in them.

#ifndef DFLASH_NATIVE_INTEGERS_H_
#define DFLASH_NATIVE_INTEGERS_H_

#include "common.h"

namespace dflash {

#if DFLASH_AVX512
using Ints = __m512i;  // int32 numbers, or bytes
inline Ints LoadBytes(const uint8_t* at) { return _mm512_loadu_si512(at); }
inline Ints AllInts(int32_t value) { return _mm512_set1_epi32(value); }
inline Ints AllBytes(int8_t value) { return _mm512_set1_epi8(value); }
inline Ints And(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints Or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints Add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints SubtractBytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
// The bytes of a table that bytes less than 16 name.
inline Ints LookUp(__m128i table, Ints v) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), v);
}
inline void StoreInts(void* at, Ints v) { _mm512_storeu_si512(at, v); }
inline Ints Max(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
template <int n>
Ints Left(Ints v) { return _mm512_slli_epi16(v, n); }
template <int n>
Ints Right(Ints v) { return _mm512_srli_epi16(v, n); }
inline int32_t Sum(Ints v) { return _mm512_reduce_add_epi32(v); }
inline int32_t Max(Ints v) { return _mm512_reduce_max_epi32(v); }
inline Floats ToFloats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Ints Rounded(Floats v) { return _mm512_cvtps_epi32(v); }
inline Ints Magnitude(Floats v) {  // its bits, which as integers have the order of |v|
  return And(_mm512_castps_si512(v), AllInts(0x7fffffff));
}
// A bit for each number of a that is greater than that of b.
inline unsigned Greater(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a, b); }
inline Ints Multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Ints ByteOf(Ints v, int n) {  // the n-th byte of each number
  return And(_mm512_srl_epi32(v, _mm_cvtsi32_si128(8 * n)), AllInts(255));
}
inline void StoreBytes(int8_t* at, Ints v) {  // numbers in -128..127
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(v));
}
// The bytes of four vectors of numbers in -128..127, in order.
inline Ints Bytes(Ints a, Ints b, Ints c, Ints d) {
  const Ints mixed = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
  return _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), mixed);
}
struct UInt8 {
  static Floats Read(const uint8_t* at) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes));
  }
};
inline Floats Multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats MultiplySubtract(Floats a, Floats b, Floats sum) { return _mm512_fnmadd_ps(a, b, sum); }
#else
using Ints = __m256i;  // int32 numbers, or bytes
inline Ints LoadBytes(const uint8_t* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}
inline Ints AllInts(int32_t value) { return _mm256_set1_epi32(value); }
inline Ints AllBytes(int8_t value) { return _mm256_set1_epi8(value); }
inline Ints And(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints Or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
inline Ints Add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints SubtractBytes(Ints a, Ints b) { return _mm256_sub_epi8(a, b); }
// The bytes of a table that bytes less than 16 name.
inline Ints LookUp(__m128i table, Ints v) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), v);
}
inline void StoreInts(void* at, Ints v) { _mm256_storeu_si256(static_cast<__m256i*>(at), v); }
inline Ints Max(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
template <int n>
Ints Left(Ints v) { return _mm256_slli_epi16(v, n); }
template <int n>
Ints Right(Ints v) { return _mm256_srli_epi16(v, n); }
inline int32_t Sum(Ints v) {
  __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1));
  return _mm_cvtsi128_si32(a);
}
inline int32_t Max(Ints v) {
  __m128i a = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0xb1));
  return _mm_cvtsi128_si32(a);
}
inline Floats ToFloats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Ints Rounded(Floats v) { return _mm256_cvtps_epi32(v); }
inline Ints Magnitude(Floats v) {  // its bits, which as integers have the order of |v|
  return And(_mm256_castps_si256(v), AllInts(0x7fffffff));
}
inline unsigned Greater(Ints a, Ints b) {
  return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b)));
}
inline Ints Multiply(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Ints ByteOf(Ints v, int n) {  // the n-th byte of each number
  return And(_mm256_srl_epi32(v, _mm_cvtsi32_si128(8 * n)), AllInts(255));
}
inline void StoreBytes(int8_t* at, Ints v) {  // numbers in -128..127
  const __m128i low = _mm256_castsi256_si128(v), high = _mm256_extracti128_si256(v, 1);
  const __m128i shorts = _mm_packs_epi32(low, high);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(at), _mm_packs_epi16(shorts, shorts));
}
// The bytes of four vectors of numbers in -128..127, in order.
inline Ints Bytes(Ints a, Ints b, Ints c, Ints d) {
  const Ints mixed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
struct UInt8 {
  static Floats Read(const uint8_t* at) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes));
  }
};
inline Floats Multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats MultiplySubtract(Floats a, Floats b, Floats sum) { return _mm256_fnmadd_ps(a, b, sum); }
#endif

// -- dot products of bytes ----------------------------------------------------------------------
// Dot adds products of unsigned codes w <= 128 and signed codes x, four to a lane. DotBytes does so
// for any byte w; it multiplies by w - 128 unless kUnsignedDot, as pairs of products must fit 16 bits.

#if DFLASH_AVX512 || defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
constexpr bool kUnsignedDot = true;
inline Ints Dot(Ints sum, Ints w, Ints x) {
#if DFLASH_AVX512 || defined(__AVX512VNNI__)
  // As assembly: with the compilers' functions, GCC copies each sum twice.
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  return sum;
#else
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#endif
}
inline Ints DotBytes(Ints sum, Ints w, Ints x) { return Dot(sum, w, x); }
Ints Pairs(Ints w, Ints x);  // of other processors only
Ints AddPairs(Ints a, Ints b);
Ints AddSumsOf(Ints pairs, Ints sum);
#else
constexpr bool kUnsignedDot = false;
// Sums of two products each, in 16 bits. The assembly keeps GCC from reordering the additions of a
// loop, for which it would keep all products on the stack.
inline Ints Pairs(Ints w, Ints x) { return _mm256_maddubs_epi16(w, x); }
inline Ints AddPairs(Ints a, Ints b) {
  a = _mm256_add_epi16(a, b);
  __asm__("" : "+x"(a));
  return a;
}
inline Ints AddSumsOf(Ints pairs, Ints sum) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  __asm__("" : "+x"(sum));
  return sum;
}
inline Ints Dot(Ints sum, Ints w, Ints x) { return AddSumsOf(Pairs(w, x), sum); }
inline Ints DotBytes(Ints sum, Ints w, Ints x) {
  const __m256i less = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  return Dot(sum, _mm256_abs_epi8(less), _mm256_sign_epi8(x, less));
}
#endif

// Four signed codes, repeated.
inline Ints Quad(const int8_t* at) {
  int32_t four;
  std::memcpy(&four, at, sizeof four);
  return AllInts(four);
}

}  // namespace dflash

#endif  // DFLASH_NATIVE_INTEGERS_H_
