// SPDX-License-Identifier: MIT OR Apache-2.0
// Small kernels that prove a path and measure it.
#include "digest.h"

using namespace pcieipc;

PCIEIPC_FN u32 pattern(u32 seed, u32 i) {
  u32 h = i * 2654435761u + seed;
  h ^= h >> 15; h *= 2246822519u; h ^= h >> 13;
  return h;
}

// out: where to; bytes; header[0]: seed.
extern "C" __global__ void __launch_bounds__(512, 1) probe_store(const __grid_constant__ Args a) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < a.bytes / 4; i += (u64)gridDim.x * blockDim.x)
    store_sys((u32*)a.out + i, pattern(a.header[0], (u32)i));
}
// in: from where; out: a word that counts what is wrong.
extern "C" __global__ void __launch_bounds__(512, 1) probe_check(const __grid_constant__ Args a) {
  u32 bad = 0;
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < a.bytes / 4; i += (u64)gridDim.x * blockDim.x)
    bad += load_sys((const u32*)a.in + i) != pattern(a.header[0], (u32)i);
  if (bad) atomicAdd((u32*)a.out, bad);
}
// Bandwidth: 16-byte stores to `out`, or loads from `in`, round a ring of `piece` bytes.
extern "C" __global__ void __launch_bounds__(512, 1) probe_push(const __grid_constant__ Args a) {
  const u64 lines = a.piece / 16;
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < a.bytes / 16; i += (u64)gridDim.x * blockDim.x)
    store_slot(a.out + i % lines * 16, Word4{(u32)i, 1, 2, 3});
}
extern "C" __global__ void __launch_bounds__(512, 1) probe_pull(const __grid_constant__ Args a) {
  const u64 lines = a.piece / 16, step = (u64)gridDim.x * blockDim.x;
  u32 sum = 0;
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < a.bytes / 16; i += 4 * step) {
    Word4 v[4];
#pragma unroll
    for (u32 u = 0; u < 4; u++) v[u] = load_slot(a.in + (i + u * step) % lines * 16);
#pragma unroll
    for (u32 u = 0; u < 4; u++) sum ^= v[u].x;
  }
  if (sum == 0x12345677) store_volatile((u32*)a.state, sum);
}
// Latency: `op` rounds of a flag to and fro; `rank` 0 begins. tx[0]: the peer's word; rx[0]: mine. The mean of a round in ns
// goes to `out`; it ends by itself after the deadline in header[1] milliseconds.
extern "C" __global__ void probe_pingpong(const __grid_constant__ Args a) {
  const u64 begun = now_ns();
  u64 from = begun;
  for (u32 i = 1; i <= a.op; i++) {
    if (i == 33) from = now_ns();
    if (a.rank == 0) store_sys((u32*)a.tx[0], i);
    while (load_sys((const u32*)a.rx[0]) != i)
      if (now_ns() - begun > a.header[1] * 1000000ull) { *(u32*)a.out = ~0u; return; }
    if (a.rank != 0) store_sys((u32*)a.tx[0], i);
  }
  *(u32*)a.out = (u32)((now_ns() - from) / (a.op - 32));
}

// The check of results between ranks.
extern "C" __global__ void digest(const __grid_constant__ Args a) { digest_of(a, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x); }
extern "C" __global__ void same(const __grid_constant__ Args a) { compare_digests(a, threadIdx.x); }
