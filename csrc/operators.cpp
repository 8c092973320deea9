// The operators' kernels: check tensors, lay out the blob (blobs.h), call the device's functions. The schemas are
// Python's (gact_fx/codec/operators.py).
//
// All of PyTorch that is used here and in cpu/codec.cpp belongs to its stable ABI of torch 2.11 (TORCH_TARGET_VERSION
// in setup.py), and nothing of Python is used: one binary serves every later torch and every Python.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>
#ifdef USE_CUDA
#include <torch/csrc/stable/accelerator.h>
#endif

#include "blobs.h"
#include "kernels.h"
#include "philox.h"

namespace gact {
namespace {

using torch::stable::Tensor;

// Nothing where more than kMaxRank dimensions remain.
std::optional<Strided> to_strided(const Tensor& x) {
  const IntHeaderOnlyArrayRef sizes = x.sizes(), strides = x.strides();
  Strided values = {x.const_data_ptr(), x.numel(), 0, {}, {}};
  for (size_t d = 0; d < sizes.size(); ++d) {
    const int64_t size = sizes[d], stride = strides[d];
    if (size == 1) continue;
    if (values.rank > 0 && values.stride[values.rank - 1] == size * stride) {
      values.size[values.rank - 1] *= size;
      values.stride[values.rank - 1] = stride;
      continue;
    }
    if (values.rank == kMaxRank) return std::nullopt;
    values.size[values.rank] = size;
    values.stride[values.rank++] = stride;
  }
  return values;
}

Tensor as_contiguous(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// A new contiguous tensor on the device of `like`. (torch::stable::new_empty boxes its
// arguments, which takes a microsecond or two.)
Tensor empty(IntHeaderOnlyArrayRef size, ScalarType dtype, const Tensor& like) {
  std::vector<int64_t> strides(size.size());
  int64_t stride = 1;
  for (size_t d = size.size(); d-- > 0; stride *= std::max<int64_t>(size[d], 1)) strides[d] = stride;
  const auto dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(size.size()), size.data(), strides.data(), dtype_code,
                                                  device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

Tensor empty_bytes(int64_t nbytes, const Tensor& like) {
  return empty(IntHeaderOnlyArrayRef(&nbytes, 1), ScalarType::Byte, like);
}

uint8_t* bytes_of(const Tensor& tensor) { return static_cast<uint8_t*>(tensor.mutable_data_ptr()); }

// ---- Devices -----------------------------------------------------------------------------------------------------

struct Cpu {
  explicit Cpu(const Tensor&) {}
  // Neighbours within a cache line are gathered faster than copied: rows with gaps took 1.1 ms against 1.7 ms, every
  // second column 1.9 against 2.2, but a transposed matrix 22 against 3.7 (3 million floats, one thread).
  static bool reads(const Strided& values, const Codec&) {
    return values.rank == 0 || values.stride[values.rank - 1] <= 16;
  }
  static void compress(const Strided& values, const Codec& codec, const Blob& blob) {
    cpu::compress(values, codec, blob);
  }
  static void decompress(const Blob& blob, const Codec& codec, void* values) {
    cpu::decompress(blob, codec, {values, blob.numel, 0});
  }
  // A contiguous tensor, whose rows have `places` groups.
  static void compress_runs(const Tensor& x, int64_t places, const std::vector<CodedRun>& runs) {
    const auto* from = static_cast<const uint8_t*>(x.const_data_ptr());
    for (const CodedRun& run : runs) {
      const int64_t row = places * run.codec.group_size, length = run.count * run.codec.group_size;
      const int64_t rows = run.blob.numel / length;
      const bool is_whole = length == row || rows == 1;
      const Strided values = {from + run.first * run.codec.group_size * item_size(x.scalar_type()),
                              rows * length,
                              is_whole ? 1 : 2,
                              {is_whole ? rows * length : rows, length},
                              {is_whole ? 1 : row, 1}};
      compress(values, run.codec, run.blob);
    }
  }
  static void decompress_runs(const std::vector<CodedRun>& runs, int64_t places, Tensor& values) {
    const int64_t itemsize = item_size(values.scalar_type());
    for (const CodedRun& run : runs) {
      const int64_t group = run.codec.group_size * itemsize, length = run.count * run.codec.group_size;
      cpu::decompress(run.blob, run.codec,
                      {bytes_of(values) + run.first * group, length, (places - run.count) * group});
    }
  }
  static bool pack_integers(const void* values, const Integers& integers, uint8_t* packed) {
    return cpu::pack_integers(values, integers, packed);
  }
  static void unpack_integers(const uint8_t* packed, const Integers& integers, void* values) {
    cpu::unpack_integers(packed, integers, values);
  }
};

#ifdef USE_CUDA
void* current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

struct Cuda {
  explicit Cuda(const Tensor& x) : guard(x.get_device_index()), stream(current_stream(x.get_device_index())) {}
  static bool reads(const Strided& values, const Codec& codec) { return cuda::reads(values, codec); }
  void compress(const Strided& values, const Codec& codec, const Blob& blob) const {
    cuda::compress(values, codec, blob, stream);
  }
  void decompress(const Blob& blob, const Codec& codec, void* values) const {
    cuda::decompress(blob, codec, values, stream);
  }
  void compress_runs(const Tensor& x, int64_t places, const std::vector<CodedRun>& runs) const {
    cuda::compress_runs(x.const_data_ptr(), places, runs.data(), int(runs.size()), stream);
  }
  void decompress_runs(const std::vector<CodedRun>& runs, int64_t places, Tensor& values) const {
    cuda::decompress_runs(runs.data(), int(runs.size()), places, values.mutable_data_ptr(), stream);
  }
  // What is out of range is found on the device.
  bool pack_integers(const void* values, const Integers& integers, uint8_t* packed) const {
    cuda::pack_integers(values, integers, packed, stream);
    return true;
  }
  void unpack_integers(const uint8_t* packed, const Integers& integers, void* values) const {
    cuda::unpack_integers(packed, integers, values, stream);
  }
  torch::stable::accelerator::DeviceGuard guard;
  void* stream;
};
#endif

// ---- Operators ---------------------------------------------------------------------------------------------------

// What aten::min or aten::max says of a tensor of integers on the CPU.
int64_t extreme(const char* op, const Tensor& x) {
  std::array<StableIValue, 1> stack{torch::stable::detail::from(x)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  const Tensor found = torch::stable::to(torch::stable::detail::to<Tensor>(stack[0]), ScalarType::Long);
  return *static_cast<const int64_t*>(found.const_data_ptr());
}

template <class Device>
Tensor compress_integers(const Device& device, const Tensor& x, int64_t bits) {
  const Integers integers = to_integers("compress", x.scalar_type(), bits, x.numel());
  const Tensor source = as_contiguous(x);
  Tensor packed = empty_bytes(packed_nbytes(integers), x);
  if (integers.numel && !device.pack_integers(source.const_data_ptr(), integers, bytes_of(packed))) {
    fail("compress", "integers must lie in [0, ", 1 << bits, ") at ", bits, " bits, got values from ",
         extreme("aten::min", x), " to ", extreme("aten::max", x));
  }
  return packed;
}

template <class Device>
Tensor compress(const Tensor& x, int64_t bits, int64_t group_size, int64_t seed, const std::optional<Tensor>& mask,
                std::string_view rounding, std::string_view by_place) {
  const ScalarType dtype = x.scalar_type();
  check(!mask || !is_integer(dtype), "compress", "mask must be None where the tensor is a mask or integer itself");
  if (mask && mask->device() != x.device()) {
    fail("compress", "mask must lie on ", to_string(x.device()), ", got ", to_string(mask->device()));
  }
  const Device device(x);
  if (is_integer(dtype)) {
    check(by_place.empty(), "compress", "by_place must be '' for masks and integers, got '", by_place, "'");
    return compress_integers(device, x, bits);
  }

  const Codec codec = to_codec("compress", dtype, bits, group_size, seed, rounding);
  const int64_t numel = x.numel();
  std::optional<Tensor> mask_bytes;
  Integers mask_integers = {1, 1, 1, true, 0};
  if (mask) {
    const ScalarType mask_dtype = mask->scalar_type();
    check(is_mask(mask_dtype), "compress", "mask must have dtype bool or uint8, got ", mask_dtype);
    mask_bytes = as_contiguous(*mask);
    mask_integers.numel = mask->numel();
  }
  const std::vector<Run> runs = to_runs("compress", by_place, numel, group_size);
  const int64_t float_nbytes = runs_nbytes(codec, dtype, numel, runs);
  Tensor blob = empty_bytes(float_nbytes + packed_nbytes(mask_integers), x);
  uint8_t* data = bytes_of(blob);
  if (numel && !runs.empty()) {
    device.compress_runs(as_contiguous(x), count_places(runs), to_coded(codec, dtype, numel, runs, data));
  } else if (numel) {
    Tensor source = x;
    std::optional<Strided> values = to_strided(source);
    if (!values || !Device::reads(*values, codec)) {
      source = as_contiguous(x);
      values = to_strided(source);
    }
    device.compress(*values, codec, lay_out(codec, dtype, numel, data).blob);
  }
  if (mask_integers.numel) device.pack_integers(mask_bytes->const_data_ptr(), mask_integers, data + float_nbytes);
  return blob;
}

template <class Device>
Tensor decompress(const Tensor& blob, IntHeaderOnlyArrayRef size, ScalarType dtype, int64_t bits, int64_t group_size,
                  int64_t seed, std::string_view rounding, std::string_view by_place) {
  const ScalarType blob_dtype = blob.scalar_type();
  check(blob_dtype == ScalarType::Byte && blob.dim() == 1, "decompress", "blob must be a 1-D uint8 tensor, got ",
        blob.dim(), "-D ", blob_dtype);
  int64_t numel = 1;
  for (const int64_t extent : size) {
    if (extent < 0) fail("decompress", "size must not be negative, got ", to_string(size));
    numel *= extent;
  }
  const int64_t given = blob.numel();
  const auto check_nbytes = [&](int64_t nbytes) {
    if (given >= nbytes) return;
    fail("decompress", "blob must have at least ", nbytes, " bytes for size ", to_string(size), ", got ", given);
  };
  const Device device(blob);
  const Tensor bytes = as_contiguous(blob);
  // Only read from; Blob has no const twin.
  auto* data = static_cast<uint8_t*>(const_cast<void*>(bytes.const_data_ptr()));
  if (is_integer(dtype)) {
    const Integers integers = to_integers("decompress", dtype, dtype == ScalarType::Bool ? 1 : bits, numel);
    const int64_t nbytes = packed_nbytes(integers);
    check_nbytes(nbytes);
    Tensor result = empty(size, dtype, blob);
    if (numel) device.unpack_integers(data + given - nbytes, integers, result.mutable_data_ptr());
    return result;
  }
  const Codec codec = to_codec("decompress", dtype, bits, group_size, seed, rounding);
  const std::vector<Run> runs = to_runs("decompress", by_place, numel, group_size);
  check_nbytes(runs_nbytes(codec, dtype, numel, runs));
  Tensor result = empty(size, dtype, blob);
  if (numel && !runs.empty()) {
    device.decompress_runs(to_coded(codec, dtype, numel, runs, data), count_places(runs), result);
  } else if (numel) {
    device.decompress(lay_out(codec, dtype, numel, data).blob, codec, result.mutable_data_ptr());
  }
  return result;
}

// As gact_fx/graphs/draw_mask.py has it.
Tensor draw_mask(const Tensor& seed, IntHeaderOnlyArrayRef size, double threshold) {
  check(seed.scalar_type() == ScalarType::Long && seed.numel() == 1, "draw_mask", "seed must be one int64, got ",
        seed.numel(), " of ", seed.scalar_type());
  const Draw draw = {uint32_t(*static_cast<const int64_t*>(seed.const_data_ptr())), least_beyond(float(threshold))};
  Tensor mask = empty(size, ScalarType::Bool, seed);
  cpu::draw_mask(draw, bytes_of(mask), mask.numel());
  return mask;
}

std::string cpu_capability() { return cpu::capability(); }

}  // namespace
}  // namespace gact

STABLE_TORCH_LIBRARY_IMPL(gact_fx, CPU, m) {
  m.impl("compress", TORCH_BOX(&gact::compress<gact::Cpu>));
  m.impl("decompress", TORCH_BOX(&gact::decompress<gact::Cpu>));
  m.impl("draw_mask", TORCH_BOX(&gact::draw_mask));
}

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(gact_fx, CUDA, m) {
  m.impl("compress", TORCH_BOX(&gact::compress<gact::Cuda>));
  m.impl("decompress", TORCH_BOX(&gact::decompress<gact::Cuda>));
}
#endif

// The instruction set of the CPU kernels: avx512, avx2 or baseline.
STABLE_TORCH_LIBRARY_FRAGMENT(gact_fx, m) { m.def("cpu_capability() -> str"); }

STABLE_TORCH_LIBRARY_IMPL(gact_fx, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&gact::cpu_capability));
}
