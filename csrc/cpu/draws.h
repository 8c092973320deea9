// Masks of random numbers, drawn as Inductor's C++ code draws them for dropout.
#pragma once

#include <cstdint>

#include "../kernels.h"
#include "../philox.h"

namespace gact::cpu {
namespace {

// Bytes [begin, end) of a mask.
template <class Elements>
void draw_mask_range(const Draw& draw, uint8_t* mask, int64_t begin, int64_t end) {
  for (; begin < end; begin += kDrawn) {
    uint32_t words[kDrawn];
    Elements::draw_words(draw.seed, uint32_t(begin), words);
    const int count = end - begin < kDrawn ? int(end - begin) : kDrawn;
    for (int i = 0; i < count; ++i) mask[begin + i] = (words[i] & kDrawnBits) >= draw.least;
  }
}

}  // namespace
}  // namespace gact::cpu
