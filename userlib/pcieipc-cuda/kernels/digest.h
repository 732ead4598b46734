// SPDX-License-Identifier: MIT OR Apache-2.0
// The check of results between ranks: each rank's number of its own result, which all exchange as a call of their own, and the comparison.
#pragma once
#include "memory.h"

namespace pcieipc {

PCIEIPC_FN u64 mixed(u64 v) {
  v ^= v >> 33; v *= 0xff51afd7ed558ccdull;
  v ^= v >> 33; v *= 0xc4ceb9fe1a85ec53ull;
  return v ^ v >> 33;
}

// Adds the number of the `bytes` bytes at `in` to the one at `out`: a sum over places, so threads add in any order, of what depends on the
// place and on every bit there.
PCIEIPC_FN void digest_of(const Args& a, u32 thread, u32 threads) {
  u64 sum = 0;
  for (u64 i = thread; i * 16 < a.bytes; i += threads) {
    Word4 v;
    if ((a.flags & ARG_ALIGNED) && i * 16 + 16 <= a.bytes) v = load_passing16(a.in + i * 16);
    else v = load_elements<u8>(a.in, i * 16, a.bytes);
    sum += mixed(((u64)v.x | (u64)v.y << 32) + (2 * i + 1) * 0x9e3779b97f4a7c15ull);
    sum += mixed(((u64)v.z | (u64)v.w << 32) + (2 * i + 2) * 0x9e3779b97f4a7c15ull);
  }
  add_number((u64*)a.out, sum);
}

// The numbers of all ranks are at `in`; all must be the own one.
PCIEIPC_FN void compare_digests(const Args& a, u32 thread) {
  const u64* all = (const u64*)a.in;
  if (thread >= a.ranks || load_volatile(&a.state->dead) != 0) return;
  if (all[thread] != all[a.rank]) fail(a, DIFFERENT, thread, WAIT_HEADER, load_volatile(&a.state->epoch) - 1, all[a.rank], all[thread], 0, 0);
}

}  // namespace pcieipc
