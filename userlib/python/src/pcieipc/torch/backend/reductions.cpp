// SPDX-License-Identifier: MIT OR Apache-2.0
// Collectives that combine elements.
#include <algorithm>
#include <cstring>
#include <future>

#include "backend.h"

namespace pcieipc_torch {

WorkPtr PcieBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
  const auto tensor = only(tensors, "all_reduce");
  return reduce_all({tensor}, opts.reduceOp, OpType::ALLREDUCE, opts.timeout);
}

WorkPtr PcieBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  if (tensors.empty()) refuse("all_reduce_coalesced: it needs a non-empty tensor list");
  for (const auto& tensor : tensors) {
    dense(tensor, "all_reduce_coalesced");
    if (tensor.scalar_type() != tensors[0].scalar_type()) refuse("all_reduce_coalesced: the tensors must have the same type");
  }
  return reduce_all(tensors, opts.reduceOp, OpType::ALLREDUCE_COALESCED, opts.timeout);
}

WorkPtr PcieBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() != 1 || !tensors[0].is_sparse() || !tensors[0].device().is_cpu()) refuse("all_reduce of a sparse tensor: one COO tensor on the CPU is expected");
  if (opts.reduceOp.op_ != ReduceOp::SUM) refuse("not supported: all_reduce of a sparse tensor with another operation than SUM");
  if (settings_.outer) return settings_.outer->allreduce(tensors, opts);
  const auto tensor = tensors[0];
  return run(OpType::_ALLREDUCE_SPARSE, "pcie:all_reduce", "all_reduce", {tensor}, {tensor}, opts.timeout,
             [this, tensor](uint32_t ms) { sum_sparse(tensor, ms); });
}

WorkPtr PcieBackend::reduce_all(const Tensors& tensors, const ReduceOp& op, OpType type, milliseconds timeout) {
  const auto how = reduction_of(tensors[0], op, "all_reduce");
  if (settings_.outer) {
    for (const auto& tensor : tensors) {
      if (!tensor.is_cpu()) refuse("not supported: all_reduce of CUDA memory in a group that spans hosts");
    }
    return reduce_all_between_hosts(tensors, op, how, type, timeout);
  }
  return run(type, "pcie:all_reduce", "all_reduce", tensors, tensors, timeout, [this, tensors, how](uint32_t ms) {
    for (const auto& tensor : tensors) {
      const auto real = real_view(tensor);
      auto flat = real.contiguous();
      if (how.bits != Bits::None) combine_bits(flat, how.bits, ms);
      else make_all_reduce(flat, how, ms, "all_reduce");
      give_back(real, flat);
    }
  });
}

void PcieBackend::make_helpers(uint32_t ms) {
  const auto deadline = Clock::now() + milliseconds(ms);
  std::vector<Helper> made;
  for (int lane = 1; lane < settings_.lanes; ++lane) {
    const auto directory = settings_.directory + "-lane-" + std::to_string(lane);
    made.push_back({meet(directory, PCIEIPC_TRANSPORT_SHM, deadline), std::make_unique<Lane>()});
    if (local_rank_ == 0) remove_folder(directory);
  }
  helpers_ = std::move(made);
}

void PcieBackend::divide_all_reduce(const Tensor& flat, const Reduction& how, uint32_t ms, const char* what) {
  if (helpers_.empty()) make_helpers(ms);
  const auto lanes = static_cast<int64_t>(helpers_.size()) + 1, count = flat.numel();
  // Whole lines of the cache, so that no two threads store to one.
  const auto each = (count / lanes + 63) / 64 * 64;
  auto* at = static_cast<char*>(flat.data_ptr());
  const auto part = [&](pcieipc_group* group, int64_t lane) {
    const auto begin = each * lane, end = lane + 1 == lanes ? count : begin + each;
    return pcieipc_all_reduce(group, at + begin * flat.element_size(), end - begin, how.element, how.operation, ms);
  };
  std::vector<std::promise<std::optional<Failure>>> promises(helpers_.size());
  for (size_t i = 0; i < helpers_.size(); ++i) {
    helpers_[i].lane->add([&, i] {
      const auto status = part(helpers_[i].group.get(), static_cast<int64_t>(i) + 1);
      promises[i].set_value(status == PCIEIPC_STATUS_OK ? std::nullopt : std::make_optional(last_failure(status, what, ms)));
    });
  }
  const auto status = part(group_.get(), 0);
  auto failure = status == PCIEIPC_STATUS_OK ? std::nullopt : std::make_optional(last_failure(status, what, ms));
  // All of them, whatever became of one: they use the tensor.
  for (auto& promise : promises) {
    auto other = promise.get_future().get();
    if (!failure) failure = std::move(other);
  }
  if (!failure) return;
  if (failure->rank >= 0 && failure->rank < local_size_) failure->rank = settings_.local[failure->rank];
  throw Refused{*failure};
}

void PcieBackend::combine_bits(Tensor& flat, Bits bits, uint32_t ms) {
  if (!flat.is_cpu()) {
    const auto line = flat.view({-1});
    const auto all = at::empty({size_, line.numel()}, line.options());
    make_all_gather(line, all, ms, "a bitwise reduction");
    line.copy_(all[0]);
    for (int rank = 1; rank < size_; ++rank) {
      if (bits == Bits::And) line.bitwise_and_(all[rank]);
      else if (bits == Bits::Or) line.bitwise_or_(all[rank]);
      else line.bitwise_xor_(all[rank]);
    }
    return;
  }
  auto* at = static_cast<uint8_t*>(flat.data_ptr());
  const auto bytes = static_cast<size_t>(flat.nbytes());
  const size_t piece = std::min<size_t>(bytes, 1 << 20);
  std::vector<uint8_t> all(piece * size_);
  for (size_t done = 0; done < bytes; done += piece) {
    const auto len = std::min(piece, bytes - done);
    check(pcieipc_all_gather(group_.get(), at + done, all.data(), len, PCIEIPC_TYPE_U8, ms), "a bitwise reduction", ms);
    std::memcpy(at + done, all.data(), len);
    for (int rank = 1; rank < size_; ++rank) {
      const auto* from = all.data() + rank * len;
      for (size_t i = 0; i < len; ++i) {
        auto& to = at[done + i];
        to = bits == Bits::And ? to & from[i] : bits == Bits::Or ? to | from[i] : to ^ from[i];
      }
    }
  }
}

void PcieBackend::sum_sparse(const Tensor& tensor, uint32_t ms) {
  const auto own = tensor.coalesce();
  const auto indices = own._indices().contiguous(), values = own._values().contiguous();
  const int64_t dims = indices.size(0), count = indices.size(1);
  const int64_t shape[3] = {count, dims, tensor.numel()};
  std::vector<int64_t> shapes(3 * size_);
  check(pcieipc_all_gather(group_.get(), shape, shapes.data(), 3, PCIEIPC_TYPE_I64, ms), "all_reduce of a sparse tensor", ms);
  int64_t most = 0;
  for (int rank = 0; rank < size_; ++rank) {
    most = std::max(most, shapes[3 * rank]);
    // All ranks see the same shapes, so all of them stop here.
    if (shapes[3 * rank + 1] != dims || shapes[3 * rank + 2] != tensor.numel()) {
      throw Refused{{"Mismatch", "all_reduce of a sparse tensor: rank " + std::to_string(rank) + " has one of another shape", rank}, false};
    }
  }
  const auto gather = [&](const Tensor& from, int64_t dim) {
    auto sizes = from.sizes().vec();
    sizes[dim] = most;
    auto padded = at::zeros(sizes, from.options());
    padded.narrow(dim, 0, count).copy_(from);
    sizes.insert(sizes.begin(), size_);
    auto all = at::empty(sizes, from.options());
    const auto span = span_of(padded);
    check(pcieipc_all_gather(group_.get(), span.at, all.data_ptr(), span.count, span.element, ms), "all_reduce of a sparse tensor", ms);
    Tensors each;
    for (int rank = 0; rank < size_; ++rank) each.push_back(all[rank].narrow(dim, 0, shapes[3 * rank]));
    return at::cat(each, dim);
  };
  const auto every_index = gather(indices, 1), every_value = gather(values, 0);
  const auto sum = at::sparse_coo_tensor(every_index, every_value, tensor.sizes(), tensor.options()).coalesce();
  tensor.copy_(sum);
}

WorkPtr PcieBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const auto tensor = only(tensors, "reduce");
  member(opts.rootRank, "reduce", "root");
  const auto how = reduction_of(tensor, opts.reduceOp, "reduce");
  if (settings_.outer) return settings_.outer->reduce(tensors, opts);
  const auto root = static_cast<int>(opts.rootRank);
  return run(OpType::REDUCE, "pcie:reduce", "reduce", {tensor}, {tensor}, opts.timeout, [this, tensor, how, root](uint32_t ms) {
    const bool here = rank_ == root;
    auto flat = real_view(tensor).contiguous();
    if (how.bits != Bits::None) {
      auto copy = flat.clone();
      combine_bits(copy, how.bits, ms);
      if (here) real_view(tensor).copy_(copy);
      return;
    }
    auto to = here ? at::empty_like(flat) : Tensor();
    make_reduce(flat, to, how, root, ms);
    if (here) real_view(tensor).copy_(to);
  });
}

WorkPtr PcieBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) {
  const auto output = only(outputs, "reduce_scatter");
  if (inputs.size() != 1) refuse("reduce_scatter: one list of input tensors is expected");
  const auto list = inputs[0];
  gathered(list, output, "reduce_scatter");
  const auto how = reduction_of(output, opts.reduceOp, "reduce_scatter");
  if (settings_.outer) return settings_.outer->reduce_scatter(outputs, inputs, opts);
  return run(OpType::REDUCE_SCATTER, "pcie:reduce_scatter", "reduce_scatter", list, {output}, opts.timeout, [this, list, output, how](uint32_t ms) {
    scatter_reduced(output, adjacent(list) ? view_of(list) : flatten(list), how, ms);
  });
}

WorkPtr PcieBackend::reduce_scatter_from(const Tensors& outputs, const Tensors& inputs, OpType type, const c10d::ReduceScatterOptions& opts) {
  if (outputs.size() != inputs.size()) refuse("reduce_scatter_tensor: as many outputs as inputs are expected");
  std::vector<Reduction> hows;
  for (size_t i = 0; i < inputs.size(); ++i) {
    dense(inputs[i], "reduce_scatter_tensor");
    dense(outputs[i], "reduce_scatter_tensor");
    same(inputs[i], outputs[i], outputs[i].numel() * size_, "reduce_scatter_tensor");
    hows.push_back(reduction_of(outputs[i], opts.reduceOp, "reduce_scatter_tensor"));
  }
  if (settings_.outer) {
    if (inputs.size() != 1) refuse("not supported: coalesced reduce_scatter in a group that spans hosts");
    Tensor output = outputs[0], input = inputs[0];
    return settings_.outer->_reduce_scatter_base(output, input, opts);
  }
  return run(type, "pcie:_reduce_scatter_base", "reduce_scatter_tensor", inputs, outputs, opts.timeout, [this, outputs, inputs, hows](uint32_t ms) {
    for (size_t i = 0; i < inputs.size(); ++i) scatter_reduced(outputs[i], inputs[i], hows[i], ms);
  });
}

void PcieBackend::scatter_reduced(const Tensor& output, const Tensor& input, const Reduction& how, uint32_t ms) {
  auto source = real_view(input).contiguous();
  const auto real = real_view(output);
  auto target = real.contiguous();
  if (how.bits != Bits::None) {
    if (source.is_same(input) || overlap(source, input)) source = source.clone();
    combine_bits(source, how.bits, ms);
    real.copy_(source.view({-1}).narrow(0, rank_ * real.numel(), real.numel()).view(real.sizes()));
    return;
  }
  if (overlap(source, target)) target = at::empty_like(target);
  make_reduce_scatter(source, target, how, ms);
  give_back(real, target);
}

}  // namespace pcieipc_torch
