// SPDX-License-Identifier: MIT OR Apache-2.0
// Messages between two ranks, and barriers.
#include "backend.h"

namespace pcieipc_torch {

WorkPtr PcieBackend::send(Tensors& tensors, int to, int tag) {
  const auto tensor = only(tensors, "send");
  other(to, "send");
  if (settings_.outer) return settings_.outer->send(tensors, to, tag);
  auto work = c10::make_intrusive<PcieWork>(OpType::SEND, "pcie:send", Tensors{tensor}, Tensors{});
  post().send(tensor, to, tag, work, settings_.timeout);
  return work;
}

WorkPtr PcieBackend::recv(Tensors& tensors, int from, int tag) {
  const auto tensor = only(tensors, "recv");
  other(from, "recv");
  if (settings_.outer) return settings_.outer->recv(tensors, from, tag);
  auto work = c10::make_intrusive<PcieWork>(OpType::RECV, "pcie:recv", Tensors{tensor}, Tensors{tensor});
  post().receive(tensor, from, tag, work, settings_.timeout);
  return work;
}

WorkPtr PcieBackend::recvAnysource(Tensors& tensors, int tag) {
  const auto tensor = only(tensors, "recv");
  if (settings_.outer) return settings_.outer->recvAnysource(tensors, tag);
  auto work = c10::make_intrusive<PcieWork>(OpType::RECVANYSOURCE, "pcie:recvAnySource", Tensors{tensor}, Tensors{tensor});
  post().receive(tensor, -1, tag, work, settings_.timeout);
  return work;
}

WorkPtr PcieBackend::barrier(const c10d::BarrierOptions& opts) {
  if (settings_.outer) return outer_barrier(opts);
  return run(OpType::BARRIER, "pcie:barrier", "barrier", {}, {}, opts.timeout,
             [this](uint32_t ms) { check(pcieipc_barrier(group_.get(), ms), "barrier", ms); });
}

void PcieBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool name_all) {
  if (settings_.outer) return settings_.outer->monitoredBarrier(opts, name_all);
  ++sequence_;
  if (post_) post_->monitored_barrier(opts.timeout < milliseconds::zero() ? settings_.timeout : opts.timeout, name_all);
}

}  // namespace pcieipc_torch
