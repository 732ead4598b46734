# SPDX-License-Identifier: MIT OR Apache-2.0
"""The package's types hold, callers are checked against them, and the stub of the compiled part says what is in it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pcieipc

PACKAGE = Path(pcieipc.__file__).parent
SETTINGS = """
[mypy]
strict = True
disallow_subclassing_any = False
[mypy-torch.*]
follow_imports = skip
ignore_missing_imports = True
"""
# Each "type: ignore" here is an error that must be found: one that is not needed is an error itself.
CALLER = """
from typing import assert_type

import numpy
import pcieipc
import pcieipc.torch

with pcieipc.Communicator("/tmp/m", 0, 2, timeout=1.5) as group:
    array = numpy.ones(3, "f4")
    assert_type(group.all_reduce(array), None)
    assert_type(group.members, tuple[int, ...])
    assert_type(group.agree().failed, tuple[int, ...])
    assert_type(group.register(10), pcieipc.Buffer)
    group.all_reduce(array, op=3)  # type: ignore[arg-type]
    group.send(array)  # type: ignore[call-arg]
pcieipc.Communicator("/tmp/m", "0", 2)  # type: ignore[arg-type]
error = pcieipc.EndpointGone("gone", 1, 2, 3)
assert_type(error.rank, int | None)
caught: RuntimeError = error
assert_type(pcieipc.topology()["devices"] is None, bool)
assert_type(pcieipc.torch.survivors(), list[int])
assert_type(pcieipc.torch.check(), None)
pcieipc.torch.Options(timeout="soon")  # type: ignore[arg-type]
"""


def mypy(folder, *arguments):
    pytest.importorskip("mypy")
    (folder / "mypy.ini").write_text(SETTINGS)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache"), *arguments],
        env=os.environ | {"MYPYPATH": str(PACKAGE.parent)}, capture_output=True, text=True, check=False, cwd=folder, timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_types_of_the_package_and_of_a_caller_hold(tmp_path):
    assert (PACKAGE / "py.typed").exists()
    (tmp_path / "caller.py").write_text(CALLER)
    code, said = mypy(tmp_path, "-p", "pcieipc")
    assert code == 0, said
    code, said = mypy(tmp_path, "caller.py")
    assert code == 0, said


def test_the_stub_of_the_compiled_part_names_what_is_in_it():
    pytest.importorskip("torch")
    from pcieipc.torch._build import load

    compiled = load()
    stub = ast.parse((PACKAGE / "torch" / "_backend.pyi").read_text())
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    (backend,) = (node for node in stub.body if isinstance(node, ast.ClassDef))
    methods = {node.name for node in backend.body if isinstance(node, ast.FunctionDef)}
    assert all(hasattr(compiled.PcieBackend, name) for name in methods)
    assert {name for name in vars(compiled.PcieBackend) if not name.startswith("_")} <= methods
    assert {name for name in vars(compiled) if not name.startswith("_") and name != "PcieBackend"} == functions


def test_everything_public_says_what_it_is_for():
    for name in pcieipc.__all__:
        public = getattr(pcieipc, name)
        assert (public.__doc__ or "").strip(), name
        for member, value in vars(public).items() if isinstance(public, type) else ():
            if callable(value) and not member.startswith("_"):
                assert (value.__doc__ or "").strip(), f"{name}.{member}"
