# SPDX-License-Identifier: MIT OR Apache-2.0
"""The backend ``pcie`` for torch.distributed.

    import torch.distributed as dist
    import pcieipc.torch

    dist.init_process_group("pcie")                       # tensors on the CPU and on CUDA devices
    dist.init_process_group("pcie", pg_options=pcieipc.torch.Options(transport="kmod"))

Nothing else changes: DDP, FSDP2, ZeRO, DTensor, new_group, objects, send and receive. A collective gives the right result or raises one of
pcieipc's exceptions within the group's timeout. The first group that a process makes compiles the backend for the torch that is installed,
once; ``python -m pcieipc.torch`` does that ahead of time.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from .._native import ALGORITHMS, CUDA_PATHS, TRANSPORTS, milliseconds, one_of
from ..cuda import find_compiler
from ..errors import ArgumentError
from ._build import NotBuilt

_loaded: ModuleType | None = None


def _backend() -> ModuleType:
    global _loaded
    if _loaded is None:
        from ._build import load

        _loaded = load()
        atexit.register(_loaded.leave_all)
    return _loaded


_finalized: int | None = None


def _leave_at_exit() -> None:
    """A rank that ends leaves in order, so that the others know that it did not die; also one that multiprocessing made, which ends in its own way."""
    global _finalized
    if _finalized != os.getpid():
        Finalize(None, _backend().leave_all, exitpriority=0)
        _finalized = os.getpid()


@dataclass
class Options:
    """What a group can be made with: ``init_process_group("pcie", pg_options=Options(...))``.

    What is None is taken from the environment variable in brackets, then from the default.
    """

    #: "shm" (default): shared memory; "kmod": channels of /dev/pcieipc, each rank on an endpoint [PCIEIPC_TRANSPORT].
    transport: str | None = None
    #: With kmod, the module's id of this rank's endpoint; otherwise the rank-th live one [PCIEIPC_ENDPOINT].
    endpoint: int | None = None
    #: Room from each rank to each other one, a power of two [PCIEIPC_RING_BYTES]; 1 MiB.
    ring_bytes: int | None = None
    #: One of "one-shot", "two-shot", "star", "ring", "recursive-doubling", "hierarchical" [PCIEIPC_ALGORITHM]; the library's choice.
    algorithm: str | None = None
    #: How long a call may take, in seconds [PCIEIPC_TIMEOUT]; the timeout that the group is made with.
    timeout: float | None = None
    #: How many threads make an all-reduce of 2 MiB or more on the CPU [PCIEIPC_LANES]; a host's cores by its ranks, at most 4.
    lanes: int | None = None
    #: What carries a group between hosts [PCIEIPC_OUTER]; "gloo".
    outer: str | None = None
    #: How CUDA memory is reached [PCIEIPC_CUDA_PATH]: "auto" (default), peer memory where it is proved and host memory elsewhere; "peer", "host", "device".
    cuda_path: str | None = None

    def with_environment(self) -> Options:
        """These options, with what the environment says where they say nothing."""

        def of(name: str, given: Any, kind: Any) -> Any:
            text = os.environ.get(f"PCIEIPC_{name}")
            if given is not None or not text:
                return given
            try:
                return kind(text)
            except ValueError:
                raise ArgumentError(f"PCIEIPC_{name}={text} is not a number") from None

        return Options(
            transport=of("TRANSPORT", self.transport, str) or "shm",
            endpoint=of("ENDPOINT", self.endpoint, int),
            ring_bytes=of("RING_BYTES", self.ring_bytes, int) or 0,
            algorithm=of("ALGORITHM", self.algorithm, str),
            timeout=of("TIMEOUT", self.timeout, float),
            lanes=of("LANES", self.lanes, int),
            outer=of("OUTER", self.outer, str) or "gloo",
            cuda_path=of("CUDA_PATH", self.cuda_path, str) or "auto",
        )


def _host() -> str:
    """A name that ranks share exactly when they can meet: of this boot of this machine, unless PCIEIPC_HOST says otherwise."""
    given = os.environ.get("PCIEIPC_HOST")
    if given:
        return given
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def _hosts(store: dist.Store, rank: int, size: int) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first ranks."""
    store.set(f"pcieipc/host/{rank}", _host())
    hosts: dict[str, list[int]] = {}
    for other in range(size):
        hosts.setdefault(store.get(f"pcieipc/host/{other}").decode(), []).append(other)
    return list(hosts.values())


def _base() -> str:
    for folder in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if folder and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise ArgumentError("there is no folder for the meeting: set XDG_RUNTIME_DIR or TMPDIR to one that can be written")


def _outer(kind: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    if kind != "gloo":
        raise ArgumentError(f"not supported: outer={kind!r}; between hosts the backend pcie uses gloo")
    if not dist.is_gloo_available():
        raise ArgumentError("not supported: a group that spans hosts, because this torch has no gloo")
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def create_backend(options: Any, pg_options: Options | None = None) -> Any:
    """What torch.distributed calls to make a group; `options` is its description of it."""
    store, rank, size = options.store, options.group_rank, options.group_size
    if pg_options is not None and not isinstance(pg_options, Options):
        raise ArgumentError(f"pg_options is a {type(pg_options).__name__}: the backend pcie takes pcieipc.torch.Options")
    chosen = (pg_options or Options()).with_environment()
    timeout = options.timeout if chosen.timeout is None else timedelta(seconds=chosen.timeout)
    # Everything that can be refused is refused before anybody waits.
    transport = one_of(TRANSPORTS, "transport", chosen.transport or "shm")
    algorithm = 0 if chosen.algorithm is None else one_of(ALGORITHMS, "algorithm", chosen.algorithm)
    cuda_path = one_of(CUDA_PATHS, "cuda_path", chosen.cuda_path or "auto")
    timeout_ms = milliseconds(timeout.total_seconds())
    backend = _backend().PcieBackend
    _leave_at_exit()

    hosts = _hosts(store, rank, size)
    local = next(ranks for ranks in hosts if rank in ranks)
    leader = rank == local[0]
    shards = min(len(ranks) for ranks in hosts)
    outer = owners = None
    if len(hosts) > 1:
        outer = _outer(chosen.outer or "gloo", dist.PrefixStore("pcieipc/outer", store), rank, size, timeout)
        shard = local.index(rank)
        if shard < shards:
            host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
            owners = _outer(chosen.outer or "gloo", dist.PrefixStore(f"pcieipc/shard/{shard}", store), host, len(hosts), timeout)
    if transport == TRANSPORTS["kmod"]:
        # An endpoint has one user, so a further group of the process goes through shared memory; all ranks must do the same.
        store.set(f"pcieipc/taken/{rank}", "1" if _backend().holds_endpoint() else "0")
        if any(store.get(f"pcieipc/taken/{other}") == b"1" for other in local):
            transport = TRANSPORTS["shm"]
    if leader:
        # Only the name matters: the library makes the folder with mode 0700 and checks whose it is.
        store.set(f"pcieipc/meeting/{rank}", tempfile.mkdtemp(prefix="pcieipc-", dir=_base()))
        # Without a channel of its own in the module for each, and the same on all ranks.
        cores = len(os.sched_getaffinity(0)) // len(local) if transport == TRANSPORTS["shm"] else 1
        store.set(f"pcieipc/lanes/{rank}", str(max(1, min(chosen.lanes or min(cores, 4), 16))))
    directory = store.get(f"pcieipc/meeting/{local[0]}").decode()
    lanes = int(store.get(f"pcieipc/lanes/{local[0]}"))
    try:
        return backend(
            rank=rank,
            size=size,
            timeout_ms=timeout_ms,
            meeting_timeout_ms=milliseconds(options.timeout.total_seconds()),
            directory=directory,
            local=local,
            transport=transport,
            endpoint=-1 if chosen.endpoint is None else chosen.endpoint,
            ring_bytes=chosen.ring_bytes or 0,
            algorithm=algorithm,
            outer=outer,
            owners=owners,
            shards=shards,
            cuda_path=cuda_path,
            lanes=lanes,
        )
    finally:
        if leader:
            # All have met, or it has failed: the folder has done its work.
            shutil.rmtree(directory, ignore_errors=True)
            shutil.rmtree(f"{directory}-last", ignore_errors=True)


def _device_stream(index: int) -> tuple[int, int, int, int]:
    """A stream of the device for a group's collectives, in torch's words and in the driver's."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise ArgumentError("the first collective of a group on a CUDA device can not be captured in a graph: make one before")
    find_compiler()
    stream = torch.cuda.Stream(device=index, priority=-1)
    return stream.stream_id, stream.device_index, stream.device_type, stream.cuda_stream


def _of(group: dist.ProcessGroup | None) -> Any:
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ArgumentError("there is no group: call init_process_group first")
    seen: list[str] = []
    for device in group._device_types:
        found = group._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts another one around it.
        found = getattr(found, "wrapped_pg", found)
        if isinstance(found, _backend().PcieBackend):
            return found
        seen.append(type(found).__name__)
    raise ArgumentError(f"the group's backend is {', '.join(seen)}, not pcie")


def survivors(group: dist.ProcessGroup | None = None, *, timeout: float = 30.0) -> list[int]:
    """After an error: agrees with the other ranks that are left who that is, and answers their ranks in this group, in order.

    All that are left call it. The group itself is over: destroy it, and make a new one of those ranks (see `shrink`).
    """
    left: list[int] = _of(group).survivors(milliseconds(timeout))
    return left


def shrink(store: dist.Store, *, name: str, timeout: float = 30.0, options: Options | None = None) -> list[int]:
    """After an error: replaces the default group by one of the ranks that are left, and answers their former ranks, in order.

    All that are left call it, with the same `name`, one that was not used before; `store` is one that outlives the lost rank. Models
    wrapped in DistributedDataParallel must be wrapped anew.
    """
    group = dist.group.WORLD
    left = survivors(group, timeout=timeout)
    rank = left.index(dist.get_rank())
    _of(group).leave()
    dist.destroy_process_group()
    dist.init_process_group(
        "pcie", store=dist.PrefixStore(f"pcieipc/shrink/{name}", store), rank=rank, world_size=len(left), pg_options=options,
        timeout=timedelta(seconds=timeout),
    )
    return left


def check(group: dist.ProcessGroup | None = None) -> None:
    """Raises what has ended the group, or `PeerDied` when a rank's process has ended. It does not communicate.

    Without collectives of CUDA memory it returns at once; with them it waits until those have run, and the caller's stream with them.
    Called before ``optimizer.step()``, it keeps a step from being made with gradients that an error has left undone.
    """
    _of(group).check()


def monitored_barrier(group: dist.ProcessGroup | None = None, *, timeout: float | None = None, wait_all_ranks: bool = False) -> None:
    """A barrier at which rank 0 names those that did not come in time: what `torch.distributed.monitored_barrier` is.

    That one refuses every backend but gloo in older versions of torch; this one does not.
    """
    # Below 0 stands for the group's own timeout.
    _of(group).monitored_barrier(timedelta(seconds=-1 if timeout is None else timeout), wait_all_ranks)


def abort(why: str, group: dist.ProcessGroup | None = None) -> None:
    """Makes the further calls of all ranks fail with `Aborted` and this reason."""
    _of(group).abort_with(why)


def register_backend() -> None:
    """Makes the name ``pcie`` known to torch.distributed; done by importing this module. Calling it again is allowed."""
    if "PCIE" not in getattr(dist.Backend, "_plugins", {}):
        dist.Backend.register_backend("pcie", create_backend, extended_api=True, devices=["cpu", "cuda"])


register_backend()

__all__ = ["NotBuilt", "Options", "abort", "check", "create_backend", "monitored_barrier", "register_backend", "shrink", "survivors"]
