// ChaCha20 of RFC 8439: a stream of bits that nobody without the key can tell from uniform ones.
#pragma once

#include <cstdint>

#include "host_device.hpp"

namespace fastclip {

constexpr int kBlockWords = 16;  // of one block of bits, whatever the cipher

FASTCLIP_HD uint32_t rotate_left(uint32_t x, int bits) { return x << bits | x >> (32 - bits); }

// RFC 8439, section 2.1.
FASTCLIP_HD void quarter_round(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  a += b, d = rotate_left(d ^ a, 16);
  c += d, b = rotate_left(b ^ c, 12);
  a += b, d = rotate_left(d ^ a, 8);
  c += d, b = rotate_left(b ^ c, 7);
}

// RFC 8439, section 2.3: one block of the key stream.
FASTCLIP_HD void chacha20_block(const uint32_t (&key)[8], uint32_t counter,
                                const uint32_t (&nonce)[3], uint32_t (&words)[kBlockWords]) {
  const uint32_t initial[kBlockWords] = {
      0x61707865, 0x3320646e, 0x79622d32, 0x6b206574,  // "expand 32-byte k"
      key[0],     key[1],     key[2],     key[3],
      key[4],     key[5],     key[6],     key[7],
      counter,    nonce[0],   nonce[1],   nonce[2]};
  FASTCLIP_UNROLL
  for (int i = 0; i < kBlockWords; ++i) words[i] = initial[i];
  FASTCLIP_KEEP_LOOP
  for (int round = 0; round < 20; round += 2) {
    FASTCLIP_UNROLL
    for (int i = 0; i < 4; ++i) quarter_round(words[i], words[4 + i], words[8 + i], words[12 + i]);
    FASTCLIP_UNROLL
    for (int i = 0; i < 4; ++i) {  // the diagonals
      quarter_round(words[i], words[4 + (i + 1) % 4], words[8 + (i + 2) % 4],
                    words[12 + (i + 3) % 4]);
    }
  }
  FASTCLIP_UNROLL
  for (int i = 0; i < kBlockWords; ++i) words[i] += initial[i];
}

// A key that serves one operation. 64 bits of block index: the RFC's counter of 32 bits would come
// round after 2^32 blocks, so the index goes on in the nonce, which is free under such a key.
struct ChaCha20 {
  static constexpr bool draws = true;
  uint32_t key[8];

  FASTCLIP_HD const ChaCha20& ready() const { return *this; }

  FASTCLIP_HD void block(uint64_t index, uint32_t (&words)[kBlockWords]) const {
    const uint32_t nonce[3] = {static_cast<uint32_t>(index >> 32), 0, 0};
    chacha20_block(key, static_cast<uint32_t>(index), nonce, words);
  }
};

}  // namespace fastclip
