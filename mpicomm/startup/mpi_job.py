"""Forms the job of ranks that MPI has connected: rank 0 plans it from the facts of all ranks, and opens the store."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from mpicomm import agreement, mpi
from mpicomm.errors import LaunchError, MpicommError, raised_on_all_ranks
from mpicomm.launch import allocation, detect, scheduler_query
from mpicomm.launch.allocation import Allocation
from mpicomm.launch.detect import Launch
from mpicomm.settings import Settings
from mpicomm.startup import backend_choice, devices, notice, other_group, rendezvous, topology, unused_hosts
from mpicomm.startup.start_request import JoinedJob, StartRequest, this_command
from mpicomm.startup.startup_barrier import Notice, startup_barrier

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_SHORTEST_INIT = 30.0  # the least timeout of MPI_Init in seconds: processes start slowly on a busy machine


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The facts of a rank, from which the job is planned."""

    hostname: str
    node: int
    """The lowest rank of this rank's node."""

    backend: str | None
    """The backend that `bootstrap` got."""

    gpus: dict[str, int]
    """The UUIDs of the GPUs that this rank may use, with their indices."""

    has_nccl: bool
    """Whether torch was built with NCCL."""

    why_cpu: str | None
    """Why this rank cannot use the GPUs that it was assigned, or None."""


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

    warning: str | None
    """A warning for rank 0 to print, or None."""


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
        world = mpi.initialize(launch.local_size, limit, by_all=request.comm is None and not is_single)
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
    plan = _agree(comm, request, launch, settings.interface, listeners)
    if warning := detect.warning_after_init(launch, os.environ, mpi.api().COMM_WORLD.size, _job_of_scheduler(launch)):
        warnings.warn(warning, stacklevel=3)
    if plan.warning and comm.rank == 0:
        warnings.warn(plan.warning, stacklevel=3)
    # 3. select the device and open the store
    where = topology.from_nodes(comm.rank, plan.nodes, plan.hosts)
    device = devices.select(plan.gpus[comm.rank])
    store = rendezvous.open_store(comm, where, listeners, plan.places, plan.store_token, request.limit)
    return JoinedJob(where, device, plan.backend, *store, comm, plan.channel_token, plan.started)


def _agree(
    comm: Intracomm, request: StartRequest, launch: Launch, interface: str | None, listeners: list[socket.socket]
) -> _Plan:
    """Gather the facts of all ranks, and return rank 0's plan; rank 0 adds its sockets to `listeners` (collective)."""
    node = topology.first_rank_of_node(comm)

    def collect() -> _Facts:
        _check_launch(launch)
        other_group.refuse(request.backend)
        gpus = devices.usable_gpus(request.device)
        assigned = allocation.assigned_gpus(os.environ) if request.device is None else None
        why_cpu = devices.why_unusable(assigned)
        return _Facts(socket.gethostname(), node, request.backend, gpus, dist.is_nccl_available(), why_cpu)

    def decide(facts: list[_Facts]) -> _Plan:
        hosts, nodes = [each.hostname for each in facts], [each.node for each in facts]
        if request.comm is None:
            unused_hosts.refuse(os.environ, hosts)
        uuids = devices.assign_on_nodes([each.gpus for each in facts], nodes)
        backend = _choose_backend(facts, uuids, hosts)
        listeners.extend(rendezvous.listen(topology.from_nodes(0, nodes, hosts), os.environ, interface))
        return _Plan(
            hosts,
            nodes,
            [None if uuid is None else each.gpus[uuid] for each, uuid in zip(facts, uuids, strict=True)],
            backend,
            places=[listener.getsockname()[:2] for listener in listeners],
            store_token=secrets.token_bytes(),
            channel_token=secrets.token_bytes(),
            started=time.strftime("%Y%m%d-%H%M%S"),
            warning=next((f"rank {rank}: {each.why_cpu}" for rank, each in enumerate(facts) if each.why_cpu), None),
        )

    return agreement.decide_on_rank_0(comm, collect, decide)


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


def _choose_backend(facts: list[_Facts], uuids: list[str | None], hosts: list[str]) -> str | None:
    wanted = facts[0].backend
    for rank, backend in enumerate([each.backend for each in facts]):
        if backend != wanted:
            raise MpicommError(
                f"rank {rank}: backend must be the same on every rank, got {backend!r}, but {wanted!r} on rank 0.\n"
                f"Pass the same backend on every rank."
            )
    backend = backend_choice.choose(
        wanted,
        has_mpi=True,
        gpu_each=backend_choice.gpu_each(uuids, hosts),
        has_nccl=all(each.has_nccl for each in facts),
    )
    if backend_choice.needs_nccl(backend):
        devices.refuse_shared(uuids, hosts, [each.why_cpu for each in facts])
    return backend
