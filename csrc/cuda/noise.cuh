// out = (sum + std * normal) / divisor for every value of every parameter, in one launch.
//
// Work is cut into chunks of kChunk values of one tensor; a block of kThreads threads takes a chunk,
// and each thread kValues of it: four runs of four neighbouring values, kThreads runs apart, so that
// neighbouring threads load and store neighbouring memory, 16 bytes at a time.
//
// Invariant: one (key, nonce, counter, word) serves one value of one tensor (and its Box-Muller
// partner). Thread t of chunk c draws from the n = blocks_for() blocks of bits that begin at
// first_block + (c kThreads + t) n; chunks are numbered through all tensors of a launch; the next
// launch of an operation begins where this one ends; and a key serves one operation.
//
// Here is what one thread does, a function of (arguments, chunk, thread) that GPU and host share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "random.cuh"

namespace fastclip {

constexpr int kThreads = 256;
constexpr int kRun = 4;      // neighbouring values
constexpr int kValues = 16;  // of a thread: as many as an unguarded float block of bits gives
constexpr int kChunk = kThreads * kValues;
constexpr int kRuns = kValues / kRun;

enum class Scalar : uint8_t { float32, float16, bfloat16, float64 };

// No noise: the sums are divided, and that is all.
struct Silence {
  static constexpr bool draws = false;
};

// What a launch works on. It is passed by value: a kernel takes 4 KB of parameters anywhere, 32,764
// bytes since CUDA 12.1.
template <int tensors>
struct TensorTable {
  static constexpr int capacity = tensors;
  const void* sum[tensors];  // of the type that is computed in; null: no sample touched the tensor
  void* out[tensors];
  int64_t size[tensors];
  uint32_t first_chunk[tensors];
  Scalar type[tensors];  // of out
  int count;

  // The tensor that `chunk` is of: the last whose first chunk is not beyond it.
  FASTCLIP_HD int find(uint32_t chunk) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first_chunk[middle] <= chunk) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

template <class Source, int tensors>
struct NoiseArguments {
  Source source;
  uint64_t first_block;       // of bits, for the first thread of chunk 0
  const double* device_std;   // null: std below
  double std;
  double divisor;
  TensorTable<tensors> table;
};

using SmallTable = TensorTable<64>;
using LargeTable = TensorTable<1024>;
static_assert(sizeof(NoiseArguments<ChaCha20, SmallTable::capacity>) <= 4096, "beyond 4 KB");
static_assert(sizeof(NoiseArguments<ChaCha20, LargeTable::capacity>) <= 32764, "beyond 32 KB");

// Four neighbours in memory, loaded and stored 16 bytes (of float16: 8) at a time.
template <class T>
struct alignas(sizeof(T) * kRun < 16 ? sizeof(T) * kRun : 16) Run {
  T values[kRun];
};

template <class T>
FASTCLIP_HD bool takes_runs(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Run<T>) == 0;
}

FASTCLIP_HD void rounded(float x, float& y) { y = x; }
FASTCLIP_HD void rounded(double x, double& y) { y = x; }
FASTCLIP_HD void rounded(float x, __half& y) { y = __float2half_rn(x); }
FASTCLIP_HD void rounded(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

// Where the runs of a thread lie in its chunk.
FASTCLIP_HD int begin_of(int run, int thread) { return (run * kThreads + thread) * kRun; }

// The thread's values of a chunk of which `left` values exist. All loads are under way before the
// first value is used.
template <class Real>
FASTCLIP_HD void load(const Real* from, int thread, int left, Real (&values)[kValues]) {
  const bool runs = takes_runs(from);
  FASTCLIP_UNROLL
  for (int run = 0; run < kRuns; ++run) {
    const int begin = begin_of(run, thread);
    if (runs && begin + kRun <= left) {
      const Run<Real> loaded = *reinterpret_cast<const Run<Real>*>(from + begin);
      FASTCLIP_UNROLL
      for (int i = 0; i < kRun; ++i) values[run * kRun + i] = loaded.values[i];
    } else {
      FASTCLIP_UNROLL
      for (int i = 0; i < kRun; ++i) {
        if (begin + i < left) values[run * kRun + i] = from[begin + i];
      }
    }
  }
}

template <class T, class Real>
FASTCLIP_HD void store(T* to, int thread, int left, const Real (&values)[kValues]) {
  const bool runs = takes_runs(to);
  FASTCLIP_UNROLL
  for (int run = 0; run < kRuns; ++run) {
    const int begin = begin_of(run, thread);
    Run<T> cast;
    FASTCLIP_UNROLL
    for (int i = 0; i < kRun; ++i) rounded(values[run * kRun + i], cast.values[i]);
    if (runs && begin + kRun <= left) {
      *reinterpret_cast<Run<T>*>(to + begin) = cast;
    } else {
      FASTCLIP_UNROLL
      for (int i = 0; i < kRun; ++i) {
        if (begin + i < left) to[begin + i] = cast.values[i];
      }
    }
  }
}

FASTCLIP_HD void store(void* to, Scalar type, int64_t at, int thread, int left,
                       const double (&values)[kValues]) {
  if (type == Scalar::float64) store(static_cast<double*>(to) + at, thread, left, values);
}

FASTCLIP_HD void store(void* to, Scalar type, int64_t at, int thread, int left,
                       const float (&values)[kValues]) {
  switch (type) {
    case Scalar::float16:
      return store(static_cast<__half*>(to) + at, thread, left, values);
    case Scalar::bfloat16:
      return store(static_cast<__nv_bfloat16*>(to) + at, thread, left, values);
    default:
      return store(static_cast<float*>(to) + at, thread, left, values);
  }
}

FASTCLIP_HD float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
FASTCLIP_HD double multiply_add(double x, double y, double z) { return fma(x, y, z); }

// What one thread does.
template <class Real, bool guarded, class Source, int tensors>
FASTCLIP_HD void noise_thread(const NoiseArguments<Source, tensors>& a, uint32_t chunk, int thread) {
  const int tensor = a.table.find(chunk);
  const int64_t at = static_cast<int64_t>(chunk - a.table.first_chunk[tensor]) * kChunk;
  const int64_t rest = a.table.size[tensor] - at;
  const int left = rest < kChunk ? static_cast<int>(rest) : kChunk;
  if (begin_of(0, thread) >= left) return;

  Real values[kValues] = {};
  const void* sum = a.table.sum[tensor];
  if (sum != nullptr) load(static_cast<const Real*>(sum) + at, thread, left, values);
  if constexpr (Source::draws) {
    const Real std = static_cast<Real>(a.device_std != nullptr ? *a.device_std : a.std);
    const uint64_t threads_before = static_cast<uint64_t>(chunk) * kThreads + thread;
    const uint64_t blocks_before = threads_before * blocks_for<Real>(kValues, guarded);
    Real noise[kValues];
    draw_normals<guarded>(a.source.ready(), a.first_block + blocks_before, noise);
    FASTCLIP_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] = multiply_add(std, noise[i], values[i]);
  }
  const Real divisor = static_cast<Real>(a.divisor);
  FASTCLIP_UNROLL
  for (int i = 0; i < kValues; ++i) values[i] /= divisor;
  store(a.table.out[tensor], a.table.type[tensor], at, thread, left, values);
}

}  // namespace fastclip
