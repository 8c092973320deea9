// How codes are laid out in bytes; gact_fx/codec/packing.py states the same.
//
// A code is split into planes of 4, 2 and 1 bits (or one of 8), low bits first. In a plane of `Width` bits, byte j
// holds elements j, j + stride, j + 2 * stride, ... from its low bits upwards: no shuffles. Group sizes are template
// parameters, so that the compiler knows the length of every loop.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../codec.h"

namespace gact::cpu {
namespace {

template <int Width, int Offset, int GroupSize>
GACT_INLINE void pack_plane(const uint8_t* __restrict codes, uint8_t* __restrict out) {
  constexpr int stride = GroupSize * Width / 8;
  constexpr uint8_t mask = (1 << Width) - 1;
  for (int j = 0; j < stride; ++j) {
    uint8_t byte = 0;
    for (int k = 0; k < 8 / Width; ++k) byte |= uint8_t((codes[j + k * stride] >> Offset & mask) << (k * Width));
    out[j] = byte;
  }
}

template <int Bits, int GroupSize>
void pack(const uint8_t* __restrict codes, uint8_t* __restrict out) {
  if constexpr (Bits == 8) memcpy(out, codes, GroupSize);
  if constexpr (Bits & 4) pack_plane<4, 0, GroupSize>(codes, out);
  if constexpr (Bits & 2) pack_plane<2, Bits & 4, GroupSize>(codes, out + GroupSize * (Bits & 4) / 8);
  if constexpr (Bits & 1) pack_plane<1, Bits & 6, GroupSize>(codes, out + GroupSize * (Bits & 6) / 8);
}

// The part of elements [Eighth * GroupSize / 8, (Eighth + 1) * GroupSize / 8) that lies in one plane.
template <int Width, int Offset, int GroupSize, int Eighth>
GACT_INLINE uint8_t plane_part(const uint8_t* plane, int j) {
  constexpr int first = Eighth * (GroupSize / 8), stride = GroupSize * Width / 8;
  constexpr uint8_t mask = (1 << Width) - 1;
  return uint8_t((plane[first % stride + j] >> (first / stride * Width) & mask) << Offset);
}

template <int Bits, int GroupSize, int Eighth>
GACT_INLINE void unpack_eighth(const uint8_t* __restrict in, uint8_t* __restrict codes) {
  for (int j = 0; j < GroupSize / 8; ++j) {
    uint8_t code = 0;
    if constexpr (Bits & 4) code |= plane_part<4, 0, GroupSize, Eighth>(in, j);
    if constexpr (Bits & 2) code |= plane_part<2, Bits & 4, GroupSize, Eighth>(in + GroupSize * (Bits & 4) / 8, j);
    if constexpr (Bits & 1) code |= plane_part<1, Bits & 6, GroupSize, Eighth>(in + GroupSize * (Bits & 6) / 8, j);
    codes[Eighth * (GroupSize / 8) + j] = code;
  }
}

template <int Bits, int GroupSize>
void unpack(const uint8_t* __restrict in, uint8_t* __restrict codes) {
  if constexpr (Bits == 8) {
    memcpy(codes, in, GroupSize);
  } else {
    [&]<int... Eighth>(std::integer_sequence<int, Eighth...>) {
      (unpack_eighth<Bits, GroupSize, Eighth>(in, codes), ...);
    }(std::make_integer_sequence<int, 8>());
  }
}

using Repack = void (*)(const uint8_t* from, uint8_t* to);

template <int GroupSize>
Repack choose_packing(int bits, bool inverse) {
  return [&]<int... Less>(std::integer_sequence<int, Less...>) {
    const Repack packs[] = {pack<Less + 1, GroupSize>...}, unpacks[] = {unpack<Less + 1, GroupSize>...};
    return inverse ? unpacks[bits - 1] : packs[bits - 1];
  }(std::make_integer_sequence<int, 8>());
}

// A function that packs (or, the inverse, unpacks) the codes of a group; bits from 1 to 8.
inline Repack choose_packing(int bits, int group_size, bool inverse = false) {
  switch (group_size) {
    case 32:
      return choose_packing<32>(bits, inverse);
    case 64:
      return choose_packing<64>(bits, inverse);
    case 128:
      return choose_packing<128>(bits, inverse);
    case 256:
      return choose_packing<256>(bits, inverse);
    case 512:
      return choose_packing<512>(bits, inverse);
    default:
      return choose_packing<1024>(bits, inverse);
  }
}

}  // namespace
}  // namespace gact::cpu
