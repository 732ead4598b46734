// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "callbacks.h"
#include "failure.h"
#include "types.h"

namespace pcieipc_torch {

class PcieWork final : public c10d::Work {
 public:
  PcieWork(OpType op, const char* title, const Tensors& inputs, Tensors outputs)
      : Work(-1, op, title, std::make_optional(inputs)),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  bool wait(milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto done = [this] { return completed_; };
    if (timeout <= milliseconds::zero()) {
      cv_.wait(lock, done);
    } else if (!cv_.wait_for(lock, timeout, done)) {
      lock.unlock();
      refuse("wait ended by timeout after " + std::to_string(timeout.count()) + " ms: the collective goes on", "Timeout");
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  void synchronize() override {}

  void abort() override { refuse("not supported: aborting one collective; abort the group"); }

  Tensors result() override { return outputs_; }

  int sourceRank() const override { return source_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(future_mutex_);
    wanted_ = true;
    return future_;
  }

  void complete(const std::exception_ptr& error, int source = -1) {
    source_ = source;
    bool asked;
    {
      std::lock_guard<std::mutex> lock(future_mutex_);
      asked = wanted_;
      // Nobody has seen it, so it has no callbacks.
      if (!asked) mark(error);
    }
    if (asked) {
      auto self = c10::intrusive_ptr<PcieWork>::unsafe_reclaim_from_nonowning(this);
      Callbacks::get().run([self, error] { self->mark(error); });
    }
    finish(error);
  }

 private:
  void mark(const std::exception_ptr& error) {
    if (error) future_->setError(error);
    else future_->markCompleted(c10::IValue(outputs_));
  }

  Tensors outputs_;
  std::mutex future_mutex_;
  bool wanted_ = false;
  std::atomic<int> source_{-1};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using Promise = c10::intrusive_ptr<PcieWork>;

}  // namespace pcieipc_torch
