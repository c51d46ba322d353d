// No noise at all.
#include "noise.hpp"
#include "noise_launch.cuh"

namespace fastclip {

void no_noise(const NoiseRequest& request) { run_noise<false>(request, Silence{}); }

}  // namespace fastclip
