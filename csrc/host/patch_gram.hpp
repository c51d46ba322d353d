// Inner products of patch Grams, which are never in memory.
#pragma once

#include <cstdint>

namespace fastclip {

// The positions that one offset of a convolution's kernel sees, in runs.
//
// Run r covers count[r] output positions to[r], to[r] + 1, ... and the pixels of[r], of[r] + step, ...
struct PatchRuns {
  const int32_t* to;
  const int32_t* of;
  const int32_t* count;
  int64_t runs;
  int64_t step;
};

// For each of n samples, with P its pixel Gram [s, s] and G the Gram of its output gradients [o, o], both
// symmetric: out[3 n] = sum over offsets, over pairs (u, v) of what the offset sees, of
// P[of u, of v] G[to u, to v], and out[3 n + 1] = sum over offsets and u of P[of u, of u].
//
// That is the inner product of the patch Gram with G, and the patch Gram's trace; out[3 n + 2] is the
// product of the Frobenius norms of P and G. Sums are float64.
template <typename T>
void patch_gram_products(const T* pixels, const T* outputs, double* out, int64_t samples, int64_t s,
                         int64_t o, const PatchRuns* offsets, int64_t count, int threads);

}  // namespace fastclip
