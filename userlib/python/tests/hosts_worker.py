# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ranks of one host of a group that spans two; started by test_torch_hosts inside the host's network namespace.

    hosts_worker.py ADDRESS PORT ALL FIRST COUNT INTERFACE

Writes one JSON object: the bytes that the host sent for the counted all-reduces, and the theory's.
"""

import json
import sys
from datetime import timedelta

import ranks as processes
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pcieipc.torch

ELEMENTS, ROUNDS = 1_000_003, 4


def sent(interface: str) -> int:
    """Bytes that this host has sent."""
    with open("/proc/net/dev") as file:
        line = next(line for line in file if line.strip().startswith(f"{interface}:"))
    return int(line.split(":")[1].split()[8])


def everything(rank: int, n: int) -> None:
    """Each collective, across hosts."""
    for count in (0, 1, 5, 70_001):
        t = torch.full((count,), float(rank))
        dist.all_reduce(t)
        assert bool((t == n * (n - 1) / 2).all()), count
    for kind in (torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        t = torch.full((33,), rank + 1, dtype=kind)
        dist.all_reduce(t)
        assert bool((t == n * (n + 1) // 2).all()), kind
    t = torch.full((10, 10), float(rank))
    dist.all_reduce(t[:, ::2], op=dist.ReduceOp.AVG)
    assert t[0, 0] == (n - 1) / 2 and t[0, 1] == rank
    t = torch.tensor([float(rank)])
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    assert t.item() == n - 1
    many = [torch.full((i + 1,), float(rank)) for i in range(5)]
    dist.all_reduce_coalesced(many)
    assert all(m[0] == n * (n - 1) / 2 for m in many)
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(50)]
    for work in works:
        work.wait()
    dist.broadcast(t := torch.tensor([float(rank)]), src=n - 1)
    assert t.item() == n - 1
    outs = [torch.empty(3) for _ in range(n)]
    dist.all_gather(outs, torch.full((3,), float(rank)))
    assert [o[0].item() for o in outs] == list(range(n))
    if rank == 0:
        dist.send(torch.ones(3), n - 1)
    if rank == n - 1:
        dist.recv(t := torch.zeros(3), 0)
        assert t[0] == 1
    dist.barrier()


def train(rank: int) -> bytes:
    """The bits of a model after some steps."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(50, 101), torch.nn.ReLU(), torch.nn.Linear(101, 7))
    wrapped = DistributedDataParallel(module, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 50, generator=draw)).pow(2).mean().backward()
        optimizer.step()
    return b"".join(p.detach().numpy().tobytes() for p in module.parameters())


def main() -> None:
    address, port, n, first, count, interface = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]

    def one(local: int) -> dict:
        rank = first + local
        torch.set_num_threads(1)
        store = dist.TCPStore(address, port, n, rank == 0, timeout=timedelta(seconds=120), use_libuv=False)
        dist.init_process_group("pcie", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=120))
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.spans_hosts and backend.host_ranks == list(range(first, first + count))
        everything(rank, n)
        gathered: list = [None] * n
        dist.all_gather_object(gathered, train(rank))
        assert len(set(gathered)) == 1, "all ranks of both hosts hold the same bits"
        t = torch.ones(ELEMENTS)
        dist.all_reduce(t)
        dist.barrier()
        before = sent(interface)
        for _ in range(ROUNDS):
            dist.all_reduce(t)
        dist.barrier()
        bytes_sent = sent(interface) - before
        dist.barrier()
        dist.destroy_process_group()
        return {"sent": bytes_sent, "theory": ROUNDS * ELEMENTS * 4}

    print(json.dumps(processes.run(count, one)[0]))


if __name__ == "__main__":
    main()
