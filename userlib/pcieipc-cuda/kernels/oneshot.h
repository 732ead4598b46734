// SPDX-License-Identifier: MIT OR Apache-2.0
// One-shot all-reduce: every rank sends all it has to every peer, and adds what it receives in rank order.
#pragma once
#include "memory.h"
#include "reduce.h"

namespace pcieipc {

// How a thread's words travel: in lines of 16 bytes of data without a flag. An empty line holds a random value that all ranks know,
// and the reader empties it again. Data that equals that value would be waited for in vain, and end in Timeout.
//   Pair:   each half of 8 bytes comes on its own: only 8-byte atomicity is assumed.
//   Whole:  the line comes at once. Needs 16-byte atomicity, which PTX gives for a scalar access; used only on peer memory with
//           native atomics.
struct Pair {
  PCIEIPC_FN static void put(u8* to, Word4 v) { store_line(to, v); }
  PCIEIPC_FN static Word4 look(const u8* from) { return load_line(from); }
  PCIEIPC_FN static bool is_there(const Args& a, Word4 v) {
    return !(v.x == a.empty[0] && v.y == a.empty[1]) && !(v.z == a.empty[2] && v.w == a.empty[3]);
  }
};
struct Whole {
  PCIEIPC_FN static void put(u8* to, Word4 v) { store_line16(to, v); }
  PCIEIPC_FN static Word4 look(const u8* from) { return load_line16(from); }
  PCIEIPC_FN static bool is_there(const Args& a, Word4 v) {
    return !(v.x == a.empty[0] && v.y == a.empty[1] && v.z == a.empty[2] && v.w == a.empty[3]);
  }
};

// As `add_two` adds: in rank order.
PCIEIPC_FN void steps_of_two(const Args& a, u32 epoch, u64 at, const u8* place) {
  if (a.rank == 0) step(a, STEP_TAKE, 0, epoch, at);
  step(a, STEP_TAKE, 1 - a.rank, epoch, at, place, a.rx[1 - a.rank]);
  if (a.rank == 1) step(a, STEP_TAKE, 1, epoch, at);
}

// A unit is what one thread sends in one line. N: number of ranks when known at compile time, otherwise 0. PASSING: for tensors that
// would only push the lines out of the L2.
template <class E, bool SIMPLE, class F, u32 N, bool PASSING = false> struct Lines {
  static constexpr u32 WORDS = 4, BYTES = 16;
  const Args& a;
  Watch w;
  u32 epoch;

  PCIEIPC_FN u32 ranks() const { return N ? N : a.ranks; }
  PCIEIPC_FN u32 peer(u32 k) const { return N == 2 ? 1 - a.rank : a.rank + k < ranks() ? a.rank + k : a.rank + k - ranks(); }
  PCIEIPC_FN static u64 units(u64 bytes) { return (bytes + BYTES - 1) / BYTES; }

  PCIEIPC_FN void load(u64 unit, u32* v, bool aligned) const {
    const u64 at = unit * BYTES;
    if (aligned && at + BYTES <= a.bytes) { if (PASSING) load_passing<WORDS>(a.in + at, v); else load_whole<WORDS>(a.in + at, v); }
    else load_part<E, WORDS>(a.in, at, a.bytes, v);
  }
  PCIEIPC_FN void store(u64 unit, const u32* v, bool aligned) const {
    const u64 at = unit * BYTES;
#ifdef PCIEIPC_SPOIL  // to see that results are compared: one rank's first word is wrong
    const u32 spoiled[WORDS] = {v[0] ^ (a.rank == 1 && unit == 0 && a.bytes > 256 ? 1u : 0u), v[1], v[2], v[3]};
    v = spoiled;
#endif
    step(a, STEP_STORE, a.rank, epoch, at);
    if (aligned && at + BYTES <= a.bytes) { if (PASSING) store_passing<WORDS>(a.out + at, v); else store_whole<WORDS>(a.out + at, v); }
    else store_part<E, WORDS>(a.out, at, a.bytes, v);
  }
  PCIEIPC_FN void send(u64 unit, const u32* own) const {
#pragma unroll 1
    for (u32 k = 1; k < ranks(); k++) {
      u8* to = half_of(a.tx[peer(k)], a.layout, epoch, peer(k), a.rank) + a.layout.lines + unit * 16;
      step(a, STEP_SEND, peer(k), epoch, unit * BYTES, to, a.tx[peer(k)]);
      put(to, own);
    }
  }
  PCIEIPC_FN static void put(u8* to, const u32* w) { F::put(to, Word4{w[0], w[1], w[2], w[3]}); }
  // What came in a line, which is emptied.
  PCIEIPC_FN void take(u8* from, Word4 v, u32* w) const {
    w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
    F::put(from, Word4{a.empty[0], a.empty[1], a.empty[2], a.empty[3]});
  }
  // Receives a unit from every peer and gives the result.
  PCIEIPC_FN bool receive(u64 unit, const u32* own, u32* r) {
    u32 got[WORDS];
    if constexpr (N == 2) {
      if (!await(peer(1), unit, got)) return false;
      add_two<E, WORDS, SIMPLE>(a.rank, own, got, a.op, r);
    } else {
      Accumulator<E, WORDS, SIMPLE> acc;
#pragma unroll 1
      for (u32 k = 0; k < ranks(); k++) {
        if (k == a.rank) {
          step(a, STEP_TAKE, k, epoch, unit * BYTES);
#pragma unroll
          for (u32 j = 0; j < WORDS; j++) got[j] = own[j];
        } else if (!await(k, unit, got)) return false;
        if (k == 0) acc.set(got); else acc.add(got, a.op);
      }
      acc.get(r, a.op, ranks());
    }
    return true;
  }
  // Two ranks: where the peer's unit comes.
  PCIEIPC_FN u8* line(u64 unit) const { return half_of(a.rx[peer(1)], a.layout, epoch, a.rank, peer(1)) + a.layout.lines + unit * 16; }
  // Two ranks: adds those of `missing` units (a bit each, `stride` apart) that have come; tells which. All lines are looked at
  // together: a look takes long, also at a line that is there.
  template <u32 U> PCIEIPC_FN u32 take_what_came(u64 unit, u64 stride, u32 missing, const u32 (*own)[WORDS], bool aligned) const {
    Word4 got[U];
    u32 come = 0;
#pragma unroll
    for (u32 u = 0; u < U; u++)
      if (missing >> u & 1) got[u] = F::look(line(unit + u * stride));
#pragma unroll
    for (u32 u = 0; u < U; u++)
      if ((missing >> u & 1) && F::is_there(a, got[u])) {
        u32 theirs[WORDS], r[WORDS];
        steps_of_two(a, epoch, (unit + u * stride) * BYTES, line(unit + u * stride));
        take(line(unit + u * stride), got[u], theirs);
        add_two<E, WORDS, SIMPLE>(a.rank, own[u], theirs, a.op, r);
        store(unit + u * stride, r, aligned);
        come |= 1u << u;
      }
    return come;
  }
  PCIEIPC_FN bool await(u32 from, u64 unit, u32* got) {
    u8* rx = half_of(a.rx[from], a.layout, epoch, a.rank, from) + a.layout.lines + unit * 16;
    Word4 v;
    while (!F::is_there(a, v = F::look(rx)))
      if (give_up(a, w, from, WAIT_LINE, epoch)) return false;
    if (N == 2) steps_of_two(a, epoch, unit * BYTES, rx); else step(a, STEP_TAKE, from, epoch, unit * BYTES, rx, a.rx[from]);
    take(rx, v, got);
    return true;
  }
};

// One thread's units, one after the other: the part of a service warp.
template <class X> struct InTurn {
  X& x;
  u64 i, step, units;
  bool aligned;
  u32 own[4];
  PCIEIPC_FN void send(u32 epoch) {
    x.epoch = epoch;
    if (i < units) { x.load(i, own, aligned); x.send(i, own); }
  }
  PCIEIPC_FN void receive() {
    for (; i < units; i += step) {
      u32 r[4];
      if (!x.receive(i, own, r)) return;
      x.store(i, r, aligned);
      if (i + step < units) { x.load(i + step, own, aligned); x.send(i + step, own); }
    }
  }
};

// UNROLL units of a thread are on their way together. WIDE: service warps move data too.
template <class E, bool SIMPLE, class F, u32 N, u32 UNROLL, bool WIDE = false, class T>
PCIEIPC_FN void oneshot_lines(T t, const Args& a) {
  t.begin(a);
  if (a.flags & ARG_NOOP) return;
  typedef Lines<E, SIMPLE, F, N> X;
  X x{a, {now_ns(), 0}, 0};
  const bool aligned = (a.flags & ARG_ALIGNED) != 0;
  const u32 width = t.data_threads() + (WIDE ? t.service_threads() : 0);
  const u64 units = X::units(a.bytes), step = (u64)t.blocks() * width;
  u64 i = (u64)t.block() * width + t.thread();
  if (t.thread() >= t.data_threads()) {
    if constexpr (WIDE) service<false>(t, a, x.w, InTurn<X>{x, i, step, units, aligned, {0, 0, 0, 0}});
    else service<false>(t, a, x.w);
    return;
  }
  // The first loads are on their way while the epoch is read.
  u32 own[UNROLL][X::WORDS];
#pragma unroll
  for (u32 u = 0; u < UNROLL; u++)
    if (i + u * step < units) x.load(i + u * step, own[u], aligned);
  Word4 state = load_state(a.state);
  x.epoch = state.x;
  // As `data_begins`, but what is on its way is sent first.
  if (state.y != OK) { data_has_epoch(t); return; }
#pragma unroll
  for (u32 u = 0; u < UNROLL; u++)
    if (i + u * step < units) x.send(i + u * step, own[u]);
  data_has_epoch(t);
  if (a.piece) linger(a.piece);
  // As a unit is received, the one that is UNROLL steps further is sent, so that as many stay on their way.
  for (; i < units; i += UNROLL * step) {
    u32 next[UNROLL][X::WORDS];
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++)
      if (i + (UNROLL + u) * step < units) x.load(i + (UNROLL + u) * step, next[u], aligned);
    if constexpr (N == 2 && UNROLL > 1) {
      u32 missing = 0;
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) missing |= (u32)(i + u * step < units) << u;
      while (missing) {
        const u32 come = x.template take_what_came<UNROLL>(i, step, missing, own, aligned);
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
