"""`bootstrap()` forms one job of N processes; `shutdown()` takes it down.

The steps of a bootstrap: read the launcher's variables, initialise MPI, wait for all ranks, discover the topology,
assign the devices, open the store, initialise the process group. An error before the process group is initialised is
raised with the same message on every rank that MPI has connected.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import functools
import os
import shlex
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from mpicomm import mpi
from mpicomm.arguments import FLAG, PATH, Expected
from mpicomm.backend import compatibility, gpus, groups, plugin, torch_internals
from mpicomm.durations import in_seconds
from mpicomm.errors import LaunchError, MpicommError, RendezvousError, raised_on_all_ranks
from mpicomm.launch import detect
from mpicomm.launch.detect import Launch
from mpicomm.settings import Settings
from mpicomm.startup import backend_choice, devices, notice, open_files, other_group, rendezvous, topology
from mpicomm.startup.startup_barrier import Notice, startup_barrier
from mpicomm.startup.topology import Topology
from mpicomm.watchdog import agent, channel_setup, dump, exit_hooks, rank_0_monitor
from mpicomm.watchdog.agent import Watchdog

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # torch's default
_SHORTEST_TIMEOUT = 1  # seconds; processes need some time to start
_DEFAULT_WAIT_LIMIT = 600.0  # seconds that bootstrap waits for ranks by default

_SHORTEST_INIT = 30.0  # the least timeout of MPI_Init in seconds: processes start slowly on a busy machine

_NOTICE_SECONDS = 30.0  # after which a waiting rank prints which ranks are absent
_CLAIM_SECONDS = 2.0  # the longest wait for the answer of rank 0's store to which rank failed first
_LEAVE_PAUSE = 0.01  # seconds between two polls of messages in flight, while other ranks still run
_DUMPS = "mpicomm-dumps"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

# torch's names of backends that have another name in bootstrap.
_TORCH_NAMES = {backend_choice.MPI: plugin.NAME, backend_choice.MPI_WITH_NCCL: plugin.NAME_WITH_NCCL}


@dataclasses.dataclass(frozen=True)
class World:
    """The ranks, topology, device and backend of the job. Reading its attributes does not communicate.

    As a context manager it calls `shutdown()` at the end of the block, unless the block raises an exception.
    """

    rank: int
    """The rank of this process, from 0 to size - 1."""

    size: int
    """The number of ranks."""

    local_rank: int
    """The rank of this process among the ranks of its node."""

    local_size: int
    """The number of ranks on this node."""

    node_rank: int
    """The index of this node among the nodes of the job."""

    num_nodes: int
    """The number of nodes; the ranks of a node share memory."""

    hostname: str
    """The name of this rank's host."""

    hosts: tuple[str, ...]
    """The host name of every rank, by rank."""

    nodes: tuple[int, ...]
    """The node index of every rank, by rank."""

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

    request: _Request
    world: World
    store: dist.Store
    environ: dict[str, str | None] = dataclasses.field(default_factory=dict)
    """The exported variables, with their values before `bootstrap`."""

    watch: Watchdog | None = None
    dumps: Path | None = None
    """The directory of the flight recorder's files."""

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

    Returns:
        The World: rank, size, topology, device and backend.

    Raises:
        LaunchError: If the processes were launched in a way that cannot form one job.
        MPINotFoundError: If MPI is needed, and mpi4py or an MPI library is missing.
        DeviceError: If a device does not exist, or two ranks would share one GPU under NCCL.
        RendezvousError: If ranks do not arrive within the timeout, or cannot reach rank 0.
        MpicommError: If this is a child process of a rank, or the ranks pass different backends.
        ValueError: If the backend is unknown, the timeout is out of range, or an argument of a second call differs
            from that of the first one.
        TypeError: If an argument is of a wrong type.
    """
    global _session  # noqa: PLW0603  a process is in one job at a time, as in torch.distributed
    # 1. a second call, in the rank or in a child process
    request = _Request(backend, timeout, comm, device, abort_on_error)
    if _session is not None and _session.is_open:
        if _session.pid != os.getpid():
            raise MpicommError(mpi.IN_A_CHILD)
        request.check()
        request.check_repeats(_session.request, _session.world)
        return _session.world
    # 2. abort the job on errors, with the rank that the environment suggests, then with the detected rank
    exit_hooks.watch_exits(_tell_exit_at_once)
    if abort_on_error:
        exit_hooks.arm(detect.guess_rank(os.environ), 1, socket.gethostname())
    request.check()
    settings = Settings.from_environ(os.environ)
    launch = detect.detect(os.environ, settings.launcher)
    if abort_on_error:
        exit_hooks.arm(launch.rank, launch.size, socket.gethostname())
    # 3. join the job
    if launch.kind in ("torchrun", "slurm"):
        _session = _join_by_environ(request, launch, settings)
    else:
        _session = _join_by_mpi(request, launch, settings)
    if abort_on_error:
        _arm_abort(_session)
    atexit.register(_shutdown_at_exit)
    return _session.world


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
    if session.watch is not None:
        _leave(session.watch)
    # 2. release torch's and MPI's resources
    if dist.is_initialized():
        dist.destroy_process_group()
    torch_internals.let_gloo_finish()
    _restore_environ(session)
    mpi.set_job_comm(None)
    if session.world.comm is not None and mpi.is_usable() and not mpi.is_abandoned():
        session.world.comm.Free()
    # 3. stop the watchdog
    if session.watch is not None:
        session.watch.stop()
        agent.set_current(None)
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

    Args:
        directory: The directory to write to; by default a directory of the job, below MPICOMM_DUMP_DIR or
            `mpicomm-dumps`.

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
    """Return the World that `bootstrap` returned.

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


_COMM = Expected(
    "an mpi4py intracommunicator or None",
    # Duck-typed, since MPI is not loaded under torchrun. Intercommunicators have a remote group.
    lambda comm: comm is None or (hasattr(comm, "Split_type") and not hasattr(comm, "Get_remote_group")),
    "a communicator that has this rank",
    lambda comm: comm is None or bool(comm),  # COMM_NULL is false
    "Pass one whose ranks form the job, or omit comm for all ranks.",
)


@dataclasses.dataclass(frozen=True)
class _Request:
    """The arguments of `bootstrap`."""

    backend: str | None = "auto"
    timeout: float | datetime.timedelta | None = None
    comm: Intracomm | None = None
    device: str | int | torch.device | None = None
    abort_on_error: bool = True

    def check(self) -> None:
        """Check the arguments, before the job is formed.

        Raises:
            ValueError: If the backend is unknown, the timeout is out of range, or the communicator is COMM_NULL.
            TypeError: If an argument is of a wrong type.
        """
        backend_choice.check(self.backend)
        in_seconds(self.timeout, _SHORTEST_TIMEOUT, "30 minutes (operations) and 10 minutes (waiting for ranks)")
        _COMM.check(self.comm, "comm")
        devices.EXPECTED.or_none().check(self.device, "device")
        FLAG.check(self.abort_on_error, "abort_on_error")

    def check_repeats(self, first: _Request, world: World) -> None:
        """Check that the arguments of a second call equal those of the first; default values are ignored.

        Raises:
            ValueError: If an argument differs from that of the first call.
        """
        same: dict[str, tuple[Any, ...]] = {"backend": (world.backend,), "device": (world.device, str(world.device))}
        for field in dataclasses.fields(self):
            name, given = field.name, getattr(self, field.name)
            before = getattr(first, name)
            if given not in (field.default, before, *same.get(name, ())):
                raise ValueError(
                    f"bootstrap() was called before with {name}={before!r}, got {name}={given!r}.\n"
                    f"Omit {name} to get the existing World, or call mpicomm.shutdown() first."
                )

    @property
    def limit(self) -> datetime.timedelta:
        """The timeout of operations."""
        if self.timeout is None:
            return _DEFAULT_TIMEOUT
        if isinstance(self.timeout, datetime.timedelta):
            return self.timeout
        return datetime.timedelta(seconds=self.timeout)

    @property
    def wait_limit(self) -> float:
        """The seconds to wait for ranks."""
        return _DEFAULT_WAIT_LIMIT if self.timeout is None else self.limit.total_seconds()


# -- started by MPI --------------------------------------------------------------------------------------------------


def _join_by_mpi(request: _Request, launch: Launch, settings: Settings) -> _Session:
    # 1. initialise MPI
    by_all = request.comm is None and launch.kind != "single"
    base = _initialize_mpi(launch, request.wait_limit, settings, by_all=by_all)
    if request.comm is not None:
        base = request.comm
    elif launch.kind == "single":
        base = mpi.api().COMM_SELF
    if request.abort_on_error and base.size > 1:  # from here on, a failing rank must not leave the others waiting
        exit_hooks.arm(base.rank, base.size, socket.gethostname(), base.Abort)
    # 2. wait for all ranks, and check that they form one job
    startup_notice = Notice(_seconds_to_notice(settings, request.wait_limit), exit_hooks.print_stderr)
    hosts = (socket.gethostname(),) * base.size if launch.local_size == base.size else ()
    startup_barrier(base, "bootstrap()", request.wait_limit, startup_notice, hosts)
    comm = base.Dup()
    _agree(comm, lambda: _check_launch(launch))
    _agree(comm, lambda: other_group.refuse(request.backend))
    if warning := detect.warning_after_init(launch, os.environ, mpi.api().COMM_WORLD.size):
        warnings.warn(warning, stacklevel=3)
    # 3. agree on the topology, the backend and the devices
    where = topology.discover(comm)
    of_rank_0 = comm.bcast(request.backend)
    _agree(comm, lambda: _check_alike(of_rank_0, request.backend))
    device, uuids = _assign_device(comm, where, request)
    backend = backend_choice.choose(
        request.backend,
        has_mpi=True,
        gpu_each=backend_choice.gpu_each(uuids, where.hosts),
        has_nccl=dist.is_nccl_available(),
    )
    if backend_choice.needs_nccl(backend):
        _agree(comm, lambda: devices.refuse_shared(uuids, where.hosts))
    startup_barrier(comm, "bootstrap(), after the choice of devices", request.wait_limit, startup_notice, where.hosts)
    # 4. open the store and start the watchdog
    job_store = rendezvous.open_store(comm, where, os.environ, settings.interface, request.limit)
    mpi.set_job_comm(comm)
    world = _world(comm.rank, comm.size, where, device, backend, launch, job_store.address, job_store.port, comm)
    session = _Session(request, world, job_store.store)
    session.dumps = _dumps(settings, comm.bcast(f"{time.strftime('%Y%m%d-%H%M%S')}-{job_store.port}"))
    session.watch = _watch(session, comm, where, settings, launch)
    # 5. export the variables and initialise the process group
    try:
        _export(session)
        _make_group(session, request)
    except BaseException:
        if session.watch is not None:  # a rank that leaves with an error must not be reported as dead
            session.watch.leave(1, is_stuck=False, waits=False)
        _restore_environ(session)
        raise
    return session


def _watch(session: _Session, comm: Intracomm, where: Topology, settings: Settings, launch: Launch) -> Watchdog | None:
    """Open the out-of-band channel and start the watchdog; return None if a rank cannot connect (collective)."""
    place = channel_setup.rank_info_of(comm, where)
    start = channel_setup.ChannelSetup(comm, place, session.world.master_addr, settings.seconds_to_lose_host)
    limits = agent.Limits(settings.seconds_to_report, session.dumps, ends_local_processes=launch.step is not None)
    prepare = functools.partial(gpus.prepare_thread_for_events, session.world.device)
    watch = Watchdog(place, start.channel, limits, comm.Abort, _claim(session.store, comm.rank), prepare)
    problem = start.connect()
    watch.start()
    if not start.is_open_on_all_ranks(problem):
        watch.stop()
        return None
    watch.establish()
    agent.set_current(watch)
    return watch


def _dumps(settings: Settings, name: str) -> Path | None:
    if settings.dump_dir == "none":
        return None
    return Path(settings.dump_dir or _DUMPS, name).absolute()


def _claim(store: dist.Store, rank: int) -> Callable[[], bool]:
    """Return a function that returns whether this rank is the first to report why the job fails.

    The first rank to ask the store prints the cause; the other ranks do not repeat it.
    """

    def ask(answers: list[bool]) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 and its store have exited
            # A separate connection, since another thread may be waiting on the store. It is opened only now, since each
            # connection is an open file of rank 0, which may have thousands of ranks.
            private = store.clone()  # type: ignore[attr-defined]  # missing in the stub
            private.set_timeout(datetime.timedelta(seconds=_CLAIM_SECONDS))
            answers.append(private.add("mpicomm/failures", 1) == 1)

    def is_first() -> bool:
        answers: list[bool] = []
        # If rank 0 is stopped (SIGSTOP), the store never answers and ignores its timeout: hence a thread.
        asking = threading.Thread(target=ask, args=(answers,), daemon=True)
        asking.start()
        asking.join(_CLAIM_SECONDS)
        if not answers:
            time.sleep(rank_0_monitor.turn_of(rank))  # meanwhile a lower rank may report the cause and abort the job
        return answers[0] if answers else True  # two reports are better than none

    return is_first


def _initialize_mpi(launch: Launch, wait_limit: float, settings: Settings, *, by_all: bool) -> Intracomm:
    if problem := detect.problem_before_init(launch, mpi.library(), _command()):
        raise _launch_error(launch, problem)
    limit = max(wait_limit, _SHORTEST_INIT)
    with notice.after(_seconds_to_notice(settings, limit), launch, "MPI_Init", limit):
        return mpi.initialize(launch.local_size, limit, by_all=by_all)


def _seconds_to_notice(settings: Settings, limit: float) -> float:
    """Return the seconds that this rank waits for others before it prints a notice."""
    return min(_NOTICE_SECONDS, settings.seconds_to_report, limit / 2)


def _check_launch(launch: Launch) -> None:
    world = mpi.api().COMM_WORLD
    problem = detect.problem_after_init(launch, os.environ, mpi.library(), world.rank, world.size, _command())
    if problem:
        raise _launch_error(launch, problem) if world.size == 1 else LaunchError(problem)


def _launch_error(launch: Launch, problem: str) -> LaunchError:
    """Return the error of a rank that MPI did not connect; every rank raises it if the launcher gave each a size."""
    error = LaunchError(problem)
    return raised_on_all_ranks(error) if launch.claims and launch.size > 1 else error


def _check_alike(of_rank_0: str | None, mine: str | None) -> None:
    if mine != of_rank_0:
        raise MpicommError(
            f"backend must be the same on every rank, got {mine!r}, but {of_rank_0!r} on rank 0.\n"
            f"Pass the same backend on every rank."
        )


def _agree(comm: Intracomm, check: Callable[[], Any]) -> Any:
    """Run a local check; if it fails on any rank, raise the error of the lowest such rank on every rank (collective).

    Returns:
        The result of this rank's check.

    Raises:
        MpicommError: If the check raises an MpicommError on any rank.
    """
    result, error = None, None
    try:
        result = check()
    except MpicommError as caught:
        error = caught
    failed = [(rank, other) for rank, other in enumerate(comm.allgather(error)) if other is not None]
    if failed:
        rank, first = failed[0]
        if len(failed) < comm.size:
            first = type(first)(f"rank {rank}: {first}")
        raise first if comm.size == 1 else raised_on_all_ranks(first)
    return result


def _assign_device(comm: Intracomm, where: Topology, request: _Request) -> tuple[torch.device, list[str | None]]:
    """Return this rank's device and the UUIDs of all ranks' GPUs (collective). A CPU rank has None."""
    wanted = _agree(comm, lambda: None if request.device is None else devices.parse(request.device))
    visible = devices.visible_gpus() if wanted is None or wanted.type == "cuda" else []
    if wanted is not None and visible:
        visible = [visible[wanted.index]]
    everyone = comm.allgather((where.node_rank, visible))
    local_ranks = [uuids for node, uuids in everyone if node == where.node_rank]
    assignment = devices.assign(local_ranks)[where.local_rank]
    uuid = visible[assignment.index] if assignment else None
    device = wanted or (torch.device("cuda", assignment.index) if assignment else torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device, comm.allgather(uuid)


# -- started by torchrun, or by srun without MPI -----------------------------------------------------------------------


def _join_by_environ(request: _Request, launch: Launch, settings: Settings) -> _Session:
    # 1. check the launch
    if backend_choice.needs_mpi(request.backend) or request.comm is not None:
        argument = "comm=" if request.comm is not None else f"backend={request.backend!r}"
        raise raised_on_all_ranks(
            LaunchError(
                f"{argument} needs MPI, but this process was started by {launch.title}, without MPI.\n"
                f"Start with MPI, or call bootstrap() without backend= and comm=:\n"
                f"  mpirun -n {launch.size} {_command()}"
            )
        )
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise LaunchError(
            f"{launch.title} did not set {' and '.join(missing)}, and the ranks cannot agree on it without MPI.\n"
            f"Set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, on all ranks."
        )
    other_group.refuse(request.backend)
    # 2. join the store and discover the topology
    if launch.rank == 0:  # torch opens the store here, unless torchrun's agent has opened it
        open_files.allow(launch.size)
    with notice.after(_seconds_to_notice(settings, request.wait_limit), launch, "rendezvous", request.wait_limit):
        store, rank, size = _rendezvous_by_environ(launch, request.wait_limit)
        where = _topology_from_store(store, rank, size, request.wait_limit)
    # 3. choose the device and the backend
    device = _device_by_local_rank(request, where)
    has_gpu = device.type == "cuda"
    backend = backend_choice.choose(request.backend, has_mpi=False, gpu_each=has_gpu, has_nccl=dist.is_nccl_available())
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    world = _world(rank, size, where, device, backend, launch, address, port, None)
    # 4. export the variables and initialise the process group
    session = _Session(request, world, store)
    _export(session)
    _make_group(session, request)
    return session


def _rendezvous_by_environ(launch: Launch, wait_limit: float) -> tuple[dist.Store, int, int]:
    """Open or join the store at MASTER_ADDR by torch's env:// rendezvous (collective)."""
    try:
        return next(
            torch_rendezvous("env://", launch.rank, launch.size, timeout=datetime.timedelta(seconds=wait_limit))
        )
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"
        raise RendezvousError(
            f"rank {launch.rank} on {socket.gethostname()}: rendezvous at {where} failed: "
            f"{str(error).splitlines()[0]}\n"
            f"Set MASTER_ADDR to an address of rank 0's host that all ranks can reach, and MASTER_PORT to a free port "
            f"there."
        ) from None


def _topology_from_store(store: dist.Store, rank: int, size: int, wait_limit: float) -> Topology:
    """Discover which ranks share a node, by GROUP_RANK or SLURM_NODEID, else by host name (collective)."""
    hostname = socket.gethostname()
    node = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or hostname
    store.set(f"mpicomm/place/{rank}", f"{node} {hostname}")
    keys = [f"mpicomm/place/{each}" for each in range(size)]
    try:
        places = [place.decode().split(" ", 1) for place in store.multi_get(keys)]
    except dist.DistError:
        missing = [f"rank {each}" for each in range(size) if not store.check([keys[each]])]
        raise RendezvousError(
            f"bootstrap(): timed out after {wait_limit:g} s: {len(missing)} of {size} ranks did not arrive: "
            f"{', '.join(missing)}.\n"
            f"Check that every rank calls mpicomm.bootstrap(), or increase bootstrap(timeout=...)."
        ) from None
    return topology.from_nodes(rank, [place[0] for place in places], [place[1] for place in places])


def _device_by_local_rank(request: _Request, where: Topology) -> torch.device:
    if request.device is not None:
        device = devices.parse(request.device)
    elif not torch.cuda.is_available():
        return torch.device("cpu")
    else:
        device = torch.device("cuda", where.local_rank % torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


# -- both ------------------------------------------------------------------------------------------------------------


def _world(
    rank: int,
    size: int,
    where: Topology,
    device: torch.device,
    backend: str | None,
    launch: Launch,
    address: str,
    port: int,
    comm: Intracomm | None,
) -> World:
    return World(
        rank=rank,
        size=size,
        **dataclasses.asdict(where),
        device=device,
        backend=backend,
        launcher=launch.title,
        master_addr=address,
        master_port=port,
        comm=comm,
    )


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
    interface = rendezvous.interface_towards(world.master_addr) if world.num_nodes > 1 else None
    if interface and not os.environ.get(_GLOO_INTERFACE):
        values[_GLOO_INTERFACE] = interface
    for name, value in values.items():
        session.environ[name] = os.environ.get(name)
        os.environ[name] = str(value)


def _make_group(session: _Session, request: _Request) -> None:
    plugin.register()
    world = session.world
    if world.backend is None:
        return
    with compatibility.explained():
        dist.init_process_group(
            _TORCH_NAMES.get(world.backend, world.backend),
            store=dist.PrefixStore("mpicomm", session.store),
            rank=world.rank,
            world_size=world.size,
            timeout=request.limit,
        )


def _arm_abort(session: _Session) -> None:
    """Arm the exit hooks again, now with MPI_Abort, the watchdog and the store."""
    world, comm = session.world, session.world.comm
    watch = session.watch
    claim = watch.claim if watch is not None else _claim(session.store, world.rank)

    def is_first() -> bool:
        if watch is not None:
            watch.fail()
        return claim()

    def end(status: int) -> None:
        if comm is not None:
            comm.Abort(status)
        os._exit(status)

    exit_hooks.arm(world.rank, world.size, world.hostname, end, is_first)


def _shutdown_at_exit() -> None:
    with contextlib.suppress(Exception):  # the program has finished: an error here must not change its exit status
        shutdown()


def _tell_exit_at_once(status: int) -> None:
    if (watch := agent.current()) is not None:
        watch.exit_at_once(status)


def _command() -> str:
    """Return this process's command line, for the command in a LaunchError."""
    return shlex.join(["python", *sys.orig_argv[1:]])
