# SPDX-License-Identifier: MIT OR Apache-2.0
"""Process groups of the backend under test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import ranks as processes
import torch
import torch.distributed as dist

import pcieipc.torch

# Gloo needs a network interface of its own choice; here there is the loopback.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
torch.set_num_threads(1)
#: Where tensors are made that name no device; "cuda" in the tests of CUDA memory, whose ranks share the devices that there are.
DEVICE = "cpu"


def run(ranks: int, body: Callable[..., Any], *, backend: str = "pcie", timeout: float = 60.0, options: Any = None, destroy: bool = True) -> list[Any]:
    """`body(rank)` on each rank of a default group of the backend."""
    with tempfile.TemporaryDirectory(prefix="pcieipc-test-") as folder:

        def one(rank: int) -> Any:
            start(folder, rank, ranks, backend=backend, timeout=timeout, options=options)
            try:
                return body(rank)
            finally:
                if destroy:
                    dist.destroy_process_group()

        return processes.run(ranks, one)


def start(folder: str, rank: int, ranks: int, *, backend: str = "pcie", timeout: float = 60.0, options: Any = None, name: str = "store") -> None:
    """Makes the default group."""
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device(DEVICE)
    else:
        # Some of torch's own functions synchronize the device wherever there is one, whatever the tensors are on.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/{name}", ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
        pg_options=options if backend == "pcie" else None,
    )


__all__ = ["pcieipc", "run", "start"]
