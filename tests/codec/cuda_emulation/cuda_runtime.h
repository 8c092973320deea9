// Runs the CUDA sources on the CPU: what they use of CUDA, with lanes as fibers that switch at warp collectives.
//
// It stands in for CUDA's header of the same name. One warp runs at a time, which is enough for kernels that do not
// synchronise blocks. Lanes of a collective that do not all arrive there are an error, not a hang.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define GACT_CUDA_MAX_BLOCKS 3

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1) : x(x), y(1), z(1) {}
};

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace emulation {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 256 << 10;

// What lanes must agree on, and what they exchange.
struct Collective {
  const char* name;
  int line;
  unsigned mask;
  int argument;
  uint64_t value;

  bool matches(const Collective& other) const {
    return name == other.name && line == other.line && mask == other.mask && argument == other.argument;
  }
};

struct Lane {
  enum { kReady, kWaiting, kDone } state;
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Collective collective;
  uint64_t result;
};

inline Lane lanes[kLanes];
inline ucontext_t scheduler;
inline int current = -1;
inline void (*run_lane)(void*);
inline void* run_lane_with;
inline std::string error;

// Ends the launch; within a lane it does not return.
inline void fail(std::string message) {
  if (error.empty()) error = std::move(message);
  if (current >= 0) setcontext(&scheduler);
}

inline uint64_t wait_for_others(const Collective& collective) {
  Lane& lane = lanes[current];
  lane.collective = collective;
  lane.state = Lane::kWaiting;
  swapcontext(&lane.context, &scheduler);
  return lane.result;
}

inline void lane_main() {
  run_lane(run_lane_with);
  lanes[current].state = Lane::kDone;
  setcontext(&scheduler);
}

inline void exchange() {
  bool any = false;
  for (const Lane& lane : lanes) {
    if (lane.state != Lane::kWaiting) return fail("a lane ended while others of its warp wait for it");
    if (!lane.collective.matches(lanes[0].collective)) return fail("lanes of a warp wait at different collectives");
    any = any || lane.collective.value != 0;
  }
  const Collective& collective = lanes[0].collective;
  if (collective.mask != 0xffffffff) return fail("only whole warps are emulated");
  for (int i = 0; i < kLanes; ++i) {
    const bool shuffles = std::string(collective.name) == "shfl_xor";
    lanes[i].result = shuffles ? lanes[i ^ (collective.argument & 31)].collective.value : any;
    lanes[i].state = Lane::kReady;
  }
}

inline void run_warp(unsigned first_thread) {
  for (Lane& lane : lanes) {
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.get();
    lane.context.uc_stack.ss_size = kStackBytes;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, lane_main, 0);
    lane.state = Lane::kReady;
  }
  while (true) {
    bool waiting = false;
    for (int i = 0; i < kLanes; ++i) {
      if (lanes[i].state == Lane::kReady) {
        current = i;
        threadIdx.x = first_thread + i;
        swapcontext(&scheduler, &lanes[i].context);
        current = -1;
        if (!error.empty()) return;
      }
      waiting = waiting || lanes[i].state == Lane::kWaiting;
    }
    if (!waiting) return;
    exchange();
    if (!error.empty()) return;
  }
}

template <class T>
uint64_t to_word(T value) {
  uint64_t word = 0;
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles exchange 4 or 8 bytes");
  memcpy(&word, &value, sizeof(T));
  return word;
}

template <class T>
T from_word(uint64_t word) {
  T value;
  memcpy(&value, &word, sizeof(T));
  return value;
}

}  // namespace emulation

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int line = __builtin_LINE()) {
  return emulation::from_word<T>(
      emulation::wait_for_others({"shfl_xor", line, mask, distance, emulation::to_word(value)}));
}

inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return int(emulation::wait_for_others({"any", line, mask, 0, uint64_t(predicate != 0)}));
}

// ---- The runtime -------------------------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess, cudaErrorLaunchFailure };
using cudaStream_t = struct Stream*;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return emulation::error.c_str(); }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  auto call = [&] { kernel(arguments...); };
  emulation::run_lane = [](void* call_pointer) { (*static_cast<decltype(call)*>(call_pointer))(); };
  emulation::run_lane_with = &call;
  emulation::error.clear();
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    for (unsigned thread = 0; thread < blockDim.x; thread += emulation::kLanes) {
      emulation::run_warp(thread);
      if (!emulation::error.empty()) return cudaErrorLaunchFailure;
    }
  }
  return cudaSuccess;
}
