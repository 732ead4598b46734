// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <pcieipc.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "elements.h"
#include "failure.h"
#include "lane.h"
#include "post.h"
#include "work.h"

namespace pcieipc_torch {

struct Settings {
  int rank, size;
  // How long a call may take, and the making of the group.
  milliseconds timeout, meeting_timeout;
  // Where the ranks of this host meet, and which ranks of the group they are.
  std::string directory;
  std::vector<int> local;
  uint32_t transport;
  int endpoint;
  size_t ring_bytes;
  uint32_t algorithm;
  // Where the group spans hosts: the whole group's outer backend, that of the owners of this rank's shard, and how many shards there are.
  c10::intrusive_ptr<c10d::Backend> outer, owners;
  int shards;
  // A pcieipc_cuda_path.
  uint32_t cuda_path;
  // How many threads make a large all-reduce on the CPU.
  int lanes;
};

// From how many bytes on an all-reduce on the CPU is divided among threads.
constexpr size_t DIVIDED = 2 << 20;

// How many groups of this process have an endpoint of the module.
inline std::atomic<int> endpoints_held{0};

class PcieBackend final : public c10d::Backend {
 public:
  explicit PcieBackend(Settings settings);

  ~PcieBackend() override;

  // Ends all work in order and leaves the group. Idempotent.
  void leave();
  static void leave_all();
  bool is_idle_within(milliseconds patience);

  // Makes the further calls of all ranks fail with this reason, once what was asked for before has ended.
  void abort_with(const std::string& why);

  // Throws what has ended the group, or that a rank has died. Waits for the calls on a device that were enqueued, and for nothing else.
  void check_group();

  // Goes on without the ranks that are lost; answers which ranks of the group are left. Only for making a new group of them.
  std::vector<int> survivors(uint32_t timeout_ms);

  const std::string getBackendName() const override { return "pcie"; }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  // Between these two every call goes as it would alone; the work that the second answers is that of all of them.
  void startCoalescing() override { on_device_was_used_ = false; }
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    return allgather_into({output}, {input}, OpType::_ALLGATHER_BASE, "pcie:_all_gather_base", opts);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return allgather_into(outputs, inputs, OpType::COALESCED, "pcie:all_gather_coalesced", opts);
  }

  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return reduce_scatter_from({output}, {input}, OpType::_REDUCE_SCATTER_BASE, opts);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    return reduce_scatter_from(outputs, inputs, OpType::COALESCED, opts);
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool name_all) override;

  std::vector<int> host_ranks() const { return settings_.local; }
  bool spans_hosts() const { return static_cast<bool>(settings_.outer); }

 private:
  static std::mutex& living_mutex();
  static std::set<PcieBackend*>& living();
  Group meet(const std::string& directory, uint32_t transport, Clock::time_point deadline);
  struct Helper {
    Group group;
    std::unique_ptr<Lane> lane;
  };
  Post& post();
  void member(int64_t rank, const char* what, const char* role) const {
    if (rank < 0 || rank >= size_) refuse(std::string(what) + ": " + role + " " + std::to_string(rank) + " is no rank of this group of " + std::to_string(size_));
  }

  void other(int rank, const char* what) const;
  WorkPtr receive(const Tensor& tensor, int from, int tag, OpType type, const char* title);
  milliseconds timeout_of(milliseconds asked) const { return asked > milliseconds::zero() ? asked : settings_.timeout; }

  // Throws what a call of the library answered; its ranks count in this host.
  void check(pcieipc_status status, const char* what, uint32_t ms) const;
  static void give_back(const Tensor& to, const Tensor& flat) {
    if (!flat.is_same(to)) to.copy_(flat);
  }

  std::optional<Failure> broken();
  void end_with(const Failure& failure);

  // What a body's exceptions mean for the work, and for the group.
  std::exception_ptr attempt(const char* what, const std::function<void()>& body);
  WorkPtr run(OpType op, const char* title, const char* what, const Tensors& inputs, Tensors outputs, milliseconds timeout,
              std::function<void(uint32_t)> body);

  WorkPtr run_on_device(c10::Device device, OpType op, const char* title, const char* what, const Tensors& inputs, Tensors outputs,
                        milliseconds timeout, const std::function<void(uint32_t)>& body);

  // ---- What bodies are made of: contiguous tensors, all on the CPU or all on the device.

  void make_all_reduce(const Tensor& flat, const Reduction& how, uint32_t ms, const char* what);
  // Each thread has a group of its own, and a part of the elements.
  void divide_all_reduce(const Tensor& flat, const Reduction& how, uint32_t ms, const char* what);
  void make_helpers(uint32_t ms);
  // `to` is defined on the root.
  void make_reduce(const Tensor& from, const Tensor& to, const Reduction& how, int root, uint32_t ms);
  void make_reduce_scatter(const Tensor& from, const Tensor& to, const Reduction& how, uint32_t ms);
  void make_broadcast(const Tensor& flat, int root, uint32_t ms, const char* what);
  void make_all_gather(const Tensor& from, const Tensor& to, uint32_t ms, const char* what);

  // ---- All-reduce

  WorkPtr reduce_all(const Tensors& tensors, const ReduceOp& op, OpType type, milliseconds timeout);

  // Bitwise operations are made here, in pieces, from what all ranks gather.
  void combine_bits(Tensor& flat, Bits bits, uint32_t ms);
  void sum_sparse(const Tensor& tensor, uint32_t ms);

  // ---- All-reduce between hosts

  struct Between {
    Tensor real, flat, shard;
    bool whole;
    int64_t each;
  };

  WorkPtr reduce_all_between_hosts(const Tensors& tensors, const ReduceOp& op, Reduction how, OpType type, milliseconds timeout);
  std::exception_ptr attempt_last(const std::function<void()>& body);

  // Leaves this rank's shard, combined inside the host, in `shard`.
  Between inside_first(const Tensor& real, const Reduction& how, uint32_t ms);
  void inside_last(Between& stage, uint32_t element, uint32_t ms);
  WorkPtr outer_barrier(const c10d::BarrierOptions& opts);

  // ---- Gather, scatter, exchange

  void gathered(const Tensors& list, const Tensor& one, const char* what) const;

  // Contiguous tensors that lie one behind the other, as one.
  static Tensor view_of(const Tensors& list) {
    return at::from_blob(list[0].data_ptr(), {static_cast<int64_t>(list.size()) * list[0].numel()}, list[0].options());
  }

  static Tensor flatten(const Tensors& list);
  void gather_all(const Tensors& list, const Tensor& input, uint32_t ms);
  WorkPtr allgather_into(const Tensors& outputs, const Tensors& inputs, OpType type, const char* title, const c10d::AllgatherOptions& opts);
  void scatter_reduced(const Tensor& output, const Tensor& input, const Reduction& how, uint32_t ms);
  WorkPtr reduce_scatter_from(const Tensors& outputs, const Tensors& inputs, OpType type, const c10d::ReduceScatterOptions& opts);

  // How many elements each rank's part has.
  std::vector<int64_t> parts(const Tensor& tensor, const std::vector<int64_t>& splits, const char* which) const;
  static Tensors cut(const Tensor& flat, const std::vector<int64_t>& counts);

  // Part p of `from` goes to rank p; parts may have any length. All ranks first learn all lengths, so a disagreement is the same error on
  // all of them and the group goes on.
  void exchange(Tensors from, const Tensors& to, uint32_t ms);
  // The longest part of all ranks in bytes, and the shortest.
  std::pair<int64_t, int64_t> longest_part(const Tensors& from, const Tensors& to, uint32_t ms);

  // On the device all parts are as long as the longest, which ranks with parts of different lengths agree on by way of the host.
  int64_t agree_on_parts(const Tensors& from, const Tensors& to, milliseconds timeout);
  void exchange_on_device(const Tensors& from, const Tensors& to, int64_t most);

  const Settings settings_;
  const pid_t process_ = getpid();
  int local_rank_ = 0, local_size_ = 1;
  Group group_, last_;
  std::mutex broken_mutex_;
  // Why the group ended, if it has.
  std::optional<Failure> broken_;
  std::atomic<uint64_t> sequence_{0};
  std::mutex leaving_;
  std::unique_ptr<Post> post_;
  std::shared_ptr<OnDevice> on_device_;
  std::atomic<bool> on_device_was_used_{false};
  // In this order, so that the first ends before what it hands on to.
  std::unique_ptr<Lane> last_lane_, lane_;
  // Beside the group's own thread, for large all-reduces; made with the first of these.
  std::vector<Helper> helpers_;
};

}  // namespace pcieipc_torch
