"""A group with an inner back end hands it the tensors of its device; Gloo on CPU tensors stands in for NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.backend import routes
from mpicomm.backend.engine import Engine
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.backend.routed import RoutedProcessGroup
from mpicomm.backend.work import JointWork
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


class Grouping(Witness):
    """Puts calls together, as NCCL does: they return nothing, and what ends the group returns the work of all."""

    supports_coalescing = True

    def _start_coalescing(self) -> None:
        self.called.append("start")
        self.works: list[dist.Work] = []

    def _end_coalescing(self) -> dist.Work:
        self.called.append("end")
        return JointWork(self.works)

    def __getattr__(self, name: str) -> object:
        if name not in ("_allgather_base", "_reduce_scatter_base"):
            return super().__getattr__(name)
        return lambda *args: self.works.append(getattr(self.backend, name)(*args))


@pytest.fixture(params=["cpu", "cuda"])
def routed(world: mpicomm.World, request: pytest.FixtureRequest) -> Iterator[tuple[RoutedProcessGroup, Witness, bool]]:
    """Return a group whose inner back end serves CPU tensors, or CUDA tensors, of which there are none here."""
    store = dist.PrefixStore(f"routed-{request.node.name}", dist.distributed_c10d._get_default_store())
    gloo = Witness(dist.ProcessGroupGloo(store, world.rank, world.size))
    record = recorder.Group("routed", range(world.size), 60, is_world=False)
    engine = Engine(world.comm.Dup(), record, Settings(), routes.AS_THEY_ARE)
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


def test_all_to_all_goes_there_too(world: mpicomm.World, routed: tuple) -> None:
    group, gloo, is_inner = routed
    source, output = torch.arange(world.size) + 100.0 * world.rank, torch.empty(world.size)
    group.all_to_all_single(output, source, [], []).wait()
    assert torch.equal(output, 100.0 * torch.arange(world.size) + world.rank)
    outputs = [torch.empty(1) for _ in range(world.size)]
    group.alltoall(outputs, list(source.chunk(world.size))).wait()
    assert torch.equal(torch.cat(outputs), output)
    assert [name in gloo.called for name in ("alltoall_base", "alltoall")] == [is_inner, is_inner]


@pytest.mark.parametrize("is_grouped", [False, True])
def test_what_is_inside_for_one_tensor_alone(world: mpicomm.World, routed: tuple, is_grouped: bool) -> None:
    """torch 2.13 shows no method of NCCL's for several; where the inner back end groups calls, they are grouped."""
    from mpicomm.backend import c10d

    group, gloo, is_inner = routed
    if is_grouped:
        gloo = group._inner = Grouping(gloo.backend)
    sources = [torch.full((2,), float(world.rank)), torch.full((3,), float(world.rank))]
    outputs = [torch.empty(2 * world.size), torch.empty(3 * world.size)]
    group.all_gather_single_coalesced(outputs, sources, c10d.AllgatherOptions()).wait()
    sums = [torch.empty(2), torch.empty(3)]
    group.reduce_scatter_single_coalesced(sums, outputs, c10d.ReduceScatterOptions()).wait()
    for source, output, sum_ in zip(sources, outputs, sums, strict=True):
        assert torch.equal(output, torch.arange(world.size).float().repeat_interleave(len(source)))
        assert torch.equal(sum_, world.size * source)
    assert gloo.called.count("start") == gloo.called.count("end") == (2 if is_grouped and is_inner else 0)


def test_a_batch_of_calls_inside(world: mpicomm.World, routed: tuple) -> None:
    group, _gloo, _is_inner = routed
    tensors = [torch.full((2,), float(world.rank)) for _ in range(3)]
    group._start_coalescing(torch.device("cpu"))
    for tensor in tensors:
        group.allreduce([tensor])
    group._end_coalescing(torch.device("cpu")).wait()
    for tensor in tensors:
        assert torch.equal(tensor, torch.full((2,), float(sum(range(world.size)))))


def test_a_part_of_it_has_an_inner_back_end_of_its_own(world: mpicomm.World, routed: tuple) -> None:
    group, gloo, is_inner = routed
    group._make_inner = lambda engine, name, store: Witness(
        dist.ProcessGroupGloo(store, engine.comm.rank, engine.comm.size)
    )
    part = group.split_group([0])
    assert (part is None) == (world.rank != 0)
    if part is not None:
        part.allreduce([torch.ones(1)]).wait()
        assert ("allreduce" in part._inner.called) == is_inner
        assert "allreduce" not in gloo.called
        part.shutdown()


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
