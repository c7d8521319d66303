"""A group with an inner back end hands it the tensors of its device; Gloo on CPU tensors stands in for NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.backend.engine import Engine
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.backend.routed import RoutedProcessGroup
from mpicomm.faults import recorder
from mpicomm.settings import Settings


class Witness:
    """Passes calls on to a back end and remembers which."""

    def __init__(self, backend: object) -> None:
        self.backend = backend
        self.called: list[str] = []

    def __getattr__(self, name: str) -> object:
        self.called.append(name)
        return getattr(self.backend, name)


@pytest.fixture(params=["cpu", "cuda"])
def routed(world: mpicomm.World, request: pytest.FixtureRequest) -> Iterator[tuple[RoutedProcessGroup, Witness, bool]]:
    """Return a group whose inner back end serves CPU tensors, or CUDA tensors, of which there are none here."""
    store = dist.PrefixStore(f"routed-{request.node.name}", dist.distributed_c10d._get_default_store())
    gloo = Witness(dist.ProcessGroupGloo(store, world.rank, world.size))
    record = recorder.Group("routed", range(world.size), 60, is_world=False)
    engine = Engine(world.comm.Dup(), record, Settings())
    group = RoutedProcessGroup(engine, "routed", "mpicomm_nccl", store, request.param, lambda *_: gloo)
    yield group, gloo, request.param == "cpu"
    if request.param == "cuda":
        MPIProcessGroup.barrier(group).wait()
    gloo.backend.shutdown()
    group._inner = Witness(type("Ended", (), {"shutdown": lambda self: None})())
    group.shutdown()


def test_tensors_go_where_they_belong(world: mpicomm.World, routed: tuple) -> None:
    group, gloo, is_inner = routed
    total = torch.full((3,), 1.0 + world.rank)
    group.allreduce([total]).wait()
    assert torch.equal(total, torch.full((3,), world.size * (world.size + 1) / 2))

    copies = [torch.empty(3) for _ in range(world.size)]
    group.allgather([copies], [torch.full((3,), float(world.rank))]).wait()
    assert [int(each[0]) for each in copies] == list(range(world.size))

    flat = torch.empty(3 * world.size)
    group.all_gather_single(flat, torch.full((3,), float(world.rank))).wait()
    assert torch.equal(flat, torch.arange(world.size).repeat_interleave(3).float())

    group.broadcast([total], _root(world.size - 1)).wait()
    inner = ["allreduce", "allgather", "_allgather_base", "broadcast"]
    called = [name.replace("all_gather_single", "_allgather_base") for name in gloo.called]
    assert called == (inner if is_inner else [])


def test_who_serves_which_device(routed: tuple) -> None:
    group, gloo, is_inner = routed
    cpu = torch.device("cpu")
    assert group._get_backend(cpu) is (gloo if is_inner else group)
    assert cpu in group._device_types


def _root(rank: int) -> object:
    from mpicomm.backend import c10d

    options = c10d.BroadcastOptions()
    options.rootRank = rank
    return options
