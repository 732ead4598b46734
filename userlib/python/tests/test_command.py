# SPDX-License-Identifier: MIT OR Apache-2.0
"""What comes from the command: the module's front door, the tree and its events."""

import subprocess
import sys

import pytest

import pcieipc


def test_python_m_pcieipc_is_the_command():
    done = subprocess.run([sys.executable, "-m", "pcieipc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"pcieipc {pcieipc.__version__}"
    assert subprocess.run([sys.executable, "-m", "pcieipc", "no-such-command"], capture_output=True, check=False).returncode == 2


def test_the_tree_comes_as_python_objects():
    assert isinstance(pcieipc.topology(), dict)
    assert isinstance(pcieipc.findings(), dict)


def test_a_missing_module_is_an_error_that_says_so():
    try:
        found = pcieipc.endpoints()
    except pcieipc.Error as error:
        assert "/dev/pcieipc" in str(error)
    else:
        assert isinstance(found, dict)


def test_watching_ends_when_the_iterator_is_closed():
    events = pcieipc.events()
    iterator = iter(events)
    try:
        import threading

        first = []
        thread = threading.Thread(target=lambda: first.append(next(iterator, None)), daemon=True)
        thread.start()
        thread.join(2)
        if not thread.is_alive():
            assert first[0] is None or isinstance(first[0], dict)
    except pcieipc.Error:
        pytest.skip("this host can not be watched")
