// CPU kernels: one pass over memory. Each group is scanned for its extremes and quantised while it sits in L1.
//
// Plain loops that the compiler vectorises, over buffers on the stack.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../codec.h"
#include "../kernels.h"
#include "planes.h"
#include "run.h"

#if defined(__GNUC__)
#define GACT_NOINLINE __attribute__((noinline))
#else
#define GACT_NOINLINE
#endif

namespace gact::cpu {
namespace {

// ---- Groups ------------------------------------------------------------------------------------------------------

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

// What a group stores beside its codes.
template <class Format>
struct Metadata {
  typename Format::Bits minimum;
  uint16_t step;
};

template <class Format>
GACT_NOINLINE Metadata<Format> compress_irregular(const typename Format::Bits* x, int bits, int group_size,
                                                  uint32_t seed_key, int64_t group, uint8_t* codes) {
  using Bits = typename Format::Bits;
  float values[kMaxGroupSize];
  float lowest = INFINITY, highest = -INFINITY;
  int kinds = 0;
  for (int j = 0; j < group_size; ++j) {
    const Bits magnitude = x[j] & (Bits(-1) >> 1);
    if (magnitude >= Format::kInfinity) {
      values[j] = magnitude > Format::kInfinity ? NAN : magnitude == x[j] ? INFINITY : -INFINITY;
      kinds |= 1 << kind_of(values[j]);
    } else {
      values[j] = Format::decode(x[j]);
      lowest = values[j] < lowest ? values[j] : lowest;
      highest = values[j] > highest ? values[j] : highest;
    }
  }
  if (lowest > highest) lowest = highest = 0.0f;
  lowest += 0.0f;  // -0.0 becomes +0.0
  kinds = representable_kinds(kinds, bits);
  const int levels = (1 << bits) - popcount3(kinds);
  const uint16_t step = encode_irregular_step(double(highest) - double(lowest), levels, kinds);
  const auto minimum = Format::encode(lowest);
  const Irregular decoded = decode_irregular(lowest, step, bits);
  const uint32_t key = group_key(seed_key, uint64_t(group), minimum, step);
  for (int j = 0; j < group_size; ++j) {
    codes[j] = uint8_t(quantize_irregular(values[j], decoded, noise(key, uint32_t(j))));
  }
  return {minimum, step};
}

template <class Format>
GACT_NOINLINE void decompress_irregular(const uint8_t* codes, int bits, int group_size, Metadata<Format> metadata,
                                        typename Format::Bits* x) {
  const Irregular group = decode_irregular(Format::decode(metadata.minimum), metadata.step, bits);
  for (int j = 0; j < group_size; ++j) x[j] = dequantize_irregular<Format>(codes[j], group);
}

template <class Format>
GACT_INLINE Metadata<Format> compress_group(const typename Format::Bits* __restrict x, int bits, int group_size,
                                            uint32_t seed_key, int64_t group, uint8_t* __restrict codes) {
  using Ordered = typename Format::Ordered;
  Ordered low = ordered<Format>(x[0]), high = low;
  for (int j = 0; j < group_size; ++j) {
    const Ordered value = ordered<Format>(x[j]);
    low = value < low ? value : low;
    high = value > high ? value : high;
  }
  if (high >= Format::kLimit || low <= ~Format::kLimit) {
    return compress_irregular<Format>(x, bits, group_size, seed_key, group, codes);
  }
  using Bits = typename Format::Bits;
  const float minimum = Format::decode(Bits(ordered<Format>(Bits(low)))) + 0.0f;  // -0.0 becomes +0.0
  const float maximum = Format::decode(Bits(ordered<Format>(Bits(high))));
  const int32_t levels = (1 << bits) - 1;
  const Metadata<Format> metadata = {Format::encode(minimum), encode_step(maximum - minimum, levels)};
  const float step = decode_step(metadata.step);
  const float inverse = step == 0.0f ? 0.0f : 1.0f / step;
  const uint32_t key = group_key(seed_key, uint64_t(group), metadata.minimum, metadata.step);
  for (int j = 0; j < group_size; ++j) {
    codes[j] = uint8_t(quantize(Format::decode(x[j]), minimum, inverse, noise(key, uint32_t(j)), levels));
  }
  return metadata;
}

template <class Format>
GACT_INLINE void decompress_group(const uint8_t* __restrict codes, int bits, int group_size, Metadata<Format> metadata,
                                  typename Format::Bits* __restrict x) {
  if (metadata.step & kIrregular) return decompress_irregular<Format>(codes, bits, group_size, metadata, x);
  const float minimum = Format::decode(metadata.minimum), step = decode_step(metadata.step);
  for (int j = 0; j < group_size; ++j) x[j] = Format::encode(dequantize(codes[j], minimum, step));
}

// ---- Tasks: what runs over a range of groups ---------------------------------------------------------------------

template <class Format, int Bits>
struct Compress {
  const typename Format::Bits* values;
  uint32_t seed_key;
  const Blob& blob;

  GACT_INLINE void operator()(int64_t begin, int64_t end) const {
    const int group_size = blob.group_size;
    typename Format::Bits tail[kMaxGroupSize];
    uint8_t codes[kMaxGroupSize];
    for (int64_t group = begin; group < end; ++group) {
      const auto* x = values + group * group_size;
      const int64_t left = blob.numel - group * group_size;
      if (left < group_size) {  // repeating an element leaves the group's extremes as they are
        for (int j = 0; j < group_size; ++j) tail[j] = x[j < left ? j : 0];
        x = tail;
      }
      const auto metadata = compress_group<Format>(x, Bits, group_size, seed_key, group, codes);
      if (left < group_size) memset(codes + left, 0, group_size - left);
      store(blob.minimum, group, metadata.minimum);
      store(blob.step, group, metadata.step);
      pack<Bits>(codes, group_size, blob.codes + group * (group_size * Bits / 8));
    }
  }
};

template <class Format, int Bits>
struct Decompress {
  const Blob& blob;
  typename Format::Bits* values;

  GACT_INLINE void operator()(int64_t begin, int64_t end) const {
    const int group_size = blob.group_size;
    typename Format::Bits tail[kMaxGroupSize];
    uint8_t codes[kMaxGroupSize];
    for (int64_t group = begin; group < end; ++group) {
      const int64_t left = blob.numel - group * group_size;
      auto* x = left < group_size ? tail : values + group * group_size;
      const Metadata<Format> metadata = {load<typename Format::Bits>(blob.minimum, group),
                                         load<uint16_t>(blob.step, group)};
      unpack<Bits>(blob.codes + group * (group_size * Bits / 8), group_size, codes);
      decompress_group<Format>(codes, Bits, group_size, metadata, x);
      if (left < group_size) memcpy(values + group * group_size, tail, left * sizeof(tail[0]));
    }
  }
};

struct PackMask {
  const uint8_t* mask;
  int64_t numel;
  uint8_t* packed;

  GACT_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t block = begin; block < end; ++block) {
      uint8_t codes[kMaskBlock] = {};
      const uint8_t* x = mask + block * kMaskBlock;
      const int64_t left = numel - block * kMaskBlock;
      for (int j = 0; j < (left < kMaskBlock ? int(left) : kMaskBlock); ++j) codes[j] = x[j] != 0;
      pack<1>(codes, kMaskBlock, packed + block * (kMaskBlock / 8));
    }
  }
};

struct UnpackMask {
  const uint8_t* packed;
  int64_t numel;
  uint8_t* mask;

  GACT_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t block = begin; block < end; ++block) {
      uint8_t tail[kMaskBlock];
      const int64_t left = numel - block * kMaskBlock;
      uint8_t* x = left < kMaskBlock ? tail : mask + block * kMaskBlock;
      unpack<1>(packed + block * (kMaskBlock / 8), kMaskBlock, x);
      if (left < kMaskBlock) memcpy(mask + block * kMaskBlock, tail, left);
    }
  }
};

// Calls f(std::integral_constant<int, bits>).
template <class F>
void with_bits(int bits, F&& f) {
  [&]<int... Less>(std::integer_sequence<int, Less...>) {
    (void)((bits == Less + 1 && (f(std::integral_constant<int, Less + 1>()), true)) || ...);
  }(std::make_integer_sequence<int, 8>());
}

// Calls f(Format()).
template <class F>
void with_format(Source source, F&& f) {
  switch (source) {
    case Source::kFloat32:
      return f(Float32());
    case Source::kBFloat16:
      return f(BFloat16());
    case Source::kFloat16:
      return f(Float16());
  }
}

}  // namespace

void compress(const void* values, uint64_t seed, const Blob& blob) {
  with_format(blob.source, [&](auto format) {
    using Format = decltype(format);
    const auto* source = static_cast<const typename Format::Bits*>(values);
    with_bits(blob.bits, [&](auto bits) {
      run(Compress<Format, bits()>{source, seed_key(seed), blob}, blob.numel, blob.group_size);
    });
  });
}

void decompress(const Blob& blob, void* values) {
  with_format(blob.source, [&](auto format) {
    using Format = decltype(format);
    auto* target = static_cast<typename Format::Bits*>(values);
    with_bits(blob.bits,
              [&](auto bits) { run(Decompress<Format, bits()>{blob, target}, blob.numel, blob.group_size); });
  });
}

void pack_mask(const uint8_t* mask, int64_t numel, uint8_t* packed) {
  run(PackMask{mask, numel, packed}, numel, kMaskBlock);
}

void unpack_mask(const uint8_t* packed, int64_t numel, uint8_t* mask) {
  run(UnpackMask{packed, numel, mask}, numel, kMaskBlock);
}

const char* capability() {
  switch (current_capability()) {
    case Capability::kAvx512:
      return "avx512";
    case Capability::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace gact::cpu
