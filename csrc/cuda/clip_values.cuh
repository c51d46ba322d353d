// Values of per-sample gradients, 16 bytes at a time: loads, widening, squared sums.
//
// How numbers fall to threads depends on their index alone, not on addresses: a row that is not
// aligned is read value by value, and gives the same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "host_device.hpp"

namespace fastclip::clip {

enum class Type : int32_t { kFloat32, kFloat64, kFloat16, kBfloat16 };

constexpr int kBytes = 16;  // of a load

template <class T>
constexpr int kWidth = kBytes / static_cast<int>(sizeof(T));  // values of a load

FASTCLIP_HD int width_of(Type type) {
  switch (type) {
    case Type::kFloat32: return kWidth<float>;
    case Type::kFloat64: return kWidth<double>;
    case Type::kFloat16: return kWidth<__half>;
    case Type::kBfloat16: return kWidth<__nv_bfloat16>;
  }
  return 1;
}

FASTCLIP_HD float widen(float x) { return x; }
FASTCLIP_HD double widen(double x) { return x; }
FASTCLIP_HD float widen(__half x) { return __half2float(x); }
FASTCLIP_HD float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// What T is summed in: float64 stays, everything else is float32.
template <class T>
using Wide = decltype(widen(T{}));

// Whether rows of n values, `stride` apart, fall into whole, aligned loads.
template <class T>
FASTCLIP_HD bool in_whole_loads(const void* data, int64_t n, int64_t stride) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return (address | static_cast<uintptr_t>(stride) * sizeof(T)) % kBytes == 0 && n % kWidth<T> == 0;
}

FASTCLIP_HD uint4 load_whole(const void* from) {
#ifdef __CUDA_ARCH__
  return __ldg(static_cast<const uint4*>(from));
#else
  uint4 bits;
  memcpy(&bits, from, sizeof bits);
  return bits;
#endif
}

// Values first .. first + width of a row of n; zeros beyond its end.
template <class T>
FASTCLIP_HD uint4 load_each(const T* row, int64_t first, int64_t n) {
  T values[kWidth<T>];
  FASTCLIP_UNROLL
  for (int e = 0; e < kWidth<T>; ++e) values[e] = first + e < n ? row[first + e] : T{};
  uint4 bits;
  memcpy(&bits, values, sizeof bits);
  return bits;
}

template <class T>
FASTCLIP_HD void unpack(const uint4& bits, Wide<T> (&x)[kWidth<T>]) {
  T values[kWidth<T>];
  memcpy(static_cast<void*>(values), &bits, sizeof bits);
  FASTCLIP_UNROLL
  for (int e = 0; e < kWidth<T>; ++e) x[e] = widen(values[e]);
}

// Values first .. first + width of a row of n, as far as they exist.
template <class A, int kCount>
FASTCLIP_HD void store(A* row, int64_t first, int64_t n, const A (&x)[kCount]) {
#ifdef __CUDA_ARCH__
  if (first + kCount <= n && reinterpret_cast<uintptr_t>(row + first) % kBytes == 0) {
    uint4 bits[kCount * sizeof(A) / kBytes];
    memcpy(bits, x, sizeof bits);
    FASTCLIP_UNROLL
    for (int i = 0; i < static_cast<int>(sizeof bits) / kBytes; ++i) {
      reinterpret_cast<uint4*>(row + first)[i] = bits[i];
    }
    return;
  }
#endif
  FASTCLIP_UNROLL
  for (int e = 0; e < kCount; ++e) {
    if (first + e < n) row[first + e] = x[e];
  }
}

// Sum of the squares of one load. Within the range of float32 it is taken there (relative error
// below 2^-20; conversions to float64 are what a GPU does slowest), beyond it in float64, in which
// no square of a float32 overflows or is lost.
template <class T>
FASTCLIP_HD double square_sum(const uint4& bits) {
  Wide<T> x[kWidth<T>];
  unpack<T>(bits, x);
  Wide<T> sum = 0;
  FASTCLIP_UNROLL
  for (int e = 0; e < kWidth<T>; ++e) sum += x[e] * x[e];
  if (sizeof(sum) == sizeof(double) || (sum > Wide<T>(1e-28) && sum < Wide<T>(1e37))) return sum;
  double exact = 0;
  FASTCLIP_UNROLL
  for (int e = 0; e < kWidth<T>; ++e) exact += static_cast<double>(x[e]) * static_cast<double>(x[e]);
  return exact;
}

}  // namespace fastclip::clip
