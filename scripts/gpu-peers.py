#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""One rank of a peer in `pcieipc cuda bench`: torch's symmetric memory, or FlashInfer's PCIe IPC all-reduce.

gpu-peers.py symm|flashinfer RANK RANKS DIRECTORY LARGEST [FLASHINFER_FOLDER]

Reads orders and writes answers as `pcieipc cuda worker` does: one JSON object a line. Each peer runs the best of its own
algorithms and launch settings, found anew for each size; calls rotate through four times the L2.
"""
import importlib
import json
import os
import sys
import types

import torch
import torch.distributed as dist

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # other output is not an answer

what, rank, ranks, directory, largest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", init_method=f"file://{directory}/meet", rank=rank, world_size=ranks, device_id=device)
stream = torch.cuda.Stream()
torch.cuda.set_stream(stream)
l2 = torch.cuda.get_device_properties(device).L2_cache_size


def together():
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def slowest(us):
    value = torch.tensor([us], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def slots(size):
    """How many tensors of this size the calls rotate through."""
    return max(1, min(40, 4 * l2 // size))


class Timed:
    """Calls in a graph, which takes turns through tensors."""

    def __init__(self, call, shape):
        self.call, self.shape = call, shape
        for i in range(3):
            call(i)
        together()
        self.graph = None
        if shape["graph"]:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                for i in range(shape["calls"]):
                    call(i)
            self.graph.replay()
            together()

    def once(self):
        if self.graph is not None:
            self.graph.replay()
        else:
            for i in range(self.shape["calls"]):
                self.call(i)

    def us(self, replays=None):
        replays = replays or self.shape["replays"]
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.once()
        first.record()
        for _ in range(replays):
            self.once()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e3 / (replays * self.shape["calls"])


def best(candidates):
    """The fastest by the slowest rank; all ranks choose the same."""
    return min(candidates, key=lambda c: slowest(c[0].us(2)))


symmetric = {}


def symm(shape):
    import torch.distributed._symmetric_memory as memory

    size, name = shape["bytes"], dist.group.WORLD.group_name
    symmetric.clear()
    views = symmetric["tensors"] = []
    for _ in range(min(8, slots(size))):
        views.append(memory.empty(size // 2, dtype=torch.bfloat16, device=device))
        memory.rendezvous(views[-1], name)
        views[-1].normal_()
    candidates = []
    operations = ["two_shot_all_reduce_"] + (["one_shot_all_reduce"] if size <= 1 << 24 else [])
    for operation in operations:
        op = getattr(torch.ops.symm_mem, operation)
        candidates.append((Timed(lambda i, op=op: op(views[i % len(views)], "sum", name), shape), operation))
    return best(candidates)


def flashinfer_modules(root):
    parts = [("flashinfer", root), ("flashinfer.comm", root + "/comm"), ("flashinfer.trace", root + "/trace")]
    for name, path in parts + [("flashinfer.trace.templates", root + "/trace/templates")]:
        module = types.ModuleType(name)
        module.__path__ = [path]
        module.__version__ = "0.7.2"
        sys.modules[name] = module
    return importlib.import_module("flashinfer.comm.pcie_ipc_ar"), importlib.import_module("flashinfer.comm.pcie_ipc_policy")


kept = []


def flashinfer(shape):
    size = shape["bytes"]
    if size > 1 << 26:
        raise RuntimeError("FlashInfer's workspace is not made for this size")
    api, policy = flashinfer_modules(sys.argv[6])
    while kept:
        kept.pop().destroy()
        dist.barrier()
    workspace = api.PcieIpcAllReduceWorkspace(dist.group.WORLD, max_numel=size // 2, profile="rootcplx")
    workspace._check_stream = lambda: None
    kept.append(workspace)
    inputs = [torch.randn(size // 2, dtype=torch.bfloat16, device=device) for _ in range(slots(size))]
    right = inputs[0].clone()
    dist.all_reduce(right)
    fastest = None
    for variant in (policy.IpcVariant.UNSTAGED, policy.IpcVariant.STAGED):
        for blocks in (1, 2, 4, 8, 16, 32):
            for threads in (128, 256, 512, 1024):
                # Far too few threads for the size are not worth the time.
                if blocks * threads * 16 < size / 512 or blocks * threads > max(1024, size // 8):
                    continue
                config = policy.IpcLaunchConfig(blocks, threads, variant)
                if not policy._is_launchable(ranks, config, workspace.max_blocks, size // 2, 2):
                    continue
                call = lambda i, c=config: workspace.all_reduce(inputs[i % len(inputs)], config=c)
                if not torch.allclose(call(0).float(), right.float(), rtol=2e-2, atol=2e-2):
                    continue
                short = dict(shape, calls=min(10, shape["calls"]))
                us = slowest(Timed(call, short).us(2))
                if fastest is None or us < fastest[0]:
                    fastest = (us, call, f"{blocks} blocks of {threads}, {variant.name}")
    return Timed(fastest[1], shape), fastest[2]


timed = None
for line in sys.stdin:
    order = json.loads(line)
    answer = {}
    try:
        if order["do"] == "quit":
            break
        if order["do"] == "prepare":
            timed = None
            timed, answer["text"] = (symm if what == "symm" else flashinfer)(order)
        elif order["do"] == "measure":
            answer["us"] = timed.us()
    except Exception as error:  # told to the bench, which goes on with the others
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)
print("{}", file=answers, flush=True)
os._exit(0)
