// How codes are laid out in bytes; gact_fx/packing.py states the same.
//
// A code is split into planes of 4, 2 and 1 bits (or one of 8), low bits first. In a plane of `Width` bits, byte j
// holds elements j, j + stride, j + 2 * stride, ... from its low bits upwards: no shuffles.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../codec.h"

namespace gact::cpu {
namespace {

template <int Width, int Offset>
GACT_INLINE uint8_t* pack_plane(const uint8_t* __restrict codes, int group_size, uint8_t* __restrict out) {
  constexpr uint8_t mask = (1 << Width) - 1;
  const int stride = group_size * Width / 8;
  for (int j = 0; j < stride; ++j) {
    uint8_t byte = 0;
    for (int k = 0; k < 8 / Width; ++k) byte |= uint8_t((codes[j + k * stride] >> Offset & mask) << (k * Width));
    out[j] = byte;
  }
  return out + stride;
}

template <int Width, int Offset>
GACT_INLINE const uint8_t* unpack_plane(const uint8_t* __restrict in, int group_size, uint8_t* __restrict codes) {
  constexpr uint8_t mask = (1 << Width) - 1;
  const int stride = group_size * Width / 8;
  for (int k = 0; k < 8 / Width; ++k) {
    for (int j = 0; j < stride; ++j) {
      const uint8_t part = uint8_t((in[j] >> (k * Width) & mask) << Offset);
      codes[j + k * stride] = Offset == 0 ? part : uint8_t(codes[j + k * stride] | part);
    }
  }
  return in + stride;
}

template <int Bits>
GACT_INLINE void pack(const uint8_t* codes, int group_size, uint8_t* out) {
  if constexpr (Bits == 8) memcpy(out, codes, group_size);
  if constexpr (Bits & 4) out = pack_plane<4, 0>(codes, group_size, out);
  if constexpr (Bits & 2) out = pack_plane<2, Bits & 4>(codes, group_size, out);
  if constexpr (Bits & 1) out = pack_plane<1, Bits & 6>(codes, group_size, out);
}

template <int Bits>
GACT_INLINE void unpack(const uint8_t* in, int group_size, uint8_t* codes) {
  if constexpr (Bits == 8) memcpy(codes, in, group_size);
  if constexpr (Bits & 4) in = unpack_plane<4, 0>(in, group_size, codes);
  if constexpr (Bits & 2) in = unpack_plane<2, Bits & 4>(in, group_size, codes);
  if constexpr (Bits & 1) in = unpack_plane<1, Bits & 6>(in, group_size, codes);
}

// Calls f(std::integral_constant<int, bits>), bits from 1 to 8.
template <class F>
GACT_INLINE void with_bits(int bits, F&& f) {
  [&]<int... Less>(std::integer_sequence<int, Less...>) {
    (void)((bits == Less + 1 && (f(std::integral_constant<int, Less + 1>()), true)) || ...);
  }(std::make_integer_sequence<int, 8>());
}

}  // namespace
}  // namespace gact::cpu
