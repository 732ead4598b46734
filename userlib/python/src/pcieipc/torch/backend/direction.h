// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <pcieipc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "failure.h"
#include "lane.h"
#include "work.h"

namespace pcieipc_torch {

// The way of messages from one rank to another: a group of those two, made when the first message has been matched.
class Direction {
 public:
  Direction(std::string directory, int from, int to, bool sending)
      : directory_(std::move(directory)), from_(from), to_(to), sending_(sending) {}

  void carry(Tensor tensor, Promise work, Clock::time_point deadline) {
    lane_.add([this, tensor = std::move(tensor), work = std::move(work), deadline]() mutable {
      std::exception_ptr error;
      try {
        if (tensor.nbytes() > 0) transfer(tensor, deadline);
      } catch (const Refused& refused) {
        error = as_exception(refused.failure);
      } catch (...) {
        error = std::current_exception();
      }
      tensor = Tensor();
      work->complete(error, sending_ ? -1 : from_);
    });
  }

 private:
  void check(pcieipc_status status, uint32_t timeout_ms) {
    if (status == PCIEIPC_STATUS_OK) return;
    auto failure = last_failure(status, (sending_ ? "send to rank " : "receive from rank ") + std::to_string(sending_ ? to_ : from_), timeout_ms);
    // The library counts in the pair.
    failure.text += " (of this pair rank 0 is the group's " + std::to_string(from_) + " and rank 1 its " + std::to_string(to_) + ")";
    if (failure.rank == 0 || failure.rank == 1) failure.rank = failure.rank == 0 ? from_ : to_;
    throw Refused{failure};
  }

  void transfer(const Tensor& tensor, Clock::time_point deadline) {
    if (!pair_) {
      pcieipc_options options{};
      options.size = sizeof options;
      options.directory = directory_.c_str();
      options.rank = sending_ ? 0 : 1;
      options.ranks = 2;
      options.meeting_timeout_ms = std::min<uint32_t>(ms_until(deadline), 30'000);
      pcieipc_group* made = nullptr;
      const auto met = pcieipc_group_meet(&options, &made);
      pair_.reset(made);
      // The sender has answered that it is past the directory.
      if (!sending_) {
        for (const char* name : {"/rank-0.lock", "/rank-1.lock"}) unlink((directory_ + name).c_str());
        rmdir(directory_.c_str());
      }
      check(met, options.meeting_timeout_ms);
    }
    Tensor flat = tensor.is_contiguous() ? tensor : sending_ ? tensor.contiguous() : at::empty_like(tensor, at::MemoryFormat::Contiguous);
    const auto ms = ms_until(deadline);
    const auto bytes = static_cast<size_t>(flat.nbytes());
    if (sending_) {
      check(pcieipc_send(pair_.get(), flat.data_ptr(), bytes, PCIEIPC_TYPE_U8, 1, ms), ms);
    } else {
      check(pcieipc_receive(pair_.get(), flat.data_ptr(), bytes, PCIEIPC_TYPE_U8, 0, ms), ms);
      if (!flat.is_same(tensor)) tensor.copy_(flat);
    }
  }

  const std::string directory_;
  const int from_, to_;
  const bool sending_;
  Group pair_;
  // Ends before the pair does.
  Lane lane_;
};

}  // namespace pcieipc_torch
