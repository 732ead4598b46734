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

// W words, whole and aligned.
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

// W words at byte offset `at` of a tensor of `bytes` bytes; bytes past its end read as zero and are not written.
template <class E, u32 W> PCIEIPC_FN void load_part(const u8* p, u64 at, u64 bytes, u32* w) {
  typedef typename Bits<sizeof(E)>::T U;
#pragma unroll
  for (u32 i = 0; i < W; i++) w[i] = 0;
#pragma unroll
  for (u32 i = 0; i < W * 4 / sizeof(E); i++) {
    u64 v = 0;
    if (at + (i + 1) * sizeof(E) <= bytes) v = ((const U*)(p + at))[i];
    if (sizeof(E) == 8) { w[2 * i % W] = (u32)v; w[(2 * i + 1) % W] = (u32)(v >> 32); }
    else w[i * sizeof(E) / 4] |= (u32)v << (i * sizeof(E) % 4 * 8);
  }
}
template <class E, u32 W> PCIEIPC_FN void store_part(u8* p, u64 at, u64 bytes, const u32* w) {
  typedef typename Bits<sizeof(E)>::T U;
#pragma unroll
  for (u32 i = 0; i < W * 4 / sizeof(E); i++) {
    u64 v = sizeof(E) == 8 ? (u64)w[2 * i % W] | (u64)w[(2 * i + 1) % W] << 32 : (u64)(w[i * sizeof(E) / 4] >> (i * sizeof(E) % 4 * 8));
    if (at + (i + 1) * sizeof(E) <= bytes) ((U*)(p + at))[i] = (U)v;
  }
}

}  // namespace pcieipc
