// The operators' arguments, checked, and the blob's layout, which gact_fx/codec/layout.py states: what needs dtypes,
// but no tensor.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <charconv>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"
#include "rotation.h"

namespace gact {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Device;

constexpr const char* kDtypes = "float32, bfloat16, float16, float64, or bool or an integer to be packed exactly";

// Python gets std::invalid_argument as a ValueError.
template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << "gact_fx." << op << ": ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

template <class... Parts>
void check(bool holds, const char* op, const Parts&... parts) {
  if (!holds) fail(op, parts...);
}

std::string to_string(const Device& device) {
  if (device.is_cpu()) return "cpu";
  return (device.is_cuda() ? "cuda:" : "another kind of device:") + std::to_string(device.index());
}

std::string to_string(IntHeaderOnlyArrayRef size) {
  std::string text = "[";
  for (const int64_t extent : size) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_mask(ScalarType dtype) { return dtype == ScalarType::Bool || dtype == ScalarType::Byte; }

bool is_integer(ScalarType dtype) {
  return is_mask(dtype) || dtype == ScalarType::Char || dtype == ScalarType::Short || dtype == ScalarType::Int ||
         dtype == ScalarType::Long;
}

bool is_source(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ||
         dtype == ScalarType::Double;
}

// Bytes of an element of a source or an integer.
int item_size(ScalarType dtype) {
  if (is_mask(dtype) || dtype == ScalarType::Char) return 1;
  if (dtype == ScalarType::Short || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half) return 2;
  return dtype == ScalarType::Int || dtype == ScalarType::Float ? 4 : 8;
}

Rounding to_rounding(const char* op, std::string_view name) {
  if (name == "stochastic") return Rounding::kStochastic;
  if (name == "dither") return Rounding::kDither;
  if (name == "nearest") return Rounding::kNearest;
  check(name == "rotated", op, "rounding must be one of ('stochastic', 'dither', 'nearest', 'rotated'), got '", name,
        "'");
  return Rounding::kRotated;
}

Codec to_codec(const char* op, ScalarType dtype, int64_t bits, int64_t group_size, int64_t seed,
               std::string_view rounding) {
  check(is_source(dtype), op, "dtype must be ", kDtypes, ", got ", dtype);
  check(bits != kBFloat16Bits || dtype == ScalarType::Float, op, "16 bits (bfloat16) are for float32 tensors, got ",
        dtype);
  check((1 <= bits && bits <= 8) || bits == kBFloat16Bits, op, "bits must lie in [1, 8], or be 16 for bfloat16, got ",
        bits);
  const bool power_of_two = (group_size & (group_size - 1)) == 0;
  check(32 <= group_size && group_size <= kMaxGroupSize && power_of_two, op,
        "group_size must be a power of two in [32, 1024], got ", group_size);
  const Rounding how = to_rounding(op, rounding);
  check((how != Rounding::kDither && how != Rounding::kRotated) || bits != kBFloat16Bits, op, "rounding '", rounding,
        "' needs bits in [1, 8], got 16; use 'stochastic'");
  const Source source = dtype == ScalarType::Float      ? Source::kFloat32
                        : dtype == ScalarType::BFloat16 ? Source::kBFloat16
                        : dtype == ScalarType::Half     ? Source::kFloat16
                                                        : Source::kFloat64;
  return {source, rounding_of(how, int(bits)), int(bits), int(group_size), uint64_t(seed)};
}

Integers to_integers(const char* op, ScalarType dtype, int64_t bits, int64_t numel) {
  check(dtype != ScalarType::Bool || bits == 1, op, "bits must be 1 for a mask, got ", bits);
  check(1 <= bits && bits <= 16, op, "bits must lie in [1, 16] for integers, got ", bits);
  const int itemsize = item_size(dtype);
  const int value_bits = std::min(int(bits), 8 * itemsize - (is_mask(dtype) ? 0 : 1));
  return {itemsize, int(bits), value_bits, is_mask(dtype) && bits == 1, numel};
}

int64_t packed_nbytes(const Integers& integers) {
  return ceil_div(integers.numel, kIntegerBlock) * (kIntegerBlock / 8 * integers.bits);
}

// The blob of a float tensor; `nbytes` is what it occupies, a mask behind it not counted.
struct Layout {
  Blob blob;
  int64_t nbytes;
};

Layout lay_out(const Codec& codec, ScalarType dtype, int64_t numel, uint8_t* data) {
  const int64_t groups = ceil_div(numel, codec.group_size);
  const bool has_metadata = codec.bits != kBFloat16Bits;
  const int64_t minimum = groups * (int64_t(codec.group_size) * codec.bits / 8);
  const int64_t step = minimum + (has_metadata ? groups * item_size(dtype) : 0);
  const int64_t end = step + (has_metadata ? groups * int64_t(sizeof(uint16_t)) : 0);
  return {{data, data + minimum, data + step, numel}, end};
}

// Groups of a row that stand one behind the other and have codes of one width.
struct Run {
  int64_t first, count;  // groups
  int bits;
};

int64_t count_places(const std::vector<Run>& runs) { return runs.empty() ? 0 : runs.back().first + runs.back().count; }

// The runs of `by_place`, which is like "8 2x15".
std::vector<Run> to_runs(const char* op, std::string_view by_place, int64_t numel, int64_t group_size) {
  std::vector<Run> runs;
  const auto check_form = [&](bool holds) {
    if (!holds) fail(op, "by_place must be like '8 2x15', of widths from 1 to 8, got '", by_place, "'");
  };
  const char* at = by_place.data();
  const char* const end = at + by_place.size();
  while (at < end) {
    const int bits = *at++ - '0';
    check_form(1 <= bits && bits <= 8);
    int64_t count = 1;
    if (at < end && *at == 'x') {
      const auto [behind, error] = std::from_chars(at + 1, end, count);
      check_form(error == std::errc() && count > 0);
      at = behind;
    }
    check_form(at == end || (*at == ' ' && at + 1 < end));
    at += at < end;
    runs.push_back({count_places(runs), count, bits});
  }
  const int64_t row = count_places(runs) * group_size;
  check(row == 0 || numel % row == 0, op, "by_place must be for whole rows, got ", count_places(runs), " groups of ",
        group_size, " for ", numel, " elements");
  return runs;
}

// Codecs of the runs have seeds one behind the other: groups of one index have noise of their own in each.
Codec of_run(Codec codec, const Run& run, size_t index) {
  codec.bits = run.bits;
  codec.rounding = rounding_of(codec.rounding, run.bits);
  codec.seed += index;
  return codec;
}

// The runs' blobs, one behind the other in `data`.
std::vector<CodedRun> to_coded(const Codec& codec, ScalarType dtype, int64_t numel, const std::vector<Run>& runs,
                               uint8_t* data) {
  std::vector<CodedRun> coded;
  for (const Run& run : runs) {
    const Codec of = of_run(codec, run, coded.size());
    const Layout layout = lay_out(of, dtype, numel / count_places(runs) * run.count, data);
    coded.push_back({run.first, run.count, of, layout.blob});
    data += layout.nbytes;
  }
  return coded;
}

// The bytes of a float tensor's blob, without a mask.
int64_t runs_nbytes(const Codec& codec, ScalarType dtype, int64_t numel, const std::vector<Run>& runs) {
  if (runs.empty()) return lay_out(codec, dtype, numel, nullptr).nbytes;
  int64_t nbytes = 0;
  for (const Run& run : runs) {
    nbytes += lay_out(of_run(codec, run, 0), dtype, numel / count_places(runs) * run.count, nullptr).nbytes;
  }
  return nbytes;
}

}  // namespace
}  // namespace gact
