// The inner loops over a group's elements: Plain in portable C++, Vectorized with vectors of 32-bit lanes, for the
// formats that are computed in float. Both are codec.h's arithmetic.
#pragma once

#include <cstdint>
#include <cstring>

#include "../codec.h"

namespace gact::cpu {
namespace {

// The smallest and the largest element, or that there are non-finite or huge ones.
template <class Real>
struct Extremes {
  Real minimum;
  Real maximum;
  bool is_irregular;
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

 protected:
  // Only dither's noise is read again; any other is a constant that goes unused.
  static constexpr Rounding read_noise(Rounding rounding) {
    return rounding == Rounding::kDither ? rounding : Rounding::kNearest;
  }

 private:
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

#if defined(GACT_VECTORS)

// `Vectors` is Vectors8 or Vectors16. Groups are taken in blocks of 64 elements, whose quarters share hashes; a group
// of 32 is half a block, which must be four vectors.
template <class Vectors>
struct Vectorized : Plain {
  using Real = typename Vectors::Real;
  using Int = typename Vectors::Int;
  using Word = typename Vectors::Word;
  using Bytes = typename Vectors::Bytes;
  static constexpr int kLanes = Vectors::kLanes;
  static constexpr int kBlock = int(kShareBlock);

  template <class Format>
  static GACT_INLINE Extremes<typename Format::Real> find_extremes(const typename Format::Bits* x, int count) {
    if constexpr (sizeof(typename Format::Bits) != 4) {
      return Plain::find_extremes<Format>(x, count);  // twice as many lanes
    } else {
      Real low = load<Format>(x), high = low, poisoned = {};
      Real low2 = low, high2 = low, poisoned2 = {};
      for (int j = 0; j < count; j += 2 * kLanes) {
        const Real a = load<Format>(x + j), b = load<Format>(x + j + kLanes);
        low = Vectors::minimum(low, a);
        high = Vectors::maximum(high, a);
        poisoned = Vectors::poison(poisoned, a);
        low2 = Vectors::minimum(low2, b);
        high2 = Vectors::maximum(high2, b);
        poisoned2 = Vectors::poison(poisoned2, b);
      }
      const float lowest = Vectors::lowest(Vectors::minimum(low, low2));
      const float highest = Vectors::highest(Vectors::maximum(high, high2));
      const float limit = Format::decode(Format::kLimit);
      return {lowest, highest, Vectors::is_poisoned(poisoned + poisoned2) || lowest <= -limit || highest >= limit};
    }
  }

  template <Rounding rounding, class Format>
  static GACT_INLINE void quantize_all(const typename Format::Bits* __restrict x, int count,
                                       const Scale<typename Format::Real>& scale, uint32_t key,
                                       uint8_t* __restrict codes) {
    if constexpr (sizeof(typename Format::Bits) == 8) {
      Plain::quantize_all<rounding, Format>(x, count, scale, key, codes);
    } else {
      const Real minimum = scale.minimum - Real{}, factor = inverse(scale.step) - Real{};
      const Bytes levels = uint8_t(scale.levels) - Bytes{};
      for_noise<rounding>(key, count, [&](int first, const auto& n) {
        prefetch(x + count + first, n.kVectors * kLanes);
        for (int k = 0; k < n.kVectors; k += 4) {
          Int code[4];
          for (int i = 0; i < 4; ++i) {
            code[i] = quantize(load<Format>(x + first + (k + i) * kLanes), minimum, factor, n.vector[k + i]);
          }
          const Bytes bytes = Vectors::smaller(Vectors::to_bytes(code[0], code[1], code[2], code[3]), levels);
          memcpy(codes + first + k * kLanes, &bytes, sizeof(bytes));
        }
      });
    }
  }

  template <Rounding rounding, class Format>
  static GACT_INLINE void dequantize_all(const uint8_t* __restrict codes, int count,
                                         const Scale<typename Format::Real>& scale, uint32_t key,
                                         typename Format::Bits* __restrict x) {
    if constexpr (sizeof(typename Format::Bits) == 8) {
      Plain::dequantize_all<rounding, Format>(codes, count, scale, key, x);
    } else {
      const Real minimum = scale.minimum - Real{}, step = fine_step<rounding>(scale.step) - Real{};
      for_noise<read_noise(rounding)>(key, count, [&](int first, const auto& n) {
        for (int k = 0; k < n.kVectors; ++k) {
          const int j = first + k * kLanes;
          store<Format>(dequantize<rounding>(Vectors::from_bytes(codes + j), minimum, step, n.vector[k]), x + j);
        }
      });
    }
  }

 private:
  // Calls f(first, noise) with the noise of the vectors from element `first` on: a whole block's or half a block's.
  template <Rounding rounding, class F>
  static GACT_INLINE void for_noise(uint32_t key, int count, F&& f) {
    Word word;
    for (int i = 0; i < kLanes; ++i) word[i] = element_word(key, uint32_t(i));
    if constexpr (kBlock / 2 == 4 * kLanes) {
      if (count < kBlock) return f(0, next_noise<rounding, kShare / 2>(word));
    }
    for (int block = 0; block < count; block += kBlock) f(block, next_noise<rounding, kShare>(word));
  }

  template <int Shares>
  struct Noise {
    static constexpr int kVectors = Shares * int(kShareStride) / kLanes;
    Int vector[kVectors];
  };

  template <Rounding rounding, int Shares>
  static GACT_INLINE Noise<Shares> next_noise(Word& word) {
    constexpr int vectors = int(kShareStride) / kLanes;
    Noise<Shares> result;
    for (int k = 0; k < vectors; ++k, word += kLanes * kGolden) {
      const Word mixed = mix(word);
      for (int share = 0; share < Shares; ++share) {
        result.vector[share * vectors + k] = noise<rounding, Int>(mixed, share);
      }
    }
    return result;
  }

  template <class Format>
  static GACT_INLINE Real load(const typename Format::Bits* x) {
    if constexpr (sizeof(typename Format::Bits) == 4) {
      Real value;
      memcpy(&value, x, sizeof(value));
      return value;
    } else {
      return Format::template to_real<Real>(Vectors::from_words16(x));
    }
  }

  template <class Format>
  static GACT_INLINE void store(Real value, typename Format::Bits* x) {
    if constexpr (sizeof(typename Format::Bits) == 4) {
      memcpy(x, &value, sizeof(value));
    } else {
      Vectors::store_words16(Format::template to_word<Word>(value), x);
    }
  }
};

#endif

}  // namespace
}  // namespace gact::cpu
