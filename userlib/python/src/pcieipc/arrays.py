# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where the elements of an array lie: numpy arrays, torch tensors and whatever else speaks the array interface, DLPack or the buffer
protocol. Nothing is copied.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, py_object, pythonapi
from dataclasses import dataclass
from typing import Any

from ._native import SIZES, TYPES
from .errors import ArgumentError


@dataclass(frozen=True)
class View:
    """The elements of an array: their address, how many, and their type. ``owner`` keeps them alive."""

    address: int
    count: int
    kind: str
    owner: Any

    @property
    def element(self) -> int:
        """The type's number in the library."""
        return TYPES[self.kind]

    @property
    def bytes(self) -> int:
        """How long it is."""
        return self.count * SIZES[self.kind]

    def overlaps(self, other: View) -> bool:
        """Whether two arrays share memory."""
        return self.bytes > 0 and other.bytes > 0 and self.address < other.address + other.bytes and other.address < self.address + self.bytes


def view(array: Any, *, writable: bool = False) -> View:
    """Looks at an array on the host: contiguous, and writable where the call stores to it."""
    if getattr(array, "is_cuda", False) or hasattr(array, "__cuda_array_interface__"):
        raise ArgumentError("not supported: an array on a CUDA device; take a CudaCommunicator, or copy it to the host first (`tensor.cpu()`)")
    if getattr(array, "is_sparse", False):
        raise ArgumentError("not supported: a sparse tensor; pass `tensor.to_dense()`")
    interface = getattr(array, "__array_interface__", None) if not hasattr(array, "is_cuda") else None
    if interface is not None:
        return _of_interface(array, interface, writable)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(array)
    try:
        memory = memoryview(array)
    except TypeError:
        raise ArgumentError(
            f"a {type(array).__name__} is no array: pass a numpy array, a torch tensor, or what speaks the array interface, DLPack or "
            "the buffer protocol"
        ) from None
    return _of_memory(memory, writable)


def view_on_device(array: Any, stream: int = 0) -> tuple[View, int]:
    """Looks at an array on a CUDA device, contiguous; and the device's number. Work on it before is ordered before the stream, where the array can say so."""
    if getattr(array, "is_sparse", False):
        raise ArgumentError("not supported: a sparse tensor; pass `tensor.to_dense()`")
    if getattr(array, "is_cuda", False):
        # Torch has no array interface for bfloat16, nor for tensors that need gradients.
        kind = str(array.dtype).removeprefix("torch.")
        if kind not in TYPES:
            raise ArgumentError(f"not supported: elements of type {kind}; take one of {', '.join(TYPES)}")
        _require(array.is_contiguous(), False, False)
        return View(array.data_ptr(), array.numel(), kind, array), array.device.index
    interface = getattr(array, "__cuda_array_interface__", None) if not hasattr(array, "is_cuda") else None
    if interface is not None and hasattr(array, "device"):
        return _of_interface(array, interface, False), int(getattr(array.device, "id", 0))
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        kind_of_device, number = array.__dlpack_device__()
        if int(kind_of_device) == _CUDA:
            # For DLPack 1 is the default stream, and -1 says that nobody need wait.
            return _of_dlpack(array, _CUDA, stream=stream or 1), int(number)
    raise ArgumentError(f"a {type(array).__name__} is no array on a CUDA device: take a Communicator for arrays on the host")


def _kind(code: str, size: int, what: Any) -> str:
    name = {"f": "float", "i": "int", "u": "uint"}.get(code, "?") + str(size * 8)
    if name not in TYPES:
        raise ArgumentError(f"not supported: elements of type {what}; take one of {', '.join(TYPES)}")
    return name


def _require(contiguous: bool, read_only: bool, writable: bool) -> None:
    if not contiguous:
        raise ArgumentError("the array is not contiguous in C order: pass a contiguous copy (`numpy.ascontiguousarray`, `tensor.contiguous()`)")
    if writable and read_only:
        raise ArgumentError("the array is read-only and the result goes into it: pass one that can be written")


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _of_interface(array: Any, interface: dict[str, Any], writable: bool) -> View:
    dtype = getattr(array, "dtype", None)
    typestr = interface["typestr"]
    size = int(typestr[2:])
    if str(dtype) == "bfloat16":
        kind = "bfloat16"
    elif typestr[0] == ">" and size > 1:
        raise ArgumentError(f"not supported: elements in big-endian order ({typestr}); convert them to the machine's order")
    else:
        kind = _kind(typestr[1], size, dtype if dtype is not None else typestr)
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    elements = None if strides is None else tuple(s // size if s % size == 0 else -1 for s in strides)
    address, read_only = interface["data"]
    _require(_contiguous(shape, elements), read_only, writable)
    return View(address or 0, _product(shape), kind, array)


def _of_memory(memory: memoryview, writable: bool) -> View:
    code, size = memory.format.lstrip("@=<"), memory.itemsize
    if code in ("b", "h", "i", "l", "q", "n"):
        kind = _kind("i", size, memory.format)
    elif code in ("B", "H", "I", "L", "Q", "N"):
        kind = _kind("u", size, memory.format)
    elif code in ("e", "f", "d"):
        kind = _kind("f", size, memory.format)
    else:
        kind = _kind("?", size, memory.format)
    _require(memory.c_contiguous, memory.readonly, writable)
    if memory.nbytes == 0:
        return View(0, 0, kind, memory)
    if memory.readonly:
        # A read-only buffer's address can be had through the C interface only.
        raw = _Buffer()
        if pythonapi.PyObject_GetBuffer(py_object(memory), ctypes.byref(raw), 0) != 0:
            raise ArgumentError("the buffer can not be read")
        address = raw.buf
        pythonapi.PyBuffer_Release(ctypes.byref(raw))
    else:
        address = ctypes.addressof(c_uint8.from_buffer(memory))
    return View(address, memory.nbytes // size, kind, memory)


class _Buffer(ctypes.Structure):
    """Py_buffer"""

    _fields_ = [
        ("buf", c_void_p),
        ("obj", c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", c_char_p),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("suboffsets", c_void_p),
        ("internal", c_void_p),
    ]


class _Tensor(ctypes.Structure):
    """DLTensor"""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


pythonapi.PyCapsule_GetPointer.restype = c_void_p
pythonapi.PyCapsule_GetPointer.argtypes = [py_object, c_char_p]

_HOST = (1, 3)  # kDLCPU, kDLCUDAHost
_CUDA = 2  # kDLCUDA
_CODES = {0: "i", 1: "u", 2: "f"}
_BFLOAT = 4


def _of_dlpack(array: Any, *devices: int, **named: Any) -> View:
    try:
        capsule = array.__dlpack__(**named)
    except Exception as error:
        raise ArgumentError(f"the array can not be exchanged by DLPack: {error}") from None
    # The capsule is not taken over: its destructor gives the memory back, and `array` is held for as long as the call lasts.
    tensor = ctypes.cast(pythonapi.PyCapsule_GetPointer(capsule, b"dltensor"), POINTER(_Tensor)).contents
    if tensor.device_type not in (devices or _HOST):
        raise ArgumentError(f"not supported: an array on a device of DLPack's type {tensor.device_type}; copy it to the host first")
    if tensor.lanes != 1 or tensor.bits % 8 != 0:
        raise ArgumentError(f"not supported: elements of {tensor.bits} bits in {tensor.lanes} lanes")
    if tensor.code == _BFLOAT and tensor.bits == 16:
        kind = "bfloat16"
    else:
        kind = _kind(_CODES.get(tensor.code, "?"), tensor.bits // 8, getattr(array, "dtype", f"DLPack code {tensor.code}"))
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    _require(_contiguous(shape, strides), False, False)
    return View((tensor.data or 0) + tensor.byte_offset, _product(shape), kind, (array, capsule))
