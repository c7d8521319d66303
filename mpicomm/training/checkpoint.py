"""Checkpoints of a run. A save is atomic: write to a temporary directory, sync, rename, set the marker COMPLETE.

A run resumes from its marked checkpoint with the most steps. A run that is killed while saving leaves a directory with
the marker INCOMPLETE, which the next start removes. The content is in the format of torch.distributed.checkpoint, so
that another number of ranks can read it. Objects with tensors are packed: as bytes, and a list of the tensors.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import itertools
import json
import os
import pickle
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mpicomm import agreement, mpi
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.collective_ops import collectives
from mpicomm.devices import accelerator
from mpicomm.errors import CheckpointError, RankFailedError, raised_on_all_ranks
from mpicomm.training import run_directory
from mpicomm.training.preemption import is_of_all_ranks
from mpicomm.training.run_directory import RunDirectory
from mpicomm.watchdog import error_output

_LAST_SAVE_SECONDS = 60.0  # that a rank whose exception ends the job waits for the save in progress
_VISIBLE_SECONDS = 10.0  # wait limit for a new file to become visible on all hosts

State = dict[str, Any]
"""`model` and `optimizer` in the form that torch.distributed.checkpoint saves, and pickled objects by name."""


class Checkpoints:
    """The checkpoints in a directory on a file system that all ranks share."""

    def __init__(self, directory: str | os.PathLike[str], keep: int, device: torch.device) -> None:
        """Open the directory, check that all ranks can write to it, and remove incomplete checkpoints (collective).

        Args:
            directory: The directory, which is created if necessary.
            keep: The number of checkpoints to keep.
            device: The device of this rank.

        Raises:
            CheckpointError: On every rank, if a rank cannot write to the directory, another job uses it, or it has
                checkpoints, but none of this run.
        """
        # 1. create the saving thread
        self.directory = Path(directory).absolute()
        self._rank = dist.get_rank()
        self._uses_mpicomm = isinstance(dist.group.WORLD, MPIProcessGroup)
        self._in_background = mpi.has_thread_multiple() if self._uses_mpicomm else dist.is_gloo_available()
        # The current GPU of a new thread is the first one, so the thread selects its own.
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "mpicomm-checkpoint", accelerator.select, (device,))
        self._running: concurrent.futures.Future[None] | None = None
        # 2. lock the directory, and agree on the newest checkpoint
        self._run_directory: RunDirectory | None = None  # on rank 0
        newest, error = collectives.broadcast_object(self._open(keep) if self._rank == 0 else None, src=0)
        if error is not None:
            raise raised_on_all_ranks(error)
        self.newest: Path | None = newest
        """The newest complete checkpoint, or None."""
        # 3. check that all ranks can write, and create the group of the saving thread
        try:
            self._probe_directory()
            self._group = self._make_group()
        except BaseException:
            self._release()
            raise

    def _make_group(self) -> dist.ProcessGroup:
        """Create the group of the saving thread, separate from the group that training uses (collective).

        With NCCL as the backend of training, it uses Gloo if available: operations of two NCCL groups must start in the
        same order on all ranks, which two threads cannot guarantee:
        https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
        """
        return dist.new_group(backend="gloo" if dist.is_gloo_available() and not self._uses_mpicomm else None)

    def _open(self, keep: int) -> tuple[Path | None, CheckpointError | None]:
        """Open the directory on rank 0, and return the newest checkpoint, and the error for all ranks, if any."""
        try:
            self._run_directory = RunDirectory(self.directory, keep)
            return self._run_directory.newest(), None
        except (CheckpointError, OSError) as error:
            self._release()
            return None, error if isinstance(error, CheckpointError) else self._unusable(0, str(error))

    def _probe_directory(self) -> None:
        """Check that each rank sees a file of rank 0 in the directory, and can write to it (collective)."""
        token = self.directory / f".{collectives.broadcast_object(uuid.uuid4().hex, src=0)}"

        def create() -> None:
            if self._rank == 0:
                run_directory.write(token, b"")

        for act in (create, functools.partial(_check_access, token, self._rank)):
            agreement.run_on_all_ranks(collectives.all_gather_object, act, OSError, self._unusable)
        if self._rank == 0:
            token.unlink(missing_ok=True)

    def _unusable(self, rank: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"rank {rank} cannot use {self.directory} for checkpoints: {why}.\n"
            f"Pass a checkpoint_dir on a file system that all hosts share, to which this user can write."
        )

    def _release(self) -> None:
        if self._run_directory is not None:
            self._run_directory.close()

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, name: str, step: int, state: State, *, kept: Collection[str], wait: bool) -> None:
        """Write a checkpoint, in the background unless `wait` is set (collective).

        Args:
            name: The name of its directory. Names of later checkpoints must sort later alphabetically.
            step: The step of the run, for the marker and for messages.
            state: The content, which must not change until the checkpoint is complete.
            kept: The names of checkpoints that this save does not remove.
            wait: Return after the checkpoint is complete. Implied where the backend cannot serve a second thread.

        Raises:
            CheckpointError: On every rank, if the previous checkpoint, or with `wait` this one, cannot be written.
        """
        self.wait()
        self._running = self._pool.submit(self._save, name, step, state, kept)
        if wait or not self._in_background:
            self.wait()

    @property
    def is_saving(self) -> bool:
        """Whether this rank is writing a checkpoint in the background."""
        return self._running is not None and not self._running.done()

    @property
    def has_failed(self) -> bool:
        """Whether the save in progress has failed on this rank; `wait` raises the error."""
        running = self._running
        return running is not None and running.done() and running.exception() is not None

    def wait(self) -> None:
        """Wait until the save in progress, if any, is complete.

        Raises:
            CheckpointError: On every rank, if the checkpoint cannot be written.
        """
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def abandon(self, error: BaseException) -> None:
        """Release the lock after an error on this rank, which aborts the job.

        The other ranks can still complete a save in progress, so this rank waits for it, except on an interrupt. After
        another rank has failed, the save fails too; the wait is for the file that this rank is writing.
        """
        if isinstance(error, Exception) and self._running is not None and not self._running.done():
            if not isinstance(error, RankFailedError):
                error_output.print_stderr(
                    f"[mpicomm] rank {self._rank}: {type(error).__name__}; waiting up to {_LAST_SAVE_SECONDS:g} s for "
                    f"the checkpoint that is being written\n"
                )
            concurrent.futures.wait([self._running], _LAST_SAVE_SECONDS)
        self._release()

    def close(self) -> None:
        """Wait for the last save, then release the saving thread, the lock and the group (collective)."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            self._release()
        dist.destroy_process_group(self._group)

    def _save(self, name: str, step: int, state: State, kept: Collection[str]) -> None:
        # Runs on the saving thread.
        # 1. rank 0 creates a directory, all ranks write the content, then rank 0 renames and marks it
        writers = {"ranks": dist.get_world_size(), "torch": str(torch.__version__)}
        temporary, failure = self._run_on_rank_0(lambda directory: directory.begin(name, step, **writers))
        failure = failure or self._store(temporary, state)
        if not failure:
            path, failure = self._run_on_rank_0(lambda directory: directory.publish(temporary, name))
        # 2. remove old checkpoints, or the content of this one
        if not failure:
            self.newest = path
            if self._run_directory is not None:
                self._run_directory.remove_old(kept)
            return
        if self._run_directory is not None:
            self._run_directory.remove_incomplete()
        last = f"The last complete checkpoint is {self.newest}." if self.newest else "No checkpoint is complete yet."
        raise raised_on_all_ranks(
            CheckpointError(
                f"cannot write the checkpoint of step {step} to {self.directory}: {failure}\n{last}\n"
                f"Free space in this directory or correct its permissions, then start the run again."
            )
        )

    def _store(self, temporary: Path, state: State) -> str:
        """Write the content, and return the reason of a failure or "", the same on all ranks (collective)."""
        try:
            writer = dcp.FileSystemWriter(temporary, sync_files=True)
            dcp.save(state, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            rank, (why, _) = min(error.failures.items())
            reason = f"rank {rank}: {why}"
            # Free the buffers of the failed write: in a reference cycle they crash Python 3.12.0 and 3.12.1
            # (python/cpython#111211).
            for failed in (error, *[failure for failure, _ in error.failures.values()]):
                traceback.clear_frames(failed.__traceback__)
            return reason
        return ""

    def _run_on_rank_0(self, act: Callable[[RunDirectory], Path]) -> tuple[Path, str]:
        """Return the result of a function on rank 0, and the reason of a failure or "" (collective)."""
        outcome: list[Any] = [self.directory, ""]
        if self._run_directory is not None:
            try:
                outcome[0] = act(self._run_directory)
            except OSError as error:
                outcome[1] = str(error)
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        return outcome[0], outcome[1]

    # -- loading -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _metadata(self) -> dict[str, Any]:
        """The metadata of the newest checkpoint (collective on first use).

        Raises:
            CheckpointError: On every rank, if a rank cannot read it.
        """
        assert self.newest is not None
        reader, metadata = dcp.FileSystemReader(self.newest), {}
        # A torch version may be unable to unpickle the metadata of a later one: torch 2.15 writes six properties of a
        # tensor, and torch 2.13 expects five. The type of the exception depends on the class that fails.
        agreement.run_on_all_ranks(
            collectives.all_gather_object,
            lambda: metadata.update(reader.read_metadata().state_dict_metadata),
            Exception,
            functools.partial(_unreadable, self.newest),
        )
        return metadata

    def objects(self) -> dict[str, Any]:
        """Return the objects of the newest checkpoint by name (collective)."""
        names = [name for name in self._metadata if name.startswith("object.")]
        state: State = dict.fromkeys(names, b"")
        self.load(state)
        return {name.removeprefix("object."): pickle.loads(state[name]) for name in names}

    def load(self, state: State) -> None:
        """Load the entries of a state from the newest checkpoint, in place (collective).

        Raises:
            CheckpointError: On every rank, if an entry is missing or cannot be read.
        """
        assert self.newest is not None
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.newest), process_group=self._group)
        except CheckpointException as error:
            rank, (why, _) = min(error.failures.items())
            raise raised_on_all_ranks(
                CheckpointError(
                    f"cannot read the checkpoint {self.newest}: rank {rank}: {why}\n"
                    f"Check that the model and the optimizer are those of this run, or remove that directory to resume "
                    f"from the previous checkpoint."
                )
            ) from error

    def empty_tensors(self, prefix: str, templates: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors into which to load the tensors `<prefix>.0`, `<prefix>.1` and so on (collective on first use).

        Args:
            prefix: The prefix of their names.
            templates: Tensors whose sharding and device to use, where shape and dtype fit. The others are whole tensors
                on the CPU.
        """
        tensors: dict[str, torch.Tensor] = {}
        for number in itertools.count():
            stored = self._metadata.get(f"{prefix}.{number}")
            if not isinstance(stored, TensorStorageMetadata):
                return tensors
            template = templates[number] if number < len(templates) else None
            if template is None or (template.shape, template.dtype) != (stored.size, stored.properties.dtype):
                template = torch.empty(stored.size, dtype=stored.properties.dtype)
            tensors[str(number)] = torch.empty_like(template)
        return tensors

    @property
    def has_training_weights(self) -> bool:
        """Whether the model in the newest checkpoint has the weights of evaluations (collective on first use)."""
        return any(name.startswith("training.") for name in self._metadata)

    def parameters_with_state(self) -> set[str]:
        """Return the names of the parameters with optimizer state in the newest checkpoint (collective on first use).

        A parameter that never had a gradient has none. The result also contains prefixes of these names.
        """
        prefix = "optimizer.state."
        paths = [name.removeprefix(prefix).split(".") for name in self._metadata if name.startswith(prefix)]
        # The depth of a state below the name of its parameter depends on the optimizer, so take every prefix.
        return {".".join(path[:end]) for path in paths for end in range(1, len(path))}

    def check_model(self, model: Mapping[str, Any]) -> None:
        """Check that a model matches the newest checkpoint.

        Raises:
            CheckpointError: On every rank, if a parameter or buffer is missing or of another shape or dtype. The
                message names the first one.
        """
        own = {
            name: (tuple(tensor.shape), tensor.dtype)
            for name, tensor in model.items()
            if isinstance(tensor, torch.Tensor)
        }
        stored = {
            name.removeprefix("model."): (tuple(tensor.size), tensor.properties.dtype)
            for name, tensor in self._metadata.items()
            if name.startswith("model.") and isinstance(tensor, TensorStorageMetadata)
        }
        if own == stored:
            return
        first = next(name for name in {**own, **stored} if own.get(name) != stored.get(name))
        raise raised_on_all_ranks(
            CheckpointError(
                f"the checkpoint in {self.directory} is of another model: expected {first} to be "
                f"{_describe(stored.get(first))}, got {_describe(own.get(first))}.\n"
                f"Pass another checkpoint_dir, or the model of the checkpoint."
            )
        )


@contextlib.contextmanager
def opened(directory: str | os.PathLike[str], keep: int, device: torch.device) -> Iterator[Checkpoints]:
    """Open a directory of checkpoints for a block (collective on entry and on exit)."""
    checkpoints = Checkpoints(directory, keep, device)
    try:
        yield checkpoints
    except BaseException as error:
        if is_of_all_ranks(error):
            checkpoints.close()
        else:
            checkpoints.abandon(error)
        raise
    checkpoints.close()


def pickled(objects: Mapping[str, Any]) -> State:
    """Return objects in the form in which a state contains them: pickled, under `object.<name>`."""
    return {f"object.{name}": pickle.dumps(content) for name, content in objects.items()}


def _unreadable(path: Path, rank: int, why: str) -> CheckpointError:
    """Return the error for a checkpoint whose metadata cannot be read."""
    own, writer = str(torch.__version__), json.loads((path / run_directory.COMPLETE).read_text()).get("torch")
    message = f"cannot read the checkpoint {path}: rank {rank}: {why}."
    if own == writer:
        return CheckpointError(f"{message}\nRemove that directory to resume from the previous checkpoint.")
    version = "an unknown version of torch" if writer is None else f"torch {writer}"
    install = "" if writer is None else f" (pip install torch=={writer.split('+')[0]})"
    return CheckpointError(
        f"{message}\nThe checkpoint was written by {version}, which torch {own} may be unable to read.\n"
        f"Resume the run with that version of torch{install}, or remove that directory to resume from the previous "
        f"checkpoint."
    )


def _describe(leaf: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if leaf is None else f"{str(leaf[1]).removeprefix('torch.')}{list(leaf[0])}"


def _check_access(token: Path, rank: int) -> None:
    """Check that this rank sees the file of rank 0, and can write to the same directory."""
    if not mpi.poll(token.exists, _VISIBLE_SECONDS, longest_pause=0.1):
        raise OSError("a file that rank 0 created in it is not visible on this rank")
    path = token.with_suffix(f".{rank}")
    run_directory.write(path, b"mpicomm")
    path.unlink()


# -- objects that contain tensors --------------------------------------------------------------------------------------


def pack(content: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return an object without its tensors as bytes, and the tensors, which share memory with the object."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(content)
    return file.getvalue(), pickler.tensors


def unpack(packed: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the object that `pack` took apart, with these tensors."""
    return _Unpickler(io.BytesIO(packed), tensors).load()


class _Pickler(pickle.Pickler):
    """Pickles the position of a tensor in `tensors` in place of the tensor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, thing: Any) -> int | None:
        """Return the position of a tensor; None for other objects."""
        if not isinstance(thing, torch.Tensor):
            return None
        self.tensors.append(thing.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, position: int) -> torch.Tensor:
        """Return the tensor at a position."""
        return self._tensors[position]
