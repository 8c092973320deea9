// The CPU's kernels: ranges of groups in parallel, in the best of their versions for the machine.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "../kernels.h"
#include "instruction_sets.h"

namespace gact::cpu {
namespace {

constexpr int64_t kGrain = 32768;  // elements for which starting a thread pays

Kernels choose_kernels() {
#if GACT_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  // The variable only ever lowers what the machine has; it is there to test each version on one machine.
  const char* variable = std::getenv("GACT_FX_CPU_CAPABILITY");
  const std::string wanted = variable ? variable : "";
  if (avx512 && wanted != "avx2" && wanted != "baseline") return avx512_kernels();
  if (avx2 && wanted != "baseline") return avx2_kernels();
#endif
  return baseline_kernels();
}

const Kernels& kernels() {
  static const Kernels chosen = choose_kernels();
  return chosen;
}

template <class F>
void for_groups(int64_t numel, int group_size, F&& f) {
  torch::stable::parallel_for(0, (numel + group_size - 1) / group_size, kGrain / group_size, f);
}

}  // namespace

void compress(const Strided& values, const Codec& codec, const Blob& blob) {
  for_groups(blob.numel, codec.group_size,
             [&](int64_t begin, int64_t end) { kernels().compress(values, codec, blob, begin, end); });
}

void decompress(const Blob& blob, const Codec& codec, const SpacedRows& values) {
  const int64_t per_row = (values.length + codec.group_size - 1) / codec.group_size;
  for_groups(blob.numel, codec.group_size, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / per_row, behind = std::min((row + 1) * per_row, end);
      kernels().decompress(blob, codec, static_cast<uint8_t*>(values.data) + row * values.gap, begin, behind);
      begin = behind;
    }
  });
}

bool pack_integers(const void* values, const Integers& integers, uint8_t* packed) {
  std::atomic<bool> inside{true};
  for_groups(integers.numel, kIntegerBlock, [&](int64_t begin, int64_t end) {
    if (!kernels().pack_integers(values, integers, packed, begin, end)) inside = false;
  });
  return inside;
}

void unpack_integers(const uint8_t* packed, const Integers& integers, void* values) {
  for_groups(integers.numel, kIntegerBlock,
             [&](int64_t begin, int64_t end) { kernels().unpack_integers(packed, integers, values, begin, end); });
}

void draw_mask(const Draw& draw, uint8_t* mask, int64_t numel) {
  torch::stable::parallel_for(0, numel, kGrain,
                              [&](int64_t begin, int64_t end) { kernels().draw_mask(draw, mask, begin, end); });
}

const char* capability() { return kernels().name; }

}  // namespace gact::cpu
