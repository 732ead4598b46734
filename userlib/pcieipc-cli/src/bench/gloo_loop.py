# SPDX-License-Identifier: MIT OR Apache-2.0
# Times torch's all_reduce of float32 over Gloo. usage: gloo_loop.py RANKS SECONDS FOLDER; measures the size in FOLDER/turn-0 when that is
# there, then the one in turn-1 and so on, until one is 0. Rank 0 prints "BYTES MICROSECONDS" for each, the median of five repeats on the
# slowest rank. Meanwhile it sleeps, so that others can be measured.
import itertools
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def turn(folder, number):
    while True:
        try:
            with open(f"{folder}/turn-{number}") as file:
                return int(file.read())
        except FileNotFoundError:
            time.sleep(0.002)


def main(rank, ranks, budget, turns, store):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)

    def slowest(seconds):
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()

    for number in itertools.count():
        size = turn(turns, number)
        if size == 0:
            break
        tensor = torch.zeros(size // 4)
        dist.all_reduce(tensor)
        begun = time.perf_counter()
        for _ in range(3):
            dist.all_reduce(tensor)
        calls = max(3, min(20000, int(budget / slowest((time.perf_counter() - begun) / 3))))
        times = []
        for _ in range(5):
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(tensor)
            times.append(slowest((time.perf_counter() - begun) / calls))
        if rank == 0:
            print(size, statistics.median(times) * 1e6, flush=True)
    # One that is gone first would be an error of the other.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    n, seconds, turns = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (n, seconds, turns, folder + "/store"), nprocs=n)
