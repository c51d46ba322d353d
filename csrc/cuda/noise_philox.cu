// Seedable noise.
#include "noise.hpp"
#include "noise_launch.cuh"

namespace fastclip {

void noise_of_philox(const NoiseRequest& request, const PhiloxSeed& seed) {
  request.guarded ? run_noise<true>(request, seed) : run_noise<false>(request, seed);
}

}  // namespace fastclip
