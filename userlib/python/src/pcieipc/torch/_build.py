# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compiles the backend for the torch that is installed, once; later processes find it in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from .._native import library_path, library_version

SOURCES = Path(__file__).with_name("backend")


class NotBuilt(ImportError):
    """The backend can not be compiled here; the text says what is missing."""


def cache() -> Path:
    """Where what was compiled is kept: below PCIEIPC_TORCH_CACHE, else below the user's cache."""
    given = os.environ.get("PCIEIPC_TORCH_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pcieipc" / "torch"


def _include(library: Path) -> Path:
    # Beside the library in the wheel; a distribution keeps headers apart.
    places = [library.parent, Path("/usr/local/include"), Path("/usr/include")]
    for place in places:
        if (place / "pcieipc.h").exists():
            return place
    raise NotBuilt(f"pcieipc.torch: pcieipc.h is missing beside {library}: install the wheel again, or the package libpcieipc-dev")


def _whole(file: Path) -> None:
    """Writes a file that includes all sources: torch's headers take longer than all of them, and are so read once."""
    file.write_text("".join(f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp"))))


def command(source: Path, output: Path) -> list[str]:
    """How the backend is compiled."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    library = library_path().resolve()
    # Torch's headers ask for the standard that torch itself was built with.
    standard = "c++17" if tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) < (2, 9) else "c++20"
    found = [
        *shlex.split(os.environ.get("CXX", "g++")),
        f"-std={standard}",
        os.environ.get("PCIEIPC_TORCH_OPTIMIZE", "-O2"),
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        # What headers define when torch was built with distributed.
        "-DUSE_DISTRIBUTED",
        "-DUSE_C10D",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        # pybind11 shares its types between modules that agree on these.
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        if value is not None:
            found.append(f'-DPYBIND11_{name}="{value}"')
    found += [f"-I{_include(library)}"]
    found += [f"-isystem{path}" for path in [*include_paths(), sysconfig.get_paths()["include"]] if path != "/usr/include"]
    found += [str(source), "-o", str(output)]
    found += [f"-L{path}" for path in library_paths()]
    found += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", str(library), f"-Wl,-rpath,{library.parent}"]
    return found


def key() -> str:
    """A name for everything that the result depends on."""
    import torch

    sources = [f"{path.name}\n{path.read_text()}" for path in sorted(SOURCES.iterdir())]
    how = " ".join(command(Path("backend.cpp"), Path("_backend.so")))
    parts = [torch.__version__, torch.__file__, sys.version, library_version(), *sources, how]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def build() -> Path:
    """Compiles the backend unless that was done before, and answers where it is. Only one process of the user compiles."""
    import torch

    folder = cache() / key()
    made = folder / "_backend.so"
    if made.exists():
        return made
    compiler = shlex.split(os.environ.get("CXX", "g++"))[0]
    if shutil.which(compiler) is None:
        raise NotBuilt(
            f"pcieipc.torch: the backend is compiled for the torch that is installed ({torch.__version__}), and there is no compiler {compiler}: "
            "install g++ or set CXX"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(folder / "lock", "w")
    except OSError as error:
        raise NotBuilt(f"pcieipc.torch: {folder} can not be written ({error}): set PCIEIPC_TORCH_CACHE to a folder of yours") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists():
            return made
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, output = folder / "backend.cpp", Path(scratch) / "_backend.so"
            _whole(source)
            compile_it = command(source, output)
            done = subprocess.run(compile_it, capture_output=True, text=True, check=False)
            log = folder / "build.log"
            log.write_text(f"$ {shlex.join(compile_it)}\n{done.stdout}{done.stderr}")
            if done.returncode != 0:
                first = next((line for line in done.stderr.splitlines() if "error" in line), "see the log")
                raise NotBuilt(
                    f"pcieipc.torch: the backend does not compile for torch {torch.__version__}: {first}\n"
                    f"(the whole log is {log}; Debian needs libtorch-dev and pybind11-dev, and every system needs Python's headers)"
                )
            output.rename(made)
    return made


def load() -> ModuleType:
    """The compiled backend."""
    import torch.distributed  # noqa: F401  (its types come first)

    path = build()
    spec = importlib.util.spec_from_file_location("pcieipc.torch._backend", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise NotBuilt(f"pcieipc.torch: {path} can not be loaded ({error}); delete its folder and try again") from None
    sys.modules[spec.name] = module
    return module
