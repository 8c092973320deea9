// One irregular group to codes and metadata, and back. `Elements` has the inner loops (elements.h, vectorized.h).
#pragma once

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

template <class Elements, Rounding rounding, class Format>
GACT_NOINLINE Metadata<Format> compress_irregular(const typename Format::Bits* x, int bits, int group_size,
                                                  uint32_t seed_key, int64_t group, uint8_t* codes) {
  const auto found = Elements::template find_contents<Format>(x, group_size);
  const Metadata<Format> metadata = irregular_metadata<Format>(found.lowest, found.highest, found.kinds, bits);
  const auto scale = irregular_scale<Format>(metadata, bits);
  const uint32_t key = group_key(seed_key, uint64_t(group), metadata.minimum, metadata.step);
  Elements::template quantize_irregular_all<rounding, Format>(x, group_size, scale, metadata.step, key, codes);
  return metadata;
}

template <class Elements, Rounding rounding, class Format>
GACT_NOINLINE void decompress_irregular(const uint8_t* codes, int bits, int group_size, Metadata<Format> metadata,
                                        uint32_t key, typename Format::Bits* x) {
  const auto scale = irregular_scale<Format>(metadata, bits);
  Elements::template dequantize_irregular_all<rounding, Format>(codes, group_size, scale, metadata.step, key, x);
}

}  // namespace
}  // namespace gact::cpu
