# SPDX-License-Identifier: MIT OR Apache-2.0
"""Collectives of CUDA memory. Ranks share the devices that there are, so one is enough; without one, all of this is skipped."""

import json
import os
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ranks as processes
import test_torch_collectives as collectives
import test_torch_training as training
import torch.distributed as dist
import worlds
from torch.nn.parallel import DistributedDataParallel

import pcieipc
import pcieipc.torch

# Not by asking the driver: processes that are forked later could not use it any more.
WHY = None
if not torch.backends.cuda.is_built():
    WHY = "this torch is built without CUDA"
elif not Path("/dev/nvidiactl").exists():
    WHY = "there is no NVIDIA device here"
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
#: Killing a process that shares a device by the multi-process service may take the others' work along, so faults are tested without it.
SERVICE = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
without_service = pytest.mark.skipif(SERVICE, reason="a killed client of the multi-process service may end the others")


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    monkeypatch.setattr(worlds, "DEVICE", "cuda")


# ---- What the tests of the CPU say, of tensors on devices


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_collectives_at_this_group_size(ranks):
    collectives.test_all_collectives_at_this_group_size(ranks)


def test_coalesced_calls_give_the_same_as_single_ones():
    collectives.test_coalesced_calls_give_the_same_as_single_ones()


def test_views_and_other_layouts_are_written_back_to_where_they_came_from():
    collectives.test_views_and_other_layouts_are_written_back_to_where_they_came_from()


def test_futures_carry_results_and_their_callbacks_may_communicate():
    collectives.test_futures_carry_results_and_their_callbacks_may_communicate()


def test_messages_are_matched_by_tag_and_in_any_order():
    collectives.test_messages_are_matched_by_tag_and_in_any_order()


def test_a_receive_from_any_rank_says_who_it_was():
    collectives.test_a_receive_from_any_rank_says_who_it_was()


def test_groups_of_some_ranks_work_at_the_same_time_as_the_whole():
    collectives.test_groups_of_some_ranks_work_at_the_same_time_as_the_whole()


def test_functional_collectives_run_over_it():
    collectives.test_functional_collectives_run_over_it()


def test_a_process_makes_group_after_group(tmp_path):
    collectives.test_a_process_makes_group_after_group(tmp_path)


# ---- Streams


def test_a_thousand_calls_in_flight_end_in_any_order_of_waiting():
    def body(rank):
        many = [torch.full((17,), float(i + rank)) for i in range(1000)]
        works = [dist.all_reduce(t, async_op=True) for t in many]
        for work in reversed(works):
            work.wait()
        torch.cuda.synchronize()
        assert all(work.is_completed() and work.is_success() for work in works)
        return all(t[16].item() == 2 * i + 1 for i, t in enumerate(many))

    assert worlds.run(2, body) == [True, True]


def test_the_host_waits_for_nobody():
    def body(rank):
        t = torch.ones(1 << 20)
        dist.all_reduce(t)
        # Kernels are loaded when they are first used, and that waits for what runs.
        t.add_(1).fill_(2)
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 1:
            time.sleep(2)
        begun = time.monotonic()
        works = [dist.all_reduce(t, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        t.add_(1)
        returned = time.monotonic() - begun
        done = works[-1].is_completed()
        torch.cuda.synchronize()
        return returned < 1, rank == 0 and done, t[0].item()

    assert worlds.run(2, body) == [(True, False, 17.0)] * 2


def test_a_call_comes_after_what_its_stream_holds_and_before_what_waits_for_it():
    def body(rank):
        side = torch.cuda.Stream()
        t = torch.zeros(1 << 16)
        dist.all_reduce(t)
        torch.cuda.synchronize()
        for turn in range(20):
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                t.fill_(turn + rank)
                work = dist.all_reduce(t, async_op=True)
                work.wait()
                doubled = t * 2
            side.synchronize()
            assert bool((doubled == 2 * (2 * turn + 1)).all()), turn
        return True

    assert worlds.run(2, body) == [True, True]


def test_memory_that_is_given_back_is_not_used_anew_before_the_call_has_read_it():
    def body(rank):
        out = torch.empty(2 << 20)
        dist.all_gather_into_tensor(out, torch.zeros(1 << 20))
        torch.cuda.synchronize()
        works = []
        torch.cuda._sleep(200_000_000)
        mine = torch.full((1 << 20,), rank + 1.0)
        works.append(dist.all_gather_into_tensor(out, mine, async_op=True))
        del mine
        # They would get the memory of `mine`, if it were free.
        others = [torch.full((1 << 20,), -1.0) for _ in range(4)]
        works[0].wait()
        assert len(others) == 4
        return out[0].item(), out[-1].item()

    assert worlds.run(2, body) == [(1.0, 2.0)] * 2


def test_calls_are_captured_in_graphs():
    def body(rank):
        t, every, shard = torch.zeros(1000), torch.empty(3000), torch.empty(500)
        weight = torch.eye(1000)
        # What is captured must have been used before.
        dist.all_reduce(t)
        dist.all_gather_into_tensor(every, t)
        (weight @ t + rank).sum()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work = dist.all_reduce(t, async_op=True)
            work.wait()
            u = weight @ t
            dist.all_gather_into_tensor(every, u + rank)
            dist.reduce_scatter_tensor(shard, every[:1500])
        for turn in range(10):
            t.fill_(turn + rank)
            graph.replay()
            # A call outside, between replays.
            v = torch.full((10,), float(rank))
            dist.all_reduce(v)
            assert v[0].item() == 3
            total = 3 * turn + 3
            assert t[0].item() == total and every[::1000].tolist() == [total, total + 1, total + 2], turn
            assert shard[0].item() == 3 * (total + rank // 2), turn
        pcieipc.torch.check()
        return True

    assert worlds.run(3, body) == [True] * 3


def test_what_was_not_used_before_a_capture_is_refused_in_it():
    def body(rank):
        t = torch.zeros(10)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(pcieipc.ArgumentError, match="can not be captured"):
            with torch.cuda.graph(graph):
                dist.all_reduce(t)
        dist.broadcast(t, 0)
        torch.cuda.synchronize()
        with pytest.raises(pcieipc.ArgumentError, match="f32 is used for the first time"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                dist.all_reduce(t)
        torch.cuda.synchronize()
        t.fill_(rank)
        dist.all_reduce(t)
        return t[0].item()

    assert worlds.run(2, body) == [1.0, 1.0]


def test_devices_may_have_backends_of_their_own():
    def body(rank):
        here, there = torch.full((3,), float(rank)), torch.full((3,), 1.0, device="cpu")
        dist.all_reduce(here)
        dist.all_reduce(there)
        pcieipc.torch.check()
        return here[0].item(), there[0].item()

    assert worlds.run(2, body, backend="cpu:gloo,cuda:pcie") == [(1.0, 2.0)] * 2


def test_host_memory_serves_where_peer_memory_is_not_wanted():
    def body(rank):
        t = torch.arange(100_000.0) * (rank + 1)
        dist.all_reduce(t)
        return torch.equal(t, torch.arange(100_000.0) * 3)

    assert worlds.run(2, body, options=pcieipc.torch.Options(cuda_path="host")) == [True, True]


# ---- Training


def layers():
    return training.layers().cuda()


def train(wrapped, optimizer, rank, steps=5):
    losses = []
    draw = torch.Generator("cuda").manual_seed(rank)
    for _ in range(steps):
        loss = wrapped(torch.randn(16, 20, generator=draw)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        if dist.get_backend() == "pcie":
            pcieipc.torch.check()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(parameters):
    return torch.cat([p.detach().reshape(-1) for p in parameters]).cpu()


def ddp(rank):
    module = layers()
    wrapped = DistributedDataParallel(module, bucket_cap_mb=0.005, gradient_as_bucket_view=True)
    return train(wrapped, torch.optim.SGD(module.parameters(), lr=0.1), rank), whole(module.parameters())


def test_ddp_trains_as_over_gloo_and_twice_the_same():
    one, two, gloo = (worlds.run(3, ddp, backend=b) for b in ("pcie", "pcie", "gloo"))
    assert all(torch.equal(a[1], one[0][1]) for a in one + two), "all ranks of both runs have the same bits"
    assert [a[0] for a in one] == [a[0] for a in two]
    torch.testing.assert_close(one[0][1], gloo[0][1], rtol=1e-4, atol=1e-5)


def test_communication_hooks_run_over_it():
    def body(rank):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        wrapped = DistributedDataParallel(layers())
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), rank)
        again = DistributedDataParallel(layers())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        again.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(again, torch.optim.SGD(again.parameters(), lr=0.1), rank)
        return whole(p for w in (wrapped, again) for p in w.parameters())

    a, b = worlds.run(2, body)
    assert torch.equal(a, b)


def test_zero_shards_the_optimizer_over_it():
    def body(rank):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped = DistributedDataParallel(layers())
        train(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01), rank)
        return whole(wrapped.parameters())

    a, b = worlds.run(2, body)
    assert torch.equal(a, b)


def test_fsdp2_trains_as_ddp():
    def body(rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda", (2,))
        module = layers()
        for layer in module:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        sharded = train(module, torch.optim.SGD(module.parameters(), lr=0.1), rank)
        parameters = whole(p.full_tensor() for p in module.parameters())
        plain, expected = ddp(rank)
        torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-5)
        return sharded == pytest.approx(plain, rel=1e-4), parameters

    a, b = worlds.run(2, body)
    assert a[0] and b[0] and torch.equal(a[1], b[1])


def test_dtensor_redistributes_over_it():
    def body(rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "model"))
        all_of_it = torch.arange(48.0).view(6, 8)
        spread = distribute_tensor(all_of_it, mesh, [Shard(0), Shard(1)])
        assert torch.equal(spread.full_tensor(), all_of_it)
        turned = spread.redistribute(mesh, [Replicate(), Shard(0)])
        assert torch.equal(turned.full_tensor(), all_of_it)
        return spread.sum().full_tensor().item()

    assert worlds.run(4, body) == [1128.0] * 4


def test_the_digits_learn_the_same_over_pcie_and_gloo(tmp_path):
    runs = []
    for name, backend in (("one", "pcie"), ("two", "pcie"), ("gloo", "gloo")):
        arguments = ["--backend", backend, "--device", "cuda", "--steps", "60", "--losses", str(tmp_path / name)]
        training.torchrun(4, training.EXAMPLES / "digits.py", *arguments)
        runs.append(json.loads((tmp_path / name).read_text()))
    one, two, gloo = runs
    assert one["losses"] == two["losses"] and one["parameters"] == two["parameters"], "two runs have the same bits"
    assert one["losses"] == pytest.approx(gloo["losses"], rel=1e-3)
    assert one["losses"][-1] < 0.5 * one["losses"][0]


def test_ten_thousand_steps_take_no_more_memory_than_a_thousand():
    def body(rank):
        def taken():
            torch.cuda.synchronize()
            resident = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
            return torch.cuda.memory_reserved(), len(os.listdir("/proc/self/fd")), resident

        t, every = torch.ones(5000), torch.empty(10000)

        def steps(count):
            for _ in range(count):
                works = [dist.all_reduce(t, op=dist.ReduceOp.AVG, async_op=True), dist.all_gather_into_tensor(every, t, async_op=True)]
                for work in works:
                    work.wait()
                pcieipc.torch.check()

        steps(1000)
        before = taken()
        steps(9000)
        after = taken()
        assert after[:2] == before[:2] and after[2] - before[2] < 8 << 10, (before, after)
        return True

    assert worlds.run(2, body) == [True, True]


# ---- Errors


@without_service
def test_a_killed_rank_is_peer_died_at_the_check_and_at_every_later_call():
    def body(rank):
        t = torch.ones(1 << 20)
        dist.all_reduce(t)
        pcieipc.torch.check()
        if rank == 1:
            processes.die()
        begun = time.monotonic()
        with pytest.raises(pcieipc.PeerDied) as caught:
            for _ in range(1000):
                dist.all_reduce(t)
                pcieipc.torch.check()
        assert caught.value.rank == 1 and time.monotonic() - begun < 30
        with pytest.raises(pcieipc.PeerDied, match="the group ended before"):
            dist.all_reduce(t)
        with pytest.raises(pcieipc.PeerDied):
            dist.barrier()
        # The device and its memory are as usable as before.
        return (torch.ones(10) * 2).sum().item()

    assert worlds.run(3, body) == [20.0, processes.Killed(), 20.0]


@without_service
def test_the_survivors_of_a_killed_rank_make_a_group_and_train_on(tmp_path):
    def body(rank):
        worlds.start(str(tmp_path), rank, 3)
        t = torch.ones(1000)
        dist.all_reduce(t)
        pcieipc.torch.check()
        if rank == 0:
            processes.die()
        with pytest.raises(pcieipc.PeerDied):
            for _ in range(1000):
                dist.all_reduce(t)
                pcieipc.torch.check()
        left = pcieipc.torch.shrink(dist.FileStore(str(tmp_path / "again"), 2), name="one")
        losses, parameters = ddp(dist.get_rank())
        dist.destroy_process_group()
        return left, losses[-1] < losses[0], parameters.sum().item()

    gone, a, b = processes.run(3, body)
    assert gone == processes.Killed() and a == b and a[:2] == ([1, 2], True)


def test_a_late_rank_is_a_timeout():
    def body(rank):
        t = torch.ones(10)
        dist.all_reduce(t)
        pcieipc.torch.check()
        if rank == 0:
            begun = time.monotonic()
            dist.all_reduce(t)
            with pytest.raises(pcieipc.Timeout) as caught:
                pcieipc.torch.check()
            assert caught.value.rank == 1 and 0.9 < time.monotonic() - begun < 20
        else:
            time.sleep(4)
            with pytest.raises(pcieipc.Error):
                dist.all_reduce(t)
                pcieipc.torch.check()
        return True

    assert worlds.run(2, body, timeout=600, options=pcieipc.torch.Options(timeout=1.0)) == [True, True]


def test_shapes_and_types_that_differ_are_a_mismatch_on_every_rank():
    def body(rank):
        lengths, kinds = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group, mine in ((lengths, torch.ones(10 + rank)), (kinds, torch.ones(12, dtype=[torch.float32, torch.int32][rank]))):
            for kind in (torch.float32, torch.int32):
                dist.all_reduce(torch.ones(12, dtype=kind), group=group)
            pcieipc.torch.check(group)
            with pytest.raises((pcieipc.Mismatch, pcieipc.Aborted), match="disagrees with rank"):
                dist.all_reduce(mine, group=group)
                pcieipc.torch.check(group)
        return True

    assert worlds.run(2, body) == [True, True]


def test_an_abort_ends_the_calls_of_all_ranks():
    def body(rank):
        t = torch.ones(10)
        dist.all_reduce(t)
        pcieipc.torch.check()
        dist.barrier()
        if rank == 1:
            pcieipc.torch.abort("enough")
        with pytest.raises(pcieipc.Aborted, match="enough"):
            for _ in range(1000):
                dist.all_reduce(t)
                pcieipc.torch.check()
        return True

    assert worlds.run(2, body) == [True, True]


def test_what_can_not_be_served_is_refused_and_the_group_goes_on():
    def body(rank):
        t, host = torch.ones(4), torch.ones(4, device="cpu")
        dist.all_reduce(t)
        refused = [
            (lambda: dist.all_reduce(torch.ones(3).to_sparse()), "sparse"),
            (lambda: dist.all_gather([torch.empty(4), torch.empty(4)], host), "in one call"),
            (lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), op=dist.ReduceOp.AVG), "AVG"),
            (lambda: dist.all_gather_into_tensor(torch.empty(7), t), "elements"),
        ]
        for call, text in refused:
            with pytest.raises((RuntimeError, ValueError), match=text):
                call()
        empty = torch.empty(0)
        dist.all_reduce(empty)
        dist.broadcast(empty, 0)
        dist.all_gather_into_tensor(torch.empty(0), empty)
        # Three bytes at an address that nothing is aligned to.
        odd = torch.zeros(8, dtype=torch.uint8)[1:4]
        odd.fill_(rank + 1)
        dist.broadcast(odd, 1)
        dist.all_reduce(t)
        dist.all_reduce(host)
        pcieipc.torch.check()
        return t[0].item(), host[0].item(), odd.tolist()

    assert worlds.run(2, body) == [(4.0, 2.0, [2, 2, 2])] * 2
