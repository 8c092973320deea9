// A group's elements and metadata in memory, and one irregular group to codes and metadata, and back. `Elements` has
// the inner loops (elements.h, vectorized.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "../codec.h"
#include "elements.h"
#include "walk.h"

#if defined(__GNUC__)
#define GACT_NOINLINE __attribute__((noinline))
#else
#define GACT_NOINLINE
#endif

namespace gact::cpu {
namespace {

template <class Bits>
GACT_INLINE Bits load(const uint8_t* from, int64_t index) {
  Bits bits;
  memcpy(&bits, from + index * int64_t(sizeof(Bits)), sizeof(Bits));
  return bits;
}

template <class Bits>
GACT_INLINE void store(uint8_t* to, int64_t index, Bits bits) {
  memcpy(to + index * int64_t(sizeof(Bits)), &bits, sizeof(Bits));
}

// The elements of a group; the last group is filled up by repeating the last one.
template <class Element>
GACT_INLINE const Element* next_group(Walk<Element>& walk, int64_t left, int group_size, Element* buffer) {
  if (left >= group_size) return walk.next(group_size, buffer);
  const Element* x = walk.next(left, buffer);
  const Element last = x[left - 1];
  for (int j = 0; j < group_size; ++j) buffer[j] = j < left ? x[j] : last;
  return buffer;
}

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
