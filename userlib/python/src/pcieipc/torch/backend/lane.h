// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "types.h"

namespace pcieipc_torch {

// A thread that does one thing after the other.
class Lane {
 public:
  Lane() : process_(getpid()), thread_([this] { run(); }) {}

  // Does what was asked for, then ends. A child made by fork has no such thread.
  ~Lane() {
    if (getpid() != process_) {
      thread_.detach();
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void add(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }

  // Whether all that was asked for is done, at the latest after this time.
  bool is_idle_within(milliseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, patience, [this] { return tasks_.empty() && !busy_; });
  }

 private:
  void run() {
    at::NoGradGuard no_grad;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  const pid_t process_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false, busy_ = false;
  std::thread thread_;
};

}  // namespace pcieipc_torch
