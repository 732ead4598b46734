// SPDX-License-Identifier: MIT OR Apache-2.0
// Which send belongs to which receive, and what ends without one.
#include <algorithm>

#include "post.h"

namespace pcieipc_torch {

void Post::match(std::vector<Ended>& ended) {
  std::move(refused_.begin(), refused_.end(), std::back_inserter(ended));
  refused_.clear();
  for (auto at = receives_.begin(); at != receives_.end();) {
    int source = -1;
    std::deque<Announced>::iterator best;
    for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
      if (at->from >= 0 && at->from != rank) continue;
      auto& all = peers_[rank].announced;
      const auto found = std::find_if(all.begin(), all.end(), [&](const auto& a) { return a.tag == at->tag; });
      if (found != all.end() && !is_lost(peers_[rank]) && (source < 0 || found->arrival < best->arrival)) source = rank, best = found;
    }
    if (source < 0) {
      ++at;
      continue;
    }
    auto& peer = peers_[source];
    const auto bytes = static_cast<uint64_t>(at->tensor.nbytes());
    if (best->bytes == bytes) {
      say(peer, {Kind::Grant, 0, best->serial, bytes});
      if (!peer.inward) peer.inward = std::make_unique<Direction>(way(source, rank_), source, rank_, false);
      peer.inward->carry(std::move(at->tensor), std::move(at->work), Clock::now() + at->timeout);
    } else {
      say(peer, {Kind::Refuse, 0, best->serial, bytes});
      ended.push_back({std::move(at->work), mismatch("receive from rank ", source, bytes, best->bytes)});
    }
    peer.announced.erase(best);
    at = receives_.erase(at);
  }
}

void Post::expire(std::vector<Ended>& ended) {
  const auto now = Clock::now();
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    auto& peer = peers_[rank];
    for (auto at = peer.sends.begin(); at != peer.sends.end();) {
      if (!peer.gone && at->second.deadline > now) {
        ++at;
        continue;
      }
      if (peer.gone) {
        ended.push_back({std::move(at->second.work), about("send to rank ", rank, *peer.gone)});
      } else {
        say(peer, {Kind::Withdraw, 0, at->first, 0});
        ended.push_back({std::move(at->second.work), late("send to rank ", rank, at->second.timeout, "it did not receive")});
      }
      at = peer.sends.erase(at);
    }
  }
  for (auto at = receives_.begin(); at != receives_.end();) {
    const auto* gone = lost_source(at->from);
    if (gone == nullptr && at->deadline > now) {
      ++at;
      continue;
    }
    ended.push_back({std::move(at->work), gone != nullptr ? about("receive from rank ", at->from, *gone)
                                                           : late("receive from rank ", at->from, at->timeout, "it did not send")});
    at = receives_.erase(at);
  }
}

const Failure* Post::lost_source(int from) const {
  if (from >= 0) return peers_[from].gone ? &*peers_[from].gone : nullptr;
  bool all = true;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (rank == rank_) continue;
    const auto& gone = peers_[rank].gone;
    if (gone && gone->status != "Aborted") return &*gone;
    all &= gone.has_value();
  }
  for (int rank = 0; all && rank < static_cast<int>(peers_.size()); ++rank)
    if (peers_[rank].gone) return &*peers_[rank].gone;
  return nullptr;
}

std::optional<Failure> Post::lost() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& peer : peers_)
    if (peer.gone && peer.gone->status != "Aborted") return peer.gone;
  return std::nullopt;
}

int Post::next_wait() const {
  auto next = Clock::time_point::max();
  for (const auto& peer : peers_)
    for (const auto& [serial, send] : peer.sends) next = std::min(next, send.deadline);
  for (const auto& receive : receives_) next = std::min(next, receive.deadline);
  return next == Clock::time_point::max() ? -1 : static_cast<int>(std::min<uint32_t>(ms_until(next) + 1, 60'000));
}

}  // namespace pcieipc_torch
