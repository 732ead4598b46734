// SPDX-License-Identifier: MIT OR Apache-2.0
// The backend "pcie" of torch.distributed: a thin c10d::Backend over the C interface of pcieipc.
//
// Collectives of a group are made by one thread of the group, in the order in which they were asked for; that thread never needs the
// interpreter's lock, except to make an exception. Messages between two ranks (send, recv) may be asked for in any order, so they are
// matched first, over a socket between each pair of ranks, and then travel through rings of their own for each direction.
//
// Where a group spans hosts, the Python side passes the group's outer backend (gloo), and all-reduce is done in three steps: reduce-scatter
// inside the host, all-reduce of the shards between hosts, all-gather inside the host. Everything else is the outer backend's.

#include <pcieipc.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;
using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using std::chrono::milliseconds;

namespace {

// ---- Errors ------------------------------------------------------------------------------------------------------------------------

// What a call answered instead of its result.
struct Failure {
  std::string status, text;
  int rank = -1;
  int64_t endpoint = -1;
  uint64_t generation = 0;
};

struct Refused {
  Failure failure;
  // Whether the ranks are no longer in step: then the group ends.
  bool ends_group = true;
};

// The exception of Python's module pcieipc.errors for a failure. It is a python_error, which torch carries from any thread to the caller.
std::exception_ptr as_exception(const Failure& failure) {
  if (!Py_IsInitialized()) return std::make_exception_ptr(std::runtime_error(failure.text));
  py::gil_scoped_acquire gil;
  try {
    auto made = py::module_::import("pcieipc.errors").attr("make")(
        failure.status, failure.text, failure.rank, failure.endpoint, failure.generation);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    python_error error;
    error.persist();
    return std::make_exception_ptr(error);
  } catch (py::error_already_set& error) {
    return std::make_exception_ptr(std::runtime_error(failure.text + " (and no exception could be made: " + error.what() + ")"));
  }
}

// Names a failed call of the library on this thread.
Failure last_failure(pcieipc_status status, const std::string& what, uint32_t timeout_ms) {
  pcieipc_error detail{};
  detail.size = sizeof detail;
  if (pcieipc_last_error_detail(&detail) != PCIEIPC_STATUS_OK) detail.rank = -1, detail.endpoint = -1;
  const std::string name = pcieipc_status_name(status);
  const std::string how = status == PCIEIPC_STATUS_TIMEOUT ? "timeout after " + std::to_string(timeout_ms) + " ms" : name;
  return {name, what + " ended by " + how + ": " + pcieipc_last_error(), detail.rank, detail.endpoint, detail.generation};
}

[[noreturn]] void refuse(const std::string& text, const char* status = "Argument") {
  std::rethrow_exception(as_exception({status, text}));
}

uint32_t clamp_ms(milliseconds given) {
  return static_cast<uint32_t>(std::clamp<int64_t>(given.count(), 1, UINT32_MAX));
}

uint32_t ms_until(Clock::time_point deadline) {
  return clamp_ms(std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

struct Leave {
  void operator()(pcieipc_group* group) const { pcieipc_group_leave(group); }
};
using Group = std::unique_ptr<pcieipc_group, Leave>;

// ---- Threads -----------------------------------------------------------------------------------------------------------------------

// A thread that does one thing after the other.
class Lane {
 public:
  Lane() : process_(getpid()), thread_([this] { run(); }) {}

  // Does what was asked for, then ends. A child made by fork has no such thread.
  ~Lane() {
    if (getpid() != process_) {
      thread_.detach();
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void add(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }

  // Whether all that was asked for is done, at the latest after this time.
  bool is_idle_within(milliseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, patience, [this] { return tasks_.empty() && !busy_; });
  }

 private:
  void run() {
    at::NoGradGuard no_grad;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  const pid_t process_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false, busy_ = false;
  std::thread thread_;
};

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

// ---- Work --------------------------------------------------------------------------------------------------------------------------

class PcieWork final : public c10d::Work {
 public:
  PcieWork(OpType op, const char* title, const Tensors& inputs, Tensors outputs)
      : Work(-1, op, title, std::make_optional(inputs)),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  bool wait(milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto done = [this] { return completed_; };
    if (timeout <= milliseconds::zero()) {
      cv_.wait(lock, done);
    } else if (!cv_.wait_for(lock, timeout, done)) {
      lock.unlock();
      refuse("wait ended by timeout after " + std::to_string(timeout.count()) + " ms: the collective goes on", "Timeout");
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  void synchronize() override {}

  void abort() override { refuse("not supported: aborting one collective; abort the group"); }

  Tensors result() override { return outputs_; }

  int sourceRank() const override { return source_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(future_mutex_);
    wanted_ = true;
    return future_;
  }

  void complete(const std::exception_ptr& error, int source = -1) {
    source_ = source;
    bool asked;
    {
      std::lock_guard<std::mutex> lock(future_mutex_);
      asked = wanted_;
      // Nobody has seen it, so it has no callbacks.
      if (!asked) mark(error);
    }
    if (asked) {
      auto self = c10::intrusive_ptr<PcieWork>::unsafe_reclaim_from_nonowning(this);
      Callbacks::get().run([self, error] { self->mark(error); });
    }
    finish(error);
  }

 private:
  void mark(const std::exception_ptr& error) {
    if (error) future_->setError(error);
    else future_->markCompleted(c10::IValue(outputs_));
  }

  Tensors outputs_;
  std::mutex future_mutex_;
  bool wanted_ = false;
  std::atomic<int> source_{-1};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using Promise = c10::intrusive_ptr<PcieWork>;

// ---- Elements ----------------------------------------------------------------------------------------------------------------------

std::optional<uint32_t> element_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return PCIEIPC_TYPE_F64;
    case at::kFloat: return PCIEIPC_TYPE_F32;
    case at::kHalf: return PCIEIPC_TYPE_F16;
    case at::kBFloat16: return PCIEIPC_TYPE_BF16;
    case at::kChar: return PCIEIPC_TYPE_I8;
    case at::kShort: return PCIEIPC_TYPE_I16;
    case at::kInt: return PCIEIPC_TYPE_I32;
    case at::kLong: return PCIEIPC_TYPE_I64;
    case at::kByte: case at::kBool: return PCIEIPC_TYPE_U8;
    case at::kUInt16: return PCIEIPC_TYPE_U16;
    case at::kUInt32: return PCIEIPC_TYPE_U32;
    case at::kUInt64: return PCIEIPC_TYPE_U64;
    default: return std::nullopt;
  }
}

// Elements that are moved and not combined: those without a type of their own travel as bytes.
struct Span {
  void* at;
  size_t count;
  uint32_t element;
  size_t bytes;
};

Span span_of(const Tensor& tensor) {
  const auto element = element_of(tensor.scalar_type());
  const auto bytes = static_cast<size_t>(tensor.nbytes());
  return {tensor.data_ptr(), element ? static_cast<size_t>(tensor.numel()) : bytes, element.value_or(PCIEIPC_TYPE_U8), bytes};
}

enum class Bits { None, And, Or, Xor };

// How a reduction is made.
struct Reduction {
  uint32_t element = 0, operation = 0;
  Bits bits = Bits::None;
};

Reduction reduction_of(const Tensor& tensor, const ReduceOp& op, const char* what) {
  auto type = tensor.scalar_type();
  const std::string where = std::string("not supported: ") + what + " with ";
  const auto code = op.op_;
  if (at::isComplexType(type)) {
    if (code != ReduceOp::SUM && code != ReduceOp::AVG) refuse(where + "complex elements and another operation than SUM or AVG");
    type = c10::toRealValueType(type);
  }
  const auto element = element_of(type);
  if (!element) refuse(where + "elements of type " + c10::toString(type));
  const bool boolean = type == at::kBool;
  switch (code) {
    // Over booleans the sum is "any" and the product is "all".
    case ReduceOp::SUM: return {*element, uint32_t(boolean ? PCIEIPC_OP_MAX : PCIEIPC_OP_SUM)};
    case ReduceOp::PRODUCT: return {*element, uint32_t(boolean ? PCIEIPC_OP_MIN : PCIEIPC_OP_PROD)};
    case ReduceOp::MIN: return {*element, PCIEIPC_OP_MIN};
    case ReduceOp::MAX: return {*element, PCIEIPC_OP_MAX};
    case ReduceOp::AVG:
      if (!at::isFloatingType(type)) refuse(where + "AVG over elements of type " + c10::toString(type) + ", which are not floating point");
      return {*element, PCIEIPC_OP_AVERAGE};
    case ReduceOp::BAND: case ReduceOp::BOR: case ReduceOp::BXOR: {
      if (!at::isIntegralType(type, /*includeBool=*/true)) refuse(where + "a bitwise operation over elements of type " + c10::toString(type));
      const auto bits = code == ReduceOp::BAND ? Bits::And : code == ReduceOp::BOR ? Bits::Or : Bits::Xor;
      return {*element, 0, bits};
    }
    default: refuse(where + "this reduce operation; take SUM, PRODUCT, MIN, MAX, AVG, BAND, BOR or BXOR");
  }
}

// A dense tensor on the host, or a clear error.
void dense(const Tensor& tensor, const char* what) {
  if (!tensor.defined()) refuse(std::string(what) + ": a tensor is not defined");
  if (!tensor.device().is_cpu()) {
    refuse(std::string("not supported: ") + what + " of a tensor on " + tensor.device().str() +
           "; the backend pcie takes tensors on the CPU (use \"cpu:pcie,cuda:nccl\", or copy the tensor)");
  }
  if (tensor.layout() != at::kStrided) refuse(std::string("not supported: ") + what + " of a sparse tensor; pass tensor.to_dense()");
}

const Tensor& only(const Tensors& tensors, const char* what) {
  if (tensors.size() != 1) refuse(std::string(what) + ": " + std::to_string(tensors.size()) + " tensors, one is expected: one device a rank");
  dense(tensors[0], what);
  return tensors[0];
}

void same(const Tensor& of, const Tensor& as, int64_t numel, const char* what) {
  if (of.scalar_type() != as.scalar_type()) {
    refuse(std::string(what) + ": tensors of type " + c10::toString(of.scalar_type()) + " and " + c10::toString(as.scalar_type()) + " in one call");
  }
  if (of.numel() != numel) {
    refuse(std::string(what) + ": a tensor has " + std::to_string(of.numel()) + " elements, " + std::to_string(numel) + " are expected");
  }
}

bool overlap(const Tensor& a, const Tensor& b) {
  const auto *x = static_cast<const char*>(a.data_ptr()), *y = static_cast<const char*>(b.data_ptr());
  return a.nbytes() > 0 && b.nbytes() > 0 && x < y + b.nbytes() && y < x + a.nbytes();
}

// Whether contiguous tensors lie one behind the other.
bool adjacent(const Tensors& tensors) {
  const char* next = nullptr;
  for (const auto& tensor : tensors) {
    if (!tensor.is_contiguous() || (next != nullptr && next != tensor.data_ptr())) return false;
    next = static_cast<const char*>(tensor.data_ptr()) + tensor.nbytes();
  }
  return true;
}

Tensor real_view(const Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

// ---- Messages ----------------------------------------------------------------------------------------------------------------------

enum class Kind : uint32_t { Hello = 0x70636965, Announce, Withdraw, Grant, Refuse, Here, Passed, Failed, Bye };

// What ranks say to each other about messages and monitored barriers.
struct Packet {
  Kind kind;
  int32_t tag;
  uint64_t serial, bytes;
};

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void system_failed(const std::string& what) {
  const int error = errno;
  refuse(what + ": " + std::strerror(error), "System");
}

// The way of messages from one rank to another: a group of those two, made when the first message has been matched.
class Direction {
 public:
  Direction(std::string directory, int from, int to, bool sending)
      : directory_(std::move(directory)), from_(from), to_(to), sending_(sending) {}

  void carry(Tensor tensor, Promise work, Clock::time_point deadline) {
    lane_.add([this, tensor = std::move(tensor), work = std::move(work), deadline]() mutable {
      std::exception_ptr error;
      try {
        if (tensor.nbytes() > 0) transfer(tensor, deadline);
      } catch (const Refused& refused) {
        error = as_exception(refused.failure);
      } catch (...) {
        error = std::current_exception();
      }
      tensor = Tensor();
      work->complete(error, sending_ ? -1 : from_);
    });
  }

 private:
  void check(pcieipc_status status, uint32_t timeout_ms) {
    if (status == PCIEIPC_STATUS_OK) return;
    auto failure = last_failure(status, (sending_ ? "send to rank " : "receive from rank ") + std::to_string(sending_ ? to_ : from_), timeout_ms);
    // The library counts in the pair.
    failure.text += " (of this pair rank 0 is the group's " + std::to_string(from_) + " and rank 1 its " + std::to_string(to_) + ")";
    if (failure.rank == 0 || failure.rank == 1) failure.rank = failure.rank == 0 ? from_ : to_;
    throw Refused{failure};
  }

  void transfer(const Tensor& tensor, Clock::time_point deadline) {
    if (!pair_) {
      pcieipc_options options{};
      options.size = sizeof options;
      options.directory = directory_.c_str();
      options.rank = sending_ ? 0 : 1;
      options.ranks = 2;
      options.meeting_timeout_ms = std::min<uint32_t>(ms_until(deadline), 30'000);
      pcieipc_group* made = nullptr;
      const auto met = pcieipc_group_meet(&options, &made);
      pair_.reset(made);
      // The sender has answered that it is past the directory.
      if (!sending_) {
        for (const char* name : {"/rank-0.lock", "/rank-1.lock"}) unlink((directory_ + name).c_str());
        rmdir(directory_.c_str());
      }
      check(met, options.meeting_timeout_ms);
    }
    Tensor flat = tensor.is_contiguous() ? tensor : sending_ ? tensor.contiguous() : at::empty_like(tensor, at::MemoryFormat::Contiguous);
    const auto ms = ms_until(deadline);
    const auto bytes = static_cast<size_t>(flat.nbytes());
    if (sending_) {
      check(pcieipc_send(pair_.get(), flat.data_ptr(), bytes, PCIEIPC_TYPE_U8, 1, ms), ms);
    } else {
      check(pcieipc_receive(pair_.get(), flat.data_ptr(), bytes, PCIEIPC_TYPE_U8, 0, ms), ms);
      if (!flat.is_same(tensor)) tensor.copy_(flat);
    }
  }

  const std::string directory_;
  const int from_, to_;
  const bool sending_;
  Group pair_;
  // Ends before the pair does.
  Lane lane_;
};

// Matches sends with receives, and knows who reached a monitored barrier. A send is announced; the receiver, who knows all announcements and all
// that it waits for, grants it when it has found its receive; then both ends carry it, in the order of the grants.
class Post {
 public:
  Post(std::string directory, int rank, int ranks, Clock::time_point deadline)
      : directory_(std::move(directory)), rank_(rank), peers_(ranks), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (wake_.get() < 0) system_failed("eventfd");
    meet(deadline);
    thread_ = std::thread([this] { run(); });
  }

  ~Post() {
    if (getpid() != process_) {
      thread_.detach();
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& peer : peers_) say(peer, {Kind::Bye, 0, 0, 0});
      closing_ = Clock::now() + std::chrono::seconds(1);
    }
    ring();
    thread_.join();
    std::vector<Promise> left;
    for (auto& peer : peers_)
      for (auto& [serial, send] : peer.sends) left.push_back(send.work);
    for (auto& receive : receives_) left.push_back(receive.work);
    for (auto& work : left) work->complete(as_exception({"Aborted", "the message was not matched before this rank left the group"}));
  }

  void send(const Tensor& tensor, int to, int tag, Promise work, milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& peer = peers_.at(to);
    if (peer.gone) {
      const auto failure = *peer.gone;
      lock.unlock();
      work->complete(as_exception(failure));
      return;
    }
    const auto serial = next_serial_++;
    peer.sends.emplace(serial, Send{tensor, std::move(work), Clock::now() + timeout, timeout});
    say(peer, {Kind::Announce, tag, serial, static_cast<uint64_t>(tensor.nbytes())});
    lock.unlock();
    ring();
  }

  // `from` below 0: from any rank.
  void receive(const Tensor& tensor, int from, int tag, Promise work, milliseconds timeout) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      receives_.push_back({tensor, std::move(work), Clock::now() + timeout, timeout, from, tag});
    }
    ring();
  }

  // Rank 0 waits for all and says who did not come; the others wait for what it says.
  void monitored_barrier(milliseconds timeout, bool name_all) {
    const auto deadline = Clock::now() + timeout;
    std::unique_lock<std::mutex> lock(mutex_);
    const auto serial = next_barrier_++;
    auto& state = barriers_[serial];
    if (rank_ != 0) {
      if (!peers_[0].gone) say(peers_[0], {Kind::Here, 0, serial, 0});
      lock.unlock();
      ring();
      lock.lock();
      const bool told = changed_.wait_until(lock, deadline, [&] { return state.verdict || peers_[0].gone; });
      const auto verdict = state.verdict;
      const auto gone = peers_[0].gone;
      barriers_.erase(serial);
      lock.unlock();
      if (verdict && *verdict) return;
      const std::string text = "[Rank " + std::to_string(rank_) + "]: Rank " + std::to_string(rank_) +
                               " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0."
                               " Please check rank 0 logs for faulty rank.";
      if (verdict || !told) std::rethrow_exception(as_exception({verdict ? "Aborted" : "Timeout", text, 0}));
      auto failure = *gone;
      failure.text = text + " " + failure.text;
      std::rethrow_exception(as_exception(failure));
    }
    const auto missing = [&] {
      std::vector<int> ranks;
      for (int peer = 1; peer < static_cast<int>(peers_.size()); ++peer)
        if (state.here.count(peer) == 0) ranks.push_back(peer);
      return ranks;
    };
    const auto nobody_more = [&] {
      for (int peer : missing())
        if (!peers_[peer].gone) return false;
      return true;
    };
    if (!changed_.wait_until(lock, deadline, nobody_more) && timeout <= milliseconds::zero()) {
      // No time to find out who comes.
      lock.unlock();
      std::rethrow_exception(as_exception({"Timeout", "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms", 0}));
    }
    const auto late = missing();
    for (int peer : state.here) say(peers_[peer], {late.empty() ? Kind::Passed : Kind::Failed, 0, serial, 0});
    barriers_.erase(serial);
    lock.unlock();
    ring();
    if (late.empty()) return;
    std::string names;
    for (int peer : late) {
      if (!names.empty() && !name_all) break;
      names += (names.empty() ? "" : ", ") + std::to_string(peer);
    }
    const std::string text = "[Rank 0]: " + std::string(name_all ? "Ranks " : "Rank ") + names + " failed to pass monitoredBarrier in " +
                             std::to_string(timeout.count()) + " ms";
    std::rethrow_exception(as_exception({"Timeout", text, late.front()}));
  }

 private:
  struct Send {
    Tensor tensor;
    Promise work;
    Clock::time_point deadline;
    milliseconds timeout;
  };
  struct Receive {
    Tensor tensor;
    Promise work;
    Clock::time_point deadline;
    milliseconds timeout;
    int from, tag;
  };
  struct Announced {
    uint64_t arrival, serial, bytes;
    int tag;
  };
  struct Peer {
    Fd socket;
    std::deque<Packet> outbox;
    std::deque<Announced> announced;
    std::map<uint64_t, Send> sends;
    std::unique_ptr<Direction> outward, inward;
    std::optional<Failure> gone;
  };
  struct Barrier {
    std::set<int> here;
    std::optional<bool> verdict;
  };
  struct Ended {
    Promise work;
    Failure failure;
  };

  // A socket to each other rank: the lower ones are called, the higher ones call.
  void meet(Clock::time_point deadline) {
    const auto path_of = [this](int rank) { return directory_ + "/post-" + std::to_string(rank); };
    const auto address_of = [&](int rank) {
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      const auto path = path_of(rank);
      if (path.size() >= sizeof address.sun_path) refuse(path + " is too long for a Unix socket: set XDG_RUNTIME_DIR to a shorter folder");
      std::memcpy(address.sun_path, path.c_str(), path.size());
      return address;
    };
    const auto make = [] {
      Fd made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
      if (made.get() < 0) system_failed("socket");
      return made;
    };
    const auto late = [&](const char* what) {
      refuse("rank " + std::to_string(rank_) + " waited for " + what + " until the timeout: look at what the other ranks are doing", "Meeting");
    };
    const int ranks = static_cast<int>(peers_.size());
    Fd listener = make();
    const auto own = address_of(rank_);
    if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) != 0) system_failed("bind " + path_of(rank_));
    if (listen(listener.get(), ranks + 1) != 0) system_failed("listen");
    for (int lower = 0; lower < rank_; ++lower) {
      const auto address = address_of(lower);
      for (;;) {
        Fd made = make();
        if (connect(made.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
          const Packet hello{Kind::Hello, rank_, 0, 0};
          if (::send(made.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) system_failed("send");
          peers_[lower].socket = std::move(made);
          break;
        }
        if (errno != ENOENT && errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) system_failed("connect " + path_of(lower));
        if (Clock::now() > deadline) late("a lower rank to listen");
        std::this_thread::sleep_for(milliseconds(2));
      }
    }
    const auto readable = [&](int fd, const char* what) {
      pollfd waiting{fd, POLLIN, 0};
      while (poll(&waiting, 1, static_cast<int>(std::min<uint32_t>(ms_until(deadline), 1000))) <= 0)
        if (Clock::now() > deadline) late(what);
    };
    for (int missing = ranks - 1 - rank_; missing > 0;) {
      readable(listener.get(), "a higher rank to call");
      Fd made(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (made.get() < 0) continue;
      ucred who{};
      socklen_t length = sizeof who;
      if (getsockopt(made.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0 || who.uid != geteuid()) continue;
      readable(made.get(), "a rank that called to say who it is");
      Packet hello{};
      if (recv(made.get(), &hello, sizeof hello, 0) != sizeof hello || hello.kind != Kind::Hello) continue;
      if (hello.tag <= rank_ || hello.tag >= ranks || peers_[hello.tag].socket.get() >= 0) continue;
      peers_[hello.tag].socket = std::move(made);
      --missing;
    }
    unlink(path_of(rank_).c_str());
  }

  void ring() {
    const uint64_t one = 1;
    // It is full only when it is signalled already.
    [[maybe_unused]] auto written = write(wake_.get(), &one, sizeof one);
  }

  void say(Peer& peer, Packet packet) {
    if (!peer.gone && peer.socket.get() >= 0) peer.outbox.push_back(packet);
  }

  std::string way(int from, int to) const { return directory_ + "-" + std::to_string(from) + "-" + std::to_string(to); }

  void run() {
    for (;;) {
      std::vector<pollfd> waiting{{wake_.get(), POLLIN, 0}};
      std::vector<int> ranks{-1};
      int wait_ms;
      std::vector<Ended> ended;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        flush();
        match(ended);
        expire(ended);
        flush();
        bool unsaid = false;
        for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
          auto& peer = peers_[rank];
          if (peer.socket.get() < 0 || peer.gone) continue;
          const bool more = !peer.outbox.empty();
          unsaid |= more;
          waiting.push_back({peer.socket.get(), static_cast<short>(POLLIN | (more ? POLLOUT : 0)), 0});
          ranks.push_back(rank);
        }
        if (closing_ && (!unsaid || Clock::now() >= *closing_)) return;
        wait_ms = closing_ ? 50 : next_wait();
      }
      for (auto& [work, failure] : ended) work->complete(as_exception(failure));
      changed_.notify_all();
      if (!ended.empty()) continue;
      if (poll(waiting.data(), waiting.size(), wait_ms) < 0 && errno != EINTR) wait_ms = 50;
      uint64_t count;
      [[maybe_unused]] auto drained = read(wake_.get(), &count, sizeof count);
      std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 1; i < waiting.size(); ++i)
        if (waiting[i].revents & (POLLIN | POLLHUP | POLLERR)) hear(ranks[i]);
    }
  }

  int next_wait() const {
    auto next = Clock::time_point::max();
    for (const auto& peer : peers_)
      for (const auto& [serial, send] : peer.sends) next = std::min(next, send.deadline);
    for (const auto& receive : receives_) next = std::min(next, receive.deadline);
    return next == Clock::time_point::max() ? -1 : static_cast<int>(std::min<uint32_t>(ms_until(next) + 1, 60'000));
  }

  void flush() {
    for (auto& peer : peers_) {
      while (!peer.outbox.empty() && !peer.gone) {
        const auto& packet = peer.outbox.front();
        if (::send(peer.socket.get(), &packet, sizeof packet, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof packet) break;
        peer.outbox.pop_front();
      }
    }
  }

  void hear(int rank) {
    auto& peer = peers_[rank];
    while (!peer.gone) {
      Packet packet{};
      const auto got = recv(peer.socket.get(), &packet, sizeof packet, MSG_DONTWAIT);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (got <= 0) {
        peer.gone = Failure{"PeerDied", "rank " + std::to_string(rank) + " died; make a new group without it", rank};
        return;
      }
      if (got != sizeof packet) {
        peer.gone = Failure{"Corrupt", "rank " + std::to_string(rank) + " sent a packet of " + std::to_string(got) + " bytes", rank};
        return;
      }
      hear(rank, peer, packet);
    }
  }

  void hear(int rank, Peer& peer, const Packet& packet) {
    switch (packet.kind) {
      case Kind::Announce: peer.announced.push_back({next_arrival_++, packet.serial, packet.bytes, packet.tag}); break;
      case Kind::Withdraw: {
        auto& all = peer.announced;
        all.erase(std::remove_if(all.begin(), all.end(), [&](const auto& a) { return a.serial == packet.serial; }), all.end());
        break;
      }
      case Kind::Grant: {
        const auto found = peer.sends.find(packet.serial);
        // Withdrawn in the meantime: the receiver's own deadline ends its wait.
        if (found == peer.sends.end()) break;
        if (!peer.outward) peer.outward = std::make_unique<Direction>(way(rank_, rank), rank_, rank, true);
        peer.outward->carry(std::move(found->second.tensor), std::move(found->second.work), Clock::now() + found->second.timeout);
        peer.sends.erase(found);
        break;
      }
      case Kind::Refuse: {
        const auto found = peer.sends.find(packet.serial);
        if (found == peer.sends.end()) break;
        refused_.push_back({std::move(found->second.work), mismatch("send to rank ", rank, static_cast<uint64_t>(found->second.tensor.nbytes()), packet.bytes)});
        peer.sends.erase(found);
        break;
      }
      case Kind::Here:
        if (packet.serial < next_barrier_ && barriers_.count(packet.serial) == 0) say(peer, {Kind::Failed, 0, packet.serial, 0});
        else barriers_[packet.serial].here.insert(rank);
        break;
      case Kind::Passed: case Kind::Failed: {
        const auto found = barriers_.find(packet.serial);
        if (found != barriers_.end()) found->second.verdict = packet.kind == Kind::Passed;
        break;
      }
      case Kind::Bye:
        peer.gone = Failure{"Aborted", "rank " + std::to_string(rank) + " has left the group", rank};
        break;
      default:
        peer.gone = Failure{"Corrupt", "rank " + std::to_string(rank) + " sent a packet of an unknown kind", rank};
    }
  }

  static Failure mismatch(const std::string& what, int rank, uint64_t ours, uint64_t theirs) {
    return {"Mismatch", what + std::to_string(rank) + ": the tensor has " + std::to_string(ours) + " bytes here and " + std::to_string(theirs) +
                            " there; both ends must have the same shape and type", rank};
  }

  void match(std::vector<Ended>& ended) {
    std::move(refused_.begin(), refused_.end(), std::back_inserter(ended));
    refused_.clear();
    for (auto at = receives_.begin(); at != receives_.end();) {
      int source = -1;
      std::deque<Announced>::iterator best;
      for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
        if (at->from >= 0 && at->from != rank) continue;
        auto& all = peers_[rank].announced;
        const auto found = std::find_if(all.begin(), all.end(), [&](const auto& a) { return a.tag == at->tag; });
        if (found != all.end() && !is_lost(peers_[rank]) && (source < 0 || found->arrival < best->arrival)) source = rank, best = found;
      }
      if (source < 0) {
        ++at;
        continue;
      }
      auto& peer = peers_[source];
      const auto bytes = static_cast<uint64_t>(at->tensor.nbytes());
      if (best->bytes == bytes) {
        say(peer, {Kind::Grant, 0, best->serial, bytes});
        if (!peer.inward) peer.inward = std::make_unique<Direction>(way(source, rank_), source, rank_, false);
        peer.inward->carry(std::move(at->tensor), std::move(at->work), Clock::now() + at->timeout);
      } else {
        say(peer, {Kind::Refuse, 0, best->serial, bytes});
        ended.push_back({std::move(at->work), mismatch("receive from rank ", source, bytes, best->bytes)});
      }
      peer.announced.erase(best);
      at = receives_.erase(at);
    }
  }

  static bool is_lost(const Peer& peer) { return peer.gone.has_value(); }

  void expire(std::vector<Ended>& ended) {
    const auto now = Clock::now();
    for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
      auto& peer = peers_[rank];
      for (auto at = peer.sends.begin(); at != peer.sends.end();) {
        if (!peer.gone && at->second.deadline > now) {
          ++at;
          continue;
        }
        if (peer.gone) {
          ended.push_back({std::move(at->second.work), about("send to rank ", rank, *peer.gone)});
        } else {
          say(peer, {Kind::Withdraw, 0, at->first, 0});
          ended.push_back({std::move(at->second.work), late("send to rank ", rank, at->second.timeout, "it did not receive")});
        }
        at = peer.sends.erase(at);
      }
    }
    for (auto at = receives_.begin(); at != receives_.end();) {
      const auto* gone = lost_source(at->from);
      if (gone == nullptr && at->deadline > now) {
        ++at;
        continue;
      }
      ended.push_back({std::move(at->work), gone != nullptr ? about("receive from rank ", at->from, *gone)
                                                             : late("receive from rank ", at->from, at->timeout, "it did not send")});
      at = receives_.erase(at);
    }
  }

  // Why a receive can no longer be served, if so. One from any rank ends with the first that died.
  const Failure* lost_source(int from) const {
    if (from >= 0) return peers_[from].gone ? &*peers_[from].gone : nullptr;
    bool all = true;
    for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
      if (rank == rank_) continue;
      const auto& gone = peers_[rank].gone;
      if (gone && gone->status != "Aborted") return &*gone;
      all &= gone.has_value();
    }
    for (int rank = 0; all && rank < static_cast<int>(peers_.size()); ++rank)
      if (peers_[rank].gone) return &*peers_[rank].gone;
    return nullptr;
  }

  static std::string name(int rank) { return rank < 0 ? "(any)" : std::to_string(rank); }

  static Failure about(const std::string& what, int rank, Failure why) {
    why.text = what + name(rank) + " ended by " + why.status + ": " + why.text;
    return why;
  }

  static Failure late(const std::string& what, int rank, milliseconds timeout, const std::string& why) {
    return {"Timeout", what + name(rank) + " ended by timeout after " + std::to_string(timeout.count()) + " ms: " + why, rank};
  }

  const std::string directory_;
  const int rank_;
  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::list<Receive> receives_;
  std::vector<Ended> refused_;
  std::map<uint64_t, Barrier> barriers_;
  uint64_t next_serial_ = 0, next_arrival_ = 0, next_barrier_ = 0;
  std::optional<Clock::time_point> closing_;
  Fd wake_;
  std::thread thread_;
};

// ---- The backend -------------------------------------------------------------------------------------------------------------------

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
};

// How many groups of this process have an endpoint of the module.
std::atomic<int> endpoints_held{0};

class PcieBackend final : public c10d::Backend {
 public:
  explicit PcieBackend(Settings settings) : Backend(settings.rank, settings.size), settings_(std::move(settings)) {
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
    if (settings_.transport == PCIEIPC_TRANSPORT_KMOD) ++endpoints_held;
    std::lock_guard<std::mutex> lock(living_mutex());
    living().insert(this);
  }

  ~PcieBackend() override {
    {
      std::lock_guard<std::mutex> lock(living_mutex());
      living().erase(this);
    }
    leave();
  }

  // Ends all work in order and leaves the group. Idempotent.
  void leave() {
    if (getpid() != process_) {
      // A child made by fork is no member: what the parent holds stays as it is.
      (void)post_.release();
      (void)lane_.release();
      (void)last_lane_.release();
      (void)group_.release();
      (void)last_.release();
      return;
    }
    std::optional<py::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    std::lock_guard<std::mutex> lock(leaving_);
    lane_.reset();
    last_lane_.reset();
    post_.reset();
    if (group_ && settings_.transport == PCIEIPC_TRANSPORT_KMOD) --endpoints_held;
    group_.reset();
    last_.reset();
  }

  static void leave_all() {
    std::vector<c10::intrusive_ptr<PcieBackend>> all;
    {
      std::lock_guard<std::mutex> lock(living_mutex());
      for (auto* one : living()) all.push_back(c10::intrusive_ptr<PcieBackend>::unsafe_reclaim_from_nonowning(one));
    }
    for (auto& one : all) {
      // The process ends: who waits for a rank that does not come is not waited for, and lives until then.
      if (one->is_idle_within(std::chrono::seconds(10))) one->leave();
      else (void)one.release();
    }
  }

  bool is_idle_within(milliseconds patience) {
    py::gil_scoped_release released;
    return (!lane_ || lane_->is_idle_within(patience)) && (!last_lane_ || last_lane_->is_idle_within(patience));
  }

  // Makes the further calls of all ranks fail with this reason, once what was asked for before has ended.
  void abort_with(const std::string& why) {
    if (!lane_) return;
    lane_->add([this, why] {
      pcieipc_group_abort(group_.get(), why.c_str());
      if (!broken_) broken_ = Failure{"Aborted", "aborted by this rank: " + why, rank_};
    });
  }

  // Goes on without the ranks that are lost; answers which ranks of the group are left. Only for making a new group of them.
  std::vector<int> survivors(uint32_t timeout_ms) {
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

  const std::string getBackendName() const override { return "pcie"; }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const auto tensor = only(tensors, "broadcast");
    member(opts.rootRank, "broadcast", "root");
    if (settings_.outer) return settings_.outer->broadcast(tensors, opts);
    const auto root = static_cast<uint32_t>(opts.rootRank);
    return run(OpType::BROADCAST, "pcie:broadcast", "broadcast", {tensor}, {tensor}, opts.timeout, [this, tensor, root](uint32_t ms) {
      auto flat = tensor.contiguous();
      const auto span = span_of(flat);
      check(pcieipc_broadcast(group_.get(), span.at, span.count, span.element, root, ms), "broadcast", ms);
      give_back(tensor, flat);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
    const auto tensor = only(tensors, "all_reduce");
    return reduce_all({tensor}, opts.reduceOp, OpType::ALLREDUCE, opts.timeout);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    if (tensors.empty()) refuse("all_reduce_coalesced: it needs a non-empty tensor list");
    for (const auto& tensor : tensors) {
      dense(tensor, "all_reduce_coalesced");
      if (tensor.scalar_type() != tensors[0].scalar_type()) refuse("all_reduce_coalesced: the tensors must have the same type");
    }
    return reduce_all(tensors, opts.reduceOp, OpType::ALLREDUCE_COALESCED, opts.timeout);
  }

  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    if (tensors.size() != 1 || !tensors[0].is_sparse() || !tensors[0].device().is_cpu()) refuse("all_reduce of a sparse tensor: one COO tensor on the CPU is expected");
    if (opts.reduceOp.op_ != ReduceOp::SUM) refuse("not supported: all_reduce of a sparse tensor with another operation than SUM");
    if (settings_.outer) return settings_.outer->allreduce(tensors, opts);
    const auto tensor = tensors[0];
    return run(OpType::_ALLREDUCE_SPARSE, "pcie:all_reduce", "all_reduce", {tensor}, {tensor}, opts.timeout,
               [this, tensor](uint32_t ms) { sum_sparse(tensor, ms); });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const auto tensor = only(tensors, "reduce");
    member(opts.rootRank, "reduce", "root");
    const auto how = reduction_of(tensor, opts.reduceOp, "reduce");
    if (settings_.outer) return settings_.outer->reduce(tensors, opts);
    const auto root = static_cast<uint32_t>(opts.rootRank);
    return run(OpType::REDUCE, "pcie:reduce", "reduce", {tensor}, {tensor}, opts.timeout, [this, tensor, how, root](uint32_t ms) {
      const bool here = rank_ == static_cast<int>(root);
      auto flat = real_view(tensor).contiguous();
      if (how.bits != Bits::None) {
        auto copy = flat.clone();
        combine_bits(copy, how.bits, ms);
        if (here) real_view(tensor).copy_(copy);
        return;
      }
      auto to = here ? at::empty_like(flat) : Tensor();
      check(pcieipc_reduce(group_.get(), flat.data_ptr(), here ? to.data_ptr() : nullptr, flat.numel(), how.element, how.operation, root, ms), "reduce", ms);
      if (here) real_view(tensor).copy_(to);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    const auto input = only(inputs, "all_gather");
    if (outputs.size() != 1) refuse("all_gather: one list of output tensors is expected");
    gathered(outputs[0], input, "all_gather");
    if (settings_.outer) return settings_.outer->allgather(outputs, inputs, opts);
    const auto list = outputs[0];
    return run(OpType::ALLGATHER, "pcie:all_gather", "all_gather", {input}, list, opts.timeout,
               [this, list, input](uint32_t ms) { gather_all(list, input, ms); });
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    return allgather_into({output}, {input}, OpType::_ALLGATHER_BASE, "pcie:_all_gather_base", opts);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return allgather_into(outputs, inputs, OpType::COALESCED, "pcie:all_gather_coalesced", opts);
  }

  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
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

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    const auto input = only(inputs, "gather");
    member(opts.rootRank, "gather", "root");
    const int root = static_cast<int>(opts.rootRank);
    if (rank_ == root && outputs.size() != 1) refuse("gather: the root gives one list of output tensors");
    if (rank_ != root && !outputs.empty()) refuse("gather: only the root gives output tensors");
    const auto list = rank_ == root ? outputs[0] : Tensors();
    if (rank_ == root) gathered(list, input, "gather");
    if (settings_.outer) return settings_.outer->gather(outputs, inputs, opts);
    return run(OpType::GATHER, "pcie:gather", "gather", {input}, list, opts.timeout, [this, list, input, root](uint32_t ms) {
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

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    const auto output = only(outputs, "scatter");
    member(opts.rootRank, "scatter", "root");
    const int root = static_cast<int>(opts.rootRank);
    if (rank_ == root && inputs.size() != 1) refuse("scatter: the root gives one list of input tensors");
    if (rank_ != root && !inputs.empty()) refuse("scatter: only the root gives input tensors");
    const auto list = rank_ == root ? inputs[0] : Tensors();
    if (rank_ == root) gathered(list, output, "scatter");
    if (settings_.outer) return settings_.outer->scatter(outputs, inputs, opts);
    return run(OpType::SCATTER, "pcie:scatter", "scatter", list, {output}, opts.timeout, [this, list, output, root](uint32_t ms) {
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

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
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

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return reduce_scatter_from({output}, {input}, OpType::_REDUCE_SCATTER_BASE, opts);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    return reduce_scatter_from(outputs, inputs, OpType::COALESCED, opts);
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override {
    dense(output, "all_to_all");
    dense(input, "all_to_all");
    if (output.scalar_type() != input.scalar_type()) refuse("all_to_all: input and output must have the same type");
    const auto from = parts(input, input_splits, "input"), to = parts(output, output_splits, "output");
    if (settings_.outer) return settings_.outer->alltoall_base(output, input, output_splits, input_splits, opts);
    const Tensor in = input, out = output;
    return run(OpType::ALLTOALL_BASE, "pcie:all_to_all", "all_to_all", {in}, {out}, opts.timeout, [this, in, out, from, to](uint32_t ms) {
      const auto source = in.contiguous();
      auto target = out.contiguous();
      exchange(cut(source, from), cut(target, to), ms);
      give_back(out, target);
    });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
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
    return run(OpType::ALLTOALL, "pcie:all_to_all", "all_to_all", from, to, opts.timeout, [this, from, to](uint32_t ms) {
      Tensors sources, targets;
      for (const auto& tensor : from) sources.push_back(tensor.contiguous());
      for (const auto& tensor : to) targets.push_back(tensor.contiguous());
      exchange(sources, targets, ms);
      for (size_t i = 0; i < to.size(); ++i) give_back(to[i], targets[i]);
    });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    const auto tensor = only(tensors, "send");
    other(to, "send");
    if (settings_.outer) return settings_.outer->send(tensors, to, tag);
    auto work = c10::make_intrusive<PcieWork>(OpType::SEND, "pcie:send", Tensors{tensor}, Tensors{});
    post().send(tensor, to, tag, work, settings_.timeout);
    return work;
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    const auto tensor = only(tensors, "recv");
    other(from, "recv");
    if (settings_.outer) return settings_.outer->recv(tensors, from, tag);
    auto work = c10::make_intrusive<PcieWork>(OpType::RECV, "pcie:recv", Tensors{tensor}, Tensors{tensor});
    post().receive(tensor, from, tag, work, settings_.timeout);
    return work;
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    const auto tensor = only(tensors, "recv");
    if (settings_.outer) return settings_.outer->recvAnysource(tensors, tag);
    auto work = c10::make_intrusive<PcieWork>(OpType::RECVANYSOURCE, "pcie:recvAnySource", Tensors{tensor}, Tensors{tensor});
    post().receive(tensor, -1, tag, work, settings_.timeout);
    return work;
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    if (settings_.outer) return outer_barrier(opts);
    return run(OpType::BARRIER, "pcie:barrier", "barrier", {}, {}, opts.timeout,
               [this](uint32_t ms) { check(pcieipc_barrier(group_.get(), ms), "barrier", ms); });
  }

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool name_all) override {
    if (settings_.outer) return settings_.outer->monitoredBarrier(opts, name_all);
    ++sequence_;
    if (post_) post_->monitored_barrier(opts.timeout < milliseconds::zero() ? settings_.timeout : opts.timeout, name_all);
  }

  std::vector<int> host_ranks() const { return settings_.local; }
  bool spans_hosts() const { return static_cast<bool>(settings_.outer); }

 private:
  static std::mutex& living_mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::set<PcieBackend*>& living() {
    static auto* all = new std::set<PcieBackend*>;
    return *all;
  }

  Group meet(const std::string& directory, uint32_t transport, Clock::time_point deadline) {
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

  Post& post() {
    if (!lane_) refuse("this rank has left the group", "Aborted");
    if (!post_) refuse("a group of one rank has nobody to send to or receive from");
    return *post_;
  }

  void member(int64_t rank, const char* what, const char* role) const {
    if (rank < 0 || rank >= size_) refuse(std::string(what) + ": " + role + " " + std::to_string(rank) + " is no rank of this group of " + std::to_string(size_));
  }

  void other(int rank, const char* what) const {
    member(rank, what, "peer");
    if (rank == rank_) refuse(std::string(what) + ": rank " + std::to_string(rank) + " is this rank; copy the tensor instead");
  }

  milliseconds timeout_of(milliseconds asked) const { return asked > milliseconds::zero() ? asked : settings_.timeout; }

  // Throws what a call of the library answered; its ranks count in this host.
  void check(pcieipc_status status, const char* what, uint32_t ms) const {
    if (status == PCIEIPC_STATUS_OK) return;
    auto failure = last_failure(status, what, ms);
    if (failure.rank >= 0 && failure.rank < local_size_) failure.rank = settings_.local[failure.rank];
    throw Refused{failure};
  }

  static void give_back(const Tensor& to, const Tensor& flat) {
    if (!flat.is_same(to)) to.copy_(flat);
  }

  // What a body's exceptions mean for the work, and for the group.
  std::exception_ptr attempt(const char* what, const std::function<void()>& body) {
    try {
      if (broken_) {
        auto again = *broken_;
        again.text = std::string(what) + ": the group ended before: " + again.text;
        return as_exception(again);
      }
      body();
      return nullptr;
    } catch (const Refused& refused) {
      if (refused.ends_group) broken_ = refused.failure;
      return as_exception(refused.failure);
    } catch (const std::exception& error) {
      // The other ranks may be in the middle of the same call.
      pcieipc_group_abort(group_.get(), error.what());
      broken_ = Failure{"Internal", error.what()};
      return std::current_exception();
    }
  }

  WorkPtr run(OpType op, const char* title, const char* what, const Tensors& inputs, Tensors outputs, milliseconds timeout,
              std::function<void(uint32_t)> body) {
    if (!lane_) refuse(std::string(what) + ": this rank has left the group", "Aborted");
    ++sequence_;
    auto work = c10::make_intrusive<PcieWork>(op, title, inputs, std::move(outputs));
    const auto ms = clamp_ms(timeout_of(timeout));
    lane_->add([this, work, what, ms, body = std::move(body)]() mutable {
      const auto error = attempt(what, [&] { body(ms); });
      // The tensors are the caller's again.
      body = nullptr;
      work->complete(error);
    });
    return work;
  }

  // ---- All-reduce

  WorkPtr reduce_all(const Tensors& tensors, const ReduceOp& op, OpType type, milliseconds timeout) {
    const auto how = reduction_of(tensors[0], op, "all_reduce");
    if (settings_.outer) return reduce_all_between_hosts(tensors, op, how, type, timeout);
    return run(type, "pcie:all_reduce", "all_reduce", tensors, tensors, timeout, [this, tensors, how](uint32_t ms) {
      for (const auto& tensor : tensors) {
        const auto real = real_view(tensor);
        auto flat = real.contiguous();
        if (how.bits != Bits::None) combine_bits(flat, how.bits, ms);
        else check(pcieipc_all_reduce(group_.get(), flat.data_ptr(), flat.numel(), how.element, how.operation, ms), "all_reduce", ms);
        give_back(real, flat);
      }
    });
  }

  // Bitwise operations are made here, in pieces, from what all ranks gather.
  void combine_bits(Tensor& flat, Bits bits, uint32_t ms) {
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

  void sum_sparse(const Tensor& tensor, uint32_t ms) {
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

  // ---- All-reduce between hosts

  struct Between {
    Tensor real, flat, shard;
    bool whole;
    int64_t each;
  };

  WorkPtr reduce_all_between_hosts(const Tensors& tensors, const ReduceOp& op, Reduction how, OpType type, milliseconds timeout) {
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

  std::exception_ptr attempt_last(const std::function<void()>& body) {
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

  // Leaves this rank's shard, combined inside the host, in `shard`.
  Between inside_first(const Tensor& real, const Reduction& how, uint32_t ms) {
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

  void inside_last(Between& stage, uint32_t element, uint32_t ms) {
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

  WorkPtr outer_barrier(const c10d::BarrierOptions& opts) {
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

  // ---- Gather, scatter, exchange

  void gathered(const Tensors& list, const Tensor& one, const char* what) const {
    if (list.size() != static_cast<size_t>(size_)) {
      refuse(std::string(what) + ": " + std::to_string(list.size()) + " tensors, one for each of " + std::to_string(size_) + " ranks is expected");
    }
    for (const auto& tensor : list) {
      dense(tensor, what);
      same(tensor, one, one.numel(), what);
    }
  }

  // Contiguous tensors that lie one behind the other, as one.
  static Tensor view_of(const Tensors& list) {
    return at::from_blob(list[0].data_ptr(), {static_cast<int64_t>(list.size()) * list[0].numel()}, list[0].options());
  }

  static Tensor flatten(const Tensors& list) {
    Tensors lines;
    for (const auto& tensor : list) lines.push_back(tensor.reshape({-1}));
    return at::cat(lines);
  }

  void gather_all(const Tensors& list, const Tensor& input, uint32_t ms) {
    auto source = input.contiguous();
    const bool in_place = adjacent(list);
    auto all = in_place ? view_of(list) : at::empty({static_cast<int64_t>(list.size()), input.numel()}, input.options().requires_grad(false));
    if (overlap(all, source)) source = source.clone();
    const auto span = span_of(source);
    check(pcieipc_all_gather(group_.get(), span.at, all.data_ptr(), span.count, span.element, ms), "all_gather", ms);
    if (in_place) return;
    for (size_t rank = 0; rank < list.size(); ++rank) list[rank].copy_(all[static_cast<int64_t>(rank)].view(list[rank].sizes()));
  }

  WorkPtr allgather_into(const Tensors& outputs, const Tensors& inputs, OpType type, const char* title, const c10d::AllgatherOptions& opts) {
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
        const auto span = span_of(source);
        check(pcieipc_all_gather(group_.get(), span.at, target.data_ptr(), span.count, span.element, ms), "all_gather_into_tensor", ms);
        give_back(outputs[i], target);
      }
    });
  }

  void scatter_reduced(const Tensor& output, const Tensor& input, const Reduction& how, uint32_t ms) {
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
    check(pcieipc_reduce_scatter(group_.get(), source.data_ptr(), target.data_ptr(), target.numel(), how.element, how.operation, ms), "reduce_scatter", ms);
    give_back(real, target);
  }

  WorkPtr reduce_scatter_from(const Tensors& outputs, const Tensors& inputs, OpType type, const c10d::ReduceScatterOptions& opts) {
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

  // How many elements each rank's part has.
  std::vector<int64_t> parts(const Tensor& tensor, const std::vector<int64_t>& splits, const char* which) const {
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

  static Tensors cut(const Tensor& flat, const std::vector<int64_t>& counts) {
    Tensors pieces;
    int64_t at = 0;
    for (auto count : counts) {
      pieces.push_back(flat.view({-1}).narrow(0, at, count));
      at += count;
    }
    return pieces;
  }

  // Part p of `from` goes to rank p; parts may have any length. All ranks first learn all lengths, so a disagreement is the same error on
  // all of them and the group goes on.
  void exchange(Tensors from, const Tensors& to, uint32_t ms) {
    const char* what = "all_to_all";
    const size_t ranks = size_;
    std::vector<int64_t> own, all(2 * ranks * ranks);
    for (const auto& part : from) own.push_back(part.nbytes());
    for (const auto& part : to) own.push_back(part.nbytes());
    check(pcieipc_all_gather(group_.get(), own.data(), all.data(), own.size(), PCIEIPC_TYPE_I64, ms), what, ms);
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

  const Settings settings_;
  const pid_t process_ = getpid();
  int local_rank_ = 0, local_size_ = 1;
  Group group_, last_;
  // Why the group ended, if it has. Only its thread looks.
  std::optional<Failure> broken_;
  std::atomic<uint64_t> sequence_{0};
  std::mutex leaving_;
  std::unique_ptr<Post> post_;
  // In this order, so that the first ends before what it hands on to.
  std::unique_ptr<Lane> last_lane_, lane_;
};

}  // namespace

PYBIND11_MODULE(_backend, m) {
  m.doc() = "The C++ part of pcieipc.torch.";
  // Typed errors, wherever pybind11 meets them.
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (python_error& error) {
      error.restore();
    }
  });
  py::class_<PcieBackend, c10d::Backend, c10::intrusive_ptr<PcieBackend>>(m, "PcieBackend")
      .def(py::init([](int rank, int size, int64_t timeout_ms, int64_t meeting_timeout_ms, std::string directory, std::vector<int> local, uint32_t transport, int endpoint,
                       size_t ring_bytes, uint32_t algorithm, const c10::intrusive_ptr<c10d::Backend>& outer,
                       const c10::intrusive_ptr<c10d::Backend>& owners, int shards) {
             py::gil_scoped_release released;
             return c10::make_intrusive<PcieBackend>(Settings{rank, size, milliseconds(timeout_ms), milliseconds(meeting_timeout_ms), std::move(directory), std::move(local), transport,
                                                              endpoint, ring_bytes, algorithm, outer, owners, shards});
           }),
           py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("timeout_ms"), py::arg("meeting_timeout_ms"), py::arg("directory"), py::arg("local"), py::arg("transport"),
           py::arg("endpoint"), py::arg("ring_bytes"), py::arg("algorithm"), py::arg("outer"), py::arg("owners"), py::arg("shards"))
      .def("leave", &PcieBackend::leave)
      .def("abort_with", &PcieBackend::abort_with, py::call_guard<py::gil_scoped_release>())
      .def("survivors", &PcieBackend::survivors, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("host_ranks", &PcieBackend::host_ranks)
      .def_property_readonly("spans_hosts", &PcieBackend::spans_hosts);
  m.def("leave_all", &PcieBackend::leave_all);
  m.def("holds_endpoint", [] { return endpoints_held > 0; });
}
