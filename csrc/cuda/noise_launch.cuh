// The kernel, and an operation's way to it or to the host's loop.
#pragma once

#include <string>

#include "cuda_call.hpp"
#include "noise.cuh"
#include "noise_tables.hpp"

namespace fastclip {

// Parameters are constant memory: `__grid_constant__` lets threads index the table there.
template <class Real, bool guarded, class Source, int tensors>
__global__ void __launch_bounds__(kThreads)
    noise_kernel(const __grid_constant__ NoiseArguments<Source, tensors> arguments) {
  noise_thread<Real, guarded>(arguments, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <class Real, bool guarded, class Table, class Source>
uint64_t run_as(const NoiseRequest& request, const Source& source, uint64_t first_block) {
  NoiseTables<Real, guarded, Source, Table> tables(request, source, first_block);
  return tables.for_each([&](const auto& arguments, uint32_t chunks) {
    if (request.device == kHost) {
      return noise_on_host<Real, guarded>(arguments, chunks, request.threads);
    }
    launch(noise_kernel<Real, guarded, Source, Table::capacity>, chunks, kThreads, arguments,
           request.stream, "noise on " + std::to_string(arguments.table.count) + " tensors");
  });
}

// float32 arithmetic for all but float64 tensors, which come after, further on in the stream.
template <bool guarded, class Table, class Source>
void run_with(const NoiseRequest& request, const Source& source) {
  const uint64_t next = run_as<float, guarded, Table>(request, source, 0);
  run_as<double, guarded, Table>(request, source, next);
}

template <bool guarded, class Source>
void run_noise(const NoiseRequest& request, const Source& source) {
  std::unique_ptr<DeviceGuard> here;
  if (request.device != kHost) here = std::make_unique<DeviceGuard>(request.device, "noise");
  if (request.tensors.size() <= SmallTable::capacity) {  // cheaper to launch
    run_with<guarded, SmallTable>(request, source);
  } else {
    run_with<guarded, LargeTable>(request, source);
  }
}

}  // namespace fastclip
