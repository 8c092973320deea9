// One group of elements to codes and metadata, and back. `Elements` has the inner loops (elements.h).
#pragma once

#include <cmath>
#include <cstdint>

#include "../codec.h"
#include "elements.h"

#if defined(__GNUC__)
#define GACT_NOINLINE __attribute__((noinline))
#else
#define GACT_NOINLINE
#endif

namespace gact::cpu {
namespace {

template <Rounding rounding, class Format>
GACT_NOINLINE Metadata<Format> compress_irregular(const typename Format::Bits* x, int bits, int group_size,
                                                  uint32_t seed_key, int64_t group, uint8_t* codes) {
  using Real = typename Format::Real;
  Real lowest = 0, highest = 0;
  bool any_finite = false;
  int kinds = 0;
  for (int j = 0; j < group_size; ++j) {
    const int kind = kind_of<Format>(x[j]);
    if (kind >= 0) {
      kinds |= 1 << kind;
      continue;
    }
    const Real value = Format::decode(x[j]);
    lowest = !any_finite || value < lowest ? value : lowest;
    highest = !any_finite || value > highest ? value : highest;
    any_finite = true;
  }
  const Metadata<Format> metadata = irregular_metadata<Format>(lowest, highest, kinds, bits);
  const auto scale = irregular_scale<Format>(metadata, bits);
  const Real factor = inverse(scale.step);
  const uint32_t key = group_key(seed_key, uint64_t(group), metadata.minimum, metadata.step);
  for (int j = 0; j < group_size; ++j) {
    const int32_t n = element_noise<rounding>(key, uint32_t(j));
    codes[j] = uint8_t(quantize_irregular<Format>(x[j], scale, factor, metadata.step, n));
  }
  return metadata;
}

template <Rounding rounding, class Format>
GACT_NOINLINE void decompress_irregular(const uint8_t* codes, int bits, int group_size, Metadata<Format> metadata,
                                        uint32_t key, typename Format::Bits* x) {
  const auto scale = irregular_scale<Format>(metadata, bits);
  for (int j = 0; j < group_size; ++j) {
    const int32_t n = element_noise<rounding>(key, uint32_t(j));
    x[j] = dequantize_irregular<rounding, Format>(codes[j], scale, metadata.step, n);
  }
}

}  // namespace
}  // namespace gact::cpu
