// The operators' kernels: check tensors, lay out the blob, call the device's functions. The schemas are Python's
// (gact_fx/ops.py), and so is the statement of the blob's layout (gact_fx/codec_layout.py).
#include <ATen/ATen.h>
#include <torch/library.h>

#include <pybind11/pybind11.h>

#include <optional>

#include "codec.h"
#include "kernels.h"

namespace gact {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t mask_nbytes(int64_t numel) { return ceil_div(numel, kMaskBlock) * (kMaskBlock / 8); }

bool is_mask(at::ScalarType dtype) { return dtype == at::kBool || dtype == at::kByte; }

bool is_source(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf; }

void check_codes(const char* op, int64_t bits, int64_t group_size) {
  TORCH_CHECK_VALUE(1 <= bits && bits <= 8, "gact_fx.", op, ": bits must lie in [1, 8], got ", bits);
  const bool power_of_two = (group_size & (group_size - 1)) == 0;
  TORCH_CHECK_VALUE(32 <= group_size && group_size <= kMaxGroupSize && power_of_two, "gact_fx.", op,
                    ": group_size must be a power of two in [32, 1024], got ", group_size);
}

// The blob of a float tensor; `nbytes` is what it occupies, a mask behind it not counted.
struct Layout {
  Blob blob;
  int64_t nbytes;
};

Layout lay_out(at::ScalarType dtype, int64_t numel, int64_t bits, int64_t group_size, uint8_t* data) {
  const int64_t groups = ceil_div(numel, group_size);
  const int64_t itemsize = at::elementSize(dtype);
  const Source source = dtype == at::kFloat      ? Source::kFloat32
                        : dtype == at::kBFloat16 ? Source::kBFloat16
                                                 : Source::kFloat16;
  const int64_t minimum = groups * (group_size * bits / 8);
  const int64_t step = minimum + groups * itemsize;
  return {{data, data + minimum, data + step, source, numel, int(bits), int(group_size)},
          step + groups * int64_t(sizeof(uint16_t))};
}

at::Tensor compress_cpu(const at::Tensor& x, int64_t bits, int64_t group_size, int64_t seed,
                        const std::optional<at::Tensor>& mask) {
  const auto options = x.options().dtype(at::kByte);
  const at::Tensor source = x.contiguous();
  if (is_mask(x.scalar_type())) {
    TORCH_CHECK_VALUE(bits == 1, "gact_fx.compress: bits must be 1 for a mask, got ", bits);
    TORCH_CHECK_VALUE(!mask, "gact_fx.compress: mask must be None where the tensor is a mask itself");
    at::Tensor blob = at::empty({mask_nbytes(x.numel())}, options);
    cpu::pack_mask(static_cast<const uint8_t*>(source.const_data_ptr()), x.numel(), blob.mutable_data_ptr<uint8_t>());
    return blob;
  }
  TORCH_CHECK_VALUE(is_source(x.scalar_type()),
                    "gact_fx.compress: dtype must be float32, bfloat16, float16, or bool or uint8 for a mask, got ",
                    x.scalar_type());
  check_codes("compress", bits, group_size);
  int64_t mask_bytes = 0;
  if (mask) {
    TORCH_CHECK_VALUE(is_mask(mask->scalar_type()), "gact_fx.compress: mask must have dtype bool or uint8, got ",
                      mask->scalar_type());
    TORCH_CHECK_VALUE(mask->device() == x.device(), "gact_fx.compress: mask must lie on ", x.device(), ", got ",
                      mask->device());
    mask_bytes = mask_nbytes(mask->numel());
  }
  const int64_t float_bytes = lay_out(x.scalar_type(), x.numel(), bits, group_size, nullptr).nbytes;
  at::Tensor blob = at::empty({float_bytes + mask_bytes}, options);
  auto* data = blob.mutable_data_ptr<uint8_t>();
  cpu::compress(source.const_data_ptr(), uint64_t(seed),
                lay_out(x.scalar_type(), x.numel(), bits, group_size, data).blob);
  if (mask) {
    const at::Tensor bytes = mask->contiguous();
    cpu::pack_mask(static_cast<const uint8_t*>(bytes.const_data_ptr()), bytes.numel(), data + float_bytes);
  }
  return blob;
}

at::Tensor decompress_cpu(const at::Tensor& blob, at::IntArrayRef size, at::ScalarType dtype, int64_t bits,
                          int64_t group_size) {
  TORCH_CHECK_VALUE(blob.scalar_type() == at::kByte && blob.dim() == 1,
                    "gact_fx.decompress: blob must be a 1-D uint8 tensor, got ", blob.dim(), "-D ", blob.scalar_type());
  TORCH_CHECK_VALUE(is_mask(dtype) || is_source(dtype),
                    "gact_fx.decompress: dtype must be float32, bfloat16, float16, or bool or uint8 for a mask, got ",
                    dtype);
  if (!is_mask(dtype)) check_codes("decompress", bits, group_size);
  for (const int64_t extent : size) {
    TORCH_CHECK_VALUE(extent >= 0, "gact_fx.decompress: size must not be negative, got ", size);
  }
  const int64_t numel = c10::multiply_integers(size);
  const int64_t nbytes = is_mask(dtype) ? mask_nbytes(numel) : lay_out(dtype, numel, bits, group_size, nullptr).nbytes;
  TORCH_CHECK_VALUE(blob.numel() >= nbytes, "gact_fx.decompress: blob must have at least ", nbytes, " bytes for size ",
                    size, ", got ", blob.numel());
  const at::Tensor bytes = blob.contiguous();
  // The kernels only read through the blob's pointers when they decompress.
  auto* data = const_cast<uint8_t*>(bytes.const_data_ptr<uint8_t>());
  at::Tensor result = at::empty(size, blob.options().dtype(dtype));
  if (is_mask(dtype)) {
    cpu::unpack_mask(data + (blob.numel() - nbytes), numel, static_cast<uint8_t*>(result.mutable_data_ptr()));
  } else {
    cpu::decompress(lay_out(dtype, numel, bits, group_size, data).blob, result.mutable_data_ptr());
  }
  return result;
}

}  // namespace
}  // namespace gact

TORCH_LIBRARY_IMPL(gact_fx, CPU, m) {
  m.impl("compress", &gact::compress_cpu);
  m.impl("decompress", &gact::decompress_cpu);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "Compiled kernels of gact_fx; importing the module registers them.";
  m.def("cpu_capability", &gact::cpu::capability, "The instruction set of the CPU kernels: avx512, avx2 or baseline.");
}
