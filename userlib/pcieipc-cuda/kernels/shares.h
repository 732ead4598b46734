// SPDX-License-Identifier: MIT OR Apache-2.0
// Two-shot all-reduce for three and more ranks: each adds a share of the tensor and sends the sums to all. A rank sends 2 (n - 1) / n
// of its tensor that way, and n - 1 times the whole in one shot.
//
// The tensor is cut into rounds of one tile for each rank, and block b takes the rounds b, b + blocks, and so on. Warps have one job:
//   push     copy every peer's tile of a round into that peer's slot
//   flag     one warp: when the tiles of rounds are complete, releases their number to every peer
//   poll     one warp: acquires the peers' numbers
//   add      the own tile, in rank order, into the output and into every peer's second slots
//   tell     as flag, for sums
//   hear     as poll, for sums
//   copy     the peers' sums into the output
// Round q is pushed once this block has copied the sums of round q - AHEAD from every peer. A peer sent those after it had added
// the tiles of that round, so its first slots are free; and once the tiles of round q are here from every peer, each has copied the sums of round
// q - AHEAD, so their second slots are free. AHEAD slots for each need no acknowledgement.
// In place, sums overwrite tiles of the peers' shares, which they only sent after this rank's push warps had read them; the
// own share is pushed to nobody.
#pragma once
#include "stream.h"

namespace pcieipc {

// Beside the number of complete tiles, in the same place for every block.
constexpr u64 SUMS_FLAG = 8;
static_assert(SUMS_FLAG + 8 <= FLAG_STRIDE, "room for two numbers");

struct SharesShared {
  StreamShared tiles;  // `consumed` counts the rounds that an add warp has added
  u32 copied[32];      // rounds whose sums copy warp i has stored; written by it
  u32 heard[MAX_RANKS];  // rounds whose sums are complete, from each peer; written by the hear warp
};

template <class E, bool SIMPLE, u32 UNROLL> struct Shares : Stream<E, SIMPLE, 0, UNROLL> {
  typedef Stream<E, SIMPLE, 0, UNROLL> S;
  PCIEIPC_FN Shares(S s) : S(s) {}

  // Tiles come into the first AHEAD slots of a block, sums into the others.
  PCIEIPC_FN u8* slot(u8* mailbox, u32 reader, u32 sender, u64 q, bool sums) const {
    return half_of(mailbox, this->a.layout, this->epoch, reader, sender) + this->slots + (q % AHEAD + (sums ? AHEAD : 0)) * this->a.layout.slot_bytes;
  }
  // The tile of a rank in the round that starts at `first`; it may be empty.
  PCIEIPC_FN u64 share(u64 first, u32 rank) const { return first + (u64)rank * this->a.piece; }
  PCIEIPC_FN u32 share_length(u64 at) const { return at < this->a.bytes ? this->length(at) : 0; }
  PCIEIPC_FN u32 stride() const { return this->warps * WARP * 16; }
  PCIEIPC_FN u32 start() const { return (this->warp * WARP + this->lane) * 16; }

  PCIEIPC_FN void push_round(u64 q, u64 first) const {
#pragma unroll 1
    for (u32 k = 1; k < this->ranks(); k++) {
      const u32 to = this->peer(k);
      const u64 at = share(first, to);
      const u32 len = share_length(at);
      u8* place = slot(this->a.tx[to], to, this->a.rank, q, false);
      u32 i = start();
      if (this->aligned)
        for (; i + (UNROLL - 1) * stride() + 16 <= len; i += UNROLL * stride()) {
          u32 v[UNROLL][4];
#pragma unroll
          for (u32 u = 0; u < UNROLL; u++) load_whole<4>(this->a.in + at + i + u * stride(), v[u]);
#pragma unroll
          for (u32 u = 0; u < UNROLL; u++) step(this->a, STEP_SEND, to, this->epoch, at + i + u * stride(), place + i + u * stride(), this->a.tx[to]);
#pragma unroll
          for (u32 u = 0; u < UNROLL; u++) store_slot(place + i + u * stride(), Word4{v[u][0], v[u][1], v[u][2], v[u][3]});
        }
      for (; i < len; i += stride()) {
        u32 v[4];
        this->load_any(at + i, v);
        step(this->a, STEP_SEND, to, this->epoch, at + i, place + i, this->a.tx[to]);
        store_slot(place + i, Word4{v[0], v[1], v[2], v[3]});
      }
    }
  }
  PCIEIPC_FN void put(u64 to, const u32* v) const {
    step(this->a, STEP_STORE, this->a.rank, this->epoch, to);
    if (this->aligned && to + 16 <= this->a.bytes) store_whole<4>(this->a.out + to, v); else store_part<E, 4>(this->a.out, to, this->a.bytes, v);
  }
  template <u32 U> PCIEIPC_FN void add(u64 q, u64 at, u32 i) const {
    Accumulator<E, 4, SIMPLE> acc[U];
    u32 r[U][4];
#pragma unroll 1
    for (u32 k = 0; k < this->ranks(); k++) {
      const u8* from = slot(this->a.rx[k], this->a.rank, k, q, false) + i;
#pragma unroll
      for (u32 u = 0; u < U; u++) {
        u32 g[4];
        if (k == this->a.rank) this->load_any(at + i + u * stride(), g);
        else {
          const Word4 v = load_slot(from + u * stride());
          g[0] = v.x; g[1] = v.y; g[2] = v.z; g[3] = v.w;
        }
        const bool own = k == this->a.rank;
        step(this->a, STEP_TAKE, k, this->epoch, at + i + u * stride(), own ? nullptr : from + u * stride(), own ? nullptr : this->a.rx[k]);
        if (k == 0) acc[u].set(g); else acc[u].add(g, this->a.op);
      }
    }
#pragma unroll
    for (u32 u = 0; u < U; u++) {
      acc[u].get(r[u], this->a.op, this->ranks());
      put(at + i + u * stride(), r[u]);
    }
#pragma unroll 1
    for (u32 k = 1; k < this->ranks(); k++) {
      const u32 to = this->peer(k);
      u8* place = slot(this->a.tx[to], to, this->a.rank, q, true) + i;
#pragma unroll
      for (u32 u = 0; u < U; u++) step(this->a, STEP_SUM, to, this->epoch, at + i + u * stride(), place + u * stride(), this->a.tx[to]);
#pragma unroll
      for (u32 u = 0; u < U; u++) store_slot(place + u * stride(), Word4{r[u][0], r[u][1], r[u][2], r[u][3]});
    }
  }
  PCIEIPC_FN void add_round(u64 q, u64 first) const {
    const u64 at = share(first, this->a.rank);
    const u32 len = share_length(at);
    u32 i = start();
    for (; i + (UNROLL - 1) * stride() + 16 <= len; i += UNROLL * stride()) add<UNROLL>(q, at, i);
#pragma unroll 1
    for (; i < len; i += stride()) add<1>(q, at, i);
  }
  PCIEIPC_FN void copy_round(u64 q, u64 first) const {
#pragma unroll 1
    for (u32 k = 1; k < this->ranks(); k++) {
      const u32 from = this->peer(k);
      const u64 at = share(first, from);
      const u32 len = share_length(at);
      const u8* place = slot(this->a.rx[from], this->a.rank, from, q, true);
      u32 i = start();
      for (; i + (UNROLL - 1) * stride() + 16 <= len; i += UNROLL * stride()) {
        Word4 v[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) v[u] = load_slot(place + i + u * stride());
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
          const u32 w[4] = {v[u].x, v[u].y, v[u].z, v[u].w};
          step(this->a, STEP_HEAR, from, this->epoch, at + i + u * stride(), place + i + u * stride(), this->a.rx[from]);
          put(at + i + u * stride(), w);
        }
      }
      for (; i < len; i += stride()) {
        const Word4 v = load_slot(place + i);
        const u32 w[4] = {v.x, v.y, v.z, v.w};
        step(this->a, STEP_HEAR, from, this->epoch, at + i, place + i, this->a.rx[from]);
        put(at + i, w);
      }
    }
  }
};

template <class E, bool SIMPLE, u32 UNROLL, class T>
PCIEIPC_FN void shares_stream(T t, const Args& a, SharesShared& s) {
  for (u32 i = t.thread(); i < sizeof(SharesShared) / 4; i += t.data_threads() + t.service_threads()) store_shared((u32*)&s + i, 0);
  t.barrier(1, t.data_threads() + t.service_threads());
  t.begin(a);
  if (a.flags & ARG_NOOP) return;
  Watch w{now_ns(), 0};
  if (t.thread() >= t.data_threads()) { service<true>(t, a, w); return; }
  u32 epoch;
  if (!data_begins<true>(t, a, epoch)) return;

  const u64 round = (u64)a.ranks * a.piece, rounds = (a.bytes + round - 1) / round, blocks = t.blocks();
  const u32 mine = t.block() < rounds ? (u32)((rounds - t.block() + blocks - 1) / blocks) : 0;
  typedef Shares<E, SIMPLE, UNROLL> X;
  X x(typename X::S{a, s.tiles, epoch, t.thread() % WARP, t.thread() / WARP, 0, a.layout.slots + (u64)t.block() * SLOTS * a.layout.slot_bytes, (a.flags & ARG_ALIGNED) != 0});
  const u64 flag = a.layout.flags + (u64)t.block() * FLAG_STRIDE;
  const u32 pushers = a.push_warps, others = t.data_threads() / WARP - pushers - 4, adders = (others + 1) / 2, copiers = others - adders;
  const u32 role = x.warp < pushers ? 0 : x.warp < pushers + 4 ? x.warp - pushers + 1 : x.warp < pushers + 4 + adders ? 5 : 6;
  if (role == 0) {
    x.warps = pushers;
    for (u32 q = 0; q < mine; q++) {
      if (q >= AHEAD && !x.reached(s.copied, copiers, q - AHEAD + 1)) break;
      x.push_round(q, (t.block() + q * blocks) * round);
      x.reach(&s.tiles.pushed[x.warp], q + 1);
    }
  } else if (role == 1) {
    tell_peers(x, a, s.tiles.pushed, pushers, flag, mine);
  } else if (role == 2) {
    poll_peers(x, a, s.tiles, s.tiles.arrived, w, flag, mine);
  } else if (role == 3) {
    tell_peers(x, a, s.tiles.consumed, adders, flag + SUMS_FLAG, mine);
  } else if (role == 4) {
    poll_peers(x, a, s.tiles, s.heard, w, flag + SUMS_FLAG, mine);
  } else if (role == 5) {
    x.warp -= pushers + 4;
    x.warps = adders;
    if (x.warp == 0 && x.lane == 0) store_shared(&s.tiles.arrived[a.rank], ~0u);
    for (u32 q = 0; q < mine; q++) {
      if (!x.reached(s.tiles.arrived, a.ranks, q + 1)) break;
      x.add_round(q, (t.block() + q * blocks) * round);
      x.reach(&s.tiles.consumed[x.warp], q + 1);
    }
  } else {
    x.warp -= pushers + 4 + adders;
    x.warps = copiers;
    if (x.warp == 0 && x.lane == 0) store_shared(&s.heard[a.rank], ~0u);
    for (u32 q = 0; q < mine; q++) {
      if (!x.reached(s.heard, a.ranks, q + 1)) break;
      x.copy_round(q, (t.block() + q * blocks) * round);
      x.reach(&s.copied[x.warp], q + 1);
    }
  }
  data_is_done(t);
}

}  // namespace pcieipc
