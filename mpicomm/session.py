"""The job of this process: its World, its state between `bootstrap()` and `shutdown()`, and how it is assembled."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.backend import compatibility, future_callbacks, gpus, plugin, torch_internals
from mpicomm.errors import MpicommError
from mpicomm.launch.detect import Launch
from mpicomm.settings import Settings
from mpicomm.startup import devices, interfaces, plan, rendezvous
from mpicomm.startup.plan import JoinedJob
from mpicomm.startup.start_request import StartRequest
from mpicomm.startup.topology import Topology
from mpicomm.watchdog import agent, channel_setup, exit_hooks, rank_failures
from mpicomm.watchdog.agent import Watchdog
from mpicomm.watchdog.channel import Channel
from mpicomm.watchdog.rank_failures import RankFailures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

DUMPS = "mpicomm-dumps"
"""The default directory of the flight recorder's files."""

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_ACCELERATE_USE_CPU = "ACCELERATE_USE_CPU"

# torch's names of backends that have another name in bootstrap.
_TORCH_NAMES = {plan.MPI: plugin.NAME, plan.MPI_WITH_NCCL: plugin.NAME_WITH_NCCL}


@dataclasses.dataclass(frozen=True)
class World(Topology):
    """The ranks, topology, device and backend of the job. Reading its attributes does not communicate.

    As a context manager it calls `shutdown()` at the end of the block, unless the block raises an exception.
    """

    device: torch.device
    """The device of this rank; if it is a GPU, it is the current CUDA device."""

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
    """The rank of this process before the last recovery, or None if it was a spare; `rank` if there was no recovery."""

    recoveries: int = 0
    """The number of times that the job has continued after failures of ranks."""

    def __str__(self) -> str:
        place = place_of(self)
        if self.num_nodes > 1:
            place += f" (local rank {self.local_rank} of {self.local_size}, node {self.node_rank} of {self.num_nodes})"
        return f"{place}: {self.device}, {self.backend or 'no process group'}, started by {self.launcher}"

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:  # after an error the other ranks may be in other operations; the exception ends the job
            assert _current is not None
            _current.shutdown()


def place_of(world: World) -> str:
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
    """Ends the job (collective)."""

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
        return [comm for comm in {id(comm): comm for comm in (self.job.comm, self.job.processes)}.values() if comm]

    def restore_environ(self) -> None:
        """Restore the variables that other code reads to their values before `bootstrap`."""
        for name, before in self.environ.items():
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before

    def stop_watching(self) -> None:
        """Stop the watchdog."""
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
    """Return the number of times that the job has continued after failures of ranks; 0 without `bootstrap`."""
    return 0 if _current is None else _current.world.recoveries


# -- assembly ----------------------------------------------------------------------------------------------------------


def create(
    request: StartRequest,
    launch: Launch,
    settings: Settings,
    job: JoinedJob,
    shutdown: Callable[[], None],
    last: Session | None = None,
) -> Session:
    """Return the session of a job that this process has joined.

    Args:
        last: The session of the last world, if ranks have failed in it.
    """
    previous_rank: int | None = job.topology.rank
    name, recoveries = f"{job.plan.started}-{job.port}", 0
    if last is not None:
        previous_rank = None if last.job.is_spare else last.world.rank
        name, recoveries = last.name, last.world.recoveries + 1
    world = World(
        **vars(job.topology),
        device=job.device,
        backend=job.plan.backend,
        launcher=launch.title,
        master_addr=job.address,
        master_port=job.port,
        comm=job.comm,
        previous_rank=previous_rank,
        recoveries=recoveries,
    )
    claim = exit_hooks.claim_in(job.store, world.rank)
    session = Session(request, launch, settings, job, world, name, shutdown, claim)
    if job.processes is not None:
        if settings.dump_dir != "none":
            session.dumps = Path(settings.dump_dir or DUMPS, name).absolute()
        if request.recovers:
            session.failures = RankFailures(job.processes, job.plan.hosts, job.plan.size)
    return session


def open_session(session: Session) -> None:
    """Start the watchdog, export the variables and initialise the process group (collective)."""
    job, settings = session.job, session.settings
    if session.request.abort_on_error:  # the program may free the communicator that it passed
        arm_abort(session.world.rank, session.world.size, job.processes)
    # 1. start the watchdog, if MPI has connected the ranks
    rank_failures.set_current(session.failures)
    if session.failures is not None:
        future_callbacks.watch_backward()
    if job.processes is not None:
        for comm in session.communicators:
            mpi.tracked(comm)
        mpi.set_job_comm(job.comm)
        channel = Channel(job.everyone.rank, job.plan.channel_token, settings.host_timeout)
        limits = agent.Limits(
            settings.hang_seconds,
            session.dumps,
            ends_local_processes=session.launch.step is not None,
            job=session.name,
            spares=job.processes.size - job.plan.size,
            recovers=session.failures is not None,
            gpu=devices.visible_gpus()[job.device.index] if job.device.type == "cuda" else "",
        )
        prepare = functools.partial(gpus.prepare_thread_for_events, job.device)
        session.watch = channel_setup.start_watchdog(
            job.processes, job.everyone, job.address, channel, limits, session.claim, prepare, settings.parent
        )
    # 2. export the variables and initialise the process group
    if not job.is_spare:
        _export(session)
        _make_group(session)


def _export(session: Session) -> None:
    """Set the variables that other code reads, such as `init_process_group("env://")`."""
    world = session.world
    values: dict[str, object] = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": world.master_port,
        rendezvous.STORE_OF_RANK: f"{world.master_addr} {world.master_port}",
    }
    # A child process of rank 0 that calls `init_process_group("env://")` cannot bind the port of this store. With 1,
    # torch's C++ TCPStore then connects to this store, if MASTER_PORT is unchanged. With True, torch's Python code
    # makes every rank a client, even if the program has set its own MASTER_PORT. torchrun sets True for its own store.
    if not dist.is_torchelastic_launched():
        values["TORCHELASTIC_USE_AGENT_STORE"] = 1
    # By default Gloo uses the address to which the host's own name resolves, which may be 127.0.1.1.
    interface = interfaces.towards(world.master_addr) if world.num_nodes > 1 else None
    if interface and not os.environ.get(_GLOO_INTERFACE):
        values[_GLOO_INTERFACE] = interface
    # Without it, `accelerate.Accelerator()` on CPUs ignores RANK and WORLD_SIZE: each rank would train alone.
    if world.device.type == "cpu" and not os.environ.get(_ACCELERATE_USE_CPU):
        values[_ACCELERATE_USE_CPU] = "true"
    for name, value in values.items():
        session.environ[name] = os.environ.get(name)
        os.environ[name] = str(value)


def _make_group(session: Session) -> None:
    plugin.register()
    world, hook = session.world, sys.excepthook
    if world.backend is None:
        return
    torch_internals.restart_group_names()
    with compatibility.explained():
        dist.init_process_group(
            _TORCH_NAMES.get(world.backend, world.backend),
            store=dist.PrefixStore("mpicomm", session.job.store),
            rank=world.rank,
            world_size=world.size,
            timeout=session.request.limit,
        )
    if session.request.abort_on_error:
        sys.excepthook = hook  # torch has replaced it by one that prints the rank, which this one prints, too


# -- hooks -------------------------------------------------------------------------------------------------------------


def arm_abort(rank: int, size: int, comm: Intracomm | None = None) -> None:
    """Let the exit hooks abort the job, by MPI if it has connected the ranks."""
    end = functools.partial(abort, comm=comm)
    exit_hooks.arm(rank, size, socket.gethostname(), end, _is_first_to_fail, _is_formed)


def abort(status: int, comm: Intracomm | None) -> None:
    """Abort the job, by MPI if it has connected the ranks; does not return."""
    if comm is not None:
        with contextlib.suppress(Exception):
            comm.Abort(status)
    os._exit(status)


def _is_formed() -> bool:
    return _current is not None and (_current.is_open or _current.watch is not None)


def _is_first_to_fail() -> bool:
    if _current is None or not _is_formed():
        return True
    if _current.watch is not None:
        _current.watch.fail()
    return _current.claim()


def report_exit_at_once(status: int) -> None:
    """Report a call of `os._exit` before the process ends; if the others continue without it, kill it instead."""
    if (watch := agent.current()) is None:
        return
    watch.exit_at_once(status)
    if rank_failures.current() is not None and not watch.has_seen_all_exit():
        # The other ranks continue. mpirun reports a signal to them as a failure; a status other than 0 makes it abort.
        os.kill(os.getpid(), signal.SIGKILL)
