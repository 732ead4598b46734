# SPDX-License-Identifier: MIT OR Apache-2.0
"""All-reduce of arrays on CUDA devices, enqueued on streams."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterable
from ctypes import byref, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from ._native import CUDA_PATHS, OPERATIONS, TYPES, CudaOptions, check, lib, milliseconds, one_of
from .arrays import View, view_on_device
from .errors import ArgumentError


def find_compiler() -> None:
    """Loads CUDA's compiler where a Python package brought it along (torch, cupy), so that the library finds it."""
    if os.environ.get("PCIEIPC_NVRTC"):
        return
    for folder in sys.path:
        for found in sorted(Path(folder or ".").glob("nvidia/*/lib/libnvrtc.so.*")):
            try:
                ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            os.environ["PCIEIPC_NVRTC"] = str(found)
            return


class CudaCommunicator:
    """One rank's part in all-reduces of CUDA memory, in a group of up to 16 processes of one host. Ranks may share a device.

    All ranks make the same calls in the same order, with arrays of the same length and type: torch tensors, cupy arrays, or whatever speaks
    the CUDA array interface or DLPack. They must be contiguous, are used where they lie, and must stay until the stream has run the call.
    A call is enqueued and returns; what became of it is raised by later calls and by `check`. After an exception a new one must be made.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        ranks: int,
        device: int = 0,
        *,
        path: str = "auto",
        types: Iterable[str] = ("float32",),
        timeout: float = 30.0,
        setup_timeout: float = 180.0,
        checked: bool = False,
    ) -> None:
        """Meets the other ranks in ``directory``, which is made with mode 0700 if it is not there.

        ``device`` is the driver's number of this rank's device, in this process. ``path``: "auto" takes peer memory where it is proved to work
        and host memory elsewhere; "peer", "host", "device" (peer memory between ranks of one device only). Kernels of ``types`` are loaded now, others
        when they are first used, which waits for the calls before. ``timeout`` is how long a call waits for the others on the device. ``checked``:
        all ranks compare their results after each call.
        """
        if not 0 <= rank < ranks:
            raise ArgumentError(f"rank {rank} of {ranks}: ranks are counted from 0")
        self._lock = threading.Lock()
        self._made: int | None = None
        self._device, self._ranks = device, ranks
        # The stream of the last call, which the library still asks whether it is done.
        self._last: Any = None
        options = CudaOptions(
            size=ctypes.sizeof(CudaOptions),
            directory=os.fsencode(directory),
            rank=rank,
            ranks=ranks,
            device=device,
            path=one_of(CUDA_PATHS, "path", path),
            deadline_ms=milliseconds(timeout),
            setup_timeout_ms=milliseconds(setup_timeout),
            types=sum(1 << number for number in {one_of(TYPES, "element type", name) for name in types}),
            checked=checked,
        )
        find_compiler()
        made = c_void_p()
        check(lib.pcieipc_cuda_make(byref(options), byref(made)))
        self._made = made.value

    def _handle(self) -> int:
        if self._made is None:
            raise ArgumentError("this rank has left the communicator")
        return self._made

    def _view(self, array: Any, stream: int) -> View:
        found, device = view_on_device(array, stream)
        if device != self._device:
            raise ArgumentError(f"an array on device {device}: this communicator is of device {self._device}")
        return found

    def all_reduce(self, array: Any, op: str = "sum", *, out: Any = None, stream: Any = None) -> None:
        """Enqueues the combination of the arrays of all ranks, element by element: in place, or into ``out``.

        ``op`` is "sum", "prod", "min", "max" or "average". ``stream`` is a number (a cudaStream_t) or what has it as `cuda_stream` (torch) or
        `ptr` (cupy); None is torch's current stream for a torch tensor, otherwise the default stream. One that is given as a number must live
        until a call on another one, or `leave`.
        """
        with self._lock:
            made, operation, number = self._handle(), one_of(OPERATIONS, "operation", op), _stream(array, stream)
            source = self._view(array, number)
            target = source if out is None else self._view(out, number)
            if source.kind != target.kind or source.count != target.count:
                raise ArgumentError(f"{source.count} elements of {source.kind} in and {target.count} of {target.kind} out: they must be the same")
            if out is not None and source.address != target.address and source.overlaps(target):
                raise ArgumentError("`array` and `out` share memory, and are not the same")
            check(lib.pcieipc_cuda_all_reduce(made, source.address, target.address, source.count, source.element, operation, number))
            self._last = stream

    def check(self) -> None:
        """Raises what the calls that have run came to, if one failed. It does not wait: synchronize the stream first to know about all."""
        with self._lock:
            check(lib.pcieipc_cuda_check(self._handle()))

    @property
    def paths(self) -> tuple[str, ...]:
        """How each rank is reached: "self", "host", "peer" (over PCIe) or "device" (the same device, or NVLink)."""
        with self._lock:
            room = (c_uint32 * self._ranks)()
            check(lib.pcieipc_cuda_paths(self._handle(), room, len(room)))
            return tuple(("self", "host", "peer", "device")[number] for number in room)

    def abort(self, why: str) -> None:
        """Makes the calls of all ranks that run, and all later ones, fail with `Aborted` and this reason."""
        with self._lock:
            check(lib.pcieipc_cuda_abort(self._handle(), why.encode()))

    def leave(self) -> None:
        """Waits for this rank's calls as long as they may take, and leaves the others. Leaving twice is allowed."""
        with self._lock:
            made, self._made = self._made, None
            if made is not None:
                lib.pcieipc_cuda_free(made)
                self._last = None

    def __enter__(self) -> CudaCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def __del__(self) -> None:
        if getattr(self, "_made", None) is not None:
            self.leave()


def _stream(array: Any, stream: Any) -> int:
    if stream is None:
        if not getattr(array, "is_cuda", False):
            return 0
        import torch

        return int(torch.cuda.current_stream(array.device).cuda_stream)
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    return int(stream)


__all__ = ["CudaCommunicator", "find_compiler"]
