# SPDX-License-Identifier: MIT OR Apache-2.0
"""Builds the wheel: the Python files, and with them libpcieipc.so, its header and the command, made by cargo from this checkout.

PCIEIPC_PREBUILT=DIR takes libpcieipc.so.1, pcieipc.h and the command from DIR instead of building them.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
USERLIB = HERE.parent
REPO = USERLIB.parent


def version() -> str:
    found = re.search(r'^version = "(.*)"', (USERLIB / "Cargo.toml").read_text(), re.MULTILINE)
    if not found:
        raise SystemExit(f"{USERLIB}/Cargo.toml names no version: build the wheel from the project's checkout")
    return found[1]


def programs(scratch: Path) -> Path:
    """A folder with the library, its header and the command."""
    prebuilt = os.environ.get("PCIEIPC_PREBUILT")
    if prebuilt:
        return Path(prebuilt).resolve()
    if not shutil.which("cargo"):
        raise SystemExit("building pcieipc needs Rust 1.85 or newer (cargo is not there), or PCIEIPC_PREBUILT=DIR with what was built elsewhere")
    target = Path(os.environ.get("CARGO_TARGET_DIR", USERLIB / "target"))
    # The command is built with it.
    subprocess.run([str(REPO / "scripts" / "build-capi"), str(scratch)], check=True)
    shutil.copy2(target / "release" / "pcieipc", scratch / "pcieipc")
    return scratch


class BuildPy(build_py):
    """Adds what cargo built to the package."""

    def run(self) -> None:
        super().run()
        package = HERE / "src" / "pcieipc" if self.editable_mode else Path(self.build_lib) / "pcieipc"
        into = package / "bin"
        scratch = Path(self.get_finalized_command("build").build_temp).resolve() / "capi"
        scratch.mkdir(parents=True, exist_ok=True)
        into.mkdir(parents=True, exist_ok=True)
        built = programs(scratch)
        for name in ("libpcieipc.so.1", "pcieipc.h", "pcieipc"):
            shutil.copy2(built / name, into / name)


class Platform(Distribution):
    """It holds a shared library, which any Python of this platform can load."""

    def has_ext_modules(self) -> bool:
        return True


def any_python():
    from setuptools.command.bdist_wheel import bdist_wheel

    class AnyPython(bdist_wheel):
        def get_tag(self):
            return ("py3", "none", super().get_tag()[2])

    return AnyPython


def commands() -> dict:
    found = {"build_py": BuildPy}
    try:
        found["bdist_wheel"] = any_python()
    except ImportError:
        # Before setuptools 70.1 the command came with the package wheel.
        from wheel.bdist_wheel import bdist_wheel

        class AnyPython(bdist_wheel):
            def get_tag(self):
                return ("py3", "none", super().get_tag()[2])

        found["bdist_wheel"] = AnyPython
    return found


setup(version=version(), cmdclass=commands(), distclass=Platform)
