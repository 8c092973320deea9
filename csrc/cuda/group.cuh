// What the lanes of a group find out together: its extremes and metadata; and the noise of each lane's elements.
#pragma once

#include <cmath>

#include "lane.cuh"

namespace gact::cuda {

// ---- Reductions over a group's lanes -----------------------------------------------------------------------------

template <class T, class Combine>
__device__ T reduce(T value, int lanes, Combine combine) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));
  }
  return value;
}

// The least and the greatest element as bit patterns, in the order of ordered<Format>. A float's bits order as an
// integer's but for the negative ones, which are in reverse; three extremes of the raw words are cheaper than a
// conversion of every word. 16-bit formats are taken in the upper half of a word.
template <class Format>
struct Extremes {
  using Bits = typename Format::Bits;
  using Word = std::conditional_t<sizeof(Bits) == 8, uint64_t, uint32_t>;
  using Signed = std::make_signed_t<Word>;
  static constexpr int kShift = 8 * (sizeof(Word) - sizeof(Bits));
  Bits lowest, highest;

  template <int kRun>
  __device__ Extremes(const Elements<Bits, kRun>& elements, int lanes) {
    Word unsigned_max = 0;
    Signed least = Signed(Word(-1) >> 1), greatest = Signed(~(Word(-1) >> 1));
#pragma unroll
    for (int i = 0; i < Elements<Bits, kRun>::kCount; ++i) {
      const Word word = Word(elements.get(i)) << kShift;
      unsigned_max = larger(unsigned_max, word);
      least = smaller(least, Signed(word));
      greatest = larger(greatest, Signed(word));
    }
    unsigned_max = reduce(unsigned_max, lanes, larger<Word>);
    least = reduce(least, lanes, smaller<Signed>);
    greatest = reduce(greatest, lanes, larger<Signed>);
    lowest = Bits((least < 0 ? unsigned_max : Word(least)) >> kShift);
    highest = Bits(Word(greatest < 0 ? least : greatest) >> kShift);
  }

  __device__ bool is_irregular() const {
    constexpr Bits magnitude = Bits(-1) >> 1;
    return (lowest & magnitude) >= Bits(Format::kLimit) || (highest & magnitude) >= Bits(Format::kLimit);
  }

 private:
  template <class T>
  static __device__ T smaller(T a, T b) {
    return a < b ? a : b;
  }
  template <class T>
  static __device__ T larger(T a, T b) {
    return a > b ? a : b;
  }
};

template <class Format, int kRun>
__device__ Metadata<Format> find_irregular_metadata(const Elements<typename Format::Bits, kRun>& elements, int lanes,
                                                    int bits) {
  using Real = typename Format::Real;
  Real lowest = INFINITY, highest = -INFINITY;
  int kinds = 0;
#pragma unroll 1
  for (int index = 0; index < elements.kQuads; ++index) {
    uint32_t quad[elements.kQuadWords];
    elements.get_quad(index, quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto element = get_item<typename Format::Bits>(quad, i);
      const int kind = kind_of<Format>(element);
      if (kind >= 0) {
        kinds |= 1 << kind;
      } else {
        const Real value = Format::decode(element);
        lowest = value < lowest ? value : lowest;
        highest = value > highest ? value : highest;
      }
    }
  }
  kinds = reduce(kinds, lanes, [](int a, int b) { return a | b; });
  lowest = reduce(lowest, lanes, [](Real a, Real b) { return a < b ? a : b; });
  highest = reduce(highest, lanes, [](Real a, Real b) { return a > b ? a : b; });
  if (lowest > highest) lowest = highest = Real(0);  // no finite element
  return irregular_metadata<Format>(lowest, highest, kinds, bits);
}

template <class Format>
__device__ Metadata<Format> regular_metadata(const Extremes<Format>& extremes, int bits) {
  using Bits = typename Format::Bits;
  constexpr Bits minus_zero = Bits(Bits(1) << (8 * sizeof(Bits) - 1));
  const auto range = Format::decode(extremes.highest) - Format::decode(extremes.lowest);
  return {extremes.lowest == minus_zero ? Bits(0) : extremes.lowest, encode_step(range, (1 << bits) - 1)};
}

// ---- Noise -------------------------------------------------------------------------------------------------------

inline __device__ int share_of(int element) { return int(uint32_t(element) / kShareStride % kShare); }

// What the noise of the i-th element behind `start` is made from, if both lie in one run.
inline __device__ uint32_t mix_behind(uint32_t key, int start, int i) {
  static_assert(kShareStride % 8 == 0, "a run, which is 4 or 8 elements, must have one share");
  return mix(element_word(key, uint32_t(start)) + uint32_t(i) * kGolden);
}

template <Rounding rounding>
__device__ int32_t noise_behind(uint32_t key, int start, int i) {
  if constexpr (rounding == Rounding::kNearest) return kHalf;
  return noise<rounding>(mix_behind(key, start, i), share_of(start));
}

constexpr int kSharingSegment = kShareBlock / 2;
static_assert(kSharingSegment % kShareStride == 0, "elements half a block apart must share a hash");

// The noise of a lane's elements, to be asked for in order. `kSharing`: segments are half as long as the blocks in
// which elements share hashes, so those of two neighbouring segments do. Otherwise each element hashes for itself,
// since those that it shares a hash with may be other lanes'.
template <Rounding rounding, int kRun, bool kSharing>
class LaneNoise {
 public:
  __device__ LaneNoise(uint32_t key, const Place<kRun>& place) : key_(key), place_(place) {}

  __device__ int32_t operator()(int i) {
    if constexpr (rounding == Rounding::kNearest) return kHalf;
    const int run = i / kRun, within_run = i % kRun;
    if constexpr (!kSharing) return noise_behind<rounding>(key_, place_.within(run * kRun), within_run);
    if (run % 2 == 0) mixed_[within_run] = mix_behind(key_, place_.within(run * kRun), within_run);
    return noise<rounding>(mixed_[within_run], share_of(place_.within(run % 2 * kRun)));
  }

 private:
  uint32_t key_;
  Place<kRun> place_;
  uint32_t mixed_[kRun];
};

template <Rounding rounding, int kRun, class Body>
__device__ void with_noise(uint32_t key, const Place<kRun>& place, Body body) {
  if (rounding != Rounding::kNearest && place.segment == kSharingSegment) {
    body(LaneNoise<rounding, kRun, true>(key, place));
  } else {
    body(LaneNoise<rounding, kRun, false>(key, place));
  }
}

}  // namespace gact::cuda
