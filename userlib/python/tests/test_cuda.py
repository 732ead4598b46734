# SPDX-License-Identifier: MIT OR Apache-2.0
"""All-reduce of arrays on CUDA devices, without torch.distributed. Ranks share the devices that there are; without one, all but the errors is skipped."""

from pathlib import Path

import pytest
import ranks

import pcieipc

WHY = None if Path("/dev/nvidiactl").exists() else "there is no NVIDIA device here"
on_device = pytest.mark.skipif(WHY is not None, reason=str(WHY))


def run(count, body, tmp_path, **options):
    def one(rank):
        with pcieipc.CudaCommunicator(tmp_path / "meeting", rank, count, **options) as group:
            return body(rank, group)

    return ranks.run(count, one)


@on_device
@pytest.mark.parametrize("count", [2, 3])
def test_torch_tensors_of_all_types_are_added_on_the_stream_that_is_current(tmp_path, count):
    torch = pytest.importorskip("torch")

    def body(rank, group):
        for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8):
            with torch.cuda.stream(torch.cuda.Stream()):
                both = torch.full((1001,), rank + 1, dtype=kind, device="cuda")
                out = torch.empty_like(both)
                group.all_reduce(both, out=out)
                group.all_reduce(both, "max")
                assert out.tolist() == [count * (count + 1) / 2] * 1001 and both.tolist() == [count] * 1001, kind
        group.check()
        return group.paths[rank], set(group.paths)

    assert run(count, body, tmp_path) == [("self", {"self", "device"})] * count


@on_device
def test_cupy_arrays_are_used_where_they_lie(tmp_path):
    pytest.importorskip("cupy")

    def body(rank, group):
        import cupy

        array = cupy.arange(100_000, dtype="f4") * (rank + 1)
        group.all_reduce(array, "average")
        assert float(array[1000]) == 1500
        with cupy.cuda.Stream(non_blocking=True) as stream:
            array.fill(rank)
            group.all_reduce(array, stream=stream)
            stream.synchronize()
        with pytest.raises(pcieipc.ArgumentError, match="contiguous"):
            group.all_reduce(array[::2])
        return float(array[0])

    assert run(2, body, tmp_path, path="host") == [1.0, 1.0]


@on_device
def test_what_can_not_be_served_is_refused_and_errors_are_typed(tmp_path):
    torch = pytest.importorskip("torch")

    def body(rank, group):
        t = torch.ones(4, device="cuda")
        for array, out, words in (
            (t.cpu(), None, "no array on a CUDA device"),
            (b"abc", None, "no array on a CUDA device"),
            (t, torch.ones(5, device="cuda"), "must be the same"),
            (t, t.int(), "must be the same"),
            (torch.ones(3, dtype=torch.complex64, device="cuda"), None, "complex64"),
            (torch.ones(4, 4, device="cuda").t(), None, "contiguous"),
        ):
            with pytest.raises(pcieipc.ArgumentError, match=words):
                group.all_reduce(array, out=out)
        group.all_reduce(t)
        torch.cuda.synchronize()
        group.check()
        assert t.tolist() == [2.0] * 4
        # Lengths that differ.
        with pytest.raises((pcieipc.Mismatch, pcieipc.Aborted), match="disagrees with rank"):
            group.all_reduce(torch.ones(10 + rank, device="cuda"))
            torch.cuda.synchronize()
            group.check()
        group.leave()
        with pytest.raises(pcieipc.ArgumentError, match="has left"):
            group.all_reduce(t)
        return True

    assert run(2, body, tmp_path) == [True, True]


def test_wrong_options_are_refused_before_anybody_waits(tmp_path):
    for options, words in (({"path": "sea"}, "auto, peer"), ({"types": ["float8"]}, "float64"), ({"timeout": 0}, "above 0")):
        with pytest.raises(pcieipc.ArgumentError, match=words):
            pcieipc.CudaCommunicator(tmp_path, 0, 1, **options)
    with pytest.raises(pcieipc.ArgumentError, match="counted from 0"):
        pcieipc.CudaCommunicator(tmp_path, 2, 2)


@pytest.mark.skipif(WHY is None, reason="there is a device here")
def test_a_host_without_a_driver_is_an_error_that_says_so(tmp_path):
    with pytest.raises(pcieipc.SystemCallError, match="(?i)driver|libcuda"):
        pcieipc.CudaCommunicator(tmp_path, 0, 1)
