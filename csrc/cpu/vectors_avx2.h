// Eight 32-bit lanes: what GCC's vector extensions do not express in AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../codec.h"

namespace gact::cpu {
namespace {

struct Vectors8 {
  static constexpr int kLanes = 8;
  typedef float Real __attribute__((vector_size(32)));
  typedef int32_t Int __attribute__((vector_size(32)));
  typedef uint32_t Word __attribute__((vector_size(32)));
  typedef uint8_t Bytes __attribute__((vector_size(32)));
  typedef uint64_t Wide __attribute__((vector_size(32)));

  static GACT_INLINE Real minimum(Real a, Real b) { return (Real)_mm256_min_ps((__m256)a, (__m256)b); }
  static GACT_INLINE Real maximum(Real a, Real b) { return (Real)_mm256_max_ps((__m256)a, (__m256)b); }
  // Every lane gets that of its index.
  static GACT_INLINE Real permute(Real a, Int index) {
    return (Real)_mm256_permutevar8x32_ps((__m256)a, (__m256i)index);
  }
  // a + b * sign in one rounding, that of the sum: signs are 1 and -1.
  static GACT_INLINE Real add_signed(Real a, Real b, Real sign) {
    return (Real)_mm256_fmadd_ps((__m256)b, (__m256)sign, (__m256)a);
  }
  static GACT_INLINE float lowest(Real a) {
    float result = a[0];
    for (int i = 1; i < kLanes; ++i) result = a[i] < result ? a[i] : result;
    return result;
  }
  static GACT_INLINE float highest(Real a) {
    float result = a[0];
    for (int i = 1; i < kLanes; ++i) result = a[i] > result ? a[i] : result;
    return result;
  }
  // NaN once an element was NaN or infinite.
  static GACT_INLINE Real poison(Real poisoned, Real a) { return a * 0.0f + poisoned; }
  static GACT_INLINE bool is_poisoned(Real a) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)a, _CMP_UNORD_Q)) != 0;
  }
  static GACT_INLINE Bytes smaller(Bytes a, Bytes b) { return (Bytes)_mm256_min_epu8((__m256i)a, (__m256i)b); }
  // The low bytes of four vectors, in order.
  static GACT_INLINE Bytes to_bytes(Int a, Int b, Int c, Int d) {
    const __m256i low = _mm256_packus_epi32((__m256i)a, (__m256i)b);
    const __m256i high = _mm256_packus_epi32((__m256i)c, (__m256i)d);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return (Bytes)_mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
  }
  static GACT_INLINE Int from_bytes(const uint8_t* from) {
    return (Int)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  static GACT_INLINE Word from_words16(const uint16_t* from) {
    return (Word)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  // Of the low halves.
  static GACT_INLINE Wide product(Wide a, Wide b) { return (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
  static GACT_INLINE void store_words16(Word a, uint16_t* to) {
    const __m256i packed = _mm256_packus_epi32((__m256i)a, (__m256i)a);
    const __m256i ordered = _mm256_permute4x64_epi64(packed, 0x8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(ordered));
  }
};

}  // namespace
}  // namespace gact::cpu

namespace gact {

template <>
struct Convert<cpu::Vectors8::Real> {
  using Real = cpu::Vectors8::Real;
  using Int = cpu::Vectors8::Int;
  static GACT_INLINE Int to_nearest(Real value) { return (Int)_mm256_cvtps_epi32((__m256)value); }
  static GACT_INLINE Real to_real(Int value) { return (Real)_mm256_cvtepi32_ps((__m256i)value); }
};

}  // namespace gact
