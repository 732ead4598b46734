# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs in the virtual machine: four ranks train the digits over /dev/pcieipc, one endpoint is removed, three go on. Prints KTAP lines."""

import glob
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import ranks as processes
import torch
import torch.distributed as dist
from digits import digest, digits, model
from torch.nn.parallel import DistributedDataParallel

import pcieipc
import pcieipc.torch

RANKS, VICTIM, STEPS = 4, 2, 5
processes.BOUND = 1200.0


def endpoints() -> list[str]:
    """The PCI addresses that the module's driver has, in order."""
    return sorted(os.path.basename(path) for path in glob.glob("/sys/bus/pci/drivers/pcieipc/0000:*"))


def train(module: torch.nn.Module, first: int, steps: int) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pictures, labels = digits(rank, ranks)
    wrapped = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for step in range(first, first + steps):
        batch = torch.randint(len(labels), (32,), generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = torch.nn.functional.cross_entropy(wrapped(pictures[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def body(rank: int, folder: str) -> dict:
    torch.set_num_threads(1)
    found = {}
    for transport in ("shm", "kmod"):
        os.environ["PCIEIPC_TRANSPORT"] = transport
        store = dist.FileStore(f"{folder}/{transport}", RANKS)
        dist.init_process_group("pcie", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
        module = model(32)
        found[transport] = (train(module, 0, STEPS), digest(module))
        if transport == "shm":
            dist.destroy_process_group()
    # The rank that will lose its endpoint pulls it out while the others train on.
    if rank == VICTIM:
        Path(f"/sys/bus/pci/devices/{endpoints()[VICTIM]}/remove").write_text("1")
    begun = time.monotonic()
    try:
        train(module, STEPS, 1000)
    except pcieipc.Error as error:
        found["error"] = (type(error).__name__, error.rank, error.endpoint is not None, time.monotonic() - begun)
    if rank == VICTIM:
        return found
    found["left"] = pcieipc.torch.shrink(dist.FileStore(f"{folder}/again", -1), name="once", timeout=300)
    found["after"] = train(module, STEPS, 2)
    found["parameters"] = digest(module)
    dist.destroy_process_group()
    return found


def main() -> int:
    number = failed = 0

    def promise(holds: bool, name: str, why: object) -> None:
        nonlocal number, failed
        number += 1
        failed += not holds
        print(f"{'ok' if holds else 'not ok'} {number} {name}", flush=True)
        if not holds:
            print(f"# {why}", flush=True)

    print("1..5", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = processes.run(RANKS, body, folder)
    left = [f for rank, f in enumerate(found) if rank != VICTIM]
    promise(all(f["shm"] == f["kmod"] for f in found), "training_over_the_module_has_the_bits_of_shared_memory", found)
    promise(len({f["kmod"][1] for f in found}) == 1, "all_ranks_hold_the_same_parameters", found)
    errors = [f.get("error") for f in left]
    named = all(e and e[:3] == ("EndpointGone", VICTIM, True) for e in errors)
    promise(named, "a_removed_endpoint_is_endpoint_gone_on_every_other_rank", errors)
    promise(all(f.get("left") == [0, 1, 3] for f in left), "the_others_agree_and_go_on_over_the_module", left)
    promise(len({f.get("parameters") for f in left}) == 1, "they_hold_the_same_parameters_afterwards", left)
    return failed


if __name__ == "__main__":
    sys.exit(main())
