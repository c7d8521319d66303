"""The program that copies a Python environment to local storage of the nodes, one rank on each, and removes the copies.

`mpicomm run --stage-env` starts it: `python -m mpicomm.cli.env_copy PREFIX COPY`, later with `--remove COPY`. Rank 0
packs the environment with tar and broadcasts the parts by MPI; every node unpacks them at once, so that the packed file
needs no space. Only rank 0 reads the environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from mpicomm import agreement, host_info, mpi, topology
from mpicomm.cli.console import print_message
from mpicomm.launch.known_launchers import WARNINGS
from mpicomm.terminal import format_size

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_PART_BYTES = 16 << 20  # of one broadcast: large enough for the bandwidth of the network
_BLOCK_BYTES = 4096  # by which file systems usually round up the size of a file
_NAMED = 8  # the most nodes that an error lists
_CHANGED = 1  # status of GNU tar if files changed or disappeared while it read them, such as those of Python's compiler


def main(arguments: Sequence[str]) -> int:
    """Copy an environment, or remove a copy from this node; return the exit status."""
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)
    if arguments[0] == "--remove":
        return remove(Path(arguments[1]))
    prefix, copy = map(Path, arguments)
    world = mpi.initialize()
    is_writer = topology.first_rank_of_node(world) == world.rank
    writers = cast("Intracomm", world.Split(0 if is_writer else mpi.api().UNDEFINED, world.rank))
    return copy_to_nodes(writers, prefix, copy) if is_writer else 0


def remove(copy: Path) -> int:
    """Remove a copy, which other ranks of this node may remove at the same time; return the exit status."""
    # tar has restored the modes: the directories of a read-only environment cannot be emptied.
    subprocess.run(("chmod", "-R", "u+rwX", copy), stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(copy, ignore_errors=True)
    return int(copy.exists())


def copy_to_nodes(comm: Intracomm, prefix: Path, copy: Path) -> int:
    """Copy an environment to the node of each rank, and return the exit status (collective).

    After an error on any node no copy is left.

    Args:
        comm: One rank of each node.
    """
    start = time.monotonic()
    hosts = comm.allgather(socket.gethostname())
    size, files = comm.bcast(measure(prefix) if comm.rank == 0 else (0, 0))
    failures = agreement.failures(comm.allgather, lambda: reserve(copy, size, files), OSError)
    is_reserved = comm.rank not in [rank for rank, _ in failures]
    if not failures:
        failures = agreement.failures(comm.allgather, lambda: _transfer(comm, prefix, copy), OSError)
    if failures and is_reserved:
        remove(copy)
    if comm.rank == 0:
        if failures:
            reasons = "".join(f"\n  {hosts[rank]}: {reason}" for rank, reason in failures[:_NAMED])
            print_message("run", f"cannot copy {prefix} to {len(failures)} of {comm.size} nodes:{reasons}")
        else:
            amount = f"{format_size(size)} in {files} files"
            taken = f"on {comm.size} node{'s' * (comm.size > 1)} in {time.monotonic() - start:.1f} s"
            print_message("run", f"copied {prefix} ({amount}) to {copy} {taken}")
    return int(bool(failures))


def left_out(prefix: Path) -> tuple[str, ...]:
    """Return the directories of conda's base that do not belong to it: other environments, and the packages of all.

    Another environment may have a directory pkgs of its own, without the file by which conda knows its cache.
    """
    is_base = (prefix / "conda-meta").is_dir() and (prefix / "pkgs" / "urls.txt").is_file()
    return ("envs", "pkgs") if is_base else ()


def measure(prefix: Path) -> tuple[int, int]:
    """Return the bytes that a copy of an environment needs, and the number of its files and directories."""
    size = files = 0
    excluded = left_out(prefix)
    for directory, names, file_names in os.walk(prefix):
        if Path(directory) == prefix:
            names[:] = [name for name in names if name not in excluded]
        for name in (*names, *file_names):
            with contextlib.suppress(OSError):  # it has been removed meanwhile, or tar will report it
                size += -(-Path(directory, name).lstat().st_size // _BLOCK_BYTES) * _BLOCK_BYTES
            files += 1
    return size, files


def reserve(copy: Path, size: int, files: int) -> None:
    """Create the directory of a copy.

    Raises:
        OSError: If it exists, or its disk cannot contain the copy.
    """
    if shutil.which("tar") is None:
        raise OSError("command tar was not found in PATH; install it")
    directory = copy.parent
    disk = os.statvfs(directory)
    if disk.f_flag & os.ST_NOEXEC:
        raise OSError(f"{directory} is mounted with noexec, so no library can be loaded from it")
    if (free := disk.f_bavail * disk.f_frsize) < size:
        raise OSError(f"{format_size(free)} free in {directory}, expected {format_size(size)} or more")
    if disk.f_files > 0 and disk.f_favail < files:  # file systems without a limit report 0 files
        raise OSError(f"room for {disk.f_favail} files in {directory}, expected {files} or more")
    try:
        copy.mkdir(mode=0o700)
    except FileExistsError:
        raise OSError(f"{copy} exists: {directory} is shared with another node; it must be local") from None


def _transfer(comm: Intracomm, prefix: Path, copy: Path) -> None:
    """Unpack the environment of rank 0 (collective).

    Raises:
        OSError: If the environment cannot be read (on rank 0) or written.
    """
    parts = _parts(comm, prefix)
    try:
        with _log() as log, _unpacking(copy, log) as tar:
            assert tar.stdin is not None
            with contextlib.suppress(BrokenPipeError), tar.stdin:
                for part in parts:
                    tar.stdin.write(part)
            _check(tar, log, f"cannot write {copy}")
    finally:
        for _ in parts:  # after an error on this node: the broadcasts continue for the others
            pass


def _parts(comm: Intracomm, prefix: Path) -> Iterator[bytes]:
    """Yield the packed environment of rank 0 on every rank (collective)."""
    if comm.rank:
        while part := comm.bcast(None):
            yield part
        return
    try:
        with (
            _log() as log,
            subprocess.Popen(_packing(prefix), cwd=prefix, stdout=subprocess.PIPE, stderr=log) as tar,
        ):
            assert tar.stdout is not None
            while part := tar.stdout.read(_PART_BYTES):
                yield comm.bcast(part)
            _check(tar, log, f"cannot read {prefix}", accepted=(0, _CHANGED))
    finally:
        comm.bcast(b"")  # the end, also after an error


def _packing(prefix: Path) -> list[str]:
    return ["tar", "-cf", "-", "--anchored", *(f"--exclude=./{name}" for name in left_out(prefix)), "."]


def _unpacking(copy: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    # In a user namespace without privileges, tar could not restore the owners.
    return subprocess.Popen(("tar", "-xf", "-", "--no-same-owner"), cwd=copy, stdin=subprocess.PIPE, stderr=log)


def _log() -> IO[bytes]:
    """Return a file in memory for the errors of tar: a disk may be full, and a pipe needs a reader."""
    return os.fdopen(host_info.memory_file("tar"), "w+b")


def _check(tar: subprocess.Popen[bytes], log: IO[bytes], failure: str, accepted: Sequence[int] = (0,)) -> None:
    """Raise an OSError with the first error of tar if it has failed."""
    if (status := tar.wait()) not in accepted:
        log.seek(0)
        reason = log.readline().decode(errors="replace").strip() or f"tar exited with status {status}"
        raise OSError(f"{failure}: {reason}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
