// SPDX-License-Identifier: MIT OR Apache-2.0
// How the ranks of a group come to have a socket to each other one.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "post.h"

namespace pcieipc_torch {

void Post::meet(Clock::time_point deadline) {
  const auto path_of = [this](int rank) { return directory_ + "/post-" + std::to_string(rank); };
  const auto address_of = [&](int rank) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const auto path = path_of(rank);
    if (path.size() >= sizeof address.sun_path) refuse(path + " is too long for a Unix socket: set XDG_RUNTIME_DIR to a shorter folder");
    std::memcpy(address.sun_path, path.c_str(), path.size());
    return address;
  };
  const auto make = [] {
    Fd made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (made.get() < 0) system_failed("socket");
    return made;
  };
  const auto late = [&](const char* what) {
    refuse("rank " + std::to_string(rank_) + " waited for " + what + " until the timeout: look at what the other ranks are doing", "Meeting");
  };
  const int ranks = static_cast<int>(peers_.size());
  Fd listener = make();
  const auto own = address_of(rank_);
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) != 0) system_failed("bind " + path_of(rank_));
  if (listen(listener.get(), ranks + 1) != 0) system_failed("listen");
  for (int lower = 0; lower < rank_; ++lower) {
    const auto address = address_of(lower);
    for (;;) {
      Fd made = make();
      if (connect(made.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
        const Packet hello{Kind::Hello, rank_, 0, 0};
        if (::send(made.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) system_failed("send");
        peers_[lower].socket = std::move(made);
        break;
      }
      if (errno != ENOENT && errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) system_failed("connect " + path_of(lower));
      if (Clock::now() > deadline) late("a lower rank to listen");
      std::this_thread::sleep_for(milliseconds(2));
    }
  }
  const auto readable = [&](int fd, const char* what) {
    pollfd waiting{fd, POLLIN, 0};
    while (poll(&waiting, 1, static_cast<int>(std::min<uint32_t>(ms_until(deadline), 1000))) <= 0)
      if (Clock::now() > deadline) late(what);
  };
  for (int missing = ranks - 1 - rank_; missing > 0;) {
    readable(listener.get(), "a higher rank to call");
    Fd made(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (made.get() < 0) continue;
    ucred who{};
    socklen_t length = sizeof who;
    if (getsockopt(made.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0 || who.uid != geteuid()) continue;
    readable(made.get(), "a rank that called to say who it is");
    Packet hello{};
    if (recv(made.get(), &hello, sizeof hello, 0) != sizeof hello || hello.kind != Kind::Hello) continue;
    if (hello.tag <= rank_ || hello.tag >= ranks || peers_[hello.tag].socket.get() >= 0) continue;
    peers_[hello.tag].socket = std::move(made);
    --missing;
  }
  unlink(path_of(rank_).c_str());
}

}  // namespace pcieipc_torch
