# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs PyTorch's own distributed tests (torch.testing._internal.distributed.distributed_test) against a backend.

    BACKEND=pcie WORLD_SIZE=3 torch_suite.py NAME...

Its tests ask in many places whether the backend is called "gloo", and skip themselves otherwise; there, the backend under test counts as gloo.
"""

import importlib.util
import os
import re
import sys
import tempfile
import types
import unittest
from pathlib import Path

BACKEND = os.environ["BACKEND"]
MODULE = "torch.testing._internal.distributed.distributed_test"


def prepare() -> None:
    """The folders and variables that the tests expect."""
    folder = Path(os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="pcieipc-suite-")))
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(exist_ok=True)
    os.environ.setdefault("INIT_METHOD", f"file://{folder}/init_dir/shared")


def stand_in() -> None:
    """Where there is no expecttest (Debian has none): of it, torch's tests need only the class that theirs derive from."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        module = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase
        sys.modules["expecttest"] = module


def suite() -> type:
    """The tests' class, for the backend under test."""
    stand_in()
    import torch
    from torch.testing._internal import common_distributed

    if BACKEND != "gloo":
        import pcieipc.torch  # noqa: F401
    for feature in ("plugin", "ddp", "subgroup", "gpu"):
        common_distributed.DistTestCases.backend_feature[feature].add(BACKEND)
    found = importlib.util.find_spec(MODULE)
    source = Path(found.origin).read_text()
    source = source.replace('BACKEND != "gloo"', f'BACKEND not in ("gloo", "{BACKEND}")')
    source = source.replace('BACKEND == "gloo"', f'BACKEND in ("gloo", "{BACKEND}")')
    source = source.replace("BACKEND == dist.Backend.GLOO", f'BACKEND in ("gloo", "{BACKEND}")')
    source = re.sub(r'\{("nccl", )?"gloo"(, "nccl")?\}', lambda m: m[0][:-1] + f', "{BACKEND}"}}', source)
    module = types.ModuleType(MODULE)
    module.__file__ = found.origin
    sys.modules[MODULE] = module
    exec(compile(source, found.origin, "exec"), module.__dict__)

    class TestBackend(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestBackend


if __name__ == "__main__":
    prepare()
    tests = suite()
    chosen = sys.argv[1:] or unittest.defaultTestLoader.getTestCaseNames(tests)
    result = unittest.TextTestRunner(verbosity=2, stream=sys.stdout).run(unittest.TestSuite(tests(name) for name in chosen))
    sys.exit(not result.wasSuccessful())
