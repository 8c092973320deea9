// The kernels for AVX-512 (F, BW, VL, DQ).
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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
#endif

#include "vectors_avx2.h"
#include "vectors_avx512.h"
//
#include "ranges.h"
#include "vectorized_rotated.h"

namespace gact::cpu {

Kernels avx512_kernels() { return make_kernels<VectorizedRotated<Vectors16>, VectorizedRotated<Vectors8>>("avx512"); }

}  // namespace gact::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
