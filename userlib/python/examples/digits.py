#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Data-parallel training on scikit-learn's handwritten digits. The backend is the only line that changes:

    torchrun --nproc-per-node 4 digits.py --backend pcie
    torchrun --nproc-per-node 4 digits.py --backend gloo
    torchrun --nproc-per-node 4 digits.py --backend pcie --device cuda

With --losses FILE, rank 0 writes every step's loss (mean over all ranks) and a digest of the parameters at the end.
"""

import argparse
import hashlib
import json
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def digits(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the pictures: every rank has as many."""
    from sklearn.datasets import load_digits

    data = load_digits()
    count = len(data.target) // ranks * ranks
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(1))[:count]
    mine = order[rank::ranks]
    return torch.tensor(data.data, dtype=torch.float32)[mine] / 16, torch.tensor(data.target)[mine]


def model(width: int) -> torch.nn.Module:
    """A small classifier, with the same parameters on every rank and in every run."""
    torch.manual_seed(2)
    layers = [torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)]
    return torch.nn.Sequential(*layers)


def digest(module: torch.nn.Module) -> str:
    """Of the parameters' bits."""
    summary = hashlib.sha256()
    for parameter in module.parameters():
        summary.update(parameter.detach().cpu().numpy().tobytes())
    return summary.hexdigest()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backend", default="pcie")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--losses")
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="with cuda, ranks share devices where there are fewer of them")
    arguments = options.parse_args()

    torch.set_num_threads(1)
    pcie = arguments.backend.endswith("pcie")
    if pcie:
        import pcieipc.torch  # torch 2.5 and later finds the installed wheel by itself
    device = arguments.device
    if device == "cuda":
        device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    dist.init_process_group(arguments.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    pictures, labels = (part.to(device) for part in digits(rank, ranks))
    trained = DistributedDataParallel(model(arguments.width).to(device))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(3 + rank)
    losses = []
    begun = time.perf_counter()
    for _ in range(arguments.steps):
        batch = torch.randint(len(labels), (arguments.batch,), generator=draw).to(device)
        loss = torch.nn.functional.cross_entropy(trained(pictures[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        if pcie:
            # No step with gradients that an error has left undone.
            pcieipc.torch.check()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    seconds = time.perf_counter() - begun

    if rank == 0:
        print(f"{arguments.backend}: {ranks} ranks, {arguments.steps} steps in {seconds:.2f} s, loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
        if arguments.losses:
            with open(arguments.losses, "w") as file:
                json.dump({"losses": losses, "parameters": digest(trained.module), "seconds": seconds}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
