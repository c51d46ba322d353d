// All that turns a block index into noise, for GPU and host alike.
#pragma once

#include "chacha20.cuh"
#include "normal.cuh"
#include "philox.cuh"

namespace fastclip {

// Normals of one block of bits.
template <class Real>
constexpr int kBlockNormals = kBlockWords / kWordsPerNormal<Real>;

// The normals of block `index` of a cipher: kBlockNormals of them.
template <class Cipher, class Real>
FASTCLIP_HD void block_normals(const Cipher& cipher, uint64_t index, Real* values) {
  uint32_t words[kBlockWords];
  cipher.block(index, words);
  FASTCLIP_UNROLL
  for (int i = 0; i < kBlockNormals<Real>; i += 2) {
    normal_pair(&words[i * kWordsPerNormal<Real>], &values[i]);
  }
}

template <class Cipher, class Real, int count>
FASTCLIP_HD void plain_normals(const Cipher& cipher, uint64_t first, Real (&values)[count]) {
  constexpr int step = kBlockNormals<Real>;
  static_assert(count % step == 0, "whole blocks only");
  FASTCLIP_UNROLL
  for (int i = 0; i < count / step; ++i) block_normals(cipher, first + i, &values[i * step]);
}

// Normals that are added up for one value where floating-point attacks are guarded against.
constexpr int kGuardTerms = 4;

// Blocks that `count` values take.
template <class Real>
FASTCLIP_HD constexpr int blocks_for(int count, bool guarded) {
  return count / kBlockNormals<Real> * (guarded ? kGuardTerms : 1);
}

// `count` independent standard normals from the blocks first, first + 1, ...: blocks_for() of them.
//
// The guard (Holohan and Braghin 2021, "Secure random sampling in differential privacy", section
// 5.1, as in Opacus' secure mode): a value is half the sum of four independent normals. A single
// floating-point normal takes few of the numbers near it, and which ones it cannot take may give
// away what it was added to.
template <bool guarded, class Cipher, class Real, int count>
FASTCLIP_HD void draw_normals(const Cipher& cipher, uint64_t first, Real (&values)[count]) {
  plain_normals(cipher, first, values);
  if constexpr (guarded) {
    FASTCLIP_KEEP_LOOP  // registers and code for one term at a time
    for (int term = 1; term < kGuardTerms; ++term) {
      Real more[count];
      plain_normals(cipher, first + term * blocks_for<Real>(count, false), more);
      FASTCLIP_UNROLL
      for (int i = 0; i < count; ++i) values[i] += more[i];
    }
    FASTCLIP_UNROLL
    for (int i = 0; i < count; ++i) values[i] *= Real{0.5};
  }
}

}  // namespace fastclip
