// The inner loops over a rotated group with vectors of 32-bit lanes: csrc/rotation.h's arithmetic, as in elements.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "../rotation.h"
#include "vectorized.h"

namespace gact::cpu {
namespace {

// What is computed in double goes element by element.
template <class Vectors>
struct VectorizedRotated : Vectorized<Vectors> {
  using Base = Vectorized<Vectors>;
  using Real = typename Vectors::Real;
  using Int = typename Vectors::Int;
  using Word = typename Vectors::Word;
  using Bytes = typename Vectors::Bytes;
  using Base::kLanes, Base::get, Base::put;
  using Plain::find_nearest, Plain::read_centroids, Plain::squared_norm, Plain::turn;

  template <class Format>
  static GACT_INLINE typename Format::Real sum(const typename Format::Bits* x, int count) {
    if constexpr (sizeof(typename Format::Bits) == 8) {
      return Plain::sum<Format>(x, count);
    } else {
      return tree_sum(count, [&](int j) { return Base::template load<Format>(x + j); });
    }
  }

  template <class Format>
  static GACT_INLINE void flip_deviations(const typename Format::Bits* __restrict x, int count,
                                          typename Format::Real mean, uint32_t key,
                                          typename Format::Real* __restrict deviations) {
    if constexpr (sizeof(typename Format::Bits) == 8) {
      Plain::flip_deviations<Format>(x, count, mean, key, deviations);
    } else {
      Base::template for_noise<Rounding::kRotated>(key, count, [&](int first, const auto& n) {
        prefetch(x + count + first, n.kVectors * kLanes);
        for (int k = 0; k < n.kVectors; ++k) {
          const int j = first + k * kLanes;
          put(flip(Base::template load<Format>(x + j) - mean, n.vector[k]), deviations + j);
        }
      });
    }
  }

  // In passes of three stages, which eight vectors go through together, and a last one with what is left.
  static GACT_INLINE void turn(float* __restrict x, int count) {
    int half = count / 2;
    for (; half >= 4 * kLanes; half /= 8) {
      const int stride = half / 4;
      for (float* block = x; block < x + count; block += 2 * half) {
        for (int i = 0; i < stride; i += kLanes) turn_vectors<8>(block + i, stride);
      }
    }
    const int left = half < kLanes ? 1 : 2 * half / kLanes;
    for (float* block = x; block < x + count; block += left * kLanes) {
      if (left == 4) turn_vectors<4, true>(block, kLanes);
      if (left == 2) turn_vectors<2, true>(block, kLanes);
      if (left == 1) turn_vectors<1, true>(block, kLanes);
    }
  }

  static GACT_INLINE float squared_norm(const float* x, int count) {
    return tree_sum(count, [&](int j) { return get(x + j) * get(x + j); });
  }

  static GACT_INLINE float find_nearest(const float* __restrict turned, int count, int bits, float root,
                                        uint8_t* __restrict codes) {
    if (bits == 1) return find_nearest_of<1>(turned, count, root, codes);
    if (bits == 2) return find_nearest_of<2>(turned, count, root, codes);
    if (bits == 3) return find_nearest_of<3>(turned, count, root, codes);
    return find_nearest_of<4>(turned, count, root, codes);
  }

  static GACT_INLINE void read_centroids(const uint8_t* __restrict codes, int count, int bits,
                                         float* __restrict turned) {
    const int half = 1 << (bits - 1);
    Real centroids{};
    for (int k = 0; k < half; ++k) centroids[k] = centroid(bits, k);
    for (int j = 0; j < count; j += kLanes) {
      const Int code = Vectors::from_bytes(codes + j);
      const Word sign = (Word)(code & half) << (32 - bits);
      put((Real)((Word)Vectors::permute(centroids, code & (half - 1)) ^ sign), turned + j);
    }
  }

  template <class Format>
  static GACT_INLINE void add_flipped(const typename Format::Real* __restrict deviations, int count,
                                      typename Format::Real mean, typename Format::Real scale, uint32_t key,
                                      typename Format::Bits* __restrict x) {
    if constexpr (sizeof(typename Format::Bits) == 8) {
      Plain::add_flipped<Format>(deviations, count, mean, scale, key, x);
    } else {
      const Real largest = Format::kMax - Real{};
      Base::template for_noise<Rounding::kRotated>(key, count, [&](int first, const auto& n) {
        for (int k = 0; k < n.kVectors; ++k) {
          const int j = first + k * kLanes;
          const Real value = mean + flip(get(deviations + j), n.vector[k]) * scale;
          const Real above = value > largest ? largest : value;
          Base::template store<Format>(above < -largest ? -largest : above, x + j);
        }
      });
    }
  }

 private:
  static GACT_INLINE Real flip(Real value, Int sign) { return (Real)((Int)value ^ sign); }

  static GACT_INLINE Int lanes() {
    Int lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    return lane;
  }

  // The sum of term(j) over the vectors that begin at elements j.
  template <class F>
  static GACT_INLINE float tree_sum(int count, F&& term) {
    Real sums[kMaxGroupSize / 2 / kLanes];
    int vectors = count / kLanes / 2;
    for (int k = 0; k < vectors; ++k) sums[k] = term(k * kLanes) + term((vectors + k) * kLanes);
    for (vectors /= 2; vectors > 0; vectors /= 2) {
      for (int k = 0; k < vectors; ++k) sums[k] += sums[vectors + k];
    }
    Real sum = sums[0];
    for (int half = kLanes / 2; half > 0; half /= 2) sum += Vectors::permute(sum, lanes() ^ half);
    return sum[0];
  }

  // The stages from `kDistance` on within a vector: every element is added to its partner, or subtracted from it.
  template <int kDistance>
  static GACT_INLINE Real turn_inside(Real v) {
    if constexpr (kDistance == 0) {
      return v;
    } else {
      const Real sign = (lanes() & kDistance) != 0 ? -1.0f - Real{} : 1.0f - Real{};
      return turn_inside<kDistance / 2>(Vectors::add_signed(Vectors::permute(v, lanes() ^ kDistance), v, sign));
    }
  }

  // Stages of the transform over `kVectors` vectors that begin `stride` elements apart, and within each one if
  // `inside`.
  template <int kVectors, bool inside = false>
  static GACT_INLINE void turn_vectors(float* x, int stride) {
    Real v[kVectors];
    for (int k = 0; k < kVectors; ++k) v[k] = get(x + k * stride);
    for (int half = kVectors / 2; half > 0; half /= 2) {
      for (int k = 0; k < kVectors; ++k) {
        if (k & half) continue;
        const Real a = v[k], b = v[k + half];
        v[k] = a + b;
        v[k + half] = a - b;
      }
    }
    for (int k = 0; k < kVectors; ++k) put(inside ? turn_inside<kLanes / 2>(v[k]) : v[k], x + k * stride);
  }

  template <int kBits>
  static GACT_INLINE float find_nearest_of(const float* __restrict turned, int count, float root,
                                           uint8_t* __restrict codes) {
    constexpr int half = 1 << (kBits - 1);
    Real centroids{}, thresholds{};
    for (int k = 0; k < half; ++k) centroids[k] = centroid(kBits, k);
    for (int k = 0; k + 1 < half; ++k) thresholds[k] = root * threshold(kBits, k);
    float products[kMaxGroupSize];
    for (int j = 0; j < count; j += 4 * kLanes) {
      Int code[4];
      for (int i = 0; i < 4; ++i) {
        const Word bits = (Word)get(turned + j + i * kLanes);
        const Real magnitude = (Real)(bits & 0x7fffffffu);
        // As many thresholds as lie below the magnitude, by bisection.
        Int index = {};
        for (int step = half / 2; step > 0; step /= 2) {
          const Real middle = Vectors::permute(thresholds, index + (step - 1));
          index += (Int)(magnitude > middle) & step;
        }
        // The smaller of two zeros is none.
        const Int negative = (Int)((Real)bits < 0.0f);
        code[i] = index | (negative & half);
        put(magnitude * Vectors::permute(centroids, index), products + j + i * kLanes);
      }
      const Bytes bytes = Vectors::to_bytes(code[0], code[1], code[2], code[3]);
      memcpy(codes + j, &bytes, sizeof(bytes));
    }
    return tree_sum(count, [&](int j) { return get(products + j); });
  }
};

}  // namespace
}  // namespace gact::cpu
