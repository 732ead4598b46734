// SPDX-License-Identifier: MIT OR Apache-2.0
// Collectives that move tensors as they are.
#include "backend.h"

namespace pcieipc_torch {

WorkPtr PcieBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const auto tensor = only(tensors, "broadcast");
  member(opts.rootRank, "broadcast", "root");
  if (settings_.outer) return settings_.outer->broadcast(tensors, opts);
  const auto root = static_cast<int>(opts.rootRank);
  return run(OpType::BROADCAST, "pcie:broadcast", "broadcast", {tensor}, {tensor}, opts.timeout, [this, tensor, root](uint32_t ms) {
    auto flat = tensor.contiguous();
    make_broadcast(flat, root, ms, "broadcast");
    give_back(tensor, flat);
  });
}

WorkPtr PcieBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const auto input = only(inputs, "all_gather");
  if (outputs.size() != 1) refuse("all_gather: one list of output tensors is expected");
  gathered(outputs[0], input, "all_gather");
  if (settings_.outer) return settings_.outer->allgather(outputs, inputs, opts);
  const auto list = outputs[0];
  return run(OpType::ALLGATHER, "pcie:all_gather", "all_gather", {input}, list, opts.timeout,
             [this, list, input](uint32_t ms) { gather_all(list, input, ms); });
}

WorkPtr PcieBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  if (outputs.size() != static_cast<size_t>(size_)) refuse("all_gather_coalesced: one list of outputs for each rank is expected");
  std::vector<Tensors> lists(inputs.size());
  Tensors all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (auto& of_rank : outputs) {
      if (of_rank.size() != inputs.size()) refuse("all_gather_coalesced: each rank's list must be as long as the inputs'");
      lists[i].push_back(of_rank[i]);
      all.push_back(of_rank[i]);
    }
    dense(inputs[i], "all_gather_coalesced");
    gathered(lists[i], inputs[i], "all_gather_coalesced");
  }
  if (settings_.outer) return settings_.outer->allgather_coalesced(outputs, inputs, opts);
  return run(OpType::ALLGATHER_COALESCED, "pcie:all_gather", "all_gather_coalesced", inputs, all, opts.timeout, [this, lists, inputs](uint32_t ms) {
    for (size_t i = 0; i < inputs.size(); ++i) gather_all(lists[i], inputs[i], ms);
  });
}

WorkPtr PcieBackend::allgather_into(const Tensors& outputs, const Tensors& inputs, OpType type, const char* title, const c10d::AllgatherOptions& opts) {
  if (outputs.size() != inputs.size()) refuse("all_gather_into_tensor: as many outputs as inputs are expected");
  for (size_t i = 0; i < inputs.size(); ++i) {
    dense(inputs[i], "all_gather_into_tensor");
    dense(outputs[i], "all_gather_into_tensor");
    same(outputs[i], inputs[i], inputs[i].numel() * size_, "all_gather_into_tensor");
  }
  if (settings_.outer) {
    if (inputs.size() != 1) refuse("not supported: coalesced all_gather in a group that spans hosts");
    Tensor output = outputs[0], input = inputs[0];
    return settings_.outer->_allgather_base(output, input, opts);
  }
  return run(type, title, "all_gather_into_tensor", inputs, outputs, opts.timeout, [this, outputs, inputs](uint32_t ms) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      auto source = inputs[i].contiguous(), target = outputs[i].contiguous();
      if (overlap(source, target)) source = source.clone();
      make_all_gather(source, target, ms, "all_gather_into_tensor");
      give_back(outputs[i], target);
    }
  });
}

void PcieBackend::gather_all(const Tensors& list, const Tensor& input, uint32_t ms) {
  auto source = input.contiguous();
  const bool in_place = adjacent(list);
  auto all = in_place ? view_of(list) : at::empty({static_cast<int64_t>(list.size()), input.numel()}, input.options().requires_grad(false));
  if (overlap(all, source)) source = source.clone();
  make_all_gather(source, all, ms, "all_gather");
  if (in_place) return;
  for (size_t rank = 0; rank < list.size(); ++rank) list[rank].copy_(all[static_cast<int64_t>(rank)].view(list[rank].sizes()));
}

WorkPtr PcieBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const auto input = only(inputs, "gather");
  member(opts.rootRank, "gather", "root");
  const int root = static_cast<int>(opts.rootRank);
  if (rank_ == root && outputs.size() != 1) refuse("gather: the root gives one list of output tensors");
  if (rank_ != root && !outputs.empty()) refuse("gather: only the root gives output tensors");
  const auto list = rank_ == root ? outputs[0] : Tensors();
  if (rank_ == root) gathered(list, input, "gather");
  if (settings_.outer) return settings_.outer->gather(outputs, inputs, opts);
  return run(OpType::GATHER, "pcie:gather", "gather", {input}, list, opts.timeout, [this, list, input, root](uint32_t ms) {
    if (!input.is_cpu()) {
      // All ranks get all: nothing on the device goes to one rank only.
      const auto all = at::empty({size_, input.numel()}, input.options().requires_grad(false));
      make_all_gather(input.contiguous(), all, ms, "gather");
      for (int from = 0; from < static_cast<int>(list.size()); ++from) list[from].copy_(all[from].view(list[from].sizes()));
      return;
    }
    if (rank_ != root) {
      const auto flat = input.contiguous();
      const auto span = span_of(flat);
      check(pcieipc_send(group_.get(), span.at, span.count, span.element, root, ms), "gather", ms);
      return;
    }
    for (int from = 0; from < size_; ++from) {
      if (from == root) {
        list[from].copy_(input.reshape(list[from].sizes()));
        continue;
      }
      auto flat = list[from].contiguous();
      const auto span = span_of(flat);
      check(pcieipc_receive(group_.get(), span.at, span.count, span.element, from, ms), "gather", ms);
      give_back(list[from], flat);
    }
  });
}

WorkPtr PcieBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  const auto output = only(outputs, "scatter");
  member(opts.rootRank, "scatter", "root");
  const int root = static_cast<int>(opts.rootRank);
  if (rank_ == root && inputs.size() != 1) refuse("scatter: the root gives one list of input tensors");
  if (rank_ != root && !inputs.empty()) refuse("scatter: only the root gives input tensors");
  const auto list = rank_ == root ? inputs[0] : Tensors();
  if (rank_ == root) gathered(list, output, "scatter");
  if (settings_.outer) return settings_.outer->scatter(outputs, inputs, opts);
  return run(OpType::SCATTER, "pcie:scatter", "scatter", list, {output}, opts.timeout, [this, list, output, root](uint32_t ms) {
    if (!output.is_cpu()) {
      const auto all = rank_ == root ? flatten(list).view({size_, output.numel()}) : at::empty({size_, output.numel()}, output.options().requires_grad(false));
      make_broadcast(all, root, ms, "scatter");
      output.copy_(all[rank_].view(output.sizes()));
      return;
    }
    if (rank_ != root) {
      auto flat = output.contiguous();
      const auto span = span_of(flat);
      check(pcieipc_receive(group_.get(), span.at, span.count, span.element, root, ms), "scatter", ms);
      give_back(output, flat);
      return;
    }
    for (int to = 0; to < size_; ++to) {
      if (to == root) continue;
      const auto flat = list[to].contiguous();
      const auto span = span_of(flat);
      check(pcieipc_send(group_.get(), span.at, span.count, span.element, to, ms), "scatter", ms);
    }
    output.copy_(list[root].reshape(output.sizes()));
  });
}

void PcieBackend::gathered(const Tensors& list, const Tensor& one, const char* what) const {
  if (list.size() != static_cast<size_t>(size_)) {
    refuse(std::string(what) + ": " + std::to_string(list.size()) + " tensors, one for each of " + std::to_string(size_) + " ranks is expected");
  }
  for (const auto& tensor : list) {
    dense(tensor, what);
    same(tensor, one, one.numel(), what);
  }
}

Tensor PcieBackend::flatten(const Tensors& list) {
  Tensors lines;
  for (const auto& tensor : list) lines.push_back(tensor.reshape({-1}));
  return at::cat(lines);
}

}  // namespace pcieipc_torch
