// The operators' kernels: check tensors, lay out the blob, call the device's functions. The schemas are Python's
// (gact_fx/codec/operators.py), and so is the statement of the blob's layout (gact_fx/codec/layout.py).
#include <ATen/ATen.h>
#include <torch/library.h>

#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>
#include <string_view>
#ifdef GACT_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "kernels.h"

namespace gact {
namespace {

constexpr const char* kDtypes = "float32, bfloat16, float16, float64, or bool or an integer to be packed exactly";

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_mask(at::ScalarType dtype) { return dtype == at::kBool || dtype == at::kByte; }

bool is_integer(at::ScalarType dtype) {
  return is_mask(dtype) || dtype == at::kChar || dtype == at::kShort || dtype == at::kInt || dtype == at::kLong;
}

bool is_source(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble;
}

Rounding to_rounding(const char* op, std::string_view name) {
  if (name == "stochastic") return Rounding::kStochastic;
  if (name == "dither") return Rounding::kDither;
  TORCH_CHECK_VALUE(name == "nearest", "gact_fx.", op,
                    ": rounding must be one of ('stochastic', 'dither', 'nearest'), got '", name, "'");
  return Rounding::kNearest;
}

Codec to_codec(const char* op, at::ScalarType dtype, int64_t bits, int64_t group_size, int64_t seed,
               std::string_view rounding) {
  TORCH_CHECK_VALUE(is_source(dtype), "gact_fx.", op, ": dtype must be ", kDtypes, ", got ", dtype);
  TORCH_CHECK_VALUE(bits != kBFloat16Bits || dtype == at::kFloat, "gact_fx.", op,
                    ": 16 bits (bfloat16) are for float32 tensors, got ", dtype);
  TORCH_CHECK_VALUE((1 <= bits && bits <= 8) || bits == kBFloat16Bits, "gact_fx.", op,
                    ": bits must lie in [1, 8], or be 16 for bfloat16, got ", bits);
  const bool power_of_two = (group_size & (group_size - 1)) == 0;
  TORCH_CHECK_VALUE(32 <= group_size && group_size <= kMaxGroupSize && power_of_two, "gact_fx.", op,
                    ": group_size must be a power of two in [32, 1024], got ", group_size);
  const Rounding how = to_rounding(op, rounding);
  TORCH_CHECK_VALUE(how != Rounding::kDither || bits != kBFloat16Bits, "gact_fx.", op,
                    ": rounding 'dither' needs bits in [1, 8], got 16; use 'stochastic'");
  const Source source = dtype == at::kFloat      ? Source::kFloat32
                        : dtype == at::kBFloat16 ? Source::kBFloat16
                        : dtype == at::kHalf     ? Source::kFloat16
                                                 : Source::kFloat64;
  return {source, how, int(bits), int(group_size), uint64_t(seed)};
}

Integers to_integers(const char* op, at::ScalarType dtype, int64_t bits, int64_t numel) {
  TORCH_CHECK_VALUE(dtype != at::kBool || bits == 1, "gact_fx.", op, ": bits must be 1 for a mask, got ", bits);
  TORCH_CHECK_VALUE(1 <= bits && bits <= 16, "gact_fx.", op, ": bits must lie in [1, 16] for integers, got ", bits);
  const int itemsize = int(at::elementSize(dtype));
  const int value_bits = std::min(int(bits), 8 * itemsize - (at::isSignedType(dtype) ? 1 : 0));
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

Layout lay_out(const Codec& codec, at::ScalarType dtype, int64_t numel, uint8_t* data) {
  const int64_t groups = ceil_div(numel, codec.group_size);
  const bool has_metadata = codec.bits != kBFloat16Bits;
  const int64_t minimum = groups * (int64_t(codec.group_size) * codec.bits / 8);
  const int64_t step = minimum + (has_metadata ? groups * int64_t(at::elementSize(dtype)) : 0);
  const int64_t end = step + (has_metadata ? groups * int64_t(sizeof(uint16_t)) : 0);
  return {{data, data + minimum, data + step, numel}, end};
}

// Nothing where more than kMaxRank dimensions remain.
std::optional<Strided> to_strided(const at::Tensor& x) {
  Strided values = {x.const_data_ptr(), x.numel(), 0, {}, {}};
  for (int64_t d = 0; d < x.dim(); ++d) {
    const int64_t size = x.size(d), stride = x.stride(d);
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

// ---- Devices -----------------------------------------------------------------------------------------------------

struct Cpu {
  explicit Cpu(const at::Tensor&) {}
  // Neighbours within a cache line are gathered faster than copied: rows with gaps took 1.1 ms against 1.7 ms, every
  // second column 1.9 against 2.2, but a transposed matrix 22 against 3.7 (3 million floats, one thread).
  static bool reads(const Strided& values, const Codec&) {
    return values.rank == 0 || values.stride[values.rank - 1] <= 16;
  }
  static void compress(const Strided& values, const Codec& codec, const Blob& blob) {
    cpu::compress(values, codec, blob);
  }
  static void decompress(const Blob& blob, const Codec& codec, void* values) { cpu::decompress(blob, codec, values); }
  static bool pack_integers(const void* values, const Integers& integers, uint8_t* packed) {
    return cpu::pack_integers(values, integers, packed);
  }
  static void unpack_integers(const uint8_t* packed, const Integers& integers, void* values) {
    cpu::unpack_integers(packed, integers, values);
  }
};

#ifdef GACT_WITH_CUDA
struct Cuda {
  explicit Cuda(const at::Tensor& x) : guard(x.device()), stream(c10::cuda::getCurrentCUDAStream().stream()) {}
  static bool reads(const Strided& values, const Codec& codec) { return cuda::reads(values, codec); }
  void compress(const Strided& values, const Codec& codec, const Blob& blob) const {
    cuda::compress(values, codec, blob, stream);
  }
  void decompress(const Blob& blob, const Codec& codec, void* values) const {
    cuda::decompress(blob, codec, values, stream);
  }
  // What is out of range is found on the device.
  bool pack_integers(const void* values, const Integers& integers, uint8_t* packed) const {
    cuda::pack_integers(values, integers, packed, stream);
    return true;
  }
  void unpack_integers(const uint8_t* packed, const Integers& integers, void* values) const {
    cuda::unpack_integers(packed, integers, values, stream);
  }
  c10::cuda::CUDAGuard guard;
  void* stream;
};
#endif

// ---- Operators ---------------------------------------------------------------------------------------------------

template <class Device>
at::Tensor compress(const at::Tensor& x, int64_t bits, int64_t group_size, int64_t seed,
                    const std::optional<at::Tensor>& mask, std::string_view rounding) {
  const Device device(x);
  const auto options = x.options().dtype(at::kByte);
  if (is_integer(x.scalar_type())) {
    TORCH_CHECK_VALUE(!mask, "gact_fx.compress: mask must be None where the tensor is a mask or integer itself");
    const Integers integers = to_integers("compress", x.scalar_type(), bits, x.numel());
    const at::Tensor source = x.contiguous();
    at::Tensor packed = at::empty({packed_nbytes(integers)}, options);
    if (x.numel()) {
      const bool inside = device.pack_integers(source.const_data_ptr(), integers, packed.mutable_data_ptr<uint8_t>());
      TORCH_CHECK_VALUE(inside, "gact_fx.compress: integers must lie in [0, ", 1 << bits, ") at ", bits,
                        " bits, got values from ", x.min().item<int64_t>(), " to ", x.max().item<int64_t>());
    }
    return packed;
  }
  const Codec codec = to_codec("compress", x.scalar_type(), bits, group_size, seed, rounding);
  at::Tensor mask_bytes;
  Integers mask_integers = {1, 1, 1, true, 0};
  if (mask) {
    TORCH_CHECK_VALUE(is_mask(mask->scalar_type()), "gact_fx.compress: mask must have dtype bool or uint8, got ",
                      mask->scalar_type());
    TORCH_CHECK_VALUE(mask->device() == x.device(), "gact_fx.compress: mask must lie on ", x.device(), ", got ",
                      mask->device());
    mask_bytes = mask->contiguous();
    mask_integers.numel = mask->numel();
  }
  const int64_t float_nbytes = lay_out(codec, x.scalar_type(), x.numel(), nullptr).nbytes;
  at::Tensor blob = at::empty({float_nbytes + packed_nbytes(mask_integers)}, options);
  auto* data = blob.mutable_data_ptr<uint8_t>();
  if (x.numel()) {
    at::Tensor source = x;
    std::optional<Strided> values = to_strided(source);
    if (!values || !Device::reads(*values, codec)) {
      source = x.contiguous();
      values = to_strided(source);
    }
    device.compress(*values, codec, lay_out(codec, x.scalar_type(), x.numel(), data).blob);
  }
  if (mask_integers.numel) device.pack_integers(mask_bytes.const_data_ptr(), mask_integers, data + float_nbytes);
  return blob;
}

template <class Device>
at::Tensor decompress(const at::Tensor& blob, at::IntArrayRef size, at::ScalarType dtype, int64_t bits,
                      int64_t group_size, int64_t seed, std::string_view rounding) {
  TORCH_CHECK_VALUE(blob.scalar_type() == at::kByte && blob.dim() == 1,
                    "gact_fx.decompress: blob must be a 1-D uint8 tensor, got ", blob.dim(), "-D ", blob.scalar_type());
  for (const int64_t extent : size) {
    TORCH_CHECK_VALUE(extent >= 0, "gact_fx.decompress: size must not be negative, got ", size);
  }
  const int64_t numel = c10::multiply_integers(size);
  const auto check_nbytes = [&](int64_t nbytes) {
    TORCH_CHECK_VALUE(blob.numel() >= nbytes, "gact_fx.decompress: blob must have at least ", nbytes,
                      " bytes for size ", size, ", got ", blob.numel());
  };
  const Device device(blob);
  const at::Tensor bytes = blob.contiguous();
  // Only read from; Blob has no const twin.
  auto* data = const_cast<uint8_t*>(bytes.const_data_ptr<uint8_t>());
  at::Tensor result;
  if (is_integer(dtype)) {
    const Integers integers = to_integers("decompress", dtype, dtype == at::kBool ? 1 : bits, numel);
    const int64_t nbytes = packed_nbytes(integers);
    check_nbytes(nbytes);
    result = at::empty(size, blob.options().dtype(dtype));
    if (numel) device.unpack_integers(data + blob.numel() - nbytes, integers, result.mutable_data_ptr());
    return result;
  }
  const Codec codec = to_codec("decompress", dtype, bits, group_size, seed, rounding);
  const Layout layout = lay_out(codec, dtype, numel, data);
  check_nbytes(layout.nbytes);
  result = at::empty(size, blob.options().dtype(dtype));
  if (numel) device.decompress(layout.blob, codec, result.mutable_data_ptr());
  return result;
}

}  // namespace
}  // namespace gact

TORCH_LIBRARY_IMPL(gact_fx, CPU, m) {
  m.impl("compress", &gact::compress<gact::Cpu>);
  m.impl("decompress", &gact::decompress<gact::Cpu>);
}

#ifdef GACT_WITH_CUDA
TORCH_LIBRARY_IMPL(gact_fx, CUDA, m) {
  m.impl("compress", &gact::compress<gact::Cuda>);
  m.impl("decompress", &gact::decompress<gact::Cuda>);
}
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "Compiled kernels of gact_fx; importing the module registers them.";
  m.def("cpu_capability", &gact::cpu::capability, "The instruction set of the CPU kernels: avx512, avx2 or baseline.");
}
