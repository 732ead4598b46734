#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""How long a training step's gradients take: the same buckets over pcie and over gloo, in turn, in the same processes.

    torchrun --nproc-per-node 4 buckets.py --out FILE

A step all-reduces buckets one behind the other without waiting in between, as DistributedDataParallel does, then waits for all.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist

import pcieipc.torch


def step(buckets: list[torch.Tensor], group: dist.ProcessGroup) -> float:
    """Seconds for one step's buckets."""
    dist.barrier(group=group)
    begun = time.perf_counter()
    for work in [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]:
        work.wait()
    return time.perf_counter() - begun


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--bucket-mb", type=int, default=25)
    options.add_argument("--buckets", type=int, default=10)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--out", required=True)
    arguments = options.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("pcie")
    groups = {"pcie": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    length = arguments.bucket_mb * 10**6 // 4
    buckets = [torch.empty(length) for _ in range(arguments.buckets)]
    times: dict[str, list[float]] = {name: [] for name in groups}
    for round_ in range(-1, arguments.rounds):
        for name, group in groups.items():
            for number, bucket in enumerate(buckets):
                bucket.fill_(rank + number)
            took = step(buckets, group)
            for number, bucket in enumerate(buckets):
                expected = ranks * (ranks - 1) / 2 + ranks * number
                if bucket[0] != expected or bucket[-1] != expected:
                    raise SystemExit(f"{name} gave a wrong sum")
            if round_ >= 0:
                times[name].append(took)
    slowest = {}
    for name, own in times.items():
        worst = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        slowest[name] = worst.tolist()
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in slowest.items()}
        with open(arguments.out, "w") as file:
            json.dump(
                {
                    "ranks": ranks,
                    "torch": torch.__version__,
                    "bucket_bytes": length * 4,
                    "buckets": arguments.buckets,
                    "bytes_in_all": length * 4 * arguments.buckets * arguments.rounds,
                    "seconds_a_step": slowest,
                    "median": medians,
                    "ratio": medians["pcie"] / medians["gloo"],
                },
                file,
                indent=1,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
