#include "noise_lanes.hpp"

#include <algorithm>
#include <cstring>

#include "avx.hpp"

namespace fastclip {
namespace {

namespace any {
#include "noise_lanes.inc"
}  // namespace any

// Other compilers and processors take the loops as they are.
#ifdef FASTCLIP_KNOWS_AVX2
#pragma GCC push_options
#pragma GCC target("avx2")
#define FASTCLIP_AVX2
namespace avx2 {
#include "noise_lanes.inc"
}  // namespace avx2
#undef FASTCLIP_AVX2
#pragma GCC pop_options

bool has_avx2() { return __builtin_cpu_supports("avx2"); }
#else
namespace avx2 = any;
bool has_avx2() { return false; }
#endif

}  // namespace

template <int tensors>
void noise_in_lanes(const NoiseArguments<PhiloxSeed, tensors>& arguments, uint32_t first, uint32_t last,
                    bool guarded) {
  using Arguments = NoiseArguments<PhiloxSeed, tensors>;
  auto chunk = guarded ? any::noise_chunk<true, Arguments> : any::noise_chunk<false, Arguments>;
  if (has_avx2()) {
    chunk = guarded ? avx2::noise_chunk<true, Arguments> : avx2::noise_chunk<false, Arguments>;
  }
  for (uint32_t i = first; i < last; ++i) chunk(arguments, i);
}

template void noise_in_lanes(const NoiseArguments<PhiloxSeed, SmallTable::capacity>&, uint32_t, uint32_t,
                             bool);
template void noise_in_lanes(const NoiseArguments<PhiloxSeed, LargeTable::capacity>&, uint32_t, uint32_t,
                             bool);

void normals_in_lanes(const Philox& key, uint64_t first_block, bool guarded, bool best, float* values) {
  auto draw = guarded ? any::normals<true> : any::normals<false>;
  if (best && has_avx2()) draw = guarded ? avx2::normals<true> : avx2::normals<false>;
  draw(key, first_block, values);
}

void pairs_in_lanes(const uint32_t* x, const uint32_t* y, bool best, float* values) {
  (best && has_avx2() ? avx2::pairs : any::pairs)(x, y, values);
}

}  // namespace fastclip
