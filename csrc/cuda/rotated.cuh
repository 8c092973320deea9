// The kernels for rotated codes (csrc/rotation.h): the lanes of a group turn it together.
#pragma once

#include "../rotation.h"
#include "codes.cuh"
#include "group.cuh"
#include "ways.cuh"

namespace gact::cuda {

// A lane's elements as numbers. Sums and differences go from the farthest pairs to neighbours: first between runs, then
// between lanes, then within runs.
template <class Real, int kRun>
struct Numbers {
  static constexpr int kCount = kSegments * kRun;
  Real values[kCount];

  template <class NumberOf>
  __device__ void fill(NumberOf number_of) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = number_of(i);
  }

  __device__ void flip_all(uint32_t key, const Place<kRun>& place) {
    with_noise<Rounding::kRotated>(key, place, [&](auto noise_of) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = flip(values[i], noise_of(i));
    });
  }

  // The Walsh-Hadamard transform, not normalised.
  __device__ void turn(const Place<kRun>& place, int lanes) {
#pragma unroll
    for (int half = kCount / 2; half >= kRun; half /= 2) turn_pairs(half);
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const Real other = __shfl_xor_sync(kWholeWarp, values[i], distance);
        values[i] = place.lane & distance ? other - values[i] : values[i] + other;
      }
    }
#pragma unroll
    for (int half = kRun / 2; half > 0; half /= 2) turn_pairs(half);
  }

 private:
  __device__ void turn_pairs(int half) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i & half) continue;
      const Real a = values[i], b = values[i + half];
      values[i] = a + b;
      values[i + half] = a - b;
    }
  }
};

// The sum of term_of(i) over the elements of all lanes, half by half.
template <class Real, int kRun, class TermOf>
__device__ Real tree_sum(int lanes, TermOf term_of) {
  static_assert(kSegments == 8, "the runs' terms are added up in three steps");
  Real sums[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const auto pair = [&](int run) { return term_of(run * kRun + i) + term_of((run + 4) * kRun + i); };
    sums[i] = (pair(0) + pair(2)) + (pair(1) + pair(3));
    sums[i] = reduce(sums[i], lanes, [](Real a, Real b) { return a + b; });
  }
#pragma unroll
  for (int half = kRun / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[half + i];
  }
  return sums[0];
}

// Numbers take more registers than elements as they came.
template <class Format, int kRun>
constexpr int kBlocksWhereTurning = sizeof(typename Format::Real) == 8 ? 2
                                    : kRun == 8                        ? 3
                                                                       : 4;

template <class Format, int kRun, class Way>
__global__ void __launch_bounds__(kThreads, kBlocksWhereTurning<Format, kRun> - Way::kFewerBlocks)
    compress_rotated_groups(Rows rows, Groups groups, Way ways) {
  using Bits = typename Format::Bits;
  using Real = typename Format::Real;
  for_each_group<kRun>(groups, [&](Place<kRun> place) {
    int64_t index;
    const Whole& way = ways.find(place.group, index);
    const int bits = way.bits, lanes = groups.lanes(), size = groups.size;
    Elements<Bits, kRun> elements;
    elements.load(rows, groups, place);
    const Extremes<Format> extremes(elements, lanes);
    bool irregular = extremes.is_irregular() || Format::decode(extremes.lowest) <= -kRotatedLimit ||
                     Format::decode(extremes.highest) >= kRotatedLimit;

    Numbers<Real, kRun> turned;
    turned.fill([&](int i) { return irregular ? Real(0) : Real(Format::decode(elements.get(i))); });
    const Real sum = tree_sum<Real, kRun>(lanes, [&](int i) { return turned.values[i]; });
    Metadata<Format> metadata{Format::encode(sum / Real(size) + Real(0)), 0};  // -0.0 becomes +0.0
    const Real mean = Format::decode(metadata.minimum);
    turned.fill([&](int i) { return turned.values[i] - mean; });
    turned.flip_all(rotation_key(way.seed_key, uint64_t(index), metadata.minimum), place);
    turned.turn(place, lanes);
    const Real squared_norm = tree_sum<Real, kRun>(lanes, [&](int i) { return turned.values[i] * turned.values[i]; });
    const Real above = Format::decode(extremes.highest) - mean, below = mean - Format::decode(extremes.lowest);
    irregular = irregular || is_ill_suited(above > below ? above : below, squared_norm, size, bits);

    const Real root = root_mean_square(squared_norm, size);
    const int half = 1 << (bits - 1);
    Codes<kRun> codes;
    codes.fill([&](int i) {
      return nearest_centroid(turned.values[i], bits, root) | (turned.values[i] < Real(0) ? half : 0);
    });
    const Real product = tree_sum<Real, kRun>(lanes, [&](int i) {
      const Real value = turned.values[i];
      return (value < Real(0) ? -value : value) * Real(centroid(bits, int(codes.get(i)) & (half - 1)));
    });
    metadata.step = encode_scale(squared_norm, product, size);

    if (__any_sync(kWholeWarp, irregular)) {
      // All lanes of the warp shuffle, also those whose group is regular.
      const Metadata<Format> found = find_irregular_metadata<Format>(elements, lanes, bits);
      if (irregular) {
        metadata = found;
        const auto scale = irregular_scale(metadata, bits);
        const auto factor = inverse(scale.step);
        const uint32_t key = group_key(way.seed_key, uint64_t(index), metadata.minimum, metadata.step);
#pragma unroll 1
        for (int quad = 0; quad < elements.kQuads; ++quad) {
          uint32_t words[elements.kQuadWords], code = 0;
          elements.get_quad(quad, words);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int32_t noise = noise_behind<Rounding::kStochastic>(key, place.within(4 * quad), i);
            const auto element = get_item<Bits>(words, i);
            code |= uint32_t(quantize_irregular<Format>(element, scale, factor, metadata.step, noise)) << 8 * i;
          }
          codes.set_quad(quad, code);
        }
      }
    }
    // The codes of the padding stay: every element of the group is read from all of them.
    codes.pack(bits, way.blob.codes + index * (groups.segment() * bits), way.blob.codes_aligned, place);
    if (place.lane == 0) {
      store_value(way.blob.minimum + index * int(sizeof(Bits)), metadata.minimum, way.blob.minimum_aligned);
      store_value(way.blob.step + index * 2, metadata.step, way.blob.step_aligned);
    }
  });
}

template <class Format, int kRun, class Way>
__global__ void __launch_bounds__(kThreads, kBlocksWhereTurning<Format, kRun> - Way::kFewerBlocks)
    decompress_rotated_groups(Groups groups, Way ways, void* values, bool wide) {
  using Bits = typename Format::Bits;
  using Real = typename Format::Real;
  for_each_group<kRun>(groups, [&](Place<kRun> place) {
    int64_t index;
    const Whole& way = ways.find(place.group, index);
    const int bits = way.bits, half = 1 << (bits - 1);
    Codes<kRun> codes;
    codes.unpack(bits, way.blob.codes + index * (groups.segment() * bits), way.blob.codes_aligned, place);
    const Metadata<Format> metadata{
        load_value<Bits>(way.blob.minimum + index * int(sizeof(Bits)), way.blob.minimum_aligned),
        load_value<uint16_t>(way.blob.step + index * 2, way.blob.step_aligned)};
    Numbers<Real, kRun> turned;
    turned.fill([&](int i) {
      const int code = int(codes.get(i));
      const Real value = centroid(bits, code & (half - 1));
      return code & half ? -value : value;
    });
    turned.turn(place, groups.lanes());
    turned.flip_all(rotation_key(way.seed_key, uint64_t(index), metadata.minimum), place);

    const bool irregular = metadata.step & kIrregular;
    const Real mean = Format::decode(metadata.minimum), scale = decode_step(irregular ? 0 : metadata.step);
    Elements<Bits, kRun> elements{};
#pragma unroll
    for (int i = 0; i < turned.kCount; ++i) {
      put_item<Bits>(elements.words, i, decode_rotated<Format>(turned.values[i], mean, scale));
    }
    const Output<Bits, kRun> output(values, groups, place);
    if (!irregular && wide && output.present >= groups.size) {
      output.store_pieces([&](int i) { return elements.get(i); });
      return;
    }
    const uint32_t key = group_key(way.seed_key, uint64_t(index), metadata.minimum, metadata.step);
    const auto other = irregular_scale(metadata, bits);
    output.store_items([&](int quad, int i) {
      if (irregular) {
        const int32_t code = int32_t(codes.get_quad(quad) >> 8 * i & 0xff);
        const int32_t noise = noise_behind<Rounding::kStochastic>(key, place.within(4 * quad), i);
        return dequantize_irregular<Rounding::kDither, Format>(code, other, metadata.step, noise);
      }
      uint32_t words[elements.kQuadWords];
      elements.get_quad(quad, words);
      return get_item<Bits>(words, i);
    });
  });
}

}  // namespace gact::cuda
