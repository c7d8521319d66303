"""MPI receives the addresses of tensors on GPUs. With the emulated accelerator, a wrapper makes any MPI GPU-aware."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import mpicomm
from mpicomm import mpi
from mpicomm.backend.gpu import probe
from mpicomm.backend.gpu.transport import GPUDirect
from mpicomm.backend.transfer import mpi_calls
from tests import accelerator as emulated
from tests.gpu import fuzz
from tests.gpu.test_late_device import KERNEL_SECONDS, Busy, busy, seconds_since  # noqa: F401  a fixture
from tests.gpu.test_tensors import (  # noqa: F401  tests that this module repeats
    test_an_operation_waits_for_the_callers_stream,
    test_ddp_is_equal_to_one_process,
    test_futures_hold_tensors_of_gpus,
    test_messages,
    test_movement,
    test_reductions,
    test_tensors_that_are_dropped_in_flight,
    test_tensors_that_are_not_dense,
    test_tensors_that_are_read_late_are_not_overwritten,
)
from tests.worlds import Group


class GPUAwareMPI:
    """MPI, which accesses the memory of the emulated accelerator."""

    def __init__(self) -> None:
        self._api = mpi.api()
        self.memory = SimpleNamespace(fromaddress=self._memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def _memory(self, address: int, nbytes: int) -> Any:
        return self._api.memory.fromaddress(emulated.accessible_address(address), nbytes)


@pytest.fixture(scope="module")
def group(world: mpicomm.World, device: torch.device) -> Iterator[Group]:
    """A group of all ranks, whose tensors go to MPI as they are."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == emulated.NAME:
            api = GPUAwareMPI()
            patch.setattr(mpi_calls, "_api", lambda: api)
            patch.setenv("MPICOMM_GPU_AWARE", "1")
            patch.setattr(probe, "_has_passed", False)  # and not True for the groups of later tests
        handle: Any = dist.new_group()
        if device.type != emulated.NAME and not isinstance(handle._executor.transport, GPUDirect):
            pytest.skip("needs GPU-aware MPI")
        assert isinstance(handle._executor.transport, GPUDirect)
        yield Group(handle, world.rank, world.size, list(range(world.size)))
        dist.destroy_process_group(handle)


def test_an_asynchronous_operation_does_not_wait_for_later_work(group: Group, busy: Busy) -> None:  # noqa: F811
    """The thread that runs it synchronises its own stream, not that of the program."""
    start = time.perf_counter()
    work = dist.all_reduce(busy.later, group=group.handle, async_op=True)
    for _ in range(8):
        busy.content.add_(1)
    work.wait()  # type: ignore[union-attr]
    assert seconds_since(start) < 4 * KERNEL_SECONDS
    assert busy.later[-1].item() == sum(range(1, group.size + 1))


def test_random_operations(world: mpicomm.World, group: Group) -> None:
    own = distributed_c10d._get_default_group()
    distributed_c10d._update_default_pg(group.handle)
    try:
        assert fuzz.run_seed(world, seed=1, count=400) == 0
    finally:
        distributed_c10d._update_default_pg(own)
