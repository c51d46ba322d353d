// Cryptographic noise.
#include "noise.hpp"
#include "noise_launch.cuh"

namespace fastclip {

void noise_of_chacha20(const NoiseRequest& request, const ChaCha20& key) {
  request.guarded ? run_noise<true>(request, key) : run_noise<false>(request, key);
}

}  // namespace fastclip
