// From squared norms to scales and counts, and from noisy counts to the next thresholds.
//
// The formulas of fastclip.clipping, in float64 (a few thousand numbers); norms are compared with
// thresholds in float32, as there. Here is what one thread does; GPU and host share it.
//
// Index letters: b sample, l parameter tensor, k group.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.hpp"

namespace fastclip::clip {

// The codes of clipping/codes.py, which a test compares.
enum class Scale : int32_t { kHard, kTanh, kAutomatic, kGlobal, kGlobalAdapt, kAutoV };
enum class Policy : int32_t { kUncounted, kQuantile, kGroup, kReweighted };

constexpr double kLargest = 1e30;  // of a scale: clipping.policy.LARGEST

// Null pointers say what there is not: no groups, a gradient clipped as a whole, nothing counted.
struct ClipArguments {
  const float* norm_sq;     // [l, b], of any strides
  const double* threshold;  // [], [k] or [all layers]
  const double* origin;     // []
  const double* bound;      // []: C of a global function
  const double* weights;    // [k]
  const int64_t* groups;    // [b]
  const int64_t* layers;    // [l]: places of the norms in `threshold`
  float* scales;            // [b], or [l, b] per layer
  float* norms;             // [b]
  double* counts;
  int64_t stride_l, stride_b, l, b;
  int64_t k;       // groups
  int64_t all;     // thresholds of a per-layer policy
  double parameter;  // eps or gamma; of kAutoV what underflow can hide of a squared norm
  double tau;
  double room;     // 1 - slack, or 1 where the thresholds keep the room
  double within;   // what thresholds are multiplied by before norms are clipped at them
  Scale scale;
  Policy policy;
  bool per_layer, per_group, normalized, below, centred;
};

// s(n; C); of the global functions without their factor C.
FASTCLIP_HD double scale_of(const ClipArguments& a, double n, double c) {
  switch (a.scale) {
    case Scale::kHard: return c / fmax(n, c);
    case Scale::kTanh: return tanh(c / (n + a.parameter));
    case Scale::kAutomatic: return c / (n + a.parameter);
    case Scale::kAutoV: return n > 0 ? c / sqrt(n * n + a.parameter) : 0;
    case Scale::kGlobal: return n <= c ? 1 / c : 0;
    default: return 1 / fmax(n, c);
  }
}

// What multiplies s(n; C) for everyone: room, and 1 / S of normalized scales, or the bound C.
FASTCLIP_HD double common_factor(const ClipArguments& a) {
  if (!a.normalized) return a.bound == nullptr ? a.room : a.room * *a.bound;
  const bool constant = a.scale == Scale::kGlobal || a.scale == Scale::kGlobalAdapt;
  if (a.per_layer) {
    double sum = 0;
    for (int64_t i = 0; i < a.all; ++i) sum += a.threshold[i] * a.threshold[i];
    return a.room / sqrt(sum);
  }
  double largest = 0;
  const int64_t count = a.per_group || a.weights != nullptr ? a.k : 1;
  for (int64_t k = 0; k < count; ++k) {
    double own = constant ? 1.0 : a.threshold[a.per_group ? k : 0];
    if (a.weights != nullptr) own *= a.weights[k];
    largest = fmax(largest, own);
  }
  return a.room / largest;
}

FASTCLIP_HD void add(double* to, double value) {
#ifdef __CUDA_ARCH__
  atomicAdd(to, value);  // whole and half numbers: exact in any order
#else
  *to += value;
#endif
}

// Adds sample b, of norm n, to the raw counts. A NaN is beyond every threshold.
FASTCLIP_HD void count_sample(
    const ClipArguments& a, float n, double c, bool grouped, bool belongs, int64_t group) {
  bool first = true;
  if (a.policy == Policy::kQuantile) {
    const bool within = n <= static_cast<float>(c * a.tau);
    first = a.below ? within : !within;
  } else if (a.policy == Policy::kGroup) {
    first = !(n <= static_cast<float>(*a.origin));
  }
  if (!grouped) {
    add(a.counts, (first ? 1.0 : 0.0) - (a.centred ? 0.5 : 0.0));
  } else if (belongs) {
    add(a.counts + group + (a.policy == Policy::kReweighted || first ? 0 : a.k), 1.0);
  }
}

FASTCLIP_HD void clip_sample(const ClipArguments& a, int64_t b) {
  if (b >= a.b) return;
  const float* own = a.norm_sq + b * a.stride_b;
  double total = 0;
  for (int64_t l = 0; l < a.l; ++l) total += static_cast<double>(own[l * a.stride_l]);
  const auto n = static_cast<float>(sqrt(static_cast<double>(static_cast<float>(total))));
  a.norms[b] = n;

  const bool grouped = a.groups != nullptr;
  int64_t group = grouped ? a.groups[b] : 0;
  const bool belongs = group >= 0 && group < a.k;
  if (!belongs) group = 0;
  const bool alive = n - n == 0 && belongs;
  const double c = a.threshold[a.per_group ? group : 0];
  double factor = common_factor(a);
  if (a.weights != nullptr) factor *= a.weights[group];

  if (a.per_layer) {
    for (int64_t l = 0; l < a.l; ++l) {
      const double size = sqrt(static_cast<double>(own[l * a.stride_l]));
      const double limit = a.threshold[a.layers == nullptr ? l : a.layers[l]];
      const bool known = alive && size == size;  // a negative square has no root
      const double scale = known ? fmin(scale_of(a, size, limit * a.within) * factor, kLargest) : 0;
      a.scales[l * a.b + b] = static_cast<float>(scale);
    }
  } else {
    const double scale = alive ? fmin(scale_of(a, n, c * a.within) * factor, kLargest) : 0;
    a.scales[b] = static_cast<float>(scale);
  }
  if (a.counts != nullptr) count_sample(a, n, c, grouped, belongs, group);
}

struct StepArguments {
  const double* counts;     // [] or [k], or [2, k]
  const double* noise;      // like counts, or null
  const double* threshold;  // [] or [k]
  const double* origin;     // []
  double* noisy;            // like counts
  double* moved;            // thresholds, or weights of Reweighted
  int64_t k;
  double batch_size, rate, target, shift, lower, upper, largest;
  Policy policy;
  bool two_way;  // counts are [2, k]
};

FASTCLIP_HD double noisy_count(const StepArguments& a, int64_t i) {
  return a.noise == nullptr ? a.counts[i] : a.counts[i] + a.noise[i];
}

FASTCLIP_HD void step_group(const StepArguments& a, int64_t k) {
  if (k >= a.k) return;
  const double first = noisy_count(a, k);
  a.noisy[k] = first;
  double high = 0, size = 1;
  if (a.two_way) {
    const double second = noisy_count(a, a.k + k);
    a.noisy[a.k + k] = second;
    high = fmax(first, 0.0);
    size = fmax(high + fmax(second, 0.0), 1.0);
  }
  if (a.policy == Policy::kReweighted) {
    a.moved[k] = fmin(a.batch_size / static_cast<double>(a.k) / fmax(first, 1.0), a.largest);
    return;
  }
  double value;
  if (a.policy == Policy::kQuantile) {
    const double fraction = a.two_way ? high / size : first / a.batch_size + a.shift;
    value = a.threshold[k] * exp(a.rate * (fraction - a.target));
  } else {
    double all = 0;
    for (int64_t i = 0; i < a.k; ++i) all += fmax(noisy_count(a, i), 0.0);
    const double share = fmax(all / a.batch_size, 1 / a.batch_size);
    value = *a.origin * (1 + fmin(high / size / share, a.largest));
  }
  a.moved[k] = fmin(fmax(value, a.lower), a.upper);
}

}  // namespace fastclip::clip
