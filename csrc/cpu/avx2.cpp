// The kernels for AVX2 and FMA.
//
// The standard library's headers stand before the target: of their functions, those that are not inlined must exist in
// one version only. Ours are always inlined, or in an unnamed namespace.
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#include "vectors_avx2.h"
//
#include "ranges.h"
#include "vectorized_rotated.h"

namespace gact::cpu {

Kernels avx2_kernels() { return make_kernels<VectorizedRotated<Vectors8>, VectorizedRotated<Vectors8>>("avx2"); }

}  // namespace gact::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
