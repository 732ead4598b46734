// SPDX-License-Identifier: MIT OR Apache-2.0
// A group's collectives of CUDA memory: enqueued on a stream of the group, behind what the caller's stream holds, and nobody waits on the host.
//
// The device's own part of the library adds up. What moves tensors is made of that: ranks without data of their own add zeros. Streams and events
// are used through c10's interface for any device, so the same source compiles for a torch without CUDA.
#pragma once

#include <pcieipc.h>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "elements.h"
#include "failure.h"
#include "types.h"

namespace pcieipc_torch {

inline c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

class OnDevice {
 public:
  OnDevice(std::string directory, int rank, int size, uint32_t path, milliseconds timeout, milliseconds setup)
      : directory_(std::move(directory)), rank_(rank), size_(size), path_(path), timeout_(timeout), setup_(setup) {}

  ~OnDevice() { leave(); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  // Calls are enqueued by one thread at a time; `enter` begins one: the stream on which it goes, once that waits for the caller's.
  std::unique_lock<std::mutex> lock();
  c10::Stream enter(c10::Device device);

  // The group's stream, after a first call.
  c10::Stream stream() const { return *stream_; }

  // What the group's calls have come to. Does not wait.
  std::optional<Failure> failure();

  // The caller's stream and the group's, once there is one: who waits for both has waited for all calls so far.
  std::vector<c10::Stream> streams();

  void abort(const std::string& why);
  // Waits for the calls, as long as they may take, and gives everything back.
  void leave();
  // A child made by fork is no member.
  void forget() { made_ = nullptr; }

  // Between `enter` and the end of the call, on contiguous tensors.
  void combine(const Tensor& from, const Tensor& to, const Reduction& how, const char* what);
  void spread(const Tensor& tensor, int root, const char* what);
  void gather(const Tensor& from, const Tensor& to, const char* what);

 private:
  void make(c10::Device device);
  void add_bytes(const Tensor& bytes, const char* what);
  void call(const void* from, void* to, size_t count, uint32_t element, uint32_t operation, const char* what);

  const std::string directory_;
  const int rank_, size_;
  const uint32_t path_;
  const milliseconds timeout_, setup_;
  std::mutex mutex_;
  pcieipc_cuda* made_ = nullptr;
  bool left_ = false;
  std::optional<c10::Device> device_;
  std::optional<c10::Stream> stream_;
  void* handle_ = nullptr;
};

// A collective that was enqueued. Waiting makes the caller's stream wait, not the host, unless a time is given.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(OpType op, const char* title, const Tensors& inputs, Tensors outputs, std::shared_ptr<OnDevice> side, c10::Stream stream);

  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override { return !side_->failure(); }
  std::exception_ptr exception() const override;
  void synchronize() override;
  bool wait(milliseconds timeout) override;
  void abort() override { refuse("not supported: aborting one collective; abort the group"); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors outputs_;
  std::shared_ptr<OnDevice> side_;
  c10::Stream stream_;
  c10::Event end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A message to or from CUDA memory, which goes through the host: what arrived is copied to the device when it is waited for.
class StagedWork final : public c10d::Work {
 public:
  StagedWork(OpType op, const char* title, WorkPtr inner, Tensor host, Tensor device)
      : Work(-1, op, title), inner_(std::move(inner)), host_(std::move(host)), device_(std::move(device)) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  void synchronize() override { land(); }
  bool wait(milliseconds timeout) override {
    inner_->wait(timeout);
    land();
    return true;
  }
  void abort() override { refuse("not supported: aborting one message; abort the group"); }
  Tensors result() override { return device_.defined() ? Tensors{device_} : Tensors{}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { refuse("not supported: a future of a message of CUDA memory; wait for its work"); }

 private:
  void land() {
    std::lock_guard<std::mutex> lock(landing_);
    if (!device_.defined() || landed_) return;
    at::NoGradGuard no_grad;
    device_.copy_(host_);
    landed_ = true;
  }

  WorkPtr inner_;
  Tensor host_, device_;
  std::mutex landing_;
  bool landed_ = false;
};

}  // namespace pcieipc_torch
