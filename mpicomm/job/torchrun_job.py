"""Joins a job that torchrun, or srun without MPI, started: by the store at MASTER_ADDR, torch's env:// rendezvous."""

from __future__ import annotations

import datetime
import os
import socket
import warnings

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from mpicomm import missing_ranks, open_files, topology
from mpicomm.arguments import PORT
from mpicomm.devices import accelerator, assignment, vendor_backends
from mpicomm.errors import LaunchError, RendezvousError, raised_on_all_ranks
from mpicomm.job import plan, start_timer
from mpicomm.job.plan import JoinedJob, Plan
from mpicomm.job.start_request import StartRequest, this_command
from mpicomm.launch import allocation, detect
from mpicomm.launch.detect import Launch


def join(request: StartRequest, launch: Launch, hang_seconds: float) -> JoinedJob:
    """Join the job of torchrun or srun (collective).

    Args:
        hang_seconds: Seconds after which a notice names missing ranks.

    Raises:
        LaunchError: If the arguments require MPI, MASTER_ADDR or MASTER_PORT is not set, MASTER_PORT is not a
            port, or torch.distributed is already initialized.
        RendezvousError: If the store cannot be reached, or ranks do not arrive within the timeout.
        DeviceError: If this process does not have the requested device.
    """
    # 1. check the launch
    _check(request, launch)
    # 2. open or join the store, and find out which ranks share a node
    limit = request.join_timeout_seconds
    if launch.rank == 0:  # torch opens the store here, unless torchrun's agent has opened it
        open_files.allow(launch.size)
    seconds = start_timer.seconds_before_notice(hang_seconds, limit)
    with start_timer.report_missing_after(seconds, launch, "rendezvous", limit):
        store, rank, size = _open_store(launch, limit)
        nodes, hosts = _nodes_and_hosts(store, rank, size, limit)
    # 3. choose the device and the backend
    ranks = topology.from_nodes(rank, nodes, hosts)
    device = _device(request, ranks.local_rank)
    accelerator.select(device)
    if rank == 0:
        _warn(request, launch)
    has_device, vendor = device.type != "cpu", vendor_backends.of_this_torch()
    backend = plan.choose_backend(request.backend, has_mpi=False, gpu_each=has_device, vendor=vendor)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return JoinedJob(
        plan=Plan(hosts, nodes, size, backend),
        rank_topology=ranks,
        process_topology=ranks,
        device=device,
        store=store,
        address=address,
        port=port,
    )


def _check(request: StartRequest, launch: Launch) -> None:
    if argument := _argument_that_needs_mpi(request):
        launcher = "mpicomm run --fault-tolerant" if request.recovers else "mpirun"
        raise raised_on_all_ranks(
            LaunchError(
                f"{argument} needs MPI, but this process was started by {launch.title}, without MPI.\n"
                f"Call bootstrap() without {argument.partition('=')[0]}=, or start with MPI:\n"
                f"  {launcher} -n {launch.size} {this_command()}"
            )
        )
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise LaunchError(
            f"{launch.title} did not set {' and '.join(missing)}, and the ranks cannot agree on it without MPI.\n"
            f"Set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, on all ranks."
        )
    remedy = "Set MASTER_PORT to a free port of rank 0's host, on all ranks."
    PORT.read(os.environ["MASTER_PORT"], "MASTER_PORT", remedy)
    request.refuse_other_group()


def _argument_that_needs_mpi(request: StartRequest) -> str:
    if request.comm is not None:
        return "comm="
    if request.recovers:
        return f"on_failure={request.on_failure!r}"
    return f"backend={request.backend!r}" if plan.needs_mpi(request.backend) else ""


def _warn(request: StartRequest, launch: Launch) -> None:
    assigned = allocation.assigned_gpus(os.environ) if request.device is None else None
    of_agents = detect.warning_of_agents(os.environ) if launch.kind == "torchrun" and not launch.forced else None
    for warning in (of_agents, assignment.why_unusable(assigned)):
        if warning is not None:
            warnings.warn(warning, stacklevel=4)


def _device(request: StartRequest, local_rank: int) -> torch.device:
    if request.device is not None:
        return assignment.parse(request.device)
    count = accelerator.count()
    return accelerator.device_at(local_rank % count if count else None)


def _open_store(launch: Launch, wait_limit: float) -> tuple[dist.Store, int, int]:
    try:
        return next(rendezvous("env://", launch.rank, launch.size, timeout=datetime.timedelta(seconds=wait_limit)))
    except dist.DistError as error:
        endpoint = f"{os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"
        raise RendezvousError(
            f"rank {launch.rank} on {socket.gethostname()}: rendezvous at {endpoint} failed: "
            f"{str(error).splitlines()[0]}\n"
            f"Set MASTER_ADDR to an address of rank 0's host that all ranks can reach, and MASTER_PORT to a free port "
            f"there."
        ) from None


def _nodes_and_hosts(store: dist.Store, rank: int, size: int, wait_limit: float) -> tuple[list[str], list[str]]:
    """Return every rank's node (GROUP_RANK or SLURM_NODEID, else the host name) and host (collective)."""
    hostname = socket.gethostname()
    node = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or hostname
    store.set(f"mpicomm/place/{rank}", f"{node} {hostname}")
    keys = [f"mpicomm/place/{number}" for number in range(size)]
    try:
        nodes_and_hosts = [value.decode().split(" ", 1) for value in store.multi_get(keys)]
    except dist.DistError:
        missing = [number for number in range(size) if not store.check([keys[number]])]
        raise missing_ranks.error_of("bootstrap()", wait_limit, size, len(missing), missing) from None
    return [node for node, _ in nodes_and_hosts], [host for _, host in nodes_and_hosts]
