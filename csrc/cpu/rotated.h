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

// Groups are turned so many at a time before their codes are looked for: a processor can then begin the next one while
// it waits for the norm of one.
constexpr int kBatch = 4;

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
  alignas(64) Real turned[kBatch][kMaxGroupSize];
  uint8_t codes[kBatch][kMaxGroupSize];
  for (int64_t first = begin; first < end; first += kBatch) {
    const int count = int(end - first < kBatch ? end - first : kBatch);
    Metadata<Format> metadata[kBatch] = {};
    Real squared_norms[kBatch];
    bool irregular[kBatch];
    for (int k = 0; k < count; ++k) {
      const int64_t group = first + k;
      const Element* const x = next_group(walk, blob.numel - group * size, size, buffer);
      const auto extremes = Elements::template find_extremes<Format>(x, size);
      irregular[k] = extremes.is_irregular || extremes.minimum <= -kRotatedLimit || extremes.maximum >= kRotatedLimit;
      if (!irregular[k]) {
        const Real sum = Elements::template sum<Format>(x, size);
        metadata[k].minimum = Format::encode(sum / Real(size) + Real(0));  // -0.0 becomes +0.0
        const Real mean = Format::decode(metadata[k].minimum);
        const uint32_t key = rotation_key(seed, uint64_t(group), metadata[k].minimum);
        Elements::template flip_deviations<Format>(x, size, mean, key, turned[k]);
        Elements::turn(turned[k], size);
        squared_norms[k] = Elements::squared_norm(turned[k], size);
        const Real above = extremes.maximum - mean, below = mean - extremes.minimum;
        irregular[k] = is_ill_suited(above > below ? above : below, squared_norms[k], size, bits);
      }
      if (irregular[k]) {
        metadata[k] = compress_irregular<Elements, Rounding::kDither, Format>(x, bits, size, seed, group, codes[k]);
      }
    }
    for (int k = 0; k < count; ++k) {
      const int64_t group = first + k;
      if (!irregular[k]) {
        const Real root = root_mean_square(squared_norms[k], size);
        const Real product = Elements::find_nearest(turned[k], size, bits, root, codes[k]);
        metadata[k].step = encode_scale(squared_norms[k], product, size);
      }
      // The codes of the padding stay: every element of the group is read from all of them.
      store(blob.minimum, group, metadata[k].minimum);
      store(blob.step, group, metadata[k].step);
      pack_codes(codes[k], blob.codes + group * packed_nbytes);
    }
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
