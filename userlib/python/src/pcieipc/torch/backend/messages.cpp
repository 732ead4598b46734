// SPDX-License-Identifier: MIT OR Apache-2.0
// Messages between two ranks, and barriers.
#include "backend.h"

namespace pcieipc_torch {

WorkPtr PcieBackend::send(Tensors& tensors, int to, int tag) {
  const auto tensor = only(tensors, "send");
  other(to, "send");
  if (settings_.outer) return settings_.outer->send(tensors, to, tag);
  // CUDA memory goes through the host: this waits for the caller's stream.
  const auto host = tensor.cpu();
  auto work = c10::make_intrusive<PcieWork>(OpType::SEND, "pcie:send", Tensors{tensor}, Tensors{});
  post().send(host, to, tag, work, settings_.timeout);
  if (!tensor.is_cpu()) return c10::make_intrusive<StagedWork>(OpType::SEND, "pcie:send", work, host, Tensor());
  return work;
}

WorkPtr PcieBackend::recv(Tensors& tensors, int from, int tag) {
  const auto tensor = only(tensors, "recv");
  other(from, "recv");
  if (settings_.outer) return settings_.outer->recv(tensors, from, tag);
  return receive(tensor, from, tag, OpType::RECV, "pcie:recv");
}

WorkPtr PcieBackend::recvAnysource(Tensors& tensors, int tag) {
  const auto tensor = only(tensors, "recv");
  if (settings_.outer) return settings_.outer->recvAnysource(tensors, tag);
  return receive(tensor, -1, tag, OpType::RECVANYSOURCE, "pcie:recvAnySource");
}

WorkPtr PcieBackend::receive(const Tensor& tensor, int from, int tag, OpType type, const char* title) {
  const auto host = tensor.is_cpu() ? tensor : at::empty(tensor.sizes(), tensor.options().device(at::kCPU).requires_grad(false));
  auto work = c10::make_intrusive<PcieWork>(type, title, Tensors{host}, Tensors{host});
  post().receive(host, from, tag, work, settings_.timeout);
  if (!tensor.is_cpu()) return c10::make_intrusive<StagedWork>(type, title, work, host, tensor);
  return work;
}

WorkPtr PcieBackend::barrier(const c10d::BarrierOptions& opts) {
  if (settings_.outer) return outer_barrier(opts);
  // With calls on a device before it: they have run on all ranks when it ends.
  const auto streams = on_device_ ? on_device_->streams() : std::vector<c10::Stream>();
  return run(OpType::BARRIER, "pcie:barrier", "barrier", {}, {}, opts.timeout, [this, streams](uint32_t ms) {
    for (const auto& stream : streams) stream.synchronize();
    check(pcieipc_barrier(group_.get(), ms), "barrier", ms);
  });
}

void PcieBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool name_all) {
  if (settings_.outer) return settings_.outer->monitoredBarrier(opts, name_all);
  ++sequence_;
  if (post_) post_->monitored_barrier(opts.timeout < milliseconds::zero() ? settings_.timeout : opts.timeout, name_all);
}

}  // namespace pcieipc_torch
