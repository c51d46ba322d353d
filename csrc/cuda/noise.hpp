// What Python asks for: noise on a list of tensors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "noise.cuh"

namespace fastclip {

struct NoisyTensor {
  const void* sum;  // float64 where out is, else float32; or null
  void* out;
  int64_t size;
  Scalar type;
};

constexpr int kHost = -1;  // instead of a device: the same source, in a loop

struct NoiseRequest {
  std::vector<NoisyTensor> tensors;
  double std;
  const double* device_std;  // or null
  double divisor;
  bool guarded;
  int device;
  cudaStream_t stream;
  int threads;  // of the host
};

// Seedable noise; the seed lies where the tensors do.
void noise_of_philox(const NoiseRequest& request, const PhiloxSeed& seed);

// Cryptographic noise. The key must not serve any other operation; the caller erases it.
void noise_of_chacha20(const NoiseRequest& request, const ChaCha20& key);

// sum / divisor.
void no_noise(const NoiseRequest& request);

}  // namespace fastclip
