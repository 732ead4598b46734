// SPDX-License-Identifier: MIT OR Apache-2.0
// The kernels' protocol run by threads of a processor, with delays at random. Prints `ok` and the number of calls.
//
// threads SEED CALLS [late|short|dead|engine|shares|direct|trace]
//   late   one rank starts each call late
//   short  one rank calls with another length: all must answer Mismatch or Aborted
//   dead   one rank does not call: the others must answer Timeout or Aborted
//   engine  only calls that copy engines serve, of more than their staging
//   shares  only two-shot calls, of three to five ranks of which one lags
//   direct  only calls of registered tensors, of two to five ranks of which one lags
//   trace   short calls; prints what each call was and its steps (a build with PCIEIPC_TRACE)
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "direct.h"
#include "engine.h"
#include "flow.h"
#include "shares.h"

namespace pcieipc {
thread_local u64 random_state = 1;
u64 step_clock = 1;
thread_local u64 pause_seldom = 4096;  // a thread sleeps at one of so many looks
static u64 random_word() {
  random_state ^= random_state << 13; random_state ^= random_state >> 7; random_state ^= random_state << 17;
  return random_state;
}
void host_pause() {
  if (random_word() % 64 == 0) std::this_thread::yield();
  if (random_word() % pause_seldom == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_word() % 200));
}
u64 now_ns() { return (u64)std::chrono::steady_clock::now().time_since_epoch().count(); }
static std::mutex line_locks[64];
void host_whole(void* p, Word4* v, bool store) {
  // The words are atomic on their own, so that the lock is not what orders them for the sanitizer.
  u64* q = (u64*)p;
  std::lock_guard<std::mutex> lock(line_locks[((u64)p >> 4) % 64]);
  if (store) {
    __atomic_store_n(q, (u64)v->x | (u64)v->y << 32, __ATOMIC_RELAXED);
    __atomic_store_n(q + 1, (u64)v->z | (u64)v->w << 32, __ATOMIC_RELAXED);
  } else {
    const u64 low = __atomic_load_n(q, __ATOMIC_RELAXED), high = __atomic_load_n(q + 1, __ATOMIC_RELAXED);
    *v = Word4{(u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32)};
  }
}
}  // namespace pcieipc
using namespace pcieipc;

// A named barrier of a block: some only arrive, others wait too.
struct Barrier {
  std::mutex lock;
  std::condition_variable changed;
  u32 count = 0, turn = 0;
  void pass(u32 n, bool wait) {
    std::unique_lock<std::mutex> held(lock);
    const u32 now = turn;
    if (++count == n) { count = 0; turn++; changed.notify_all(); return; }
    if (wait) changed.wait(held, [&] { return turn != now; });
  }
};
struct Block { Barrier barriers[16]; StreamShared shared; FlowShared flow; SharesShared shares; DirectShared direct; };

// A thread of a block, in the place of `Gpu`.
struct Host {
  Block* of;
  u32 index, number, count, data;
  u32 thread() const { return index; }
  u32 block() const { return number; }
  u32 blocks() const { return count; }
  u32 service_threads() const { return 1; }
  u32 data_threads() const { return data; }
  void barrier(u32 id, u32 n) const { of->barriers[id].pass(n, true); }
  void arrive(u32 id, u32 n) const { of->barriers[id].pass(n, false); }
  void begin(const Args&) const {}
};

constexpr u32 BLOCKS = 2;
typedef int Element;

struct Rank {
  State state;
  std::vector<u8> mailbox;
  std::vector<Element> input, output;
  std::vector<u8> trace;
  Block blocks[BLOCKS];
};

enum Kernel { PAIR_TWO, PAIR_MANY, WHOLE_TWO, WHOLE_MANY, FLOW_TWO, WIDE_TWO, STREAM_TWO, STREAM_MANY, ENGINE_TWO, SHARES_MANY, DIRECT_MANY, KERNELS };
// The names of the kernels whose plans these realise.
static const char* const NAMES[KERNELS] = {"pair_sum_two_u2", "pair_any_many_u1", "whole_sum_two_u2", "whole_any_many_u1", "pair_flow_sum_two_p4u2",
    "whole_wide_sum_two_u1", "stream_sum_two_u4", "stream_any_many_u1", "engine_sum_two_u4", "shares_any_many_u1", "direct_any_many_u1"};
static bool for_many(Kernel k) { return k == PAIR_MANY || k == WHOLE_MANY || k == STREAM_MANY || k == SHARES_MANY || k == DIRECT_MANY; }

static void run(Host t, const Args& a, Kernel kernel) {
  switch (kernel) {
    case PAIR_TWO: return oneshot_lines<Element, true, Pair, 2, 2>(t, a);
    case PAIR_MANY: return oneshot_lines<Element, false, Pair, 0, 1>(t, a);
    case WHOLE_TWO: return oneshot_lines<Element, true, Whole, 2, 4>(t, a);
    case WHOLE_MANY: return oneshot_lines<Element, false, Whole, 0, 1>(t, a);
    case FLOW_TWO: return oneshot_flow<Element, true, Pair, 3, 2>(t, a, t.of->flow);
    case WIDE_TWO: return oneshot_lines<Element, true, Whole, 2, 1, true>(t, a);
    case ENGINE_TWO: return engine_stream<Element, true, 2>(t, a, t.of->shared);
    case SHARES_MANY: return shares_stream<Element, false, 2>(t, a, t.of->shares);
    case DIRECT_MANY: return direct_reads<Element, false, 2>(t, a, t.of->direct);
    case STREAM_TWO: return oneshot_stream<Element, true, 2, 2>(t, a, t.of->shared);
    default: return oneshot_stream<Element, false, 0, 1>(t, a, t.of->shared);
  }
}

// What a copy engine does of a call, and the gates before its copies.
static void copy_engine(const Args& a) {
  static Block nobody;
  const Host gate{&nobody, 0, 0, 1, 0};
  const u64 whole = a.bytes & ~(u64)15, chunk = a.layout.chunk;
  for (u32 j = 0; j * chunk < a.bytes; j++) {
    if (j >= 2) {
      Args g = a;
      g.piece = j;
      engine_gate(gate, g);
    }
    u64 i = j * chunk > a.prefix ? j * chunk : a.prefix;
    u8* to = staging_of(a.tx[1 - a.rank], a.layout, 1 - a.rank, a.rank);
    for (; i < whole && i < (j + 1) * chunk; i += 16) {
      step(a, STEP_SEND, 1 - a.rank, a.state->engine_epoch, i, to + i % (2 * chunk), a.tx[1 - a.rank]);
      store_line(to + i % (2 * chunk), load_passing16(a.in + i));
    }
  }
}

constexpr u32 ROOM = 1 << 16;

int main(int argc, char** argv) {
  const u64 seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const u32 calls = argc > 2 ? (u32)std::atoi(argv[2]) : 50;
  const std::string mode = argc > 3 ? argv[3] : "";
  random_state = seed * 0x9e3779b97f4a7c15ull | 1;
  Control control;
  std::memset(&control, 0, sizeof control);
  const bool traced = mode == "trace";
  const u32 ranks = mode == "shares" ? 3 + (u32)(seed % 3) : traced || mode == "direct" ? 2 + (u32)(seed % 4) : mode == "" && seed % 3 == 0 ? 3 : 2;
  for (u32 r = 0; r < ranks; r++) control.deadline_ns[r] = 60000000000ull;
  Layout layout;
  std::memset(&layout, 0, sizeof layout);
  layout.flags = HEADERS_BYTES;
  layout.lines = 4096; layout.lines_bytes = 16384;
  layout.slot_bytes = 256;
  layout.slots = layout.lines + layout.lines_bytes;
  layout.sender = layout.slots + BLOCKS * SLOTS * layout.slot_bytes;
  layout.half = layout.sender * (ranks - 1);
  layout.staging = 2 * layout.half; layout.chunk = 4096;
  const u32 empty[4] = {0x9e3779b9, 0x7f4a7c15, 0xf39cc060, 0x5cedc835};
  std::vector<Rank> all(ranks);
  for (auto& rank : all) {
    std::memset(&rank.state, 0, sizeof rank.state);
    // Near the wrap of the epoch.
    rank.state.epoch = rank.state.busy = seed % 2 ? 0xfffffff7u : 1;
    rank.mailbox.assign(2 * layout.half + (ranks - 1) * 2 * layout.chunk, 0);
    for (u64 part = 0; part < 2 * (ranks - 1); part++)
      for (u64 i = 0; i < layout.lines_bytes; i += 16) std::memcpy(&rank.mailbox[part * layout.sender + layout.lines + i], empty, 16);
    for (u64 i = 0; i < (ranks - 1) * 2 * layout.chunk; i += 16) std::memcpy(&rank.mailbox[layout.staging + i], empty, 16);
    if (traced) {
      rank.trace.assign(sizeof(Trace) + ROOM * sizeof(Step), 0);
      rank.state.trace = (Trace*)rank.trace.data();
      rank.state.trace->room = ROOM;
    }
  }
  u32 failures = 0;
  for (u32 call = 0; call < calls && failures == 0; call++) {
    const bool two = ranks == 2;
    Kernel kernel;
    do kernel = (Kernel)(random_word() % KERNELS); while (!two && !for_many(kernel));
    if (mode == "engine") kernel = ENGINE_TWO;
    if (mode == "shares") kernel = SHARES_MANY;
    if (mode == "direct") kernel = DIRECT_MANY;
    const u32 most = traced && kernel == ENGINE_TWO ? 4000 : traced ? 1500 : kernel >= STREAM_TWO ? 20000 : 2000;
    // With copy engines alone every call uses its places of the staging again: more than two chunks.
    const u32 least = mode == "engine" ? 2 * (u32)layout.chunk / sizeof(Element) : 0;
    u32 count = least + (u32)(random_word() % (most - least));
    // Often with a last chunk in which not every block has a tile.
    const u32 per_chunk = (u32)layout.chunk / sizeof(Element);
    if (mode == "engine" && call % 2) count = count / per_chunk * per_chunk + 1 + (u32)(random_word() % 64);
    const u32 op = for_many(kernel) ? (u32)(random_word() % 5) : 0;
    const u32 absent = mode == "dead" && call == calls / 2 ? ranks - 1 : ranks;
    const bool differs = mode == "short" && call == calls / 2;
    // The verdict comes while the data threads of a block have not read the state and its service thread has.
    const bool between = differs && seed % 2 == 0;
    if (absent < ranks)
      for (u32 r = 0; r < ranks; r++) control.deadline_ns[r] = 300000000ull;
    for (auto& rank : all) {
      rank.input.resize(count); rank.output.assign(count, 0x7fc17fc1);
      for (auto& e : rank.input) e = (int)(random_word() % 2000) - 1000;
    }
    std::vector<Args> args(ranks);
    std::vector<u64> inputs(MAX_RANKS), outputs(MAX_RANKS);
    const u64 prefix = random_word() % 3 * 512;
    std::vector<std::thread> threads;
    std::vector<Block*> all_blocks;
    for (auto& rank : all) all_blocks.push_back(rank.blocks);
    for (u32 r = 0; r < ranks; r++) {
      // In place, as below.
      if (call % 3 == 2) all[r].output = all[r].input;
      outputs[r] = (u64)all[r].output.data();
      inputs[r] = call % 3 == 2 ? outputs[r] : (u64)all[r].input.data();
    }
    for (u32 r = 0; r < ranks; r++) {
      Args& a = args[r];
      std::memset(&a, 0, sizeof a);
      a.in_of = inputs.data(); a.out_of = outputs.data();
      a.state = &all[r].state; a.control = &control;
      // Every third call is in place.
      a.out = (u8*)all[r].output.data(); a.in = call % 3 == 2 ? a.out : (const u8*)all[r].input.data();
      a.bytes = (differs && r == 1 ? count / 2 : count) * sizeof(Element);
      a.rank = r; a.ranks = ranks; a.op = op; a.flags = ARG_ALIGNED; a.layout = layout;
      a.header[0] = op; a.header[1] = (u32)a.bytes; a.header[3] = kernel;
      a.push_warps = kernel == FLOW_TWO ? 1 : 2; a.piece = kernel >= STREAM_TWO ? 256 : 0;
      a.prefix = prefix < a.bytes ? prefix : a.bytes & ~(u64)15;
      std::memcpy(a.empty, empty, 16);
      for (u32 j = 0; j < ranks; j++) { a.tx[j] = all[j].mailbox.data(); a.rx[j] = all[r].mailbox.data(); }
      if (r == absent) continue;
      const u32 data = kernel == SHARES_MANY ? 2 + 4 + 4 : kernel == DIRECT_MANY ? 2 + 4 : kernel >= STREAM_TWO ? 2 + 2 + 3 : 3;
      if (kernel == ENGINE_TWO && r != absent) {
        const u64 own = random_word() | 1;
        threads.emplace_back([=, &a] {
          random_state = own;
          static Block nobody[2];
          Args g = a;
          g.piece = 0;
          engine_gate(Host{&nobody[r], 0, 0, 1, 0}, g);
          std::thread engine([=, &a] { random_state = own + 2; copy_engine(a); });
          std::vector<std::thread> kernel_threads;
          for (u32 b = 0; b < BLOCKS; b++)
            for (u32 i = 0; i <= data; i++) {
              Host t{&all_blocks[r][b], i, b, BLOCKS, data};
              // The first block lags behind the others at times.
              const u64 seldom = mode == "engine" && b == 0 && call % 4 > 1 ? 128 : 4096;
              const u64 late = between && r == 0 && b == 1 && i < data ? 20000 : 0;
              kernel_threads.emplace_back([=, &a] {
                random_state = own + 4 + 2 * (b * 32 + i);
                pause_seldom = seldom;
                if (late) std::this_thread::sleep_for(std::chrono::microseconds(late));
                run(t, a, kernel);
              });
            }
          for (auto& t : kernel_threads) t.join();
          engine.join();
        });
        continue;
      }
      const u64 comes_late = mode == "late" && r == call % ranks ? random_word() % 3000 : 0;
      const u64 seldom = (mode == "shares" || mode == "direct") && r == call % ranks ? 128 : 4096;
      for (u32 b = 0; b < BLOCKS; b++)
        for (u32 i = 0; i <= data; i++) {
          const u64 own = random_word() | 1;
          Host t{&all[r].blocks[b], i, b, BLOCKS, data};
          const u64 late = between && r == 0 && b == 1 && i < data ? 20000 : comes_late;
          threads.emplace_back([=, &a] {
            random_state = own;
            pause_seldom = seldom;
            if (late) std::this_thread::sleep_for(std::chrono::microseconds(late));
            run(t, a, kernel);
          });
        }
    }
    for (auto& t : threads) t.join();
    if (traced) {
      std::printf("call %s %u %llu %u %u %llu %d\n", NAMES[kernel], ranks, args[0].bytes, BLOCKS, args[0].piece, args[0].prefix, args[0].in == args[0].out);
      for (u32 r = 0; r < ranks; r++) {
        Trace* trace = all[r].state.trace;
        std::printf("rank %u %u\n", r, trace->next);
        for (u32 i = 0; i < trace->next && i < ROOM; i++) {
          const Step& s = trace->steps[i];
          std::printf("%u %u %u %u %llu %llu %llu\n", s.verb, s.peer, s.epoch, s.bytes, s.at, s.place, s.time);
        }
        trace->next = 0;
      }
    }
    for (u32 r = 0; r < ranks; r++) {
      const u32 dead = all[r].state.dead;
      if (absent < ranks || differs) {
        const bool good = r == absent || (differs ? dead == MISMATCH || dead == ABORTED : dead == TIMEOUT || dead == ABORTED);
        if (!good) { std::printf("rank %u answered %u\n", r, dead); return 1; }
        if (r == ranks - 1) { std::printf("ok %u\n", call + 1); return 0; }
        continue;
      }
      if (dead) { std::printf("call %u: rank %u failed with %u\n", call, r, dead); failures++; }
      for (u32 i = 0; i < count; i++) {
        u32 want = 0;
        int best = all[0].input[i];
        u32 product = 1;
        for (auto& rank : all) {
          want += (u32)rank.input[i];
          product *= (u32)rank.input[i];
          if (op == MINIMUM ? rank.input[i] < best : rank.input[i] > best) best = rank.input[i];
        }
        const int right = op == SUM ? (int)want : op == AVERAGE ? (int)want / (int)ranks : op == PRODUCT ? (int)product : best;
        if (all[r].output[i] != right) {
          std::printf("call %u kernel %d op %u: rank %u element %u of %u is %d, not %d\n", call, (int)kernel, op, r, i, count, all[r].output[i], right);
          failures++;
          break;
        }
      }
    }
  }
  if (failures == 0) std::printf("ok %u\n", calls);
  return failures != 0;
}
