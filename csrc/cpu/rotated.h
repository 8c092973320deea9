// The kernels for rotated codes over a range of groups. `Elements` has the loops that go across a group's elements.
#pragma once

#include <cstdint>
#include <cstring>

#include "../rotation.h"
#include "groups.h"
#include "planes.h"
#include "walk.h"

namespace gact::cpu {
namespace {

// The sum of `x`, which is used up: half by half, an order that vectors and a GPU's threads can keep.
template <class Real>
GACT_INLINE Real tree_sum(Real* __restrict x, int count) {
  for (int half = count / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[half + i];
  }
  return x[0];
}

template <class Elements, class Format>
void compress_rotated_range(const Strided& values, const Codec& codec, const Blob& blob, int64_t begin, int64_t end) {
  using Element = typename Format::Bits;
  using Real = typename Format::Real;
  const int size = codec.group_size, bits = codec.bits;
  const int64_t packed_nbytes = size * bits / 8;
  const Repack pack_codes = choose_packing(bits, size);
  const uint32_t seed = seed_key(codec.seed);
  Walk<Element> walk;
  walk.start(values, begin * size);
  Element buffer[kMaxGroupSize];
  alignas(64) Real turned[kMaxGroupSize], terms[kMaxGroupSize];
  uint8_t codes[kMaxGroupSize];
  for (int64_t group = begin; group < end; ++group) {
    const int64_t left = blob.numel - group * size;
    const Element* const x = next_group(walk, left, size, buffer);
    const auto extremes = Elements::template find_extremes<Format>(x, size);
    bool irregular = extremes.is_irregular || extremes.minimum <= -kRotatedLimit || extremes.maximum >= kRotatedLimit;
    Metadata<Format> metadata{};
    if (!irregular) {
      for (int i = 0; i < size; ++i) terms[i] = turned[i] = Real(Format::decode(x[i]));
      metadata.minimum = Format::encode(tree_sum(terms, size) / Real(size) + Real(0));  // -0.0 becomes +0.0
      const Real mean = Format::decode(metadata.minimum);
      for (int i = 0; i < size; ++i) turned[i] -= mean;
      Elements::flip_all(turned, size, rotation_key(seed, uint64_t(group), metadata.minimum));
      Elements::turn(turned, size);
      for (int i = 0; i < size; ++i) terms[i] = turned[i] * turned[i];
      const Real squared_norm = tree_sum(terms, size);
      const Real above = extremes.maximum - mean, below = mean - extremes.minimum;
      irregular = is_ill_suited(above > below ? above : below, squared_norm, size, bits);
      if (!irregular) {
        const Real root = root_mean_square(squared_norm, size);
        Elements::find_nearest(turned, size, bits, root, codes, terms);
        metadata.step = encode_scale(squared_norm, tree_sum(terms, size), size);
      }
    }
    if (irregular) {
      metadata = compress_irregular<Elements, Rounding::kDither, Format>(x, bits, size, seed, group, codes);
    }
    // The codes of the padding stay: every element of the group is read from all of them.
    store(blob.minimum, group, metadata.minimum);
    store(blob.step, group, metadata.step);
    pack_codes(codes, blob.codes + group * packed_nbytes);
  }
}

template <class Elements, class Format>
void decompress_rotated_range(const Blob& blob, const Codec& codec, void* values, int64_t begin, int64_t end) {
  using Element = typename Format::Bits;
  using Real = typename Format::Real;
  const int size = codec.group_size, bits = codec.bits;
  const int64_t packed_nbytes = size * bits / 8;
  const Repack unpack_codes = choose_packing(bits, size, /*inverse=*/true);
  const uint32_t seed = seed_key(codec.seed);
  Real table[1 << kMaxRotatedBits];
  for (int code = 0, half = 1 << (bits - 1); code < half; ++code) {
    table[code] = centroid(bits, code);
    table[half + code] = -table[code];
  }
  Element buffer[kMaxGroupSize];
  alignas(64) Real turned[kMaxGroupSize];
  uint8_t codes[kMaxGroupSize];
  for (int64_t group = begin; group < end; ++group) {
    const int64_t left = blob.numel - group * size;
    Element* const target = static_cast<Element*>(values) + group * size;
    Element* const x = left < size ? buffer : target;
    const Metadata<Format> metadata{load<Element>(blob.minimum, group), load<uint16_t>(blob.step, group)};
    unpack_codes(blob.codes + group * packed_nbytes, codes);
    if (metadata.step & kIrregular) {
      const uint32_t key = group_key(seed, uint64_t(group), metadata.minimum, metadata.step);
      decompress_irregular<Elements, Rounding::kDither, Format>(codes, bits, size, metadata, key, x);
    } else {
      for (int i = 0; i < size; ++i) turned[i] = table[codes[i]];
      Elements::turn(turned, size);
      Elements::flip_all(turned, size, rotation_key(seed, uint64_t(group), metadata.minimum));
      const Real mean = Format::decode(metadata.minimum), scale = decode_step(metadata.step);
      for (int i = 0; i < size; ++i) x[i] = decode_rotated<Format>(turned[i], mean, scale);
    }
    if (left < size) memcpy(target, buffer, left * sizeof(Element));
  }
}

}  // namespace
}  // namespace gact::cpu
