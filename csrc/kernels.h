// What a device must provide: raw pointers in, raw pointers out. operators.cpp checks tensors and calls these.
#pragma once

#include <cstdint>

#include "codec.h"

namespace gact {

enum class Source { kFloat32, kBFloat16, kFloat16, kFloat64 };

struct Codec {
  Source source;
  Rounding rounding;
  int bits;  // 1 to 8, or 16 for bfloat16 codes of float32
  int group_size;
  uint64_t seed;
};

// The sections of a blob and the number of elements that it stands for. No pointer need be aligned. At 16 bits there is
// no minimum and no step.
struct Blob {
  uint8_t* codes;    // ceil(numel / group_size) * group_size * bits / 8 bytes
  uint8_t* minimum;  // one element of the source's dtype per group
  uint8_t* step;     // one bfloat16 per group
  int64_t numel;
};

// Of every row of a tensor the `count` groups from `first` on, coded to a blob of their own.
struct CodedRun {
  int64_t first;
  int64_t count;
  Codec codec;
  Blob blob;
};

// Where decompressed elements go: rows of `length` elements, of whole groups but for the last, `gap` bytes apart.
struct SpacedRows {
  void* data;
  int64_t length;
  int64_t gap;
};

constexpr int kMaxRank = 8;

// A tensor to be read in row-major order of its dimensions, outermost first; neighbouring dimensions that can be walked
// as one are merged, and those of size 1 left out. Strides are in elements.
struct Strided {
  const void* data;
  int64_t numel;
  int rank;
  int64_t size[kMaxRank];
  int64_t stride[kMaxRank];

  GACT_INLINE bool is_contiguous() const { return rank == 0 || (rank == 1 && stride[0] == 1); }
};

// Integers of `itemsize` bytes, packed at `bits` (1 to 16) each in blocks of kIntegerBlock elements; `is_mask`: nonzero
// elements are ones. Elements lie in [0, 2^value_bits), which is less than [0, 2^bits) where bit `bits` would be a
// sign.
struct Integers {
  int itemsize;
  int bits;
  int value_bits;
  bool is_mask;
  int64_t numel;
};

// Numbers of 31 bits that Philox draws by `seed`; those from `least` on make a one.
struct Draw {
  uint32_t seed;
  uint32_t least;
};

namespace cpu {

void compress(const Strided& values, const Codec& codec, const Blob& blob);
void decompress(const Blob& blob, const Codec& codec, const SpacedRows& values);
// Returns whether all integers were in [0, 2^value_bits).
bool pack_integers(const void* values, const Integers& integers, uint8_t* packed);
void unpack_integers(const uint8_t* packed, const Integers& integers, void* values);

// `numel` bytes, each 0 or 1.
void draw_mask(const Draw& draw, uint8_t* mask, int64_t numel);

// The instruction set in use: "avx512", "avx2" or "baseline".
const char* capability();

}  // namespace cpu

// All on `stream` (a cudaStream_t) and without waiting for it. They throw std::runtime_error where a launch fails.
namespace cuda {

// Whether compress reads such a tensor; others must be made contiguous first.
bool reads(const Strided& values, const Codec& codec);
void compress(const Strided& values, const Codec& codec, const Blob& blob, void* stream);
void decompress(const Blob& blob, const Codec& codec, void* values, void* stream);
// A contiguous tensor, whose rows have `places` whole groups. The runs' codecs differ in bits, 8 at most, and seeds.
void compress_runs(const void* values, int64_t places, const CodedRun* runs, int count, void* stream);
void decompress_runs(const CodedRun* runs, int count, int64_t places, void* values, void* stream);
// An integer beyond [0, 2^value_bits) raises a device-side assertion.
void pack_integers(const void* values, const Integers& integers, uint8_t* packed, void* stream);
void unpack_integers(const uint8_t* packed, const Integers& integers, void* values, void* stream);

}  // namespace cuda
}  // namespace gact
