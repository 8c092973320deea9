// Runs a task over ranges of groups: in parallel, and in the best of its versions for the machine.
//
// A task is a callable (int64_t begin, int64_t end) whose operator() is GACT_INLINE: it is compiled once per
// instruction set and chosen at run time, so that one binary serves every x86-64 machine.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#if defined(__x86_64__) && defined(__GNUC__)
#define GACT_X86 1
#if defined(__clang__)
#define GACT_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#else
#define GACT_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#endif
#define GACT_AVX2 __attribute__((target("avx2")))
#else
#define GACT_X86 0
#define GACT_AVX512
#define GACT_AVX2
#endif

namespace gact::cpu {

constexpr int64_t kGrain = 32768;  // elements for which starting a thread pays

enum class Capability { kBaseline, kAvx2, kAvx512 };

inline Capability detect_capability() {
#if GACT_X86
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  // The variable only ever lowers what the machine has; it is there to test each version on one machine.
  const char* variable = std::getenv("GACT_FX_CPU_CAPABILITY");
  const std::string wanted = variable ? variable : "";
  if (avx512 && wanted != "avx2" && wanted != "baseline") return Capability::kAvx512;
  if (__builtin_cpu_supports("avx2") && wanted != "baseline") return Capability::kAvx2;
#endif
  return Capability::kBaseline;
}

inline Capability current_capability() {
  static const Capability capability = detect_capability();
  return capability;
}

template <class Task>
GACT_AVX512 void run_avx512(const Task& task, int64_t begin, int64_t end) {
  task(begin, end);
}

template <class Task>
GACT_AVX2 void run_avx2(const Task& task, int64_t begin, int64_t end) {
  task(begin, end);
}

template <class Task>
void run(const Task& task, int64_t numel, int group_size) {
  const int64_t groups = (numel + group_size - 1) / group_size;
  at::parallel_for(0, groups, kGrain / group_size, [&](int64_t begin, int64_t end) {
    if (current_capability() == Capability::kAvx512) return run_avx512(task, begin, end);
    if (current_capability() == Capability::kAvx2) return run_avx2(task, begin, end);
    task(begin, end);
  });
}

}  // namespace gact::cpu
