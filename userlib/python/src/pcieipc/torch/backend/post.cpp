// SPDX-License-Identifier: MIT OR Apache-2.0
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "post.h"

namespace pcieipc_torch {

Post::Post(std::string directory, int rank, int ranks, Clock::time_point deadline)
    : directory_(std::move(directory)), rank_(rank), peers_(ranks), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_.get() < 0) system_failed("eventfd");
  meet(deadline);
  thread_ = std::thread([this] { run(); });
}

Post::~Post() {
  if (getpid() != process_) {
    thread_.detach();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& peer : peers_) say(peer, {Kind::Bye, 0, 0, 0});
    closing_ = Clock::now() + std::chrono::seconds(1);
  }
  ring();
  thread_.join();
  std::vector<Promise> left;
  for (auto& peer : peers_)
    for (auto& [serial, send] : peer.sends) left.push_back(send.work);
  for (auto& receive : receives_) left.push_back(receive.work);
  for (auto& work : left) work->complete(as_exception({"Aborted", "the message was not matched before this rank left the group"}));
}

void Post::send(const Tensor& tensor, int to, int tag, Promise work, milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto& peer = peers_.at(to);
  if (peer.gone) {
    const auto failure = *peer.gone;
    lock.unlock();
    work->complete(as_exception(failure));
    return;
  }
  const auto serial = next_serial_++;
  peer.sends.emplace(serial, Send{tensor, std::move(work), Clock::now() + timeout, timeout});
  say(peer, {Kind::Announce, tag, serial, static_cast<uint64_t>(tensor.nbytes())});
  lock.unlock();
  ring();
}

void Post::receive(const Tensor& tensor, int from, int tag, Promise work, milliseconds timeout) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    receives_.push_back({tensor, std::move(work), Clock::now() + timeout, timeout, from, tag});
  }
  ring();
}

void Post::ring() {
  const uint64_t one = 1;
  // It is full only when it is signalled already.
  [[maybe_unused]] auto written = write(wake_.get(), &one, sizeof one);
}

void Post::run() {
  for (;;) {
    std::vector<pollfd> waiting{{wake_.get(), POLLIN, 0}};
    std::vector<int> ranks{-1};
    int wait_ms;
    std::vector<Ended> ended;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      flush();
      match(ended);
      expire(ended);
      flush();
      bool unsaid = false;
      for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
        auto& peer = peers_[rank];
        if (peer.socket.get() < 0 || peer.gone) continue;
        const bool more = !peer.outbox.empty();
        unsaid |= more;
        waiting.push_back({peer.socket.get(), static_cast<short>(POLLIN | (more ? POLLOUT : 0)), 0});
        ranks.push_back(rank);
      }
      if (closing_ && (!unsaid || Clock::now() >= *closing_)) return;
      wait_ms = closing_ ? 50 : next_wait();
    }
    for (auto& [work, failure] : ended) work->complete(as_exception(failure));
    changed_.notify_all();
    if (!ended.empty()) continue;
    if (poll(waiting.data(), waiting.size(), wait_ms) < 0 && errno != EINTR) wait_ms = 50;
    uint64_t count;
    [[maybe_unused]] auto drained = read(wake_.get(), &count, sizeof count);
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 1; i < waiting.size(); ++i)
      if (waiting[i].revents & (POLLIN | POLLHUP | POLLERR)) hear(ranks[i]);
  }
}

void Post::flush() {
  for (auto& peer : peers_) {
    while (!peer.outbox.empty() && !peer.gone) {
      const auto& packet = peer.outbox.front();
      if (::send(peer.socket.get(), &packet, sizeof packet, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof packet) break;
      peer.outbox.pop_front();
    }
  }
}

void Post::hear(int rank) {
  auto& peer = peers_[rank];
  while (!peer.gone) {
    Packet packet{};
    const auto got = recv(peer.socket.get(), &packet, sizeof packet, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
      peer.gone = Failure{"PeerDied", "rank " + std::to_string(rank) + " died; make a new group without it", rank};
      return;
    }
    if (got != sizeof packet) {
      peer.gone = Failure{"Corrupt", "rank " + std::to_string(rank) + " sent a packet of " + std::to_string(got) + " bytes", rank};
      return;
    }
    hear(rank, peer, packet);
  }
}

void Post::hear(int rank, Peer& peer, const Packet& packet) {
  switch (packet.kind) {
    case Kind::Announce: peer.announced.push_back({next_arrival_++, packet.serial, packet.bytes, packet.tag}); break;
    case Kind::Withdraw: {
      auto& all = peer.announced;
      all.erase(std::remove_if(all.begin(), all.end(), [&](const auto& a) { return a.serial == packet.serial; }), all.end());
      break;
    }
    case Kind::Grant: {
      const auto found = peer.sends.find(packet.serial);
      // Withdrawn in the meantime: the receiver's own deadline ends its wait.
      if (found == peer.sends.end()) break;
      if (!peer.outward) peer.outward = std::make_unique<Direction>(way(rank_, rank), rank_, rank, true);
      peer.outward->carry(std::move(found->second.tensor), std::move(found->second.work), Clock::now() + found->second.timeout);
      peer.sends.erase(found);
      break;
    }
    case Kind::Refuse: {
      const auto found = peer.sends.find(packet.serial);
      if (found == peer.sends.end()) break;
      refused_.push_back({std::move(found->second.work), mismatch("send to rank ", rank, static_cast<uint64_t>(found->second.tensor.nbytes()), packet.bytes)});
      peer.sends.erase(found);
      break;
    }
    case Kind::Here:
      if (packet.serial < next_barrier_ && barriers_.count(packet.serial) == 0) say(peer, {Kind::Failed, 0, packet.serial, 0});
      else barriers_[packet.serial].here.insert(rank);
      break;
    case Kind::Passed: case Kind::Failed: {
      const auto found = barriers_.find(packet.serial);
      if (found != barriers_.end()) found->second.verdict = packet.kind == Kind::Passed;
      break;
    }
    case Kind::Bye:
      peer.gone = Failure{"Aborted", "rank " + std::to_string(rank) + " has left the group", rank};
      break;
    default:
      peer.gone = Failure{"Corrupt", "rank " + std::to_string(rank) + " sent a packet of an unknown kind", rank};
  }
}

}  // namespace pcieipc_torch
