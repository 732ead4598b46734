// SPDX-License-Identifier: MIT OR Apache-2.0
// How a rank joins its group, does one thing after the other in it, and leaves it.
#include <algorithm>
#include <future>

#include "backend.h"

namespace pcieipc_torch {

PcieBackend::PcieBackend(Settings settings) : Backend(settings.rank, settings.size), settings_(std::move(settings)) {
  const auto deadline = Clock::now() + settings_.meeting_timeout;
  const auto own = std::find(settings_.local.begin(), settings_.local.end(), settings_.rank);
  if (own == settings_.local.end()) refuse("this rank is not among the ranks of its host");
  local_rank_ = static_cast<int>(own - settings_.local.begin());
  local_size_ = static_cast<int>(settings_.local.size());
  group_ = meet(settings_.directory, settings_.transport, deadline);
  if (settings_.outer) {
    last_ = meet(settings_.directory + "-last", PCIEIPC_TRANSPORT_SHM, deadline);
    last_lane_ = std::make_unique<Lane>();
  } else if (size_ > 1) {
    post_ = std::make_unique<Post>(settings_.directory, rank_, size_, deadline);
  }
  const auto ms = ms_until(deadline);
  const auto all_here = pcieipc_barrier(group_.get(), ms);
  if (all_here != PCIEIPC_STATUS_OK) std::rethrow_exception(as_exception(last_failure(all_here, "making the group", ms)));
  lane_ = std::make_unique<Lane>();
  on_device_ = std::make_shared<OnDevice>(settings_.directory + "-cuda", rank_, size_, settings_.cuda_path, settings_.timeout, settings_.meeting_timeout);
  if (settings_.transport == PCIEIPC_TRANSPORT_KMOD) ++endpoints_held;
  std::lock_guard<std::mutex> lock(living_mutex());
  living().insert(this);
}

PcieBackend::~PcieBackend() {
  {
    std::lock_guard<std::mutex> lock(living_mutex());
    living().erase(this);
  }
  leave();
}

void PcieBackend::leave() {
  if (getpid() != process_) {
    // A child made by fork is no member: what the parent holds stays as it is.
    (void)post_.release();
    (void)lane_.release();
    (void)last_lane_.release();
    (void)group_.release();
    (void)last_.release();
    for (auto& helper : helpers_) {
      (void)helper.lane.release();
      (void)helper.group.release();
    }
    if (on_device_) on_device_->forget();
    return;
  }
  std::optional<py::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  std::lock_guard<std::mutex> lock(leaving_);
  lane_.reset();
  last_lane_.reset();
  // The thread before has ended, so these are idle.
  helpers_.clear();
  if (on_device_) on_device_->leave();
  post_.reset();
  if (group_ && settings_.transport == PCIEIPC_TRANSPORT_KMOD) --endpoints_held;
  group_.reset();
  last_.reset();
}

void PcieBackend::leave_all() {
  std::vector<c10::intrusive_ptr<PcieBackend>> all;
  {
    std::lock_guard<std::mutex> lock(living_mutex());
    for (auto* one : living()) {
      // Those of a parent before a fork are none of this process's.
      if (one->process_ == getpid()) all.push_back(c10::intrusive_ptr<PcieBackend>::unsafe_reclaim_from_nonowning(one));
    }
  }
  for (auto& one : all) {
    // The process ends: who waits for a rank that does not come is not waited for, and lives until then.
    if (one->is_idle_within(std::chrono::seconds(10))) one->leave();
    else (void)one.release();
  }
}

bool PcieBackend::is_idle_within(milliseconds patience) {
  py::gil_scoped_release released;
  return (!lane_ || lane_->is_idle_within(patience)) && (!last_lane_ || last_lane_->is_idle_within(patience));
}

void PcieBackend::abort_with(const std::string& why) {
  if (!lane_) return;
  on_device_->abort(why);
  lane_->add([this, why] {
    pcieipc_group_abort(group_.get(), why.c_str());
    if (!broken()) end_with(Failure{"Aborted", "aborted by this rank: " + why, rank_});
  });
}

void PcieBackend::check_group() {
  if (on_device_) {
    for (const auto& stream : on_device_->streams()) stream.synchronize();
  }
  auto failure = broken();
  std::lock_guard<std::mutex> lock(leaving_);
  if (!failure && post_) failure = post_->lost();
  if (failure) std::rethrow_exception(as_exception(*failure));
  if (!lane_) refuse("this rank has left the group", "Aborted");
}

std::optional<Failure> PcieBackend::broken() {
  auto on_device = on_device_ ? on_device_->failure() : std::nullopt;
  std::lock_guard<std::mutex> lock(broken_mutex_);
  if (!broken_) broken_ = std::move(on_device);
  return broken_;
}

void PcieBackend::end_with(const Failure& failure) {
  std::lock_guard<std::mutex> lock(broken_mutex_);
  broken_ = failure;
}

std::vector<int> PcieBackend::survivors(uint32_t timeout_ms) {
  if (settings_.outer) refuse("not supported: shrinking a group that spans hosts; make a new group");
  if (!lane_) refuse("this rank has left the group");
  auto promise = std::make_shared<std::promise<std::vector<int>>>();
  auto answer = promise->get_future();
  lane_->add([this, promise, timeout_ms] {
    try {
      check(pcieipc_group_shrink(group_.get(), timeout_ms), "shrink", timeout_ms);
      uint32_t count = 0, members[64];
      check(pcieipc_group_ranks(group_.get(), &count), "shrink", timeout_ms);
      check(pcieipc_group_members(group_.get(), members, 64), "shrink", timeout_ms);
      promise->set_value(std::vector<int>(members, members + count));
    } catch (const Refused& refused) {
      promise->set_exception(as_exception(refused.failure));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  });
  return answer.get();
}

std::mutex& PcieBackend::living_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::set<PcieBackend*>& PcieBackend::living() {
  static auto* all = new std::set<PcieBackend*>;
  return *all;
}

Group PcieBackend::meet(const std::string& directory, uint32_t transport, Clock::time_point deadline) {
  pcieipc_options options{};
  options.size = sizeof options;
  options.directory = directory.c_str();
  options.rank = local_rank_;
  options.ranks = local_size_;
  options.transport = transport;
  options.endpoint = settings_.endpoint < 0 ? 0 : settings_.endpoint + 1;
  options.ring_bytes = settings_.ring_bytes;
  options.algorithm = settings_.algorithm;
  options.meeting_timeout_ms = ms_until(deadline);
  pcieipc_group* made = nullptr;
  const auto status = pcieipc_group_meet(&options, &made);
  if (status != PCIEIPC_STATUS_OK) std::rethrow_exception(as_exception(last_failure(status, "making the group", options.meeting_timeout_ms)));
  return Group(made);
}

void PcieBackend::check(pcieipc_status status, const char* what, uint32_t ms) const {
  if (status == PCIEIPC_STATUS_OK) return;
  auto failure = last_failure(status, what, ms);
  if (failure.rank >= 0 && failure.rank < local_size_) failure.rank = settings_.local[failure.rank];
  throw Refused{failure};
}

std::exception_ptr PcieBackend::attempt(const char* what, const std::function<void()>& body) {
  try {
    if (auto again = broken()) {
      again->text = std::string(what) + ": the group ended before: " + again->text;
      return as_exception(*again);
    }
    body();
    return nullptr;
  } catch (const Refused& refused) {
    if (refused.ends_group) end_with(refused.failure);
    return as_exception(refused.failure);
  } catch (const std::exception& error) {
    // The other ranks may be in the middle of the same call.
    pcieipc_group_abort(group_.get(), error.what());
    end_with(Failure{"Internal", error.what()});
    return std::current_exception();
  }
}

Post& PcieBackend::post() {
  if (!lane_) refuse("this rank has left the group", "Aborted");
  if (!post_) refuse("a group of one rank has nobody to send to or receive from");
  return *post_;
}

void PcieBackend::other(int rank, const char* what) const {
  member(rank, what, "peer");
  if (rank == rank_) refuse(std::string(what) + ": rank " + std::to_string(rank) + " is this rank; copy the tensor instead");
}

}  // namespace pcieipc_torch
