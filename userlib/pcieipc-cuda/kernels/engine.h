// SPDX-License-Identifier: MIT OR Apache-2.0
// All-reduce of two ranks for the longest tensors: a copy engine writes this rank's tensor into the peer's staging, in one copy for each
// chunk and without flags. The staging was emptied before, so the reader sees the data itself come; a flag would need a copy of
// its own, and the engine stands still between two copies.
//
//   gate     before the first copy, and before each that uses a part of the staging again: waits for the credit of what was there
//   watch    look at lines until they have come; before that, push the tensor's first bytes, while the engine is starting
//   flag     one warp: tells the peer which tiles were seen, and gives credits when all blocks have consumed a chunk
//   poll     one warp: acquires what the peer has seen
//   consume  add the tiles and empty them
// In place, a tile is overwritten once the peer has seen it: until then the engine may have to read it.
// After a failure engines may still write into staging, which nobody reads then and which is not given back while a peer lives.
#pragma once
#include "stream.h"

namespace pcieipc {

struct Staging {
  static constexpr bool EMPTIES = true;
  PCIEIPC_FN static u8* rx(const Args& a, u32, u32 from, u64, u64 at, u64) {
    return staging_of(a.rx[from], a.layout, a.rank, from) + at % (2 * a.layout.chunk);
  }
  // The last bytes, where they do not fill a line, are pushed at the start, when their place in the staging may still be in use:
  // they have a line of their own.
  PCIEIPC_FN static u8* last(u8* mailbox, const Args& a, u32 epoch, u32 reader, u32 sender) {
    return half_of(mailbox, a.layout, epoch, reader, sender) + a.layout.lines;
  }
};
PCIEIPC_FN bool is_last(const Args& a, u64 at) { return at + 16 > a.bytes; }

// A credit that `giver` writes into the mailbox of `reader`.
PCIEIPC_FN u64* credit_of(u8* mailbox, const Layout& l, u32 reader, u32 giver, u32 chunk) {
  return (u64*)(half_of(mailbox, l, 0, reader, giver) + CREDITS) + chunk;
}
PCIEIPC_FN u32 chunks_of(const Args& a) { return (u32)((a.bytes + a.layout.chunk - 1) / a.layout.chunk); }

// One warp. `piece` is the chunk that is to be copied next.
template <class T> PCIEIPC_FN void engine_gate(T t, const Args& a) {
  if (a.flags & ARG_NOOP || t.thread() != 0) return;
  const u32 peer = 1 - a.rank;
  Watch w{now_ns(), 0};
  const Word4 state = load_state(a.state);
  if (state.y != OK) return;
  // The credit for the last chunk of the call before, or for the chunk that was in this place.
  u32 epoch = state.x, chunk = a.piece - 2;
  if (a.piece == 0) {
    const u32 before = load_volatile(&a.state->engine_epoch), chunks = load_volatile(&a.state->engine_chunks);
    store_volatile(&a.state->engine_epoch, epoch);
    store_volatile(&a.state->engine_chunks, chunks_of(a));
    if (before == 0) return;
    epoch = before;
    chunk = chunks - 1;
  } else {
    // The kernel beside has advanced the epoch already.
    epoch = load_volatile(&a.state->engine_epoch);
  }
  const u64* credit = credit_of(a.rx[peer], a.layout, a.rank, peer, chunk);
  while (load_acquire_sys(credit) != epoch)
    if (give_up(a, w, peer, WAIT_CREDIT, epoch)) return;
}

template <class E, bool SIMPLE, u32 UNROLL> struct Engine : Stream<E, SIMPLE, 2, UNROLL, Staging> {
  typedef Stream<E, SIMPLE, 2, UNROLL, Staging> S;
  PCIEIPC_FN Engine(S s) : S(s) {}

  // Stores what engines do not copy: the first bytes, and the last ones where they do not fill a line.
  PCIEIPC_FN void push(u64 at, u32 len) const {
    const Args& a = this->a;
    const u64 whole = a.bytes & ~(u64)15;
    u8* to = staging_of(a.tx[1 - a.rank], a.layout, 1 - a.rank, a.rank) + at % (2 * a.layout.chunk);
    const u32 stride = this->warps * WARP * 16;
    u32 i = (this->warp * WARP + this->lane) * 16;
    if (at + len <= a.prefix && at + len <= whole && this->aligned)
      for (; i + (UNROLL - 1) * stride + 16 <= len; i += UNROLL * stride) {
        u32 v[UNROLL][4];
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) load_whole<4>(a.in + at + i + u * stride, v[u]);
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) step(a, STEP_SEND, 1 - a.rank, this->epoch, at + i + u * stride, to + i + u * stride, a.tx[1 - a.rank]);
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) store_line(to + i + u * stride, Word4{v[u][0], v[u][1], v[u][2], v[u][3]});
      }
    for (; i < len; i += stride)
      if (at + i < a.prefix || at + i >= whole) {
        u32 v[4];
        this->load_any(at + i, v);
        u8* line = is_last(a, at + i) ? Staging::last(a.tx[1 - a.rank], a, this->epoch, 1 - a.rank, a.rank) : to + i;
        step(a, STEP_SEND, 1 - a.rank, this->epoch, at + i, line, a.tx[1 - a.rank]);
        store_line(line, Word4{v[0], v[1], v[2], v[3]});
      }
  }
  // Whether all blocks have consumed the chunk that lay where this one comes.
  PCIEIPC_FN bool has_place(u64 chunk) const {
    if (chunk < 2) return true;
    const u64 emptied = load_acquire_sys(&this->a.state->emptied);
    return (u32)(emptied >> 32) == this->epoch && (u32)emptied + 2 > chunk;
  }
  // Waits for that: until then the old lines would pass for those that are to come.
  PCIEIPC_FN bool is_emptied(Watch& w, u64 at) const {
    while (!has_place(at / this->a.layout.chunk))
      if (give_up(this->a, w, this->a.rank, WAIT_CREDIT, this->epoch)) return false;
    return true;
  }
  // Waits until this warp's part of a tile has come.
  PCIEIPC_FN bool watch(Watch& w, u64 at, u32 len) const {
    const Args& a = this->a;
    const u8* from = Staging::rx(a, 0, 1 - a.rank, 0, at, 0);
    const u32 stride = this->warps * WARP * 16, first = (this->warp * WARP + this->lane) * 16, whole = len & ~15u;
    for (u32 i = first; i < whole; i += UNROLL * stride) {
      u32 missing = 0;
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) missing |= (u32)(i + u * stride < whole) << u;
      while (missing) {
        Word4 v[UNROLL];
        u32 come = 0;
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++)
          if (missing >> u & 1) v[u] = load_line(from + i + u * stride);
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++)
          if ((missing >> u & 1) && Pair::is_there(a, v[u])) come |= 1u << u;
        missing &= ~come;
        if (come == 0 && give_up(a, w, 1 - a.rank, WAIT_COPY, this->epoch)) return false;
      }
    }
    if (len != whole && first == 0) {
      const u8* last = Staging::last(a.rx[1 - a.rank], a, this->epoch, a.rank, 1 - a.rank);
      while (!Pair::is_there(a, load_line(last)))
        if (give_up(a, w, 1 - a.rank, WAIT_COPY, this->epoch)) return false;
    }
    return true;
  }
};

template <class E, bool SIMPLE, u32 UNROLL, class T>
PCIEIPC_FN void engine_stream(T t, const Args& a, StreamShared& s) {
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
  typedef Engine<E, SIMPLE, UNROLL> X;
  X x(typename X::S{a, s, epoch, t.thread() % WARP, t.thread() / WARP, 0, 0, (a.flags & ARG_ALIGNED) != 0});
  const u64 flag = a.layout.flags + (u64)t.block() * FLAG_STRIDE;
  const u32 watchers = a.push_warps, consumers = t.data_threads() / WARP - watchers - 2;
  if (x.warp < watchers) {
    x.warps = watchers;
    bool good = true;
    for (u32 q = 0; q < mine; q++) {
      const u64 at = (t.block() + q * blocks) * a.piece;
      const u32 len = x.length(at);
      if (at < a.prefix || ((a.bytes & 15) != 0 && q + 1 == mine)) x.push(at, len);
    }
    for (u32 q = 0; q < mine && good; q++) {
      const u64 at = (t.block() + q * blocks) * a.piece;
      good = x.is_emptied(w, at) && x.watch(w, at, x.length(at));
      good = warp_all(good);
      if (good) x.reach(&s.pushed[x.warp], q + 1);
      else store_shared(&s.lost, 1u);
    }
  } else if (x.warp == watchers) {
    // Flags need no fence: they publish no data. Credits do, for the lines that were emptied.
    u32 told = 0, chunk = 0;
    const u32 chunks = chunks_of(a);
    const u64 per_chunk = a.layout.chunk / a.piece;  // tiles
    u64* to = (u64*)(half_of(a.tx[1 - a.rank], a.layout, epoch, 1 - a.rank, a.rank) + flag);
    while (told < mine || chunk < chunks) {
      u32 seen = mine, done = mine;
#pragma unroll 1
      for (u32 i = 0; i < watchers; i++) { const u32 v = load_shared(&s.pushed[i]); seen = v < seen ? v : seen; }
#pragma unroll 1
      for (u32 i = 0; i < consumers; i++) { const u32 v = load_shared(&s.consumed[i]); done = v < done ? v : done; }
      if (seen > told) {
        told = seen;
        if (x.lane == 0) store_sys(to, ((u64)epoch << 32) | told);
      }
      // This block's tiles of the chunk are consumed.
      if (chunk < chunks && (done == mine || t.block() + done * blocks >= (chunk + 1) * per_chunk)) {
        // Two counters are enough, since no block counts for a chunk before all have counted for the one two before: tiles of it can not
        // have come, and a block without tiles waits here.
        if (!x.has_place(chunk)) {
          if (give_up(a, w, a.rank, WAIT_CREDIT, epoch)) break;
          continue;
        }
        fence_block();
        if (x.lane == 0) {
          u32* finished = &a.state->finished[chunk % 2];
          fence_sys();
          if (atomic_add(finished, 1u) + 1 == t.blocks()) {
            store_volatile(finished, 0u);
            // For this rank's own watchers, of all blocks.
            store_release_sys(&a.state->emptied, ((u64)epoch << 32) | (chunk + 1));
            store_release_sys(credit_of(a.tx[1 - a.rank], a.layout, 1 - a.rank, a.rank, chunk), (u64)epoch);
          }
        }
        chunk++;
      }
      if (load_shared(&s.lost)) break;
    }
  } else if (x.warp == watchers + 1) {
    if (a.in == a.out) poll_peers(x, a, s, s.arrived, w, flag, mine);
  } else {
    x.consume_all(t.block(), blocks, mine, x.warp - watchers - 2, consumers, watchers);
  }
  data_is_done(t);
}

}  // namespace pcieipc
