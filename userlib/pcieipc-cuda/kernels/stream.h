// SPDX-License-Identifier: MIT OR Apache-2.0
// One-shot all-reduce for larger tensors: each block streams tiles to every peer through slots and adds what streams in.
//
// The warps of a block have one job each, so that nobody waits for a fence but the warp that issues it:
//   push     copy the block's tiles into the peers' slots
//   flag     one warp: when tiles are complete, releases their number to every peer
//   poll     one warp: acquires the peers' numbers
//   consume  add the tiles in rank order
// Tile q is pushed once this block has consumed tile q - AHEAD, which needs tile q - AHEAD of every peer, which that peer
// pushed after it had consumed q - 2 * AHEAD. So 2 * AHEAD slots need no acknowledgement.
#pragma once
#include "oneshot.h"

namespace pcieipc {

constexpr u32 AHEAD = SLOTS / 2;

struct StreamShared {
  u32 pushed[32];       // tiles that push warp i has stored, or watch warp i has seen; written by it
  u32 consumed[32];     // tiles that consume warp i has added; written by it
  u32 arrived[MAX_RANKS];  // tiles complete from each peer; written by the poll warp
  u32 lost;             // a wait was given up
};

// Where tiles come in.
struct Slots {
  static constexpr bool EMPTIES = false;
  PCIEIPC_FN static u8* last(u8* mailbox, const Args&, u32, u32, u32) { return mailbox; }  // of staging only
  PCIEIPC_FN static u8* rx(const Args& a, u32 epoch, u32 from, u64 q, u64, u64 slots) {
    return half_of(a.rx[from], a.layout, epoch, a.rank, from) + slots + q % SLOTS * a.layout.slot_bytes;
  }
};

template <class E, bool SIMPLE, u32 N, u32 UNROLL, class Place = Slots> struct Stream {
  const Args& a;
  StreamShared& s;
  u32 epoch;
  u32 lane, warp, warps;  // within the role
  u64 slots;
  bool aligned;

  PCIEIPC_FN u32 ranks() const { return N ? N : a.ranks; }
  PCIEIPC_FN u32 peer(u32 k) const { return N == 2 ? 1 - a.rank : a.rank + k < ranks() ? a.rank + k : a.rank + k - ranks(); }
  PCIEIPC_FN u8* tx(u32 peer, u64 q) const { return half_of(a.tx[peer], a.layout, epoch, peer, a.rank) + slots + q % SLOTS * a.layout.slot_bytes; }
  PCIEIPC_FN u8* rx(u32 peer, u64 q, u64 at) const { return Place::rx(a, epoch, peer, q, at, slots); }

  // Waits until all `n` counters have reached `want`.
  PCIEIPC_FN bool reached(const u32* counters, u32 n, u32 want) const {
    for (;;) {
      bool good = true;
#pragma unroll 1
      for (u32 i = lane; i < n; i += WARP) good &= load_shared(&counters[i]) >= want;
      if (warp_all(good)) { fence_block(); return true; }
      if (load_shared(&s.lost)) return false;
    }
  }
  PCIEIPC_FN void reach(u32* counter, u32 value) const {
    fence_block();
    warp_sync();
    if (lane == 0) store_shared(counter, value);
  }

  PCIEIPC_FN void push(u64 q, u64 at, u32 len) const {
    const u32 stride = warps * WARP * 16;
    u32 i = (warp * WARP + lane) * 16;
    if (aligned)
      for (; i + (UNROLL - 1) * stride + 16 <= len; i += UNROLL * stride) {
        u32 v[UNROLL][4];
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) load_whole<4>(a.in + at + i + u * stride, v[u]);
#pragma unroll 1
        for (u32 k = 1; k < ranks(); k++) {
          u8* to = tx(peer(k), q) + i;
#pragma unroll
          for (u32 u = 0; u < UNROLL; u++) step(a, STEP_SEND, peer(k), epoch, at + i + u * stride, to + u * stride, a.tx[peer(k)]);
#pragma unroll
          for (u32 u = 0; u < UNROLL; u++) store_slot(to + u * stride, Word4{v[u][0], v[u][1], v[u][2], v[u][3]});
        }
      }
    for (; i < len; i += stride) {
      u32 v[4];
      load_any(at + i, v);
#pragma unroll 1
      for (u32 k = 1; k < ranks(); k++) {
        u8* to = tx(peer(k), q) + i;
        step(a, STEP_SEND, peer(k), epoch, at + i, to, a.tx[peer(k)]);
        store_slot(to, Word4{v[0], v[1], v[2], v[3]});
      }
    }
  }
  PCIEIPC_FN void load_any(u64 at, u32* v) const {
    if (aligned && at + 16 <= a.bytes) load_whole<4>(a.in + at, v); else load_part<E, 4>(a.in, at, a.bytes, v);
  }

  template <u32 U, bool WHOLE> PCIEIPC_FN void combine(u64 q, u64 at, u32 i) const {
    const u32 stride = warps * WARP * 16;
    u32 r[U][4];
    if constexpr (N == 2) {
      u32 own[U][4];
      Word4 got[U];
      u8* from = rx(peer(1), q, at) + i;
      if (Place::EMPTIES && !WHOLE && at + i + 16 > a.bytes) from = Place::last(a.rx[peer(1)], a, epoch, a.rank, peer(1));
#pragma unroll
      for (u32 u = 0; u < U; u++) got[u] = Place::EMPTIES ? load_line(from + u * stride) : load_slot(from + u * stride);
#pragma unroll
      for (u32 u = 0; u < U; u++) {
        if (WHOLE) load_passing<4>(a.in + at + i + u * stride, own[u]); else load_any(at + i + u * stride, own[u]);
      }
#pragma unroll
      for (u32 u = 0; u < U; u++) {
        const u32 theirs[4] = {got[u].x, got[u].y, got[u].z, got[u].w};
        steps_of_two(a, epoch, at + i + u * stride, from + u * stride);
        add_two<E, 4, SIMPLE>(a.rank, own[u], theirs, a.op, r[u]);
        if (Place::EMPTIES) store_line(from + u * stride, Word4{a.empty[0], a.empty[1], a.empty[2], a.empty[3]});
      }
    } else {
      Accumulator<E, 4, SIMPLE> acc[U];
#pragma unroll 1
      for (u32 k = 0; k < ranks(); k++) {
        const u8* from = rx(k, q, at) + i;
#pragma unroll
        for (u32 u = 0; u < U; u++) {
          u32 g[4];
          if (k != a.rank) {
            Word4 v = load_slot(from + u * stride);
            g[0] = v.x; g[1] = v.y; g[2] = v.z; g[3] = v.w;
          } else if (WHOLE) load_whole<4>(a.in + at + i + u * stride, g);
          else load_any(at + i + u * stride, g);
          step(a, STEP_TAKE, k, epoch, at + i + u * stride, k != a.rank ? from + u * stride : nullptr, k != a.rank ? a.rx[k] : nullptr);
          if (k == 0) acc[u].set(g); else acc[u].add(g, a.op);
        }
      }
#pragma unroll
      for (u32 u = 0; u < U; u++) acc[u].get(r[u], a.op, ranks());
    }
#pragma unroll
    for (u32 u = 0; u < U; u++) {
      const u64 to = at + i + u * stride;
      step(a, STEP_STORE, a.rank, epoch, to);
      if (WHOLE || (aligned && to + 16 <= a.bytes)) {
        if (N == 2) store_passing<4>(a.out + to, r[u]); else store_whole<4>(a.out + to, r[u]);
      }
      else store_part<E, 4>(a.out, to, a.bytes, r[u]);
    }
  }
  PCIEIPC_FN u32 length(u64 at) const { return (u32)(a.bytes - at < a.piece ? a.bytes - at : a.piece); }
  // One consume warp's part of all the block's tiles.
  PCIEIPC_FN void consume_all(u32 block, u64 blocks, u32 mine, u32 me, u32 consumers, u32 pushers) {
    warp = me;
    warps = consumers;
    // In place, the result overwrites what the push warps may still have to read, or what the copy engine reads until the peer has
    // seen it come.
    const bool in_place = a.in == a.out, arrival = !Place::EMPTIES || in_place, departure = Place::EMPTIES || in_place;
    if (warp == 0 && lane == 0) store_shared(&s.arrived[a.rank], ~0u);
    for (u32 q = 0; q < mine; q++) {
      const u64 at = (block + q * blocks) * a.piece;
      if (arrival && !reached(s.arrived, ranks(), q + 1)) break;
      if (departure && !reached(s.pushed, pushers, q + 1)) break;
      consume(q, at, length(at));
      reach(&s.consumed[warp], q + 1);
    }
  }
  PCIEIPC_FN void consume(u64 q, u64 at, u32 len) const {
    const u32 stride = warps * WARP * 16;
    u32 i = (warp * WARP + lane) * 16;
    if (aligned)
      for (; i + (UNROLL - 1) * stride + 16 <= len; i += UNROLL * stride) combine<UNROLL, true>(q, at, i);
#pragma unroll 1
    for (; i < len; i += stride) combine<1, false>(q, at, i);
  }
};

// The warp that releases to all peers how far `n` warps have come, which their `counters` say.
template <class X> PCIEIPC_FN void tell_peers(const X& x, const Args& a, const u32* counters, u32 n, u64 flag, u32 mine) {
  for (u32 sent = 0; sent < mine;) {
    if (!x.reached(counters, n, sent + 1)) break;
    u32 least = mine;
#pragma unroll 1
    for (u32 i = 0; i < n; i++) { u32 v = load_shared(&counters[i]); least = v < least ? v : least; }
    fence_block();
    warp_sync();
    sent = least;
    for (u32 k = 1 + x.lane; k < x.ranks(); k += WARP)
      store_release_sys((u64*)(half_of(a.tx[x.peer(k)], a.layout, x.epoch, x.peer(k), a.rank) + flag), ((u64)x.epoch << 32) | sent);
    warp_sync();
  }
}

// The warp that acquires the peers' numbers, of all of its peers in turn, into `arrived`.
template <class X> PCIEIPC_FN void poll_peers(const X& x, const Args& a, StreamShared& s, u32* arrived, Watch& w, u64 flag, u32 mine) {
  for (bool more = true; more;) {
    more = false;
#pragma unroll 1
    for (u32 k = 1 + x.lane; k < x.ranks(); k += WARP) {
      const u32 from = x.peer(k), seen = load_shared(&arrived[from]);
      if (seen >= mine) continue;
      more = true;
      const u64 v = load_acquire_sys((const u64*)(half_of(a.rx[from], a.layout, x.epoch, a.rank, from) + flag));
      if ((u32)(v >> 32) == x.epoch && (u32)v > seen && (u32)v <= mine) {
        fence_block();
        store_shared(&arrived[from], (u32)v);
      } else if (give_up(a, w, from, WAIT_SLOT, x.epoch)) {
        store_shared(&s.lost, 1u);
        more = false;
        break;
      }
    }
  }
  warp_sync();
}

template <class E, bool SIMPLE, u32 N, u32 UNROLL, class T>
PCIEIPC_FN void oneshot_stream(T t, const Args& a, StreamShared& s) {
  for (u32 i = t.thread(); i < sizeof(StreamShared) / 4; i += t.data_threads() + t.service_threads()) store_shared((u32*)&s + i, 0);
  t.barrier(1, t.data_threads() + t.service_threads());
  t.begin(a);
  if (a.flags & ARG_NOOP) return;
  Watch w{now_ns(), 0};
  if (t.thread() >= t.data_threads()) { service<true>(t, a, w); return; }
  u32 epoch;
  if (!data_begins<true>(t, a, epoch)) return;

  const u64 tiles = (a.bytes + a.piece - 1) / a.piece, blocks = t.blocks();
  const u32 mine = t.block() < tiles ? (u32)((tiles - t.block() + blocks - 1) / blocks) : 0;
  Stream<E, SIMPLE, N, UNROLL> x{a, s, epoch, t.thread() % WARP, t.thread() / WARP, 0, a.layout.slots + (u64)t.block() * SLOTS * a.layout.slot_bytes, (a.flags & ARG_ALIGNED) != 0};
  const u64 flag = a.layout.flags + (u64)t.block() * FLAG_STRIDE;
  const u32 pushers = a.push_warps, consumers = t.data_threads() / WARP - pushers - 2;
  if (x.warp < pushers) {
    x.warps = pushers;
    for (u32 q = 0; q < mine; q++) {
      const u64 at = (t.block() + q * blocks) * a.piece;
      if (q >= AHEAD && !x.reached(s.consumed, consumers, q - AHEAD + 1)) break;
      x.push(q, at, x.length(at));
      x.reach(&s.pushed[x.warp], q + 1);
    }
  } else if (x.warp == pushers) {
    tell_peers(x, a, s.pushed, pushers, flag, mine);
  } else if (x.warp == pushers + 1) {
    poll_peers(x, a, s, s.arrived, w, flag, mine);
  } else {
    x.consume_all(t.block(), blocks, mine, x.warp - pushers - 2, consumers, pushers);
  }
  data_is_done(t);
}

}  // namespace pcieipc
