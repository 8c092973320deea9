// The floating-point formats that are compressed, as bits and as numbers.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define GACT_INLINE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define GACT_INLINE inline __attribute__((always_inline))
#elif defined(_MSC_VER)
#define GACT_INLINE __forceinline
#else
#define GACT_INLINE inline
#endif

namespace gact {

template <class To, class From>
GACT_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- Source formats ----------------------------------------------------------------------------------------------
//
// Decode and encode are integer arithmetic so that they need neither F16C nor AVX512-BF16. `encode` rounds to nearest
// even and takes finite values within the format's range only. Quantisation is done in `Real`. `to_real` and `to_word`
// do the work on 32-bit words that hold the format's bits, one or a vector of them. An element whose magnitude reaches
// kLimit makes its group irregular; below it neither the range nor a decoded value can overflow.

struct Float32 {
  using Bits = uint32_t;
  using Ordered = int32_t;
  using Real = float;
  static constexpr Ordered kLimit = 0x7e000000;  // 2^125
  static constexpr Bits kInfinity = 0x7f800000, kNaN = 0x7fc00000;
  static constexpr Real kMax = 0x1.fffffep127f;
  static GACT_INLINE float decode(Bits bits) { return bit_cast<float>(bits); }
  static GACT_INLINE Bits encode(float value) { return bit_cast<Bits>(value); }
};

struct Float64 {
  using Bits = uint64_t;
  using Ordered = int64_t;
  using Real = double;
  static constexpr Ordered kLimit = 0x47c0000000000000;  // 2^125
  static constexpr Bits kInfinity = 0x7ff0000000000000, kNaN = 0x7ff8000000000000;
  static constexpr Real kMax = 0x1.fffffffffffffp1023;
  static GACT_INLINE double decode(Bits bits) { return bit_cast<double>(bits); }
  static GACT_INLINE Bits encode(double value) { return bit_cast<Bits>(value); }
};

struct BFloat16 {
  using Bits = uint16_t;
  using Ordered = int16_t;
  using Real = float;
  static constexpr Ordered kLimit = 0x7e00;  // 2^125
  static constexpr Bits kInfinity = 0x7f80, kNaN = 0x7fc0;
  static constexpr Real kMax = 0x1.fep127f;
  template <class Reals, class Word>
  static GACT_INLINE Reals to_real(Word word) {
    return bit_cast<Reals>(word << 16);
  }
  template <class Word, class Reals>
  static GACT_INLINE Word to_word(Reals value) {
    const Word bits = bit_cast<Word>(value);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
  static GACT_INLINE float decode(Bits bits) { return to_real<float>(uint32_t(bits)); }
  static GACT_INLINE Bits encode(float value) { return Bits(to_word<uint32_t>(value)); }
};

struct Float16 {
  using Bits = uint16_t;
  using Ordered = int16_t;
  using Real = float;
  static constexpr Ordered kLimit = 0x7400;  // 2^14
  static constexpr Bits kInfinity = 0x7c00, kNaN = 0x7e00;
  static constexpr Real kMax = 65504.0f;
  // Finite values only. The exponent's bias goes from 15 to 127; a subnormal gets an exponent of its own, which is then
  // subtracted, so that no operand is a subnormal float32, which the processor may be told to take for zero.
  template <class Reals, class Word>
  static GACT_INLINE Reals to_real(Word word) {
    const Word magnitude = (word & 0x7fff) << 13;
    const Word subnormal = bit_cast<Word>(bit_cast<Reals>(magnitude + 0x38800000u) - 0x1p-14f);
    const Word normal = magnitude + 0x38000000u;
    return bit_cast<Reals>((magnitude < 0x00800000u ? subnormal : normal) | (word & 0x8000) << 16);
  }
  template <class Word, class Reals>
  static GACT_INLINE Word to_word(Reals value) {
    const Word bits = bit_cast<Word>(value);
    const Word magnitude = bits & 0x7fffffff;
    const Word normal = (magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 lets the FPU round at 2^-24, the spacing of float16's subnormals.
    const Word subnormal = bit_cast<Word>(bit_cast<Reals>(magnitude) + 0.5f) - 0x3f000000u;
    return (magnitude < 0x38800000u ? subnormal : normal) | (bits >> 16 & 0x8000);
  }
  static GACT_INLINE float decode(Bits bits) { return to_real<float>(uint32_t(bits)); }
  static GACT_INLINE Bits encode(float value) { return Bits(to_word<uint32_t>(value)); }
};

// An integer that orders as the floats do, NaN beyond the infinities: minima and maxima over integers vectorise without
// fast-math, and both ends together tell whether the group is irregular. Its own inverse.
template <class Format>
GACT_INLINE typename Format::Ordered ordered(typename Format::Bits bits) {
  using Ordered = typename Format::Ordered;
  constexpr int sign_shift = 8 * sizeof(Ordered) - 1;
  const Ordered value = Ordered(bits);
  return Ordered(value ^ (Ordered(value >> sign_shift) & Ordered((uint64_t(1) << sign_shift) - 1)));
}

}  // namespace gact
