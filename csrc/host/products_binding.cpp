// fastclip._host: per-sample gradients with their norms, and half Grams, on a CPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "products.hpp"
#include "registry.hpp"
#include "workers.hpp"

namespace py = pybind11;

namespace fastclip {
namespace {

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};
using Scratch = std::unique_ptr<float, Free>;

const ProductLoops& loops_of(int lanes) {
  const ProductLoops* loops = product_loops(lanes);
  if (loops == nullptr) throw py::value_error("this processor has no vectors of so many numbers");
  return *loops;
}

// body(sample, scratch) of every sample, on so many threads, each with `floats` zeros of its own.
template <class Body>
void for_samples(int64_t samples, int threads, int64_t floats, const Body& body) {
  const py::gil_scoped_release release;
  std::atomic<bool> failed{false};
  in_stretches(samples, threads, [&](int64_t first, int64_t last) {
    const size_t bytes = (sizeof(float) * static_cast<size_t>(floats) + 64) / 64 * 64;  // never 0
    const Scratch scratch(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (scratch == nullptr) {
      failed = true;
      return;
    }
    std::memset(scratch.get(), 0, bytes);
    for (int64_t n = first; n < last; ++n) body(n, scratch.get());
  });
  if (failed) throw std::bad_alloc();
}

const float* floats_at(uintptr_t address) { return reinterpret_cast<const float*>(address); }

// An operand [samples, rows, columns]: its address, the steps of a sample and of a row.
using Operand = std::tuple<uintptr_t, int64_t, int64_t>;

Rows rows_of(const Operand& x, int64_t sample, int64_t columns) {
  const auto& [address, of_sample, of_row] = x;
  return {floats_at(address) + sample * of_sample, of_row, columns};
}

// Gradients [samples, size] in parts of so many samples: the address of each part.
struct Parts {
  const std::vector<uintptr_t>& addresses;
  int64_t each, size;

  float* of(int64_t sample) const {
    float* const part = reinterpret_cast<float*>(addresses[static_cast<size_t>(sample / each)]);
    return part + sample % each * size;
  }
};

Parts parts_of(const std::vector<uintptr_t>& addresses, int64_t each, int64_t samples, int64_t size) {
  const bool enough = each > 0 && static_cast<int64_t>(addresses.size()) * each >= samples;
  if (!enough) throw py::value_error("the parts do not hold so many samples");
  return {addresses, each, size};
}

double squares_of(const ProductLoops& loops, const Rows& x, int64_t rows) {
  if (x.step == x.columns) return loops.squares(x.values, rows * x.columns);
  double total = 0;
  for (int64_t i = 0; i < rows; ++i) total += loops.squares(x.values + i * x.step, x.columns);
  return total;
}

void linear_gradients(const Operand& a, const Operand& g, const std::vector<uintptr_t>& out, int64_t each,
                      uintptr_t norms, int64_t samples, int64_t t,
                      int64_t d, int64_t p, int lanes, int threads) {
  const ProductLoops& loops = loops_of(lanes);
  const Parts parts = parts_of(out, each, samples, p * d);
  for_samples(samples, threads, loops.panel_scratch(t), [&](int64_t n, float* scratch) {
    const Rows own_a = rows_of(a, n, d), own_g = rows_of(g, n, p);
    double* const found = reinterpret_cast<double*>(norms) + 3 * n;
    found[0] = loops.linear_gradient(own_a, own_g, t, parts.of(n), scratch);
    found[1] = squares_of(loops, own_a, t);
    found[2] = squares_of(loops, own_g, t);
  });
}

using Three = std::array<int64_t, 3>;

void conv_gradients(uintptr_t x, uintptr_t g, const std::vector<uintptr_t>& out, int64_t each,
                    uintptr_t norms, int64_t samples, int64_t channels,
                    int64_t out_channels, const std::array<Three, 6>& sizes, int lanes, int threads) {
  const ProductLoops& loops = loops_of(lanes);
  Convolution conv{channels, out_channels, {}, {}, {}, {}, {}, {}};
  int64_t* const kinds[6] = {conv.in, conv.out, conv.kernel, conv.stride, conv.padding, conv.dilation};
  for (size_t kind = 0; kind < 6; ++kind) std::copy(sizes[kind].begin(), sizes[kind].end(), kinds[kind]);
  const int64_t of_x = channels * conv.pixels(), of_g = out_channels * conv.positions();
  const int64_t weights = out_channels * channels * conv.taps();
  const Parts parts = parts_of(out, each, samples, weights);
  for_samples(samples, threads, loops.conv_scratch(conv), [&](int64_t n, float* scratch) {
    float* const gradient = parts.of(n);
    loops.conv_gradient(floats_at(x) + n * of_x, floats_at(g) + n * of_g, conv, gradient, scratch);
    double* const found = reinterpret_cast<double*>(norms) + 3 * n;
    found[0] = loops.squares(gradient, weights);
    found[1] = loops.squares(floats_at(x) + n * of_x, of_x);
    found[2] = loops.squares(floats_at(g) + n * of_g, of_g);
  });
}

// sum_b scale_b of gradients in parts, a stretch after the other; what has the scale 0 is not looked at.
void weighted_sum(const std::vector<uintptr_t>& gradients, int64_t each, uintptr_t scale, uintptr_t out,
                  int64_t samples, int64_t size, int lanes, int threads) {
  constexpr int64_t kStretch = 2048;  // of which the sum stays in the nearest cache
  const ProductLoops& loops = loops_of(lanes);
  const Parts parts = parts_of(gradients, each, samples, size);
  std::vector<int64_t> alive;
  std::vector<float> scales;
  for (int64_t n = 0; n < samples; ++n) {
    if (floats_at(scale)[n] == 0) continue;
    alive.push_back(n);
    scales.push_back(floats_at(scale)[n]);
  }
  const py::gil_scoped_release release;
  in_stretches((size + kStretch - 1) / kStretch, threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first * kStretch; i < std::min(last * kStretch, size); i += kStretch) {
      const int64_t count = std::min(kStretch, size - i);
      float* const to = reinterpret_cast<float*>(out) + i;
      std::fill(to, to + count, 0.0f);
      size_t n = 0;
      for (; n + 4 <= alive.size(); n += 4) {
        const float* rows[4];
        for (size_t j = 0; j < 4; ++j) rows[j] = parts.of(alive[n + j]) + i;
        loops.add_four_scaled(rows, &scales[n], count, to);
      }
      for (; n < alive.size(); ++n) loops.add_scaled(parts.of(alive[n]) + i, scales[n], count, to);
    }
  });
}

float* or_none(uintptr_t address, int64_t offset) {
  return address == 0 ? nullptr : reinterpret_cast<float*>(address) + offset;
}

void layer_norm_backward(uintptr_t x, uintptr_t g, uintptr_t mean, uintptr_t rstd, uintptr_t weight,
                         uintptr_t dx, uintptr_t dw, uintptr_t db, int64_t samples, int64_t t, int64_t c,
                         int lanes, int threads) {
  const ProductLoops& loops = loops_of(lanes);
  for_samples(samples, threads, 2 * c, [&](int64_t n, float* scratch) {
    const int64_t at = n * t * c;
    loops.layer_norm(floats_at(x) + at, floats_at(g) + at, floats_at(mean) + n * t, floats_at(rstd) + n * t,
                     or_none(weight, 0), t, c, or_none(dx, at), or_none(dw, n * c), or_none(db, n * c),
                     scratch);
  });
}

void group_norm_backward(uintptr_t x, uintptr_t g, uintptr_t mean, uintptr_t rstd, uintptr_t weight,
                         uintptr_t dx, uintptr_t dw, uintptr_t db, int64_t samples, int64_t c, int64_t k,
                         int64_t t, int lanes, int threads) {
  const ProductLoops& loops = loops_of(lanes);
  if (k < 1 || c % k) throw py::value_error("the channels are no groups of one size");
  for_samples(samples, threads, 0, [&](int64_t n, float*) {
    const int64_t at = n * c * t;
    loops.group_norm(floats_at(x) + at, floats_at(g) + at, floats_at(mean) + n * k, floats_at(rstd) + n * k,
                     or_none(weight, 0), c, k, t, or_none(dx, at), or_none(dw, n * c), or_none(db, n * c));
  });
}

void half_gram(const Operand& x, bool side_by_side, uintptr_t out, int64_t samples, int64_t t, int64_t d,
               int64_t strips, int lanes, int threads) {
  const ProductLoops& loops = loops_of(lanes);
  for_samples(samples, threads, loops.gram_scratch(t), [&](int64_t n, float* scratch) {
    float* const found = reinterpret_cast<float*>(out) + n * t * t;
    loops.gram(rows_of(x, n, d), t, side_by_side, found, t, scratch);
    loops.fill_below(found, t, strips);
  });
}

void gram_dots(uintptr_t gram, const Operand& y, bool side_by_side, uintptr_t out, int64_t samples,
               int64_t t, int64_t p, int lanes, int threads) {
  const ProductLoops& loops = loops_of(lanes);
  const int64_t own = (t * t + 15) / 16 * 16;
  for_samples(samples, threads, own + loops.gram_scratch(t), [&](int64_t n, float* scratch) {
    loops.gram(rows_of(y, n, p), t, side_by_side, scratch, t, scratch + own);
    loops.gram_product(floats_at(gram) + n * t * t, scratch, t, t,
                       reinterpret_cast<double*>(out) + 4 * n);
  });
}

using Sizes = std::tuple<int64_t, int64_t, int64_t, int64_t>;   // t, d, p and strips
using Layer = std::tuple<Operand, bool, Operand, bool, Sizes>;  // operands, and whether positions lie side by side

void gram_norms(const std::vector<Layer>& layers, uintptr_t out, int64_t samples, int lanes, int threads) {
  std::vector<float> gram;
  const Layer* last = nullptr;
  for (const auto& layer : layers) {
    const auto& [a, a_side, g, g_side, sizes] = layer;
    const auto [t, d, p, strips] = sizes;
    const bool shared = last && std::get<0>(*last) == a && std::get<1>(*last) == a_side &&
                        std::get<0>(std::get<4>(*last)) == t && std::get<1>(std::get<4>(*last)) == d;
    if (!shared) {
      gram.resize(samples * t * t);
      half_gram(a, a_side, reinterpret_cast<uintptr_t>(gram.data()), samples, t, d, strips, lanes, threads);
    }
    gram_dots(reinterpret_cast<uintptr_t>(gram.data()), g, g_side, out, samples, t, p, lanes, threads);
    out += samples * 4 * sizeof(double), last = &layer;
  }
}

std::vector<int> product_lanes() {
  std::vector<int> found;
  for (int lanes : {16, 8}) {
    if (product_loops(lanes) != nullptr) found.push_back(lanes);
  }
  return found;
}

const Binding binding([](py::module_& module) {
  using py::arg;
  module.def("product_lanes", &product_lanes,
             "float32 numbers of the vectors that this processor can compute products in, best first.");
  module.def("linear_gradients", &linear_gradients,
             "g_b^T a_b for a [samples, t, d] and g [samples, t, p], each (address, step of a sample, "
             "step of a row): out [samples, p, d] in parts of `each` samples, and norms, float64 "
             "[samples, 3]: squared norms of the gradient, of a and of g.",
             arg("a"), arg("g"), arg("out"), arg("each"), arg("norms"), arg("samples"), arg("t"), arg("d"), arg("p"),
             arg("lanes"), arg("threads"));
  module.def("conv_gradients", &conv_gradients,
             "The same for the weights of a convolution; x and g are contiguous. sizes: in, out, kernel, "
             "stride, padding and dilation, of three dimensions.",
             arg("x"), arg("g"), arg("out"), arg("each"), arg("norms"), arg("samples"), arg("channels"),
             arg("out_channels"), arg("sizes"), arg("lanes"), arg("threads"));
  module.def("weighted_sum", &weighted_sum,
             "sum_b scale_b x_b of x [samples, size] in parts of `each` samples: out [size].", arg("gradients"),
             arg("each"), arg("scale"), arg("out"), arg("samples"), arg("size"), arg("lanes"), arg("threads"));
  module.def("layer_norm_backward", &layer_norm_backward,
             "Of LayerNorm for x, g [samples, t, c]: dx [samples, t, c], dw and db [samples, c]; weight and "
             "dx may be 0.",
             arg("x"), arg("g"), arg("mean"), arg("rstd"), arg("weight"), arg("dx"), arg("dw"), arg("db"),
             arg("samples"), arg("t"), arg("c"), arg("lanes"), arg("threads"));
  module.def("group_norm_backward", &group_norm_backward,
             "Of GroupNorm for x, g [samples, c, t], mean and rstd [samples, k]: dx [samples, c, t], dw and db "
             "[samples, c]; weight and dx may be 0.",
             arg("x"), arg("g"), arg("mean"), arg("rstd"), arg("weight"), arg("dx"), arg("dw"), arg("db"),
             arg("samples"), arg("c"), arg("k"), arg("t"), arg("lanes"), arg("threads"));
  module.def("half_gram", &half_gram,
             "Gram of x [samples, t, d], or [samples, d, t] where positions lie side by side, on and "
             "above the diagonal; below it mirrored within so many strips of rows, else 0.",
             arg("x"), arg("side_by_side"), arg("out"), arg("samples"), arg("t"), arg("d"),
             arg("strips"), arg("lanes"), arg("threads"));
  module.def("gram_dots", &gram_dots,
             "Of Grams [samples, t, t] and those of y: inner product, that of absolute values, and both "
             "traces, float64 [samples, 4].",
             arg("gram"), arg("y"), arg("side_by_side"), arg("out"), arg("samples"), arg("t"), arg("p"),
             arg("lanes"), arg("threads"));
  module.def("gram_norms", &gram_norms,
             "What gram_dots gives for the Gram of a and for g of each layer, float64 [layers, samples, 4]; "
             "layers: (a, side by side, g, side by side, (t, d, p, strips)).",
             arg("layers"), arg("out"), arg("samples"), arg("lanes"), arg("threads"));
});

}  // namespace
}  // namespace fastclip
