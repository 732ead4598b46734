# SPDX-License-Identifier: MIT OR Apache-2.0
"""What goes wrong is a typed exception on every rank, within the timeout, and gives everything back."""

import gc
import os
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import ranks as processes
import torch.distributed as dist
import worlds

import pcieipc
import pcieipc.torch


def test_a_killed_rank_is_peer_died_on_every_other_within_the_timeout():
    def body(rank):
        t = torch.ones(1 << 20)
        dist.all_reduce(t)
        if rank == 1:
            processes.die()
        begun = time.monotonic()
        with pytest.raises(pcieipc.PeerDied) as caught:
            for _ in range(1000):
                dist.all_reduce(t)
        assert caught.value.rank == 1 and time.monotonic() - begun < 50
        # Whatever comes later says the same, at once.
        with pytest.raises(pcieipc.PeerDied, match="the group ended before"):
            dist.barrier()
        work = dist.all_reduce(t, async_op=True)
        with pytest.raises(pcieipc.PeerDied):
            work.get_future().wait()
        return True

    assert worlds.run(3, body) == [True, processes.Killed(), True]


def test_the_exception_comes_through_a_backward_pass():
    def body(rank):
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(torch.nn.Linear(100, 100))
        x = torch.ones(4, 100)
        wrapped(x).sum().backward()
        if rank == 0:
            processes.die()
        with pytest.raises(pcieipc.PeerDied) as caught:
            for _ in range(100):
                wrapped(x).sum().backward()
        return caught.value.rank

    assert worlds.run(3, body) == [processes.Killed(), 0, 0]


def test_a_rank_whose_process_ends_in_order_is_not_one_that_died():
    def body(rank):
        t = torch.ones(10)
        dist.all_reduce(t)
        if rank == 0:
            time.sleep(1.5)
            # The others have ended, with the group still in use.
            pcieipc.torch.check()
        return t[0].item()

    assert worlds.run(3, body, destroy=False) == [3.0] * 3


def test_a_message_to_or_from_a_killed_rank_ends():
    def body(rank):
        t = torch.ones(1 << 20)
        if rank == 1:
            dist.recv(t, 0)
            processes.die()
        dist.send(t, 1)
        for call in (lambda: dist.recv(t, 1), lambda: dist.send(t, 1), lambda: dist.recv(t)):
            with pytest.raises(pcieipc.PeerDied) as caught:
                call()
            assert caught.value.rank == 1
        return True

    assert worlds.run(2, body) == [True, processes.Killed()]


def test_a_late_rank_is_a_timeout_and_options_set_it():
    def body(rank):
        t = torch.ones(10)
        dist.all_reduce(t)
        if rank == 0:
            begun = time.monotonic()
            with pytest.raises(pcieipc.Timeout) as caught:
                dist.all_reduce(t)
            assert caught.value.rank == 1 and 0.9 < time.monotonic() - begun < 40
        else:
            time.sleep(4)
            with pytest.raises(pcieipc.Error):
                dist.all_reduce(t)
        return True

    assert worlds.run(2, body, timeout=600, options=pcieipc.torch.Options(timeout=1.0)) == [True, True]


def test_an_unmatched_message_is_a_timeout_and_the_group_goes_on():
    def body(rank):
        short = dist.new_group([0, 1], pg_options=pcieipc.torch.Options(timeout=1.0))
        t = torch.ones(10)
        with pytest.raises(pcieipc.Timeout):
            if rank == 0:
                dist.recv(t, 1, group=short, tag=5)
            else:
                dist.send(t, 0, group=short, tag=6)
        dist.barrier()
        if rank == 0:
            dist.recv(t, 1, group=short, tag=7)
        else:
            dist.send(t + 1, 0, group=short, tag=7)
        return t[0].item()

    assert worlds.run(2, body) == [2.0, 1.0]


def test_shapes_that_differ_are_a_mismatch_on_every_rank():
    def collective(rank):
        # Who sees it first tells the other.
        with pytest.raises((pcieipc.Mismatch, pcieipc.Aborted), match="disagrees with rank") as caught:
            dist.all_reduce(torch.ones(10 + rank))
        return isinstance(caught.value, pcieipc.Mismatch)

    def exchange(rank):
        with pytest.raises(pcieipc.Mismatch, match="rank 0 sends 8 bytes to rank 1, which expects 4"):
            dist.all_to_all([torch.empty(1), torch.empty(1)], [torch.ones(1), torch.ones(2 - rank)])
        t = torch.ones(1)
        dist.all_reduce(t)  # All ranks saw it at the same place, so the group goes on.
        return t.item()

    def message(rank):
        with pytest.raises(pcieipc.Mismatch, match="bytes here"):
            if rank == 0:
                dist.send(torch.ones(3), 1)
            else:
                dist.recv(torch.ones(4), 0)
        t = torch.ones(1)
        dist.all_reduce(t)
        return t.item()

    assert any(worlds.run(2, collective))
    assert worlds.run(2, exchange) == [2.0, 2.0]
    assert worlds.run(2, message) == [2.0, 2.0]


def test_misuse_is_refused_with_words_and_the_group_goes_on():
    def body(rank):
        meta = torch.empty(3, device="meta")
        fp8 = getattr(torch, "float8_e4m3fn", None)
        cases = [
            (lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX), "complex|not support"),
            (lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BOR), "bitwise"),
            (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.AVG), "AVG"),
            (lambda: dist.broadcast(torch.sparse_coo_tensor([[0]], [1.0], (2,)), 0), "sparse|SparseCPU"),
            (lambda: dist.all_reduce_coalesced([torch.ones(1), torch.ones(1, dtype=torch.int32)]), "type"),
            (lambda: dist.all_gather([torch.empty(2)] * 2, torch.ones(3)), "elements|shape|size"),
            (lambda: dist.send(torch.ones(1), rank), "same as the rank|is this rank"),
            (lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3)), "divid"),
            (lambda: dist.all_to_all_single(torch.empty(2), torch.empty(2), [1, 2], [1, 1]), "add up"),
            (lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(5)), "elements|size"),
        ]
        if fp8 is not None:
            cases.append((lambda: dist.all_reduce(torch.ones(2).to(fp8)), "Float8"))
        for call, words in cases:
            with pytest.raises((RuntimeError, ValueError, TypeError), match=words):
                call()
        # Later versions of torch answer for tensors without data themselves, by doing nothing.
        if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
            with pytest.raises((RuntimeError, NotImplementedError)):
                dist.all_reduce(meta)
        t = torch.ones(1)
        dist.all_reduce(t)
        return t.item()

    assert worlds.run(2, body) == [2.0, 2.0]


def test_wrong_options_are_refused_before_anybody_waits():
    for options, words in (
        (pcieipc.torch.Options(transport="carrier-pigeon"), "shm, kmod"),
        (pcieipc.torch.Options(algorithm="quick"), "one-shot"),
        (pcieipc.torch.Options(timeout=-1), "above 0"),
        ("shm", "takes pcieipc.torch.Options"),
    ):

        def body(rank, options=options, words=words):
            begun = time.monotonic()
            with pytest.raises(pcieipc.ArgumentError, match=words):
                worlds.start("/tmp", 0, 1, options=options, name=f"pcieipc-no-store-{os.getpid()}")
            return time.monotonic() - begun < 30

        assert processes.run(1, body) == [True]


def test_the_module_that_is_not_there_is_an_error_that_says_so():
    if os.path.exists("/dev/pcieipc"):
        pytest.skip("the module is loaded here")

    def body(rank):
        with pytest.raises(pcieipc.DeviceError, match="/dev/pcieipc"):
            worlds.start("/tmp", 0, 1, options=pcieipc.torch.Options(transport="kmod"), name=f"pcieipc-no-module-{os.getpid()}")
        return True

    assert processes.run(1, body) == [True]


def test_waiting_lets_other_python_threads_run():
    def body(rank):
        t = torch.ones(10)
        if rank == 1:
            time.sleep(1.5)
            dist.all_reduce(t)
            return True
        turns = 0
        stop = threading.Event()

        def count():
            nonlocal turns
            while not stop.is_set():
                turns += 1
                time.sleep(0.01)

        thread = threading.Thread(target=count)
        thread.start()
        dist.all_reduce(t)
        stop.set()
        thread.join()
        return turns > 10

    assert worlds.run(2, body) == [True, True]


def test_a_monitored_barrier_names_who_did_not_come(tmp_path):
    def body(rank):
        worlds.start(str(tmp_path), rank, 3)
        pcieipc.torch.monitored_barrier()
        if rank != 2:
            words = "Ranks 2 failed to pass monitoredBarrier in 1000 ms" if rank == 0 else "successfully reached monitoredBarrier"
            with pytest.raises(pcieipc.Error, match=words):
                pcieipc.torch.monitored_barrier(timeout=1 if rank == 0 else 60, wait_all_ranks=True)
        dist.barrier()
        return True

    assert processes.run(3, body) == [True] * 3


def test_ten_thousand_steps_take_no_more_memory_and_all_is_given_back(tmp_path):
    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def body(rank):
        def open_files():
            return len(os.listdir("/proc/self/fd"))

        # Where there is a driver, torch starts it sooner or later, once a process.
        torch.cuda.is_available()
        before = open_files()
        worlds.start(str(tmp_path), rank, 2)
        t = torch.ones(1000)
        for _ in range(1000):
            dist.all_reduce(t)
            dist.all_gather_into_tensor(torch.empty(2000), t)
        start = resident()
        for step in range(10_000):
            dist.all_reduce(t)
            if step % 10 == 0:
                works = [dist.isend(t, 1 - rank), dist.irecv(torch.empty(1000), 1 - rank)]
                for work in works:
                    work.wait()
        grown = resident() - start
        held = open_files()
        dist.destroy_process_group()
        gc.collect()
        return grown, held - before, open_files() - before

    for grown, held, left in processes.run(2, body):
        assert grown < 4 << 20, f"{grown} bytes more after 10,000 steps"
        assert held > 0 and left <= 1, f"{left} descriptors are left"


def test_nothing_is_left_behind_by_ranks_that_are_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    before = set(os.listdir("/dev/shm"))

    def body(rank):
        worlds.start(str(tmp_path), rank, 2)
        t = torch.ones(1000)
        for work in [dist.isend(t, 1 - rank), dist.irecv(torch.empty(1000), 1 - rank)]:
            work.wait()
        dist.all_reduce(t)
        dist.barrier()
        processes.die()

    assert processes.run(2, body) == [processes.Killed()] * 2
    assert os.listdir(tmp_path / "run") == []
    assert set(os.listdir("/dev/shm")) <= before


def test_survivors_agree_and_make_a_group_of_their_own(tmp_path):
    def body(rank):
        worlds.start(str(tmp_path), rank, 4)
        t = torch.ones(1000)
        dist.all_reduce(t)
        if rank == 0:
            processes.die()
        with pytest.raises(pcieipc.PeerDied):
            for _ in range(100):
                dist.all_reduce(t)
        left = pcieipc.torch.shrink(dist.FileStore(str(tmp_path / "again"), -1), name="a", timeout=60)
        t = torch.tensor([float(rank)])
        dist.all_reduce(t)
        found = (left, dist.get_rank(), t.item())
        dist.destroy_process_group()
        return found

    assert processes.run(4, body) == [processes.Killed(), *(([1, 2, 3], r, 6.0) for r in range(3))]


def test_check_raises_what_nobody_has_waited_for():
    def body(rank):
        t = torch.ones(10)
        dist.all_reduce(t)
        pcieipc.torch.check()
        if rank == 1:
            processes.die()

        def until_it_raises():
            # A death is seen without communicating.
            for _ in range(2000):
                pcieipc.torch.check()
                time.sleep(0.01)

        with pytest.raises(pcieipc.PeerDied) as caught:
            until_it_raises()
        assert caught.value.rank == 1
        work = dist.all_reduce(t, async_op=True)
        with pytest.raises(pcieipc.PeerDied):
            work.wait()
        with pytest.raises(pcieipc.PeerDied):
            pcieipc.torch.check()
        return True

    def in_order(rank):
        dist.all_reduce(torch.ones(10))
        if rank == 1:
            dist.destroy_process_group()
            return True
        time.sleep(1)
        pcieipc.torch.check()  # Who left in order is no error as long as nobody needs it.
        dist.destroy_process_group()
        return True

    assert worlds.run(2, body) == [True, processes.Killed()]
    assert worlds.run(2, in_order, destroy=False) == [True, True]


def test_abort_is_heard_by_all_ranks():
    def body(rank):
        t = torch.ones(10)
        dist.all_reduce(t)
        if rank == 0:
            pcieipc.torch.abort("the loss is not a number")
        with pytest.raises(pcieipc.Aborted, match="the loss is not a number"):
            for _ in range(100):
                dist.all_reduce(t)
        return True

    assert worlds.run(2, body) == [True, True]
