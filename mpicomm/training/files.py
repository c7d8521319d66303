"""Atomic file writes: a file is complete or absent, also after a power failure."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".new"


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under a temporary name in its directory, sync it, and rename it.

    Args:
        path: The file; an existing file is replaced.
        write: Writes the content to the open file.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
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


def remove_tree(directory: Path, last: str) -> None:
    """Remove a directory and as much of its content as possible.

    Args:
        directory: The directory.
        last: The file that is removed when nothing else is left.

    Raises:
        OSError: If a file cannot be removed: on NFS, for example, a file that a process has open (EBUSY).
    """
    failures = []
    for path in directory.iterdir():
        if path.name != last:
            try:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            except OSError as error:
                failures.append(error)
    if failures:
        raise failures[0]
    if left := [path for path in directory.iterdir() if path.name != last]:  # NFS renames a removed file that is open
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), left[0])
    (directory / last).unlink()
    directory.rmdir()
