#pragma once

// Marks code that compiles for the host and, under nvcc, for the device too.
#ifdef __CUDACC__
#define AGL_HD __host__ __device__ __forceinline__
#else
#define AGL_HD inline
#endif
