// SPDX-License-Identifier: MIT OR Apache-2.0
// What ranks say to each other about messages and monitored barriers, and over what.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "failure.h"

namespace pcieipc_torch {

enum class Kind : uint32_t { Hello = 0x70636965, Announce, Withdraw, Grant, Refuse, Here, Passed, Failed, Bye };

// What ranks say to each other about messages and monitored barriers.
struct Packet {
  Kind kind;
  int32_t tag;
  uint64_t serial, bytes;
};

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] inline void system_failed(const std::string& what) {
  const int error = errno;
  refuse(what + ": " + std::strerror(error), "System");
}

}  // namespace pcieipc_torch
