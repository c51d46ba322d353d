// MT19937 (Matsumoto and Nishimura 1998), inlined, and so compiled for the vectors of whoever calls it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastclip {

struct Twister {
  static constexpr int64_t kWords = 624, kShift = 397;

  uint32_t state[kWords];
  int64_t used;  // words of this state that were drawn

  // Go on by so many words without making them.
  [[gnu::always_inline]] inline void skip(int64_t count) {
    while (count > kWords - used) {
      count -= kWords - used;
      renew();
    }
    used += count;
  }

  // The next words, as they are drawn.
  [[gnu::always_inline]] inline void draw(uint32_t* to, int64_t count) {
    while (count > 0) {
      if (used == kWords) renew();
      const int64_t run = std::min(count, kWords - used);
      for (int64_t i = 0; i < run; ++i) to[i] = tempered(state[used + i]);
      used += run;
      to += run;
      count -= run;
    }
  }

 private:
  [[gnu::always_inline]] static inline uint32_t mixed(uint32_t high, uint32_t low, uint32_t far) {
    const uint32_t both = (high & 0x80000000u) | (low & 0x7fffffffu);
    return far ^ (both >> 1) ^ ((0u - (low & 1u)) & 0x9908b0dfu);
  }

  [[gnu::always_inline]] static inline uint32_t tempered(uint32_t x) {
    x ^= x >> 11;
    x ^= (x << 7) & 0x9d2c5680u;
    x ^= (x << 15) & 0xefc60000u;
    return x ^ (x >> 18);
  }

  // The next state in place of this one.
  [[gnu::always_inline]] inline void renew() {
    for (int64_t i = 0; i < kWords - kShift; ++i) {
      state[i] = mixed(state[i], state[i + 1], state[i + kShift]);
    }
    for (int64_t i = kWords - kShift; i < kWords - 1; ++i) {
      state[i] = mixed(state[i], state[i + 1], state[i + kShift - kWords]);
    }
    state[kWords - 1] = mixed(state[kWords - 1], state[0], state[kShift - 1]);
    used = 0;
  }
};

}  // namespace fastclip
