#include "products.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "avx.hpp"

// Other compilers and processors have no such loops: PyTorch computes what they do.
#ifdef FASTCLIP_KNOWS_AVX2

namespace fastclip {
namespace {

#pragma GCC push_options
#pragma GCC target("avx2,fma")
inline void transpose_eight(const float* x, int64_t step, float* out, int64_t out_step) {
  __m256 row[8], pair[8], four[8];
  for (int i = 0; i < 8; ++i) row[i] = _mm256_loadu_ps(x + i * step);
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      four[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0x44);
      four[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0xEE);
    }
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * out_step, _mm256_permute2f128_ps(four[i], four[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * out_step, _mm256_permute2f128_ps(four[i], four[i + 4], 0x31));
  }
}

// Sums in float64.
inline double total_of(__m256d x) {
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
  return two[0] + two[1];
}
inline double total_of(__m256 x) {
  const __m128 low = _mm256_castps256_ps128(x), high = _mm256_extractf128_ps(x, 1);
  return total_of(_mm256_add_pd(_mm256_cvtps_pd(low), _mm256_cvtps_pd(high)));
}

// Before other threads may read what was streamed.
inline void finish_streams() { _mm_sfence(); }

namespace avx2 {
constexpr int64_t kLanes = 8;
using Vector = __m256;
inline Vector zeros() { return _mm256_setzero_ps(); }
inline Vector repeated(float x) { return _mm256_set1_ps(x); }
inline Vector load(const float* x) { return _mm256_loadu_ps(x); }
inline void store(float* x, Vector value) { _mm256_storeu_ps(x, value); }
inline void stream(float* x, Vector value) { _mm256_stream_ps(x, value); }
inline Vector multiply_add(Vector x, Vector y, Vector z) { return _mm256_fmadd_ps(x, y, z); }
inline Vector absolute(Vector x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
#include "tiles.inc"
#include "gradients.inc"
#include "grams.inc"
#include "layer_norm.inc"
#include "group_norm.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx2,fma")
inline double total_of(__m512 x) {
  const __m512d pairs = _mm512_castps_pd(x);
  const __m256 low = _mm256_castpd_ps(_mm512_castpd512_pd256(pairs));
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(pairs, 1));
  const __m512d eight = _mm512_add_pd(_mm512_cvtps_pd(low), _mm512_cvtps_pd(high));
  return total_of(_mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1)));
}

namespace avx512 {
constexpr int64_t kLanes = 16;
using Vector = __m512;
inline Vector zeros() { return _mm512_setzero_ps(); }
inline Vector repeated(float x) { return _mm512_set1_ps(x); }
inline Vector load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* x, Vector value) { _mm512_storeu_ps(x, value); }
inline void stream(float* x, Vector value) { _mm512_stream_ps(x, value); }
inline Vector multiply_add(Vector x, Vector y, Vector z) { return _mm512_fmadd_ps(x, y, z); }
inline Vector absolute(Vector x) { return _mm512_abs_ps(x); }
#include "tiles.inc"
#include "gradients.inc"
#include "grams.inc"
#include "layer_norm.inc"
#include "group_norm.inc"
}  // namespace avx512
#pragma GCC pop_options

#define FASTCLIP_LOOPS(set)                                                                        \
  {set::panel_scratch, set::conv_scratch, set::gram_scratch, set::linear_gradient, set::conv_gradient, \
   set::gram, set::fill_below, set::gram_product, set::squares, set::add_scaled, \
   set::add_four_scaled, set::layer_norm, set::group_norm}
constexpr ProductLoops kAvx2 = FASTCLIP_LOOPS(avx2);
constexpr ProductLoops kAvx512 = FASTCLIP_LOOPS(avx512);

}  // namespace

const ProductLoops* product_loops(int lanes) {
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (lanes == 8 && has_avx2) return &kAvx2;
  if (lanes == 16 && has_avx2 && __builtin_cpu_supports("avx512f")) return &kAvx512;
  return nullptr;
}

}  // namespace fastclip

#else

namespace fastclip {
const ProductLoops* product_loops(int) { return nullptr; }
}  // namespace fastclip

#endif
