// Uniform words to normal variables: Box and Muller (1958), safe at both ends.
//
// Two words, of 32 bits for float and 64 for double (n below), give the pair
//     r cos(pi t), r sin(pi t)    with r = sqrt(-2 log u).
//
// u = (x + 1/2) / 2^n lies in (0, 1]. The smallest, x = 0, is exact: u = 2^-33 and r = 6.76 for
// float, u = 2^-65 and r = 9.49 for double. It stands for all that lies below 2^-n: the radii's
// tail ends where 2^-n of it is left. Everywhere else u is rounded, to nearest, to 24 (53) bits:
// twice, so it is off by 2^-24 (2^-53) at most, near 1. The last 2^7 (2^10) words round up to
// u = 1, where log u = 0 and r = 0: a logarithm is never positive, infinite or NaN. The
// distribution function is off by no more than u is: 2^48 samples would be needed to see it.
//
// t = (y + 1/2) / 2^(n-1) of the signed word y lies in [-1, 1], symmetric about 0, and is never 0.
// Multiplication by pi is left to sincospi, which loses nothing near the axes.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.hpp"

namespace fastclip {

// Words of 32 bits that one normal takes; a pair takes twice as many.
template <class Real>
constexpr int kWordsPerNormal = static_cast<int>(sizeof(Real) / sizeof(uint32_t));

#ifdef __CUDA_ARCH__
__device__ __forceinline__ void sine_cosine_pi(float t, float& sine, float& cosine) {
  sincospif(t, &sine, &cosine);
}
__device__ __forceinline__ void sine_cosine_pi(double t, double& sine, double& cosine) {
  sincospi(t, &sine, &cosine);
}
#else
// The same for the host: t is taken to [-1/4, 1/4], exactly, before pi comes in.
template <class Real>
inline void sine_cosine_pi(Real t, Real& sine, Real& cosine) {
  const int quarters = static_cast<int>(std::lrint(2 * t));
  const double rest = 3.14159265358979323846 * (t - static_cast<Real>(0.5) * quarters);
  const Real s = static_cast<Real>(std::sin(rest)), c = static_cast<Real>(std::cos(rest));
  switch (quarters & 3) {
    case 0: sine = s, cosine = c; break;
    case 1: sine = c, cosine = -s; break;
    case 2: sine = -s, cosine = -c; break;
    default: sine = -c, cosine = s; break;
  }
}
#endif

FASTCLIP_HD void normal_pair(uint32_t x, uint32_t y, float& first, float& second) {
  const float u = fmaf(static_cast<float>(x), 0x1p-32f, 0x1p-33f);
  const float t = fmaf(static_cast<float>(static_cast<int32_t>(y)), 0x1p-31f, 0x1p-32f);
  const float r = sqrtf(-2.0f * logf(u));
  float sine, cosine;
  sine_cosine_pi(t, sine, cosine);
  first = r * cosine;
  second = r * sine;
}

FASTCLIP_HD void normal_pair(uint64_t x, uint64_t y, double& first, double& second) {
  const double u = fma(static_cast<double>(x), 0x1p-64, 0x1p-65);
  const double t = fma(static_cast<double>(static_cast<int64_t>(y)), 0x1p-63, 0x1p-64);
  const double r = sqrt(-2.0 * log(u));
  double sine, cosine;
  sine_cosine_pi(t, sine, cosine);
  first = r * cosine;
  second = r * sine;
}

// The pair of normals of two float, or four double, words.
FASTCLIP_HD void normal_pair(const uint32_t* words, float* pair) {
  normal_pair(words[0], words[1], pair[0], pair[1]);
}

FASTCLIP_HD void normal_pair(const uint32_t* words, double* pair) {
  const uint64_t x = uint64_t{words[1]} << 32 | words[0];
  const uint64_t y = uint64_t{words[3]} << 32 | words[2];
  normal_pair(x, y, pair[0], pair[1]);
}

}  // namespace fastclip
