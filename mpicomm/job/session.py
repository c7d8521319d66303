"""The job of this process: its World, and its state between `bootstrap()` and `shutdown()`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpicomm import mpi, torch_internals
from mpicomm.errors import MpicommError
from mpicomm.job.plan import JoinedJob
from mpicomm.job.start_request import StartRequest
from mpicomm.launch.detect import Launch
from mpicomm.settings import Settings
from mpicomm.topology import Topology
from mpicomm.watchdog import channel_setup, rank_failures
from mpicomm.watchdog.agent import Watchdog
from mpicomm.watchdog.rank_failures import RankFailures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

DUMPS = "mpicomm-dumps"
"""The default directory of the flight recorder's files."""


@dataclasses.dataclass(frozen=True)
class World(Topology):
    """The ranks, topology, device and backend of the job. Reading its attributes does not communicate.

    As a context manager it calls `shutdown()` at the end of the block, unless the block raises an exception.
    """

    device: torch.device
    """The device of this rank; if it is a GPU, it is the current device of the accelerator."""

    backend: str | None
    """The backend of the process group; None if `bootstrap` created no process group."""

    launcher: str
    """The launcher that started the ranks."""

    master_addr: str
    """The address at which the job's store listens."""

    master_port: int
    """The port at which the job's store listens."""

    comm: Intracomm | None = dataclasses.field(repr=False)
    """A private duplicate of the job's communicator, for use with mpi4py; None where MPI is not in use."""

    previous_rank: int | None = None
    """The rank of this process in the last world, or None if it was a spare; `rank` if this is the first world."""

    recoveries: int = 0
    """The number of times that the job has continued without ranks, after failures or `shrink_group`."""

    def __str__(self) -> str:
        text = describe_rank(self)
        if self.num_nodes > 1:
            text += f" (local rank {self.local_rank} of {self.local_size}, node {self.node_rank} of {self.num_nodes})"
        return f"{text}: {self.device}, {self.backend or 'no process group'}, started by {self.launcher}"

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:  # after an error the other ranks may be in other operations; the exception ends the job
            assert _current is not None
            _current.shutdown()


def describe_rank(world: World) -> str:
    """Return the rank and its host, for messages."""
    return f"rank {world.rank} of {world.size} on {world.hostname}"


@dataclasses.dataclass
class Session:
    """The state of the job in this process, which `shutdown` must undo."""

    request: StartRequest
    launch: Launch
    settings: Settings
    job: JoinedJob
    world: World
    """On a spare, its topology is that of all processes."""

    name: str
    """The name of the job, the same after each recovery."""

    shutdown: Callable[[], None]
    """`shutdown.shutdown`, for `World.__exit__`: that module imports this one, and imports must not form a cycle."""

    claim: Callable[[], bool]
    """Returns whether this rank is the first to report why the job fails."""

    failures: RankFailures | None = None
    """The failed ranks of this world; None if a failure aborts the job."""

    watch: Watchdog | None = None
    dumps: Path | None = None
    """The directory of the flight recorder's files."""

    environ: dict[str, str | None] = dataclasses.field(default_factory=dict)
    """The exported variables, with their values before `bootstrap`."""

    is_open: bool = True
    pid: int = dataclasses.field(default_factory=os.getpid)

    @property
    def communicators(self) -> list[Intracomm]:
        """The communicators of the ranks and of all processes, which are one without spares."""
        # COMM_NULL, one that the program has freed, is false.
        by_id = {id(comm): comm for comm in (self.job.rank_comm, self.job.process_comm)}
        return [comm for comm in by_id.values() if comm]

    def close(self, *, recovers: bool = False) -> None:
        """Undo what `session_setup.open_session` has set in this process, except the watchdog. Does not communicate.

        Args:
            recovers: Whether a next world follows. Until its session is open, operations on all threads continue to
                raise the error of this world's failed ranks.
        """
        if dist.is_initialized():
            if recovers:
                torch_internals.abort_groups()
            else:
                dist.destroy_process_group()
        for name, before in self.environ.items():
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        mpi.set_job_comm(None)
        if not recovers:
            rank_failures.set_current(None)

    def stop_watching(self) -> None:
        """Stop the watchdog, which reports hangs and failures also while the world ends: hence not in `close`."""
        channel_setup.stop_watchdog(self.watch)
        self.watch = None


_current: Session | None = None


def current() -> Session | None:
    """Return the last session of this process, open or not; None before the first one. Does not communicate."""
    return _current


def set_current(session: Session) -> None:
    """Set the session of this process."""
    global _current  # noqa: PLW0603  a process is in one job at a time, as in torch.distributed
    _current = session


def current_world() -> World:
    """Return the World that `bootstrap` returned. Does not communicate.

    Raises:
        MpicommError: If `bootstrap` has not been called, or `shutdown` has been called since.
    """
    if _current is None or not _current.is_open:
        raise MpicommError("mpicomm is not initialized.\nCall mpicomm.bootstrap() first.")
    return _current.world


def recoveries() -> int:
    """Return the number of times that the job has continued without ranks; 0 without `bootstrap`."""
    return 0 if _current is None else _current.world.recoveries
