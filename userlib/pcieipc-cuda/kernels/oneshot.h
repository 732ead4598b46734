// SPDX-License-Identifier: MIT OR Apache-2.0
// One-shot all-reduce: every rank sends all it has to every peer, and adds what it receives in rank order.
#pragma once
#include "memory.h"
#include "reduce.h"

namespace pcieipc {

template <u32 W> PCIEIPC_FN void in_rank_order(u32 rank, const u32* own, const u32* got, u32* first, u32* second) {
#pragma unroll
  for (u32 i = 0; i < W; i++) {
    first[i] = rank == 0 ? own[i] : got[i];
    second[i] = rank == 0 ? got[i] : own[i];
  }
}

// How a thread's words travel in lines of 16 bytes.
//   Narrow: 8 bytes of data, a flag for each 4: only 8-byte atomicity is assumed.
//   Whole:  16 bytes of data and no flag: an empty line holds a random value that all ranks know, and the reader empties it
//           again. Needs 16-byte atomicity, which PTX gives for a scalar access; used only on peer memory with native atomics.
//           Data that equals that value would be waited for in vain, and end in Timeout.
// They never share memory: data of one would pass for a flag of the other.
struct Narrow {
  static constexpr u32 WORDS = 2;
  PCIEIPC_FN static u64 offset(const Layout& l) { return l.lines; }
  PCIEIPC_FN static void send(u8* to, const u32* w, u32 flag) { store_line(to, Word4{w[0], flag, w[1], flag}); }
  PCIEIPC_FN static Word4 look(const u8* from) { return load_line(from); }
  PCIEIPC_FN static bool is_there(const Args&, Word4 v, u32 flag) { return v.y == flag && v.w == flag; }
  PCIEIPC_FN static void take(const Args&, u8*, Word4 v, u32* w) { w[0] = v.x; w[1] = v.z; }
};
struct Whole {
  static constexpr u32 WORDS = 4;
  PCIEIPC_FN static u64 offset(const Layout& l) { return l.whole; }
  PCIEIPC_FN static void send(u8* to, const u32* w, u32) { store_line16(to, Word4{w[0], w[1], w[2], w[3]}); }
  PCIEIPC_FN static Word4 look(const u8* from) { return load_line16(from); }
  PCIEIPC_FN static bool is_there(const Args& a, Word4 v, u32) {
    return !(v.x == a.empty[0] && v.y == a.empty[1] && v.z == a.empty[2] && v.w == a.empty[3]);
  }
  PCIEIPC_FN static void take(const Args& a, u8* from, Word4 v, u32* w) {
    w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
    store_line16(from, Word4{a.empty[0], a.empty[1], a.empty[2], a.empty[3]});
  }
};

// A unit is what one thread sends in one line. N: number of ranks when known at compile time, otherwise 0.
template <class E, bool SIMPLE, class F, u32 N> struct Lines {
  static constexpr u32 WORDS = F::WORDS, BYTES = F::WORDS * 4;
  const Args& a;
  Watch w;
  u32 epoch;

  PCIEIPC_FN u32 ranks() const { return N ? N : a.ranks; }
  PCIEIPC_FN u32 peer(u32 k) const { return N == 2 ? 1 - a.rank : a.rank + k < ranks() ? a.rank + k : a.rank + k - ranks(); }
  PCIEIPC_FN static u64 units(u64 bytes) { return (bytes + BYTES - 1) / BYTES; }

  PCIEIPC_FN void load(u64 unit, u32* v, bool aligned) const {
    const u64 at = unit * BYTES;
    if (aligned && at + BYTES <= a.bytes) load_whole<WORDS>(a.in + at, v); else load_part<E, WORDS>(a.in, at, a.bytes, v);
  }
  PCIEIPC_FN void store(u64 unit, const u32* v, bool aligned) const {
    const u64 at = unit * BYTES;
    if (aligned && at + BYTES <= a.bytes) store_whole<WORDS>(a.out + at, v); else store_part<E, WORDS>(a.out, at, a.bytes, v);
  }
  PCIEIPC_FN void send(u64 unit, const u32* own) const {
#pragma unroll 1
    for (u32 k = 1; k < ranks(); k++)
      F::send(half_of(a.tx[peer(k)], a.layout, epoch, a.rank) + F::offset(a.layout) + unit * 16, own, epoch);
  }
  // Receives a unit from every peer and gives the result.
  PCIEIPC_FN bool receive(u64 unit, const u32* own, u32* r) {
    Accumulator<E, WORDS, SIMPLE> acc;
    u32 got[WORDS];
    if (N == 2) {
      if (!await(peer(1), unit, got)) return false;
      u32 first[WORDS], second[WORDS];
      in_rank_order<WORDS>(a.rank, own, got, first, second);
      acc.set(first);
      acc.add(second, a.op);
    } else {
#pragma unroll 1
      for (u32 k = 0; k < ranks(); k++) {
        if (k == a.rank) {
#pragma unroll
          for (u32 j = 0; j < WORDS; j++) got[j] = own[j];
        } else if (!await(k, unit, got)) return false;
        if (k == 0) acc.set(got); else acc.add(got, a.op);
      }
    }
    acc.get(r, a.op, ranks());
    return true;
  }
  // Two ranks: where the peer's unit comes, and its sum with the own one.
  PCIEIPC_FN u8* line(u64 unit) const {
    return half_of(a.rx[peer(1)], a.layout, epoch, peer(1)) + F::offset(a.layout) + unit * 16;
  }
  PCIEIPC_FN void add(const u32* own, const u32* got, u32* r) const {
    Accumulator<E, WORDS, SIMPLE> acc;
    u32 first[WORDS], second[WORDS];
    in_rank_order<WORDS>(a.rank, own, got, first, second);
    acc.set(first);
    acc.add(second, a.op);
    acc.get(r, a.op, 2);
  }
  PCIEIPC_FN bool await(u32 from, u64 unit, u32* got) {
    u8* rx = half_of(a.rx[from], a.layout, epoch, from) + F::offset(a.layout) + unit * 16;
    Word4 v;
    while (!F::is_there(a, v = F::look(rx), epoch))
      if (give_up(a, w, from, WAIT_LINE, epoch)) return false;
    F::take(a, rx, v, got);
    return true;
  }
};

// UNROLL units of a thread are on their way together.
template <class E, bool SIMPLE, class F, u32 N, u32 UNROLL, class T>
PCIEIPC_FN void oneshot_lines(T t, const Args& a) {
  t.begin();
  if (a.flags & ARG_NOOP) return;
  typedef Lines<E, SIMPLE, F, N> X;
  X x{a, {now_ns(), 0}, 0};
  if (t.thread() >= t.data_threads()) { service<false>(t, a, x.w); return; }
  const bool aligned = (a.flags & ARG_ALIGNED) != 0;
  const u64 units = X::units(a.bytes), step = (u64)t.blocks() * t.data_threads();
  u64 i = (u64)t.block() * t.data_threads() + t.thread();
  // The first loads are on their way while the epoch is read.
  u32 own[UNROLL][X::WORDS];
#pragma unroll
  for (u32 u = 0; u < UNROLL; u++)
    if (i + u * step < units) x.load(i + u * step, own[u], aligned);
  Word4 state = load_state(a.state);
  x.epoch = state.x;
  if (state.y != OK) return;
#pragma unroll
  for (u32 u = 0; u < UNROLL; u++)
    if (i + u * step < units) x.send(i + u * step, own[u]);
  data_has_epoch(t);
  // As a unit is received, the one that is UNROLL steps further is sent, so that as many stay on their way.
  for (; i < units; i += UNROLL * step) {
    u32 next[UNROLL][X::WORDS];
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++)
      if (i + (UNROLL + u) * step < units) x.load(i + (UNROLL + u) * step, next[u], aligned);
    if (N == 2 && UNROLL > 1) {
      // All lines are looked at together: a look takes long, also at a line that is there.
      u32 missing = 0;
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) missing |= (u32)(i + u * step < units) << u;
      while (missing) {
        Word4 got[UNROLL];
        u32 come = 0;
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++)
          if (missing >> u & 1) got[u] = F::look(x.line(i + u * step));
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++)
          if ((missing >> u & 1) && F::is_there(a, got[u], x.epoch)) {
            u32 theirs[X::WORDS], r[X::WORDS];
            F::take(a, x.line(i + u * step), got[u], theirs);
            x.add(own[u], theirs, r);
            x.store(i + u * step, r, aligned);
            come |= 1u << u;
          }
        if (come == 0 && give_up(a, x.w, x.peer(1), WAIT_LINE, x.epoch)) return;
        missing &= ~come;
      }
    } else {
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++)
        if (i + u * step < units) {
          u32 r[X::WORDS];
          if (!x.receive(i + u * step, own[u], r)) return;
          x.store(i + u * step, r, aligned);
        }
    }
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++)
      if (i + (UNROLL + u) * step < units) {
        x.send(i + (UNROLL + u) * step, next[u]);
#pragma unroll
        for (u32 k = 0; k < X::WORDS; k++) own[u][k] = next[u][k];
      }
  }
}

}  // namespace pcieipc
