"""Destroying a group frees its communicator; torch knows the device types that the backend serves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import mpi


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_communicator_of_a_destroyed_group_is_freed(world: mpicomm.World, is_async: bool) -> None:
    """A test that creates many groups would not detect a leak: MPI has thousands of communicators."""
    group = dist.new_group(list(range(world.size)))
    comm = group._operations.comm
    work = dist.all_reduce(torch.ones(1), group=group, async_op=is_async)
    if work is not None:
        work.wait()
    assert comm != mpi.api().COMM_NULL
    dist.destroy_process_group(group)
    assert comm == mpi.api().COMM_NULL


def test_torch_knows_whether_tensors_on_gpus_are_taken(world: mpicomm.World) -> None:
    for name in ("mpicomm", "mpicomm_nccl"):
        expected = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        assert dist.Backend.backend_capability[name] == expected
