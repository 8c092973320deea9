// The kernels over a range of groups, to be compiled once per instruction set: `make_kernels<Elements, Small>()`, where
// `Small` has the inner loops for groups that are too short for those of `Elements`.
#pragma once

#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "draws.h"
#include "groups.h"
#include "instruction_sets.h"
#include "planes.h"
#include "rotated.h"
#include "walk.h"

namespace gact::cpu {
namespace {

constexpr int kSmallGroup = 32;

// A range is worked on at several places at once, a tile being one group from each. Memory then streams from as many
// pages (one alone gave 1.3 times memcpy's rate where eight gave 1.7), and what has to wait within a group (extremes, a
// division, hashes) overlaps with the other groups, for every step is done for the whole tile before the next.
constexpr int kMaxStretches = 8;
constexpr int kTileElements = 2 * kMaxGroupSize;

class Stretches {
 public:
  Stretches(int64_t begin, int64_t end, int group_size) : begin_(begin), end_(end) {
    const int most = kTileElements / group_size < kMaxStretches ? kTileElements / group_size : kMaxStretches;
    // Odd, so that the places do not fall on the same sets of the caches.
    length_ = (end - begin + most - 1) / most | 1;
    count_ = int((end - begin + length_ - 1) / length_);
  }
  GACT_INLINE int count() const { return count_; }
  GACT_INLINE int64_t length() const { return length_; }
  GACT_INLINE int64_t group(int stretch, int64_t step) const { return begin_ + stretch * length_ + step; }
  // How many stretches have a group at this step: the last may be shorter.
  GACT_INLINE int count_at(int64_t step) const { return group(count_ - 1, step) < end_ ? count_ : count_ - 1; }

 private:
  int64_t begin_, end_, length_;
  int count_;
};

template <class Elements, Rounding rounding, class Format>
void compress_range(const Strided& values, const Codec& codec, const Blob& blob, int64_t begin, int64_t end) {
  using Element = typename Format::Bits;
  using Real = typename Format::Real;
  const int group_size = codec.group_size, bits = codec.bits;
  const int64_t packed_nbytes = group_size * bits / 8;
  const Repack pack_codes = choose_packing(bits, group_size);
  const uint32_t seed = seed_key(codec.seed);
  const Stretches stretches(begin, end, group_size);
  Walk<Element> walks[kMaxStretches];
  for (int i = 0; i < stretches.count(); ++i) walks[i].start(values, stretches.group(i, 0) * group_size);
  Element buffer[kTileElements];
  uint8_t codes[kMaxGroupSize];
  const Element* x[kMaxStretches];
  Extremes<Real> extremes[kMaxStretches];
  Metadata<Format> metadata[kMaxStretches];
  uint32_t key[kMaxStretches];
  for (int64_t step = 0; step < stretches.length(); ++step) {
    const int count = stretches.count_at(step);
    for (int i = 0; i < count; ++i) {
      const int64_t left = blob.numel - stretches.group(i, step) * group_size;
      x[i] = next_group(walks[i], left, group_size, buffer + i * group_size);
      extremes[i] = Elements::template find_extremes<Format>(x[i], group_size);
    }
    for (int i = 0; i < count; ++i) {
      const Real minimum = extremes[i].minimum + Real(0);  // -0.0 becomes +0.0
      metadata[i] = {Format::encode(minimum), encode_step(Real(extremes[i].maximum - minimum), (1 << bits) - 1)};
      key[i] = group_key(seed, uint64_t(stretches.group(i, step)), metadata[i].minimum, metadata[i].step);
    }
    for (int i = 0; i < count; ++i) {
      const int64_t group = stretches.group(i, step), left = blob.numel - group * group_size;
      if (extremes[i].is_irregular) {
        metadata[i] = compress_irregular<Elements, rounding, Format>(x[i], bits, group_size, seed, group, codes);
      } else {
        const auto scale = regular_scale(metadata[i], bits);
        Elements::template quantize_all<rounding, Format>(x[i], group_size, scale, key[i], codes);
      }
      if (left < group_size) memset(codes + left, 0, group_size - left);
      store(blob.minimum, group, metadata[i].minimum);
      store(blob.step, group, metadata[i].step);
      pack_codes(codes, blob.codes + group * packed_nbytes);
    }
  }
}

template <class Elements, Rounding rounding, class Format>
void decompress_range(const Blob& blob, const Codec& codec, void* values, int64_t begin, int64_t end) {
  using Element = typename Format::Bits;
  const int group_size = codec.group_size, bits = codec.bits;
  const int64_t packed_nbytes = group_size * bits / 8;
  const Repack unpack_codes = choose_packing(bits, group_size, /*inverse=*/true);
  const uint32_t seed = seed_key(codec.seed);
  const Stretches stretches(begin, end, group_size);
  Element buffer[kMaxGroupSize];
  uint8_t codes[kMaxGroupSize];
  Metadata<Format> metadata[kMaxStretches];
  uint32_t key[kMaxStretches] = {};
  for (int64_t step = 0; step < stretches.length(); ++step) {
    const int count = stretches.count_at(step);
    for (int i = 0; i < count; ++i) {
      const int64_t group = stretches.group(i, step);
      metadata[i] = {load<Element>(blob.minimum, group), load<uint16_t>(blob.step, group)};
      if constexpr (rounding == Rounding::kDither) {
        key[i] = group_key(seed, uint64_t(group), metadata[i].minimum, metadata[i].step);
      }
    }
    for (int i = 0; i < count; ++i) {
      const int64_t group = stretches.group(i, step), left = blob.numel - group * group_size;
      Element* const target = static_cast<Element*>(values) + group * group_size;
      Element* const x = left < group_size ? buffer : target;
      unpack_codes(blob.codes + group * packed_nbytes, codes);
      if (metadata[i].step & kIrregular) {
        decompress_irregular<Elements, rounding, Format>(codes, bits, group_size, metadata[i], key[i], x);
      } else {
        const auto scale = regular_scale(metadata[i], bits);
        Elements::template dequantize_all<rounding, Format>(codes, group_size, scale, key[i], x);
      }
      if (left < group_size) memcpy(target, buffer, left * sizeof(Element));
    }
  }
}

// ---- 16 bits -----------------------------------------------------------------------------------------------------

template <Rounding rounding>
void compress_bfloat16_range(const Strided& values, const Codec& codec, const Blob& blob, int64_t begin, int64_t end) {
  const int group_size = codec.group_size;
  const uint32_t seed = seed_key(codec.seed);
  Walk<uint32_t> walk;
  walk.start(values, begin * group_size);
  uint32_t buffer[kMaxGroupSize];
  uint16_t codes[kMaxGroupSize];
  for (int64_t group = begin; group < end; ++group) {
    const int64_t left = blob.numel - group * group_size;
    const uint32_t* x = next_group(walk, left, group_size, buffer);
    const uint32_t key = group_key(seed, uint64_t(group), uint32_t(0), 0);
    for (int j = 0; j < group_size; ++j) codes[j] = round_to_bfloat16<rounding>(x[j], key, uint32_t(j));
    if (left < group_size) memset(codes + left, 0, (group_size - left) * sizeof(codes[0]));
    memcpy(blob.codes + group * group_size * 2, codes, group_size * sizeof(codes[0]));
  }
}

inline void decompress_bfloat16_range(const Blob& blob, const Codec& codec, void* values, int64_t begin, int64_t end) {
  const int64_t last = end * codec.group_size;
  uint8_t* const to = static_cast<uint8_t*>(values);
  for (int64_t i = begin * codec.group_size; i < (last < blob.numel ? last : blob.numel); ++i) {
    store(to, i, uint32_t(load<uint16_t>(blob.codes, i)) << 16);
  }
}

// ---- Integers ----------------------------------------------------------------------------------------------------

template <class Element>
bool pack_integers_range(const Element* values, const Integers& integers, uint8_t* packed, int64_t begin, int64_t end) {
  const bool has_high = integers.bits > 8;
  const Repack pack_low = choose_packing(has_high ? 8 : integers.bits, kIntegerBlock);
  const Repack pack_high = choose_packing(has_high ? integers.bits - 8 : 1, kIntegerBlock);
  Element all = 0;
  for (int64_t block = begin; block < end; ++block) {
    uint8_t low[kIntegerBlock] = {}, high[kIntegerBlock] = {};
    const Element* x = values + block * kIntegerBlock;
    const int64_t left = integers.numel - block * kIntegerBlock;
    const int count = left < kIntegerBlock ? int(left) : kIntegerBlock;
    if (integers.is_mask) {
      for (int j = 0; j < count; ++j) low[j] = x[j] != 0;
    } else {
      for (int j = 0; j < count; ++j) {
        all |= x[j];
        low[j] = uint8_t(x[j]);
        high[j] = uint8_t(uint64_t(x[j]) >> 8);
      }
    }
    uint8_t* const to = packed + block * (kIntegerBlock / 8 * integers.bits);
    pack_low(low, to);
    if (has_high) pack_high(high, to + kIntegerBlock);
  }
  return uint64_t(all) >> integers.value_bits == 0;
}

template <class Element>
void unpack_integers_range(const uint8_t* packed, const Integers& integers, Element* values, int64_t begin,
                           int64_t end) {
  const bool has_high = integers.bits > 8;
  const Repack unpack_low = choose_packing(has_high ? 8 : integers.bits, kIntegerBlock, /*inverse=*/true);
  const Repack unpack_high = choose_packing(has_high ? integers.bits - 8 : 1, kIntegerBlock, /*inverse=*/true);
  for (int64_t block = begin; block < end; ++block) {
    uint8_t low[kIntegerBlock], high[kIntegerBlock] = {};
    Element* const x = values + block * kIntegerBlock;
    const int64_t left = integers.numel - block * kIntegerBlock;
    const int count = left < kIntegerBlock ? int(left) : kIntegerBlock;
    const uint8_t* const from = packed + block * (kIntegerBlock / 8 * integers.bits);
    unpack_low(from, low);
    if (has_high) unpack_high(from + kIntegerBlock, high);
    for (int j = 0; j < count; ++j) x[j] = Element(low[j] | high[j] << 8);
  }
}

// ---- Choosing an instance ----------------------------------------------------------------------------------------

template <class F>
void with_format(Source source, F&& f) {
  switch (source) {
    case Source::kFloat32:
      return f(Float32());
    case Source::kBFloat16:
      return f(BFloat16());
    case Source::kFloat16:
      return f(Float16());
    case Source::kFloat64:
      return f(Float64());
  }
}

template <class F>
void with_rounding(Rounding rounding, F&& f) {
  switch (rounding) {
    case Rounding::kStochastic:
      return f(std::integral_constant<Rounding, Rounding::kStochastic>());
    case Rounding::kDither:
      return f(std::integral_constant<Rounding, Rounding::kDither>());
    case Rounding::kNearest:
      return f(std::integral_constant<Rounding, Rounding::kNearest>());
    case Rounding::kRotated:
      return f(std::integral_constant<Rounding, Rounding::kRotated>());
  }
}

template <class F>
void with_unsigned(int itemsize, F&& f) {
  switch (itemsize) {
    case 1:
      return f(uint8_t());
    case 2:
      return f(uint16_t());
    case 4:
      return f(uint32_t());
    default:
      return f(uint64_t());
  }
}

template <class Elements, class Small>
Kernels make_kernels(const char* name) {
  Kernels kernels;
  kernels.name = name;
  kernels.compress = [](const Strided& values, const Codec& codec, const Blob& blob, int64_t begin, int64_t end) {
    with_rounding(codec.rounding, [&](auto rounding) {
      constexpr Rounding r = rounding();
      const auto compress = [&](auto format, auto elements) {
        using Format = decltype(format);
        using Loops = decltype(elements);
        if constexpr (r == Rounding::kRotated) {
          compress_rotated_range<Loops, Format>(values, codec, blob, begin, end);
        } else {
          compress_range<Loops, r, Format>(values, codec, blob, begin, end);
        }
      };
      if constexpr (r != Rounding::kRotated) {
        if (codec.bits == kBFloat16Bits) return compress_bfloat16_range<r>(values, codec, blob, begin, end);
      }
      with_format(codec.source, [&](auto format) {
        codec.group_size == kSmallGroup ? compress(format, Small()) : compress(format, Elements());
      });
    });
  };
  kernels.decompress = [](const Blob& blob, const Codec& codec, void* values, int64_t begin, int64_t end) {
    if (codec.bits == kBFloat16Bits) return decompress_bfloat16_range(blob, codec, values, begin, end);
    with_rounding(codec.rounding, [&](auto rounding) {
      constexpr Rounding r = rounding();
      // Codes are read in the same way however they were rounded, but for dither.
      constexpr Rounding read = r == Rounding::kDither ? r : Rounding::kStochastic;
      const auto decompress = [&](auto format, auto elements) {
        using Format = decltype(format);
        using Loops = decltype(elements);
        if constexpr (r == Rounding::kRotated) {
          decompress_rotated_range<Loops, Format>(blob, codec, values, begin, end);
        } else {
          decompress_range<Loops, read, Format>(blob, codec, values, begin, end);
        }
      };
      with_format(codec.source, [&](auto format) {
        codec.group_size == kSmallGroup ? decompress(format, Small()) : decompress(format, Elements());
      });
    });
  };
  kernels.pack_integers = [](const void* values, const Integers& integers, uint8_t* packed, int64_t begin,
                             int64_t end) {
    bool inside = true;
    with_unsigned(integers.itemsize, [&](auto element) {
      using Element = decltype(element);
      inside = pack_integers_range(static_cast<const Element*>(values), integers, packed, begin, end);
    });
    return inside;
  };
  kernels.unpack_integers = [](const uint8_t* packed, const Integers& integers, void* values, int64_t begin,
                               int64_t end) {
    with_unsigned(integers.itemsize, [&](auto element) {
      unpack_integers_range(packed, integers, static_cast<decltype(element)*>(values), begin, end);
    });
  };
  kernels.draw_mask = draw_mask_range<Elements>;
  return kernels;
}

}  // namespace
}  // namespace gact::cpu
