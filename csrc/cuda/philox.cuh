// Philox 4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2,
// 3"): fast and seedable. It is no cipher: whoever knows the seed knows the noise.
#pragma once

#include <cstdint>

#include "chacha20.cuh"
#include "host_device.hpp"

namespace fastclip {

// One call: the counter becomes four random words.
FASTCLIP_HD void philox_4x32_10(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
  FASTCLIP_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0;
    counter[1] = static_cast<uint32_t>(product1);
    counter[2] = static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1;
    counter[3] = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9;  // Weyl sequences: the golden ratio, and sqrt(3) - 1
    key1 += 0xBB67AE85;
  }
}

// A key and the high half of the counter; the low half counts calls. Four calls make a block.
struct Philox {
  uint32_t key[2];
  uint32_t high[2];

  FASTCLIP_HD void block(uint64_t index, uint32_t (&words)[kBlockWords]) const {
    FASTCLIP_UNROLL
    for (int i = 0; i < kBlockWords; i += 4) {
      const uint64_t call = 4 * index + i / 4;
      uint32_t counter[4] = {static_cast<uint32_t>(call), static_cast<uint32_t>(call >> 32),
                             high[0], high[1]};
      philox_4x32_10(counter, key[0], key[1]);
      FASTCLIP_UNROLL
      for (int j = 0; j < 4; ++j) words[i + j] = counter[j];
    }
  }
};

// Key and high half, drawn by torch's generator, wait in the memory of the device: the host never
// looks at them, and a CUDA graph that is replayed finds new ones.
struct PhiloxSeed {
  static constexpr bool draws = true;
  const uint32_t* words;  // [4]

  FASTCLIP_HD Philox ready() const { return {{words[0], words[1]}, {words[2], words[3]}}; }
};

}  // namespace fastclip
