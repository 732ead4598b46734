// SPDX-License-Identifier: MIT OR Apache-2.0
// The all-reduce kernels of one element type, which the compiler is told as ELEMENT.
#include "direct.h"
#include "engine.h"
#include "flow.h"
#include "shares.h"

using namespace pcieipc;

#define LINES(format, F, op, SIMPLE, size, N, U)                                                                        \
  extern "C" __global__ void __launch_bounds__(1024, 1) format##_##op##_##size##_u##U(const __grid_constant__ Args a) { \
    oneshot_lines<ELEMENT, SIMPLE, F, N, U>(Gpu(), a);                                                                 \
  }
#define WIDE(format, F, op, SIMPLE, size, N, U)                                                                              \
  extern "C" __global__ void __launch_bounds__(1024, 1) format##_wide_##op##_##size##_u##U(const __grid_constant__ Args a) { \
    oneshot_lines<ELEMENT, SIMPLE, F, N, U, true>(Gpu(), a);                                                                \
  }
#define FLOW(format, F, op, SIMPLE, size, P, U)                                                                              \
  extern "C" __global__ void __launch_bounds__(1024, 1) format##_flow_##op##_##size##_p##P##u##U(const __grid_constant__ Args a) { \
    __shared__ FlowShared shared;                                                                                            \
    oneshot_flow<ELEMENT, SIMPLE, F, P, U>(Gpu(), a, shared);                                                               \
  }
#define STREAM(op, SIMPLE, size, N, U, THREADS)                                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) stream_##op##_##size##_u##U(const __grid_constant__ Args a) { \
    __shared__ StreamShared shared;                                                                                  \
    oneshot_stream<ELEMENT, SIMPLE, N, U>(Gpu(), a, shared);                                                         \
  }
#define ENGINE(op, SIMPLE, size, U, THREADS)                                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) engine_##op##_##size##_u##U(const __grid_constant__ Args a) { \
    __shared__ StreamShared shared;                                                                                      \
    engine_stream<ELEMENT, SIMPLE, U>(Gpu(), a, shared);                                                                 \
  }
#define SHARES(op, SIMPLE, size, U, THREADS)                                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) shares_##op##_##size##_u##U(const __grid_constant__ Args a) { \
    __shared__ SharesShared shared;                                                                                      \
    shares_stream<ELEMENT, SIMPLE, U>(Gpu(), a, shared);                                                                 \
  }
#define DIRECT(op, SIMPLE, size, U, THREADS)                                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) direct_##op##_##size##_u##U(const __grid_constant__ Args a) { \
    __shared__ DirectShared shared;                                                                                      \
    direct_reads<ELEMENT, SIMPLE, U>(Gpu(), a, shared);                                                                  \
  }

LINES(pair, Pair, sum, true, two, 2, 1)
LINES(pair, Pair, sum, true, two, 2, 2)
LINES(pair, Pair, sum, true, many, 0, 1)
LINES(pair, Pair, any, false, many, 0, 1)
LINES(whole, Whole, sum, true, two, 2, 1)
LINES(whole, Whole, sum, true, two, 2, 2)
WIDE(whole, Whole, sum, true, two, 2, 1)
LINES(whole, Whole, sum, true, many, 0, 1)
LINES(whole, Whole, any, false, many, 0, 1)
FLOW(pair, Pair, sum, true, two, 4, 2)
FLOW(whole, Whole, sum, true, two, 4, 1)
FLOW(whole, Whole, sum, true, two, 4, 2)
FLOW(whole, Whole, sum, true, two, 8, 2)
STREAM(sum, true, two, 2, 4, 896)
STREAM(sum, true, many, 0, 2, 896)
STREAM(any, false, many, 0, 1, 896)
ENGINE(sum, true, two, 4, 896)
SHARES(sum, true, many, 2, 896)
SHARES(any, false, many, 1, 896)
DIRECT(sum, true, many, 2, 896)
DIRECT(any, false, many, 1, 896)
extern "C" __global__ void gate(const __grid_constant__ Args a) { engine_gate(Gpu(), a); }
