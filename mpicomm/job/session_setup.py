"""Assembly of the job of this process: the watchdog, the exported variables, the process group, the exit hooks."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from mpicomm import mpi, torch_compatibility, torch_internals
from mpicomm.backend import registration
from mpicomm.backend.execution import backward_errors
from mpicomm.devices import vendors
from mpicomm.job import interfaces, plan, session
from mpicomm.job.plan import JoinedJob
from mpicomm.job.session import DUMPS, Session, World
from mpicomm.job.start_request import StartRequest
from mpicomm.launch.detect import Launch
from mpicomm.settings import ORIGINAL, STORE_OF_RANK, Settings
from mpicomm.watchdog import agent, channel_setup, error_output, exit_hooks, rank_failures
from mpicomm.watchdog.channel import Channel
from mpicomm.watchdog.rank_failures import RankFailures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_ACCELERATE_USE_CPU = "ACCELERATE_USE_CPU"
# If a rank fails, torch's threads for NCCL end the process by default, and a group waits a minute for its thread.
_NCCL_IF_RANKS_FAIL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # leave errors to this package, which aborts the group
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",  # a quarter of the time after an error that is left for dumps
}


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
    previous_rank: int | None = job.rank_topology.rank
    name, recoveries = f"{job.plan.started}-{job.port}", 0
    if last is not None:
        previous_rank = None if last.job.is_spare else last.world.rank
        name, recoveries = last.name, last.world.recoveries + 1
    world = World(
        **vars(job.rank_topology),
        device=job.device,
        backend=job.plan.backend,
        launcher=launch.title,
        master_addr=job.address,
        master_port=job.port,
        comm=job.rank_comm,
        previous_rank=previous_rank,
        recoveries=recoveries,
    )
    claim = error_output.claim_in(job.store, world.rank)
    created = Session(request, launch, settings, job, world, name, shutdown, claim)
    if job.process_comm is not None:
        if settings.dump_dir != "none":
            created.dumps = Path(settings.dump_dir or DUMPS, name).absolute()
        if request.recovers:
            created.failures = RankFailures(job.process_comm, job.plan.hosts, job.plan.size)
    return created


def open_session(opened: Session) -> None:
    """Start the watchdog, export the variables and initialise the process group (collective)."""
    job, settings = opened.job, opened.settings
    if opened.request.abort_on_error:  # the program may free the communicator that it passed
        arm_abort(opened.world.rank, opened.world.size, job.process_comm)
    # 1. start the watchdog, if MPI has connected the ranks
    rank_failures.set_current(opened.failures)
    if opened.failures is not None:
        backward_errors.watch_backward()
    if job.process_comm is not None:
        for comm in opened.communicators:
            mpi.tracked(comm)
        mpi.set_job_comm(job.rank_comm)
        channel = Channel(job.process_topology.rank, job.plan.channel_token, settings.host_timeout)
        limits = agent.WatchdogSettings(
            settings.hang_seconds,
            opened.dumps,
            ends_local_processes=opened.launch.step is not None,
            job=opened.name,
            spares=job.process_comm.size - job.plan.size,
            recovers=opened.failures is not None,
            synchronous_kernels=vendors.vendor().synchronous_kernels,
            gpu="" if job.device.index is None else vendors.vendor().uuid(job.device.index),
        )
        opened.watch = channel_setup.start_watchdog(
            job.process_comm, job.process_topology, job.address, channel, limits, opened.claim, settings.parent
        )
    # 2. export the variables and initialise the process group
    if not job.is_spare:
        _export(opened)
        _make_group(opened)


def _export(opened: Session) -> None:
    """Set the variables that other code reads, such as `init_process_group("env://")`."""
    world = opened.world
    values: dict[str, object] = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": world.master_port,
        STORE_OF_RANK: f"{world.master_addr} {world.master_port}",
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
    if opened.failures is not None:
        values.update({name: value for name, value in _NCCL_IF_RANKS_FAIL.items() if name not in os.environ})
    for name, value in values.items():
        opened.environ[name] = os.environ.get(name)
        os.environ[name] = str(value)


def _make_group(opened: Session) -> None:
    registration.register()
    world, hook = opened.world, sys.excepthook
    name = None if world.backend is None else _name_in_torch(world.backend)
    registration.update_device_types()
    if name is None:
        return
    torch_internals.restart_group_names()
    init_process_group = getattr(dist.init_process_group, ORIGINAL, dist.init_process_group)
    with torch_compatibility.blame_untested_torch():
        init_process_group(
            name,
            store=dist.PrefixStore("mpicomm", opened.job.store),
            rank=world.rank,
            world_size=world.size,
            timeout=opened.request.operation_timeout,
        )
    if opened.request.abort_on_error:
        sys.excepthook = hook  # torch has replaced it by one that prints the rank, which this one prints, too


def _name_in_torch(backend: str) -> str:
    """Return torch's name of a backend of `bootstrap`."""
    if not plan.needs_mpi(backend):
        return backend
    vendor = backend.partition(",")[2]
    return registration.register_beside(vendor) if vendor else registration.NAME


# -- hooks -------------------------------------------------------------------------------------------------------------


def arm_abort(rank: int, size: int, comm: Intracomm | None = None) -> None:
    """Let the exit hooks abort the job, by MPI if it has connected the ranks."""
    end = functools.partial(abort, comm=comm)
    exit_hooks.arm(rank, size, socket.gethostname(), end, is_first_to_fail, _is_formed)


def abort(status: int, comm: Intracomm | None) -> None:
    """Abort the job, by MPI if it has connected the ranks; does not return."""
    if comm is not None:
        with contextlib.suppress(Exception):
            comm.Abort(status)
    os._exit(status)


def _is_formed() -> bool:
    """Return whether the job exists, also while `shutdown` ends it: the watchdog is the last to stop."""
    current = session.current()
    return current is not None and (current.is_open or current.watch is not None)


def is_first_to_fail() -> bool:
    """Announce to the watchdog that this rank aborts the job, and return whether no other rank has failed before."""
    current = session.current()
    if current is None or not _is_formed():
        return True
    is_first = current.claim()
    # Only now, and only the rank that prints its error: `mpicomm run` names the rank whose report arrives first.
    if is_first and current.watch is not None:
        current.watch.fail()
    return is_first


def report_exit_at_once(status: int) -> None:
    """Report a call of `os._exit` before the process ends; if the others continue without it, kill it instead."""
    if (watch := agent.current()) is None:
        return
    watch.exit_at_once(status)
    if rank_failures.current() is not None and not watch.has_seen_all_exit():
        # The other ranks continue. mpirun reports a signal to them as a failure; a status other than 0 makes it abort.
        os.kill(os.getpid(), signal.SIGKILL)
