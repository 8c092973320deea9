// Reading a tensor in logical order, piece by piece, whatever its strides.
#pragma once

#include <cstdint>
#include <cstring>

#include "../kernels.h"

namespace gact::cpu {
namespace {

template <class Element>
class Walk {
 public:
  // Starts at element `first` in row-major order.
  void start(const Strided& values, int64_t first) {
    values_ = &values;
    from_ = static_cast<const Element*>(values.data);
    for (int d = values.rank - 1; d >= 0; --d) {
      at_[d] = first % values.size[d];
      first /= values.size[d];
      from_ += at_[d] * values.stride[d];
    }
  }

  // The next `count` elements: where they lie, if they lie in a row, or copied into `buffer`.
  GACT_INLINE const Element* next(int64_t count, Element* buffer) {
    if (values_->is_contiguous()) {
      const Element* here = from_;
      from_ += count;
      return here;
    }
    return next_strided(count, buffer);
  }

 private:
  const Element* next_strided(int64_t count, Element* buffer) {
    const int inner = values_->rank - 1;
    const int64_t stride = values_->stride[inner];
    if (stride == 1 && values_->size[inner] - at_[inner] >= count) {
      const Element* here = from_;
      advance(count);
      return here;
    }
    for (int64_t done = 0; done < count;) {
      const int64_t left = values_->size[inner] - at_[inner];
      const int64_t run = left < count - done ? left : count - done;
      if (stride == 1) {
        memcpy(buffer + done, from_, run * sizeof(Element));
      } else {
        for (int64_t i = 0; i < run; ++i) buffer[done + i] = from_[i * stride];
      }
      done += run;
      advance(run);
    }
    return buffer;
  }

  // By at most what is left of the innermost dimension.
  void advance(int64_t count) {
    int d = values_->rank - 1;
    at_[d] += count;
    from_ += count * values_->stride[d];
    for (; d > 0 && at_[d] == values_->size[d]; --d) {
      from_ += values_->stride[d - 1] - at_[d] * values_->stride[d];
      at_[d] = 0;
      ++at_[d - 1];
    }
  }

  const Strided* values_;
  const Element* from_;
  int64_t at_[kMaxRank];
};

}  // namespace
}  // namespace gact::cpu
