"""Atomic file writes: a file is complete or absent, also after a power failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under a temporary name in its directory, sync it, and rename it.

    Args:
        path: The file; an existing file is replaced.
        write: Writes the content to the open file.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(directory: Path) -> None:
    """Sync the entries of a directory to disk (fsync)."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_tree(directory: Path) -> None:
    """Remove a directory and as much of its content as possible.

    Raises:
        OSError: If a file cannot be removed: on NFS, for example, a file that a process has open (EBUSY).
    """
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        shutil.rmtree(directory)
