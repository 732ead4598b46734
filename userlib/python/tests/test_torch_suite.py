# SPDX-License-Identifier: MIT OR Apache-2.0
"""A part of PyTorch's own distributed tests; `torch_suite.py` runs all of them, in half an hour on a small machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

CHOSEN = [
    "test_all_gather_coalesced_with_empty",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_sum_async",
    "test_barrier_full_group",
    "test_get_future",
    "test_irecv",
    "test_reduce_sum_twice",
    "test_scatter_complex",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_accumulate_gradients_no_sync",
]


def test_pytorch_s_own_tests_pass():
    environment = os.environ | {"BACKEND": "pcie", "WORLD_SIZE": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).with_name("torch_suite.py")), *CHOSEN]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, check=False)
    # A test that skips itself in its processes counts as skipped there.
    passed = re.findall(r"^(test_\w+) .*(?:\n(?!test_).*)*?ok$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and set(passed) == set(CHOSEN), done.stdout[-8000:]
