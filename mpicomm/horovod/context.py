"""`hvd.init()`, `hvd.shutdown()`, and the properties of the job."""

from __future__ import annotations

import atexit
import collections
import os
from collections.abc import Sequence
from typing import Any

import torch

from mpicomm import mpi
from mpicomm.devices import accelerator, vendors
from mpicomm.errors import LaunchError, raised_on_all_ranks
from mpicomm.horovod.process_sets import DYNAMIC_VARIABLE, ProcessSet, registry
from mpicomm.horovod.variables import is_set
from mpicomm.job import bootstrap, session
from mpicomm.job.session import World

_MIN_RANKS = "HOROVOD_ELASTIC_MIN_NP"


def init(comm: Sequence[int] | Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Initialize Horovod (collective); calls `mpicomm.bootstrap()`. A second call has no effect.

    Args:
        comm: An mpi4py communicator of the ranks that take part, or a list of all ranks; all ranks by default.
        process_sets: Process sets to register, or "dynamic" to allow `hvd.add_process_set()`.

    Raises:
        ValueError: If `comm` lists ranks other than all, `process_sets` contains a set twice or invalid ranks, or a
            HOROVOD_* variable is out of range.
        LaunchError: On every rank, if torchrun started the ranks, since MPI is required, or if MPI
            provides a lower thread level than MPI_THREAD_MULTIPLE.
        MpicommError: If the ranks cannot be connected; see `mpicomm.bootstrap()`.
    """
    if registry.is_open:
        return
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f"init: process_sets must be 'dynamic' or a list, got {process_sets!r}.\nPass one of these."
            )
        os.environ[DYNAMIC_VARIABLE] = "1"
        process_sets = ()
    communicator: Any = comm if hasattr(comm, "Get_group") else None
    world = bootstrap.bootstrap(comm=communicator, **_recovery_options())
    if world.comm is None:
        raise raised_on_all_ranks(
            LaunchError(
                "init: the operations of Horovod need MPI, and the ranks were started without MPI (torchrun).\n"
                "Start them with an MPI launcher: mpicomm run --horovod -n 4 SCRIPT.py"
            )
        )
    if not mpi.has_thread_multiple():
        raise raised_on_all_ranks(
            LaunchError(
                "init: the operations of Horovod need the MPI thread level MPI_THREAD_MULTIPLE, "
                "but MPI provides a lower level.\n"
                "Call hvd.init() before the program initializes MPI, or initialize it with MPI_THREAD_MULTIPLE; "
                "otherwise use an MPI that was built with it."
            )
        )
    if comm is not communicator and sorted(comm) not in ([], list(range(world.size))):
        raise ValueError(
            f"init: comm must be an mpi4py communicator or all ranks, got {list(comm)} of {world.size} ranks.\n"
            f"Pass a communicator of these ranks, or use process_sets."
        )
    registry.open(list(process_sets or ()))
    atexit.unregister(_shutdown_at_exit)
    atexit.register(_shutdown_at_exit, os.getpid())


def _recovery_options() -> dict[str, Any]:
    """Return the arguments of `bootstrap` that let `hvd.elastic.run` continue without failed ranks."""
    if not is_set(os.environ, "HOROVOD_ELASTIC"):
        return {}
    least = os.environ.get(_MIN_RANKS) or "1"
    if not least.isdecimal() or int(least) < 1:
        raise ValueError(f"{_MIN_RANKS} must be a positive integer, got {least}.\nCorrect it, or unset it.")
    return {"on_failure": "recover", "min_ranks": int(least)}


def shutdown() -> None:
    """Shut Horovod down (collective); pending operations fail. The job itself stays; `hvd.init()` may follow."""
    if registry.is_open:
        registry.close()


def _shutdown_at_exit(pid: int) -> None:
    if pid == os.getpid():
        shutdown()


def is_initialized() -> bool:
    """Return whether `hvd.init()` has been called, and not `hvd.shutdown()` since. Does not communicate."""
    return registry.is_open


def _world() -> World:
    registry.check_open()
    return session.current_world()


def rank() -> int:
    """Return this rank. Does not communicate.

    Raises:
        ValueError: If Horovod is not initialized.
    """
    return _world().rank


def size() -> int:
    """Return the number of ranks. Does not communicate.

    Raises:
        ValueError: If Horovod is not initialized.
    """
    return _world().size


def local_rank() -> int:
    """Return this rank among the ranks of its node. Does not communicate.

    Raises:
        ValueError: If Horovod is not initialized.
    """
    return _world().local_rank


def local_size() -> int:
    """Return the number of ranks of this rank's node. Does not communicate.

    Raises:
        ValueError: If Horovod is not initialized.
    """
    return _world().local_size


def cross_rank() -> int:
    """Return the position of this rank's node among the nodes that have a rank of this local rank.

    Does not communicate.

    Raises:
        ValueError: If Horovod is not initialized.
    """
    return _nodes_with(_world().local_rank).index(_world().node_rank)


def cross_size() -> int:
    """Return the number of nodes that have a rank of this rank's local rank. Does not communicate.

    Raises:
        ValueError: If Horovod is not initialized.
    """
    return len(_nodes_with(_world().local_rank))


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks. Does not communicate.

    Raises:
        ValueError: If Horovod is not initialized.
    """
    return len(set(collections.Counter(_world().nodes).values())) == 1


def _nodes_with(local: int) -> list[int]:
    counts = collections.Counter(_world().nodes)
    return sorted(node for node, count in counts.items() if count > local)


# -- queries about the build -------------------------------------------------------------------------------------------


def mpi_threads_supported() -> bool:
    """Return True: `mpicomm.bootstrap()` initializes MPI with MPI_THREAD_MULTIPLE. Does not communicate.

    Raises:
        ValueError: If Horovod is not initialized.
    """
    registry.check_open()
    return True


def mpi_enabled() -> bool:
    """Return True: the ranks communicate by MPI."""
    return True


def mpi_built() -> bool:
    """Return True: MPI is supported."""
    return True


def gloo_enabled() -> bool:
    """Return False: the ranks do not communicate by Gloo."""
    return False


def gloo_built() -> bool:
    """Return False: Gloo is not supported."""
    return False


def nccl_built() -> int:
    """Return the version of NCCL, such as 22703, if torch has it; otherwise 0."""
    version = vendors.vendor().versions().get("NCCL") if accelerator.is_available() else None
    if version is None:
        return 0
    major, minor, patch = map(int, version.split(".")[:3])
    return 10_000 * major + 100 * minor + patch


def ddl_built() -> bool:
    """Return False: IBM DDL is not supported."""
    return False


def ccl_built() -> bool:
    """Return whether torch has XCCL, which runs oneCCL on GPUs of Intel."""
    return torch.distributed.is_xccl_available()


def cuda_built() -> bool:
    """Return whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built with ROCm."""
    return torch.version.hip is not None


# -- the timeline ------------------------------------------------------------------------------------------------------


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to write a timeline on rank 0; has no effect on other ranks. Does not communicate.

    Args:
        file_path: The file.
        mark_cycles: Whether to mark the cycles of the engine.

    Raises:
        ValueError: If Horovod is not initialized.
        OSError: On rank 0, if the file cannot be written.
    """
    if _world().rank == 0:
        registry.timeline.start(file_path, marks_cycles=mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline, if one is being written. Does not communicate.

    Raises:
        ValueError: If Horovod is not initialized.
    """
    registry.check_open()
    registry.timeline.stop()
