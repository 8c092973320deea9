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

// Loops over a group of `kSize` elements are unrolled; 0 stands for any size.
template <class Elements, class Format, int kSize>
void compress_rotated_groups(const Strided& values, const Codec& codec, const Blob& blob, int64_t begin, int64_t end) {
  using Element = typename Format::Bits;
  using Real = typename Format::Real;
  const int size = kSize ? kSize : codec.group_size, bits = codec.bits;
  const int64_t packed_nbytes = size * bits / 8;
  const Repack pack_codes = choose_packing(bits, size);
  const uint32_t seed = seed_key(codec.seed);
  Walk<Element> walk;
  walk.start(values, begin * size);
  Element buffer[kMaxGroupSize];
  alignas(64) Real turned[kMaxGroupSize];
  uint8_t codes[kMaxGroupSize];
  for (int64_t group = begin; group < end; ++group) {
    const int64_t left = blob.numel - group * size;
    const Element* const x = next_group(walk, left, size, buffer);
    const auto extremes = Elements::template find_extremes<Format>(x, size);
    bool irregular = extremes.is_irregular || extremes.minimum <= -kRotatedLimit || extremes.maximum >= kRotatedLimit;
    Metadata<Format> metadata{};
    if (!irregular) {
      const Real sum = Elements::template sum<Format>(x, size);
      metadata.minimum = Format::encode(sum / Real(size) + Real(0));  // -0.0 becomes +0.0
      const Real mean = Format::decode(metadata.minimum);
      const uint32_t key = rotation_key(seed, uint64_t(group), metadata.minimum);
      Elements::template flip_deviations<Format>(x, size, mean, key, turned);
      Elements::turn(turned, size);
      const Real squared_norm = Elements::squared_norm(turned, size);
      const Real above = extremes.maximum - mean, below = mean - extremes.minimum;
      irregular = is_ill_suited(above > below ? above : below, squared_norm, size, bits);
      if (!irregular) {
        const Real root = root_mean_square(squared_norm, size);
        metadata.step = encode_scale(squared_norm, Elements::find_nearest(turned, size, bits, root, codes), size);
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

template <class Elements, class Format, int kSize>
void decompress_rotated_groups(const Blob& blob, const Codec& codec, void* values, int64_t begin, int64_t end) {
  using Element = typename Format::Bits;
  using Real = typename Format::Real;
  const int size = kSize ? kSize : codec.group_size, bits = codec.bits;
  const int64_t packed_nbytes = size * bits / 8;
  const Repack unpack_codes = choose_packing(bits, size, /*inverse=*/true);
  const uint32_t seed = seed_key(codec.seed);
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
      const Real mean = Format::decode(metadata.minimum), scale = decode_step(metadata.step);
      Elements::read_centroids(codes, size, bits, turned);
      Elements::turn(turned, size);
      const uint32_t key = rotation_key(seed, uint64_t(group), metadata.minimum);
      Elements::template add_flipped<Format>(turned, size, mean, scale, key, x);
    }
    if (left < size) memcpy(target, buffer, left * sizeof(Element));
  }
}

constexpr int kUsualGroup = 256;

template <class Elements, class Format>
void compress_rotated_range(const Strided& values, const Codec& codec, const Blob& blob, int64_t begin, int64_t end) {
  constexpr auto usual = compress_rotated_groups<Elements, Format, kUsualGroup>;
  constexpr auto any = compress_rotated_groups<Elements, Format, 0>;
  (codec.group_size == kUsualGroup ? usual : any)(values, codec, blob, begin, end);
}

template <class Elements, class Format>
void decompress_rotated_range(const Blob& blob, const Codec& codec, void* values, int64_t begin, int64_t end) {
  constexpr auto usual = decompress_rotated_groups<Elements, Format, kUsualGroup>;
  constexpr auto any = decompress_rotated_groups<Elements, Format, 0>;
  (codec.group_size == kUsualGroup ? usual : any)(blob, codec, values, begin, end);
}

}  // namespace
}  // namespace gact::cpu
