"""Compiles the emulated device, once for each environment and version of torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]*"))
SECONDS = 1800


def compiler() -> str | None:
    """The C++ compiler: that of $CXX, or of the system."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")


def library() -> Path:
    """Return the path of the library, which the first of several processes compiles.

    The cache is in the folder of the environment, or in $EMULATED_CACHE.

    Raises:
        RuntimeError: There is no compiler, or it failed.
    """
    key = hashlib.sha256("\0".join([torch.__version__, *(path.read_text() for path in SOURCES)]).encode()).hexdigest()
    folder = Path(os.environ.get("EMULATED_CACHE", Path(sys.prefix) / "emulated-device"))
    path = folder / f"torch-{torch.__version__}-{key[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path)
    return path


def _compile(path: Path) -> None:
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("there is no C++ compiler\nInstall g++, or set CXX.")
    torch_folder = Path(torch.__file__).parent
    unfinished = path.with_suffix(f".{os.getpid()}")
    command = [
        *(
            cxx,
            "-shared",
            "-fPIC",
            "-std=c++20",
            "-O1",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ),
        *(f"-isystem{torch_folder / 'include'}", f"-isystem{torch_folder / 'include/torch/csrc/api/include'}"),
        f"-isystem{sysconfig.get_paths()['include']}",
        *(str(source) for source in SOURCES if source.suffix == ".cpp"),
        *(f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(unfinished)),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"the compiler failed: {' '.join(command)}\n{done.stderr[-4000:]}")
    unfinished.replace(path)
