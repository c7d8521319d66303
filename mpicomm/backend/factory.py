"""The functions that torch calls to create a process group of a registered backend."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from mpicomm.backend import backward_errors, compatibility, groups, torch_internals
from mpicomm.backend.composite import CompositeProcessGroup
from mpicomm.backend.executor import Executor
from mpicomm.backend.process_group import MPIProcessGroup


@compatibility.explained()
def create(options: Any, backend_name: str) -> MPIProcessGroup:
    """Create a process group over MPI (collective over its ranks)."""
    executor = _make_executor(options, takes_gpu_tensors=MPIProcessGroup.takes_gpu_tensors)
    return MPIProcessGroup(executor, options.group_id, backend_name, options.store)


@compatibility.explained()
def create_with_nccl(options: Any, backend_options: Any, backend_name: str) -> CompositeProcessGroup:
    """Create a process group over MPI that uses NCCL for CUDA tensors (collective over its ranks)."""

    def make_inner(executor: Executor, name: str, store: dist.Store) -> Any:
        timeout = datetime.timedelta(seconds=executor.record.timeout)
        return torch_internals.make_nccl(
            name, store, executor.comm.rank, executor.record.ranks, timeout, backend_options
        )

    executor = _make_executor(options, takes_gpu_tensors=CompositeProcessGroup.takes_gpu_tensors)
    return CompositeProcessGroup(executor, options.group_id, backend_name, options.store, "cuda", make_inner)


def _make_executor(options: Any, *, takes_gpu_tensors: bool) -> Executor:
    backward_errors.watch()
    seconds = options.timeout.total_seconds()
    if ranks := list(options.global_ranks_in_group):
        return groups.make(options.group_id, ranks, seconds, takes_gpu_tensors=takes_gpu_tensors)
    return groups.make_world(
        options.group_id, seconds, options.group_rank, options.group_size, takes_gpu_tensors=takes_gpu_tensors
    )
