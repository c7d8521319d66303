"""Compiles the emulated device, once for each environment and version of torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]*"))


def compiler() -> str | None:
    """The C++ compiler: that of $CXX, or of the system."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")


def library(sources: Sequence[Path] = SOURCES, name: str = "torch") -> Path:
    """Return the path of the library, which the first of several processes compiles.

    The cache is in the folder of the environment, or in $EMULATED_CACHE.

    Args:
        sources: The C++ files, and the headers on which they depend.
        name: The start of the library's name.

    Raises:
        RuntimeError: There is no compiler, or it failed.
    """
    key = hashlib.sha256("\0".join([torch.__version__, *(path.read_text() for path in sources)]).encode()).hexdigest()
    folder = Path(os.environ.get("EMULATED_CACHE", Path(sys.prefix) / "emulated-device"))
    path = folder / f"{name}-{torch.__version__}-{key[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path, sources)
    return path


def _compile(path: Path, sources: Sequence[Path]) -> None:
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("there is no C++ compiler\nInstall g++, or set CXX.")
    torch_folder = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    options = [
        *("-fPIC", "-std=c++20", "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *(f"-isystem{torch_folder / 'include'}", f"-isystem{torch_folder / 'include/torch/csrc/api/include'}"),
        f"-isystem{sysconfig.get_paths()['include']}",
    ]
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        objects = {source: folder / f"{source.stem}.o" for source in sources if source.suffix == ".cpp"}
        _run([[cxx, *options, "-c", str(source), "-o", str(target)] for source, target in objects.items()])
        library = folder / path.name
        libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch_python"]
        linked = ["-shared", *map(str, objects.values()), *libraries]
        _run([[cxx, *linked, "-o", str(library)]])
        library.replace(path)


def _run(commands: list[list[str]]) -> None:
    """Run commands in parallel."""
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    messages = [process.communicate()[1] for process in processes]
    for command, process, message in zip(commands, processes, messages, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"the compiler failed: {' '.join(command)}\n{message[-4000:]}")
