"""Forms the job of processes that MPI has connected: rank 0 plans it from the facts of all, and opens the store.

A start and a recovery differ in the facts only: `join` gathers those of new ranks, `rejoin` those of processes whose
device and backend are known.
"""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mpicomm import agreement, mpi, native, topology
from mpicomm.devices import accelerator, assignment, vendor_backends
from mpicomm.errors import LaunchError, MpicommError, raised_on_all_ranks
from mpicomm.job import plan, rendezvous, separation, start_timer
from mpicomm.job.plan import JoinedJob, Plan
from mpicomm.job.start_request import StartRequest, this_command
from mpicomm.launch import allocation, detect, mpi_operator, queries
from mpicomm.launch.allocation import Allocation
from mpicomm.launch.detect import Launch
from mpicomm.missing_ranks import MissingNotice, wait_for_all_ranks
from mpicomm.native import c_library
from mpicomm.settings import SPARES, Settings
from mpicomm.watchdog import error_output

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

F = TypeVar("F")
T = TypeVar("T")

_CONNECT_LIMIT = datetime.timedelta(seconds=5)  # for the store of a rank 0 that has failed during the recovery
_SHORTEST_INIT = 30.0  # the least timeout of MPI_Init in seconds: processes start slowly on a busy machine


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The facts of a rank at the start, from which the job is planned."""

    hostname: str
    node: int
    """The lowest rank of this rank's node."""

    settings: dict[str, Any]
    """The arguments of `bootstrap`, and the variables, that must be the same on every rank."""

    devices: dict[str, int]
    """The identities of the devices that this rank may use, with their indices."""

    gpus: dict[str, str]
    """For each of these devices the identity of its GPU."""

    may_share: bool
    """Whether the user lets the vendor's library use one GPU for several ranks."""

    vendor: str
    """The backend of the vendor's library that this torch has, such as `cuda:nccl`; empty without one."""

    why_cpu: str | None
    """Why this rank cannot use the GPUs that it was assigned, or None."""

    lacks_gpu_buffers: bool
    """Whether MPI is to transfer GPU tensors, but an earlier `bootstrap()` has disabled its support for them."""

    lacks_library: bool
    """Whether shared memory is enabled, but the C library that it requires was not built."""


def initialize(request: StartRequest, launch: Launch, settings: Settings) -> Intracomm:
    """Initialise MPI, and return the communicator of the ranks that form the job (collective).

    Nothing before this calls the driver of a GPU.

    Raises:
        LaunchError: If this process cannot join the job of its launcher.
    """
    if problem := detect.problem_before_init(launch, os.environ, mpi.library(), this_command()):
        raise _launch_error(launch, problem)
    _prepare_for_separate_containers(launch)
    limit = max(request.join_timeout_seconds, _SHORTEST_INIT)
    is_single = launch.kind == "single"
    seconds = start_timer.seconds_before_notice(settings.hang_seconds, limit)
    with start_timer.report_missing_after(seconds, launch, "MPI_Init", limit):
        all_ranks_call = request.comm is None and not is_single
        world = mpi.initialize(
            launch.local_size,
            limit,
            all_ranks_call=all_ranks_call,
            is_single=is_single,
            takes_gpu_tensors=_takes_gpu_tensors(request, settings),
        )
    if world.size == 1:  # MPI has connected no other rank to which this one could report the error
        _check_launch(launch)
    return request.comm or (mpi.api().COMM_SELF if is_single else world)


def _prepare_for_separate_containers(launch: Launch) -> None:
    """Let MPI do without the memory of other ranks if containers separate them.

    Raises:
        LaunchError: If MPI cannot do without it.
    """
    if launch.kind != "mpi" or launch.forced:
        return
    separated = separation.of_this_process(os.environ)
    if problem := separated.problem(launch.local_size):
        raise _launch_error(launch, problem)
    for name, value in mpi.library().separated_environ(separated).items():
        os.environ.setdefault(name, value)


def _takes_gpu_tensors(request: StartRequest, settings: Settings) -> bool:
    return plan.mpi_takes_gpu_tensors(request.backend, vendor_backends.of_this_torch(), settings.gpu_aware)


def join(base: Intracomm, request: StartRequest, launch: Launch, settings: Settings) -> JoinedJob:
    """Form the job of the ranks of a communicator (collective).

    Raises:
        MpicommError: On every rank that has arrived, if a rank is missing or cannot join the job, or the store cannot
            be opened.
    """
    # 1. wait for all ranks
    limit = request.join_timeout_seconds
    seconds = start_timer.seconds_before_notice(settings.hang_seconds, limit)
    hosts = (socket.gethostname(),) * base.size if launch.local_size == base.size else ()
    wait_for_all_ranks(base, "bootstrap()", limit, MissingNotice(seconds, error_output.print_stderr), hosts)
    # 2. the facts of each rank
    comm = base.Dup()
    node = topology.first_rank_of_node(comm)
    num_spares = settings.spares if request.recovers else 0
    same = {
        "backend": request.backend,
        "on_failure": request.on_failure,
        "min_ranks": request.min_ranks,
        SPARES: num_spares,
    }

    def collect() -> _Facts:
        _check_launch(launch)
        request.refuse_other_group()
        usable, vendor = assignment.usable_devices(request.device), vendor_backends.of_this_torch()
        assigned = allocation.assigned_gpus(os.environ) if request.device is None else None
        why_cpu = assignment.why_unusable(assigned)
        needs_gpu_buffers = bool(usable) and _takes_gpu_tensors(request, settings)
        lacks_gpu_buffers = needs_gpu_buffers and mpi.has_disabled_gpu_buffers()
        lacks_library = settings.shared_memory and settings.native and c_library.load() is None
        gpus, may_share = assignment.gpus_of(usable), assignment.may_share(os.environ)
        host = socket.gethostname()
        return _Facts(host, node, same, usable, gpus, may_share, vendor, why_cpu, lacks_gpu_buffers, lacks_library)

    # 3. the plan of rank 0
    def decide(facts: list[_Facts]) -> Plan:
        _check_same([rank_facts.settings for rank_facts in facts])
        if request.recovers:
            _check_recovery(comm.size, request.min_ranks, num_spares)
        hosts, nodes = [rank_facts.hostname for rank_facts in facts], [rank_facts.node for rank_facts in facts]
        if request.comm is None:
            _refuse_unused_hosts(os.environ, hosts)
        identities = assignment.assign_on_nodes([rank_facts.devices for rank_facts in facts], nodes)
        indices = _assigned([rank_facts.devices for rank_facts in facts], identities)
        gpus = _assigned([rank_facts.gpus for rank_facts in facts], identities)
        vendors = {rank_facts.vendor for rank_facts in facts}
        backend = plan.choose_backend(
            request.backend,
            has_mpi=True,
            gpu_each=plan.has_gpu_each(gpus, hosts),
            vendor=vendors.pop() if len(vendors) == 1 else "",
        )
        if library := plan.vendor_part(backend):
            reasons = [rank_facts.why_cpu for rank_facts in facts]
            may_share = all(rank_facts.may_share for rank_facts in facts)
            assignment.refuse_shared(gpus, hosts, library.upper(), reasons, may_share=may_share)
        return Plan(hosts, nodes, comm.size - num_spares, backend, indices, warnings=_warnings(facts, backend))

    if warning := detect.warning_after_init(launch, os.environ, mpi.api().COMM_WORLD.size, _job_of_scheduler(launch)):
        warnings.warn(warning, stacklevel=3)
    environ = rendezvous.environ_of_user(os.environ)
    return _form(comm, collect, decide, environ, settings.interface, request.operation_timeout)


def rejoin(comm: Intracomm, size: int, request: StartRequest, settings: Settings, last: JoinedJob) -> JoinedJob:
    """Form the job of the processes that are left after a failure (collective).

    Args:
        comm: The communicator of these processes: the ranks of the world, then the spares.
        size: The number of ranks of the world.
        request: The arguments of `bootstrap`.
        settings: The settings.
        last: The job in which ranks have failed.

    Raises:
        MpicommError: On every process, if the store cannot be opened.
        Exception: An exception of MPI, on some processes only, if another process fails meanwhile.
    """
    facts_of_process = (socket.gethostname(), topology.first_rank_of_node(comm), last.device.index)

    def decide(facts: list[tuple[str, int, int | None]]) -> Plan:
        hosts, nodes, indices = zip(*facts, strict=True)
        return Plan(hosts, nodes, size, last.plan.backend, indices)

    # MASTER_ADDR and MASTER_PORT, if the user has set them, are those of the first rank 0, which may have failed.
    timeout = request.operation_timeout
    return _form(comm, lambda: facts_of_process, decide, {}, settings.interface, timeout, _CONNECT_LIMIT)


def _form(
    comm: Intracomm,
    collect: Callable[[], F],
    decide: Callable[[list[F]], Plan],
    environ: Mapping[str, str],
    interface: str | None,
    limit: datetime.timedelta,
    connect_limit: datetime.timedelta | None = None,
) -> JoinedJob:
    """Agree on the plan, select the device, open the store, and split the ranks from the spares (collective).

    Args:
        comm: The communicator of all processes.
        collect: Returns the facts of this process.
        decide: Returns the plan, from the facts of all processes, without addresses and tokens.
        environ: The environment of rank 0, with the address of the store if the user has set it.
        interface: The network interface of the store.
        limit: The timeout of the store.
        connect_limit: The timeout of the connection to the store, if it differs.
    """
    listeners: list[socket.socket] = []

    def complete(facts: list[F]) -> Plan:
        decided = decide(facts)
        of_rank_0 = topology.from_nodes(0, decided.nodes, decided.hosts)
        listeners.extend(rendezvous.listen(of_rank_0, environ, interface))
        return dataclasses.replace(
            decided,
            addresses=[listener.getsockname()[:2] for listener in listeners],
            store_token=secrets.token_bytes(),
            channel_token=secrets.token_bytes(),
            started=time.strftime("%Y%m%d-%H%M%S"),
        )

    try:
        agreed = agreement.decide_on_rank_0(comm, collect, complete)
        for warning in agreed.warnings if comm.rank == 0 else ():
            warnings.warn(warning, stacklevel=4)
        device = accelerator.device_at(agreed.devices[comm.rank])
        accelerator.select(device)
        process_topology = topology.from_nodes(comm.rank, agreed.nodes, agreed.hosts)
        store, address, port = rendezvous.open_store(
            comm, process_topology, listeners, agreed.addresses, agreed.store_token, limit, connect_limit
        )
    finally:
        for listener in listeners:
            listener.close()  # does nothing for the one that the store has taken over
    rank_topology, rank_comm, is_spare = process_topology, comm, comm.rank >= agreed.size
    if agreed.size < comm.size:
        rank_comm = cast("Intracomm", comm.Split(mpi.api().UNDEFINED if is_spare else 0, comm.rank))
    if agreed.size < comm.size and not is_spare:
        rank_topology = topology.from_nodes(comm.rank, agreed.nodes[: agreed.size], agreed.hosts[: agreed.size])
    return JoinedJob(
        plan=agreed,
        rank_topology=rank_topology,
        process_topology=process_topology,
        device=device,
        store=store,
        address=address,
        port=port,
        process_comm=comm,
        rank_comm=None if is_spare else rank_comm,
        is_spare=is_spare,
    )


# -- the checks of rank 0 ----------------------------------------------------------------------------------------------


def _assigned(by_identity: Sequence[Mapping[str, T]], identities: Sequence[str | None]) -> list[T | None]:
    """Return a property of the device of each rank; None without a device.

    Args:
        by_identity: For each rank the property of each device that it may use.
        identities: The identity of each rank's device.
    """
    pairs = zip(by_identity, identities, strict=True)
    return [None if identity is None else values[identity] for values, identity in pairs]


def _warnings(facts: list[_Facts], backend: str | None) -> list[str]:
    """Return what rank 0 warns of: each cause once, with the lowest rank that has it."""
    causes = [f"rank {rank}: {rank_facts.why_cpu}" for rank, rank_facts in enumerate(facts) if rank_facts.why_cpu][:1]
    if plan.needs_mpi(backend) and any(rank_facts.lacks_gpu_buffers for rank_facts in facts):
        causes.append(
            "GPU tensors are staged through host memory: an earlier bootstrap() of this process has disabled MPI's "
            "support for GPU memory, which only MPI_Init can enable.\n"
            "To enable it, set MPICOMM_GPU_AWARE=1 before the program starts, or pass backend='mpi' to the first "
            "bootstrap()."
        )
    shares_memory = plan.needs_mpi(backend) and len({rank_facts.node for rank_facts in facts}) < len(facts)
    if shares_memory and (ranks := [rank for rank, rank_facts in enumerate(facts) if rank_facts.lacks_library]):
        causes.append(
            f"rank {ranks[0]}: {native.MISSING_LIBRARY}.\n"
            f"{native.LIBRARY_REMEDY} To disable shared memory and this warning, set MPICOMM_NATIVE=0."
        )
    return causes


def _check_same(settings: list[dict[str, Any]]) -> None:
    """Check that all ranks have the same arguments and variables.

    Raises:
        MpicommError: If one differs from that of rank 0.
    """
    for name, expected in settings[0].items():
        for rank, of_rank in enumerate(settings):
            if of_rank[name] != expected:
                raise MpicommError(
                    f"rank {rank}: {name} must be the same on every rank, got {of_rank[name]!r}, "
                    f"but {expected!r} on rank 0.\n"
                    f"{'Set' if name.isupper() else 'Pass'} the same {name} on every rank."
                )


def _check_recovery(size: int, min_ranks: int, num_spares: int) -> None:
    """Check that the job can continue after a failure.

    Raises:
        LaunchError: If MPI does not tolerate failures, or there are too few processes.
    """
    if not mpi.tolerates_failures():
        raise LaunchError(
            f'bootstrap(on_failure="recover") needs Open MPI 5 with ULFM under `mpirun --with-ft ulfm`, got '
            f"{mpi.library().title} without it.\n"
            f"Without ULFM, restart the ranks from a checkpoint (mpicomm run --max-restarts N), or let the scheduler "
            f"requeue the job.\n"
            f"With Open MPI 5, start with:\n"
            f"  mpicomm run --fault-tolerant {shlex.join(sys.orig_argv[1:])}"
        )
    if size - num_spares < min_ranks:
        raise LaunchError(
            f"bootstrap(min_ranks={min_ranks}) needs {min_ranks} ranks and the spares ({SPARES}={num_spares}), "
            f"got {size} processes.\n"
            f"Start {min_ranks + num_spares} processes or more: mpicomm run -n N."
        )


def _refuse_unused_hosts(environ: Mapping[str, str], hosts: Sequence[str]) -> None:
    """Raise LaunchError if a Kubernetes operator's host file, which the launcher ignored, names more hosts.

    Only the launcher's container has the file. A rank elsewhere was started with the file, or with other hosts.

    Args:
        hosts: The host of every rank.
    """
    library = mpi.library()
    if (host_file := mpi_operator.ignored_host_file(environ, library)) is None:
        return
    try:
        text = Path(host_file[1]).read_text()
    except OSError:
        return
    if problem := mpi_operator.problem(text, host_file, library, hosts):
        raise LaunchError(problem)


# -- the checks of each rank -------------------------------------------------------------------------------------------


def _check_launch(launch: Launch) -> None:
    """Check that the launcher, the environment and MPI agree on this process's rank and the number of ranks.

    Raises:
        LaunchError: If they contradict each other.
    """
    world = mpi.api().COMM_WORLD
    problem = detect.problem_after_init(launch, os.environ, mpi.library(), world.rank, world.size, this_command())
    if launch.is_plain and world.size == 1:
        problem = problem or separation.of_this_process(os.environ).problem_of_single()
    if problem:
        raise _launch_error(launch, problem) if world.size == 1 else LaunchError(problem)


def _job_of_scheduler(launch: Launch) -> Allocation | None:
    """Return the scheduler's job, for a warning; None outside one, and where its resources cannot be read."""
    with contextlib.suppress(LaunchError):
        return queries.current_allocation(os.environ) if launch.is_plain else None
    return None


def _launch_error(launch: Launch, problem: str) -> LaunchError:
    """Return the error of a rank that MPI did not connect; every rank raises it if the launcher gave each a size."""
    error = LaunchError(problem)
    return raised_on_all_ranks(error) if launch.claims and launch.size > 1 else error
