// Sixteen 32-bit lanes: what GCC's vector extensions do not express in AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../codec.h"

namespace gact::cpu {
namespace {

struct Vectors16 {
  static constexpr int kLanes = 16;
  typedef float Real __attribute__((vector_size(64)));
  typedef int32_t Int __attribute__((vector_size(64)));
  typedef uint32_t Word __attribute__((vector_size(64)));
  typedef uint8_t Bytes __attribute__((vector_size(64)));
  typedef uint64_t Wide __attribute__((vector_size(64)));

  static GACT_INLINE Real minimum(Real a, Real b) { return (Real)_mm512_min_ps((__m512)a, (__m512)b); }
  static GACT_INLINE Real maximum(Real a, Real b) { return (Real)_mm512_max_ps((__m512)a, (__m512)b); }
  // Every lane gets that of its index.
  static GACT_INLINE Real permute(Real a, Int index) { return (Real)_mm512_permutexvar_ps((__m512i)index, (__m512)a); }
  // a + b * sign in one rounding, that of the sum: signs are 1 and -1.
  static GACT_INLINE Real add_signed(Real a, Real b, Real sign) {
    return (Real)_mm512_fmadd_ps((__m512)b, (__m512)sign, (__m512)a);
  }
  static GACT_INLINE float lowest(Real a) { return _mm512_reduce_min_ps((__m512)a); }
  static GACT_INLINE float highest(Real a) { return _mm512_reduce_max_ps((__m512)a); }
  // NaN once an element was NaN or infinite.
  static GACT_INLINE Real poison(Real poisoned, Real a) {
    return (Real)_mm512_fmadd_ps((__m512)a, _mm512_setzero_ps(), (__m512)poisoned);
  }
  static GACT_INLINE bool is_poisoned(Real a) { return _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_UNORD_Q) != 0; }
  static GACT_INLINE Bytes smaller(Bytes a, Bytes b) { return (Bytes)_mm512_min_epu8((__m512i)a, (__m512i)b); }
  // The low bytes of four vectors, in order.
  static GACT_INLINE Bytes to_bytes(Int a, Int b, Int c, Int d) {
    const __m512i low = _mm512_packus_epi32((__m512i)a, (__m512i)b);
    const __m512i high = _mm512_packus_epi32((__m512i)c, (__m512i)d);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return (Bytes)_mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
  }
  static GACT_INLINE Int from_bytes(const uint8_t* from) {
    return (Int)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static GACT_INLINE Word from_words16(const uint16_t* from) {
    return (Word)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  // Of the low halves.
  static GACT_INLINE Wide product(Wide a, Wide b) { return (Wide)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
  static GACT_INLINE void store_words16(Word a, uint16_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)a));
  }
};

}  // namespace
}  // namespace gact::cpu

namespace gact {

template <>
struct Convert<cpu::Vectors16::Real> {
  using Real = cpu::Vectors16::Real;
  using Int = cpu::Vectors16::Int;
  static GACT_INLINE Int to_nearest(Real value) { return (Int)_mm512_cvtps_epi32((__m512)value); }
  static GACT_INLINE Real to_real(Int value) { return (Real)_mm512_cvtepi32_ps((__m512i)value); }
};

}  // namespace gact
