// SPDX-License-Identifier: MIT OR Apache-2.0
// One-shot all-reduce of two ranks by lines where some warps of a block send and the others receive, so that the link never waits
// for a reader: a line needs no flow control within a call.
#pragma once
#include "oneshot.h"

namespace pcieipc {

struct FlowShared {
  u32 sent[32];  // rounds that push warp i has sent; written by it, and read where the call is in place
};

// Every block has its own stretch of the tensor, so that what one overwrites in place it has sent itself. PUSH and TAKE units of a
// thread are on their way together.
template <class E, bool SIMPLE, class F, u32 PUSH, u32 TAKE, class T>
PCIEIPC_FN void oneshot_flow(T t, const Args& a, FlowShared& s) {
  for (u32 i = t.thread(); i < 32; i += t.data_threads() + t.service_threads()) store_shared(&s.sent[i], 0);
  t.barrier(1, t.data_threads() + t.service_threads());
  t.begin(a);
  if (a.flags & ARG_NOOP) return;
  typedef Lines<E, SIMPLE, F, 2, (TAKE > 1)> X;
  X x{a, {now_ns(), 0}, 0};
  if (t.thread() >= t.data_threads()) { service<false>(t, a, x.w); return; }
  const bool aligned = (a.flags & ARG_ALIGNED) != 0, in_place = a.in == a.out;
  const u64 units = X::units(a.bytes), each = (units + t.blocks() - 1) / t.blocks();
  const u64 from = each * t.block() < units ? each * t.block() : units, to = from + each < units ? from + each : units;
  const u32 pushers = a.push_warps * WARP, takers = t.data_threads() - pushers, round = PUSH * pushers;
  if (t.thread() < pushers) {
    u64 i = from + t.thread();
    u32 own[PUSH][X::WORDS];
#pragma unroll
    for (u32 u = 0; u < PUSH; u++)
      if (i + u * pushers < to) x.load(i + u * pushers, own[u], aligned);
    const Word4 state = load_state(a.state);
    x.epoch = state.x;
    // As `data_begins`, but what is on its way is sent first.
    if (state.y != OK) { data_has_epoch(t); return; }
    u8* tx = half_of(a.tx[x.peer(1)], a.layout, x.epoch, x.peer(1), a.rank) + a.layout.lines;
    for (u32 rounds = 1;; rounds++) {
#pragma unroll
      for (u32 u = 0; u < PUSH; u++)
        if (i + u * pushers < to) {
          step(a, STEP_SEND, x.peer(1), x.epoch, (i + u * pushers) * 16, tx + (i + u * pushers) * 16, a.tx[x.peer(1)]);
          X::put(tx + (i + u * pushers) * 16, own[u]);
        }
      if (rounds == 1) data_has_epoch(t);
      if (in_place) {
        fence_block();
        warp_sync();
        if (t.thread() % WARP == 0) store_shared(&s.sent[t.thread() / WARP], rounds);
      }
      if (from + (u64)rounds * round >= to) return;
      i += round;
#pragma unroll
      for (u32 u = 0; u < PUSH; u++)
        if (i + u * pushers < to) x.load(i + u * pushers, own[u], aligned);
    }
  }
  if (!data_begins<false>(t, a, x.epoch)) return;
  for (u64 i = from + (t.thread() - pushers); i < to; i += TAKE * takers) {
    u32 own[TAKE][X::WORDS], missing = 0;
#pragma unroll
    for (u32 u = 0; u < TAKE; u++)
      if (i + u * takers < to) {
        missing |= 1u << u;
        x.load(i + u * takers, own[u], aligned);
      }
    if (in_place) {
      // The round in which this thread's last unit was sent.
      const u64 last = i + (TAKE - 1) * takers < to ? i + (TAKE - 1) * takers : to - 1;
      const u32 want = (u32)((last - from) / round) + 1;
      for (u32 k = 0; k < a.push_warps; k++)
        while (load_shared(&s.sent[k]) < want)
          if (give_up(a, x.w, a.rank, WAIT_LINE, x.epoch)) return;
      fence_block();
    }
    while (missing) {
      const u32 come = x.template take_what_came<TAKE>(i, takers, missing, own, aligned);
      if (come == 0 && give_up(a, x.w, x.peer(1), WAIT_LINE, x.epoch)) return;
      missing &= ~come;
    }
  }
}

}  // namespace pcieipc
