# SPDX-License-Identifier: MIT OR Apache-2.0
"""The PCIe tree of this host, its endpoints, and what happens to them: what the command says, as Python objects."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._native import BIN
from .errors import Error, SystemCallError


def command_path() -> Path:
    """Where the command is: the one that PCIEIPC names, the package's own, or the one on the PATH."""
    given = os.environ.get("PCIEIPC")
    if given:
        return Path(given)
    own = BIN / "pcieipc"
    if own.exists():
        return own
    found = shutil.which("pcieipc")
    if found is None:
        raise SystemCallError("the pcieipc command is not there: install the wheel, or set PCIEIPC to it")
    return Path(found)


def _ask(*arguments: str, fine: tuple[int, ...] = (0,)) -> dict[str, Any]:
    done = subprocess.run([str(command_path()), *arguments, "--json"], capture_output=True, text=True, check=False)
    if done.returncode not in fine:
        raise Error(f"pcieipc {arguments[0]} ended with {done.returncode}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def topology() -> dict[str, Any]:
    """The PCIe tree as it is now: `pcieipc topo --json` (docs/topology.md)."""
    return _ask("topo")


def findings() -> dict[str, Any]:
    """What is wrong with the tree, each finding with evidence, consequence and remedy: `pcieipc doctor --json` (docs/doctor.md)."""
    return _ask("doctor", fine=(0, 3, 4))


def endpoints() -> dict[str, Any]:
    """The module, its limits and its endpoints with their states: `pcieipc info --json`. Raises `Error` when the node can not be opened."""
    return _ask("info")


def events(*arguments: str) -> Iterator[dict[str, Any]]:
    """Links, errors, cards that come and go, as they happen: one object for each event of `pcieipc watch --json`.

    Closing the iterator ends the watching.
    """
    watching = subprocess.Popen([str(command_path()), "watch", "--json", *arguments], stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    try:
        for line in watching.stdout:
            yield json.loads(line)
        code = watching.wait()
        if code != 0:
            raise Error(f"pcieipc watch ended with {code}")
    finally:
        watching.terminate()
        watching.wait()
        watching.stdout.close()


__all__ = ["command_path", "endpoints", "events", "findings", "topology"]
