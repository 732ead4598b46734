// SPDX-License-Identifier: MIT OR Apache-2.0
// The all-reduce kernels of one element type, which the compiler is told as ELEMENT.
#include "stream.h"

using namespace pcieipc;

#define LINES(format, F, op, SIMPLE, size, N, U, THREADS)                                                                       \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) format##_##op##_##size##_u##U(const __grid_constant__ Args a) { \
    oneshot_lines<ELEMENT, SIMPLE, F, N, U>(Gpu(), a);                                                                 \
  }
#define STREAM(op, SIMPLE, size, N, U, THREADS)                                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) stream_##op##_##size##_u##U(const __grid_constant__ Args a) { \
    __shared__ StreamShared shared;                                                                                  \
    oneshot_stream<ELEMENT, SIMPLE, N, U>(Gpu(), a, shared);                                                         \
  }

LINES(narrow, Narrow, sum, true, two, 2, 1, 1024)
LINES(narrow, Narrow, sum, true, two, 2, 4, 768)
LINES(narrow, Narrow, sum, true, many, 0, 1, 1024)
LINES(narrow, Narrow, any, false, many, 0, 1, 1024)
LINES(whole, Whole, sum, true, two, 2, 1, 1024)
LINES(whole, Whole, sum, true, two, 2, 2, 1024)
LINES(whole, Whole, sum, true, many, 0, 1, 1024)
LINES(whole, Whole, any, false, many, 0, 1, 1024)
STREAM(sum, true, two, 2, 4, 896)
STREAM(sum, true, many, 0, 2, 896)
STREAM(any, false, many, 0, 1, 896)
