"""The checkpoint directory of one run on rank 0: its lock, and the ownership of the directories `step-*` in it.

The trainer resumes from checkpoints of this run, and removes only what it made. The marker of each directory that it
makes has the ID of the run, and the name and the inode of the directory. A copy has another inode, a renamed checkpoint
another name, and a link is not a directory: these are the user's. So are directories of other programs, which have no
such marker.

Files are written under a temporary name and renamed: a file is complete or absent, also after a power failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import struct
import uuid
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mpicomm import mpi
from mpicomm.errors import CheckpointError

COMPLETE = "COMPLETE"
"""The marker of a complete checkpoint, in JSON."""

_IN_MARKER = {"run", "name", "inode", "step"}  # entries of each marker
_INCOMPLETE = "INCOMPLETE"  # the same marker while the content is written or removed
_LOCK = ".lock"  # also contains the ID of the run
_LOCK_SECONDS = 10.0  # wait limit for the previous job to release the lock when a run is restarted
TEMPORARY_SUFFIX = ".new"  # of a file that is being written
_PREFIX = "step-"
_REPLACED = r"\.[0-9a-f]{32}"  # added to the name of a checkpoint while another one of this name takes its place
_TEMPORARY = re.compile(r"step-.*\.[0-9a-f]{32}\.partial")  # names of incomplete checkpoints
_NO_MARKER = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ESTALE}


@dataclasses.dataclass(frozen=True)
class _Marked:
    """A directory with a marker."""

    path: Path
    mark: dict[str, Any]

    @property
    def order(self) -> tuple[int, str]:
        """The step; several checkpoints of one step are in the order of their names."""
        return self.mark["step"], self.path.name

    @property
    def has_its_name(self) -> bool:
        """Whether it has the name under which the trainer saved it, and is not a link."""
        return bool(self.mark["name"] == self.path.name) and not self.path.is_symlink()

    def is_original(self, run: str) -> bool:
        """Return whether this run made the directory: a copy or a link of it has another inode."""
        return self.mark["run"] == run and self.mark["inode"] == self.path.lstat().st_ino


class RunDirectory:
    """The checkpoints in a directory, which one job uses at a time."""

    def __init__(self, path: Path, keep: int) -> None:
        """Create the directory if necessary, lock it, and remove what a killed job of this run has left incomplete.

        Args:
            path: The directory.
            keep: The number of checkpoints to keep.

        Raises:
            CheckpointError: If another job uses the directory, or it is unclear which run is in it.
            OSError: If the directory cannot be read or written.
        """
        self.path, self._keep = path, keep
        path.mkdir(parents=True, exist_ok=True)
        self._file = (path / _LOCK).open("a+b", buffering=0)
        try:
            self._lock()
            self._run = self._identify()
        except BaseException:
            self._file.close()
            raise
        _open.add(self)
        self.remove_incomplete()
        self._settle_replaced()

    def close(self) -> None:
        """Release the lock, also that of processes which have inherited the file by a fork."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                _set_lock(self._file.fileno(), fcntl.F_UNLCK)
            self._file.close()

    def newest(self) -> Path | None:
        """Return the complete checkpoint of this run with the most steps; None if the directory has no checkpoints.

        Raises:
            CheckpointError: If it has complete checkpoints, but none of this run.
        """
        complete = list(self._marked(COMPLETE))
        of_run = [marked for marked in complete if marked.has_its_name and marked.mark["run"] == self._run]
        if complete and not of_run:
            other = max(complete, key=lambda marked: marked.order)
            name = other.mark["name"]
            raise CheckpointError(
                f"checkpoint_dir {self.path} has no checkpoint of this run, but a link, a copy under another name or a "
                f"checkpoint of another run: {other.path.name}, of step {other.mark['step']}.\n"
                f"To continue from it, copy its content to {name} in an empty directory, and pass that as "
                f"checkpoint_dir. To start a new run, pass another checkpoint_dir."
            )
        return max(of_run, key=lambda marked: marked.order).path if of_run else None

    def begin(self, name: str, step: int, **about: Any) -> Path:
        """Return a new directory for the content of a checkpoint.

        Args:
            name: The name of the checkpoint.
            step: The step of the run.
            about: Further entries of the marker.
        """
        path = self.path / _temporary(name)
        path.mkdir()
        mark = {"run": self._run, "name": name, "inode": path.stat().st_ino, "step": step, **about}
        try:
            write(path / _INCOMPLETE, json.dumps(mark).encode())
        except OSError:
            path.rmdir()
            raise
        return path

    def publish(self, content: Path, name: str) -> Path:
        """Rename and mark the content of a checkpoint, which all ranks have written, and return its path.

        Raises:
            FileExistsError: If a directory of that name exists which this run did not make.
        """
        # 1. give the content its name
        sync(content)
        path, replaced = self.path / name, None
        if os.path.lexists(path):
            if not any(
                marked.path == path and marked.has_its_name for marked in self._originals(COMPLETE, _INCOMPLETE)
            ):
                raise FileExistsError(
                    errno.EEXIST, "this run did not make the file or directory of that name; move it elsewhere", path
                )
            # Still marked, so that a complete checkpoint is left at any time.
            replaced = path.rename(path.with_name(f"{name}.{uuid.uuid4().hex}"))
        content.rename(path)
        sync(self.path)
        # 2. mark it
        self._mark(path)
        if replaced is not None and (replaced / COMPLETE).exists():
            (replaced / COMPLETE).rename(replaced / _INCOMPLETE)
        return path

    def _mark(self, path: Path) -> None:
        (path / _INCOMPLETE).rename(path / COMPLETE)
        sync(path)

    def remove_old(self, kept: Collection[str]) -> None:
        """Remove all but the newest `keep` checkpoints that this run made, and those in `kept`."""
        with _warning_on_failure(self.path):
            originals = sorted(self._originals(COMPLETE), key=lambda marked: marked.order)
            complete = [marked.path for marked in originals if marked.has_its_name]
            for path in complete[: -self._keep]:
                if path.name not in kept:
                    with _warning_on_failure(path):
                        # Before the content, so that no run resumes from a partly removed checkpoint.
                        (path / COMPLETE).rename(path / _INCOMPLETE)
        self.remove_incomplete()

    def remove_incomplete(self) -> None:
        """Remove the incomplete checkpoints that this run made."""
        with _warning_on_failure(self.path):
            for marked in list(self._originals(_INCOMPLETE)):
                with _warning_on_failure(marked.path):
                    path = marked.path
                    if not _TEMPORARY.fullmatch(path.name):
                        # Without its marker it would block the name.
                        path = path.rename(path.with_name(_temporary(path.name)))
                    remove_tree(path, last=_INCOMPLETE)
            for path in self.path.glob(_PREFIX + "*"):
                if _TEMPORARY.fullmatch(path.name):
                    _remove_empty(path)

    def _settle_replaced(self) -> None:
        """Restore the checkpoints whose replacement a killed job has not completed, and remove the others."""
        with _warning_on_failure(self.path):
            for marked in list(self._originals(COMPLETE)):
                path = self.path / marked.mark["name"]
                if not re.fullmatch(re.escape(path.name) + _REPLACED, marked.path.name):
                    continue
                if _read(path / COMPLETE) is not None:
                    (marked.path / COMPLETE).rename(marked.path / _INCOMPLETE)
                elif not os.path.lexists(path):
                    marked.path.rename(path)
        self.remove_incomplete()

    def _originals(self, *markers: str) -> Iterator[_Marked]:
        """Yield the directories with one of these markers that this run made."""
        return (marked for marker in markers for marked in self._marked(marker) if marked.is_original(self._run))

    def _marked(self, marker: str) -> Iterator[_Marked]:
        for path in self.path.glob(_PREFIX + "*"):
            mark = _read(path / marker)
            if mark is not None:
                yield _Marked(path, mark)

    # -- the lock ----------------------------------------------------------------------------------------------------

    def _lock(self) -> None:
        """Lock the directory; the kernel releases the lock however this process ends."""

        def is_locked() -> bool:
            try:
                _set_lock(self._file.fileno(), fcntl.F_WRLCK)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                message = (
                    f"cannot lock checkpoint_dir {self.path}: {error}. Start only one job at a time with this "
                    f"directory: a second one would not be detected."
                )
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            return True

        if not mpi.poll(is_locked, _LOCK_SECONDS, longest_pause=0.1):
            raise CheckpointError(
                f"checkpoint_dir {self.path} is locked by another running job.\n"
                f"Wait for that job to end, cancel it, or pass another checkpoint_dir."
            )

    def _identify(self) -> str:
        """Return the ID of the run in this directory; a directory without an ID gets a new one."""
        stored = _parsed(os.pread(self._file.fileno(), 4096, 0))
        if isinstance(stored.get("run"), str):
            return str(stored["run"])
        # The file is new, or was removed or damaged.
        runs = {marked.mark["run"] for marked in self._marked(COMPLETE) if marked.has_its_name}
        if len(runs) > 1:
            raise CheckpointError(
                f"checkpoint_dir {self.path} must have the checkpoints of one run, got those of {len(runs)} runs.\n"
                f"Move the checkpoints of the other runs elsewhere; {COMPLETE} in each has the ID of its run."
            )
        run = str(runs.pop()) if runs else uuid.uuid4().hex
        self._file.truncate(0)
        self._file.write(json.dumps({"run": run}).encode())
        os.fsync(self._file.fileno())
        return run


_open: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the files in a forked child, such as a worker of a DataLoader: it would keep the lock of a killed rank."""
    for directory in _open:
        directory._file.close()


os.register_at_fork(after_in_child=_close_in_child)


def write(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    write_whole(path, lambda file: file.write(content))


def _temporary(name: str) -> str:
    return f"{name}.{uuid.uuid4().hex}.partial"


def _remove_empty(path: Path) -> None:
    """Remove a directory without content: a job was killed after it created the directory, or before it removed it."""
    with contextlib.suppress(OSError):  # it has content, or is not a directory
        unfinished = path / f"{_INCOMPLETE}{TEMPORARY_SUFFIX}"
        if [*path.iterdir()] == [unfinished]:
            unfinished.unlink()
        path.rmdir()


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a marker; None if the file does not exist, or is not a marker of mpicomm."""
    try:
        mark = _parsed(path.read_bytes())
    except OSError as error:
        if error.errno in _NO_MARKER:
            return None
        raise
    return mark if mark.keys() >= _IN_MARKER else None


def _parsed(content: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one if the content is something else."""
    try:
        parsed = json.loads(content)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _set_lock(handle: int, kind: int) -> None:
    """Set or release a lock of the open file.

    Other than the locks of `fcntl.lockf`, which exclude it, this one is not released when the process opens and closes
    the file elsewhere, for example to copy the directory.
    """
    whole_file = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)  # struct flock
    fcntl.fcntl(handle, fcntl.F_OFD_SETLK, whole_file)


@contextlib.contextmanager
def _warning_on_failure(path: Path) -> Iterator[None]:
    """Turn a failure to remove a file or directory into a warning: it only costs space, and the run can continue."""
    try:
        yield
    except OSError as error:
        message = f"cannot remove {path} yet: {error}. The next save tries again; the newer checkpoints are complete."
        warnings.warn(message, RuntimeWarning, stacklevel=3)


# -- files -------------------------------------------------------------------------------------------------------------


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
