// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "direction.h"
#include "packet.h"
#include "work.h"

namespace pcieipc_torch {

// Matches sends with receives, and knows who reached a monitored barrier. A send is announced; the receiver, who knows all announcements and all
// that it waits for, grants it when it has found its receive; then both ends carry it, in the order of the grants.
class Post {
 public:
  Post(std::string directory, int rank, int ranks, Clock::time_point deadline);

  ~Post();
  void send(const Tensor& tensor, int to, int tag, Promise work, milliseconds timeout);

  // `from` below 0: from any rank.
  void receive(const Tensor& tensor, int from, int tag, Promise work, milliseconds timeout);

  // The first rank whose process has ended, if there is one; a rank that left in order is none.
  std::optional<Failure> lost();

  // Rank 0 waits for all and says who did not come; the others wait for what it says.
  void monitored_barrier(milliseconds timeout, bool name_all);

 private:
  struct Send {
    Tensor tensor;
    Promise work;
    Clock::time_point deadline;
    milliseconds timeout;
  };
  struct Receive {
    Tensor tensor;
    Promise work;
    Clock::time_point deadline;
    milliseconds timeout;
    int from, tag;
  };
  struct Announced {
    uint64_t arrival, serial, bytes;
    int tag;
  };
  struct Peer {
    Fd socket;
    std::deque<Packet> outbox;
    std::deque<Announced> announced;
    std::map<uint64_t, Send> sends;
    std::unique_ptr<Direction> outward, inward;
    std::optional<Failure> gone;
  };
  struct Barrier {
    std::set<int> here;
    std::optional<bool> verdict;
  };
  struct Ended {
    Promise work;
    Failure failure;
  };

  // A socket to each other rank: the lower ones are called, the higher ones call.
  void meet(Clock::time_point deadline);
  void ring();
  void say(Peer& peer, Packet packet) {
    if (!peer.gone && peer.socket.get() >= 0) peer.outbox.push_back(packet);
  }

  std::string way(int from, int to) const { return directory_ + "-" + std::to_string(from) + "-" + std::to_string(to); }

  void run();
  int next_wait() const;
  void flush();
  void hear(int rank);
  void hear(int rank, Peer& peer, const Packet& packet);
  static Failure mismatch(const std::string& what, int rank, uint64_t ours, uint64_t theirs) {
    return {"Mismatch", what + std::to_string(rank) + ": the tensor has " + std::to_string(ours) + " bytes here and " + std::to_string(theirs) +
                            " there; both ends must have the same shape and type", rank};
  }

  void match(std::vector<Ended>& ended);
  static bool is_lost(const Peer& peer) { return peer.gone.has_value(); }

  void expire(std::vector<Ended>& ended);

  // Why a receive can no longer be served, if so. One from any rank ends with the first that died.
  const Failure* lost_source(int from) const;
  static std::string name(int rank) { return rank < 0 ? "(any)" : std::to_string(rank); }

  static Failure about(const std::string& what, int rank, Failure why) {
    why.text = what + name(rank) + " ended by " + why.status + ": " + why.text;
    return why;
  }

  static Failure late(const std::string& what, int rank, milliseconds timeout, const std::string& why) {
    return {"Timeout", what + name(rank) + " ended by timeout after " + std::to_string(timeout.count()) + " ms: " + why, rank};
  }

  const std::string directory_;
  const int rank_;
  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::list<Receive> receives_;
  std::vector<Ended> refused_;
  std::map<uint64_t, Barrier> barriers_;
  uint64_t next_serial_ = 0, next_arrival_ = 0, next_barrier_ = 0;
  std::optional<Clock::time_point> closing_;
  Fd wake_;
  std::thread thread_;
};

}  // namespace pcieipc_torch
