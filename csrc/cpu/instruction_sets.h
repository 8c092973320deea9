// The kernels over ranges of groups, compiled for several instruction sets and chosen at run time, so that one binary
// serves every x86-64 machine.
#pragma once

#include <cstdint>

#include "../kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define GACT_X86 1
#else
#define GACT_X86 0
#endif

namespace gact::cpu {

struct Kernels {
  const char* name;
  void (*compress)(const Strided& values, const Codec& codec, const Blob& blob, int64_t begin, int64_t end);
  void (*decompress)(const Blob& blob, const Codec& codec, void* values, int64_t begin, int64_t end);
  bool (*pack_integers)(const void* values, const Integers& integers, uint8_t* packed, int64_t begin, int64_t end);
  void (*unpack_integers)(const uint8_t* packed, const Integers& integers, void* values, int64_t begin, int64_t end);
  void (*draw_mask)(const Draw& draw, uint8_t* mask, int64_t begin, int64_t end);
};

Kernels baseline_kernels();
#if GACT_X86
Kernels avx2_kernels();
Kernels avx512_kernels();
#endif

}  // namespace gact::cpu
