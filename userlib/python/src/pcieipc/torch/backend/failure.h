// SPDX-License-Identifier: MIT OR Apache-2.0
// What a call answered instead of its result, and the exception that it is in Python.
#pragma once

#include <pcieipc.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "types.h"

namespace pcieipc_torch {

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
inline std::exception_ptr as_exception(const Failure& failure) {
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
inline Failure last_failure(pcieipc_status status, const std::string& what, uint32_t timeout_ms) {
  pcieipc_error detail{};
  detail.size = sizeof detail;
  if (pcieipc_last_error_detail(&detail) != PCIEIPC_STATUS_OK) detail.rank = -1, detail.endpoint = -1;
  const std::string name = pcieipc_status_name(status);
  const std::string how = status == PCIEIPC_STATUS_TIMEOUT ? "timeout after " + std::to_string(timeout_ms) + " ms" : name;
  return {name, what + " ended by " + how + ": " + pcieipc_last_error(), detail.rank, detail.endpoint, detail.generation};
}

[[noreturn]] inline void refuse(const std::string& text, const char* status = "Argument") {
  std::rethrow_exception(as_exception({status, text}));
}

// Removes the folder of a meeting that is over. Not by std::filesystem: torch's libraries bring another one of that along.
inline void remove_folder(const std::string& folder) {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  try {
    py::module_::import("shutil").attr("rmtree")(folder, true);
  } catch (py::error_already_set&) {
  }
}

inline uint32_t clamp_ms(milliseconds given) {
  return static_cast<uint32_t>(std::clamp<int64_t>(given.count(), 1, UINT32_MAX));
}

inline uint32_t ms_until(Clock::time_point deadline) {
  return clamp_ms(std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

struct Leave {
  void operator()(pcieipc_group* group) const { pcieipc_group_leave(group); }
};
using Group = std::unique_ptr<pcieipc_group, Leave>;

}  // namespace pcieipc_torch
