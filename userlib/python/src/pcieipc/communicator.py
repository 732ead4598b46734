# SPDX-License-Identifier: MIT OR Apache-2.0
"""A group of ranks and its collectives."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_uint32, c_void_p
from typing import Any, NamedTuple

from ._native import ALGORITHMS, OPERATIONS, SIZES, TRANSPORTS, TYPES, AgreementRecord, Options, check, lib, milliseconds, one_of
from .arrays import View, view
from .errors import ArgumentError


class Agreement(NamedTuple):
    """What all ranks that are left learn alike from `Communicator.agree`. Ranks are those of the meeting."""

    #: Every one of them said that its last call was good.
    ok: bool
    #: Members that can not go on: died, left, did not answer in time, or have an endpoint that is not live.
    failed: tuple[int, ...]
    #: Ranks that are not in the group now and ask to be taken back.
    returned: tuple[int, ...]


class Communicator:
    """One rank's membership in a group of up to 16 processes of one host.

    All ranks make the same calls in the same order, with arrays of the same length and type. Arrays are numpy arrays, torch tensors on
    the CPU, or anything on the host that speaks the array interface, DLPack or the buffer protocol; they must be contiguous, and are used
    where they lie. ``timeout`` (seconds) bounds a call. After an exception the group can only `agree`, `shrink` and `recover`, and the array
    that the result goes into may be half overwritten; an array that is only read never is.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        ranks: int,
        *,
        transport: str = "shm",
        endpoint: int | None = None,
        ring_bytes: int = 0,
        algorithm: str | None = None,
        timeout: float = 30.0,
        meeting_timeout: float = 30.0,
        checked: bool = False,
        degraded_link_is_error: bool = False,
        rejoin: bool = False,
    ) -> None:
        """Meets the other ranks in ``directory``, which is made with mode 0700 if it is not there.

        ``transport`` is "shm" (shared memory) or "kmod" (channels of /dev/pcieipc, each rank on an endpoint of its own: ``endpoint``, or
        the rank-th live one). ``ring_bytes`` is the room from each rank to each other one, a power of two; 0 is the default of 1 MiB.
        ``algorithm`` None takes the default choice; otherwise one of "one-shot", "two-shot", "star", "ring", "recursive-doubling",
        "hierarchical". ``timeout`` is that of calls which name none. ``checked`` puts a checksum into every record, and ``Corrupt`` says
        which rank's did not match. ``degraded_link_is_error``: a link that trains down raises `LinkDegraded` instead of slowing calls.
        ``rejoin``: takes the place of a rank whose process has ended; the others must call `recover` meanwhile.
        """
        if not 0 <= rank < ranks:
            raise ArgumentError(f"rank {rank} of {ranks}: ranks are counted from 0")
        self._lock = threading.Lock()
        self._group: int | None = None
        self._buffers: list[Buffer] = []
        self._timeout = milliseconds(timeout)
        options = Options(
            size=ctypes.sizeof(Options),
            directory=os.fsencode(directory),
            rank=rank,
            ranks=ranks,
            transport=one_of(TRANSPORTS, "transport", transport),
            endpoint=0 if endpoint is None else endpoint + 1,
            ring_bytes=ring_bytes,
            meeting_timeout_ms=milliseconds(meeting_timeout),
            algorithm=0 if algorithm is None else one_of(ALGORITHMS, "algorithm", algorithm),
            checked=checked,
            degraded_link_is_error=degraded_link_is_error,
        )
        made = c_void_p()
        enter = lib.pcieipc_group_rejoin if rejoin else lib.pcieipc_group_meet
        check(enter(byref(options), byref(made)))
        self._group = made.value

    @contextmanager
    def _held(self) -> Iterator[int]:
        if not self._lock.acquire(blocking=False):
            raise ArgumentError("another thread is in a call of this communicator: make one for each thread, or take turns")
        try:
            if self._group is None:
                raise ArgumentError("this rank has left the group")
            yield self._group
        finally:
            self._lock.release()

    def _wait(self, timeout: float | None) -> int:
        return self._timeout if timeout is None else milliseconds(timeout)

    def _number(self, function: Any) -> int:
        with self._held() as group:
            found = c_uint32()
            check(function(group, byref(found)))
            return found.value

    @property
    def rank(self) -> int:
        """This rank, in the group as it is now."""
        return self._number(lib.pcieipc_group_rank)

    @property
    def ranks(self) -> int:
        """How many ranks the group has now."""
        return self._number(lib.pcieipc_group_ranks)

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers that the present ranks had when they met, in order."""
        with self._held() as group:
            room = (c_uint32 * 64)()
            count = c_uint32()
            check(lib.pcieipc_group_ranks(group, byref(count)))
            check(lib.pcieipc_group_members(group, room, len(room)))
            return tuple(room[: count.value])

    def all_reduce(self, array: Any, op: str = "sum", *, out: Any = None, timeout: float | None = None) -> None:
        """Combines the arrays of all ranks, element by element: in place, or into ``out``.

        ``op`` is "sum", "prod", "min", "max" or "average". 16-bit floats are added in float32 and rounded once.
        """
        with self._held() as group:
            operation = one_of(OPERATIONS, "operation", op)
            if out is None:
                both = view(array, writable=True)
                check(lib.pcieipc_all_reduce(group, both.address, both.count, both.element, operation, self._wait(timeout)))
            else:
                source, target = _pair(array, out, 1, 1)
                check(
                    lib.pcieipc_all_reduce_into(
                        group, source.address, target.address, source.count, source.element, operation, self._wait(timeout)
                    )
                )

    def reduce_scatter(self, array: Any, out: Any, op: str = "sum", *, timeout: float | None = None) -> None:
        """``array`` holds a block for each rank; ``out`` gets this rank's block of the combination."""
        ranks = self.ranks
        with self._held() as group:
            operation = one_of(OPERATIONS, "operation", op)
            source, target = _pair(array, out, ranks, 1)
            check(
                lib.pcieipc_reduce_scatter(
                    group, source.address, target.address, target.count, source.element, operation, self._wait(timeout)
                )
            )

    def all_gather(self, array: Any, out: Any, *, timeout: float | None = None) -> None:
        """``out`` gets the arrays of all ranks, in rank order."""
        ranks = self.ranks
        with self._held() as group:
            source, target = _pair(array, out, 1, ranks)
            check(lib.pcieipc_all_gather(group, source.address, target.address, source.count, source.element, self._wait(timeout)))

    def all_to_all(self, array: Any, out: Any, *, timeout: float | None = None) -> None:
        """Block p of ``array`` goes to rank p, which finds it as the block of this rank in its ``out``."""
        ranks = self.ranks
        with self._held() as group:
            source, target = _pair(array, out, 1, 1)
            if source.count % ranks:
                raise ArgumentError(f"{source.count} elements are not a block for each of {ranks} ranks")
            check(
                lib.pcieipc_all_to_all(
                    group, source.address, target.address, source.count // ranks, source.element, self._wait(timeout)
                )
            )

    def reduce(self, array: Any, out: Any = None, op: str = "sum", *, root: int = 0, timeout: float | None = None) -> None:
        """The root's ``out`` gets the combination of all ranks' ``array``; elsewhere ``out`` is not used."""
        here = self.rank == root
        with self._held() as group:
            operation = one_of(OPERATIONS, "operation", op)
            if here and out is None:
                raise ArgumentError("rank {root} is the root: give it `out`, where the result goes".format(root=root))
            source, target = _pair(array, out, 1, 1) if here else (view(array), None)
            at = target.address if target is not None else None
            check(lib.pcieipc_reduce(group, source.address, at, source.count, source.element, operation, root, self._wait(timeout)))

    def broadcast(self, array: Any, *, root: int = 0, timeout: float | None = None) -> None:
        """Every rank's array gets what the root's holds."""
        with self._held() as group:
            both = view(array, writable=True)
            check(lib.pcieipc_broadcast(group, both.address, both.count, both.element, root, self._wait(timeout)))

    def send(self, array: Any, to: int, *, timeout: float | None = None) -> None:
        """Sends to one rank, which must call `receive` with an array of the same length and type."""
        with self._held() as group:
            source = view(array)
            check(lib.pcieipc_send(group, source.address, source.count, source.element, to, self._wait(timeout)))

    def receive(self, array: Any, source: int, *, timeout: float | None = None) -> None:
        """Receives from one rank, which must call `send`."""
        with self._held() as group:
            target = view(array, writable=True)
            check(lib.pcieipc_receive(group, target.address, target.count, target.element, source, self._wait(timeout)))

    def barrier(self, *, timeout: float | None = None) -> None:
        """Waits until all ranks have called it."""
        with self._held() as group:
            check(lib.pcieipc_barrier(group, self._wait(timeout)))

    def register(self, count: int, dtype: Any = "float32", *, timeout: float | None = None) -> Buffer:
        """Makes a buffer of zeros that the other ranks read where it lies, so that its all-reduce copies nothing through rings.

        All ranks call it in the same order with the same arguments. After `shrink` and `recover`, register again.
        """
        kind = dtype if isinstance(dtype, str) else str(getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype).removeprefix("torch.")))
        with self._held() as group:
            made = c_void_p()
            check(lib.pcieipc_buffer_register(group, count, one_of(TYPES, "element type", kind), self._wait(timeout), byref(made)))
            buffer = Buffer(self, made.value, count, kind)
            self._buffers.append(buffer)
            return buffer

    def agree(self, ok: bool = True, *, timeout: float | None = None) -> Agreement:
        """Says to all ranks whether this one's last call was good, and answers what all that are left learn alike.

        All of them call it at the same point, whether their last call raised or not: one rank's result can be another's exception.
        """
        with self._held() as group:
            record = AgreementRecord(size=ctypes.sizeof(AgreementRecord))
            check(lib.pcieipc_group_agree(group, ok, self._wait(timeout), byref(record)))
            return Agreement(bool(record.ok), _ranks(record.failed), _ranks(record.returned))

    def recover(self, *, timeout: float | None = None) -> None:
        """Waits until all ranks that met are there again, and goes on with all of them; all that are left call it.

        Those that come back are endpoints that recovered or were put back, processes that took a rank's place (``rejoin=True``), and
        ranks that had been left out. When not all come in time, all get an exception, and may call it again or `shrink`. Buffers are
        registered again.
        """
        with self._held() as group:
            check(lib.pcieipc_group_recover(group, self._wait(timeout)))

    def shrink(self, *, timeout: float | None = None) -> None:
        """Goes on without the ranks that are lost; all that are left call it, and get new numbers in the old order."""
        with self._held() as group:
            check(lib.pcieipc_group_shrink(group, self._wait(timeout)))

    def abort(self, why: str) -> None:
        """Makes the calls of all ranks fail with `Aborted` and this reason."""
        with self._held() as group:
            check(lib.pcieipc_group_abort(group, why.encode()))

    def leave(self) -> None:
        """Leaves the group in order. The arrays of its buffers must not be used after that. Leaving twice is allowed."""
        with self._lock:
            group, self._group = self._group, None
            if group is not None:
                for buffer in self._buffers:
                    buffer._free()
                self._buffers.clear()
                lib.pcieipc_group_leave(group)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def __del__(self) -> None:
        if getattr(self, "_group", None) is not None:
            self.leave()

    def __repr__(self) -> str:
        return f"<pcieipc.Communicator {'left' if self._group is None else f'rank {self.rank} of {self.ranks}'}>"


class Buffer:
    """A registered buffer: memory that this process writes and all ranks read where it lies. Made by `Communicator.register`."""

    def __init__(self, of: Communicator, handle: int | None, count: int, kind: str) -> None:
        self._of, self._count, self._kind = of, count, kind
        self._handle = handle

    def _address(self) -> int:
        if self._handle is None:
            raise ArgumentError("the group of this buffer was left")
        return lib.pcieipc_buffer_data(self._handle) or 0

    def __len__(self) -> int:
        return self._count

    @property
    def dtype(self) -> str:
        """The name of its elements' type."""
        return self._kind

    @property
    def memory(self) -> memoryview:
        """Its bytes. They are gone when the rank leaves the group."""
        return memoryview((ctypes.c_uint8 * (self._count * SIZES[self._kind])).from_address(self._address())).cast("B")

    @property
    def array(self) -> Any:
        """Its elements as a numpy array (which has no bfloat16: those come as uint16). They are gone when the rank leaves the group."""
        import numpy

        return numpy.frombuffer(self.memory, dtype="uint16" if self._kind == "bfloat16" else self._kind)

    def all_reduce(self, op: str = "sum", *, timeout: float | None = None) -> None:
        """Like `Communicator.all_reduce` on the whole buffer."""
        with self._of._held() as group:
            self._address()
            check(lib.pcieipc_buffer_all_reduce(group, self._handle, one_of(OPERATIONS, "operation", op), self._of._wait(timeout)))

    def _free(self) -> None:
        handle, self._handle = self._handle, None
        lib.pcieipc_buffer_free(handle)


def _ranks(bits: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(32) if bits >> rank & 1)


def _pair(array: Any, out: Any, blocks_in: int, blocks_out: int) -> tuple[View, View]:
    """An input and an output of the same type, whose lengths are in this proportion and which share no memory."""
    source, target = view(array), view(out, writable=True)
    if source.kind != target.kind:
        raise ArgumentError(f"`array` holds {source.kind} and `out` {target.kind}: they must be the same")
    if source.count * blocks_out != target.count * blocks_in:
        raise ArgumentError(f"{source.count} elements in and {target.count} out: here the proportion is {blocks_in} to {blocks_out}")
    if source.overlaps(target):
        raise ArgumentError("`array` and `out` share memory")
    return source, target


__all__ = ["Agreement", "Buffer", "Communicator"]
