#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Training that goes on after a rank was killed in the middle of a backward pass.

    faults.py shrink     the ranks that are left go on without it, from the last step that all of them have done
    faults.py recover    a new process takes its place, gets the state from the others, and all go on

Both then prove it: a shrunken run must end with the same bits as a fresh run of as many ranks from the same state, a recovered run
with the same bits as one that nothing happened to. Exit code 0 means proved. Every process keeps the state of its last steps in memory.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pcieipc
import pcieipc.torch
from digits import digest, digits, model

TIMEOUT = 60.0


class Trainer:
    """A model, its optimizer, and the states after the last steps."""

    def __init__(self) -> None:
        self.module = model(64)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.done = 0
        self.states: dict[int, bytes] = {}
        self.keep()

    def state(self) -> dict:
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}

    def keep(self) -> None:
        """Remembers the state after this step, and forgets all but the last three: ranks are at most one step apart."""
        import io

        file = io.BytesIO()
        torch.save(self.state(), file)
        self.states[self.done] = file.getvalue()
        for old in [step for step in self.states if step < self.done - 2]:
            del self.states[old]

    def restore(self, saved: bytes) -> None:
        import io

        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]
        self.states = {}
        self.keep()

    def run(self, steps: int, killed_at: int | None) -> None:
        """Trains up to `steps` with the default group; what a rank reads depends on the step, its rank and the number of ranks alone."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        pictures, labels = digits(rank, ranks)
        # Small buckets: when the rank dies, some are reduced and some are not.
        wrapped = DistributedDataParallel(self.module, bucket_cap_mb=0.01)
        while self.done < steps:
            draw = torch.Generator().manual_seed(1000 * self.done + rank)
            batch = torch.randint(len(labels), (32,), generator=draw)
            loss = torch.nn.functional.cross_entropy(wrapped(pictures[batch]), labels[batch])
            self.optimizer.zero_grad()
            if self.done == killed_at:
                first = next(iter(self.module.parameters()))
                first.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
            pcieipc.torch.check()
            self.optimizer.step()
            self.done += 1
            self.keep()


def common_step(trainer: Trainer) -> int:
    """The last step that all ranks of the default group have done."""
    step = torch.tensor(trainer.done)
    dist.all_reduce(step, op=dist.ReduceOp.MIN)
    return int(step)


def meet(store: dist.Store, life: str, rank: int, ranks: int) -> None:
    dist.init_process_group(
        "pcie", store=dist.PrefixStore(life, store), rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT)
    )


def rank_main(arguments: argparse.Namespace) -> None:
    """One process of a run."""
    torch.set_num_threads(1)
    folder, rank, ranks = Path(arguments.folder), arguments.rank, arguments.ranks
    store = dist.FileStore(str(folder / "store"), -1)
    trainer = Trainer()
    told: dict = {}
    if arguments.start_from:
        trainer.restore(Path(arguments.start_from).read_bytes())
    if arguments.replacement:
        meet(store, "second", rank, ranks)
        take_state(trainer)
    else:
        meet(store, "first", rank, ranks)
    try:
        trainer.run(arguments.steps, arguments.at if rank == arguments.victim else None)
    except pcieipc.Error as error:
        told = {"error": type(error).__name__, "about": error.rank, "noticed": time.time()}
        if arguments.mode == "recover":
            dist.destroy_process_group()
            meet(store, "second", rank, ranks)
            take_state(trainer)
        else:
            told["left"] = pcieipc.torch.shrink(store, name="1", timeout=TIMEOUT)
            step = common_step(trainer)
            trainer.restore(trainer.states[step])
            told["step"] = step
            if dist.get_rank() == 0:
                (folder / "restored").write_bytes(trainer.states[step])
        trainer.run(arguments.steps, None)
    told |= {"parameters": digest(trainer.module), "ranks": dist.get_world_size(), "done": trainer.done}
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def take_state(trainer: Trainer) -> None:
    """Gives every rank the state after the last step that all but the new process have done."""
    done: list = [None] * dist.get_world_size()
    fresh = trainer.done == 0
    dist.all_gather_object(done, None if fresh else trainer.done)
    step = min(number for number in done if number is not None)
    source = next(rank for rank, number in enumerate(done) if number is not None)
    state = [trainer.states[step] if dist.get_rank() == source else None]
    dist.broadcast_object_list(state, src=source)
    trainer.restore(state[0])


def start(folder: Path, rank: int, ranks: int, steps: int, *more: str) -> subprocess.Popen:
    command = [sys.executable, __file__, "rank", "--folder", str(folder), "--rank", str(rank), "--ranks", str(ranks), "--steps", str(steps), *more]
    return subprocess.Popen(command)


def finish(processes: dict[int, subprocess.Popen]) -> None:
    """All must end well, and soon."""
    deadline = time.monotonic() + 4 * TIMEOUT
    try:
        for rank, process in processes.items():
            code = process.wait(max(deadline - time.monotonic(), 0.1))
            if code != 0:
                sys.exit(f"rank {rank} ended with {code}")
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def results(folder: Path, ranks: list[int]) -> list[dict]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in ranks]


def require(holds: bool, what: str) -> None:
    print(f"{'ok' if holds else 'NOT OK'}: {what}", flush=True)
    if not holds:
        sys.exit(1)


def prove(arguments: argparse.Namespace, folder: Path) -> None:
    """Runs, kills, runs again, compares."""
    ranks, victim, steps = arguments.ranks, arguments.victim, arguments.steps
    left = [rank for rank in range(ranks) if rank != victim]
    interrupted, other = folder / "interrupted", folder / "other"
    interrupted.mkdir()
    other.mkdir()
    same = ("--mode", arguments.mode, "--victim", str(victim), "--at", str(arguments.at))
    processes = {rank: start(interrupted, rank, ranks, steps, *same) for rank in range(ranks)}
    lost = processes.pop(victim)
    try:
        code = lost.wait(2 * TIMEOUT)
        died = time.time()
        if arguments.mode == "recover":
            processes[victim] = start(interrupted, victim, ranks, steps, "--mode", "recover", "--replacement")
    finally:
        if lost.poll() is None:
            lost.kill()
        finish(processes)
    require(code == -signal.SIGKILL, f"rank {victim} was killed in step {arguments.at}")
    told = results(interrupted, left)
    require(all(t["error"] == "PeerDied" for t in told), f"every survivor was told so: {[t['error'] for t in told]}")
    slowest = max(t["noticed"] - died for t in told)
    require(slowest < TIMEOUT / 2, f"the last of them {slowest:.3f} s after the death, with a timeout of {TIMEOUT:.0f} s")

    if arguments.mode == "recover":
        finish({rank: start(other, rank, ranks, steps) for rank in range(ranks)})
        ends = results(interrupted, list(range(ranks))) + results(other, list(range(ranks)))
        what = f"a recovered run of {ranks} ends with the bits of an uninterrupted run"
    else:
        require(all(t["left"] == left for t in told), f"they agree that {left} are left")
        require(len({t["step"] for t in told}) == 1, f"they agree on step {told[0]['step']} as the last that all have done")
        begin = ("--start-from", str(interrupted / "restored"))
        finish({rank: start(other, rank, len(left), steps, *begin) for rank in range(len(left))})
        ends = told + results(other, list(range(len(left))))
        what = f"the run that shrank to {len(left)} ends with the bits of a fresh run of {len(left)} from the same state"
    require(all(t["done"] == steps for t in ends), f"all made {steps} steps")
    require(len({t["parameters"] for t in ends}) == 1, what)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("mode_or_rank", choices=["shrink", "recover", "rank"])
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--victim", type=int, default=2)
    options.add_argument("--at", type=int, default=7, help="the step in which the victim is killed")
    options.add_argument("--mode", default="shrink", help=argparse.SUPPRESS)
    options.add_argument("--folder", help=argparse.SUPPRESS)
    options.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options.add_argument("--start-from", help=argparse.SUPPRESS)
    options.add_argument("--replacement", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.mode_or_rank == "rank":
        if "--victim" not in sys.argv:
            arguments.victim = -1
        rank_main(arguments)
        return
    arguments.mode = arguments.mode_or_rank
    with tempfile.TemporaryDirectory(prefix="pcieipc-faults-") as folder:
        prove(arguments, Path(folder))


if __name__ == "__main__":
    main()
