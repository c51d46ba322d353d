// clip_accumulate: the steps of clip_accumulate.cuh as kernels, and as loops for the host.
#include "clip_accumulate.cuh"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "cuda_call.hpp"
#include "registry.hpp"

namespace fastclip::clip {
namespace {

// The sum of the threads' values in values[0], by the same tree as `sum_on_host`.
__device__ void sum_of_block(double* values, double own) {
  values[threadIdx.x] = own;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    fold(values, half, threadIdx.x);
  }
}

__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ NormArguments a) {
  __shared__ double values[kThreads];
  int64_t place;
  sum_of_block(values, norm_share(a, blockIdx.x, threadIdx.x, place));
  if (threadIdx.x == 0) a.partial[place] = values[0];
}

__global__ void __launch_bounds__(kThreads) scale_kernel(const __grid_constant__ ScaleArguments a) {
  __shared__ double values[kThreads];
  sum_of_block(values, scale_share(a, blockIdx.x, threadIdx.x));
  if (threadIdx.x == 0) write_scale(a, blockIdx.x, values[0]);
}

__global__ void __launch_bounds__(kThreads, 3) sum_kernel(const __grid_constant__ SumArguments a) {
  sum_thread(a, blockIdx.x, threadIdx.x);
}

double sum_on_host(double* values) {
  for (int half = kThreads / 2; half > 0; half /= 2) {
    for (int thread = 0; thread < half; ++thread) fold(values, half, thread);
  }
  return values[0];
}

void run_on_host(const NormArguments& a, int64_t blocks) {
  for (int64_t block = 0; block < blocks; ++block) {
    double values[kThreads];
    int64_t place = 0;
    for (int thread = 0; thread < kThreads; ++thread) {
      values[thread] = norm_share(a, block, thread, place);
    }
    a.partial[place] = sum_on_host(values);
  }
}

void run_on_host(const ScaleArguments& a, int64_t blocks) {
  for (int64_t block = 0; block < blocks; ++block) {
    double values[kThreads];
    for (int thread = 0; thread < kThreads; ++thread) values[thread] = scale_share(a, block, thread);
    write_scale(a, block, sum_on_host(values));
  }
}

void run_on_host(const SumArguments& a, int64_t blocks) {
  for (int64_t block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < kThreads; ++thread) sum_thread(a, block, thread);
  }
}

// Where to run: a device and a stream, or the host (device -1).
struct Place {
  int device;
  cudaStream_t stream;
};

template <class Arguments>
void run(void (*kernel)(const Arguments), const Arguments& arguments, int64_t blocks,
         const Place& place, const char* what) {
  if (blocks == 0) return;
  if (place.device < 0) return run_on_host(arguments, blocks);
  launch<Arguments>(kernel, static_cast<unsigned>(blocks), kThreads, arguments, place.stream, what);
}

// data, sum, n, stride, type.
using Row = std::tuple<uintptr_t, uintptr_t, int64_t, int64_t, int>;

Gradients gradients(const Row& row) {
  const auto& [data, sum, n, stride, type] = row;
  return {reinterpret_cast<const void*>(data), reinterpret_cast<void*>(sum), n, stride, 0, 0,
          static_cast<Type>(type)};
}

// Runs the kernel over the rows, as many at a time as fit its parameters and the grid.
template <class Arguments, class Blocks, class Set>
void run_over(const std::vector<Row>& rows, Arguments& arguments, void (*kernel)(const Arguments),
              const Place& place, const char* what, Blocks blocks_of, Set set_place) {
  constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max();
  int64_t blocks = 0;
  arguments.count = 0;
  for (size_t l = 0; l < rows.size(); ++l) {
    Gradients g = gradients(rows[l]);
    const int64_t own = blocks_of(g);
    set_place(g, l);
    if (own == 0) continue;
    if (own > kMostBlocks) throw std::length_error("a tensor has more blocks than a grid");
    if (arguments.count == kTensors || blocks + own > kMostBlocks) {
      run(kernel, arguments, blocks, place, what);
      arguments.count = 0;
      blocks = 0;
    }
    g.first = blocks;
    arguments.tensors[arguments.count++] = g;
    blocks += own;
  }
  run(kernel, arguments, blocks, place, what);
}

std::vector<int64_t> chunks_of_rows(const std::vector<Row>& rows) {
  std::vector<int64_t> chunks;
  for (const Row& row : rows) {
    chunks.push_back(chunks_of(static_cast<Type>(std::get<4>(row)), std::get<2>(row)));
  }
  return chunks;
}

int64_t total(const std::vector<int64_t>& values) {
  int64_t sum = 0;
  for (const int64_t value : values) sum += value;
  if (sum > std::numeric_limits<int32_t>::max()) throw std::length_error("too many chunks");
  return sum;
}

int64_t scratch(const std::vector<Row>& rows) { return total(chunks_of_rows(rows)); }

void partial_norms(const std::vector<Row>& rows, const std::vector<int64_t>& chunks, int64_t b,
                   uintptr_t partial, const Place& place) {
  NormArguments arguments{reinterpret_cast<double*>(partial), total(chunks), 0, {}};
  int64_t before = 0;
  const auto blocks_of = [b](const Gradients& g) { return chunks_of(g.type, g.n) * b; };
  const auto set_place = [&before, &chunks](Gradients& g, size_t l) {
    g.place = static_cast<int32_t>(before);
    before += chunks[l];
  };
  run_over(rows, arguments, &norm_kernel, place, "clip_accumulate's norms", blocks_of, set_place);
}

void weighted_sums(const std::vector<Row>& rows, int64_t b, bool per_layer, uintptr_t scales,
                   uintptr_t dropped, const Place& place) {
  SumArguments arguments{reinterpret_cast<const double*>(scales),
                         reinterpret_cast<const int32_t*>(dropped), b, 0, {}};
  const auto blocks_of = [](const Gradients& g) { return sum_blocks_of(g.type, g.n); };
  const auto set_place = [per_layer](Gradients& g, size_t l) {
    g.place = per_layer ? static_cast<int32_t>(l) : 0;
  };
  run_over(rows, arguments, &sum_kernel, place, "clip_accumulate's sums", blocks_of, set_place);
}

// The norms of a gradient that is clipped as a whole, or of one clipped per layer.
std::vector<Norm> norms_of(const std::vector<int64_t>& chunks, bool per_layer,
                           const std::vector<double>& thresholds) {
  std::vector<Norm> norms;
  if (!per_layer) {
    norms.push_back({0, total(chunks), thresholds.empty() ? 0.0 : thresholds.at(0)});
    return norms;
  }
  int64_t before = 0;
  for (size_t l = 0; l < chunks.size(); ++l) {
    norms.push_back({before, chunks[l], thresholds.empty() ? 0.0 : thresholds.at(l)});
    before += chunks[l];
  }
  return norms;
}

void scales_of(const std::vector<Norm>& norms, ScaleArguments& arguments, const Place& place) {
  const int64_t most = std::numeric_limits<int32_t>::max() / arguments.b;
  const size_t rows = static_cast<size_t>(most < kNorms ? most : kNorms);
  if (rows == 0) throw std::length_error("more samples than a grid has blocks");
  for (size_t begin = 0; begin < norms.size(); begin += rows) {
    const size_t count = norms.size() - begin < rows ? norms.size() - begin : rows;
    for (size_t i = 0; i < count; ++i) arguments.rows[i] = norms[begin + i];
    arguments.begin = static_cast<int32_t>(begin);
    run(&scale_kernel, arguments, static_cast<int64_t>(count) * arguments.b, place,
        "clip_accumulate's scales");
  }
}

void clip_accumulate(const std::vector<Row>& rows, int64_t b, bool per_layer,
                     const std::vector<double>& thresholds, uintptr_t device_thresholds, bool wide,
                     double room, double smallest, uintptr_t partial, uintptr_t norms,
                     uintptr_t scales, uintptr_t dropped, int device, uintptr_t stream) {
  const Place place{device, reinterpret_cast<cudaStream_t>(stream)};
  const std::vector<int64_t> chunks = chunks_of_rows(rows);
  const auto work = [&] {
    partial_norms(rows, chunks, b, partial, place);
    ScaleArguments arguments{reinterpret_cast<const double*>(partial),
                             reinterpret_cast<const double*>(device_thresholds),
                             reinterpret_cast<void*>(norms),
                             reinterpret_cast<double*>(scales),
                             reinterpret_cast<int32_t*>(dropped),
                             room, smallest, total(chunks), b, 0, wide, {}};
    scales_of(norms_of(chunks, per_layer, thresholds), arguments, place);
    weighted_sums(rows, b, per_layer, scales, dropped, place);
  };
  if (device < 0) return work();
  const DeviceGuard guard(device, "clip_accumulate");
  work();
}

const Binding binding([](pybind11::module_& module) {
  using pybind11::arg;
  module.def("clip_accumulate_chunks", &scratch, arg("rows"),
             "Partial sums a sample needs. rows: (data, sum, n, stride, type) of each parameter.");
  module.def("clip_accumulate", &clip_accumulate,
             "Norms, scales and weighted sums of b samples; see fastclip/cuda/clip.py.",
             pybind11::call_guard<pybind11::gil_scoped_release>(), arg("rows"), arg("b"),
             arg("per_layer"), arg("thresholds"), arg("device_thresholds"), arg("wide"), arg("room"),
             arg("smallest"), arg("partial"), arg("norms"), arg("scales"), arg("dropped"),
             arg("device"), arg("stream"));
});

}  // namespace
}  // namespace fastclip::clip
