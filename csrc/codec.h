// The codec's arithmetic, spelled out once for the CPU and the CUDA kernels.
//
// gact_fx/reference.py states the same arithmetic in PyTorch, and the tests hold the two together bit by bit. So the
// order of the operations below is part of the storage format: compile with -ffp-contract=off (nvcc: --fmad=false) and
// without fast-math.
#pragma once

#include <cmath>
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

constexpr int kMaxGroupSize = 1024;
constexpr int kMaskBlock = 256;        // elements of a mask that are packed together, into 32 bytes
constexpr float kMinStep = 0x1p-100f;  // keeps 1/step far from overflow; a range below it is noise to any gradient

template <class To, class From>
GACT_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- Source formats ----------------------------------------------------------------------------------------------
//
// Decode and encode are integer arithmetic so that loops over them vectorise without F16C or AVX512-BF16. `encode`
// rounds to nearest even and takes finite values within the format's range only. An element whose magnitude reaches
// kLimit makes its group irregular; below it neither the range nor a decoded value can overflow.

struct Float32 {
  using Bits = uint32_t;
  using Ordered = int32_t;
  static constexpr Ordered kLimit = 0x7e000000;  // 2^125
  static constexpr Bits kInfinity = 0x7f800000, kNaN = 0x7fc00000;
  static constexpr double kMax = 0x1.fffffep127;
  static GACT_INLINE float decode(Bits bits) { return bit_cast<float>(bits); }
  static GACT_INLINE Bits encode(float value) { return bit_cast<Bits>(value); }
};

struct BFloat16 {
  using Bits = uint16_t;
  using Ordered = int16_t;
  static constexpr Ordered kLimit = 0x7e00;  // 2^125
  static constexpr Bits kInfinity = 0x7f80, kNaN = 0x7fc0;
  static constexpr double kMax = 0x1.fep127;
  static GACT_INLINE float decode(Bits bits) { return bit_cast<float>(uint32_t(bits) << 16); }
  static GACT_INLINE Bits encode(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    return Bits((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {
  using Bits = uint16_t;
  using Ordered = int16_t;
  static constexpr Ordered kLimit = 0x7400;  // 2^14
  static constexpr Bits kInfinity = 0x7c00, kNaN = 0x7e00;
  static constexpr double kMax = 65504.0;
  // Finite values only: the product moves the exponent's bias from 15 to 127 and makes subnormals normal.
  static GACT_INLINE float decode(Bits bits) {
    const uint32_t magnitude = bit_cast<uint32_t>(bit_cast<float>((bits & 0x7fffu) << 13) * 0x1p112f);
    return bit_cast<float>(magnitude | (bits & 0x8000u) << 16);
  }
  static GACT_INLINE Bits encode(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 lets the FPU round at 2^-24, the spacing of float16's subnormals.
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    return Bits((magnitude < 0x38800000u ? subnormal : normal) | (bits >> 16 & 0x8000));
  }
};

// An integer that orders as the floats do, NaN beyond the infinities: minima and maxima over integers vectorise without
// fast-math, and both ends together tell whether the group is irregular. Its own inverse.
template <class Format>
GACT_INLINE typename Format::Ordered ordered(typename Format::Bits bits) {
  using Ordered = typename Format::Ordered;
  constexpr int sign_shift = 8 * sizeof(Ordered) - 1;
  const Ordered value = Ordered(bits);
  return Ordered(value ^ (Ordered(value >> sign_shift) & Ordered((uint32_t(1) << sign_shift) - 1)));
}

// ---- Noise: a counter-based hash, no generator -------------------------------------------------------------------

GACT_INLINE uint32_t mix32(uint32_t x) {  // lowbias32, Chris Wellons, "Prospecting for hash functions" (2018)
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

GACT_INLINE uint32_t chain(uint32_t key, uint32_t word) { return mix32(key ^ word); }

GACT_INLINE uint32_t seed_key(uint64_t seed) { return chain(chain(0, uint32_t(seed)), uint32_t(seed >> 32)); }

GACT_INLINE uint32_t group_key(uint32_t seed_key, uint64_t group, uint32_t minimum_bits, uint32_t step_bits) {
  const uint32_t key = chain(chain(seed_key, uint32_t(group)), uint32_t(group >> 32));
  return chain(chain(key, minimum_bits), step_bits);
}

// Uniform in [0, 1) with 24 bits. The detour over int32 is exact and has an instruction on every vector unit.
GACT_INLINE float noise(uint32_t group_key, uint32_t element) {
  return float(int32_t(mix32(group_key + element * 0x9e3779b9u) >> 8)) * 0x1p-24f;
}

// ---- Regular groups ----------------------------------------------------------------------------------------------

// The step's bits in bfloat16, rounded up so that every element of the group lies within the codes' range.
GACT_INLINE uint16_t encode_step(float range, int32_t levels) {
  if (range == 0.0f) return 0;
  const float step = range / float(levels);
  const uint32_t bits = bit_cast<uint32_t>(step > kMinStep ? step : kMinStep);
  return uint16_t((bits + 0xffff) >> 16);
}

GACT_INLINE float decode_step(uint16_t bits) { return bit_cast<float>(uint32_t(bits) << 16); }

GACT_INLINE int32_t quantize(float x, float minimum, float inverse_step, float noise, int32_t levels) {
  const int32_t code = int32_t((x - minimum) * inverse_step + noise);  // the sum is >= 0, so truncation is the floor
  return code < levels ? code : levels;
}

GACT_INLINE float dequantize(int32_t code, float minimum, float step) { return minimum + float(code) * step; }

// ---- Irregular groups: non-finite or huge elements ---------------------------------------------------------------
//
// The stored step has its sign bit set, the set of non-finite kinds in its three low bits, and a quarter of the step in
// the others (a quarter because the range of a group may be twice the largest float). Codes below `levels` are finite
// values, the codes from there on are the kinds present, in order. Arithmetic is in double.

constexpr uint16_t kIrregular = 0x8000;

struct Irregular {
  int kinds;   // bit 0: NaN, bit 1: +Inf, bit 2: -Inf
  int levels;  // codes for finite values
  double minimum;
  double step;
};

GACT_INLINE int popcount3(int kinds) { return (kinds & 1) + (kinds >> 1 & 1) + (kinds >> 2 & 1); }

GACT_INLINE int kind_of(float value) {  // -1: finite
  return value != value ? 0 : value == INFINITY ? 1 : value == -INFINITY ? 2 : -1;
}

// The kinds that the codes tell apart: one bit has no room for two kinds and a finite level, so all become NaN there.
GACT_INLINE int representable_kinds(int kinds, int bits) { return (1 << bits) > popcount3(kinds) ? kinds : 1; }

GACT_INLINE uint16_t encode_irregular_step(double range, int levels, int kinds) {
  uint32_t bits = 0;
  if (range != 0.0 && levels > 1) {
    const float quarter = float(range / double(levels - 1) * 0.25);
    bits = bit_cast<uint32_t>(quarter > kMinStep ? quarter : kMinStep);
    bits = (bits + 0x7ffff) >> 19 << 3;  // upwards to 4 mantissa bits; 3 more make room for the kinds
  }
  return uint16_t(kIrregular | bits | uint32_t(kinds));
}

GACT_INLINE Irregular decode_irregular(float minimum, uint16_t step_bits, int bits) {
  const int kinds = step_bits & 7;
  const uint16_t quarter = step_bits & 0x7ff8;
  return {kinds, (1 << bits) - popcount3(kinds), double(minimum), double(decode_step(quarter)) * 4.0};
}

GACT_INLINE int32_t quantize_irregular(float x, const Irregular& group, float noise) {
  const int kind = kind_of(x);
  if (kind >= 0) {
    const bool present = group.kinds >> kind & 1;  // if not, it was merged into NaN
    return group.levels + (present ? popcount3(group.kinds & ((1 << kind) - 1)) : 0);
  }
  if (group.step == 0.0) return 0;
  const double position = (double(x) - group.minimum) * (1.0 / group.step) + double(noise);
  const int32_t code = int32_t(position);
  return code < group.levels ? code : group.levels - 1;
}

template <class Format>
GACT_INLINE typename Format::Bits dequantize_irregular(int32_t code, const Irregular& group) {
  using Bits = typename Format::Bits;
  if (code >= group.levels) {
    int kind = 0;  // the (code - levels)-th of the set bits
    for (int skip = code - group.levels; kind < 2; ++kind) {
      if ((group.kinds >> kind & 1) && skip-- == 0) break;
    }
    if (kind == 0) return Format::kNaN;
    return kind == 1 ? Format::kInfinity : Bits(Format::kInfinity | Bits(1) << (8 * sizeof(Bits) - 1));
  }
  const double value = group.minimum + double(code) * group.step;
  return Format::encode(float(value > Format::kMax ? Format::kMax : value));
}

}  // namespace gact
