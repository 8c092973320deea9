// The inner loops over a group's elements in portable C++: codec.h's arithmetic, element by element.
#pragma once

#include <cstdint>
#include <cstring>

#include "../codec.h"
#include "../philox.h"
#include "../rotation.h"

namespace gact::cpu {
namespace {

// The smallest and the largest element, or that there are non-finite or huge ones.
template <class Real>
struct Extremes {
  Real minimum;
  Real maximum;
  bool is_irregular;
};

// The smallest and the largest finite element (0 if there are none), and the set of kinds among the others.
template <class Real>
struct Contents {
  Real lowest;
  Real highest;
  int kinds;
};

// Asks for what is behind a group, which as a rule comes next, in step with the work on the group itself.
template <class Element>
GACT_INLINE void prefetch(const Element* from, int count) {
#if defined(__GNUC__)
  constexpr int line = 64 / int(sizeof(Element));
  for (int i = 0; i < count; i += line) __builtin_prefetch(from + i, /*write=*/0, /*locality=*/2);
#endif
}

struct Plain {
  // The words of counters `first` to `first + kDrawn - 1`, modulo 2^32.
  static GACT_INLINE void draw_words(uint32_t seed, uint32_t first, uint32_t* words) {
    uint32_t a[kDrawn], b[kDrawn] = {}, c[kDrawn] = {}, d[kDrawn] = {};
    for (int i = 0; i < kDrawn; ++i) a[i] = first + uint32_t(i);
    uint32_t keys[2] = {seed, 0};
    for (int round = 0; round < kPhiloxRounds; ++round) {
      for (int i = 0; i < kDrawn; ++i) {
        const uint64_t of_a = uint64_t(kPhiloxFactors[0]) * a[i], of_c = uint64_t(kPhiloxFactors[1]) * c[i];
        a[i] = uint32_t(of_c >> 32) ^ b[i] ^ keys[0];
        b[i] = uint32_t(of_c);
        c[i] = uint32_t(of_a >> 32) ^ d[i] ^ keys[1];
        d[i] = uint32_t(of_a);
      }
      for (int i = 0; i < 2; ++i) keys[i] += kPhiloxKeys[i];
    }
    memcpy(words, a, sizeof(a));
  }

  template <class Format>
  static GACT_INLINE Extremes<typename Format::Real> find_extremes(const typename Format::Bits* x, int count) {
    using Ordered = typename Format::Ordered;
    using Bits = typename Format::Bits;
    Ordered low = ordered<Format>(x[0]), high = low;
    for (int j = 0; j < count; ++j) {
      const Ordered value = ordered<Format>(x[j]);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    return {Format::decode(Bits(ordered<Format>(Bits(low)))), Format::decode(Bits(ordered<Format>(Bits(high)))),
            high >= Format::kLimit || low <= Ordered(~Format::kLimit)};
  }

  template <Rounding rounding, class Format>
  static GACT_INLINE void quantize_all(const typename Format::Bits* __restrict x, int count,
                                       const Scale<typename Format::Real>& scale, uint32_t key,
                                       uint8_t* __restrict codes) {
    const auto factor = inverse(scale.step);
    prefetch(x + count, count);
    for_noise<rounding>(key, count, [&](int j, int32_t n) {
      const int32_t code = quantize(Format::decode(x[j]), scale.minimum, factor, n);
      codes[j] = uint8_t(code < scale.levels ? code : scale.levels);
    });
  }

  template <Rounding rounding, class Format>
  static GACT_INLINE void dequantize_all(const uint8_t* __restrict codes, int count,
                                         const Scale<typename Format::Real>& scale, uint32_t key,
                                         typename Format::Bits* __restrict x) {
    const auto step = fine_step<rounding>(scale.step);
    for_noise<read_noise(rounding)>(key, count, [&](int j, int32_t n) {
      x[j] = Format::encode(dequantize<rounding>(int32_t(codes[j]), scale.minimum, step, n));
    });
  }

  // Irregular groups

  template <class Format>
  static GACT_INLINE Contents<typename Format::Real> find_contents(const typename Format::Bits* x, int count) {
    using Real = typename Format::Real;
    Contents<Real> found = {0, 0, 0};
    bool any_finite = false;
    for (int j = 0; j < count; ++j) {
      const int kind = kind_of<Format>(x[j]);
      if (kind >= 0) {
        found.kinds |= 1 << kind;
        continue;
      }
      const Real value = Format::decode(x[j]);
      found.lowest = !any_finite || value < found.lowest ? value : found.lowest;
      found.highest = !any_finite || value > found.highest ? value : found.highest;
      any_finite = true;
    }
    return found;
  }

  template <Rounding rounding, class Format>
  static GACT_INLINE void quantize_irregular_all(const typename Format::Bits* x, int count,
                                                 const Scale<typename Format::Real>& scale, uint16_t step, uint32_t key,
                                                 uint8_t* codes) {
    const auto factor = inverse(scale.step);
    for (int j = 0; j < count; ++j) {
      const int32_t n = element_noise<rounding>(key, uint32_t(j));
      codes[j] = uint8_t(quantize_irregular<Format>(x[j], scale, factor, step, n));
    }
  }

  template <Rounding rounding, class Format>
  static GACT_INLINE void dequantize_irregular_all(const uint8_t* codes, int count,
                                                   const Scale<typename Format::Real>& scale, uint16_t step,
                                                   uint32_t key, typename Format::Bits* x) {
    for (int j = 0; j < count; ++j) {
      const int32_t n = element_noise<rounding>(key, uint32_t(j));
      x[j] = dequantize_irregular<rounding, Format>(codes[j], scale, step, n);
    }
  }

  // Rotated groups

  template <class Format>
  static GACT_INLINE typename Format::Real sum(const typename Format::Bits* x, int count) {
    typename Format::Real terms[kMaxGroupSize];
    for (int i = 0; i < count; ++i) terms[i] = Format::decode(x[i]);
    return tree_sum(terms, count);
  }

  // The deviations from the mean, with signs at random.
  template <class Format>
  static GACT_INLINE void flip_deviations(const typename Format::Bits* __restrict x, int count,
                                          typename Format::Real mean, uint32_t key,
                                          typename Format::Real* __restrict deviations) {
    for_noise<Rounding::kRotated>(key, count,
                                  [&](int j, int32_t n) { deviations[j] = flip(Format::decode(x[j]) - mean, n); });
  }

  // The Walsh-Hadamard transform, not normalised, from the farthest pairs to neighbours.
  template <class Real>
  static GACT_INLINE void turn(Real* __restrict x, int count) {
    for (int half = count / 2; half > 0; half /= 2) {
      for (Real* first = x; first < x + count; first += 2 * half) {
        for (int i = 0; i < half; ++i) {
          const Real a = first[i], b = first[half + i];
          first[i] = a + b;
          first[half + i] = a - b;
        }
      }
    }
  }

  template <class Real>
  static GACT_INLINE Real squared_norm(const Real* x, int count) {
    Real terms[kMaxGroupSize];
    for (int i = 0; i < count; ++i) terms[i] = x[i] * x[i];
    return tree_sum(terms, count);
  }

  // The codes of what was turned, and the product of it with their centroids.
  template <class Real>
  static GACT_INLINE Real find_nearest(const Real* __restrict turned, int count, int bits, Real root,
                                       uint8_t* __restrict codes) {
    Real terms[kMaxGroupSize];
    for (int j = 0; j < count; ++j) {
      const bool negative = turned[j] < Real(0);
      const int index = nearest_centroid(turned[j], bits, root);
      codes[j] = uint8_t(index | (negative ? 1 << (bits - 1) : 0));
      terms[j] = (negative ? -turned[j] : turned[j]) * Real(centroid(bits, index));
    }
    return tree_sum(terms, count);
  }

  template <class Real>
  static GACT_INLINE void read_centroids(const uint8_t* __restrict codes, int count, int bits,
                                         Real* __restrict turned) {
    const int half = 1 << (bits - 1);
    Real table[1 << kMaxRotatedBits];
    for (int code = 0; code < half; ++code) {
      table[code] = centroid(bits, code);
      table[half + code] = -table[code];
    }
    for (int i = 0; i < count; ++i) turned[i] = table[codes[i]];
  }

  // The elements of deviations that were turned back, and still have their signs at random.
  template <class Format>
  static GACT_INLINE void add_flipped(const typename Format::Real* __restrict deviations, int count,
                                      typename Format::Real mean, typename Format::Real scale, uint32_t key,
                                      typename Format::Bits* __restrict x) {
    for_noise<Rounding::kRotated>(
        key, count, [&](int j, int32_t n) { x[j] = decode_rotated<Format>(flip(deviations[j], n), mean, scale); });
  }

 protected:
  // Only dither's noise is read again; any other is a constant that goes unused.
  static constexpr Rounding read_noise(Rounding rounding) {
    return rounding == Rounding::kDither ? rounding : Rounding::kNearest;
  }

 private:
  // The sum of `x`, which is used up: half by half, an order that vectors and a GPU's threads can keep.
  template <class Real>
  static GACT_INLINE Real tree_sum(Real* __restrict x, int count) {
    for (int half = count / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) x[i] += x[half + i];
    }
    return x[0];
  }

  // Calls f(j, noise) for all elements, in an order that the compiler can vectorise.
  template <Rounding rounding, class F>
  static GACT_INLINE void for_noise(uint32_t key, int count, F&& f) {
    constexpr int stride = int(kShareStride);
    for (int first = 0; first < count; first += stride) {
      const int share = first / stride % kShare;
      for (int j = first; j < first + stride; ++j) f(j, noise<rounding>(mix(element_word(key, uint32_t(j))), share));
    }
  }
};

}  // namespace
}  // namespace gact::cpu
