// SPDX-License-Identifier: MIT OR Apache-2.0
#include "device.h"

#include <future>
#include <thread>
#include <tuple>

#include "backend.h"

namespace pcieipc_torch {

// ---- The communicator

// Nobody waits for it with the interpreter's lock, which making the communicator needs.
std::unique_lock<std::mutex> OnDevice::lock() {
  std::optional<py::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  return std::unique_lock<std::mutex>(mutex_);
}

void OnDevice::make(c10::Device device) {
  int64_t id = 0, index = 0, type = 0, handle = 0;
  {
    py::gil_scoped_acquire gil;
    try {
      std::tie(id, index, type, handle) =
          py::module_::import("pcieipc.torch").attr("_device_stream")(int(device.index())).cast<std::tuple<int64_t, int64_t, int64_t, int64_t>>();
    } catch (py::error_already_set& raised) {
      raised.restore();
      python_error error;
      error.persist();
      throw error;
    }
  }
  if (size_ > 1) {
    pcieipc_cuda_options options{};
    options.size = sizeof options;
    options.directory = directory_.c_str();
    options.rank = rank_;
    options.ranks = size_;
    options.device = device.index();
    options.path = path_;
    options.deadline_ms = clamp_ms(timeout_);
    options.setup_timeout_ms = clamp_ms(setup_);
    // What moves tensors; others are loaded when they are first used.
    options.types = 1u << PCIEIPC_TYPE_U32;
    const auto status = pcieipc_cuda_make(&options, &made_);
    if (rank_ == 0) remove_folder(directory_);
    if (status != PCIEIPC_STATUS_OK) throw Refused{last_failure(status, "the first collective on " + device.str(), clamp_ms(setup_))};
  }
  device_ = device;
  stream_ = c10::Stream::unpack3(id, static_cast<c10::DeviceIndex>(index), static_cast<c10::DeviceType>(type));
  handle_ = reinterpret_cast<void*>(handle);
}

c10::Stream OnDevice::enter(c10::Device device) {
  if (left_) throw Refused{{"Aborted", "this rank has left the group"}, false};
  if (!device_) make(device);
  if (device != *device_) {
    throw Refused{{"Argument", "a tensor on " + device.str() + ": this rank's collectives of the group are on " + device_->str() + "; one device a rank"}, false};
  }
  c10::Event here(device.type());
  here.record(current_stream(device));
  here.block(*stream_);
  return *stream_;
}

std::optional<Failure> OnDevice::failure() {
  const auto held = lock();
  if (made_ == nullptr) return std::nullopt;
  const auto status = pcieipc_cuda_check(made_);
  if (status == PCIEIPC_STATUS_OK) return std::nullopt;
  return last_failure(status, "a collective on " + device_->str(), clamp_ms(timeout_));
}

std::vector<c10::Stream> OnDevice::streams() {
  const auto held = lock();
  if (!stream_) return {};
  return {current_stream(*device_), *stream_};
}

void OnDevice::abort(const std::string& why) {
  const auto held = lock();
  if (made_ != nullptr) pcieipc_cuda_abort(made_, why.c_str());
}

void OnDevice::leave() {
  const auto held = lock();
  left_ = true;
  pcieipc_cuda_free(std::exchange(made_, nullptr));
}

void OnDevice::call(const void* from, void* to, size_t count, uint32_t element, uint32_t operation, const char* what) {
  const auto status = pcieipc_cuda_all_reduce(made_, from, to, count, element, operation, handle_);
  if (status != PCIEIPC_STATUS_OK) throw Refused{last_failure(status, what, clamp_ms(timeout_)), status != PCIEIPC_STATUS_ARGUMENT};
}

// ---- What the other collectives are made of

void OnDevice::combine(const Tensor& from, const Tensor& to, const Reduction& how, const char* what) {
  if (size_ == 1) {
    if (from.data_ptr() != to.data_ptr()) to.copy_(from.view(to.sizes()));
    return;
  }
  call(from.data_ptr(), to.data_ptr(), from.numel(), how.element, how.operation, what);
}

// Adds up all ranks' bytes; where only one rank's are not zero, these are the sum, bit by bit.
void OnDevice::add_bytes(const Tensor& bytes, const char* what) {
  const auto length = static_cast<size_t>(bytes.nbytes());
  if (size_ == 1) return;
  // All ranks must choose the same type, whatever their tensors' addresses are.
  if (length % 4 != 0) {
    call(bytes.data_ptr(), bytes.data_ptr(), length, PCIEIPC_TYPE_U8, PCIEIPC_OP_SUM, what);
    return;
  }
  const auto aligned = reinterpret_cast<uintptr_t>(bytes.data_ptr()) % 4 == 0 ? bytes : bytes.clone();
  call(aligned.data_ptr(), aligned.data_ptr(), length / 4, PCIEIPC_TYPE_U32, PCIEIPC_OP_SUM, what);
  if (!aligned.is_same(bytes)) bytes.copy_(aligned);
}

void OnDevice::spread(const Tensor& tensor, int root, const char* what) {
  if (rank_ != root) tensor.zero_();
  add_bytes(tensor, what);
}

void OnDevice::gather(const Tensor& from, const Tensor& to, const char* what) {
  const auto lines = to.view({size_, from.numel()});
  // Only what the others fill.
  lines.narrow(0, 0, rank_).zero_();
  lines.narrow(0, rank_ + 1, size_ - rank_ - 1).zero_();
  lines[rank_].copy_(from.view({-1}));
  add_bytes(to, what);
}

// ---- The work

DeviceWork::DeviceWork(OpType op, const char* title, const Tensors& inputs, Tensors outputs, std::shared_ptr<OnDevice> side, c10::Stream stream)
    : Work(-1, op, title, std::make_optional(inputs)),
      outputs_(std::move(outputs)),
      side_(std::move(side)),
      stream_(stream),
      end_(stream.device_type()),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()})) {
  end_.record(stream);
  // On the group's stream, so that who waits for the future waits for that one.
  const c10::StreamGuard guard(stream);
  future_->markCompleted(c10::IValue(outputs_));
}

std::exception_ptr DeviceWork::exception() const {
  const auto failure = side_->failure();
  return failure ? as_exception(*failure) : nullptr;
}

void DeviceWork::synchronize() { end_.block(current_stream(stream_.device())); }

bool DeviceWork::wait(milliseconds timeout) {
  synchronize();
  const auto until = Clock::now() + timeout;
  while (timeout > milliseconds::zero() && !end_.query()) {
    if (Clock::now() > until) refuse("wait ended by timeout after " + std::to_string(timeout.count()) + " ms: the collective goes on", "Timeout");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (const auto failure = side_->failure()) std::rethrow_exception(as_exception(*failure));
  return true;
}

// ---- The backend's side

namespace {

std::optional<c10::Device> device_of(const Tensors& inputs, const Tensors& outputs, const char* what) {
  std::optional<c10::Device> device;
  for (const auto* list : {&inputs, &outputs}) {
    for (const auto& tensor : *list) {
      if (device && tensor.device() != *device) refuse(std::string(what) + ": tensors on " + device->str() + " and " + tensor.device().str() + " in one call");
      device = tensor.device();
    }
  }
  if (device && device->is_cpu()) return std::nullopt;
  return device;
}

}  // namespace

WorkPtr PcieBackend::run_on_device(c10::Device device, OpType op, const char* title, const char* what, const Tensors& inputs, Tensors outputs,
                                   milliseconds timeout, const std::function<void(uint32_t)>& body) {
  if (auto again = broken()) {
    again->text = std::string(what) + ": the group ended before: " + again->text;
    std::rethrow_exception(as_exception(*again));
  }
  std::exception_ptr error;
  try {
    const auto held = on_device_->lock();
    at::NoGradGuard no_grad;
    const auto stream = on_device_->enter(device);
    on_device_was_used_ = true;
    const c10::StreamGuard guard(stream);
    body(clamp_ms(timeout_of(timeout)));
    const c10::impl::VirtualGuardImpl device_guard(device.type());
    for (const auto* list : std::initializer_list<const Tensors*>{&inputs, &outputs})
      for (const auto& tensor : *list) device_guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    return c10::make_intrusive<DeviceWork>(op, title, inputs, std::move(outputs), on_device_, stream);
  } catch (const Refused& refused) {
    if (refused.ends_group) end_with(refused.failure);
    error = as_exception(refused.failure);
  } catch (const python_error&) {
    // Nothing was begun.
    throw;
  } catch (const std::exception& unexpected) {
    // The other ranks may wait for this one in the middle of the same call.
    on_device_->abort(unexpected.what());
    end_with(Failure{"Internal", unexpected.what()});
    throw;
  }
  std::rethrow_exception(error);
}

WorkPtr PcieBackend::run(OpType op, const char* title, const char* what, const Tensors& inputs, Tensors outputs, milliseconds timeout,
                         std::function<void(uint32_t)> body) {
  if (!lane_) refuse(std::string(what) + ": this rank has left the group", "Aborted");
  ++sequence_;
  if (const auto device = device_of(inputs, outputs, what)) return run_on_device(*device, op, title, what, inputs, std::move(outputs), timeout, body);
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

WorkPtr PcieBackend::endCoalescing() {
  if (on_device_was_used_) {
    const auto held = on_device_->lock();
    return c10::make_intrusive<DeviceWork>(OpType::COALESCED, "pcie:coalesced", Tensors{}, Tensors{}, on_device_, on_device_->stream());
  }
  // Calls on the CPU are made one after the other.
  return run(OpType::COALESCED, "pcie:coalesced", "coalesced calls", {}, {}, settings_.timeout, [](uint32_t) {});
}

void PcieBackend::make_all_reduce(const Tensor& flat, const Reduction& how, uint32_t ms, const char* what) {
  if (!flat.is_cpu()) on_device_->combine(flat, flat, how, what);
  else if (settings_.lanes > 1 && flat.nbytes() >= DIVIDED) divide_all_reduce(flat, how, ms, what);
  else check(pcieipc_all_reduce(group_.get(), flat.data_ptr(), flat.numel(), how.element, how.operation, ms), what, ms);
}

void PcieBackend::make_reduce(const Tensor& from, const Tensor& to, const Reduction& how, int root, uint32_t ms) {
  if (from.is_cpu()) {
    check(pcieipc_reduce(group_.get(), from.data_ptr(), to.defined() ? to.data_ptr() : nullptr, from.numel(), how.element, how.operation, root, ms), "reduce", ms);
  } else {
    on_device_->combine(from, to.defined() ? to : at::empty_like(from), how, "reduce");
  }
}

void PcieBackend::make_reduce_scatter(const Tensor& from, const Tensor& to, const Reduction& how, uint32_t ms) {
  if (from.is_cpu()) {
    check(pcieipc_reduce_scatter(group_.get(), from.data_ptr(), to.data_ptr(), to.numel(), how.element, how.operation, ms), "reduce_scatter", ms);
    return;
  }
  const auto all = at::empty_like(from);
  on_device_->combine(from, all, how, "reduce_scatter");
  to.copy_(all.view({-1}).narrow(0, rank_ * to.numel(), to.numel()).view(to.sizes()));
}

void PcieBackend::make_broadcast(const Tensor& flat, int root, uint32_t ms, const char* what) {
  if (!flat.is_cpu()) {
    on_device_->spread(flat, root, what);
    return;
  }
  const auto span = span_of(flat);
  check(pcieipc_broadcast(group_.get(), span.at, span.count, span.element, root, ms), what, ms);
}

void PcieBackend::make_all_gather(const Tensor& from, const Tensor& to, uint32_t ms, const char* what) {
  if (!from.is_cpu()) {
    on_device_->gather(from, to, what);
    return;
  }
  const auto span = span_of(from);
  check(pcieipc_all_gather(group_.get(), span.at, to.data_ptr(), span.count, span.element, ms), what, ms);
}

int64_t PcieBackend::agree_on_parts(const Tensors& from, const Tensors& to, milliseconds timeout) {
  if (!lane_) refuse("all_to_all: this rank has left the group", "Aborted");
  const auto ms = clamp_ms(timeout_of(timeout));
  auto promise = std::make_shared<std::promise<int64_t>>();
  auto answer = promise->get_future();
  lane_->add([this, promise, from, to, ms] {
    int64_t most = 0;
    const auto error = attempt("all_to_all", [&] { most = longest_part(from, to, ms).first; });
    if (error) promise->set_exception(error);
    else promise->set_value(most);
  });
  return answer.get();
}

void PcieBackend::exchange_on_device(const Tensors& from, const Tensors& to, int64_t most) {
  if (most == 0) return;
  // Line s, part d: what rank s sends to rank d. Every rank gets all of it.
  const auto mine = at::zeros({size_, most}, from[0].options().dtype(at::kByte));
  const auto all = at::empty({size_, size_, most}, mine.options());
  const auto bytes = [](const Tensor& part) { return part.contiguous().view({-1}).view(at::kByte); };
  for (int d = 0; d < size_; ++d)
    if (from[d].numel() > 0) mine[d].narrow(0, 0, from[d].nbytes()).copy_(bytes(from[d]));
  on_device_->gather(mine, all, "all_to_all");
  for (int s = 0; s < size_; ++s)
    if (to[s].numel() > 0) to[s].copy_(all[s][rank_].narrow(0, 0, to[s].nbytes()).clone().view(to[s].scalar_type()).view(to[s].sizes()));
}

}  // namespace pcieipc_torch
