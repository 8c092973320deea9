// How a lane packs its codes into bytes, and unpacks them; csrc/cpu/planes.h states the layout.
#pragma once

#include "lane.cuh"

namespace gact::cuda {

// A lane's codes, a byte each: the i-th is byte i % 4 of word i / 4.
template <int kRun>
struct Codes {
  static constexpr int kWords = kRun / 4;  // of a run
  static constexpr int kQuads = kSegments * kWords;
  uint32_t words[kQuads];

  __device__ uint32_t get(int i) const { return get_item<uint8_t>(words, i); }

  __device__ uint32_t get_quad(int index) const {
    uint32_t quad = words[0];
#pragma unroll
    for (int w = 1; w < kQuads; ++w) quad = index == w ? words[w] : quad;
    return quad;
  }

  __device__ void set_quad(int index, uint32_t quad) {
#pragma unroll
    for (int w = 0; w < kQuads; ++w) words[w] = index == w ? quad : words[w];
  }

  template <class CodeOf>
  __device__ void fill(CodeOf code_of) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      words[quad] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) words[quad] |= uint32_t(code_of(4 * quad + i)) << 8 * i;
    }
  }

  __device__ void clear_padding(const Groups& groups, const Place<kRun>& place) {
    const int64_t first = place.group * groups.size;
    if (first + groups.size <= groups.numel) return;
    const int present = int(groups.numel - first);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int kept = present - place.within(4 * quad);
      if (kept < 4) words[quad] &= kept <= 0 ? 0 : (1u << 8 * kept) - 1;
    }
  }

  // The planes of the low `bits` bits of all codes, `out` being the group's; returns what is behind them. `aligned`: a
  // run is an aligned word.
  __device__ uint8_t* pack(int bits, uint8_t* out, bool aligned, const Place<kRun>& place) const {
    if (bits & 8) out = pack_plane<8>(0, out, aligned, place);
    if (bits & 4) out = pack_plane<4>(0, out, aligned, place);
    if (bits & 2) out = pack_plane<2>(bits & 4, out, aligned, place);
    if (bits & 1) out = pack_plane<1>(bits & 6, out, aligned, place);
    return out;
  }

  __device__ const uint8_t* unpack(int bits, const uint8_t* in, bool aligned, const Place<kRun>& place) {
#pragma unroll
    for (uint32_t& word : words) word = 0;
    if (bits & 8) in = unpack_plane<8>(0, in, aligned, place);
    if (bits & 4) in = unpack_plane<4>(0, in, aligned, place);
    if (bits & 2) in = unpack_plane<2>(bits & 4, in, aligned, place);
    if (bits & 1) in = unpack_plane<1>(bits & 6, in, aligned, place);
    return in;
  }

 private:
  template <int kWidth>
  static constexpr uint32_t kMask = 0x01010101u * ((1u << kWidth) - 1);

  template <int kWidth>
  __device__ uint8_t* pack_plane(int offset, uint8_t* out, bool aligned, const Place<kRun>& place) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      uint32_t bytes[kWords] = {};
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
#pragma unroll
        for (int k = 0; k < kSegments / kWidth; ++k) {
          bytes[w] |= (words[(j + k * kWidth) * kWords + w] >> offset & kMask<kWidth>) << k * kWidth;
        }
      }
      store_words(out + place.within(j * kRun), bytes, aligned);
    }
    return out + kWidth * place.segment;
  }

  template <int kWidth>
  __device__ const uint8_t* unpack_plane(int offset, const uint8_t* in, bool aligned, const Place<kRun>& place) {
    uint32_t bytes[kWidth][kWords];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) load_words(bytes[j], in + place.within(j * kRun), aligned);
#pragma unroll
    for (int run = 0; run < kSegments; ++run) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t part = bytes[run % kWidth][w] >> run / kWidth * kWidth & kMask<kWidth>;
        words[run * kWords + w] |= part << offset;
      }
    }
    return in + kWidth * place.segment;
  }
};

}  // namespace gact::cuda
