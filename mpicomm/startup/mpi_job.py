"""Forms the job of ranks that MPI has connected: rank 0 plans it from the facts of all ranks, and opens the store."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import secrets
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from mpicomm import agreement, mpi, shm
from mpicomm.errors import LaunchError, MpicommError, raised_on_all_ranks
from mpicomm.launch import allocation, detect, scheduler_query
from mpicomm.launch.allocation import Allocation
from mpicomm.launch.detect import Launch
from mpicomm.settings import SPARES, Settings
from mpicomm.shm import native
from mpicomm.startup import backend_choice, devices, notice, other_group, rendezvous, topology, unused_hosts
from mpicomm.startup.start_request import JoinedJob, StartRequest, this_command
from mpicomm.startup.startup_barrier import Notice, startup_barrier

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_CONNECT_LIMIT = datetime.timedelta(seconds=5)  # for the store of a rank 0 that has failed during the recovery
_SHORTEST_INIT = 30.0  # the least timeout of MPI_Init in seconds: processes start slowly on a busy machine


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The facts of a rank, from which the job is planned."""

    hostname: str
    node: int
    """The lowest rank of this rank's node."""

    settings: dict[str, Any]
    """The arguments of `bootstrap`, and the variables, that must be the same on every rank."""

    gpus: dict[str, int]
    """The UUIDs of the GPUs that this rank may use, with their indices."""

    has_nccl: bool
    """Whether torch was built with NCCL."""

    why_cpu: str | None
    """Why this rank cannot use the GPUs that it was assigned, or None."""

    lacks_library: bool
    """Whether shared memory is enabled, but the C library that it requires was not built."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How the job is set up, the same on all ranks."""

    hosts: list[str]
    """The host of every rank."""

    nodes: list[int]
    """The lowest rank of every rank's node."""

    gpus: list[int | None]
    """The index of every rank's GPU; None for the CPU."""

    backend: str | None
    places: list[tuple[str, int]]
    """The addresses and ports at which rank 0 listens for connections of the store."""

    store_token: bytes
    """With it rank 0 proves its identity at these addresses."""

    channel_token: bytes
    """With it the ranks authenticate themselves to the hubs of the out-of-band channel."""

    started: str
    """The time of the start."""

    warnings: list[str]
    """Warnings for rank 0 to print."""


def initialize(request: StartRequest, launch: Launch, hang_seconds: float) -> Intracomm:
    """Initialise MPI, and return the communicator of the ranks that form the job (collective).

    Args:
        hang_seconds: Seconds after which a notice names absent ranks.

    Raises:
        LaunchError: If this process cannot join the job of its launcher.
    """
    if problem := detect.problem_before_init(launch, mpi.library(), this_command()):
        raise _launch_error(launch, problem)
    limit = max(request.wait_limit, _SHORTEST_INIT)
    is_single = launch.kind == "single"
    with notice.after(notice.seconds_before(hang_seconds, limit), launch, "MPI_Init", limit):
        by_all = request.comm is None and not is_single
        world = mpi.initialize(launch.local_size, limit, by_all=by_all, is_single=is_single)
    if world.size == 1:  # MPI has connected no other rank to which this one could report the error
        _check_launch(launch)
    return request.comm or (mpi.api().COMM_SELF if is_single else world)


def join(
    base: Intracomm, request: StartRequest, launch: Launch, settings: Settings, write_notice: Callable[[str], None]
) -> JoinedJob:
    """Form the job of the ranks of a communicator (collective).

    Args:
        write_notice: Prints a notice about missing ranks.

    Raises:
        MpicommError: On every rank that has arrived, if a rank is missing or cannot join the job, or the store cannot
            be opened.
    """
    # 1. wait for all ranks
    limit = request.wait_limit
    missing_notice = Notice(notice.seconds_before(settings.seconds_to_report, limit), write_notice)
    hosts = (socket.gethostname(),) * base.size if launch.local_size == base.size else ()
    startup_barrier(base, "bootstrap()", limit, missing_notice, hosts)
    # 2. agree on the plan
    comm = base.Dup()
    listeners: list[socket.socket] = []
    plan = _agree(comm, request, launch, settings, listeners)
    spares = settings.num_spares if request.recovers else 0
    if warning := detect.warning_after_init(launch, os.environ, mpi.api().COMM_WORLD.size, _job_of_scheduler(launch)):
        warnings.warn(warning, stacklevel=3)
    for warning in plan.warnings if comm.rank == 0 else ():
        warnings.warn(warning, stacklevel=3)
    # 3. select the device and open the store
    device = devices.select(plan.gpus[comm.rank])
    return _open(comm, comm.size - spares, plan, device, listeners, request.limit)


def rejoin(
    comm: Intracomm, size: int, request: StartRequest, interface: str | None, backend: str | None, device: torch.device
) -> JoinedJob:
    """Form the job of the processes that are left after a failure (collective).

    Args:
        comm: The communicator of these processes: the ranks of the world, then the spares.
        size: The number of ranks of the world.
        request: The arguments of `bootstrap`.
        interface: The network interface of the store.
        backend: The backend of the job.
        device: The device of this process.

    Raises:
        MpicommError: On every process, if the store cannot be opened.
        Exception: An exception of MPI, on some processes only, if another process fails meanwhile.
    """
    listeners: list[socket.socket] = []
    node = topology.first_rank_of_node(comm)

    def decide(facts: list[tuple[str, int]]) -> _Plan:
        hosts, nodes = [host for host, _ in facts], [node for _, node in facts]
        # MASTER_ADDR and MASTER_PORT, if the user has set them, are those of the first rank 0, which may have failed.
        listeners.extend(rendezvous.listen(topology.from_nodes(0, nodes, hosts), {}, interface))
        return _plan(hosts, nodes, [None] * len(hosts), backend, listeners)

    try:
        plan = agreement.decide_on_rank_0(comm, lambda: (socket.gethostname(), node), decide)
        return _open(comm, size, plan, device, listeners, request.limit, connect_limit=_CONNECT_LIMIT)
    finally:
        for listener in listeners:
            listener.close()  # does nothing for the one that the store has taken over


def _open(
    comm: Intracomm,
    size: int,
    plan: _Plan,
    device: torch.device,
    listeners: list[socket.socket],
    limit: datetime.timedelta,
    connect_limit: datetime.timedelta | None = None,
) -> JoinedJob:
    """Open the store, and split the ranks of the world from the spares (collective)."""
    everyone = topology.from_nodes(comm.rank, plan.nodes, plan.hosts)
    store = rendezvous.open_store(comm, everyone, listeners, plan.places, plan.store_token, limit, connect_limit)
    is_spare = comm.rank >= size
    where, world = everyone, comm
    if size < comm.size:
        world = cast("Intracomm", comm.Split(mpi.api().UNDEFINED if is_spare else 0, comm.rank))
        where = everyone if is_spare else topology.from_nodes(comm.rank, plan.nodes[:size], plan.hosts[:size])
    return JoinedJob(
        where,
        device,
        plan.backend,
        *store,
        None if is_spare else world,
        plan.channel_token,
        plan.started,
        base=comm,
        size=size,
        everyone=everyone,
    )


def _agree(
    comm: Intracomm, request: StartRequest, launch: Launch, settings: Settings, listeners: list[socket.socket]
) -> _Plan:
    """Gather the facts of all ranks, and return rank 0's plan; rank 0 adds its sockets to `listeners` (collective)."""
    node = topology.first_rank_of_node(comm)
    same = {
        "backend": request.backend,
        "on_failure": request.on_failure,
        "min_ranks": request.min_ranks,
        SPARES: settings.num_spares if request.recovers else 0,
    }

    def collect() -> _Facts:
        _check_launch(launch)
        other_group.refuse(request.backend)
        gpus = devices.usable_gpus(request.device)
        assigned = allocation.assigned_gpus(os.environ) if request.device is None else None
        why_cpu = devices.why_unusable(assigned)
        lacks_library = settings.shares_memory and settings.uses_native and native.library() is None
        return _Facts(socket.gethostname(), node, same, gpus, dist.is_nccl_available(), why_cpu, lacks_library)

    def decide(facts: list[_Facts]) -> _Plan:
        _check_same([each.settings for each in facts])
        if request.recovers:
            _check_recovery(comm.size, request.min_ranks, settings.num_spares)
        hosts, nodes = [each.hostname for each in facts], [each.node for each in facts]
        if request.comm is None:
            unused_hosts.refuse(os.environ, hosts)
        uuids = devices.assign_on_nodes([each.gpus for each in facts], nodes)
        backend = _choose_backend(request.backend, facts, uuids, hosts)
        environ = rendezvous.environ_of_user(os.environ)
        listeners.extend(rendezvous.listen(topology.from_nodes(0, nodes, hosts), environ, settings.interface))
        indices = [None if uuid is None else each.gpus[uuid] for each, uuid in zip(facts, uuids, strict=True)]
        return _plan(hosts, nodes, indices, backend, listeners, _warnings(facts, backend))

    return agreement.decide_on_rank_0(comm, collect, decide)


def _warnings(facts: list[_Facts], backend: str | None) -> list[str]:
    """Return what rank 0 warns of: each cause once, with the lowest rank that has it."""
    found = [f"rank {rank}: {each.why_cpu}" for rank, each in enumerate(facts) if each.why_cpu][:1]
    shares_memory = backend_choice.needs_mpi(backend) and len({each.node for each in facts}) < len(facts)
    if shares_memory and (ranks := [rank for rank, each in enumerate(facts) if each.lacks_library]):
        found.append(
            f"rank {ranks[0]}: {shm.MISSING_LIBRARY}.\n"
            f"{shm.LIBRARY_REMEDY} To disable shared memory and this warning, set MPICOMM_NATIVE=0."
        )
    return found


def _plan(
    hosts: list[str],
    nodes: list[int],
    gpus: list[int | None],
    backend: str | None,
    listeners: list[socket.socket],
    warnings_of_ranks: Sequence[str] = (),
) -> _Plan:
    return _Plan(
        hosts,
        nodes,
        gpus,
        backend,
        places=[listener.getsockname()[:2] for listener in listeners],
        store_token=secrets.token_bytes(),
        channel_token=secrets.token_bytes(),
        started=time.strftime("%Y%m%d-%H%M%S"),
        warnings=list(warnings_of_ranks),
    )


def _check_same(settings: list[dict[str, Any]]) -> None:
    """Check that all ranks have the same arguments and variables.

    Raises:
        MpicommError: If one differs from that of rank 0.
    """
    for name, expected in settings[0].items():
        for rank, each in enumerate(settings):
            if each[name] != expected:
                raise MpicommError(
                    f"rank {rank}: {name} must be the same on every rank, got {each[name]!r}, "
                    f"but {expected!r} on rank 0.\n"
                    f"{'Set' if name.isupper() else 'Pass'} the same {name} on every rank."
                )


def _check_recovery(size: int, min_ranks: int, num_spares: int) -> None:
    """Check that the job can continue after a failure.

    Raises:
        LaunchError: If MPI does not tolerate failures, or there are too few processes.
    """
    if not mpi.tolerates_failures():
        raise LaunchError(_cannot_recover(mpi.library().title))
    if size - num_spares < min_ranks:
        raise LaunchError(
            f"bootstrap(min_ranks={min_ranks}) needs {min_ranks} ranks and the spares ({SPARES}={num_spares}), "
            f"got {size} processes.\n"
            f"Start {min_ranks + num_spares} processes or more: mpicomm run -n N."
        )


def _cannot_recover(library: str) -> str:
    return (
        f'bootstrap(on_failure="recover") needs Open MPI 5 with ULFM under `mpirun --with-ft ulfm`, got {library} '
        f"without it.\n"
        f"Without ULFM, restart the ranks from a checkpoint (mpicomm run --max-restarts N), or let the scheduler "
        f"requeue the job.\n"
        f"With Open MPI 5, start with:\n"
        f"  mpicomm run --fault-tolerant {shlex.join(sys.orig_argv[1:])}"
    )


def _check_launch(launch: Launch) -> None:
    """Check that the launcher, the environment and MPI agree on this process's rank and the number of ranks.

    Raises:
        LaunchError: If they contradict each other.
    """
    world = mpi.api().COMM_WORLD
    problem = detect.problem_after_init(launch, os.environ, mpi.library(), world.rank, world.size, this_command())
    if problem:
        raise _launch_error(launch, problem) if world.size == 1 else LaunchError(problem)


def _job_of_scheduler(launch: Launch) -> Allocation | None:
    """Return the scheduler's job, for a warning; None outside one, and where its resources cannot be read."""
    with contextlib.suppress(LaunchError):
        return scheduler_query.current_allocation(os.environ) if launch.is_plain else None
    return None


def _launch_error(launch: Launch, problem: str) -> LaunchError:
    """Return the error of a rank that MPI did not connect; every rank raises it if the launcher gave each a size."""
    error = LaunchError(problem)
    return raised_on_all_ranks(error) if launch.claims and launch.size > 1 else error


def _choose_backend(wanted: str | None, facts: list[_Facts], uuids: list[str | None], hosts: list[str]) -> str | None:
    backend = backend_choice.choose(
        wanted,
        has_mpi=True,
        gpu_each=backend_choice.gpu_each(uuids, hosts),
        has_nccl=all(each.has_nccl for each in facts),
    )
    if backend_choice.needs_nccl(backend):
        devices.refuse_shared(uuids, hosts, [each.why_cpu for each in facts])
    return backend
