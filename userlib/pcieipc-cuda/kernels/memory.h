// SPDX-License-Identifier: MIT OR Apache-2.0
// The caller's own tensors: whole words where pointers are aligned and inside the tensor, elements otherwise.
#pragma once
#include "protocol.h"

namespace pcieipc {

template <u32 SIZE> struct Bits;
template <> struct Bits<1> { typedef u8 T; };
template <> struct Bits<2> { typedef u16 T; };
template <> struct Bits<4> { typedef u32 T; };
template <> struct Bits<8> { typedef u64 T; };

// W words, whole and aligned; W is 2 or 4.
template <u32 W> PCIEIPC_FN void load_whole(const u8* p, u32* w) {
  if (W == 4) { Word4 v = load_own16(p); w[0] = v.x; w[1] = v.y; w[2] = v.z; w[W == 4 ? 3 : 0] = v.w; }
  else if (W == 2) { Word2 v = load_own8(p); w[0] = v.x; w[1] = v.y; }
  else {
#pragma unroll
    for (u32 i = 0; i < W; i++) w[i] = load_own4(p + 4 * i);
  }
}
template <u32 W> PCIEIPC_FN void store_whole(u8* p, const u32* w) {
  if (W == 4) store_own16(p, Word4{w[0], w[1], w[2], w[W == 4 ? 3 : 0]});
  else if (W == 2) store_own8(p, Word2{w[0], w[1]});
  else {
#pragma unroll
    for (u32 i = 0; i < W; i++) store_own4(p + 4 * i, w[i]);
  }
}

// Four words of a tensor that is longer than the L2.
template <u32 W> PCIEIPC_FN void load_passing(const u8* p, u32* w) {
  Word4 v = load_passing16(p); w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
}
template <u32 W> PCIEIPC_FN void store_passing(u8* p, const u32* w) { store_passing16(p, Word4{w[0], w[1], w[2], w[3]}); }

// Four words at byte offset `at` of a tensor of `bytes` bytes, element by element; bytes past its end read as zero. Never
// inlined: it is the way of unaligned tensors and of the last bytes of others.
template <class E> PCIEIPC_NOINLINE Word4 load_elements(const u8* p, u64 at, u64 bytes) {
  typedef typename Bits<sizeof(E)>::T U;
  u64 half[2] = {0, 0};
#pragma unroll 1
  for (u32 i = 0; i < 16; i += sizeof(E)) {
    if (at + i + sizeof(E) > bytes) break;
    const u64 v = (u64) * (const U*)(p + at + i) << (i % 8 * 8);
    if (i < 8) half[0] |= v; else half[1] |= v;
  }
  return Word4{(u32)half[0], (u32)(half[0] >> 32), (u32)half[1], (u32)(half[1] >> 32)};
}
template <class E> PCIEIPC_NOINLINE void store_elements(u8* p, u64 at, u64 bytes, Word4 w, u32 count) {
  typedef typename Bits<sizeof(E)>::T U;
  const u64 low = (u64)w.x | (u64)w.y << 32, high = (u64)w.z | (u64)w.w << 32;
#pragma unroll 1
  for (u32 i = 0; i < count; i += sizeof(E)) {
    if (at + i + sizeof(E) > bytes) break;
    *(U*)(p + at + i) = (U)((i < 8 ? low : high) >> (i % 8 * 8));
  }
}

// W words at byte offset `at`, of which some may lie past the end; those read as zero and are not written.
template <class E, u32 W> PCIEIPC_FN void load_part(const u8* p, u64 at, u64 bytes, u32* w) {
  const u64 end = at + W * 4 < bytes ? at + W * 4 : bytes;
  const Word4 v = load_elements<E>(p, at, end);
  w[0] = v.x; w[1] = v.y;
  if (W == 4) { w[W == 4 ? 2 : 0] = v.z; w[W == 4 ? 3 : 0] = v.w; }
}
template <class E, u32 W> PCIEIPC_FN void store_part(u8* p, u64 at, u64 bytes, const u32* w) {
  store_elements<E>(p, at, bytes, Word4{w[0], w[1], W == 4 ? w[W == 4 ? 2 : 0] : 0, W == 4 ? w[W == 4 ? 3 : 0] : 0}, W * 4);
}

}  // namespace pcieipc
