# SPDX-License-Identifier: MIT OR Apache-2.0
"""A group that spans hosts: pcie inside, gloo between. Two network namespaces stand for two hosts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

WORKER = Path(__file__).with_name("hosts_worker.py")


class Hosts:
    """Two network namespaces with a cable between them; they go with the processes that hold them."""

    def __init__(self):
        self.holders = [subprocess.Popen(["unshare", "--net", "sleep", "600"]) for _ in range(2)]

    def lay_cable(self):
        for _ in range(1000):
            # The namespace is there when the process is no longer in ours.
            if all(os.readlink(f"/proc/{h.pid}/ns/net") != os.readlink("/proc/self/ns/net") for h in self.holders):
                break
        a, b = (h.pid for h in self.holders)
        name = f"pi{os.getpid() % 10**6}"
        subprocess.run(["ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b"], check=True)
        for number, (pid, end) in enumerate(((a, f"{name}a"), (b, f"{name}b"))):
            subprocess.run(["ip", "link", "set", end, "netns", str(pid)], check=True)
            for command in (
                f"ip link set {end} name cable",
                f"ip addr add 10.77.0.{number + 1}/24 dev cable",
                "ip link set cable up",
                "ip link set lo up",
            ):
                subprocess.run(self.inside(number, *command.split()), check=True)

    def inside(self, number, *command):
        return ["nsenter", "--target", str(self.holders[number].pid), "--net", *command]

    def end(self):
        for holder in self.holders:
            holder.kill()
            holder.wait()


@pytest.fixture
def hosts():
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter")):
        pytest.skip("network namespaces need root and the tools of iproute2 and util-linux")
    made = Hosts()
    try:
        try:
            made.lay_cable()
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("ranks", [(2, 2), (3, 2)])
def test_two_hosts_send_each_other_what_the_theory_says_and_no_more(hosts, ranks):
    environment = os.environ | {"USE_LIBUV": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
    running = []
    for number, count in enumerate(ranks):
        arguments = ["10.77.0.1", "29511", str(sum(ranks)), str(sum(ranks[:number])), str(count), "cable"]
        command = hosts.inside(number, sys.executable, str(WORKER), *arguments)
        running.append(
            subprocess.Popen(
                command, env=environment | {"PCIEIPC_HOST": f"host-{number}"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    answers = []
    try:
        for process in running:
            out, err = process.communicate(timeout=400)
            assert process.returncode == 0, out + err
            answers.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    for answer in answers:
        # Two hosts: each sends every byte once; on top come headers, acknowledgements and two barriers.
        assert 1.0 <= answer["sent"] / answer["theory"] < 1.15, answer
