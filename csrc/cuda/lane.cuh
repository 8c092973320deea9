// How the elements of a group are spread over lanes, and how lanes read and write them.
//
// A group is eight segments of equal length, and a lane owns `kRun` consecutive elements of every segment. Elements
// that share a byte, in planes of any width, lie whole segments apart: so a lane holds all of them, and packing is
// arithmetic on its registers, four codes at a time. Neighbouring lanes own neighbouring elements, so accesses
// coalesce.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "../kernels.h"

namespace gact::cuda {

constexpr int kSegments = 8;
constexpr int kWarpSize = 32;
constexpr unsigned kWholeWarp = 0xffffffff;
constexpr int kThreads = 128;
#ifndef GACT_CUDA_MAX_BLOCKS  // the emulation sets few, so that its small tensors take several rounds
#define GACT_CUDA_MAX_BLOCKS 65536
#endif

// Blocks that a multiprocessor is to hold at once: as many as leave every kernel the registers that it needs, on every
// architecture (check.sh tells). Reading compressed data, a lane holds codes only; otherwise its elements as they came.
constexpr int kBlocksWhereDecompressing = 7;
template <class Item, int kRun>
constexpr int kBlocksWhereCompressing = sizeof(Item) == 8 || kRun == 16 ? 4
                                        : kRun == 8                     ? 5
                                                                        : 6;

// Groups of `numel` elements, 2^lanes_log2 lanes each.
struct Groups {
  int64_t numel;
  int64_t count;
  int size;
  int lanes_log2;

  Groups(int64_t numel, int size, int run) : numel(numel), count((numel + size - 1) / size), size(size), lanes_log2(0) {
    while (kSegments * run << lanes_log2 < size) ++lanes_log2;
  }
  GACT_INLINE int lanes() const { return 1 << lanes_log2; }
  GACT_INLINE int segment() const { return size / kSegments; }
};

// Where a lane stands.
template <int kRun>
struct Place {
  int64_t group;
  int lane;  // within the group
  int segment;

  // Where the lane's i-th element lies within the group.
  __device__ int within(int i) const { return (i / kRun) * segment + lane * kRun + i % kRun; }
};

// All lanes of a warp make the same number of calls, so that `body` may shuffle; those beyond the last group repeat it
// and write the same bytes.
template <int kRun, class Body>
__device__ void for_each_group(const Groups& groups, Body body) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int lane_of_warp = int(threadIdx.x) % kWarpSize;
  for (int64_t first = thread - lane_of_warp; first >> groups.lanes_log2 < groups.count; first += stride) {
    const int64_t group = (first + lane_of_warp) >> groups.lanes_log2;
    body(Place<kRun>{group < groups.count ? group : groups.count - 1, lane_of_warp & (groups.lanes() - 1),
                     groups.segment()});
  }
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Groups& groups, void* stream, Arguments&&... arguments) {
  if (groups.count == 0) return;
  const int64_t blocks = ((groups.count << groups.lanes_log2) + kThreads - 1) / kThreads;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks < GACT_CUDA_MAX_BLOCKS ? blocks : GACT_CUDA_MAX_BLOCKS));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (error != cudaSuccess) {
    cudaGetLastError();  // what is reported here must not be reported again by a later call
    throw std::runtime_error(std::string("gact_fx: a CUDA kernel does not launch: ") + cudaGetErrorString(error));
  }
}

// ---- Accesses of any alignment -----------------------------------------------------------------------------------

inline bool is_aligned(const void* pointer, size_t nbytes) {
  return reinterpret_cast<uintptr_t>(pointer) % nbytes == 0;
}

template <int kWords>
struct VectorOf;
template <>
struct VectorOf<1> {
  using type = uint32_t;
};
template <>
struct VectorOf<2> {
  using type = uint2;
};
template <>
struct VectorOf<4> {
  using type = uint4;
};

template <int kWords>
__device__ void load_words(uint32_t (&words)[kWords], const uint8_t* from, bool aligned) {
  using Vector = typename VectorOf<kWords>::type;
  if (aligned) {
    const Vector vector = *reinterpret_cast<const Vector*>(from);
    memcpy(words, &vector, sizeof(vector));
    return;
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    words[w] = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) words[w] |= uint32_t(from[4 * w + byte]) << 8 * byte;
  }
}

template <int kWords>
__device__ void store_words(uint8_t* to, const uint32_t (&words)[kWords], bool aligned) {
  using Vector = typename VectorOf<kWords>::type;
  if (aligned) {
    Vector vector;
    memcpy(&vector, words, sizeof(vector));
    *reinterpret_cast<Vector*>(to) = vector;
    return;
  }
#pragma unroll
  for (int byte = 0; byte < 4 * kWords; ++byte) to[byte] = uint8_t(words[byte / 4] >> byte % 4 * 8);
}

template <class T>
__device__ T load_value(const uint8_t* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const T*>(from);
  T value = 0;
#pragma unroll
  for (int byte = 0; byte < int(sizeof(T)); ++byte) value |= T(T(from[byte]) << 8 * byte);
  return value;
}

template <class T>
__device__ void store_value(uint8_t* to, T value, bool aligned) {
  if (aligned) {
    *reinterpret_cast<T*>(to) = value;
    return;
  }
#pragma unroll
  for (int byte = 0; byte < int(sizeof(T)); ++byte) to[byte] = uint8_t(value >> 8 * byte);
}

// ---- Elements ----------------------------------------------------------------------------------------------------

// What compress reads: rows of `length` elements, `stride` apart, with `inner` from element to element.
struct Rows {
  const void* data;
  int64_t numel;
  int64_t length;
  int64_t stride;
  int64_t inner;
  bool contiguous;
  bool wide;  // sixteen aligned bytes never straddle rows
};

// The i-th of the items that registers hold; short ones share a register.
template <class Item>
__device__ Item get_item(const uint32_t* words, int i) {
  if constexpr (sizeof(Item) == 8) {
    return words[2 * i] | Item(words[2 * i + 1]) << 32;
  } else {
    constexpr int kPerWord = 4 / sizeof(Item);
    return Item(words[i / kPerWord] >> i % kPerWord * (32 / kPerWord));
  }
}

// Into registers that are zero there.
template <class Item>
__device__ void put_item(uint32_t* words, int i, Item item) {
  if constexpr (sizeof(Item) == 8) {
    words[2 * i] = uint32_t(item);
    words[2 * i + 1] = uint32_t(item >> 32);
  } else {
    constexpr int kPerWord = 4 / sizeof(Item);
    words[i / kPerWord] |= uint32_t(item) << i % kPerWord * (32 / kPerWord);
  }
}

// A lane's elements, as they came.
//
// What is rare goes by quads of elements in loops that are not unrolled, to keep the code small. Registers cannot be
// indexed at run time, so a quad is picked out of them, or put into them, by comparing its index with each.
template <class Item, int kRun>
struct Elements {
  static constexpr int kCount = kSegments * kRun;
  static constexpr int kQuads = kCount / 4;
  static constexpr int kQuadWords = sizeof(Item);
  static constexpr int kPerPiece = 16 / sizeof(Item);  // of a 16-byte access
  uint32_t words[kQuads * kQuadWords];

  __device__ Item get(int i) const { return get_item<Item>(words, i); }

  __device__ void get_quad(int index, uint32_t (&quad)[kQuadWords]) const {
#pragma unroll
    for (int w = 0; w < kQuads * kQuadWords; ++w) {
      if (w < kQuadWords || index == w / kQuadWords) quad[w % kQuadWords] = words[w];
    }
  }

  __device__ void set_quad(int index, const uint32_t (&quad)[kQuadWords]) {
#pragma unroll
    for (int w = 0; w < kQuads * kQuadWords; ++w) {
      if (index == w / kQuadWords) words[w] = quad[w % kQuadWords];
    }
  }

  // Behind the tensor's end its last element is repeated.
  __device__ void load(const Rows& rows, const Groups& groups, const Place<kRun>& place) {
    const auto* data = static_cast<const Item*>(rows.data);
    const int64_t first = place.group * groups.size;
    if (rows.wide && first + groups.size <= rows.numel) {
#pragma unroll
      for (int i = 0; i < kCount; i += kPerPiece) {
        int64_t element = first + place.within(i);
        if (!rows.contiguous) element = element / rows.length * rows.stride + element % rows.length;
        uint32_t piece[4];
        load_words(piece, reinterpret_cast<const uint8_t*>(data + element), true);
#pragma unroll
        for (int w = 0; w < 4; ++w) words[i / kPerPiece * 4 + w] = piece[w];
      }
      return;
    }
#pragma unroll 1
    for (int index = 0; index < kQuads; ++index) {
      int64_t element = first + place.within(4 * index);
      if (element >= rows.numel) element = rows.numel - 1;
      const int64_t row = element / rows.length;
      int64_t column = element - row * rows.length;
      const Item* from = data + row * rows.stride + column * rows.inner;
      uint32_t quad[kQuadWords] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        put_item(quad, i, *from);
        if (element + 1 >= rows.numel) continue;
        ++element;
        from += rows.inner;
        if (++column == rows.length) {
          column = 0;
          from += rows.stride - rows.length * rows.inner;
        }
      }
      set_quad(index, quad);
    }
  }
};

// Where a lane writes its elements.
template <class Item, int kRun>
struct Output {
  Item* data;       // the group's
  int64_t present;  // elements that the tensor has from there on
  Place<kRun> place;

  __device__ Output(void* values, const Groups& groups, const Place<kRun>& place)
      : data(static_cast<Item*>(values) + place.group * groups.size),
        present(groups.numel - place.group * groups.size),
        place(place) {}

  // To aligned memory, item_of(0), item_of(1), ...; the group is whole.
  template <class ItemOf>
  __device__ void store_pieces(ItemOf item_of) const {
    constexpr int kPerPiece = Elements<Item, kRun>::kPerPiece;
#pragma unroll
    for (int first = 0; first < Elements<Item, kRun>::kCount; first += kPerPiece) {
      uint32_t piece[4] = {};
#pragma unroll
      for (int i = 0; i < kPerPiece; ++i) put_item<Item>(piece, i, item_of(first + i));
      store_words(reinterpret_cast<uint8_t*>(data + place.within(first)), piece, true);
    }
  }

  // item_of(quad, 0), ... item_of(quad, 3) of every quad; nothing behind the tensor's end.
  template <class ItemOf>
  __device__ void store_items(ItemOf item_of) const {
#pragma unroll 1
    for (int quad = 0; quad < Elements<Item, kRun>::kQuads; ++quad) {
      const int start = place.within(4 * quad);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (start + i < present) data[start + i] = item_of(quad, i);
      }
    }
  }
};

}  // namespace gact::cuda
