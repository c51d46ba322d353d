// clip_scale and threshold_step: one thread a sample or group; on the host, a loop.
#include "clip_scale.cuh"

#include <pybind11/pybind11.h>

#include <stdexcept>

#include "cuda_call.hpp"
#include "registry.hpp"

namespace fastclip::clip {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) clip_kernel(const __grid_constant__ ClipArguments a) {
  clip_sample(a, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
}

__global__ void __launch_bounds__(kThreads) step_kernel(const __grid_constant__ StepArguments a) {
  step_group(a, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
}

template <class Arguments>
void run(void (*kernel)(const Arguments), void (*one)(const Arguments&, int64_t), int64_t count,
         const Arguments& arguments, int device, uintptr_t stream, const char* what) {
  if (device < 0) {
    for (int64_t i = 0; i < count; ++i) one(arguments, i);
    return;
  }
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) throw std::length_error("more samples than a grid has threads");
  const DeviceGuard guard(device, what);
  launch<Arguments>(kernel, static_cast<unsigned>(blocks), kThreads, arguments,
                    reinterpret_cast<cudaStream_t>(stream), what);
}

// The fields of a struct of arguments, by name, from Python's keywords.
class Keywords {
 public:
  explicit Keywords(const pybind11::kwargs& values) : values_(values) {}

  template <class T>
  void get(const char* name, T*& pointer) const {
    pointer = reinterpret_cast<T*>(values_[name].cast<uintptr_t>());
  }
  template <class T>
  void get(const char* name, T& value) const {
    if constexpr (std::is_enum_v<T>) {
      value = static_cast<T>(values_[name].cast<int>());
    } else {
      value = values_[name].cast<T>();
    }
  }

 private:
  const pybind11::kwargs& values_;
};

#define FASTCLIP_GET(field) keywords.get(#field, a.field)

void clip_scale(int device, uintptr_t stream, const pybind11::kwargs& values) {
  const Keywords keywords(values);
  ClipArguments a{};
  FASTCLIP_GET(norm_sq);
  FASTCLIP_GET(threshold);
  FASTCLIP_GET(origin);
  FASTCLIP_GET(bound);
  FASTCLIP_GET(weights);
  FASTCLIP_GET(groups);
  FASTCLIP_GET(layers);
  FASTCLIP_GET(scales);
  FASTCLIP_GET(norms);
  FASTCLIP_GET(counts);
  FASTCLIP_GET(stride_l);
  FASTCLIP_GET(stride_b);
  FASTCLIP_GET(l);
  FASTCLIP_GET(b);
  FASTCLIP_GET(k);
  FASTCLIP_GET(all);
  FASTCLIP_GET(parameter);
  FASTCLIP_GET(tau);
  FASTCLIP_GET(room);
  FASTCLIP_GET(within);
  FASTCLIP_GET(scale);
  FASTCLIP_GET(policy);
  FASTCLIP_GET(per_layer);
  FASTCLIP_GET(per_group);
  FASTCLIP_GET(normalized);
  FASTCLIP_GET(below);
  FASTCLIP_GET(centred);
  run(&clip_kernel, &clip_sample, a.b, a, device, stream, "clip_scale");
}

void threshold_step(int device, uintptr_t stream, const pybind11::kwargs& values) {
  const Keywords keywords(values);
  StepArguments a{};
  FASTCLIP_GET(counts);
  FASTCLIP_GET(noise);
  FASTCLIP_GET(threshold);
  FASTCLIP_GET(origin);
  FASTCLIP_GET(noisy);
  FASTCLIP_GET(moved);
  FASTCLIP_GET(k);
  FASTCLIP_GET(batch_size);
  FASTCLIP_GET(rate);
  FASTCLIP_GET(target);
  FASTCLIP_GET(shift);
  FASTCLIP_GET(lower);
  FASTCLIP_GET(upper);
  FASTCLIP_GET(largest);
  FASTCLIP_GET(policy);
  FASTCLIP_GET(two_way);
  run(&step_kernel, &step_group, a.k, a, device, stream, "threshold_step");
}

const Binding binding([](pybind11::module_& module) {
  using pybind11::arg;
  module.def("clip_scale", &clip_scale, arg("device"), arg("stream"),
             "Scales, norms and counts; keywords are the fields of ClipArguments, csrc/cuda/clip_scale.cuh.");
  module.def("threshold_step", &threshold_step, arg("device"), arg("stream"),
             "The next thresholds; keywords are the fields of StepArguments, csrc/cuda/clip_scale.cuh.");
});

}  // namespace
}  // namespace fastclip::clip
