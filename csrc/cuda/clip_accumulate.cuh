// Norms, scales and clipped sums of materialised per-sample gradients, of all parameters together.
//
//     n_b^2 = sum_l ||g_lb||^2     s_b = min(1, C (1 - slack) / n_b)     S_l = sum_b s_b g_lb
//
// Three steps: partial squared norms, one for a chunk of one sample's gradient of one parameter;
// norms and scales from them; the weighted sums. Each gradient is read twice, the least that is
// possible, since a scale needs the whole norm. All sums run in a fixed order: results are bitwise
// repeatable.
//
// Here is what one thread does, a function of (arguments, block, thread) that GPU and host share.
//
// Index letters: b sample, l parameter tensor.
#pragma once

#include <cmath>

#include "clip_values.cuh"

namespace fastclip::clip {

constexpr int kThreads = 256;           // of every block
constexpr int kLoads = 8;               // of a thread in a chunk, all in flight together
constexpr int kSamples = 4;             // in flight for a thread of the weighted sum
constexpr int kParameterBytes = 32764;  // of a kernel, since CUDA 12.1

// Per-sample gradients of one parameter tensor: the n values of a sample lie densely.
struct Gradients {
  const void* data;
  void* sum;       // [n], of the type that they are summed in
  int64_t n;       // values of a sample
  int64_t stride;  // values from one sample to the next
  int64_t first;   // block that works on it
  int32_t place;   // norms: its first chunk in a row of partial sums; sums: its row of scales
  Type type;
};

constexpr int kTensors = 640;

struct NormArguments {
  double* partial;  // [b, chunks]
  int64_t chunks;   // of all parameters
  int32_t count;
  Gradients tensors[kTensors];
};

// A norm, the whole gradient's or one parameter's: where its chunks lie in a row of partial sums.
struct Norm {
  int64_t begin;
  int64_t chunks;
  double threshold;
};

constexpr int kNorms = 1024;

struct ScaleArguments {
  const double* partial;     // [b, chunks]
  const double* thresholds;  // [l] on the device, or null: each Norm has its own
  void* norms;               // [l, b], double where `wide`, else float
  double* scales;            // [l, b]
  int32_t* dropped;          // [b], zeros at first; 1: a norm of the sample is not finite
  double room;               // 1 - slack
  double smallest;           // a scale below it is 0
  int64_t chunks;
  int64_t b;
  int32_t begin;  // l of rows[0]
  bool wide;
  Norm rows[kNorms];
};

struct SumArguments {
  const double* scales;    // [l, b], or [1, b]
  const int32_t* dropped;  // [b]
  int64_t b;
  int32_t count;
  Gradients tensors[kTensors];
};

static_assert(sizeof(NormArguments) <= kParameterBytes, "beyond a kernel's parameters");
static_assert(sizeof(ScaleArguments) <= kParameterBytes, "beyond a kernel's parameters");
static_assert(sizeof(SumArguments) <= kParameterBytes, "beyond a kernel's parameters");

FASTCLIP_HD int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Chunks of a sample's n values: one a block.
FASTCLIP_HD int64_t chunks_of(Type type, int64_t n) {
  return ceil_div(n, int64_t{width_of(type)} * kThreads * kLoads);
}

// Blocks of the weighted sum of n values.
FASTCLIP_HD int64_t sum_blocks_of(Type type, int64_t n) {
  return ceil_div(n, int64_t{width_of(type)} * kThreads);
}

// The tensor that a block works on: the last whose first block is not beyond it. (Tensors without
// blocks share theirs with the next one, and are never the last.)
FASTCLIP_HD const Gradients& tensor_of(
    const Gradients* tensors, int count, int64_t block) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (tensors[middle].first <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return tensors[low];
}

// One step of a block's sum of kThreads values; its threads wait for each other after each.
FASTCLIP_HD void fold(double* values, int half, int thread) {
  if (thread < half) values[thread] += values[thread + half];
}

// ---- Partial squared norms: block = (tensor, sample, chunk) --------------------------------------

template <class T>
FASTCLIP_HD double chunk_square_sum(
    const Gradients& g, int64_t sample, int64_t chunk, int thread) {
  constexpr int64_t kStep = int64_t{kThreads} * kWidth<T>;
  const T* row = static_cast<const T*>(g.data) + sample * g.stride;
  const int64_t first = chunk * kLoads * kStep + int64_t{thread} * kWidth<T>;
  double sum = 0;
  if (in_whole_loads<T>(g.data, g.n, g.stride)) {
    uint4 bits[kLoads];
    FASTCLIP_UNROLL
    for (int j = 0; j < kLoads; ++j) {
      const int64_t at = first + j * kStep;
      bits[j] = at < g.n ? load_whole(row + at) : uint4{0, 0, 0, 0};
    }
    FASTCLIP_UNROLL
    for (int j = 0; j < kLoads; ++j) sum += square_sum<T>(bits[j]);
  } else {
    for (int j = 0; j < kLoads && first + j * kStep < g.n; ++j) {
      sum += square_sum<T>(load_each(row, first + j * kStep, g.n));
    }
  }
  return sum;
}

// The thread's share of its block's partial sum; `place` is where the block's sum goes.
FASTCLIP_HD double norm_share(
    const NormArguments& a, int64_t block, int thread, int64_t& place) {
  const Gradients& g = tensor_of(a.tensors, a.count, block);
  const int64_t chunks = chunks_of(g.type, g.n);
  const int64_t sample = (block - g.first) / chunks, chunk = (block - g.first) % chunks;
  place = sample * a.chunks + g.place + chunk;
  switch (g.type) {
    case Type::kFloat64: return chunk_square_sum<double>(g, sample, chunk, thread);
    case Type::kFloat16: return chunk_square_sum<__half>(g, sample, chunk, thread);
    case Type::kBfloat16: return chunk_square_sum<__nv_bfloat16>(g, sample, chunk, thread);
    default: return chunk_square_sum<float>(g, sample, chunk, thread);
  }
}

// ---- Norms and scales: block = (norm, sample) ----------------------------------------------------

FASTCLIP_HD double scale_share(const ScaleArguments& a, int64_t block, int thread) {
  const Norm& norm = a.rows[block / a.b];
  const double* chunk = a.partial + (block % a.b) * a.chunks + norm.begin;
  double sum = 0;
  for (int64_t i = thread; i < norm.chunks; i += kThreads) sum += chunk[i];
  return sum;
}

// min(1, limit / n), in the arithmetic of fastclip.clipping's Hard: the same bits.
template <class A>
FASTCLIP_HD A hard_scale(A n, A limit, A smallest) {
  const A scale = limit / (n > limit ? n : limit);
  return scale < smallest ? A(0) : scale;
}

// Writes the norm and the scale of a block, whose partial sums add up to `total`.
FASTCLIP_HD void write_scale(const ScaleArguments& a, int64_t block, double total) {
  const int64_t row = a.begin + block / a.b, sample = block % a.b, at = row * a.b + sample;
  const double threshold =
      a.thresholds == nullptr ? a.rows[block / a.b].threshold : a.thresholds[row];
  const double limit = threshold * a.room;
  const double n = a.wide ? sqrt(total) : static_cast<double>(static_cast<float>(sqrt(total)));
  const bool finite = n - n == 0;
  if (a.wide) {
    static_cast<double*>(a.norms)[at] = n;
    a.scales[at] = hard_scale(n, limit, a.smallest);
  } else {
    static_cast<float*>(a.norms)[at] = static_cast<float>(n);
    a.scales[at] = hard_scale(static_cast<float>(n), static_cast<float>(limit),
                              static_cast<float>(a.smallest));
  }
  if (!finite) {
#ifdef __CUDA_ARCH__
    atomicOr(&a.dropped[sample], 1);
#else
    a.dropped[sample] = 1;
#endif
  }
}

// ---- Weighted sums: block = (tensor, 256 loads of its values) ------------------------------------

// Adds the contributions of kCount samples, of which each has its scale.
template <class T, int kCount>
FASTCLIP_HD void add_samples(
    const SumArguments& a, const Gradients& g, int64_t sample, int64_t first, bool whole,
    Wide<T> (&sum)[kWidth<T>]) {
  const T* row = static_cast<const T*>(g.data) + sample * g.stride;
  uint4 bits[kCount];
  Wide<T> scale[kCount], part[kWidth<T>] = {};
  FASTCLIP_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const double own = a.scales[g.place * a.b + sample + j];
    scale[j] = a.dropped[sample + j] ? Wide<T>(0) : static_cast<Wide<T>>(own);
  }
  if (whole) {
    FASTCLIP_UNROLL
    for (int j = 0; j < kCount; ++j) bits[j] = load_whole(row + j * g.stride + first);
  } else {
    FASTCLIP_UNROLL
    for (int j = 0; j < kCount; ++j) bits[j] = load_each(row + j * g.stride, first, g.n);
  }
  FASTCLIP_UNROLL
  for (int j = 0; j < kCount; ++j) {
    Wide<T> x[kWidth<T>];
    unpack<T>(bits[j], x);
    FASTCLIP_UNROLL
    for (int e = 0; e < kWidth<T>; ++e) {
      part[e] += scale[j] * (scale[j] == 0 ? Wide<T>(0) : x[e]);  // never 0 * inf
    }
  }
  FASTCLIP_UNROLL
  for (int e = 0; e < kWidth<T>; ++e) sum[e] += part[e];
}

template <class T>
FASTCLIP_HD void weighted_sum(
    const SumArguments& a, const Gradients& g, int64_t block, int thread) {
  const int64_t first = ((block - g.first) * kThreads + thread) * kWidth<T>;
  if (first >= g.n) return;
  const bool whole = in_whole_loads<T>(g.data, g.n, g.stride);
  Wide<T> sum[kWidth<T>] = {};
  int64_t b = 0;
  for (; b + kSamples <= a.b; b += kSamples) add_samples<T, kSamples>(a, g, b, first, whole, sum);
  for (; b < a.b; ++b) add_samples<T, 1>(a, g, b, first, whole, sum);
  store(static_cast<Wide<T>*>(g.sum), first, g.n, sum);
}

FASTCLIP_HD void sum_thread(const SumArguments& a, int64_t block, int thread) {
  const Gradients& g = tensor_of(a.tensors, a.count, block);
  switch (g.type) {
    case Type::kFloat64: return weighted_sum<double>(a, g, block, thread);
    case Type::kFloat16: return weighted_sum<__half>(a, g, block, thread);
    case Type::kBfloat16: return weighted_sum<__nv_bfloat16>(a, g, block, thread);
    default: return weighted_sum<float>(a, g, block, thread);
  }
}

}  // namespace fastclip::clip
