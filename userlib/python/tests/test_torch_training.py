# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models train over the backend pcie as they do over gloo, unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import worlds
from torch.nn.parallel import DistributedDataParallel

EXAMPLES = Path(__file__).parent.parent / "examples"


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def train(wrapped, optimizer, rank, steps=5):
    losses = []
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(16, 20, generator=draw)
        loss = wrapped(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(rank):
    module = layers()
    wrapped = DistributedDataParallel(module, bucket_cap_mb=0.005, gradient_as_bucket_view=True)
    losses = train(wrapped, torch.optim.SGD(module.parameters(), lr=0.1), rank)
    return losses, torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def test_ddp_trains_as_over_gloo_and_twice_the_same():
    one, two, gloo = (worlds.run(3, ddp, backend=b) for b in ("pcie", "pcie", "gloo"))
    assert all(torch.equal(a[1], one[0][1]) for a in one + two), "all ranks of both runs have the same bits"
    assert [a[0] for a in one] == [a[0] for a in two]
    torch.testing.assert_close(one[0][1], gloo[0][1], rtol=1e-5, atol=1e-6)


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
        return torch.cat([p.detach().reshape(-1) for w in (wrapped, again) for p in w.parameters()])

    a, b = worlds.run(2, body)
    assert torch.equal(a, b)


def test_zero_shards_the_optimizer_over_it():
    def body(rank):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped = DistributedDataParallel(layers())
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)
        train(wrapped, optimizer, rank)
        optimizer.consolidate_state_dict(0)
        return torch.cat([p.detach().reshape(-1) for p in wrapped.parameters()])

    a, b = worlds.run(2, body)
    assert torch.equal(a, b)


def fsdp(rank):
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,))
    module = layers()
    for layer in module:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    losses = train(module, torch.optim.SGD(module.parameters(), lr=0.1), rank)
    return losses, torch.cat([p.full_tensor().detach().reshape(-1) for p in module.parameters()])


def test_fsdp2_trains_as_over_gloo():
    try:
        gloo = worlds.run(2, fsdp, backend="gloo")
    except AssertionError as error:
        if "has no attribute 'record_event'" in str(error):
            pytest.skip("FSDP2 of this torch does not run on the CPU, over gloo neither")
        raise
    pcie = worlds.run(2, fsdp)
    assert torch.equal(pcie[0][1], pcie[1][1])
    torch.testing.assert_close(pcie[0][1], gloo[0][1], rtol=1e-5, atol=1e-6)


def test_dtensor_redistributes_over_it():
    def body(rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        whole = torch.arange(48.0).view(6, 8)
        spread = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert torch.equal(spread.full_tensor(), whole)
        turned = spread.redistribute(mesh, [Replicate(), Shard(0)])
        product = turned @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Replicate()])
        assert torch.equal(product.full_tensor(), whole @ whole.t())
        total = spread.sum()
        assert total.full_tensor() == whole.sum() and any(isinstance(p, Partial) for p in total.placements)
        return str(mesh.get_group("model") is not None)

    assert worlds.run(4, body) == ["True"] * 4


def torchrun(ranks, script, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(Path(__file__).with_name("launch.py")), "--standalone", f"--nproc-per-node={ranks}", str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_digits_learn_the_same_over_pcie_and_gloo(tmp_path):
    runs = []
    for name, backend in (("one", "pcie"), ("two", "pcie"), ("gloo", "gloo")):
        torchrun(4, EXAMPLES / "digits.py", "--backend", backend, "--steps", "60", "--losses", str(tmp_path / name))
        runs.append(json.loads((tmp_path / name).read_text()))
    one, two, gloo = runs
    assert one["losses"] == two["losses"] and one["parameters"] == two["parameters"], "two runs have the same bits"
    assert one["losses"] == pytest.approx(gloo["losses"], rel=1e-3)
    assert one["losses"][-1] < 0.5 * one["losses"][0]


@pytest.mark.parametrize("mode", ["shrink", "recover"])
def test_training_goes_on_after_a_rank_was_killed(mode):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "faults.py"), mode], capture_output=True, text=True, timeout=500, check=False, cwd=EXAMPLES
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT OK" not in done.stdout and done.stdout.count("ok: ") >= 5
