"""The job of this process between `bootstrap()` and `shutdown()`: its World, its state, and how they begin and end."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.backend import backward_errors, compatibility, gpus, groups, plugin, torch_internals
from mpicomm.errors import MpicommError, RankFailedError
from mpicomm.launch.detect import Launch
from mpicomm.settings import Settings
from mpicomm.startup import backend_choice, devices, interfaces, rendezvous, survivors
from mpicomm.startup.start_request import JoinedJob, StartRequest
from mpicomm.startup.survivors import Place
from mpicomm.startup.topology import Topology
from mpicomm.watchdog import agent, channel_setup, exit_hooks, parent_link, rank_failures
from mpicomm.watchdog.agent import Watchdog
from mpicomm.watchdog.channel import Channel
from mpicomm.watchdog.rank_failures import RankFailures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

DUMPS = "mpicomm-dumps"
"""The default directory of the flight recorder's files."""

_LEAVE_PAUSE = 0.01  # seconds between two polls of messages in flight, while other ranks still run
_SHORTEST_LIMIT = 10.0  # seconds; processes may notice a failure late on a busy machine
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_ACCELERATE_USE_CPU = "ACCELERATE_USE_CPU"

# torch's names of backends that have another name in bootstrap.
_TORCH_NAMES = {backend_choice.MPI: plugin.NAME, backend_choice.MPI_WITH_NCCL: plugin.NAME_WITH_NCCL}


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
        place = _place_of(self)
        if self.num_nodes > 1:
            place += f" (local rank {self.local_rank} of {self.local_size}, node {self.node_rank} of {self.num_nodes})"
        return f"{place}: {self.device}, {self.backend or 'no process group'}, started by {self.launcher}"

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:  # after an error the other ranks may be in other operations; the exception ends the job
            shutdown()


def _place_of(world: World) -> str:
    return f"rank {world.rank} of {world.size} on {world.hostname}"


@dataclasses.dataclass
class Session:
    """The state that `shutdown` must undo."""

    request: StartRequest
    launch: Launch
    settings: Settings
    job: JoinedJob
    world: World
    """On a spare, its topology is that of all processes."""

    claim: Callable[[], bool]
    """Returns whether this rank is the first to report why the job fails."""

    name: str
    """The name of the job, the same after each recovery."""

    place: Place
    """The place of this process in the world."""

    failures: RankFailures | None = None
    """The failed ranks of this world; None if a failure aborts the job."""

    watch: Watchdog | None = None
    dumps: Path | None = None
    """The directory of the flight recorder's files."""

    environ: dict[str, str | None] = dataclasses.field(default_factory=dict)
    """The exported variables, with their values before `bootstrap`."""

    is_open: bool = True
    pid: int = dataclasses.field(default_factory=os.getpid)


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


# -- the beginning -----------------------------------------------------------------------------------------------------


def create(
    request: StartRequest, launch: Launch, settings: Settings, job: JoinedJob, before: Session | None = None
) -> Session:
    """Return the session of a job that this process has joined.

    Args:
        before: The session of the last world, if ranks have failed in it.
    """
    recoveries = 0 if before is None else before.world.recoveries + 1
    previous_rank = job.where.rank if before is None else before.place.rank
    world = World(
        **dataclasses.asdict(job.where),
        device=job.device,
        backend=job.backend,
        launcher=launch.title,
        master_addr=job.address,
        master_port=job.port,
        comm=job.comm,
        previous_rank=previous_rank,
        recoveries=recoveries,
    )
    name = f"{job.started}-{job.port}" if before is None else before.name
    place = Place(None if job.is_spare else world.rank, job.size)
    session = Session(request, launch, settings, job, world, exit_hooks.claim_in(job.store, world.rank), name, place)
    if job.comm is not None or job.is_spare:
        if settings.dump_dir != "none":
            session.dumps = Path(settings.dump_dir or DUMPS, name).absolute()
        if request.recovers and job.everyone is not None:
            session.failures = RankFailures(job.base, job.everyone.hosts, place.size)
    return session


def open_session(session: Session) -> None:
    """Start the watchdog, export the variables and initialise the process group (collective)."""
    job, settings = session.job, session.settings
    # 1. start the watchdog, if MPI has connected the ranks
    rank_failures.set_current(session.failures)
    if session.failures is not None:
        backward_errors.watch()
    if job.base is not None and job.everyone is not None:
        for comm in _communicators(job):
            mpi.tracked(comm)
        mpi.set_job_comm(job.comm)
        channel = Channel(job.everyone.rank, job.channel_token, settings.seconds_to_lose_host)
        limits = agent.Limits(
            settings.seconds_to_report,
            session.dumps,
            ends_local_processes=session.launch.step is not None,
            job=session.name,
            spares=job.everyone.size - session.place.size,
            recovers=session.failures is not None,
            gpu=devices.visible_gpus()[job.device.index] if job.device.type == "cuda" else "",
        )
        prepare = functools.partial(gpus.prepare_thread_for_events, job.device)
        session.watch = channel_setup.start_watchdog(
            job.base, job.everyone, job.address, channel, limits, session.claim, prepare, settings.parent
        )
    # 2. export the variables and initialise the process group
    if not job.is_spare:
        _export(session)
        _make_group(session)


def _communicators(job: JoinedJob) -> list[Intracomm]:
    """Return the communicators of the ranks and of all processes, which are one without spares."""
    # COMM_NULL, one that the program has freed, is false.
    return [comm for comm in {id(each): each for each in (job.comm, job.base)}.values() if comm]


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


# -- the end -----------------------------------------------------------------------------------------------------------


def shutdown() -> None:
    """Destroy the process groups, free the communicator and restore the environment (collective).

    Runs automatically at exit. MPI is finalised at exit, not here, so that `bootstrap` may be called again. While an
    exception is being handled, the call has no effect.
    """
    session = _current
    if session is None or not session.is_open or session.pid != os.getpid():
        return
    if isinstance(sys.exc_info()[1], Exception):
        return  # in a `finally`: the other ranks may be elsewhere; the exception ends the job, or this runs at exit
    # 1. wait for all ranks
    session.is_open = False
    atexit.unregister(shutdown_at_exit)
    if session.watch is not None and not session.job.is_spare:
        try:
            _leave(session.watch)
        except RankFailedError:
            _leave_without_failed(session)
    # 2. release torch's and MPI's resources
    if dist.is_initialized():
        dist.destroy_process_group()
    torch_internals.let_gloo_finish()
    restore_environ(session)
    mpi.set_job_comm(None)
    rank_failures.set_current(None)
    if mpi.is_usable() and not mpi.is_abandoned():
        for comm in _communicators(session.job):
            mpi.free(comm)
    # 3. stop the watchdog
    stop_watching(session)
    exit_hooks.disarm()
    # The store stays open until the process exits or calls bootstrap again: other ranks may still use it.


def restore_environ(session: Session) -> None:
    """Restore the variables that other code reads to their values before `bootstrap`."""
    for name, before in session.environ.items():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _leave(watch: Watchdog) -> None:
    """Wait until every rank is ready to exit, so that no rank waits for one that has exited (collective)."""
    groups.drain()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # if MPI cannot be finalized, a launcher may end this rank as soon as another exits
    watch.leave(exit_hooks.exit_status(), is_stuck=groups.is_stuck(), sends=groups.are_sending())
    if watch.wait_for_all_to_leave(groups.advance, _LEAVE_PAUSE):
        mpi.abandon()
    watch.take_down()


def _leave_without_failed(session: Session) -> None:
    """End this rank's part in a world in which another rank has failed: it has finished, so it does not continue."""
    assert session.job.base is not None
    mpi.revoke_all()
    end_world(session)
    with time_limit(session, "shutdown()"):
        comm, found = survivors.regroup(session.job.base, session.place, is_finished=True)
    if comm.rank == 0 and not found.size and session.settings.parent:
        # The last rank 0 may have failed. If other ranks continue, rank 0 of the next world reports their end.
        with contextlib.suppress(OSError, ValueError):
            parent_link.report_end(parent_link.Parent.parse(session.settings.parent), session.name)


def end_world(session: Session) -> None:
    """End the groups and the variables of a world without communication; all communicators are revoked."""
    assert session.failures is not None
    groups.end_all(session.failures.error(), "its world has ended, since ranks have failed")
    if dist.is_initialized():
        dist.destroy_process_group()
    restore_environ(session)
    mpi.set_job_comm(None)


def stop_watching(session: Session) -> None:
    """Stop the watchdog of a session."""
    channel_setup.stop_watchdog(session.watch)
    session.watch = None


@contextlib.contextmanager
def time_limit(session: Session, what: str) -> Iterator[None]:
    """Abort the job at the timeout of operations: MPI waits without a limit for a process that does not respond.

    Args:
        what: The function that the user has called.
    """
    world, seconds = session.world, max(session.request.limit.total_seconds(), _SHORTEST_LIMIT)

    def end() -> None:
        exit_hooks.print_stderr(
            f"[mpicomm] {_place_of(world)}: {what} timed out after {seconds:g} s: "
            f"a rank that has not failed does not take part; aborting the job\n"
            f"Find the rank that is stopped or busy, or increase the timeout of bootstrap().\n"
        )
        abort(1, session.job.base)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shutdown_at_exit() -> None:
    """Call `shutdown` when the process exits, and print its error, which does not change the exit status."""
    try:
        shutdown()
    except Exception:  # noqa: BLE001  an error of any kind is printed
        assert _current is not None
        place = _place_of(_current.world)
        exit_hooks.print_stderr(f"[mpicomm] {place}: shutdown() failed at exit\n{traceback.format_exc()}")


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
