// The codec's arithmetic, spelled out once for the CPU and the CUDA kernels.
//
// gact_fx/codec/arithmetic.py states the same arithmetic in PyTorch, and the tests hold the two together bit by bit. So
// the order of the operations below is part of the storage format: compile with -ffp-contract=off (nvcc: --fmad=false)
// and without fast-math.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "formats.h"

namespace gact {

constexpr int kMaxGroupSize = 1024;
constexpr int kIntegerBlock = 256;     // integers and masks are packed in blocks of as many elements
constexpr float kMinStep = 0x1p-100f;  // keeps 1/step far from overflow; a range below it is noise to any gradient
constexpr int kFraction = 22;          // bits below one step with which elements are rounded: 8 + 22 fit an int32
constexpr int32_t kHalf = 1 << (kFraction - 1);

enum class Rounding { kStochastic, kDither, kNearest, kRotated };

// ---- Vectors -----------------------------------------------------------------------------------------------------
//
// Noise, quantize and dequantize also take vectors (GCC's vector extensions) in place of words and floats, so that the
// arithmetic is spelled once. Convert<Real> is what operators do not express; csrc/cpu specialises it for its vectors.

template <class Real>
struct Convert;

template <>
struct Convert<float> {
  static GACT_INLINE int32_t to_nearest(float value) {
#if defined(__CUDA_ARCH__)
    return __float2int_rn(value);
#else
    return int32_t(std::nearbyint(value));
#endif
  }
  static GACT_INLINE float to_real(int32_t value) { return float(value); }
};

template <>
struct Convert<double> {
  static GACT_INLINE int32_t to_nearest(double value) {
#if defined(__CUDA_ARCH__)
    return __double2int_rn(value);
#else
    return int32_t(std::nearbyint(value));
#endif
  }
  static GACT_INLINE double to_real(int32_t value) { return double(value); }
};

// ---- Noise: a counter-based hash, no generator -------------------------------------------------------------------

// lowbias32 (Chris Wellons, "Prospecting for hash functions", 2018), from the start to before its last product.
template <class Word>
GACT_INLINE Word mix(Word x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  return x;
}

// Multipliers of its last product. Four of them give four words for one hash: their quotient is a good multiplier of a
// congruential generator (L'Ecuyer, "Tables of linear congruential generators of different sizes", 1999), so that the
// four words fill their space evenly.
constexpr int kShare = 4;

GACT_INLINE constexpr uint32_t multiplier(int index) {
  return 0x846ca68bu * (index & 1 ? 747796405u : 1u) * (index & 2 ? 747796405u * 747796405u : 1u);
}

GACT_INLINE uint32_t chain(uint32_t key, uint32_t word) {
  const uint32_t x = mix(key ^ word) * multiplier(0);
  return x ^ x >> 16;
}

GACT_INLINE uint32_t seed_key(uint64_t seed) { return chain(chain(0, uint32_t(seed)), uint32_t(seed >> 32)); }

template <class Bits>
GACT_INLINE uint32_t group_key(uint32_t seed_key, uint64_t group, Bits minimum, uint16_t step) {
  uint32_t key = chain(chain(seed_key, uint32_t(group)), uint32_t(group >> 32));
  key = chain(key, uint32_t(minimum));
  if constexpr (sizeof(Bits) == 8) key = chain(key, uint32_t(minimum >> 32));
  return chain(key, step);
}

constexpr uint32_t kGolden = 0x9e3779b9u;
constexpr uint32_t kShareStride = 16;  // elements i, i + 16, i + 32, i + 48 of every 64 share a hash
constexpr uint32_t kShareBlock = kShare * kShareStride;

// What the hash is taken of.
GACT_INLINE uint32_t element_word(uint32_t group_key, uint32_t element) {
  return group_key + (element / kShareBlock * kShareStride + element % kShareStride) * kGolden;
}

// Uniform over the kFraction bits below one step; half a step when rounding to nearest; for rotated groups the upper
// bit alone, as a sign. `mixed` is mix(element_word).
template <Rounding rounding, class Int = int32_t, class Word>
GACT_INLINE Int noise(Word mixed, int share) {
  if constexpr (rounding == Rounding::kNearest) return Int{} + kHalf;
  if constexpr (rounding == Rounding::kRotated) return (Int)((mixed * multiplier(share)) & 0x80000000u);
  return (Int)((mixed * multiplier(share)) >> (32 - kFraction));
}

template <Rounding rounding>
GACT_INLINE int32_t element_noise(uint32_t group_key, uint32_t element) {
  return noise<rounding>(mix(element_word(group_key, element)), int(element / kShareStride % kShare));
}

// ---- Groups ------------------------------------------------------------------------------------------------------
//
// x is the code floor((x - minimum) / step + n), n uniform in [0, 1); the fraction is rounded to kFraction bits first,
// so that the sum is exact. The value of a code is minimum + code * step, and with subtractive dither
// minimum + (code + 1/2 - n) * step, with the same n.

// What a group stores beside its codes.
template <class Format>
struct Metadata {
  typename Format::Bits minimum;
  uint16_t step;
};

// A group's metadata as its elements are computed with. All in quarters where the group is irregular.
template <class Real>
struct Scale {
  Real minimum;
  Real step;
  int32_t levels;  // the largest code of a finite value
};

// The factor that takes elements to fixed point.
template <class Real>
GACT_INLINE Real inverse(Real step) {
  return step == Real(0) ? Real(0) : Real(1 << kFraction) / step;
}

// The code before it is clamped to the levels. `minimum` as in Scale.
template <class Real, class Int>
GACT_INLINE Int quantize(Real x, Real minimum, Real inverse, Int noise) {
  return (Convert<Real>::to_nearest((x - minimum) * inverse) + noise) >> kFraction;
}

// `fine_step` is the step, under dither its 2^-kFraction.
template <Rounding rounding, class Real, class Int>
GACT_INLINE Real dequantize(Int code, Real minimum, Real fine_step, Int noise) {
  if constexpr (rounding == Rounding::kDither) code = (code << kFraction) + (kHalf - noise);
  return minimum + Convert<Real>::to_real(code) * fine_step;
}

template <Rounding rounding, class Real>
GACT_INLINE Real fine_step(Real step) {
  return rounding == Rounding::kDither ? step * Real(1.0 / (1 << kFraction)) : step;
}

// The step in bfloat16, rounded up so that every element of the group lies within the codes' range.
template <class Real>
GACT_INLINE uint16_t encode_step(Real range, int32_t levels) {
  if (range == Real(0)) return 0;
  Real step = range / Real(levels);
  step = step > Real(kMinStep) ? step : Real(kMinStep);
  if constexpr (sizeof(Real) == 8) {
    const uint64_t rounded_up = (bit_cast<uint64_t>(step) + ((uint64_t(1) << 45) - 1)) >> 45;
    return uint16_t(rounded_up - ((1023 - 127) << 7));
  } else {
    return uint16_t((bit_cast<uint32_t>(step) + 0xffff) >> 16);
  }
}

GACT_INLINE float decode_step(uint16_t bits) { return bit_cast<float>(uint32_t(bits) << 16); }

template <class Format>
GACT_INLINE Scale<typename Format::Real> regular_scale(Metadata<Format> metadata, int bits) {
  using Real = typename Format::Real;
  return {Real(Format::decode(metadata.minimum)), Real(decode_step(metadata.step)), (1 << bits) - 1};
}

// ---- Irregular groups: non-finite or huge elements ---------------------------------------------------------------
//
// The stored step has its sign bit set and the set of non-finite kinds in its three low bits. Codes up to `levels` are
// finite values, those beyond are the kinds present, in order. All else is as in regular groups, in quarters, because
// the range of a group may be twice the largest float.

constexpr uint16_t kIrregular = 0x8000;

GACT_INLINE int popcount3(int kinds) { return (kinds & 1) + (kinds >> 1 & 1) + (kinds >> 2 & 1); }

// 0: NaN, 1: +Inf, 2: -Inf; -1: finite.
template <class Format>
GACT_INLINE int kind_of(typename Format::Bits bits) {
  using Bits = typename Format::Bits;
  const Bits magnitude = bits & Bits(Bits(-1) >> 1);
  if (magnitude < Format::kInfinity) return -1;
  if (magnitude > Format::kInfinity) return 0;
  return magnitude == bits ? 1 : 2;
}

// The kinds that the codes tell apart: one bit has no room for two kinds and a finite level, so all become NaN there.
GACT_INLINE int representable_kinds(int kinds, int bits) { return (1 << bits) > popcount3(kinds) ? kinds : 1; }

// The mantissa bits of a quarter of the step, of which 12 bits are stored: all 4 beside float32's exponent, 1 beside
// float64's.
template <class Real>
constexpr int kDropped = sizeof(Real) == 8 ? 51 : 19;

template <class Real>
GACT_INLINE uint16_t encode_irregular_step(Real quarter_range, int32_t levels, int kinds) {
  using Word = std::conditional_t<sizeof(Real) == 8, uint64_t, uint32_t>;
  Word bits = 0;
  if (quarter_range != Real(0) && levels > 0) {
    const Real step = quarter_range / Real(levels);
    bits = bit_cast<Word>(step > Real(kMinStep) ? step : Real(kMinStep));
    bits = (bits + ((Word(1) << kDropped<Real>)-1)) >> kDropped<Real>;
  }
  return uint16_t(kIrregular | uint32_t(bits) << 3 | uint32_t(kinds));
}

template <class Format>
GACT_INLINE Scale<typename Format::Real> irregular_scale(Metadata<Format> metadata, int bits) {
  using Real = typename Format::Real;
  using Word = std::conditional_t<sizeof(Real) == 8, uint64_t, uint32_t>;
  const Word step = Word(metadata.step >> 3 & 0xfff) << kDropped<Real>;
  const int32_t levels = (1 << bits) - popcount3(metadata.step & 7) - 1;
  return {Real(Format::decode(metadata.minimum)) * Real(0.25), bit_cast<Real>(step), levels};
}

// The metadata of an irregular group: `lowest` and `highest` among the finite elements (0 if there are none), and the
// set of kinds among the others.
template <class Format>
GACT_INLINE Metadata<Format> irregular_metadata(typename Format::Real lowest, typename Format::Real highest, int kinds,
                                                int bits) {
  using Real = typename Format::Real;
  kinds = representable_kinds(kinds, bits);
  const int32_t levels = (1 << bits) - popcount3(kinds) - 1;
  const Real range = highest * Real(0.25) - lowest * Real(0.25);
  return {Format::encode(lowest + Real(0)), encode_irregular_step(range, levels, kinds)};  // -0.0 becomes +0.0
}

// The code of a kind, in a group whose step is `step`: one that is not told apart was merged into NaN.
GACT_INLINE int32_t code_of_kind(int kind, int32_t levels, uint16_t step) {
  const bool present = step >> kind & 1;
  return levels + 1 + (present ? popcount3(step & ((1 << kind) - 1)) : 0);
}

// The non-finite element that code `levels` + 1 + `index` stands for.
template <class Format>
GACT_INLINE typename Format::Bits nonfinite(int index, uint16_t step) {
  using Bits = typename Format::Bits;
  int kind = 0;  // the index-th of the set bits
  for (int skip = index; kind < 2; ++kind) {
    if ((step >> kind & 1) && skip-- == 0) break;
  }
  if (kind == 0) return Format::kNaN;
  return kind == 1 ? Format::kInfinity : Bits(Format::kInfinity | Bits(1) << (8 * sizeof(Bits) - 1));
}

template <class Format>
GACT_INLINE int32_t quantize_irregular(typename Format::Bits x, const Scale<typename Format::Real>& scale,
                                       typename Format::Real inverse, uint16_t step, int32_t noise) {
  using Real = typename Format::Real;
  const int kind = kind_of<Format>(x);
  if (kind >= 0) return code_of_kind(kind, scale.levels, step);
  const int32_t code = quantize(Real(Format::decode(x)) * Real(0.25), scale.minimum, inverse, noise);
  return code < scale.levels ? code : scale.levels;
}

// A finite element of an irregular group.
template <Rounding rounding, class Format>
GACT_INLINE typename Format::Bits dequantize_finite(int32_t code, const Scale<typename Format::Real>& scale,
                                                    typename Format::Real fine_step, int32_t noise) {
  using Real = typename Format::Real;
  const Real value = dequantize<rounding>(code, scale.minimum, fine_step, noise) * Real(4);
  return Format::encode(value > Format::kMax ? Format::kMax : value < -Format::kMax ? -Format::kMax : value);
}

template <Rounding rounding, class Format>
GACT_INLINE typename Format::Bits dequantize_irregular(int32_t code, const Scale<typename Format::Real>& scale,
                                                       uint16_t step, int32_t noise) {
  if (code > scale.levels) return nonfinite<Format>(code - scale.levels - 1, step);
  return dequantize_finite<rounding, Format>(code, scale, fine_step<rounding>(scale.step), noise);
}

// ---- 16 bits: float32 as bfloat16, without metadata --------------------------------------------------------------

constexpr int kBFloat16Bits = 16;

// The upper half of the element takes part in the hash, so that the noise changes with the data here as well.
template <Rounding rounding>
GACT_INLINE uint16_t round_to_bfloat16(uint32_t x, uint32_t group_key, uint32_t element) {
  const uint32_t upper = x >> 16, magnitude = x & 0x7fffffff;
  if (magnitude >= Float32::kInfinity) return uint16_t(magnitude > Float32::kInfinity ? upper | 0x40 : upper);
  const uint32_t noise = rounding == Rounding::kNearest
                             ? 0x7fff + (upper & 1)
                             : mix((group_key + element * kGolden) ^ upper) * multiplier(0) >> 16;
  const uint32_t rounded = (x + noise) >> 16;
  return uint16_t((rounded & 0x7fff) < BFloat16::kInfinity ? rounded : rounded - 1);  // the largest, not infinity
}

}  // namespace gact
