// SPDX-License-Identifier: MIT OR Apache-2.0
// What tensors hold, in the library's words; and which tensors can be taken.
#pragma once

#include <pcieipc.h>

#include <cstdint>
#include <optional>
#include <string>

#include "failure.h"
#include "types.h"

namespace pcieipc_torch {

inline std::optional<uint32_t> element_of(at::ScalarType type) {
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

inline Span span_of(const Tensor& tensor) {
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

inline Reduction reduction_of(const Tensor& tensor, const ReduceOp& op, const char* what) {
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

// A dense tensor on the host or on a CUDA device, or a clear error.
inline void dense(const Tensor& tensor, const char* what) {
  if (!tensor.defined()) refuse(std::string(what) + ": a tensor is not defined");
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    refuse(std::string("not supported: ") + what + " of a tensor on " + tensor.device().str() + "; the backend pcie takes tensors on the CPU and on CUDA devices");
  }
  if (tensor.layout() != at::kStrided) refuse(std::string("not supported: ") + what + " of a sparse tensor; pass tensor.to_dense()");
}

inline const Tensor& only(const Tensors& tensors, const char* what) {
  if (tensors.size() != 1) refuse(std::string(what) + ": " + std::to_string(tensors.size()) + " tensors, one is expected: one device a rank");
  dense(tensors[0], what);
  return tensors[0];
}

inline void same(const Tensor& of, const Tensor& as, int64_t numel, const char* what) {
  if (of.scalar_type() != as.scalar_type()) {
    refuse(std::string(what) + ": tensors of type " + c10::toString(of.scalar_type()) + " and " + c10::toString(as.scalar_type()) + " in one call");
  }
  if (of.numel() != numel) {
    refuse(std::string(what) + ": a tensor has " + std::to_string(of.numel()) + " elements, " + std::to_string(numel) + " are expected");
  }
}

inline bool overlap(const Tensor& a, const Tensor& b) {
  const auto *x = static_cast<const char*>(a.data_ptr()), *y = static_cast<const char*>(b.data_ptr());
  return a.nbytes() > 0 && b.nbytes() > 0 && x < y + b.nbytes() && y < x + a.nbytes();
}

// Whether contiguous tensors lie one behind the other.
inline bool adjacent(const Tensors& tensors) {
  const char* next = nullptr;
  for (const auto& tensor : tensors) {
    if (!tensor.is_contiguous() || (next != nullptr && next != tensor.data_ptr())) return false;
    next = static_cast<const char*>(tensor.data_ptr()) + tensor.nbytes();
  }
  return true;
}

inline Tensor real_view(const Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

}  // namespace pcieipc_torch
