// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace pcieipc_torch {

// Threads that run the callbacks of futures. A callback may ask for a further collective and wait for it, so it must not run on a group's own
// thread; and there is always one more thread than callbacks that wait.
class Callbacks {
 public:
  static Callbacks& get() {
    static std::mutex mutex;
    static Callbacks* current = nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    // Threads do not outlive a fork; and nothing here is ever destroyed, because threads may use it until the process ends.
    if (current == nullptr || current->process_ != getpid()) current = new Callbacks;
    return *current;
  }

  void run(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() > idle_) std::thread([this] { serve(); }).detach();
    else changed_.notify_one();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      while (!tasks_.empty()) {
        auto task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
        task = nullptr;
        lock.lock();
      }
      if (idle_ >= 2) return;
      ++idle_;
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      --idle_;
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
};

}  // namespace pcieipc_torch
