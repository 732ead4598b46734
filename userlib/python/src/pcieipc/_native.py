# SPDX-License-Identifier: MIT OR Apache-2.0
"""libpcieipc.so as pcieipc.h declares it. ctypes lets go of the interpreter's lock during every call."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

from . import errors

#: Numbers of pcieipc_type.
TYPES = {
    "float64": 0,
    "float32": 1,
    "float16": 2,
    "bfloat16": 3,
    "int8": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "uint8": 8,
    "uint16": 9,
    "uint32": 10,
    "uint64": 11,
}
SIZES = {name: int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8 for name in TYPES}
#: Numbers of pcieipc_op.
OPERATIONS = {"sum": 0, "prod": 1, "min": 2, "max": 3, "average": 4}
TRANSPORTS = {"shm": 0, "kmod": 1}
CUDA_PATHS = {"auto": 0, "peer": 1, "host": 2, "device": 3}
ALGORITHMS = {"one-shot": 1, "two-shot": 2, "star": 3, "ring": 4, "recursive-doubling": 5, "hierarchical": 6}

BIN = Path(__file__).parent / "bin"
SONAME = "libpcieipc.so.1"


class Options(ctypes.Structure):
    """struct pcieipc_options"""

    _fields_ = [
        ("size", c_size_t),
        ("directory", c_char_p),
        ("rank", c_uint32),
        ("ranks", c_uint32),
        ("transport", c_uint32),
        ("endpoint", c_uint32),
        ("ring_bytes", c_size_t),
        ("meeting_timeout_ms", c_uint32),
        ("algorithm", c_uint32),
        ("helper_thread", c_uint32),
        ("tuned", c_uint32),
        ("checked", c_uint32),
        ("degraded_link_is_error", c_uint32),
    ]


class CudaOptions(ctypes.Structure):
    """struct pcieipc_cuda_options"""

    _fields_ = [
        ("size", c_size_t),
        ("directory", c_char_p),
        ("rank", c_uint32),
        ("ranks", c_uint32),
        ("device", c_uint32),
        ("path", c_uint32),
        ("deadline_ms", c_uint32),
        ("setup_timeout_ms", c_uint32),
        ("types", c_uint32),
        ("blocks", c_uint32),
        ("checked", c_uint32),
        ("reserved", c_uint32),
    ]


class AgreementRecord(ctypes.Structure):
    """struct pcieipc_agreement"""

    _fields_ = [
        ("size", c_size_t),
        ("ok", c_uint32),
        ("failed", c_uint32),
        ("returned", c_uint32),
        ("reserved", c_uint32),
    ]


class ErrorDetail(ctypes.Structure):
    """struct pcieipc_error"""

    _fields_ = [
        ("size", c_size_t),
        ("status", c_uint32),
        ("rank", c_int32),
        ("endpoint", c_int64),
        ("generation", c_uint64),
    ]


def library_path() -> Path:
    """Where the shared library is: the one that PCIEIPC_LIBRARY names, the package's own, or the system's (a distribution's package has none)."""
    given = os.environ.get("PCIEIPC_LIBRARY")
    if given:
        return Path(given)
    if (BIN / SONAME).exists():
        return BIN / SONAME
    places = [Path("/usr/lib", sysconfig.get_config_var("MULTIARCH") or ""), Path("/usr/local/lib"), Path("/usr/lib64"), Path("/usr/lib")]
    return next((place / SONAME for place in places if (place / SONAME).exists()), BIN / SONAME)


def _load() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"pcieipc's shared library {path} can not be loaded ({error}): install the wheel (`pip install ./userlib/python`), "
            "or set PCIEIPC_LIBRARY to a libpcieipc.so made by scripts/build-capi"
        ) from None
    group, at, data, number, size = c_void_p, POINTER(c_void_p), c_void_p, c_uint32, c_size_t
    signatures = {
        "group_rank": [group, POINTER(c_uint32)],
        "group_ranks": [group, POINTER(c_uint32)],
        "group_members": [group, POINTER(c_uint32), size],
        "group_meet": [POINTER(Options), at],
        "group_rejoin": [POINTER(Options), at],
        "group_agree": [group, number, number, POINTER(AgreementRecord)],
        "group_shrink": [group, number],
        "group_recover": [group, number],
        "group_abort": [group, c_char_p],
        "all_reduce": [group, data, size, number, number, number],
        "all_reduce_into": [group, data, data, size, number, number, number],
        "reduce_scatter": [group, data, data, size, number, number, number],
        "all_gather": [group, data, data, size, number, number],
        "all_to_all": [group, data, data, size, number, number],
        "reduce": [group, data, data, size, number, number, number, number],
        "broadcast": [group, data, size, number, number, number],
        "send": [group, data, size, number, number, number],
        "receive": [group, data, size, number, number, number],
        "barrier": [group, number],
        "buffer_register": [group, size, number, number, at],
        "buffer_all_reduce": [group, c_void_p, number, number],
        "cuda_make": [POINTER(CudaOptions), at],
        "cuda_all_reduce": [c_void_p, data, data, size, number, number, c_void_p],
        "cuda_check": [c_void_p],
        "cuda_paths": [c_void_p, POINTER(c_uint32), size],
        "cuda_abort": [c_void_p, c_char_p],
        "last_error_detail": [POINTER(ErrorDetail)],
    }
    for name, arguments in signatures.items():
        function = getattr(library, f"pcieipc_{name}")
        function.argtypes, function.restype = arguments, c_uint32
    for name, arguments, result in (
        ("group_leave", [group], None),
        ("buffer_data", [c_void_p], c_void_p),
        ("buffer_free", [c_void_p], None),
        ("cuda_free", [c_void_p], None),
        ("last_error", [], c_char_p),
        ("status_name", [c_uint32], c_char_p),
        ("version", [], c_char_p),
    ):
        function = getattr(library, f"pcieipc_{name}")
        function.argtypes, function.restype = arguments, result
    return library


lib = _load()


def check(status: int) -> None:
    """Raises the exception of a status that is not OK."""
    if status == 0:
        return
    message = (lib.pcieipc_last_error() or b"").decode(errors="replace")
    detail = ErrorDetail(size=ctypes.sizeof(ErrorDetail))
    if lib.pcieipc_last_error_detail(byref(detail)) != 0:
        detail = ErrorDetail(rank=-1, endpoint=-1)
    name = (lib.pcieipc_status_name(status) or b"Internal").decode()
    raise errors.make(name, message, detail.rank, detail.endpoint, detail.generation)


def library_version() -> str:
    """The version of the shared library."""
    return str(lib.pcieipc_version().decode())


def milliseconds(seconds: float) -> int:
    """A timeout as the library takes it; a fraction of a millisecond counts as one."""
    if not seconds > 0:
        raise errors.ArgumentError(f"a timeout of {seconds} s: give a number above 0")
    return min(max(int(seconds * 1000 + 0.999), 1), 0xFFFF_FFFF)


def one_of(table: dict[str, int], what: str, name: str) -> int:
    """The library's number for a name."""
    try:
        return table[name]
    except KeyError:
        raise errors.ArgumentError(f"there is no {what} {name!r}: take one of {', '.join(table)}") from None


__all__ = ["BIN", "AgreementRecord", "CudaOptions", "Options", "check", "lib", "library_path", "library_version", "milliseconds", "one_of"]
