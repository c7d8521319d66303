"""Checkpoints of a run: written aside, synced, renamed, marked; the marked one with the most steps is what counts.

The content goes by torch.distributed.checkpoint, so that another number of ranks can read it. What is killed at any
moment leaves a directory without a mark, which the next start removes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import functools
import json
import os
import pickle
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mpicomm import mpi
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.collective_ops import collectives
from mpicomm.errors import CheckpointError, raised_on_all_ranks
from mpicomm.training import files, rank_sync
from mpicomm.training.preemption import is_of_all_ranks

_MARK = "COMPLETE"
_ASIDE = ".partial"
_PREFIX = "step-"
_LOCK = ".lock"
_GONE_SECONDS = 10.0  # in which a job must have ended that is started anew
_SEEN_SECONDS = 10.0  # in which a new file must be seen on all hosts

State = dict[str, Any]
"""`model` and `optimizer` as torch.distributed.checkpoint knows them, and objects by name."""


class Checkpoints:
    """The checkpoints in a directory that all ranks see."""

    def __init__(self, directory: str | os.PathLike[str], keep: int, device: torch.device) -> None:
        """Open the directory, see that all ranks can write there, and remove what was not finished (collective).

        Args:
            keep: How many to keep.
            device: This rank's.

        Raises:
            CheckpointError: On every rank, if a rank cannot write there.
        """
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._rank = dist.get_rank()
        self._is_ours = isinstance(dist.group.WORLD, MPIProcessGroup)
        self._in_background = mpi.serves_threads() if self._is_ours else dist.is_gloo_available()
        # A thread of its own begins with the first GPU as its current one.
        begin = functools.partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "mpicomm-checkpoint", initializer=begin)
        self._running: concurrent.futures.Future[None] | None = None
        self._lock: TextIO | None = None
        self._open()
        self.newest = collectives.broadcast_object(_newest(self.directory) if self._rank == 0 else None, src=0)
        """The last complete checkpoint; None if there is none."""
        self._group = self._make_group()

    def _make_group(self) -> dist.ProcessGroup:
        """Make the group of the saving thread, whose operations must not mix with those of training (collective).

        Operations of two NCCL groups must start in one order on all ranks, which two threads cannot guarantee:
        https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
        """
        if self._is_ours or not dist.is_gloo_available():
            return dist.new_group()
        return dist.new_group(backend="gloo")

    def _open(self) -> None:
        token = self.directory / f".{collectives.broadcast_object(uuid.uuid4().hex, src=0)}"
        self._agree(self._prepare if self._rank == 0 else _nothing)
        self._agree((lambda: _write(token, b"")) if self._rank == 0 else _nothing)
        self._agree(lambda: _probe(token, self._rank))
        if self._rank == 0:
            token.unlink(missing_ok=True)

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = (self.directory / _LOCK).open("w")  # the kernel lets go of it when this process ends, however
        if not mpi.poll(lambda: _is_locked(self._lock), _GONE_SECONDS, longest_pause=0.1):
            raise OSError("another job is using it")
        self._remove_unmarked()

    def _agree(self, act: Callable[[], object]) -> None:
        """Do something that may fail, and fail everywhere if it fails on any rank (collective)."""
        failure = rank_sync.first_failure(act, OSError)
        if failure is not None:
            raise raised_on_all_ranks(
                CheckpointError(
                    f"rank {failure[0]} cannot use {self.directory} for checkpoints: {failure[1]}.\n"
                    f"Give a directory that all hosts share, in which this user may write."
                )
            )

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, name: str, step: int, state: State, *, wait: bool) -> None:
        """Write a checkpoint, in the background unless `wait` (collective).

        Args:
            name: What its directory is to be called; those of later ones come later in the alphabet.
            state: What it holds; nobody may change it meanwhile.
        """
        self.wait()
        self._running = self._pool.submit(self._save, name, step, state)
        if wait or not self._in_background:
            self.wait()

    @property
    def has_failed(self) -> bool:
        """Whether the checkpoint that was being written has failed, as far as this rank knows; `wait` raises that."""
        running = self._running
        return running is not None and running.done() and running.exception() is not None

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: On every rank, if it could not be written.
        """
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def close(self) -> None:
        """Wait for the last checkpoint, and end the thread and the group (collective)."""
        self.wait()
        self._pool.shutdown()
        if self._lock is not None:
            self._lock.close()
        dist.destroy_process_group(self._group)

    def _save(self, name: str, step: int, state: State) -> None:
        path = self.directory / name
        aside = path.with_suffix(_ASIDE)
        failure = self._store(aside, state)
        if not failure and self._rank == 0:
            failure = self._publish(aside, path, step)
        told = [failure]
        dist.broadcast_object_list(told, src=0, group=self._group)
        if not told[0]:
            self.newest = path
            if self._rank == 0:
                self._remove_old()
            return
        if self._rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        last = f"The last complete one is {self.newest}." if self.newest else "There is no complete one yet."
        raise raised_on_all_ranks(
            CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.directory}: {told[0]}\n{last} "
                f"Make room there, and start the run again."
            )
        )

    def _store(self, aside: Path, state: State) -> str:
        """Write the content, and return why that failed; the same on all ranks."""
        try:
            writer = dcp.FileSystemWriter(aside, sync_files=True)
            dcp.save(state, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            rank, (why, _) = min(error.failures.items())
            return f"rank {rank}: {why}"
        return ""

    def _publish(self, aside: Path, path: Path, step: int) -> str:
        """Give the content its name and its mark, and return why that failed."""
        try:
            files.sync(aside)
            if path.exists():  # without a mark; it could not be removed
                path.rename(path.with_suffix(f".{uuid.uuid4().hex}"))
            aside.rename(path)
            files.sync(self.directory)
            self._mark(path, step)
        except OSError as error:
            return str(error)
        return ""

    def _remove_old(self) -> None:
        """Remove the checkpoints beyond those to keep, and what earlier removals left."""
        for mark in sorted(self.directory.glob(f"{_PREFIX}*/{_MARK}"))[: -self._keep]:
            with _warning_if_it_stays(mark):
                mark.unlink()  # first, so that a checkpoint that is partly removed is not used
        self._remove_unmarked()

    def _remove_unmarked(self) -> None:
        for path in self.directory.glob(_PREFIX + "*"):
            if not (path / _MARK).exists():
                with _warning_if_it_stays(path):
                    files.remove_tree(path)

    def _mark(self, path: Path, step: int) -> None:
        mark = {"step": step, "ranks": dist.get_world_size(), "torch": str(torch.__version__)}
        _write(path / _MARK, json.dumps(mark).encode())
        files.sync(path)

    # -- loading -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _contents(self) -> dict[str, Any]:
        """The description of the newest checkpoint (collective on first use).

        Raises:
            CheckpointError: On every rank, if a rank cannot read it.
        """
        assert self.newest is not None
        reader, contents = dcp.FileSystemReader(self.newest), {}
        # Not every torch can unpickle the metadata of a later one: torch 2.15 writes six properties of a tensor, and
        # torch 2.13 expects five. What is raised depends on the class.
        failure = rank_sync.first_failure(
            lambda: contents.update(reader.read_metadata().state_dict_metadata), Exception
        )
        if failure is not None:
            raise raised_on_all_ranks(CheckpointError(_unreadable(self.newest, *failure)))
        return contents

    def objects(self) -> dict[str, Any]:
        """Return the objects of the newest checkpoint by name (collective)."""
        names = [name for name in self._contents if name.startswith("object.")]
        state: State = dict.fromkeys(names, b"")
        self.load(state)
        return {name.removeprefix("object."): pickle.loads(state[name]) for name in names}

    def load(self, state: State) -> None:
        """Read of the newest checkpoint what a state has, into it (collective).

        Raises:
            CheckpointError: On every rank, if something is missing or cannot be read.
        """
        assert self.newest is not None
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.newest), process_group=self._group)
        except CheckpointException as error:
            rank, (why, _) = min(error.failures.items())
            raise raised_on_all_ranks(
                CheckpointError(
                    f"{self.newest} cannot be read: rank {rank}: {why}\n"
                    f"Is the model, or the optimizer, another one? Remove that directory to go on from the one before."
                )
            ) from error

    def parameters_with_state(self) -> set[str]:
        """Return the parameters of which the newest checkpoint has the optimizer's state; some never get a gradient."""
        prefix = "optimizer.state."
        places = [name.removeprefix(prefix).split(".") for name in self._contents if name.startswith(prefix)]
        # How deep a state is below its parameter is the optimizer's affair.
        return {".".join(place[:end]) for place in places for end in range(1, len(place))}

    def check_model(self, model: Mapping[str, Any]) -> None:
        """Refuse a model that is not the one of the newest checkpoint.

        Raises:
            CheckpointError: If a parameter or buffer is missing, or of another shape or dtype; it is named.
        """
        here = {name: (tuple(each.shape), each.dtype) for name, each in model.items() if isinstance(each, torch.Tensor)}
        there = {
            name.removeprefix("model."): (tuple(each.size), each.properties.dtype)
            for name, each in self._contents.items()
            if name.startswith("model.") and isinstance(each, TensorStorageMetadata)
        }
        if here == there:
            return
        first = next(name for name in {**here, **there} if here.get(name) != there.get(name))
        raise raised_on_all_ranks(
            CheckpointError(
                f"{self.directory} holds a run of another model: {first} is {_shown(there.get(first))} there, and "
                f"{_shown(here.get(first))} in this one.\n"
                f"Give this run a checkpoint_dir of its own, or the model that was trained there."
            )
        )


@contextlib.contextmanager
def opened(directory: str | os.PathLike[str], keep: int, device: torch.device) -> Iterator[Checkpoints]:
    """Open a directory of checkpoints for a block (collective at both ends)."""
    checkpoints = Checkpoints(directory, keep, device)
    try:
        yield checkpoints
    except BaseException as error:
        if is_of_all_ranks(error):
            checkpoints.close()
        raise
    checkpoints.close()


@contextlib.contextmanager
def _warning_if_it_stays(path: Path) -> Iterator[None]:
    """Turn a failure to remove a file or directory into a warning: it costs space, and the run can continue."""
    try:
        yield
    except OSError as error:
        message = f"cannot remove {path} yet: {error}. The next save tries again; the newer checkpoints are complete."
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def packed(objects: Mapping[str, Any]) -> State:
    """Return objects as a part of a state."""
    return {f"object.{name}": pickle.dumps(each) for name, each in objects.items()}


def _newest(directory: Path) -> Path | None:
    marks = sorted(directory.glob(f"{_PREFIX}*/{_MARK}"))
    return marks[-1].parent if marks else None


def _unreadable(path: Path, rank: int, why: str) -> str:
    """Return the message of a checkpoint whose description cannot be read."""
    mine, writer = str(torch.__version__), json.loads((path / _MARK).read_text()).get("torch")
    what = f"{path} cannot be read: rank {rank}: {why}."
    if mine == writer:
        return f"{what}\nRemove that directory to continue from the checkpoint before it."
    its, install = ("an unknown version of torch", "")
    if writer is not None:
        its, install = f"torch {writer}", f" (pip install torch=={writer.split('+')[0]})"
    return (
        f"{what}\nIt was written by {its}, and this is torch {mine}, which may not read it.\n"
        f"Continue the run with that version of torch{install}, or remove that directory to continue from the "
        f"checkpoint before it."
    )


def _shown(leaf: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "nothing" if leaf is None else f"{str(leaf[1]).removeprefix('torch.')}{list(leaf[0])}"


def _probe(token: Path, rank: int) -> None:
    """See whether rank 0's file is there, and whether this rank can write beside it."""
    if not mpi.poll(token.exists, _SEEN_SECONDS, longest_pause=0.1):
        raise OSError("it is not the directory that rank 0 sees")
    mine = token.with_suffix(f".{rank}")
    _write(mine, b"mpicomm")
    mine.unlink()


def _write(path: Path, content: bytes) -> None:
    files.write_whole(path, lambda file: file.write(content))


def _is_locked(file: TextIO | None) -> bool:
    """Lock a file against other processes, and tell whether that worked."""
    assert file is not None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # some file systems have no locks
    return True


def _nothing() -> None:
    pass
