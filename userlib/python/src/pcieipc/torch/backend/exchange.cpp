// SPDX-License-Identifier: MIT OR Apache-2.0
// All-to-all.
#include <algorithm>
#include <cstring>

#include "backend.h"

namespace pcieipc_torch {

WorkPtr PcieBackend::alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                      const c10d::AllToAllOptions& opts) {
  dense(output, "all_to_all");
  dense(input, "all_to_all");
  if (output.scalar_type() != input.scalar_type()) refuse("all_to_all: input and output must have the same type");
  const auto from = parts(input, input_splits, "input"), to = parts(output, output_splits, "output");
  if (settings_.outer) return settings_.outer->alltoall_base(output, input, output_splits, input_splits, opts);
  const Tensor in = input, out = output;
  // Without splits all parts are as long, here and on the other ranks.
  const bool even = input_splits.empty() && output_splits.empty();
  int64_t most = input.nbytes() / size_;
  if (!in.is_cpu() && !even) most = agree_on_parts(cut(in.contiguous(), from), cut(out.contiguous(), to), opts.timeout);
  return run(OpType::ALLTOALL_BASE, "pcie:all_to_all", "all_to_all", {in}, {out}, opts.timeout, [this, in, out, from, to, most](uint32_t ms) {
    const auto source = in.contiguous();
    auto target = out.contiguous();
    if (in.is_cpu()) exchange(cut(source, from), cut(target, to), ms);
    else exchange_on_device(cut(source, from), cut(target, to), most);
    give_back(out, target);
  });
}

WorkPtr PcieBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  if (outputs.size() != static_cast<size_t>(size_) || inputs.size() != static_cast<size_t>(size_)) {
    refuse("all_to_all: one input and one output for each of " + std::to_string(size_) + " ranks are expected");
  }
  for (const auto* list : {&inputs, &outputs}) {
    for (const auto& tensor : *list) {
      dense(tensor, "all_to_all");
      if (tensor.scalar_type() != inputs[0].scalar_type()) refuse("all_to_all: the tensors must have the same type");
    }
  }
  if (settings_.outer) return settings_.outer->alltoall(outputs, inputs, opts);
  const Tensors from = inputs, to = outputs;
  const auto most = from[0].is_cpu() ? 0 : agree_on_parts(from, to, opts.timeout);
  return run(OpType::ALLTOALL, "pcie:all_to_all", "all_to_all", from, to, opts.timeout, [this, from, to, most](uint32_t ms) {
    if (!from[0].is_cpu()) {
      exchange_on_device(from, to, most);
      return;
    }
    Tensors sources, targets;
    for (const auto& tensor : from) sources.push_back(tensor.contiguous());
    for (const auto& tensor : to) targets.push_back(tensor.contiguous());
    exchange(sources, targets, ms);
    for (size_t i = 0; i < to.size(); ++i) give_back(to[i], targets[i]);
  });
}

std::vector<int64_t> PcieBackend::parts(const Tensor& tensor, const std::vector<int64_t>& splits, const char* which) const {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : tensor.numel();
  const std::string what = std::string("all_to_all: the ") + which;
  if (splits.empty()) {
    if (rows % size_ != 0) refuse(what + "'s first dimension, " + std::to_string(rows) + ", can not be divided among " + std::to_string(size_) + " ranks");
    return std::vector<int64_t>(size_, tensor.numel() / size_);
  }
  if (splits.size() != static_cast<size_t>(size_)) refuse(what + " has " + std::to_string(splits.size()) + " splits for " + std::to_string(size_) + " ranks");
  int64_t sum = 0;
  for (auto split : splits) {
    if (split < 0) refuse(what + " has a negative split");
    sum += split;
  }
  if (sum != rows) refuse(what + "'s splits add up to " + std::to_string(sum) + ", its first dimension is " + std::to_string(rows));
  const auto row = rows == 0 ? 0 : tensor.numel() / rows;
  std::vector<int64_t> counts;
  for (auto split : splits) counts.push_back(split * row);
  return counts;
}

Tensors PcieBackend::cut(const Tensor& flat, const std::vector<int64_t>& counts) {
  Tensors pieces;
  int64_t at = 0;
  for (auto count : counts) {
    pieces.push_back(flat.view({-1}).narrow(0, at, count));
    at += count;
  }
  return pieces;
}

std::pair<int64_t, int64_t> PcieBackend::longest_part(const Tensors& from, const Tensors& to, uint32_t ms) {
  const size_t ranks = size_;
  std::vector<int64_t> own, all(2 * ranks * ranks);
  for (const auto& part : from) own.push_back(part.nbytes());
  for (const auto& part : to) own.push_back(part.nbytes());
  check(pcieipc_all_gather(group_.get(), own.data(), all.data(), own.size(), PCIEIPC_TYPE_I64, ms), "all_to_all", ms);
  int64_t most = 0, least = INT64_MAX;
  for (size_t s = 0; s < ranks; ++s) {
    for (size_t d = 0; d < ranks; ++d) {
      const auto sent = all[2 * ranks * s + d], expected = all[2 * ranks * d + ranks + s];
      if (sent != expected) {
        throw Refused{{"Mismatch", "all_to_all: rank " + std::to_string(s) + " sends " + std::to_string(sent) + " bytes to rank " +
                                       std::to_string(d) + ", which expects " + std::to_string(expected), static_cast<int>(s)}, false};
      }
      most = std::max(most, sent);
      least = std::min(least, sent);
    }
  }
  return {most, least};
}

void PcieBackend::exchange(Tensors from, const Tensors& to, uint32_t ms) {
  const char* what = "all_to_all";
  const size_t ranks = size_;
  const auto [most, least] = longest_part(from, to, ms);
  if (most == 0) return;
  bool shared = false;
  for (const auto& a : from)
    for (const auto& b : to) shared |= overlap(a, b);
  if (shared)
    for (auto& part : from) part = part.clone();
  if (least == most && adjacent(from) && adjacent(to)) {
    check(pcieipc_all_to_all(group_.get(), from[0].data_ptr(), to[0].data_ptr(), most, PCIEIPC_TYPE_U8, ms), what, ms);
    return;
  }
  const size_t piece = std::min<size_t>(most, 1 << 20);
  std::vector<char> out(piece * ranks), in(piece * ranks);
  for (size_t done = 0; done < static_cast<size_t>(most); done += piece) {
    const auto rest = [&](const Tensor& part) { return static_cast<size_t>(part.nbytes()) <= done ? 0 : std::min(piece, static_cast<size_t>(part.nbytes()) - done); };
    for (size_t p = 0; p < ranks; ++p)
      if (const auto len = rest(from[p])) std::memcpy(out.data() + p * piece, static_cast<const char*>(from[p].data_ptr()) + done, len);
    check(pcieipc_all_to_all(group_.get(), out.data(), in.data(), piece, PCIEIPC_TYPE_U8, ms), what, ms);
    for (size_t p = 0; p < ranks; ++p)
      if (const auto len = rest(to[p])) std::memcpy(static_cast<char*>(to[p].data_ptr()) + done, in.data() + p * piece, len);
  }
}

}  // namespace pcieipc_torch
