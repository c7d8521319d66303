"""Makes groups as torch asks its back ends to."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from mpicomm.backend import c10d, compatibility, groups
from mpicomm.backend.engine import Engine
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.backend.routed import RoutedProcessGroup


@compatibility.explained()
def create(options: Any, backend_name: str) -> MPIProcessGroup:
    """Make a group over MPI under a name (collective over its ranks)."""
    engine = _make_engine(options, takes_gpu_tensors=MPIProcessGroup.takes_gpu_tensors)
    return MPIProcessGroup(engine, options.group_id, backend_name, options.store)


@compatibility.explained()
def create_with_nccl(options: Any, backend_options: Any, backend_name: str) -> RoutedProcessGroup:
    """Make a group over MPI that has NCCL for CUDA tensors (collective over its ranks)."""

    def make_inner(engine: Engine, name: str, store: dist.Store) -> Any:
        timeout = datetime.timedelta(seconds=engine.record.timeout)
        return c10d.make_nccl(name, store, engine.comm.rank, engine.record.ranks, timeout, backend_options)

    engine = _make_engine(options, takes_gpu_tensors=RoutedProcessGroup.takes_gpu_tensors)
    return RoutedProcessGroup(engine, options.group_id, backend_name, options.store, "cuda", make_inner)


def _make_engine(options: Any, *, takes_gpu_tensors: bool) -> Engine:
    seconds = options.timeout.total_seconds()
    if ranks := list(options.global_ranks_in_group):
        return groups.make(options.group_id, ranks, seconds, takes_gpu_tensors=takes_gpu_tensors)
    return groups.make_world(
        options.group_id, seconds, options.group_rank, options.group_size, takes_gpu_tensors=takes_gpu_tensors
    )
