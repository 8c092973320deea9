// Rotated codes: a group's deviations from its mean, turned at random, are coded by the nearest centroid of a normal
// distribution (Vargaftik et al., "EDEN", ICML 2022). gact_fx/codec/rotation.py states the same in PyTorch.
//
// The rotation is a sign for every element and a Hadamard transform. What it gives is close to normal whatever the
// group was, so one table of centroids serves all (Max, "Quantizing for Minimum Distortion", 1960). The stored scale
// makes the product of the decoded and the true deviations the squared norm of these: that removes the bias of
// centroids.
//
// A blob has the mean in the place of the minimum, and the scale in that of the step. Groups that are not finite, huge
// or tiny, or have an element that sticks out, are coded as irregular ones, with dither.
#pragma once

#include <cmath>

#include "codec.h"

namespace gact {

constexpr int kMaxRotatedBits = 4;
// How codes of `bits` are rounded: wide ones that are to be rotated have dither, which adds as little there.
inline Rounding rounding_of(Rounding named, int bits) {
  return named == Rounding::kRotated && bits > kMaxRotatedBits ? Rounding::kDither : named;
}

// Magnitudes and squared norms between which squares neither overflow nor underflow.
constexpr float kRotatedLimit = 0x1p40f;
constexpr float kLeastSquaredNorm = 0x1p-80f;

// The positive centroids of codes of `bits`, of a normal distribution of variance 1; those of 1 bit first.
GACT_INLINE float centroid(int bits, int index) {
  constexpr float table[] = {0.797884561f, 0.452780035f, 1.51041748f,  0.245094174f, 0.756005252f,
                             1.34390929f,  2.15194555f,  0.128394717f, 0.388048291f, 0.656759059f,
                             0.942340456f, 1.25623123f,  1.61804641f,  2.06901598f,  2.73258956f};
  return table[(1 << (bits - 1)) - 1 + index];
}

// The magnitude from which the code is `index` + 1 and not `index`.
GACT_INLINE float threshold(int bits, int index) { return (centroid(bits, index) + centroid(bits, index + 1)) * 0.5f; }

// An element whose square is more of the squared norm makes what was turned two heaps and not a normal distribution;
// centroids, the more the fewer they are, then bias it upwards and the others to nothing.
GACT_INLINE float most_of_norm(int bits) { return bits < 4 ? 0.0625f * float(1 << bits) : 0.75f; }

// Whether a group is to be coded as an irregular one: by its largest deviation, and the squared norm of what was
// turned, which is `count` times that of the deviations.
template <class Real>
GACT_INLINE bool is_ill_suited(Real deviation, Real squared_norm, int count, int bits) {
  if (squared_norm == Real(0)) return false;
  return squared_norm < Real(kLeastSquaredNorm) ||
         deviation * deviation * Real(count) > squared_norm * Real(most_of_norm(bits));
}

template <class Real>
GACT_INLINE Real root_mean_square(Real squared_norm, int count) {
  return std::sqrt(squared_norm / Real(count));
}

// The index of the centroid that is the nearest to the magnitude of a number that was turned.
template <class Real>
GACT_INLINE int nearest_centroid(Real turned, int bits, Real root) {
  const Real magnitude = turned < Real(0) ? -turned : turned;
  int index = 0;
  for (int k = 0; k + 1 < 1 << (bits - 1); ++k) index += magnitude > root * Real(threshold(bits, k));
  return index;
}

// `product`: of the rotated group with its centroids.
template <class Real>
GACT_INLINE uint16_t encode_scale(Real squared_norm, Real product, int count) {
  if (squared_norm == Real(0)) return 0;
  return BFloat16::encode(float(squared_norm / (product * Real(count))));
}

// The signs are those of the elements' noise, whose key knows no scale: it is not known when a group is turned.
template <class Bits>
GACT_INLINE uint32_t rotation_key(uint32_t seed_key, uint64_t group, Bits mean) {
  return group_key(seed_key, group, mean, 0);
}

template <class Real>
GACT_INLINE Real flip(Real value, int32_t sign) {
  return sign < 0 ? -value : value;
}

// The element whose deviation from the mean, in units of the scale, was turned back.
template <class Format>
GACT_INLINE typename Format::Bits decode_rotated(typename Format::Real deviation, typename Format::Real mean,
                                                 typename Format::Real scale) {
  const auto value = mean + deviation * scale;
  return Format::encode(value > Format::kMax ? Format::kMax : value < -Format::kMax ? -Format::kMax : value);
}

}  // namespace gact
