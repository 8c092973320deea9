// The inner loops over a group's elements with vectors of 32-bit lanes, for the formats that are computed in float:
// codec.h's arithmetic, as in elements.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "../codec.h"
#include "elements.h"

namespace gact::cpu {
namespace {

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

  // The words of counters `first` to `first + kDrawn - 1`. Only the low half of each lane counts.
  static GACT_INLINE void draw_words(uint32_t seed, uint32_t first, uint32_t* words) {
    using Wide = typename Vectors::Wide;
    constexpr int kWide = kLanes / 2, kChains = 4;  // what one round waits for is hidden behind the other chains
    typedef uint32_t Half __attribute__((vector_size(4 * kWide)));
    for (int from = 0; from < kDrawn; from += kWide * kChains) {
      Wide a[kChains], b[kChains] = {}, c[kChains] = {}, d[kChains] = {};
      for (int i = 0; i < kChains; ++i) {
        for (int lane = 0; lane < kWide; ++lane) a[i][lane] = uint64_t(first) + from + i * kWide + lane;
      }
      uint32_t keys[2] = {seed, 0};
#pragma GCC unroll kPhiloxRounds
      for (int round = 0; round < kPhiloxRounds; ++round) {
        for (int i = 0; i < kChains; ++i) {
          const Wide of_a = Vectors::product(a[i], Wide{} + kPhiloxFactors[0]);
          const Wide of_c = Vectors::product(c[i], Wide{} + kPhiloxFactors[1]);
          a[i] = (of_c >> 32) ^ b[i] ^ uint64_t(keys[0]);
          b[i] = of_c;
          c[i] = (of_a >> 32) ^ d[i] ^ uint64_t(keys[1]);
          d[i] = of_a;
        }
        for (int i = 0; i < 2; ++i) keys[i] += kPhiloxKeys[i];
      }
      for (int i = 0; i < kChains; ++i) {
        const Half low = __builtin_convertvector(a[i], Half);
        memcpy(words + from + i * kWide, &low, sizeof(low));
      }
    }
  }

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

  // Irregular groups: as finite ones, with the others' codes or values put in their places.

  template <class Format>
  static GACT_INLINE Contents<typename Format::Real> find_contents(const typename Format::Bits* x, int count) {
    if constexpr (sizeof(typename Format::Bits) == 8) {
      return Plain::find_contents<Format>(x, count);
    } else {
      const Word infinity = nonfinite_word<Format>(Format::kInfinity) - Word{};
      const float limit = std::numeric_limits<float>::infinity();
      Real low = limit - Real{}, high = -limit - Real{};
      Int kinds[3] = {};
      for (int j = 0; j < count; j += kLanes) {
        const Real a = load<Format>(x + j);
        const Word bits = (Word)a, magnitude = bits & 0x7fffffffu;
        const auto finite = magnitude < infinity;
        low = Vectors::minimum(low, finite ? a : limit - Real{});
        high = Vectors::maximum(high, finite ? a : -limit - Real{});
        kinds[0] |= (Int)(magnitude > infinity);
        kinds[1] |= (Int)(bits == infinity);
        kinds[2] |= (Int)(bits == (infinity | 0x80000000u));
      }
      const float lowest = Vectors::lowest(low), highest = Vectors::highest(high);
      const bool any_finite = lowest <= highest;
      int found = 0;
      for (int i = 0; i < kLanes; ++i) found |= (kinds[0][i] & 1) | (kinds[1][i] & 2) | (kinds[2][i] & 4);
      return {any_finite ? lowest : 0, any_finite ? highest : 0, found};
    }
  }

  template <Rounding rounding, class Format>
  static GACT_INLINE void quantize_irregular_all(const typename Format::Bits* __restrict x, int count,
                                                 const Scale<typename Format::Real>& scale, uint16_t step, uint32_t key,
                                                 uint8_t* __restrict codes) {
    if constexpr (sizeof(typename Format::Bits) == 8) {
      Plain::quantize_irregular_all<rounding, Format>(x, count, scale, step, key, codes);
    } else {
      const Real minimum = scale.minimum - Real{}, factor = inverse(scale.step) - Real{};
      const Int levels = scale.levels - Int{};
      const Word infinity = nonfinite_word<Format>(Format::kInfinity) - Word{};
      const Int of_kind[3] = {code_of_kind(0, scale.levels, step) - Int{}, code_of_kind(1, scale.levels, step) - Int{},
                              code_of_kind(2, scale.levels, step) - Int{}};
      for_noise<rounding>(key, count, [&](int first, const auto& n) {
        prefetch(x + count + first, n.kVectors * kLanes);
        for (int k = 0; k < n.kVectors; k += 4) {
          Int code[4];
          for (int i = 0; i < 4; ++i) {
            const Real a = load<Format>(x + first + (k + i) * kLanes);
            const Word bits = (Word)a, magnitude = bits & 0x7fffffffu;
            const auto finite = magnitude < infinity;
            const Int rounded = quantize(finite ? a * 0.25f : minimum, minimum, factor, n.vector[k + i]);
            const Int other = magnitude > infinity ? of_kind[0] : bits == infinity ? of_kind[1] : of_kind[2];
            code[i] = finite ? (rounded < levels ? rounded : levels) : other;
          }
          const Bytes bytes = Vectors::to_bytes(code[0], code[1], code[2], code[3]);
          memcpy(codes + first + k * kLanes, &bytes, sizeof(bytes));
        }
      });
    }
  }

  template <Rounding rounding, class Format>
  static GACT_INLINE void dequantize_irregular_all(const uint8_t* __restrict codes, int count,
                                                   const Scale<typename Format::Real>& scale, uint16_t step,
                                                   uint32_t key, typename Format::Bits* __restrict x) {
    if constexpr (sizeof(typename Format::Bits) == 8) {
      Plain::dequantize_irregular_all<rounding, Format>(codes, count, scale, step, key, x);
    } else {
      const Real minimum = scale.minimum - Real{}, fine = fine_step<rounding>(scale.step) - Real{};
      const Real largest = Format::kMax - Real{};
      const Int levels = scale.levels - Int{};
      Real others[3];
      for (int i = 0; i < 3; ++i) others[i] = (Real)(nonfinite_word<Format>(nonfinite<Format>(i, step)) - Word{});
      for_noise<read_noise(rounding)>(key, count, [&](int first, const auto& n) {
        for (int k = 0; k < n.kVectors; ++k) {
          const int j = first + k * kLanes;
          const Int code = Vectors::from_bytes(codes + j), beyond = code - levels - 1;
          const Real value = dequantize<rounding>(code < levels ? code : levels, minimum, fine, n.vector[k]) * 4.0f;
          const Real above = value > largest ? largest : value;
          const Real finite = above < -largest ? -largest : above;
          const Real other = beyond == 0 ? others[0] : beyond == 1 ? others[1] : others[2];
          store<Format>(beyond < 0 ? finite : other, x + j);
        }
      });
    }
  }

 protected:
  static GACT_INLINE Real get(const float* from) {
    Real value;
    memcpy(&value, from, sizeof(value));
    return value;
  }

  static GACT_INLINE void put(Real value, float* to) { memcpy(to, &value, sizeof(value)); }

  // The bits of a non-finite element as load gives it.
  template <class Format>
  static GACT_INLINE uint32_t nonfinite_word(typename Format::Bits bits) {
    if constexpr (sizeof(typename Format::Bits) == 4) {
      return bits;
    } else {
      return bit_cast<uint32_t>(Format::template to_real<float>(uint32_t(bits)));
    }
  }

  // Calls f(first, noise) with the noise of the vectors from element `first` on: a whole block's or half a block's.
  template <Rounding rounding, class F>
  static GACT_INLINE void for_noise(uint32_t key, int count, F&& f) {
    Word word;
    for (int i = 0; i < kLanes; ++i) word[i] = element_word(0, uint32_t(i));
    word += key;
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

}  // namespace
}  // namespace gact::cpu
