"""The C code of this package: one file that is an extension module, and a library for ctypes.

It is built where a C compiler is available; the extension module also needs the headers of Python. Without the file,
all tensors use MPI. Without the extension module, all calls take the general path.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import zlib
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
LIBRARY = _FOLDER / "hot_path.abi3.so"


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library; None if it was not built, or was built for another system or from other sources."""
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        loaded.mpicomm_source_crc.restype = ctypes.c_uint32
    except (OSError, AttributeError):
        return None
    expected = source_crc(_FOLDER)
    return loaded if expected in (None, loaded.mpicomm_source_crc()) else None


@functools.cache
def module() -> Any:
    """Return the extension module; None if it cannot be used."""
    if library() is None:
        return None
    try:
        return importlib.import_module("mpicomm.native.hot_path")
    except ImportError:  # built without the headers of Python, or this Python has no GIL
        return None


def source_crc(folder: Path) -> int | None:
    """Return the CRC of the C sources in a folder; None if a wheel has installed the package without them.

    A file that was built from other sources may have other structures.
    """
    sources = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
    return zlib.crc32(b"".join(path.read_bytes() for path in sources)) if sources else None
