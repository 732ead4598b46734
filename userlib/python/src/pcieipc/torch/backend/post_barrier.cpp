// SPDX-License-Identifier: MIT OR Apache-2.0
#include <chrono>

#include "post.h"

namespace pcieipc_torch {

void Post::monitored_barrier(milliseconds timeout, bool name_all) {
  const auto deadline = Clock::now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto serial = next_barrier_++;
  auto& state = barriers_[serial];
  if (rank_ != 0) {
    if (!peers_[0].gone) say(peers_[0], {Kind::Here, 0, serial, 0});
    lock.unlock();
    ring();
    lock.lock();
    const bool told = changed_.wait_until(lock, deadline, [&] { return state.verdict || peers_[0].gone; });
    const auto verdict = state.verdict;
    const auto gone = peers_[0].gone;
    barriers_.erase(serial);
    lock.unlock();
    if (verdict && *verdict) return;
    const std::string text = "[Rank " + std::to_string(rank_) + "]: Rank " + std::to_string(rank_) +
                             " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0."
                             " Please check rank 0 logs for faulty rank.";
    if (verdict || !told) std::rethrow_exception(as_exception({verdict ? "Aborted" : "Timeout", text, 0}));
    auto failure = *gone;
    failure.text = text + " " + failure.text;
    std::rethrow_exception(as_exception(failure));
  }
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int peer = 1; peer < static_cast<int>(peers_.size()); ++peer)
      if (state.here.count(peer) == 0) ranks.push_back(peer);
    return ranks;
  };
  const auto nobody_more = [&] {
    for (int peer : missing())
      if (!peers_[peer].gone) return false;
    return true;
  };
  if (!changed_.wait_until(lock, deadline, nobody_more) && timeout <= milliseconds::zero()) {
    // No time to find out who comes.
    lock.unlock();
    std::rethrow_exception(as_exception({"Timeout", "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms", 0}));
  }
  const auto late = missing();
  for (int peer : state.here) say(peers_[peer], {late.empty() ? Kind::Passed : Kind::Failed, 0, serial, 0});
  barriers_.erase(serial);
  lock.unlock();
  ring();
  if (late.empty()) return;
  std::string names;
  for (int peer : late) {
    if (!names.empty() && !name_all) break;
    names += (names.empty() ? "" : ", ") + std::to_string(peer);
  }
  const std::string text = "[Rank 0]: " + std::string(name_all ? "Ranks " : "Rank ") + names + " failed to pass monitoredBarrier in " +
                           std::to_string(timeout.count()) + " ms";
  std::rethrow_exception(as_exception({"Timeout", text, late.front()}));
}

}  // namespace pcieipc_torch
