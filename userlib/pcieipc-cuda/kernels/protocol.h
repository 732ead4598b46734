// SPDX-License-Identifier: MIT OR Apache-2.0
// The protocol between ranks: memory layout, epochs, lines, flags, bounded waits and the verdict.
// One text for NVRTC and for a host C++ compiler, where CI runs it under a thread sanitizer.
//
// Who writes what, and what pairs with it:
//   State       device memory of one rank, never exported; written by that rank's kernels only.
//   Control     host memory that every rank maps. Each word has one writer: `abort[r]` and `deadline_ns[r]` the host of
//               rank r, `failed[r]` and `verdict[r]` the kernels of rank r.
//   Mailbox     memory that peers write and this rank reads, on the device (peer path) or in host memory (host path).
//               headers: the epoch in the same 8 bytes as the data, so no ordering is needed;
//               lines: data alone; an empty line holds a random value that all ranks know, and its reader empties it again;
//               slots: data, then a flag stored with release; the reader acquires the flag before it reads;
//               staging: lines that a copy engine writes, with credits that the reader gives back (engine.h).
// Two halves of a mailbox alternate with the epoch. Every call receives a header from every peer, and a peer sends it only
// after its previous call is complete; so when call e+2 writes a half, nobody reads what call e left there.
#pragma once

namespace pcieipc {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 MAX_RANKS = 16;
constexpr u32 HEADER_WORDS = 4;
constexpr u32 MAX_BLOCKS = 64;
constexpr u32 SLOTS = 16;        // slots of a block for tiles in flight

// Failure codes of the verdict; the host maps them to its typed errors.
enum Code : u32 { OK = 0, TIMEOUT = 1, MISMATCH = 2, ABORTED = 3, CONCURRENT = 4, DIFFERENT = 5 };
// What a rank was waiting for when it failed.
enum What : u32 { WAIT_HEADER = 0, WAIT_LINE = 1, WAIT_SLOT = 2, WAIT_COPY = 3, WAIT_CREDIT = 4 };

// A step of a kernel: 16 bytes of the tensor, or those that are left of it. src/trace.rs compares them with the plan.
enum Verb : u32 {
  STEP_SEND = 1,   // the own input was sent to a peer
  STEP_TAKE = 2,   // a rank's input became a part of the sum; `peer` is this rank for the own input
  STEP_STORE = 3,  // the output was stored
  STEP_SUM = 4,    // a sum was sent to a peer
  STEP_HEAR = 5,   // a peer's sum was taken
};
struct Step {
  u32 verb, peer, epoch, bytes;
  u64 at, place, time;  // offset in the tensor and in the mailbox, and a clock that all ranks have in common
};
struct Trace {
  u32 next, room;  // steps so far, also those that found no room; written by all threads of this rank's kernels
  u32 pad[2];
  Step steps[1];
};

struct State {
  u32 epoch;    // calls completed; read by every thread, advanced once per call
  u32 dead;     // a Code; once set, later kernels exit without writing
  u32 busy;     // the epoch after that of the last kernel that began
  u32 arrived;  // blocks of the running kernel that have read the epoch
  u32 finished[2];  // blocks that have consumed a chunk of the staging, for even and odd chunks
  u32 engine_epoch, engine_chunks;  // of the last call that copy engines served
  u64 emptied;  // the epoch, and how many chunks of the staging all blocks have consumed in it
  Trace* trace; // of a build that traces: where its steps go
  u32 pad[20];
};

struct Verdict {
  u32 code, peer, what, epoch;
  u64 ours, theirs, waited_ns;
  u32 header_word;
  u32 written; // 1, stored last with release
  u32 pad[4];
};

struct Control {
  u64 abort[MAX_RANKS];
  u64 failed[MAX_RANKS];
  u64 deadline_ns[MAX_RANKS];
  Verdict verdict[MAX_RANKS];
};

// Offsets inside one half of a mailbox, for one sender. The host computes them; all ranks hold the same.
struct Layout {
  u64 half, sender;          // strides
  u64 flags, lines, slots;   // offsets of the parts
  u64 lines_bytes;
  u64 staging, chunk;        // behind both halves: two chunks for each sender but the owner
  u32 slot_bytes, pad;
};
constexpr u64 HEADERS_BYTES = 1024;  // at offset 0 of each (half, sender): headers, then credits
constexpr u64 CREDITS = 64;
constexpr u32 MAX_CHUNKS = (u32)(HEADERS_BYTES - CREDITS) / 8;
constexpr u64 FLAG_STRIDE = 32;

struct Args {
  State* state;
  Control* control;
  const u8* in;
  u8* out;
  u64 bytes;
  u32 rank, ranks;
  u32 header[HEADER_WORDS];
  u32 push_warps;     // streams and flows: warps of a block that push
  u32 piece;          // streams: bytes of a tile, a multiple of 16; lines: cycles before the first look; gates: the chunk
  u32 op;             // 0 sum, 1 average, 2 product, 3 minimum, 4 maximum
  u32 flags;          // ARG_*
  u32 empty[4];       // what an empty line holds: random, the same for all ranks
  u64 prefix;         // copy engines: bytes at the start that kernels push
  const u64 *in_of, *out_of;  // registered tensors: where each rank's memory begins, as this device sees it; in device memory
  Layout layout;
  u8* tx[MAX_RANKS];  // mailbox of rank j, as this rank writes it
  u8* rx[MAX_RANKS];  // own mailbox for what rank j sends
};
// The host's structures are compared with these when the kernels are compiled.
static_assert(sizeof(State) == 128 && sizeof(Verdict) == 64 && sizeof(Control) == 1408 && sizeof(Layout) == 72, "layout");
static_assert(sizeof(Args) == 448 && sizeof(Step) == 40, "arguments");
// Early: the kernel that follows may be made resident while this one still waits.
enum : u32 { ARG_NOOP = 1, ARG_ALIGNED = 2, ARG_EARLY = 4 };

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "device_ops.h"
#else
#include "host_ops.h"
#endif

// A mailbox has a place for each sender but its reader.
PCIEIPC_FN u32 place_of(u32 reader, u32 sender) { return sender > reader ? sender - 1 : sender; }
PCIEIPC_FN u8* half_of(u8* mailbox, const Layout& l, u32 epoch, u32 reader, u32 sender) {
  return mailbox + (epoch & 1) * l.half + place_of(reader, sender) * l.sender;
}

// Where `sender` stages in the mailbox of `reader`: two chunks in turn.
PCIEIPC_FN u8* staging_of(u8* mailbox, const Layout& l, u32 reader, u32 sender) {
  return mailbox + l.staging + place_of(reader, sender) * 2 * l.chunk;
}

// The place of what lies in registered memory and in no mailbox.
#define REGISTERED ((const u8*)~(u64)0)

// Records a step, in a build that traces; otherwise nothing. `place` is where in `mailbox` the bytes lie.
PCIEIPC_FN void step(const Args& a, u32 verb, u32 peer, u32 epoch, u64 at, const u8* place = nullptr, const u8* mailbox = nullptr) {
#ifdef PCIEIPC_TRACE
  Trace* trace = a.state->trace;
  const u32 i = count_step(&trace->next);
  if (i < trace->room) trace->steps[i] = Step{verb, peer, epoch, (u32)(a.bytes - at < 16 ? a.bytes - at : 16), at, (u64)(place - mailbox), step_time()};
#endif
}

// ---- bounded waits ---------------------------------------------------------------------------------------------------

// One per thread: when the kernel started, and whether the wait was given up.
struct Watch {
  u64 start;
  u32 spins;
};

// Writes the verdict of this rank once; the first failure wins.
PCIEIPC_NOINLINE void fail(const Args& a, u32 code, u32 peer, u32 what, u32 epoch, u64 ours, u64 theirs, u64 waited, u32 word) {
  if (atomic_cas(&a.state->dead, 0u, code) != 0) return;
  Verdict* v = &a.control->verdict[a.rank];
  store_sys(&v->code, code);
  store_sys(&v->peer, peer);
  store_sys(&v->what, what);
  store_sys(&v->epoch, epoch);
  store_sys(&v->ours, ours);
  store_sys(&v->theirs, theirs);
  store_sys(&v->waited_ns, waited);
  store_sys(&v->header_word, word);
  store_release_sys(&v->written, 1u);
  store_release_sys(&a.control->failed[a.rank], ((u64)epoch << 32) | code);
}

// Called on every failed poll; true means give up. Host words are read seldom: each read crosses the bus.
PCIEIPC_NOINLINE bool give_up_slow(const Args& a, u64 start, u32 spins, u32 peer, u32 what, u32 epoch) {
  if (load_volatile(&a.state->dead) != 0) return true;
  if ((spins & 1023) != 0 || !lane_leads()) return false;
  u64 waited = now_ns() - start;
#pragma unroll 1
  for (u32 r = 0; r < a.ranks; r++) {
    if (load_sys(&a.control->abort[r]) != 0 || load_sys(&a.control->failed[r]) != 0) {
      fail(a, ABORTED, r, what, epoch, 0, 0, waited, 0);
      return true;
    }
  }
  if (waited > load_sys(&a.control->deadline_ns[a.rank])) {
    fail(a, TIMEOUT, peer, what, epoch, 0, 0, waited, 0);
    return true;
  }
  return false;
}
PCIEIPC_FN bool give_up(const Args& a, Watch& w, u32 peer, u32 what, u32 epoch) {
#ifdef PCIEIPC_UNCHECKED  // only to measure what bounded waits and the header check cost
  return false;
#else
#ifdef PCIEIPC_NAP  // nanoseconds between polls, to try
  pause_ns(PCIEIPC_NAP);
#endif
  return (++w.spins & 63) == 0 && give_up_slow(a, w.start, w.spins, peer, what, epoch);
#endif
}

// ---- headers ---------------------------------------------------------------------------------------------------------

// Header words lie at one place for every algorithm, each with the epoch in the same 8 bytes. What one lane of the service
// warp sends and expects; addresses are ready before the epoch is known.
struct HeaderLane {
  u64* to;
  const u64* from;
  u32 ours, peer, word;
  bool active;
  PCIEIPC_FN HeaderLane(const Args& a, u32 i) {
    peer = i / HEADER_WORDS;
    word = i % HEADER_WORDS;
    active = peer < a.ranks && peer != a.rank;
    if (!active) return;
    to = (u64*)half_of(a.tx[peer], a.layout, 0, peer, a.rank) + word;
    from = (const u64*)half_of(a.rx[peer], a.layout, 0, a.rank, peer) + word;
    ours = a.header[word];
  }
  PCIEIPC_FN void send(const Args& a, u32 epoch) const {
    if (active) store_sys((u64*)((u8*)to + (epoch & 1) * a.layout.half), ((u64)epoch << 32) | ours);
  }
  PCIEIPC_FN void check(const Args& a, Watch& w, u32 epoch) const {
    if (!active) return;
    const u64* line = (const u64*)((const u8*)from + (epoch & 1) * a.layout.half);
    u64 v;
    while ((u32)((v = load_sys(line)) >> 32) != epoch)
      if (give_up(a, w, peer, WAIT_HEADER, epoch)) return;
    if ((u32)v != ours) fail(a, MISMATCH, peer, WAIT_HEADER, epoch, ours, (u32)v, 0, word);
  }
};

// Epochs pass over 0, which is what new memory holds, and keep alternating between the halves.
PCIEIPC_FN u32 next_epoch(u32 epoch) { return epoch == 0xffffffffu ? 2 : epoch + 1; }

// The last warp of a block other than block 0: tells when every thread has read the epoch.
template <class T> PCIEIPC_FN void block_has_epoch(T& t, const Args& a) {
  t.barrier(15, t.data_threads() + t.service_threads());
  if (t.thread() == t.data_threads()) atomic_add(&a.state->arrived, 1u);
}

// The block's service warp. Data warps arrive at barrier 15 once they have read the epoch. Block 0's exchanges headers; the
// epoch is advanced once every block has read it and every peer's header has come (WHOLE: and block 0 is done). Until then
// a second kernel of the same communicator finds `busy` at its own epoch's number, which is an error and not a hang.
// `also` is the service warp's own part of the data, where it has one.
struct Nothing {
  PCIEIPC_FN void send(u32) {}
  PCIEIPC_FN void receive() {}
};
template <bool WHOLE, class T, class X>
PCIEIPC_FN void service(T& t, const Args& a, Watch& w, X also) {
  const u32 lane = t.thread() - t.data_threads(), lanes = t.service_threads(), all = t.data_threads() + lanes;
  const bool leads = t.block() == 0;
  const HeaderLane first(a, lane);
  Word4 state = load_state(a.state);
  const u32 epoch = state.x;
  if (state.y != OK) return;
#ifndef PCIEIPC_UNCHECKED
  if (leads) {
    first.send(a, epoch);
#pragma unroll 1
    for (u32 i = lane + lanes; i < a.ranks * HEADER_WORDS; i += lanes) HeaderLane(a, i).send(a, epoch);
  }
#endif
  also.send(epoch);
  if (!leads) {
    block_has_epoch(t, a);
    also.receive();
    return;
  }
  t.barrier(15, all);
  u32 before = epoch;
  if (lane == 0) before = atomic_exch(&a.state->busy, next_epoch(epoch));
  if (t.blocks() > 1) {
    if (lane == 0) {
      while (load_volatile(&a.state->arrived) < t.blocks() - 1)
        if (give_up(a, w, a.rank, WAIT_HEADER, epoch)) break;
      store_volatile(&a.state->arrived, 0u);
    }
  }
#ifndef PCIEIPC_UNCHECKED
  if (before != epoch) fail(a, CONCURRENT, a.rank, WAIT_HEADER, epoch, 0, 0, 0, 0);
  first.check(a, w, epoch);
#pragma unroll 1
  for (u32 i = lane + lanes; i < a.ranks * HEADER_WORDS; i += lanes) HeaderLane(a, i).check(a, w, epoch);
#endif
  // Lane 0 may have no header to wait for.
  warp_sync();
  also.receive();
  if (WHOLE) t.barrier(14, all);
  if (lane == 0) store_volatile(&a.state->epoch, next_epoch(epoch));
}
template <bool WHOLE, class T> PCIEIPC_FN void service(T& t, const Args& a, Watch& w) { service<WHOLE>(t, a, w, Nothing()); }
template <class T> PCIEIPC_FN void data_has_epoch(T& t) { t.arrive(15, t.data_threads() + t.service_threads()); }
template <class T> PCIEIPC_FN void data_is_done(T& t) {
  if (t.block() == 0) t.arrive(14, t.data_threads() + t.service_threads());
}
// How a data warp begins: reads the epoch, and false where the verdict is given. Threads of a block do not all read the same: a verdict may
// come between. So it arrives in any case wherever the service warp, which may have read earlier, waits for it.
template <bool WHOLE, class T> PCIEIPC_FN bool data_begins(T& t, const Args& a, u32& epoch) {
  const Word4 state = load_state(a.state);
  epoch = state.x;
  data_has_epoch(t);
  if (state.y == OK) return true;
  if (WHOLE) data_is_done(t);
  return false;
}

}  // namespace pcieipc
