"""`bootstrap()` forms one job of N processes.

The steps of bootstrap: read the launcher's variables, initialise MPI, wait for all ranks, agree on the plan of the job,
open the store, start the watchdog, initialise the process group. An error before the process group is initialised is
raised with the same message on every rank that MPI has connected.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpicomm import mpi
from mpicomm.arguments import PATH
from mpicomm.errors import MpicommError, RankFailedError
from mpicomm.job import mpi_job, recovery, session, session_setup, shrinking, torchrun_job
from mpicomm.job.session import World
from mpicomm.job.shutdown import shutdown, shutdown_at_exit
from mpicomm.job.start_request import StartRequest
from mpicomm.launch import detect
from mpicomm.recorder import dump
from mpicomm.settings import Settings
from mpicomm.watchdog import exit_hooks, parent_link, rank_failures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


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
        backend: "auto" (MPI, with the vendor's library, such as NCCL, for GPU tensors if every rank has its own GPU;
            Gloo and that library under torchrun), "mpi", "gloo", "nccl", "cpu:mpi,cuda:nccl", "cpu:gloo,cuda:nccl", the
            same with "xpu:xccl" or the backend of an extension of torch, or None to create the store and set the
            variables without a process group.
        timeout: The timeout of operations and `recover()`, and of the wait for ranks, in seconds or as a timedelta. By
            default 30 minutes for operations (torch's default), and 10 minutes for ranks.
        comm: An mpi4py communicator of the ranks that form the job; all ranks by default.
        device: The device of this rank, such as "cpu", "cuda:1", "xpu:0" or the index of a GPU; by default chosen among
            the visible GPUs.
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
        DeviceError: If a device does not exist, or, with a vendor's library, a rank has no GPU or shares one with
            another rank.
        RendezvousError: If ranks do not arrive within the timeout, or cannot reach rank 0.
        MpicommError: If this is a child process of a rank, the ranks pass different backends, or this version of torch
            is not supported.
        ValueError: If the backend is unknown, the timeout is not between 1 and 1e9 seconds, or an argument of a second
            call differs from that of the first one.
        TypeError: If an argument is of a wrong type.
    """
    # 1. a second call, in the rank or in a child process
    request = StartRequest(backend, timeout, comm, device, abort_on_error, on_failure, min_ranks)
    if (earlier := session.current()) is not None and earlier.is_open:
        if earlier.pid != os.getpid():
            raise MpicommError(mpi.IN_A_CHILD)
        request.check()
        request.check_repeats(earlier.request, earlier.world.backend, earlier.world.device)
        return earlier.world
    # 2. install the exit hooks, with the rank from the launcher, or with the likely one if the detection fails
    exit_hooks.watch_exits(session_setup.report_exit_at_once)
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
        job = torchrun_job.join(request, launch, settings.hang_seconds)
    else:
        base = mpi_job.initialize(request, launch, settings)
        if abort_on_error:  # from here on, a failing rank must not leave the others waiting
            session_setup.arm_abort(base.rank, base.size, base)
        job = mpi_job.join(base, request, launch, settings)
    # 4. start the watchdog, export the variables and initialise the process group
    opened = session_setup.create(request, launch, settings, job, shutdown)
    try:
        session_setup.open_session(opened)
        session.set_current(opened)
    except BaseException as error:
        if isinstance(error, RankFailedError) or (isinstance(error, Exception) and rank_failures.error_after(error)):
            opened = recovery.recover_from(opened)
        else:
            if opened.watch is not None:  # a rank that leaves with an error must not be reported as dead
                opened.watch.leave(1, is_stuck=False, waits=False)
            opened.close()
            raise
    shrinking.serve_torch()
    atexit.register(shutdown_at_exit)
    if opened.job.is_spare:
        recovery.wait_as_spare()
    return session.current_world()


def dump_flight_recorder(directory: str | os.PathLike[str] | None = None) -> Path:
    """Write this rank's last operations (the flight recorder) and the stacks of its threads to files.

    Does not communicate.

    Args:
        directory: The directory to write to; by default a directory of the job, below MPICOMM_DUMP_DIR or
            `mpicomm-dumps`. Without MPI, or with MPICOMM_DUMP_DIR=none, it is `mpicomm-dumps` itself.

    Returns:
        The path of `rank-<rank>.json`. In the same directory are the file with the stacks, and `fr_trace_rank_<rank>`,
        the operations in the format of torch's flight recorder.

    Raises:
        MpicommError: If `bootstrap` has not been called.
        TypeError: If the directory is not a path.
        OSError: If the files cannot be written. The job's directory must not be a link or belong to another user.
    """
    PATH.or_none().check(directory, "directory", "dump_flight_recorder")
    if (last := session.current()) is None:
        raise MpicommError("dump_flight_recorder: mpicomm is not initialized.\nCall mpicomm.bootstrap() first.")
    world = last.world
    fields = {"size": world.size, "host": world.hostname}
    offset = None if last.watch is None else last.watch.clock_offset()
    if directory is None and last.dumps is not None:
        return dump.write(last.dumps, world.rank, fields, offset, is_of_job=True)
    return dump.write(directory or session.DUMPS, world.rank, fields, offset)
