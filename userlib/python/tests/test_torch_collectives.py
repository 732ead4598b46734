# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every collective of torch.distributed over the backend pcie gives the right result."""

import zlib

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import worlds

import pcieipc
import pcieipc.torch

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_collectives_at_this_group_size(ranks):
    def body(rank):
        n = ranks
        for kind in KINDS:
            for count in (1, 7, 3000):
                both = torch.full((count,), rank + 1, dtype=kind)
                dist.all_reduce(both)
                assert bool((both == n * (n + 1) // 2).all()), (kind, count)
        t = torch.tensor([float(rank)])
        for op, expected in ((dist.ReduceOp.MAX, n - 1.0), (dist.ReduceOp.MIN, 0.0), (dist.ReduceOp.AVG, (n - 1) / 2)):
            x = t.clone()
            dist.all_reduce(x, op=op)
            assert x.item() == expected, op
        x = torch.full((5,), 2.0)
        dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)
        assert x[0] == 2.0**n
        for op, expected in ((dist.ReduceOp.BOR, (1 << n) - 1), (dist.ReduceOp.BXOR, (1 << n) - 1), (dist.ReduceOp.BAND, 0 if n > 1 else 1)):
            x = torch.full((3,), 1 << rank, dtype=torch.int32)
            dist.all_reduce(x, op=op)
            assert x.tolist() == [expected] * 3, op
        flag = torch.tensor([rank == 0, True, False])
        dist.all_reduce(flag)
        assert flag.tolist() == [True, True, False]
        flag = torch.tensor([rank == 0, True])
        dist.all_reduce(flag, op=dist.ReduceOp.PRODUCT)
        assert flag.tolist() == [n == 1, True]
        z = torch.tensor([1 + 2j * rank])
        dist.all_reduce(z)
        assert z.item() == complex(n, n * (n - 1))

        last = n - 1
        x = torch.full((4, 2), float(rank))
        dist.broadcast(x, src=last)
        assert x[3, 1] == last
        x = torch.full((4,), float(rank))
        dist.reduce(x, dst=last)
        assert x[0] == (n * (n - 1) / 2 if rank == last else rank)

        outs = [torch.empty(2, 3) for _ in range(n)]
        dist.all_gather(outs, torch.full((2, 3), float(rank)))
        assert [int(o[1, 2]) for o in outs] == list(range(n))
        flat = torch.empty(n * 4, dtype=torch.complex64)
        dist.all_gather_into_tensor(flat, torch.full((4,), complex(rank, 1)))
        assert flat[::4].tolist() == [complex(r, 1) for r in range(n)]
        whole = torch.zeros(n, 5)
        whole[rank] = rank + 1
        dist.all_gather_into_tensor(whole.view(-1), whole[rank])  # in place
        assert whole[:, 4].tolist() == [r + 1.0 for r in range(n)]

        got = [torch.empty(3) for _ in range(n)] if rank == last else None
        dist.gather(torch.full((3,), float(rank)), got, dst=last)
        if rank == last:
            assert [int(g[0]) for g in got] == list(range(n))
        out = torch.empty(3)
        dist.scatter(out, [torch.full((3,), 10.0 + r) for r in range(n)] if rank == 0 else None, src=0)
        assert out.tolist() == [10.0 + rank] * 3

        out = torch.empty(6)
        dist.reduce_scatter_tensor(out, torch.arange(6.0 * n))
        assert out.tolist() == [n * (6 * rank + i) for i in range(6)]
        dist.reduce_scatter(out, [torch.full((6,), r + rank + 0.0) for r in range(n)], op=dist.ReduceOp.MAX)
        assert out.tolist() == [rank + n - 1.0] * 6
        bits = torch.empty(2, dtype=torch.int64)
        dist.reduce_scatter_tensor(bits, torch.full((2 * n,), 1 << rank), op=dist.ReduceOp.BOR)
        assert bits.tolist() == [(1 << n) - 1] * 2

        out = torch.empty(2 * n)
        dist.all_to_all_single(out, torch.arange(2.0 * n) + 100 * rank)
        assert out[::2].tolist() == [100.0 * r + 2 * rank for r in range(n)]
        # Rank r sends r + d + 1 rows to rank d.
        mine = torch.cat([torch.full((rank + d + 1, 3), 10.0 * rank + d) for d in range(n)])
        out = torch.empty(sum(r + rank + 1 for r in range(n)), 3)
        splits = [r + rank + 1 for r in range(n)]
        dist.all_to_all_single(out, mine, output_split_sizes=splits, input_split_sizes=splits)
        assert [int(p[0, 0]) for p in out.split(splits)] == [10 * r + rank for r in range(n)]
        outs = [torch.empty(r + 1) for r in range(n)]
        dist.all_to_all(outs, [torch.full((rank + 1,), float(d)) for d in range(n)])
        assert all((o == rank).all() for o in outs)

        dist.barrier()
        objects = [None] * n
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * (1000 * rank)})
        assert [len(o["text"]) for o in objects] == [1000 * r for r in range(n)]
        said = [("from", last)] if rank == last else [None]
        dist.broadcast_object_list(said, src=last)
        assert said == [("from", last)]
        return True

    assert worlds.run(ranks, body) == [True] * ranks


def test_coalesced_calls_give_the_same_as_single_ones():
    def body(rank):
        many = [torch.full((c,), float(rank)) for c in (1, 0, 1000)]
        dist.all_reduce_coalesced(many)
        assert [t.sum().item() for t in many] == [3.0, 0.0, 3000.0]
        group = dist.group.WORLD
        outs = [torch.empty(3 * 2), torch.empty(3 * 3)]
        with dist._coalescing_manager(group):
            for out, count in zip(outs, (2, 3)):
                dist.all_gather_into_tensor(out, torch.full((count,), float(rank)))
        assert [o[-1].item() for o in outs] == [2.0, 2.0]
        pair = [torch.full((c,), float(rank)) for c in (5, 7)]
        with dist._coalescing_manager(group, device=pair[0].device, async_ops=True) as together:
            for t in pair:
                dist.all_reduce(t)
        together.wait()
        assert [t.sum().item() for t in pair] == [15.0, 21.0]
        outs = [torch.empty(2), torch.empty(3)]
        with dist._coalescing_manager(group):
            for out in outs:
                dist.reduce_scatter_tensor(out, torch.ones(3 * len(out)))
        return [o[0].item() for o in outs]

    assert worlds.run(3, body) == [[3.0, 3.0]] * 3


def test_a_sum_of_sparse_tensors_has_every_rank_s_elements():
    def body(rank):
        mine = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 5.0], (6,))
        dist.all_reduce(mine)
        return mine.to_dense().tolist()

    assert worlds.run(3, body) == [[3.0, 5.0, 5.0, 5.0, 0.0, 0.0]] * 3


def test_views_and_other_layouts_are_written_back_to_where_they_came_from():
    def body(rank):
        base = torch.zeros(6, 8)
        base[:, ::2] = rank + 1
        dist.all_reduce(base[:, ::2])
        assert base.sum() == 3 * 24 and bool((base[:, 1::2] == 0).all())
        image = torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last)
        dist.broadcast(image, src=1)
        assert bool((image == 1).all())
        outs = [torch.empty(4, 3).t() for _ in range(2)]
        dist.all_gather(outs, (torch.arange(12.0).view(4, 3) + rank).t())
        assert all(bool((o == (torch.arange(12.0).view(4, 3) + r).t()).all()) for r, o in enumerate(outs))
        leaf = torch.nn.Parameter(torch.ones(3))
        dist.all_reduce(leaf.data)
        return leaf.tolist()

    assert worlds.run(2, body) == [[2.0] * 3] * 2


def test_a_thousand_calls_in_flight_end_in_any_order_of_waiting():
    def body(rank):
        many = [torch.full((17,), float(i + rank)) for i in range(1000)]
        works = [dist.all_reduce(t, async_op=True) for t in many]
        for work in reversed(works):
            work.wait()
        assert all(work.is_completed() and work.is_success() for work in works)
        return all(t[16] == 2 * i + 1 for i, t in enumerate(many))

    assert worlds.run(2, body) == [True, True]


def test_large_sums_are_made_by_several_threads_and_have_the_same_bits():
    def body(rank, options):
        draw = torch.Generator().manual_seed(rank)
        answers = []
        for count in (1 << 20, (1 << 20) + 7, 3_000_001):
            t = torch.randn(count, generator=draw)
            average = t.clone()
            dist.all_reduce(t)
            dist.all_reduce(average, op=dist.ReduceOp.AVG)
            # As numbers: this process's parent, which makes others by fork, must not begin to compute with tensors itself.
            answers += [zlib.crc32(t.numpy()), zlib.crc32(average.numpy())]
        large = torch.full((1 << 21,), rank + 1, dtype=torch.int16)
        dist.all_reduce(large)
        assert bool((large == 6).all())
        if rank == 2:
            return answers
        # Both ranks see a tensor that does not fit.
        pair = dist.new_group([0, 1], use_local_synchronization=True, pg_options=options)
        with pytest.raises((pcieipc.Mismatch, pcieipc.Aborted), match="disagrees with rank"):
            dist.all_reduce(torch.ones((1 << 20) + 4096 * rank), group=pair)
        return answers

    def with_lanes(lanes):
        options = pcieipc.torch.Options(lanes=lanes)
        return worlds.run(3, lambda rank: body(rank, options), options=options)

    one, four = with_lanes(1), with_lanes(4)
    assert one + four == [one[0]] * 6


def test_futures_carry_results_and_their_callbacks_may_communicate():
    def body(rank):
        t = torch.full((3,), float(rank))
        future = dist.all_reduce(t, async_op=True).get_future()

        def again(done):
            (value,) = done.value()
            work = dist.all_reduce(value, async_op=True)
            return work.get_future().wait()[0] + 1

        assert future.then(again).wait().tolist() == [3.0] * 3
        late = dist.all_reduce(t, async_op=True)
        late.wait()
        return late.get_future().value()[0].tolist()

    assert worlds.run(2, body) == [[4.0] * 3] * 2


def test_messages_are_matched_by_tag_and_in_any_order():
    def body(rank):
        other = 1 - rank
        big = 3 << 20
        # Both send first, and more than the rings hold.
        sends = [dist.isend(torch.full((big,), float(tag + 10 * rank)), other, tag=tag) for tag in (1, 2, 3)]
        into = {tag: torch.empty(big) for tag in (3, 1, 2)}
        receives = [dist.irecv(into[tag], other, tag=tag) for tag in into]
        for work in receives + sends:
            work.wait()
        assert all(bool((into[tag] == tag + 10 * other).all()) for tag in into)
        ops = [dist.P2POp(dist.isend, torch.ones(4, 2).t(), other), dist.P2POp(dist.irecv, got := torch.zeros(4, 2).t(), other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert bool((got == 1).all())
        empty = torch.empty(0)
        if rank == 0:
            dist.send(empty, 1)
        else:
            dist.recv(empty, 0)
        return True

    assert worlds.run(2, body) == [True, True]


def test_a_receive_from_any_rank_says_who_it_was():
    def body(rank):
        if rank == 0:
            seen = set()
            for _ in range(2):
                t = torch.empty(5)
                seen.add((dist.recv(t), t[0].item()))
            return seen
        dist.send(torch.full((5,), float(rank)), 0)
        return None

    assert worlds.run(3, body)[0] == {(1, 1.0), (2, 2.0)}


def test_groups_of_some_ranks_work_at_the_same_time_as_the_whole():
    def body(rank):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        odd = dist.new_group([1, 3])
        t, u, v = torch.ones(1000), torch.full((10,), float(rank)), torch.full((10,), float(rank))
        works = [dist.all_reduce(t, async_op=True), dist.all_reduce(u, group=pairs[rank // 2], async_op=True)]
        if rank % 2:
            works.append(dist.all_reduce(v, group=odd, async_op=True))
        for work in works:
            work.wait()
        # Torch 2.6 names such a group by how many groups a process has: these two have as many.
        reverse = dist.new_group([3, 1], use_local_synchronization=True) if rank in (1, 3) else None
        if reverse is not None:
            dist.broadcast(w := torch.full((1,), float(rank)), src=3, group=reverse)
            assert w.item() == 3
        return t[0].item(), u[0].item(), v[0].item()

    assert worlds.run(4, body) == [(4.0, 1.0, 0.0), (4.0, 1.0, 4.0), (4.0, 5.0, 2.0), (4.0, 5.0, 4.0)]


def test_devices_are_named_as_torch_names_them():
    def body(rank):
        t = torch.full((3,), float(rank))
        dist.all_reduce(t)
        return t[0].item()

    assert worlds.run(2, body, backend="cpu:pcie") == [1.0, 1.0]


def test_torch_s_own_check_of_every_call_may_be_on(tmp_path):
    import ranks as processes

    import pcieipc.torch

    def body(rank):
        # As TORCH_DISTRIBUTED_DEBUG=DETAIL: torch puts a backend around this one, which compares what the ranks ask for.
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        worlds.start(str(tmp_path), rank, 2)
        t = torch.full((3,), float(rank))
        dist.all_reduce(t)
        dist.barrier()
        pcieipc.torch.check()
        with pytest.raises(RuntimeError, match="mismatch"):
            if rank == 0:
                dist.all_reduce(t)
            else:
                dist.broadcast(t, 0)
        dist.destroy_process_group()
        return t[0].item()

    assert processes.run(2, body) == [1.0, 1.0]


def test_functional_collectives_run_over_it():
    def body(rank):
        from torch.distributed import _functional_collectives as functional

        group = dist.group.WORLD
        mine = torch.arange(4.0) + rank
        total = functional.all_reduce(mine, "sum", group)
        every = functional.all_gather_tensor(mine, 0, group)
        shard = functional.reduce_scatter_tensor(mine, "sum", 0, group)
        swapped = functional.all_to_all_single(mine, None, None, group)
        said = functional.broadcast(mine, 1, group)
        return [functional.wait_tensor(t).tolist() for t in (total, every, shard, swapped, said)]

    total, every = [1.0, 3.0, 5.0, 7.0], [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
    said = [1.0, 2.0, 3.0, 4.0]
    assert worlds.run(2, body) == [
        [total, every, total[:2], [0.0, 1.0, 1.0, 2.0], said],
        [total, every, total[2:], [2.0, 3.0, 3.0, 4.0], said],
    ]


def test_a_process_makes_group_after_group(tmp_path):
    import ranks as processes

    def body(rank):
        for life in range(3):
            worlds.start(str(tmp_path), rank, 2, name=f"life-{life}")
            t = torch.ones(10)
            dist.all_reduce(t)
            assert t[0] == 2
            dist.destroy_process_group()
        return True

    assert processes.run(2, body) == [True, True]
