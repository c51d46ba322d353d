// float32 noise of Philox on the host, in vectors of the best instructions that the processor has.
#pragma once

#include <cstdint>

#include "noise.cuh"

namespace fastclip {

// What a grid does in chunks first, first + 1, ... before last; for tables of both sizes.
template <int tensors>
void noise_in_lanes(const NoiseArguments<PhiloxSeed, tensors>& arguments, uint32_t first, uint32_t last,
                    bool guarded);

// Standard normals of eight threads whose blocks of bits begin at first_block, 16 values of each, as
// memory has them: run by run. `best`: in the best instructions, not in those of any processor.
void normals_in_lanes(const Philox& key, uint64_t first_block, bool guarded, bool best, float* values);

// normal_pair of eight pairs of words: the first normals, then the second ones.
void pairs_in_lanes(const uint32_t* x, const uint32_t* y, bool best, float* values);

}  // namespace fastclip
