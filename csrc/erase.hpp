// Memory that held a secret is overwritten, not just freed.
#pragma once

#include <cstddef>

namespace fastclip {

inline void erase(void* memory, size_t bytes) {
  volatile unsigned char* p = static_cast<volatile unsigned char*>(memory);
  for (size_t i = 0; i < bytes; ++i) p[i] = 0;  // volatile: no dead store to be left out
}

}  // namespace fastclip
