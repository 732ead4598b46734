// SPDX-License-Identifier: MIT OR Apache-2.0
// All-reduce of a group that spans hosts: reduce-scatter inside each, all-reduce of the shards between them by the outer backend, all-gather inside.
#include <algorithm>

#include "backend.h"

namespace pcieipc_torch {

WorkPtr PcieBackend::reduce_all_between_hosts(const Tensors& tensors, const ReduceOp& op, Reduction how, OpType type, milliseconds timeout) {
  if (how.bits != Bits::None) refuse("not supported: bitwise operations in a group that spans hosts");
  if (!lane_) refuse("all_reduce: this rank has left the group", "Aborted");
  ++sequence_;
  const bool average = op.op_ == ReduceOp::AVG;
  if (average) how.operation = PCIEIPC_OP_SUM;
  c10d::AllreduceOptions between;
  between.reduceOp = average ? ReduceOp(ReduceOp::SUM) : op;
  between.timeout = timeout_of(timeout);
  auto work = c10::make_intrusive<PcieWork>(type, "pcie:all_reduce", tensors, tensors);
  const auto ms = clamp_ms(between.timeout);
  lane_->add([this, tensors, how, between, average, work, ms] {
    auto stages = std::make_shared<std::vector<std::pair<Between, WorkPtr>>>();
    auto error = attempt("all_reduce", [&] {
      for (const auto& tensor : tensors) {
        auto stage = inside_first(real_view(tensor), how, ms);
        WorkPtr outer;
        if (stage.shard.defined() && stage.shard.numel() > 0) {
          Tensors one{stage.shard};
          outer = settings_.owners->allreduce(one, between);
        }
        stages->emplace_back(std::move(stage), std::move(outer));
      }
    });
    // The last stage has a group and a thread of its own, so the next bucket's first stage runs while this one's shards are between the hosts.
    last_lane_->add([this, error, stages, how, average, work, ms] {
      auto last_error = error;
      if (!last_error) {
        last_error = attempt_last([&] {
          for (auto& [stage, outer] : *stages) {
            if (outer) outer->wait();
            inside_last(stage, how.element, ms);
            if (average) stage.flat.div_(size_);
            give_back(stage.real, stage.flat);
          }
        });
      }
      stages->clear();
      work->complete(last_error);
    });
  });
  return work;
}

std::exception_ptr PcieBackend::attempt_last(const std::function<void()>& body) {
  try {
    body();
    return nullptr;
  } catch (const Refused& refused) {
    return as_exception(refused.failure);
  } catch (const std::exception& error) {
    // Most likely a host that is lost; the other ranks of this one need not wait for their own deadline.
    pcieipc_group_abort(last_.get(), error.what());
    return as_exception({"PeerDied", std::string("all_reduce between hosts failed: ") + error.what()});
  }
}

PcieBackend::Between PcieBackend::inside_first(const Tensor& real, const Reduction& how, uint32_t ms) {
  Between stage{real, real.contiguous(), {}, local_size_ == settings_.shards, 0};
  const auto count = stage.flat.numel();
  stage.each = (count + settings_.shards - 1) / settings_.shards;
  const auto own = std::clamp<int64_t>(count - stage.each * local_rank_, 0, stage.each);
  auto line = stage.flat.view({-1});
  if (stage.whole) {
    auto source = line;
    if (stage.each * settings_.shards != count) {
      source = at::zeros({stage.each * settings_.shards}, line.options());
      source.narrow(0, 0, count).copy_(line);
    }
    auto block = at::empty({stage.each}, line.options());
    check(pcieipc_reduce_scatter(group_.get(), source.data_ptr(), block.data_ptr(), stage.each, how.element, how.operation, ms), "all_reduce", ms);
    stage.shard = block.narrow(0, 0, own);
    return stage;
  }
  // More ranks here than there are shards: some own none.
  check(pcieipc_all_reduce(group_.get(), line.data_ptr(), count, how.element, how.operation, ms), "all_reduce", ms);
  if (local_rank_ < settings_.shards) stage.shard = line.narrow(0, stage.each * local_rank_ > count ? count : stage.each * local_rank_, own);
  return stage;
}

void PcieBackend::inside_last(Between& stage, uint32_t element, uint32_t ms) {
  auto line = stage.flat.view({-1});
  const auto count = line.numel();
  if (!stage.whole) {
    for (int owner = 0; owner < settings_.shards; ++owner) {
      const auto start = std::min(stage.each * owner, count);
      auto part = line.narrow(0, start, std::clamp<int64_t>(count - start, 0, stage.each));
      check(pcieipc_broadcast(last_.get(), part.data_ptr(), part.numel(), element, owner, ms), "all_reduce", ms);
    }
    return;
  }
  // The block behind the shard is as long on every rank.
  const auto block = at::empty({0}, line.options()).set_(stage.shard.storage(), 0, {stage.each});
  if (stage.each * settings_.shards == count) {
    check(pcieipc_all_gather(last_.get(), block.data_ptr(), line.data_ptr(), stage.each, element, ms), "all_reduce", ms);
    return;
  }
  auto all = at::empty({stage.each * settings_.shards}, line.options());
  check(pcieipc_all_gather(last_.get(), block.data_ptr(), all.data_ptr(), stage.each, element, ms), "all_reduce", ms);
  line.copy_(all.narrow(0, 0, count));
}

WorkPtr PcieBackend::outer_barrier(const c10d::BarrierOptions& opts) {
  if (!lane_) refuse("barrier: this rank has left the group", "Aborted");
  ++sequence_;
  auto work = c10::make_intrusive<PcieWork>(OpType::BARRIER, "pcie:barrier", Tensors{}, Tensors{});
  auto between = opts;
  between.timeout = timeout_of(opts.timeout);
  lane_->add([this, work, between] {
    last_lane_->add([this, work, between] { work->complete(attempt_last([&] { settings_.outer->barrier(between)->wait(); })); });
  });
  return work;
}

}  // namespace pcieipc_torch
