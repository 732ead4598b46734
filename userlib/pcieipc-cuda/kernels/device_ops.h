// SPDX-License-Identifier: MIT OR Apache-2.0
// What the protocol needs from a GPU: system-scope loads and stores, barriers, time. Included by protocol.h only.
#pragma once

#define PCIEIPC_FN __device__ __forceinline__
#define PCIEIPC_NOINLINE __device__ __noinline__

PCIEIPC_FN u32 load_volatile(const u32* p) { u32 v; asm volatile("ld.volatile.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
PCIEIPC_FN void store_volatile(u32* p, u32 v) { asm volatile("st.volatile.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory"); }
PCIEIPC_FN u32 load_sys(const u32* p) { u32 v; asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
PCIEIPC_FN u64 load_sys(const u64* p) { u64 v; asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
PCIEIPC_FN u64 load_acquire_sys(const u64* p) { u64 v; asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
PCIEIPC_FN void store_sys(u32* p, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory"); }
PCIEIPC_FN void store_sys(u64* p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory"); }
PCIEIPC_FN void store_release_sys(u32* p, u32 v) { asm volatile("st.release.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory"); }
PCIEIPC_FN void store_release_sys(u64* p, u64 v) { asm volatile("st.release.sys.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory"); }
PCIEIPC_FN u32 atomic_cas(u32* p, u32 old, u32 v) { return atomicCAS(p, old, v); }
PCIEIPC_FN u32 atomic_exch(u32* p, u32 v) { return atomicExch(p, v); }
PCIEIPC_FN u32 atomic_add(u32* p, u32 v) { return atomicAdd(p, v); }
// Adds the numbers of a whole warp.
PCIEIPC_FN void add_number(u64* to, u64 v) {
#pragma unroll
  for (u32 i = 16; i > 0; i /= 2) v += __shfl_xor_sync(0xffffffffu, v, i);
  if ((threadIdx.x & 31) == 0) atomicAdd(to, v);
}
// For traces: positions in the order of what happens, and a clock of the whole device.
PCIEIPC_FN u32 count_step(u32* p) { return atomicAdd(p, 1u); }
PCIEIPC_FN u64 step_time() { u64 v; asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(v)); return v; }
PCIEIPC_FN void fence_sys() { __threadfence_system(); }
PCIEIPC_FN u64 now_ns() { u64 v; asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(v)); return v; }
PCIEIPC_FN void pause_ns(u32 ns) { __nanosleep(ns); }
PCIEIPC_FN bool lane_leads() { return (threadIdx.x & 31) == (u32)(__ffs(__activemask()) - 1); }

struct Word2 { u32 x, y; };
struct Word4 { u32 x, y, z, w; };
// A line of two 8-byte halves: only 8-byte atomicity is assumed.
PCIEIPC_FN void store_line(void* p, Word4 v) { asm volatile("st.relaxed.sys.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
PCIEIPC_FN Word4 load_line(const void* p) { Word4 v; asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v; }
// A 16-byte scalar access is single-copy atomic in PTX's memory model (a vector of four words is not).
PCIEIPC_FN void store_line16(void* p, Word4 v) {
  asm volatile("{.reg .b128 q; .reg .b64 l,h; mov.b64 l,{%1,%2}; mov.b64 h,{%3,%4}; mov.b128 q,{l,h}; st.relaxed.sys.global.b128 [%0],q;}" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
PCIEIPC_FN Word4 load_line16(const void* p) {
  Word4 v;
  asm volatile("{.reg .b128 q; .reg .b64 l,h; ld.relaxed.sys.global.b128 q,[%4]; mov.b128 {l,h},q; mov.b64 {%0,%1},l; mov.b64 {%2,%3},h;}" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
constexpr u32 WARP = 32;
PCIEIPC_FN u32 load_shared(const u32* p) { return *(const volatile u32*)p; }
PCIEIPC_FN void store_shared(u32* p, u32 v) { *(volatile u32*)p = v; }
PCIEIPC_FN void fence_block() { __threadfence_block(); }
PCIEIPC_FN void warp_sync() { __syncwarp(); }
PCIEIPC_FN bool warp_all(bool v) { return __all_sync(0xffffffffu, v); }
// Slot data: ordered by the flag that follows or precedes it.
PCIEIPC_FN void store_slot(void* p, Word4 v) { asm volatile("st.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
PCIEIPC_FN Word4 load_slot(const void* p) { return load_line(p); }
// The caller's tensors when they are longer than the L2, and pass through it only once.
PCIEIPC_FN Word4 load_passing16(const void* p) { uint4 v = __ldcs((const uint4*)p); return {v.x, v.y, v.z, v.w}; }
PCIEIPC_FN void store_passing16(void* p, Word4 v) { __stcs((uint4*)p, make_uint4(v.x, v.y, v.z, v.w)); }
// State is one 16-byte load: epoch, dead, busy, arrived.
PCIEIPC_FN Word4 load_state(const State* p) { Word4 v; asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v; }
PCIEIPC_FN Word4 load_own16(const void* p) { uint4 v = *(const uint4*)p; return {v.x, v.y, v.z, v.w}; }
PCIEIPC_FN Word2 load_own8(const void* p) { uint2 v = *(const uint2*)p; return {v.x, v.y}; }
PCIEIPC_FN u32 load_own4(const void* p) { return *(const u32*)p; }
PCIEIPC_FN void store_own16(void* p, Word4 v) { *(uint4*)p = make_uint4(v.x, v.y, v.z, v.w); }
PCIEIPC_FN void store_own8(void* p, Word2 v) { *(uint2*)p = make_uint2(v.x, v.y); }
PCIEIPC_FN void store_own4(void* p, u32 v) { *(u32*)p = v; }

// The thread that runs: one warp of each block, the last, serves the protocol and the others move data.
struct Gpu {
  PCIEIPC_FN u32 thread() const { return threadIdx.x; }
  PCIEIPC_FN u32 block() const { return blockIdx.x; }
  PCIEIPC_FN u32 blocks() const { return gridDim.x; }
  PCIEIPC_FN u32 service_threads() const { return 32; }
  PCIEIPC_FN u32 data_threads() const { return blockDim.x - 32; }
  PCIEIPC_FN void barrier(u32 id, u32 n) const { asm volatile("barrier.sync %0,%1;" ::"r"(id), "r"(n) : "memory"); }
  PCIEIPC_FN bool barrier_or(u32 id, u32 n, bool v) const {
    u32 r;
    asm volatile("{.reg .pred p,q; setp.ne.u32 p,%3,0; barrier.red.or.pred q,%1,%2,p; selp.u32 %0,1,0,q;}" : "=r"(r) : "r"(id), "r"(n), "r"((u32)v) : "memory");
    return r != 0;
  }
  PCIEIPC_FN void arrive(u32 id, u32 n) const { asm volatile("barrier.arrive %0,%1;" ::"r"(id), "r"(n) : "memory"); }
  // This kernel waits for the one before; then the one that follows may be made resident (and waits likewise). With ARG_EARLY the other way
  // round; if all did so, each kernel of a graph would become resident behind the last, until no multiprocessor is left for anything else.
  PCIEIPC_FN void begin(const Args& a) const {
#if __CUDA_ARCH__ >= 900
    if (a.flags & ARG_EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  }
};

PCIEIPC_FN void linger(u32 cycles) { const long long from = clock64(); while (clock64() - from < (long long)cycles) {} }
#if __CUDA_ARCH__ >= 900
PCIEIPC_FN u32 add_bf16x2(u32 x, u32 y) { u32 r; asm("add.rn.bf16x2 %0,%1,%2;" : "=r"(r) : "r"(x), "r"(y)); return r; }
PCIEIPC_FN u32 add_f16x2(u32 x, u32 y) { u32 r; asm("add.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(x), "r"(y)); return r; }
#endif
PCIEIPC_FN float from_bits_f32(u32 v) { return __uint_as_float(v); }
PCIEIPC_FN double from_bits_f64(u64 v) { return __longlong_as_double((long long)v); }
PCIEIPC_FN u32 bits_f32(float v) { return __float_as_uint(v); }
PCIEIPC_FN u64 bits_f64(double v) { return (u64)__double_as_longlong(v); }
PCIEIPC_FN float f32_from_f16(u16 v) { float f; asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(v)); return f; }
PCIEIPC_FN u16 f16_from_f32(float f) { u16 v; asm("cvt.rn.f16.f32 %0,%1;" : "=h"(v) : "f"(f)); return v; }
PCIEIPC_FN u16 bf16_from_f32(float f) {
#if __CUDA_ARCH__ >= 800
  u16 v;
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(v) : "f"(f));
  return v;
#else
  u32 b = __float_as_uint(f);
  if ((b & 0x7fffffffu) > 0x7f800000u) return (u16)((b >> 16) | 0x40);
  return (u16)((b + 0x7fffu + ((b >> 16) & 1)) >> 16);
#endif
}
