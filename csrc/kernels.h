// What a device must provide: raw pointers in, raw pointers out. bindings.cpp checks tensors and calls these.
#pragma once

#include <cstdint>

namespace gact {

enum class Source { kFloat32, kBFloat16, kFloat16 };

// The sections of a blob and the tensor that it stands for. No pointer into the blob needs alignment.
struct Blob {
  uint8_t* codes;    // ceil(numel / group_size) * group_size * bits / 8 bytes
  uint8_t* minimum;  // one element of the source's dtype per group
  uint8_t* step;     // one bfloat16 per group
  Source source;
  int64_t numel;
  int bits;
  int group_size;
};

namespace cpu {

void compress(const void* values, uint64_t seed, const Blob& blob);
void decompress(const Blob& blob, void* values);
void pack_mask(const uint8_t* mask, int64_t numel, uint8_t* packed);
void unpack_mask(const uint8_t* packed, int64_t numel, uint8_t* mask);

// The instruction set in use: "avx512", "avx2" or "baseline".
const char* capability();

}  // namespace cpu
}  // namespace gact
