"""Dump files: the flight recorder and the stacks of a rank, written when a job hangs or is aborted, or on request."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mpicomm import host_info
from mpicomm.recorder import flight_recorder, torch_format

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/time")


@dataclasses.dataclass(frozen=True)
class ClockOffset:
    """A measured difference between two clocks."""

    seconds: float
    """To add to this rank's clock for that of rank 0."""

    error: float
    """The largest error of `seconds`."""


@functools.cache
def clock_identity() -> str:
    """Return a text that is equal for processes with the same clock; empty if unknown."""
    boot = host_info.read(_BOOT_ID)
    if not boot:
        return ""
    try:
        return f"{boot} {_NAMESPACE.readlink()}"
    except OSError:  # a kernel without time namespaces
        return boot


def write(
    directory: str | os.PathLike[str],
    rank: int,
    fields: dict[str, Any],
    offset: ClockOffset | None = None,
    *,
    is_of_job: bool = False,
) -> Path:
    """Write the recorded operations and the stacks of all threads.

    The files are `rank-<rank>.json` with the operations, `fr_trace_rank_<rank>` with the operations in the format of
    torch's flight recorder, and `rank-<rank>.stacks.txt`. Existing symbolic links with these names are replaced, not
    followed. Only this user can read the files.

    Args:
        fields: Further fields of the JSON file.
        offset: The difference between the clocks of this rank and rank 0; None if unknown.
        is_of_job: The directory is the job's own, in which only this user may write. Otherwise, the user has chosen it.

    Returns:
        The path of the JSON file.

    Raises:
        OSError: If the directory or the files cannot be written, or the job's directory is a symbolic link or belongs
            to another user.
    """
    folder = Path(directory)
    now, wall = time.monotonic(), time.time()
    recorded = flight_recorder.recorded()
    operations = [{**vars(operation.describe(now)), **_details(operation, now, wall)} for operation in recorded]
    clocks = {"clock": clock_identity(), "monotonic": now, "offset": None if offset is None else vars(offset)}
    content = {"rank": rank, **fields, "written": wall, **clocks, "operations": operations}
    trace = torch_format.encoded(rank, recorded, now, wall)
    with _opened(folder, is_of_job=is_of_job) as handle:
        owner = os.fstat(handle).st_uid if is_of_job else None
        path = folder / f"rank-{rank}.json"
        _write(handle, path, lambda file: file.write(json.dumps(content, indent=1).encode()), owner)
        _write(handle, folder / torch_format.FILE.format(rank=rank), lambda file: file.write(trace), owner)
        _write(handle, path.with_suffix(".stacks.txt"), faulthandler.dump_traceback, owner)
    return path


def try_write(directory: Path, rank: int, fields: dict[str, Any], offset: ClockOffset | None, seconds: float) -> str:
    """Write the files to the job's directory, and wait for at most some seconds.

    Returns:
        Why the files cannot be written; empty on success, and while they are being written.
    """
    errors: list[OSError] = []

    def run() -> None:
        try:
            write(directory, rank, fields, offset, is_of_job=True)
        except OSError as error:
            errors.append(error)

    # A blocked file system is a common reason for hangs: it must not block the caller as well.
    writing = threading.Thread(target=run, daemon=True)
    writing.start()
    writing.join(seconds)
    return str(errors[0]) if errors else ""


@contextlib.contextmanager
def _opened(folder: Path, *, is_of_job: bool) -> Iterator[int]:
    """Open a directory; create it if it does not exist."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    if is_of_job:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another rank has created it on the same file system
            folder.mkdir(mode=0o700)
        if folder.is_symlink():
            raise _refusal(f"{folder} is a symbolic link")
        flags |= os.O_NOFOLLOW
    else:
        folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, flags)
    try:
        yield handle
    finally:
        os.close(handle)


def _write(folder: int, path: Path, write: Callable[[BinaryIO], object], owner: int | None) -> None:
    """Write a file under a random name and rename it, so that no symbolic link is followed.

    Args:
        owner: The uid that must own the file. On a network file system, this user may have a uid other than geteuid().
    """
    aside = f".{secrets.token_hex(8)}.part"  # not the name of the file: torchfrtrace reads all files that contain it
    try:
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    except PermissionError as error:
        if owner in (None, os.geteuid()):
            raise
        raise _refusal(f"{path.parent} belongs to user {owner}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            if owner not in (None, user := os.fstat(handle).st_uid):
                raise _refusal(f"{path.parent} belongs to user {owner}, and this user is {user}")
            write(file)
        os.rename(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(aside, dir_fd=folder)
        raise


def _refusal(why: str) -> PermissionError:
    return PermissionError(f"{why}, and mpicomm did not create it. Set MPICOMM_DUMP_DIR to a directory of your own.")


def _details(operation: flight_recorder.Operation, now: float, wall: float) -> dict[str, Any]:
    """Return the fields that only dump files have; `monotonic` is on the clock of the file's field of that name."""
    moments = {"called": operation.called_at, "start": operation.start, "end": operation.end}
    times = {name: None if moment is None else wall - (now - moment) for name, moment in moments.items()}
    fields = {name: getattr(operation, name) for name in ("nbytes", "tag", "message")}
    return {**fields, **times, "monotonic": list(moments.values())}
