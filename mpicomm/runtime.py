"""`bootstrap()` forms one job of N processes; `recover()` continues it without failed ranks; `shutdown()` ends it.

The steps of a bootstrap: read the launcher's variables, initialise MPI, wait for all ranks, agree on the plan of the
job, open the store, start the watchdog, initialise the process group. An error before the process group is initialised
is raised with the same message on every rank that MPI has connected.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import functools
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.arguments import PATH
from mpicomm.backend import compatibility, gpus, groups, plugin, torch_internals
from mpicomm.errors import MpicommError, RankFailedError
from mpicomm.launch import detect
from mpicomm.launch.detect import Launch
from mpicomm.settings import Settings
from mpicomm.startup import backend_choice, environ_job, interfaces, mpi_job, survivors
from mpicomm.startup.start_request import JoinedJob, StartRequest
from mpicomm.startup.survivors import NextWorld, Place
from mpicomm.startup.topology import Topology
from mpicomm.watchdog import (
    agent,
    channel_setup,
    dump,
    exit_hooks,
    first_report,
    parent_link,
    rank_failures,
)
from mpicomm.watchdog.agent import Watchdog
from mpicomm.watchdog.channel import Channel
from mpicomm.watchdog.rank_failures import RankFailures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_SPARE_SECONDS = 0.2  # between two checks of a spare whether all ranks have exited
_ABORT_SECONDS = 10.0  # for MPI_Abort on another rank to end this process
_LEAVE_PAUSE = 0.01  # seconds between two polls of messages in flight, while other ranks still run
_DUMPS = "mpicomm-dumps"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

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
        place = f"rank {self.rank} of {self.size} on {self.hostname}"
        if self.num_nodes > 1:
            place += f" (local rank {self.local_rank} of {self.local_size}, node {self.node_rank} of {self.num_nodes})"
        return f"{place}: {self.device}, {self.backend or 'no process group'}, started by {self.launcher}"

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:  # after an error the other ranks may be in other operations; the exception ends the job
            shutdown()


@dataclasses.dataclass
class _Session:
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


_session: _Session | None = None


def bootstrap(
    backend: str | None = "auto",
    *,
    timeout: float | datetime.timedelta | None = None,
    comm: Intracomm | None = None,
    device: str | int | torch.device | None = None,
    abort_on_error: bool = True,
    on_failure: str = "abort",
    min_ranks: int = 1,
) -> World:
    """Form one job of the processes that srun, mpirun or torchrun started (collective).

    Afterwards `torch.distributed` is initialised, RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT are set, and this rank's GPU, if any, is the current device. A second call returns the same World.

    Args:
        backend: "auto" (MPI, with NCCL for GPU tensors if every rank has its own GPU; Gloo and NCCL under torchrun),
            "mpi", "nccl", "gloo", "cpu:mpi,cuda:nccl", "cpu:gloo,cuda:nccl", or None to create the store and set the
            variables without a process group.
        timeout: The timeout of operations, and of the wait for ranks in bootstrap, in seconds or as a timedelta. By
            default 30 minutes for operations (torch's default), and 10 minutes for ranks.
        comm: An mpi4py communicator of the ranks that form the job; all ranks by default.
        device: The device of this rank; by default chosen among the visible GPUs.
        abort_on_error: Whether an unhandled exception on this rank aborts the whole job.
        on_failure: The reaction to the death of a rank: "abort" aborts the job; with "recover", the operations of the
            other ranks raise RankFailedError, and `recover()` continues without the failed rank. "recover" requires
            Open MPI 5 with ULFM: `mpicomm run --fault-tolerant`.
        min_ranks: With "recover", the least number of ranks: if fewer ranks are left, mpicomm aborts the job.

    Returns:
        The World: rank, size, topology, device and backend.

    Raises:
        LaunchError: If the launcher, the environment (including MPICOMM_* variables) or an earlier
            init_process_group() prevents one job; with "recover", if the ranks run without ULFM.
        MPINotFoundError: If MPI is needed, and mpi4py or an MPI library is missing.
        DeviceError: If a device does not exist, or, with NCCL, a rank has no GPU or shares one with another rank.
        RendezvousError: If ranks do not arrive within the timeout, or cannot reach rank 0.
        MpicommError: If this is a child process of a rank, the ranks pass different backends, or this version of torch
            is not supported.
        ValueError: If the backend is unknown, the timeout is not between 1 and 1e9 seconds, or an argument of a second
            call differs from that of the first one.
        TypeError: If an argument is of a wrong type.
    """
    global _session  # noqa: PLW0603  a process is in one job at a time, as in torch.distributed
    # 1. a second call, in the rank or in a child process
    request = StartRequest(backend, timeout, comm, device, abort_on_error, on_failure, min_ranks)
    if _session is not None and _session.is_open:
        if _session.pid != os.getpid():
            raise MpicommError(mpi.IN_A_CHILD)
        request.check()
        request.check_repeats(_session.request, _session.world.backend, _session.world.device)
        return _session.world
    # 2. install the exit hooks, with the rank from the launcher, or with the likely one if the detection fails
    exit_hooks.watch_exits(_report_exit_at_once)
    launch = None
    try:
        request.check()
        settings = Settings.from_environ(os.environ)
        settings = dataclasses.replace(settings, parent=parent_link.take_address(os.environ))
        launch = detect.detect(os.environ, settings.launcher)
    finally:
        if abort_on_error:
            rank, size = (launch.rank, launch.size) if launch else (detect.guess_rank(os.environ), 1)
            exit_hooks.arm(rank, size, socket.gethostname())
    # 3. join the job
    if launch.kind in ("torchrun", "slurm"):
        job = environ_job.join(request, launch, settings.seconds_to_report)
        if abort_on_error:
            _arm_abort(job.where.rank, job.where.size)
    else:
        base = mpi_job.initialize(request, launch, settings.seconds_to_report)
        if abort_on_error:  # from here on, a failing rank must not leave the others waiting
            _arm_abort(base.rank, base.size, base)
        job = mpi_job.join(base, request, launch, settings, exit_hooks.print_stderr)
        if abort_on_error:  # the program may free the communicator that it passed
            _arm_abort(job.where.rank, job.where.size, job.base)
    # 4. start the watchdog, export the variables and initialise the process group
    session = _new_session(request, launch, settings, job)
    try:
        _open_session(session)
        _session = session
    except BaseException as error:
        if isinstance(error, RankFailedError) or (isinstance(error, Exception) and rank_failures.error_after(error)):
            _session = _recover(session)
        else:
            if session.watch is not None:  # a rank that leaves with an error must not be reported as dead
                session.watch.leave(1, is_stuck=False, waits=False)
            _restore_environ(session)
            raise
    atexit.register(_shutdown_at_exit)
    if _session.job.is_spare:
        _wait_as_spare()
    return _session.world


def recover() -> World:
    """Continue without the failed ranks, after operations have raised RankFailedError (collective over the others).

    The remaining ranks form a new World: without gaps between the ranks, or with a spare in the place of each failed
    rank. It has a new store and a new default process group, and the environment variables describe it. All groups of
    the old world are unusable. A failure during the recovery starts it again. If fewer than `min_ranks` ranks are left,
    mpicomm aborts the job.

    Returns:
        The new World.

    Raises:
        MpicommError: If `bootstrap(on_failure="recover")` has not been called, no rank has failed, or the new world
            cannot be formed.
    """
    session = _session
    if session is None or not session.is_open or session.failures is None:
        raise MpicommError(
            'recover: the job was not started with on_failure="recover".\n'
            'Call mpicomm.bootstrap(on_failure="recover"), and start the job with mpicomm run --fault-tolerant.'
        )
    if rank_failures.current() is None:
        time.sleep(_ABORT_SECONDS)
        raise MpicommError("recover: the job is being aborted.\nCheck the output of the other ranks for the cause.")
    if not session.failures.find():
        raise MpicommError(
            "recover: no rank has failed.\nCall recover() only after an operation has raised RankFailedError."
        )
    return _recover(session).world


def shutdown() -> None:
    """Destroy the process groups, free the communicator and restore the environment (collective).

    Runs automatically at exit. MPI is finalised at exit, not here, so that `bootstrap` may be called again. While an
    exception is being handled, the call has no effect.
    """
    session = _session
    if session is None or not session.is_open or session.pid != os.getpid():
        return
    if isinstance(sys.exc_info()[1], Exception):
        return  # in a `finally`: the other ranks may be elsewhere; the exception ends the job, or this runs at exit
    # 1. wait for all ranks
    session.is_open = False
    atexit.unregister(_shutdown_at_exit)
    if session.watch is not None and not session.job.is_spare:
        try:
            _leave(session.watch)
        except RankFailedError:
            _leave_without_failed(session)
    # 2. release torch's and MPI's resources
    if dist.is_initialized():
        dist.destroy_process_group()
    torch_internals.let_gloo_finish()
    _restore_environ(session)
    mpi.set_job_comm(None)
    rank_failures.set_current(None)
    if mpi.is_usable() and not mpi.is_abandoned():
        for comm in filter(None, {id(each): each for each in (session.job.comm, session.job.base)}.values()):
            mpi.free(comm)
    # 3. stop the watchdog
    channel_setup.stop_watchdog(session.watch)
    session.watch = None
    exit_hooks.disarm()
    # The store stays open until the process exits or calls bootstrap again: other ranks may still use it.


def _restore_environ(session: _Session) -> None:
    for name, before in session.environ.items():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def dump_flight_recorder(directory: str | os.PathLike[str] | None = None) -> Path:
    """Write this rank's last operations (the flight recorder) and the stacks of its threads to files.

    Does not communicate.

    Args:
        directory: The directory to write to; by default a directory of the job, below MPICOMM_DUMP_DIR or
            `mpicomm-dumps`. Without MPI, or with MPICOMM_DUMP_DIR=none, it is `mpicomm-dumps` itself.

    Returns:
        The path of `rank-<rank>.json`; the file with the stacks is in the same directory.

    Raises:
        MpicommError: If `bootstrap` has not been called.
        TypeError: If the directory is not a path.
        OSError: If the files cannot be written. The job's directory must not be a link or belong to another user.
    """
    PATH.or_none().check(directory, "directory", "dump_flight_recorder")
    if _session is None:
        raise MpicommError("dump_flight_recorder: mpicomm is not initialized.\nCall mpicomm.bootstrap() first.")
    world = _session.world
    about = {"size": world.size, "host": world.hostname}
    if directory is None and _session.dumps is not None:
        return dump.write(_session.dumps, world.rank, about, is_of_job=True)
    return dump.write(directory or _DUMPS, world.rank, about)


def current_world() -> World:
    """Return the World that `bootstrap` returned. Does not communicate.

    Raises:
        MpicommError: If `bootstrap` has not been called, or `shutdown` has been called since.
    """
    if _session is None or not _session.is_open:
        raise MpicommError("mpicomm is not initialized.\nCall mpicomm.bootstrap() first.")
    return _session.world


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


# -- the session -------------------------------------------------------------------------------------------------------


def _new_session(
    request: StartRequest, launch: Launch, settings: Settings, job: JoinedJob, before: _Session | None = None
) -> _Session:
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
    session = _Session(request, launch, settings, job, world, first_report.claim_in(job.store, world.rank), name, place)
    if job.comm is not None or job.is_spare:
        if settings.dump_dir != "none":
            session.dumps = Path(settings.dump_dir or _DUMPS, name).absolute()
        if request.recovers and job.everyone is not None:
            session.failures = RankFailures(job.base, job.everyone.hosts, place.size)
    return session


def _open_session(session: _Session) -> None:
    """Start the watchdog, export the variables and initialise the process group (collective)."""
    job, settings = session.job, session.settings
    # 1. start the watchdog, if MPI has connected the ranks
    rank_failures.set_current(session.failures)
    if session.failures is not None:
        torch_internals.check_backward(rank_failures.check)
    if job.base is not None and job.everyone is not None:
        for comm in filter(None, {id(each): each for each in (job.base, job.comm)}.values()):
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
        )
        prepare = functools.partial(gpus.prepare_thread_for_events, job.device)
        session.watch = channel_setup.start_watchdog(
            job.base, job.everyone, job.address, channel, limits, session.claim, prepare, settings.parent
        )
    # 2. export the variables and initialise the process group
    if not job.is_spare:
        _export(session)
        _make_group(session)


def _export(session: _Session) -> None:
    """Set the variables that other code reads, such as `init_process_group("env://")`."""
    world = session.world
    values: dict[str, object] = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": world.master_port,
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
    for name, value in values.items():
        session.environ[name] = os.environ.get(name)
        os.environ[name] = str(value)


def _make_group(session: _Session) -> None:
    plugin.register()
    world, hook = session.world, sys.excepthook
    if world.backend is None:
        return
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


# -- recovery ----------------------------------------------------------------------------------------------------------


def recoveries() -> int:
    """Return the number of times that the job has continued after failures of ranks; 0 without `bootstrap`."""
    return 0 if _session is None else _session.world.recoveries


def _recover(last: _Session) -> _Session:
    """End the last world, and form the next one of the processes that are left (collective over these)."""
    global _session  # noqa: PLW0603  a process is in one job at a time, as in torch.distributed
    start = time.monotonic()
    assert last.failures is not None
    assert last.job.base is not None
    comm, place, size = last.job.base, last.place, last.job.base.size
    mpi.record_lost_processes()
    mpi.revoke_all()
    _end_world(last)
    while True:
        # 1. find the processes that are left; until then, the watchdog of the last world reports ranks that hang
        comm, found = survivors.regroup(comm, place)
        _stop_watching(last)
        mpi.forget_revoked()
        groups.release_abandoned()
        comm, place = found.comm, found.place
        if not found.size:
            raise SystemExit(0)  # of a spare: all ranks have finished
        _check_enough(last, found)
        # 2. form the next world
        session, error = None, None
        try:
            job = mpi_job.rejoin(
                comm, found.size, last.request, last.settings.interface, last.world.backend, last.world.device
            )
            session = _new_session(last.request, last.launch, last.settings, job, last)
            _open_session(session)
        except Exception as caught:  # noqa: BLE001  if another process has failed, the next attempt is without it
            error = caught
            mpi.revoke_all()
            comm.Revoke()  # other processes may wait for this one
        # 3. all processes agree that they have formed it
        if survivors.agree(comm, error is None):
            break
        mpi.revoke_all()
        if session is not None:
            _end_world(session)
            _stop_watching(session)
        if comm.size == size:  # no process has failed in this attempt
            raise MpicommError(
                f"recover: the new world cannot be formed: {error or 'see the error of another rank.'}\n"
                f"Correct the cause, and start the job again."
            ) from error
        size = comm.size
    assert session is not None
    _session = session
    if session.request.abort_on_error:
        _arm_abort(session.world.rank, session.world.size, session.job.base)
    if comm.rank == 0:
        number, seconds = session.world.recoveries, time.monotonic() - start
        exit_hooks.print_stderr(
            f"[mpicomm] {_describe(last, found)}; continuing with {session.world.size} ranks after {seconds:.2f} s "
            f"(recovery {number})\n"
        )
    return session


def _end_world(session: _Session) -> None:
    """End the groups and the variables of a world without communication; all communicators are revoked."""
    assert session.failures is not None
    groups.end_all(session.failures.error(), "its world has ended, since ranks have failed")
    if dist.is_initialized():
        dist.destroy_process_group()
    _restore_environ(session)
    mpi.set_job_comm(None)


def _stop_watching(session: _Session) -> None:
    channel_setup.stop_watchdog(session.watch)
    session.watch = None


def _leave_without_failed(session: _Session) -> None:
    """End this rank's part in a world in which another rank has failed: it has finished, so it does not continue."""
    assert session.job.base is not None
    mpi.revoke_all()
    _end_world(session)
    comm, found = survivors.regroup(session.job.base, session.place, is_finished=True)
    if comm.rank == 0 and not found.size and session.settings.parent:
        # The last rank 0 may have failed. If other ranks continue, rank 0 of the next world reports their end.
        with contextlib.suppress(OSError, ValueError):
            parent_link.report_end(parent_link.Parent.parse(session.settings.parent), session.name)


def _check_enough(session: _Session, found: NextWorld) -> None:
    """Abort the job if fewer ranks are left than the program needs."""
    least = session.request.min_ranks
    if found.size >= least:
        return
    if found.comm.rank == 0:
        exit_hooks.print_stderr(
            f"[mpicomm] {_describe(session, found)}; {found.size} ranks are left, fewer than min_ranks={least}; "
            f"aborting the job\n"
        )
        found.comm.Abort(1)
    time.sleep(_ABORT_SECONDS)
    os._exit(1)


def _describe(session: _Session, found: NextWorld) -> str:
    """Return which ranks have failed, and why."""
    assert session.failures is not None
    return session.failures.describe(found.failed)


def _wait_as_spare() -> None:
    """Wait until this process takes the place of a failed rank; end the process if all ranks have exited."""
    importlib.import_module("torch._dynamo")  # which creating an optimizer imports, in half a second
    while _session is not None and _session.job.is_spare:
        assert _session.failures is not None
        watch, failures = _session.watch, _session.failures
        while not failures.has_any.wait(_SPARE_SECONDS):
            if watch is None or watch.has_seen_all_exit():
                raise SystemExit(0)
        _recover(_session)


# -- hooks -------------------------------------------------------------------------------------------------------------


def _arm_abort(rank: int, size: int, comm: Intracomm | None = None) -> None:
    """Let the exit hooks abort the job, by MPI if it has connected the ranks."""

    def abort(status: int) -> None:
        if comm is not None:
            with contextlib.suppress(Exception):
                comm.Abort(status)
        os._exit(status)

    exit_hooks.arm(rank, size, socket.gethostname(), abort, _is_first_to_fail)


def _is_first_to_fail() -> bool:
    if _session is None or not (_session.is_open or _session.watch):  # the job is being formed
        return True
    if _session.watch is not None:
        _session.watch.fail()
    return _session.claim()


def _shutdown_at_exit() -> None:
    with contextlib.suppress(Exception):  # the program has finished: an error here must not change its exit status
        shutdown()


def _report_exit_at_once(status: int) -> None:
    if (watch := agent.current()) is None:
        return
    watch.exit_at_once(status)
    if rank_failures.current() is not None and not watch.has_seen_all_exit():
        # The other ranks continue. mpirun reports a signal to them as a failure; a status other than 0 makes it abort.
        os.kill(os.getpid(), signal.SIGKILL)
