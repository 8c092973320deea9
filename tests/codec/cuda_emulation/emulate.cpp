// A C interface to the emulated kernels, for ctypes. Every function returns null, or a message of what went wrong.
#include <exception>
#include <string>
#include <vector>

#include "../../../csrc/kernels.h"
#include "../../../csrc/rotation.h"
#include "cuda_runtime.h"

// csrc/cuda is compiled with -fsanitize=alignment and without its runtime library, for which this is: an access of 16
// bytes to an address that is not a multiple of 16 would fault on a GPU.
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) { emulation::fail("a misaligned access"); }

// Device-side assertions end here, by way of -Bsymbolic.
extern "C" void __assert_fail(const char* assertion, const char*, unsigned, const char*) noexcept {
  emulation::fail(std::string("assertion failed: ") + assertion);
  __builtin_abort();  // outside of kernels
}

namespace {

template <class Call>
const char* message_of(Call call) {
  static std::string message;
  try {
    call();
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}

gact::Codec codec_of(int source, int rounding, int bits, int group_size, uint64_t seed) {
  return {gact::Source(source), gact::rounding_of(gact::Rounding(rounding), bits), bits, group_size, seed};
}

gact::Strided strided(const void* data, int64_t numel, int rank, const int64_t* size, const int64_t* stride) {
  gact::Strided values{data, numel, rank, {}, {}};
  for (int i = 0; i < rank; ++i) {
    values.size[i] = size[i];
    values.stride[i] = stride[i];
  }
  return values;
}

// Of every row `places` groups; the runs' sections lie in `blobs`, three each.
std::vector<gact::CodedRun> runs_of(int source, int rounding, int group_size, uint64_t seed, int64_t rows, int count,
                                    const int64_t* first, const int64_t* places, const int* bits, uint8_t** blobs) {
  std::vector<gact::CodedRun> runs;
  for (int i = 0; i < count; ++i) {
    runs.push_back({first[i],
                    places[i],
                    codec_of(source, rounding, bits[i], group_size, seed + uint64_t(i)),
                    {blobs[3 * i], blobs[3 * i + 1], blobs[3 * i + 2], rows * places[i] * group_size}});
  }
  return runs;
}

}  // namespace

extern "C" {

bool reads(const void* data, int64_t numel, int rank, const int64_t* size, const int64_t* stride, int source) {
  return gact::cuda::reads(strided(data, numel, rank, size, stride), codec_of(source, 0, 4, 256, 0));
}

const char* compress(const void* data, int64_t numel, int rank, const int64_t* size, const int64_t* stride, int source,
                     int rounding, int bits, int group_size, uint64_t seed, uint8_t* codes, uint8_t* minimum,
                     uint8_t* step) {
  return message_of([&] {
    gact::cuda::compress(strided(data, numel, rank, size, stride), codec_of(source, rounding, bits, group_size, seed),
                         {codes, minimum, step, numel}, nullptr);
  });
}

const char* decompress(void* values, int64_t numel, int source, int rounding, int bits, int group_size, uint64_t seed,
                       uint8_t* codes, uint8_t* minimum, uint8_t* step) {
  return message_of([&] {
    gact::cuda::decompress({codes, minimum, step, numel}, codec_of(source, rounding, bits, group_size, seed), values,
                           nullptr);
  });
}

const char* compress_runs(const void* values, int64_t rows, int64_t row, int source, int rounding, int group_size,
                          uint64_t seed, int count, const int64_t* first, const int64_t* places, const int* bits,
                          uint8_t** blobs) {
  return message_of([&] {
    const auto runs = runs_of(source, rounding, group_size, seed, rows, count, first, places, bits, blobs);
    gact::cuda::compress_runs(values, row, runs.data(), count, nullptr);
  });
}

const char* decompress_runs(void* values, int64_t rows, int64_t row, int source, int rounding, int group_size,
                            uint64_t seed, int count, const int64_t* first, const int64_t* places, const int* bits,
                            uint8_t** blobs) {
  return message_of([&] {
    const auto runs = runs_of(source, rounding, group_size, seed, rows, count, first, places, bits, blobs);
    gact::cuda::decompress_runs(runs.data(), count, row, values, nullptr);
  });
}

const char* pack_integers(const void* values, int itemsize, int bits, int value_bits, bool is_mask, int64_t numel,
                          uint8_t* packed) {
  return message_of(
      [&] { gact::cuda::pack_integers(values, {itemsize, bits, value_bits, is_mask, numel}, packed, nullptr); });
}

const char* unpack_integers(const uint8_t* packed, int itemsize, int bits, int64_t numel, void* values) {
  return message_of(
      [&] { gact::cuda::unpack_integers(packed, {itemsize, bits, bits, false, numel}, values, nullptr); });
}

// Lanes of one warp that disagree, to show that the emulation tells so.
const char* disagree(bool end) {
  const auto kernel = +[](bool end) {
    if (threadIdx.x != 5) {
      __any_sync(0xffffffff, 1);
    } else if (!end) {
      __shfl_xor_sync(0xffffffff, 1, 1);
    }
  };
  cudaLaunchConfig_t config{dim3(1), dim3(32), 0, nullptr};
  cudaLaunchKernelEx(&config, kernel, end);
  return emulation::error.c_str();
}
}
