# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a function in several processes at once, with a bound, and brings their results back."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

#: For hangs only; a loaded machine is slow.
BOUND = 240.0


class Killed:
    """The result of a rank that was killed."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Killed)


def run(ranks: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`body(rank, *arguments)` in one process a rank, made by fork. Answers what each returned; an exception in any of them fails."""
    context = multiprocessing.get_context("fork")
    processes, ends = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, rank, body, arguments), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    deadline = time.monotonic() + BOUND
    results: list[Any] = [None] * ranks
    failures = []
    try:
        for rank, (process, end) in enumerate(zip(processes, ends)):
            try:
                if not end.poll(max(deadline - time.monotonic(), 0.01)):
                    failures.append(f"rank {rank} did not end within {BOUND:.0f} s")
                    break
                fine, value = pickle.loads(end.recv_bytes())
                results[rank] = value
                if not fine:
                    failures.append(f"rank {rank}:\n{value}")
            except EOFError:
                process.join(10)
                if process.exitcode == -signal.SIGKILL:
                    results[rank] = Killed()
                else:
                    failures.append(f"rank {rank} ended with {process.exitcode} and without a result")
        for rank, process in enumerate(processes):
            process.join(max(deadline - time.monotonic(), 0.01) if not failures else 5)
    finally:
        for process in processes:
            if process.is_alive():
                if not failures:
                    failures.append(f"process {process.pid} does not end")
                process.kill()
                process.join()
    assert not failures, "\n".join(failures)
    return results


def die() -> None:
    """Ends this process as a crash would."""
    os.kill(os.getpid(), signal.SIGKILL)


def _child(end: Any, rank: int, body: Callable[..., Any], arguments: tuple) -> None:
    try:
        answer = (True, body(rank, *arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    # By value: torch's own pickling of tensors leaves them with this process, which ends.
    end.send_bytes(pickle.dumps(answer))
    end.close()
