// SPDX-License-Identifier: MIT OR Apache-2.0
// Names that all parts use.
#pragma once

#include <chrono>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace pcieipc_torch {

namespace py = pybind11;
using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using std::chrono::milliseconds;

}  // namespace pcieipc_torch
