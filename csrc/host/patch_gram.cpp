// fastclip._host.patch_gram_products: the norm of a convolution's gradient on a CPU, in one read.
//
// The sliding sum over a kernel's offsets and its product with the other Gram are one loop over pairs of
// positions: per sample both Grams stay in the cache, and the patch Gram is never written.
#include "patch_gram.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "registry.hpp"
#include "workers.hpp"

namespace py = pybind11;

namespace fastclip {
namespace {

constexpr int kLanes = 8;

// The inner product of n numbers, `a` in steps.
template <typename T>
double dot(const T* a, int64_t step, const T* b, int64_t n) {
  int64_t i = 0;
  double total = 0;
  if (step == 1) {
    T lanes[kLanes] = {};
    for (; i + kLanes <= n; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
    }
    for (int j = 0; j < kLanes; ++j) total += lanes[j];
  }
  for (; i < n; ++i) total += static_cast<double>(a[i * step]) * b[i];
  return total;
}

// Pairs of one offset: those of two different positions count twice, for both Grams are symmetric.
template <typename T>
void add_offset(const T* pixels, int64_t s, const T* outputs, int64_t o, const PatchRuns& seen,
                double* product, double* trace) {
  double twice = 0, once = 0;
  for (int64_t r = 0; r < seen.runs; ++r) {
    for (int64_t k = 0; k < seen.count[r]; ++k) {
      const T* row = pixels + (seen.of[r] + k * seen.step) * s;
      const T* other = outputs + (seen.to[r] + k) * o;
      const double own = row[seen.of[r] + k * seen.step];
      *trace += own;
      once += own * other[seen.to[r] + k];
      twice += dot(row + seen.of[r] + (k + 1) * seen.step, seen.step, other + seen.to[r] + k + 1,
                   seen.count[r] - k - 1);
      for (int64_t q = r + 1; q < seen.runs; ++q) {
        twice += dot(row + seen.of[q], seen.step, other + seen.to[q], seen.count[q]);
      }
    }
  }
  *product += once + 2 * twice;
}

// The Frobenius norm of a symmetric matrix [t, t], of which what lies below the diagonal is not read.
template <typename T>
double size_of(const T* gram, int64_t t) {
  double once = 0, twice = 0;
  for (int64_t i = 0; i < t; ++i) {
    const T* row = gram + i * t;
    once += static_cast<double>(row[i]) * row[i];
    twice += dot(row + i + 1, 1, row + i + 1, t - i - 1);
  }
  return std::sqrt(once + 2 * twice);
}

// to, of, count: addresses of int32 arrays; their length; the step.
using Offset = std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t>;

const int32_t* numbers(uintptr_t address) { return reinterpret_cast<const int32_t*>(address); }

void products(uintptr_t pixels, uintptr_t outputs, uintptr_t out, int64_t samples, int64_t s, int64_t o,
              const std::vector<Offset>& offsets, bool wide, int threads) {
  std::vector<PatchRuns> seen;
  for (const auto& [to, of, count, runs, step] : offsets) {
    seen.push_back({numbers(to), numbers(of), numbers(count), runs, step});
  }
  const py::gil_scoped_release release;
  auto run = [&](auto type) {
    using T = decltype(type);
    patch_gram_products(reinterpret_cast<const T*>(pixels), reinterpret_cast<const T*>(outputs),
                        reinterpret_cast<double*>(out), samples, s, o, seen.data(),
                        static_cast<int64_t>(seen.size()), threads);
  };
  wide ? run(double{}) : run(float{});
}

const Binding binding([](py::module_& module) {
  using py::arg;
  module.def("patch_gram_products", &products,
             "Addresses of the Grams [samples, s, s] and [samples, o, o], and of float64 "
             "[samples, 3]; offsets: (to, of, count, runs, step) of each.",
             arg("pixels"), arg("outputs"), arg("out"), arg("samples"), arg("s"), arg("o"),
             arg("offsets"), arg("wide"), arg("threads"));
});

}  // namespace

template <typename T>
void patch_gram_products(const T* pixels, const T* outputs, double* out, int64_t samples, int64_t s,
                         int64_t o, const PatchRuns* offsets, int64_t count, int threads) {
  auto range = [=](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) {
      double product = 0, trace = 0;
      for (int64_t i = 0; i < count; ++i) {
        add_offset(pixels + n * s * s, s, outputs + n * o * o, o, offsets[i], &product, &trace);
      }
      out[3 * n] = product;
      out[3 * n + 1] = trace;
      out[3 * n + 2] = size_of(pixels + n * s * s, s) * size_of(outputs + n * o * o, o);
    }
  };
  in_stretches(samples, threads, range);
}

template void patch_gram_products(const float*, const float*, double*, int64_t, int64_t, int64_t,
                                  const PatchRuns*, int64_t, int);
template void patch_gram_products(const double*, const double*, double*, int64_t, int64_t, int64_t,
                                  const PatchRuns*, int64_t, int);

}  // namespace fastclip
