// Pack integers and masks exactly, and unpack them. A block of kIntegerBlock elements goes as a group of codes does.
#undef NDEBUG  // the range check is an assertion, and is part of what compress promises
#include <cassert>

#include "codes.cuh"

namespace gact::cuda {
namespace {

// 16 bytes, but at least four elements, for packing goes by four.
template <class Item>
constexpr int kRunOf = sizeof(Item) == 8 ? 4 : 16 / int(sizeof(Item));

// Ones in the bytes that are not zero.
__device__ uint32_t nonzero_bytes(uint32_t word) {
  return (((word & 0x7f7f7f7f) + 0x7f7f7f7f) | word) >> 7 & 0x01010101;
}

template <class Item>
__global__ void __launch_bounds__(kThreads, kBlocksWhereCompressing<Item, kRunOf<Item>>)
    pack(Rows rows, Groups blocks, int bits, int value_bits, bool is_mask, uint8_t* packed, bool aligned) {
  constexpr int kRun = kRunOf<Item>;
  const int low_bits = bits < 8 ? bits : 8;
  bool inside = true;
  for_each_group<kRun>(blocks, [&](const Place<kRun>& place) {
    Elements<Item, kRun> elements;
    elements.load(rows, blocks, place);
    Codes<kRun> low, high;
    if constexpr (sizeof(Item) == 1) {
      const uint32_t excess = 0x01010101u * (0xff << (value_bits < 8 ? value_bits : 8) & 0xff);
#pragma unroll
      for (int quad = 0; quad < low.kQuads; ++quad) {
        low.words[quad] = is_mask ? nonzero_bytes(elements.words[quad]) : elements.words[quad];
        inside = inside && (low.words[quad] & excess) == 0;
      }
    } else {
      Item all = 0;
      low.fill([&](int i) {
        const Item item = is_mask ? elements.get(i) != 0 : elements.get(i);
        all |= item;
        return uint32_t(item & 0xff);
      });
      inside = inside && all >> value_bits == 0;
    }
    low.clear_padding(blocks, place);
    uint8_t* out = packed + place.group * (blocks.segment() * bits);
    out = low.pack(low_bits, out, aligned, place);
    if (bits > 8) {
      high.fill([&](int i) { return uint32_t(uint32_t(elements.get(i)) >> 8 & 0xff); });
      high.clear_padding(blocks, place);
      high.pack(bits - 8, out, aligned, place);
    }
  });
  // Behind the loop, because some architectures spill what is in use across an assertion.
  assert(inside && "gact_fx.compress: integers must lie in [0, 2^bits)");
}

template <class Item>
__global__ void __launch_bounds__(kThreads, kBlocksWhereDecompressing)
    unpack(const uint8_t* packed, bool aligned, Groups blocks, int bits, void* values, bool wide) {
  constexpr int kRun = kRunOf<Item>;
  for_each_group<kRun>(blocks, [&](const Place<kRun>& place) {
    Codes<kRun> low, high{};
    const uint8_t* in = packed + place.group * (blocks.segment() * bits);
    in = low.unpack(bits < 8 ? bits : 8, in, aligned, place);
    if (bits > 8) high.unpack(bits - 8, in, aligned, place);
    const Output<Item, kRun> output(values, blocks, place);
    if (wide && output.present >= blocks.size) {
      output.store_pieces([&](int i) { return Item(low.get(i) | high.get(i) << 8); });
    } else {
      output.store_items([&](int quad, int i) {
        return Item((low.get_quad(quad) >> 8 * i & 0xff) | (high.get_quad(quad) >> 8 * i & 0xff) << 8);
      });
    }
  });
}

template <class Function>
void dispatch(int itemsize, Function function) {
  switch (itemsize) {
    case 1:
      return function(uint8_t());
    case 2:
      return function(uint16_t());
    case 4:
      return function(uint32_t());
    case 8:
      return function(uint64_t());
    default:
      throw std::runtime_error("gact_fx: integers must have 1, 2, 4 or 8 bytes, got " + std::to_string(itemsize));
  }
}

}  // namespace

void pack_integers(const void* values, const Integers& integers, uint8_t* packed, void* stream) {
  dispatch(integers.itemsize, [&](auto item) {
    constexpr int kRun = kRunOf<decltype(item)>;
    const Groups blocks(integers.numel, kIntegerBlock, kRun);
    const Rows rows{values, integers.numel, integers.numel, 0, 1, true, is_aligned(values, 16)};
    launch(pack<decltype(item)>, blocks, stream, rows, blocks, integers.bits, integers.value_bits, integers.is_mask,
           packed, is_aligned(packed, kRun));
  });
}

void unpack_integers(const uint8_t* packed, const Integers& integers, void* values, void* stream) {
  dispatch(integers.itemsize, [&](auto item) {
    constexpr int kRun = kRunOf<decltype(item)>;
    const Groups blocks(integers.numel, kIntegerBlock, kRun);
    launch(unpack<decltype(item)>, blocks, stream, packed, is_aligned(packed, kRun), blocks, integers.bits, values,
           is_aligned(values, 16));
  });
}

}  // namespace gact::cuda
