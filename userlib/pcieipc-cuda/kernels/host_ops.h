// SPDX-License-Identifier: MIT OR Apache-2.0
// The protocol on a processor, for tests under a thread sanitizer: threads stand for warps of one lane. Slot data is plain
// memory, so that the sanitizer sees whether flags order it. Included by protocol.h only.
#pragma once

#define PCIEIPC_FN inline
#define PCIEIPC_NOINLINE inline

constexpr u32 WARP = 1;
// Delays at random, so that threads meet in other orders than they would.
void host_pause();

PCIEIPC_FN u32 load_volatile(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
PCIEIPC_FN void store_volatile(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
PCIEIPC_FN u32 load_sys(const u32* p) { host_pause(); return __atomic_load_n(p, __ATOMIC_RELAXED); }
PCIEIPC_FN u64 load_sys(const u64* p) { host_pause(); return __atomic_load_n(p, __ATOMIC_RELAXED); }
PCIEIPC_FN u64 load_acquire_sys(const u64* p) { host_pause(); return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
PCIEIPC_FN void store_sys(u32* p, u32 v) { host_pause(); __atomic_store_n(p, v, __ATOMIC_RELAXED); }
PCIEIPC_FN void store_sys(u64* p, u64 v) { host_pause(); __atomic_store_n(p, v, __ATOMIC_RELAXED); }
PCIEIPC_FN void store_release_sys(u32* p, u32 v) { host_pause(); __atomic_store_n(p, v, __ATOMIC_RELEASE); }
PCIEIPC_FN void store_release_sys(u64* p, u64 v) { host_pause(); __atomic_store_n(p, v, __ATOMIC_RELEASE); }
PCIEIPC_FN u32 atomic_cas(u32* p, u32 old, u32 v) { __atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE); return old; }
PCIEIPC_FN u32 atomic_exch(u32* p, u32 v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
PCIEIPC_FN u32 atomic_add(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
PCIEIPC_FN void add_number(u64* to, u64 v) { __atomic_fetch_add(to, v, __ATOMIC_RELAXED); }
// For traces: positions in the order of what happens. They order nothing themselves, so that the sanitizer sees what would be without them.
extern u64 step_clock;
PCIEIPC_FN u32 count_step(u32* p) { return __atomic_fetch_add(p, 1u, __ATOMIC_RELAXED); }
PCIEIPC_FN u64 step_time() { return __atomic_fetch_add(&step_clock, (u64)1, __ATOMIC_RELAXED); }
PCIEIPC_FN void fence_sys() {}  // the atomic access that follows is stronger
u64 now_ns();
PCIEIPC_FN bool lane_leads() { return true; }

struct Word2 { u32 x, y; };
struct Word4 { u32 x, y, z, w; };
// Two accesses of 8 bytes, in either order: nothing wider is whole.
PCIEIPC_FN void store_line(void* p, Word4 v) {
  u64* q = (u64*)p;
  store_sys(q + 1, (u64)v.z | (u64)v.w << 32);
  store_sys(q, (u64)v.x | (u64)v.y << 32);
}
PCIEIPC_FN Word4 load_line(const void* p) {
  const u64* q = (const u64*)p;
  const u64 low = load_sys(q), high = load_sys(q + 1);
  return Word4{(u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32)};
}
// Whole, as on links with native atomics: made so by a lock, which orders nothing else.
void host_whole(void* p, Word4* v, bool store);
PCIEIPC_FN void store_line16(void* p, Word4 v) { host_pause(); host_whole(p, &v, true); }
PCIEIPC_FN Word4 load_line16(const void* p) { Word4 v; host_pause(); host_whole((void*)p, &v, false); return v; }
PCIEIPC_FN u32 load_shared(const u32* p) { host_pause(); return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
PCIEIPC_FN void store_shared(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
PCIEIPC_FN void fence_block() {}  // what it orders is ordered by the accesses to shared memory here, which are stronger
PCIEIPC_FN void warp_sync() {}
PCIEIPC_FN bool warp_all(bool v) { return v; }
PCIEIPC_FN void store_slot(void* p, Word4 v) { *(Word4*)p = v; }
PCIEIPC_FN Word4 load_slot(const void* p) { return *(const Word4*)p; }
PCIEIPC_FN void linger(u32) {}
// What a copy engine reads, and a kernel may overwrite in place once the peer has told that it came: an order by cause, which no
// access expresses.
PCIEIPC_FN Word4 load_passing16(const void* p) {
  const u64* q = (const u64*)p;
  const u64 low = __atomic_load_n(q, __ATOMIC_RELAXED), high = __atomic_load_n(q + 1, __ATOMIC_RELAXED);
  return Word4{(u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32)};
}
PCIEIPC_FN void store_passing16(void* p, Word4 v) {
  u64* q = (u64*)p;
  __atomic_store_n(q, (u64)v.x | (u64)v.y << 32, __ATOMIC_RELAXED);
  __atomic_store_n(q + 1, (u64)v.z | (u64)v.w << 32, __ATOMIC_RELAXED);
}
PCIEIPC_FN Word4 load_state(const State* p) { return Word4{load_volatile(&p->epoch), load_volatile(&p->dead), 0, 0}; }
PCIEIPC_FN Word4 load_own16(const void* p) { return *(const Word4*)p; }
PCIEIPC_FN Word2 load_own8(const void* p) { return *(const Word2*)p; }
PCIEIPC_FN u32 load_own4(const void* p) { return *(const u32*)p; }
PCIEIPC_FN void store_own16(void* p, Word4 v) { *(Word4*)p = v; }
PCIEIPC_FN void store_own8(void* p, Word2 v) { *(Word2*)p = v; }
PCIEIPC_FN void store_own4(void* p, u32 v) { *(u32*)p = v; }

PCIEIPC_FN float from_bits_f32(u32 v) { float f; __builtin_memcpy(&f, &v, 4); return f; }
PCIEIPC_FN double from_bits_f64(u64 v) { double f; __builtin_memcpy(&f, &v, 8); return f; }
PCIEIPC_FN u32 bits_f32(float f) { u32 v; __builtin_memcpy(&v, &f, 4); return v; }
PCIEIPC_FN u64 bits_f64(double f) { u64 v; __builtin_memcpy(&v, &f, 8); return v; }
float f32_from_f16(u16 v);
u16 f16_from_f32(float f);
u16 bf16_from_f32(float f);
