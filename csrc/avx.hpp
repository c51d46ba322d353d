// Whether loops can be written in AVX2 and AVX-512: x86-64, and GCC, whose pragmas choose instructions.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own built-ins
#include <immintrin.h>
#pragma GCC diagnostic pop
#define FASTCLIP_KNOWS_AVX2
#endif
