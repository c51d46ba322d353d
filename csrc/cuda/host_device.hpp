// Functions of both sides: nvcc compiles them for GPU and host, any C++17 compiler for the host.
#pragma once

#ifdef __CUDACC__
#define FASTCLIP_HD __host__ __device__ __forceinline__
#else
#define FASTCLIP_HD inline
#endif

// Arrays live in registers only where every index is known: loops over them are unrolled.
#ifdef __CUDA_ARCH__
#define FASTCLIP_UNROLL _Pragma("unroll")
#define FASTCLIP_KEEP_LOOP _Pragma("unroll 1")
#else
#define FASTCLIP_UNROLL
#define FASTCLIP_KEEP_LOOP
#endif
