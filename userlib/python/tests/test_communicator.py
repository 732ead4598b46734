# SPDX-License-Identifier: MIT OR Apache-2.0
"""The communicator on numpy arrays, tensors and plain buffers."""

import array
import time

import numpy
import pytest
import ranks as processes

import pcieipc

RANKS = 3


def everywhere(folder, body, ranks=RANKS):
    """Runs `body(group, rank)` on each rank of a group."""

    def one(rank):
        with pcieipc.Communicator(folder, rank, ranks, timeout=60, meeting_timeout=120) as group:
            return body(group, rank)

    return processes.run(ranks, one)


def test_collectives_give_every_rank_what_they_promise(tmp_path):
    def body(group, rank):
        mine = numpy.arange(12, dtype="f4") + rank
        inside = mine.copy()
        group.all_reduce(inside)
        assert inside.tolist() == [3 * i + 3 for i in range(12)]
        out = numpy.empty_like(mine)
        group.all_reduce(mine, "max", out=out)
        assert out.tolist() == [i + 2 for i in range(12)] and mine[0] == rank
        shard = numpy.empty(4, "f4")
        group.reduce_scatter(mine, shard, "average")
        assert shard.tolist() == [4 * rank + i + 1 for i in range(4)]
        every = numpy.empty(36, "f4")
        group.all_gather(mine, every)
        assert every.tolist() == [i + r for r in range(3) for i in range(12)]
        swapped = numpy.empty(12, "f4")
        group.all_to_all(mine, swapped)
        assert swapped.tolist() == [4 * rank + i + r for r in range(3) for i in range(4)]
        result = numpy.empty_like(mine) if rank == 1 else None
        group.reduce(mine, result, "prod", root=1)
        if rank == 1:
            assert result[5] == 5 * 6 * 7
        group.broadcast(mine, root=2)
        assert mine[0] == 2
        if rank == 0:
            group.send(mine, 2)
        if rank == 2:
            group.receive(mine, 0)
        group.barrier()
        return group.members

    assert everywhere(tmp_path / "m", body) == [(0, 1, 2)] * RANKS


@pytest.mark.parametrize("kind", ["f8", "f4", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_every_numpy_type_is_added(tmp_path, kind):
    def body(group, rank):
        mine = numpy.full(1000, rank + 1, dtype=kind)
        group.all_reduce(mine)
        return bool((mine == 6).all())

    assert all(everywhere(tmp_path / "m", body))


def test_tensors_are_used_where_they_lie(tmp_path):
    torch = pytest.importorskip("torch")

    def body(group, rank):
        for kind in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
            mine = torch.full((5, 7), rank + 1, dtype=kind)
            at = mine.data_ptr()
            group.all_reduce(mine)
            assert mine.data_ptr() == at and bool((mine == 6).all()), kind
        every = torch.empty(RANKS, 4)
        group.all_gather(torch.full((4,), float(rank)), every)
        return every[:, 0].tolist()

    assert everywhere(tmp_path / "m", body) == [[0, 1, 2]] * RANKS


def test_buffers_of_the_standard_library_are_arrays_too(tmp_path):
    def body(group, rank):
        mine = array.array("d", [rank, 1])
        group.all_reduce(mine)
        raw = bytearray(b"\x01\x02")
        group.all_reduce(raw)
        group.all_gather(bytes([rank]), every := bytearray(3))
        return mine.tolist(), bytes(raw), bytes(every)

    assert everywhere(tmp_path / "m", body) == [([3.0, 3.0], b"\x03\x06", b"\x00\x01\x02")] * RANKS


def test_registered_buffers_are_reduced_where_all_ranks_see_them(tmp_path):
    def body(group, rank):
        buffer = group.register(100_000, "float32")
        buffer.array[:] = rank + 1
        buffer.all_reduce()
        buffer.all_reduce("max")
        return float(buffer.array.min()), float(buffer.array.max()), len(buffer)

    assert everywhere(tmp_path / "m", body) == [(6.0, 6.0, 100_000)] * RANKS


def test_a_dead_rank_is_named_and_the_others_go_on(tmp_path):
    def body(group, rank):
        mine = numpy.ones(1 << 20, "f4")
        group.all_reduce(mine)
        if rank == 1:
            processes.die()
        begun = time.monotonic()
        with pytest.raises(pcieipc.PeerDied) as caught:
            for _ in range(1000):
                group.all_reduce(mine)
        assert caught.value.rank == 1 and caught.value.endpoint is None and time.monotonic() - begun < 30
        group.shrink()
        mine = numpy.full(10, float(rank))
        group.all_reduce(mine)
        return group.members, mine[0]

    assert everywhere(tmp_path / "m", body) == [((0, 2), 2.0), processes.Killed(), ((0, 2), 2.0)]


def test_all_that_are_left_agree_and_a_new_process_takes_the_dead_ones_place(tmp_path):
    folder = tmp_path / "m"

    def body(place):
        # The third process comes in place of rank 1.
        rank = 1 if place == 3 else place
        with pcieipc.Communicator(folder, rank, RANKS, timeout=60, meeting_timeout=120, rejoin=place == 3, checked=True) as group:
            if place != 3:
                mine = numpy.ones(1000, "f4")
                group.all_reduce(mine)
                assert group.agree() == (True, (), ())
                if rank == 1:
                    (tmp_path / "dying").touch()
                    processes.die()
                with pytest.raises(pcieipc.Error):
                    for _ in range(1000):
                        group.all_reduce(mine)
                agreed = group.agree(False)
                assert not agreed.ok and agreed.failed == (1,)
                group.recover()
            mine = numpy.full(10, float(rank))
            group.all_reduce(mine)
            return group.members, mine[0]

    def one(place):
        if place == 3:
            while not (tmp_path / "dying").exists():
                time.sleep(0.05)
        return body(place)

    back = ((0, 1, 2), 3.0)
    assert processes.run(RANKS + 1, one) == [back, processes.Killed(), back, back]


def test_a_late_rank_is_a_timeout_that_names_it(tmp_path):
    def body(group, rank):
        if rank == 2:
            time.sleep(3)
            return None
        with pytest.raises((pcieipc.Timeout, pcieipc.Aborted)) as caught:
            group.all_reduce(numpy.ones(10), timeout=0.5)
        return type(caught.value).__name__, caught.value.rank, isinstance(caught.value, TimeoutError)

    # Whose deadline passes first tells the other, which then need not wait for its own.
    answers = everywhere(tmp_path / "m", body)[:2]
    assert ("Timeout", 2, True) in answers
    assert all(a == ("Timeout", 2, True) or a[0] == "Aborted" for a in answers)


def test_ranks_that_disagree_are_told_so(tmp_path):
    def body(group, rank):
        with pytest.raises((pcieipc.Mismatch, pcieipc.Aborted), match="disagrees with rank") as caught:
            group.all_reduce(numpy.ones(10 + (rank == 1)))
        return isinstance(caught.value, pcieipc.Mismatch)

    # Who sees it first tells the others.
    assert any(everywhere(tmp_path / "m", body))


def test_bad_arrays_are_refused_before_anybody_waits(tmp_path):
    def body(group, rank):
        fine = numpy.ones(6, "f4")
        read_only = numpy.ones(6, "f4")
        read_only.flags.writeable = False
        for wrong, words in (
            (numpy.ones((4, 6), "f4")[:, ::2], "contiguous"),
            (read_only, "read-only"),
            (numpy.ones(3, "c8"), "elements of type"),
            (numpy.ones(3, ">f4"), "big-endian"),
            ([1.0, 2.0], "no array"),
            (b"read only", "read-only"),
        ):
            with pytest.raises(pcieipc.ArgumentError, match=words):
                group.all_reduce(wrong)
        with pytest.raises(pcieipc.ArgumentError, match="share memory"):
            group.all_reduce(fine, out=fine)
        with pytest.raises(pcieipc.ArgumentError, match="proportion"):
            group.all_gather(fine, numpy.empty(7, "f4"))
        with pytest.raises(pcieipc.ArgumentError, match="must be the same"):
            group.all_reduce(fine, out=numpy.empty(6, "f8"))
        with pytest.raises(pcieipc.ArgumentError, match="take one of sum"):
            group.all_reduce(fine, "median")
        with pytest.raises(pcieipc.ArgumentError, match="number above 0"):
            group.all_reduce(fine, timeout=0)
        # Nothing of that was the group's end.
        group.all_reduce(fine)
        return fine[0]

    assert everywhere(tmp_path / "m", body) == [3.0] * RANKS


def test_empty_arrays_and_a_group_of_one_are_fine(tmp_path):
    def body(group, rank):
        group.all_reduce(numpy.empty(0, "f4"))
        group.all_gather(numpy.empty(0, "f4"), numpy.empty(0, "f4"))
        return group.rank, group.ranks

    assert everywhere(tmp_path / "m", body) == [(0, 3), (1, 3), (2, 3)]
    assert everywhere(tmp_path / "one", body, ranks=1) == [(0, 1)]


def test_a_communicator_that_was_left_says_so(tmp_path):
    def body(group, rank):
        buffer = group.register(10)
        group.leave()
        group.leave()
        with pytest.raises(pcieipc.ArgumentError, match="left"):
            group.barrier()
        with pytest.raises(pcieipc.ArgumentError, match="left"):
            buffer.array
        return repr(group)

    assert everywhere(tmp_path / "m", body) == ["<pcieipc.Communicator left>"] * RANKS


def test_exceptions_keep_what_they_know_when_they_travel():
    import pickle

    error = pcieipc.EndpointGone("gone", 2, 7, 9)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.rank, again.endpoint, again.generation) == (pcieipc.EndpointGone, "gone", 2, 7, 9)
