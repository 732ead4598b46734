// SPDX-License-Identifier: MIT OR Apache-2.0
// All-reduce of registered tensors, which all ranks can read where they lie: nothing is staged. Each rank owns shares: it reads them from all
// inputs, adds them into its own output, and the others read them from there. Nobody writes another's tensors.
//
// The tensor is cut into rounds of one tile for each rank, and block b takes the rounds b, b + blocks, and so on. Warps have one job:
//   tell     one warp: tells the peers that this rank has begun, how many own tiles are added, and that it has read all it reads
//   hear     one warp: acquires those numbers
//   add      the own tile of a round from all inputs, in rank order, into the output
//   copy     the peers' tiles of a round from their outputs into the own one
// A peer's input is there once it has begun, since its kernel waited for what came before on its stream; its output may change once all have
// read it, since no rank is done before all have told so.
// In place, a peer's tile of the own input is overwritten only by its sum, which that peer had after reading the input.
#pragma once
#include "shares.h"

namespace pcieipc {

// Beside the number of complete tiles: how far a rank's block has come.
enum Stage : u32 { BEGUN = 1, HAS_READ = 2 };

struct DirectShared {
  StreamShared tiles;  // `consumed` counts the rounds that an add warp has added, `arrived` those that a peer has
  u32 copied[32];      // rounds that copy warp i has copied; written by it
  u32 begun;           // all peers have begun; written by the hear warp
};

template <class E, bool SIMPLE, u32 UNROLL> struct Direct : Stream<E, SIMPLE, 0, UNROLL> {
  typedef Stream<E, SIMPLE, 0, UNROLL> S;
  PCIEIPC_FN Direct(S s) : S(s) {}

  PCIEIPC_FN u64 tile(u64 q, u64 blocks, u32 block, u32 of) const { return ((block + q * blocks) * this->ranks() + of) * this->a.piece; }
  PCIEIPC_FN u32 tile_length(u64 at) const { return at < this->a.bytes ? this->length(at) : 0; }
  PCIEIPC_FN u32 stride() const { return this->warps * WARP * 16; }
  PCIEIPC_FN u32 start() const { return (this->warp * WARP + this->lane) * 16; }
  // Where another rank's tensor lies, as this device sees it: as far behind the start of its registered memory as the own one.
  PCIEIPC_FN static const u8* there(const u64* of, u32 rank, u32 own, const u8* mine) { return (const u8*)(of[rank] + ((u64)mine - of[own])); }

  // 16 bytes of a tensor, or those that are left of it. Registered memory is aligned alike on all ranks.
  PCIEIPC_FN void load_from(const u8* tensor, u64 at, u32* v) const {
    if (this->aligned && at + 16 <= this->a.bytes) {
      const Word4 w = load_slot(tensor + at);
      v[0] = w.x; v[1] = w.y; v[2] = w.z; v[3] = w.w;
    } else load_part<E, 4>(tensor, at, this->a.bytes, v);
  }
  PCIEIPC_FN void put(u64 to, const u32* v) const {
    step(this->a, STEP_STORE, this->a.rank, this->epoch, to);
    if (this->aligned && to + 16 <= this->a.bytes) store_slot(this->a.out + to, Word4{v[0], v[1], v[2], v[3]});
    else store_part<E, 4>(this->a.out, to, this->a.bytes, v);
  }
  template <u32 U> PCIEIPC_FN void add(u64 at) const {
    Accumulator<E, 4, SIMPLE> acc[U];
    u32 r[4];
#pragma unroll 1
    for (u32 k = 0; k < this->ranks(); k++) {
      const u8* from = there(this->a.in_of, k, this->a.rank, this->a.in);
      u32 g[U][4];
#pragma unroll
      for (u32 u = 0; u < U; u++) load_from(from, at + u * stride(), g[u]);
#pragma unroll
      for (u32 u = 0; u < U; u++) {
        step(this->a, STEP_TAKE, k, this->epoch, at + u * stride(), REGISTERED);
        if (k == 0) acc[u].set(g[u]); else acc[u].add(g[u], this->a.op);
      }
    }
#pragma unroll
    for (u32 u = 0; u < U; u++) {
      acc[u].get(r, this->a.op, this->ranks());
      put(at + u * stride(), r);
    }
  }
  PCIEIPC_FN void add_tile(u64 at) const {
    const u32 len = tile_length(at);
    u32 i = start();
    for (; i + (UNROLL - 1) * stride() + 16 <= len; i += UNROLL * stride()) add<UNROLL>(at + i);
#pragma unroll 1
    for (; i < len; i += stride()) add<1>(at + i);
  }
  template <u32 U> PCIEIPC_FN void copy(const u8* from, u32 of, u64 at) const {
    u32 v[U][4];
#pragma unroll
    for (u32 u = 0; u < U; u++) load_from(from, at + u * stride(), v[u]);
#pragma unroll
    for (u32 u = 0; u < U; u++) {
      step(this->a, STEP_HEAR, of, this->epoch, at + u * stride(), REGISTERED);
      put(at + u * stride(), v[u]);
    }
  }
  PCIEIPC_FN void copy_tile(u64 at, u32 of) const {
    const u8* from = there(this->a.out_of, of, this->a.rank, this->a.out);
    const u32 len = tile_length(at);
    u32 i = start();
    for (; i + (UNROLL - 1) * stride() + 16 <= len; i += UNROLL * stride()) copy<UNROLL>(from, of, at + i);
#pragma unroll 1
    for (; i < len; i += stride()) copy<1>(from, of, at + i);
  }
  // One warp: tells all peers how far this block has come.
  PCIEIPC_FN void tell_stage(u64 flag, Stage stage) const {
    fence_block();
    warp_sync();
    for (u32 k = 1 + this->lane; k < this->ranks(); k += WARP) {
      const u32 to = this->peer(k);
      store_release_sys((u64*)(half_of(this->a.tx[to], this->a.layout, this->epoch, to, this->a.rank) + flag), ((u64)this->epoch << 32) | stage);
    }
    warp_sync();
  }
  // One warp: waits until all peers' blocks have come so far.
  PCIEIPC_FN bool hear_stage(Watch& w, u64 flag, Stage stage) const {
    bool good = true;
#pragma unroll 1
    for (u32 k = 1 + this->lane; k < this->ranks() && good; k += WARP) {
      const u32 from = this->peer(k);
      const u64* word = (const u64*)(half_of(this->a.rx[from], this->a.layout, this->epoch, this->a.rank, from) + flag);
      for (;;) {
        const u64 v = load_acquire_sys(word);
        if ((u32)(v >> 32) == this->epoch && (u32)v >= stage && (u32)v <= HAS_READ) break;
        if (give_up(this->a, w, from, WAIT_SLOT, this->epoch)) { good = false; break; }
      }
    }
    warp_sync();
    good = warp_all(good);
    if (!good) store_shared(&this->s.lost, 1u);
    fence_block();
    return good;
  }
};

template <class E, bool SIMPLE, u32 UNROLL, class T>
PCIEIPC_FN void direct_reads(T t, const Args& a, DirectShared& s) {
  for (u32 i = t.thread(); i < sizeof(DirectShared) / 4; i += t.data_threads() + t.service_threads()) store_shared((u32*)&s + i, 0);
  t.barrier(1, t.data_threads() + t.service_threads());
  t.begin(a);
  if (a.flags & ARG_NOOP) return;
  Watch w{now_ns(), 0};
  if (t.thread() >= t.data_threads()) { service<true>(t, a, w); return; }
  u32 epoch;
  if (!data_begins<true>(t, a, epoch)) return;

  const u64 round = (u64)a.ranks * a.piece, rounds = (a.bytes + round - 1) / round, blocks = t.blocks();
  const u32 mine = t.block() < rounds ? (u32)((rounds - t.block() + blocks - 1) / blocks) : 0;
  typedef Direct<E, SIMPLE, UNROLL> X;
  X x(typename X::S{a, s.tiles, epoch, t.thread() % WARP, t.thread() / WARP, 0, 0, (a.flags & ARG_ALIGNED) != 0});
  const u64 flag = a.layout.flags + (u64)t.block() * FLAG_STRIDE, stage = flag + SUMS_FLAG;
  const u32 adders = (t.data_threads() / WARP - 2 + 1) / 2, copiers = t.data_threads() / WARP - 2 - adders;
  if (x.warp == 0) {
    x.tell_stage(stage, BEGUN);
    tell_peers(x, a, s.tiles.consumed, adders, flag, mine);
    if (x.reached(s.copied, copiers, mine)) x.tell_stage(stage, HAS_READ);
  } else if (x.warp == 1) {
    if (x.hear_stage(w, stage, BEGUN)) {
      warp_sync();
      if (x.lane == 0) store_shared(&s.begun, 1u);
      poll_peers(x, a, s.tiles, s.tiles.arrived, w, flag, mine);
      // The kernel is not over before that.
      x.hear_stage(w, stage, HAS_READ);
    }
  } else if (x.warp < 2 + adders) {
    x.warp -= 2;
    x.warps = adders;
    if (x.warp == 0 && x.lane == 0) store_shared(&s.tiles.arrived[a.rank], ~0u);
    if (x.reached(&s.begun, 1, 1))
      for (u32 q = 0; q < mine; q++) {
        x.add_tile(x.tile(q, blocks, t.block(), a.rank));
        x.reach(&s.tiles.consumed[x.warp], q + 1);
      }
  } else {
    x.warp -= 2 + adders;
    x.warps = copiers;
    for (u32 q = 0; q < mine; q++) {
      if (!x.reached(s.tiles.arrived, a.ranks, q + 1)) break;
#pragma unroll 1
      for (u32 k = 1; k < a.ranks; k++) {
        const u32 of = x.peer(k);
        x.copy_tile(x.tile(q, blocks, t.block(), of), of);
      }
      x.reach(&s.copied[x.warp], q + 1);
    }
  }
  data_is_done(t);
}

}  // namespace pcieipc
